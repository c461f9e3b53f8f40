"""Heads, frequencies and parts as they are given to ablation hooks: every form, and what is refused."""

import inspect

import numpy as np
import pandas as pd
import pytest
import torch
from ablation_runs import NO_ROPE, intact, logits, rotary_layers, rotary_parts
from zoo import shared

from tlspectral.errors import BadHead, UnsupportedArchitecture
from tlspectral.hooks import PARTS, ablate, ablation_hooks
from tlspectral.hooks.arguments import check_arguments
from tlspectral.hooks.edge_reach import check_edge
from tlspectral.models.attention import attention_view
from tlspectral.selection import chosen_part

# --- heads and frequencies, however they are given ---


def test_heads_in_every_form():
    model = shared("bridge", "llama")
    with ablate(model, [(0, 1), (1, 3)], "symmetric"):
        expected = logits(model)
    pairs = np.array([[0, 1], [1, 3]])
    forms = [
        {(1, 3), (0, 1)},
        [(1, 3), (0, 1), (0, 1)],
        iter([(0, 1), (1, 3)]),
        pd.DataFrame({"layer": [1, 0], "head": [3, 1], "entropy": [0.1, 0.2]}, index=[7, 7]),
        pd.MultiIndex.from_tuples([(0, 1), (1, 3)], names=["layer", "head"]),
        [tuple(pair) for pair in pairs],
        [(np.int16(1), np.uint8(3)), "L0H1"],
    ]
    for heads in forms:
        with ablate(model, heads, "symmetric"):
            assert torch.equal(logits(model), expected)
    with ablate(model, pd.DataFrame({"layer": [], "head": []}), "symmetric"):
        assert torch.equal(logits(model), intact("bridge", "llama"))


def test_frequencies_in_every_form():
    model = shared("bridge", "llama")
    with ablate(model, [(0, 1)], "rope_phase", frequencies=[0, 2]):
        expected = logits(model)
    mask = [True, False, True, False, False, False]
    forms = [
        (2, 0), [0, 0, 2], range(0, 4, 2), mask, torch.tensor(mask), torch.tensor([2, 0], dtype=torch.int32),
        [np.int64(0), np.int64(2)], np.array([0, 2]), np.array(mask),
    ]  # fmt: skip
    for frequencies in forms:
        with ablate(model, [(0, 1)], "rope_phase", frequencies=frequencies):
            assert torch.equal(logits(model), expected)
    with ablate(model, [(0, 1)], "rope_phase", frequencies=range(6)):
        everything = logits(model)
    with ablate(model, [(0, 1)], "rope_phase"):
        # The same product with the columns chosen or taken whole: measured 0.0.
        assert float((logits(model) - everything).abs().max()) < 2e-6


# --- refusals ---

