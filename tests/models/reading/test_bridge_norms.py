"""Norms of bridges: which form a module has is found by one call of it, and kept where it is beyond doubt."""

import pytest
import torch
import zoo
from attention_models import poke
from torch import nn

from tlspectral.errors import BadWeights
from tlspectral.models.reading import attention_view, bridge_norms


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3"])
def test_a_norm_is_asked_once_and_its_numbers_are_read_each_time(spied, name):
    model = zoo.bridge(name)
    asked = spied(bridge_norms, "_norm_errors")
    first = attention_view(model).raw(1)
    assert asked
    asked.clear()
    gain = model.blocks[1].ln1.original_component.weight
    gain.data += 0.25
    again = attention_view(model).raw(1)
    assert not asked
    assert again.norm.kind == first.norm.kind
    read = {"llama": gain, "qwen3": gain, "gpt2": gain, "gemma2": 1 + gain.double()}[name]
    assert torch.equal(again.norm.gain, read)
    poke(gain, torch.nan)
    with pytest.raises(BadWeights, match="layer 1, input norm gain"):
        attention_view(model).raw(1)


def test_a_form_that_the_weights_leave_open_is_asked_again():
    # With a gain of 0 every norm gives 0.
    model = zoo.bridge("llama")
    module = model.blocks[0].ln1.original_component
    gain = module.weight.detach().clone()
    module.weight.data.zero_()
    attention_view(model).raw(0)
    module.weight.data.copy_(gain)
    assert attention_view(model).raw(0).norm.kind == "RMS"


def test_another_forward_of_the_class_is_asked_again(monkeypatch):
    model = zoo.bridge("llama")
    attention_view(model).raw(0)
    module = model.blocks[0].ln1.original_component

    def centred(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, None, self.variance_epsilon)

    monkeypatch.setattr(type(module), "forward", centred)
    assert attention_view(model).raw(0).norm.kind == "LN"
