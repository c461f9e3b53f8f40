"""Position kernels of the final previous-token heads of constrained runs."""

import numpy as np
import pandas as pd
import pytest

from tlspectral.studies.fingerprint.constrained import previous_token_heads, rerouting


def run_tables(arm, seed, best, curves, step=10):
    """Heads and kernels of a run of one layer: `prev` is largest at head `best`, `curves` by head."""
    heads = pd.DataFrame(
        {
            "arm": arm,
            "seed": seed,
            "step": [step - 5] * len(curves) + [step] * len(curves),
            "layer": 0,
            "head": [*range(len(curves))] * 2,
            # At the earlier evaluation another head is the best, and better.
            "prev": [0.99 if head != best else 0.1 for head in range(len(curves))]
            + [0.8 if head == best else 0.2 for head in range(len(curves))],
            "dir_frac": [0.0] * len(curves) + [0.1 * head for head in range(len(curves))],
        }
    )
    kernels = pd.DataFrame(
        [
            {"arm": arm, "seed": seed, "step": at, "layer": 0, "head": head, "offset": offset - 8, "score": score}
            for at in (step - 5, step)
            for head, curve in enumerate(curves)
            for offset, score in enumerate(curve)
        ]
    )
    return heads, kernels


def joined(*runs):
    return tuple(pd.concat(parts, ignore_index=True) for parts in zip(*runs, strict=True))


def spike(offset, height=1.0, level=0.0):
    curve = np.full(9, level)
    curve[offset + 8] += height
    return curve


def test_kernels_of_the_final_previous_token_head():
    heads, kernels = joined(
        run_tables("rope_free", 0, 1, [spike(0), spike(-1)]),
        run_tables("rope_free", 1, 0, [spike(-1, 2.0, level=7.0), spike(0)]),
        run_tables("rope_free", 2, 0, [spike(-1, 4.0), spike(0)], step=20),
        run_tables("rope_imag", 0, 1, [spike(0), spike(-3, 1.0)]),
        run_tables("ape_free", 0, 1, [spike(0), spike(-2)]),
    )
    table = rerouting(heads, kernels.sample(frac=1, random_state=1)).set_index(["arm", "seed"])
    assert table["head"].tolist() == [1, 0, 0, 1, 1]
    assert table["step"].tolist() == [10, 10, 20, 10, 10]
    assert table["peak_offset"].tolist() == [-1, -1, -1, -3, -2]
    assert table.loc[("rope_imag", 0), "dir_frac"] == pytest.approx(0.1)

    def rms(one, other):
        one, other = one - one.mean(), other - other.mean()
        return np.sqrt(((one - other) ** 2).mean())

    # The level of a kernel does not matter.
    free = [spike(-1, height) for height in (1.0, 2.0, 4.0)]
    among = [np.mean([rms(free[i], free[j]) for j in range(3) if j != i]) for i in range(3)]
    assert table.loc["rope_free", "kernel_distance"].tolist() == pytest.approx(among)
    own = np.mean([rms(spike(-3), curve) for curve in free])
    row = table.loc[("rope_imag", 0)]
    assert row["kernel_distance"] == pytest.approx(own)
    assert row["free_spread"] == pytest.approx(np.mean(among))
    assert row["distance_ratio"] == pytest.approx(own / np.mean(among))
    assert np.isnan(table.loc[("ape_free", 0), ["kernel_distance", "free_spread"]].astype(float)).all()


def test_kernels_that_do_not_fit_are_refused():
    heads, kernels = run_tables("rope_free", 0, 1, [spike(0), spike(-1)])
    with pytest.raises(ValueError, match="arm rope_free, seed 0: the table of kernels has none of L0H1 at step 10"):
        rerouting(heads, kernels[kernels["head"] == 0])
    with pytest.raises(ValueError, match="no rows"):
        previous_token_heads(heads.iloc[:0])
    with pytest.raises(ValueError, match="seed 0 has several rows for one step, layer, head"):
        previous_token_heads(pd.concat([heads, heads], ignore_index=True))
    with pytest.raises(ValueError, match="seed 0 has several rows for one step, layer, head, offset"):
        rerouting(heads, pd.concat([kernels, kernels], ignore_index=True))
