"""`qk_attribution`: one attention score of a head as a sum over pairs of terms of the two residual streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64

from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings, whole_number
from tlspectral.hooks.attribution.asked_positions import AskedPositions, DistinctMean, asked_positions
from tlspectral.hooks.attribution.dictionary import Dictionary, require_division
from tlspectral.hooks.attribution.dictionary_null import dictionary_notes
from tlspectral.hooks.attribution.divisions import DividedBy, DividedScore, divided_score
from tlspectral.hooks.attribution.score_terms import PARTS
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import one_head
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.stream.writes import require_stream
from tlspectral.selection.heads_as_written import Head
from tlspectral.selection.node_names import head_name
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.schema import Schema, columns

REST = "rest"

QK_ATTRIBUTION = Schema(
    "qk_attribution",
    columns("""
        query_term           | label       | Term of the query's stream: its source (head, MLP, embedding), mode,
                             |             | feature or frequency; or error, bias, alibi, rest.
        key_term             | label       | Term of the key's stream, with the same names as query_term.
        query_source?        | label       | query_term, if the terms are sources.
        key_source?          | label       | key_term, if the terms are sources.
        symmetric            | logit       | M_S: (C(a, b) + C(b, a)) / 2; C is the part of the score that is even in
                             |             | the distance of the two tokens, a and b are the two terms.
        antisymmetric        | logit       | M_A: (C(a, b) - C(b, a)) / 2.
        phase                | logit       | Im(M_t): the part that is odd in the distance; 0 without rotary positions.
        outside_m            | logit       | The whole score of a pair with a bias, and ALiBi; otherwise 0.
        total                | logit       | Sum of the four parts. All rows sum to the score before softcap and mask.
        total_se?            | logit       | Standard error of total over several scores; equal ones are one
                             |             | observation.
        measured?            | logit       | S(x, y) - S(x - a, y) - S(x, y - b) + S(x - a, y - b): x and y are the two
                             |             | streams, a and b the terms, and every norm is computed again. NaN for rows
                             |             | that are not removed.
        measured_se?         | logit       | Standard error of measured over several scores.
        attention_predicted? | probability | Attention to the key if its score lost `total` and other scores stayed.
        attention_measured?  | probability | The same if its score lost `measured`.
    """),
    "`tls.qk_attribution`; one score of one head as a sum",
)


@checked_settings
def qk_attribution(
    model: Any,
    prompt: Any,
    head: Head,
    query: Any = None,
    key: Any = None,
    *,
    by: DividedBy = "source",
    dictionary: Dictionary | None = None,
    top: int | None = None,
    remove: int | None = None,
) -> pd.DataFrame:
    """Split one attention score of a head into a sum over pairs: a term of the query's stream and one of the key's.

    >>> import tlspectral as tls, torch
    >>> model, tokens = tls.load_model("tiny-rope"), torch.arange(3, 20).repeat(2)
    >>> table = tls.qk_attribution(model, tokens, "L1H0", query=-1, key=17, top=8, remove=4)
    >>> table.loc[0, ["query_term", "key_term"]].tolist()
    ['embedding', 'L0H3']

    Use it to see why a head attends from one token to another. With every norm's scale held as in this run, the rows
    add up to the score before softcap and mask.

    Args:
        model: TransformerBridge or HookedTransformer.
        prompt: text or token ids [pos]. For the mean of several scores: several prompts, a list of `(prompt, query,
            key)`, or a `Task` with `attention=` or named positions.
        head: "L5H1", (5, 1) or a table row: one head.
        query, key: positions of the two tokens, negative from the end; names of the task's positions; or texts of
            tokens that occur once in each prompt, such as " lake". None for a list and for `Task.attention`.
        by: the terms. "source" (default): the embedding, learned positions, each earlier head and MLP, attention
            biases. "mode": components along the singular vectors of the query-key matrix M. "frequency": rotary pairs.
        dictionary: a `tls.Dictionary` for the stream that enters the head's layer. The terms are then its active
            features, its bias and the error. First read the error's share, `attrs["error_share"]`.
        top: number of pairs with the largest |total| to keep; all other pairs become one row, `rest`. Default: all.
        remove: number of pairs with the largest |total| to take out, at most `top`: `measured` is the score lost
            without the pair, with every norm computed again. Default: None. Not with by="frequency".

    Returns:
        DataFrame, largest |total| first, in logits. Columns (`?`: not in every table): `query_term, key_term,
        query_source?, key_source?, symmetric, antisymmetric, phase, outside_m, total, total_se?, measured?,
        measured_se?, attention_predicted?, attention_measured?`. M_S, M_A, Im(M_t) and the biases (`outside_m`) of a
        row add up to `total`. `attrs`: `score`, `remainder` (score less the sum of rows), attention, positions, tokens.

    Raises:
        BadHead: the head does not exist.
        ScoreMismatch: the rows do not add up to the model's score, or its scores do not give its attention.
        UnsupportedArchitecture, BadWeights: a layer cannot be read, or the stream is not the sum of its writes.
        ValueError, TypeError: a prompt, position or key is not usable, or arguments do not go together.

    Not established: that a term caused the attention. Terms can cancel, and a norm changes when a term is removed.
    More: docs/attribution.md
    """
    top, remove = _counts(top, remove)
    _require_by(by, dictionary, remove)
    with measured(model) as view:
        require_stream(view)
        layer, index = one_head(view, head)
        if dictionary is not None:
            dictionary = dictionary.fitted(view, [layer])
        asked = asked_positions(view, prompt, query, key, every_key=False)
        distinct = asked.distinct()
        first = np.unique(distinct, return_index=True)[1]
        divided = [divided_score(view, (layer, index), asked.places[place], by, dictionary) for place in first]
        mean = _MeanScore.of_scores(divided, DistinctMean(np.bincount(distinct)))
        frame = mean.frame(top, by_source=by == "source" and dictionary is None, several=asked.several)
        settings = {"head": head_name(layer, index), "by": by if dictionary is None else "feature", "top": top}
        attrs = _attrs(view, asked, mean)
        if dictionary is not None:
            attrs = dictionary_notes(dictionary, divided, torch.tensor(mean.over.weights)) | attrs
        if remove is not None:
            attrs |= _add_removed(frame, remove, mean, several=asked.several)
        origin = view.origin(range(layer + 1), processing=True)
        return Measurement(QK_ATTRIBUTION, settings, origin).table(frame, **attrs)


@dataclass(frozen=True)
class _MeanScore:
    """Distinct attention scores and their division into pairs of terms, for means over the scores; largest first.

    Attributes:
        divided: each distinct score as a sum over pairs of terms.
        over: the mean over all scores that the user asked for.
        pairs: term of the query and term of the key, for each row; rows are sorted by |mean total|.
        parts: M_S, M_A, Im(M_t), and terms with biases, of each row and score, in logits.
    """

    divided: list[DividedScore]
    over: DistinctMean
    pairs: list[tuple[str, str]]
    parts: Float64[np.ndarray, "parts rows scores"]

    @classmethod
    def of_scores(cls, divided: list[DividedScore], over: DistinctMean) -> "_MeanScore":
        """Return divided scores as a `_MeanScore` with common rows: the pairs of terms that occur in any score.

        `divided` are the distinct scores, `over` the mean over them. Where a score lacks a pair, its parts are 0.
        """
        rows: dict[tuple[str, str], int] = {}
        places = []
        for score in divided:
            pairs = [(score.names[0][a], score.names[1][b]) for a, b in score.pairs.tolist()]
            places.append([rows.setdefault(pair, len(rows)) for pair in pairs])
        parts = np.zeros((len(PARTS), len(rows), len(divided)))
        for number, (score, place) in enumerate(zip(divided, places, strict=True)):
            parts[:, place, number] = score.parts.numpy()
        total = over.mean(parts).sum(0)
        order = np.argsort(-np.abs(total), kind="stable")
        pairs = list(rows)
        return cls(divided, over, [pairs[row] for row in order], parts[:, order])

    def frame(self, top: int | None, *, by_source: bool, several: bool) -> pd.DataFrame:
        """Return a DataFrame with a row for each pair of terms, largest |mean total| first.

        With `query_term, key_term`, the four parts `symmetric, antisymmetric, phase, outside_m` and their sum
        `total`, as means in logits. With `top`, only so many rows and a row `rest` with the sum of all others.
        `by_source`: True adds the columns `query_source` and `key_source`. `several`: True (several scores) adds the
        column `total_se`.
        """
        shown = len(self.pairs) if top is None else min(top, len(self.pairs))
        pairs, parts = self.pairs[:shown], self.parts[:, :shown]
        if shown < len(self.pairs):
            pairs = [*pairs, (REST, REST)]
            parts = np.concatenate([parts, (self.parts.sum(1) - parts.sum(1))[:, None]], axis=1)
        terms = {"query_term": [pair[0] for pair in pairs], "key_term": [pair[1] for pair in pairs]}
        if by_source:
            terms |= {"query_source": terms["query_term"], "key_source": terms["key_term"]}
        means = self.over.mean(parts)
        columns = {**terms, **dict(zip(PARTS, means, strict=True)), "total": means.sum(0)}
        return pd.DataFrame(columns | ({"total_se": self.over.se(parts.sum(0))} if several else {}))


def _attrs(view: AttentionView, asked: AskedPositions, mean: _MeanScore) -> dict[str, Any]:
    """Return a dict of attrs of the table of `qk_attribution`; several scores are averaged.

    Keys: `query, key, query_token, key_token, score` (the model's own), `remainder` (score minus the sum of all rows,
    the largest), `tolerance, attention, softcap, norm_behind_held`; for several scores also `n_prompts, n_distinct,
    score_se`. `asked` has the scores that the user asked for, `mean` their division, `view` is the model.
    """
    rows, layer = [divided.row for divided in mean.divided], mean.divided[0].run.layer
    score = np.array([row.score for row in rows])
    remainders = [divided.remainder for divided in mean.divided]
    attrs = {
        **asked.texts(view),
        "score": float(mean.over.mean(score)),
        "remainder": max(remainders, key=abs),
        "tolerance": max(row.tolerance for row in rows),
        "attention": float(mean.over.mean(np.array([row.attention for row in rows]))),
        "softcap": rows[0].form.layer.softcap,
        "norm_behind_held": any(view.behind(earlier)[1].kind != "none" for earlier in view.layers if earlier < layer),
    }
    if asked.several:
        attrs |= {**mean.over.noted, "score_se": float(mean.over.se(score))}
    return attrs


def _add_removed(frame: pd.DataFrame, count: int, mean: _MeanScore, *, several: bool) -> dict[str, Any]:
    """Remove the first `count` pairs of terms: add columns to `frame` in place, and return a dict of attrs.

    The columns are `measured` (the score lost without the pair), `attention_predicted` and `attention_measured`; with
    `several` scores (True) also `measured_se`. Later rows get NaN. The attrs are `removed_key_sources` (the key terms
    of these pairs), and `joint_score_predicted, joint_score_measured, joint_attention_predicted,
    joint_attention_measured`: score and attention lost when these key terms are removed together. `mean` has the
    divided scores.
    """
    pairs = mean.pairs[:count]
    total = mean.parts[:, : len(pairs)].sum(0)
    removals = np.stack([divided.without(pairs).numpy() for divided in mean.divided], axis=-1)
    columns = {"measured": mean.over.mean(removals)}
    if several:
        columns["measured_se"] = mean.over.se(removals)
    for name, change in (("attention_predicted", total), ("attention_measured", removals)):
        columns[name] = mean.over.mean(_attention_without(mean.divided, change))
    for name, values in columns.items():
        frame[name] = np.concatenate([values, np.full(len(frame) - len(pairs), np.nan)])
    taken, in_order = {pair[1] for pair in pairs}, (name for one in mean.divided for name in one.names[1])
    gone = [name for name in dict.fromkeys(in_order) if name in taken]
    joint = np.array([divided.without_key_terms(gone) for divided in mean.divided]).T
    attrs: dict[str, Any] = {"removed_key_sources": gone}
    for name, change in zip(("predicted", "measured"), joint, strict=True):
        attrs[f"joint_score_{name}"] = float(mean.over.mean(change))
        attrs[f"joint_attention_{name}"] = float(mean.over.mean(_attention_without(mean.divided, change[None]))[0])
    return attrs


def _attention_without(
    divided: list[DividedScore], change: Float64[np.ndarray, "rows scores"]
) -> Float64[np.ndarray, "rows scores"]:
    """Return the attention to the key if the score lost each amount in `change` (logits), for each row and score.

    `divided` are the scores, in the order of the last axis of `change`.
    """
    losses = zip(divided, change.T, strict=True)
    return np.stack([score.row.attention_without(torch.tensor(lost)).numpy() for score, lost in losses], axis=-1)


def _require_by(by: str, dictionary: Any, remove: int | None) -> None:
    """Raise ValueError or TypeError if by=, dictionary= and remove= of `qk_attribution` do not go together."""
    require_division(by, ("source", "mode", "frequency"), dictionary)
    if by == "frequency" and remove is not None:
        raise ValueError(
            "remove= does not go with by='frequency', because frequencies are not terms of the stream: leave remove= "
            "out, and remove frequencies by tls.ablate(model, head, tls.parts.Band([...]))"
        )


def _counts(top: int | None, remove: int | None) -> tuple[int | None, int | None]:
    """Return the arguments `top` and `remove` as whole numbers or None.

    Raises ValueError for a number below 1, or if `remove` exceeds `top`.
    """
    counts = [None if count is None else whole_number(count) for count in (top, remove)]
    for name, given, count in zip(("top", "remove"), (top, remove), counts, strict=True):
        if given is not None and (count is None or count < 1):
            raise ValueError(f"{name}= must be a number of pairs of terms, 1 or more; found {shown(given)}")
    if top is not None and remove is not None and remove > top:
        raise ValueError(f"remove={remove} is larger than top={top}: give remove= at most top=")
    return counts[0], counts[1]
