"""What is kept of trained heads: weights, a training that goes on where it stopped, and how the heads behave."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pandas as pd
import pytest
import torch
from canonical_preset import SHORT

import tlspectral.studies.positional_symbolic.canonical.state as state_module
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.positional import exclusion_split
from tlspectral.studies.positional_symbolic.canonical import (
    CanonicalHeads,
    CanonicalRun,
    accuracy_by_position,
    answer_shape,
    head_behaviour,
    saved_heads,
    train_canonical,
)
from tlspectral.studies.positional_symbolic.canonical.sweep import most_frequent_share
from tlspectral.studies.positional_symbolic.canonical.trainer import validation_prompts
from tlspectral.studies.positional_symbolic.canonical_tasks import CanonicalTask

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
        d = logits(context, query).softmax(-1)
        differences, positional, symbolic = [], [], []
        for i, j in combinations(range(n), 2):
            swapped = context.clone()
            swapped[[i, j]] = context[[j, i]]
            after = logits(swapped, query).softmax(-1)[[i, j]]
            before = d[[i, j]]
            differences.append((before[0] - before[1]).abs())
            norms = after.norm() * before.norm()
            positional.append(after @ before / norms)
            symbolic.append(after @ before.flip(0) / norms)
        apart = torch.stack(differences)
        alpha = (apart / (0.1 * apart.max())).softmax(0)
        index = exclusion_split(table)
        scores = [(alpha * torch.stack(each)).sum() for each in (positional, symbolic)]
        rows.append([*map(float, scores), float(index.index), float(index.variance.sqrt())])
    return np.mean(rows, axis=0)


def test_behaviour_is_that_of_permuted_prompts():
    batch = TASK.sample(5, torch.Generator().manual_seed(3))
    found = head_behaviour(enlarged(), batch)
    columns = ["s_pos", "s_sym", "exclusion_index", "logit_std"]
    for run in range(2):
        # float64 by two routes: measured 4e-16; s_pos of the two runs differ by .1 and more.
        expected = written_out(enlarged(), run, batch)
        np.testing.assert_allclose(found.loc[run, columns].astype(float), expected, rtol=0, atol=1e-12)
    assert abs(found["s_pos"].diff().iloc[1]) > 0.01


def test_a_head_without_positions_is_symbolic_and_one_without_contents_positional():
    batch = TASK.sample(5, torch.Generator().manual_seed(3))
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


class Stopped(Exception):
    pass


@pytest.mark.parametrize(("learned", "fixed_set"), [(False, None), (True, 40)])
def test_a_training_that_was_stopped_becomes_what_it_would_have_become(tmp_path, monkeypatch, learned, fixed_set):
    monkeypatch.setattr(state_module, "_SECONDS_BETWEEN_FILES", 0.0)
    schedule = replace(SHORT, training_samples=fixed_set)
    settings = {"learn_frequencies": learned, "measured": TASK.sample(50, torch.Generator().manual_seed(1))}
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
    prompts = TASK.sample(50, torch.Generator().manual_seed(1))
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
