"""Mean attention scores by distance (`relative_position_kernel`), and how well a head's mean query and key predict
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int

from tlspectral.errors import earlier_calls, shown, warn_caller
from tlspectral.errors.settings import checked_settings, whole_number
from tlspectral.heads.detectors.kernel_sums import LayerKernels, measured_kernels
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, even_rows
from tlspectral.models.running.long_prompts import strips_for, strips_noted
from tlspectral.models.running.prompts import distinct_rows, equality_notes, packed_prompts, within
from tlspectral.selection.heads_as_written import Heads
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.schema import Schema, columns

BANDS = ("high", "middle", "low")
FARTHEST_OFFSET = 20
_KERNEL_SEQUENCES, _KERNEL_LENGTH = 48, 96

RELATIVE_POSITION_KERNEL = Schema(
    "relative_position_kernel",
    (
        *HEAD,
        *columns("""
            offset    | token | Position of the key less that of the query; -1 is the previous token.
            score     | logit | Mean attention score at the offset, scaled and before the softmax. NaN where every such
                      |       | key is masked.
            predicted | logit | Score of the mean query with the mean key at that distance. NaN where score is, and
                      |       | where the head has no prediction.
        """),
    ),
    "`tls.relative_position_kernel`",
)
KERNEL_PREDICTION = Schema(
    "kernel_prediction",
    (
        *HEAD,
        *columns("""
            r              | correlation | Pearson's, over the offsets, of the mean score on prompts that gave no means
                           |             | and its prediction. NaN for fewer than three, or where one does not vary.
            peak           | token | Offset of the largest mean score on the prompts that r is judged on.
            predicted_peak | token | Offset of the largest prediction; missing where it does not vary.
            share_high     | share | Share of the fastest third of the rotary pairs in the variance of the prediction
                           |       | over the offsets, before a softcap. The three sum to 1.
            share_middle   | share | The same of the middle third.
            share_low      | share | The same of the slowest third.
            band           | label | Which third has the largest share: high, middle or low.
            first          | index | First frequency of that third when the head's pairs are sorted from fast to slow.
            last           | index | Last frequency of that third in that order.
        """),
    ),
    "`tls.heads.kernel_prediction`",
)


@earlier_calls("offsets")
@checked_settings
def relative_position_kernel(
    model: Any,
    heads: Heads | None = None,
    prompts: Any = None,
    *,
    offsets: Iterable[Any] | None = None,
    reference: Any = None,
) -> pd.DataFrame:
    """Return each head's mean attention score by distance from query to key ("Fingerprint, Not Blueprint", section 7).

    Use it to see which distances a head prefers.

    >>> import tlspectral as tls
    >>> kernel = tls.relative_position_kernel(tls.load_model("tiny-rope"), "L0H3")
    >>> int(kernel.loc[kernel["score"].idxmax(), "offset"])
    -1

    Args:
        model: a TransformerBridge or HookedTransformer.
        heads: "L5H1", (5, 1), "L5" (a layer), "L5KV1" (a key/value group), a list of these, or a table with columns
            `layer` and `head`. Default: all.
        prompts: strings, token ids [batch, pos], lists of ids, or a tokenizer's batch; padding is not counted. Default:
            48 sequences of BOS and 95 random ids.
        offsets: position of the key minus position of the query, 0 or negative. Default: -20 to 0.
        reference: prompts for the mean query and key. Default: half of the distinct `prompts`, by a fixed seed.

    Returns:
        DataFrame with a row per head and offset, sorted by layer, head and offset. Columns: `layer, head, name, offset,
        score, predicted`. `score` is the mean of the model's own scores, scaled and before the softmax (logits); inside
        `ablate(...)` it is the ablated score. `predicted` is the score of the head's mean query with its mean key at
        that distance: NaN without rotary positions, for prompts beyond the valid length, and for a single distinct
        prompt without `reference`. `attrs` hold the model and weights, `n_reference` (distinct prompts of the means)
        and `n_judged` (the rest).

    Raises:
        BadHead: a head does not exist.
        ScoreMismatch: rebuilt scores do not give the model's pattern, or the model does not rotate by its frequencies.
        EditNotHonored: an ablation edits z in a layer whose scores are rebuilt.
        ValueError, TypeError: prompts in none of these forms, or no prompt has these offsets.

    Not established: that the head attends by position; contents contribute to the mean. `predicted` close to `score` is
    nearly an identity of means and explains nothing. More: docs/preferences.md.
    """
    with measured(model) as view:
        rows: list[tuple[Any, ...]] = []
        kernels, back, counts, _ = _measured(view, heads, prompts, offsets, reference)
        for kernel in kernels:
            score = kernel.score.numpy()  # [distances, heads]
            predicted = np.where(np.isnan(score), np.nan, kernel.predicted())
            rows += [
                (kernel.layer, head, -distance, score[row, column], predicted[row, column])
                for column, head in enumerate(kernel.heads)
                for row, distance in enumerate(back)
            ]
        table = pd.DataFrame(rows, columns=["layer", "head", "offset", "score", "predicted"])
        return RELATIVE_POSITION_KERNEL.frame(table, {**view.origin(), **counts})


@earlier_calls("offsets")
@checked_settings
def kernel_prediction(
    model: Any,
    heads: Heads | None = None,
    prompts: Any = None,
    *,
    offsets: Iterable[Any] | None = None,
    reference: Any = None,
) -> pd.DataFrame:
    """Measure how well a head's mean query and key predict its mean scores by distance, and which frequencies they use.

    Use it to find the rotary frequencies behind a preferred distance; then remove them with `ablate`.

    >>> import tlspectral as tls
    >>> row = tls.heads.kernel_prediction(tls.load_model("tiny-rope"), "L0H3").iloc[0]
    >>> int(row["peak"]), int(row["predicted_peak"]), row["band"]
    (-1, -1, 'high')

    Args:
        model: a TransformerBridge or HookedTransformer.
        heads: "L5H1", (5, 1), "L5" (a layer), "L5KV1" (a key/value group), a list of these, or a table with columns
            `layer` and `head`. Default: all.
        prompts: strings, token ids [batch, pos], lists of ids, or a tokenizer's batch; padding is not counted. Default:
            48 sequences of BOS and 95 random ids.
        offsets: position of the key minus position of the query, 0 or negative. Default: -20 to 0.
        reference: prompts for the mean query and key. Default: half of the distinct prompts; the prediction is judged
            on the other half. A prompt in `reference` (or the beginning of one) is not judged on.

    Returns:
        DataFrame, one row per head. Columns: `layer, head, name, r, peak, predicted_peak, share_high, share_middle,
        share_low, band, first, last`. `r` is Pearson's correlation, over offsets, of the mean score with its
        prediction; `peak` and `predicted_peak` are the offsets (tokens) where these are largest. `share_high`,
        `share_middle`, `share_low` are the shares of the fast, middle and slow third of the frequencies in the variance
        of the prediction; `band` names the largest. Its frequencies are `first` to `last`, counted from fast to slow,
        for `tls.parts.Band(range(first, last + 1))`. NaN without a prediction. `attrs`: `n_reference`, `n_judged`
        (numbers of prompts).

    Raises:
        BadHead: a head does not exist.
        ScoreMismatch: rebuilt scores do not give the model's pattern, or the model does not rotate by its frequencies.
        EditNotHonored: an ablation edits z in a layer whose scores are rebuilt.
        ValueError, TypeError: a single distinct prompt without `reference`, no prompt outside of `reference`, prompts
            that cannot be read, or offsets that no prompt has.

    Not established: a mechanism. A large r is nearly an identity of means, offsets are not independent (so r has no p),
    and only an ablation shows that the head needs a band. More: docs/preferences.md.
    """
    with measured(model) as view:
        kernels, back, counts, left_out = _measured(view, heads, prompts, offsets, reference)
        if kernels and not counts["n_reference"]:
            raise ValueError(
                "one distinct prompt is not enough: the prediction is judged on other prompts than the means are taken "
                "from. Give several different prompts, or give reference="
            )
        if kernels and not counts["n_judged"]:
            raise ValueError(
                "no prompt is left to judge the prediction on, because all are in reference= or begin a prompt there: "
                "give other prompts="
            )
        if left_out:
            warn_caller(
                f"{len(left_out)} prompts, such as prompt {left_out[0]}, are also in reference= or begin a prompt of "
                "reference=: the prediction is not judged on them"
            )
        rows = [row for kernel in kernels for row in _judged(kernel, back)]
        table = pd.DataFrame(
            rows, columns=[column.name for column in KERNEL_PREDICTION.columns if column.name != "name"]
        )
        table = table.astype(dict.fromkeys(("first", "last", "peak", "predicted_peak"), "Int64"))
        return KERNEL_PREDICTION.frame(table, {**view.origin(), **counts})


def _measured(
    view: AttentionView, heads: Heads | None, prompts: Any, offsets: Iterable[Any] | None, reference: Any
) -> tuple[list[LayerKernels], list[int], dict[str, Any], list[int]]:
    """Run the prompts; return (kernels, distances, counts, left out): the mean scores by distance of each layer and
    what belongs to them.

    The kernels are a `LayerKernels` per layer, the distances are in tokens (far to near). The counts are a dict for the
    attrs: `n_reference`, `n_judged` and `prompt_notes`. Left out are the indices of prompts that are not judged because
    they are in `reference`.

    `view`: the open model. `heads`: names of heads or None (all). `prompts`: those whose scores are averaged; None:
    random ids. `offsets`: key position less query position; None: -20 to 0. `reference`: prompts for the mean query and
    key; None: half of the distinct prompts. Equal prompts go to the same half. A prompt is not judged if it gave the
    means or begins a prompt that did, because its queries and keys are then in the means.
    """
    chosen = heads_by_layer(view, heads)
    if not chosen:
        return [], [], {"n_reference": 0, "n_judged": 0}, []
    if prompts is None:
        shape = (_KERNEL_SEQUENCES, min(_KERNEL_LENGTH, view.n_ctx))
        tokens = torch.randint(0, view.d_vocab, shape, generator=torch.Generator().manual_seed(0))
        tokens[:, 0] = view.start_token
        packed = even_rows(tokens)
    else:
        packed = packed_prompts(view, prompts)
    back = _distances(offsets, packed.tokens.shape[1])
    distinct = distinct_rows([packed], [()] * len(packed.tokens))
    notes = equality_notes(distinct, "they give the means together or are judged on together, and means are over all")
    averaged, n_distinct = torch.zeros(len(distinct), dtype=torch.bool), int(distinct.max()) + 1
    if reference is None:
        reference_prompts, n_reference = None, n_distinct // 2
        half = torch.randperm(n_distinct, generator=torch.Generator().manual_seed(0))[:n_reference]
        averaged = torch.isin(torch.from_numpy(distinct), half)
        known = within(view, packed, PackedTokens(packed.tokens[averaged], packed.lengths[averaged]))
    else:
        reference_prompts = packed_prompts(view, reference)
        n_reference = int(distinct_rows([reference_prompts], [()] * len(reference_prompts.tokens)).max()) + 1
        known = within(view, packed, reference_prompts)
    for note in notes:
        warn_caller(note.message)
    counts = {"n_reference": n_reference, "n_judged": len({*distinct[~known.numpy()].tolist()})}
    counts |= replace(packed, notes=(*packed.notes, *notes)).noted
    counts |= strips_noted(strips_for(view, packed.tokens.shape[1]))
    left_out = [] if reference is None else known.nonzero().flatten().tolist()
    return measured_kernels(view, chosen, packed, back, averaged, ~known, reference_prompts), back, counts, left_out


def _distances(offsets: Iterable[Any] | None, width: int) -> list[int]:
    """Return the distances in tokens (0 or more), far to near, from `offsets` (0 or less; None: -20 to 0).

    `width` is the number of tokens of the prompts. Raises ValueError for an offset that no prompt has.
    """
    if offsets is None:
        return list(range(min(FARTHEST_OFFSET, width - 1), -1, -1))
    listed = list(offsets)
    numbers = [whole_number(offset) for offset in listed]
    known = {number for number in numbers if number is not None and -width < number <= 0}
    unknown = [offset for offset, number in zip(listed, numbers, strict=True) if number not in known]
    if unknown or not listed:
        raise ValueError(
            f"offsets= are key position less query position, numbers from {1 - width} to 0 for prompts of {width} "
            f"tokens; found {shown(unknown[0]) if unknown else 'none'}: for example offsets=[0, -1]"
        )
    return sorted((-number for number in known), reverse=True)


def _judged(kernel: LayerKernels, back: list[int]) -> Iterator[dict[str, Any]]:
    """Yield a row of `kernel_prediction` (a dict by column) for each head of a layer.

    `kernel` has the layer's mean and predicted scores by distance, `back` the distances in tokens. Values that do not
    exist, such as `r` without rotary positions, are left out.
    """
    judged, predicted = kernel.judged.numpy().T, kernel.predicted().T  # [heads, distances]
    for index, head in enumerate(kernel.heads):
        row: dict[str, Any] = {"layer": kernel.layer, "head": head, "band": None}
        known = np.isfinite(judged[index])
        if known.any():
            row["peak"] = -back[int(np.nanargmax(judged[index]))]
        known &= np.isfinite(predicted[index])
        if kernel.preference is not None and known.any():
            row["r"] = correlation(judged[index], predicted[index], known)
            theta = kernel.preference.theta[index].numpy()
            shares, bands = band_shares(kernel.preference.by_pair[index].numpy()[:, known], theta)
            row |= {f"share_{band}": share for band, share in zip(BANDS, shares.tolist(), strict=True)}
            if not np.isnan(shares).any():
                best, ends = int(np.argmax(shares)), np.cumsum([0, *map(len, bands)])
                row["predicted_peak"] = -back[int(np.nanargmax(np.where(known, predicted[index], np.nan)))]
                row |= {"band": BANDS[best], "first": int(ends[best]), "last": int(ends[best + 1] - 1)}
        yield row


def band_shares(
    by_pair: Float64[np.ndarray, "pairs distances"], theta: Float64[np.ndarray, " pairs"]
) -> tuple[Float64[np.ndarray, " bands"], list[Int[np.ndarray, " chosen"]]]:
    """Return the share of each band (fast, middle, slow) in the variance of the prediction over distances, and the
    pairs of each band.

    `by_pair` is what each rotary pair adds to the predicted score, `theta` its angle per token. Bands are thirds of the
    pairs from fast to slow. A share is the covariance of the band's contribution with the whole, over the variance of
    the whole. Shares sum to 1 and can be negative. NaN where the whole does not vary.
    """
    bands = [np.sort(third) for third in np.array_split(np.argsort(-np.abs(theta), kind="stable"), len(BANDS))]
    centred = by_pair - by_pair.mean(1, keepdims=True)
    whole = centred.sum(0)
    variance = float(whole @ whole)
    scale = float(np.abs(by_pair).max(initial=0.0))
    if not variance > len(whole) * (1e-12 * scale) ** 2:
        return np.full(len(BANDS), np.nan), bands
    return np.array([float(centred[band].sum(0) @ whole) / variance for band in bands]), bands


def correlation(
    judged: Float64[np.ndarray, " offsets"],
    predicted: Float64[np.ndarray, " offsets"],
    known: Bool[np.ndarray, " offsets"],
) -> float:
    """Return Pearson's r of the mean scores `judged` and the scores `predicted`, over the offsets that `known` marks.

    NaN for fewer than three offsets, or if either side does not vary.
    """
    scores, predictions = judged[known], predicted[known]
    if len(scores) < 3 or min(np.ptp(scores), np.ptp(predictions)) <= 1e-9 * max(
        np.abs(scores).max(), np.abs(predictions).max()
    ):
        return float("nan")
    return float(np.corrcoef(scores, predictions)[0, 1])
