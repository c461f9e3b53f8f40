"""`ablate`: remove a part of some heads' query-key operators while a model runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import get_ident
from typing import Any, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tlspectral.errors import EditNotHonored
from tlspectral.hooks.arguments import Frequencies, Reach, check_arguments, chosen_pairs
from tlspectral.hooks.generation import generating_without_cache
from tlspectral.hooks.parts import Part, Projection, Removal, Rotation, project, removal, whole_scores
from tlspectral.hooks.probe import require_honoured, require_own_scores
from tlspectral.hooks.replacement import Replace, Replacement, replacements
from tlspectral.models.attention import (
    AttentionLayer,
    AttentionView,
    QueryKeyNorm,
    attention_view,
    folded_bias,
    require_even_scale,
)
from tlspectral.models.attention.selection import heads_by_layer
from tlspectral.models.attention.threads import exclusive, hooks_on
from tlspectral.rotary import RotaryGeometry, per_pair, widened
from tlspectral.selection import Heads, Symbol, chosen_part

PARTS: tuple[Part, ...] = get_args(Part)


@contextmanager
def ablate(
    model: Any,
    heads: Heads,
    part: Part | Symbol,
    *,
    frequencies: Frequencies = None,
    include_bias: bool = False,
    replace: Replace = "zero",
    reference: Int[Tensor, "sequences pos"] | None = None,
    seed: int = 0,
    window: int | None = None,
    sinks: int = 0,
) -> Iterator[Any]:
    """Remove a part of the given heads' scores inside a `with` block; the model is as before when the block ends.

    What is removed (with C, D of `tlspectral.hooks.parts`):

    * `"rope_phase"`: Im(M_t), the part of the score that is odd in the offset; of some frequencies if given.
    * `"antisymmetric"`: M_A, so that content acts by M_S; the phase is left alone.
    * `"symmetric"`: M_S, so that content acts by M_A; the phase is left alone.
    * `"rotary_band"`: everything that the given frequencies contribute.
    * `"output"`: everything that the head writes. `replace` says what z becomes: 0; its mean over sequences; or its z
      on another sequence.
    * `"long_range"`: the keys between the first `sinks` tokens and the last `window`.

    `generate` and `generate_stream` run without their key/value cache inside the block, whatever `use_past_kv_cache`
    says: cached keys are those of earlier positions alone, and a part needs the queries too. The text is the same.

    Biases, ALiBi, windows and masks stay as they are, unless `include_bias` adds the bias terms to a part of the
    scores: the operator on tokens with a 1 appended. Works with `run_with_cache`, `run_with_hooks`, gradients and hooks
    of your own: enter it after hooks that edit queries and keys, which it then sees. Two contexts on different heads
    act like one on both; on the same head they need not add up.

    Args:
        model: a TransformerBridge or HookedTransformer; the block's `as` target.
        heads: "L5H1", (5, 1), a table row, a list of these over any layers, or a DataFrame with `layer` and `head`;
            an empty list changes nothing.
        part: what is removed, by name or as `"M_S"`, `"M_A"`, `"Im(M_t)"`.
        frequencies: indices of rotary pairs (0 is the model's first) or a boolean mask over them.
        include_bias: see above.
        replace: `"mean"` is taken at each position where the run has the reference's length, else over all positions
            too. `"resample"` needs that length; each sequence of a run gets that of one other, the same in every head.
        reference: token ids without padding, that means and other sequences come from; they are run once, at the start
            of the block, under the hooks on the model by then. None: the sequences of each run itself, every position
            counted, never a sequence for itself. Batches then differ, so give a reference where a loss is computed.
        seed: of the draw of other sequences, which is the same in each run.
        window, sinks: of `long_range`; the token itself counts in the window, and padding is no first token.

    Raises:
        BadHead: a head that does not exist.
        UnsupportedArchitecture: `rope_phase` or `rotary_band` on a layer without rotary positions.
        ValueError: an unknown part, frequencies that do not exist, arguments that do not go with the part, or a
            reference that is no token ids of the model or looks padded.
        EditNotHonored: the model discards the edit, or its scores are not those of the operators; the model is given a
            key/value cache, or a later hook edits queries or keys (raised as the model runs); the hooks were taken off
            inside the block, by `reset_hooks` (raised at its end, unless another exception is raised); or a second
            thread opens a block on the model or runs it while a block is open.
        ValueError, as the model runs: a prompt beyond the length up to which the model's score scale holds (Ministral
            3; `attrs["rotary_valid_up_to"]` of the head table); one sequence that is its own reference; or sequences
            to resample that are of another length.

    What it does not establish: that training needed the part. And an effect alone says little: the parts differ in
    size.
    """
    with exclusive(attention_view(model).model, block=True):
        hooks = ablation_hooks(
            model,
            heads,
            part,
            frequencies=frequencies,
            include_bias=include_bias,
            replace=replace,
            reference=reference,
            seed=seed,
            window=window,
            sinks=sinks,
        )
        with hooks_on(model, model.hook_dict, hooks), generating_without_cache(model):
            yield model


def ablation_hooks(
    model: Any,
    heads: Heads,
    part: Part | Symbol,
    *,
    frequencies: Frequencies = None,
    include_bias: bool = False,
    replace: Replace = "zero",
    reference: Int[Tensor, "sequences pos"] | None = None,
    seed: int = 0,
    window: int | None = None,
    sinks: int = 0,
) -> list[tuple[str, Callable[..., Any]]]:
    """Return the hooks of `ablate` as a TransformerLens `fwd_hooks` list, with the same arguments and errors.

    They keep a run's queries and keys between the hook points of one layer, so use a list in one run at a time. As
    TransformerLens adds and removes hooks for all threads at once, use it in one thread at a time too; `ablate` refuses
    a second one.
    """
    removed = chosen_part(part, PARTS)
    check_arguments(
        removed, frequencies, include_bias, replace=replace, reference=reference, window=window, sinks=sinks
    )
    reach = None if window is None else Reach(window, sinks)
    view = attention_view(model)
    by_layer = heads_by_layer(view, heads)
    written = replacements(view, by_layer, replace, reference, seed)
    hooks: list[tuple[str, Callable[..., Any]]] = []
    for index, chosen in by_layer.items():
        layer = view.layer(index)
        pairs = chosen_pairs(layer, removed, frequencies)
        if pairs is None or bool(pairs.any()):
            ablation = LayerAblation(view, layer, chosen, removed, pairs, include_bias)
            ablation.reach, ablation.replacement = reach, written.get(index)
            hooks += ablation.hooks()
    return hooks


@dataclass
class LayerAblation:
    """The hooks that remove a part from heads of one layer, and the activations that they share within a run.

    Attributes:
        pairs: rotary pairs that the removal is limited to, None for all.
        stacked: the batch is len(heads) copies of one batch, one after the other, and the i-th head of `heads` (which
            may recur) loses its part in the i-th copy alone.
        alter: function of a `Removal` that returns what is added in place of its `difference`. With it, values that do
            not change need not be equal to the bit. Not for `"long_range"`, which adds nothing.
        reach: what the heads still see, for `"long_range"`.
        replacement: of z, for `"output"`; None is 0.
        seen: activations that the hooks of a run have captured so far, by thread.
    """

    view: AttentionView
    layer: AttentionLayer
    heads: list[int]
    part: Part
    pairs: Bool[Tensor, "pairs"] | None = None
    include_bias: bool = False
    stacked: bool = False
    alter: Callable[[Removal], Tensor] | None = None
    reach: Reach | None = None
    replacement: Replacement | None = None
    seen: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def hooks(self) -> list[tuple[str, Callable[..., Any]]]:
        """Return a `fwd_hooks` list whose edits are proved to reach the output, else raise EditNotHonored."""
        names = self.view.hook_names(self.layer.layer)
        if self.part == "output" or "scores" not in names:
            require_honoured(self.view, self.layer.layer, "z")
            if self.part == "output":
                return [(names["z"], self._edit_output)]
            return [*self._holders("query", "key", "value"), (names["z"], self._edit_z)]
        every_head = replace(self, heads=list(range(self.layer.n_heads)), stacked=False, seen={})
        points = ("query", "key", "cos", "sin")
        check = [*every_head._holders(*points), (names["scores"], every_head._compare_scores)]
        require_honoured(self.view, self.layer.layer, "scores", during=check)
        return [*self._holders(*points), (names["scores"], self._edit_scores)]

    def _holders(self, *points: str) -> list[tuple[str, Callable[..., Any]]]:
        names = self.view.hook_names(self.layer.layer)
        return [(names[point], partial(self._hold, point)) for point in points if point in names]

    def _hold(self, point: str, activation: Tensor, hook: Any) -> None:
        self.seen.setdefault(get_ident(), {})[point] = activation

    def _taken(self, point: str) -> Tensor:
        seen = self.seen.get(get_ident(), {})
        if point not in seen:
            raise EditNotHonored(
                f"layer {self.layer.layer}: the {point} of this run was not seen: some of the ablation's hooks were "
                "taken off the model and some left; call model.reset_hooks() and put them on again"
            )
        return seen.pop(point)

    def _edit_scores(self, scores: Float[Tensor, "batch heads query key"], hook: Any) -> Tensor:
        query, key, rotation = self._projections()
        shape = query.whole.shape[-2], key.whole.shape[-2]
        if shape != scores.shape[-2:]:
            raise EditNotHonored(
                f"layer {self.layer.layer}: scores are {tuple(scores.shape[-2:])} but queries and keys of this run "
                f"give {shape}: a key/value cache is in use; run without it "
                "(use_past_kv_cache=False)"
            )
        if self._is_first(hook):  # else the scores may be edited, and the edit is to be kept
            self._require_own_scores(scores, query, key, rotation)
        if self.reach is not None:
            limited = self.reach.limited(self._selected(scores, heads_axis=1))
            return self._with_replaced(scores, limited, heads_axis=1)
        allowed = self._selected(scores > torch.finfo(scores.dtype).min / 2, heads_axis=1)
        difference = self._difference(query, key, rotation, allowed)
        if self.layer.softcap is not None:
            # The change of the capped score is added, so that edits by other hooks are kept here too.
            raw = whole_scores(query, key, rotation, self.layer.score_scale)
            difference = self._capped(raw + difference) - self._capped(raw)
        # Masked entries stay equal to the bit; where nothing is removed, adding 0 keeps them so. In place, so that at
        # most two matrices of the scores' size are in memory.
        change = difference.to(scores).masked_fill_(~allowed, 0.0)
        if not self.stacked:
            return scores.index_add(1, torch.tensor(self.heads, device=scores.device), change)
        edited = scores.clone()
        edited.unflatten(0, (len(self.heads), -1))[range(len(self.heads)), :, self.heads] += change.transpose(0, 1)
        return edited

    def _compare_scores(self, scores: Float[Tensor, "batch heads query key"], hook: Any) -> None:
        self._require_own_scores(scores, *self._projections())

    def _is_first(self, point: Any) -> bool:
        """Return whether `_edit_scores` acts before all other hooks of its hook point."""
        placed = [handle.user_hook for handle in getattr(point, "fwd_hooks", ())]
        return bool(placed) and getattr(placed[0], "hook", placed[0]) == self._edit_scores

    @torch.no_grad()
    def _require_own_scores(
        self, scores: Tensor, query: Projection, key: Projection, rotation: Rotation | None
    ) -> None:
        """Refuse a run whose scores are not those of its queries and keys, by its first sequence."""
        query, key = (Projection(side.whole[:1], side.content[:1], None) for side in (query, key))
        if rotation is not None and rotation.cos.ndim == rotation.geometry.theta.ndim + 2:
            rotation = replace(rotation, cos=rotation.cos[:1], sin=rotation.sin[:1])
        rebuilt = self._capped(whole_scores(query, key, rotation, self.layer.score_scale))
        require_own_scores(self.layer, self.heads, self._selected(scores, heads_axis=1)[:1], rebuilt)

    def _edit_z(self, z: Float[Tensor, "batch pos heads d_head"], hook: Any) -> Tensor:
        value = self._taken("value")
        query, key, rotation = self._projections()
        if query.whole.shape[-2] != value.shape[1] or z.shape[1] != value.shape[1]:
            raise EditNotHonored(
                f"layer {self.layer.layer}: a key/value cache is in use; run without it (use_past_kv_cache=False)"
            )
        scores = whole_scores(query, key, rotation, self.layer.score_scale)
        values = self._selected(value, heads_axis=2, heads=self._key_heads(value)).transpose(1, 2).to(scores)
        allowed = self.view.causal_mask(self.layer.layer, scores.shape[-1]).to(scores.device)

        def mixed(raw: Tensor, visible: Tensor) -> Tensor:
            pattern = self._capped(raw).masked_fill(~visible, -torch.inf).softmax(-1)
            return (pattern @ values).transpose(1, 2)

        before = mixed(scores, allowed)
        selected = self._selected(z, heads_axis=2)
        # Per token, so that one padded sequence in a large batch is seen: measured 4e-7 in float32, 0.011 in bfloat16;
        # padding, which this layer does not show, a cache or an edit of z moves some token by tenths and more.
        allowed_error = 1e-3 if selected.dtype.itemsize >= 4 else 0.1
        off, size = (x.detach().flatten(2).norm(dim=-1) for x in (before - selected.to(before), selected.to(before)))
        if bool((off > allowed_error * size.clamp_min(size.mean())).any()):
            raise EditNotHonored(
                f"layer {self.layer.layer}: this bridge computes attention itself, and its output is not that of "
                "causal attention over this run's own keys; look for a key/value cache (run with "
                "use_past_kv_cache=False), padding, or another hook on z, or ablate on another backend"
            )
        if self.reach is not None:
            after = mixed(scores, allowed & ~self.reach.beyond(allowed))
        else:
            after = mixed(scores + self._difference(query, key, rotation, allowed), allowed)
        change = (after - before).to(z)
        edited = torch.where(change == 0, selected, selected + change) if self.alter is None else selected + change
        return self._with_replaced(z, edited, heads_axis=2)

    def _edit_output(self, z: Float[Tensor, "batch pos heads d_head"], hook: Any) -> Tensor:
        selected = self._selected(z, heads_axis=2)
        replacement = self.replacement
        edited = torch.zeros_like(selected) if replacement is None else replacement.of(selected, self.heads)
        if self.alter is not None:
            edited = selected + self.alter(Removal(-selected.transpose(1, 2), None, None, None, None)).transpose(1, 2)
        return self._with_replaced(z, edited, heads_axis=2)

    def _selected(self, whole: Tensor, *, heads_axis: int, heads: list[int] | None = None) -> Tensor:
        """Select the ablated heads of a tensor. In a stacked batch, head i is taken from copy i."""
        heads = self.heads if heads is None else heads
        if not self.stacked:
            return whole.index_select(heads_axis, torch.tensor(heads, device=whole.device))
        copies = whole.unflatten(0, (len(heads), -1)).movedim(heads_axis + 1, 1)
        return copies[range(len(heads)), heads].movedim(0, heads_axis)

    def _with_replaced(self, whole: Tensor, replacement: Tensor, *, heads_axis: int) -> Tensor:
        """Return a copy of `whole` with the ablated heads replaced."""
        edited = whole.clone()
        if not self.stacked:
            edited.movedim(heads_axis, 0)[self.heads] = replacement.movedim(heads_axis, 0)
            return edited
        copies = edited.unflatten(0, (len(self.heads), -1)).movedim(heads_axis + 1, 1)
        copies[range(len(self.heads)), self.heads] = replacement.movedim(heads_axis, 0)
        return edited

    def _difference(self, query: Projection, key: Projection, rotation: Rotation | None, allowed: Tensor) -> Tensor:
        """Return what is added to the scaled scores, before a softcap."""
        difference = removal(
            self.part, query, key, rotation, self.layer, pairs=self.pairs, include_bias=self.include_bias
        )
        if self.alter is None:
            return difference
        return self.alter(Removal(difference, allowed, query, key, rotation))

    def _projections(self) -> tuple[Projection, Projection, Rotation | None]:
        q, k = self._taken("query"), self._taken("key")
        layer = self.layer
        require_even_scale(layer, layer.layer, q.shape[1])
        kv_heads = [layer.kv_head(head) for head in self.heads]
        b_q, b_k, q_norm, k_norm = layer.b_q, layer.b_k, layer.q_norm, layer.k_norm
        if torch.is_grad_enabled():  # folded biases depend on the weights, and gradients go through them and the gains
            raw = self.view.raw(layer.layer)
            b_q, b_k = folded_bias(raw.w_q, raw.b_q, raw.norm), folded_bias(raw.w_k, raw.b_k, raw.norm)
            q_norm, k_norm = raw.q_norm, raw.k_norm
        spectral = None if layer.rotary is None else layer.rotary.of_heads(self.heads)
        query = self._projected(q, self.heads, self.heads, b_q, q_norm, spectral)
        key = self._projected(k, self._key_heads(k), kv_heads, b_k, k_norm)
        return query, key, self._rotation(q.shape[1])

    def _projected(
        self,
        captured: Tensor,
        indices: list[int],
        heads: list[int],
        bias: Tensor,
        norm: QueryKeyNorm | None,
        spectral: RotaryGeometry | None = None,
    ) -> Projection:
        """Return queries or keys of the ablated heads: `indices` index the captured tensor, `heads` the weights."""
        selected = self._selected(captured, heads_axis=2, heads=indices)
        token_scale = None
        if norm is not None and norm.over_heads:  # its mean runs over other heads too
            token_scale = self._selected(norm.token_scale(widened(captured)), heads_axis=2, heads=indices)
        return project(selected, bias[heads], norm and norm.of_heads(heads), spectral, token_scale=token_scale)

    def _capped(self, scores: Tensor) -> Tensor:
        cap = self.layer.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def _key_heads(self, captured: Tensor) -> list[int]:
        """Return the heads to select from a key or value tensor, which is grouped or repeated per query head."""
        grouped = captured.shape[2] == self.layer.n_kv_heads
        return [self.layer.kv_head(head) for head in self.heads] if grouped else self.heads

    def _rotation(self, n_positions: int) -> Rotation | None:
        geometry = self.layer.rotary
        if geometry is None:
            return None
        names = self.view.hook_names(self.layer.layer)
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