REFERENCE = torch.ones(2, 3, dtype=torch.long)
REFUSED = [
    # Arguments that do not go together.
    ("L0H0", "symmetric", {"frequencies": [0]}, ValueError, "frequencies .*'symmetric'"),
    ("L0H0", "output", {"frequencies": []}, ValueError, "frequencies .*'output'"),
    ("L0H0", "rotary_band", {}, ValueError, "rotary_band needs frequencies"),
    ([], "rotary_band", {}, ValueError, "rotary_band needs frequencies"),
    ("L0H0", "output", {"include_bias": True}, ValueError, "include_bias .*'output'"),
    ("L0H0", "long_range", {"window": 1, "include_bias": True}, ValueError, "include_bias .*'long_range'"),
    ("L0H0", "symmetric", {"replace": "mean"}, ValueError, "replace='mean' .*'output', not 'symmetric'"),
    ("L0H0", "output", {"reference": REFERENCE}, ValueError, "reference goes with replace"),
    ("L0H0", "long_range", {}, ValueError, "long_range needs window"),
    ("L0H0", "output", {"window": 4}, ValueError, "window and sinks go with 'long_range'"),
    ("L0H0", "output", {"sinks": 4}, ValueError, "window and sinks go with 'long_range'"),
    ("L0H0", "output", {"into": (1, 1)}, ValueError, "into needs input"),
    ("L0H0", "output", {"input": "k"}, ValueError, "input needs into"),
    # Values out of range.
    ("L0H0", "output", {"replace": "mean", "reference": REFERENCE.repeat(1, 43)}, ValueError, "129 tokens"),
    ("L0H0", "output", {"replace": "mean", "reference": 97 * REFERENCE}, ValueError, "token ids are 0 to 96"),
    ("L0H0", "long_range", {"window": 0}, ValueError, "window is a whole number"),
    ("L0H0", "long_range", {"window": 1, "sinks": -1}, ValueError, "sinks is a whole number"),
    ("L0H0", "rope_phase", {"frequencies": [6]}, ValueError, r"layer 0: frequencies are 0 to 5, found \[6\]"),
    ("L0H0", "rope_phase", {"frequencies": [0, -1]}, ValueError, "layer 0: frequencies are 0 to 5"),
    ("L0H0", "rotary_band", {"frequencies": [True] * 5}, ValueError, "layer 0: the mask has 5 entries for 6"),
    ("L0H0", "rope_phase", {"frequencies": torch.tensor([0.5])}, ValueError, "layer 0: frequencies"),
    ("L0H0", "rope_phase", {"frequencies": torch.tensor([[True] * 6])}, ValueError, "layer 0: the mask"),
    # Heads that do not exist, and targets that read before a source writes.
    ([(0, 0), (2, 0)], "output", {}, BadHead, "L2H0 does not exist: the model has layers 0 to 1"),
    ([(0, 0), (-3, 0)], "symmetric", {}, BadHead, "L-3H0 does not exist"),
    # Grouped keys: 2 key heads, but heads are query heads.
    ([(0, 0), (1, 4)], "symmetric", {}, BadHead, "L1H4 does not exist: layer 1 has heads 0 to 3"),
    (pd.DataFrame([(1, -1)], columns=["layer", "head"]), "symmetric", {}, BadHead, "L1H-1 does not exist"),
    ("L0H1", "output", {"into": "L1H9", "input": "k"}, BadHead, "L1H9 does not exist"),
    (["L0H1", "L1H2"], "output", {"into": ["L1H3", "L1H1"], "input": "k"}, ValueError, "L1H1 reads before L1H2"),
    ("L1H0", "output", {"into": "L0H1", "input": "v"}, ValueError, "L0H1 reads before L1H0"),
]


@pytest.mark.parametrize(("heads", "part", "options", "error", "words"), REFUSED)
def test_what_is_refused(heads, part, options, error, words):
    model = shared("bridge", "llama")
    with pytest.raises(error, match=words), ablate(model, heads, part, **options):
        pytest.fail("entered")


@pytest.mark.parametrize("name", NO_ROPE)
def test_no_rope_no_phase(name):
    for part in rotary_parts:
        with pytest.raises(UnsupportedArchitecture, match=f"layer 0: no rotary positions, so there is no {part}"):
            ablation_hooks(shared("bridge", name), [(0, 1)], part, frequencies=[0])


def test_layers_without_rope_are_named():
    model = shared("bridge", "smollm3")
    view = attention_view(model)
    bare = [layer for layer in range(view.n_layers) if layer not in rotary_layers(view)]
    heads = [(layer, 0) for layer in (*rotary_layers(view), bare[0])]
    with pytest.raises(UnsupportedArchitecture, match=f"layer {bare[0]}: no rotary positions"):
        ablation_hooks(model, heads, "rope_phase")
    with ablate(model, heads[:-1], "rope_phase"):
        assert not torch.equal(logits(model), intact("bridge", "smollm3"))


def test_words_that_it_does_not_know_are_refused():
    # Below beartype, which checks the Literals first where tests run under it.
    check, edge = inspect.unwrap(check_arguments), inspect.unwrap(check_edge)
    with pytest.raises(ValueError, match=r"part must be one of 'symmetric', .*'output', .*not 'symmetrical'"):
        chosen_part("symmetrical", PARTS)
    with pytest.raises(ValueError, match=r"replace must be 'zero', 'mean' or 'resample', not 'median'"):
        check("output", replace="median")
    with pytest.raises(ValueError, match=r"input must be 'q', 'k' or 'v' .*not 'z'"):
        edge("L1H1", "z")


def test_something_else_than_a_model():
    with pytest.raises(TypeError, match="neither a TransformerBridge nor a HookedTransformer"):
        ablation_hooks(torch.nn.Linear(2, 2), [(0, 0)], "symmetric")
