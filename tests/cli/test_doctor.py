"""`baton doctor` says what works, each line checked by doing it, and says so when it does not."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from baton.bench import transport
from baton.cli import doctor_checks
from baton.transport import transport_names


@pytest.mark.slow
def test_one_line_for_each_part_and_exit_0() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton", "doctor"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*transport_names(), "cuda", "kernel"]
    for line in lines:
        assert re.fullmatch(r"[a-z_]+ (ok: .+|no: .+; .+)", line), line
    assert [line for line in lines if line.startswith(("memory no", "shm no", "tcp no"))] == []


def test_a_transport_that_garbles_is_not_ok(monkeypatch) -> None:
    class Garbling(transport.TransferTarget):
        def digest(self) -> str:
            self.buffer[7] ^= 1
            return super().digest()

    monkeypatch.setattr(transport, "TransferTarget", Garbling)
    finding = doctor_checks.check_transport("memory")
    assert not finding.is_ok
    assert "not the bytes that were sent" in finding.text


def test_a_missing_library_is_named(monkeypatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libx.so.1: cannot open shared object file")

    monkeypatch.setattr(transport, "open_transport", fail)
    finding = doctor_checks.check_transport("shm")
    assert str(finding) == "shm no: libx.so.1: cannot open shared object file"
