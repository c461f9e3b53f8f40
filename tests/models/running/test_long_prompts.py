"""Attention strip by strip: no matrix of all queries and keys is made, and hooks that need one get the model's own."""

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from squares import Squares
from zoo import shared

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.hooking.strips import OfStrips, Strip
from tlspectral.models.reading import attention_view
from tlspectral.models.running.long_prompts import LONG, strips_for, strips_of, whole_hooks
from tlspectral.models.running.passes import whole_logits
from tlspectral.models.running.striped import ByStrips, NotByStrips

N = 211  # no size of the models


def seen_strips(view, tokens, what="pattern"):
    """The strips that hooks of every layer get in a run, and its logits."""
    strips = {layer: [] for layer in view.layers}

    def note(layer, activation, strip, hook):
        assert activation.shape[-2:] == (strip.stop - strip.start, strip.n_keys)
        strips[layer].append((strip.start, strip.stop))

    hooks = [
        (view.hook_names(layer)[what], OfStrips(lambda x, strip, hook, layer=layer: note(layer, x, strip, hook)))
        for layer in view.layers
    ]
    with view.hooks_on(hooks), torch.no_grad():
        return strips, whole_logits(view, tokens)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gptj"])
def test_no_matrix_of_all_queries_and_keys_is_made(name):
    view = attention_view(shared("bridge", name))
    tokens = zoo.prompt(1, 127 if name == "gptj" else N)
    whole_logits(view, zoo.prompt(1, 5))  # what is checked once per model
    with strips_of(50), Squares(N) as squares:
        strips, _ = seen_strips(view, tokens)
    assert squares.found == []
    if name != "gptj":
        assert strips[0] == [(0, 50), (50, 100), (100, 150), (150, 200), (200, N)]
        with Squares(N) as squares:
            whole_logits(view, tokens)
        assert squares.found  # the model's own attention makes some


@settings(max_examples=10, deadline=None)
@given(size=st.integers(1, 40), length=st.integers(2, 30))
def test_strips_of_any_size_give_the_same_logits(size, length):
    view = attention_view(shared("bridge", "gemma2"))
    tokens = zoo.prompt(2, length)
    with torch.no_grad():
        expected = whole_logits(view, tokens)
    with strips_of(size):
        strips, found = seen_strips(view, tokens, "scores")
    assert strips[1] == [(start, min(start + size, length)) for start in range(0, length, size)]
    # Measured: 1.2e-6, smaller float32 products; a strip that saw a key less moves logits by .1.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_left_padding_masks_the_same_keys():
    model = shared("bridge", "mistral")
    view = attention_view(model)
    tokens, mask = zoo.prompt(2, 23), torch.ones(2, 23, dtype=torch.long)
    mask[1, :6] = 0
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask)
        with strips_of(5):
            from tlspectral.models.running.long_prompts import in_strips

            with in_strips(view):
                found = model(tokens, attention_mask=mask)
    # Measured: 5e-7; padding that is seen moves logits by .1.
    torch.testing.assert_close(found[:, 6:], expected[:, 6:], rtol=0, atol=1e-5)


def test_an_edit_of_strips_acts():
    """Scores without the first key, in strips and whole."""
    view = attention_view(shared("bridge", "llama"))

    def hide(scores, strip, hook):
        edited = scores.clone()
        edited[..., max(0, 1 - strip.start) :, 0] = torch.finfo(scores.dtype).min
        return edited

    def run():
        with view.hooks_on([(view.hook_names(0)["scores"], OfStrips(hide))]), torch.no_grad():
            return whole_logits(view, zoo.prompt(2, 23))

    expected = run()
    with strips_of(5):
        found = run()
    # Measured: 5e-7. The edit itself moves logits by .1.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        assert (whole_logits(view, zoo.prompt(2, 23)) - expected).abs().max() > 1e-2


def test_gradients_are_those_of_whole_attention_and_keep_no_pattern():
    model = shared("bridge", "llama")
    view = attention_view(model)
    weight = model.original_model.model.layers[0].self_attn.q_proj.weight
    kept = []

    def gradient():
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
            loss = whole_logits(view, zoo.prompt(2, 23)).square().mean()
        return torch.autograd.grad(loss, weight)[0]

    expected = gradient()
    assert (2, zoo.HEADS, 23, 23) in kept
    with strips_of(5):
        found = gradient()
    assert not any(len(shape) == 4 and shape[-2] == 5 and shape[-1] % 5 == 0 for shape in kept)
    # Measured: 1e-7 of gradients up to .2; detached scores would give 0.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert expected.abs().max() > 1e-3


def test_hooks_that_take_whole_matrices_get_them():
    model = zoo.bridge("llama")
    view = attention_view(model)
    name, shapes = view.hook_names(0)["pattern"], []
    with strips_of(5):
        assert len(strips_for(view, 23)) == 5
        with model.hooks(fwd_hooks=[(name, lambda x, hook: shapes.append(x.shape))]):
            assert whole_hooks(view) == [name]
            assert [(strip.start, strip.stop) for strip in strips_for(view, 23)] == [(0, 23)]
            whole_logits(view, zoo.prompt(2, 23))
        model.blocks[0].attn.register_forward_hook(lambda module, given, output: None)
        assert whole_hooks(view)
    assert shapes == [(2, zoo.HEADS, 23, 23)]


def test_a_model_that_needs_all_queries_is_refused_by_length():
    view = attention_view(shared("bridge", "glm5"))
    assert len(strips_for(view, LONG - 1)) == 1
    with pytest.raises(UnsupportedArchitecture, match=r"prompts of 2,048 tokens or more .*topk.* give shorter"):
        strips_for(view, LONG)


def test_an_operation_across_queries_is_refused():
    mode = ByStrips(4, 8)
    mode.attending = True
    with mode:
        scores = torch.ones(1, 2, 9, 3) @ torch.ones(1, 2, 3, 9)
        assert scores.shape == (1, 2, 9, 9)
        for across in (lambda: scores.softmax(-2), lambda: scores.mT, lambda: scores[..., 1:, :], lambda: scores.sum(),
                       lambda: scores.reshape(-1, 81), lambda: torch.ones(9, 9) @ scores):  # fmt: skip
            with pytest.raises(NotByStrips):
                across()
    assert torch.equal(scores.of(Strip(4, 8, 9)), torch.full((1, 2, 4, 8), 3.0))
