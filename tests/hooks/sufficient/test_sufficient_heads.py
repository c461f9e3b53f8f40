"""`sufficient_heads`: its numbers are those of circuits, folders resume, and pairs that share too much are refused."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.hooks.sufficient import sufficient_heads as room
from tlspectral.hooks.sufficient.shared_pairs import folds_by_answer
from tlspectral.hooks.sweeps.controls import sets_apart
from tlspectral.models.reading import attention_view
from tlspectral.tasks.task_sequences import task_sequences

AT = 4


def pairs_with(answers, n, seed, length=9, template=None):
    """Pairs of random prompts that differ at one token; right and wrong answers are drawn from `answers`."""
    drawn = torch.Generator().manual_seed(seed)
    clean = torch.randint(30, 90, (n, length), generator=drawn)
    if template is not None:
        clean = template.repeat(n, 1)
        clean[:, AT] = torch.randperm(50, generator=drawn)[:n] + 30
    other = clean.clone()
    other[:, AT] = (other[:, AT] - 29) % 60 + 30
    order = [(answers[row % len(answers)], answers[(row + 1) % len(answers)]) for row in range(n)]
    return clean, other, [right for right, _ in order], [wrong for _, wrong in order]


def task_of(answers, n, seed, **options):
    clean, other, right, wrong = pairs_with(answers, n, seed, **options)
    return tls.logit_difference(clean, right, wrong, counterfactual=other)


@pytest.fixture(scope="module")
def model():
    return zoo.shared("bridge", "llama")


@pytest.fixture(scope="module")
def tasks(model):
    """A task and held pairs whose right answer is the token that the clean run prefers to the pair's."""
    made = []
    for seed, n, low, high in ((0, 6, 5, 15), (1, 8, 15, 25)):
        clean, other, *_ = pairs_with([5, 6], n, seed)
        with torch.no_grad():
            change = (model(clean) - model(other))[:, -1, low:high]
        right, wrong = (low + change.argmax(-1)).tolist(), (low + change.argmin(-1)).tolist()
        made.append(tls.logit_difference(clean, right, wrong, counterfactual=other))
    return made


@pytest.fixture(scope="module")
def found(model, tasks):
    return tls.sufficient_heads(model, *tasks, n=3, sizes=[1, 2], starts=2, draws=4)


def kept_by(model, task, heads):
    """The share that a set keeps, by `run_circuit` with all edges but those of the other heads."""
    view = attention_view(model)
    from tlspectral.hooks.circuits.graph import Graph  # the names of all edges

    graph = Graph(view)
    others = {f"L{layer}H{head}" for layer in view.layers for head in range(view.n_heads(layer))} - {*heads}
    edges = [
        (graph.senders[place].name, graph.receivers[row].name)
        for row, place in np.argwhere(graph.possible)
        if graph.senders[place].name not in others
    ]
    none = [edge for edge in edges if not edge[0].startswith("L") or "MLP" in edge[0]]
    whole = tls.evaluate(model, task).per_sequence
    value, closed = (tls.run_circuit(model, some, task).per_sequence for some in (edges, none))
    return value, (value - closed).mean() / (whole - closed).mean()


def test_the_table_has_a_row_for_each_head_and_the_chosen_ones(found):
    assert found["chosen"].sum() == 3
    assert found.loc[found["chosen"], "name"].tolist() == found.attrs["heads"]
    assert found["gate"].between(0, 1).all()
    assert found["selected"].sum() == pytest.approx(3)
    assert found["leaves_delta"].notna().tolist() == found["chosen"].tolist()
    fits = found.attrs["fits"]
    assert len(fits) == 6
    best = min(fits, key=lambda fit: abs(1 - fit["kept_training"]))
    assert best["heads"] == found.attrs["heads"]
    assert best["kept"] == found.attrs["kept"]
    assert best["kept_training"] == found.attrs["kept_training"]


@pytest.mark.slow
@pytest.mark.tl4
def test_kept_is_that_of_the_circuit_of_the_same_heads(found, model, tasks):
    heads = found.attrs["heads"]
    value, kept = kept_by(model, tasks[1], heads)
    assert found.attrs["kept"] == pytest.approx(kept, abs=1e-5)  # float32: 1e-6 measured
    assert [pair["value"] for pair in found.attrs["held_pairs"]] == pytest.approx(value, abs=1e-5)
    assert found.attrs["kept_training"] == pytest.approx(kept_by(model, tasks[0], heads)[1], abs=1e-5)
    row = found[found["chosen"]].iloc[0]
    without, _ = kept_by(model, tasks[1], [head for head in heads if head != row["name"]])
    assert row["leaves_delta"] == pytest.approx((without - value).mean(), abs=1e-5)
    sets = pd.DataFrame(found.attrs["sets"]).set_index(["set", "n"])
    others = [name for name in found["name"] if name not in heads]
    assert sets.loc[("complement", 3), "kept"] == pytest.approx(kept_by(model, tasks[1], others)[1], abs=1e-5)
    assert sets.loc[("learned", 3), "low"] <= kept <= sets.loc[("learned", 3), "high"]
    drawn = sets.loc[("random", 3), "draws"]
    assert sets.loc[("random", 3), "p"] == (1 + sum(abs(1 - other) <= abs(1 - kept) for other in drawn)) / (
        1 + len(drawn)
    )
    with tls.ablate(model, row["name"], "output", task=tasks[0]):
        alone = tls.evaluate(model, tasks[0]) - tls.evaluate(model, tasks[0])
    assert alone.value == 0
    sweep = tls.ablation_sweep(model, "output", task=tasks[0]).set_index("name")["delta"]
    np.testing.assert_allclose(found.set_index("name")["delta"], sweep.loc[found["name"]], atol=1e-5)


