"""`band_effects`: effects of removing a head's high, middle or low rotary frequencies, beside random sets."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.hooks.layer_ablation import LayerAblation, Removal
from tlspectral.hooks.parts import Band
from tlspectral.hooks.sweeps.layer_effects import unpadded
from tlspectral.hooks.sweeps.sweep import SEQUENCES
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.layer import AttentionLayer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.partial_runs import IntactRun
from tlspectral.selection import Heads, counted, heads_by_layer
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.progress import bar
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks import Task
from tlspectral.tasks.metric_value import beside_control, standard_error
from tlspectral.tasks.task import task_of
from tlspectral.tasks.task_sequences import TaskSequences, intact_values, replayed_values, task_sequences

BANDS = ("high", "middle", "low")
_TRIES = 200  # orders of the frequencies tried for one random set
_TOLERANCE = 0.1  # of the RMS that a random set may differ by

BAND_EFFECTS = Schema(
    "band_effects",
    (
        *HEAD,
        *columns("""
            band             | label         | Third of the frequencies that was dropped: high (the fastest pairs),
                             |               | middle or low.
            first            | index         | The band's first frequency, the head's pairs sorted from fast to slow.
            last             | index         | The band's last frequency in that order.
            delta            | of the metric | Value without the band's contribution to the scores less the intact one.
            delta_se         | of the metric | Standard error of delta over sequences, paired with the intact run.
            score_rms        | logit         | RMS of the band's contribution to the scaled scores over unmasked pairs.
            random_delta     | of the metric | As delta, mean over random sets of frequencies. NaN without a set, as
                             |               | what follows.
            random_delta_se  | of the metric | Standard error of random_delta over sets and sequences; NaN for one set.
            random_delta_min | of the metric | Smallest effect of a random set, mean over sequences.
            random_delta_max | of the metric | Largest effect of a random set, mean over sequences.
            control_excess   | of the metric | |delta| less the mean over random sets of |their effect|.
            control_p        | probability   | (1 + sets with an effect as large as delta) / (1 + sets), in absolute
                             |               | values.
            random_score_rms | logit         | As score_rms, mean over random sets.
            random_overlap   | share         | RMS of the band's own frequencies in a set over that of the band, mean
                             |               | over sets.
            random_draws     | count         | Different random sets that were found.
        """),
    ),
    "`tls.hooks.band_effects`",
)


def band_effects(
    model: Any,
    heads: Heads,
    *,
    task: Task | Literal["induction", "language"] = "induction",
    draws: int = 5,
    seed: int = 0,
) -> pd.DataFrame:
    """Remove each third of a head's rotary frequencies in turn, and random sets of frequencies of equal RMS.

    A random set is the beginning of a random order of the head's frequencies, cut where the RMS of its contribution to
    the scores is nearest to that of the band. It is used if it is within 10 % of that. Nothing is rescaled.

    Args:
        model: a TransformerBridge or HookedTransformer.
        heads: as in `ablate`.
        task: as in `ablation_sweep`.
        draws: random sets per band. `control_p` is not below 1 / (1 + random_draws): 19 reach .05.
        seed: of the sets and of the task's sequences.

    Returns:
        DataFrame, one row per head and band. Columns: `layer, head, name, band, first, last, delta, delta_se,
        score_rms, random_delta, random_delta_se, random_delta_min, random_delta_max, control_excess, control_p,
        random_score_rms, random_overlap, random_draws`.

    Raises:
        BadHead: a head that does not exist.
        UnsupportedArchitecture: a layer without rotary positions.
        ValueError: fewer than three frequencies, `draws` that are no number, or prompts that the task refuses.

    What it does not establish: that the head was trained to use the band. Frequencies act together in a softmax: the
    effects of the three bands do not add up to that of the head. Where `random_overlap` is near 1, as in a head with
    one dominant frequency, a random set is almost the band itself and cannot serve as a control.
    """
    draws, view = counted(draws, 0, "draws is how many random sets each band has"), attention_view(model)
    by_layer = heads_by_layer(view, heads)
    for layer in by_layer:
        geometry = view.rotary(layer)
        if geometry is None:
            raise UnsupportedArchitecture(f"layer {layer}: no rotary positions, so there are no bands to drop")
        if geometry.n_pairs < len(BANDS):
            raise ValueError(f"layer {layer}: {geometry.n_pairs} rotary frequencies do not make three bands")
    chosen_task = task_of(task, seed=seed, n_sequences=SEQUENCES)
    sequences = task_sequences(view, chosen_task)
    intact, intact_value = intact_values(view, sequences, by_layer)
    rows = []
    total = sum(len(chosen) for chosen in by_layer.values())
    with bar(total, "bands", "head") as shown:
        for layer, chosen in by_layer.items():
            folded = view.layer(layer)
            for head, products in zip(chosen, _score_products(view, sequences, folded, chosen), strict=True):
                rows += _head_rows(intact, sequences, intact_value, folded, head, products, draws, seed)
                shown.update(1)
    settings = {"task": sequences.name, "draws": draws, "seed": seed}
    return Measurement(BAND_EFFECTS, settings, view.origin(runs=True)).table(
        pd.DataFrame(rows),
        n_sequences=len(sequences.tokens),
        batch=sequences.rows_at_once(view),
        higher_is_better=sequences.higher_is_better,
        intact_value=float(intact_value.mean()),
        **sequences.noted,
    )


def _head_rows(
    intact: IntactRun,
    sequences: TaskSequences,
    intact_value: Float64[np.ndarray, "sequences"],
    layer: AttentionLayer,
    head: int,
    products: Float64[np.ndarray, "pairs pairs"],
    draws: int,
    seed: int,
) -> list[dict[str, Any]]:
    assert layer.rotary is not None
    theta = layer.rotary.of_heads([head]).theta.flatten().numpy()
    fast_to_slow = np.argsort(-np.abs(theta), kind="stable")
    thirds = np.array_split(np.arange(len(theta)), len(BANDS))
    rows = []
    for band_index, (band, third) in enumerate(zip(BANDS, thirds, strict=True)):
        chosen = np.zeros(len(theta), dtype=bool)
        chosen[fast_to_slow[third]] = True
        rng = np.random.default_rng([seed, layer.layer, head, band_index])
        sets = equal_sets(products, chosen, draws, rng)
        bands = [Band(np.flatnonzero(pairs)).on(intact.view, {layer.layer: [head]}) for pairs in [chosen, *sets]]
        hooks = [LayerAblation(intact.view, layer, [head], band[layer.layer]).hooks() for band in bands]
        replayed = [replayed_values(intact, sequences, [layer.layer], lambda *_, each=each: each) for each in hooks]
        values = np.concatenate(replayed)
        delta, random = values[0] - intact_value, values[1:] - intact_value  # [sequences], [sets, sequences]
        rows.append(
            {
                "layer": layer.layer,
                "head": head,
                "band": band,
                "first": int(third[0]),
                "last": int(third[-1]),
                "delta": float(delta.mean()),
                "delta_se": standard_error(delta, sequences.distinct),
                "score_rms": _set_rms(products, chosen),
                **_random_columns(products, chosen, sets, delta, random, sequences.distinct),
            }
        )
    return rows


def _random_columns(
    products: Float64[np.ndarray, "pairs pairs"],
    band: Bool[np.ndarray, "pairs"],
    sets: list[Bool[np.ndarray, "pairs"]],
    delta: Float64[np.ndarray, "sequences"],
    deltas: Float64[np.ndarray, "sets sequences"],
    distinct: Int[np.ndarray, "sequences"] | None,
) -> dict[str, float]:
    names = [*(f"random_{name}" for name in ("delta", "delta_se", "delta_min", "delta_max"))]
    names += ["control_excess", "control_p", "random_score_rms", "random_overlap"]
    if not sets:
        return dict.fromkeys(names, np.nan) | {"random_draws": 0}
    by_set = deltas.mean(1)
    beside = beside_control(delta[None], deltas[None], distinct)
    error, excess, pvalue = (float(beside[f"control_{name}"][0]) for name in ("delta_se", "excess", "p"))
    rms = np.mean([_set_rms(products, chosen) for chosen in sets])
    overlap = np.mean([_set_rms(products, chosen & band) for chosen in sets]) / _set_rms(products, band)
    values = [by_set.mean(), error, by_set.min(), by_set.max(), excess, pvalue, rms, overlap]
    return dict(zip(names, map(float, values), strict=True)) | {"random_draws": len(sets)}


def equal_sets(
    products: Float64[np.ndarray, "pairs pairs"], band: Bool[np.ndarray, " pairs"], draws: int, rng: np.random.Generator
) -> list[Bool[np.ndarray, "pairs"]]:
    """Draw random sets of frequencies whose joint contribution to the scores has the RMS of a band's.

    Fewer than `draws` are returned if not enough are found.

    `products` are mean products of the contributions of two frequencies over all unmasked pairs of tokens, so that
    `m^T products m` is the mean square of the contribution of a set m.
    """
    wanted = _set_rms(products, band)
    sets: list[np.ndarray] = []
    for _ in range(_TRIES * draws):
        if len(sets) == draws:
            break
        order = rng.permutation(len(band))
        prefixes = np.zeros((len(band) - 1, len(band)), dtype=bool)
        for size in range(1, len(band)):
            prefixes[size - 1, order[:size]] = True
        sizes = np.array([_set_rms(products, prefix) for prefix in prefixes])
        best = int(np.argmin(np.abs(sizes - wanted)))
        drawn = prefixes[best]
        fits = abs(sizes[best] - wanted) <= _TOLERANCE * wanted
        if fits and not any((drawn == other).all() for other in [band, *sets]):
            sets.append(drawn)
    return sets


def _set_rms(products: Float64[np.ndarray, "pairs pairs"], chosen: Bool[np.ndarray, "pairs"]) -> float:
    # Rounding can make the mean square slightly negative.
    return float(np.sqrt(max(products[np.ix_(chosen, chosen)].sum(), 0.0)))


def _score_products(
    view: AttentionView, sequences: TaskSequences, layer: AttentionLayer, heads: list[int]
) -> Float64[np.ndarray, "heads pairs pairs"]:
    """Compute the mean products of the contributions of every two frequencies to the scaled scores.

    The mean is over the unmasked pairs of tokens of a sequence and then over sequences.
    """
    assert layer.rotary is not None
    n_pairs = layer.rotary.n_pairs
    total = torch.zeros(len(heads), n_pairs, n_pairs, dtype=torch.float64)
    batch = slice(0, 0)
    of_batch = torch.zeros_like(total)

    def add_products(removal: Removal) -> Tensor:
        """Add each sequence's mean products to those of the batch, and remove nothing."""
        removal = unpadded(removal, sequences, batch)
        assert removal.scores is not None
        assert removal.allowed is not None
        for index in range(len(total)):
            scores = removal.scores.of_head(index)
            allowed = removal.allowed if removal.allowed.ndim == 2 else removal.allowed[:, index]
            unmasked = allowed.expand(len(removal.difference), *allowed.shape[-2:])
            products = torch.stack(
                [scores.of_pairs(torch.arange(n_pairs) == pair)[:, 0][unmasked] for pair in range(n_pairs)]
            )  # [pairs, unmasked pairs of tokens]
            products = in_float64(products)
            per_sequence = unmasked.sum((-2, -1)).to(products.device)
            weights = (1.0 / per_sequence.double()).repeat_interleave(per_sequence)  # by unmasked pair of tokens
            of_batch[index] += (products * weights @ products.T).cpu()
        return torch.zeros_like(removal.difference)

    every = Band(range(n_pairs)).on(view, {layer.layer: heads})[layer.layer]
    hooks = LayerAblation(view, layer, heads, every, alter=add_products).hooks()

    def products_of(sequences_run: slice) -> Tensor:
        nonlocal batch
        batch = sequences_run
        of_batch.zero_()
        view.run(sequences.tokens[batch], hooks, last=view.hook_names(layer.layer)["z"])
        return of_batch

    for found in sequences.in_batches(view, products_of):
        total += found
    return (total / (len(sequences.tokens) * view.blocks[layer.layer].runs)).numpy()
