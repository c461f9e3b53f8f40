"""Heads, frequencies and receivers as they are given to ablation hooks: every form, and what is refused."""

import numpy as np
import pandas as pd
import pytest
import torch
from ablation_runs import NO_ROPE, ablated, intact, rotary_layers
from zoo import shared

from tlspectral.errors import BadHead, UnsupportedArchitecture
from tlspectral.hooks import ablate, ablation_hooks
from tlspectral.hooks.parts import Band, Output, RopePhase
from tlspectral.models.reading import attention_view

# --- heads and frequencies, however they are given ---


LAYER = [(1, head) for head in range(4)]
PAIRS = np.array([[0, 1], [1, 3]])
HEADS = [
    *(
        ([(0, 1), (1, 3)], heads)
        for heads in (
            {(1, 3), (0, 1)},
            [(1, 3), (0, 1), (0, 1)],
            iter([(0, 1), (1, 3)]),
            pd.DataFrame({"layer": [1, 0], "head": [3, 1], "entropy": [0.1, 0.2]}, index=[7, 7]),
            pd.MultiIndex.from_tuples([(0, 1), (1, 3)], names=["layer", "head"]),
            [tuple(pair) for pair in PAIRS],
            [(np.int16(1), np.uint8(3)), "L0H1"],
        )
    ),
    *((LAYER, heads) for heads in ("L1", " l1 ", ["L-1", "L1H3"])),
    ([*LAYER, (0, 2)], ["L1", "L0H2"]),
    ([], pd.DataFrame({"layer": [], "head": []})),
]
MASK = [True, False, True, False, False, False]
FREQUENCIES = [
    (2, 0), [0, 0, 2], range(0, 4, 2), MASK, torch.tensor(MASK), torch.tensor([2, 0], dtype=torch.int32),
    [np.int64(0), np.int64(2)], np.array([0, 2]), np.array(MASK),
]  # fmt: skip


@pytest.mark.slow
def test_heads_and_frequencies_in_every_form():
    model = shared("bridge", "llama")
    for plain, heads in HEADS:
        assert torch.equal(ablated(model, heads, "symmetric"), ablated(model, plain, "symmetric"))
    expected = ablated(model, [(0, 1)], RopePhase([0, 2]))
    for frequencies in FREQUENCIES:
        assert torch.equal(ablated(model, [(0, 1)], RopePhase(frequencies)), expected)
    # The same product with the columns chosen or taken whole: measured 0.0.
    everything = ablated(model, [(0, 1)], RopePhase(range(6)))
    assert float((ablated(model, [(0, 1)], "rope_phase") - everything).abs().max()) < 2e-6


# --- refusals ---

REFERENCE = torch.ones(2, 3, dtype=torch.long)
REFUSED = [
    # Settings that this model cannot have (others: test_part_values).
    ("L0H0", Output("mean", REFERENCE.repeat(1, 43)), None, ValueError, "reference: .*129 tokens"),
    ("L0H0", Output("mean", 97 * REFERENCE), None, ValueError, "reference: .*token ids are 0 to 96"),
    ("L0H0", RopePhase([6]), None, ValueError, r"layer 0: frequencies are 0 to 5, found \[6\]"),
    ("L0H0", RopePhase([0, -1]), None, ValueError, "layer 0: frequencies are 0 to 5"),
    ("L0H0", Band([True] * 5), None, ValueError, "layer 0: the mask has 5 entries for 6"),
    ("L0H0", RopePhase(torch.tensor([0.5])), None, ValueError, "layer 0: frequencies"),
    ("L0H0", RopePhase(torch.tensor([[True] * 6])), None, ValueError, "layer 0: the mask"),
    # Heads that do not exist, and receivers that read before a head writes.
    ([(0, 0), (2, 0)], "output", None, BadHead, "L2H0 does not exist: the model has layers 0 to 1"),
    ([(0, 0), (-3, 0)], "symmetric", None, BadHead, "L-3H0 does not exist"),
    ("L2", "symmetric", None, BadHead, "the model has layers 0 to 1"),
    (["L0H0", "L-3"], "symmetric", None, BadHead, "the model has layers 0 to 1"),
    # Grouped keys: 2 key heads, but heads are query heads.
    ([(0, 0), (1, 4)], "symmetric", None, BadHead, "L1H4 does not exist: layer 1 has heads 0 to 3"),
    (pd.DataFrame([(1, -1)], columns=["layer", "head"]), "symmetric", None, BadHead, "head -1 has two readings"),
    ("L0H1", "output", "L1H9.k", BadHead, "L1H9.k does not exist"),
    (["L0H1", "L1H2"], "output", ["L1H3.k", "L1H1.k"], ValueError, "L1KV0.k reads before L1H2 writes"),
    ("L1H0", "output", "L0H1.v", ValueError, "L0KV0.v reads before L1H0"),
]


