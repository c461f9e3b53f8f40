"""Heads, pairs and layers as callers give them: what is read, and what is refused in words that say what to write."""

import inspect
import sqlite3
from types import SimpleNamespace
from typing import NamedTuple

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from attribution_nodes import EDGES, EMBED, HEAD, LOGITS, NODES, QUERY, AttributionResult
from head_tables import analyze, built
from reference_circuits import edited
from zoo import shared

import tlspectral as tls
from tlspectral.errors import BadHead, BadWeights, ScoreMismatch
from tlspectral.errors.settings import counted
from tlspectral.heads.weight_columns import NullSettings
from tlspectral.history.checkpoint_tables import HeadHistory
from tlspectral.history.recording import _checked_pairs
from tlspectral.hooks import band_effects
from tlspectral.hooks.edges.reached import reached
from tlspectral.hooks.edges.senders import chosen_senders
from tlspectral.models.reading import attention_view
from tlspectral.models.reading import bridge as bridge_reader
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.selection.heads_as_written import head_pair, head_pairs, pair_in_table
from tlspectral.selection.node_names import Receiver, naming_nodes
from tlspectral.selection.parts_as_written import chosen_part
from tlspectral.selection.receivers_as_written import read_receivers
from tlspectral.spectral_rope.module import _chosen_heads
from tlspectral.tasks.repeated import repeated_sequences

FORMS = r'a head is "L5H1", "5\.1", \(5, 1\) or a table row with layer and head; heads are one of these, "L5" for all'
EFFECTS = np.array([[0, 0, 0, 2], [0, 0, 3, 0]])  # of two layers with four heads
TABLE = pd.DataFrame({"head": [2, 3], "layer": [1, 0], "name": ["L1H2", "L0H3"]})
RECORDS = np.array([(2, 1), (3, 0)], dtype=[("head", int), ("layer", int)])
SQL = sqlite3.connect(":memory:")
SQL.row_factory = sqlite3.Row
SQL_ROWS = SQL.execute("SELECT 2 AS head, 1 AS layer UNION ALL SELECT 3, 0").fetchall()
# In every place where one head is given.
NO_HEAD = [
    "12", "L1H2H3", "head 2", "1,2", 1.2,
    b"12", ("1", "2"), (1, 2.5), (1, float("nan")), (True, False), (1, np.bool_(True)), (1, 2, 0), (1,),
    (), {"layer": 1, "head": None}, {"layer": 1}, {1, 2}, [[1, 2]], 12, None, (1, None), torch.tensor(12),
    NamedTuple("Row", [("Index", int), ("head", int)])(1, 2), torch.tensor([3.0, 1.0]).max(0), (torch.tensor([1]), 2),
    pd.DataFrame([[1, 2]]),
]  # fmt: skip


NAMES = "instead of TransformerLens' nodes, which have one position each, give the names: "


@pytest.mark.tl4
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (QUERY, f"; {NAMES}'L1H2.q'"),
        (EMBED, f"; {NAMES}'embedding'"),
        ([LOGITS], f"; {NAMES}'logits'"),
        ((HEAD, QUERY), f"; {NAMES}('L0H1', 'L1H2.q')"),
        (EDGES, f"; a AttributionResult of TransformerLens has edges, {NAMES}('L0H1', 'L1H2.q')"),
        (NODES, f"; a AttributionResult of TransformerLens has nodes alone, {NAMES}'L0H1'"),
        ([*EDGES.edge_scores], f"; {NAMES}('embedding', 'logits')"),
        ([(HEAD, QUERY, -1.0)], f"; {NAMES}('L0H1', 'L1H2.q')"),
        (AttributionResult({}), "; a AttributionResult of TransformerLens has nodes alone"),
        ("L0H1", ""),
        ([], ""),
        (None, ""),
        ([1.5, None], ""),
    ],
)
def test_nodes_of_transformer_lens_are_named_as_here(given, said):
    assert naming_nodes(given) == said.replace("a Attr", "an Attr")


