"""Sweeps on other tasks: equal to sweeps of each by itself, to the bit, and what is no same cut is refused."""

import dataclasses

import joblib
import pandas as pd
import pytest
import zoo
from pair_prompts import prompt_pairs

import tlspectral as tls
import tlspectral.hooks.sweeps.sweep as sweep_module
from tlspectral.hooks.parts import Content, LongRange, Output
from tlspectral.tables import read_table, write_table

COLUMNS = ["delta", "delta_se", "control_p", "control_p_floor", "excess_z"]
HEADS = ["L0H1", "L1H2"]
SETS = {"two layers": ["L0H1", "L0H2", "L1H2"], "others": ["L0H0", "L1H0", "L1H3"]}


def pairs(name="pairs", n=5, length=9, seed=4, pairs=True):
    clean, other = prompt_pairs(n, length, seed=seed, at=3)
    given = {"counterfactual": other} if pairs else {}
    return tls.logit_difference(clean, 7, 10, positions={"S": 3}, name=name, **given)


def text(name="text", length=12):
    return dataclasses.replace(tls.tasks.language(zoo.prompt(4, length, 2)), name=name)


def sweep(part="symmetric", task=None, heads=HEADS, model=None, **options):
    model = zoo.shared("bridge", "llama") if model is None else model
    return tls.ablation_sweep(model, part, heads=heads, task=task or pairs(), **{"control": "random", **options})


def z_by_hand(row):
    draws = pd.Series(row.control_draws)
    return (row.delta - draws.mean()) / draws.std()


def same_as_alone(part, others, task=None, heads=HEADS, **options):
    """A sweep with other tasks beside a sweep of each task by itself; the table."""
    table = sweep(part, task, heads, off_target=others, **options)
    plain = sweep(part, task, heads, **{"draws": 19, **options})
    pd.testing.assert_frame_equal(table[list(plain)], plain, check_exact=True)
    assert table["excess_z"].tolist() == pytest.approx([z_by_hand(row) for row in plain.itertuples()], rel=1e-9)
    for other in others:
        alone = sweep(part, other, heads, **{"draws": 19, **options})
        own = table[[f"{other.name}_{column}" for column in COLUMNS]]
        assert (own.to_numpy()[:, :4] == alone[COLUMNS[:4]].to_numpy()).all()
        z = [z_by_hand(row) for row in alone.itertuples()]
        assert own.iloc[:, 4].tolist() == pytest.approx(z, rel=1e-9)
        said = table.attrs["off_target"][other.name]
        assert said["task"] == other.name
        for name in ("intact_value", "intact_value_se", "n_sequences", "tokens_sha256", "batch", "higher_is_better"):
            assert said[name] == alone.attrs[name]
    return table


@pytest.mark.parametrize(
    ("part", "heads"),
    [
        ("symmetric", HEADS),
        pytest.param("rope_phase", HEADS, marks=pytest.mark.slow),
        pytest.param(Output("zero"), SETS, marks=pytest.mark.slow),
        pytest.param(Output("mean"), SETS, marks=pytest.mark.slow),
        pytest.param(LongRange(2, sinks=1), SETS, marks=pytest.mark.slow),
    ],
    ids=["symmetric", "phase", "zero", "mean", "far"],
)
def test_columns_of_a_task_are_those_of_a_sweep_of_it_alone(part, heads):
    """Prompts of other numbers and lengths, and a loss beside logits."""
    table = same_as_alone(part, [pairs("other", 4, 11, 7), text()], heads=heads)
    assert table.attrs["draws"] == 19
    assert (table["delta"] - table["other_delta"]).abs().min() > 1e-5


def test_pairs_are_each_task_s_own():
    same_as_alone("output", [pairs("other", 4, 11, 7)], heads={"one": SETS["others"]})


def test_a_task_that_is_the_target_has_equal_columns():
    table = sweep(off_target=[pairs("again"), pairs("other", seed=8)], draws=20)
    for column in COLUMNS:
        assert table[f"again_{column}"].tolist() == table[column].tolist()
        assert (table[f"other_{column}"].tolist() != table[column].tolist()) == (column != "control_p_floor")
    assert max(table.attrs["least_z_difference"].values()) <= 0
    only = sweep(off_target=[pairs("again")], draws=20)
    assert only.attrs["least_z_difference"] == {"L0H1": 0.0, "L1H2": 0.0}


