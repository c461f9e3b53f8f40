"""Head table and frequency table: documented columns in order, numbers of dense references, planted heads."""

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
import zoo
from ablation_runs import LEARNED_POSITIONS, NO_ROPE
from head_tables import (
    ALL,
    BEHAVIOUR,
    BOUNDED,
    COUNTS,
    NULLS,
    SCALE_FREE,
    TEXTS,
    analyze,
    assert_same,
    built,
    dense_phase,
    table_of,
)
from reference_circuits import dense_copying, dense_self_match, edited, reference
from reference_spectra import dense_reference

import tlspectral as tls
from tlspectral.algebra.nulls import NULL_COLUMNS, block_generator, haar_blocks, null_statistics
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.heads import weight_columns
from tlspectral.models.reading import attention_view
from tlspectral.tables.head_columns import EXTRA_COLUMNS

ROTARY = ["rope_imag_frac", "freq_centroid", "hi_freq_dir", "rotary_fraction"]


# --- the form of the table ---


FEW = ("gpt2", "neox", "llama", "qwen3", "gemma2", "smollm3", "bloom")


@pytest.mark.fast(3)
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
    empty = BEHAVIOUR + ROTARY if name in NO_ROPE else BEHAVIOUR
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
     ("gemma3", "up_to_token_scale", [0, 0, 1, 1] * 4, False), ("gemma2", "softcapped", [0, 0, 1, 1] * 4, False)],
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# --- extra columns ---


def test_extras_come_last_in_the_documented_order():
    table = analyze(built("bridge", "gpt2"), extras=("content_scale", "position_share", "score_asym"))
    assert list(table) == [*ALL, *[column.name for column in EXTRA_COLUMNS]]
    assert_same(table[ALL], table_of("gpt2"))
    one = analyze(built("bridge", "gpt2"), extras=iter(["position_share"]), heads="L1")
    assert list(one) == [*ALL, "position_share"]
    assert one["position_share"].tolist() == table.loc[4:, "position_share"].tolist()
    without = analyze(built("bridge", "llama"), extras=["position_share"])
    assert without["position_share"].isna().all()  # no learned positions
    assert table["content_scale"].isna().all()  # no latent attention


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_score_asymmetry_is_that_of_plain_content_scores(name):
    model, tokens = built("bridge", name), zoo.prompt(batch=3)
    table = analyze(model, extras=["score_asym"], prompts=tokens)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    expected = []
    for index, layer in enumerate(reference(name).layers):
        x = cache[f"blocks.{index}.hook_resid_pre"].double().numpy()
        if name == "gpt2":
            x = x - x.mean(-1, keepdims=True)
        eps = 1e-5 if name == "gpt2" else 1e-6
        n = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
        for m in layer.qk:
            scores = n @ m @ n.transpose(0, 2, 1)
            turned = scores - scores.transpose(0, 2, 1)
            expected.append(np.linalg.norm(turned, axis=(1, 2)).mean() / np.linalg.norm(scores, axis=(1, 2)).mean())
    # Measured: 1e-14; a gain left out or scores under a mask move it by 1e-2.
    np.testing.assert_allclose(table["score_asym"], expected, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED_POSITIONS)
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_position_share_is_the_part_of_m_in_the_span_of_positions(monkeypatch, backend, name):
    monkeypatch.setattr(weight_columns, "POSITION_DIRECTIONS", 10)
    model = built(backend, name)
    table = analyze(model, extras=["position_share"])
    rows = {
        "gpt2": lambda hf: hf.transformer.wpe.weight,
        "gptneo": lambda hf: hf.transformer.wpe.weight,
        "opt": lambda hf: hf.model.decoder.embed_positions.weight[2:],  # transformers keeps two rows that no token gets
    }[name](zoo.hf_model(name))
    rows = rows.detach().double().numpy()
    span = np.linalg.svd(rows - rows.mean(1, keepdims=True))[2][:10].T
    operators = [operator.dense().numpy() for operator in tls.qk_operators(model)]
    expected = [np.linalg.norm(span.T @ m @ span) / np.linalg.norm(m) for m in operators]
    # Measured: 1e-14 (hooked 1e-6: its positions are centred in float32); one direction more or less moves it by 1e-2.
    np.testing.assert_allclose(table["position_share"], expected, rtol=1e-10 if backend == "bridge" else 1e-5)
    assert table["position_share"].between(0.05, 0.6).all()


# --- the frequency table ---


@pytest.mark.parametrize("name", ["neox", "llama", "qwen3"])
def test_frequencies_are_those_of_dense_pairs(name):
    table = tls.frequency_table(built("bridge", name))
    assert isinstance(table.index, pd.RangeIndex)
    places = list(zip(table["layer"], table["head"], table["frequency"], strict=True))
    assert places == sorted(places)
    for index, layer in enumerate(reference(name).layers):
        theta, re, im = dense_phase(name, layer)
        rows = table[table["layer"] == index]
        assert len(rows) == re.size
        # Measured: 1e-15, angles 4e-8 (the model keeps them in float32); another base or pairing: 1e-2 and more.
        np.testing.assert_allclose(rows["theta"], np.tile(theta, len(re)), rtol=1e-6)
        np.testing.assert_allclose(rows["wavelength"], 2 * np.pi / np.tile(theta, len(re)), rtol=1e-6)
        np.testing.assert_allclose(rows["re_norm"], re.flatten(), rtol=1e-10)
        np.testing.assert_allclose(rows["im_norm"], im.flatten(), rtol=1e-10)
        np.testing.assert_allclose(rows["im_share"], (im / (re + im)).flatten(), rtol=1e-10)


