"""Heads of several models, with a scheme of positions for each."""

import numpy as np
import pandas as pd

# Top-5 medians of FP's Table 2, last column.
MEDIANS = {
    "gpt2": 0.2083, "opt": 0.2305, "neo": 0.1406, "bloom": 0.2630, "410m": 0.8854, "1.4b": 0.8490, "llama": 0.7900,
}  # fmt: skip


SCHEMES = {model: "rope" if model in ("410m", "1.4b", "llama") else "other" for model in MEDIANS}


def heads_of(seed):
    """Four layers of five heads."""
    rng = np.random.default_rng(seed)
    layer, head = np.divmod(np.arange(20), 5)
    return pd.DataFrame({"layer": layer, "head": head, "D_head": rng.uniform(size=20), "prev": rng.beta(0.3, 2, 20)})
