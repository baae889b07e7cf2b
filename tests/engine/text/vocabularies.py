"""Small tokenizers of the two kinds that models use, made in memory."""

from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast

from baton.engine.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then the dog jumps over the quick fox",
    "na\u00efve caf\u00e9 \u00fcber \u4f60\u597d\u4e16\u754c \u4f60\u597d \U0001f600\U0001f600 \U0001f680",
    "def main():\n    print('hello')\n\n\nmain()\n",
] * 5
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'nobody' %}{{ raise_exception('no such role') }}"
    "{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ speaker or 'assistant' }}\n{% endif %}"
)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Llama 3 and Qwen have: any token may be part of a character."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=specials)
    fast.train_from_iterator(CORPUS, trainer)
    fast.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    backend = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|endoftext|>")
    backend.chat_template = TEMPLATE
    return backend


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Words with a mark for the space and bytes for the rest, as Llama 2 has; the first space is dropped."""
    words = ["\u2581", "\u2581the", "\u2581fox", "es", "\u2581caf\u00e9", "\u4f60", "a", "b", "."]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    fast = Fast(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


@cache
def fallback_tokenizer() -> Tokenizer:
    return Tokenizer(byte_fallback())
