"""docs/results/positional.md gives what the stored tables of benchmarks/swapped_words.py hold, and these scores are the
library's.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from tlspectral.positional.scores import swap_scores

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(import_benchmark):
    return import_benchmark("swapped_words")


@pytest.fixture
def page():
    return " ".join((ROOT / "docs/results/positional.md").read_text(encoding="utf-8").split())


def test_the_page_has_the_rows_of_the_stored_tables(benchmark, page):
    rows = list(benchmark.rows_of_page())
    scored = [
        pd.read_csv(benchmark.FOLDER / f"{name}.csv")["model"].nunique() for name in ("sensitivity", "swapped_words")
    ]
    assert len(rows) == 2 * 4 + 4 * sum(scored)
    for row in rows:
        assert row in page, row


def test_tau_as_a_share_of_the_largest_difference_is_the_librarys_default(benchmark):
    rng = np.random.default_rng(0)
    swaps = [(1, 4), (1, 7), (4, 7)]
    before, after = rng.uniform(0, 1e-3, (2, 3, 20, 2))  # swaps, rows, slots
    # A block has one weight before any swap.
    weights = {block: rng.uniform(0, 1e-3, 20) for block in (1, 4, 7)}
    before = np.stack([np.stack([weights[i], weights[j]], axis=-1) for i, j in swaps])
    rows = pd.DataFrame({"query": 0, "layer": 0, "head": range(20)})
    rows = rows.assign(**{f"before_{block}": weight for block, weight in weights.items()})
    for (i, j), of_swap in zip(swaps, after, strict=True):
        rows[f"first_{i}_{j}"], rows[f"second_{i}_{j}"] = of_swap.T
    found = benchmark.scored(rows, swaps, 0.1)
    expected = swap_scores(torch.tensor(before), torch.tensor(after))
    for name in ("s_pos", "s_sym", "alpha_ess", "tau"):
        # Rounding, measured 4e-16; a tau of .3 moves scores by 1e-2.
        np.testing.assert_allclose(found[name], getattr(expected, name), rtol=1e-12)
    assert (np.abs(benchmark.scored(rows, swaps, 0.3)["s_pos"] - found["s_pos"]) > 1e-3).any()
