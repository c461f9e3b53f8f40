"""The search for BA's setting: what is listed, how a batch is scored and worded, which setting is nearest."""

import math
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
import torch
from tlspectral_studies.bifocal import experiments, figures, setting_search
from tlspectral_studies.bifocal.evolution import EvolutionSettings
from tlspectral_studies.bifocal.formal_languages import PAD, BioRotation, Dyck3, Modulo7
from tlspectral_studies.bifocal.setting_search import (
    FULL_SETTING,
    LEARNED_SETTING,
    QUICK_SETTING,
    SETTINGS,
    Setting,
    as_printed,
    compared,
    scored_as,
    setting_experiment,
    train_in_setting,
)
from tlspectral_studies.common.run_folder import open_run_folder

from tlspectral.tables import read_table

PRINTED = dict(enumerate(Modulo7.vocabulary)) | {token: text for text, token in setting_search._PRINTED.items()}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_list_has_thirty_settings_once():
    assert len(SETTINGS) == len(set(SETTINGS)) == 30
    assert sum(setting.scored == "answers" for setting in SETTINGS) == 15
    assert SETTINGS[1] == Setting()
    assert FULL_SETTING.search_seed not in FULL_SETTING.seeds


def test_an_expression_is_worded_as_ba_prints_it():
    short = Modulo7().sample(50, generator())
    batch = as_printed(short)
    for row, scored, before in zip(batch.tokens.tolist(), batch.scored.tolist(), short.tokens.tolist(), strict=True):
        text = "".join(PRINTED[token] for token in row)
        a, b, c, d = (token - 4 for token in before[1::2])
        assert text == f"<begin>({a}+{b}+{c})(mod7)={d}<end>"
        assert [row[1 + at] for at, counts in enumerate(scored) if counts] == [before[-1]]


@pytest.mark.parametrize("language", [Dyck3((2, 4)), BioRotation((3, 9), 2), Modulo7()], ids=lambda one: one.name)
def test_what_the_loss_counts(language):
    batch = language.sample(20, generator())
    assert scored_as(batch, "answers") is batch
    real = (batch.tokens[:, 1:] != PAD).sum()
    assert scored_as(batch, "tokens").scored.sum() == real
    assert scored_as(batch, "padded").scored.sum() == batch.tokens[:, 1:].numel()
    assert (scored_as(batch, "tokens").scored | ~batch.scored).all()


def test_the_floors_that_the_schedule_names():
    dyck, bio = Dyck3((4, 8)), BioRotation((100, 200))
    length = {"dyck3": 6 * 2 + 1, "bio_rotation": 8 + 150 + 1 + 8}  # mean tokens behind the first
    width = {one.name: one.sample(1, generator()).tokens.shape[1] - 1 for one in (dyck, bio)}
    floors = [one.sequence_floor * length[one.name] / width[one.name] for one in (dyck, bio)]
    expression = as_printed(Modulo7().sample(1, generator()))
    floors.append(3 * math.log(7) / expression.scored.shape[1])
    assert [round(floor, 3) for floor in floors] == [0.482, 1.031, 0.417]
    assert all(f"{floor:.3f}".lstrip("0") in setting_search.__doc__ for floor in floors)


def test_a_cosine_falls_from_the_rate_to_nothing():
    settings = EvolutionSettings(steps=100, warmup_steps=0, cosine=True)
    assert [settings.rate_factor(step) for step in (0, 50, 100)] == pytest.approx([1.0, 0.5, 0.0])
    assert EvolutionSettings(steps=100, warmup_steps=4).rate_factor(0) == 0.25
    assert EvolutionSettings(steps=100, warmup_steps=4).rate_factor(99) == 1.0


@pytest.mark.slow
def test_fixed_sequences_are_those_of_the_loss():
    """Four expressions are learned by heart, and the fresh ones are not: the two losses are of other sequences."""
    by_heart = Setting(learning_rate=3e-3, batch=(4, 4, 4), sequences=4)
    schedule = replace(QUICK_SETTING, settings=(by_heart,), steps=60, held_out=(64, 8, 64))
    row = train_in_setting(schedule, 0, "modulo7", "standard", 0)["measured"].iloc[0]
    assert row["loss"] < 0.5 < row["fresh_loss"]  # measured: 2e-4 to 4e-4, and 9.3


def rows(losses):
    """Rows of runs, a seed a loss."""
    return pd.concat(
        [
            pd.DataFrame({"language": language, "arm": arm, "seed": range(len(values)), "loss": values})
            for (language, arm), values in losses.items()
        ],
        ignore_index=True,
    ).assign(setting=3, fresh_loss=1.0, accuracy=0.5)


