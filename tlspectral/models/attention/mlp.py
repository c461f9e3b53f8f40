"""What the MLP of a layer reads: the residual stream, with or without the attention of its layer, and a norm before it.

The norm is the MLP's own, that of the attention which parallel blocks share (GPT-J, Phi, Command R), or none (OLMo 2).
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tlspectral.models.attention import bridge, hooked
from tlspectral.models.attention.norms import NO_NORM, Normalization
from tlspectral.models.attention.view import AttentionView

_BEHIND = ("post_feedforward_layernorm",)  # OLMo 2 has no norm in front of its MLP; TransformerLens calls this one ln2


@dataclass(frozen=True)
class MlpReads:
    """What the MLP of one layer reads.

    Attributes:
        layer: index of the layer.
        parallel: the MLP reads what enters the layer; else that and what the attention of the layer adds.
        norm: in front of it; of kind "none" where there is none.
        point: the hook point of what the MLP reads: the output of its own norm, else its input.
    """

    layer: int
    parallel: bool
    norm: Normalization
    point: str

    def stream(self, entering: Tensor, attention: Tensor) -> Tensor:
        """Return the stream that the MLP reads, from what enters the layer and what its attention adds."""
        return entering if self.parallel else entering + attention.to(entering.device)

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
    block, cfg = view.model.blocks[index], view.model.cfg
    if block._modules.get("mlp") is None:
        return None
    own, where = block._modules.get("ln2"), f"layer {index}, norm before the MLP"
    point = f"blocks.{index}.ln2.{'hook_out' if view.backend == 'bridge' else 'hook_normalized'}"
    if own is None or getattr(own, "name", None) in _BEHIND:
        norm, point = view.raw(index).norm if own is None else NO_NORM, f"blocks.{index}.mlp.hook_in"
    elif view.backend == "hooked":
        norm = hooked.read_normalization(own, cfg, where)
    else:
        norm = bridge.read_normalization(own.original_component, view.model, (view.d_model,), where)
    return MlpReads(index, bool(getattr(cfg, "parallel_attn_mlp", False)), norm, point)