@pytest.mark.slow
def test_the_frequency_table_carries_the_phase_columns():
    """The three columns of the head table are sums over a head's frequencies."""
    for name in ("neox", "phi", "gemma3", "smollm3"):
        heads = table_of(name)
        table = tls.frequency_table(built("bridge", name))
        table["turn"] = table["theta"] * table["im_norm"]
        sums = table.groupby(["layer", "head"])[["re_norm", "im_norm", "turn"]].sum().reset_index()
        heads = heads.merge(sums, on=["layer", "head"])
        share = heads["im_norm"] / (heads["im_norm"] + heads["re_norm"])
        np.testing.assert_allclose(heads["rope_imag_frac"], share, rtol=1e-12)  # sums in another order: 1e-15
        np.testing.assert_allclose(heads["freq_centroid"], heads["turn"] / heads["im_norm"], rtol=1e-12)
        # The first half rounded down: phi has three pairs.
        first = table[table["frequency"] < (table["frequency"].max() + 1) // 2]
        high = first.groupby(["layer", "head"])["im_norm"].sum().reset_index(drop=True)
        np.testing.assert_allclose(heads["hi_freq_dir"], high / heads["im_norm"], rtol=1e-12)
        assert (heads["rotary_fraction"] == {"neox": 0.25, "phi": 0.5}.get(name, 1.0)).all()


def test_layers_without_rotary_positions_have_no_rows():
    assert set(tls.frequency_table(built("bridge", "smollm3"))["layer"]) == {0, 2}
    assert tls.frequency_table(zoo.bridge("dynamic")).attrs["rotary_valid_up_to"] == 32
    with pytest.raises(UnsupportedArchitecture, match="none of the 2 layers has rotary positions"):
        tls.frequency_table(built("bridge", "bloom"))


# --- planted heads ---

SPECTRAL = [
    *SCALE_FREE, "cond_eig", "spectral_radius", "prin_angle_mean", "prin_angle_max", "self_match",
    "rope_imag_frac", "freq_centroid", "hi_freq_dir", *NULLS,
]  # fmt: skip


def plant_heads(model):
    """Layer 1 of llama: head 0 is zero, head 1 has rank 3, head 2 reads keys where no query is, head 3 is left."""
    layer = model.model.layers[1]
    queries, keys = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
    queries[:12] = 0
    generator = torch.Generator().manual_seed(0)
    queries[12:24] = torch.randn(12, 3, generator=generator) @ torch.randn(3, 48, generator=generator) / 3
    queries[24:36, 24:] = 0  # key head 1 is read by heads 2 and 3: only this query head moves
    keys[12:, :24] = 0


def test_planted_heads_get_their_status_and_no_false_numbers():
    model = edited("llama", plant_heads)
    table = analyze(model, detectors=True)
    assert table["status"].tolist() == ["ok"] * 4 + ["zero", "rank_deficient", "defective", "ok"]
    zero, deficient, nilpotent = (table.loc[row] for row in (4, 5, 6))
    assert zero["rank"] == 0
    assert zero[SPECTRAL].isna().all()
    assert zero[["prev", "dup", "ind", "copying", "positivity"]].notna().all()  # it still averages and writes
    assert deficient["rank"] == 3
    assert deficient[SPECTRAL].notna().all()
    assert nilpotent["rank"] == 12
    # Measured: 1e-16 of the norm.
    assert nilpotent["lam_mass"] < 1e-12
    assert nilpotent["henrici"] == pytest.approx(1, abs=1e-12)
    assert nilpotent["dir_frac"] == pytest.approx(0.5**0.5, abs=1e-12)
    assert nilpotent[["prin_angle_mean", "prin_angle_max"]].tolist() == pytest.approx([90, 90], abs=1e-6)
    undefined = ["D_head", "D_head_z", "D_head_null_pct", "D_head_pct"]
    assert nilpotent[undefined].isna().all()
    assert nilpotent[[column for column in SPECTRAL if column not in undefined]].notna().all()
    measured = table["D_head"].dropna()
    assert table["D_head_pct"].dropna().tolist() == (measured.rank() / len(measured)).tolist()
    plain = analyze(built("bridge", "llama"), detectors=True)
    assert_same(table.loc[:3].drop(columns="D_head_pct"), plain.loc[:3].drop(columns="D_head_pct"))


def test_a_model_without_a_single_head_that_does_anything():
    """Only biases are left, which lie outside M."""

    def silence(model):
        for block in model.transformer.h:
            block.attn.c_attn.weight.zero_()

    table = analyze(edited("gpt2", silence))
    assert (table["status"] == "zero").all()
    assert table["D_head_pct"].isna().all()
    assert (table["outside_m"] == 1).all()
    json.dumps(table.attrs, allow_nan=False)
