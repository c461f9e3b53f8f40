"""`load_other`: load every model that is not in this package, from a name, a path or an object of transformers."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from tlspectral.errors import shown
from tlspectral.models.loaders import LOADERS, claimed
from tlspectral.models.loading.adapters import load_merged
from tlspectral.models.loading.building import build_model
from tlspectral.models.loading.copies import note_given
from tlspectral.models.loading.damage import download_bars, misfit, quiet
from tlspectral.models.loading.finding import find_source
from tlspectral.models.loading.given_objects import copied_object
from tlspectral.models.loading.pretrained import load_pretrained
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.computed_weights import require_linear
from tlspectral.models.running.passes import require_single_runs


def load_other(
    given: Any,
    revision: str | None,
    checkpoint: int | None,
    *,
    backend: str,
    device: torch.device | None,
    dtype: torch.dtype | None,
    tokenizer: Any,
) -> Any:
    """Return the TransformerLens model of a name, a path or an object; `tlspectral_source` is a dict with its origin.

    Args:
        given: name, path, or a model object of transformers or a PeftModel.
        revision, checkpoint: choose the weights of a name: branch, tag or commit; training step. None for an object.
        backend: "hooked", otherwise a bridge.
        device, dtype: of the model. None keeps an object's own; for a name `device` is needed and `dtype` None is
            float32.
        tokenizer: the user's tokenizer of transformers, or None.

    Raises as `load_model`.
    """
    with download_bars(), copied_tokenizer(tokenizer) as own_tokenizer:
        source = find_source(given, revision, checkpoint) if isinstance(given, str | os.PathLike) else None
        kind = claimed(given) if source is None else source.kind
        if kind in LOADERS:
            options = {"backend": backend, "device": device, "dtype": dtype, "tokenizer": tokenizer}
            return LOADERS[kind].load(given if source is None else source, **options)
        if source is None:
            pretrained, record = copied_object(given, dtype, device=device, backend=backend)
        else:
            load = load_merged if kind == "adapter" else load_pretrained
            pretrained, own_tokenizer, record = load(source, dtype or torch.float32, own_tokenizer)
        anchor = next(pretrained.parameters())
        with contextlib.nullcontext() if source is None else misfit(record):
            place = device or anchor.device, dtype or anchor.dtype
            model = build_model(pretrained, own_tokenizer, record["model"], backend, *place)
    if backend != "hooked":
        require_linear(model)
    model.tlspectral_source = record
    require_single_runs(attention_view(model))
    if source is None:
        note_given(model, given)
    return model


def bridge_of(model: Any) -> Any:
    """Return a bridge of a Hugging Face model, for reading its layers; it is not checked whether it can generate."""
    return load_other(model, None, None, backend="bridge", device=None, dtype=None, tokenizer=None)


@contextlib.contextmanager
def copied_tokenizer(tokenizer: Any) -> Iterator[Any]:
    """Yield a copy of the user's tokenizer, which can be given to TransformerLens inside the context; None for None.

    TransformerLens changes the tokenizer it gets, and loads it again by name, which would use the network for a hub id
    and lose added tokens. The name of the copy is a temporary folder.
    """
    if tokenizer is None:
        yield None
        return
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer={shown(tokenizer)} is not a tokenizer of transformers: give "
            "transformers.AutoTokenizer.from_pretrained(...), or leave tokenizer= out"
        )
    with tempfile.TemporaryDirectory(prefix="tlspectral-") as folder:
        with quiet():
            tokenizer.save_pretrained(folder)
            copied = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        yield copied
