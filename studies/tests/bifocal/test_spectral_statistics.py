"""Resonance, drift and the manifold over depth where the answer is known; statistics and further comparisons.

The comparisons: Dyck-3 with a test of equivalence, and learned frequencies beside those of rope settings.
"""

import itertools
import math
import re
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from spectral_arms import SMALL, jitter_spectral, model
from tlspectral_studies.bifocal import context_extension, experiments
from tlspectral_studies.bifocal.context_extension import QUICK_EXTENSION, joined, learnable, new_model, scaled
from tlspectral_studies.bifocal.depth_manifold import depth_manifold
from tlspectral_studies.bifocal.equivalence import depth_cosines
from tlspectral_studies.bifocal.formal_languages import Dyck3
from tlspectral_studies.bifocal.language_runs import LanguageRun, chosen_rates
from tlspectral_studies.bifocal.languages import compared, differences_beyond, lock_in_step
from tlspectral_studies.bifocal.llama import LITERAL_ARM, SpectralArm, SpectralLlama, parameter_counts
from tlspectral_studies.bifocal.modulo import QUICK_MODULO, modulo_experiment, split_expressions
from tlspectral_studies.bifocal.resonance import phase_drift, resonance, resonance_gain, resonance_over_training
from tlspectral_studies.bifocal.schedule import FULL, QUICK_DYCK
from tlspectral_studies.common.run_folder import open_run_folder
from tlspectral_studies.common.seed_intervals import equivalence, paired_differences, t_interval
from zoo import generator

from tlspectral.tables import read_table
from tlspectral.tables.schema import known_schemas


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
    within = sum(((z[:, depth] - z[:, depth].mean(0)) ** 2).sum() for depth in range(5))
    total = ((flat - flat.mean(0)) ** 2).sum()
    assert here["between"].iloc[0] == pytest.approx(1 - within / total)
    np.testing.assert_array_equal(here["depth"], list(range(1, 6)) * 6)


# --- statistics ---
def test_t_interval_by_hand():
    found = t_interval(pd.Series([1.0, 2.0, 3.0, 4.0, 5.0]))
    reach = 2.7764451 * math.sqrt(2.5) / math.sqrt(5)  # t table, 4 degrees of freedom
    assert found == pytest.approx({"mean": 3.0, "low": 3 - reach, "high": 3 + reach, "n": 5})
    assert math.isnan(t_interval(pd.Series([1.0]))["low"])


def test_differences_are_paired_over_seeds():
    table = pd.DataFrame({"arm": ["standard"] * 3 + ["full"] * 3, "seed": [0, 1, 2, 2, 0, 1]})
    table = table.assign(language="a", loss=[1.0, 5.0, 9.0, 9.5, 1.1, 5.3])
    (row,) = paired_differences(table, ["language"], "loss", reference="standard").to_dict("records")
    reach = 4.3026527 * np.std([0.1, 0.3, 0.5], ddof=1) / math.sqrt(3)
    assert (row["language"], row["arm"], row["n"]) == ("a", "full", 3)
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((0.3, 0.3 - reach, 0.3 + reach))


def test_differences_beyond_leave_trained_sizes_out():
    table = pd.DataFrame(
        itertools.product(["dyck3"], ["standard", "full"], [0, 1], [4, 9, 10]),
        columns=["language", "arm", "seed", "size"],
    ).assign(accuracy=[1.0, 0.5, 0.3, 1.0, 0.5, 0.5, 0.1, 0.7, 0.5, 0.1, 0.8, 0.4])
    table["trained"] = table["size"] <= 8
    (row,) = differences_beyond(table).to_dict("records")
    assert (row["arm"], row["n"]) == ("full", 2)
    assert row["mean"] == pytest.approx((0.2 + 0.1) / 2)


def losses_of(values):
    return pd.DataFrame({"step": range(1, len(values) + 1), "loss": values})


def test_lock_in_is_the_first_halving_within_twenty_steps():
    jump = [1.0] * 100 + [0.3] * 50  # the mean of ten is 0.44 once eight of them have fallen
    assert lock_in_step(losses_of(jump), 0.0) == 108
    assert lock_in_step(losses_of([x + 0.2 for x in jump]), 0.2) == 108
    assert lock_in_step(losses_of([x + 0.2 for x in jump]), 0.0) == 109  # a floor that is wrong: 0.57 < 0.6 takes 9
    assert lock_in_step(losses_of([1.0] * 100 + [0.51] * 50), 0.0) is None
    slow = [2 ** (-step / 25) for step in range(200)]
    assert lock_in_step(losses_of(slow), 0.0) is None
    fast = [2 ** (-step / 15) for step in range(200)]
    assert lock_in_step(losses_of(fast), 0.0) == 30  # the first step with two windows
    assert lock_in_step(losses_of([1.0, 0.1] * 10), 0.0) is None  # too short for two windows


