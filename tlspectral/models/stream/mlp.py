"""What the MLP of a layer reads: the residual stream, with or without its layer's attention, and a norm before it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.errors import EditNotHonored
from tlspectral.models.attention.tolerances import require_close
from tlspectral.models.reading.norms import Normalization
from tlspectral.models.reading.view import AttentionView


@dataclass(frozen=True)
class MlpReads:
    """What the MLP of one layer reads.

    Attributes:
        reads: the points, named as in `AttentionView.hook_names`, of which it reads the sum: what enters the layer, and
            where the MLP is not parallel to the attention what that adds; in a layer with a mixer what stands in front
            of it.
        norm: between that sum and `point`; of kind "none" where there is none. Its gain and bias are None where they
            act behind the point.
        point: the hook point that is edited.
    """

    reads: tuple[str, ...]
    norm: Normalization
    point: str

    @property
    def parallel(self) -> bool:
        """Whether it reads what enters the layer alone."""
        return self.reads == ("residual",)

    def stream(self, seen: Mapping[str, Tensor]) -> Tensor:
        """Return the stream that the MLP reads, from what passed the points `reads`."""
        first, *others = (seen[point] for point in self.reads)
        return first if not others else first + others[0].to(first.device)

    def changed(
        self,
        read: Float[Tensor, "*shape d_model"],
        x: Float[Tensor, "batch pos d_model"],
        removed: Float[Tensor, "batch pos d_model"],
    ) -> Float[Tensor, "*shape d_model"]:
        """Return what the MLP reads, `read` of the stream `x`, without `removed`; the norm is taken again."""
        change = self._scaled(self.norm.normalized(x - removed) - self.norm.normalized(x))
        return read + change.to(read).reshape(read.shape)  # OPT flattens sequences

    def require_own_read(
        self,
        read: Float[Tensor, "*shape d_model"],
        x: Float[Tensor, "batch pos d_model"],
        stored: torch.dtype,
        where: str,
    ) -> None:
        """Refuse a run in which `read` is not what the norm makes of the stream `x`. Raises EditNotHonored.

        The first sequence is compared. `stored`: the coarsest type of what the run hands on.
        """
        found, expected = widened(read).reshape(x.shape)[:1].to(x.device), self._scaled(self.norm.normalized(x[:1]))
        if self.norm.bias is not None:
            expected = expected + self.norm.bias.to(expected.dtype).to(expected.device)
        require_close(
            (found - expected).abs().max(),
            expected.abs().max(),
            stored,
            "live reads",
            f"{where}: what passes {self.point} in this run is not what the norm makes of the residual stream; they "
            "differ",
            "a change of the stream cannot be carried to it: look for hooks that edit the input of the MLP or its norm",
            EditNotHonored,
        )

    def _scaled(self, normalized: Tensor) -> Tensor:
        gain = self.norm.gain
        return normalized if gain is None else normalized * gain.to(normalized.dtype).to(normalized.device)

    def gradient(
        self, of_read: Float[Tensor, "*shape d_model"], x: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Carry a gradient at the input of the MLP back to the residual stream `x` that it reads."""
        gain = self.norm.gain
        of_read = of_read.reshape(x.shape)
        return self.norm.gradient(of_read if gain is None else of_read * gain.to(of_read), x)


def mlp_reads(view: AttentionView, index: int) -> MlpReads | None:
    """Return what the MLP of a layer reads; None without one. Raises as `AttentionView.mlp_input`."""
    found = view.mlp_input(index)
    if found is None:
        return None
    parallel = getattr(view.model.cfg, "parallel_attn_mlp", False)
    reads = ("residual",) if parallel else ("residual", "attention_out")
    return MlpReads(("middle",) if view.writes_more(index) else reads, found.norm, found.point)
