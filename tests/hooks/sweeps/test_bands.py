"""Dropping bands of frequencies: equal to whole forwards under hooks, random sets as large as they claim to be."""

import functools

import numpy as np
import pandas as pd
import pytest
import torch
from ablation_runs import repetitions
from zoo import also_slow, shared

import tlspectral as tls
from tlspectral.errors import BadHead, UnsupportedArchitecture
from tlspectral.hooks import ablate, ablation_sweep
from tlspectral.hooks import band_effects as effects
from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.hooks.parts import Band
from tlspectral.hooks.parts.query_key import BANDS
from tlspectral.hooks.parts.removal import root_mean_square
from tlspectral.hooks.sweeps.controls import equal_sets
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import run_until
from tlspectral.tasks import induction, induction_loss

MODELS = ("mistral", "qwen3", "gemma2", "phi", "gptj")  # the last: delegated, adjacent pairs


drawn = functools.partial(repetitions, count=4, length=9)


def thirds(name, layer):
    theta = attention_view(shared("bridge", name)).rotary(layer).theta
    return [part.tolist() for part in torch.tensor_split(theta.argsort(descending=True, stable=True), 3)]


def measured_rms(model, tokens, layer, head, pairs):
    """RMS of what `Band` removes, read from the hook that removes it."""
    view = attention_view(model)
    found = []

    def alter(removal):
        allowed = removal.allowed if removal.allowed.ndim == 2 else removal.allowed[:, [0]]
        found.append(root_mean_square(removal.difference, allowed))
        return removal.difference

    bound = Band(pairs).on(view, {layer: [head]})[layer]
    hooks = LayerAblation(view, view.layer(layer), [head], bound, alter=alter).hooks()
    run_until(view, tokens, hooks, last=view.hook_names(layer)["z"])
    return float(torch.cat(found).double().square().mean().sqrt())


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["gemma2", "gptj", *also_slow("mistral", "qwen3", "phi")])
def test_a_band_is_one_ablated_forward(name):
    model, tokens = shared("bridge", name), drawn(name)
    table = effects(model, [(1, 2), (0, 1)], task=induction(tokens), draws=1)
    intact = induction_loss(model, tokens)
    assert list(table["band"]) == list(BANDS) * 2
    assert list(zip(table["layer"], table["head"], strict=True)) == [(0, 1)] * 3 + [(1, 2)] * 3
    assert table.attrs["intact_value"] == pytest.approx(intact.value, abs=1e-6)
    for row in table.itertuples():
        band = thirds(name, row.layer)[BANDS.index(row.band)]
        with ablate(model, [(row.layer, row.head)], Band(band)):
            ablated = induction_loss(model, tokens)
        # Noise: 4e-7 (float32 batches of another size); the bands of these models move the loss by 1e-4 to 1.
        assert row.delta == pytest.approx(ablated.value - intact.value, abs=3e-6)
        difference = ablated.per_sequence - intact.per_sequence
        assert row.delta_se == pytest.approx(difference.std(ddof=1) / 2, abs=3e-6)
        # Noise 1e-6 relative; without biases, scale or mask it is off by tenths.
        assert row.score_rms == pytest.approx(measured_rms(model, tokens, row.layer, row.head, band), rel=1e-4)
    assert table["delta"].abs().max() > 1e-4


def test_random_sets_weigh_what_the_band_weighs_and_are_other_sets():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(24, 500)) * rng.uniform(0.5, 2, size=(24, 1)) + rng.normal(size=500)
    products = scores @ scores.T / 500
    band = np.arange(24) < 8
    sets = equal_sets(products, band, 10, rng)
    assert len(sets) == 10
    assert len({tuple(one) for one in [band, *sets]}) == 11
    wanted = np.sqrt((scores[band].sum(0) ** 2).mean())
    for one in sets:
        assert np.sqrt((scores[one].sum(0) ** 2).mean()) == pytest.approx(wanted, rel=0.1)
    spread = np.mean(sets, axis=0)
    assert spread.min() < 0.5 < spread.max() or len(np.unique(spread)) > 3  # no frequency is favoured by construction


@pytest.mark.slow
def test_where_no_set_weighs_the_same_there_is_none():
    products = np.diag([1.0, 4.0, 16.0])
    assert equal_sets(products, np.array([False, True, False]), 3, np.random.default_rng(0)) == []
    # Six pairs: few sets fit.
    model, options = shared("bridge", "llama"), {"task": induction(drawn("llama")), "draws": 4, "seed": 3}
    table = effects(model, [(0, 0), (1, 3)], **options)
    assert table.equals(effects(model, [(0, 0), (1, 3)], **options))
    for row in table.itertuples():
        if not row.control_draws:
            none = [row.control_delta, row.control_rms, row.control_overlap, row.control_excess, row.control_p]
            assert np.isnan([*none, row.control_p_floor]).all()
        else:
            assert row.control_rms == pytest.approx(row.score_rms, rel=0.1)
            assert row.control_delta_min <= row.control_delta <= row.control_delta_max
            assert row.control_overlap >= 0
            assert row.control_p >= row.control_p_floor == 1 / (1 + len(row.control_draws))
    assert table["control_draws"].map(len).between(0, 4).all()
    assert (table["control_draws"].map(len) > 0).any()