def test_the_lowest_loss_chooses_the_rate():
    def run(arm, rate, loss):
        return LanguageRun("a", arm, rate, 9), {"held_out": pd.DataFrame({"loss": [loss]})}

    runs = dict(
        [run("x", 1e-3, 0.5), run("x", 3e-3, 0.4), run("x", 1e-2, math.nan), run("y", 1e-3, 0.7), run("y", 3e-3, 0.7)]
    )
    table = chosen_rates(runs)
    assert table["chosen"].tolist() == [False, True, False, True, False]


def test_the_summary_is_that_of_the_rows():
    rows = [
        {"language": "dyck3", "arm": arm, "learning_rate": 1e-3, "seed": seed, "loss": loss, "accuracy": 1 - loss,
         "lock_in": math.nan if seed else 50.0}
        for arm, losses in {"standard": (0.5, 0.3), "full": (0.4, 0.1)}.items()
        for seed, loss in enumerate(losses)
    ]  # fmt: skip
    table = compared(pd.DataFrame(rows), FULL).set_index("arm")
    assert table["loss"].tolist() == pytest.approx([0.4, 0.25])
    assert math.isnan(table["loss_difference"]["standard"])
    assert table["loss_difference"]["full"] == pytest.approx(-0.15)
    assert table["accuracy_difference"]["full"] == pytest.approx(0.15)
    reach = 12.7062047 * 0.05 * math.sqrt(2) / math.sqrt(2)
    assert table["loss_difference_high"]["full"] == pytest.approx(-0.15 + reach)
    assert table["lock_ins"].tolist() == [1, 1]
    assert table["spectral_parameters"].tolist() == [0, 384]
    assert table["chance_loss"].iloc[0] == pytest.approx(Dyck3((4, 8)).chance_loss)


# --- equivalence, held-out sums and rope settings ---


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    output = tmp_path_factory.mktemp("comparisons")
    experiments.run_experiment("equivalence", output, dyck=QUICK_DYCK)
    experiments.run_experiment("modulo", output, modulo=QUICK_MODULO)
    return {path.stem: read_table(path) for path in output.glob("*.parquet")}


def test_the_literal_arm_is_the_papers():
    arm = LITERAL_ARM["literal"]
    built = SpectralLlama(SMALL, arm, seed=1)
    spectral = built.attentions()[0].spectral
    assert spectral is not None
    assert parameter_counts(SMALL, arm)["spectral"] == 2 * 3 * 2
    jitter_spectral(built)
    x = torch.randn(1, 6, 4, 4, generator=generator())
    position = torch.arange(6)
    q, k = (spectral(x, position, side) for side in ("query", "key"))
    torch.testing.assert_close(q, k)  # rounding of float32: the gain is multiplied at another place
    gain = torch.cat([spectral.gain, spectral.gain], -1)
    # A rotation keeps the norm of a pair, so the norms are those of the input times the gain: float32 rounding, 1e-7.
    torch.testing.assert_close(q.unflatten(-1, (2, 2)).norm(dim=-2), (x * gain).unflatten(-1, (2, 2)).norm(dim=-2))


def test_a_tie_is_a_matter_of_the_margin():
    differences = pd.Series([0.01, -0.02, 0.03, 0.0, 0.005])
    found = equivalence(differences, 0.05)
    lower = scipy.stats.ttest_1samp(differences, -0.05, alternative="greater").pvalue
    upper = scipy.stats.ttest_1samp(differences, 0.05, alternative="less").pvalue
    assert found["pvalue"] == pytest.approx(max(lower, upper))
    assert equivalence(differences, found["bound"])["pvalue"] == pytest.approx(0.05)
    assert equivalence(-differences, 0.05) == pytest.approx(found)


@pytest.mark.slow
def test_every_arm_has_the_same_grid_and_seeds(tables):
    wanted = {one.name for one in known_schemas().values() if re.search("learn (equivalence|modulo) ", one.made_by)}
    assert {table.attrs["table"] for table in tables.values()} == wanted
    rates, compared = tables["equivalence_rates"], tables["equivalence"]
    assert rates.groupby("arm").size().tolist() == [len(QUICK_DYCK.rates)] * 2
    assert rates.groupby("arm")["best"].sum().tolist() == [1, 1]
    assert compared["view"].tolist() == ["equal"] * 2 + ["best"] * 2
    assert compared.loc[compared["view"] == "equal", "learning_rate"].nunique() == 1
    assert set(compared["n"]) == {len(QUICK_DYCK.seeds)}


