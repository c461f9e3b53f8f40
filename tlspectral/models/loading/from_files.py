"""A model on the hub, in a folder or in a GGUF file, loaded as a TransformerLens model."""

from importlib.metadata import version
from typing import Any

import torch

from tlspectral.models.loading import gguf
from tlspectral.models.loading.agreement import log_probabilities, require_agreement, require_numbers
from tlspectral.models.loading.bridge import build_bridge
from tlspectral.models.loading.damage import misfit, refusing
from tlspectral.models.loading.hooked import build_hooked, hooked_transformer_class
from tlspectral.models.loading.hub import pinned
from tlspectral.models.loading.pretrained import load_pretrained
from tlspectral.models.loading.source import Source


def load_from_files(source: Source, backend: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model of a source, which is not a packaged one, with its provenance; arguments as of `load_model`.

    Raises:
        as `load_model`.
    """
    if backend == "hooked":
        hooked_transformer_class()  # raises on TransformerLens 4, before minutes of loading
    if source.kind == "gguf":
        folder, digest = gguf.converted_folder(source)
        source = source.converted(folder, digest)
    if source.kind == "hub":
        source = pinned(source)
    pretrained, tokenizer, left_out = load_pretrained(source, dtype)
    label = source.record["model"]
    with refusing(misfit(source.record)):
        model = _built(pretrained, tokenizer, backend, device, dtype, label)
    model.tlspectral_source = source.record | left_out
    return model


def _built(pretrained: Any, tokenizer: Any, backend: str, device: torch.device, dtype: torch.dtype, label: str) -> Any:
    """Return the TransformerLens model of a transformers model, which it takes apart, after comparing the two."""
    if backend == "hooked":
        return build_hooked(pretrained, tokenizer, label, dtype).to(device, print_details=False)
    expected = log_probabilities(pretrained.to(device))
    require_numbers(pretrained, expected, label)
    model = build_bridge(pretrained, tokenizer, label)  # takes the model apart, so its values are computed before
    subject = f"the bridge that TransformerLens {version('transformer-lens')} makes of {label}"
    require_agreement(model, expected, subject, "try another version of TransformerLens")
    return model