@pytest.mark.parametrize(("heads", "part", "into", "error", "words"), REFUSED)
def test_what_is_refused(heads, part, into, error, words):
    model = shared("bridge", "llama")
    with pytest.raises(error, match=words), ablate(model, heads, part, into=into):
        pytest.fail("entered")


@pytest.mark.parametrize("name", NO_ROPE)
def test_no_rope_no_phase(name):
    for part in (RopePhase(), Band([0])):
        with pytest.raises(
            UnsupportedArchitecture, match=f"layer 0: no rotary positions, so there is no {part.name} to remove"
        ):
            ablation_hooks(shared("bridge", name), [(0, 1)], part)


def test_layers_without_rope_are_named():
    model = shared("bridge", "smollm3")
    view = attention_view(model)
    bare = [layer for layer in range(view.n_layers) if layer not in rotary_layers(view)]
    heads = [(layer, 0) for layer in (*rotary_layers(view), bare[0])]
    with pytest.raises(UnsupportedArchitecture, match=f"layer {bare[0]}: no rotary positions"):
        ablation_hooks(model, heads, "rope_phase")
    assert not torch.equal(ablated(model, heads[:-1], "rope_phase"), intact("bridge", "smollm3"))


LINES = {
    "output": (
        lambda: {"heads": "L0H1", "part": "output"},
        ["blocks.0.attn.hook_z: L0H1, output replaced by zeros"],
        "<ablate: L0H1, output replaced by zeros>",
    ),
    "mean": (
        lambda: {"heads": ["L0H1", "L0H2"], "part": Output("mean", torch.arange(12).view(3, 4), at=2)},
        ["blocks.0.attn.hook_z: L0H1, L0H2, output replaced by the mean over the reference (at 2)"],
        "<ablate: L0H1, L0H2, output replaced by the mean over the reference (at 2)>",
    ),
    "scores": (
        lambda: {"heads": "L1H3", "part": RopePhase(frequencies=[0, 1])},
        [
            "blocks.1.attn.hook_q: L1H3, read",
            "blocks.1.attn.hook_k: L1H3, read",
            "blocks.1.attn.hook_attn_scores: L1H3, rope_phase taken out (frequencies [0, 1])",
        ],
        "<ablate: L1H3, rope_phase taken out (frequencies [0, 1])>",
    ),
    "edge": (
        lambda: {"heads": "L0H1", "part": "output", "into": "L1KV0.k"},
        ["L1KV0.k, read", "L1KV0.k, output of L0H1 replaced by zeros", "drops activations that an earlier run left"],
        "<ablate: L0H1, output replaced by zeros, in what L1KV0.k read>",
    ),
    "nothing": (lambda: {"heads": [], "part": "output"}, ["[]"], "<ablate: no head, output replaced by zeros>"),
}


@pytest.mark.parametrize("case", LINES)
def test_hooks_and_blocks_print_a_line_each(case):
    given, lines, of_block = LINES[case]
    model = shared("bridge", "llama")
    hooks = ablation_hooks(model, **given())
    printed = repr(hooks).splitlines()
    assert len(printed) == max(1, len(hooks))
    assert [line.split(": ")[0] for line in printed if hooks] == [name for name, _ in hooks]
    for line in lines:
        assert any(one.endswith(line) for one in printed), (line, printed)
    assert "array" not in repr([*hooks])
    assert "tensor" not in repr([*hooks])  # also in a list of the caller's own no hook prints its model or arrays
    assert len(repr([*hooks])) < 250 * max(1, len(hooks))
    block = ablate(model, **given())
    assert repr(block) == of_block
    with block:
        pass
