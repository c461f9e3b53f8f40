"""`at=`: parts and edges that act at one position of each prompt, in blocks, sweeps, the screen and edges."""

import inspect

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
import zoo
from pair_prompts import first_order, patched_by_pair, prompt_pairs

import tlspectral as tls
from tlspectral.hooks.sweeps import sweep as sweep_module
from tlspectral.tasks.task_sequences import task_sequences

PAIRED = tls.parts.Output(replace="counterfactual")
LENGTHS = [9, 8, 7, 9, 6, 9]
CHANGED = [3, 3, 4, 3, 3, 2]


def prompts():
    """Prompts of unequal length, and pairs that differ at one position."""
    clean, _ = prompt_pairs(6, 9, seed=3)
    other = clean.clone()
    for row, at in enumerate(CHANGED):
        other[row, at] = (clean[row, at] - 4) % 85 + 5
    return [row[:n] for row, n in zip(clean, LENGTHS, strict=True)], [
        row[:n] for row, n in zip(other, LENGTHS, strict=True)
    ]


def pairs(**positions):
    clean, other = prompts()
    return tls.logit_difference(
        clean, 7, 10, counterfactual=other, positions={"changed": CHANGED, "END": -1, **positions}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_sweep_by_position_is_z_edited_at_that_position(name):
    model = zoo.shared("bridge", name)
    table = tls.ablation_sweep(model, PAIRED, task=pairs(), heads=["L0H1", "L1H2"], at=["changed", "END", -2])
    places = {"changed": CHANGED, "END": [-1] * 6, "-2": [-2] * 6}
    assert list(table["position"]) == 2 * list(places)
    assert list(table["name"]) == ["L0H1"] * 3 + ["L1H2"] * 3
    for row in table.itertuples():
        expected = patched_by_pair(model, *prompts(), row.layer, row.head, places[row.position])
        assert row.value == pytest.approx(expected.mean(), abs=1e-5)  # float32: 3e-7 measured, effects of 1e-2
    effects = table.set_index(["name", "position"])["delta"].abs()
    # The last layer is read at the end alone.
    assert effects["L1H2", "changed"] < 1e-6
    assert effects["L1H2", "END"] > 1e-3
    assert effects["L0H1", "changed"] > 1e-4


def test_where_a_pair_agrees_the_first_layer_has_no_effect():
    model = zoo.shared("bridge", "llama")
    table = tls.ablation_sweep(model, PAIRED, task=pairs(), heads="L0", at=[0, 1])
    # Both sides are computed from the same tokens; batches of other sizes may round otherwise, by 1e-7.
    assert table["delta"].abs().max() < 1e-6


def test_a_block_a_part_and_a_row_are_one_number():
    model, task = zoo.shared("bridge", "llama"), pairs()
    rows = tls.ablation_sweep(model, "antisymmetric", task=task, heads="L1H2", at=["END"])
    part = tls.parts.Antisymmetric(at="END")
    alone = tls.ablation_sweep(model, part, task=task, heads="L1H2")
    assert "position" not in alone
    assert alone.attrs["at"] == ["END"]
    assert rows["value"].tolist() == alone["value"].tolist()
    assert rows["score_rms"].tolist() == alone["score_rms"].tolist()
    with tls.ablate(model, "L1H2", part, task=task):
        block = tls.evaluate(model, task)
    assert float(block) == pytest.approx(rows["value"].iloc[0], abs=2e-6)  # float32 replay, as in test_head_sets
    sets = tls.ablation_sweep(model, "antisymmetric", task=task, heads={"one": ["L1H2"]}, at=["END", "changed"])
    assert sets["value"].iloc[0] == pytest.approx(float(block), abs=2e-6)
    assert sets["position"].tolist() == ["END", "changed"]
    assert repr(part) == "Antisymmetric(include_bias=False, static=False, at='END')"


@pytest.mark.slow
def test_the_screen_by_position_is_the_gradient_at_that_position(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep_module, "SCREENED", 3)
    model, (clean, other) = zoo.shared("bridge", "llama"), prompt_pairs(6, 9, seed=3, at=3)
    task = tls.logit_difference(clean, 7, 10, counterfactual=other, positions={"changed": 3})
    options = {"task": task, "screen": "gradient", "at": ["changed", -1], "folder": tmp_path}
    table = tls.ablation_sweep(model, PAIRED, **options)
    assert len(table) == 16
    assert table["measured"].value_counts().to_dict() == {"": 10, "top": 3, "control": 3}
    assert tls.ablation_sweep(model, PAIRED, **options).equals(table)
    for layer, rows in table.groupby("layer"):
        expected = first_order(model, clean, other, layer).sum((0, 3))
        for row in rows.itertuples():
            found = float(expected[3 if row.position == "changed" else -1, row.head])
            assert row.estimate == pytest.approx(found, abs=1e-6)  # float32: 3e-8 measured, effects of 1e-2


@pytest.mark.slow
def test_estimates_of_edges_by_position_sum_to_those_of_all():
    model, (clean, other) = zoo.shared("bridge", "llama"), prompt_pairs(8, 9, seed=3, at=3)
    task = tls.logit_difference(clean, 7, 10, counterfactual=other)
    options = {"task": task, "screen": "gradient", "senders": ["embedding", "L0H1", "L0MLP"]}
    whole = tls.edge_effects(model, **options).set_index(["sender", "receiver"])["estimate"]
    parts = tls.edge_effects(model, at=list(range(9)), **options)
    assert len(parts) == 9 * len(whole)
    # To first order positions add up; rounding in float32: 1e-8 measured, estimates of 1e-3 to 1e-1.
    summed = parts.groupby(["sender", "receiver"])["estimate"].sum()
    np.testing.assert_allclose(summed.loc[whole.index], whole, atol=1e-6)
    assert parts["estimate"].abs().max() > 1e-2


EACH = [1, 2, 3, 4, 3, 2]
FORMS = [
    (-1, ["-1"]),
    ("END", ["END"]),
    (np.int64(-2), ["-2"]),
    (torch.tensor(-2), ["-2"]),
    ([np.int64(1), 2, 1], ["1", "2"]),
    (["4", 2], ["4", "2"]),
    ([torch.tensor(EACH), np.array(EACH) - 1], ["given 1", "given 2"]),
    ([pd.Series(EACH, index=[5, 4, 3, 2, 1, 0]), "END"], ["given", "END"]),
]


@pytest.mark.fast(1)
@pytest.mark.parametrize(("at", "called"), FORMS, ids=lambda one: str(one)[:20].replace("\n", " "))
def test_positions_in_any_form_are_rows_of_their_own(at, called):
    """Each row is the one that its position gives as a list for all prompts; what is called alike is refused."""
    model, task = zoo.shared("bridge", "llama"), pairs(**{"4": 3})
    places = {"-1": [-1] * 6, "END": [-1] * 6, "-2": [-2] * 6, "1": [1] * 6, "2": [2] * 6, "4": [3] * 6}
    places |= {"given": EACH, "given 1": EACH, "given 2": [one - 1 for one in EACH]}
    tables = {
        "heads": tls.ablation_sweep(model, "output", task=task, heads=["L0H1"], at=at),
        "edges": tls.edge_effects(model, "logits", task=task, senders=["L0H1"], at=at),
    }
    for kind, table in tables.items():
        assert table["position"].tolist() == called
        assert [str(one) for one in table.attrs["at"]] == called
        for row in table.itertuples():
            plain = [places[row.position]]
            if kind == "heads":
                alone = tls.ablation_sweep(model, "output", task=task, heads=["L0H1"], at=plain)
            else:
                alone = tls.edge_effects(model, "logits", task=task, senders=["L0H1"], at=plain)
            assert row.delta == pytest.approx(alone["delta"].item(), abs=1e-6)  # stacked copies in float32
    table = tables["edges"]
    assert table.attrs["positions"] == [
        [place % length for place, length in zip(places[name], LENGTHS, strict=True)] for name in called
    ]


def test_a_resampled_write_is_that_of_another_sequence():
    """Into the logits at the end: the run with the last stream changed by the difference of two writes."""
    model = zoo.shared("bridge", "llama")
    clean, _ = prompt_pairs(5, 9, seed=3)
    task = tls.logit_difference(clean, 7, 10)
    table = tls.edge_effects(model, "logits", senders=["L1MLP"], task=task, replace="resample", seed=2)
    donors = tls.parts.Output("resample", seed=2)
    view = tls.models.reading.attention_view(model)
    order = donors.fixed(view, task_sequences(view, task)).reference.donors
    seen, point = {}, "blocks.1.hook_mlp_out"
    with torch.no_grad():
        model.run_with_hooks(clean, fwd_hooks=[(point, lambda x, hook: seen.update(out=x.clone()))])
        edit = [("blocks.1.hook_resid_post", lambda x, hook: x - seen["out"] + seen["out"][order])]
        cut = model.run_with_hooks(clean, fwd_hooks=edit)[:, -1]
    expected = float((cut[:, 7] - cut[:, 10]).mean()) - float(tls.evaluate(model, task))
    assert table["delta"].iloc[0] == pytest.approx(expected, abs=1e-5)  # float32: 1e-7 measured
    assert abs(expected) > 1e-2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: tls.ablation_sweep(model, PAIRED, task=pairs(), at=["S2"]), "the task names 'changed', 'END'"),
        (
            lambda model: tls.ablation_sweep(model, "output", at=["S2"]),
            "at='S2' is not a named position, the task names no positions",
        ),
        (lambda model: tls.ablation_sweep(model, PAIRED, task=pairs(), at=[8]), "sequence 1|prompt 1|position 8"),
        (lambda model: tls.ablation_sweep(model, PAIRED, task=pairs(), at=[]), "give some"),
        (lambda model: tls.edge_effects(model, "logits", task=pairs(), at=[]), "give some"),
        (
            lambda model: tls.edge_effects(model, "logits", task=pairs(**{"4": 3}), at=["4", 4]),
            "two positions that the table would call '4'",
        ),
        (
            lambda model: tls.ablation_sweep(model, "output", task=pairs(**{"4": 3}), at=["4", 4]),
            "two positions that the table would call '4'",
        ),
        (
            lambda model: tls.ablation_sweep(model, tls.parts.Output(at=1), task=pairs(), at=["END"]),
            "give only one of the two",
        ),
        (lambda model: tls.edge_effects(model, "logits", task=pairs(), at="S2"), "at='S2' is not a named position"),
        (
            lambda model: tls.ablation_hooks(model, "L0H1", tls.parts.Output(at="END")),
            "names a position .*: give task=",
        ),
        (lambda model: tls.ablation_hooks(model, "L0H1", tls.parts.Output(at=-1)), "from the end of each prompt"),
    ],
)
def test_positions_that_are_not_there_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(zoo.shared("bridge", "llama"))


