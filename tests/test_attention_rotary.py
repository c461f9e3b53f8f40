"""Rotary geometry read from a model: its frequencies are those of the config, as far as they hold."""

import pytest
import torch
import transformers
import zoo
from attention_models import BRIDGES, LAYER_NORM, every_model, fresh
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from zoo import shared

from tlspectral.models.attention import attention_view


def standard_frequencies(base, rotary_dim):
    return base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def expected_frequencies(name, index):
    """theta of a layer from the Hugging Face config alone, and the factor on cos and sin."""
    d_head = zoo.WIDTH // zoo.HEADS
    config = zoo.hf_model(name).config
    if name in ("llama3", "yarn"):
        inv_freq, factor = ROPE_INIT_FUNCTIONS[name](config, "cpu")
        return inv_freq.double(), factor
    if name == "gemma3":
        slow = index % 2
        return standard_frequencies(10000.0 if slow else 100.0, 16) / (2.0 if slow else 1.0), 1.0
    if name == "phi3_longrope":
        parameters = config.rope_parameters
        factors = torch.tensor(parameters["short_factor"], dtype=torch.float64)
        stretch = config.max_position_embeddings / parameters["original_max_position_embeddings"]
        scaling = (1 + torch.log(torch.tensor(stretch)) / torch.log(torch.tensor(32.0))).sqrt()
        return standard_frequencies(10000.0, d_head) / factors, float(scaling)
    rotary_dim = {"neox": 4, "phi": d_head // 2, "gptj": 8, "qwen3": 16, "gemma2": 16}.get(name, d_head)
    base = config.rope_parameters["rope_theta"] if name != "gptj" else 10000.0
    return standard_frequencies(base, rotary_dim), 1.0


ROTARY = [name for name in BRIDGES if name not in ("gpt2", "opt", "gptneo", "bloom")]
# The bridge of TransformerLens 3.9 does not know that Cohere pairs neighbours; `verify_scores` refuses it.
ROTARY_MODELS = [("bridge", name) for name in ROTARY if name not in zoo.READ_WRONG]
ROTARY_MODELS += [pytest.param("hooked", n, marks=zoo.needs_hooked) for n in zoo.HOOKED_ARCHITECTURES if n in ROTARY]


@pytest.mark.parametrize(("backend", "name"), ROTARY_MODELS)
def test_frequencies_are_those_of_the_config(backend, name):
    view = attention_view(shared(backend, name))
    for index in range(view.n_layers):
        rotary = view.layer(index).rotary
        if name == "smollm3" and index % 2:
            assert rotary is None
            continue
        theta, scaling = expected_frequencies(name, index)
        # The model keeps inv_freq, or a cos and sin of it, in float32: 1e-7. Scaled RoPE differs by percents.
        torch.testing.assert_close(rotary.theta, theta, rtol=1e-6, atol=1e-9)
        assert rotary.attention_scaling == pytest.approx(scaling, rel=1e-6)
        pairs = torch.stack([rotary.real_index, rotary.imag_index])
        adjacent = name in ("gptj", "cohere")
        assert (pairs[1] - pairs[0]).tolist() == [1 if adjacent else len(theta)] * len(theta)
        assert rotary.d_head == view.layer(index).d_head


def test_scaled_frequencies_are_not_the_unscaled_ones():
    # Without this the comparison above could pass on configs whose scaling does nothing.
    for name, unscaled in (("llama3", standard_frequencies(500.0, 12)), ("yarn", standard_frequencies(10000.0, 12))):
        theta = attention_view(shared("bridge", name)).layer(0).rotary.theta
        assert float((theta / unscaled - 1).abs().max()) > 0.5


@every_model
def test_layers_without_rotary_positions_have_no_geometry(backend, name):
    view = attention_view(shared(backend, name))
    found = [view.layer(index).rotary is not None for index in range(view.n_layers)]
    expected = [name in ROTARY and not (name == "smollm3" and index % 2) for index in range(view.n_layers)]
    assert found == expected


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
