"""`ov_attribution`: the output of heads at one position, as a sum over the tokens that they attend to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.errors import ScoreMismatch, UnsupportedArchitecture
from tlspectral.errors.settings import checked_settings
from tlspectral.hooks.attribution.asked_positions import (
    AskedPosition,
    DistinctMean,
    asked_positions,
)
from tlspectral.hooks.attribution.dictionary import ERROR, Dictionary, require_division
from tlspectral.hooks.attribution.heads_run import HeadsRun, HeadWrite, head_write, heads_run
from tlspectral.hooks.attribution.ov_directions import Direction, directions_of
from tlspectral.hooks.attribution.stream_terms import source_terms
from tlspectral.models.attention.tolerances import LOOK_FOR_HOOKS, nearest_bound, noise_of
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.layer import require_own_projections
from tlspectral.models.reading.norms import Normalization, double, folded_bias, folded_weight
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.text import token_text
from tlspectral.models.stream.writes import require_stream
from tlspectral.selection.heads_as_written import Heads
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.measurement import Measurement, stacked
from tlspectral.tables.schema import Schema, columns

Term = Literal["token", "source", "head"]

BIAS = "bias"
AT_ONCE = 128 * 2**20
"""Most bytes of the sources' writes at the keys that are computed together; memory holds several copies."""

OV_ATTRIBUTION = Schema(
    "ov_attribution",
    (
        *HEAD,
        *columns("""
            source?          | label            | Head, MLP or embedding that wrote to the key's stream, or a feature;
                             |                  | or error or bias.
            position?        | index            | Position of the key that the head attends to.
            token?           | text             | Token of the key; its id without a tokenizer; empty if several
                             |                  | prompts differ there.
            contribution?    | of the direction | Inner product of the term's write with the direction. With direction=.
                             |                  | Over several prompts the mean, 0 where a prompt lacks the term.
            contribution_se? | of the direction | Standard error of contribution over several prompts; equal ones are
                             |                  | one observation.
            norm?            | of the stream    | Length of the term's write; under LayerNorm without its mean over
                             |                  | d_model, which no reader sees. Without direction=. Over several
                             |                  | prompts the mean.
            norm_se?         | of the stream    | Standard error of norm over several prompts.
            cosine?          | cosine           | Cosine between the term's write and the head's whole write at the
                             |                  | query (centred as for norm); NaN for a write of 0. Without direction=.
                             |                  | Over several prompts the mean.
            cosine_se?       | cosine           | Standard error of cosine over several prompts.
        """),
    ),
    "`tls.ov_attribution`; what heads write at one position as a sum",
)