@pytest.mark.slow
def test_random_losses_are_those_of_the_sets(monkeypatch):
    """The one set that is handed out is dropped in a whole forward as well."""
    model, tokens = shared("bridge", "llama"), drawn("llama")
    mask = np.array([True, False, False, True, False, False])
    monkeypatch.setattr("tlspectral.hooks.sweeps.controls.equal_sets", lambda products, band, draws, rng: [mask, mask])
    table = effects(model, [(1, 0)], task=induction(tokens))
    with ablate(model, [(1, 0)], Band([0, 3])):
        delta = induction_loss(model, tokens).value - table.attrs["intact_value"]
    # As above: noise 4e-7.
    for name in ("control_delta", "control_delta_min", "control_delta_max"):
        assert table[name].to_numpy() == pytest.approx(delta, abs=3e-6)
    assert table["control_rms"].to_numpy() == pytest.approx(measured_rms(model, tokens, 1, 0, [0, 3]), rel=1e-4)
    assert (table["control_draws"].map(len) == 2).all()
    # Two draws with one effect: an effect that is larger has p = 1 / 3.
    assert table["control_excess"].to_numpy() == pytest.approx(table["delta"].abs() - abs(delta), abs=3e-6)
    assert table["control_p"].tolist() == [1 / 3 if abs(own) > abs(delta) else 1.0 for own in table["delta"]]
    # Of the two slowest pairs, the low band, the set has none; of the two fastest and the two between it has one each.
    overlap = table.set_index("band")["control_overlap"]
    assert overlap["low"] == 0.0
    alone = [measured_rms(model, tokens, 1, 0, [pair]) for pair in (0, 3)]
    whole = table.set_index("band").loc[["high", "middle"], "score_rms"].to_numpy()
    assert overlap[["high", "middle"]].to_numpy() == pytest.approx(alone / whole, rel=1e-4)  # noise 1e-6


SWEPT = [
    "control_delta",
    "control_delta_se",
    "control_excess",
    "control_p",
    "control_p_floor",
    "control_draws",
    "excess_z",
    "control_rms",
    "control_overlap",
]


@pytest.mark.slow
def test_bands_are_rows_of_a_sweep():
    """Of a named third and, but for the order of random sets, of its pairs by their indices."""
    model, options = shared("bridge", "llama"), {"heads": ["L0H1", "L1H2"], "task": induction(drawn("llama"))}
    table = effects(model, draws=19, **options)
    for band in BANDS:
        swept = ablation_sweep(model, Band(band), control="random", draws=19, **options)
        rows = table[table["band"] == band].reset_index(drop=True)
        pd.testing.assert_frame_equal(
            rows[["delta", "delta_se", "score_rms"]], swept[["delta", "delta_se", "score_rms"]], check_exact=True
        )
        pd.testing.assert_frame_equal(rows[SWEPT], swept[SWEPT], check_exact=True)
        assert swept.attrs["frequencies"] == band
        indices = thirds("llama", 0)[BANDS.index(band)]
        by_index = ablation_sweep(model, Band(indices), heads="L0H1", task=options["task"])
        # Noise 0: the same numbers in the same batches but for a head; bands of this model move the loss by 1e-3.
        assert by_index["delta"].item() == pytest.approx(rows["delta"][0], abs=3e-6)
    assert (table["control_draws"].map(len) < 19).any()  # six pairs: few sets fit
    assert (table["control_draws"].map(len) > 0).any()


@pytest.mark.parametrize("name", ["llama", *also_slow("gptj", "qwen3")])
def test_a_band_at_a_position_is_one_ablated_forward(name):
    """So are its random sets, whose size is that of the scores of this query alone."""
    model, tokens = shared("bridge", name), drawn(name)
    task = induction(tokens)
    table = effects(model, "L0H1", task=task, at=[-2, 12], draws=3)
    assert list(table["position"]) == ["-2", "12"] * 3
    intact = tls.evaluate(model, task)
    for row in table.itertuples():
        band = Band(thirds(name, 0)[BANDS.index(row.band)], at=int(row.position))
        with ablate(model, "L0H1", band, task=task):
            # Noise: 4e-7 (float32 batches of another size); removed at all positions the largest is off by .01.
            assert row.delta == pytest.approx(float(tls.evaluate(model, task)) - intact.value, abs=3e-6)
        if row.control_draws:
            assert row.control_rms == pytest.approx(row.score_rms, rel=0.1)
    assert table["control_draws"].map(len).max() > 0


@pytest.mark.parametrize(
    ("name", "heads", "options", "error", "said"),
    [
        ("gpt2", "L1H0", {}, UnsupportedArchitecture, "layer 1: no rotary positions"),
        ("neox", "L0H0", {}, ValueError, "layer 0: Band.* needs at least three rotary pairs, and the layer has 2"),
        ("llama", "L0H99", {}, BadHead, "L0H99 does not exist"),
    ],
)
def test_refusals_say_what_was_found(name, heads, options, error, said):
    with pytest.raises(error, match=said):
        effects(shared("bridge", name), heads, **options)
