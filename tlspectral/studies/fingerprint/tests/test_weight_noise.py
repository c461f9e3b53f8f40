"""The weight-noise band: the grid is found from the weights, and the band is the spread that the grid causes."""

import numpy as np
import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.studies.fingerprint.statistics import weight_noise_band, weight_noise_draws
from tlspectral.studies.fingerprint.statistics.weight_noise import storage_steps


def _random_weight(d_model: int = 64) -> torch.Tensor:
    return torch.randn(2, d_model, 8, generator=torch.Generator().manual_seed(0))


def test_four_bit_blocks_are_found_with_their_step() -> None:
    weight = _random_weight()
    blocks = weight.reshape(2, 2, 32, 8)
    low, high = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    step = (high - low) / 15
    stored = (low + step * ((blocks - low) / step).round()).reshape(weight.shape)
    found = storage_steps(stored)
    assert found.kind == "4-bit blocks of 32"
    # float32 arithmetic on the grid: 1e-6 of a step. A block axis taken wrongly gives other steps by tenths.
    torch.testing.assert_close(found.step.reshape(2, 2, 32, 8), step.expand(2, 2, 32, 8), rtol=1e-5, atol=0)


def test_five_bit_blocks_are_found_with_their_step() -> None:
    """Q5_0: 32 weights are whole multiples, -16 .. 15, of a float16 step, the largest of them 16 steps."""
    blocks = _random_weight().reshape(2, 2, 32, 8)
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
def test_half_precision_is_found_in_float32_tensors(dtype: torch.dtype, bits: int) -> None:
    stored = _random_weight().to(dtype).float()
    found = storage_steps(stored)
    assert found.kind == str(dtype).removeprefix("torch.")
    # A number in [1, 2) has steps of 2^(1 - bits), exactly.
    in_binade = (stored.abs() >= 1) & (stored.abs() < 2)
    assert (found.step[in_binade] == 2.0 ** (1 - bits)).all()


@pytest.mark.parametrize("d_model", [64, 48])
def test_full_precision_is_its_own_grid(d_model) -> None:
    """Also of a width that 32 does not divide, which has no blocks to look for."""
    assert storage_steps(_random_weight(d_model)).kind == "float32"


def test_band_scales_with_the_grid() -> None:
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


def test_the_band_is_the_spread_of_the_draws() -> None:
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
