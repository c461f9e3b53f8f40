"""The canonical sweep and its trajectories: row by row as trained alone, resumed, and what the heads learn."""

from dataclasses import replace

import joblib
import numpy as np
import pandas as pd
import pytest
from canonical_preset import SHORT
from described import assert_described

import tlspectral.studies.positional_symbolic.canonical.sweep as sweep_module
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.studies.positional_symbolic.canonical import (
    BASE_ANGLES,
    CanonicalHeads,
    CanonicalRun,
    accuracy_by_position,
    angle_unit,
    canonical_sweep,
    query_key_trajectories,
    train_canonical,
)
from tlspectral.studies.positional_symbolic.canonical.trainer import validation_prompts
from tlspectral.studies.positional_symbolic.canonical_tasks import CanonicalTask

ANGLES = (0.0, 0.3, 2.0)


def swept(*args, angles=ANGLES, **kwargs):
    return canonical_sweep(*args, **{"preset": SHORT, "angles": angles, "seeds": 2, "show_progress": False, **kwargs})


@pytest.fixture(scope="module")
def sweep():
    return swept()


def same(one, two):
    pd.testing.assert_frame_equal(one.accuracy, two.accuracy, check_exact=True)
    pd.testing.assert_frame_equal(one.by_position, two.by_position, check_exact=True)
    assert one.accuracy.attrs == two.accuracy.attrs
    assert one.by_position.attrs == two.by_position.attrs


def test_a_sweep_has_one_row_per_head(sweep):
    arms = [("index", 1), ("retrieval", 1), ("partial_induction", 1), ("partial_induction", 2)]
    expected = [(*arm, angle, seed) for arm in arms for angle in ANGLES for seed in range(2)]
    columns = ["task", "n_frequencies", "angle", "seed"]
    assert list(sweep.accuracy[columns].itertuples(index=False, name=None)) == expected
    assert_described(sweep.accuracy)
    assert_described(sweep.by_position)
    assert sweep.accuracy["theta"].to_numpy() == pytest.approx(sweep.accuracy["angle"].to_numpy() * np.pi / 33)
    assert sweep.accuracy["chance"].tolist() == [1 / 16] * 6 + [1 / 32] * 18
    assert set(sweep.accuracy["n"]) == {500}
    pooled = sweep.by_position.groupby(columns, sort=False)[["correct", "n"]].sum()
    assert (pooled["correct"] / pooled["n"]).tolist() == sweep.accuracy["accuracy"].tolist()
    assert sweep.by_position["position"].tolist() == list(range(32)) * 24
    empty = sweep.by_position["accuracy"].isna()
    first = (sweep.by_position["task"] == "partial_induction") & (sweep.by_position["position"] == 0)
    assert (empty == (sweep.by_position["n"] == 0)).all()
    assert empty[first].all()
    assert sweep.accuracy.attrs["schedule"]["steps"] == 12


def test_each_row_is_the_head_of_its_angle_and_seed(sweep):
    for arm in [("index", 1), ("partial_induction", 2)]:
        task = CanonicalTask(arm[0])
        run = CanonicalRun((0.0,) * (arm[1] - 1) + (2.0 * angle_unit(task),), 1)
        counts = accuracy_by_position(train_canonical(task, [run], SHORT).model, validation_prompts(task, SHORT))
        rows = sweep.by_position.query("task == @arm[0] and n_frequencies == @arm[1] and angle == 2.0 and seed == 1")
        assert rows["correct"].tolist() == counts["correct"].tolist()
    assert angle_unit(CanonicalTask("index")) == pytest.approx(np.pi / 33)


@pytest.mark.parametrize("finished", [0, 3])
def test_a_sweep_that_was_stopped_continues(sweep, tmp_path, monkeypatch, finished):
    train, trained = sweep_module.train_canonical, []

    def until(limit):
        def counted(task, runs, *args, **kwargs):
            if len(trained) == limit:
                raise KeyboardInterrupt
            trained.append((task.name, len(runs[0].frequencies), runs[0].seed))
            return train(task, runs, *args, **kwargs)

        return counted

    monkeypatch.setattr(sweep_module, "train_canonical", until(finished))
    with pytest.raises(KeyboardInterrupt):
        swept(checkpoint_dir=tmp_path / "out")
    monkeypatch.setattr(sweep_module, "train_canonical", until(-1))
    same(swept(checkpoint_dir=tmp_path / "out"), sweep)
    assert len(trained) == len(set(trained)) == 8
    same(swept(checkpoint_dir=tmp_path / "out"), sweep)
    assert len(trained) == 8
    # A third seed, or one task of them, needs nothing anew of what is there.
    more = swept(checkpoint_dir=tmp_path / "out", seeds=3)
    assert len(trained) == 12
    kept = more.accuracy[more.accuracy["seed"] < 2].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, sweep.accuracy, check_exact=True)
    swept(("retrieval",), checkpoint_dir=tmp_path / "out")
    assert len(trained) == 12


