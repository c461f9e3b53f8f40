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
from tlspectral.models.attention import attention_view
from tlspectral.selection import chosen_part

# --- heads and frequencies, however they are given ---


def test_heads_in_every_form():
    model = shared("bridge", "llama")
    with ablate(model, [(0, 1), (1, 3)], "symmetric"):
        expected = logits(model)
    pairs = np.array([[0, 1], [1, 3]])
    forms = [
        ((0, 1), (1, 3)),
        {(1, 3), (0, 1)},
        [(1, 3), (0, 1), (0, 1)],
        iter([(0, 1), (1, 3)]),
        ((layer, head) for layer, head in [(0, 1), (1, 3)]),
        pd.DataFrame({"layer": [1, 0], "head": [3, 1], "entropy": [0.1, 0.2]}, index=[7, 7]),
        pd.DataFrame({"layer": pairs[:, 0].astype(np.int32), "head": pairs[:, 1].astype(np.int64)}),
        pd.MultiIndex.from_tuples([(0, 1), (1, 3)], names=["layer", "head"]),
        [tuple(pair) for pair in pairs],
        [(np.int64(0), np.int32(1)), (np.int16(1), np.uint8(3))],
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
        (2, 0), [0, 0, 2], range(0, 4, 2), mask, tuple(mask), torch.tensor(mask), torch.tensor([0, 2]),
        torch.tensor([2, 0], dtype=torch.int32), [np.int64(0), np.int64(2)], np.array([0, 2]), np.array(mask),
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


@pytest.mark.parametrize("part", rotary_parts)
@pytest.mark.parametrize("name", NO_ROPE)
def test_no_rope_no_phase(name, part):
    message = f"layer 0: no rotary positions, so there is no {part} to remove"
    with (
        pytest.raises(UnsupportedArchitecture, match=message),
        ablate(shared("bridge", name), [(0, 1)], part, frequencies=[0]),
    ):
        pytest.fail("entered")


def test_layers_without_rope_are_named():
    model = shared("bridge", "smollm3")
    view = attention_view(model)
    bare = [layer for layer in range(view.n_layers) if layer not in rotary_layers(view)]
    assert bare
    heads = [(layer, 0) for layer in (*rotary_layers(view), bare[0])]
    with pytest.raises(UnsupportedArchitecture, match=f"layer {bare[0]}: no rotary positions"):
        ablation_hooks(model, heads, "rope_phase")
    with ablate(model, heads[:-1], "rope_phase"):
        assert not torch.equal(logits(model), intact("bridge", "smollm3"))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ((2, 0), "L2H0 does not exist: the model has layers 0 to 1"),
        ((-3, 0), "L-3H0 does not exist: the model has layers 0 to 1"),
        ((1, 4), "L1H4 does not exist: layer 1 has heads 0 to 3"),
        ((1, -1), "L1H-1 does not exist: layer 1 has heads 0 to 3"),
        # Grouped keys: 2 key heads, but heads are query heads.
        ((0, 99), "L0H99 does not exist: layer 0 has heads 0 to 3"),
    ],
)
def test_heads_that_do_not_exist(head, message):
    model = shared("bridge", "llama")
    for part in ("symmetric", "output"):
        with pytest.raises(BadHead, match=message), ablate(model, [(0, 0), head], part):
            pytest.fail("entered")
    with pytest.raises(BadHead, match=message):
        ablation_hooks(model, pd.DataFrame([head], columns=["layer", "head"]), "symmetric")


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [
        ("symmetric", {"frequencies": [0]}, "frequencies choose rotary pairs, and 'symmetric' is not made of them"),
        ("output", {"frequencies": []}, "'output' is not made of them"),
        ("rotary_band", {}, "rotary_band needs frequencies: the pairs whose contribution is dropped"),
        ("output", {"include_bias": True}, "include_bias has a meaning .* not for 'output'"),
        ("symmetric", {"replace": "mean"}, "goes with 'output', not 'symmetric'"),
        ("output", {"reference": torch.ones(2, 3, dtype=torch.long)}, "goes with replace='mean' or 'resample'"),
        ("output", {"replace": "mean", "reference": torch.ones(2, 129, dtype=torch.long)}, "prompt 0 has 129 tokens"),
        ("output", {"replace": "mean", "reference": torch.full((2, 3), 97)}, "token ids are 0 to 96"),
        ("long_range", {}, "long_range needs window"),
        ("long_range", {"window": 0}, "window is a whole number of keys from 1"),
        ("long_range", {"window": 1, "sinks": -1}, "sinks is a whole number of first tokens from 0"),
        ("long_range", {"window": 1, "include_bias": True}, "not for 'long_range'"),
        ("output", {"window": 4}, "window and sinks go with 'long_range', not with 'output'"),
        ("rope_phase", {"frequencies": [6]}, r"layer 0: frequencies are 0 to 5, found \[6\]"),
        ("rope_phase", {"frequencies": [0, -1]}, "layer 0: frequencies are 0 to 5"),
        ("rotary_band", {"frequencies": [True] * 5}, "layer 0: the mask has 5 entries for 6 rotary pairs"),
        ("rotary_band", {"frequencies": torch.ones(7, dtype=torch.bool)}, "the mask has 7 entries for 6"),
        ("rope_phase", {"frequencies": torch.tensor([0.5])}, "layer 0: frequencies"),
        ("rope_phase", {"frequencies": torch.tensor([[True] * 6])}, "layer 0: the mask"),
    ],
)
def test_arguments_that_make_no_sense(part, options, message):
    model = shared("bridge", "llama")
    with pytest.raises(ValueError, match=message), ablate(model, [(0, 0)], part, **options):
        pytest.fail("entered")


def test_an_unknown_part():
    with pytest.raises(ValueError, match=r"part must be one of 'symmetric', .*'output', .*not 'symmetrical'"):
        chosen_part("symmetrical", PARTS)
    # Below beartype, which checks the Literals first where tests run under it.
    check = inspect.unwrap(check_arguments)
    with pytest.raises(ValueError, match=r"replace must be 'zero', 'mean' or 'resample', not 'median'"):
        check("output", replace="median")


def test_arguments_are_checked_with_no_heads_too():
    with pytest.raises(ValueError, match="rotary_band needs frequencies"):
        ablation_hooks(shared("bridge", "llama"), [], "rotary_band")


def test_something_else_than_a_model():
    with pytest.raises(TypeError, match="neither a TransformerBridge nor a HookedTransformer"):
        ablation_hooks(torch.nn.Linear(2, 2), [(0, 0)], "symmetric")
