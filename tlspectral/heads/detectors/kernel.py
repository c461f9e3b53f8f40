"""`relative_position_kernel`: mean attention scores by how far the key lies behind the query.

Beside them stands what the head's mean query and key alone predict; `kernel_prediction` judges that per head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tlspectral.errors import earlier_calls, warn_caller
from tlspectral.heads.detectors.kernel_sums import LayerKernels, measured_kernels
from tlspectral.models.reading import measured
from tlspectral.models.reading.view import AttentionView, heads_by_layer
from tlspectral.models.running.batches import PackedTokens, even_rows
from tlspectral.models.running.prompts import distinct_rows, equality_notes, packed_prompts, within
from tlspectral.selection import Heads, whole_number
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
def relative_position_kernel(
    model: Any,
    heads: Heads | None = None,
    prompts: Any = None,
    *,
    offsets: Iterable[Any] | None = None,
    reference: Any = None,
) -> pd.DataFrame:
    """Return the mean attention score by how far the key lies behind the query (FP section 7, figure 3).

    >>> import tlspectral as tls
    >>> kernel = tls.relative_position_kernel(tls.load_model("tiny-rope"), "L0H3")
    >>> int(kernel.loc[kernel["score"].idxmax(), "offset"])
    -1

    Scores are captured as the model computes them, scaled and before the softmax, so that inside `ablate(...)` they are
    the ablated model's. The mean is over sequences and all queries that have such a key unmasked; later keys,
    which an encoder sees, are left out. Where a bridge computes attention itself (GPT-J, OPT, GPT-Neo, BERT,
    tiny-rope), the scores are rebuilt from the weights and the layer's input in float64, and their softmax has to be
    the model's pattern.

    `predicted` is the score of the mean query with the mean key at that distance: `Re sum_t q_t conj(k_t)
    exp(i theta_t D)` over rotary pairs, plus the non-rotary columns, times the model's scale. Queries and keys
    are those that the model rotates: with biases, after a query/key norm, with gain and phase of a spectral layer. They
    are taken from other prompts than those that `kernel_prediction` judges on. A softcap is applied to the sum.
    Hooks on the scores, such as `ablate` puts on for parts of the scores, leave `predicted` as it is; hooks on queries
    and keys change it.

    Args:
        model: a TransformerBridge or HookedTransformer.
        heads: as in `ablate`; None is every head. All are measured in one pass, in memory that does not grow with the
            number of prompts.
        prompts: in any form that `Task` takes: strings, ids [sequences, pos], or a tokenizer's batch, whose padding is
            not counted. None draws 48 seeded sequences of BOS and 95 random ids. FP used text.
        offsets: positions of the key less the query's, 0 or negative; None is -20 (or as far as prompts reach)
            to 0.
        reference: prompts that the mean query and key are taken over. None: half of the distinct `prompts`, by a fixed
            seed.

    Returns:
        DataFrame, offsets ascending. Columns: `layer, head, name, offset, score, predicted`. There is no prediction in
        layers without rotary positions, whose mean query and key give the same score at every distance (ALiBi's slope
        and learned positions are left out); where a prompt is longer than frequencies or score scale hold; and for one
        distinct prompt without a reference. `attrs` say which model and weights, `n_reference`, how many distinct
        prompts the means are over, and `n_judged`, how many gave none.

    Raises:
        BadHead: a head that does not exist.
        ScoreMismatch: rebuilt scores do not give the model's pattern, or the model does not rotate by frequencies.
        EditNotHonored: a layer whose scores are rebuilt has hooks on z, such as an ablation there puts on.
        ValueError, TypeError: prompts that cannot be read (see `Task`), or offsets that no prompt has.

    What it does not establish: that the head attends by position. Contents contribute to the mean as well, and a
    softmax sees only differences within a query's row. That `predicted` follows `score` is nearly an identity of means:
    they differ only by what queries and keys at a distance have in common beyond their means, and by the dependence
    of the means on the position. It needs activations, so it says nothing from weights alone.
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
def kernel_prediction(
    model: Any,
    heads: Heads | None = None,
    prompts: Any = None,
    *,
    offsets: Iterable[Any] | None = None,
    reference: Any = None,
) -> pd.DataFrame:
    """Judge, per head, how its mean query and key predict its kernel on other prompts, and which frequencies do it.

        row = tls.heads.kernel_prediction(model, "L16H0").iloc[0]
        band = tls.parts.Band(range(row["first"], row["last"] + 1))
        with tls.ablate(model, row, band):
            moved = tls.relative_position_kernel(model, row)  # without its peak

    Args:
        model, heads, prompts, offsets, reference: as in `relative_position_kernel`. Without `reference` the means are
            over half of the distinct prompts, and scores are from the other half. A prompt that is equal to one in
            `reference`, or is the beginning of one, is not judged on.

    Returns:
        DataFrame, one row per head. Columns: `layer, head, name, r, peak, predicted_peak, share_high, share_middle,
        share_low, band, first, last`. Frequencies are numbered as in `band_effects`: sorted from fast to slow, the
        order of an ordinary model's pairs. NaN where there is no prediction. `attrs` as in `relative_position_kernel`.

    Raises:
        BadHead: a head that does not exist.
        ScoreMismatch, EditNotHonored: as in `relative_position_kernel`.
        ValueError, TypeError: one distinct prompt without a reference, no prompt that is not in `reference`, prompts
            that cannot be read, or offsets that no prompt has.

    What it does not establish: a mechanism. A large r is nearly an identity of means (see `relative_position_kernel`).
    It says that the head's mean scores need no more than a mean query and a mean key, not that attention follows them,
    nor that the head needs a band: drop it (`ablate`, `tls.parts.Band`) to see. Offsets are no independent cases, so r
    has no p.
    """
    with measured(model) as view:
        kernels, back, counts, left_out = _measured(view, heads, prompts, offsets, reference)
        if kernels and not counts["n_reference"]:
            raise ValueError(
                "one prompt cannot give the means and be judged on: give several prompts, or others as reference= "
                "(equal prompts are one)"
            )
        if kernels and not counts["n_judged"]:
            raise ValueError(
                "no prompt is left to judge on: each gave the means or is the beginning of one that did; give "
                "other prompts"
            )
        if left_out:
            warn_caller(
                f"{len(left_out)} prompts are in reference= too, or are the beginning of one there, such as prompt "
                f"{left_out[0]}: no prediction is judged on them"
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
    """Return the kernels by layer, the distances as columns have them (far to near), and `attrs` of the prompts.

    Equal prompts go to one half together. A prompt is not judged on if it is among those that gave the means, or is the
    beginning of one, since its queries and keys are then in the means. Those that are so in `reference` come last.
    """
    chosen = heads_by_layer(view, heads)
    if not chosen:
        return [], [], {"n_reference": 0, "n_judged": 0}, []
    packed = even_rows(_random_prompts(view)) if prompts is None else packed_prompts(view, prompts)
    back = _distances(offsets, packed.tokens.shape[1])
    distinct = distinct_rows([packed], [()] * len(packed.tokens))
    notes = equality_notes(distinct, "they give the means together or are judged on together, and means are over all")
    averaged, n_distinct = torch.zeros(len(distinct), dtype=torch.bool), int(distinct.max()) + 1
    if reference is None:
        others, n_reference = None, n_distinct // 2
        half = torch.randperm(n_distinct, generator=torch.Generator().manual_seed(0))[:n_reference]
        averaged = torch.isin(torch.from_numpy(distinct), half)
        known = within(view, packed, PackedTokens(packed.tokens[averaged], packed.lengths[averaged]))
    else:
        others = packed_prompts(view, reference)
        n_reference = int(distinct_rows([others], [()] * len(others.tokens)).max()) + 1
        known = within(view, packed, others)
    for note in notes:
        warn_caller(note.message)
    counts = {"n_reference": n_reference, "n_judged": len({*distinct[~known.numpy()].tolist()})}
    counts |= replace(packed, notes=(*packed.notes, *notes)).noted
    left_out = [] if reference is None else known.nonzero().flatten().tolist()
    return measured_kernels(view, chosen, packed, back, averaged, ~known, others), back, counts, left_out


def _distances(offsets: Iterable[Any] | None, width: int) -> list[int]:
    if offsets is None:
        return list(range(min(FARTHEST_OFFSET, width - 1), -1, -1))
    given = list(offsets)
    numbers = [whole_number(offset) for offset in given]
    known = {number for number in numbers if number is not None and -width < number <= 0}
    wrong = [offset for offset, number in zip(given, numbers, strict=True) if number not in known]
    if wrong or not given:
        raise ValueError(
            f"offsets are positions of the key less that of the query, {1 - width} to 0 for prompts of {width} tokens; "
            f"found {wrong[0] if wrong else 'none'}"
        )
    return sorted((-number for number in known), reverse=True)


def _judged(kernel: LayerKernels, back: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `kernel_prediction` of a layer's heads, without what there is not."""
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
    """Return each band's share of the variance of the preference over distances, and the pairs of each band.

    Bands are thirds of the pairs from fast to slow, as in `band_effects`. The share is the covariance of the band's
    contribution with the whole over the variance of the whole: shares sum to 1, and a band that works against the
    others has a negative one. NaN where the whole does not vary.
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
    """Return Pearson's r over the known offsets; NaN for fewer than three, or where either does not vary."""
    one, other = judged[known], predicted[known]
    if len(one) < 3 or min(np.ptp(one), np.ptp(other)) <= 1e-9 * max(np.abs(one).max(), np.abs(other).max()):
        return float("nan")
    return float(np.corrcoef(one, other)[0, 1])


def _random_prompts(view: AttentionView) -> Int[Tensor, "sequences pos"]:
    length = min(_KERNEL_LENGTH, view.n_ctx)
    tokens = torch.randint(0, view.d_vocab, (_KERNEL_SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = view.start_token
    return tokens
