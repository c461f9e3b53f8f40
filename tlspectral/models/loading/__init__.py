"""`load_model`: load a model from a package, the hub, a folder, a GGUF file or a model object."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings
from tlspectral.models.loaders import TINY, tiny_source
from tlspectral.models.loading.packaged import hooked_transformer_class, load_packaged

__all__ = ["load_model"]


@checked_settings
def load_model(
    name: str | os.PathLike[str] | Any,
    *,
    backend: str = "auto",
    weights: Literal["model", "files"] = "model",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    checkpoint: int | None = None,
    tokenizer: Any = None,
) -> Any:
    """Load a language model as a TransformerLens model, ready for `analyze_heads` and every other measurement.

    >>> import tlspectral as tls
    >>> tls.load_model("tiny-rope").cfg.n_heads
    4

    Args:
        name: one of
            - a hub id or a short name of TransformerLens (`"gpt2-small"`); files missing from the cache are downloaded,
            - a folder: a checkpoint, a LoRA adapter, or a saved spectral model (`to_spectral`),
            - a `.gguf` file,
            - a model object of transformers (also in 4 bits), a PeftModel with LoRA, or a model of nnsight (0.8 or
              later) or nnterp, copied and left as it is; a TransformerBridge or HookedTransformer is returned itself,
            - in this package: `"tiny-rope"`, `"tiny-ape"`, `"tiny-rope-sym"`, `"tiny-rope-imag"`, `"tiny-ape-sym"`,
            - from other packages: `"smollm2-135m"`, `"gemma3-270m"`, `"minilm-l6"`.
        backend: `"bridge"` (default, `"auto"`) or `"hooked"` (TransformerLens 3 only).
        weights: `"model"` (default), or `"files"`: load nothing, and read layer by layer later.
        device: default: the object's own device; otherwise CUDA if available, otherwise the CPU.
        dtype: floating-point type or its name. Default: the object's or spectral model's own, otherwise float32.
        revision: branch, tag or commit on the hub.
        checkpoint: training step N, of Pythia and stanford-crfm on the hub, or a subfolder `step{N}` or
            `checkpoint-{N}`.
        tokenizer: a tokenizer of transformers, which is copied. Default: the one in the files, or of nnsight's object;
            another object has none.

    Returns:
        A raw TransformerBridge, or for `"hooked"` a HookedTransformer with folded norms: in evaluation mode, with eager
        attention, so hooks see scores and patterns. Its `tlspectral_source` is a dict with the origin of the weights. A
        model of TransformerLens comes back itself, unchanged.
        For `weights="files"` a `WeightFiles`, for `analyze_heads`, `k_composition` and `head_likeness`; it cannot run.

    Raises:
        FileNotFoundError, ValueError, TypeError: the name, file, object, device or another argument cannot be used.
        ImportError: `"hooked"` on TransformerLens 4, or a package is missing.
        UnsupportedArchitecture: another kind of model, or one that the backend computes wrongly.
        BadWeights: quantised files, layers that quantise their inputs; weights that are incomplete, NaN or do not fit.

    More: docs/models.md.
    """
    if backend not in ("auto", "bridge", "hooked"):
        raise ValueError(f"backend={shown(backend)} is not known: give 'auto', 'bridge' or 'hooked'.")
    if weights not in ("model", "files"):
        raise ValueError(f"weights={shown(weights)} is not known: give 'model' or 'files'.")
    if weights == "files":
        from tlspectral.models.loading.finding import opened_by_name

        chosen = None if backend == "auto" else backend
        of_models = {"backend": chosen, "device": device, "dtype": dtype, "tokenizer": tokenizer}
        superfluous = [key for key, value in of_models.items() if value is not None]
        return opened_by_name(name, revision, checkpoint, superfluous)
    float_type = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(float_type, torch.dtype) and float_type.is_floating_point):
        raise ValueError(f"dtype={shown(dtype)} is not a floating-point type of torch: give one, such as 'float32'.")
    on_device = None if device is None else usable_device(device)
    if backend == "hooked":
        hooked_transformer_class()  # raises on TransformerLens 4, before minutes of loading
    if isinstance(name, str | os.PathLike):
        # The default is never mps, which has no float64.
        on_device = on_device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if (text := os.fspath(name)).lower() in TINY:
            source = tiny_source(text, revision, checkpoint)
            if tokenizer is not None:
                raise ValueError(f"{text} was not trained on text, so it takes no tokenizer: leave tokenizer= out.")
            return load_packaged(source, backend, on_device, float_type or torch.float32)
    elif revision is not None or checkpoint is not None:
        raise ValueError(
            f"this {type(name).__name__} is loaded; it has no revision or checkpoint to choose: give its name instead."
        )
    # Imported late: they import transformers.
    from tlspectral.models.loading.checks import avoid_lost_cache
    from tlspectral.models.loading.given_objects import as_it_is, is_of_transformer_lens, unwrapped
    from tlspectral.models.loading.roads import load_other

    given, tokenizer = unwrapped(name, tokenizer)
    options = {"backend": backend, "device": on_device, "dtype": float_type, "tokenizer": tokenizer}
    if is_of_transformer_lens(given):
        return as_it_is(given, **options | {"backend": None if backend == "auto" else backend})
    model = load_other(given, revision, checkpoint, **options)
    avoid_lost_cache(model)
    return model


def usable_device(device: str | torch.device) -> torch.device:
    """Return `device` as a torch.device. Raises ValueError if this machine cannot use it."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"device={shown(device)} cannot be used here, choose cpu or another: {reason}") from error
    return torch.device(device)