@checked_settings
def ov_attribution(
    model: Any,
    prompt: Any,
    heads: Heads | None,
    query: Any = None,
    key: Any = None,
    *,
    direction: Any = None,
    by: Term = "token",
    dictionary: Dictionary | None = None,
) -> pd.DataFrame:
    """Split the output of heads at one position into a sum over the tokens that they attend to.

    >>> import tlspectral as tls, torch
    >>> model, tokens = tls.load_model("tiny-rope"), torch.arange(3, 20).repeat(2)
    >>> table = tls.ov_attribution(model, tokens, None, query=-2, direction=(19, 4))
    >>> table.loc[0, ["name", "token"]].tolist()
    ['L1H3', '19']

    Use it to see which tokens a head copies from. Attention, norms and gates are held as in this run.

    Args:
        model: TransformerBridge or HookedTransformer.
        prompt: text or token ids [pos]. For means and their errors: several prompts, a list of `(prompt, query)` or
            `(prompt, query, key)`, or a `Task`, whose named positions and `attention=` can be used.
        heads: "L5H1", (5, 1), "L5" (a layer), "L5KV1" (a key/value group), or a list of these. None: all heads (if
            `direction` is a receiver, those in earlier layers). Several heads need a direction.
        query: where the heads write: a position, negative from the end; the name of one of the task; or the text of a
            token that occurs once in each prompt. Default: None, for a list and for `Task.attention`.
        key: the token that they read, in the same forms. Default: None, all tokens.
        direction: the number to compute for each term. Default: None, the term's length, and its cosine with the whole
            write. Answers (" Mary", " John"), two lists of them or `task.metric`: its contribution to logit(first) -
            logit(second). A receiver "L20H3.q", "L20H3.v" or "L18KV2.k": its component along the receiver's input. A
            vector [d_model]: the inner product.
        by: "token" (default): a row per head and key, for several prompts by position. "head": a row per head.
            "source": a row per head, key and source of the key's stream (embedding, earlier heads and MLPs, biases).
        dictionary: with by="source", a `tls.Dictionary` for the stream that enters the heads' layer; its active
            features, `dictionary bias` and `error` are then the sources. First read attrs["error_share"].

    Returns:
        DataFrame, largest |contribution| (or norm) first. Columns (`?`: not in every table): `layer, head, name,
        source?, position?, token?, contribution?, contribution_se?, norm?, norm_se?, cosine?, cosine_se?`.
        `contribution` is in logits for answers. `attrs["remainder"]`: largest relative error of the sum of terms.

    Raises:
        BadHead: a head or receiver does not exist.
        ScoreMismatch: the terms do not add up to the model's own write, or the sources to its values.
        UnsupportedArchitecture, BadWeights: a layer cannot be read or divided in this way.
        ValueError, TypeError: arguments do not go together, or a prompt or position is not usable.

    Not established: that the head matters. This is the direct effect alone. More: docs/attribution.md
    """
    require_division(by, ("token", "source", "head"), dictionary)
    with measured(model) as view:
        require_stream(view)
        chosen = heads_by_layer(view, heads)
        asked = asked_positions(view, prompt, query, key, every_key=True)
        along = directions_of(view, [place.tokens for place in asked.places], direction)
        chosen = _require_together(view, chosen, along[0], every=heads is None)
        if by == "source":
            _require_sources(view, chosen)
            dictionary = None if dictionary is None else dictionary.fitted(view, chosen)
        by_key = by != "head" and asked.places[0].key is None
        if asked.several and by_key and len({place.query for place in asked.places}) > 1:
            raise ValueError(
                f"by={by!r} has a row per position, and these prompts differ in the position of the query: give key=, "
                "or by='head'"
            )
        whole = [] if by != "source" else list(chosen) if dictionary is not None else list(range(max(chosen) + 1))
        distinct = asked.distinct(along)
        mean = DistinctMean(np.bincount(distinct))
        first = np.unique(distinct, return_index=True)[1]
        divided = [_divided(view, asked.places[one], chosen, along[one], by, dictionary, whole) for one in first]
        frames = [one.frame for one in divided]
        if asked.several:
            frames = frames if by_key else [frame.drop(columns="position", errors="ignore") for frame in frames]
            frames = [_mean_rows(frames, mean)]
        sizes = frames[0]["contribution" if "contribution" in frames[0] else "norm"].abs()
        frame = frames[0].iloc[np.argsort(-sizes.to_numpy(), kind="stable")].reset_index(drop=True)
        if "position" in frame:
            # A position whose token differs between prompts has no text.
            ids = np.stack([place.tokens[0, : asked.places[0].query + 1].numpy() for place in asked.places])
            texts = np.array([token_text(view, int(token)) for token in ids[0]], dtype=object)
            frame["token"] = np.where((ids == ids[0]).all(0), texts, "")[frame["position"]]
        words = ["" if one is None else one.in_words(view) for one in along]
        attrs = {
            **asked.texts(view),
            "direction": None if direction is None else words[0] if len(set(words)) == 1 else words,
            **_mean_notes([one.notes for one in divided], mean),
            **(mean.noted if asked.several else {}),
            "remainder": max(one.remainder for one in divided),
            "tolerance": max(noise_of("live z", view.raw(layer).w_q.dtype)[1] for layer in chosen),
            "norm_behind_held": any(
                view.behind(layer)[1].kind != "none" for layer in {*chosen, *whole} if layer in view.layers
            ),
            "gate_held": any(view.raw(layer).w_gate is not None for layer in chosen),
        }
        if dictionary is not None:
            along_total = (
                frame["contribution"] if "contribution" in frame else (frame["norm"] * frame["cosine"]).fillna(0.0)
            )
            share = float(along_total[frame["source"] == ERROR].sum() / along_total.sum())
            attrs = {"error_share": share, **dictionary.described()} | attrs
        settings = {"by": by if dictionary is None else "feature"}
        origin = view.origin(range(max(chosen) + 1), processing=True)
        return Measurement(OV_ATTRIBUTION, settings, origin).table(frame, **attrs)


