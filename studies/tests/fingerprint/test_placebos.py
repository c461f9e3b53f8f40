"""Placebos of rotary phase: what a permuted pairing keeps and loses, and RoPE pretended where there is none."""

from collections import namedtuple
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from reference_spectra import dense_phase
from tlspectral_studies.fingerprint.statistics.placebos import (
    PHASE_COLUMNS,
    permuted_geometries,
    permuted_pairing,
    placebo_attenuation,
    pseudo_rope,
)

import tlspectral as tls
from tlspectral import stats
from tlspectral.algebra.rotary import RotaryGeometry
from tlspectral.models.reading import attention_view

pytestmark = pytest.mark.lowest

PLACES = ["draw", "layer", "head"]
COLUMNS = list(PHASE_COLUMNS)
# Measured against the dense route: at most 2e-15 for shares of order 1; a wrong pair is off by hundredths and more.
EXACT = {"rtol": 0, "atol": 1e-12}


@pytest.fixture(autouse=True)
def model_is_left_alone(monkeypatch):
    """Nothing here runs a model: the placebos read weights."""
    monkeypatch.setattr(
        "tlspectral.models.running.passes.evaluating", lambda *_, **__: pytest.fail("the model was run")
    )


def dense_metrics(w_q, w_k, geometry):
    """The three metrics of each head from dense complex M_t, plainly."""
    products = dense_phase(w_q, w_k, geometry)
    re, im = (np.linalg.norm(part, axis=(2, 3)) for part in (products.real, products.imag))
    theta = geometry.theta.numpy()
    half = geometry.n_pairs // 2
    columns = im.sum(1) / (re + im).sum(1), (im * theta).sum(1) / im.sum(1), im[:, :half].sum(1) / im.sum(1)
    return np.stack(columns, axis=1)


# --- permuted pairing ---


@pytest.mark.parametrize("name", ["llama", "neox", "gptj", "qwen3", "gemma3"])
def test_every_draw_is_the_dense_metric_of_permuted_columns(name):
    """Full, partial and adjacent-pair rotation, grouped keys, query/key norm, two bases: against permuted weights."""
    model = zoo.shared("bridge", name)
    table = permuted_pairing(model, draws=2, seed=5)
    view = attention_view(model)
    for index in range(view.n_layers):
        layer = view.layer(index)
        geometry, (w_q, w_k) = layer.rotary, layer.operator_factors()
        rotary = np.sort(np.concatenate([geometry.real_index, geometry.imag_index]))
        rng = np.random.default_rng(5)
        own = dense_phase(w_q, w_k, geometry).real.sum(1)
        for draw, permuted in enumerate(permuted_geometries(geometry, 2, 5)):
            # The paper's recipe: the columns of the weights are permuted, the geometry stays.
            moved = np.arange(layer.d_head)
            moved[rotary] = rotary[rng.permutation(len(rotary))]
            expected = dense_metrics(w_q[:, :, moved], w_k[:, :, moved], geometry)
            rows = table[(table["draw"] == draw) & (table["layer"] == index)]
            np.testing.assert_allclose(rows[COLUMNS].to_numpy(), expected, **EXACT)
            # M is the sum of Re M_t and what does not turn: new pairs of the same columns leave both sums as they are,
            # but for the order of summation of entries of order 1.
            assert sorted(torch.cat([permuted.real_index, permuted.imag_index]).tolist()) == rotary.tolist()
            np.testing.assert_allclose(dense_phase(w_q, w_k, permuted).real.sum(1), own, **EXACT)


def test_draws_share_one_permutation_over_heads_and_layers():
    """Layers of equal weights get equal draws; a permutation per layer or per head would tell them apart."""
    model = zoo.bridge("llama")
    with torch.no_grad():
        first, second = (block.attn for block in model.blocks[:2])
        for projection in ("q", "k"):
            weights = [getattr(attn, projection).original_component.weight for attn in (first, second)]
            weights[1].copy_(weights[0])
        model.blocks[1].ln1.original_component.weight.copy_(model.blocks[0].ln1.original_component.weight)
    table = permuted_pairing(model, draws=4)
    one, other = (table[table["layer"] == layer][COLUMNS].to_numpy() for layer in (0, 1))
    np.testing.assert_array_equal(one, other)
    # Heads differ in weights, draws in permutation.
    assert (table.groupby(["layer", "head"])[COLUMNS].nunique() == 4).all(axis=None)
    assert (table.groupby(["draw", "layer"])[COLUMNS].nunique() > 1).all(axis=None)


def test_the_table_is_sorted_reproducible_and_says_its_seed():
    model = tls.load_model("tiny-rope")
    table = permuted_pairing(model, draws=5)
    assert table[PLACES].equals(table[PLACES].sort_values(PLACES, ignore_index=True))
    # More draws only add draws.
    assert permuted_pairing(model, draws=6).iloc[: len(table)].equals(table)
    said = {key: table.attrs[key] for key in ("model", "placebo", "draws", "seed")}
    assert said == {"model": "tiny-rope", "placebo": "permuted_pairing", "draws": 5, "seed": 0}


