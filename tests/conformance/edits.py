"""What `ablate` changes and what it leaves alone to the bit, beside explicit operators in float64."""

import pytest
import torch
import zoo
from ablation_runs import a_part, applicable, in_dtype, logits, recorded, rotary_layers, rotary_parts
from explicit_patterns import CASES, explicit_pattern, run_ablated, worst_error

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate, parts
from tlspectral.models.reading import attention_view

from .rows import asked, right

# Whose bridges compute norms and softmax in the model's own precision.
IN_ITS_OWN_PRECISION = ("gpt2", "neox", "phi", "bloom")


def first_time(x):
    """Of what passes each time that a layer runs in a pass, that of the first time."""
    return x[: len(zoo.prompt())]


def editable(row, part):
    return row.read_right and (row.rotary or part not in rotary_parts)


def explicit(row, case):
    return editable(row, case[0])


def in_double(row, case):
    """Whether all of the model runs in float64: wrapped softmaxes and RMS norms of bridges do not."""
    return explicit(row, case) and (row.backend == "hooked" or row.name in IN_ITS_OWN_PRECISION)


@asked(editable, every=9, part=("symmetric", "antisymmetric", *rotary_parts), encoders=True)
def other_heads_and_earlier_layers_are_as_they_were_to_the_bit(row, part):
    layer, head = applicable(row.view, part)[-1], 1
    with ablate(row.model, [(layer, head)], parts.Band([0]) if part == "rotary_band" else part):
        during = recorded(row.model, ("pattern", "z"))
    for (index, point), found in during.items():
        if index > layer:
            continue
        both = map(first_time, (row.run[index, point], found))
        old, new = (x.transpose(1, 2) if point == "z" else x for x in both)
        others = [h for h in range(old.shape[1]) if (index, h) != (layer, head)]
        assert torch.equal(old[:, others], new[:, others])
        if index == layer:
            # The ablation is not idle: it moves pattern and z by far more than rounding, 1e-6.
            assert float((old[:, head] - new[:, head]).abs().max()) > 1e-3


@asked(right, every=3, encoders=True)
def output_silences_the_head(row):
    with ablate(row.model, [(0, 1), (1, 0)], "output"):
        during = recorded(row.model, ("z",))
    assert not during[0, "z"][:, :, 1].any()
    assert not during[1, "z"][:, :, 0].any()
    others = [head for head in range(row.view.n_heads(0)) if head != 1]
    assert torch.equal(*(first_time(run[0, "z"])[:, :, others] for run in (row.run, during)))
    assert during[1, "z"][:, :, 1].any()


@asked(editable, every=9, part=("output", "antisymmetric", "rope_phase", "long_range"))
def at_a_position_a_part_is_gone_there_and_nowhere_else(row, part):
    layer, head, at = applicable(row.view, part)[-1], 1, [5, 7][: len(zoo.prompt())]
    kind = {"output": parts.Output, "antisymmetric": parts.Antisymmetric, "rope_phase": parts.RopePhase}.get(part)
    made = (lambda **given: parts.LongRange(2, **given)) if kind is None else kind
    with ablate(row.model, [(layer, head)], made()):
        everywhere = first_time(recorded(row.model, ("z",))[layer, "z"])
    with ablate(row.model, [(layer, head)], made(at=at)):
        found = first_time(recorded(row.model, ("z",))[layer, "z"])
    rows = range(len(at))
    before = first_time(row.run[layer, "z"])
    expected = before.clone()
    expected[rows, at, head] = everywhere[rows, at, head]
    # Rounding of one matrix product: 0 to 1e-7 measured; the part moves z by hundredths.
    torch.testing.assert_close(found[rows, at, head], expected[rows, at, head], rtol=0, atol=1e-6)
    found[rows, at, head] = expected[rows, at, head]
    assert torch.equal(found, expected)
    assert float((expected - before).abs().max()) > 1e-3