def test_outcomes_of_a_comparison():
    noise = np.array([1.0, 1.1, 0.9, 1.05, 0.95])
    found = compared(
        rows(
            {
                ("dyck3", "standard"): noise,
                ("dyck3", "omega"): 0.01 * noise[::-1],
                ("dyck3", "full"): 0.8 * noise + [0.001, 0.0, 0.001, 0.0, 0.0],
                ("dyck3", "placebo"): noise[::-1],
                ("modulo7", "standard"): noise,
                ("modulo7", "full"): 1.3 * noise + [0.001, 0.0, 0.001, 0.0, 0.0],
            }
        )
    ).set_index(["language", "arm"])
    outcomes = found["outcome"].to_dict()
    assert outcomes == {
        ("dyck3", "standard"): "",
        ("dyck3", "omega"): "reproduced",
        ("dyck3", "full"): "gain",
        ("dyck3", "placebo"): "not seen",
        ("modulo7", "standard"): "",
        ("modulo7", "full"): "loss",
    }
    assert found.loc[("dyck3", "omega"), "ratio"] == pytest.approx(0.01)
    # Four tests: Holm multiplies the least p by four.
    least = found["pvalue"].idxmin()
    assert found.loc[least, "pvalue_holm"] == pytest.approx(4 * found.loc[least, "pvalue"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("setting")
    experiments.run_experiment("setting", output, setting=QUICK_SETTING)
    return output


@pytest.mark.slow
def test_the_least_of_the_largest_ratios_is_chosen(finished):
    search = read_table(finished / "setting_search.parquet")
    assert search.groupby("setting").size().tolist() == [3, 3]
    largest = np.exp(np.abs(np.log(search["loss"] / search["paper_loss"]))).groupby(search["setting"]).max()
    assert search.loc[search["chosen"], "setting"].unique().tolist() == [largest.idxmin()]
    assert search.groupby("setting")["worst"].first().tolist() == pytest.approx(largest.tolist())
    runs, table = (read_table(finished / f"setting_{name}.parquet") for name in ("runs", "comparison"))
    assert set(runs["setting"]) == {largest.idxmin()}
    assert len(runs) == 2 * 3 * 3
    assert len(table) == 2 * 3
    figure = figures.setting_losses(search)
    drawn = [point for line in figure.axes[0].lines[1:] for point in np.atleast_1d(line.get_ydata())]
    dyck = search[search["language"] == "dyck3"]
    assert sorted(drawn) == pytest.approx(sorted(dyck["loss"] / dyck["paper_loss"]))


@pytest.mark.slow
def test_arms_are_not_judged_on_a_task_that_standard_does_not_learn(tmp_path, monkeypatch):
    """Two steps teach nothing. If every task counts as learned, the outcomes are those of the comparison."""
    experiments.run_experiment("setting-learned", tmp_path, learned=QUICK_SETTING)
    table = read_table(tmp_path / "setting_learned.parquet")
    assert (len(table), set(table["outcome"])) == (6, {"", "no power"})
    assert len(read_table(tmp_path / "setting_learned_runs.parquet")) == 2 * 3 * 3
    monkeypatch.setattr(setting_search, "is_learned", lambda language, accuracy: True)
    folder = open_run_folder(
        tmp_path / "setting_learned_runs", experiments.schedule_settings(QUICK_SETTING), command=""
    )
    again = setting_search.learned_experiment(folder, QUICK_SETTING)["setting_learned"]
    assert (
        again["outcome"].tolist() == compared(read_table(tmp_path / "setting_learned_runs.parquet"))["outcome"].tolist()
    )
    assert LEARNED_SETTING.search_seed not in LEARNED_SETTING.seeds


@pytest.mark.slow
def test_no_setting_near_enough_ends_the_experiment(tmp_path):
    far = replace(QUICK_SETTING, within=1.001)
    folder = open_run_folder(tmp_path / "runs", {**asdict(far)}, command="")
    assert list(setting_experiment(folder, far)) == ["setting_search"]


def test_a_setting_names_its_lengths():
    setting = Setting(depths=(8, 16), motif=16, printed=True, batch=(1, 2, 3))
    labels = list(map(setting.lengths_of, setting.languages))
    assert labels == ["depths 8 to 16", "motif 16", "as printed"]
    assert list(map(setting.batch_of, setting.languages)) == [1, 2, 3]
