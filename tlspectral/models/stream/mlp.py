"""What the MLP of a layer reads: the residual stream, with or without the attention of its layer, and a norm before it.

The norm is the MLP's own, the attention's, which parallel blocks share (GPT-J, Phi, Command R), or none (OLMo 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tlspectral.models.reading import bridge
from tlspectral.models.reading import hooked_transformer as hooked
from tlspectral.models.reading.norms import NO_NORM, Normalization
from tlspectral.models.reading.view import AttentionView

_BEHIND_MLP = "post_feedforward_layernorm"  # OLMo 2 has none in front of it; TransformerLens calls this one ln2


@dataclass(frozen=True)
class MlpReads:
    """What the MLP of one layer reads.

    Attributes:
        reads: the points, named as in `AttentionView.hook_names`, of which it reads the sum: what enters the layer, and
            where the MLP is not parallel to the attention what that adds; in a layer with a mixer what stands in front
            of it.
        norm: in front of it; of kind "none" where there is none.
        point: the hook point of what the MLP reads: the output of its own norm, else its input.
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
        change = self.norm.normalized(x - removed) - self.norm.normalized(x)
        gain = self.norm.gain
        change = change if gain is None else change * gain.to(change.dtype).to(change.device)
        return read + change.to(read).reshape(read.shape)  # OPT flattens sequences

    def gradient(
        self, of_read: Float[Tensor, "*shape d_model"], x: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Carry a gradient at the input of the MLP back to the residual stream `x` that it reads."""
        gain = self.norm.gain
        of_read = of_read.reshape(x.shape)
        return self.norm.gradient(of_read if gain is None else of_read * gain.to(of_read), x)


def mlp_reads(view: AttentionView, index: int) -> MlpReads | None:
    """Return what the MLP of a layer reads; None without one. Raises UnsupportedArchitecture for its norm."""
    (name, block, _), cfg = view.blocks[index], view.model.cfg
    if block._modules.get("mlp") is None:
        return None
    own, where = block._modules.get("ln2"), f"layer {index}, norm before the MLP"
    point = f"{name}.ln2.{'hook_out' if view.backend == 'bridge' else 'hook_normalized'}"
    if own is None or own is bridge.norm_behind(block) or getattr(own, "name", None) == _BEHIND_MLP:
        norm, point = view.raw(index).norm if own is None else NO_NORM, f"{name}.mlp.hook_in"
    elif view.backend == "hooked":
        norm = hooked.read_normalization(own, cfg, where)
    else:
        norm = bridge.read_normalization(own.original_component, view.model, (view.d_model,), where)
    reads = ("residual",) if getattr(cfg, "parallel_attn_mlp", False) else ("residual", "attention_out")
    return MlpReads(("middle",) if view.writes_more(index) else reads, norm, point)