@pytest.mark.slow
def test_held_out_sums_are_not_trained(tables, tmp_path):
    train, held_out = split_expressions(240, 0)
    rows = [*map(tuple, train.tokens.tolist()), *map(tuple, held_out.tokens.tolist())]
    assert (len(train.tokens), len(held_out.tokens), len(set(rows))) == (240, 103, 343)
    assert all((a + b + c) % 7 == answer for _, a, _, b, _, c, _, answer in (np.array(rows) - 4).tolist())
    assert tables["modulo_runs"]["learned_at"].tolist() == [0.0] * 4  # from an accuracy of 0, the preset's
    # A pilot that has not learned the task ends the experiment.
    never = replace(QUICK_MODULO, learned=1.1)
    folder = open_run_folder(tmp_path / "runs", asdict(never), command="")
    assert list(modulo_experiment(folder, never)) == ["modulo_pilot"]


def test_cosines_of_depths():
    table = depth_cosines(SpectralLlama(SMALL, SpectralArm(), seed=0), depth=5, n_words=8)
    assert len(table) == 2 * 4 * 10
    assert table["cosine"].between(-1 - 1e-12, 1 + 1e-12).all()
    # The centred vectors of a head sum to 0, so that their cosines cannot all be positive.
    assert (table.groupby(["layer", "head"])["centred"].min() < 0).all()


def test_rope_settings_change_what_they_should():
    plain = new_model(QUICK_EXTENSION, 0)
    theta = plain.model.rotary_emb.inv_freq
    row = torch.randint(0, 256, (1, 256), generator=generator())
    with torch.no_grad():
        own, short = plain(input_ids=row).logits, plain(input_ids=row[:, :100]).logits
        for scaling in context_extension.SCALINGS:
            reader = scaled(plain, scaling, QUICK_EXTENSION)
            assert not torch.equal(reader(input_ids=row).logits, own)
            found = reader.model.rotary_emb
            if scaling == "linear":
                assert torch.equal(found.inv_freq, theta / 2)
            elif scaling == "dynamic":  # the base of a text of twice the length; of a short one the model's own
                pairs = len(theta)
                base = 10000.0 * 3 ** (pairs / (pairs - 1))
                torch.testing.assert_close(found.inv_freq, base ** -(torch.arange(pairs) / pairs))
                torch.testing.assert_close(reader(input_ids=row[:, :100]).logits, short)
            else:
                assert found.attention_scaling == pytest.approx(0.1 * math.log(2) + 1)


def test_frequencies_and_weights_of_a_learnable_copy_train():
    plain = new_model(QUICK_EXTENSION, 0)
    trained = [name.rsplit(".", 1)[-1] for name, value in learnable(plain).named_parameters() if value.requires_grad]
    assert trained.count("log_omega_shift") == 2
    assert len(trained) == 2 + len(list(plain.parameters()))


@pytest.mark.slow  # 11 CPU seconds: five trainings, and six tables of heads
def test_all_readings_are_of_the_same_models(tmp_path):
    experiments.run_experiment("longer-context", tmp_path, extension=QUICK_EXTENSION)
    tables = {path.stem: read_table(path) for path in tmp_path.glob("*.parquet")}
    assert {table.attrs["table"].removeprefix("experiments.") for table in tables.values()} == set(tables)
    runs, heads = tables["extension_runs"], tables["extension_heads"]
    assert set(runs["arm"]) == {"fixed", *context_extension.SCALINGS, "learned", "learned_fast"}
    assert runs.groupby(["arm", "adapted"])["position"].apply(list).map(tuple).nunique() == 1
    assert tables["extension"].groupby("positions")["difference"].count().tolist() == [10] * 3
    start = heads[heads["step"] == 0].groupby(["layer", "head"])[["rope_imag_frac", "D_head"]]
    # The arms of a seed start from the same weights. Measured 0: the same numbers.
    assert start.agg(np.ptp).to_numpy().max() < 1e-12
    moved = heads[heads["step"] > 0].groupby("arm")["log_shift"].mean()
    assert np.isnan(moved["fixed"])
    assert moved["learned_fast"] > 3 * moved["learned"] > 0


@pytest.mark.slow
def test_heads_that_move_together_are_found():
    rng = np.random.default_rng(0)
    rows = []
    for arm in ("fixed", "learned", "learned_fast"):
        for seed, layer, head in np.ndindex(5, 2, 4):
            shift = rng.random()
            for step in (0, 10):
                moved = {"D_head": shift**3 if arm == "learned" else rng.random(), "s_pos": rng.random()}
                measures = {"rope_imag_frac": -shift, **moved, "omega_shift": shift, "log_shift": shift}
                rows.append(
                    {"arm": arm, "seed": seed, "layer": layer, "head": head, "step": step}
                    | (measures if step else dict.fromkeys(measures, 0.0))
                )
    found = joined(pd.DataFrame(rows)).set_index(["arm", "move", "measure"])
    assert found.loc[("learned", "log_shift", "D_head"), "mean"] == pytest.approx(1.0)
    assert found.loc[("learned", "log_shift", "rope_imag_frac"), "q"] < 0.01
    assert found.loc[("learned_fast", "log_shift", "s_pos"), "q"] > 0.05
    assert set(found["n"]) == {10}
