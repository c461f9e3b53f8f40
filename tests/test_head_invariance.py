"""What must not change a head table: backend, workers, order of layers and heads, grouping, other seeds."""

import itertools

import joblib
import numpy as np
import pytest
import zoo
from head_tables import ALL, COUNTS, NULLS, SCALE_FREE, TEXTS, analyze, assert_same, built, table_of

# --- both backends ---


FEW = ("gpt2", "neox", "llama", "qwen3")
FOLDED = [(name, True) for name in FEW] + [("gpt2", False), ("llama", False)]
FOLDED += [pytest.param(name, fold_ln, marks=pytest.mark.slow) for name in zoo.HOOKED_ARCHITECTURES
           for fold_ln in (True, False) if (name, fold_ln) not in FOLDED]  # fmt: skip


@zoo.needs_hooked
@pytest.mark.parametrize(("name", "fold_ln"), FOLDED)
def test_a_users_hooked_transformer_gives_the_table_of_the_bridge(name, fold_ln):
    """TransformerLens's default processing: norms folded or not, writing weights, values and unembedding centred."""
    bridge = table_of(name)
    hooked = table_of(name, "hooked") if fold_ln else analyze(zoo.hooked(name, fold_ln=False))
    assert_same(hooked[TEXTS + COUNTS], bridge[TEXTS + COUNTS])
    # Measured: at most 9e-8, norms folded in float32; a norm folded twice or not at all moves them by 1e-2.
    shares = [*SCALE_FREE, "rope_imag_frac", "hi_freq_dir", "rotary_fraction", "outside_m"]
    np.testing.assert_allclose(hooked[shares], bridge[shares], rtol=0, atol=1e-6)
    relative = ["spectral_radius", "freq_centroid"]
    np.testing.assert_allclose(hooked[relative], bridge[relative], rtol=1e-5)
    # Measured: 1e-7, 5e-8 and 1e-6 (a small self_match; 3e-8 of the spread of scores, its unit).
    np.testing.assert_allclose(hooked["self_match"], bridge["self_match"], rtol=1e-5, atol=1e-6)
    # Measured: 1e-6 degrees; 3e-5 of a condition number, which itself says how much rounding it multiplies.
    np.testing.assert_allclose(
        hooked[["prin_angle_mean", "prin_angle_max"]], bridge[["prin_angle_mean", "prin_angle_max"]], atol=1e-4
    )
    np.testing.assert_allclose(hooked["cond_eig"], bridge["cond_eig"], rtol=1e-3)
    # The same draws for nearly the same singular values. Measured: 6e-9; z, which divides by a spread of 1e-2, 8e-7.
    means = [column for column in NULLS if column.endswith(("null_mean", "null_std"))]
    np.testing.assert_allclose(hooked[means], bridge[means], rtol=0, atol=1e-6)
    z = [column for column in NULLS if column.endswith("_z")]
    np.testing.assert_allclose(hooked[z], bridge[z], rtol=0, atol=1e-5)
    # Not so: copying and positivity. center_unembed takes a mean over the vocabulary from W_U (test_copying).
    assert (hooked["positivity"] - bridge["positivity"]).abs().max() > 1e-3


# --- what must not matter ---


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_neither_workers_nor_the_order_of_layers_change_a_bit(backend):
    model = built("bridge", "gemma2")
    assert_same(analyze(model, heads=["L3", "L1", "L0", "L2"]), table_of("gemma2"))
    fresh = analyze(model, null_blocks="fresh")
    with joblib.parallel_config(backend):
        assert_same(analyze(model, n_jobs=2, null_blocks="fresh", heads=("L3", "L-2", "L1", "L0")), fresh)


def test_seeds_and_kinds_of_blocks_give_their_own_null():
    draws = [column for column in NULLS if not column.startswith("dir_frac") and column.endswith("null_mean")]
    closed = ["dir_frac_null_mean", "dir_frac_null_std", "dir_frac_z"]  # without draws
    rest = [column for column in ALL if column not in NULLS] + closed
    settings = [(blocks, seed) for blocks in ("shared", "fresh") for seed in (0, 1)]
    tables = [analyze(built("bridge", "llama"), null_blocks=blocks, seed=seed) for blocks, seed in settings]
    assert_same(tables[0], table_of("llama"))
    assert_same(tables[3], analyze(built("bridge", "llama"), null_blocks="fresh", seed=1))
    for one, other in itertools.combinations(tables, 2):
        assert (one[draws] != other[draws]).all(axis=None)
        assert_same(one[rest], other[rest])
