"""What the documents show is what the program says."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.plan import Cache, Component, Spec, parse_layout, plan
from baton.plan.cache import Dim, Full, Units
from baton.plan.ownership import buffers
from baton.plan.wire import storage_from_bytes
from tests.cli.commands import in_shell, problems
from tests.ports import free_port
from tests.serve.parts import ask, until

ROOT = Path(__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run(*words: str, timeout: float = 300, **options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False, **options
    )


def test_the_readme_shows_real_output() -> None:
    (example,) = (block for block in blocks("README.md", "") if block.startswith("$ baton plan"))
    command, shown = example.split("\n", 1)
    words = [sys.executable, "-m", "baton", *command.split()[2:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == shown


def test_the_readme_opens_with_the_two_commands() -> None:
    first = blocks("README.md", "")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


def baton_commands(page: str) -> Iterator[tuple[bool, list[str]]]:
    """Every `baton` command in the blocks of a page, and whether the shell has found the program by then."""
    is_found = False
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language not in ("", "bash"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            is_found = is_found or line.startswith(". .venv/bin/activate")
            if re.search(r"(^|[;&|(] *)(\S*/)?baton ", line):
                for words in in_shell(line):
                    yield is_found, words


def hidden(page: str) -> list[list[str]]:
    return [words for is_found, words in baton_commands(page) if not is_found]


def test_the_commands_of_the_readme_run_as_written() -> None:
    page = (ROOT / "README.md").read_text()
    commands = [words for _, words in baton_commands(page)]
    assert {"demo", "generate", "chat", "up", "bench", "sim"} <= {words[0] for words in commands}
    wrong = [problem for words in commands for problem in problems(words)]
    assert (hidden(page), wrong) == ([], [])
    assert hidden(page.replace(". .venv/bin/activate", "")), "the check sees a shell without baton"


IMPORTED_AS = {"prometheus-client": "prometheus_client"}
OPTIONAL = {"matplotlib", "mooncake", "nixl", "requests", "sglang", "triton", "vllm"}
"""Imported where they are there: for pictures, transports and GPUs, and under vLLM or SGLang."""
COMES_ALONG = {"huggingface_hub", "tokenizers", "yarl"}
"""With transformers, and yarl with aiohttp."""


def third_parties(source: str) -> set[str]:
    """Top-level packages that a module imports, also by `import_module` with a literal name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module), level=0):
                names.add(module)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                names.add(module)
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"baton", "__future__"}


def test_what_is_imported_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[>=<!]", requirement)[0] for requirement in listed}
    installed = {IMPORTED_AS.get(name, name) for name in names}
    imported = set().union(*(third_parties(path.read_text()) for path in (ROOT / "src").rglob("*.py")))
    assert imported - OPTIONAL - COMES_ALONG == installed
    assert third_parties("import importlib\nimportlib.import_module('gguf.quants')") == {"gguf"}


def test_the_python_example_runs(capsys) -> None:
    (example,) = blocks("docs/plan.md", "python")
    exec(compile(example, "docs/plan.md", "exec"), {})
    assert capsys.readouterr().out.count("BoundRoute(") == 16