@pytest.mark.parametrize("change", [{"angles": (0.0,)}, {"preset": replace(SHORT, steps=13)}])
def test_a_folder_of_another_sweep_is_refused(tmp_path, change):
    swept(("index",), seeds=1, checkpoint_dir=tmp_path)
    with pytest.raises(IncompatibleCheckpoint, match=r"angles|schedule"):
        swept(("index",), seeds=1, checkpoint_dir=tmp_path, **change)


def test_workers_give_the_same_tables(sweep, tmp_path):
    with joblib.parallel_config(backend="threading"):
        same(swept(n_jobs=2, checkpoint_dir=tmp_path), sweep)
    assert len(list(tmp_path.glob("*.parquet"))) == 8


def test_tasks_come_in_the_order_given_and_angles_sorted(sweep, tmp_path):
    some = swept(("retrieval", "index"), angles=(2.0, 0.0), checkpoint_dir=tmp_path)
    same(swept(("retrieval", "index"), angles=(0.0, 2.0), checkpoint_dir=tmp_path), some)
    assert some.accuracy["task"].unique().tolist() == ["retrieval", "index"]
    assert some.accuracy["angle"].tolist() == [0.0, 0.0, 2.0, 2.0] * 2
    expected = sweep.accuracy.query("task == 'retrieval' and angle != 0.3")["accuracy"]
    assert some.accuracy["accuracy"].tolist()[:4] == expected.tolist()


def test_the_angles_are_those_of_the_paper():
    assert BASE_ANGLES == (0, 0.01, 0.1, 0.25, 0.4, 0.5, 0.8, 1, 1.5, 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tasks": ("induction",)}, "no canonical task"),
        ({"tasks": ("index", "index")}, "each once"),
        ({"angles": ()}, "at least one"),
        ({"seeds": 0}, "seeds=0"),
        ({"preset": "fast"}, "no preset"),
    ],
)
def test_an_impossible_sweep_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        swept(**wrong)


def test_bars_are_silent_unless_asked_for(capfd):
    swept(("index",), seeds=1, angles=(0.0,))
    assert capfd.readouterr() == ("", "")
    swept(("index",), seeds=1, angles=(0.0,), show_progress=True)
    assert "canonical sweep" in capfd.readouterr().err


# --- trajectories ---


def test_trajectories_are_the_queries_and_keys_of_the_heads():
    table = query_key_trajectories((2.0, 0.5), preset=SHORT, seed=3, show_progress=False)
    task = CanonicalTask("index")
    assert_described(table)
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


# --- what is learned ---


@pytest.fixture(scope="module")
def learned():
    """Accuracy by task and angle, three seeds each, under the quick preset."""
    sweep = canonical_sweep(("index", "retrieval"), angles=(0.0, 0.5, 2.0), show_progress=False)
    return {key: rows["accuracy"] for key, rows in sweep.accuracy.groupby(["task", "angle"])}


@pytest.mark.slow
def test_index_needs_a_high_frequency_and_retrieval_a_low_one(learned):
    """The tension of PS Figure 2A at three angles; every seed has to show it."""
    assert learned["retrieval", 0.0].min() > 0.9 > 0.3 > learned["retrieval", 2.0].max()
    assert learned["index", 2.0].min() > 0.8 > 0.25 > learned["index", 0.0].max()
    assert learned["retrieval", 0.0].min() > learned["retrieval", 0.5].max()
    assert learned["retrieval", 0.5].min() > learned["retrieval", 2.0].max()
    assert learned["index", 2.0].min() > learned["index", 0.5].max()
    assert learned["index", 0.5].mean() > learned["index", 0.0].max()
