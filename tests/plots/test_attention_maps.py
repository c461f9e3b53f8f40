"""Attention of heads side by side is that of the model, with the tokens on both axes."""

import numpy as np
import pytest
import torch
from figure_parts import part
from zoo import shared

from tlspectral import plots
from tlspectral.errors import BadHead

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
    with pytest.raises(ValueError, match="found 2 prompts of 5 tokens, and one prompt of up to 128"):
        plots.patterns(model, PROMPT.repeat(2, 1), "L0H0")
    with pytest.raises(ValueError, match="the prompt is one token, whose key is left out"):
        plots.patterns(model, PROMPT[:1], "L0H0")
