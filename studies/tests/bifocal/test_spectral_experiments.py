"""Folders and experiments of Spectral Evolution: continued, compared on the same data, run by the command."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
from spectral_arms import LANGUAGE
from stand_in_device import DEVICE, SECOND_DEVICE, StandInDevice
from tlspectral_studies.bifocal import experiments, language_runs, schedule
from tlspectral_studies.bifocal.depth_manifold import depth_manifold
from tlspectral_studies.bifocal.formal_languages import BioRotation, Dyck3
from tlspectral_studies.bifocal.language_runs import LanguageRun
from tlspectral_studies.bifocal.llama import ARMS
from tlspectral_studies.bifocal.schedule import LanguagePlan, LanguageSchedule
from tlspectral_studies.common.run_folder import finish_runs, open_run_folder
from typer.testing import CliRunner

from tlspectral.cli import app
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables import read_table
from tlspectral.tables.schema import known_schemas

PLAN = LanguagePlan(LANGUAGE, 4, 8, tuple(Dyck3((depth, depth)) for depth in (3, 5)), 4, 4)
TINY = LanguageSchedule((PLAN,), steps=3, rates=(1e-3, 1e-2), seeds=(0, 1), warmup_steps=1, log_every=2)


def test_a_run_of_several_tables_is_one_file_and_made_once(tmp_path):
    folder = open_run_folder(tmp_path / "runs", {"a": [1, 2]}, command="x")
    tables = {
        "empty": pd.DataFrame(columns=["step", "omega"]).astype({"step": "int64", "omega": "float64"}),
        "full": pd.DataFrame({"step": [1, 2], "loss": [0.5, math.nan], "name": ["a", "b"]}),
        "other": pd.DataFrame({"step": [7], "layer": [3]}),
    }
    for make in (lambda: tables, lambda: {}):  # made, then read
        found = finish_runs(folder, {"one": (4, make)})["one"]
        assert list(found) == list(tables)
        for name, table in tables.items():
            pd.testing.assert_frame_equal(found[name], table)
    attrs = read_table(folder.parts.path / "one.parquet").attrs
    assert (attrs["command"], attrs["seed"], attrs["run"]) == ("x", 4, "one")
    assert set(attrs["versions"]) == {"tlspectral", "python", "torch"}


def test_a_folder_of_other_settings_versions_or_devices_is_refused(tmp_path):
    path = tmp_path / "runs"
    open_run_folder(path, {"a": 1}, command="")
    with pytest.raises(IncompatibleCheckpoint, match="made with other settings"):
        open_run_folder(path, {"a": 2}, command="")
    with StandInDevice():
        with pytest.raises(IncompatibleCheckpoint):
            open_run_folder(path, {"a": 1}, command="", device=DEVICE)
        open_run_folder(tmp_path / "there", {"a": 1}, command="", device=SECOND_DEVICE)
        assert open_run_folder(tmp_path / "there", {"a": 1}, command="", device=DEVICE).device == DEVICE
    with pytest.raises(ValueError, match="device='abacus' cannot be used here"):
        open_run_folder(tmp_path / "others", {"a": 1}, command="", device="abacus")
    manifest = path / "settings.json"
    stored = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**stored, "versions": {"torch": "0.1"}}))
    with pytest.raises(IncompatibleCheckpoint, match="other versions"):
        open_run_folder(path, {"a": 1}, command="")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("finished")
    experiments.run_experiment("languages", output, languages=TINY, command="once")
    return output


@pytest.fixture
def trained(monkeypatch):
    """Names of the runs that are trained during a test."""
    names, real = [], language_runs.train_on_language

    def recorded(run, schedule, device):
        names.append(run.name)
        return real(run, schedule, device)

    monkeypatch.setattr(language_runs, "train_on_language", recorded)
    return names


@pytest.mark.slow
def test_table1_compares_all_arms_on_the_same_data(finished):
    runs, table, rates, losses = (
        read_table(finished / f"{name}.parquet") for name in ("table1_runs", "table1", "learning_rates", "losses")
    )
    assert (table["arm"].tolist(), len(runs), set(rates["seed"])) == (list(ARMS), 10, {100})
    assert rates.groupby(["language", "arm"])["chosen"].agg(list).map(sorted).tolist() == [[False, True]] * 5
    # The same weights and the same first batch: the first loss is that of the standard arm, to the bit.
    first = losses[losses["step"] == 1].groupby(["language", "seed"])["loss"]
    assert (first.nunique() == 1).all()
    assert first.first().nunique() == 2


@pytest.mark.slow
def test_an_interrupted_experiment_trains_what_is_missing_and_ends_with_the_same_files(finished, trained, tmp_path):
    again = shutil.copytree(finished, tmp_path / "again")
    missing = sorted((again / "language_runs").glob("*-placebo-*.parquet"))
    for path in [*missing, *again.glob("*.parquet")]:
        path.unlink()
    experiments.run_experiment("languages", again, languages=TINY, command="once")
    assert sorted(trained) == [path.stem for path in missing]
    assert len(missing) == 4
    for path in finished.rglob("*.*"):
        assert path.read_bytes() == (again / path.relative_to(finished)).read_bytes(), path


@pytest.mark.slow
def test_other_experiments_read_the_runs_of_table1(finished, trained, tmp_path):
    """They train what is new, the noisy arms and the control, and nothing again."""
    output = shutil.copytree(finished, tmp_path / "others")
    experiments.run_experiment("structure-gap", output, languages=TINY)
    assert not trained
    gap = read_table(output / "structure_gap.parquet")
    assert gap["size"].tolist() == [3, 5] * 5
    assert gap["trained"].tolist() == [True, False] * 5
    experiments.run_experiment("resonance", output, languages=TINY)
    assert len(trained) == 2 * 2
    assert all("full_noise" in name for name in trained)
    gains = read_table(output / "resonance_runs.parquet")
    assert not gains.loc[gains["arm"] == "placebo", "gain"].any()
    assert (gains.loc[(gains["arm"] == "omega") & (gains["pairs"] == "turning"), "gain"] != 0).any()
    drift = read_table(output / "phase_drift_runs.parquet")
    shared = drift[drift["arm"] == "full_noise_shared"]
    # Near a thousandth: 8e-4 is the mean of |N(0, 1e-3)|; without noise it is 0.
    assert 3e-4 < shared["start_abs"].mean() < 1.5e-3
    # The tables over training end where those of the last step stand.
    for steps, last, by, column in (
        ("phase_steps", drift, ["arm"], "mean_abs"),
        ("resonance_steps", gains.rename(columns={"end": "resonance"}), ["arm", "pairs"], "resonance"),
    ):
        table = read_table(output / f"{steps}.parquet")
        found = table[table["step"] == table["step"].max()].set_index(by)[column].sort_index()
        pd.testing.assert_series_equal(found, last.groupby(by)[column].mean().sort_index())

    experiments.run_experiment("manifold", output, languages=TINY)
    manifold = read_table(output / "manifold.parquet")
    assert manifold["arm"].unique().tolist() == list(ARMS)
    # Trained again from its run: the models of a seed differ, so their arms do.
    assert manifold.groupby("arm")["between"].first().nunique() == 5

    trained.clear()
    command = "tlspectral study learn memorisation --quick"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "QUICK", TINY)
        done = CliRunner().invoke(app, [*command.split()[1:], "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert len(trained) == 5
    assert all(name.startswith("memorise-") for name in trained)
    table = read_table(output / "memorisation.parquet")
    assert (table["arm"].tolist(), table.attrs["command"]) == (list(ARMS), command)

    written = [read_table(path) for path in output.glob("*.parquet")]
    made_by = [f"study learn {name} " for name in experiments.LANGUAGE_EXPERIMENTS]
    wanted = {name for name, table in known_schemas().items() if any(one in table.made_by for one in made_by)}
    assert {table.attrs["table"] for table in written} == wanted


def test_memorisation_sees_the_same_sequences_again():
    frozen = replace(TINY, rates=(0.0,), steps=3)
    fixed, fresh = (
        language_runs.train_on_language(LanguageRun("dyck3", "standard", 0.0, 0, memorise=memorise), frozen)
        for memorise in (True, False)
    )
    assert fixed["losses"]["loss"].nunique() == 1
    assert fresh["losses"]["loss"].nunique() == 3


@pytest.mark.slow
def test_held_out_sequences_are_fresh(monkeypatch):
    """Training, held-out and tuning data of a bio language, where two equal draws are impossible, share no row."""
    plan = LanguagePlan(BioRotation((20, 30)), 8, 8, (), 0, 4)
    seen, sample = [], BioRotation.sample

    def recorded(self, n_sequences, stream):
        batch = sample(self, n_sequences, stream)
        seen.extend(map(tuple, batch.tokens.tolist()))
        return batch

    monkeypatch.setattr(BioRotation, "sample", recorded)
    for seed in (0, 1, 100):
        run = LanguageRun("bio_rotation", "standard", 1e-3, seed)
        language_runs.train_on_language(run, LanguageSchedule((plan,), steps=2))
    assert len(seen) == len(set(seen)) == 3 * (2 * 8 + 8)


def test_the_command_refuses_what_is_no_experiment(tmp_path):
    refused = CliRunner().invoke(app, ["study", "learn", "figure9", "-o", str(tmp_path)])
    assert refused.exit_code == 2
    assert "'figure9' is no experiment" in refused.output


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["standard", pytest.param("bifocal", marks=pytest.mark.slow)])
def test_a_run_on_another_device_gives_the_same_tables(arm, device):
    tiny, run = replace(TINY, steps=2), LanguageRun("dyck3", arm, 1e-3, 0)
    here, there = (language_runs.trained_model(run, tiny, *where) for where in ((), (device,)))
    assert str(there[0].unembed.weight.device) == device
    assert here[1].keys() == there[1].keys()
    # The CPU fuses its attention, the stand-in does not: measured 2e-7 in losses, 5e-6 in outputs of size 0.8. Other
    # data or weights move losses by a hundredth.
    near = partial(pd.testing.assert_frame_equal, rtol=1e-4, atol=1e-4)
    for name, table in here[1].items():
        near(table, there[1][name])
    near(*(depth_manifold(model, depth=4, n_words=8) for model, _ in (here, there)))
