"""What the MLP of a layer reads: the residual stream, with or without the attention of its layer, and a norm before it.

The norm is the MLP's own, that of the attention which parallel blocks share (GPT-J, Phi, Command R), or none (OLMo 2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.attention import bridge, hooked
from tlspectral.models.attention.closeness import require_close
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
        own: the norm's module where the MLP has one of its own, whose output is edited; None where the input of the MLP
            is.
        mlp: the module of the MLP.
    """

    layer: int
    parallel: bool
    norm: Normalization
    own: Any
    mlp: Any

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
        """Return the gradient in the stream `x` of a function whose gradient in what the MLP reads is given."""
        gain = self.norm.gain
        of_read = of_read.reshape(x.shape)
        return self.norm.gradient(of_read if gain is None else of_read * gain.to(of_read), x)

    def placing(self, edit: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return a method that registers a hook of PyTorch and the hook, which edits what the MLP reads."""
        if self.own is not None:
            return self.own.register_forward_hook, lambda module, inputs, output: edit(output)
        return self.mlp.register_forward_pre_hook, lambda module, inputs: (edit(inputs[0]), *inputs[1:])

    def require_own_read(self, read: Tensor, x: Tensor) -> None:
        """Refuse a run whose MLP does not read the normalised stream. Raises UnsupportedArchitecture."""
        expected = self.norm.normalized(x)
        gain, bias = (None if each is None else each.to(expected) for each in (self.norm.gain, self.norm.bias))
        expected = expected if gain is None else expected * gain
        expected = expected if bias is None else expected + bias
        require_close(
            (read.to(expected) - expected).abs().max(),
            expected.abs().max(),
            read.dtype,
            "stream",
            f"layer {self.layer}: the MLP reads something else than the normalised residual stream; they differ",
            "edges into it are not defined; look for hooks that edit the stream or its norm",
            UnsupportedArchitecture,
        )


def mlp_reads(view: AttentionView, index: int) -> MlpReads | None:
    """Return what the MLP of a layer reads; None without one. Raises UnsupportedArchitecture for its norm."""
    block, cfg = view.model.blocks[index], view.model.cfg
    mlp = block._modules.get("mlp")
    if mlp is None:
        return None
    own = block._modules.get("ln2")
    if own is not None and getattr(own, "name", None) in _BEHIND:
        own, norm = None, NO_NORM
    elif own is None:
        norm = view.raw(index).norm  # shared with the attention
    elif view.backend == "hooked":
        norm = hooked._normalization(own, cfg, f"layer {index}, norm before the MLP")
    else:
        where = f"layer {index}, norm before the MLP"
        norm = bridge._normalization(own.original_component, view.model, (view.d_model,), where)
    return MlpReads(index, bool(getattr(cfg, "parallel_attn_mlp", False)), norm, own, mlp)
