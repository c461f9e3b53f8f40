"""`HeadCapture`: activations of some heads of one layer during a run, and the scores and z computed from them."""

from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.algebra.rotary import per_pair
from tlspectral.errors import EditNotHonored
from tlspectral.hooks.probe import require_honoured
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.attention.score_side import Rotation, keys_read
from tlspectral.models.attention.tolerances import require_close
from tlspectral.models.hooking.placing import Hook, holding
from tlspectral.models.reading.layer import AttentionLayer, require_even_scale, softcapped
from tlspectral.models.reading.view import AttentionView
from tlspectral.selection.node_names import head_name


@dataclass(repr=False)
class HeadCapture:
    """Base class of hooks on some heads of one layer: it keeps activations of a run for later hooks of the same run.

    Attributes:
        view: the model.
        layer: the layer's weights, norms folded in.
        heads: indices of query heads of the layer.
        stacked: True if the batch is len(heads) copies of one batch, one after the other. The i-th entry of `heads` is
            then read and edited only in the i-th copy. A head may stand in `heads` several times.
        seen: activations kept so far in this run: dict from thread to dict from short name of the hook point to tensor.
    """

    view: AttentionView
    layer: AttentionLayer
    heads: list[int]
    stacked: bool = field(default=False, kw_only=True)
    seen: dict[int, dict[str, Tensor]] = field(default_factory=dict, kw_only=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.head_names})"

    @property
    def head_names(self) -> str:
        """Names of this object's heads, joined by commas: "L5H1, L5H3"."""
        return ", ".join(head_name(self.layer.layer, head) for head in self.heads)

    @property
    def names(self) -> dict[str, str]:
        """Dict from short names ("query", "scores", "z", ...) to the full names of the layer's hook points."""
        return self.view.hook_names(self.layer.layer)

    def holders(self, *points: str) -> list[Hook]:
        """Return pairs (hook point, hook) that keep the activations at these hook points, given by short names.

        A hook keeps its activation by `hold` and changes nothing. Points that the layer lacks are left out.
        """
        names = self.names
        return [(names[point], partial(self.hold, point)) for point in points if point in names]

    def hold(self, point: str, activation: Tensor, hook: Any = None) -> None:
        """Keep an activation of this run and thread in `seen`, under the short name of its hook point, `point`.

        `hook` is not used.
        """
        self.seen.setdefault(get_ident(), {})[point] = activation

    def taken(self, point: str) -> Tensor:
        """Return an activation that `hold` kept under the short name `point`, and forget it.

        Raises EditNotHonored if `hold` was not called in this run.
        """
        seen = self.seen.get(get_ident(), {})
        if point not in seen:
            raise EditNotHonored(
                f"layer {self.layer.layer}: the hook on {point} did not run: some hooks of the ablation were taken off "
                "the model and others left on; call model.reset_hooks() and put all of them on again"
            )
        return seen.pop(point)

    def selected(self, whole: Tensor, heads: list[int] | None = None, *, heads_axis: int) -> Tensor:
        """Return the entries of some heads of the tensor `whole` along `heads_axis`. Default: this object's heads.

        `whole` has all heads of the layer. In a stacked batch, take the i-th head from the i-th copy of the batch.
        """
        heads = self.heads if heads is None else heads
        copy, head = head_indices(tuple(heads), whole.device)
        if not self.stacked:
            return whole.index_select(heads_axis, head)
        return whole.unflatten(0, (len(heads), -1)).movedim(heads_axis + 1, 1)[copy, head].movedim(0, heads_axis)

    def with_replaced(self, whole: Tensor, replacement: Tensor, *, heads_axis: int) -> Tensor:
        """Return a copy of `whole` in which this object's heads have the values `replacement`.

        `replacement` has the shape that `selected` returns, `heads_axis` is the axis of heads.
        """
        edited, (copy, head) = whole.clone(), head_indices(tuple(self.heads), whole.device)
        if not self.stacked:
            edited.movedim(heads_axis, 0)[head] = replacement.movedim(heads_axis, 0)
            return edited
        copies = edited.unflatten(0, (len(self.heads), -1)).movedim(heads_axis + 1, 1)
        copies[copy, head] = replacement.movedim(heads_axis, 0)
        return edited

    def scores_of_run(self) -> HeadScores:
        """Return the heads' scores, computed from the kept queries, keys and rotation of this run, and forget these.

        Raises EditNotHonored if queries or keys were not kept in this run.
        """
        q, k = self.taken("query"), self.taken("key")
        return self.scores_of(q, k, self.rotation(q.shape[1]))

    def scores_of(self, q: Tensor, k: Tensor, rotation: Rotation | None) -> HeadScores:
        """Return the heads' `HeadScores`, computed from queries `q`, keys `k` and the rotation.

        `q` and `k` are the activations of `hook_q` and `hook_k`. `rotation` has cos and sin of the run, or is None
        without rotary positions. Raises ValueError if the run is longer than the layer's score scale allows.
        """
        require_even_scale(self.layer, self.layer.layer, q.shape[1])
        # Gradients go through gains and folded biases, so these must come from the model's own tensors.
        weights = self.view.raw(self.layer.layer) if torch.is_grad_enabled() else self.layer
        head_scores = HeadScores.of_run(
            weights, self.heads, q, k, rotation, select=partial(self.selected, heads_axis=2)
        )
        return replace(head_scores, layer=self.layer)  # with and without gradients a part sees the same layer

    def rotation(self, n_positions: int) -> Rotation | None:
        """Return the rotary cos and sin that this run applied to this object's heads; None without rotary positions.

        `n_positions` is the number of tokens of the run. Tables that the run showed are taken from `seen` and
        forgotten; a layer that shows none gives its own tables for positions 0, 1, ...
        """
        geometry = self.layer.rotary
        if geometry is None:
            return None
        names = self.names
        seen = self.seen.get(get_ident(), {})
        captured = {names[point]: seen.pop(point) for point in ("cos", "sin") if point in seen}
        tables = self.view.rotary_tables(self.layer.layer, n_positions, captured)
        if tables is None:
            return Rotation(geometry, *geometry.position_tables(n_positions)).of_heads(self.heads)
        cos, sin = (per_pair(table, geometry) for table in tables)
        batched = cos.ndim == geometry.theta.ndim + 2 and len(cos) > 1
        if self.stacked and batched:  # every copy has the same positions
            cos, sin = (table[: len(table) // len(self.heads)] for table in (cos, sin))
        return Rotation(geometry, cos, sin).of_heads(self.heads)

    def require_lengths(self, *lengths: int) -> None:
        """Raise EditNotHonored unless all lengths, in tokens, are equal.

        They differ if the run uses a key/value cache.
        """
        if len(set(lengths)) > 1:
            raise EditNotHonored(
                f"layer {self.layer.layer}: scores, queries and keys of this run have different lengths {lengths}: a "
                "key/value cache is in use; run without it (use_past_kv_cache=False)"
            )

    @torch.no_grad()
    def require_own_scores(self, scores: Tensor, head_scores: HeadScores) -> None:
        """Raise EditNotHonored if the model's scores differ from `head_scores`, computed from its queries and keys.

        `scores` are the model's scaled and capped scores of all heads, `head_scores` the computed scores of this
        object's heads. Unmasked pairs of the first sequence are compared.
        """
        # ALiBi is subtracted below: implementations differ by a constant in each query's row.
        rebuilt = softcapped(head_scores.first().whole(), self.layer.softcap)
        scores = self.selected(scores, heads_axis=1)[:1]
        visible = self.visible(scores)
        off = scores.to(rebuilt) - rebuilt
        if self.layer.alibi is not None:
            off = off - self.layer.alibi.bias(torch.arange(scores.shape[-1]))[self.heads][:, None].to(off)
            # The softmax does not depend on a constant per row.
            off = off - off.masked_fill(~visible, 0.0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
        worst, largest = (x.masked_fill(~visible, 0.0).abs().amax((0, 2, 3)) for x in (off, scores.to(rebuilt)))
        require_close(
            worst,  # per head, because heads differ in the size of their scores
            largest,
            scores.dtype,
            "live scores",
            [
                f"layer {self.layer.layer}, head {head}: the model's scores do not follow from this run's queries and "
                "keys; they differ"
                for head in self.heads
            ],
            "the part cannot be removed from such scores: enter the ablation after hooks that edit queries or keys, "
            "and check whether tls.verify_scores passes on this model",
            EditNotHonored,
        )

    def prove_scores(self) -> None:
        """Raise EditNotHonored unless a short run shows that edits of the scores change the logits.

        Also raises if the model's scores do not follow from its queries and keys.
        """
        require_honoured(self.view, self.layer.layer, "scores", checks=partial(own_scores_required, self.view))

    def values(self, captured: Tensor, like: Tensor) -> Float[Tensor, "batch heads pos d_head"]:
        """Return the values that each of this object's heads reads, from the activation `captured` of `hook_v`.

        They get the dtype and device of the tensor `like`. Heads that share values get copies.
        """
        by_head = self.layer.values(captured)
        heads = keys_read(self.heads, self.layer.n_heads, by_head.shape[2])
        return self.selected(by_head, heads, heads_axis=2).transpose(1, 2).to(like)

    def visible(self, scores: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Return a mask with the shape of `scores`: True where the query may attend to the key.

        `scores` are scores of this layer as the model shows them, [..., query, key].
        """
        return self.view.reader.unmasked(self.view.model, self.layer.layer, scores)

    def require_own_z(self, z: Float[Tensor, "batch pos heads d_head"], rebuilt: Tensor, *, delegated: bool) -> None:
        """Raise EditNotHonored if the run's `z` differs from `rebuilt`, which was computed from its scores and values.

        z is the output of this object's heads before W_O; both tensors have one shape. `delegated`: True if the bridge
        computes attention itself and shows no scores. Otherwise tokens at which `rebuilt` is 0 in all heads are padding
        and are not compared.
        """
        # Compared per token: one padded sequence must not be hidden in a large batch.
        blind = (rebuilt.detach() == 0).flatten(2).all(-1) & (not delegated)
        off, size = (x.detach().flatten(2).norm(dim=-1) for x in (rebuilt - z.to(rebuilt), z.to(rebuilt)))
        text_and_advice = (
            f"layer {self.layer.layer}: z of this run does not follow from its scores and values; they differ",
            "enter the context after all hooks that edit scores, patterns, values or z of this layer (attention sinks "
            "are not supported)",
        )
        if delegated:
            text_and_advice = self.not_of_own_keys("output")
        off = off.masked_fill(blind, 0.0)
        require_close(off, size.clamp_min(size.mean()), z.dtype, "live z", *text_and_advice, EditNotHonored)

    def not_of_own_keys(self, what: str) -> tuple[str, str]:
        """Return two texts for an error of a layer whose bridge computes attention itself: the problem, and the advice.

        `what` is the quantity that does not follow from the run's own keys, such as "pattern".
        """
        return (
            f"layer {self.layer.layer}: this bridge computes attention itself, and its {what} of heads {self.heads} "
            "does not follow from this run's own keys; they differ",
            "run without a key/value cache (use_past_kv_cache=False), padding, or other hooks and open contexts on "
            "these heads, or load the model with another backend",
        )


def own_scores_required(view: AttentionView, layer: int) -> list[Hook]:
    """Return hooks that raise EditNotHonored if a layer's scores do not follow from its queries and keys.

    The result is a list of pairs (hook point, hook). The hooks keep queries and keys of the run and compare them with
    its scores; they change no activation. `view` is the model.
    """
    names, held = view.hook_names(layer), {}

    def compare(scores: Tensor, hook: Any) -> None:
        # The weights are read inside the hook: hooks of all layers then hold one layer's weights at a time.
        folded = view.layer(layer)
        every_head = HeadCapture(view, folded, list(range(folded.n_heads)))
        for point in points:
            if names[point] in held:
                every_head.hold(point, held.pop(names[point]))
        every_head.require_own_scores(scores, every_head.scores_of_run())

    points = [point for point in ("query", "key", "cos", "sin") if point in names]
    return [*holding(held, (names[point] for point in points)), (names["scores"], compare)]


@lru_cache(maxsize=256)
def head_indices(heads: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two index tensors [heads] on a device: 0, 1, 2, ... (one for each head), and the heads.

    The result is cached, because lists would be copied to a GPU at each use.
    """
    with torch.inference_mode(False):
        return torch.arange(len(heads), device=device), torch.tensor(heads, dtype=torch.long, device=device)
