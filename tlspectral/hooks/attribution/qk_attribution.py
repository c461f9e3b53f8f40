"""`qk_attribution`: why a head attends from one token to another, as a sum over terms of their residual streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
import torch
from jaxtyping import Float64, Int

from tlspectral.hooks.attribution.asked_scores import AskedScores, asked_scores
from tlspectral.hooks.attribution.dictionary import Dictionary, require_division
from tlspectral.hooks.attribution.dictionary_null import dictionary_notes
from tlspectral.hooks.attribution.divisions import DividedBy, DividedScore, divided_score
from tlspectral.hooks.attribution.score_terms import PARTS
from tlspectral.models.reading import measured
from tlspectral.models.reading.view import AttentionView, one_head
from tlspectral.models.stream.writes import require_stream
from tlspectral.selection import Head, head_name, whole_number
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.schema import Schema, columns

REST = "rest"

QK_ATTRIBUTION = Schema(
    "qk_attribution",
    columns("""
        query_term           | label       | Term of the query's stream: what wrote it, mode, feature, frequency; else
                             |             | error, bias, alibi or rest.
        key_term             | label       | Term of the key's stream, else as query_term.
        query_source?        | label       | query_term where terms are sources.
        key_source?          | label       | key_term where terms are sources.
        symmetric            | logit       | (C(a, b) + C(b, a)) / 2, C being the part that is even in the offset.
        antisymmetric        | logit       | (C(a, b) - C(b, a)) / 2.
        phase                | logit       | The part that is odd in the offset; 0 without rotary positions.
        outside_m            | logit       | All of a pair with a bias, and ALiBi; else 0.
        total                | logit       | The four parts' sum. All rows sum to the score before softcap and mask.
        total_se?            | logit       | Standard error of total over several scores; equal ones are one
                             |             | observation.
        measured?            | logit       | S(x, y) - S(x - a, y) - S(x, y - b) + S(x - a, y - b), all norms taken
                             |             | again, x and y the tokens' streams, a and b the terms. NaN for rows not
                             |             | removed.
        measured_se?         | logit       | Standard error of measured over several scores.
        attention_predicted? | probability | Attention to the key if its score lost `total`, others as they are.
        attention_measured?  | probability | The same if it lost `measured`.
    """),
    "`tls.qk_attribution`; one score of one head as a sum",
)


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
    """Divide an attention score of a head among pairs of terms of the residual streams of its two tokens.

    >>> import tlspectral as tls, torch
    >>> tokens = torch.arange(3, 20).repeat(2)
    >>> table = tls.qk_attribution(tls.load_model("tiny-rope"), tokens, "L1H0", query=-1, key=17, top=8, remove=4)
    >>> table.loc[0, ["query_term", "key_term"]].tolist()
    ['embedding', 'L0H3']

    A stream is a sum of terms: by default what wrote to it (`by="source"`), which is the embedding, learned positions,
    each earlier head and MLP, and biases of attention. With the scale of each norm as a number of this run, the scaled
    score, before softcap and mask, is bilinear in the two streams: one row per pair of terms, and rows `bias` and
    `alibi` where the model has them. Each total is the sum of four parts, which are those that `ablate` removes:
    `symmetric` (M_S) and `antisymmetric` (M_A) of what is even in the offset, `phase` (Im(M_t)), and `outside_m`
    (biases and ALiBi). C(b, a) exchanges the vectors of the two tokens; a query/key norm keeps its factors. All is
    computed in float64 from one run of each prompt.

    `by="mode"`: the components of the streams along the singular vectors of M = W_Q W_K^T, norms folded in: the row of
    `mode k` and `mode l` is u_k at the query with v_l at the key (arXiv:2602.13524 divides attention so). Without
    rotation totals with k != l are 0. `no mode` is the rest of a stream, of which M reads nothing: its total is 0 but
    where M has a lower rank than W_Q or W_K, and its symmetric part is that of the tokens exchanged.
    `by="frequency"`: a row per rotary pair of the head, and `no rotation` for columns that do not turn, on both streams
    as they are.

    With a `dictionary` the terms are its features that are active, its bias, and the error, which is what is left of
    the stream. Look at `attrs["error_share"]` first: the sum of all rows with the error over the score. It can be above
    1 or below 0; beside it stands `error_share_turned`, with the decoder turned at random. `max_p` is of the largest
    row of two features, against features of other tokens of the prompt at query and key, each under its own norms;
    `max_p_floor` is the smallest p that any pair of these tokens could have.

    With `remove=`, the rows of largest |total| are taken out and the score is computed again, every norm taken again:
    a decomposition alone proves nothing. With the norms held, `measured` would be `total`. In `attrs`,
    `joint_score_measured` is what the score loses when all key terms of the removed rows are taken out of the key at
    once, and `joint_score_predicted` is the sum of all rows with such a key term.

    One score of one prompt is an anecdote. For several scores each number is the mean, with standard errors.

    Args:
        model: a TransformerBridge or HookedTransformer.
        prompt: one prompt in any form that `Task` takes: a string, ids [pos] or [1, pos], or a tokenizer's batch. Or
            several scores: a list of `(prompt, query, key)`, or a `Task` with `attention` or with named positions.
        head: "L5H1", (5, 1) or another form of one head.
        query, key: positions of the two tokens in the prompt; negative ones count from its end. For a task also names
            of its positions; None for a list, and for a task to take its `attention`.
        by: what the streams are divided into: `"source"`, `"mode"` or `"frequency"`.
        dictionary: features of the stream that enters the head's layer, see `tls.Dictionary`; with `by="source"`.
        top: the number of pairs with the largest |total| to keep; the others become one row, `rest`.
        remove: the number of pairs with the largest |total| to take out, at most `top`; not with `by="frequency"`.

    Returns:
        DataFrame, largest |total| first, `rest` last. Columns: `query_term, key_term, query_source?, key_source?,
        symmetric, antisymmetric, phase, outside_m, total, total_se?, measured?, measured_se?, attention_predicted?,
        attention_measured?`. `attrs`: `head`, `by`, `query`, `key`, `query_token`, `key_token`; `score`, the model's
        own; `remainder`, by how much it exceeds the sum of the rows; `tolerance`; `attention` to the key; `softcap`
        (None without one); `norm_behind_held`: True where a norm stands behind the attention of an earlier layer (Gemma
        2 and 3, OLMo 2), whose scale is then held as a number, a head's write being its share; with `remove`,
        `removed_key_sources`, `joint_score_...` and `joint_attention_...`; and the model's origin. For several scores,
        `n_prompts`, `n_distinct`, how many of them differ up to the query, `score_se`, means in place of numbers, lists
        in place of positions, and the largest `remainder` and `tolerance`.

    Raises:
        BadHead: no such head.
        ScoreMismatch: the rows do not sum to the model's score within 1e-4 + 1e-5 |score| (float32 and wider; 16-bit: 4
            eps times the largest |score| of the layer), or its scores do not give its attention.
        UnsupportedArchitecture, BadWeights: a layer cannot be read; the residual stream is not the sum of its writes,
            as under hooks that edit it; frequencies of a layer without rotary positions.
        ValueError, TypeError: a prompt that cannot be read or is not one, a position outside it, a key that is masked,
            or arguments that do not go together.

    What it does not establish: that a term caused the attention. The terms are exact for this run with its norms;
    terms of opposite sign can cancel, a norm shrinks when what it reads is removed, and a source that is removed would
    also be missed elsewhere. Modes and frequencies are of the head's own making: that few of them carry a score says
    nothing of what the model represents. A HookedTransformer with folded value biases counts these to `attention
    biases`.
    """
    top, remove = _counts(top, remove)
    _require_by(by, dictionary, remove)
    with measured(model) as view:
        require_stream(view)
        layer, index = one_head(view, head)
        if dictionary is not None:
            dictionary = dictionary.fitted(view, [layer])
        asked = asked_scores(view, prompt, query, key)
        distinct = asked.distinct
        first = np.unique(distinct, return_index=True)[1]
        divided = [divided_score(view, (layer, index), asked.scores[place], by, dictionary) for place in first]
        mean = _MeanScore.of_scores(divided, np.bincount(distinct))
        frame = mean.frame(top, by_source=by == "source" and dictionary is None, several=asked.several)
        settings = {"head": head_name(layer, index), "by": by if dictionary is None else "feature", "top": top}
        attrs = _attrs(view, asked, mean)
        if dictionary is not None:
            attrs = dictionary_notes(dictionary, divided, torch.tensor(mean.weights)) | attrs
        if remove is not None:
            attrs |= _add_removed(frame, remove, mean, several=asked.several)
        origin = view.origin(range(layer + 1), processing=True)
        return Measurement(QK_ATTRIBUTION, settings, origin).table(frame, **attrs)


@dataclass(frozen=True)
class _MeanScore:
    """Distinct scores of which the mean is taken, in rows of one pair of terms each, largest |mean total| first.

    `counts` says how often each score was asked for.
    """

    divided: list[DividedScore]
    counts: Int[np.ndarray, "scores"]
    pairs: list[tuple[str, str]]
    parts: Float64[np.ndarray, "parts rows scores"]

    @classmethod
    def of_scores(cls, divided: list[DividedScore], counts: np.ndarray) -> "_MeanScore":
        rows: dict[tuple[str, str], int] = {}
        places = []
        for each in divided:
            pairs = [(each.names[0][a], each.names[1][b]) for a, b in each.pairs.tolist()]
            places.append([rows.setdefault(pair, len(rows)) for pair in pairs])
        parts = np.zeros((len(PARTS), len(rows), len(divided)))
        for number, (each, place) in enumerate(zip(divided, places, strict=True)):
            parts[:, place, number] = each.parts.numpy()
        total = (parts @ (counts / counts.sum())).sum(0)
        order = np.argsort(-np.abs(total), kind="stable")
        pairs = list(rows)
        return cls(divided, counts, [pairs[row] for row in order], parts[:, order])

    @property
    def weights(self) -> Float64[np.ndarray, "scores"]:
        """Share of each score in the mean."""
        return self.counts / self.counts.sum()

    def mean(self, values: Float64[np.ndarray, "*rows scores"]) -> Float64[np.ndarray, "*rows"]:
        """Return means over what was asked for."""
        return np.asarray(values @ self.weights)

    def se(self, values: Float64[np.ndarray, "*rows scores"]) -> Float64[np.ndarray, "*rows"]:
        """Return standard errors of `mean`, of which equal scores are one observation; NaN for one."""
        deviations = (values - self.mean(values)[..., None]) * self.weights * len(self.counts)
        n = len(self.counts)
        return np.asarray(scipy.stats.sem(deviations, axis=-1)) if n > 1 else np.full(values.shape[:-1], np.nan)

    def frame(self, top: int | None, *, by_source: bool, several: bool) -> pd.DataFrame:
        """Return the table of all rows, or of the first `top` and the sum of the others."""
        shown = len(self.pairs) if top is None else min(top, len(self.pairs))
        pairs, parts = self.pairs[:shown], self.parts[:, :shown]
        if shown < len(self.pairs):
            pairs = [*pairs, (REST, REST)]
            parts = np.concatenate([parts, (self.parts.sum(1) - parts.sum(1))[:, None]], axis=1)
        terms = {"query_term": [pair[0] for pair in pairs], "key_term": [pair[1] for pair in pairs]}
        if by_source:
            terms |= {"query_source": terms["query_term"], "key_source": terms["key_term"]}
        means = self.mean(parts)
        columns = {**terms, **dict(zip(PARTS, means, strict=True)), "total": means.sum(0)}
        return pd.DataFrame(columns | ({"total_se": self.se(parts.sum(0))} if several else {}))


def _attrs(view: AttentionView, asked: AskedScores, mean: _MeanScore) -> dict[str, Any]:
    """Return what `attrs` say of the scores beside settings, removal and dictionary."""
    rows, layer = [each.row for each in mean.divided], mean.divided[0].run.layer
    score = np.array([row.score for row in rows])
    remainders = [each.remainder for each in mean.divided]
    attrs = {
        **_texts(view, asked),
        "score": float(mean.mean(score)),
        "remainder": max(remainders, key=abs),
        "tolerance": max(row.tolerance for row in rows),
        "attention": float(mean.mean(np.array([row.attention for row in rows]))),
        "softcap": rows[0].form.layer.softcap,
        "norm_behind_held": any(view.behind(one)[1].kind != "none" for one in view.layers if one < layer),
    }
    if asked.several:
        attrs |= {
            "n_prompts": int(mean.counts.sum()),
            "n_distinct": len(mean.counts),
            "score_se": float(mean.se(score)),
        }
    return attrs


def _add_removed(frame: pd.DataFrame, count: int, mean: _MeanScore, *, several: bool) -> dict[str, Any]:
    """Write the columns of `remove=` into the table, and return what `attrs` say of the removal of all pairs."""
    pairs = mean.pairs[:count]
    total = mean.parts[:, : len(pairs)].sum(0)
    removals = np.stack([each.without(pairs).numpy() for each in mean.divided], axis=-1)
    columns = {"measured": mean.mean(removals)}
    if several:
        columns["measured_se"] = mean.se(removals)
    for name, change in (("attention_predicted", total), ("attention_measured", removals)):
        columns[name] = mean.mean(_attention_without(mean.divided, change))
    for name, values in columns.items():
        frame[name] = np.concatenate([values, np.full(len(frame) - len(pairs), np.nan)])
    gone = [name for name in _order_of_terms(mean) if name in {pair[1] for pair in pairs}]
    joint = np.array([each.without_key_terms(gone) for each in mean.divided]).T
    attrs: dict[str, Any] = {"removed_key_sources": gone}
    for name, change in zip(("predicted", "measured"), joint, strict=True):
        attrs[f"joint_score_{name}"] = float(mean.mean(change))
        attrs[f"joint_attention_{name}"] = float(mean.mean(_attention_without(mean.divided, change[None]))[0])
    return attrs


def _attention_without(
    divided: list[DividedScore], change: Float64[np.ndarray, "rows scores"]
) -> Float64[np.ndarray, "rows scores"]:
    each = zip(divided, change.T, strict=True)
    return np.stack([score.row.attention_without(torch.tensor(lost)).numpy() for score, lost in each], axis=-1)


def _order_of_terms(mean: _MeanScore) -> list[str]:
    """Return the terms of the keys, each once, in the order in which the streams have them."""
    return list(dict.fromkeys(name for each in mean.divided for name in each.names[1]))


def _require_by(by: str, dictionary: Any, remove: int | None) -> None:
    require_division(by, ("source", "mode", "frequency"), dictionary)
    if by == "frequency" and remove is not None:
        raise ValueError(
            "remove= takes terms out of the residual streams, and frequencies are columns of the head: ablate "
            "tls.parts.Band in place of it"
        )


def _counts(top: int | None, remove: int | None) -> tuple[int | None, int | None]:
    counts = [None if count is None else whole_number(count) for count in (top, remove)]
    for name, given, count in zip(("top", "remove"), (top, remove), counts, strict=True):
        if given is not None and (count is None or count < 1):
            raise ValueError(f"{name} is a number of pairs of sources, 1 or more; found {given!r}")
    if top is not None and remove is not None and remove > top:
        raise ValueError(f"remove={remove} takes out pairs that top={top} does not show: give remove at most top")
    return counts[0], counts[1]


def _texts(view: AttentionView, asked: AskedScores) -> dict[str, Any]:
    """Return positions and tokens of query and key: of one score as they are, of several as lists."""
    tokenizer, found = getattr(view.model, "tokenizer", None), {}
    for name in ("query", "key"):
        positions = [getattr(score, name) for score in asked.scores]
        ids = [int(score.tokens[0, at]) for score, at in zip(asked.scores, positions, strict=True)]
        tokens = ids if tokenizer is None else [tokenizer.decode([token]) for token in ids]
        found[name], found[f"{name}_token"] = (positions, tokens) if asked.several else (positions[0], tokens[0])
    return found