@pytest.mark.slow
def test_a_stopped_call_goes_on_from_its_folder(found, model, tasks, tmp_path, monkeypatch):
    calls, train = [], room.trained_gates

    def stopped(runs, penalty, seeds):
        calls.append(penalty)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(runs, penalty, seeds)

    options = {"n": 3, "sizes": [1, 2], "starts": 2, "draws": 4, "folder": tmp_path / "gates"}
    monkeypatch.setattr(room, "trained_gates", stopped)
    with pytest.raises(KeyboardInterrupt, match="stopped: 4 of 6 fits"):
        tls.sufficient_heads(model, *tasks, **options)
    resumed = tls.sufficient_heads(model, *tasks, **options)
    assert calls == [0.003, 0.01, 0.03, 0.03]
    pd.testing.assert_frame_equal(resumed, found, check_exact=True)
    assert resumed.attrs["sets"] == found.attrs["sets"]
    again = tls.sufficient_heads(model, *tasks, **options)
    assert len(calls) == 4
    pd.testing.assert_frame_equal(again, found, check_exact=True)
    with pytest.raises(IncompatibleCheckpoint, match="other n"):
        tls.sufficient_heads(model, *tasks, **{**options, "n": 2})
    tls.write_table(found, tmp_path / "heads.parquet")
    read = tls.read_table(tmp_path / "heads.parquet")
    assert read.attrs["sets"][0]["heads"] == found.attrs["sets"][0]["heads"]


@pytest.mark.slow
def test_without_held_pairs_folds_by_answer_judge_the_procedure(model):
    clean, other, right, _ = pairs_with([5, 6, 7, 8], 8, 0)
    with torch.no_grad():
        wrong = (10 + (model(clean) - model(other))[:, -1, 10:30].argmin(-1)).tolist()
    task = tls.logit_difference(clean, right, wrong, counterfactual=other)
    view = attention_view(model)
    folds = folds_by_answer(task_sequences(view, task))
    assert len(folds) == 3
    assert sorted(row for _, judged in folds for row in judged) == list(range(8))
    for trained, judged in folds:
        assert not {right[row] for row in trained} & {right[row] for row in judged}
    table = tls.sufficient_heads(model, task, n=2, starts=1, penalties=[0.01], draws=2)
    assert table.attrs["kept"] is None
    assert table.attrs["folds"] == 3
    assert "low" not in table.attrs
    # By hand: each fold's set, on the pairs that it has not seen.
    carried = whole = 0.0
    for fold, (_, judged) in enumerate(folds, 1):
        (heads,) = (fit["heads"] for fit in table.attrs["fits"] if fit["fold"] == fold)
        part = tls.logit_difference(
            clean[judged], [right[row] for row in judged], [wrong[row] for row in judged], counterfactual=other[judged]
        )
        value, _ = kept_by(model, part, heads)
        closed, _ = kept_by(model, part, [])
        carried += (value - closed).sum()
        whole += (tls.evaluate(model, part).per_sequence - closed).sum()
    assert table.attrs["kept_procedure"] == pytest.approx(carried / whole, abs=1e-4)
    one = tls.logit_difference(clean, 5, 6, counterfactual=other)
    assert folds_by_answer(task_sequences(view, one)) == []


def test_the_cost_is_said_before_the_first_pass(model, tasks, capsys, monkeypatch):
    def nothing(*_):
        raise RuntimeError("the first pass")

    monkeypatch.setattr(room, "gated_runs", nothing)
    with pytest.raises(RuntimeError, match="the first pass"):
        tls.sufficient_heads(model, *tasks)
    said = capsys.readouterr().err
    assert "9 fits of 25 steps, 1,350 passes of a pair forward and backward" in said
    assert "CPU seconds" in said


TEMPLATE = torch.arange(31, 40)[None]


