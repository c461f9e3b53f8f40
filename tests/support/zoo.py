"""Tiny random causal language models, one per attention shape that the package has to read right.

At Hugging Face's initialisation the scores of a tiny model are near 0, norms are exactly 1 and biases exactly 0, so a
check of scores or of norm folding would pass for wrong code too. Here norms, biases and query/key-norm gains are
jittered and query and key weights enlarged: the largest score on the check prompt lies between about 4 and 16, under
Gemma 2's softcap the raw scores go far enough past the cap to bend, and rope scaling acts within the prompt.
"""

import atexit
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from zoo_shapes import CONTEXT, FALCONS, HEADS, LATENTS, LAYERS, MORE_SHAPES, SHAPES, VOCABULARY, WIDTH, WINDOW

from tlspectral.models.loading.building import build_bridge

__all__ = [
    "ARCHITECTURES", "CONTEXT", "ENCODERS", "ENCODERS_HERE", "FALCONS", "HAS_HOOKED", "HEADS", "HOOKED_ARCHITECTURES",
    "LATENTS", "LAYERS", "LENGTH_DEPENDENT", "PROMPT_LENGTH", "READ_WRONG", "REFUSED", "RIGHT",
    "VOCABULARY", "WIDTH", "WINDOW", "also_slow", "bridge", "converted", "generator", "hf_model", "hooked", "logits",
    "needs_hooked", "prompt", "save_folder", "shared", "temporary", "wrapped",
]  # fmt: skip

PROMPT_LENGTH = 24

REFUSED = ("mamba",)
ENCODERS = ("bert", "roberta")
LENGTH_DEPENDENT = ("phi3_longrope", "dynamic")
ARCHITECTURES: tuple[str, ...] = tuple(name for name in SHAPES if name not in (*REFUSED, *LENGTH_DEPENDENT, *ENCODERS))
HOOKED_ARCHITECTURES: tuple[str, ...] = (
    "gpt2",
    "neox",
    "llama",
    "llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "phi",
    "gptj",
    "opt",
    "gptneo",
    "bloom",
)
"""Those of which HookedTransformer can be built from a local checkpoint, with the checkpoint's log-probabilities."""


def _has_hooked_transformer() -> bool:
    # TransformerLens 4 raises ImportError for the removed names even inside hasattr.
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        return False
    return True


HAS_HOOKED: bool = _has_hooked_transformer()
READ_WRONG: tuple[str, ...] = ("cohere",) if HAS_HOOKED else ()
"""Architectures whose bridge is wrong here: TransformerLens 3.9 rotates the wrong pairs in Cohere's."""
ENCODERS_HERE: tuple[str, ...] = ENCODERS[:1] if HAS_HOOKED else ENCODERS
"""Encoders that TransformerLens has a bridge of: RoBERTa from 4 on."""
RIGHT: tuple[str, ...] = tuple(name for name in ARCHITECTURES if name not in READ_WRONG)
needs_hooked = pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")