@pytest.mark.slow
def test_positions_by_name_are_each_task_s_own():
    other = dataclasses.replace(pairs("other", 4, 11, 7), positions={"S": [3, 2, 3, 1]})
    table = same_as_alone("symmetric", [other], heads=["L0H1", "L0H3"], at=["S", -1])
    assert table["position"].tolist() == ["S", "-1"] * 2
    assert list(table.attrs["least_z_difference"]) == ["L0H1 at S", "L0H1 at -1", "L0H3 at S", "L0H3 at -1"]


def test_a_screen_chooses_by_the_target(monkeypatch):
    monkeypatch.setattr(sweep_module, "SCREENED", 1)
    table = sweep(off_target=[text()], screen="gradient", heads=None)
    plain = sweep(screen="gradient", heads=None, draws=19)
    pd.testing.assert_frame_equal(table[list(plain)], plain, check_exact=True)
    measured = table["measured"] != ""
    names = table.loc[measured, "name"].tolist()
    assert table.loc[~measured, ["excess_z", *(f"text_{column}" for column in COLUMNS)]].isna().all(axis=None)
    alone = sweep(task=text(), draws=19, heads=names).set_index("name").loc[names]
    assert table.loc[measured, "text_delta"].tolist() == alone["delta"].tolist()
    assert list(table.attrs["least_z_difference"]) == names


def test_the_table_keeps_its_descriptions_in_a_file_and_workers_give_it_too(tmp_path):
    table = sweep(off_target=[text("a text")], heads=HEADS)
    write_table(table, tmp_path / "sweep.parquet")
    again = read_table(tmp_path / "sweep.parquet")
    pd.testing.assert_frame_equal(again.drop(columns="control_draws"), table.drop(columns="control_draws"))
    assert again.attrs["least_z_difference"] == table.attrs["least_z_difference"]
    described = tls.tables.describe_columns(again).set_index("name")["meaning"]
    assert "the task a text" in described["a_text_excess_z"]
    with joblib.parallel_config(backend="threading"):
        pd.testing.assert_frame_equal(
            sweep(off_target=[text("a text")], heads=HEADS, n_jobs=2), table, check_exact=True
        )


EQUAL = pairs().prompts
FEW = {"one": ["L0H1"]}
REFUSED = [
    ("symmetric", {"control": None}, "draws of the control: give control='random' too"),
    ("symmetric", {"draws": 18}, "takes 19 draws or more: found draws=18"),
    ("output", {}, "a head of layer 0 has 3 other heads of its layers for its control, and excess_z .* takes 19"),
    ("output", {"heads": FEW}, "the set 'one' has 3 other sets of its layers for its control"),
    ("symmetric", {"off_target": [pairs()]}, "two tasks would be called 'pairs'"),
    ("symmetric", {"off_target": [pairs("control")]}, "would have the column control_delta, which the sweep has"),
    ("symmetric", {"at": [[1, 2, 3, 4, 5]]}, "positions of each prompt belong to one task"),
    ("symmetric", {"at": ["S"]}, "off_target 'text': at='S' is no position of this task, which names none"),
    (Output("mean", EQUAL), {"heads": SETS}, "a reference= belongs to one: leave it out"),
    ("output", {"heads": SETS}, "would become 'counterfactual' on 'pairs', 'zero' on 'text', as not all of these"),
    (Output("counterfactual"), {"heads": SETS}, "off_target 'text': replace='counterfactual' needs pairs"),
]


@pytest.mark.parametrize(("part", "options", "words"), REFUSED)
def test_what_is_no_same_cut_is_refused(part, options, words):
    with pytest.raises(ValueError, match=words):
        sweep(part, **{"off_target": [text()], **options})


@pytest.mark.slow
def test_a_part_in_blocks_is_of_prompts_that_both_tasks_have():
    prompt = tls.positional.BlockPrompt(zoo.prompt(1, 1, 3)[0], [*zoo.prompt(6, 2, 1)], zoo.prompt(1, 2, 5)[0])
    tokens = prompt.tokenized(zoo.shared("bridge", "llama")).tokens().repeat(3, 1)
    tokens[1, -1], tokens[2, -1] = 5, 6
    task = tls.logit_difference(tokens, 7, 10, name="blocks")
    same_as_alone(Content(prompt), [tls.logit_difference(tokens, 8, 11, name="other")], task=task)
    with pytest.raises(ValueError, match="off_target 'text': content: prompt"):
        sweep(Content(prompt), task, off_target=[text(length=20)])
