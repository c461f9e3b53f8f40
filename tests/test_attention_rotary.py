"""Rotary geometry read from a model: scaled frequencies, and how far they hold."""

import pytest
import torch
import transformers
import zoo
from attention_models import BRIDGES, LAYER_NORM, fresh
from conformance.reading import standard_frequencies
from zoo import shared

from tlspectral.models.attention import attention_view

ROTARY = [name for name in BRIDGES if name not in ("gpt2", "opt", "gptneo", "bloom")]


def test_scaled_frequencies_are_not_the_unscaled_ones():
    # Without this the comparison with the config could pass on configs whose scaling does nothing.
    for name, unscaled in (("llama3", standard_frequencies(500.0, 12)), ("yarn", standard_frequencies(10000.0, 12))):
        theta = attention_view(shared("bridge", name)).layer(0).rotary.theta
        assert float((theta / unscaled - 1).abs().max()) > 0.5


def test_gemma3_has_one_geometry_per_layer_type():
    view = attention_view(shared("bridge", "gemma3"))
    theta = [view.layer(index).rotary.theta for index in range(4)]
    assert torch.equal(theta[0], theta[2])
    assert torch.equal(theta[1], theta[3])
    assert float(theta[0][-1] / theta[1][-1]) > 10  # base 100 against 10000 and a factor of 2


@pytest.mark.parametrize("name", zoo.LENGTH_DEPENDENT)
def test_length_dependent_frequencies_say_how_far_they_hold(name):
    assert attention_view(shared("bridge", name)).layer(0).rotary.valid_up_to == 32


@pytest.mark.parametrize("name", ["llama", "llama3", "yarn", "gemma3"])
def test_other_frequencies_hold_at_every_length(name):
    assert attention_view(shared("bridge", name)).layer(0).rotary.valid_up_to is None


@pytest.mark.parametrize("name", zoo.LENGTH_DEPENDENT)
def test_a_long_prompt_does_not_move_the_frequencies_that_are_read(name):
    model = fresh("bridge", name)
    view = attention_view(model)
    before = view.layer(0).rotary.theta.clone()
    kept = model.rotary_emb.original_component.inv_freq.clone()
    with torch.no_grad():
        model(zoo.prompt(length=64))
    # The module overwrote its own table, so that reading that one would show.
    assert not torch.equal(model.rotary_emb.original_component.inv_freq, kept)
    assert torch.equal(view.layer(0).rotary.theta, before)


def test_the_zoo_is_what_these_tests_believe():
    assert transformers.__version__ >= "5"
    assert set(LAYER_NORM) | set(ROTARY) | {"bloom"} <= set(BRIDGES)