@pytest.mark.tl4
@pytest.mark.parametrize(
    "call",
    [
        lambda: unchecked(head_pair)(HEAD),
        lambda: unchecked(head_pairs)([HEAD]),
        lambda: unchecked(head_pairs)(EDGES),
        lambda: unchecked(read_receivers)(QUERY),
        lambda: unchecked(read_receivers)([QUERY]),
        lambda: unchecked(read_receivers)(EDGES),
    ],
)
def test_where_heads_and_receivers_are_given_nodes_are_refused_with_their_names(call):
    with pytest.raises(BadHead, match=rf"{NAMES}\(?'L[01]H[12]"):
        call()


def unchecked(function):
    """Below the check of annotations, which refuses some of these first while tests run."""
    return inspect.unwrap(function)


def chosen(heads):
    return unchecked(heads_by_layer)(attention_view(shared("bridge", "llama")), heads)


@pytest.mark.parametrize(
    "head",
    [
        (1, 2), [1, 2], (np.int64(1), np.uint8(2)), (1.0, np.float64(2.0)), (torch.tensor(1), np.array(2)),
        "L1H2", "1.2", "l1h2", " L1H2 ", np.array("L1H2"), np.str_("1.2"), pa.scalar("L1H2"),
        "L-1H2", "-1.2", (-1, 2), "L1H-2", "1.-2", (1, -2), (-1, -2), "L-1H-2",
        {"layer": 1, "head": 2}, RECORDS[0], SQL_ROWS[0], pa.scalar({"head": 2, "layer": 1}),
        TABLE.iloc[0], TABLE[["head", "layer"]].iloc[0], TABLE.set_index(["layer", "head"]).iloc[0],
        next(TABLE.itertuples()), next(TABLE.itertuples(index=False)),
    ],
)  # fmt: skip
def test_a_pair_in_every_form(head):
    """A row of a table gives its layer and its head by their names, in whichever order they stand.

    Of two layers with four heads, what counts from the end is the same head.
    """
    layer, index = head_pair(head)
    assert (layer % 2, index % 4) == (1, 2)
    assert chosen([head]) == {1: [2]}
    assert chosen(head) == {1: [2]}  # one head need not stand in a list


@pytest.mark.parametrize(
    "heads",
    [
        TABLE,
        TABLE.astype({"layer": float, "head": float}),
        pd.MultiIndex.from_frame(TABLE[["head", "layer"]]),
        TABLE.set_index(["layer", "head"]).index,
        [row for _, row in TABLE.iterrows()],
        torch.tensor([[1, 2], [0, 3]]),
        TABLE.set_index(["layer", "head"]),
        ["L1H2", "0.3"],
        TABLE["name"].tolist(),
        TABLE["name"],
        TABLE["name"].astype("category"),
        TABLE["name"].to_numpy(),
        pd.Index(TABLE["name"]),
        pa.array(TABLE["name"]),
        pa.chunked_array([["L1H2"], ["L0H3"]]),
        [pa.scalar("L1H2"), np.array("L0H3")],
        pl.Series(["L1H2", "L0H3"]),
        pd.Series([(1, 2), (0, 3)]),
        pd.Series([np.array([1, 2]), np.array([0, 3])]),
        pa.array([[1, 2], [0, 3]]),
        pl.Series([[1, 2], [0, 3]]),
        np.array([[1.0, 2.0], [0.0, 3.0]]),
        np.argwhere(EFFECTS > 1),
        torch.tensor(EFFECTS > 1).nonzero(),
        zip(*np.where(EFFECTS > 1), strict=True),
        list(zip(*torch.where(torch.tensor(EFFECTS > 1)), strict=True)),
        [[1, 2], [0, 3]],
        ((1, 2), (0, 3)),
        TABLE.set_index(["layer", "head"])["name"],
        TABLE.assign(D_head=[0.5, 0.25]).set_index(["head", "layer"])["D_head"],
        TABLE.to_dict("records"),
        SQL_ROWS,
        list(RECORDS),
        [(1, -2), "L0H-1"],
        pd.DataFrame({"layer": [-1, 0], "head": [2, 3]}),
        {"L1H2": 0.5, "L0H3": 0.1}.keys(),
    ],
)
def test_heads_in_every_form(heads):
    assert chosen(heads) == {0: [3], 1: [2]}


