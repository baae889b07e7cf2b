"""Tokenizers out of folders and GGUF files, without a network."""

import json
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.engine.checkpoint.packed import pack
from tests.engine.tiny import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from baton.checkpoint.opening import open_checkpoint
from baton.checkpoint.tokenizer import eos_ids, load_tokenizer
from baton.errors import ConfigError

TEXTS = [
    "The relay runner hands the baton on, and doesn't stop: 12345 steps!",
    "  two  spaces,\n\nlines\tand 3.14 \u00e9\u00e8 \u4f60\u597d",
    "def f(x):\n    return x  # 7\n",
    "<|end|> is one token, <|other|> is not",
]
TEMPLATE = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|end|>{% endfor %}"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise AssertionError(f"a tokenizer went to the network: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """A real byte-level BPE of few merges, which splits as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def metadata(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3] + [1] * (len(tokens) - 2),
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | {
        "tokenizer.chat_template": TEMPLATE
    }


def folder_with(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return folder


def test_models_without_a_tokenizer():
    assert load_tokenizer(open_checkpoint(str(tiny("llama")))) is None
    assert load_tokenizer(open_checkpoint("dummy:smollm2-135m")) is None


def test_tokenizer_of_a_folder(trained: Tokenizer, tmp_path: Path):
    found = load_tokenizer(open_checkpoint(str(folder_with(trained, tmp_path))))
    for text in TEXTS:
        ids = found(text)["input_ids"]
        assert ids == trained.encode(text).ids
        assert found.decode(ids) == text
    chat = [{"role": "user", "content": "hi"}]
    assert found.apply_chat_template(chat, tokenize=False) == "[user]hi<|end|>"


@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v3"])
@pytest.mark.parametrize(
    "stated", ["TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", None]
)
def test_a_stated_class_gives_the_tokenizer_of_transformers(
    family: str, stated: str | None, trained: Tokenizer, tmp_path: Path
):
    folder = folder_with(trained, tmp_path)
    for name, changes in {"config.json": {"model_type": family}, "tokenizer_config.json": {}}.items():
        content = json.loads((folder / name).read_text()) | changes
        content.pop("tokenizer_class", None)
        if stated and name == "tokenizer_config.json":
            content["tokenizer_class"] = stated
        (folder / name).write_text(json.dumps(content))
    expected = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    found = load_tokenizer(open_checkpoint(str(folder)))
    assert type(found) is type(expected)
    assert found.get_vocab() == expected.get_vocab()
    assert [found(text)["input_ids"] for text in TEXTS] == [expected(text)["input_ids"] for text in TEXTS]
    assert found.special_tokens_map == expected.special_tokens_map


STARTING = """
import sys
from baton.checkpoint.tokenizer import load_tokenizer
from baton.engine.config import EngineConfig
from baton.engine.sizes import derive_sizes
print(load_tokenizer(derive_sizes(EngineConfig(sys.argv[1])).checkpoint) is not None)
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_start_does_without_the_compiler_of_torch(trained: Tokenizer, tmp_path: Path):
    """It takes as long to import as all of torch."""
    folder = folder_with(trained, tmp_path)
    run = partial(subprocess.run, capture_output=True, text=True, check=True)
    assert run([sys.executable, "-c", STARTING, str(folder)]).stdout == "True\nFalse\n"
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": None}))
    assert run([sys.executable, "-c", STARTING, str(folder)]).stdout == "True\nTrue\n"


def test_tokenizer_of_a_folder_that_is_broken(trained: Tokenizer, tmp_path: Path):
    folder = folder_with(trained, tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        load_tokenizer(open_checkpoint(str(folder)))


def test_tokenizer_of_a_gguf_file(trained: Tokenizer, tmp_path: Path):
    path = pack(tiny("llama"), tmp_path / "model.gguf", more=metadata(trained))
    found = load_tokenizer(open_checkpoint(str(path)))
    for text in TEXTS:
        ids = found(text)["input_ids"]
        assert ids == trained.encode(text).ids
        assert found.decode(ids) == text
    assert found.decode([1, *found("a")["input_ids"], 0], skip_special_tokens=True) == "a"
    assert (found.bos_token, found.eos_token, found.chat_template) == ("<|begin|>", "<|end|>", TEMPLATE)


def test_bos_is_added_where_the_file_says_so(trained: Tokenizer, tmp_path: Path):
    path = pack(tiny("llama"), tmp_path / "model.gguf", more=metadata(trained, add_bos_token=True))
    found = load_tokenizer(open_checkpoint(str(path)))
    assert found("a b")["input_ids"] == [0, *trained.encode("a b").ids]
    assert found("a b", add_special_tokens=False)["input_ids"] == trained.encode("a b").ids


@pytest.mark.parametrize(
    ("rule", "text", "pieces"),
    [
        ("gpt-2", "a  12 b", ["a", " ", " 12", " b"]),
        ("smollm", "a  12 b", ["a", "  ", "1", "2", " b"]),
        ("llama-bpe", "a 1234's\n x", ["a", " ", "123", "4", "'s", "\n", " x"]),
        ("qwen2", "a 12'S\n x", ["a", " ", "1", "2", "'S", "\n", " x"]),
    ],
)
def test_text_is_split_by_the_rule_that_the_file_names(
    trained: Tokenizer, tmp_path: Path, rule: str, text: str, pieces: list[str]
):
    path = pack(tiny("llama"), tmp_path / "model.gguf", more=metadata(trained, pre=rule))
    found: Any = load_tokenizer(open_checkpoint(str(path)))
    split = found.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in split] == pieces


def test_rules_that_are_not_known(trained: Tokenizer, tmp_path: Path):
    path = pack(tiny("llama"), tmp_path / "model.gguf", more=metadata(trained, pre="tekken"))
    with pytest.raises(ConfigError, match=r"'tekken', which is not known .*put the model's tokenizer\.json"):
        load_tokenizer(open_checkpoint(str(path)))
    trained.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(open_checkpoint(str(path)))(TEXTS[0])["input_ids"] == trained.encode(TEXTS[0]).ids


def test_pieces_with_scores(tmp_path: Path):
    """The tokenizer of Llama 2: no merges but scores, spaces as part of the words."""
    pieces = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
    keys = {
        "model": "llama",
        "tokens": pieces,
        "scores": [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0],
        "token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
    }
    more = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    path = pack(tiny("llama"), tmp_path / "model.gguf", more=more)
    found = load_tokenizer(open_checkpoint(str(path)))
    ids = found("ab a")["input_ids"]
    assert ids == [1, 8, 6]
    assert found.decode(ids, skip_special_tokens=True) == "ab a"
    assert eos_ids(open_checkpoint(str(path)), found) == (2,)


def test_ends_of_an_answer(trained: Tokenizer, tmp_path: Path):
    folder = folder_with(trained, tmp_path)
    checkpoint = open_checkpoint(str(folder))
    assert eos_ids(checkpoint) == (2,)
    assert eos_ids(checkpoint, load_tokenizer(checkpoint)) == (2, 1)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8, 7]}')
    assert eos_ids(open_checkpoint(str(folder))) == (7, 8)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [5, 6]}))
    assert eos_ids(open_checkpoint(str(folder))) == (5, 6)
    path = pack(tiny("llama"), tmp_path / "model.gguf", more=metadata(trained, eot_token_id=9))
    assert eos_ids(open_checkpoint(str(path))) == (1, 9)
