"""`positional_contrast`: the scores of two tasks on one model, or of two models on one task, with intervals."""

import numpy as np
import pandas as pd

from tlspectral.positional.measure import mean
from tlspectral.stats.jackknife import jackknife
from tlspectral.tables.required import require
from tlspectral.tables.schema import Schema, columns

_SCORES = ("s_pos", "s_sym", "exclusion_index")
_SETTINGS = ("mode", "tau", "swaps", "logit_scale", "per_frequency")
_SAME_PROMPTS = ("task", "draw_seeds", "queries", "blocks")
_BY_DRAW = 'positional_symbolic(..., by="draw")'

POSITIONAL_CONTRAST = Schema(
    "positional_contrast",
    columns("""
        score      | label        | s_pos, s_sym or exclusion_index.
        a          | as the score | Mean over heads of the first table.
        b          | as the score | Mean over heads of the second table.
        difference | as the score | a less b.
        low        | as the score | Low end of its interval. NaN for fewer than three layers or draws.
        high       | as the score | High end of its interval.
        pvalue     | probability  | Two-sided p of the same t.
        n          | count        | Layers or draws behind the interval.
        paired_by  | label        | What is paired, and what the interval is over: head, over layers; or draw.
    """),
    "`tlspectral.positional.positional_contrast`",
)


def positional_contrast(a: pd.DataFrame, b: pd.DataFrame, *, level: float = 0.95) -> pd.DataFrame:
    """Difference of the mean scores over heads on two tasks or of two models, a less b, paired and with intervals.

    Two tasks on one model are paired head by head, and the interval is over layers. Two models on one task are paired
    draw by draw, as both read the same lists, and the interval is over draws. Both are those of leaving out one layer,
    or draw, after another, by Student's t.

    Args:
        a, b: tables of `positional_symbolic` by draw and head, with the same mode, tau, swaps and scale.
        level: of the interval.

    Returns:
        DataFrame, one row per score. Columns: `score, a, b, difference, low, high, pvalue, n, paired_by`.

    Raises:
        ValueError: a table without `by="draw"` or with frequencies, other settings, two models whose task, seeds,
            blocks or queries differ, or no head in both tables.

    What it does not establish: between tasks, anything about other draws, wordings or models; between models, that
    heads at one place do the same, or anything about other models of their kind. `pvalue` is too small where
    neighbouring layers resemble each other.
    """
    for table in (a, b):
        require(table, ["layer", "head", "draw", *_SCORES], _BY_DRAW)
        if table.duplicated(["layer", "head", "draw"]).any():
            raise ValueError(f"a head has several rows of one draw: give tables of {_BY_DRAW} without per_frequency")
    first, second = a.attrs, b.attrs
    differing = [name for name in _SETTINGS if first.get(name) != second.get(name)]
    if differing:
        raise ValueError(
            f"the tables were made with other {', '.join(differing)}: {[first.get(name) for name in differing]} and "
            f"{[second.get(name) for name in differing]}"
        )
    same_model = first.get("weights_sha256", first["model"]) == second.get("weights_sha256", second["model"])
    if not same_model and (other := [name for name in _SAME_PROMPTS if first.get(name) != second.get(name)]):
        raise ValueError(f"two models are compared on the same prompts, and {', '.join(other)} differ")
    rows = []
    for score in _SCORES:
        if same_model:
            joined = _heads(a, score).merge(_heads(b, score), on=["layer", "head"], suffixes=("_a", "_b"))
            paired = joined.dropna(subset=[f"{score}_a", f"{score}_b"])
            groups = paired["layer"].to_numpy()
        else:
            means = {f"{score}_{name}": one.groupby("draw")[score].mean() for name, one in (("a", a), ("b", b))}
            paired = pd.DataFrame(means).dropna()
            groups = paired.index.to_numpy()
        if paired.empty:
            raise ValueError(f"no head has {score} in both tables")
        difference = (paired[f"{score}_a"] - paired[f"{score}_b"]).to_numpy(float)
        kinds = np.unique(groups)
        left_out = [difference[groups != kind].mean() for kind in kinds] if len(kinds) > 1 else []
        (low, high), pvalue = jackknife(float(difference.mean()), np.array(left_out), level)
        rows.append(
            {
                "score": score,
                "a": float(paired[f"{score}_a"].mean()),
                "b": float(paired[f"{score}_b"].mean()),
                "difference": float(difference.mean()),
                "low": low,
                "high": high,
                "pvalue": pvalue,
                "n": len(kinds),
                "paired_by": "head, over layers" if same_model else "draw",
            }
        )
    of_each = {name: {key: one.get(key) for key in ("model", "task")} for name, one in (("a", first), ("b", second))}
    attrs = {**of_each, "level": level, **{name: first.get(name) for name in _SETTINGS}}
    return POSITIONAL_CONTRAST.frame(pd.DataFrame(rows), attrs)


def _heads(table: pd.DataFrame, score: str) -> pd.DataFrame:
    """Mean of a score over draws, a row per head."""
    by_draw = table.pivot(index="draw", columns=["layer", "head"], values=score)
    return by_draw.columns.to_frame(index=False).assign(**{score: mean(by_draw.to_numpy(float))})
