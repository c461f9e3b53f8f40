"""Resonance, drift of phases and the manifold over depth, on trajectories whose answer is known."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from spectral_arms import SMALL, generator, model

from tlspectral.studies.bifocal.depth_manifold import depth_manifold
from tlspectral.studies.bifocal.formal_languages import Dyck3
from tlspectral.studies.bifocal.resonance import phase_drift, resonance, resonance_gain, resonance_over_training


def trajectory(omegas, phases=None):
    """One head: rows are steps 0, 10, ..., columns are pairs."""
    steps, pairs = np.shape(omegas)
    table = pd.DataFrame(
        itertools.product(range(0, 10 * steps, 10), [0], [0], range(pairs)),
        columns=["step", "layer", "head", "frequency"],
    )
    return table.assign(omega=np.ravel(omegas), gain=1.0, phase=0.0 if phases is None else np.ravel(phases))


def test_resonance_is_the_mean_of_the_best_cosines():
    omega = np.array([[math.pi / 2, math.pi / 3]])
    assert resonance(omega, np.array([4.0, 6.0, 2.0])) == pytest.approx([(1 + 1 + -0.5) / 3])


def test_a_frequency_that_moves_to_a_lap_resonates():
    lap = 2 * math.pi / 10
    moved = trajectory([[0.45, 1e-4], [0.55, 1e-4], [lap, 1e-4]])
    found = resonance_over_training(moved, [0, 10, 20])
    turning = found[found["pairs"] == "turning"].set_index("step")["resonance"]
    assert turning[0] == pytest.approx((math.cos(4.5) + math.cos(9.0)) / 2)
    assert turning[20] == pytest.approx(1.0)
    everything = found[found["pairs"] == "all"]["resonance"]
    assert everything.min() > 0.999  # the slow pair does it from the start
    gain = resonance_gain(moved, [10, 20], draws=400).set_index("pairs")
    down = 0.45 - (lap - 0.45)
    other = (math.cos(10 * down) + math.cos(20 * down)) / 2 - turning[0]
    up = 1.0 - turning[0]
    assert gain["gain"]["turning"] == pytest.approx(up)
    # 400 fair coins between two values: within four standard errors of their mean.
    assert gain["random_mean"]["turning"] == pytest.approx((up + other) / 2, abs=4 * abs(up - other) / 2 / 20)
    assert gain["excess"]["turning"] == pytest.approx(up - gain["random_mean"]["turning"])
    assert gain["percentile"]["turning"] == 1.0
    assert gain["gain"]["all"] < 0.001


def test_what_does_not_move_gains_nothing():
    found = resonance_gain(trajectory([[0.5, 0.1]] * 2), [10])
    assert not found[["gain", "random_mean", "random_sd", "excess"]].to_numpy().any()
    assert found["percentile"].isna().all()
    with pytest.raises(ValueError, match="at least one above 0"):
        resonance_gain(trajectory([[0.5]] * 2), [0])


def test_phase_drift_by_hand():
    table = phase_drift(trajectory([[0.1] * 4] * 2, [[1.0, -1.0, 1.0, -1.0], [1.0, 2.0, 3.0, 2.0]]))
    first, last = table.to_dict("records")
    assert (first["mean_abs"], first["start_abs"], first["drift"], first["zigzag"]) == (1.0, 1.0, 0.0, 1.0)
    assert (last["mean_abs"], last["start_abs"], last["drift"], last["zigzag"]) == (2.0, 1.0, 2.0, 0.5)
    level = phase_drift(trajectory([[0.1] * 4], [[1.0, 1.0, 2.0, 1.0]]))
    assert level["zigzag"].tolist() == [0.5]  # no increment, no turn
    assert math.isnan(phase_drift(trajectory([[0.1] * 3]))["zigzag"].iloc[0])
    noise = np.random.default_rng(0).normal(size=(1, 20_000))
    # 2/3 for independent noise; 20,000 neighbouring triples have a standard error below 0.004.
    assert phase_drift(trajectory(np.ones_like(noise), noise))["zigzag"].iloc[0] == pytest.approx(2 / 3, abs=0.015)


def test_depth_manifold_by_covariance():
    built = model("full", config=replace(SMALL, n_ctx=32))
    table = depth_manifold(built, depth=5, n_words=6, seed=2)
    assert len(table) == 2 * 4 * 30
    words = Dyck3((5, 5)).sample(6, generator(2)).tokens
    with torch.no_grad():
        z = built.head_outputs(words)[1][:, 2, 1:6].double().numpy()  # words depth d_head
    here = table[(table["layer"] == 1) & (table["head"] == 2)]
    flat = z.reshape(30, -1)
    values, vectors = np.linalg.eigh(np.cov(flat.T, ddof=0))
    assert here["explained"].iloc[0] == pytest.approx(values[-2:].sum() / values.sum())
    for place, name in ((-1, "pc1"), (-2, "pc2")):
        expected = (flat - flat.mean(0)) @ vectors[:, place]
        agreement = np.corrcoef(here[name], expected)[0, 1]
        assert abs(agreement) == pytest.approx(1.0, abs=1e-6)
        assert here[name].std(ddof=0) == pytest.approx(math.sqrt(values[place]), rel=1e-6)
    by_depth = [here[here["depth"] == depth].index for depth in range(1, 6)]
    assert [len(index) for index in by_depth] == [6] * 5
    within = sum(((z[:, depth] - z[:, depth].mean(0)) ** 2).sum() for depth in range(5))
    total = ((flat - flat.mean(0)) ** 2).sum()
    assert here["between"].iloc[0] == pytest.approx(1 - within / total)
    np.testing.assert_array_equal(here["depth"], list(range(1, 6)) * 6)