def test_layers_without_rope_have_no_placebo():
    """SmolLM3 leaves out RoPE in some layers."""
    model = zoo.shared("bridge", "smollm3")
    empty = permuted_pairing(model, draws=2).groupby("layer")[COLUMNS].agg(lambda values: values.isna().mean())
    view = attention_view(model)
    assert empty.mean(axis=1).tolist() == [float(view.rotary(layer) is None) for layer in range(view.n_layers)]
    assert empty.to_numpy().any()


def test_pseudo_rope_is_rotate_half_at_base_10000():
    model = zoo.shared("bridge", "gpt2")
    table = pseudo_rope(model)
    layer = attention_view(model).layer(1)
    width = layer.d_head
    theta = torch.tensor([10_000.0 ** (-2 * t / width) for t in range(width // 2)], dtype=torch.float64)
    geometry = RotaryGeometry(theta, torch.arange(width // 2), torch.arange(width // 2, width), width)
    expected = dense_metrics(*layer.operator_factors(), geometry)
    np.testing.assert_allclose(table[table["layer"] == 1][COLUMNS].to_numpy(), expected, **EXACT)
    assert (table.attrs["placebo"], set(table["draw"])) == ("pseudo_rope", {0})


# --- attenuation ---


Share = namedtuple("Share", "statistic")


def mean_share(heads):
    """A stand-in for an attenuation, whose value can be set by the table."""
    return Share(float(heads["rope_imag_frac"].mean()))


def planted(own, drawn):
    """Tables of two heads in which `mean_share` is `own`, and one of `drawn` in each draw."""
    heads = pd.DataFrame({"layer": 0, "head": [1, 0], "rope_imag_frac": [own + 0.25, own - 0.25]})
    placebo = pd.DataFrame({"draw": np.repeat(range(len(drawn)), 2), "layer": 0, "head": [0, 1] * len(drawn)})
    placebo["rope_imag_frac"] = np.repeat(drawn, 2)
    placebo.attrs = {"placebo": "permuted_pairing", "seed": 3}
    return heads, placebo


def test_the_p_value_counts_draws_at_or_above():
    found = placebo_attenuation(*planted(0.5, [0.1, 0.5, 0.2, 0.9]), mean_share)
    # Of four draws one is above and one equal; (1 + 2) / 5.
    assert (found.statistic, found.pvalue, found.floor, found.n, found.seed) == (0.5, 3 / 5, 1 / 5, 4, 3)
    assert found.draws.tolist() == [0.1, 0.5, 0.2, 0.9]
    assert (found.method, found.reason) == ("permuted_pairing", None)
    # FP's 2/51: one of 50 at or above.
    assert placebo_attenuation(*planted(0.5, [0.75] + 49 * [0.25]), mean_share).pvalue == 2 / 51


def test_rows_are_matched_by_head_not_by_place():
    heads, placebo = planted(0.5, [0.1, 0.9])
    weights = {(0, 0): 10.0, (0, 1): 1.0}

    def weighted(table):
        scale = [weights[key] for key in zip(table["layer"], table["head"], strict=True)]
        return Share(float((table["rope_imag_frac"] * scale).sum()))

    placebo["rope_imag_frac"] = [0.0, 1.0, 1.0, 0.0]
    assert placebo_attenuation(heads, placebo, weighted).draws.tolist() == [1.0, 10.0]
    assert heads["rope_imag_frac"].tolist() == [0.75, 0.25]


def test_a_placebo_without_signal_attenuates_less_than_the_cause():
    """Heads whose D_head and prev share one hidden cause, which rope_imag_frac shows and columns of noise do not."""
    rng = np.random.default_rng(0)
    cause = rng.standard_normal(120)
    heads = pd.DataFrame({"layer": np.repeat(range(12), 10), "head": np.tile(range(10), 12)})
    heads["dir_frac"], heads["freq_centroid"] = rng.standard_normal((2, 120))
    heads["D_head"], heads["prev"] = cause + 0.5 * rng.standard_normal((2, 120))
    heads["rope_imag_frac"] = cause + 0.2 * rng.standard_normal(120)
    draws = pd.concat([heads[["layer", "head"]].assign(draw=draw) for draw in range(8)], ignore_index=True)
    for name in COLUMNS:
        draws[name] = rng.standard_normal(len(draws))
    for method in ("hybrid", "rank"):
        found = placebo_attenuation(heads, draws, partial(stats.attenuation, method=method, draws=0))
        # Measured 0.87 and 0.85 against at most 0.05: columns of noise take nothing away.
        assert found.statistic > 0.6
        assert found.draws.max() < 0.2
        assert found.pvalue == found.floor == 1 / 9
    # A model without RoPE has the placebo's own attenuation alone.
    placebo = heads[["layer", "head", "rope_imag_frac", "freq_centroid"]].assign(draw=0)
    placebo.attrs = {"placebo": "pseudo_rope"}
    found = placebo_attenuation(heads.assign(rope_imag_frac=np.nan, freq_centroid=np.nan), placebo)
    assert np.isnan([found.statistic, found.pvalue, found.floor]).all()
    assert found.reason == "the model has no RoPE, so no phase features of its own"
    assert found.draws[0] == stats.attenuation(heads).statistic
    assert (found.n, found.seed, found.method) == (1, None, "pseudo_rope")
