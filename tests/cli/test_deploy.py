"""docs/deploy.md, the units and the manifest name what there is."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import in_shell, options, problems

from baton.plan.layout import parse_layout

yaml = pytest.importorskip("yaml", reason="no PyYAML here to read the manifest with")

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
MANIFEST = ROOT / "deploy/kubernetes/baton.yaml"
PAGE = (ROOT / "docs/deploy.md").read_text()


def documents() -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(MANIFEST.read_text()) if each]


def containers() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By the name of what they belong to: pod and container."""
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in documents()
        if each["kind"] in ("Deployment", "StatefulSet")
    }
    return {name: (pod, pod["containers"][0]) for name, pod in pods.items()}


def words_of(container: dict[str, Any]) -> list[str]:
    command = [*container["command"], *container["args"]]
    assert command[0] == "baton"
    return command[1:]


def value(words: list[str], option: str) -> str:
    (found,) = [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return found


def test_the_checker_sees_what_is_wrong() -> None:
    assert list(problems(["serve", "--role", "prefill", "--port=1", "-tp", "2"])) == []
    for words, said in (
        (["sirve"], "no baton sirve"),
        (["serve", "--rolle", "prefill"], "no --rolle"),
        (["serve", "--role", "--port", "1"], "--role has no value"),
        (["serve", "--port", "1", "--port", "2"], "twice"),
        (["route", "now"], "takes 0 words"),
        (["serve", "-tp"], "-tp has no value"),
        (["serve", "-tpp", "2"], "no -tpp"),
        (["up", "--decode-args", "--page-tokens 64 --colour red"], "baton serve has no --colour"),
    ):
        assert any(said in problem for problem in problems(words)), words
    assert list(in_shell("a; baton drain http://x; sleep 2\na && /opt/baton serve \\\n  --port 1 &")) == [
        ["drain", "http://x"],
        ["serve", "--port", "1"],
    ]
    assert "--model" in options("up")


@pytest.mark.slow
def test_the_commands_of_the_page() -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    found = [words for kind, block in blocks if kind in ("", "bash") for words in in_shell(block)]
    found += [words for code in re.findall(r"`(baton [^`]+)`", PAGE) for words in in_shell(code)]
    assert [words[0] for words in found if len(words) > 3].count("serve") == 2
    wrong = [problem for words in found for problem in problems(words)]
    assert wrong == []


def test_options_that_the_page_speaks_of_exist() -> None:
    verbs = ("up", "chat", "serve", "route", "registry", "drain")
    known = {option for verb in verbs for option in options(verb)}
    spoken = set(re.findall(r"`(--[a-z][a-z-]*)", PAGE))
    assert spoken
    assert spoken <= known


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_units(unit: Path) -> None:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str
    parser.read_string(unit.read_text().replace("\\\n", " "))
    service = parser["Service"]
    (words,) = in_shell(service["ExecStart"])
    assert list(problems(words)) == []
    assert words[0] == {"registry": "registry", "router": "route"}.get(
        unit.stem.removeprefix("baton-"), "serve"
    )
    variables = set(re.findall(r"\$\{(\w+)\}", service["ExecStart"]))
    named = (ROOT / "deploy/systemd/baton.env").read_text()
    assert all(re.search(rf"^{variable}=", named, re.MULTILINE) for variable in variables)
    if words[0] == "serve":
        assert int(service["TimeoutStopSec"]) > 30, "longer than --drain-s"


def test_the_manifest_starts_what_there_is() -> None:
    found = containers()
    assert set(found) == {"baton-registry", "baton-prefill", "baton-decode", "baton-router"}
    for name, (_, container) in found.items():
        assert list(problems(words_of(container))) == [], name
        defined = {each["name"] for each in container["env"]}
        used = set(re.findall(r"\$\((\w+)\)", " ".join(words_of(container))))
        assert used <= defined, name
        assert "BATON_SECRET" in defined
    for role in ("prefill", "decode"):
        words = words_of(found[f"baton-{role}"][1])
        assert value(words, "--role") == role
        assert value(words, "--registry") == value(words_of(found["baton-router"][1]), "--registry")


def test_the_image_has_what_the_manifest_runs() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = [word for kind, rest in steps if kind == "COPY" for word in rest.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    # What the build reads: the package, and the files that its metadata names.
    needed = {"pyproject.toml", "src", project["project"]["readme"], *project["project"]["license-files"]}
    assert needed <= set(copied)
    assert ["RUN", "pip install --no-cache-dir ."] in steps
    version = next(rest for kind, rest in steps if kind == "FROM").removeprefix("python:").split("-")[0]
    lowest = project["project"]["requires-python"].removeprefix(">=")
    assert tuple(map(int, version.split("."))) >= tuple(map(int, lowest.split(".")))
    user = next(int(rest) for kind, rest in steps if kind == "USER")
    built = re.search(r"docker build .* -t (\S+)", text)
    for name, (_, container) in containers().items():
        assert built, name
        assert container["image"] == built[1], name
        assert container["command"][0] in project["project"]["scripts"], name
        assert container["securityContext"]["runAsUser"] == user, name


def test_an_instance_asks_for_a_gpu_for_each_rank() -> None:
    for role in ("prefill", "decode"):
        container = containers()[f"baton-{role}"][1]
        layout = parse_layout(value(words_of(container), "--layout"))
        assert container["resources"]["limits"]["nvidia.com/gpu"] == layout.num_ranks


def test_the_manifest_belongs_together() -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in documents() if each["kind"] == "Service"}
    pods = containers()
    for name, (pod, container) in pods.items():
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports["http"] == int(value(words_of(container), "--port")), name
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            check = container.get(probe, {})
            assert check.get("httpGet", {"path": "/health"})["path"] == "/health"
            assert (check.get("httpGet") or check.get("tcpSocket") or {"port": "http"})["port"] in ports
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        mounts = {each["name"] for each in container.get("volumeMounts", ())}
        assert mounts == {each["name"] for each in pod.get("volumes", ())}, name
    registry = value(words_of(pods["baton-router"][1]), "--registry")
    host, port = registry.removeprefix("http://").split(":")
    assert int(port) in {each["port"] for each in services[host]["ports"]}
    for each in documents():
        if each["kind"] == "StatefulSet":
            assert each["spec"]["serviceName"] in services
            assert each["spec"]["selector"]["matchLabels"] == each["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pod_has_the_time_to_drain(role: str) -> None:
    pod, container = containers()[f"baton-{role}"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["sh", "-c"]
    (words,) = in_shell(command[2])
    assert words[0] == "drain"
    assert list(problems(words)) == []
    drain_s = float(value(words_of(container), "--drain-s"))
    assert pod["terminationGracePeriodSeconds"] > drain_s + 10


def systemd(tmp_path: Path) -> Path:
    """A file system with the units, as far as systemd looks."""
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for unit in UNITS:
        shutil.copy(unit, units)
    shutil.copytree("/lib/systemd/system", tmp_path / "lib/systemd/system", symlinks=True)
    program = tmp_path / "opt/baton/bin/baton"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    return tmp_path


def verified(root: Path, unit: str) -> str:
    """What systemd has to say against a unit."""
    command = ["systemd-analyze", "verify", "--man=no", f"--root={root}", unit]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_enables_the_units_as_the_page_says(tmp_path: Path) -> None:
    root = systemd(tmp_path)
    commands = re.findall(r"^systemctl enable --now ([\w -]+?) +#", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for names in commands:
        # There is no systemd to start them now.
        command = ["systemctl", f"--root={root}", "enable", *names.split()]
        subprocess.run(command, capture_output=True, timeout=60, check=True)
    wanted = root / "etc/systemd/system/multi-user.target.wants"
    assert sorted(link.name for link in wanted.iterdir()) == [unit.name for unit in UNITS]
    for unit in UNITS:
        assert verified(root, unit.name) == ""
    path = root / "etc/systemd/system" / UNITS[0].name
    path.write_text(path.read_text().replace("KillMode=mixed", "KillMode=mixd"))
    assert "kill mode" in verified(root, path.name)


@pytest.mark.long
@pytest.mark.skipif(
    os.environ.get("BATON_DOCKER") != "1",
    reason="it downloads gigabytes; set BATON_DOCKER=1 where a Docker engine runs",
)
def test_docker_builds_the_image_as_the_page_says() -> None:
    (command,) = re.findall(r"`(docker build [^`]+)`", PAGE)
    subprocess.run(command.split(), cwd=ROOT, timeout=1800, check=True)
    done = subprocess.run(
        ["docker", "run", "--rm", "baton:latest", "--version"], capture_output=True, timeout=60, check=True
    )
    assert done.stdout
