"""`QueryRow`: the model's own scores of one query, to check the sum of the terms and to predict attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import ScoreMismatch
from tlspectral.hooks.attribution.score_terms import HeadForm
from tlspectral.hooks.attribution.stream_terms import TracedRun
from tlspectral.models.attention.head_scores import HeadScores, Tables
from tlspectral.models.attention.run_scores import require_own_pattern
from tlspectral.models.attention.tolerances import LOOK_FOR_HOOKS, noise_of, require_close
from tlspectral.models.reading.layer import softcapped
from tlspectral.models.reading.view import AttentionView


@dataclass(frozen=True)
class QueryRow:
    """The scores of one query of a head in a run, and the score of one key among them.

    Attributes:
        form: the head's score as a function of the two streams.
        layer: index of the layer.
        key: position of the key.
        scores: scores of the query for all keys, after the softcap, as the softmax gets them.
        unmasked: True for keys that the query sees.
        score: score of the key before the softcap.
        alibi: the ALiBi bias in `score`; None without ALiBi.
        attention: attention of the query to the key.
        stored: dtype of the layer's weights.
        largest: largest |score| of the layer.
    """

    form: HeadForm
    layer: int
    key: int
    scores: Float64[Tensor, "pos"]
    unmasked: Bool[Tensor, "pos"]
    score: float
    alibi: float | None
    attention: float
    stored: torch.dtype
    largest: float

    @property
    def tolerance(self) -> float:
        """Largest allowed difference between the sum of the terms and the score, in logits.

        It grows with |score|, or for 16-bit weights with the layer's largest |score|.
        """
        absolute, relative = noise_of("term sum", self.stored)
        return absolute + relative * self._size

    @property
    def _size(self) -> float:
        """Size that the tolerance is relative to: |score|, or the largest |score| for 16-bit weights."""
        return abs(self.score) if self.stored.itemsize >= 4 else self.largest

    def require_sum(self, total: float) -> None:
        """Raise ScoreMismatch if `total`, the sum of the terms, is not the model's score (before and after softcap)."""
        capped = float(self._capped(torch.tensor(total, dtype=torch.float64)))
        for term_sum, own, what in ((total, self.score, ""), (capped, float(self.scores[self.key]), " capped")):
            require_close(
                torch.tensor(abs(term_sum - own), dtype=torch.float64),
                torch.tensor(self._size, dtype=torch.float64),
                self.stored,
                "term sum",
                f"layer {self.layer}: the terms sum{what} to {term_sum:.6g}, which differs from the model's own score",
                LOOK_FOR_HOOKS,
                ScoreMismatch,
            )

    def _capped(self, score: Tensor) -> Tensor:
        """Return the score after the layer's softcap, cap * tanh(score / cap); unchanged without a softcap."""
        return softcapped(score, self.form.layer.softcap)

    def attention_without(self, change: Float64[Tensor, "rows"]) -> Float64[Tensor, "rows"]:
        """Return the attention to the key if its score before the softcap lost each amount in `change`, in logits.

        The scores of all other keys stay as they are.
        """
        other_keys = self.scores.masked_fill(~self.unmasked, -torch.inf)
        log_sum = other_keys[torch.arange(len(other_keys)) != self.key].logsumexp(0)
        return torch.sigmoid(self._capped(self.score - change) - log_sum)


def query_row(
    view: AttentionView, run: TracedRun, form: HeadForm, tables: Tables | None, query: int, key: int
) -> QueryRow:
    """Return the scores of one query of a head in a run, and the score of one key among them, as a `QueryRow`.

    `run` has the layer's queries, keys, scores and pattern; `query` and `key` are positions. The model shows its
    scores, or they are computed from its queries and keys. `form` is the head's score as a function of streams
    and `tables` are cos and sin of the run. Raises ValueError for a masked key, and ScoreMismatch if the softmax of the
    scores is not the model's attention.
    """
    layer, names, raw = run.layer, view.hook_names(run.layer), view.raw(run.layer)
    q, k = (in_float64(run.captured[names[point]]).cpu() for point in ("query", "key"))
    rows = torch.tensor([[query]])
    of_run = HeadScores.of_rows(raw, form.head, q[:, [query]], k, tables, rows).whole()[0, 0, 0]
    if form.slope is not None:
        of_run = of_run + form.slope * torch.arange(len(of_run), dtype=of_run.dtype)
    if "scores" in names:
        exposed = run.captured[names["scores"]]
        visible = view.reader.unmasked(view.model, layer, exposed)
        largest = float(exposed.where(visible, 0.0).abs().max())
        scores = exposed[0, form.head, query].cpu().double()
        unmasked = visible[0, form.head, query].cpu() & (torch.arange(len(scores)) <= query)
    else:
        scores, unmasked = (
            softcapped(of_run, form.layer.softcap),
            view.reader.seen_keys(view.model, layer, len(of_run))[query].cpu(),
        )
        largest = float(scores[unmasked].abs().max())
    if not bool(unmasked[key]):
        first = int(unmasked.nonzero()[0])
        raise ValueError(
            f"layer {layer} masks key {key} for query {query}: the query sees keys {first} to {query} (a window): give "
            "one of these keys"
        )
    row, pattern = scores.masked_fill(~unmasked, -torch.inf), run.captured[names["pattern"]]
    pattern = pattern[0, form.head, query].cpu().double()
    require_own_pattern(row, pattern, raw.storage_dtype, f"layer {layer}", largest=largest)
    score, alibi = float(scores[key] if form.layer.softcap is None else of_run[key]), None
    if form.slope is not None:
        # The bias is slope * position plus a constant of the row, which the softmax does not see. The constant is the
        # mean difference between the model's scores and the computed scores.
        alibi = float(form.slope * key + (scores - of_run)[unmasked].mean())
    return QueryRow(form, layer, key, scores, unmasked, score, alibi, float(pattern[key]), raw.storage_dtype, largest)
