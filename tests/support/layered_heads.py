"""Heads whose columns depend on each other and on the layer."""

import numpy as np
import pandas as pd


def heads_of(seed, layers=8, per_layer=6):
    """Head tables whose columns depend on each other and on the layer."""
    rng = np.random.default_rng(seed)
    layer = np.repeat(np.arange(layers), per_layer)
    rows, level = len(layer), rng.standard_normal((layers, 3))
    dir_frac = level[layer, 0] + rng.standard_normal(rows)
    rif = level[layer, 1] + rng.standard_normal(rows)
    d_head = dir_frac + rif + level[layer, 2] + rng.standard_normal(rows)
    head, centroid = np.tile(np.arange(per_layer), layers), rng.standard_normal(rows)
    prev = np.exp(d_head + rng.standard_normal(rows))
    return pd.DataFrame({"layer": layer, "head": head, "kv_head": head // 2, "dir_frac": dir_frac,
                         "rope_imag_frac": rif, "freq_centroid": centroid, "D_head": d_head, "prev": prev})  # fmt: skip