class _Divided(NamedTuple):
    """The terms of one prompt.

    Attributes:
        frame: a row per term, without the column `token`.
        notes: attrs of the direction.
        remainder: largest distance of a head's sum from its own write, as a share of its length.
    """

    frame: pd.DataFrame
    notes: dict[str, Any]
    remainder: float


def _divided(
    view: AttentionView,
    place: AskedPosition,
    chosen: dict[int, list[int]],
    along: Direction | None,
    by: Term,
    dictionary: Dictionary | None,
    whole: list[int],
) -> _Divided:
    """Run one prompt and divide what the heads write at its query into terms, as `_Divided`.

    `view` is the model. `place` has the prompt, the query and the key (None: all keys), `chosen` the heads by layer,
    `along` the direction or None, `by` the kind of terms, `dictionary` the features of by="source" or None, and `whole`
    the layers whose streams are kept at all keys.
    """
    point = None if along is None else along.point(view)
    answers = along is not None and along.layer(view) == view.n_layers and point is not None
    run = heads_run(view, place.tokens, place.query, list(chosen), whole=whole, also=point, logits=answers)
    vector, notes = (None, {}) if along is None else along.vector(view, run)
    writes = [head_write(view, run, layer, some) for layer, some in chosen.items()]
    tables = [_rows(view, run, write, vector, by, dictionary, place.key) for write in writes]
    return _Divided(stacked(tables), notes, max(write.remainder for write in writes))


def _mean_rows(frames: list[pd.DataFrame], mean: DistinctMean) -> pd.DataFrame:
    """Return the mean of tables of distinct prompts, with a column `NAME_se` behind each column of numbers.

    `frames` are the tables of one call, `mean` is the mean over them. A row that a prompt lacks counts as 0 (NaN for
    `cosine`).
    """
    names = [name for name in ("contribution", "norm", "cosine") if name in frames[0]]
    labels = [name for name in frames[0] if name not in names]
    beside = pd.concat(
        [frame.set_index(labels)[names] for frame in frames], axis=1, keys=range(len(frames)), sort=False
    )
    table = beside.index.to_frame(index=False)
    for name in names:
        values = beside.xs(name, axis=1, level=1).fillna(np.nan if name == "cosine" else 0.0).to_numpy()
        table[name], table[f"{name}_se"] = mean.mean(values), mean.se(values)
    return table


def _mean_notes(notes: list[dict[str, Any]], mean: DistinctMean) -> dict[str, Any]:
    """Return the attrs of a direction as means over the distinct prompts; `mean` is the mean over them.

    `notes` has the attrs of each prompt: numbers, or None if the model lacks them.
    """
    values = {name: [note[name] for note in notes] for name in notes[0]}
    return {name: None if None in some else float(mean.mean(np.array(some))) for name, some in values.items()}


def _require_together(
    view: AttentionView, chosen: dict[int, list[int]], along: Direction | None, *, every: bool
) -> dict[int, list[int]]:
    """Return the heads to measure, as a dict from layer to heads, after comparing them with the direction.

    `view` is the model. `chosen` is the dict of the user's heads, `along` the direction or None. Without a direction
    only one head may be measured; with one, heads must be in layers before its receiver. `every`: True if the user gave
    no heads, so heads after the receiver are left out instead of refused. Raises ValueError for several heads without a
    direction, for heads after the receiver, and if no head remains.
    """
    if along is None:
        if sum(map(len, chosen.values())) != 1:
            raise ValueError("several heads need a direction, to compare their writes: give direction=, or one head")
        return chosen
    below = along.layer(view)
    if every:
        chosen = {layer: heads for layer, heads in chosen.items() if layer < below}
    late = [layer for layer in chosen if layer >= below]
    if late or not chosen:
        where = f"heads of layer {late[0]} write" if late else "any head writes"
        raise ValueError(f"direction={along.in_words(view)!r} reads before {where}: give a receiver in a later layer")
    return chosen


def _require_sources(view: AttentionView, chosen: dict[int, list[int]]) -> None:
    """Raise UnsupportedArchitecture for layers whose values are not linear in the stream (norm of values or latent).

    `view` is the model. `chosen` is a dict from layer to heads.
    """
    for layer in chosen:
        raw = view.raw(layer)
        require_own_projections(raw, layer, "values cannot be divided among sources, because their latent has a norm")
        if raw.v_norm is not None:
            raise UnsupportedArchitecture(
                f"layer {layer}: its values have a norm, so they cannot be divided among sources: give by='token' or "
                "by='head'"
            )


