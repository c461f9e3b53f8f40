"""`tlspectral ablate`: heads and prompts of one's own, and what is refused before the model is loaded."""

import io
import re
from functools import partial

import pandas as pd
import pytest
import zoo
from command_line import refusal, succeed

import tlspectral as tls
from tlspectral.selection.node_names import head_name
from tlspectral.tables import read_table

PROMPTS = ["w5 w6 w7 w8", "w9 w10", "w11 w12 w13"]
PAIRS = ["w40 w6 w7 w8", "w40 w10", "w40 w12 w13"]


ablate, refused = partial(succeed, "ablate"), partial(refusal, "ablate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return zoo.save_folder("llama", tmp_path_factory.mktemp("model"), tokenizer=True)


def csv(folder, **columns):
    """Write prompts and answers, and return the file."""
    pd.DataFrame({"prompt": PROMPTS, "correct": "w20", "wrong": "w30", **columns}).to_csv(
        folder / "prompts.csv", index=False
    )
    return folder / "prompts.csv"


@pytest.mark.slow
def test_of_equal_prompts_the_distinct_ones_are_counted(folder, tmp_path):
    given = pd.DataFrame({"prompt": [*PROMPTS, PROMPTS[0]], "correct": "w20", "wrong": "w30"})
    given.to_csv(tmp_path / "prompts.csv", index=False)
    with pytest.warns(UserWarning, match="of 4 prompts 3 are distinct"):
        done = ablate(folder, "--heads", "L0H1", "--prompts", tmp_path / "prompts.csv")
    assert "standard errors over 3 distinct of 4 sequences" in done.stdout


def test_heads_and_prompts_of_ones_own_are_measured_as_in_python(folder, tmp_path):
    options = ["--heads", "L0H1,L-1", "--control", "random", "--draws", "3", "--device", "cpu", "--dtype", "float64"]
    done = ablate(folder, "--prompts", csv(tmp_path, wrong="w21"), *options, "-o", tmp_path / "sweep.parquet")
    model = tls.load_model(folder, dtype="float64")
    task = tls.logit_difference(PROMPTS, "w20", "w21")
    expected = tls.ablation_sweep(model, "rope_phase", heads=["L0H1", "L-1"], task=task, control="random", draws=3)
    sweep = read_table(tmp_path / "sweep.parquet")
    pd.testing.assert_frame_equal(sweep, expected)
    assert "value of the logit difference and its change delta (intact " in done.stdout
    assert "over 3 sequences" in done.stdout
    assert "control: 3 random parts of equal size a head; control_excess: " in done.stdout
    assert "control_p: whether delta is one of theirs; the smallest possible is 0.25\n" in done.stdout
    few = ablate(folder, "--heads", "L0H1", "--part", "output", "--control", "random", "--draws", "2")
    assert "control: 2 other heads of the layer a head; " in few.stdout
    shown = pd.read_csv(io.StringIO(done.stdout.split("\n", 2)[2]), sep=r"\s+")
    assert {"value", "delta", "delta_se", "delta_p", "control_delta", "control_excess", "control_p"} <= set(shown)
    assert (shown["control_p_floor"] == 0.25).all()
    assert shown["delta"].is_monotonic_increasing  # the greatest harm to a logit difference first
    measured = dict(zip(map(head_name, sweep["layer"], sweep["head"]), sweep["delta"], strict=True))
    assert dict(zip(shown["name"], shown["delta"], strict=True)) == pytest.approx(measured, abs=6e-5)  # 4 decimals


def test_groups_are_removed_as_a_whole_beside_other_groups(folder, tmp_path):
    options = ["--part", "output", "--prompts", csv(tmp_path, wrong="w21"), "--control", "random"]
    done = ablate(folder, "--heads", "groups", *options, "-o", tmp_path / "groups.parquet")
    task = tls.logit_difference(PROMPTS, "w20", "w21")
    expected = tls.ablation_sweep(tls.load_model(folder), "output", heads="groups", task=task, control="random")
    pd.testing.assert_frame_equal(read_table(tmp_path / "groups.parquet"), expected)
    assert "one group at a time; value of the logit difference" in done.stdout
    assert "control: the other groups of each group's layer (up to 1); control_excess: " in done.stdout
    assert "the smallest possible is 0.5\n" in done.stdout
    assert "L1KV1 " in done.stdout
    listed = ablate(folder, "--heads", "L0KV1", "--part", "output", "--prompts", tmp_path / "prompts.csv").stdout
    assert sorted(re.findall(r"^ *(L\dH\d) ", listed, re.MULTILINE)) == ["L0H2", "L0H3"]


def rows(*arguments):
    return pd.read_json(io.StringIO(ablate(*arguments, "--format", "json").stdout)).to_dict(orient="records")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "part", "expected"),
    [
        ({"correct": ["w20", "w21", "w22"]}, "M_S", "M_S"),
        ({"counterfactual": PAIRS}, "output", tls.parts.Output(replace="counterfactual")),
    ],
    ids=["answers", "pairs"],
)
def test_answers_and_the_pair_of_each_prompt_come_from_a_csv(folder, tmp_path, columns, part, expected):
    (row,) = rows(folder, "--heads", "L0H1", "--prompts", csv(tmp_path, **columns), "--part", part)
    task = tls.logit_difference(PROMPTS, **{"correct": "w20", "wrong": "w30", **columns})
    sweep = tls.ablation_sweep(tls.load_model(folder), expected, heads="L0H1", task=task)
    assert row["part"] == part
    # The same numbers, in text with 15 decimals.
    assert (row["value"], row["delta"]) == pytest.approx((sweep["value"][0], sweep["delta"][0]), abs=1e-14)