def test_the_library_page_runs_block_by_block() -> None:
    """As one program, in a process of its own: endpoints have threads, and one block starts a process."""
    program = "\n".join(blocks("docs/library.md", "python"))
    done = run("-", input=program)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Ready(aux=Aux(tokens=(42,)" in done.stdout
    assert "decode goes on after (42,)" in done.stdout


def test_what_an_engine_needs_comes_from_one_import() -> None:
    imported = re.findall(
        r"^from (baton\S*) import", "\n".join(blocks("docs/library.md", "python")), re.MULTILINE
    )
    assert set(imported) == {"baton.session"}


def test_the_storage_file_can_be_planned_with() -> None:
    (example,) = blocks("docs/plan.md", "json")
    storage = storage_from_bytes(example.encode())
    kv = Component("kv", ((0, 80),), Units(8), (Dim("channel", 256),), Full(), "tokens", "kv")
    spec = Spec(parse_layout("tp1"), Cache(80, (kv,)), storage)
    assert len(plan(spec, spec).routes) == 1
    assert buffers(spec, 0, "pool") == {"raw": 5242880000}


def test_commands_on_every_page_have_the_options_that_there_are() -> None:
    pages = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md") if path.name != "log.md"}
    commands = {name: [words for _, words in baton_commands(text)] for name, text in pages.items()}
    for name, text in pages.items():
        commands[name] += [words for command in inline_commands(text) for words in in_shell(command)]
    assert {"deploy.md", "plan.md", "vllm.md", "router.md"} <= {name for name in commands if commands[name]}
    wrong = [
        (name, problem)
        for name, of_page in commands.items()
        for words in of_page
        if words[0] != "..."
        for problem in problems([word for word in words if word != "..."])
    ]
    assert wrong == []
    (wrong_value,) = problems(["route", "--registry", "http://10.0.0.1:8400", "--policy", "foo"])
    assert "'foo' is not one of 'least_loaded'" in wrong_value


RUN_BY = {
    "baton demo": "tests/cli/test_demo.py::test_two_layouts_one_answer",
    "baton bench overlap": "tests/bench/test_overlap.py::test_table_record_and_picture",
    "baton bench serve --model": "tests/bench/serve/test_own_deployment.py::test_own_deployment",
    "baton bench serve --url": "tests/bench/serve/test_generator.py::test_command_prints_writes_and_draws",
    "baton chat": "tests/serve/test_up.py::test_it_serves_mends_itself_and_ends_in_order",
    "baton up": "tests/serve/test_up.py::test_it_serves_mends_itself_and_ends_in_order",
    "baton up --engine vllm": "tests/vllm/test_up.py::test_one_command_serves_and_leaves_nothing",
    "baton registry": "tests/cli/test_registry.py::test_one_line_with_the_url_and_a_clean_end",
    "baton serve": (
        "tests/serve/test_hosts.py::test_the_answer_is_that_of_one_machine_and_the_cable_can_be_seen"
    ),
    "baton route": (
        "tests/serve/test_hosts.py::test_the_answer_is_that_of_one_machine_and_the_cable_can_be_seen"
    ),
    "baton route --engine vllm": "tests/vllm/test_router.py::test_the_tokens_are_those_of_plain_vllm",
    "baton route --print-key": "tests/serve/test_hosts.py::test_a_stock_router_has_the_key_of_a_router",
    "baton drain": "tests/serving/test_tls.py::test_chat_and_drain_verify_the_server",
    "baton doctor": "tests/cli/test_doctor.py::test_one_line_for_each_part_and_exit_0",
    "baton bench transport": "tests/bench/test_transport.py::test_results_table_and_picture",
    "baton bench plan": "tests/bench/test_plan.py::test_each_target_is_measured_and_judged",
    "baton bench engine": "tests/bench/test_engine.py::test_table_record_and_picture",
    "baton bench serve": "tests/bench/serve/test_own_deployment.py::test_own_deployment",
    "baton plan": "tests/test_docs.py::test_plans_on_a_page_can_be_made",
    "baton generate": "tests/test_docs.py::test_commands_that_end_run_as_written",
    "baton bench handoff": "tests/test_docs.py::test_commands_that_end_run_as_written",
    "baton sim": "tests/test_docs.py::test_commands_that_end_run_as_written",
    "curl": "tests/serving/test_server.py::test_the_curl_commands_of_the_pages_run",
    "curl -sS": "tests/cli/test_registry.py::test_the_shell_example_of_the_page_runs",
    "curl -sSN": "tests/cli/test_registry.py::test_the_shell_example_of_the_page_runs",
    "python -m sglang_router.launch_router": (
        "tests/serve/test_hosts.py::test_a_stock_router_has_the_key_of_a_router"
    ),
    "python -m sglang.launch_server": (
        "tests/sglang/test_handoff.py::test_the_answers_are_those_of_one_server"
    ),
    "python examples/library.py": "tests/test_docs.py::test_the_example_of_the_library_runs",
    "python examples/sglang_prefill.py": "tests/sglang/test_vllm.py::test_the_example_prints_the_answer",
    "vllm serve": "tests/vllm/test_handoff.py::test_the_tokens_are_those_of_plain_vllm",
    ".venv/bin/python benchmarks/interference.py": (
        "tests/bench/serve/test_suites_deployed.py::test_interference_to_its_end"
    ),
    ".venv/bin/python benchmarks/pipelining.py": (
        "tests/bench/serve/test_suites_deployed.py::test_pipelining_to_its_end"
    ),
    ".venv/bin/python benchmarks/router.py": (
        "tests/bench/serve/test_suites_deployed.py::test_router_to_its_end"
    ),
    "ask": "tests/cli/test_registry.py::test_the_shell_example_of_the_page_runs",
    "python3 -m venv": "tests/cli/test_installing.py::test_the_install_block_runs_as_written",
    "pip install": "tests/cli/test_installing.py::test_the_install_block_runs_as_written",
    "hf download": "tests/cli/test_installing.py::test_a_model_that_was_downloaded_generates_by_its_name",
    "systemctl": "tests/cli/test_deploy.py::test_systemd_enables_the_units_as_the_page_says",
    "docker build": "tests/cli/test_deploy.py::test_docker_builds_the_image_as_the_page_says",
}
"""By the beginning of a command in the documents: the test that runs it or, where it names hosts, sizes or
models that are not here, the same with others."""
NOT_RUN = {"make": "by .ci/run, or by hand: make serve is a baton up, make test these tests"}
PROGRAMS = {
    "baton",
    "curl",
    "python",
    "python3",
    "pip",
    "make",
    "vllm",
    "systemctl",
    "ask",
    "docker",
    "hf",
    ".venv/bin/python",
}
SHELL = {"echo", "export", "local", "openssl"}
"""Words of the shell itself, and what makes secrets in the examples that tests run."""
PROCESSES = ("baton prefill-0", "baton rank N")
"""Names in process lists."""
ENDING = ("sim ", "generate ", "bench handoff ")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in (ROOT / "docs").glob("*.md") if page.name != "log.md"),
]


