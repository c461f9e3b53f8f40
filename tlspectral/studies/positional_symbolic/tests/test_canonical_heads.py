"""The canonical sweep and its trajectories: row by row as trained alone, resumed, and what the heads learn."""

import shutil
from dataclasses import replace
from itertools import pairwise

import joblib
import numpy as np
import pandas as pd
import pytest
from canonical_preset import SHORT

import tlspectral.studies.positional_symbolic.canonical.sweep as sweep_module
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.studies.positional_symbolic.canonical import (
    CanonicalHeads,
    CanonicalRun,
    accuracy_by_position,
    angle_unit,
    canonical_sweep,
    query_key_trajectories,
    saved_heads,
    train_canonical,
)
from tlspectral.studies.positional_symbolic.canonical.trainer import validation_prompts
from tlspectral.studies.positional_symbolic.canonical_tasks import CanonicalTask

ANGLES = (0.0, 0.3, 2.0)


def swept(*args, angles=ANGLES, **kwargs):
    return canonical_sweep(*args, **{"preset": SHORT, "angles": angles, "seeds": 2, **kwargs})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep") / "runs"


@pytest.fixture(scope="module")
def sweep(folder):
    return swept(folder=folder)


def test_a_sweep_has_one_row_per_head(sweep):
    arms = [("index", 1), ("retrieval", 1), ("partial_induction", 1), ("partial_induction", 2)]
    arms = [("index", 1), ("retrieval", 1), ("partial_induction", 1), ("partial_induction", 2)]
    expected = [(*arm, angle, seed) for arm in arms for angle in ANGLES for seed in range(2)]
    columns = ["task", "n_frequencies", "angle", "seed"]
    accuracy, by_position = sweep.accuracy, sweep.by_position
    assert list(accuracy[columns].itertuples(index=False, name=None)) == expected
    assert accuracy["theta"].to_numpy() == pytest.approx(accuracy["angle"].to_numpy() * np.pi / 33)
    assert accuracy["chance"].tolist() == [1 / 16] * 6 + [1 / 32] * 18
    assert set(accuracy["n"]) == {500}
    pooled = by_position.groupby(columns, sort=False)[["correct", "n"]].sum()
    assert (pooled["correct"] / pooled["n"]).tolist() == accuracy["accuracy"].tolist()
    assert by_position["position"].tolist() == list(range(32)) * 24
    assert (by_position["accuracy"].isna() == (by_position["n"] == 0)).all()
    assert accuracy.attrs["schedule"]["steps"] == 12
    assert sweep.progress["step"].unique().tolist() == [0, 5, 10, 12]
    last = sweep.progress[sweep.progress["step"] == 12]
    assert last["correct"].tolist() == by_position["correct"].tolist()  # 500 prompts, all of them
    assert not accuracy.query("angle == 0 and n_frequencies == 1")["exclusion_index"].any()


def test_each_row_is_the_head_of_its_angle_and_seed_which_is_kept(sweep, folder):
    for name, count in [("index", 1), ("partial_induction", 2)]:
        task = CanonicalTask(name)
        run = CanonicalRun((0.0,) * (count - 1) + (2.0 * angle_unit(task),), 1)
        prompts = validation_prompts(task, SHORT)
        counts = accuracy_by_position(train_canonical(task, [run], SHORT).model, prompts)["correct"]
        rows = sweep.by_position.query("task == @name and n_frequencies == @count and angle == 2.0 and seed == 1")
        assert rows["correct"].tolist() == counts.tolist()
        kept = saved_heads(folder / "weights" / f"{name}_{count}f_seed001.safetensors")
        assert kept.runs[-1] == run
        assert accuracy_by_position(kept, prompts)["correct"].tolist()[-32:] == counts.tolist()


