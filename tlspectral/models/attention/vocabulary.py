"""The vocabulary side of a weight, chunk by chunk."""

from collections.abc import Iterator

from jaxtyping import Float64
from torch import Tensor


def vocabulary_chunks(weight: Tensor, *, axis: int, size: int = 4096) -> Iterator[Float64[Tensor, "..."]]:
    """Yield chunks of an embedding along its vocabulary axis, in float64 on the CPU; it is never copied whole."""
    for chunk in weight.detach().split(size, dim=axis):
        yield chunk.cpu().double()