@pytest.mark.parametrize("at", [2.5, True, [None], [["END"]]])
def test_what_is_no_position_is_refused(at):
    model = zoo.shared("bridge", "llama")
    for measured in (
        lambda: inspect.unwrap(tls.ablation_sweep)(model, "output", task=pairs(), at=at),
        lambda: inspect.unwrap(tls.edge_effects)(model, "logits", task=pairs(), at=at),
    ):
        with pytest.raises(TypeError, match="whole number"):
            measured()


def test_a_block_is_for_the_prompts_that_it_was_given():
    model, task = zoo.shared("bridge", "llama"), pairs()
    part = tls.parts.Output(at="END")
    with tls.ablate(model, "L0H1", part, task=task), pytest.raises(ValueError, match="at= has positions of 6 prompts"):
        model(torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13]] * 2))
    with tls.ablate(model, "L0H1", tls.parts.Output(at=3)), pytest.raises(ValueError, match="at=3 is not a position"):
        model(torch.tensor([[5, 6, 7]]))


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (
            torch.tensor([3, 2]),
            r"at=\[3, 2\] for 2 positions, a row for each; write at=\[\[3, 2\]\] for one position of each",
        ),
        (np.array(CHANGED), "for 6 positions, a row for each; write .* for one position of each prompt"),
        (pd.Series([3]), "for 1 positions, a row for each"),
        (np.where(np.eye(6)), "a tuple of 2 arrays or lists, which has two readings: a result of np.where"),
    ],
)
def test_an_array_of_positions_has_two_readings(at, words):
    """A sweep took it for several positions, and edges for one position of each prompt."""
    model = zoo.shared("bridge", "llama")
    for call in (
        lambda: tls.ablation_sweep(model, PAIRED, task=pairs(), at=at),
        lambda: tls.edge_effects(model, "logits", task=pairs(), at=at),
        lambda: tls.hooks.band_effects(model, "L0H1", task=pairs(), at=at),
    ):
        with pytest.raises(TypeError, match=words):
            call()