def _rows(
    view: AttentionView,
    run: HeadsRun,
    write: HeadWrite,
    vector: Float64[Tensor, "d_model"] | None,
    by: Term,
    dictionary: Dictionary | None,
    key: int | None,
) -> pd.DataFrame:
    """Return a DataFrame with the rows of the heads of one layer; the column `token` is filled later.

    `view` is the model. A row has `layer, head`, with by="position" or "source" also `position`, with "source" also
    `source`, and `contribution`, or `norm, cosine` without a direction. `run` has the activations, `write` the heads'
    output at the query, `vector` the direction (or None), `by` the kind of terms ("head", "position" or "source"),
    `dictionary` the features of by="source" or None, `key` the position of the only key, or None for all keys.
    """
    measure = _Measure.of_write(view, write, vector)
    keys = range(run.query + 1) if key is None else range(key, key + 1)
    if by == "source":
        value = _values_of_stream(view, write.layer)
        pieces = [measure.frame(*terms) for terms in _source_rows(view, run, write, value, measure, dictionary, keys)]
        return stacked(pieces)
    terms = (write.weights[..., None] * (write.values @ measure.project))[:, keys.start : keys.stop]
    if by == "head":
        return measure.frame(terms.sum(1, keepdim=True), {})
    return measure.frame(terms, {"position": np.array(keys)})


@dataclass(frozen=True)
class _Measure:
    """Turns terms of z (a head's output before W_O) into numbers: a component along a direction, or norm and cosine.

    Attributes:
        write: the heads and their write at the query.
        project: for a direction d the gate times W_O d, so that values times this are one number; else the gate, so
            that values times this are gated values.
        directed: True if the user gave a direction.
        centred: True if a LayerNorm reads the stream, so the mean over d_model of a write has no effect and is taken
            out.
    """

    write: HeadWrite
    project: Float64[Tensor, "heads d_head read"]
    directed: bool
    centred: bool

    @classmethod
    def of_write(cls, view: AttentionView, write: HeadWrite, vector: Float64[Tensor, "d_model"] | None) -> "_Measure":
        """Return the measure of a write along the direction `vector`, or of its norm and cosine if `vector` is None.

        `view` is the model, `write` the output of the heads that are measured.
        """
        centred = view.raw(write.layer).norm.kind == "LN"
        if vector is None:
            return cls(write, torch.diag_embed(write.gate), False, centred)
        return cls(write, (write.gate * (write.w_o @ vector))[..., None], True, centred)

    def frame(self, terms: Float64[Tensor, "heads terms read"], labels: dict[str, Any]) -> pd.DataFrame:
        """Return a DataFrame with a row per head and term: `layer, head`, labels, and `contribution` or `norm, cosine`.

        `terms` are the terms of z in the form that `project` gives: `read` is 1 along a direction, else d_head.
        `labels` is a dict from further columns to an entry for each term.
        """
        heads, count = terms.shape[:2]
        columns = {"layer": self.write.layer, "head": np.repeat(self.write.heads, count)}
        columns |= {name: np.tile(np.asarray(entries), heads) for name, entries in labels.items()}
        if self.directed:
            return pd.DataFrame(columns | {"contribution": terms[..., 0].flatten().numpy()})
        written, own = terms[0] @ self.write.w_o[0], self.write.own[0]
        if self.centred:
            written, own = written - written.mean(-1, keepdim=True), own - own.mean()
        norm = written.norm(dim=-1)
        cosine = (written @ own) / (norm * own.norm())
        return pd.DataFrame(columns | {"norm": norm.numpy(), "cosine": cosine.numpy()})


@dataclass(frozen=True)
class _StreamValues:
    """The values of a layer as a function of the stream x: `norm(x) @ weight + bias`, gain and bias folded in.

    Attributes:
        norm: the norm in front of the attention.
        weight, bias: W_V and its bias for each key/value head.
    """

    norm: Normalization
    weight: Float64[Tensor, "kv_heads d_model d_head"]
    bias: Float64[Tensor, "kv_heads d_head"]