def test_a_sweep_trains_what_its_folder_lacks(sweep, folder, tmp_path, monkeypatch, capfd):
    train, trained = sweep_module.train_canonical, []

    def counted(task, runs, *args, **kwargs):
        trained.append((task.name, len(runs[0].frequencies), runs[0].seed))
        return train(task, runs, *args, **kwargs)

    monkeypatch.setattr(sweep_module, "train_canonical", counted)
    again = shutil.copytree(folder, tmp_path / "again")
    for stack in ("retrieval_1f_seed001", "partial_induction_2f_seed000"):
        (again / f"{stack}.parquet").unlink()
        (again / "weights" / f"{stack}.safetensors").unlink()
    with joblib.parallel_config(backend="threading"):
        continued = swept(folder=again, n_jobs=2)
    assert sorted(trained) == [("partial_induction", 2, 0), ("retrieval", 1, 1)]
    for name in ("accuracy", "by_position", "progress"):
        one, other = getattr(continued, name), getattr(sweep, name)
        pd.testing.assert_frame_equal(one, other, check_exact=True)
        assert one.attrs == other.attrs
    assert capfd.readouterr() == ("", "")
    # A third seed, or some tasks in another order, need nothing anew of what is there.
    more = swept(("retrieval", "index"), seeds=3, folder=again, angles=ANGLES[::-1])
    assert trained[2:] == [("retrieval", 1, 2), ("index", 1, 2)]
    assert more.accuracy["task"].unique().tolist() == ["retrieval", "index"]
    kept, expected = (
        table.query("seed < 2 and task == 'retrieval'").reset_index(drop=True)
        for table in (more.accuracy, sweep.accuracy)
    )
    pd.testing.assert_frame_equal(kept, expected, check_exact=True)


@pytest.mark.parametrize("change", [{"angles": (0.0,)}, {"preset": replace(SHORT, steps=13)}])
def test_a_folder_of_another_sweep_is_refused(sweep, folder, change):
    with pytest.raises(IncompatibleCheckpoint, match=r"angles|schedule"):
        swept(folder=folder, **change)


def test_trajectories_are_the_queries_and_keys_of_the_heads():
    table = query_key_trajectories((2.0, 0.5), preset=SHORT, seed=3)
    task = CanonicalTask("index")
    assert len(table) == 2 * 4 * (32 + 512)
    assert table["step"].unique().tolist() == [0, 5, 10, 12]
    runs = [CanonicalRun((angle * angle_unit(task),), 3) for angle in (0.5, 2.0)]
    for step, model in [(0, CanonicalHeads(task, runs)), (12, train_canonical(task, runs, SHORT).model)]:
        for run, angle in enumerate((0.5, 2.0)):
            now = table[(table["angle"] == angle) & (table["step"] == step)]
            for kind, weights, first in (("query", model.W_Q, 512), ("key", model.W_K, 0)):
                rows = now[now["kind"] == kind]
                places = (model.W_E[run] @ weights[run]).detach()[first : first + len(rows)]
                # Measured: 5e-7, products of other shapes in float32; neighbours differ by 1.
                assert rows[["x", "y"]].to_numpy() == pytest.approx(places.numpy(), abs=1e-5)
                label = rows["token"] - 512 if kind == "query" else rows["token"] // 32
                assert (rows["label"] == label).all()


@pytest.mark.slow
def test_index_needs_a_high_frequency_and_retrieval_a_low_one():
    """The tension of PS Figure 2A at three angles, under the quick preset; each of the two seeds has to show it."""
    sweep = canonical_sweep(("index", "retrieval"), angles=(0.0, 0.5, 2.0), seeds=2)
    learned = {key: rows["accuracy"] for key, rows in sweep.accuracy.groupby(["task", "angle"])}
    assert learned["retrieval", 0.0].min() > 0.9 > 0.3 > learned["retrieval", 2.0].max()
    assert learned["index", 2.0].min() > 0.8 > 0.25 > learned["index", 0.0].max()
    for task, angles in (("retrieval", (0.0, 0.5, 2.0)), ("index", (2.0, 0.5))):
        for better, worse in pairwise(angles):
            assert learned[task, better].min() > learned[task, worse].max()
    assert learned["index", 0.5].mean() > learned["index", 0.0].max()
