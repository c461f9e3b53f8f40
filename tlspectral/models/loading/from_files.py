"""A model on the hub, in a folder or in a GGUF file, loaded as a TransformerLens model."""

from dataclasses import replace
from typing import Any

import torch

from tlspectral.models.loading import gguf
from tlspectral.models.loading.building import build_model, copied_tokenizer
from tlspectral.models.loading.damage import misfit, refusing
from tlspectral.models.loading.hooked import hooked_transformer_class
from tlspectral.models.loading.hub import pinned
from tlspectral.models.loading.pretrained import load_pretrained
from tlspectral.models.loading.source import Source


def load_from_files(
    source: Source, backend: str, device: torch.device, dtype: torch.dtype, tokenizer: Any = None
) -> Any:
    """Return the model of a source, which is not a packaged one, with its provenance; arguments as of `load_model`."""
    if backend == "hooked":
        hooked_transformer_class()  # raises on TransformerLens 4, before minutes of loading
    with copied_tokenizer(tokenizer) as given:
        if source.kind == "adapter":
            from tlspectral.models.loading.adapters import load_merged

            pretrained, tokenizer, record = load_merged(source, dtype, given)
        else:
            pretrained, tokenizer, record = load_whole(source, dtype, given)
        with refusing(misfit(record)):
            model = build_model(pretrained, tokenizer, record["model"], backend, device, dtype)
    model.tlspectral_source = record
    return model


def load_whole(source: Source, dtype: torch.dtype, tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the Hugging Face model of a hub model, folder or GGUF file, its tokenizer or None, and its provenance."""
    if source.kind == "gguf":
        folder, digest = gguf.converted_folder(source)
        record = {**source.record, "sha256": digest}
        source = replace(source, kind="folder", location=str(folder), record=record)
    if source.kind == "hub":
        source = pinned(source)
    pretrained, tokenizer, left_out = load_pretrained(source, dtype, tokenizer)
    return pretrained, tokenizer, source.record | left_out