def _values_of_stream(view: AttentionView, layer: int) -> _StreamValues:
    """Return the function from the residual stream to the values of a layer (norm, weight, bias), in float64.

    `view` is the model. Nothing is run; the weights are the model's own.
    """
    raw = view.raw(layer)
    norm, weight = raw.norm.as_(double), double(raw.w_v)
    bias = folded_bias(weight, None if raw.b_v is None else double(raw.b_v), norm)
    return _StreamValues(norm, folded_weight(weight, norm), bias)


def _source_rows(
    view: AttentionView,
    run: HeadsRun,
    write: HeadWrite,
    value: _StreamValues,
    measure: _Measure,
    dictionary: Dictionary | None,
    asked: range,
) -> Iterator[tuple[Float64[Tensor, "heads terms read"], dict[str, Any]]]:
    """Yield pairs (numbers, labels) of the terms by source, for groups of the `asked` keys.

    `view` is the model. The numbers are [heads, terms, read], where `read` is 1 along a direction and d_head otherwise.
    The labels are a dict with `source` and `position` of each term. The last item is the bias of the values, if there
    is one. `run` has the activations, `write` the heads' attention and values, `value` the function from streams to
    values, `measure` turns values into numbers. With a `dictionary` the sources are its features. Raises ScoreMismatch
    if the values of the run are not `value` of its streams.
    """
    # The direction is carried back to the stream first. Each term is then one number instead of a z for each head.
    weight, bias = value.weight[write.kv_heads] @ measure.project, value.bias[write.kv_heads][:, None] @ measure.project
    n_sources = sum(view.n_heads(layer) + 2 if layer in view.layers else 2 for layer in range(write.layer)) + 3
    n_terms = n_sources if dictionary is None else len(dictionary.decoder)
    at_once = max(1, AT_ONCE // (8 * n_terms * (view.d_model if dictionary is None else 1)))
    for first in range(asked.start, asked.stop, at_once):
        keys = list(range(first, min(first + at_once, asked.stop)))
        traced = run.traced(view, write.layer, keys)
        _require_own_values(write, value, traced.residual, keys)
        if dictionary is None:
            names, written = source_terms(view, traced)
            place = torch.tensor(keys).repeat_interleave(len(names))
            groups = iter([(names * len(keys), place, written.flatten(0, 1))])
        else:
            groups = _features(dictionary, traced.residual, keys)
        scale = value.norm.token_scale(traced.residual)
        for names, place, written in groups:
            held = write.weights[:, place] * scale[place - first]
            terms = held[..., None] * einsum(written, weight, "term d_model, head d_model read -> head term read")
            yield terms, {"source": np.array(names, dtype=object), "position": place.numpy()}
    if bool(value.bias.any()):
        keys = np.array(asked)
        held = write.weights[:, asked.start : asked.stop, None]
        yield held * bias, {"source": np.full(len(keys), BIAS, dtype=object), "position": keys}


def _features(
    dictionary: Dictionary, streams: Float64[Tensor, "keys d_model"], keys: list[int]
) -> Iterator[tuple[list[str], Int[Tensor, "terms"], Float64[Tensor, "terms d_model"]]]:
    """Yield for each key the names of its dictionary terms, the key's position for each term, and their writes.

    `streams` are the residual streams at the keys, `keys` their positions. The terms are the active features, the
    dictionary's bias and the error.
    """
    for key, stream, activations in zip(keys, streams, dictionary.activations(streams), strict=True):
        terms = dictionary.terms(stream, activations)
        yield terms.names, torch.full((len(terms.names),), key), terms.written


def _require_own_values(
    write: HeadWrite, value: _StreamValues, streams: Float64[Tensor, "keys d_model"], keys: list[int]
) -> None:
    """Raise ScoreMismatch if the values of the run differ from `value`, applied to the streams at these keys.

    `write` has the values of the run, `value` the function from streams to values, `keys` the positions of the streams.
    """
    heads = write.kv_heads
    own = write.values[:, keys]
    off = value.norm.normalized(streams) @ value.weight[heads] + value.bias[heads][:, None] - own
    problem = "its values are not those of the stream; they differ"
    nearest_bound(
        off.abs().amax((1, 2)),
        write.values.abs().amax((1, 2)),
        write.stored,
        "live reads",
        [f"layer {write.layer}, head {head}: {problem}" for head in write.heads],
        LOOK_FOR_HOOKS,
        ScoreMismatch,
    )
