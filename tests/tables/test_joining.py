"""Tables about the heads of one model as one table, and a sweep on several tasks: rows, names, what is refused."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import zoo
from pair_prompts import prompt_pairs

import tlspectral as tls
from tlspectral.tables import describe_columns, join, read_table, write_table

ORIGIN = {"model": "tiny", "backend": "bridge", "weights_by_layer": {"0": "a" * 64, "1": "b" * 64}, "n_layers": 2}
PAIRS = {"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1]}


def heads():
    table = pd.DataFrame({**PAIRS, "name": ["L0H0", "L0H1", "L1H0", "L1H1"], "prev": [0.1, 0.2, 0.3, 0.4]})
    table.attrs = {**ORIGIN, "seed": 3, "table": "analyze_heads"}
    return table


def sweep(part="rope_phase", **attrs):
    table = pd.DataFrame({**PAIRS, "part": part, "delta": [1.0, 2.0, 3.0, 4.0]}).iloc[::-1]
    table.attrs = {**ORIGIN, "task": "induction", "table": "ablation_sweep", **attrs}
    return table


def kinds():
    rows = [(0, 1, "induction", 0.9, True), (0, 1, "self", 0.2, False), (1, 1, "induction", 0.1, False)]
    table = pd.DataFrame(rows, columns=["layer", "head", "kind", "score", "strong"])
    table.attrs = {**ORIGIN, "table": "a table that nothing makes"}
    return table


def test_every_number_stands_in_the_row_of_its_head_and_the_tables_are_left_as_they_were():
    one, other = heads(), sweep()
    joined = join(one, other, kinds(), text=sweep("output"))
    for table, copy in ((one, heads()), (other, sweep())):
        pd.testing.assert_frame_equal(table, copy)
        assert table.attrs == copy.attrs
    assert list(joined) == ["layer", "head", "name", "prev", "rope_phase_delta", "induction_score", "induction_strong",
                            "self_score", "self_strong", "text_output_delta"]  # fmt: skip
    assert list(joined["name"]) == list(heads()["name"])
    assert list(joined["rope_phase_delta"]) == list(joined["text_output_delta"]) == [1.0, 2.0, 3.0, 4.0]
    assert joined["induction_score"].tolist()[1::2] == [0.9, 0.1]
    assert joined["induction_score"].isna().tolist() == [True, False, True, False]
    assert joined["induction_strong"].dtype == "boolean"
    assert joined["induction_strong"].tolist() == [pd.NA, True, pd.NA, False]
    assert joined["self_score"].notna().sum() == 1


def test_numbers_and_several_keys_are_spelled_into_the_names():
    table = pd.DataFrame({"layer": 0, "head": [0, 0, 1, 1], "frequency": [0, 1] * 2, "kind": "a b", "n": [1, 2, 3, 4]})
    table.attrs = ORIGIN
    joined = join(heads().iloc[:2], table)
    assert list(joined)[4:] == ["a_b_frequency_0_n", "a_b_frequency_1_n"]
    assert joined["a_b_frequency_1_n"].dtype == "int64"  # nothing is missing, so nothing is converted
    assert joined["a_b_frequency_1_n"].tolist() == [2, 4]


def test_columns_keep_their_meaning_in_the_frame_and_in_a_file(tmp_path):
    original = tls.tables.describe_table("ablation_sweep").set_index("name").loc["delta"]
    joined = join(heads(), sweep("output"), text=sweep("output"), mine=kinds())
    join(heads(), sweep("output"), text=sweep(), mine=kinds())  # no column of another join answers for one of this
    described = describe_columns(joined).set_index("name")
    assert list(described.index) == list(joined)
    for name in ("output_delta", "text_output_delta"):
        assert described.loc[name, "meaning"] == f"{original['meaning']} Where part output."
        assert described.loc[name, "unit"] == original["unit"] != ""
        assert joined.attrs["columns"][name] == described.loc[name, "meaning"]
    assert described.loc["mine_self_score", "meaning"] == ""  # nothing is invented
    write_table(joined, tmp_path / "joined.parquet")
    again = read_table(tmp_path / "joined.parquet")
    pd.testing.assert_frame_equal(again, joined)
    pd.testing.assert_frame_equal(describe_columns(again), describe_columns(joined))
    assert again.attrs["joined"]["text"] == {"task": "induction", "table": "ablation_sweep"}
    assert again.attrs["seed"] == 3


def test_a_joined_table_can_be_joined_and_reported():
    joined = join(join(heads().assign(dir_frac=0.5, D_head=0.5), sweep("output")), sweep("rope_phase"))
    assert set(joined.attrs["joined"]) == {"ablation_sweep", "ablation_sweep_2"}
    assert {"output_delta", "rope_phase_delta"} <= set(joined)
    assert "Where part rope_phase." in tls.report.report(joined)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (lambda: sweep(weights_by_layer={"1": "c" * 64}), "other weights than .* ablation_sweep: the hash of layer 1"),
        (lambda: sweep(weights_by_layer={"7": "c" * 64}), "are of one model: they have no layer in common"),
        (lambda: sweep(backend="hooked", model="other"), "made with model tiny, the rows of .* with model other"),
        (lambda: sweep(n_layers=4), "made with n_layers 2, the rows of .* with n_layers 4"),
        (lambda: sweep().assign(layer=[9, 1, 0, 0]), "has a row for L9H1, which the table of heads lacks"),
        (lambda: pd.concat([sweep(), sweep()]), "several rows for layer 1, head 1, part rope_phase"),
        (lambda: heads().drop(columns="name"), "the column prev, which the joined table has already: .*other=table"),
        (lambda: pd.concat([heads()] * 2), "several rows for layer 0, head 0: .*none of part, .* tells them apart"),
        (lambda: sweep().assign(part=None), "a row without part"),
        (lambda: sweep().assign(part=["a b", "a_b", "a b", "a_b"], layer=0, head=[0, 0, 1, 1]), "spelled alike"),
        (lambda: sweep().assign(receiver="L1H1.k"), "ablation_sweep has a row per edge: its layer and head"),
        (lambda: sweep().drop(columns="head"), "has no column head"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(table, said):
    with pytest.raises(ValueError, match=said):
        join(heads(), table())


def test_a_table_of_heads_has_a_row_for_each():
    with pytest.raises(ValueError, match="the table of heads has several rows"):
        join(pd.concat([heads()] * 2), sweep())


# --- a sweep on several tasks ---


def on(task, **changes):
    """A sweep of two sets at two positions on a task, its rows in another order for each."""
    rows = [(name, position) for name in ("a", "b") for position in ("S", "-1")]
    table = pd.DataFrame(rows, columns=["name", "position"]).assign(layer=-1, head=-1, part="output")
    table["delta"] = [f"{task} {name} {position}" for name, position in rows]
    own = {"task": task, "batch": len(task), "tokens_sha256": task, "n_sequences": len(task), "intact_value": 1.0}
    cut = {"replace": "mean", "control": "random", "draws": 19, "seed": 0, "at": ["S", -1], "sets": {"a": ["L0H0"]}}
    table = table.sample(frac=1, random_state=len(task))
    table.attrs = {**ORIGIN, **own, **cut, "table": "ablation_sweep", "processing": {"value_biases": True}, **changes}
    return table


def test_sweeps_on_several_tasks_stand_side_by_side():
    joined = join(on("names"), years=on("the years"), text=on("text"))
    assert list(joined) == ["name", "position", "layer", "head", "part", "delta", "years_delta", "text_delta"]
    for column, task in (("delta", "names"), ("years_delta", "the years"), ("text_delta", "text")):
        assert joined[column].tolist() == (f"{task} " + joined["name"] + " " + joined["position"]).tolist()
    meaning = describe_columns(joined).set_index("name")["meaning"]
    assert meaning["years_delta"] == meaning["delta"] + " Measured on the task the years."
    assert joined.attrs["task"] == "names"
    assert joined.attrs["joined"]["years"]["tokens_sha256"] == "the years"


def test_a_joined_sweep_can_be_kept_and_joined_to_another(tmp_path):
    at_once = join(on("names"), years=on("the years"), text=on("text"))
    write_table(join(on("names"), years=on("the years")), tmp_path / "joined.parquet")
    pd.testing.assert_frame_equal(join(read_table(tmp_path / "joined.parquet"), text=on("text")), at_once)


def test_rows_that_another_task_lacks_are_missing_and_foreign_ones_are_refused():
    part = on("text")
    joined = join(on("names"), text=part[part["name"] == "a"])
    assert joined["text_delta"].isna().tolist() == (joined["name"] == "b").tolist()
    with pytest.raises(ValueError, match=r"table text has a row for b, part output, position .*, which the table"):
        join(part[part["name"] == "a"], text=on("names"))
    with pytest.raises(ValueError, match=r"has several rows for layer -1, head -1, name .*, part output, position"):
        join(pd.concat([on("names")] * 2), text=part)
    with pytest.raises(ValueError, match=r"has the column delta, which the joined table has already: .*other=table"):
        join(on("names"), part)


@pytest.mark.parametrize(
    "changes",
    [
        {"replace": "counterfactual"},
        {"control": None},
        {"draws": 20},
        {"seed": 1},
        {"at": ["S"]},
        {"sets": {"a": ["L0H1"]}},
        {"processing": {"value_biases": False}},
        {"a setting of a part": 3},
        {"user_hooks": ["blocks.0.attn.hook_z"]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_not_the_same_cut_is_refused(changes):
    [name] = changes
    for one, other in ((on("names"), on("text", **changes)), (on("names", **changes), on("text"))):
        with pytest.raises(
            ValueError,
            match=f"table text and .* do not remove the same .*: {name} is .* in .* and .* in .*heads. Me",
        ):
            join(one, text=other)


def test_other_weights_and_another_part_are_refused():
    with pytest.raises(ValueError, match=r"other weights than .* table text: the hash of layer 1"):
        join(on("names"), text=on("text", weights_by_layer={"1": "c" * 64}))
    with pytest.raises(ValueError, match="the table text has a row for a, part zeros, position"):
        join(on("names"), text=on("text").assign(part="zeros"))


def test_a_joined_sweep_of_an_older_meaning_warns_as_the_sweep_does(tmp_path):
    older = [on(task, meanings=0) for task in ("names", "text")]
    for table in older:
        del table.attrs["replace"]
    with pytest.warns(UserWarning, match="part may mean something else"):
        joined = join(older[0], text=older[1])
    write_table(joined, tmp_path / "joined.parquet")
    with pytest.warns(UserWarning, match="part may mean something else"):
        read_table(tmp_path / "joined.parquet")


# --- the page of the recipe ---

PAGE = (Path(__file__).parents[2] / "docs/your_question.md").read_text(encoding="utf-8")
[LEAST] = set(re.findall("^least = (.*)$", PAGE, re.MULTILINE))
"""The expression of the page, for a table that `join` made."""


def pairs(name, n=5, length=9, seed=4):
    clean, other = prompt_pairs(n, length, seed=seed, at=3)
    return tls.logit_difference(clean, 7, 10, counterfactual=other, positions={"S": 3}, name=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"part": "symmetric", "heads": ["L0H1", "L0H3"], "at": ["S", -1]},
        pytest.param(
            {"part": tls.parts.Output("mean"), "heads": {"a": ["L0H1", "L0H2", "L1H2"], "b": ["L0H0", "L1H0", "L1H3"]}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["part", "sets"],
)
def test_the_least_difference_of_the_recipe_is_of_the_task_that_is_most_like_the_target(options):
    model, tasks = zoo.shared("bridge", "llama"), [pairs("names"), pairs("other", 4, 11, 7), pairs("third", seed=8)]
    sweeps = [tls.ablation_sweep(model, task=task, control="random", draws=19, **options) for task in tasks]
    table = tls.tables.join(sweeps[0], other=sweeps[1], third=sweeps[2])
    least = eval(LEAST, {"table": table})
    for row, (target, *others) in enumerate(zip(*(sweep.itertuples() for sweep in sweeps), strict=True)):
        assert least[row] == abs(target.excess_z) - max(abs(other.excess_z) for other in others)
    for name, sweep in zip(["", "other_", "third_"], sweeps, strict=True):
        columns = ["delta", "delta_se", "control_p", "control_p_floor", "excess_z", "control_draws"]
        for column in columns:
            assert table[f"{name}{column}"].tolist() == sweep[column].tolist()
    assert table.attrs["joined"]["third"]["intact_value"] == sweeps[2].attrs["intact_value"]
    # Too few draws on a task give no difference.
    assert eval(LEAST, {"table": table.assign(third_excess_z=np.nan)}).isna().all()


def test_an_output_that_becomes_its_pair_on_one_task_alone_is_refused():
    """Without `replace`, a task of pairs and one without are cut in two ways; sets of one name need equal heads."""
    model, sets = zoo.shared("bridge", "llama"), {"a": ["L0H1", "L1H2"]}
    text = dataclasses.replace(tls.tasks.language(zoo.prompt(3, 8, 2)), name="text")

    def swept(task, heads=sets, part="output"):
        return tls.ablation_sweep(model, part, heads=heads, task=task, control="random", draws=1)

    with pytest.raises(ValueError, match=r"replace is 'zero' in the table .* and 'counterfactual' in"):
        join(swept(pairs("names", 3)), text=swept(text))
    with pytest.raises(
        ValueError,
        match=r"sets is {'a': \['L0H1', 'L1H3'\]} in .* and {'a': \['L0H1', 'L1H2'\]} in",
    ):
        join(swept(text), text=swept(text, {"a": ["L0H1", "L1H3"]}))
