"""Mean attention scores by distance, and mean queries and keys, accumulated while a model runs.

With the mean query q_t and the mean key k_t of rotary pair t as complex numbers, and D tokens from the key to the
query, the predicted score at distance D is

    s(D) = Re sum_t q_t conj(k_t) exp(i theta_t D)  +  the product over non-rotary columns,

times the model's scale. Nothing is fitted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from einops import repeat
from jaxtyping import Bool, Float64
from torch import Tensor

from tlspectral.algebra.rotary import summed, with_gain_and_phase
from tlspectral.errors import EditNotHonored
from tlspectral.models.attention.head_scores import (
    HeadScores,
    joined_scores,
    rotation_tables,
    scores_of_groups,
)
from tlspectral.models.attention.run_scores import require_own_pattern
from tlspectral.models.hooking.placing import holding
from tlspectral.models.hooking.strips import OfStrips, Strip
from tlspectral.models.hooking.user_hooks import user_hooks
from tlspectral.models.reading.layer import softcapped
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, rows_of_scores
from tlspectral.models.running.passes import run_until

BATCH = 25
Hooks = list[tuple[str, Callable[[Tensor, Any], None]]]


class Preference(NamedTuple):
    """The score (a logit) that the mean query and the mean key of some heads predict, by distance.

    Attributes:
        by_pair: contribution of each rotary pair at each distance.
        non_rotary: contribution of the columns that do not rotate, equal at all distances.
        theta: angle of each pair, in radians per token.
    """

    by_pair: Float64[Tensor, "heads pairs distances"]
    non_rotary: Float64[Tensor, "heads"]
    theta: Float64[Tensor, "heads pairs"]


class LayerKernels:
    """Sums over batches: mean scores of some heads of a layer by distance, and their mean query and key.

    `view` is the open model, `layer` the number of the layer. `heads` are numbers within the layer, `back` the
    distances in tokens. Hooks from `hooks` add each batch; after `predict`, `preference` has the predicted scores (None
    where the mean query and key predict nothing).
    """

    def __init__(self, view: AttentionView, layer: int, heads: list[int], back: list[int]):
        self.view, self.layer, self.heads, self.back = view, layer, heads, back
        self.settings, self.rotary = view.raw(layer).without_weights(), view.rotary(layer)
        self.total = torch.zeros(2, 2, len(back), len(heads), dtype=torch.float64)  # [judged, sum and number, ...]
        self.means: dict[str, Tensor] = {}  # "query", "key": sums [heads, d_head]
        self.tables: dict[str, Tensor] = {}  # cos and sin of the last batch, by the names of their hook points
        self.n_tokens = 0
        self.preference: Preference | None = None

    @property
    def score(self) -> Float64[Tensor, "distances heads"]:
        """Mean score over all prompts, a logit; NaN where every key at the distance is masked."""
        sums = self.total.sum(0)
        return sums[0] / sums[1]

    @property
    def judged(self) -> Float64[Tensor, "distances heads"]:
        """Mean score over the prompts that test the prediction and did not give its means."""
        return self.total[1, 0] / self.total[1, 1]

    def predicted(self) -> Float64[np.ndarray, "distances heads"]:
        """Return the score of the mean query with the mean key at each distance, after a softcap; NaN without a
        prediction.
        """
        if self.preference is None:
            return np.full(self.total.shape[2:], np.nan)
        scores = self.preference.by_pair.sum(1) + self.preference.non_rotary[:, None]
        return softcapped(scores, self.settings.softcap).T.numpy()

    def hooks(
        self, real: Bool[Tensor, "batch pos"], averaged: Bool[Tensor, "batch"], judged: Bool[Tensor, "batch"] | None
    ) -> Hooks:
        """Return (hook name, function) pairs that add one batch to the sums. `real` is True at tokens, False at
        padding.

        `averaged` marks sequences that contribute to the mean query and key. `judged` marks sequences that test the
        prediction; None: no scores are read.
        """
        names = self.view.hook_names(self.layer)
        hooks: Hooks = []
        counted = real & averaged[:, None]
        if self.rotary is not None and bool(averaged.any()):
            self.n_tokens += int(counted.sum())
            hooks += [(names[side], partial(self._add_mean, side, counted)) for side in ("query", "key")]
            hooks += [(names[table], partial(self._keep, names[table])) for table in ("cos", "sin") if table in names]
        if judged is None:
            return hooks
        if "scores" in names:

            def add(scores: Tensor, strip: Strip, hook: Any) -> None:
                self._add_scores(scores, strip, real, judged)

            return [*hooks, (names["scores"], OfStrips(add))]

        captured: dict[str, Tensor] = {}
        rebuilt: list[HeadScores] = []  # of all queries, until the last strip

        def rebuild(pattern: Tensor, strip: Strip, hook: Any) -> None:
            if strip.is_first:
                rebuilt[:] = scores_of_groups(self.view, self.layer, captured)
                captured.clear()
            mask = ~self.view.reader.seen_keys(self.view.model, self.layer, strip.n_keys, strip.start).cpu()
            of_strip = [scores.of_queries(strip.queries) for scores in rebuilt]
            scores = joined_scores(self.view.raw(self.layer), of_strip).total.masked_fill(mask, -torch.inf)
            require_own_pattern(scores, pattern.detach().cpu(), pattern.dtype, f"layer {self.layer}")
            self._add_scores(scores, strip, real, judged)
            if strip.is_last:
                rebuilt.clear()

        held = (names[point] for point in ("residual", "cos", "sin") if point in names)
        kept = holding(captured, (name for name in held if name in self.view.hook_points))
        return [*hooks, *kept, (names["pattern"], OfStrips(rebuild))]

    def _add_mean(
        self, side: Literal["query", "key"], counted: Bool[Tensor, "batch pos"], x: Tensor, hook: Any
    ) -> None:
        """Hook: add the queries or keys `x` (`side`: "query" or "key") at tokens that `counted` marks to the sums for
        the mean query or key.

        `hook`, the hook point, is not used.
        """
        total = summed(self.settings.normed(side, x[counted.to(x.device)]), 0).cpu()
        self.means[side] = total + self.means.get(side, 0)

    def _keep(self, name: str, table: Tensor, hook: Any) -> None:
        """Hook: store `table`, cos or sin of the batch, in `self.tables` under the name of its hook point, without
        gradients.

        `hook`, the hook point, is not used.
        """
        self.tables[name] = table.detach()

    def _add_scores(
        self, scores: Tensor, strip: Strip, real: Bool[Tensor, "batch pos"], judged: Bool[Tensor, "batch"]
    ) -> None:
        """Add the scores [batch, heads, query, key] of a batch in a strip to the sums by distance, apart for judged and
        other sequences.

        `real` is True at tokens, False at padding. `judged` marks the sequences that test the prediction.
        """
        every = self.heads == list(range(scores.shape[1]))
        chosen = scores if every else scores[:, self.heads]
        for row, distance in enumerate(self.back):
            diagonal = chosen.diagonal(strip.start - distance, dim1=-2, dim2=-1)  # [batch, heads, queries]
            is_token = real[:, None, max(distance, strip.start) : strip.stop].to(diagonal.device)
            unmasked = self.view.reader.unmasked(self.view.model, self.layer, diagonal) & is_token
            sums, counts = summed(diagonal.where(unmasked, 0.0), 2).cpu(), unmasked.sum(2).cpu()
            for part, rows in enumerate((~judged, judged)):
                self.total[part, 0, row] += sums[rows].sum(0)
                self.total[part, 1, row] += counts[rows].sum(0)

    def predict(self, longest: int, averaged: int) -> None:
        """Set `preference` from the mean query and key.

        Nothing is set without rotary positions, or if the longest prompt (`longest`) exceeds the layer's valid length.
        `averaged` is the number of positions in the run of the means. Raises ScoreMismatch if that run used other
        angles than the frequencies, as with a hook on cos and sin.
        """
        limit = self.settings.valid_up_to
        too_long = limit is not None and longest > limit
        if self.rotary is None or not self.n_tokens or too_long:
            return
        rotation_tables(self.view, self.rotary, self.layer, averaged, self.tables)
        query, key = (self.means[side] / self.n_tokens for side in ("query", "key"))
        # Some models repeat grouped keys themselves; others need it here.
        key = repeat(key, "kv_head d_head -> (kv_head group) d_head", group=len(query) // len(key))
        rotary, settings = self.rotary.of_heads(self.heads), self.settings
        query, key = with_gain_and_phase(query[self.heads][:, None], rotary)[:, 0], key[self.heads]
        q, k = (torch.complex(x[:, rotary.real_index], x[:, rotary.imag_index]) for x in (query, key))
        theta = rotary.theta.cpu().double().expand(len(query), -1)
        rotations = torch.polar(torch.ones(1, dtype=torch.float64), theta[..., None] * torch.tensor(self.back))
        scale = settings.score_scale * rotary.attention_scaling**2
        self.preference = Preference(
            scale * ((q * k.conj())[..., None] * rotations).real,
            settings.score_scale * (query * key)[:, rotary.still_columns].sum(1),
            theta,
        )


def measured_kernels(
    view: AttentionView,
    chosen: dict[int, list[int]],
    prompts: PackedTokens,
    back: list[int],
    averaged: Bool[Tensor, "sequences"],
    judged: Bool[Tensor, "sequences"],
    reference: PackedTokens | None,
) -> list[LayerKernels]:
    """Run the prompts through the model in `view`; return a list with one `LayerKernels` for each layer in `chosen`.

    A `LayerKernels` has the mean scores by distance, and their prediction. `chosen` has heads by layer; `back` are the
    distances in tokens. `averaged` marks prompts for the mean query and key, to which all prompts in `reference` are
    added. `judged` marks prompts that test the prediction. Raises EditNotHonored if an ablation hides the scores of a
    layer.
    """
    hooked = user_hooks(view.model)
    for layer in chosen:
        names = view.hook_names(layer)
        if "scores" not in names and names["z"] in hooked:
            raise EditNotHonored(
                f"layer {layer}: this bridge computes attention itself, so an edit of {names['z']} leaves no edited "
                "scores to read: leave the `ablate` block, or remove your hooks there"
            )
    kernels = [LayerKernels(view, layer, heads, back) for layer, heads in chosen.items()]
    runs: list[tuple[PackedTokens, Tensor, Tensor | None]] = [(prompts, averaged, judged)]
    if reference is not None:
        runs.append((reference, torch.ones(len(reference.tokens), dtype=torch.bool), None))
    for run, summed_rows, judged_rows in runs:
        at_once = max(1, min(BATCH, rows_of_scores(view, run.tokens.shape[1])))
        for start in range(0, len(run.tokens), at_once):
            rows = slice(start, start + at_once)
            of_batch = run.real[rows], summed_rows[rows], None if judged_rows is None else judged_rows[rows]
            hooks = [hook for kernel in kernels for hook in kernel.hooks(*of_batch)]
            if hooks:
                # Queries may pass after keys, and the pattern passes after both.
                last = hooks[-1][0] if judged_rows is not None else view.hook_names(kernels[-1].layer)["pattern"]
                run_until(view, run.tokens[rows], hooks, last=last)
    for kernel in kernels:
        kernel.predict(max(run.tokens.shape[1] for run, _, _ in runs), runs[-1][0].tokens.shape[1])
    return kernels
