"""A row of Tables 2 and 3 for a further model, and how rounding of its weights moves what is measured."""

import functools
import math

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from tlspectral_studies.fingerprint.published import published_heads
from tlspectral_studies.fingerprint.statistics import statistic_noise, weight_noise_band, weight_noise_draws
from tlspectral_studies.fingerprint.statistics.model_row import another_model
from tlspectral_studies.fingerprint.statistics.placebos import permuted_pairing, placebo_attenuation, pseudo_rope
from tlspectral_studies.fingerprint.statistics.weight_noise import NOISE_COLUMNS, storage_steps
from typer.testing import CliRunner

import tlspectral as tls
from tlspectral import stats
from tlspectral.cli import app


def row(table, statistic, method):
    found = table[(table["statistic"] == statistic) & (table["method"] == method)]
    assert len(found) == 1
    return found.iloc[0]


@pytest.mark.slow
def test_a_published_model_gets_its_published_row_from_the_command_too(tmp_path, monkeypatch):
    heads = published_heads("pythia-410m")
    fewer = functools.partial(another_model, bootstrap_draws=50)
    table = fewer(heads)
    # FP, Table 2: +0.35 and the percentile .89; Table 3: 61 % by the hybrid estimator, 47 % by ranks.
    assert round(row(table, "partial correlation", "hybrid")["value"], 2) == 0.35
    assert round(row(table, "top-5 percentile of D_head", "median")["value"], 2) == 0.89
    assert round(row(table, "attenuation", "hybrid")["value"], 2) == 0.61
    assert round(row(table, "attenuation", "rank")["value"], 2) == 0.47
    assert table["noise_sd"].isna().all()
    # More than half of that lies between layers: .157 is left.
    within = row(table, "partial correlation within layers", "hybrid")
    assert round(within["value"], 2) == 0.16
    assert 0.01 < within["pvalue"] < 0.05
    monkeypatch.setattr("tlspectral_studies.fingerprint.statistics.another_model", fewer)
    given, out = tmp_path / "heads.parquet", tmp_path / "out.parquet"
    tls.write_table(heads, given)
    done = CliRunner().invoke(app, ["study", "statistics", str(given), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "partial correlation hybrid  0.353" in done.stdout
    assert "5 heads at random reach it" in done.stdout
    assert "nan" not in done.stdout.split("\n\n", 1)[1]  # a number that is there needs no reason
    pd.testing.assert_frame_equal(pd.read_parquet(out), table)
    refused = CliRunner().invoke(app, ["study", "statistics", str(given), "--revision", "main"])
    assert refused.exit_code == 2
    assert "goes with --model" in refused.output


def test_chance_is_that_of_heads_drawn_at_random():
    heads = published_heads("gpt2")
    table = another_model(heads, bootstrap_draws=20, k=3)
    assert not table["statistic"].str.startswith("attenuation").any()  # the model has no RoPE
    found = row(table, "top-3 percentile of D_head", "median")
    ranks = (heads["D_head"].rank() / len(heads)).to_numpy()
    generator = np.random.default_rng(0)
    medians = np.median([generator.choice(ranks, 3, replace=False) for _ in range(4000)], axis=1)
    # 4000 draws: standard error below .008; counting one head more or less would move it by .2.
    assert np.mean(medians >= found["value"] - 1e-12) == pytest.approx(found["pvalue"], abs=0.03)
    # The median is highest where two of three heads are the two of the largest D_head.
    n = len(heads)
    assert found["pvalue_floor"] == pytest.approx(3 * 2 / (n * (n - 1)), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-rope", "tiny-ape"])
def test_with_the_model_come_placebo_and_rounding(name):
    model = tls.load_model(name)
    heads = tls.analyze_heads(model, null_draws=2)
    table = another_model(heads, model=model, k=3, bootstrap_draws=20, placebo_draws=4, noise_draws=3, seed=1)
    rotary = name == "tiny-rope"
    placebo = permuted_pairing(model, draws=4, seed=1) if rotary else pseudo_rope(model)
    expected = placebo_attenuation(heads, placebo)
    found = row(table, f"attenuation by placebo: {expected.method}", "hybrid")
    assert found["value"] == pytest.approx(expected.draws.mean(), nan_ok=True)
    assert found["pvalue"] == pytest.approx(expected.pvalue, nan_ok=True)
    moved = weight_noise_draws(model, draws=3, seed=1)
    spread = statistic_noise(heads, moved, {"top": lambda drawn: stats.top_head_percentile(drawn, k=3).statistic})
    assert row(table, "top-3 percentile of D_head", "median")["noise_sd"] == pytest.approx(spread["sd"].item())
    # Two layers are too few to resample: no interval, and the reason instead of one.
    assert "2 layers" in row(table, "partial correlation within layers", "hybrid")["reason"]
    partial = row(table, "partial correlation", "rank")
    assert math.isnan(partial["low"])
    assert "cluster" in partial["reason"]


@pytest.mark.slow
def test_noise_of_a_statistic_is_that_of_the_drawn_tables():
    model = zoo.shared("bridge", "llama")
    moved = weight_noise_draws(model, draws=6)
    heads = tls.analyze_heads(model, detectors=False, null_draws=2)
    heads["prev"] = np.arange(len(heads)) / 10
    statistics = {
        "mean": lambda at: at["D_head"].mean(),
        "behaviour": lambda at: at["prev"].sum(),
        "weighted": lambda at: (at["D_head"] * at["prev"]).sum(),
    }
    table = statistic_noise(heads.iloc[::-1], moved, statistics)
    table = table.set_index("statistic")
    drawn = np.stack([moved[moved["draw"] == draw]["D_head"] for draw in range(6)])
    for name, values in (("mean", drawn.mean(axis=1)), ("weighted", drawn @ heads["prev"].to_numpy())):
        expected = [values.mean(), values.std(ddof=1), np.quantile(values, 0.025)]
        np.testing.assert_allclose(table.loc[name, ["mean", "sd", "low"]].astype(float), expected, rtol=1e-7)
    assert table.loc["mean", "value"] == pytest.approx(heads["D_head"].mean(), rel=1e-12)
    # Behaviour is not measured again, so a statistic of it alone does not move, but for the rounding of a mean.
    assert table.loc["behaviour", "sd"] < 1e-12
    assert (table["draws"] == 6).all()
    # A drawn D_head is ranked again.
    last = (moved["layer"] == 1) & (moved["head"] == 3) & (moved["draw"] >= 0)
    moved.loc[last, "D_head"] = -1.0
    found = statistic_noise(heads, moved, {"last": lambda at: at["D_head_pct"].iloc[-1]})
    assert found["mean"].item() == 1 / len(heads)


# --- the grid on which weights are stored, and the band that it causes ---


def random_weight(d_model=64):
    return torch.randn(2, d_model, 8, generator=torch.Generator().manual_seed(0))


def test_four_bit_blocks_are_found_with_their_step():
    weight = random_weight()
    blocks = weight.reshape(2, 2, 32, 8)
    low, high = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    step = (high - low) / 15
    stored = (low + step * ((blocks - low) / step).round()).reshape(weight.shape)
    found = storage_steps(stored)
    assert found.kind == "4-bit blocks of 32"
    # float32 arithmetic on the grid: 1e-6 of a step. A block axis taken wrongly gives other steps by tenths.
    torch.testing.assert_close(found.step.reshape(2, 2, 32, 8), step.expand(2, 2, 32, 8), rtol=1e-5, atol=0)


def test_five_bit_blocks_are_found_with_their_step():
    """Q5_0: 32 weights are whole multiples, -16 .. 15, of a float16 step, the largest of them 16 steps."""
    blocks = random_weight().reshape(2, 2, 32, 8)
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    step = (largest / -16).half().float()
    stored = (step * (blocks / step).round().clamp(-16, 15)).reshape(2, 64, 8)
    found = storage_steps(stored)
    assert found.kind == "5-bit blocks of 32"
    assert torch.equal(found.step.reshape(2, 2, 32, 8), step.abs().expand(2, 2, 32, 8))
    # One weight off the grid, and the tensor is not such a file's.
    stored[0, 3, 1] += 0.3 * step.abs().min()
    assert storage_steps(stored).kind == "float32"


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_half_precision_is_found_in_float32_tensors(dtype, bits):
    stored = random_weight().to(dtype).float()
    found = storage_steps(stored)
    assert found.kind == str(dtype).removeprefix("torch.")
    # A number in [1, 2) has steps of 2^(1 - bits), exactly.
    in_binade = (stored.abs() >= 1) & (stored.abs() < 2)
    assert (found.step[in_binade] == 2.0 ** (1 - bits)).all()


@pytest.mark.parametrize("d_model", [64, 48])
def test_full_precision_is_its_own_grid(d_model):
    """Also of a width that 32 does not divide, which has no blocks to look for."""
    assert storage_steps(random_weight(d_model)).kind == "float32"


@pytest.mark.slow
def test_band_scales_with_the_grid():
    fine, coarse = zoo.bridge("llama"), zoo.bridge("llama")
    with torch.no_grad():
        for layer in coarse.blocks:
            for projection in (layer.attn.q, layer.attn.k):
                weight = projection.original_component.weight
                weight.copy_(weight.bfloat16().float())
    bands = [weight_noise_band(model, draws=8) for model in (fine, coarse)]
    assert [band.attrs["storage"] for band in bands] == [["float32"], ["bfloat16"]]
    ratio = (bands[1]["dir_frac_sd"] / bands[0]["dir_frac_sd"]).median()
    # The grids differ by 2^16. With 8 draws an sd is known to 25 %; no scaling at all would give 1.
    assert 2**15 < ratio < 2**17


@pytest.mark.slow
def test_the_band_is_the_spread_of_the_draws():
    model = zoo.bridge("llama")
    moved = weight_noise_draws(model, draws=5, seed=2)
    band = weight_noise_band(model, draws=5, seed=2)
    # float32 noise: 1e-9 to 1e-7 here. A step taken as relative to the largest weight would be far above.
    assert 0 < band["dir_frac_sd"].max() < 1e-6
    assert moved["draw"].unique().tolist() == [-1, 0, 1, 2, 3, 4]
    heads = tls.analyze_heads(model, detectors=False, null_draws=2)
    unmoved = moved[moved["draw"] == -1].reset_index(drop=True)
    for name in NOISE_COLUMNS:
        # Draw -1 is the head table itself.
        np.testing.assert_array_equal(unmoved[name], heads[name])
        values = np.stack([moved[moved["draw"] == draw][name] for draw in range(5)])
        np.testing.assert_allclose(band[f"{name}_sd"], values.std(axis=0, ddof=1), rtol=1e-12, atol=0)
        np.testing.assert_allclose(band[f"{name}_shift"], values.mean(axis=0) - heads[name], rtol=1e-9, atol=1e-15)
    assert moved.attrs | {"table": "weight_noise_band"} == band.attrs
    without_rotation = weight_noise_band(zoo.bridge("gpt2"), draws=2)
    assert without_rotation["rope_imag_frac_sd"].isna().all()
    assert (without_rotation["D_head_sd"] > 0).all()
    with pytest.raises(ValueError, match="at least two draws"):
        weight_noise_band(model, draws=1)
