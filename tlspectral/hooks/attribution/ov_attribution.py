"""`ov_attribution`: what heads write at one position, as a sum over the tokens that they read it from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.errors import ScoreMismatch, UnsupportedArchitecture
from tlspectral.hooks.attribution.asked_scores import position_in, require_one
from tlspectral.hooks.attribution.dictionary import ERROR, Dictionary, require_division
from tlspectral.hooks.attribution.heads_run import HeadsRun, HeadWrite, head_write, heads_run
from tlspectral.hooks.attribution.ov_directions import Direction, direction_of
from tlspectral.hooks.attribution.stream_terms import source_terms
from tlspectral.models.attention.tolerances import LOOK_FOR_HOOKS, nearest_bound, noise_of
from tlspectral.models.reading import measured
from tlspectral.models.reading.layer import require_own_projections
from tlspectral.models.reading.norms import Normalization, double, folded_bias, folded_weight
from tlspectral.models.reading.view import AttentionView, heads_by_layer
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.running.text import token_text
from tlspectral.models.stream.writes import require_stream
from tlspectral.selection import Heads
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.measurement import Measurement, stacked
from tlspectral.tables.schema import Schema, columns

Term = Literal["token", "source", "head"]

BIAS = "bias"
AT_ONCE = 128 * 2**20
"""Bytes of what sources write at the keys that are taken apart together; several copies of it are in memory."""

OV_ATTRIBUTION = Schema(
    "ov_attribution",
    (
        *HEAD,
        *columns("""
            source?       | label            | What wrote to the key's stream, or a feature; else error or bias.
            position?     | index            | Position of the key that the head attends to.
            token?        | text             | Token of the key; its id without a tokenizer.
            contribution? | of the direction | Inner product of the term's write with the direction. With direction=.
            norm?         | of the stream    | Length of the term's write; under LayerNorm without its mean over
                          |                  | d_model, which no reader sees. Without direction=.
            cosine?       | cosine           | Of the term's write with all that the head writes at the query, both as
                          |                  | for norm; NaN for no write. Without direction=.
        """),
    ),
    "`tls.ov_attribution`; what heads write at one position as a sum",
)


def ov_attribution(
    model: Any,
    prompt: Any,
    heads: Heads | None,
    query: int,
    *,
    direction: Any = None,
    by: Term = "token",
    dictionary: Dictionary | None = None,
) -> pd.DataFrame:
    """Divide what heads write at one position among the tokens that they attend to, and what these hold.

    >>> import tlspectral as tls, torch
    >>> tokens = torch.arange(3, 20).repeat(2)
    >>> table = tls.ov_attribution(tls.load_model("tiny-rope"), tokens, None, query=-2, direction=(19, 4))
    >>> table.loc[0, ["name", "token"]].tolist()
    ['L1H3', '19']

    At query i a head writes sum_j A_ij (n(x_j) W_V + b_V) W_O, x_j the stream at key j, n the norm in front. With the
    attention A and all norms as numbers of this run, that is a sum over keys j, and over what wrote x_j. Held are the
    scale of the norm in front at each key, the scale of a norm behind the attention (Gemma 2 and 3, OLMo 2) at the
    query, and the gate of gated attention; a multiplier is in. All is computed in float64 on the CPU from one run.

    A `direction` d makes of each write w the number w . d:

    * a pair of answers, (" Mary", " John"): the contribution to logit(first) - logit(second), through the final norm
      with its scale in the run (centred under LayerNorm). Left out are biases of final norm and unembedding, in
      `attrs["outside_stream"]`, and a softcap of the logits: with one, numbers are of the difference in front of it.
    * a receiver, "L18KV2.k" or "L20H3.q" or "L20H3.v", in a later layer: r = n(x) W, the norm of its layer held, is
      what it reads of the stream at the query, without biases, before a norm of queries or keys and rotation. The
      number is the component along r / |r| of what it reads of w, so that the whole stream has |r|,
      `attrs["read_norm"]`.
    * a vector [d_model]: the plain inner product.

    Args:
        model: a TransformerBridge or HookedTransformer.
        prompt: one prompt in any form that `Task` takes: a string, ids [pos] or [1, pos], or a tokenizer's batch.
        heads: one head or several in any form, or None for all; with a receiver for all that write before it reads.
            Several need a direction.
        query: position at which the heads write; negative ones count from the end.
        direction: see above; None gives length and cosine of each write in place of a contribution.
        by: `"token"` has a row per head and key up to the query, `"head"` one per head. `"source"` has one per head,
            key and source of the key's stream: the embedding, learned positions, each earlier head and MLP, biases of
            attention, and `bias`, the head's own b_V with the norm's. What layers write is kept at all keys up to the
            query; sources are taken apart in groups of keys, of about 128 MiB each.
        dictionary: with `by="source"`, features of the stream that enters the heads' layer, see
            `tls.Dictionary`: its active features, `dictionary bias` and `error` are then the sources. Look at
            `attrs["error_share"]` first: the sum of all rows of the error over the sum of all rows; without a direction
            of their components along what the head writes.

    Returns:
        DataFrame, largest |contribution| (or norm) first. Columns: `layer, head, name, source?, position?, token?,
        contribution?, norm?, cosine?`. `attrs`: `query`, `query_token`, `by`, `direction` in words; `remainder`, the
        largest distance between the sum over tokens and what a head writes by the model's own z, as a share of its
        length, and the `tolerance` of that; `norm_behind_held`: True where a norm stands behind the attention of one of
        the layers; `gate_held`; of two answers `logit_difference`, the run's, `outside_stream` and `final_softcap`
        (None without one); of a receiver `read_norm`; and the model's origin.

    Raises:
        BadHead: no such head or receiver.
        ScoreMismatch: the terms do not sum to what a head writes within 1e-3 of its z (16-bit: 0.1), or the sources to
            its values within 1e-4 of the largest (16-bit: 0.1).
        UnsupportedArchitecture, BadWeights: a layer cannot be read; the residual stream is not the sum of its writes,
            as under hooks that edit it; sources through a latent or a norm of values; a receiver of latent attention;
            answers of a model whose logits are not what final norm and unembedding give.
        ValueError, TypeError: several heads without a direction, a receiver that reads before a head writes, a prompt
            that cannot be read or is not one, a position outside it, or arguments that do not go together.

    What it does not establish: that the head matters for the answer. It is the direct effect alone: what later layers
    make of the write is not in it, nor that a norm shrinks when the write is gone. The attention is held, so that
    nothing is said of why the head looks there. Terms of opposite sign can cancel. A write includes the head's value
    bias only where TransformerLens' `fold_value_biases` has not moved it into the bias of the layer
    (docs/from_transformerlens.md).
    """
    require_division(by, ("token", "source", "head"), dictionary)
    with measured(model) as view:
        require_stream(view)
        chosen = heads_by_layer(view, heads)
        prompts = packed_prompts(view, prompt)
        require_one(prompts, "what heads write is")
        query = position_in(prompts.tokens.shape[1], query, "query")
        along = None if direction is None else direction_of(view, prompts, direction)
        chosen = _require_together(view, chosen, along, every=heads is None)
        if by == "source":
            _require_sources(view, chosen)
            dictionary = None if dictionary is None else dictionary.fitted(view, chosen)
        whole = [] if by != "source" else list(chosen) if dictionary is not None else list(range(max(chosen) + 1))
        point = None if along is None else along.point(view)
        answers = along is not None and along.layer(view) == view.n_layers and point is not None
        run = heads_run(view, prompts.tokens, query, list(chosen), whole=whole, also=point, logits=answers)
        vector, said = (None, {}) if along is None else along.vector(view, run)
        writes = [head_write(view, run, layer, some) for layer, some in chosen.items()]
        tables = [_rows(view, run, write, vector, by, dictionary) for write in writes]
        frame = _sorted(stacked(tables))
        if "position" in frame:
            texts = np.array([token_text(view, int(token)) for token in prompts.tokens[0, : query + 1]], dtype=object)
            frame["token"] = texts[frame["position"]]
        attrs = {
            "query": query,
            "query_token": token_text(view, int(prompts.tokens[0, query])),
            "direction": None if along is None else along.said(view),
            **said,
            "remainder": max(write.remainder for write in writes),
            "tolerance": max(noise_of("live z", write.stored)[1] for write in writes),
            "norm_behind_held": any(
                view.behind(layer)[1].kind != "none" for layer in {*chosen, *whole} if layer in view.layers
            ),
            "gate_held": any(view.raw(layer).w_gate is not None for layer in chosen),
        }
        if dictionary is not None:
            attrs = {"error_share": _error_share(frame), **dictionary.described()} | attrs
        settings = {"by": by if dictionary is None else "feature"}
        origin = view.origin(range(max(chosen) + 1), processing=True)
        return Measurement(OV_ATTRIBUTION, settings, origin).table(frame, **attrs)


def _require_together(
    view: AttentionView, chosen: dict[int, list[int]], along: Direction | None, *, every: bool
) -> dict[int, list[int]]:
    """Return the heads that are measured. Raises ValueError where they and the direction do not go together."""
    if along is None:
        if sum(map(len, chosen.values())) != 1:
            raise ValueError(
                "several heads need a direction, along which what they write is compared: give direction= or one head"
            )
        return chosen
    below = along.layer(view)
    if every:
        chosen = {layer: heads for layer, heads in chosen.items() if layer < below}
    late = [layer for layer in chosen if layer >= below]
    if late or not chosen:
        where = f"heads of layer {late[0]} write" if late else "any head writes"
        raise ValueError(f"{along.said(view)} reads before {where}: give a receiver in a later layer")
    return chosen


def _require_sources(view: AttentionView, chosen: dict[int, list[int]]) -> None:
    """Refuse layers whose values are not linear in the stream."""
    for layer in chosen:
        raw = view.raw(layer)
        require_own_projections(raw, layer, "values are not taken apart through the norm of their latent")
        if raw.v_norm is not None:
            raise UnsupportedArchitecture(f"layer {layer}: a norm of values, through which they are not taken apart")


def _rows(
    view: AttentionView,
    run: HeadsRun,
    write: HeadWrite,
    vector: Float64[Tensor, "d_model"] | None,
    by: Term,
    dictionary: Dictionary | None,
) -> pd.DataFrame:
    """Return the rows of the heads of a layer, without tokens."""
    measure = _Measure.of_write(view, write, vector)
    if by == "source":
        value = _values_of_stream(view, write.layer)
        pieces = [measure.frame(*terms) for terms in _source_rows(view, run, write, value, measure, dictionary)]
        return stacked(pieces)
    terms = write.weights[..., None] * (write.values @ measure.project)
    if by == "head":
        return measure.frame(terms.sum(1, keepdim=True), {})
    return measure.frame(terms, {"position": np.arange(terms.shape[1])})


@dataclass(frozen=True)
class _Measure:
    """What is read of a term of z of each head: its component along a direction, or the term itself.

    `project` takes values to one number, W_O d, or leaves them as they are but for the gate. `centred`: a LayerNorm
    reads the stream, and takes the mean over d_model out of every write.
    """

    write: HeadWrite
    project: Float64[Tensor, "heads d_head read"]
    directed: bool
    centred: bool

    @classmethod
    def of_write(cls, view: AttentionView, write: HeadWrite, vector: Float64[Tensor, "d_model"] | None) -> "_Measure":
        centred = view.raw(write.layer).norm.kind == "LN"
        if vector is None:
            return cls(write, torch.diag_embed(write.gate), False, centred)
        return cls(write, (write.gate * (write.w_o @ vector))[..., None], True, centred)

    def frame(self, terms: Float64[Tensor, "heads terms read"], labels: dict[str, Any]) -> pd.DataFrame:
        """Return a row per head and term; labels are one for each term."""
        heads, count = terms.shape[:2]
        columns = {"layer": self.write.layer, "head": np.repeat(self.write.heads, count)}
        columns |= {name: np.tile(np.asarray(each), heads) for name, each in labels.items()}
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
    """Values as a function of the stream: `n(x) @ weight + bias`, the norm's gain and bias folded in."""

    norm: Normalization
    weight: Float64[Tensor, "kv_heads d_model d_head"]
    bias: Float64[Tensor, "kv_heads d_head"]


