"""Columns of the head table: documented names and order, and the numbers of plain dense references."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import zoo
from head_tables import ALL, BEHAVIOUR, BOUNDED, COUNTS, NULLS, TEXTS, analyze, assert_same, built, table_of
from reference_circuits import dense_copying, dense_self_match, reference
from reference_spectra import dense_reference

import tlspectral as tls
from tlspectral.algebra.nulls import NULL_COLUMNS, block_generator, haar_blocks, null_statistics
from tlspectral.models.attention import attention_view

ROTARY = ["rope_imag_frac", "freq_centroid", "hi_freq_dir", "rotary_fraction"]


# --- the form of the table ---


FEW = ("gpt2", "neox", "llama", "qwen3", "gemma2", "smollm3", "bloom")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in zoo.RIGHT]
)
def test_every_model_gets_the_documented_columns_in_order(name):
    table, model = table_of(name), built("bridge", name)
    assert list(table) == ALL
    assert isinstance(table.index, pd.RangeIndex)
    heads = model.cfg.n_heads
    assert table["layer"].tolist() == np.repeat(np.arange(model.cfg.n_layers), heads).tolist()
    assert table["head"].tolist() == list(range(heads)) * model.cfg.n_layers
    assert table["name"].tolist() == [f"L{i}H{j}" for i, j in zip(table["layer"], table["head"], strict=True)]
    for column in table:
        kind = table[column].dtype
        if column in TEXTS:
            assert all(isinstance(value, str) for value in table[column])
        else:
            assert kind == ("int64" if column in COUNTS else "float64"), column
    empty = BEHAVIOUR + ROTARY if name in ("gpt2", "opt", "gptneo", "bloom") else BEHAVIOUR
    filled = [column for column in ALL if column not in empty]
    if name == "smollm3":
        turns = table["layer"].isin([0, 2])
        assert table.loc[turns, ROTARY].notna().all(axis=None)
        assert table.loc[~turns, ROTARY].isna().all(axis=None)
        filled = [column for column in filled if column not in ROTARY]
    assert table[empty].isna().all(axis=None)
    assert table[filled].notna().all(axis=None)
    assert (table["status"] == "ok").all()
    for column in [*BOUNDED, "D_head_null_pct", "copying", "D_head_pct", "outside_m"]:
        assert table[column].between(0, 1).all()


@pytest.mark.parametrize(
    ("name", "bilinear", "kv_heads", "biased"),
    [("gpt2", "exact", [0, 1, 2, 3] * 2, True), ("bloom", "exact", [0, 1, 2, 3] * 2, True),
     ("llama", "exact", [0, 0, 1, 1] * 2, False), ("qwen3", "up_to_token_scale", [0, 0, 1, 1] * 2, False),
     ("gemma2", "softcapped", [0, 0, 1, 1] * 4, False)],
)  # fmt: skip
def test_how_scores_depend_on_the_operator_and_what_lies_outside(name, bilinear, kv_heads, biased):
    table = table_of(name)
    assert (table["bilinear"] == bilinear).all()
    assert table["kv_head"].tolist() == kv_heads
    outside = table["outside_m"]  # biases and ALiBi alone
    assert (outside > 1e-3).all() if biased else (outside == 0).all()


# --- the numbers ---

DENSE = ("gpt2", "neox", "llama", "qwen3", "gemma3")


@pytest.mark.parametrize("name", DENSE)
def test_columns_are_those_of_dense_matrices(name):
    dense, table = reference(name), table_of(name)
    k = dense.layers[0].w_q.shape[2]
    pairs = [pair for at in dense.layers for pair in zip(at.w_q, at.w_k, strict=True)]
    rows = [dense_reference(*pair, k) for pair in pairs]
    assert (table["rank"] == k).all()
    for column in set(rows[0]) - {"singular_values"}:
        expected = np.array([row[column] for row in rows], dtype=float)
        # Measured: 4e-13 relative, angles 4e-12, cond_eig 1e-11. A norm gain or centring left out: 1e-3.
        np.testing.assert_allclose(table[column], expected, rtol=1e-9, err_msg=column)
    copying, positivity = zip(*[dense_copying(layer, dense) for layer in dense.layers], strict=True)
    np.testing.assert_array_equal(table["copying"], np.concatenate(copying))
    # Measured: 1e-14 for both; a gain left out moves them by 1e-3 and more.
    np.testing.assert_allclose(table["positivity"], np.concatenate(positivity), rtol=0, atol=1e-10)
    matching = np.concatenate([dense_self_match(layer, dense) for layer in dense.layers])
    np.testing.assert_allclose(table["self_match"], matching, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "kind"), [("gpt2", "shared"), ("llama", "fresh")])
def test_the_null_is_that_of_the_heads_own_singular_values(name, kind):
    """Size, dimension (one less under LayerNorm), seed, draws and kind of blocks reach the null as asked."""
    dense = reference(name)
    table = analyze(built("bridge", name), null_draws=30, seed=7, null_blocks=kind)
    k, n = dense.layers[0].w_q.shape[2], zoo.WIDTH - (name == "gpt2")

    def of_head(head, layer):
        return haar_blocks(n, k, 30, block_generator(7, n, k, layer, head))

    for index, layer in enumerate(dense.layers):
        shared = haar_blocks(n, k, 30, block_generator(7, n, k))
        blocks = shared if kind == "shared" else partial(of_head, layer=index)
        rows = table[table["layer"] == index].reset_index(drop=True)
        values = np.linalg.svd(layer.qk, compute_uv=False)[:, :k]
        expected = null_statistics(values, {c: rows[c].to_numpy() for c in NULL_COLUMNS}, blocks, n)
        for column in NULLS:
            # Measured: 1e-12 on z of 10; draws of another seed or dimension move z by tenths.
            np.testing.assert_allclose(rows[column], expected[column], rtol=1e-8, atol=1e-8, err_msg=column)


def test_detector_columns_are_those_of_detect_heads():
    model = built("bridge", "gpt2")
    table = analyze(model, detectors=True, seed=3)
    expected = tls.detect_heads(model, seed=3)
    assert_same(table[BEHAVIOUR], expected[BEHAVIOUR])
    assert expected.attrs == {**attention_view(model).origin(), **table.attrs["detectors"]}
    rest = [column for column in ALL if column not in BEHAVIOUR]
    assert_same(table[rest], analyze(model, seed=3)[rest])
    of_layer = analyze(model, detectors=True, heads="L1", seed=3)
    assert_same(of_layer[BEHAVIOUR], expected.loc[4:, BEHAVIOUR])
    percentiles = scipy.stats.rankdata(of_layer["D_head"]) / len(of_layer)  # of the rows of the table
    np.testing.assert_array_equal(of_layer["D_head_pct"], percentiles)
