"""Damaged copies of files: seeded changes of bytes, of JSON values, and of the header of a GGUF file."""

import copy
import json
import random
import warnings
from pathlib import Path

import numpy as np
import torch
import zoo

from tlspectral.errors import TlspectralError

STRANGE = (
    None, True, "", "nonsense", "\ud800", "../x.safetensors", "a\0b.safetensors", -1, 0, 1, 3, 0.5, -1.5, 2**31, 2**63,
    10**30, 1e308, float("nan"), float("inf"), [], [0], [[]], {}, {"a": {"b": []}}, "9" * 5000,
)  # fmt: skip


def other_bytes(content: bytes, random_numbers: random.Random, *, within: int | None = None) -> bytes:
    """Flip, cut or zero some bytes, among the first `within`."""
    changed, end = bytearray(content), min(len(content), within or len(content))
    kind, start = (
        random_numbers.choice(("flip", "flip", "cut", "zero", "ones", "insert")),
        random_numbers.randrange(end),
    )
    if kind == "cut":
        return bytes(changed[:start])
    if kind == "insert":
        return bytes(changed[:start]) + random_numbers.randbytes(random_numbers.randint(1, 9)) + bytes(changed[start:])
    if kind == "flip":
        for _ in range(random_numbers.randint(1, 4)):
            changed[random_numbers.randrange(end)] ^= 1 << random_numbers.randrange(8)
        return bytes(changed)
    length = random_numbers.choice((1, 4, 8, 64))
    changed[start : start + length] = (b"\0" if kind == "zero" else b"\xff") * len(changed[start : start + length])
    return bytes(changed)


def other_json(content: bytes, random_numbers: random.Random) -> bytes:
    """Change, drop, move or nest a value of a JSON file; of one in five files change bytes."""
    if random_numbers.random() < 0.2:
        return other_bytes(content, random_numbers)
    if random_numbers.random() < 0.02:
        return b"[" * 100_000
    value = copy.deepcopy(json.loads(content))
    places = list(_places(value))
    for _ in range(random_numbers.choice((1, 1, 1, 2))):
        parent, key = random_numbers.choice(places)
        if key not in (parent if isinstance(parent, dict) else range(len(parent))):
            continue
        if isinstance(parent, dict) and random_numbers.random() < 0.2:
            del parent[key]
        elif random_numbers.random() < 0.1:
            parent[key] = [parent[key]]
        else:
            parent[key] = random_numbers.choice(STRANGE)
    if random_numbers.random() < 0.02:
        value = [value]
    return json.dumps(value).encode()


def _places(value):
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def write_gguf(path: Path) -> Path:
    """A tiny Llama as a GGUF file, in float32, with a tokenizer of single letters."""
    import gguf

    model = zoo.hf_model("llama")
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<unk>", "<s>", "</s>"] + [chr(0x4E00 + index) for index in range(3, config.vocab_size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in weights.items():
        tensor = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(tensor, value.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def outcome(read, folder: Path, file: Path):
    """What `read` returns, or the text of its refusal. Fails on any other error, and on one that names no file."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is loaded with", category=UserWarning)
        try:
            with torch.no_grad():
                return read(folder)
        except (TlspectralError, FileNotFoundError) as error:
            refusal = str(error)
    by_name = file.name in refusal or str(folder) in refusal
    assert by_name or refusal.startswith("layer "), f"names neither file nor layer: {refusal}"
    return refusal
