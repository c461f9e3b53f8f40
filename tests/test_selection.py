"""Heads, pairs and layers as callers give them: what is read, and what is refused in words that say what to write."""

import inspect
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from attribution_nodes import EDGES, EMBED, HEAD, LOGITS, NODES, QUERY, AttributionResult
from head_tables import analyze, built
from reference_circuits import edited
from zoo import shared

import tlspectral as tls
from tlspectral.errors import BadHead, BadWeights, ScoreMismatch
from tlspectral.heads.weight_columns import NullSettings
from tlspectral.history.checkpoint_tables import HeadHistory
from tlspectral.history.recording import _checked_pairs
from tlspectral.hooks import band_effects
from tlspectral.models.reading import attention_view
from tlspectral.models.reading import bridge as bridge_reader
from tlspectral.models.reading.view import heads_by_layer
from tlspectral.selection import chosen_part, counted, head_pair, head_pairs, naming_nodes, read_receivers
from tlspectral.spectral_rope.module import _chosen_heads
from tlspectral.tasks.repeated import repeated_sequences

FORMS = r'a head is "L5H1", "5\.1", \(5, 1\) or a table row with layer and head; heads are one of these, "L5" for all'
TABLE = pd.DataFrame({"head": [2, 3], "layer": [1, 0], "name": ["L1H2", "L0H3"]})
# In every place where one head is given.
NO_HEAD = [
    "12", "L1H2H3", "head 2", "1,2", 1.2,
    b"12", ("1", "2"), (1, 2.5), (1, float("nan")), (True, False), (1, np.bool_(True)), (1, 2, 0), (1,),
    (), {"layer": 1, "head": 2}, {1, 2}, [[1, 2]], 12, None, (1, None), torch.tensor(12), torch.tensor([1.0, 2.0]),
    torch.tensor([True, True]),
]  # fmt: skip


NAMES = "of TransformerLens' nodes, which are at one position each, give the names: "


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
        (1, 2), [1, 2], np.array([1, 2]), torch.tensor([1, 2]), (np.int64(1), np.uint8(2)), (1.0, np.float64(2.0)),
        "L1H2", "1.2", "l1h2", " L1H2 ", "L-1H2", "-1.2", (-1, 2),
        TABLE.iloc[0], TABLE[["head", "layer"]].iloc[0], TABLE.set_index(["layer", "head"]).iloc[0],
        next(TABLE.itertuples()), next(TABLE.itertuples(index=False)),
    ],
)  # fmt: skip
def test_a_pair_in_every_form(head):
    """A row of a table gives its layer and its head by their names, in whichever order they stand."""
    assert head_pair(head, 2) == (1, 2)
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
    ],
)
def test_heads_in_every_form(heads):
    assert chosen(heads) == {0: [3], 1: [2]}


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
        with pytest.raises(BadHead, match=f"names no head: {FORMS}"):
            call()


@pytest.mark.parametrize(
    "heads", ["12", 12, {1: [2]}, TABLE[["layer"]], TABLE["name"], (1, 2, 3), [1, 2, 3], TABLE.assign(head=[True, 1])]
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
    with pytest.raises(BadHead, match=r"names no head: (a head is|write operators\[layer, head\])"):
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
        with pytest.raises(ValueError, match="heads are the indices of query heads, whole numbers; found"):
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
        (lambda n: unchecked(repeated_sequences)(attention_view(shared("bridge", "llama")), n), "n_sequences"),
        (lambda n: unchecked(repeated_sequences)(attention_view(shared("bridge", "llama")), 2, n), "segment_length"),
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
    with pytest.raises(ValueError, match=r"12 x 12 .* 1,072\.9 GiB of memory: give null_draws of 7,456,540 at most"):
        analyze(built("bridge", "llama"), null_draws=10**9, null_blocks=null_blocks)
