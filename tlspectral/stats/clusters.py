"""Clusters of heads: the cluster of each row."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Int64

from tlspectral.stats.values import require_columns

# With two clusters a resample has three different outcomes, and the spread between clusters one degree of freedom.
FEWEST_CLUSTERS = 3


def cluster_indices(heads: pd.DataFrame, cluster: str | Sequence[str]) -> Int64[np.ndarray, "rows"]:
    """Return the index of each row's cluster, from 0 in sorted order; -1 where a cluster column has no value.

    Raises:
        ValueError: no cluster column, one that the table lacks, or `"kv_head"` alone, which every layer numbers anew.
    """
    names = [cluster] if isinstance(cluster, str) else list(cluster)
    if not names:
        raise ValueError("name at least one cluster column")
    require_columns(heads, names)
    if names == ["kv_head"]:
        raise ValueError("kv_head is numbered anew in every layer: give cluster=('layer', 'kv_head')")
    return heads.groupby(names, sort=True, dropna=True).ngroup().fillna(-1).to_numpy().astype(np.int64)
