"""Dyck-3 with a test of equivalence, and learned frequencies beside those of rope settings."""

import math
import re
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from spectral_arms import SMALL, jitter_spectral
from zoo import generator

from tlspectral.studies.bifocal import context_extension, experiments
from tlspectral.studies.bifocal.context_extension import QUICK_EXTENSION, joined, learnable, new_model, scaled
from tlspectral.studies.bifocal.equivalence import depth_cosines
from tlspectral.studies.bifocal.llama import LITERAL_ARM, SpectralArm, SpectralLlama, parameter_counts
from tlspectral.studies.bifocal.modulo import QUICK_MODULO, modulo_experiment, split_expressions
from tlspectral.studies.bifocal.schedule import QUICK_DYCK
from tlspectral.studies.common.run_folder import open_run_folder
from tlspectral.studies.common.seed_intervals import equivalence
from tlspectral.tables import read_table
from tlspectral.tables.schema import known_schemas


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    output = tmp_path_factory.mktemp("comparisons")
    experiments.run_experiment("equivalence", output, dyck=QUICK_DYCK)
    experiments.run_experiment("modulo", output, modulo=QUICK_MODULO)
    return {path.stem: read_table(path) for path in output.glob("*.parquet")}


def test_the_literal_arm_is_the_papers():
    arm = LITERAL_ARM["literal"]
    model = SpectralLlama(SMALL, arm, seed=1)
    spectral = model.attentions()[0].spectral
    assert spectral is not None
    assert parameter_counts(SMALL, arm)["spectral"] == 2 * 3 * 2
    jitter_spectral(model)
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


def test_every_arm_has_the_same_grid_and_seeds(tables):
    wanted = {one.name for one in known_schemas().values() if re.search("learn (equivalence|modulo) ", one.made_by)}
    assert {table.attrs["table"] for table in tables.values()} == wanted
    rates, compared = tables["equivalence_rates"], tables["equivalence"]
    assert rates.groupby("arm").size().tolist() == [len(QUICK_DYCK.rates)] * 2
    assert rates.groupby("arm")["best"].sum().tolist() == [1, 1]
    assert compared["view"].tolist() == ["equal"] * 2 + ["best"] * 2
    assert compared.loc[compared["view"] == "equal", "learning_rate"].nunique() == 1
    assert set(compared["n"]) == {len(QUICK_DYCK.seeds)}


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
    model = SpectralLlama(SMALL, SpectralArm(), seed=0)
    table = depth_cosines(model, depth=5, n_words=8)
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
