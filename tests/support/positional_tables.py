"""Tables of positional and symbolic scores as their figures take them."""

import numpy as np
import pandas as pd

N_LAYERS, N_HEADS, N_FREQUENCIES = 4, 3, 8


def head_scores(**extra) -> pd.DataFrame:
    generator = np.random.default_rng(5)
    count = N_LAYERS * N_HEADS
    table = pd.DataFrame(
        {
            "layer": np.repeat(np.arange(N_LAYERS), N_HEADS),
            "head": np.tile(np.arange(N_HEADS), N_LAYERS),
            "s_pos": generator.uniform(0.2, 1, count),
            "s_sym": generator.uniform(0.2, 1, count),
            "exclusion_index": generator.random(count),
            "logit_std": generator.gamma(2, 1, count),
            "tau": 0.01,
            "alpha_ess": 12.0,
        }
    ).assign(**extra)
    table.attrs["model"] = "tiny-model"
    return table


def by_query(queries=(0, 8, 16, 24, 32)) -> pd.DataFrame:
    generator = np.random.default_rng(6)
    tables = []
    for query in queries:
        one = head_scores(query=query)
        one[["s_pos", "s_sym"]] = generator.uniform(0, 1, (len(one), 2))
        tables.append(one)
    # Rows in no order: panels have to find theirs.
    return pd.concat(tables).sample(frac=1, random_state=0, ignore_index=True)


def per_frequency() -> pd.DataFrame:
    generator = np.random.default_rng(7)
    index = pd.MultiIndex.from_product(
        [range(N_LAYERS), range(N_HEADS), range(N_FREQUENCIES)], names=["layer", "head", "frequency"]
    )
    table = index.to_frame(index=False)
    table[["s_pos", "s_sym", "logit_std"]] = generator.uniform(0, 1, (len(table), 3))
    table["theta"] = 10.0 ** -table["frequency"]
    return table.sample(frac=1, random_state=0, ignore_index=True)


def norms() -> pd.DataFrame:
    return per_frequency().rename(columns={"s_pos": "logit_norm", "s_sym": "key_norm"})


def traces() -> pd.DataFrame:
    rows = [
        {"layer": 1, "head": 2, "frequency": frequency, "swap_i": i, "swap_j": j, "block": block}
        for frequency in (pd.NA, 0, 5)
        for i, j in ((1, 3), (2, 4))
        for block in range(5)
    ]
    table = pd.DataFrame(rows).astype({"frequency": "Int64"})
    table[["before", "after"]] = np.random.default_rng(8).uniform(0, 0.02, (len(table), 2))
    return table.sample(frac=1, random_state=0, ignore_index=True)


def joined() -> pd.DataFrame:
    generator = np.random.default_rng(10)
    table = head_scores()
    table[["rope_imag_frac", "D_head", "prev"]] = generator.random((len(table), 3))
    return table


def of_head(table: pd.DataFrame, layer: int, head: int) -> pd.DataFrame:
    return table[(table["layer"] == layer) & (table["head"] == head)].sort_values("frequency")
