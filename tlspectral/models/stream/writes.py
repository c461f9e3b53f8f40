"""How the heads of a layer write to the residual stream, and how a layer reads from it.

A layer adds `multiplier * N(sum_h z_h W_O + b_O)` for its attention, plus the output of its MLP. z is a head's output
before W_O. N is the norm after the attention (Gemma 2 and 3, OLMo 2) or the identity. With N's scale fixed as in the
run, this is a sum over heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.attention.tolerances import require_close
from tlspectral.models.reading.latent import Latent
from tlspectral.models.reading.layer import RawAttention, projection
from tlspectral.models.reading.norms import Normalization, folded_bias, folded_weight
from tlspectral.models.reading.view import AttentionView, require_causal
from tlspectral.models.running.batches import batch_on
from tlspectral.models.running.passes import require_single_runs

Input = Literal["q", "k", "v"]
"""What a head computes from the residual stream: queries, keys or values."""

INPUT_POINTS: dict[Input, str] = {"q": "query", "k": "key", "v": "value"}
"""The hook point of queries, keys and values, by its name in `AttentionView.hook_names`."""

WRITE_POINTS = ("residual", "middle", "residual_after", "attention_out", "mlp_out", "z")
"""The hook points that show what a layer writes, by their names in `AttentionView.hook_names`."""

Cast = Callable[[Tensor], Tensor]
HeadIndex = slice | list[int]
_ALL = slice(None)


@dataclass(frozen=True)
class HeadWrites:
    """The weights through which the heads of a layer write to the residual stream.

    Attributes:
        w_o, b_o: as stored; b_o is None without a bias. It belongs to no single head.
        norm: norm after the attention; kind "none" without one.
        multiplier: factor on what the layer adds (Granite), otherwise 1.
        cast: converts parameters and activations before computing: `widened` or `in_float64`.
    """

    w_o: Float[Tensor, "heads d_head d_model"]
    b_o: Float[Tensor, "d_model"] | None
    norm: Normalization
    multiplier: float
    cast: Cast

    def token_scale(self, z: Float[Tensor, "batch pos heads d_head"]) -> Float[Tensor, "batch pos"]:
        """Return the factor (1/rms per token) of the norm after the attention; 1 without such a norm.

        z: outputs of all heads before W_O, because the norm acts on the sum of what all heads write.
        """
        if self.norm.kind == "none":
            return self.cast(z).new_ones(z.shape[:2])
        # einops would sum over heads and d_head in the other order and change the last bits (also in `sum_of`).
        total = torch.einsum("bphd,hdm->bpm", self.cast(z), self.w_o)
        return self.norm.token_scale(total if self.b_o is None else total + self.b_o)

    def scaled(self, z: Float[Tensor, "batch pos heads d_head"]) -> Float[Tensor, "batch pos heads d_head"]:
        """Return z of all heads times `token_scale`. Its product with `effective` is the write of the heads.

        z: outputs of all heads before W_O.
        """
        return self.cast(z) * self.token_scale(z)[..., None, None]

    def written(
        self,
        z: Float[Tensor, "batch pos chosen d_head"],
        scale: Float[Tensor, "batch pos"],
        heads: list[int] | None = None,
    ) -> Float[Tensor, "chosen batch pos d_model"]:
        """Return the write of each given head (None: all) to the residual stream.

        z: outputs of these heads before W_O. scale: `token_scale` of the run.
        """
        return einsum(
            self.cast(z) * scale[..., None, None],
            self.effective(heads),
            "batch pos head d_head, head d_head d_model -> head batch pos d_model",
        )

    def effective(self, heads: HeadIndex | None = None) -> Float[Tensor, "chosen d_head d_model"]:
        """Return W_O of `heads` (None: all), [chosen, d_head, d_model], with multiplier and gain of the norm after it;
        centred for LayerNorm.
        """
        return self._added(self.w_o if heads is None else self.w_o[heads])

    def sum_of(
        self,
        z: Float[Tensor, "batch pos chosen d_head"],
        scale: Float[Tensor, "batch pos"],
        heads: list[int] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the sum of what these heads (None: all) add to the residual stream; no copy of the stream per head.

        z: outputs of these heads before W_O. scale: `token_scale` of the run.
        """
        return torch.einsum("bphd,hdm->bpm", self.cast(z) * scale[..., None, None], self.effective(heads))

    def of_biases(self, scale: Float[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the part of the attention's output that is from no head: from b_O and the bias of the norm after it.

        scale: `token_scale` of the run.
        """
        bias = self.w_o.new_zeros(self.w_o.shape[-1]) if self.b_o is None else self.b_o
        added = self._added(bias) * scale[..., None]
        if self.norm.bias is None:
            return added
        return added + self.multiplier * self.cast(self.norm.bias).to(added.dtype).to(added.device)

    def _added(self, write: Tensor) -> Tensor:
        """Return the contribution of a vector after W_O to the residual stream: centred for LayerNorm, times gain and
        multiplier.

        write: tensor whose last axis is d_model. The norm's 1/rms per token is not applied.
        """
        write = self.norm.centred(write)
        if self.multiplier != 1.0:
            write = write * self.multiplier
        # This order matters: without float64 on the device, `cast` returns a tensor on the CPU.
        gain = self.norm.gain
        return write if gain is None else write * self.cast(gain).to(write.dtype).to(write.device)


def head_writes(view: AttentionView, index: int, cast: Cast) -> HeadWrites:
    """Return the `HeadWrites` of a layer: its W_O, b_O, the norm after the attention and the multiplier.

    view: the model. index: the layer. cast: converts parameters before computing; the result is differentiable if
    `cast` is. Raises BadHead if the layer does not exist.
    """
    b_o, norm, multiplier = view.behind(index)
    return HeadWrites(cast(view.raw(index).w_o), None if b_o is None else cast(b_o), norm, multiplier, cast)


def z_of(captured: Float[Tensor, "batch pos *width"], w_o: Tensor) -> Float[Tensor, "batch pos heads d_head"]:
    """Return z, the heads' outputs before W_O, by head.

    captured: activation at the hook point of z; some bridges join all heads there. w_o: W_O [heads, d_head, d_model],
    which gives the sizes.
    """
    return captured.reshape(*captured.shape[:2], *w_o.shape[:2])


def require_stream(view: AttentionView) -> None:
    """Raise UnsupportedArchitecture unless the residual stream of the model in `view` is a sum of separate writes.

    Encoders are refused, because their norms act on the stream, and so are models that run a layer several times.
    """
    require_causal(view, "its norms act on the residual stream, which is not a sum of what heads and MLPs write")
    require_single_runs(view)


@torch.no_grad()
def checked_writes(view: AttentionView, index: int, captured: Mapping[str, Tensor], cast: Cast) -> HeadWrites | None:
    """Return the `HeadWrites` of a layer (None without heads) after a check that its stream is the sum of its writes.

    The check: the layer's output is its input plus the writes of heads, biases and MLP. In a layer with a mixer, the
    mixer's write is whatever remains, so only the sum of the heads and the MLP's write are checked.

    view: the model. index: the layer. captured: activations of a run, from hook point name to tensor, with the points
    `WRITE_POINTS` that the layer has. cast: converts parameters and activations before computing. Raises
    UnsupportedArchitecture if a sum does not match.
    """
    names = view.hook_names(index)
    writes = head_writes(view, index, cast) if index in view.layers else None
    points = ("residual", "residual_after", *(() if writes is None else ("attention_out", "z")))
    missing = [names[point] for point in points if names[point] not in captured]
    if missing:
        raise UnsupportedArchitecture(
            f"layer {index}: {missing[0]} never fires, so the writes of this layer cannot be verified: this call needs "
            "a model that shows its writes at this hook point"
        )
    # Everything is moved to one device, because in a model spread over devices the stream can change it in a layer.
    stored, device = captured[names["residual"]].dtype, cast(captured[names["residual_after"]]).device
    seen = {point: cast(captured[name]).to(device) for point, name in names.items() if name in captured}
    undefined = "the share of one head is not defined"
    if writes is not None:
        z = z_of(seen["z"].to(writes.w_o.device), writes.w_o)
        scale = writes.token_scale(z)
        rebuilt = (writes.sum_of(z, scale) + writes.of_biases(scale)).to(device)
        problem = "the attention's output is not the sum of what its heads and biases write"
        seen["attention_out"] = seen["attention_out"] * view.attention_factor(index)
        require_equal_streams(rebuilt, seen["attention_out"], stored, f"layer {index}: {problem}", undefined)
    if view.writes_more(index) and not {"middle", "mlp_out"} <= seen.keys():
        return writes
    before = ("middle",) if view.writes_more(index) else ("residual", "attention_out")
    total = torch.stack([seen[point] for point in (*before, "mlp_out") if point in seen]).sum(0)
    problem = "the residual stream is not the sum of its input and what attention and MLP add"
    require_equal_streams(total, seen["residual_after"], stored, f"layer {index}: {problem}", undefined)
    return writes


def mixed(
    view: AttentionView,
    index: int,
    captured: Mapping[str, Tensor],
    cast: Cast,
    behind: Literal["residual_after", "middle"] = "residual_after",
) -> Tensor:
    """Return a layer's write besides heads and MLP, [batch, pos, d_model]: its output minus its input and minus their
    writes.

    view: the model. index: the layer. captured: activations of a run, from hook point name to tensor. cast: converts
    activations before computing. behind: "residual_after", or "middle" to stop before the MLP. An MLP without a hook
    point is included.
    """
    names = view.hook_names(index)
    remainder = cast(captured[names[behind]])
    for point, factor in (("residual", 1.0), ("attention_out", view.attention_factor(index)), ("mlp_out", 1.0)):
        if names.get(point) in captured:
            remainder = remainder - factor * cast(captured[names[point]]).to(remainder.device)
    return remainder


def require_equal_streams(computed: Tensor, expected: Tensor, stored: torch.dtype, problem: str, effect: str) -> None:
    """Raise UnsupportedArchitecture if a stream differs from the sum of its parts by more than rounding.

    computed: the sum. expected: the stream.

    stored: type in which the model stores it. problem, effect: beginning and end of the message.
    """
    require_close(
        (computed - expected).abs().max(),
        expected.abs().max(),
        stored,
        "stream",
        f"{problem}; they differ",
        f"{effect}; look for hooks that edit the residual stream (in Gemma 3n and 4 the stream is never such a sum)",
        UnsupportedArchitecture,
    )


@dataclass(frozen=True)
class LayerReads:
    """Queries, keys or values of some heads as a function of the residual stream, at one hook point.

    They are taken before a query/key norm; in latent attention after the norm of the latent.

    Attributes:
        norm: norm before the projection.
        weight: projection with the gain of `norm` folded in, centred for LayerNorm.
        bias: with the bias of `norm`; None if it is not used. For values the bias of W_V is ignored.
        point: the hook point, by its name in `AttentionView.hook_names`.
        latent: how the latent is read from the stream (as one head); None unless the heads project a latent. `norm` is
            then the latent's norm.
        joint: all heads are one receiver, because they read one latent.
        before, behind: columns of a head at the hook point that come before and after the columns of `weight`.
    """

    norm: Normalization
    weight: Float[Tensor, "heads d_in d_head"]
    bias: Float[Tensor, "heads d_head"] | None = None
    point: str = ""
    latent: "LayerReads | None" = None
    joint: bool = False
    before: int = 0
    behind: int = 0

    def from_stream(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch heads d_head"]:
        """Return the heads' queries, keys or values (before a query/key norm) from the residual stream x."""
        x = self._input(x)
        projected = _projected(self.norm.centred(x) * self.norm.token_scale(x)[..., None], self.weight)
        return projected if self.bias is None else projected + self.bias

    def change(
        self, x: Float[Tensor, "*batch d_model"], removed: Float[Tensor, "*copies d_model"], heads: HeadIndex = _ALL
    ) -> Float[Tensor, "*copies chosen d_head"]:
        """Return how the heads' queries, keys or values change if `removed` is subtracted from the stream x.

        The norms are computed again. With P the projection without the norm, and r and r' 1/rms before and after, the
        change is `(r' - r) P x - r' P removed`. It is exactly 0 if `removed` is 0. `removed` can have more axes in
        front of the axes of x.
        """
        x, removed = self._centred(x, removed)
        before, after = (self.norm.scale_of_centred(part)[..., None, None] for part in (x, x - removed))
        of_x, of_removed = (_projected(part, self.weight[heads]) for part in (x, removed))
        return (after - before) * of_x - after * of_removed

    def change_of_each(
        self,
        x: Float[Tensor, "batch pos d_model"],
        removed: Float[Tensor, "receivers batch pos d_model"],
        heads: HeadIndex,
    ) -> Float[Tensor, "batch pos chosen d_head"]:
        """Return how each head's queries, keys or values change if its own `removed` is subtracted from the stream x.

        removed: one change of the stream per head. heads: these heads, as indices or a slice. The norms are computed
        again. The stream x is projected only once.
        """
        x, removed = self._centred(x, removed)
        weight, before = self.weight[heads], self.norm.scale_of_centred(x)
        of_x = x.flatten(0, 1) @ weight  # [heads, tokens, d_head]
        changes = torch.empty_like(of_x)
        at_once = max(1, batch_on(x.device).copied // (x.numel() * x.element_size()))
        # Each head needs a copy of the stream; so many heads are computed at once as the CPU's caches can hold.
        for first in range(0, len(weight), at_once):
            chunk = slice(first, first + at_once)
            after = self.norm.scale_of_centred(x - removed[chunk])
            of_removed = removed[chunk].flatten(1, 2) @ weight[chunk]
            scales = (scale.flatten(1)[..., None] for scale in (after - before, after))
            changes[chunk] = next(scales) * of_x[chunk] - next(scales) * of_removed
        return rearrange(changes, "head (batch pos) d_head -> batch pos head d_head", batch=len(x))

    def gradient(
        self, of_heads: Float[Tensor, "batch pos heads d_head"], x: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "receivers batch pos d_model"]:
        """Return the gradient at each receiver's residual stream from the gradient at queries, keys or values.

        of_heads: the gradient at them. x: the residual stream. A receiver is one head, or all heads if they read one
        latent.
        """
        of_input = einsum(
            of_heads,
            self.weight.to(of_heads),
            "batch pos head d_head, head d_model d_head -> head batch pos d_model",
        )
        of_input = self.norm.gradient(of_input.sum(0, keepdim=True) if self.joint else of_input, self._input(x))
        if self.latent is None:
            return of_input
        return self.latent.norm.gradient(of_input @ self.latent.weight[0].mT.to(of_input), x)

    def by_head(self, captured: Float[Tensor, "batch pos *width"]) -> Float[Tensor, "batch pos heads d_head"]:
        """Return the columns that `weight` computes, by head, from `captured`, the activation at the hook point
        `point`.

        It is a view if the heads stand side by side.
        """
        d_head = self.weight.shape[2]
        by_head = captured.reshape(*captured.shape[:2], -1, self.before + d_head + self.behind)
        return by_head[..., self.before : self.before + d_head]

    def heads_of(self, receivers: list[int]) -> HeadIndex:
        """Return the heads that belong to some receivers of the layer, as indices or a slice.

        A receiver is one head, or all heads if they read one latent.
        """
        if self.joint or receivers == list(range(len(self.weight))):
            return _ALL
        return slice(receivers[0], receivers[0] + 1) if len(receivers) == 1 else receivers

    def _centred(self, x: Tensor, removed: Tensor) -> tuple[Tensor, Tensor]:
        """Return (input of the norm for the stream x, amount that `removed` subtracts from it).

        Both are centred if the norm is a LayerNorm.
        """
        if self.latent is not None:
            x, removed = self._input(x), -self.latent.change(x, removed)[..., 0, :]
        # The norm is later computed on their difference. If most of the stream is removed, a difference of squares
        # would lose the rest in rounding.
        return self.norm.centred(x), self.norm.centred(removed)

    def _input(self, x: Tensor) -> Tensor:
        """Return the input of the norm: the stream x, or in latent attention the latent that is computed from x."""
        return x if self.latent is None else self.latent.from_stream(x)[..., 0, :]


def _projected(x: Float[Tensor, "*batch d_in"], weight: Float[Tensor, "heads d_in d_head"]) -> Tensor:
    """Return x times the weight of each head: [*batch, heads, d_head]."""
    return einsum(x, weight, "... d_in, head d_in d_head -> ... head d_head")


def layer_reads(raw: RawAttention, what: Input, cast: Cast) -> list[LayerReads]:
    """Return how the heads of the layer `raw` (key/value heads for "k", "v") read the stream: a list with one
    `LayerReads` per hook point.

    what: "q", "k" or "v" for queries, keys or values. cast: converts parameters before computing, such as `widened`.

    Gated attention has two for "q": the queries and the gate, both read from the same input. Latent attention has two
    for "k", whose columns stand side by side: columns from the latent, different for each head, and rotating columns
    shared by all heads.
    """
    norm, latent = raw.norm.as_(cast), raw.q_norm if what == "q" else raw.k_norm
    if not isinstance(latent, Latent):
        weight, bias = projection(raw, what, cast)
        own = LayerReads(norm, folded_weight(weight, norm), folded_bias(weight, bias, norm), INPUT_POINTS[what])
        return [own] if what != "q" or raw.w_gate is None else [own, _gate_reads(raw, norm, cast)]
    latent, w_v = latent.as_(cast).behind(norm), cast(raw.w_v)
    rank, content = latent.up.shape[1:]
    down, bias = latent.down[None], latent.bias_or_zero[None]
    read_latent = LayerReads(norm, down[..., :rank], bias[..., :rank])
    norm_of_latent = Normalization("RMS", latent.gain, None, latent.eps)
    w_u = folded_weight(w_v if what == "v" else latent.up, norm_of_latent)
    own = LayerReads(norm_of_latent, w_u, None, "query_up", read_latent)
    if what == "q":
        return [own]
    own = replace(own, point="value", joint=True)  # at this point keys and values of a head stand side by side
    if what == "v":
        return [replace(own, before=content)]
    rotary = LayerReads(norm, down[..., rank:], bias[..., rank:], "key", joint=True, before=rank)
    return [replace(own, behind=w_v.shape[2]), rotary]


def _gate_reads(raw: RawAttention, norm: Normalization, cast: Cast) -> LayerReads:
    """Return how the gate of the layer `raw`, which has gated attention, is computed from the stream, as a
    `LayerReads`.

    norm: input norm of the layer. cast: converts parameters before computing.
    """
    assert raw.w_gate is not None
    weight, bias = cast(raw.w_gate), None if raw.b_gate is None else cast(raw.b_gate)
    read = LayerReads(norm, folded_weight(weight, norm), folded_bias(weight, bias, norm), "gate")
    return replace(read, before=raw.w_q.shape[2]) if raw.gate_behind_queries else read


def change_of_reads(
    reads: list[LayerReads], x: Float[Tensor, "*batch d_model"], removed: Float[Tensor, "*copies d_model"]
) -> Float[Tensor, "*copies heads d_head"]:
    """Return how queries, keys or values of a layer change if `removed` is subtracted from the stream x.

    reads: the list that `layer_reads` returns. The columns of all its hook points stand side by side; a gate's columns
    are left out. The norms are computed again.
    """
    changes = [reading.change(x, removed) for reading in reads if reading.point != "gate"]
    if len(changes) == 1:
        return changes[0]
    n_heads = max(len(reading.weight) for reading in reads)
    return torch.cat([change.expand(*change.shape[:-2], n_heads, -1) for change in changes], dim=-1)
