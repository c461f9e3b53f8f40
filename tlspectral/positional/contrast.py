"""`profile_contrast`: the scores of two tasks on one model, or of two models on one task, with intervals."""

import numpy as np
import pandas as pd

from tlspectral.positional.columns import PROFILE_CONTRAST
from tlspectral.positional.profile import PositionalSymbolicProfile
from tlspectral.stats.jackknife import jackknife
from tlspectral.tables import named

_SCORES = ("s_pos", "s_sym", "exclusion_index")
_SETTINGS = ("mode", "tau", "swaps", "exclude_first_block", "logit_scale")
_SAME_PROMPTS = ("task", "draw_seeds", "queries", "blocks")


def profile_contrast(
    a: PositionalSymbolicProfile, b: PositionalSymbolicProfile, *, level: float = 0.95
) -> pd.DataFrame:
    """Difference of the mean scores over heads of two profiles, a less b, paired and with intervals.

    Two tasks on one model are paired head by head, and the interval is over layers. Two models on one task are paired
    draw by draw, as both read the same lists, and the interval is over draws. Both are those of leaving out one layer,
    or draw, after another, by Student's t.

    Args:
        a, b: profiles with the same mode, tau, swaps and scale.
        level: of the interval.

    Returns:
        DataFrame, one row per score: `score, a, b` (means over heads), `difference, low, high, pvalue, n` (layers or
        draws) and `paired_by`. Interval and p are NaN for fewer than three layers or draws.

    Raises:
        ValueError: other settings, two models whose task, seeds, blocks or queries differ, or no head in both tables.

    What it does not establish: between tasks, anything about other draws, wordings or models; between models, that
    heads at one place do the same, or anything about other models of their kind.
    """
    first, second = a.heads.attrs, b.heads.attrs
    differing = [name for name in _SETTINGS if first.get(name) != second.get(name)]
    if differing:
        raise ValueError(
            f"the profiles were made with other {', '.join(differing)}: {[first.get(name) for name in differing]} and "
            f"{[second.get(name) for name in differing]}"
        )
    same_model = first.get("weights_sha256", first["model"]) == second.get("weights_sha256", second["model"])
    if not same_model and (other := [name for name in _SAME_PROMPTS if first.get(name) != second.get(name)]):
        raise ValueError(f"two models are compared on the same prompts, and {', '.join(other)} differ")
    rows = []
    for score in _SCORES:
        if same_model:
            joined = a.heads.merge(b.heads, on=["layer", "head"], suffixes=("_a", "_b"))
            paired = joined.dropna(subset=[f"{score}_a", f"{score}_b"])
            groups = paired["layer"].to_numpy()
        else:
            means = {f"{score}_{name}": one.draws.groupby("draw")[score].mean() for name, one in (("a", a), ("b", b))}
            paired = pd.DataFrame(means).dropna()
            groups = paired.index.to_numpy()
        if paired.empty:
            raise ValueError(f"no head has {score} in both profiles")
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
    table = pd.DataFrame(rows)
    table.attrs = {
        "a": {name: first.get(name) for name in ("model", "task")},
        "b": {name: second.get(name) for name in ("model", "task")},
        "level": level,
        **{name: first.get(name) for name in _SETTINGS},
    }
    return named(table, PROFILE_CONTRAST)
