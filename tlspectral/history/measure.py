"""The measurements of one checkpoint: the head table with percentiles within the model, medians of it against their
null, the in-context score, K-composition of pairs of heads.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from tlspectral.errors import BadHead
from tlspectral.heads import analyze_heads
from tlspectral.heads.composition import k_composition
from tlspectral.history.result import PERCENTILES, Head
from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.loading.source import Source
from tlspectral.models.opening import open_layers
from tlspectral.positional import BlockPrompt, positional_symbolic
from tlspectral.tables import bundled
from tlspectral.tasks import Score, Task, evaluate, induction, score_of, scored_sequences, standard_error

if TYPE_CHECKING:
    from tlspectral.models.checkpoints import CheckpointLayers

_PAIR = ["sender_layer", "sender_head", "receiver_layer", "receiver_head"]
_COMPOSITION = ["score", "chance", "rank"]
_LEVEL = 0.95
_MEDIANS = 4000  # simulated; the ends of the interval then move by about 1/30 of its width between seeds


def measure_step(
    opened: AttentionView | Source,
    pairs: Sequence[tuple[Head, Head]],
    task: Task | None,
    blocks: BlockPrompt | None,
    **options: Any,
) -> pd.DataFrame:
    """Measure a model, or one that is read from its files; the arguments are those of `head_history`.

    Return the tables `heads` and `composition`, with blocks also `positional` and, on a model with rotary positions,
    `frequencies`, as one, see `bundled`. Its `attrs` are those of `analyze_heads`, with `numbers` (columns of a
    summary) and `shape` (numbers that have to be the same at all steps). Raises as `analyze_heads`, and BadHead for a
    pair that the model does not have.
    """
    model = opened.model if isinstance(opened, AttentionView) else opened
    shape = _shape(open_layers(model))
    score = None if task is None else evaluate(model, task)
    tables = {"composition": _composition(model, pairs)}  # a wrong head is refused before the null is computed
    heads = analyze_heads(model, null_blocks="fresh", **options)
    tables["heads"] = heads.assign(**{f"{name}_pct": heads[name].rank(pct=True) for name in PERCENTILES})
    if blocks is not None:
        tables["positional"] = positional_symbolic(model, blocks, mode="key")
        if any(shape["rotary"]):
            tables["frequencies"] = positional_symbolic(model, blocks, mode="key", per_frequency=True)
    numbers = {} if score is None else {"value": score.value, "value_se": score.se}
    if options["detectors"]:
        first, second = copy_losses(model, induction(seed=options["seed"]))
        difference = second.per_sequence - first.per_sequence
        numbers |= {"icl_score": float(difference.mean()), "icl_score_se": standard_error(difference)}
        numbers |= {"first_copy_loss": first.value, "second_copy_loss": second.value}
    table = bundled(tables)
    shape["heads"] = heads.groupby("layer").size().tolist()
    table.attrs |= heads.attrs | {"numbers": numbers, "shape": shape}
    return table


def _shape(layers: "AttentionView | CheckpointLayers") -> dict[str, Any]:
    shape = {"layers": layers.n_layers, "d_model": layers.d_model}
    if isinstance(layers, AttentionView):
        rotary = [layers.rotary(index) is not None for index in layers.layers]
        return shape | {"d_vocab": layers.d_vocab, "rotary": rotary}
    return shape | {"d_vocab": int(layers.config.vocab_size), "model_type": layers.config.model_type}


def _composition(model: Any, pairs: Sequence[tuple[Head, Head]]) -> pd.DataFrame:
    """Return the pairs' rows of `k_composition`, which is computed once per receiver."""
    receivers = dict.fromkeys(receiver for _, receiver in pairs)
    scores = {end: k_composition(model, end).set_index(["layer", "head"])[_COMPOSITION] for end in receivers}
    rows = []
    for sender, receiver in pairs:
        if sender not in scores[receiver].index:
            raise BadHead(f"layer {sender[0]} of the model has no head {sender[1]}")
        rows.append((*sender, *receiver, *scores[receiver].loc[sender]))
    return pd.DataFrame(rows, columns=[*_PAIR, *_COMPOSITION]).astype({"rank": np.int64})


def copy_losses(model: Any, task: Task) -> tuple[Score, Score]:
    """Return the losses on the first and on the second copy of the repeated segments of `tasks.induction`.

    With segments of L tokens, positions 1 .. L-1 predict the first copy and L+1 .. 2L-1 the second, L - 1 each.
    """
    view = attention_view(model)
    second = scored_sequences(view, task)
    # Attention is causal, so the second copy does not change the losses of the first.
    width = second.tokens.shape[1] // 2 + 1
    lengths = torch.full((len(second.tokens),), width)
    first = replace(second, tokens=second.tokens[:, :width], lengths=lengths, scored=slice(1, width - 1))
    return score_of(view, first), score_of(view, second)


def population_medians(heads: pd.DataFrame, *, seed: int = 0) -> dict[str, float]:
    """Compute medians over the heads of one model, and their null of random orientations.

    The null of the median of D_head and of dir_frac has every head drawn independently from a normal distribution with
    the mean and deviation of its own matched null; `_null_low` and `_null_high` hold 95 % of such medians. For
    rope_imag_frac it is 1/2: rotating the pairs of a random W_K by 90 degrees swaps Re M_t and Im M_t and changes
    nothing else.

    Args:
        heads: the head table of one model, with `D_head`, `dir_frac`, `rope_imag_frac`, and `_null_mean`, `_null_std`
            of the first two.
        seed: of the simulated medians.

    Returns:
        `D_head_median`, `D_head_null_median`, `D_head_null_low`, `D_head_null_high`, the same of `dir_frac`, and
        `rope_imag_frac_median`, `rope_imag_frac_null_median`; NaN where a model has no such number.

    Source: "Fingerprint, Not Blueprint" (FP, sections 3 and 9), which draws one constant null; here it follows the
    singular values of the heads at each step.

    What it does not establish: an exact level. Heads that share keys (grouped queries), or were trained together, are
    not independent, so that the true spread is wider.
    """
    medians: dict[str, float] = {}
    # Without dropna, pandas 2 warns of a column that is empty.
    for column in ("D_head", "dir_frac"):
        medians[f"{column}_median"] = float(heads[column].dropna().median())
        medians |= _null_of_median(column, heads, seed)
    phase = float(heads["rope_imag_frac"].dropna().median())
    medians["rope_imag_frac_median"] = phase
    medians["rope_imag_frac_null_median"] = float("nan") if np.isnan(phase) else 0.5
    return medians


def _null_of_median(column: str, heads: pd.DataFrame, seed: int) -> dict[str, float]:
    moments = [f"{column}_null_mean", f"{column}_null_std"]
    null_moments = heads.loc[heads[column].notna(), moments].dropna().to_numpy(dtype=float)
    names = [f"{column}_null_low", f"{column}_null_median", f"{column}_null_high"]
    if len(null_moments) == 0:
        return dict.fromkeys(names, float("nan"))
    drawn = np.random.default_rng(seed).normal(*null_moments.T, size=(_MEDIANS, len(null_moments)))  # medians heads
    quantiles = np.quantile(np.median(drawn, axis=1), [(1 - _LEVEL) / 2, 0.5, (1 + _LEVEL) / 2])
    return dict(zip(names, quantiles.tolist(), strict=True))