@pytest.mark.slow
def test_positions_are_numbers_or_columns_of_the_csv(folder, tmp_path):
    pairs, places = [f"{prompt.rpartition(' ')[0]} w40" for prompt in PROMPTS], [-1, 1, 2]
    file = csv(tmp_path, counterfactual=pairs, S2=places, note="not read")
    options = ("--heads", "L0", "--part", "output", "--prompts", file, "-o", tmp_path / "sweep.parquet")
    done = ablate(folder, *options, "--at", "S2,-1")
    task = tls.logit_difference(PROMPTS, "w20", "w30", counterfactual=pairs, positions={"S2": places})
    part = tls.parts.Output(replace="counterfactual")
    expected = tls.ablation_sweep(tls.load_model(folder), part, heads="L0", task=task, at=["S2", -1])
    pd.testing.assert_frame_equal(read_table(tmp_path / "sweep.parquet"), expected)
    assert re.search(r"^ *name +position +value +delta ", done.stdout, flags=re.MULTILINE)
    # Without prompts they are numbers: the loss of induction, the part removed at one token.
    assert [row["position"] for row in rows("tiny-rope", "--heads", "L1H0", "--at", "-1")] == [-1]
    assert "is not a named position, the task names no positions" in refused(
        "tiny-rope", "--heads", "L1H0", "--at", "S2"
    )


