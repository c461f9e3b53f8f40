"""`qk_attribution`: why a head attends from one token to another, as a sum over what wrote to the residual stream."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.hooks.attribution.score_form import PARTS, head_form, pair_parts, removed_key_sources, removed_pairs
from tlspectral.hooks.attribution.two_tokens import QueryRow, TwoTokens, query_row, trace
from tlspectral.models.attention.head_scores import rotation_tables
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.layer import require_even_scale, require_own_projections
from tlspectral.models.reading.view import AttentionView, heads_by_layer, require_stream
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.selection import Head, head_name, whole_number
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.schema import Schema, columns

REST, BIAS, ALIBI = "rest", "bias", "alibi"

QK_ATTRIBUTION = Schema(
    "qk_attribution",
    columns("""
        query_source         | label       | What wrote this part of the query's stream; else bias, alibi or rest.
        key_source           | label       | What wrote this part of the key's stream; else bias, alibi or rest.
        symmetric            | logit       | (C(a, b) + C(b, a)) / 2, C being the part that is even in the offset.
        antisymmetric        | logit       | (C(a, b) - C(b, a)) / 2.
        phase                | logit       | The part that is odd in the offset; 0 without rotary positions.
        outside_m            | logit       | All of a pair with a bias, and ALiBi; else 0.
        total                | logit       | The four parts' sum. All rows sum to the score before softcap and mask.
        measured?            | logit       | S(x, y) - S(x - a, y) - S(x, y - b) + S(x - a, y - b), all norms taken
                             |             | again, x and y the tokens' streams, a and b the sources. NaN for rows not
                             |             | removed.
        attention_predicted? | probability | Attention to the key if its score lost `total`, others as they are.
        attention_measured?  | probability | The same if it lost `measured`.
    """),
    "`tls.qk_attribution`; one score of one head as a sum",
)


def qk_attribution(
    model: Any,
    prompt: Any,
    head: Head,
    query: int,
    key: int,
    *,
    top: int | None = None,
    remove: int | None = None,
) -> pd.DataFrame:
    """Divide one attention score of a head among pairs of what wrote to the residual streams of its two tokens.

    >>> import tlspectral as tls, torch
    >>> tokens = torch.arange(3, 20).repeat(2)
    >>> table = tls.qk_attribution(tls.load_model("tiny-rope"), tokens, "L1H0", query=-1, key=17, top=8, remove=4)
    >>> table.loc[0, ["query_source", "key_source"]].tolist()
    ['embedding', 'L0H3']

    The streams of the query token and of the key token are sums of writes: the embedding, learned positions, each
    earlier head, each earlier MLP, and biases. With the scale of each norm as a number of this run, the scaled score,
    before softcap and mask, is bilinear in the two streams: one row per pair of sources, and rows `bias` and `alibi`
    where the model has them. Each total is the sum of four parts, which are those that `ablate` removes: `symmetric`
    (M_S) and `antisymmetric` (M_A) of what is even in the offset, `phase` (Im(M_t)), and `outside_m` (biases and
    ALiBi). C(b, a) exchanges the vectors of the two tokens; a query/key norm keeps its factors. All is computed in
    float64 from one run.

    With `remove=`, the rows of largest |total| are taken out and the score is computed again, every norm taken again:
    a decomposition alone proves nothing. With the norms held, `measured` would be `total`. In `attrs`,
    `joint_score_measured` is what the score loses when all key sources of the removed rows are taken out of the key at
    once, and `joint_score_predicted` is the sum of all rows with such a key source.

    Args:
        model: a TransformerBridge or HookedTransformer.
        prompt: one prompt in any form that `Task` takes: a string, ids [pos] or [1, pos], or a tokenizer's batch.
        head: "L5H1", (5, 1) or another form of one head.
        query, key: positions of the two tokens in the prompt; negative ones count from its end.
        top: the number of pairs with the largest |total| to keep; the others become one row, `rest`.
        remove: the number of pairs with the largest |total| to take out, at most `top`.

    Returns:
        DataFrame, largest |total| first, `rest` last. Columns: `query_source, key_source, symmetric,
        antisymmetric, phase, outside_m, total, measured?, attention_predicted?, attention_measured?`. `attrs`:
        `head`, `query`, `key`, `query_token`, `key_token`; `score`, the model's own; `remainder`, by how much it
        exceeds the sum of the rows; `tolerance`; `attention` to the key; `softcap` (None without one);
        `norm_behind_held`: True where a norm stands behind the attention of an earlier layer (Gemma 2 and 3, OLMo 2),
        whose scale is then held as a number, a head's write being its share; with `remove`, `removed_key_sources`,
        `joint_score_...` and `joint_attention_...`; and the model's origin.

    Raises:
        BadHead: no such head.
        ScoreMismatch: the rows do not sum to the model's score within 1e-4 + 1e-5 |score| (float32 and wider; 16-bit: 4
            eps times the largest |score| of the layer), or its scores do not give its attention.
        UnsupportedArchitecture, BadWeights: a layer cannot be read; the residual stream is not the sum of its writes,
            as under hooks that edit it.
        ValueError, TypeError: a prompt that cannot be read or is not one, a position outside it, a key that is masked,
            or numbers that do not go together.

    What it does not establish: that a source caused the attention. The terms are exact for this run with its norms;
    terms of opposite sign can cancel, a norm shrinks when what it reads is removed, and a source that is removed would
    also be missed elsewhere. A HookedTransformer with folded value biases counts these to `attention biases`.
    """
    top, remove = _counts(top, remove)
    view = attention_view(model)
    require_stream(view)
    ((layer, (index,)),) = heads_by_layer(view, [head]).items()
    tokens = packed_prompts(view, prompt).tokens
    if len(tokens) != 1:
        raise ValueError(f"one score is of one prompt; found {len(tokens)} prompts")
    query, key = _positions(query, key, tokens.shape[1])
    raw = view.raw(layer)
    require_even_scale(raw, layer, tokens.shape[1])
    require_own_projections(raw, layer, "a score is not taken apart through the norms of its latents")
    traced = trace(view, tokens, layer, index, query, key)
    tables = rotation_tables(view, raw.rotary, layer, tokens.shape[1], traced.captured)
    form = head_form(view, layer, index, query, key, tables)
    row = query_row(view, layer, traced, form, tables, query, key)
    rows = _Rows.of(*pair_parts(form, traced.written, traced.residual), traced.sources, row.alibi)
    row.require_sum(float(rows.total.sum()))
    frame = rows.frame(top)
    settings = {"head": head_name(layer, index), "query": query, "key": key, "top": top}
    attrs = {
        **_texts(view, tokens, query, key),
        "score": row.score,
        "remainder": row.score - float(rows.total.sum()),
        "tolerance": row.tolerance,
        "attention": float(traced.pattern[key]),
        "softcap": form.layer.softcap,
        "norm_behind_held": any(view.behind(one)[1].kind != "none" for one in view.layers if one < layer),
    }
    if remove is not None:
        attrs |= _add_removed(frame, remove, rows, traced, row)
    return Measurement(QK_ATTRIBUTION, settings, view.origin(range(layer + 1), runs=True)).table(frame, **attrs)


@dataclass(frozen=True)
class _Rows:
    """All pairs of sources, largest |total| first; `names` are of the sources, then of the bias and of ALiBi."""

    names: list[str]
    pairs: Int[Tensor, "rows two"]
    parts: Float64[Tensor, "parts rows"]

    @classmethod
    def of(cls, parts: Tensor, biased: tuple[bool, bool], sources: list[str], alibi: float | None) -> "_Rows":
        n_sources = len(sources)
        present = torch.ones(parts.shape[1:], dtype=torch.bool)
        present[n_sources], present[:, n_sources] = biased
        present[n_sources, n_sources] = all(biased)
        pairs, parts = present.nonzero(), parts[:, present]
        if alibi is not None:
            pairs = torch.cat([pairs, torch.full((1, 2), n_sources + 1)])
            parts = torch.cat([parts, parts.new_tensor([[0.0], [0.0], [0.0], [alibi]])], dim=1)
        order = parts.sum(0).abs().argsort(descending=True, stable=True)
        return cls([*sources, BIAS, ALIBI], pairs[order], parts[:, order])

    @property
    def total(self) -> Float64[Tensor, "rows"]:
        """Sum of the parts of each pair."""
        return self.parts.sum(0)

    def frame(self, top: int | None) -> pd.DataFrame:
        """Return the table of all pairs, or of the first `top` and the sum of the others."""
        shown = len(self.pairs) if top is None else min(top, len(self.pairs))
        rest = int(shown < len(self.pairs))
        sources = torch.cat([self.pairs[:shown], self.pairs.new_full((rest, 2), len(self.names))])
        names = np.array([*self.names, REST], dtype=object)[sources.numpy()]
        parts = self.parts[:, :shown]
        others = self.parts.sum(1) - parts.sum(1)
        parts = torch.cat([parts, others[:, None].expand(-1, rest)], dim=1)
        return pd.DataFrame(
            {
                "query_source": names[:, 0],
                "key_source": names[:, 1],
                **{name: part.numpy() for name, part in zip(PARTS, parts, strict=True)},
                "total": parts.sum(0).numpy(),
            }
        )


def _add_removed(frame: pd.DataFrame, count: int, rows: _Rows, traced: TwoTokens, row: QueryRow) -> dict[str, Any]:
    """Write the columns of `remove=` into the table, and return what `attrs` say of the removal of all pairs."""
    pairs, total = rows.pairs[:count], rows.total
    alibi, streams = len(rows.names) - 1, (traced.written, traced.residual)
    # Nothing is read of ALiBi, so that the score without it is the score less its value.
    is_alibi = pairs[:, 0] == alibi
    measured = removed_pairs(row.form, *streams, torch.where(is_alibi[:, None], 0, pairs))
    measured = torch.where(is_alibi, total[:count], measured)
    columns = {
        "measured": measured,
        "attention_predicted": row.attention_without(total[:count]),
        "attention_measured": row.attention_without(measured),
    }
    for name, values in columns.items():
        frame[name] = np.concatenate([values.numpy(), np.full(len(frame) - len(pairs), np.nan)])
    gone = sorted(set(pairs[:, 1].tolist()))
    of_gone = torch.isin(rows.pairs[:, 1], torch.tensor(gone))
    joint = {
        "predicted": total[of_gone].sum(),
        "measured": removed_key_sources(row.form, *streams, set(gone)) + (row.alibi or 0.0) * (alibi in gone),
    }
    attrs: dict[str, Any] = {"removed_key_sources": [rows.names[source] for source in gone]}
    for name, change in joint.items():
        attrs[f"joint_score_{name}"] = float(change)
        attrs[f"joint_attention_{name}"] = float(row.attention_without(change[None])[0])
    return attrs


def _positions(query: int, key: int, length: int) -> tuple[int, int]:
    positions = []
    for name, given in (("query", query), ("key", key)):
        position = whole_number(given)
        if position is None:
            raise TypeError(f"{name} is the position of a token, a whole number; found {given!r}")
        if not -length <= position < length:
            raise ValueError(f"{name} {position} is not in the prompt, which has tokens 0 to {length - 1}")
        positions.append(position % length)
    if positions[1] > positions[0]:
        raise ValueError(f"key {positions[1]} is behind query {positions[0]}: a query sees itself and earlier keys")
    return positions[0], positions[1]


def _counts(top: int | None, remove: int | None) -> tuple[int | None, int | None]:
    counts = [None if count is None else whole_number(count) for count in (top, remove)]
    for name, given, count in zip(("top", "remove"), (top, remove), counts, strict=True):
        if given is not None and (count is None or count < 1):
            raise ValueError(f"{name} is a number of pairs of sources, 1 or more; found {given!r}")
    if top is not None and remove is not None and remove > top:
        raise ValueError(f"remove={remove} takes out pairs that top={top} does not show: give remove at most top")
    return counts[0], counts[1]


def _texts(view: AttentionView, tokens: Int[Tensor, "one pos"], query: int, key: int) -> dict[str, Any]:
    tokenizer = getattr(view.model, "tokenizer", None)
    ids = {"query_token": int(tokens[0, query]), "key_token": int(tokens[0, key])}
    return ids if tokenizer is None else {name: tokenizer.decode([token]) for name, token in ids.items()}
