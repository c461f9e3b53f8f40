"""Chance in `attrs`: what `detect_heads` measures of a head that attends alike to all keys that its queries see."""

from functools import partial

import pytest
import torch
import zoo
from zoo import shared

import tlspectral as tls
from tlspectral.heads.detectors.chance import one_or_by_layer
from tlspectral.heads.detectors.spread import MEASURES, WITHOUT_SINKS
from tlspectral.models.reading import attention_view
from tlspectral.tables.detector_columns import DETECTORS

# TransformerLens 4 says of layers that delegate their attention that the output does not follow a changed pattern.
pytestmark = pytest.mark.filterwarnings("ignore:A hook on .* returned a modified tensor")


def uniform(pattern, hook):
    """Attention of the same size to each key that gets any from some head on some prompt."""
    seen = (pattern > 0).any(1, keepdim=True).any(0, keepdim=True).to(pattern)
    return (seen / seen.sum(-1, keepdim=True)).expand_as(pattern)


def uniform_heads(model):
    view = attention_view(model)
    return model.hooks(fwd_hooks=[(view.hook_names(layer)["pattern"], uniform) for layer in view.layers])


def levels(chance, n_layers):
    """The chance of each layer."""
    return [chance[f"L{layer}"] if isinstance(chance, dict) else chance for layer in range(n_layers)]


def assert_chance_is_measured(model, table, names):
    n_layers = attention_view(model).n_layers
    for name in names:
        chance = table.attrs["chance"]
        expected = levels(chance[name] if isinstance(chance, dict) else chance, n_layers)
        for layer, level in enumerate(expected):
            measured = table.loc[table["layer"] == layer, name]
            # Measured: 4e-7, float32 rows; a window of 8 in prompts of 30 tokens changes each level by .01 and more.
            assert (
                measured.isna().all()
                if level is None
                else measured.tolist() == pytest.approx([level] * len(measured), rel=1e-5, abs=1e-7)
            ), (name, layer)


ROWS = ["llama", "mistral", "gemma3", "llama4", "bert"]


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", [*ROWS, *zoo.also_slow("gpt2", "gptneo", "gemma3n", "gemma4")])
def test_on_prompts_chance_is_what_uniform_heads_have(name):
    """No window, one on all layers, on some, chunks, an encoder; prompts of unequal length, and a pattern."""
    model, encoder = shared("bridge", name), name in zoo.ENCODERS
    lengths = (30, 30) if encoder else (30, 12, 41)
    rows = [torch.randint(3, 9, (length,), generator=zoo.generator(seed)) for seed, length in enumerate(lengths)]
    sinks = None if name == "mistral" else "found"  # a window of 8 decides no key
    with uniform_heads(model):
        table = tls.detect_heads(model, prompts=rows, pattern="local", sinks=sinks)
    names = ["prev", "dup", "ind", "self", *(["next"] if encoder else []), "pattern", "pattern_largest", *MEASURES]
    names += WITHOUT_SINKS if sinks else []
    assert set(table.attrs["chance"]) == set(names)
    assert_chance_is_measured(model, table, names)
    by_layer = isinstance(table.attrs["chance"]["prev"], dict)
    assert by_layer == (name in ("gemma3", "llama4", "gptneo", "gemma3n", "gemma4"))


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", [*ROWS, *zoo.also_slow("gptneo", "gemma4")])
@pytest.mark.parametrize("length", [3, 6, 10])
def test_on_drawn_sequences_chance_is_what_uniform_heads_have(name, length):
    """A window of 8 holds all of 7 tokens, the keys of `dup` and `ind` in segments of 6, and in segments of 10 not."""
    model, given = shared("bridge", name), {"n_sequences": 2, "segment_length": length}
    for pattern in (None, "previous_token"):
        with uniform_heads(model):
            table = tls.detect_heads(model, **given, pattern=pattern)
        names = [*DETECTORS, *(["pattern", "pattern_largest"] if pattern else [])]
        names = [one for one in names if one != "ind" or name not in zoo.ENCODERS]
        assert_chance_is_measured(model, table, names)
        alike = length == 3 or name in ("llama", "bert") or (length == 6 and name in ("mistral", "llama4"))
        one_number = pattern is None and alike
        assert isinstance(table.attrs["chance"], float) == one_number
        assert ("n_counted" in table.attrs) != one_number
    if name == "mistral" and length == 10:
        assert table.attrs["chance"]["prev"] == 1 / zoo.WINDOW
        assert table.attrs["chance"]["dup"] == table.attrs["chance"]["ind"] == 0


def test_a_null_sees_the_keys_of_the_window():
    """A head cannot reach a key outside of its window, and neither can a draw: p is 1 there, and less where it can."""
    table = tls.detect_heads(shared("bridge", "mistral"), n_sequences=8, segment_length=10, null_draws=9)
    assert (table[["dup", "ind"]] == 0).all(axis=None)
    assert (table[["dup_p", "ind_p"]] == 1).all(axis=None)
    assert table["prev_p"].min() < 1


def test_keys_that_an_indexer_picks_have_no_chance():
    model = shared("bridge", "glm5_selecting")  # 8 keys for each query
    assert attention_view(model).reader.selected_keys(attention_view(model).model, 0) == 8
    measured = partial(tls.detect_heads, model, n_sequences=2)
    assert isinstance(measured(segment_length=3).attrs["chance"], float)
    assert set(measured(segment_length=10).attrs["chance"].values()) == {None}
    on_prompts = tls.detect_heads(model, prompts=zoo.prompt(2, 20)).attrs["chance"]
    assert set(on_prompts.values()) == {None}


def test_a_chance_is_one_number_where_layers_agree():
    assert one_or_by_layer({0: 0.5, 3: 0.5}) == 0.5
    assert one_or_by_layer({0: 0.5, 3: 0.25}) == {"L0": 0.5, "L3": 0.25}
    assert one_or_by_layer({0: float("nan"), 3: 0.25}) == {"L0": None, "L3": 0.25}
    assert one_or_by_layer({0: float("nan"), 3: float("nan")}) is None
    assert one_or_by_layer({}) is None