def _values_of_stream(view: AttentionView, layer: int) -> _StreamValues:
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
) -> Iterator[tuple[Float64[Tensor, "heads terms read"], dict[str, Any]]]:
    """Yield what is read of the sources of some keys, and their labels, then of the bias of values."""
    # A direction is carried to the stream first, so that terms are numbers there, and not a z for each head.
    weight, bias = value.weight[write.kv_heads] @ measure.project, value.bias[write.kv_heads][:, None] @ measure.project
    n_sources = sum(view.n_heads(layer) + 2 if layer in view.layers else 2 for layer in range(write.layer)) + 3
    n_terms = n_sources if dictionary is None else len(dictionary.decoder)
    at_once = max(1, AT_ONCE // (8 * n_terms * (view.d_model if dictionary is None else 1)))
    for first in range(0, run.query + 1, at_once):
        keys = list(range(first, min(first + at_once, run.query + 1)))
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
        keys = np.arange(run.query + 1)
        yield write.weights[..., None] * bias, {"source": np.full(len(keys), BIAS, dtype=object), "position": keys}


def _features(
    dictionary: Dictionary, streams: Float64[Tensor, "keys d_model"], keys: list[int]
) -> Iterator[tuple[list[str], Int[Tensor, "terms"], Float64[Tensor, "terms d_model"]]]:
    for key, stream, activations in zip(keys, streams, dictionary.activations(streams), strict=True):
        terms = dictionary.terms(stream, activations)
        yield terms.names, torch.full((len(terms.names),), key), terms.written


def _require_own_values(
    write: HeadWrite, value: _StreamValues, streams: Float64[Tensor, "keys d_model"], keys: list[int]
) -> None:
    """Refuse a run whose values do not follow from its streams. Raises ScoreMismatch."""
    heads = write.kv_heads
    own = write.values[:, keys]
    off = value.norm.normalized(streams) @ value.weight[heads] + value.bias[heads][:, None] - own
    said = "its values are not those of the stream; they differ"
    nearest_bound(
        off.abs().amax((1, 2)),
        write.values.abs().amax((1, 2)),
        write.stored,
        "live reads",
        [f"layer {write.layer}, head {head}: {said}" for head in write.heads],
        LOOK_FOR_HOOKS,
        ScoreMismatch,
    )


def _sorted(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows, largest first."""
    size = frame["contribution" if "contribution" in frame else "norm"].abs()
    return frame.iloc[np.argsort(-size.to_numpy(), kind="stable")].reset_index(drop=True)


def _error_share(frame: pd.DataFrame) -> float:
    """Return the sum of the error's rows over the sum of all rows, along the direction or the head's whole write."""
    along = frame["contribution"] if "contribution" in frame else (frame["norm"] * frame["cosine"]).fillna(0.0)
    return float(along[frame["source"] == ERROR].sum() / along.sum())
