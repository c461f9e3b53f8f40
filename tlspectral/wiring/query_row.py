"""A query's own scores in a run, and whether a sum gives one of them."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tlspectral.errors import ScoreMismatch
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.scores import pattern_tolerance
from tlspectral.wiring.score_form import HeadForm
from tlspectral.wiring.two_tokens import TwoTokens


@dataclass(frozen=True)
class QueryRow:
    """The scores of a query as the model has them, and that of one key.

    Attributes:
        scores: as the softmax reads them.
        unmasked: keys that the query may attend to.
        score: of the key, before a softcap.
        alibi: the bias in `score`, None without ALiBi.
    """

    form: HeadForm
    layer: int
    key: int
    scores: Float64[Tensor, "pos"]
    unmasked: Bool[Tensor, "pos"]
    score: float
    alibi: float | None
    tolerance: float

    def require_sum(self, total: float) -> None:
        """Refuse terms that do not sum to the score, or under a softcap to the capped one. Raises ScoreMismatch."""
        capped = float(self.form.capped(torch.tensor(total, dtype=torch.float64)))
        for found, own, what in ((total, self.score, ""), (capped, float(self.scores[self.key]), ", capped,")):
            if not abs(found - own) <= self.tolerance:
                raise ScoreMismatch(
                    f"layer {self.layer}: the terms sum{what} to {found:.6g} and the model's own score is {own:.6g} "
                    f"(allowed difference {self.tolerance:.1e}); look for hooks that edit scores, queries or keys, or "
                    "run verify_scores"
                )

    def attention_without(self, change: Float64[Tensor, "rows"]) -> Float64[Tensor, "rows"]:
        """Return the attention to the key if its score, before a softcap, lost each of these amounts."""
        others = self.scores.masked_fill(~self.unmasked, -torch.inf)
        others = others[torch.arange(len(others)) != self.key].logsumexp(0)
        return torch.sigmoid(self.form.capped(self.score - change) - others)


def query_row(view: AttentionView, layer: int, traced: TwoTokens, form: HeadForm, query: int, key: int) -> QueryRow:
    """Return a query's own scores of a run: those that the model exposes, else those of its own queries and keys.

    Under ALiBi the bias of a key is `slope * position` and a constant of the row, which the softmax does not see: the
    constant is the mean difference, over the row, between the model's scores and the others. Raises ValueError for a
    masked key, and ScoreMismatch where the softmax of the scores is not the model's attention.
    """
    names, raw = view.hook_names(layer), view.raw(layer)
    of_run = form.scores_of_run(traced.captured[names["query"]], traced.captured[names["key"]], query)
    scores, unmasked = traced.scores, traced.unmasked
    if scores is None or unmasked is None:
        scores, unmasked = form.capped(of_run), view.causal_mask(layer, len(of_run))[query].cpu()
    if not bool(unmasked[key]):
        first = int(unmasked.nonzero()[0])
        raise ValueError(
            f"layer {layer} masks key {key} for query {query}: the query sees keys {first} to {query} (a window), so "
            "there is no score"
        )
    largest = float(scores[unmasked].abs().max()) if traced.largest is None else traced.largest
    wide = raw.w_q.dtype.itemsize >= 4
    row = scores.masked_fill(~unmasked, -torch.inf).softmax(-1)
    error = float((row - traced.pattern).abs().max())
    if not error <= pattern_tolerance(raw.w_q.dtype, largest):
        raise ScoreMismatch(
            f"layer {layer}: the softmax of the scores differs from the model's own attention by {error:.2e}; look for "
            "hooks that edit scores or the pattern, or run verify_scores"
        )
    score, alibi = float(scores[key] if form.softcap is None else of_run[key]), None
    if form.slope is not None:
        alibi = float(form.slope * key + (scores - of_run)[unmasked].mean())
    # Measured: at most 1.6e-2 of it over the zoo in float32 and 3.4e-2 in SmolLM2-135M; in 16 bits 0.41 over six tiny
    # models and 0.18 in SmolLM2, as scores, queries, keys and, at each addition, the stream are rounded. A norm or a
    # source that is left out is off by tenths.
    tolerance = 1e-4 + 1e-5 * abs(score) if wide else 4 * torch.finfo(raw.w_q.dtype).eps * largest
    return QueryRow(form, layer, key, scores, unmasked, score, alibi, tolerance)