def test_every_head_is_swept_and_summarised(folder, tmp_path):
    model = tls.load_model(folder)
    heads = tls.analyze_heads(model, null_draws=2)
    tls.write_table(heads, tmp_path / "heads.parquet")
    options = ["--heads", "all", "--folder", tmp_path / "parts", "-o", tmp_path / "sweep.parquet"]
    done = ablate(folder, tmp_path / "heads.parquet", *options)
    sweep = tls.ablation_sweep(model, "rope_phase")
    pd.testing.assert_frame_equal(read_table(tmp_path / "sweep.parquet"), sweep)
    assert (tmp_path / "parts" / "settings.json").exists()
    assert re.search(r"^ *name +prev +dup +ind +value +delta ", done.stdout, flags=re.MULTILINE)
    summary = tls.hooks.summarize_sweep(sweep, heads).query("size_control == 'none'").set_index("statement")
    total, rank = summary.loc["sum"], summary.query("column == 'prev'").loc["effect_rank"]
    assert f"sum of the effects of all heads: {total['value']:.3f} ({total['low']:.3f} to " in done.stdout
    said = f"rank by harm of {rank['note']}, the strongest by prev: {rank['value']:.0f} of {len(sweep)}, p = "
    assert said in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no heads are given: give --heads, or a TABLE"),
        (("--heads", "L5K1"), "'L5K1' names no head"),
        (("--heads", "L5,L5K1"), "'L5K1' names no head"),
        (("--heads", "L5H1", "--part", "symetric"), "did you mean 'symmetric'?"),
        (("--heads", "L5H1", "--part", "content"), "Content has settings: give tls.parts.Content(prompt)"),
        (("--heads", "L5H1", "--task", "langage"), "did you mean 'language'?"),
        (("--heads", "L5H1", "--control", "mean"), "'mean' is none of random"),
        (("--heads", "L5H1", "--draws", "19"), "--draws: needs --control random"),
        (("--heads", "L5H1", "-o", "sweep.tsv"), "sweep.tsv: tables are .parquet or .csv files"),
        (("--heads", "L5H1", "--prompts", "none.txt"), "none.txt does not exist: check the name"),
        (("none.parquet",), "none.parquet does not exist"),
        (("--heads", "L5H1", "--prompts", "CELLS", "--task", "induction"), "--prompts is a task of its own"),
        (("--heads", "L5H1", "--prompts", "CELLS"), "row 2: wrong is empty"),
        (
            ("--heads", "L5H1", "--prompts", "WHOLE", "--at", "S2"),
            "has no column S2: give a table of a row per prompt, with the columns prompt",
        ),
        (("--heads", "L5H1", "--prompts", "PLACES", "--at", "s2"), "has no column 's2': did you mean 'S2'?"),
        (("--heads", "L5H1", "--prompts", "PLACES", "--at", "S2"), "column S2 has 'b'; give the number of a token"),
        (
            ("--heads", "L5H1", "--prompts", "NOTHING"),
            "has no column prompt, correct, wrong: give a table of a row per prompt",
        ),
        (
            ("--heads", "L5H1", "--prompts", "HEADER"),
            "has no rows: give a table of a row per prompt, with the columns prompt, correct, wrong",
        ),
        (
            ("--heads", "L5H1", "--prompts", "MISSPELT"),
            "has a column 'counterfactuals', which has no meaning here; did you mean 'counterfactual'?",
        ),
        (("--heads", "L5H1", "--prompts", "EMPTY"), "cannot be read as CSV (No columns to parse from file): write"),
        (("--heads", "L5H1", "--prompts", "OPEN"), "EOF inside string starting at row 1): write a first line"),
        (("--heads", "L5H1", "--prompts", "WIDE"), "is not a text file in UTF-8: found UTF-16; save it as"),
        (
            ("--heads", "L5H1", "--prompts", "BINARY"),
            "is not a text file in UTF-8: found byte 0x93 at position 1; save",
        ),
    ],
)
def test_arguments_are_checked_before_the_model_is_loaded(tmp_path, monkeypatch, arguments, said):
    loaded = []
    monkeypatch.setattr(tls, "load_model", lambda name, **_: loaded.append(name), raising=False)
    (tmp_path / "cells.csv").write_text("prompt,correct,wrong\nw5,w6,w7\nw8,w9,\n")
    (tmp_path / "whole.csv").write_text("prompt,correct,wrong\nw5,w6,w7\n")
    (tmp_path / "places.csv").write_text("prompt,correct,wrong,S2\nw5,w6,w7,0\nw5,w6,w7,b\n")
    (tmp_path / "nothing.csv").write_text("text\nw5\n")
    (tmp_path / "header.csv").write_text("prompt,correct,wrong\n")
    (tmp_path / "misspelt.csv").write_text("prompt,correct,wrong,counterfactuals,kind\nw5,w6,w7,w8,a\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "open.csv").write_text('prompt\n"w5 w6\n')
    (tmp_path / "wide.csv").write_text("prompt\nw5\n", encoding="utf-16")
    (tmp_path / "binary.csv").write_bytes(b"p\x93\x00")
    files = {file.stem.upper(): file for file in tmp_path.glob("*.csv")}
    assert said in refused("tiny", *(files.get(argument, argument) for argument in arguments))
    assert loaded == []