class Stream:
    """A frame that offers the stream of Arrow's C interface and nothing else."""

    def __arrow_c_stream__(self, requested_schema=None):
        return pa.table({"layer": [1, 0], "head": [2, 3]}).__arrow_c_stream__(requested_schema)


class Named:
    """A frame that is iterated by the names of its columns, as those of modin and cuDF."""

    columns = ("layer", "head")
    values = TABLE

    def __getitem__(self, name):
        return self.values[name]

    def __iter__(self):
        return iter(self.columns)


@pytest.mark.parametrize(
    "frame",
    [
        pl.DataFrame({"layer": [1, 0], "head": [2, 3]}),
        pl.DataFrame({"head": [2, 3], "layer": [1, 0]}),
        pa.table({"layer": [1, 0], "head": [2, 3]}),
        pa.RecordBatch.from_pydict({"head": [2, 3], "layer": [1, 0]}),
        lambda: pa.RecordBatchReader.from_stream(Stream()),
        lambda: duckdb.connect().sql("SELECT 1 AS layer, 2 AS head UNION ALL SELECT 0, 3"),
        RECORDS,
        RECORDS.view(np.recarray),
        {"layer": [1, 0], "head": np.array([2, 3])},
        TABLE.to_dict("list"),
        Stream(),
        Named(),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_frames_of_every_library_are_read_by_their_columns(frame):
    """Two rows and two columns, so that reading columns as rows finds L1H0 and L2H3, which are heads as well."""
    assert chosen(frame() if inspect.isfunction(frame) else frame) == {0: [3], 1: [2]}


@pytest.mark.parametrize(
    "frame",
    [
        pl.DataFrame({"a": [1, 0], "b": [2, 3]}),
        pa.table({"a": [1, 0], "b": [2, 3]}),
        pd.DataFrame([[1, 2], [0, 3]]),
        TABLE.pivot(index="layer", columns="head", values="name"),
        np.array([(1, 2)], dtype=[("a", int), ("b", int)]),
        pl.DataFrame({"layer": [1, 0], "head": [2, 3]}).lazy(),
        {"layer": [1], "head": [2, 3]},
        TABLE.to_dict(),
        [TABLE],
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_frames_without_heads_are_refused_in_words(frame):
    words = r"names? no head|not a head|cannot be read: give a pandas DataFrame|unequal lengths"
    with pytest.raises(BadHead, match=words):
        chosen(frame)


TWO_READINGS = [
    (np.unravel_index([4, 1], (2, 4)), r"\(L1H0, L0H1\).* or a row .* \(L1H0, L0H1\)\. Write list\(zip\("),
    (np.unravel_index([6, 3], (2, 4)), r"tuple of 2 arrays has two readings: .*\(L1H2, L0H3\).*\(L1H0, L2H3\)"),
    (np.where(EFFECTS > 1), r"\(L0H3, L1H2\).*\(L0H1, L3H2\)"),
    (torch.where(torch.tensor(EFFECTS > 1)), r"\(L0H3, L1H2\).*\(L0H1, L3H2\)"),
    (torch.tensor(EFFECTS > 1).nonzero(as_tuple=True), r"\(L0H3, L1H2\).*\(L0H1, L3H2\)"),
    (np.where(EFFECTS > 2), r"\(L1H2\), as np.where"),
    (([1, 0], [2, 1]), r"tuple of 2 lists has two readings: .*\(L1H2, L0H1\).*\(L1H0, L2H1\)"),
    ([np.array([1, 0]), np.array([2, 1])], r"list of 2 arrays has two readings: .*\(L1H2, L0H1\).*\(L1H0, L2H1\)"),
    ((pd.Series([1, 0]), pd.Series([2, 1])), r"\(L1H2, L0H1\).*\(L1H0, L2H1\)"),
    (torch.tensor([0.0, 2.0, 1.0, 3.0]).topk(2), "topk of 2 arrays has two readings"),
    (torch.tensor([0.0, 2.0, 1.0, 3.0]).topk(2).indices, r'L3H1, or 2 heads of one layer\. Write "L3H1" or \(3, 1\)'),
    (np.array([1, 2]), r"one head, L1H2, or 2 heads of one layer.*\[\(layer, 1\), \(layer, 2\)\] for the second"),
    (np.array([1.0, 2.0]), "one head, L1H2, or 2 heads of one layer"),
    (np.array([1, 2, 3]), "places in a flattened table of heads, or 3 heads of one layer"),
    (pd.Series([1, 2]), "one head, L1H2, or 2 heads of one layer"),
    (pl.Series([1, 2]), "one head, L1H2, or 2 heads of one layer"),
    (pa.array([1, 2]), "one head, L1H2, or 2 heads of one layer"),
    (TABLE["name"].value_counts(), "one head, L1H1, or 2 heads of one layer"),
    (range(2), "one head, L0H1, or 2 heads of one layer"),
    ((index for index in (0, 1)), "one head, L0H1, or 2 heads of one layer"),
    ([np.array([1, 2]), "L0H1"], "one head, L1H2, or 2 heads of one layer"),
    (EFFECTS > 1, r"is a mask and names no heads: write np\.argwhere\(mask\)"),
    (np.array([True, False]), "is a mask and names no heads"),
    (np.array(np.where(EFFECTS < 1)), r"\[heads, 2\]; found shape \(2, 6\): np\.argwhere"),
    (pd.Series(["L0H0", "L0H1"], TABLE.set_index(["layer", "head"]).index), "values, L0H0 first, .* index, L1H2 first"),
    (pd.DataFrame({"layer": [-1], "head": [-1], "name": ["a set"]}), r"layer -1 and head -1 has .* write \(-1, -1\)"),
    (pl.DataFrame({"sender": ["L1MLP"], "layer": [1], "head": [-1]}), r"layer 1 and head -1 has .* write \(1, -1\)"),
    ([{"layer": 1, "head": -1}], "tables write -1 for what is not a head"),
    ([Receiver(1, -1, "mlp")], "L1MLP is not one head"),
    ([Receiver(1, 0, "k", True)], "L1KV0.k is not one head"),
]


@pytest.mark.parametrize(("heads", "said"), TWO_READINGS, ids=[str(place) for place in range(len(TWO_READINGS))])
def test_a_value_with_two_readings_is_refused_with_both(heads, said):
    with pytest.raises(BadHead, match=said):
        chosen(heads)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, heads: tls.analyze_heads(model, heads=heads, detectors=False, null_draws=2),
        lambda model, heads: tls.ablation_sweep(model, "output", heads=heads),
        lambda model, heads: tls.ablation_sweep(model, "output", heads={"a": heads}),
        lambda model, heads: tls.hooks.band_effects(model, heads),
        lambda model, heads: tls.ablation_hooks(model, heads, "output"),
        lambda model, heads: tls.edge_effects(model, "L1H0.k", senders=heads),
        lambda model, heads: tls.edge_effects(model, {"k": heads}),
        lambda model, heads: tls.hooks.receivers(heads, "k"),
        lambda model, heads: tls.top_pairs(model, heads, prompts=[[1, 2, 3]]),
        lambda model, heads: tls.relative_position_kernel(model, heads),
        lambda model, heads: tls.to_spectral(model, heads=heads),
        lambda model, heads: tls.heads.qk_penalty(model, "symmetric", heads),
        lambda model, heads: tls.ov_attribution(model, [[1, 2, 3]], heads, -1),
        lambda model, heads: tls.plots.patterns(model, [[1, 2, 3]], heads),
        lambda model, heads: tls.plots.eigenvalues(model, heads),
    ],
)
@pytest.mark.parametrize(
    "heads", [(np.array([1, 0]), np.array([2, 1])), torch.tensor([1, 2])], ids=["columns", "array"]
)
def test_whatever_takes_heads_refuses_two_readings(call, heads):
    with pytest.raises(BadHead, match="two readings"):
        unchecked(call)(shared("bridge", "llama"), heads)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, head: tls.scores(model, [[1, 2, 3]], head),
        lambda model, head: tls.plots.rotary_plane(model, head, 0, [[1, 2, 3]]),
        lambda model, head: tls.qk_attribution(model, [[1, 2, 3]], head, -1, 0),
        lambda model, head: tls.head_directions(model, head, "qk"),
        lambda model, head: tls.k_composition(model, head),
        lambda model, head: tls.hooks.check_hook(model, [], head),
        lambda model, head: tls.qk_operators(model)[head],
        lambda model, head: tls.report.head_card(TABLE, head),
    ],
)
def test_where_one_head_is_asked_for_a_layer_or_an_array_is_refused(call):
    for head in ("L1", "L1KV0", (np.array([1]), np.array([2])), torch.tensor([[1], [2]])):
        with pytest.raises(
            BadHead,
            match=r"is a (whole layer|key/value group)[, ]|names no head|two readings|found shape \(2, 1\)",
        ):
            call(shared("bridge", "llama"), head)