def shell_lines(text: str) -> Iterator[tuple[str, str]]:
    """The lines of a page's code blocks, with their language, without variables before them and prompts."""
    for _, language, block in re.findall(r"^( *)```(\w*)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines() if language in ("", "bash", "console") else ()
        for line in lines:
            command = re.sub(r"^(\$ |[A-Z_]+=('[^']*'|\S+)( |$))*", "", line.strip()).split(" #")[0].strip()
            yield language, " ".join(command.split())


def inline_commands(text: str) -> Iterator[str]:
    """Commands in the sentences of a page, with at least a verb or an argument."""
    for command in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
        program, *rest = command.split(" ")
        if program in PROGRAMS and rest and "..." not in rest and command not in PROCESSES:
            yield command


def shell_commands(text: str) -> Iterator[str]:
    """All commands of a page, in one line each."""
    yield from (line for _, line in shell_lines(text) if line.split(" ")[0] in PROGRAMS)
    yield from inline_commands(text)


def run_by(command: str) -> str:
    """The longest beginning of a command that the tables know; empty where none does."""
    known = [name for name in (*RUN_BY, *NOT_RUN) if f"{command} ".startswith(f"{name} ")]
    return max(known, key=len, default="")


def test_every_command_is_run_by_a_test() -> None:
    commands = [command for page in PAGES for command in shell_commands(page.read_text())]
    assert len(commands) > 150
    assert [command for command in commands if not run_by(command)] == []
    assert {run_by(command) for command in commands} == {*RUN_BY, *NOT_RUN}, "a command is gone"
    for test in RUN_BY.values():
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), test
    text = "```bash\nX='a b' baton frob --hard \\\n  now  # slowly\n```\nor `baton frib`, not `baton`\n"
    assert [(each, run_by(each)) for each in shell_commands(text)] == [
        ("baton frob --hard now", ""),
        ("baton frib", ""),
    ]


def test_no_program_is_passed_over() -> None:
    """In blocks of bash: others may show output. A line that begins with a sign goes on with a command."""
    firsts = {
        line.split(" ")[0]
        for page in PAGES
        for language, line in shell_lines(page.read_text())
        if language == "bash"
    }
    assert {word for word in firsts if re.fullmatch(r"[.\w][\w./-]*", word)} - PROGRAMS == SHELL


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w.-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [command for page in PAGES for command in shell_commands(page.read_text())]
    named = {word for command in commands if command.startswith("make ") for word in command.split()[1:]}
    assert len(named) > 15
    assert named <= targets


