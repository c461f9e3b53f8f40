"""Tiny tokenizers of the kinds that hub models bring, with ids that fit the zoo's vocabulary."""

import json
import string

import transformers
import zoo
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

__all__ = ["IDS", "START", "TEXT", "save_tokenized"]

TEXT = "abba cab"
IDS = {"gpt2": [31, 30, 28], "llama": [3, 33, 32, 30], "neox": [31, 30, 28]}
"""Ids of the text, without the start token."""
START = {"gpt2": 0, "llama": 1, "neox": 0}
"""Ids that open a text: `<|endoftext|>`, `<s>` (after `<unk>`), `<|endoftext|>`."""

_SPACE = {"gpt2": "\u0120", "llama": "\u2581", "neox": "\u0120"}
_SPECIAL = {"gpt2": ["<|endoftext|>"], "llama": ["<unk>", "<s>", "</s>"], "neox": ["<|endoftext|>"]}


def save_tokenized(name, path, **options):
    """A checkpoint folder of the zoo with the tokenizer of its kind, GPT-2's as `vocab.json` and `merges.txt`."""
    zoo.hf_model(name).save_pretrained(path, **options)
    space = _SPACE[name]
    merges = [("a", "b"), ("b", "a"), (space, "c"), ("ab", "ba"), (space, "ab")]
    words = [*_SPECIAL[name], space, *string.ascii_lowercase, *("".join(pair) for pair in merges)]
    vocabulary = {word: index for index, word in enumerate(words)}
    assert len(vocabulary) < zoo.VOCABULARY - 2
    if name == "gpt2":
        tokenizer = transformers.GPT2Tokenizer(vocab=vocabulary, merges=merges)
    elif name == "llama":
        tokenizer = transformers.LlamaTokenizer(vocab=vocabulary, merges=merges)
    else:
        raw = Tokenizer(models.BPE(vocabulary, merges))
        raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        tokenizer = transformers.GPTNeoXTokenizer(tokenizer_object=raw)
    tokenizer.save_pretrained(path)
    if name == "gpt2":
        (path / "tokenizer.json").unlink()
        (path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
        (path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    return path