def test_layers_and_heads_count_from_the_end_wherever_one_is_given():
    model, last = shared("bridge", "llama"), (-1, -1)
    prompt = [[1, 2, 3]]
    assert tls.scores(model, prompt, last).equals(tls.scores(model, prompt, "L1H3"))
    assert tls.qk_operators(model)[last].head == 3
    assert tls.k_composition(model, last).equals(tls.k_composition(model, "L1H3"))
    assert [one.receiver.name for one in reached(attention_view(model), ["L1H-1.q", "L-1KV-1.k", "L-1MLP"])] == [
        "L1KV1.k", "L1MLP", "L1H3.q",
    ]  # fmt: skip
    assert [one.name for one in chosen_senders(attention_view(model), ["L-1MLP", "L0H-1"], 2)] == ["L0H3", "L1MLP"]
    table = pd.DataFrame({"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1]})
    assert pair_in_table((-1, -1), table, "the table") == (1, 1)
    for gaps in (table.iloc[1:], table.iloc[2:]):
        with pytest.raises(BadHead, match=r"\(-2, -2\) counts from the end, and the table does not hold all"):
            pair_in_table((-2, -2), gaps, "the table")
    assert _chosen_heads([-1, -2], 4, 2)[0].tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("L0H4", r"L0H4 does not exist: layer 0 has heads 0 to 3$"),
        ((0, -5), r"L0H-5 does not exist: layer 0 has heads 0 to 3, or -4 to -1 from the end$"),
        ("L2H0", r"L2H0 does not exist: the model has layers 0 to 1$"),
        ("L-3", r"L-3 does not exist: the model has layers 0 to 1, or -2 to -1 from the end$"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_range(head, said):
    with pytest.raises(BadHead, match=said):
        chosen(head)


def test_sets_called_layer_and_head_are_refused():
    """As columns they are L0H0 and L1H1, as sets L0H1 and L0H1."""
    for heads in ({"layer": [0, 1], "head": [0, 1]}, TABLE.to_dict("list"), {"layer": 1, "head": 2}):
        with pytest.raises(BadHead, match=r"two readings\. Write .* for columns of a table; give sets"):
            tls.ablation_sweep(shared("bridge", "llama"), "output", heads=heads)


@pytest.mark.parametrize(
    "given",
    [
        pl.DataFrame({"sender": ["L0H1"], "receiver": ["L1H2.k"]}),
        pa.table({"receiver": ["L1H2.k"], "x": [1]}),
        {"receiver": ["L1H2.k"]},
        pd.Series(["L1H2.k"]), pa.array(["L1H2.k"]), np.array("L1H2.k"), np.array(["L1H2.k"]), [pa.scalar("L1H2.k")],
    ],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_receivers_of_every_library(given):
    view = attention_view(shared("bridge", "llama"))
    assert [one.receiver.name for one in unchecked(reached)(view, given)] == ["L1KV1.k"]


def test_senders_of_every_library():
    view = attention_view(shared("bridge", "llama"))
    for given in (
        pd.Series(["embedding", "L0H1"]), np.array(["embedding", "L0H1"]), pa.array(["L0H1", "embedding"]),
        pl.DataFrame({"sender": ["embedding", "L0H1"], "layer": [-1, 0], "head": [-1, 1]}),
    ):  # fmt: skip
        assert [one.name for one in chosen_senders(view, given, 2)] == ["embedding", "L0H1"]


@pytest.mark.parametrize("head", NO_HEAD, ids=repr)
def test_what_is_no_pair_is_refused_with_the_forms_that_are_read(head):
    history = HeadHistory(pd.DataFrame(), pd.DataFrame(), pd.DataFrame())
    for call in (
        lambda: head_pair(head),
        lambda: chosen([head]),
        lambda: unchecked(tls.k_composition)(shared("bridge", "llama"), "" if head is None else head),  # None: all
        lambda: unchecked(_checked_pairs)([((0, 1), head)]),
        lambda: unchecked(HeadHistory.track)(history, "" if head is None else head),
    ):
        with pytest.raises(BadHead, match=f"(names no head|(is|are) .*, not a head.*): {FORMS}"):
            call()


@pytest.mark.parametrize(
    "heads",
    ["12", 12, {1: [2]}, TABLE[["layer"]], TABLE["name"] + ".k", (1, 2, 3), [1, 2, 3], TABLE.assign(head=[True, 1])],
)
def test_what_is_no_list_of_heads_is_refused(heads):
    with pytest.raises(BadHead, match=FORMS):
        chosen(heads)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: tls.ablation_sweep(model, "symmetric", heads=["12"]),
        lambda model: tls.hooks.band_effects(model, ["12"]),
        lambda model: tls.relative_position_kernel(model, ["12"]),
        lambda model: tls.to_spectral(model, heads=["12"]),
        lambda model: tls.ablation_hooks(model, ["12"], "symmetric"),
    ],
)
def test_texts_are_refused_by_whatever_takes_heads(call):
    with pytest.raises(BadHead, match=f"'12' names no head: {FORMS}"):
        call(shared("bridge", "llama"))


@pytest.mark.parametrize("at", ["12", ("1", "2"), (1, 2.5), (True, False), (1, 2, 0), [1, 2], True, None], ids=repr)
def test_operators_refuse_what_names_no_head(at):
    with pytest.raises(BadHead, match=r"(names no|, not a) head.*: (a head is|write operators\[layer, head\])"):
        tls.qk_operators(shared("bridge", "llama"))[at]


def test_parts_are_given_by_the_symbol_of_what_is_removed():
    known = ("symmetric", "antisymmetric", "rope_phase")
    assert [chosen_part(symbol, known) for symbol in ("M_S", "M_A", "Im(M_t)", "rope_phase")] == [*known, "rope_phase"]
    for given, near in (("symetric", "symmetric"), ("M_s", "M_S"), ("rope-phase", "rope_phase")):
        with pytest.raises(ValueError, match=f"not '{given}'; did you mean '{near}'"):
            chosen_part(given, known)


def test_heads_of_a_spectral_layer_are_whole_numbers():
    """A mask of booleans would choose every head."""
    for heads in ([True, False], ["1"], [0.5]):
        with pytest.raises(ValueError, match="heads= takes indices of query heads, whole numbers; found"):
            unchecked(_chosen_heads)(heads, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "role"), [("q_proj", "W_Q"), ("o_proj", "W_O")])
def test_weights_that_are_no_numbers_are_refused_by_layer_and_role(module, role):
    def spoil(model):
        model.model.layers[1].self_attn.get_submodule(module).weight.view(-1)[5] = float("nan")

    with pytest.raises(BadWeights, match=rf"layer 1, {role}: 1 of \d+ values are NaN or infinite"):
        analyze(edited("llama", spoil))


def test_a_model_whose_scores_are_not_reproduced_gets_no_table(monkeypatch):
    real = bridge_reader._score_scale
    monkeypatch.setattr(bridge_reader, "_score_scale", lambda *arguments: 1.001 * real(*arguments))
    with pytest.raises(ScoreMismatch, match="layer 0: the scores rebuilt from the folded weights differ from"):
        analyze(built("bridge", "llama"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"extras": ["score_asym", "nonsense"]}, "unknown extras"),
        ({"extras": "score_asym"}, "unknown extras"),
        ({"null_draws": 1}, "null_draws is how many draws the null has, a whole number from 2 up; found 1"),
        ({"null_blocks": "own"}, "null_blocks"),
        ({"null_dtype": "float16"}, "null_dtype"),
    ],
)
def test_unknown_wishes_are_refused_before_any_work(monkeypatch, arguments, said):
    monkeypatch.setattr(torch.linalg, "qr", lambda *_, **__: pytest.fail("work began"))
    # An unknown literal is stopped by jaxtyping's hook in tests, by the function itself elsewhere.
    with pytest.raises((ValueError, TypeError), match=said):
        analyze(built("bridge", "llama"), **arguments)


