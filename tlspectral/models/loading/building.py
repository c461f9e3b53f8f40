"""A Hugging Face model made into a TransformerLens model, with its own tokenizer."""

import contextlib
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch

from tlspectral.models.loading.agreement import log_probabilities, require_agreement, require_numbers
from tlspectral.models.loading.bridge import build_bridge
from tlspectral.models.loading.hooked import build_hooked
from tlspectral.models.loading.pretrained import quiet


def build_model(
    pretrained: Any, tokenizer: Any, name: str, backend: str, device: torch.device, dtype: torch.dtype
) -> Any:
    """Return the TransformerLens model of a Hugging Face model, which is taken apart.

    Raises:
        BadWeights: weights that are NaN or infinite.
        UnsupportedArchitecture: TransformerLens makes none, or one that computes something else.
    """
    if backend == "hooked":
        return build_hooked(pretrained, tokenizer, name, dtype).to(device, print_details=False)
    expected = log_probabilities(pretrained.to(device))
    require_numbers(pretrained, expected, name)
    model = build_bridge(pretrained, tokenizer, name)  # takes the model apart, so its values are computed before
    subject = f"the bridge that TransformerLens {version('transformer-lens')} makes of {name}"
    require_agreement(model, expected, subject, "try another version of TransformerLens")
    return model


@contextlib.contextmanager
def copied_tokenizer(tokenizer: Any) -> Iterator[Any]:
    """Yield a copy of a caller's tokenizer, from which a model can be built until the context ends; None for None.

    TransformerLens changes the tokenizer that it is given, and loads it again by its name, which would use the network
    for a hub id and lose tokens that were added. The copy has the name of a temporary folder.

    Raises:
        TypeError: it is no tokenizer of transformers.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if tokenizer is None:
        yield None
        return
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"tokenizer= takes a tokenizer of transformers, and found {type(tokenizer).__name__}")
    with tempfile.TemporaryDirectory(prefix="tlspectral-") as folder:
        with quiet():
            tokenizer.save_pretrained(folder)
            copied = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        yield copied