def test_held_pairs_that_share_too_much_are_refused(model):
    own = task_of([5, 6], 4, 0)
    for held, said in (
        (task_of([7, 8], 7, 1), "held= has 7 distinct pairs: give 8 or more"),
        (task_of([6, 7], 8, 1), r"share the answers \['6'\]|share the answers"),
        (task_of([7, 8], 8, 0), "share a template"),
    ):
        with pytest.raises(ValueError, match=said):
            tls.sufficient_heads(model, own, held)
    templated, same = (task_of(answers, 8, seed, template=TEMPLATE) for answers, seed in (([5, 6], 0), ([7, 8], 1)))
    with pytest.raises(ValueError, match="8 of 8 pairs of held= share a template"):
        tls.sufficient_heads(model, templated, same)
    near = TEMPLATE.clone()
    near[0, 1] = 77
    with (
        pytest.warns(UserWarning, match="in 2 words or fewer besides the answers"),
        pytest.raises(ValueError, match="a set has fewer heads"),
    ):
        tls.sufficient_heads(model, templated, task_of([7, 8], 8, 1, template=near), n=1000)


def test_labels_name_answers_and_templates(model):
    clean, other, right, wrong = pairs_with([5, 6], 8, 0, template=TEMPLATE)

    def labelled(answer, template, answers):
        labels = pd.DataFrame({"answer": [answer] * 8, "template": [template] * 8})
        return tls.Task(clean, tls.logit_difference(clean, *answers).metric, counterfactual=other, labels=labels)

    task = labelled("a", "one", (right, wrong))
    with pytest.raises(ValueError, match="share the answers"):
        tls.sufficient_heads(model, task, labelled("a", "two", (7, 8)))
    with pytest.raises(ValueError, match="share a template"):
        tls.sufficient_heads(model, task, labelled("b", "one", (7, 8)))
    with pytest.raises(ValueError, match="a set has fewer heads than the model"):
        tls.sufficient_heads(model, task, labelled("b", "two", (7, 8)), n=1000)
    plain = tls.Task(clean, lambda logits, tokens, mask: logits[:, -1, 5], counterfactual=other)
    with pytest.raises(ValueError, match="the answers of held= are not known"):
        tls.sufficient_heads(model, task, plain)
    single = tls.logit_difference(clean, 7, 8)
    with pytest.raises(ValueError, match="held= has no counterfactual prompts"):
        tls.sufficient_heads(model, task, single)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 0}, "n is how many heads"),
        ({"sizes": [3, 0]}, "an entry of sizes"),
        ({"starts": 0}, "starts is how many"),
        ({"draws": 0}, "draws is how many"),
        ({"penalties": []}, r"penalties= must be a list of positive numbers"),
        ({"penalties": [0.1, -1]}, r"penalties= must be a list of positive numbers"),
        ({"n": 1000}, "a set has fewer heads than the model"),
    ],
)
def test_settings_that_do_not_fit_are_refused(model, tasks, options, said):
    with pytest.raises(ValueError, match=said):
        tls.sufficient_heads(model, tasks[0], **options)


def test_a_task_whose_sides_are_alike_or_whose_metric_has_no_gradient_is_refused(model, tasks):
    alike = tls.logit_difference(tasks[0].prompts, 7, 8, counterfactual=[*reversed(tasks[0].prompts)])
    with pytest.raises(ValueError, match=r"with all heads and .* with none, too close"):
        tls.sufficient_heads(model, alike)

    answers = list(zip(tasks[0].metric.correct, tasks[0].metric.wrong, strict=True))
    sides = [tls.evaluate(model, side).per_sequence for side in (tasks[0], tasks[0].denoising())]
    between = np.mean(sides, axis=0)

    def steps(logits, tokens, mask):
        rows = zip(logits, answers, between, strict=True)
        return torch.tensor([float(row[-1, right] - row[-1, wrong] > bound) for row, (right, wrong), bound in rows])

    stepped = tls.Task(tasks[0].prompts, steps, predict=-1, counterfactual=tasks[0].counterfactual)
    with pytest.raises(ValueError, match="gates are trained by gradients, and the metric of steps has none"):
        tls.sufficient_heads(model, stepped)


def test_random_sets_leave_the_chosen_heads_out_where_there_are_others():
    rng = np.random.default_rng(0)
    sets = sets_apart({0: 8, 3: 8}, {0: [1, 2], 3: [7]}, 19, rng)
    assert len({tuple(drawn) for drawn in sets}) == 19
    for drawn in sets:
        assert [layer for layer, _ in drawn] == [0, 0, 3]
        assert not {*drawn} & {(0, 1), (0, 2), (3, 7)}
    short = sets_apart({0: 4}, {0: [0, 1, 2]}, 19, rng)  # one other head, and two of the three
    assert sorted(map(tuple, short)) == [
        tuple((0, head) for head in some) for some in ((0, 1, 3), (0, 2, 3), (1, 2, 3))
    ]
    assert sets_apart({0: 2}, {0: [0, 1]}, 19, rng) == []