@pytest.mark.parametrize(
    "value", [1, 0, -3, 2.5, float("nan"), float("inf"), True, "3", None, [], [3], 2j, torch.ones(2)]
)
def test_what_is_no_number_of_things_is_refused_with_what_it_is(value):
    with pytest.raises(ValueError, match=r"^n is how many things, a whole number from 2 up; found "):
        counted(value, 2, "n is how many things")


def with_draws(n):
    return SimpleNamespace(**vars(NullSettings(0, 2, "shared", "float64")) | {"null_draws": n})


@pytest.mark.parametrize("value", [3, 3.0, np.int64(3), np.float32(3), torch.tensor(3)])
def test_a_whole_number_of_any_library_is_a_number_of_things(value):
    found = counted(value, 2, "n is how many things")
    assert (found, type(found)) == (3, int)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda n: unchecked(NullSettings.__post_init__)(with_draws(n)),
            "null_draws",
        ),
        (lambda n: unchecked(tls.detect_heads)(shared("bridge", "llama"), null_draws=n), "null_draws"),
        (
            lambda n: unchecked(repeated_sequences)(attention_view(shared("bridge", "llama")), n_sequences=n),
            "n_sequences",
        ),
        (
            lambda n: unchecked(repeated_sequences)(
                attention_view(shared("bridge", "llama")), n_sequences=2, segment_length=n
            ),
            "segment_length",
        ),
        (lambda n: unchecked(tls.top_pairs)(shared("bridge", "llama"), n=n), "n is how many pairs"),
        (lambda n: unchecked(band_effects)(shared("bridge", "llama"), None, draws=n), "draws"),
        (lambda n: unchecked(tls.faithfulness)(None, None, None, choose="bootstrap", null=n), "null"),
    ],
)
@pytest.mark.parametrize("value", [1.5, float("nan"), "3"])
def test_functions_refuse_a_number_of_draws_that_is_none(call, said, value):
    with pytest.raises(ValueError, match=rf"^{said} .*, a whole number from \d up; found {value!r}$"):
        call(value)


@pytest.mark.parametrize("null_blocks", ["shared", "fresh"])
def test_draws_that_no_memory_holds_are_refused_with_what_they_would_take(null_blocks):
    """12 x 12 numbers of 8 bytes a draw: 1,073 GiB for 10^9 draws, and 7,456,540 draws in 8 GiB."""
    with pytest.raises(ValueError, match=r"1,072\.9 GiB of memory .* 12 x 12 .*: give null_draws=7,456,540 or less"):
        analyze(built("bridge", "llama"), null_draws=10**9, null_blocks=null_blocks)
