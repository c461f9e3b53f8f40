"""Build a HookedTransformer (TransformerLens 3.x) from a loaded Hugging Face model.

TransformerLens' own loader downloads the configuration by name, even for weights in memory; here its converters get
the model's own configuration. They drop some features silently (such as YaRN), so outputs are compared afterwards.
"""

import contextlib
import copy
import importlib
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.hooking.methods import methods_replaced
from tlspectral.models.loading.packaged import FOLDED, hooked_transformer_class
from tlspectral.models.reading.bridge import stated_context

_IN_MEMORY = "<in memory>"  # not a hub id: ids that contain "llama" or "gemma" get hard-coded shapes
_LONGEST = 2048  # tokens; every layer keeps a mask of [tokens, tokens]
_converting = threading.Lock()


def build_hooked(model: Any, tokenizer: Any, name: str, dtype: torch.dtype) -> Any:
    """Return a new HookedTransformer on the CPU, with folded norm gains, from the weights of a Hugging Face model.

    Nothing is centred and value biases stay in place, so the logits equal the checkpoint's. Without learned positions
    the context is the config's, at most 2048 tokens.

    model: of transformers; it stays unchanged. tokenizer: its tokenizer, or None. name: hub id or path. dtype: of the
    weights. Raises ImportError on TransformerLens 4; UnsupportedArchitecture if TransformerLens cannot hold the model,
    or would ignore rope scaling or a sliding window.
    """
    hooked_class = hooked_transformer_class()
    try:
        with _own_config(model) as tl_loading:
            cfg, tl_name = _hooked_config(tl_loading, model, name, dtype)
            _check_positions(cfg, model.config, name)
            state = tl_loading.get_pretrained_state_dict(tl_name, cfg, hf_model=model, dtype=dtype)
            cfg.tokenizer_name, cfg.model_name = None, name.rsplit("/", 1)[-1]
            hooked = hooked_class(cfg, tokenizer, move_to_device=False)
            hooked.load_and_process_state_dict(state, **FOLDED)
    except (UnsupportedArchitecture, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise UnsupportedArchitecture(
            f"TransformerLens has no HookedTransformer of {name} ({type(model).__name__}): {type(error).__name__}:"
            f' {reason} Use backend="bridge".'
        ) from error
    return hooked.eval()


def _hooked_config(tl_loading: Any, model: Any, name: str, dtype: torch.dtype) -> tuple[Any, str]:
    """Return (TransformerLens' config of a model, name by which its converters know the model).

    tl_loading: TransformerLens' module of loading functions. model: of transformers. name: hub id or path. dtype: of
    the weights.
    """

    def configured(tl_name: str) -> Any:
        cfg = tl_loading.get_pretrained_model_config(
            tl_name, hf_cfg=model.config.to_dict(), fold_ln=True, device="cpu", dtype=dtype
        )
        if cfg.positional_embedding_type in ("rotary", "alibi"):
            # For some architectures TransformerLens uses 2048 tokens, whatever the config says.
            cfg.n_ctx = min(cfg.n_ctx, _LONGEST, stated_context(model.config) or _LONGEST)
        return cfg

    try:
        return configured(_IN_MEMORY), _IN_MEMORY
    except NotImplementedError:
        # Gemma and OLMo are known by hub id only.
        if name not in tl_loading.OFFICIAL_MODEL_NAMES:
            raise
        return configured(name), name


@contextlib.contextmanager
def _own_config(model: Any) -> Iterator[Any]:
    """Yield TransformerLens' module of loading functions, patched to use the config of this Hugging Face model.

    Until the `with` block ends, messages that TransformerLens logs are suppressed.
    """
    tl_loading: Any = importlib.import_module("transformer_lens.loading_from_pretrained")
    config = copy.deepcopy(model.config)
    # Fields that TransformerLens reads and transformers 5 has dropped or moved.
    if config.model_type == "gpt2" and not hasattr(config, "n_ctx"):
        config.n_ctx = config.n_positions
    rope = getattr(config, "rope_parameters", None) or {}
    if "partial_rotary_factor" in rope and not hasattr(config, "partial_rotary_factor"):
        config.partial_rotary_factor = rope["partial_rotary_factor"]

    class OwnConfig:
        from_pretrained = staticmethod(lambda *_, **__: config)

    # TransformerLens warns on the root logger about each weight it fills in, and logging.warning would add a handler
    # to a root logger that has none, and leave it there.
    root, handler = logging.getLogger(), logging.NullHandler()

    def from_elsewhere(record: logging.LogRecord) -> bool:
        return "transformer_lens" not in record.pathname

    with _converting, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
        root.addHandler(handler)
        root.addFilter(from_elsewhere)
        try:
            with methods_replaced(
                tl_loading, {"AutoConfig": OwnConfig, "get_official_model_name": lambda tl_name: tl_name}
            ):
                yield tl_loading
        finally:
            root.removeFilter(from_elsewhere)
            root.removeHandler(handler)


def _check_positions(cfg: Any, config: Any, name: str) -> None:
    """Raise UnsupportedArchitecture for a rope scaling or sliding window that HookedTransformer ignores.

    cfg: TransformerLens' config of the model. config: the config of transformers. name: the model's name in the
    message. A comparison of outputs on a short text would not notice every ignored setting.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    flat = [rope] if "rope_type" in rope else [entry for entry in rope.values() if isinstance(entry, dict)]
    computes = {"llama3": cfg.use_NTK_by_parts_rope, "yarn": getattr(cfg, "use_yarn_rope", False), "default": True}
    kinds = sorted({str(entry.get("rope_type", "default")) for entry in flat})
    ignored = [f"{kind} rope scaling" for kind in kinds if not computes.get(kind)]
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if slides and window is not None and getattr(config, "use_sliding_window", True) is not False:
        ignored += [f"sliding window of {window} tokens"] if not cfg.use_local_attn and window < cfg.n_ctx else []
    if ignored:
        raise UnsupportedArchitecture(
            f"HookedTransformer ignores the {ignored[0]} of {name}, so its attention would not be the model's; use "
            'backend="bridge".'
        )