@asked(right, every=6, encoders=True)
def nothing_asked_is_nothing_changed_to_the_bit(row):
    for part in ("symmetric", "antisymmetric", "output"):
        with ablate(row.model, [], part):
            assert torch.equal(logits(row.model), row.logits)
    if not row.rotary:
        return
    heads = [(layer, head) for layer in rotary_layers(row.view) for head in range(row.view.n_heads(layer))]
    nothing = torch.zeros(row.view.rotary(heads[0][0]).n_pairs, dtype=torch.bool)
    for part in (parts.RopePhase, parts.Band):
        for frequencies in ([], nothing, nothing.tolist()):
            with ablate(row.model, heads, part(frequencies)):
                assert torch.equal(logits(row.model), row.logits)


@asked(right, every=3, part=(parts.Symmetric, parts.Antisymmetric), encoders=True)
def where_nothing_rotates_a_static_part_is_the_default_one(row, part):
    heads = [(layer, head) for layer in row.layers for head in (0, 1) if row.view.rotary(layer) is None]
    found = []
    for static in (False, True):
        with ablate(row.model, heads, part(static=static)):
            found.append(logits(row.model))
    assert torch.equal(*found)
    assert (float((found[0] - row.logits).abs().max()) > 1e-3) == bool(heads)
    turning = [(layer, 1) for layer in row.layers if row.view.rotary(layer) is not None][:1]
    for static in (False, True):
        with ablate(row.model, turning, part(static=static)):
            found.append(logits(row.model))
    # Where pairs rotate, they differ by far more than rounding, 1e-6.
    assert (float((found[2] - found[3]).abs().max()) > 1e-3) == bool(turning)


@asked(explicit, every=9, forms=True, case=CASES, encoders=True)
def ablated_heads_follow_explicit_operators(row, case):
    # A run in float32 against float64: measured at most 8e-7, 1.1e-6 under YaRN (a factor enlarges scores), 1.8e-6 in
    # Gemma 3n (scores are not divided), 1.7e-6 in BLOOM on two busy threads. A part left in, a sign, a bias or a mask
    # wrong moves a pattern by tenths.
    most = {"bloom": 3e-6, "yarn": 2e-6, "gemma3n": 3e-6}.get(row.name, 1e-6)
    assert worst_error(row.model, row.backend, row.name, case) < most


@asked(in_double, every=9, case=CASES, encoders=True)
def in_float64_they_follow_to_rounding(row, case):
    model = in_dtype(row.backend, row.name, torch.float64)
    layers, heads, mask, seen = run_ablated(model, case, ("residual", "scores", "cos", "sin"))
    view = attention_view(model)
    for index in layers:
        expected = explicit_pattern(view, row.name, index, seen, (case[0], mask, case[2]), heads)
        found = seen[index, "scores"][:, heads].softmax(-1)
        # Measured at most 2e-15: what float32 shows above is rounding. A table or bias in float32 would show at 1e-8.
        assert float((found - expected).abs().max()) < 1e-13


@asked(right, every=3, encoders=True)
def left_padding_is_followed_or_refused(row):
    pad, tokens = 5, zoo.prompt(length=19)
    padded = torch.cat([torch.zeros(2, pad, dtype=torch.long), tokens], 1)
    mask = torch.ones_like(padded)
    mask[:, :pad] = 0
    part = a_part(row.name)
    heads = [(rotary_layers(row.view)[-1] if part == "rope_phase" else 1, 1), (0, 2)]
    if row.delegated:
        with (
            pytest.raises(EditNotHonored, match=r"layer 0: .*padding.*with another backend"),
            ablate(row.model, heads, part),
        ):
            logits(row.model, padded, attention_mask=mask)
        part = "output"
    with ablate(row.model, heads, part):
        expected, found = logits(row.model, tokens), logits(row.model, padded, attention_mask=mask)[:, pad:]
    # Positions shift and with them the rounding of rotations: measured 2e-6 on logits of size 2. Pads that were
    # attended, or an ablation by other offsets, move them by tenths.
    assert float((found - expected).abs().max()) < 1e-5
