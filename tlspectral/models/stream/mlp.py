"""The input of a layer's MLP: a residual stream, with or without the layer's attention, and the norm before the MLP."""

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
    """How the MLP of one layer gets its input.

    Attributes:
        reads: hook points whose sum the MLP reads, by their names in `AttentionView.hook_names`: the layer's input,
            plus the attention's output unless MLP and attention are parallel; "middle" in a layer with a mixer.
        norm: between that sum and `point`; kind "none" without a norm. Gain and bias are None if they act after the
            point.
        point: hook point at which the MLP's input is edited.
    """

    reads: tuple[str, ...]
    norm: Normalization
    point: str

    @property
    def parallel(self) -> bool:
        """True if the MLP reads only the layer's input, not the layer's attention."""
        return self.reads == ("residual",)

    def stream(self, seen: Mapping[str, Tensor]) -> Tensor:
        """Return the residual stream that the MLP reads, before its norm: the sum of activations at the points `reads`.

        seen: from name in `reads` to the activation.
        """
        first, *further = (seen[point] for point in self.reads)
        return first if not further else first + further[0].to(first.device)

    def changed(
        self,
        read: Float[Tensor, "*shape d_model"],
        x: Float[Tensor, "batch pos d_model"],
        removed: Float[Tensor, "batch pos d_model"],
    ) -> Float[Tensor, "*shape d_model"]:
        """Return the MLP's input once `removed` is subtracted from the residual stream, as a new tensor; the norm is
        computed again.

        read: the MLP's input in the run without this change. x: the stream that the MLP reads in that run.
        """
        change = self._scaled(self.norm.normalized(x - removed) - self.norm.normalized(x))
        return read + change.to(read).reshape(read.shape)  # OPT flattens sequences

    def require_own_read(
        self,
        read: Float[Tensor, "*shape d_model"],
        x: Float[Tensor, "batch pos d_model"],
        stored: torch.dtype,
        where: str,
    ) -> None:
        """Raise EditNotHonored if the MLP's input `read` is not the norm of the stream x, up to rounding.

        Only the first sequence is compared. stored: the coarsest type of the run's activations. where: layer, for
        messages.
        """
        measured, expected = widened(read).reshape(x.shape)[:1].to(x.device), self._scaled(self.norm.normalized(x[:1]))
        if self.norm.bias is not None:
            expected = expected + self.norm.bias.to(expected.dtype).to(expected.device)
        require_close(
            (measured - expected).abs().max(),
            expected.abs().max(),
            stored,
            "live reads",
            f"{where}: what passes {self.point} in this run is not the norm of the residual stream; they differ",
            "a change of the stream cannot be carried to the MLP: look for hooks that edit the MLP's input or its norm",
            EditNotHonored,
        )

    def _scaled(self, normalized: Tensor) -> Tensor:
        """Return the stream `normalized` times the norm's gain, if any."""
        gain = self.norm.gain
        return normalized if gain is None else normalized * gain.to(normalized.dtype).to(normalized.device)

    def gradient(
        self, of_read: Float[Tensor, "*shape d_model"], x: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the gradient at the residual stream x from `of_read`, the gradient at the MLP's input."""
        gain = self.norm.gain
        of_read = of_read.reshape(x.shape)
        return self.norm.gradient(of_read if gain is None else of_read * gain.to(of_read), x)


def mlp_reads(view: AttentionView, index: int) -> MlpReads | None:
    """Return how the MLP of layer `index` of the model in `view` gets its input, as `MlpReads` (`.reads`, `.norm`,
    `.point`); None without an MLP.

    Raises UnsupportedArchitecture if the norm is not supported or no hook point shows the input.
    """
    mlp_input = view.mlp_input(index)
    if mlp_input is None:
        return None
    parallel = getattr(view.model.cfg, "parallel_attn_mlp", False)
    reads = ("residual",) if parallel else ("residual", "attention_out")
    return MlpReads(("middle",) if view.writes_more(index) else reads, mlp_input.norm, mlp_input.point)
