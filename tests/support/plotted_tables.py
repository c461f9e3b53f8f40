"""Made-up tables of the figures: heads, terms of a score, effects and kernels."""

import numpy as np
import pandas as pd
from made_up_heads import heads as made_up_heads

EFFECTS = {"part": "rope_phase", "delta": [0.5, -0.1, np.nan], "delta_se": [0.1, 0.02, np.nan]}
OFFSETS = {"offset": np.tile(np.arange(-3, 1), 2), "score": np.arange(8.0)}
PARTS = ["symmetric", "antisymmetric", "phase", "outside_m"]
HEADS = pd.DataFrame({"layer": [0, 0, 1], "head": [0, 1, 0], "name": ["L0H0", "L0H1", "L1H0"], "prev": [0.9, 0.1, 0.5]})
SWEEP = HEADS[["layer", "head", "name"]].assign(**EFFECTS)
KERNELS = pd.DataFrame({"layer": 2, "head": np.repeat([1, 5], 4), **OFFSETS})


def terms(count: int = 5, **more) -> pd.DataFrame:
    values = np.random.default_rng(0).normal(size=(count, 4))
    frame = pd.DataFrame(values, columns=PARTS)
    frame.insert(0, "query_term", "embedding")
    frame.insert(1, "key_term", [f"L0H{index}" for index in range(count)])
    frame["total"] = values.sum(1)
    frame = frame.assign(**more)
    frame.attrs = {"head": "L5H1", "query": 7, "key": 2, "query_token": " be", "key_token": " or", "score": -1.5}
    return frame


def heads() -> pd.DataFrame:
    """A table with the narrow nulls of real heads."""
    table = made_up_heads(4, 6)
    table["D_head_null_std"] /= 20
    return table.assign(dir_frac_null_mean=0.7065, dir_frac_null_std=0.0009)
