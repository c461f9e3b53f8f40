"""Attention of heads side by side is that of the model, with the tokens on both axes."""

import numpy as np
import pytest
import torch
import zoo
from figure_parts import part, small_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from squares import Squares
from zoo import shared

from tlspectral import plots
from tlspectral.errors import BadHead, UnsupportedArchitecture
from tlspectral.models.running.long_prompts import LONG, strips_of

PROMPT = torch.tensor([5, 7, 9, 7, 11])


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_each_panel_is_the_pattern_of_its_head(name, sink):
    model = shared("bridge", name)
    _, cache = model.run_with_cache(PROMPT[None])
    figure = plots.patterns(model, PROMPT, ["L1H0", (0, 1)], sink=sink)
    for layer, head in ((0, 1), (1, 0)):
        (image,) = part(figure, f"L{layer}H{head}")
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, head].numpy()
        np.testing.assert_array_equal(image.get_array(), pattern if sink else pattern[:, 1:])
        assert image.axes.get_title(loc="left") == f"L{layer}H{head}"
    first = figure.axes[0]
    assert [label.get_text() for label in first.get_yticklabels()] == ["5", "7", "9", "7", "11"]
    assert [label.get_text() for label in first.get_xticklabels()] == ["5", "7", "9", "7", "11"][not sink :]
    assert figure.get_supxlabel() == ("key" if sink else "key, without the first, 5")


def test_what_cannot_be_drawn_is_refused():
    model = shared("bridge", "gpt2")
    for heads, error, text in (([], ValueError, "0 heads given: give 1 to 12"), (["L9H0"], BadHead, "L9H0")):
        with pytest.raises(error, match=text):
            plots.patterns(model, PROMPT, heads)
    with pytest.raises(
        ValueError, match=r"found 2 prompts of 5 tokens, and one prompt of up to 128 .* give one prompt"
    ):
        plots.patterns(model, PROMPT.repeat(2, 1), "L0H0")
    with pytest.raises(ValueError, match="the only key is the first, which is left out"):
        plots.patterns(model, PROMPT[:1], "L0H0")


@pytest.fixture(scope="module")
def wide():
    """A model with 512 positions."""
    return zoo.bridge("gemma2", positions=512)


def drawn(figure, name="L1H2"):
    (image,) = part(figure, name)
    return np.ma.filled(image.get_array(), np.nan)


@settings(max_examples=6, deadline=None)
@given(size=st.integers(2, 40), edges=st.lists(st.integers(0, 40), min_size=4, max_size=4, unique=True))
def test_rows_and_keys_of_strips_are_those_of_the_whole_pattern(size, edges):
    model, prompt = shared("bridge", "gemma2"), zoo.prompt(1, 40)[0]
    key, start, last, stop = sorted(edges)
    whole = drawn(plots.patterns(model, prompt, "L1H2", sink=True))
    with strips_of(size):
        figure = plots.patterns(
            model, prompt, ["L0H1", "L1H2"], queries=slice(start, stop), keys=slice(key, last), sink=True
        )
    # Measured: 4e-7, smaller float32 products. The pattern of the next row differs by .1.
    np.testing.assert_allclose(drawn(figure), whole[start:stop, key:last], rtol=0, atol=1e-5)


def test_a_part_of_a_long_prompt_makes_no_whole_pattern(wide):
    prompt, rows = zoo.prompt(1, 211)[0], slice(-50, None)
    expected = plots.patterns(wide, prompt, "L1", queries=rows)
    with strips_of(32), Squares(211) as squares:
        figure = plots.patterns(wide, prompt, "L1", queries=rows)
    assert squares.found == []
    np.testing.assert_allclose(drawn(figure), drawn(expected), rtol=0, atol=1e-5)
    with Squares(211) as squares:
        plots.patterns(wide, prompt, "L1", queries=rows)
    assert squares.found  # the model's own attention makes some
    assert small_texts(figure) == {}


