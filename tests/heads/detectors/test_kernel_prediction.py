"""What a head's mean query and key predict of its kernel: exact cases, a slower route, and the judged summary."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from conformance.scoring import assert_exact, one_token
from spectral_zoo import moved
from zoo import shared

import tlspectral as tls
from tlspectral.heads import kernel_prediction, relative_position_kernel
from tlspectral.heads.detectors.kernel import band_shares
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import capture_until


def test_a_spectral_model_is_predicted_with_its_gain_and_phase():
    spectral = moved("bridge", "llama")
    table = relative_position_kernel(spectral, None, one_token(), reference=one_token())
    assert_exact(table)
    before = relative_position_kernel(spectral.base, None, one_token(), reference=one_token())
    assert (table["predicted"] - before["predicted"]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["gptj", "qwen3"])
def test_it_is_the_score_of_the_mean_query_with_the_mean_key(name):
    """By a slower route: two float64 means, rotated by explicit 2 x 2 rotations."""
    model, tokens, reference = shared("bridge", name), zoo.prompt(3, 24), zoo.prompt(5, 20, seed=1)
    view = attention_view(model)
    layer, head = view.layer(1), 2
    names = view.hook_names(1)
    kept = capture_until(view, reference, [names["query"], names["key"]], last=names["pattern"])
    q, k = kept[names["query"]].double(), kept[names["key"]].double()
    q, k = (x if norm is None else norm.applied(x) for x, norm in ((q, layer.q_norm), (k, layer.k_norm)))
    k = k if k.shape[2] == layer.n_heads else k.repeat_interleave(layer.n_heads // layer.n_kv_heads, dim=2)
    q, k = (x[:, :, head].reshape(-1, layer.d_head).mean(0).numpy() for x in (q, k))
    geometry, expected = layer.rotary, []
    assert geometry is not None
    for distance in range(20, -1, -1):
        turned = q.copy()
        for pair, theta in enumerate(geometry.theta.tolist()):
            re, im = int(geometry.real_index[pair]), int(geometry.imag_index[pair])
            c, s = np.cos(theta * distance), np.sin(theta * distance)
            turned[[re, im]] = c * q[re] - s * q[im], s * q[re] + c * q[im]
        expected.append(layer.score_scale * turned @ k)
    found = relative_position_kernel(model, [(1, head)], tokens, reference=reference)
    # Measured: 7e-9, a float32 norm of queries.
    np.testing.assert_allclose(found["predicted"], expected, rtol=0, atol=1e-5)
    assert found.attrs["n_reference"] == 5


def test_the_score_is_the_same_with_and_without_a_reference():
    model, tokens = shared("bridge", "llama"), zoo.prompt(4, 24)
    split = relative_position_kernel(model, None, tokens)
    apart = relative_position_kernel(model, None, tokens, reference=zoo.prompt(3, 10, seed=1))
    np.testing.assert_allclose(split["score"], apart["score"], rtol=0, atol=1e-12)  # the order of a float64 sum
    assert (split["predicted"] - apart["predicted"]).abs().max() > 0.01
    assert split.attrs["n_reference"] == 2


def test_it_is_judged_on_the_prompts_that_gave_no_means():
    """The split that a caller makes by hand gives the same numbers, and the halves are disjoint."""
    model, tokens = shared("bridge", "llama"), zoo.prompt(6, 24)
    half = torch.randperm(6, generator=torch.Generator().manual_seed(0))[:3]
    rest = [row for row in range(6) if row not in half.tolist()]
    split = kernel_prediction(model, None, tokens)
    by_hand = kernel_prediction(model, None, tokens[rest], reference=tokens[half])
    # Measured: 0; float32 runs of other batch shapes may round otherwise.
    pd.testing.assert_frame_equal(split, by_hand, rtol=0, atol=1e-4)
    assert split.attrs["n_reference"] == split.attrs["n_judged"] == 3


@pytest.mark.slow
def test_padding_enters_no_mean():
    model, reference, tokens = shared("bridge", "gemma2"), zoo.prompt(2, 24, seed=1), zoo.prompt(2, 24)
    mask = torch.ones_like(reference)
    mask[0, :10] = 0
    rows = [reference[0, 10:], reference[1]]
    padded = relative_position_kernel(model, None, tokens, reference={"input_ids": reference, "attention_mask": mask})
    listed = relative_position_kernel(model, None, tokens, reference=rows)
    pd.testing.assert_frame_equal(padded, listed)
    filled = relative_position_kernel(model, None, tokens, reference=reference)
    assert (padded["predicted"] - filled["predicted"]).abs().max() > 1e-3


def test_equal_prompts_are_one_prompt():
    """Half of the distinct prompts give the means, however often each comes, and however it is padded."""
    model, tokens = shared("bridge", "llama"), zoo.prompt(6, 24)
    once, every = kernel_prediction(model, None, tokens), relative_position_kernel(model, None, tokens)
    with pytest.warns(UserWarning, match=r"of 18 prompts 6 are distinct \(prompt 6 is prompt 0 again\): they give the"):
        thrice = kernel_prediction(model, None, tokens.repeat(3, 1))
    # Measured: 0; float32 runs of other batch shapes may round otherwise.
    pd.testing.assert_frame_equal(thrice, once, rtol=0, atol=1e-4)
    assert {name: thrice.attrs[name] for name in ("n_reference", "n_judged")} == {"n_reference": 3, "n_judged": 3}
    assert thrice.attrs["prompt_notes"] == {"distinct_rows": 6}
    padded = torch.cat([tokens, torch.full((6, 3), 5)], dim=1)
    left = torch.cat([torch.full((6, 3), 5), tokens], dim=1)
    masks = torch.ones(12, 27, dtype=torch.long)
    masks[:6, 24:] = masks[6:, :3] = 0
    with pytest.warns(UserWarning, match="of 12 prompts 6 are distinct"):
        found = relative_position_kernel(model, None, {"input_ids": torch.cat([padded, left]), "attention_mask": masks})
    pd.testing.assert_frame_equal(found, every, rtol=0, atol=1e-5)
    for copies in (tokens[:1].repeat(8, 1), [tokens[0].tolist()] * 8):
        with (
            pytest.warns(UserWarning, match="of 8 prompts 1 are"),
            pytest.raises(ValueError, match="one distinct prompt is not"),
        ):
            kernel_prediction(model, None, copies)
        with pytest.warns(UserWarning, match="of 8 prompts 1 are distinct"):
            table = relative_position_kernel(model, None, copies)
        assert table["predicted"].isna().all()
        assert table["score"].notna().all()


def test_no_prediction_is_judged_on_a_prompt_that_made_it():
    model, tokens, others = shared("bridge", "llama"), zoo.prompt(3, 24), zoo.prompt(4, 24, seed=1)
    apart = kernel_prediction(model, None, tokens, reference=others)
    beginnings = [row[:n] for row, n in zip(others[:2], (24, 9), strict=True)]
    with pytest.warns(UserWarning, match="2 prompts, such as prompt .*, are also in reference= or begin"):
        mixed = kernel_prediction(model, None, [*tokens, *beginnings], reference=others)
    # Measured: 2e-7, float32 runs of other batch shapes. Judged on all five prompts r moves by hundredths.
    pd.testing.assert_frame_equal(mixed, apart, rtol=0, atol=1e-4)
    assert {name: mixed.attrs[name] for name in ("n_reference", "n_judged")} == {"n_reference": 4, "n_judged": 3}
    with pytest.raises(ValueError, match="no prompt is left to judge the prediction on"):
        kernel_prediction(model, None, others[:, :15], reference=others)
    kernel = relative_position_kernel(model, None, others, reference=others)  # which judges nothing
    assert kernel["predicted"].notna().all()
    assert kernel.attrs["n_judged"] == 0
    # Rows 0, 3, 4 and 7 give the means, and row 6 is the beginning of row 3.
    assert sorted(torch.randperm(8, generator=torch.Generator().manual_seed(0))[:4].tolist()) == [0, 3, 4, 7]
    assert kernel_prediction(model, None, [*others, *others[[1, 2, 3, 0], :12]]).attrs["n_judged"] == 3


def test_every_head_is_measured_in_one_pass():
    model, tokens = shared("bridge", "llama"), zoo.prompt(4, 24)
    calls = []
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: calls.append(len(x)))]):
        table = relative_position_kernel(model, prompts=tokens)
    assert calls == [4]
    pairs = [(layer, head) for layer in range(zoo.LAYERS) for head in range(zoo.HEADS)]
    assert table[["layer", "head"]].drop_duplicates().to_records(index=False).tolist() == pairs
    some = relative_position_kernel(model, [(1, 2)], tokens)
    chosen = table[(table["layer"] == 1) & (table["head"] == 2)].reset_index(drop=True)
    pd.testing.assert_frame_equal(chosen, some)


def test_without_rotary_positions_there_is_no_prediction():
    judged = kernel_prediction(shared("bridge", "bloom"), None, zoo.prompt(4, 24))
    assert judged.drop(columns=["layer", "head", "name", "peak"]).isna().all(axis=None)
    assert judged["peak"].notna().all()


def test_beyond_the_length_that_frequencies_hold_for_there_is_no_prediction():
    model = shared("bridge", "phi3_longrope")
    short, long = (relative_position_kernel(model, [(0, 0)], zoo.prompt(4, width)) for width in (32, 40))
    assert short["predicted"].notna().all()
    assert long["predicted"].isna().all()
    assert long["score"].notna().all()


def test_one_prompt_gives_no_prediction_and_is_not_judged():
    model = shared("bridge", "llama")
    assert relative_position_kernel(model, None, zoo.prompt(1, 24))["predicted"].isna().all()
    with pytest.raises(ValueError, match="one distinct prompt is not enough"):
        kernel_prediction(model, None, zoo.prompt(1, 24))
    judged = kernel_prediction(model, None, zoo.prompt(1, 24), reference=zoo.prompt(1, 24, seed=1))
    assert judged["r"].notna().all()


def test_hooks_on_queries_reach_the_prediction_and_ablations_do_not():
    model, tokens = shared("bridge", "llama"), zoo.prompt(4, 24)
    intact = relative_position_kernel(model, [(0, 1)], tokens)
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", lambda q, hook: 2 * q)]):
        doubled = relative_position_kernel(model, [(0, 1)], tokens)
    np.testing.assert_allclose(doubled["predicted"], 2 * intact["predicted"], rtol=1e-6)
    with tls.ablate(model, [(0, 1)], tls.parts.Band([0])):
        ablated = relative_position_kernel(model, [(0, 1)], tokens)
    np.testing.assert_array_equal(ablated["predicted"], intact["predicted"])
    assert (ablated["score"] - intact["score"]).abs().max() > 0.01


# --- the judged summary ---


def test_constant_queries_and_keys_are_judged_perfect():
    judged = kernel_prediction(shared("bridge", "gptj"), None, one_token(25), reference=one_token())
    # Measured: 1 - 4e-13.
    np.testing.assert_allclose(judged["r"], 1, rtol=0, atol=1e-6)
    assert (judged["peak"] == judged["predicted_peak"]).all()
    np.testing.assert_allclose(judged.filter(like="share_").sum(axis=1), 1, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_the_band_is_that_of_the_only_frequencies_left():
    """Queries keep one pair: its third has a share of 1, and dropping it flattens the kernel."""
    model = shared("bridge", "llama")
    geometry = attention_view(model).rotary(0)
    thirds = np.array_split(np.arange(geometry.n_pairs), 3)
    for band, third in zip(("high", "middle", "low"), thirds, strict=True):
        pair = int(third[0])

        def keep(q, hook, pair=pair):
            kept = torch.zeros_like(q)
            for column in (int(geometry.real_index[pair]), int(geometry.imag_index[pair])):
                kept[..., column] = q[..., column]
            return kept

        with model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", keep)]):
            row = kernel_prediction(model, [(0, 1)], one_token(25), reference=one_token()).iloc[0]
            with tls.ablate(model, row, tls.parts.Band(range(row["first"], row["last"] + 1))):
                flat = relative_position_kernel(model, row, one_token())["score"]
        assert (row["band"], row["first"], row["last"]) == (band, third[0], third[-1])
        assert row[f"share_{band}"] == pytest.approx(1, abs=1e-12)
        assert np.ptp(flat) < 1e-6


def test_shares_are_those_of_a_regression_on_the_whole():
    rng = np.random.default_rng(0)
    by_pair, theta = rng.standard_normal((8, 21)), rng.standard_normal(8)
    shares, bands = band_shares(by_pair, theta)
    whole = by_pair.sum(0)
    for share, band in zip(shares, bands, strict=True):
        assert share == pytest.approx(np.polyfit(whole, by_pair[band].sum(0), 1)[0], abs=1e-12)
    assert sorted(np.concatenate(bands).tolist()) == list(range(8))
    assert min(np.abs(theta[bands[0]])) >= max(np.abs(theta[bands[1]])) >= max(np.abs(theta[bands[2]]))
    assert np.isnan(band_shares(np.ones((8, 21)), theta)[0]).all()


def test_chosen_offsets():
    model, tokens = shared("bridge", "llama"), zoo.prompt(4, 24)
    whole, some = relative_position_kernel(model, None, tokens), relative_position_kernel(model, None, tokens, [0, -3])
    expected = whole[whole["offset"].isin([-3, 0])].reset_index(drop=True)
    pd.testing.assert_frame_equal(some, expected)
    far = relative_position_kernel(model, [(0, 0)], tokens, range(-23, 1))
    assert far["offset"].tolist() == list(range(-23, 1))
    assert kernel_prediction(model, [(0, 0)], tokens, [0, -3])["r"].isna().all()  # two points


@pytest.mark.parametrize("offsets", [[1], [-24], [-1.5], [], ["a"]])
def test_offsets_that_no_prompt_has_are_refused(offsets):
    with pytest.raises(ValueError, match="offsets= are key position less query position, numbers from -23 to 0"):
        relative_position_kernel(shared("bridge", "llama"), [(0, 0)], zoo.prompt(4, 24), offsets)
