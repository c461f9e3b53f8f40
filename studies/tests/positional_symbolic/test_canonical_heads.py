"""The canonical sweep: row by row as trained alone, resumed; what is kept of its heads, and how they behave."""

import shutil
from dataclasses import replace
from itertools import combinations, pairwise, product

import joblib
import numpy as np
import pandas as pd
import pytest
import tlspectral_studies.positional_symbolic.canonical.state as state_module
import tlspectral_studies.positional_symbolic.canonical.sweep as sweep_module
import torch
from canonical_preset import SHORT
from tlspectral_studies.positional_symbolic.canonical import (
    CanonicalHeads,
    CanonicalRun,
    accuracy_by_position,
    angle_unit,
    answer_shape,
    canonical_sweep,
    head_behaviour,
    query_key_trajectories,
    saved_heads,
    train_canonical,
)
from tlspectral_studies.positional_symbolic.canonical.sweep import most_frequent_share
from tlspectral_studies.positional_symbolic.canonical.trainer import validation_prompts
from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalTask
from zoo import generator

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.positional import exclusion_split
from tlspectral.positional.scores import swap_scores

pytestmark = pytest.mark.long

ANGLES = (0.0, 0.3, 2.0)


def swept(*args, angles=ANGLES, **kwargs):
    return canonical_sweep(*args, **{"preset": SHORT, "angles": angles, "seeds": 2, **kwargs})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep") / "runs"


@pytest.fixture(scope="module")
def sweep(folder):
    return swept(folder=folder)


@pytest.mark.slow
def test_a_sweep_has_one_row_per_head(sweep):
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
def test_index_needs_a_high_frequency_and_retrieval_a_low_one(full):
    """The tension of PS Figure 2A at three angles, under the quick preset; every seed has to show it."""
    sweep = canonical_sweep(("index", "retrieval"), angles=(0.0, 0.5, 2.0), seeds=2 if full else 1)
    learned = {key: rows["accuracy"] for key, rows in sweep.accuracy.groupby(["task", "angle"])}
    assert learned["retrieval", 0.0].min() > 0.9 > 0.3 > learned["retrieval", 2.0].max()
    assert learned["index", 2.0].min() > 0.8 > 0.25 > learned["index", 0.0].max()
    for task, angles in (("retrieval", (0.0, 0.5, 2.0)), ("index", (2.0, 0.5))):
        for better, worse in pairwise(angles):
            assert learned[task, better].min() > learned[task, worse].max()
    assert learned["index", 0.5].mean() > learned["index", 0.0].max()


# --- how heads behave ---

TASK = CanonicalTask("retrieval", length=6, n_symbols=3, n_integers=4)
RUNS = [CanonicalRun((0.0, 0.4), 0), CanonicalRun((0.0, 2.0), 1)]
WEIGHTS = ("W_E", "W_V", "W_U", "W_Q", "W_K")


def enlarged(task=TASK, runs=RUNS):
    """Heads with logits of size 3; as initialised they are near 0, and all scores near 1."""
    heads = CanonicalHeads(task, runs, d_model=8)
    with torch.no_grad():
        heads.W_Q *= 4
        heads.W_K *= 4
    return heads


@torch.no_grad()
def written_out(heads, run, batch):
    """Exclusion index, s_pos and s_sym by the definitions: contexts permuted, the model's own attention read."""
    model = heads.double()
    angles = model.offsets[:, None] * model.fixed_frequencies[:, None]
    model.cos, model.sin = angles.cos(), angles.sin()
    q, k = model.W_E @ model.W_Q, model.W_E @ model.W_K

    def logits(context, query):
        tokens = torch.cat([context, query[None]])
        return model._scores(q[:, query][:, None], k[:, tokens][:, None])[run, 0]

    rows = []
    for context, query in zip(batch.context, batch.query, strict=True):
        n = len(context)
        table = torch.empty(n, n, dtype=torch.float64)
        for shift in range(n):
            moved = logits(context.roll(shift), query)[:n]
            table[(torch.arange(n) - shift) % n, torch.arange(n)] = moved
        before, after = [], []
        for i, j in combinations(range(n), 2):
            swapped = context.clone()
            swapped[[i, j]] = context[[j, i]]
            before.append(logits(context, query).softmax(-1)[[i, j]])
            after.append(logits(swapped, query).softmax(-1)[[i, j]])
        scores, index = swap_scores(torch.stack(before), torch.stack(after)), exclusion_split(table)
        rows.append([*map(float, (scores.s_pos, scores.s_sym, index.index, index.variance.sqrt()))])
    return np.mean(rows, axis=0)


def test_behaviour_is_that_of_permuted_prompts():
    batch = TASK.sample(5, generator(3))
    found = head_behaviour(enlarged(), batch)
    columns = ["s_pos", "s_sym", "exclusion_index", "logit_std"]
    for run in range(2):
        # float64 by two routes: measured 4e-16; s_pos of the two runs differ by .1 and more.
        expected = written_out(enlarged(), run, batch)
        np.testing.assert_allclose(found.loc[run, columns].astype(float), expected, rtol=0, atol=1e-12)
    assert abs(found["s_pos"].diff().iloc[1]) > 0.01