@pytest.mark.slow
def test_positions_of_each_prompt_are_read_alike_by_sweeps_and_edges():
    model = zoo.shared("bridge", "llama")
    for at in ([CHANGED], np.array([CHANGED]), torch.tensor([CHANGED])):
        swept = tls.ablation_sweep(model, PAIRED, task=pairs(), heads="L0H1", at=at)
        named = tls.ablation_sweep(model, PAIRED, task=pairs(), heads="L0H1", at="changed")
        assert swept["delta"].tolist() == named["delta"].tolist()
        edges = [tls.edge_effects(model, "logits", senders="L0H1", task=pairs(), at=one) for one in (at, "changed")]
        assert edges[0]["delta"].tolist() == edges[1]["delta"].tolist()
        assert edges[0]["position"].tolist() == ["given"]


@pytest.mark.parametrize(
    "positions",
    [
        {"attention": (np.array([5, 4]), np.array([3, 2]))},
        {"attention": ([5, 4], [3, 2])},
        {"attention": torch.where(torch.eye(2) > 0)},
        {"predict": np.where(np.eye(2) > 0)},
        {"positions": {"S": np.where(np.arange(4).reshape(2, 2) == 3)}},
    ],
    ids=str,
)
def test_columns_of_positions_are_no_rows(positions):
    """Of two prompts, query 5 with key 3 and query 4 with key 2, or query 5 with key 4 and query 3 with key 2."""
    with pytest.raises(TypeError, match=r"has two readings: each of the 2 arrays or lists in this tuple"):
        tls.Task([[1, 2, 3, 4, 5, 6]] * 2, lambda logits, tokens, mask: logits[:, -1, 0], **positions)


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame, pa.table], ids=["pandas", "polars", "pyarrow"])
def test_attention_of_a_frame_is_read_by_its_columns(frame):
    def task(attention):
        return tls.Task([[1, 2, 3, 4]] * 2, lambda logits, tokens, mask: logits[:, -1, 0], attention=attention)

    assert task(frame({"key": [0, 1], "query": [3, 2]})).attention == [[3, 0], [2, 1]]
    with pytest.raises(
        TypeError, match=r"attention= is a frame with the columns .*: give one with columns query and key"
    ):
        task(frame({"a": [3, 2], "b": [0, 1]}))
