#!/usr/bin/env python3
"""Installs the lowest allowed version of every direct dependency, and runs the command line and a smoke test.

    .venv/bin/python tools/lowest.py

The versions are the `>=` of [project] dependencies in pyproject.toml, in a virtual environment below a
temporary folder. torch stays at the version of constraints.txt, and is linked from the environment that runs
this script: another version would download gigabytes of CUDA libraries.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CARD = "llama-3-8b"
# Options that must be there and take a value.
OPTIONS = {
    "plan": "--from --to --tokens --source-page --skip-tokens --json --html",
    "demo": "--model --prefill --decode --out --cache",
    "generate": "--model --prefill --decode --link --top-p --draft --timeline",
    "doctor": "",
    "registry": "--port --host --secret-file",
    "serve": "--model --role --layout -tp --registry --link --max-model-len --draft --silence-s --log-format",
    "route": "--registry --policy --local --first-token --in-flight --drain-s --secret-file",
    "drain": "--secret-file",
    "up": "--model --prefill --decode --policy --max-model-len --local-prefill-max --draft",
    "chat": "--url --system --temperature",
    "sim": "--seed --seeds --trace --list",
    "bench plan": "--repeats --out",
    "bench transport": "--transports --sizes --out",
    "bench handoff": "--from --to --policy --verify --control --sweep",
    "bench overlap": "--tokens --link --policy --json --png",
    "bench engine": "--tokens --answer --requests",
    "bench serve": "--url --rate --slo --no-ignore-eos",
}


def lowest(requirement: str) -> str:
    """`name==version` of a requirement `name>=version,...`."""
    match = re.match(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", requirement)
    if match is None:
        sys.exit(f"dependency {requirement!r} has no lowest version; write it as name>=version")
    return f"{match[1]}=={match[2]}"


def torch_version() -> str:
    """The torch of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def link_torch(site_packages: Path) -> None:
    """Links the torch of the running environment, so that pip finds it installed."""
    for folder in map(Path, sys.path):
        info = list(folder.glob("torch-*.dist-info")) if folder.name == "site-packages" else []
        if info:
            for path in (*info, *(folder / name for name in ("torch", "torchgen", "functorch"))):
                (site_packages / path.name).symlink_to(path)
            return
    sys.exit(f"no torch beside {sys.executable}; install {torch_version()} there first")


def make_environment(folder: Path) -> Path:
    """A virtual environment with the lowest versions and this checkout; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    site_packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    link_torch(site_packages)
    (site_packages / "baton.pth").write_text(f"{ROOT / 'src'}\n")
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    versions = [lowest(one) for one in dependencies if not one.startswith("torch>")]
    versions.append(torch_version())  # installed already; named so that pip installs what it needs
    print("installing", *versions, flush=True)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *versions], check=True
    )
    return python


def check_help() -> None:
    """In the environment: every command's --help lists its options."""
    os.environ |= {"COLUMNS": "200", "TERM": "dumb"}
    from baton.cli import main

    for command, options in {"": " ".join(sorted({c.split()[0] for c in OPTIONS})), **OPTIONS}.items():
        sys.argv, output = ["baton", *command.split(), "--help"], io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            main()
        missing = [option for option in options.split() if option not in output.getvalue()]
        if missing or not output.getvalue():
            sys.exit(f"baton {command} --help does not list {', '.join(missing) or 'anything'}")


def run(python: Path, *arguments: str, code: int = 0) -> str:
    """Runs a `baton` command; returns its stdout."""
    done = subprocess.run(
        [python, "-m", "baton", *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != code:
        sys.exit(f"baton {' '.join(arguments)}: exit code {done.returncode}, not {code}\n{done.stderr}")
    return done.stdout


def smoke_test(python: Path, folder: Path) -> None:
    """Real commands: options that take values, a plan, a short simulation, and a tiny model end to end."""
    run(python, "serve", "--role", "prefill", "--model", "none", "--secret-file", "none", code=2)
    plan = run(python, "plan", CARD, "--from", "pp2.tp2", "--to", "tp4", "--tokens", "512", "--json")
    assert json.loads(plan)["model"] == CARD
    print(run(python, "sim", "--seeds", "2").strip())
    assert "bytes identical" in run(python, "demo", "--cache")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    card = folder / "tiny.json"
    card.write_text(json.dumps(config))
    layouts = ("--prefill", "pp2", "--decode", "tp2")
    answer = run(python, "generate", "--model", f"dummy:{card}", *layouts, "--max-tokens", "4", "1 2 3 4")
    assert len(answer.split()) == 4, answer
    print(f"generated {answer.split()} from a model with random weights")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="baton-lowest-") as name:
        folder = Path(name)
        python = make_environment(folder / "venv")
        subprocess.run([python, __file__, "--check-help"], check=True)
        print("every command lists its options")
        smoke_test(python, folder)
    print("the lowest allowed versions work")


if __name__ == "__main__":
    if "--check-help" in sys.argv:
        check_help()
    else:
        main()