def test_recipes_of_make_are_commands_that_there_are() -> None:
    """Without running them: the options of `baton` are read, and other files are there."""
    targets = set(re.findall(r"^([a-z][\w.-]*):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = [f"--assume-old={stamp}" for stamp in (".venv/.stamp", ".venv/.extras")]
    assert len(targets) > 15
    commands: list[list[str]] = []
    for target in sorted(targets - {"help"}):
        done = subprocess.run(
            ["make", "--dry-run", "--always-make", *made, target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (target, done.stderr)
        lines = re.sub(r"\$\([^()]*\)", "1", done.stdout.replace("\\\n", " ")).splitlines()
        commands += [shlex.split(line, comments=True)[1:] for line in lines if "/baton " in line]
        files = re.findall(r"(?<![\w./-])(?:tools|tests|benchmarks)/[\w./]+", done.stdout)
        assert [name for name in files if not (ROOT / name).exists()] == []
    assert len(commands) > 8
    assert [problem for words in commands for problem in problems(words)] == []


def copy_of_the_repository(folder: Path) -> Path:
    """The tracked files as they are now, and the real .venv, for targets of make that write files."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def make(folder: Path, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--assume-old=.venv/.stamp", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_make_without_a_target_lists_every_target_that_pages_name() -> None:
    done = make(ROOT)
    listed = set(re.findall(r"^make (\S+) +\S", done.stdout, re.MULTILINE))
    assert (done.returncode, done.stderr) == (0, "")
    assert {"demo", "test", "test-all", "check", "serve", "site", "docs", "sim", "soak"} <= listed
    assert done.stdout == make(ROOT, "help").stdout


def test_make_builds_the_site_and_generated_pages_are_up_to_date(tmp_path: Path) -> None:
    folder = copy_of_the_repository(tmp_path)
    done = make(folder, "docs", "site")
    assert done.returncode == 0, done.stderr
    assert (folder / "site/index.html").exists()
    for page in (ROOT / "docs").glob("*.md"):
        assert (folder / "docs" / page.name).read_text() == page.read_text(), f"{page.name}: run make docs"


@pytest.mark.serve
def test_make_serve_answers_until_ctrl_c(tmp_path: Path) -> None:
    files = [tmp_path / "stdout", tmp_path / "stderr"]
    with files[0].open("wb") as out, files[1].open("wb") as err:
        process = subprocess.Popen(
            ["make", "--assume-old=.venv/.stamp", "serve", f"PORT={free_port()}"],
            cwd=ROOT,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        until(lambda: "curl" in files[0].read_text() or process.poll() is not None, "it serves", 600)
        assert process.poll() is None, files[1].read_text()
        url = re.search(r"serving demo at (http://\S+)", files[0].read_text())[1]
        reply = ask(url, "/v1/completions", {"prompt": "A relay race is", "max_tokens": 4})
        assert (reply.status, reply.json["usage"]["completion_tokens"]) == (200, 4)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(300)


@pytest.mark.long
def test_make_sim_searches_and_ends(tmp_path: Path) -> None:
    folder = copy_of_the_repository(tmp_path)
    done = make(folder, "sim", "SEEDS=30", "EXAMPLES=20", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_benchmarks_on_the_pages_have_their_options() -> None:
    commands: dict[str, set[str]] = {}
    for command in [command for page in PAGES for command in shell_commands(page.read_text())]:
        if match := re.match(r"\.venv/bin/python (benchmarks/\w+\.py)", command):
            commands.setdefault(match[1], set()).update(re.findall(r" (--[a-z-]+)", command))
    assert len(commands) >= 3
    for script, options in commands.items():
        done = run(script, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert [option for option in options if option not in done.stdout] == []


def test_the_example_of_the_library_runs() -> None:
    done = run("examples/library.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("every byte is equal\n")


def ending_commands() -> list[str]:
    commands = [command for page in PAGES for command in shell_commands(page.read_text())]
    return sorted({each for each in commands if each.removeprefix("baton ").startswith(ENDING)})


@pytest.mark.serve
@pytest.mark.parametrize("command", ending_commands())
def test_commands_that_end_run_as_written(command: str, tmp_path: Path) -> None:
    """With a measurement's files elsewhere."""
    words = shlex.split(command)[1:]
    if words[0] == "bench":
        words += ["--out", str(tmp_path)]
    done = run("-m", "baton", *words, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", ["docs/plan.md", "docs/vllm.md"])
def test_plans_on_a_page_can_be_made(page: str) -> None:
    commands = [words for _, words in baton_commands((ROOT / page).read_text()) if words[0] == "plan"]
    assert commands
    for words in commands:
        done = run("-m", "baton", *words)
        assert done.returncode == 0, (words, done.stderr)
        assert "every target byte proven to be sent once" in done.stdout


def test_the_site_builds_and_has_every_page(tmp_path: Path) -> None:
    """`--strict` makes a page outside of the index, and a link or an anchor that leads nowhere, an error."""
    done = run("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    built = {path.stem for path in tmp_path.glob("*.html")} - {"404"}
    assert built == {path.stem for path in (ROOT / "docs").glob("*.md")}
    for page in (ROOT / "docs").glob("*.md"):
        shown = (tmp_path / f"{page.stem}.html").read_text()
        diagrams = re.findall(r"^```mermaid$", page.read_text(), re.MULTILINE)
        assert shown.count('<pre class="mermaid">') == len(diagrams), "diagrams are drawn"
    index = (tmp_path / "index.html").read_text()
    sources = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?://[^\" >]*)", index)
    assert sources == [], "the pages need nothing from outside"


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    dead = [
        (page.name, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert dead == []