def test_a_head_without_positions_is_symbolic_and_one_without_contents_positional():
    batch = TASK.sample(5, generator(3))
    heads = enlarged(runs=[CanonicalRun((0.0,), 0), CanonicalRun((0.5,), 0)])
    still, turning = head_behaviour(heads, batch)["exclusion_index"]
    assert still == 0 < 0.1 < turning < 0.9  # equal places give exactly 0
    with torch.no_grad():
        heads.W_E[1, : TASK.n_pairs] = heads.W_E[1, 0]  # pairs that cannot be told apart
    assert head_behaviour(heads, batch)["exclusion_index"].iloc[1] == 1


def test_the_share_of_the_most_frequent_answer():
    tasks = {name: CanonicalTask(name) for name in ("index", "retrieval")}
    shares = {name: most_frequent_share(task, validation_prompts(task, SHORT)) for name, task in tasks.items()}
    # Largest of 32 draws from 16 and from 32 classes, over 32: .1513 and .1104 by 10^6 draws; error of 500 is .001.
    assert shares == pytest.approx({"index": 0.151, "retrieval": 0.110}, abs=0.005)


# --- a training that is stopped ---


class Stopped(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(("learned", "fixed_set"), [(False, None), (True, 40)])
def test_a_training_that_was_stopped_becomes_what_it_would_have_become(tmp_path, monkeypatch, learned, fixed_set):
    monkeypatch.setattr(state_module, "_SECONDS_BETWEEN_FILES", 0.0)
    schedule = replace(SHORT, training_samples=fixed_set)
    settings = {"learn_frequencies": learned, "measured": TASK.sample(50, generator(1))}
    whole = train_canonical(TASK, RUNS, schedule, **settings)

    def stop(step, heads):
        if step == 10:
            raise Stopped

    file = tmp_path / "deeper" / "state.safetensors"
    with pytest.raises(Stopped):
        train_canonical(TASK, RUNS, schedule, state=file, observe=stop, **settings)
    steps = []
    again = train_canonical(TASK, RUNS, schedule, state=file, observe=lambda step, _: steps.append(step), **settings)
    assert steps == [10, 12]  # nothing is done twice
    finished = train_canonical(TASK, RUNS, schedule, state=file, **settings)
    for other in (again, finished):
        for name in WEIGHTS:
            assert torch.equal(getattr(whole.model, name), getattr(other.model, name))
        for table in ("history", "frequencies", "progress"):
            pd.testing.assert_frame_equal(getattr(whole, table), getattr(other, table), check_exact=True)
    kept = saved_heads(file)
    assert kept.runs == whole.model.runs
    assert torch.equal(kept.frequencies, whole.model.frequencies)
    assert torch.equal(kept.W_Q, whole.model.W_Q)
    with pytest.raises(IncompatibleCheckpoint, match="another training"):
        train_canonical(TASK, RUNS, replace(schedule, steps=13), state=file, **settings)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(IncompatibleCheckpoint, match="first step"):
        train_canonical(TASK, RUNS, schedule, state=file, **settings)


def test_a_job_that_is_behind_does_not_replace_what_another_has_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "_SECONDS_BETWEEN_FILES", 0.0)
    file, whole = tmp_path / "state.safetensors", []

    def other_finishes(step, heads):
        if step == 5:
            whole.append(train_canonical(TASK, RUNS, SHORT, state=file))
        if step == 10:  # killed, after it has saved that step
            raise Stopped

    with pytest.raises(Stopped):
        train_canonical(TASK, RUNS, SHORT, state=file, observe=other_finishes)
    assert torch.equal(saved_heads(file).W_Q, whole[0].model.W_Q)


def test_progress_counts_the_right_answers_of_every_logged_step():
    prompts = TASK.sample(50, generator(1))
    counts = {}

    def observe(step, heads):
        counts[step] = accuracy_by_position(heads, prompts)["correct"].tolist()

    training = train_canonical(TASK, RUNS, SHORT, measured=prompts, observe=observe)
    assert list(counts) == [0, 5, 10, 12]
    for step, expected in counts.items():
        rows = training.progress[training.progress["step"] == step]
        assert rows["correct"].tolist() == expected
        assert rows["n"].tolist() == torch.bincount(prompts.answer_position, minlength=6).tolist() * 2
    assert train_canonical(TASK, RUNS, SHORT).progress is None


def test_ends_against_the_middle():
    rows = []
    for (seed, extra), position in product(enumerate((0, 2, 4)), range(8)):
        n, share = 10 * (1 + position), 0.5 + (0.1 * extra if position in (0, 1, 6, 7) else 0.0)
        rows.append(("index", 1, 0.5, seed, position, n, round(n * share)))
    table = pd.DataFrame(rows, columns=["task", "n_frequencies", "angle", "seed", "position", "n", "correct"])
    found = answer_shape(table, edge=2)
    # Differences 0, .2 and .4: mean .2, standard error .2 / sqrt 3, t of two degrees of freedom 4.303.
    assert found[["mean", "low", "high"]].iloc[0].tolist() == pytest.approx([0.2, -0.2968, 0.6968], abs=1e-4)
    assert found["n"].tolist() == [3]
