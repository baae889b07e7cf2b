"""The commands of README.md and docs/engine.md that install Baton and fetch a model, as they are written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.serve.speaking import model

ROOT = Path(__file__).parents[2]
COMMIT = "0" * 40
WAIT_S_MAX = 600


def install_block() -> list[str]:
    """README's lines below Install, without what they say of themselves."""
    section = (ROOT / "README.md").read_text().split("\n## Install\n")[1]
    block = section.split("```\n")[1]
    return [line.split("  #")[0] for line in block.splitlines()]


def run_shell(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-ec", script],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
        check=False,
    )


@pytest.mark.slow
def test_the_install_block_runs_as_written(tmp_path: Path) -> None:
    """Up to its demo, which make demo runs. The new environment finds the packages of this one installed."""
    *lines, last = install_block()
    assert last == "baton demo"
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    lines += [
        "command -v baton",
        "cd /",
        'python -c "import baton; print(baton.__file__)"',
        "baton --version",
    ]
    done = run_shell(
        "\n".join(lines),
        tmp_path,
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        PYTHONPATH=sysconfig.get_path("purelib"),
    )
    assert done.returncode == 0, done.stderr
    assert "Successfully installed baton" in done.stdout
    command, package, version = done.stdout.splitlines()[-3:]
    assert command == str(tmp_path / ".venv/bin/baton")
    assert Path(package).is_relative_to(tmp_path / ".venv")
    assert re.search(r"\d+\.\d+", version)


@contextmanager
def hub(models: Mapping[str, Path]) -> Iterator[str]:
    """A model hub of this machine, as far as `hf download` asks for a whole model."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.reply(has_body=False)

        def do_GET(self) -> None:
            self.reply(has_body=True)

        def reply(self, has_body: bool) -> None:
            data = self.find(self.path.partition("?")[0])
            self.send_response(404 if data is None else 200)
            data = data or b""
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if has_body:
                self.wfile.write(data)

        def find(self, path: str) -> bytes | None:
            for name, folder in models.items():
                files = {file.name: file for file in folder.iterdir()}
                if path.startswith(f"/{name}/resolve/"):
                    file = files.get(path.rpartition("/")[2])
                    return None if file is None else file.read_bytes()
                if path.startswith(f"/api/models/{name}/tree/"):
                    tree = [
                        {
                            "type": "file",
                            "path": each.name,
                            "size": each.stat().st_size,
                            "oid": hashlib.sha1(each.read_bytes()).hexdigest(),
                        }
                        for each in files.values()
                    ]
                    return json.dumps(tree).encode()
                if path.startswith(f"/api/models/{name}"):
                    siblings = [{"rfilename": each} for each in files]
                    return json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            return None

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.engine
def test_a_model_that_was_downloaded_generates_by_its_name(tmp_path: Path) -> None:
    page = (ROOT / "docs/engine.md").read_text()
    assert "`hf download org/name`" in page
    scripts = sysconfig.get_path("scripts")
    environment = {
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    asked = '--prefill tp1 --decode tp1 --temperature 0 --max-tokens 8 "the quick brown fox"'
    generate = f"baton generate --model org/name {asked}"
    before = run_shell(generate, ROOT, **environment)
    assert before.returncode == 2
    assert "fetch it with `hf download org/name`" in " ".join(before.stderr.split())
    with hub({"org/name": model()}) as url:
        fetched = run_shell("hf download org/name", ROOT, HF_ENDPOINT=url, **environment)
    assert fetched.returncode == 0, fetched.stderr
    done = run_shell(generate, ROOT, HF_HUB_OFFLINE="1", **environment)
    assert done.returncode == 0, done.stderr
    from_folder = run_shell(f"baton generate --model {model()} {asked}", ROOT, **environment)
    assert done.stdout == from_folder.stdout != ""