def test_columns_of_many_keys_hold_the_largest(wide):
    prompt = zoo.prompt(1, 300)[0]
    pattern = wide.run_with_cache(prompt[None])[1]["blocks.1.attn.hook_pattern"][0, 2].numpy()
    figure = plots.patterns(wide, prompt, "L1H2", queries=slice(290, 300))
    # 300 keys in columns of 4, the first column without key 0.
    expected = np.stack([pattern[290:, max(1, start) : start + 4].max(1) for start in range(0, 300, 4)], axis=1)
    np.testing.assert_array_equal(drawn(figure), expected)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert (labels[0], {int(label) % 4 for label in labels[1:]}) == ("1", {0})
    assert figure.get_supxlabel() == f"key, a column is the largest of 4 keys, without the first, {prompt[0]}"
    near = plots.patterns(wide, prompt, "L1H2", queries=slice(290, 300), keys=slice(200, None))
    np.testing.assert_array_equal(drawn(near), pattern[290:, 200:])
    assert near.axes[0].get_yticklabels()[0].get_text() == f"290: {prompt[290]}"
    assert near.get_supxlabel() == "key"


def test_sinks_are_left_out_of_columns_of_many_keys():
    model, prompt = zoo.bridge("llama", positions=512), zoo.prompt(1, 300)[0]

    def look_at(keys, pattern, hook):
        rest = 1.0 - 0.3 * len(keys)
        edited = pattern * rest
        edited[..., keys] += 0.3
        return edited.tril()

    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", lambda x, hook: look_at([5, 8, 9], x, hook))]):
        figure = plots.patterns(model, prompt, "L1H2", queries=slice(280, 300), sinks="found")
        pattern = model.run_with_cache(prompt[None])[1]["blocks.1.attn.hook_pattern"][0, 2].numpy()
    shown = drawn(figure)
    np.testing.assert_array_equal(shown[:, 1], np.delete(pattern[280:, 4:8], 1, axis=1).max(1))  # without key 5
    np.testing.assert_array_equal(shown[:, 2], pattern[280:, 10:12].max(1))
    assert shown.max() < 0.3
    assert figure.get_supxlabel() == "key, a column is the largest of 4 keys, sinks of the layer left out"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"queries": (100, 110)},
            r"\(100, 110\), which can be two tokens or all between them: give queries=slice\(start",
        ),
        ({"queries": 100}, "queries= must be a slice of positions; found 100"),
        ({"queries": slice(0, 100, 2)}, "steps and other numbers than whole ones are not read"),
        ({"queries": slice(0.5, 100)}, "steps and other numbers than whole ones are not read"),
        ({"queries": slice(True, 100)}, "steps and other numbers than whole ones are not read"),
        ({"queries": slice(290, 301)}, r"queries=slice\(290, 301, None\): the prompt has 300 tokens, 0 to 299"),
        ({"queries": slice(20, 10)}, "holds no token"),
        ({}, r"found 300 queries, .* up to 128 can be drawn: .* queries=slice\(200, 300\)"),
        ({"queries": slice(0, 129)}, "found 129 queries"),
        ({"queries": slice(5, 9), "keys": slice(9, 20)}, "keys= begins at 9, after the last query, 8"),
        ({"queries": slice(5, 9), "keys": slice(1)}, "the only key is the first"),
        ({"queries": slice(0, 1)}, "the only key is the first"),
    ],
)
def test_other_rows_are_refused_in_words(wide, asked, said):
    with pytest.raises(ValueError, match=said):
        plots.patterns(wide, zoo.prompt(1, 300)[0], "L1H2", **asked)


def test_numbers_of_numpy_are_read(wide):
    prompt = zoo.prompt(1, 200)[0]
    rows = slice(np.int64(190), np.int32(195))
    figures = [plots.patterns(wide, prompt, "L0H0", queries=asked) for asked in (rows, slice(-10, -5))]
    np.testing.assert_array_equal(*[drawn(figure, "L0H0") for figure in figures])


def test_an_encoder_draws_all_keys():
    figure = plots.patterns(shared("bridge", "bert"), zoo.prompt(1, 24)[0], "L0H0", queries=slice(2, 5), sink=True)
    assert drawn(figure, "L0H0").shape == (3, 24)


@pytest.mark.slow
def test_a_model_that_needs_all_rows_of_a_long_prompt_is_refused():
    model = zoo.bridge("glm5", positions=LONG)
    with pytest.raises(UnsupportedArchitecture, match=r"2,048 tokens or more .*topk.* give shorter"):
        plots.patterns(model, zoo.prompt(1, LONG)[0], "L0H0", queries=slice(10))