# Factors on query and key weights, chosen so that the largest score is near 10. Query/key norm makes them irrelevant:
# there the gains are enlarged instead. GPT-Neo does not divide its scores by sqrt(d_head).
_ENLARGED = {"gptneo": 2.5, "gemma2": 6.0}
_QUERY_KEY_NAMES = ("q_proj", "k_proj", "query", "key", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa")
_JOINT_NAMES = ("query_key_value", "c_attn", "qkv_proj")


def _query_key_rows(name: str, config: PretrainedConfig, size: int) -> torch.Tensor:
    """Which of the output features of a joint projection are queries or keys: `[size]`, boolean."""
    feature = torch.arange(size)
    if name == "query_key_value":  # NeoX and BLOOM: heads outside, then query, key, value
        d_head = config.hidden_size // config.num_attention_heads
        return (feature // d_head) % 3 < 2
    if config.model_type == "codegen":  # four parts, in each of them queries, values and keys
        return (feature // (size // 12)) % 3 != 1
    if name == "qkv_proj":  # Phi-3: all queries, then keys, then values
        d_head = config.hidden_size // config.num_attention_heads
        return feature < size - config.num_key_value_heads * d_head
    return feature < 2 * size // 3


def _jitter(model: nn.Module, name: str, config: PretrainedConfig) -> None:
    """Move norms and biases off 1 and 0 and enlarge the query and key weights, in place."""
    enlarged = _ENLARGED.get(name, 5.0)
    # The heads of nanochat write little beside an embedding of norm 1.
    names = (*_QUERY_KEY_NAMES, *(("v_proj", "o_proj") if name == "nanochat" else ()))
    for path, module in model.named_modules():
        kind = path.rsplit(".", 1)[-1]
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        is_norm = "Norm" in type(module).__name__
        if is_norm and weight is not None:
            weight += 0.3 * torch.randn_like(weight)
            if kind in ("q_norm", "k_norm"):
                weight += {"gemma3n": -0.3, "gemma4": -0.6}.get(name, 0.6)  # whose scores are not divided
        elif kind in names and weight is not None:
            weight *= enlarged
        elif kind in _JOINT_NAMES and weight is not None:
            by_column = type(module).__name__ == "Conv1D"
            rows = _query_key_rows(kind, config, weight.shape[1 if by_column else 0])
            factor = torch.where(rows, enlarged, 1.0)
            weight *= factor if by_column else factor[:, None]
        if bias is not None and isinstance(bias, nn.Parameter):
            spread = 0.4 if is_norm or kind in _QUERY_KEY_NAMES or kind in _JOINT_NAMES else 0.1
            bias += spread * torch.randn_like(bias)


@torch.no_grad()
def hf_model(name: str, seed: int = 0, positions: int | None = None) -> Any:
    """A fresh Hugging Face model in float32, eager attention and evaluation mode.

    Fresh at each call, because a bridge replaces submodules of the model it wraps in place. `positions` is its longest
    prompt, if another than `CONTEXT`.
    """
    config = {**SHAPES, **MORE_SHAPES}[name]()
    config.initializer_range = 0.04
    for limit in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len") if positions else ():
        if getattr(config, limit, None) is not None:
            setattr(config, limit, positions)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"  # the default asks for kernels of CPU or CUDA by the device's name
        model = getattr(transformers, config.architectures[0])(config).float().eval()
        _jitter(model, name, config)
    return model


def generator(seed: int = 0) -> torch.Generator:
    """A random stream of one's own."""
    return torch.Generator().manual_seed(seed)


def prompt(batch: int = 2, length: int = PROMPT_LENGTH, seed: int = 0) -> torch.Tensor:
    """Seeded random token ids `[batch, length]`, none of them a special token."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator(seed))


def logits(model: Any, tokens: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Logits of a model of TransformerLens or transformers on `tokens`, by default on `prompt()`."""
    with torch.no_grad():
        output = model(prompt() if tokens is None else tokens, **options)
    return getattr(output, "logits", output)


def wrapped(model: Any) -> Any:
    """A raw TransformerBridge of a model of transformers (no compatibility mode, no tokenizer)."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)


def bridge(name: str, seed: int = 0, positions: int | None = None) -> Any:
    """The raw bridge of `hf_model`."""
    model = hf_model(name, seed, positions)
    return build_bridge(model, None, name) if name == "gemma3n" else wrapped(model)  # made by `load_model` alone


def hooked(name: str, seed: int = 0, fold_ln: bool = True, positions: int | None = None) -> Any:
    """A HookedTransformer of `hf_model` with TransformerLens' default processing (TransformerLens 3.x)."""
    import transformer_lens.loading_from_pretrained as tl_loading
    from transformer_lens import HookedTransformer

    model = hf_model(name, seed, positions)
    config = model.config
    if name == "gpt2":
        config.n_ctx = config.n_positions  # in the config.json of the hub, gone from the class
    if name == "phi":
        config.partial_rotary_factor = config.rope_parameters["partial_rotary_factor"]

    class _OwnConfig:
        from_pretrained = staticmethod(lambda *_, **__: config)

    real = tl_loading.AutoConfig
    with tempfile.TemporaryDirectory(prefix="tiny_") as folder:  # TransformerLens reads "llama" out of a folder's name
        config.save_pretrained(folder)
        tl_loading.AutoConfig = _OwnConfig
        try:
            cfg = tl_loading.get_pretrained_model_config(
                folder, hf_cfg=config.to_dict(), fold_ln=fold_ln, device="cpu", dtype=torch.float32
            )
        finally:
            tl_loading.AutoConfig = real
        state = tl_loading.get_pretrained_state_dict(folder, cfg, hf_model=model, dtype=torch.float32)
    cfg.tokenizer_name = None
    built = HookedTransformer(cfg, move_to_device=False)
    built.load_and_process_state_dict(state, fold_ln=fold_ln)
    if cfg.positional_embedding_type == "alibi":
        built.pos_embed.W_pos.data.zero_()  # unused, and whatever was in memory: NaN differs from itself
    return built.eval()


def also_slow(*cases: Any) -> list[Any]:
    """Cases of a parametrised test that the fast tests leave out: names, or tuples of arguments."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def converted(model: Any, dtype: torch.dtype) -> Any:
    """The model in another type, in place: a bridge moves what it wraps only when that is told too."""
    model.to(dtype)
    getattr(model, "original_model", model).to(dtype)
    return model


@functools.cache
def shared(backend: str, name: str) -> Any:
    """The model of `bridge` or `hooked` that all tests of this process share. Not to be changed: build one's own.

    "unfolded" is `hooked` with the norm weights and biases of `hf_model`. That reading does not change a model is what
    test_view.py proves.
    """
    make = {"bridge": bridge, "hooked": hooked, "unfolded": functools.partial(hooked, fold_ln=False)}
    return make[backend](name)


@functools.cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>"] + [f"w{index}" for index in range(3, VOCABULARY)]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )


def save_folder(name: str, path: Path | str, seed: int = 0, tokenizer: bool = False) -> Path:
    """The model as a local checkpoint folder (safetensors and config.json), optionally with a word-level tokenizer.

    The tokenizer knows the words `w3` .. `w96`, each the id it names.
    """
    folder = Path(path)
    hf_model(name, seed).save_pretrained(folder)
    if tokenizer:
        _tokenizer().save_pretrained(folder)
    return folder


def temporary(prefix: str) -> Path:
    """A new folder that is there until the process ends."""
    made = tempfile.TemporaryDirectory(prefix=prefix)
    atexit.register(made.cleanup)
    return Path(made.name)
