"""`LayerAblation`: hooks that remove a part from heads of one layer, or measure the change of their output."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.errors import EditNotHonored
from tlspectral.hooks.capture import HeadCapture, head_indices
from tlspectral.hooks.parts import Part
from tlspectral.hooks.parts.checked_calls import acts_by_strip, change_of, hidden_keys, replaced_z
from tlspectral.hooks.parts.long_range import LongRange
from tlspectral.hooks.parts.removal import Removal
from tlspectral.hooks.probe import require_honoured
from tlspectral.models.attention.head_scores import HeadScores, key_weights
from tlspectral.models.attention.tolerances import require_close
from tlspectral.models.hooking.placing import Hook, acts_first
from tlspectral.models.hooking.strips import OfStrips, Strip, strip_of
from tlspectral.models.reading.blocks import expect_edited_pattern, reweighs
from tlspectral.models.reading.layer import softcapped
from tlspectral.models.running.long_prompts import prompt_strips
from tlspectral.user_functions import not_finite, returned_tensor


@dataclass(repr=False)
class LayerAblation(HeadCapture):
    """The hooks that remove a part from heads of one layer.

    Attributes:
        part: the part that is removed, prepared for these heads by `Part.on`.
        alter: function from a `Removal` (the change that the part makes to scores or z) to the tensor that is added to
            them instead. None: the part itself is removed. With `alter`, unchanged values may differ by rounding. Not
            for parts of the mask, which add nothing.
        of_run: scores of the heads in a run whose strips have not all passed, by thread.
    """

    part: Part
    alter: Callable[[Removal], Tensor] | None = None
    of_run: dict[int, HeadScores] = field(default_factory=dict, kw_only=True)

    def hooks(self) -> list[Hook]:
        """Return a `fwd_hooks` list that removes the part from the heads, in scores, pattern or z of a run.

        Raises EditNotHonored if a short run shows that such an edit does not change the logits. The hooks themselves
        raise EditNotHonored in a run that does not follow from its own queries, keys and values.
        """
        self.prove()
        names = self.names
        if self.part.acts_on == "z":
            return [(names["z"], self._edit_output)]
        shown = self._tokens_shown()
        if "scores" not in names:
            if reweighs(self.view.blocks[self.layer.layer].module):
                return [*shown, *self.holders("query", "key"), (names["pattern"], self._taking(self._edit_pattern))]
            held = [*shown, *self.holders("query", "key", "value"), (names["z"], self._edit_z)]
            # Only runs of the user read the pattern. Runs of the library stack copies of a batch or use `alter`.
            pattern_is_read = not self.stacked and self.alter is None
            return [*held, (names["pattern"], self._taking(self._hand_on_pattern))] if pattern_is_read else held
        return [*shown, *self._read_for_scores(), (names["scores"], self._taking(self._edit_scores))]

    def _taking(self, edit: Callable[[Tensor, Strip, Any], Tensor]) -> Callable[..., Tensor]:
        """Return the hook that calls `edit` with scores or pattern, their strip and the hook point: strip by strip if
        the part allows it, otherwise on whole matrices.
        """
        return OfStrips(edit) if self.by_strip else _OfWhole(edit)

    @property
    def by_strip(self) -> bool:
        """True if the part is removed from the scores of some queries at a time, so that memory is linear in a long
        prompt.
        """
        return self.alter is None and acts_by_strip(self.part)

    def prove(self) -> None:
        """Raise EditNotHonored unless a short run shows that an edit at the part's hook point changes the logits."""
        of_z = self.part.acts_on == "z"
        if not of_z and "scores" in self.names:
            return self.prove_scores()
        of_pattern = not of_z and reweighs(self.view.blocks[self.layer.layer].module)
        require_honoured(self.view, self.layer.layer, "pattern" if of_pattern else "z")

    def measuring(self) -> list[Hook]:
        """Return a `fwd_hooks` list that stores what `change_of_head_output` needs, and edits nothing.

        It stores queries, keys and values, and if the model shows scores also these scores with and without the part.
        The list is empty for a part that acts on z, which needs no stored activations.
        """
        if self.part.acts_on == "z":
            return []
        hooks = [*self._tokens_shown(), *self.holders("value")]
        if "scores" in self.names:
            return [*hooks, *self._read_for_scores(), (self.names["scores"], self._hold_scores)]
        return [*hooks, *self.holders("query", "key")]  # a layer that delegates its attention shows no rotation

    def _read_for_scores(self) -> list[Hook]:
        """Return hooks that keep what an edit of the scores reads: nothing for a mask, which changes any scores."""
        return [] if self.part.acts_on == "mask" else self.holders("query", "key", "cos", "sin")

    def _tokens_shown(self) -> list[Hook]:
        """Return a list with the hook that compares the run's tokens with the part's prompt, or an empty list.

        It is empty for a part that fits any prompt.
        """
        return [(self.view.tokens_point, self._see_tokens)] if self.part.needs_tokens else []

    def _see_tokens(self, activation: Tensor, hook: Any) -> None:
        self.part.require_own(self.view, activation)
        self.hold("tokens", activation)

    def _require_tokens(self) -> None:
        """Raise ValueError if this run showed no tokens, because it began after the embedding; else forget them.

        A part for certain prompts compares the tokens with its own prompt.
        """
        seen = self.seen.get(get_ident(), {})
        if "tokens" not in seen:
            raise ValueError(
                f"{self.part.name}: this run began after the embedding (from embeddings, or by start_at_layer), so its "
                "tokens cannot be compared with the prompt of the part: run the model on token ids"
            )
        del seen["tokens"]

    def change_of_head_output(
        self, z: Float[Tensor, "batch pos heads d_head"]
    ) -> Float[Tensor, "batch pos chosen d_head"]:
        """Return z of the heads without the part, minus their z in this run. z is the output before W_O.

        `z` has all heads of the layer and is not changed; the result has only the heads of this ablation. The hooks of
        `measuring` must have run. Raises EditNotHonored if z is not attention times values.
        """
        if self.part.acts_on == "z":
            selected = self.selected(z, heads_axis=2)
            return widened(self._replaced(selected)) - widened(selected)
        return self._change_of_z(z)

    def _hold_scores(self, scores: Tensor, hook: Any) -> None:
        edited = self.edited_scores(scores, strip_of(scores), first=acts_first(hook, self._hold_scores))
        for point, held in (("scores", scores), ("edited", edited)):
            self.hold(point, self.selected(held, heads_axis=1))

    def edited_scores(self, scores: Float[Tensor, "batch heads query key"], strip: Strip, *, first: bool) -> Tensor:
        """Return the layer's scores with the part removed from the heads, using the queries and keys of this run.

        `scores` are the model's scaled scores in a strip, of all heads; the result is a new tensor of this shape.
        `first`: True if no other hook edited them before, so they are compared with the queries and keys. Raises
        EditNotHonored if they differ.
        """
        if self.part.acts_on == "mask":
            return self._masked(scores, strip)
        head_scores = self._scores_of_strip(strip)
        q_length, k_length = head_scores.shape[-2:]
        if strip.is_whole:
            self.require_lengths(*scores.shape[-2:], q_length, k_length)
        self.require_lengths(scores.shape[-2], q_length)
        self.require_lengths(scores.shape[-1], k_length)
        # Scores that another hook edited need not follow from queries and keys; its edit is kept.
        if first:
            self.require_own_scores(scores, head_scores)
        allowed = self.selected(self.visible(scores), heads_axis=1)
        difference = self._difference(head_scores, allowed, strip)
        cap = self.layer.softcap
        if cap is not None:
            # Add the change of the capped score; setting the score would lose edits by other hooks.
            raw = head_scores.whole()
            difference = softcapped(raw + difference, cap) - softcapped(raw, cap)
        # Adding 0 keeps masked entries, and entries that lose nothing, equal to the bit. `difference` is freed because
        # at most two matrices of the scores' size should be in memory.
        change = difference.to(scores).masked_fill(~allowed, 0.0)
        del difference
        copy, head = head_indices(tuple(self.heads), scores.device)
        if not self.stacked:
            return scores.index_add(1, head, change)
        edited = scores.clone()
        edited.unflatten(0, (len(self.heads), -1))[copy, :, head] += change.transpose(0, 1)
        return edited

    def _masked(self, scores: Float[Tensor, "batch heads queries keys"], strip: Strip) -> Tensor:
        """Return a copy of the layer's scores in a strip, with the keys masked that the heads no longer see.

        Raises EditNotHonored if the run has keys of earlier runs, ValueError for gradients of a long prompt.
        """
        self._refuse_gradients(strip)
        self.require_lengths(scores.shape[-2], strip.stop - strip.start)
        self.require_lengths(scores.shape[-1], strip.n_keys)
        visible = self.visible(scores)
        beyond = self._beyond(self.selected(visible, heads_axis=1), strip)
        hidden = self.with_replaced(torch.zeros_like(visible), beyond, heads_axis=1)
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min)

    def _weights(self, head_scores: HeadScores, strip: Strip) -> tuple[Tensor, Tensor]:
        """Return two tensors [batch, heads, query, key]: the heads' attention with the part, and without it.

        For layers whose bridge computes attention itself. `head_scores` are the heads' scores in a strip.
        """
        scores, cap = head_scores.whole(), self.layer.softcap
        allowed = self.view.reader.seen_keys(self.view.model, self.layer.layer, scores.shape[-1], strip.start)
        allowed = allowed.to(scores.device)
        before = key_weights(softcapped(scores, cap), allowed)
        if self.part.acts_on == "mask":
            allowed = allowed & ~self._beyond(allowed.expand(scores.shape), strip)
        else:
            scores = scores + self._difference(head_scores, allowed, strip)
        return before, key_weights(softcapped(scores, cap), allowed)

    def _weights_of_run(self, z: Float[Tensor, "rows pos heads d_head"]) -> Iterator[tuple[Strip, Tensor, Tensor]]:
        """Yield (strip, attention weights with the removed part, weights without it); each [batch, heads, query, key].

        A strip has some queries of the prompts. Long prompts have several strips if the layer's bridge computes
        attention itself, other prompts have one. The length of `z`, the output before W_O of all heads in this run, is
        the number of tokens.
        """
        n = z.shape[1]
        if "scores" in self.names:
            scores = [self.taken(point) for point in ("scores", "edited")]
            before, after = (key_weights(widened(each), self.visible(each)) for each in scores)
            yield Strip(0, n, n), before, after
            return
        for strip in prompt_strips(n) if self.by_strip else [Strip(0, n, n)]:
            head_scores = self._scores_of_strip(strip)
            self.require_lengths(head_scores.query.whole.shape[-2], strip.stop - strip.start)
            self.require_lengths(head_scores.key.whole.shape[-2], strip.n_keys)
            yield strip, *self._weights(head_scores, strip)

    def _change_of_z(self, z: Float[Tensor, "rows pos heads d_head"]) -> Float[Tensor, "batch pos chosen d_head"]:
        """Return the change of z of the heads, the output before W_O, when the part is removed.

        `z` has all heads of the layer in this run. Raises EditNotHonored if it is not attention times values.
        """
        value, delegated = self.taken("value"), "scores" not in self.names
        self.require_lengths(value.shape[1], z.shape[1])
        pattern_is_read = delegated and not self.stacked and self.alter is None
        again = {point: kept for point, kept in self.seen.get(get_ident(), {}).items() if point in ("query", "key")}
        changes, rebuilt = [], []
        for strip, before, after in self._weights_of_run(z):
            values = self.values(value[:, : strip.n_keys], before)
            rebuilt.append((before @ values).transpose(1, 2))
            changes.append((after @ values).transpose(1, 2) - rebuilt[-1])
            if pattern_is_read:
                # `_hand_on_pattern` needs the weights. Those of a long prompt are computed once more.
                kept = {"before": before, "after": after} if strip.is_whole else again
                self.seen.setdefault(get_ident(), {}).update(kept if strip.is_last else {})
        self.require_own_z(self.selected(z, heads_axis=2), torch.cat(rebuilt, dim=1), delegated=delegated)
        return torch.cat(changes, dim=1)

    def _scores_of_strip(self, strip: Strip) -> HeadScores:
        """Return the heads' scores of this run for the queries of a strip. They are forgotten after the last strip.

        Raises ValueError for a strip of a longer prompt if gradients are recorded: they would be computed from scores
        that are forgotten by then.
        """
        if strip.is_whole:
            return self.scores_of_run()
        self._refuse_gradients(strip)
        if strip.is_first:
            self.of_run[get_ident()] = self.scores_of_run()
        if get_ident() not in self.of_run:
            self.taken("query")  # raises: the hook on queries did not run
        scores = self.of_run.pop(get_ident()) if strip.is_last else self.of_run[get_ident()]
        return scores.of_queries(strip.queries)

    def _refuse_gradients(self, strip: Strip) -> None:
        """Raise ValueError if gradients of a long prompt are recorded: they would run its strips again, backwards."""
        if torch.is_grad_enabled() and not strip.is_whole:
            raise ValueError(
                f"{self.part.name}: a prompt of {strip.n_queries} tokens has no gradients inside an ablation of scores"
                ": run it under torch.no_grad(), or give shorter prompts"
            )

    def _edit_scores(self, scores: Tensor, strip: Strip, hook: Any) -> Tensor:
        return self.edited_scores(scores, strip, first=acts_first(hook, self._edit_scores))

    def _edit_z(self, z: Tensor, hook: Any) -> Tensor:
        """Return a copy of `z` in which these heads have their z without the part.

        For a bridge that computes attention itself; z is the heads' output before W_O. The attention before and after
        is kept for `_hand_on_pattern`. `hook` is not used. Raises EditNotHonored if `z` is not attention times values.
        """
        change = self._change_of_z(z).to(z)
        if not self.stacked and self.alter is None:
            expect_edited_pattern(self.view.blocks[self.layer.layer].module, True)
        selected = self.selected(z, heads_axis=2)
        edited = torch.where(change == 0, selected, selected + change) if self.alter is None else selected + change
        return self.with_replaced(z, edited, heads_axis=2)

    def _edit_pattern(self, pattern: Tensor, strip: Strip, hook: Any) -> Tensor:
        head_scores = self._scores_of_strip(strip)
        self.require_lengths(pattern.shape[-1], head_scores.key.whole.shape[-2])
        self.require_lengths(pattern.shape[-2], head_scores.query.whole.shape[-2])
        return self._with_weights(pattern, *self._weights(head_scores, strip))

    def _hand_on_pattern(self, pattern: Tensor, strip: Strip, hook: Any) -> Tensor:
        """Return a copy of the attention pattern in a strip in which these heads have the ablated attention of this
        run.

        `_edit_z` has kept that attention; it is forgotten here. `hook` is not used. Raises EditNotHonored if `pattern`
        is not the attention of this run.
        """
        if strip.is_first:
            expect_edited_pattern(self.view.blocks[self.layer.layer].module, False)
        if strip.is_whole and "before" in self.seen.get(get_ident(), {}):
            return self._with_weights(pattern, self.taken("before"), self.taken("after"))
        return self._edit_pattern(pattern, strip, hook)

    def _with_weights(self, pattern: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Return a copy of `pattern` in which the heads of this ablation have the attention `after`.

        `before` is their attention computed from queries and keys. Raises EditNotHonored if `pattern` does not agree
        with it.
        """
        selected = self.selected(pattern, heads_axis=1)
        off = (selected.to(before) - before).detach().abs().max()
        require_close(off, off, pattern.dtype, "live pattern", *self.not_of_own_keys("pattern"), EditNotHonored)
        return self.with_replaced(pattern, torch.where(before == after, selected, after.to(pattern)), heads_axis=1)

    def _edit_output(self, z: Tensor, hook: Any) -> Tensor:
        """Return a copy of `z` with the heads' z replaced by the part's result; for a part that acts on z.

        With `alter`, its result is added to z instead. `hook` is not used.
        """
        by_head = z.reshape(*z.shape[:2], self.layer.n_heads, -1)  # bridges of latent attention split it otherwise
        selected = self.selected(by_head, heads_axis=2)
        edited = self._replaced(selected)
        if self.alter is not None:
            edited = selected + self._altered(Removal((edited - selected).transpose(1, 2), None, None)).transpose(1, 2)
        return self.with_replaced(by_head, edited, heads_axis=2).reshape(z.shape)

    def _replaced(self, z: Float[Tensor, "batch pos chosen d_head"]) -> Tensor:
        """Return z of the heads without the part; at token positions where the part does not act, z is unchanged.

        `z` has only the heads of this ablation. The result is a new tensor.
        """
        acts = self.part.acts(*z.shape[:2])
        replaced = replaced_z(self.part, z, self.heads)
        return replaced if acts is None else torch.where(acts[..., None, None].to(z.device), replaced, z)

    def _difference(self, scores: HeadScores, allowed: Tensor, strip: Strip) -> Tensor:
        """Return the tensor [batch, heads, query, key] whose addition to the scaled scores removes the part.

        It is added before a softcap. `scores` are the heads' scores in this run in a strip, `allowed` is True for pairs
        of query and key that the model does not mask.
        """
        if self.part.needs_tokens:
            self._require_tokens()
        difference, allowed = change_of(self.part, scores, allowed)
        acts = self._acts(difference, strip)
        if acts is not None:
            allowed = (allowed & acts).expand_as(difference)
        if self.alter is not None:
            difference = self._altered(Removal(difference, allowed, scores))
        return difference if acts is None else difference.masked_fill(~acts, 0.0)

    def _altered(self, removal: Removal) -> Tensor:
        """Call `alter` with a removal and return its result, the tensor to add to scores or z.

        Raises ValueError unless the result is a finite tensor with the shape of `removal.difference`.
        """
        assert self.alter is not None
        expected, shape = "alter returns the tensor added in place of the difference", tuple(removal.difference.shape)
        like = removal.difference
        altered = returned_tensor(self.alter(removal), shape, expected, kind="floating-point numbers", like=like)
        if not_finite(altered) is not None:
            raise ValueError(f"{expected}; found NaN or infinite numbers: return finite ones")
        return altered

    def _beyond(self, visible: Bool[Tensor, "batch heads queries keys"], strip: Strip) -> Tensor:
        acts = self._acts(visible, strip)
        own = self.view.reader.seen_keys(self.view.model, self.layer.layer, visible.shape[-1], strip.start)
        if isinstance(self.part, LongRange) and not strip.is_whole:
            kept = self.seen.setdefault(get_ident(), {})
            before = None if strip.is_first else kept["documents"]
            beyond, kept["documents"] = self.part.beyond_in_strip(visible, own, strip.start, before)
        else:
            beyond = hidden_keys(self.part, visible, own)
        return beyond if acts is None else beyond & acts

    def _acts(self, like: Tensor, strip: Strip) -> Bool[Tensor, "batch one queries one"] | None:
        """Return a mask of the queries whose scores lose the part, True where they do; None for all queries.

        `like` [batch, heads, queries, keys] gives the number of sequences and the device, `strip` the queries.
        """
        acts = self.part.acts(like.shape[0], strip.n_queries)
        return None if acts is None else acts[:, None, strip.queries, None].to(like.device)


@dataclass(frozen=True)
class _OfWhole:
    """A hook that calls the function `hook` with whole matrices of queries and keys, the strip of all queries and the
    hook point.
    """

    hook: Callable[[Tensor, Strip, Any], Tensor]

    def __call__(self, activation: Tensor, hook: Any) -> Tensor:
        """Return the edited activation. `hook` is the hook point."""
        return self.hook(activation, strip_of(activation), hook)
