"""Receivers of edges: their names, the keys and values that heads share, aliases, and what names none."""

import inspect

import pandas as pd
import pytest
from zoo import shared

import tlspectral as tls
from tlspectral.errors import BadHead
from tlspectral.hooks.edges.reached import reached
from tlspectral.models.reading import attention_view
from tlspectral.selection.node_names import Receiver
from tlspectral.selection.receivers_as_written import read_receivers


def of(name, given):
    """Name, heads that were asked for and heads that are reached, of each receiver in a model."""
    found = reached(attention_view(shared("bridge", name)), given)
    return [(one.receiver.name, one.asked, one.heads) for one in found]


# --- names, without a model ---


def test_a_name_is_read_in_every_form_and_given_back():
    assert read_receivers("L18H6.q") == [Receiver(18, 6, "q")]
    for name in ("L18KV2.k", "l18kv2.K", " L18KV2.k ", "18KV2.k"):
        assert read_receivers(name) == [Receiver(18, 2, "k", True)]
    assert read_receivers("18.6.v") == [Receiver(18, 6, "v")]
    assert read_receivers("L-1H0.k") == [Receiver(-1, 0, "k")]
    names = ["L18H6.q", "L18KV2.k", "L0H0.v"]
    assert [one.name for one in read_receivers(names)] == names
    assert read_receivers(read_receivers(names)) == read_receivers(names)


def test_lists_and_tables_of_receivers():
    expected = [Receiver(1, 0, "k"), Receiver(1, 2, "q")]
    table = pd.DataFrame({"sender": "L0H0", "receiver": ["L1H0.k", "L1H2.q", "L1H0.k"]}, index=[7, 7, 3])
    for given in (["L1H0.k", "L1H2.q", "L1H0.k"], iter(("L1H0.k", "L1H2.q")), table, table["receiver"], expected):
        assert read_receivers(given) == expected
    assert read_receivers([]) == []


def test_receivers_of_heads():
    frame = pd.DataFrame({"layer": [1, 0], "head": [3, 2], "entropy": 0.5})
    for heads in (["L1H3", (0, 2)], frame, frame.set_index(["layer", "head"])):
        assert tls.hooks.receivers(heads, "v") == ["L1H3.v", "L0H2.v"]
    assert tls.hooks.receivers("L1H3", "q") == ["L1H3.q"]
    with pytest.raises(ValueError, match=r"input must be 'q', 'k' or 'v' .*not 'z'"):
        inspect.unwrap(tls.hooks.receivers)("L1H3", "z")
    with pytest.raises(BadHead, match="'L1' is a whole layer, and here heads are named one by one, such as L1H0"):
        tls.hooks.receivers("L1", "k")


def test_heads_by_what_is_read_of_them():
    """In any form, also a whole layer; in a model of grouped keys they are its groups."""
    frame = pd.DataFrame({"layer": [1], "head": [2]})
    for heads in ("L1H2", [(1, 2)], frame, frame.set_index(["layer", "head"]), "L-1H2"):
        assert of("gpt2", {"q": heads, "v": "L1H0"}) == of("gpt2", ["L1H2.q", "L1H0.v"])
    view = attention_view(shared("bridge", "llama3"))
    assert of("llama3", {"k": "L1"}) == of("llama3", [f"L1H{head}.k" for head in range(view.n_heads(1))])
    assert of("gpt2", {}) == of("gpt2", {"k": []}) == []
    with pytest.raises(BadHead, match="L1H9 does not exist"):
        of("gpt2", {"k": "L1H9"})
    with pytest.raises(BadHead, match=r"names no receivers: .* the keys of heads are \{\"k\": heads\}"):
        of("gpt2", {"z": "L1H0"})


NO_RECEIVER = ["L1H0", "L1H0.z", "L1KV0.q", "KV0.k", "", "L1MLP.q", 3, None, (1, 0), {"L1H0.k": 1}, ["L1H0.k", 2]]


@pytest.mark.parametrize("given", NO_RECEIVER, ids=repr)
def test_what_names_no_receiver_is_refused(given):
    with pytest.raises(
        BadHead, match=r'(names no|a head, not a) receivers?: a receiver is "L18H6.q", "L18H6.k" or "L18KV2.k"'
    ):
        inspect.unwrap(read_receivers)(given)


def test_a_table_without_receivers_is_refused():
    with pytest.raises(BadHead, match="a DataFrame without a column receiver names no receivers"):
        read_receivers(pd.DataFrame({"layer": [1], "head": [0]}))


# --- in a model ---


def test_keys_that_heads_share_are_one_receiver_and_those_of_one_head_have_its_name():
    # Two heads to a key/value head.
    assert of("llama", "L1KV1.k") == [("L1KV1.k", (2, 3), (2, 3))]
    assert of("llama", "L1H3.k") == [("L1KV1.k", (3,), (2, 3))]  # by an alias
    assert of("llama", ["L1H3.k", "L1H2.k", "L1H3.k"]) == [("L1KV1.k", (2, 3), (2, 3))]
    assert of("llama", ["L1H3.v", "L1KV1.v"]) == [("L1KV1.v", (2, 3), (2, 3))]
    assert of("llama", "L-1H0.v") == [("L1KV0.v", (0,), (0, 1))]
    assert of("llama", "L1H3.q") == [("L1H3.q", (3,), (3,))]
    assert of("gpt2", ["L1H3.k", "L1KV3.k"]) == [("L1H3.k", (3,), (3,))]


def test_a_norm_over_all_heads_reaches_them_all():
    assert of("olmo2", "L1H1.q") == [("L1H1.q", (1,), (0, 1, 2, 3))]
    assert of("olmo2", "L1KV1.k") == [("L1KV1.k", (2, 3), (0, 1, 2, 3))]
    assert of("olmo2", "L1KV1.v") == [("L1KV1.v", (2, 3), (2, 3))]


def test_receivers_are_sorted_by_layer_input_and_head():
    given = ["L1H2.q", "L1KV0.v", "L0H0.v", "L1H0.q", "L1H3.k"]
    assert [name for name, _, _ in of("llama", given)] == ["L0KV0.v", "L1KV1.k", "L1H0.q", "L1H2.q", "L1KV0.v"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("L2H0.k", "L2H0.k does not exist: the model has layers 0 to 1"),
        ("L-3H0.k", "L-3H0.k does not exist: the model has layers 0 to 1"),
        ("L1H4.q", "L1H4.q does not exist: layer 1 has heads 0 to 3"),
        ("L1KV2.k", "L1KV2.k does not exist: layer 1 has key/value heads 0 to 1"),
    ],
)
def test_receivers_that_the_model_lacks_are_refused(given, said):
    with pytest.raises(BadHead, match=said):
        of("llama", given)
