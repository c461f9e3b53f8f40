"""What the heads of a layer write to the residual stream, and what a layer reads from it.

A layer adds `multiplier * N(sum_h z_h W_O + b_O)` of its attention and the output of its MLP, N the norm behind the
attention where there is one (Gemma 2 and 3, OLMo 2), else the identity. With the scale of N as the run has it, that is
a sum over heads.
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
"""What a head computes from the residual stream: its queries, keys or values."""

INPUT_POINTS: dict[Input, str] = {"q": "query", "k": "key", "v": "value"}
"""The hook point of each input, by its name in `AttentionView.hook_names`."""

WRITE_POINTS = ("residual", "middle", "residual_after", "attention_out", "mlp_out", "z")
"""The hook points of a layer that show what it writes, by their names in `AttentionView.hook_names`."""

Cast = Callable[[Tensor], Tensor]
HeadIndex = slice | list[int]
_ALL = slice(None)


@dataclass(frozen=True)
class HeadWrites:
    """How the heads of a layer write to the residual stream.

    Attributes:
        w_o, b_o: as stored; b_o None where there is none. It belongs to no head.
        norm: behind the attention; of kind "none" where there is none.
        multiplier: factor on what the layer adds (Granite), else 1.
        cast: of parameters and activations that are computed with: `widened` or `in_float64`.
    """

    w_o: Float[Tensor, "heads d_head d_model"]
    b_o: Float[Tensor, "d_model"] | None
    norm: Normalization
    multiplier: float
    cast: Cast

    def token_scale(self, z: Float[Tensor, "batch pos heads d_head"]) -> Float[Tensor, "batch pos"]:
        """Return the scale of the norm behind the attention, 1/rms of each token; 1 without such a norm.

        `z` is of all heads, since the norm runs over their sum.
        """
        if self.norm.kind == "none":
            return self.cast(z).new_ones(z.shape[:2])
        # Not einops: it would sum over heads and d_head in the other order, which moves the last bits. So in `sum_of`.
        total = torch.einsum("bphd,hdm->bpm", self.cast(z), self.w_o)
        return self.norm.token_scale(total if self.b_o is None else total + self.b_o)

    def scaled(self, z: Float[Tensor, "batch pos heads d_head"]) -> Float[Tensor, "batch pos heads d_head"]:
        """Return z of all heads times `token_scale`, of which `effective` makes what they write."""
        return self.cast(z) * self.token_scale(z)[..., None, None]

    def written(
        self,
        z: Float[Tensor, "batch pos chosen d_head"],
        scale: Float[Tensor, "batch pos"],
        heads: list[int] | None = None,
    ) -> Float[Tensor, "chosen batch pos d_model"]:
        """Return what these heads (None: all) add to the residual stream, linear in `z` at a given `token_scale`."""
        return einsum(
            self.cast(z) * scale[..., None, None],
            self.effective(heads),
            "batch pos head d_head, head d_head d_model -> head batch pos d_model",
        )

    def effective(self, heads: HeadIndex | None = None) -> Float[Tensor, "chosen d_head d_model"]:
        """Return W_O of these heads (None: all) with multiplier and gain of the norm behind, centred under LN."""
        return self._added(self.w_o if heads is None else self.w_o[heads])

    def sum_of(
        self,
        z: Float[Tensor, "batch pos chosen d_head"],
        scale: Float[Tensor, "batch pos"],
        heads: list[int] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return what these heads (None: all) add together, without one copy of the stream per head."""
        return torch.einsum("bphd,hdm->bpm", self.cast(z) * scale[..., None, None], self.effective(heads))

    def of_biases(self, scale: Float[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """Return what the attention adds that belongs to no head: b_O, and the bias of the norm behind."""
        bias = self.w_o.new_zeros(self.w_o.shape[-1]) if self.b_o is None else self.b_o
        added = self._added(bias) * scale[..., None]
        if self.norm.bias is None:
            return added
        return added + self.multiplier * self.cast(self.norm.bias).to(added.dtype).to(added.device)

    def _added(self, written: Tensor) -> Tensor:
        written = self.norm.centred(written)
        if self.multiplier != 1.0:
            written = written * self.multiplier
        # Cast, then the type, then the device: float64 is only on the CPU where the device has no such type.
        gain = self.norm.gain
        return written if gain is None else written * self.cast(gain).to(written.dtype).to(written.device)


def head_writes(view: AttentionView, index: int, cast: Cast) -> HeadWrites:
    """Return how the heads of a layer write; differentiable where `cast` is. Raises BadHead for no layer."""
    b_o, norm, multiplier = view.behind(index)
    return HeadWrites(cast(view.raw(index).w_o), None if b_o is None else cast(b_o), norm, multiplier, cast)


def z_of(captured: Float[Tensor, "batch pos *width"], w_o: Tensor) -> Float[Tensor, "batch pos heads d_head"]:
    """Return z head by head; some bridges hand on all heads side by side."""
    return captured.reshape(*captured.shape[:2], *w_o.shape[:2])


def require_stream(view: AttentionView) -> None:
    """Refuse a model in which writes to the residual stream are not told apart. Raises UnsupportedArchitecture."""
    require_causal(view, "its norms act on the residual stream, which is no sum of what heads and MLPs write")
    require_single_runs(view)


@torch.no_grad()
def checked_writes(view: AttentionView, index: int, captured: Mapping[str, Tensor], cast: Cast) -> HeadWrites | None:
    """Return how the heads of a layer write, None without heads, if its stream is the sum of what is written to it.

    That is what it read plus what heads, biases and MLP write. In a layer that writes more, a mixer's write is what is
    left, so that only the sum of its heads, and what its MLP adds, are checked. `captured` is what
    `capture_until` returns of a run, with the points of `WRITE_POINTS` that the layer has. Raises
    UnsupportedArchitecture.
    """
    names = view.hook_names(index)
    writes = head_writes(view, index, cast) if index in view.layers else None
    points = ("residual", "residual_after", *(() if writes is None else ("attention_out", "z")))
    missing = [names[point] for point in points if names[point] not in captured]
    if missing:
        raise UnsupportedArchitecture(
            f"layer {index}: {missing[0]} never fires, so it cannot be checked what is written to the stream"
        )
    # On one device: the stream of a model spread over several moves inside a layer. `cast` may move it too.
    stored, device = captured[names["residual"]].dtype, cast(captured[names["residual_after"]]).device
    seen = {point: cast(captured[name]).to(device) for point, name in names.items() if name in captured}
    undefined = "the share of one head is not defined"
    if writes is not None:
        z = z_of(seen["z"].to(writes.w_o.device), writes.w_o)
        scale = writes.token_scale(z)
        rebuilt = (writes.sum_of(z, scale) + writes.of_biases(scale)).to(device)
        problem = "the attention adds something else than what its heads and biases write"
        seen["attention_out"] = seen["attention_out"] * view.attention_factor(index)
        require_equal_streams(rebuilt, seen["attention_out"], stored, f"layer {index}: {problem}", undefined)
    if view.writes_more(index) and not {"middle", "mlp_out"} <= seen.keys():
        return writes
    before = ("middle",) if view.writes_more(index) else ("residual", "attention_out")
    total = torch.stack([seen[point] for point in (*before, "mlp_out") if point in seen]).sum(0)
    problem = "the residual stream is no sum of what attention and MLP add"
    require_equal_streams(total, seen["residual_after"], stored, f"layer {index}: {problem}", undefined)
    return writes


def mixed(
    view: AttentionView,
    index: int,
    captured: Mapping[str, Tensor],
    cast: Cast,
    behind: Literal["residual_after", "middle"] = "residual_after",
) -> Tensor:
    """Return what a layer writes beside its heads and MLP: what leaves it, less what enters it and what these add.

    Without a hook point for the MLP it holds that too. `captured` is as for `checked_writes`; with `behind="middle"` it
    is of the run up to the MLP.
    """
    names = view.hook_names(index)
    written = cast(captured[names[behind]])
    for point, factor in (("residual", 1.0), ("attention_out", view.attention_factor(index)), ("mlp_out", 1.0)):
        if names.get(point) in captured:
            written = written - factor * cast(captured[names[point]]).to(written.device)
    return written


def require_equal_streams(found: Tensor, expected: Tensor, stored: torch.dtype, problem: str, effect: str) -> None:
    """Refuse a residual stream, stored as a type, that is not the sum of its parts. Raises UnsupportedArchitecture."""
    require_close(
        (found - expected).abs().max(),
        expected.abs().max(),
        stored,
        "stream",
        f"{problem}; they differ",
        f"{effect}; so it is in Gemma 3n and 4, and under hooks that edit the residual stream",
        UnsupportedArchitecture,
    )


@dataclass(frozen=True)
class LayerReads:
    """What passes one hook point of some heads of a layer, as a function of the residual stream.

    That is queries, keys or values before a query/key norm, behind the norm of a latent that they are projected from.

    Attributes:
        norm: of the input of the projection.
        weight: with the gain of `norm` folded in, centred under LayerNorm.
        bias: with the bias of `norm`; None where it is not read. For values the bias of W_V is ignored.
        point: the hook point, by its name in `AttentionView.hook_names`.
        latent: how the latent is read from the stream, of one head, where the heads project a latent; `norm` is then
            the latent's.
        joint: all heads are one receiver, since they read one latent.
        before, behind: columns of each head at the hook point that stand before and behind the columns of `weight`.
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
        """Return what the heads read of a residual stream."""
        x = self._input(x)
        projected = _projected(self.norm.centred(x) * self.norm.token_scale(x)[..., None], self.weight)
        return projected if self.bias is None else projected + self.bias

    def change(
        self, x: Float[Tensor, "*batch d_model"], removed: Float[Tensor, "*copies d_model"], heads: HeadIndex = _ALL
    ) -> Float[Tensor, "*copies chosen d_head"]:
        """Return what heads read of `x - removed` less what they read of `x`, the norms taken again; 0 if 0 is removed.

        With P the projection without the norm, r and r' 1/rms before and after, it is `(r' - r) P x - r' P removed`.
        `removed` has the axes of `x` behind axes of its own.
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
        """Return `change` of heads of which each has its own `removed`; `x` is projected once."""
        x, removed = self._centred(x, removed)
        weight, before = self.weight[heads], self.norm.scale_of_centred(x)
        of_x = x.flatten(0, 1) @ weight  # [heads, tokens, d_head]
        changes = torch.empty_like(of_x)
        at_once = max(1, batch_on(x.device).copied // (x.numel() * x.element_size()))
        # Each head takes a copy of the stream: as many at once as caches hold.
        for first in range(0, len(weight), at_once):
            some = slice(first, first + at_once)
            after = self.norm.scale_of_centred(x - removed[some])
            of_removed = removed[some].flatten(1, 2) @ weight[some]
            scales = (scale.flatten(1)[..., None] for scale in (after - before, after))
            changes[some] = next(scales) * of_x[some] - next(scales) * of_removed
        return rearrange(changes, "head (batch pos) d_head -> batch pos head d_head", batch=len(x))

    def gradient(
        self, of_heads: Float[Tensor, "batch pos heads d_head"], x: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "receivers batch pos d_model"]:
        """Carry a gradient at what the heads read back to the stream of each receiver."""
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
        """Return the columns of `weight` of what passes the hook point, a view where the heads stand side by side."""
        d_head = self.weight.shape[2]
        by_head = captured.reshape(*captured.shape[:2], -1, self.before + d_head + self.behind)
        return by_head[..., self.before : self.before + d_head]

    def heads_of(self, receivers: list[int]) -> HeadIndex:
        """Return the heads of some receivers of the layer."""
        if self.joint or receivers == list(range(len(self.weight))):
            return _ALL
        return slice(receivers[0], receivers[0] + 1) if len(receivers) == 1 else receivers

    def _centred(self, x: Tensor, removed: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the norm reads of the stream, and what is removed from that, both without their means."""
        if self.latent is not None:
            x, removed = self._input(x), -self.latent.change(x, removed)[..., 0, :]
        # The norm is then taken of their difference: where most of the stream is removed, a difference of squares would
        # round the rest away.
        return self.norm.centred(x), self.norm.centred(removed)

    def _input(self, x: Tensor) -> Tensor:
        return x if self.latent is None else self.latent.from_stream(x)[..., 0, :]


def _projected(x: Float[Tensor, "*batch d_in"], weight: Float[Tensor, "heads d_in d_head"]) -> Tensor:
    return einsum(x, weight, "... d_in, head d_in d_head -> ... head d_head")


def layer_reads(raw: RawAttention, what: Input, cast: Cast) -> list[LayerReads]:
    """Return the reading side of the heads of a layer (key/value heads for `"k"` and `"v"`), one for each hook point.

    Two are of the queries of gated attention, of which the gate reads what the queries read.
    Two are of the keys of latent attention, their columns side by side: those from the latent, of each head, and those
    that rotate, which all heads share.
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
    own = replace(own, point="value", joint=True)  # keys and values of a head stand side by side there
    if what == "v":
        return [replace(own, before=content)]
    rotary = LayerReads(norm, down[..., rank:], bias[..., rank:], "key", joint=True, before=rank)
    return [replace(own, behind=w_v.shape[2]), rotary]


def _gate_reads(raw: RawAttention, norm: Normalization, cast: Cast) -> LayerReads:
    assert raw.w_gate is not None
    weight, bias = cast(raw.w_gate), None if raw.b_gate is None else cast(raw.b_gate)
    read = LayerReads(norm, folded_weight(weight, norm), folded_bias(weight, bias, norm), "gate")
    return replace(read, before=raw.w_q.shape[2]) if raw.gate_behind_queries else read


def change_of_reads(
    reads: list[LayerReads], x: Float[Tensor, "*batch d_model"], removed: Float[Tensor, "*copies d_model"]
) -> Float[Tensor, "*copies heads d_head"]:
    """Return `LayerReads.change` of all columns of `layer_reads`, without a gate's columns."""
    changes = [one.change(x, removed) for one in reads if one.point != "gate"]
    if len(changes) == 1:
        return changes[0]
    n_heads = max(len(one.weight) for one in reads)
    return torch.cat([change.expand(*change.shape[:-2], n_heads, -1) for change in changes], dim=-1)
