"""Adaptation of a frozen model to code: files, rows, the runs and what they leave alone."""

import hashlib
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from tlspectral_studies.bifocal import code_adaptation
from tlspectral_studies.bifocal.code_text import code_rows, source_files
from tlspectral_studies.common.run_folder import open_run_folder

import tlspectral as tls
from tlspectral.tables.schema import known_schemas


class Letters:
    """A tokenizer of 32 tokens."""

    bos_token_id = 1

    def __call__(self, text, **_):
        return type("Encoding", (), {"input_ids": [ord(letter) % 32 for letter in text]})()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of 60 files, some too short."""
    folder = tmp_path / "toy_source_package"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    for number in range(60):
        place = folder / "inner" if number % 2 else folder
        place.joinpath(f"module{number}.py").write_text(f"value{number} = {number}\n" * (1 if number % 7 == 0 else 20))
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder.name


def test_files_are_split_by_their_path(package, tmp_path):
    split = source_files(package)
    train, held_out = ([path.relative_to(tmp_path).as_posix() for path in split[name]] for name in split)
    assert len(train) + len(held_out) == 61
    assert 1 <= len(held_out) <= 15
    for path in [*train, *held_out]:
        inside = path.removeprefix(f"{package}/")
        assert (int(hashlib.sha256(inside.encode()).hexdigest(), 16) % 10 == 0) == (path in held_out)


def test_rows_are_pieces_of_their_files(package):
    files = source_files(package)["train"]
    rows = code_rows(Letters(), files, 20, length=40, start_token=1, seed=3)
    assert rows.shape == (20, 40)
    assert set(rows[:, 0].tolist()) == {1}
    long_enough = [path for path in files if len(path.read_text()) >= 39]
    starts = set()
    for row, path in zip(rows, long_enough, strict=False):
        ids = Letters()(path.read_text()).input_ids
        found = [start for start in range(len(ids) - 38) if ids[start : start + 39] == row[1:].tolist()]
        assert found
        starts.add(found[0])
    assert len(starts) > 3
    with pytest.raises(ValueError, match="ask for fewer or shorter rows"):
        code_rows(Letters(), files, 1000, length=40, start_token=1)


def described(found):
    for name, frame in found.items():
        assert len(known_schemas()[f"experiments.{name}"].frame(frame))


@pytest.fixture
def model():
    """A model with a tokenizer, which must be afterwards what it was."""
    model = tls.load_model("tiny-rope")
    model.tokenizer = Letters()
    before = {name: (value.detach().clone(), value.requires_grad) for name, value in model.named_parameters()}
    yield model
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name][0])
        assert value.requires_grad == before[name][1]
        assert value.grad is None


@pytest.mark.slow
def test_a_frozen_model_adapts_and_is_left_as_it_was(model, package, tmp_path):
    schedule = code_adaptation.CodeSchedule(
        package=package, steps=4, batch_size=4, length=24, train_files=16, held_out=3, evaluate_every=2,
        learning_rate=0.03, warmup_steps=1, log_every=3,
    )  # fmt: skip
    folder = open_run_folder(tmp_path / "runs", asdict(schedule), command="")
    found = code_adaptation.code_experiment(folder, schedule, load=lambda _: model)
    described(found)
    losses = found["code_losses"]
    assert losses["step"].tolist() == [0, 2, 4] * 3
    start = losses[losses["step"] == 0]
    assert start["loss"].nunique() == 1
    rows = code_rows(Letters(), source_files(package)["held_out"], 3, length=24, start_token=1, seed=0)
    # Measured: 1e-8, the same losses by another route in float32.
    assert start["loss"].iloc[0] == pytest.approx(tls.tasks.language_loss(model, rows).value, abs=1e-5)
    movement = found["code_movement"].groupby("arm")[["log_ratio", "gain", "phase"]].agg(lambda x: x.abs().max())
    assert movement["log_ratio"]["placebo"] == 0.0
    assert movement["log_ratio"]["omega"] > 0.001
    assert movement["phase"]["full"] > 0.01
    effects = found["code_effects"].set_index(["arm", "reference"])["value"]
    ends = losses[losses["step"] == 4].set_index("arm")["loss"]
    assert effects["full", "intact"] == pytest.approx(ends["full"] - start["loss"].iloc[0], abs=1e-12)  # rounding
    assert effects["full", "placebo"] == pytest.approx(ends["full"] - ends["placebo"], abs=1e-12)
    # Four steps on the same kind of text: measured -0.037; a step in the wrong direction raises the loss.
    assert effects["full", "intact"] < -0.01
    row = found["code_by_frequency"].query("arm == 'full' and frequency == 3").iloc[0]
    full = found["code_movement"].query("arm == 'full' and frequency == 3")
    assert row["log_ratio_abs"] == pytest.approx(full["log_ratio"].abs().mean())
    assert row["log_gain_abs"] == pytest.approx(np.log(full["gain"]).abs().mean())
    assert row["wavelength"] == pytest.approx(2 * math.pi / full["omega_start"].iloc[0])
    np.testing.assert_allclose(full["log_ratio"], np.log(full["omega"] / full["omega_start"]))


@pytest.mark.slow
def test_weights_train_too_in_a_copy(model, package, tmp_path):
    schedule = replace(
        code_adaptation.QUICK_BACKBONE, package=package, steps=2, batch_size=4, length=24, train_files=8,
        learning_rate=1e-3,
    )  # fmt: skip
    folder = open_run_folder(tmp_path / "runs", asdict(schedule), command="")
    found = code_adaptation.fine_tuning(folder, schedule, load=lambda _: model)
    described(found)
    effects = found["backbone_effects"].set_index(["arm", "reference"])["value"]
    # Two steps of all weights on the same kind of text: they fall.
    assert effects["standard", "intact"] < -0.01
    assert effects["full", "standard"] == pytest.approx(effects["full", "intact"] - effects["standard", "intact"])
    assert effects["full", "standard"] != 0.0
