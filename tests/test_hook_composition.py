"""Ablations beside hooks of the user, caches of activations and one another."""

from contextlib import ExitStack

import pytest
import torch
import zoo
from ablation_runs import SCORES, a_part, allowed_keys, intact, logits, recorded, some_models
from zoo import shared

from tlspectral.hooks import ablate, ablation_hooks
from tlspectral.models.attention import attention_view


@some_models
def test_an_earlier_edit_of_queries_is_seen(backend, name):
    model, view = shared(backend, name), attention_view(shared(backend, name))
    part, head = a_part(name), 1
    names = view.hook_names(0)

    def scramble(q, hook):
        return torch.cat([q[:, :, :head], q[:, :, head : head + 1].flip(1), q[:, :, head + 1 :]], 2)

    # Removing all three parts of a head leaves biases, masks, caps and windows only, if every edit saw the same query.
    def removed(parts):
        with ExitStack() as stack:
            stack.enter_context(model.hooks(fwd_hooks=[(names["query"], scramble)]))
            for part in parts:
                stack.enter_context(ablate(model, [(0, head)], part))
            return recorded(model, ("pattern",), layers=[0])[0, "pattern"]

    edited, ablated = removed([]), removed([part])
    assert torch.equal(ablated[:, 0], edited[:, 0])
    assert float((ablated[:, head] - edited[:, head]).abs().max()) > 1e-3
    # The same edit by hand: a hook after the fact, on the projections of the scrambled run.
    with model.hooks(fwd_hooks=[(names["query"], scramble)]):
        seen = recorded(model, ("query", "key", "value", "cos", "sin"), layers=[0])
    assert torch.equal(
        seen[0, "query"][:, :, head], recorded(model, ("query",), layers=[0])[0, "query"][:, :, head].flip(1)
    )
    expected = edited_by_definition(view, name, seen, head, part)
    assert float((ablated[:, head].double() - expected).abs().max()) < 1e-6  # float32 against float64


def edited_by_definition(view, name, seen, head, part):
    """The pattern of a head of layer 0 from captured queries and keys, in float64, position by position."""
    layer = view.layer(0)
    captured = seen[0, "key"]
    kv_head = layer.kv_head(head) if captured.shape[2] == layer.n_kv_heads else head
    q, k = seen[0, "query"].double()[:, :, head], captured.double()[:, :, kv_head]
    assert layer.q_norm is None
    length = q.shape[1]
    offset = torch.arange(length)[:, None] - torch.arange(length)
    if layer.rotary is None:
        whole = q @ k.mT
        content = (q - layer.b_q[head]) @ (k - layer.b_k[layer.kv_head(head)]).mT
        scores = whole - (content - content.mT) / 2
    else:
        real, imag = layer.rotary.real_index, layer.rotary.imag_index
        still = [c for c in range(layer.d_head) if c not in {*real.tolist(), *imag.tolist()}]
        scores = q[..., still] @ k[..., still].mT
        bare_q, bare_k = q - layer.b_q[head], k - layer.b_k[layer.kv_head(head)]

        def products(x, y, t):
            x, y = (torch.complex(z[..., real[t]], z[..., imag[t]]) for z in (x, y))
            return x[:, :, None] * y.conj()[:, None, :]

        for t, theta in enumerate(layer.rotary.theta):
            turn = torch.polar(torch.ones_like(offset, dtype=torch.float64), offset * theta)
            scores = scores + (products(q, k, t) * turn).real
            scores = scores + (offset * theta).sin() * products(bare_q, bare_k, t).imag
        assert part == "rope_phase"
    scores = layer.score_scale * scores
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    return scores.masked_fill(~allowed_keys(name, 0, length), -torch.inf).softmax(-1)


@pytest.mark.parametrize(("backend", "name"), SCORES)
@pytest.mark.parametrize("first", ["user", "ablation"])
def test_an_edit_of_scores_survives(backend, name, first):
    model, view = shared(backend, name), attention_view(shared(backend, name))
    names, head = view.hook_names(0), 1
    shift = torch.randn(zoo.PROMPT_LENGTH, zoo.PROMPT_LENGTH, generator=torch.Generator().manual_seed(0))

    def users():
        return model.hooks(fwd_hooks=[(names["scores"], lambda scores, hook: scores + shift)])

    def ours():
        return ablate(model, [(0, head)], "rope_phase")

    with ours():
        alone = recorded(model, ("pattern",), layers=[0])[0, "pattern"]
    entered = [users, ours] if first == "user" else [ours, users]
    with entered[0](), entered[1]():
        both = recorded(model, ("pattern",), layers=[0])[0, "pattern"]
    expected = (alone.double().log() + shift).softmax(-1)
    # float32 rounding, measured 5e-7; an edit that is lost moves the pattern by tenths.
    assert float((both - expected).abs().max()) < 2e-6


@some_models
@pytest.mark.parametrize("part", ["symmetric", "output"])
def test_no_activation_is_edited_in_place(backend, name, part):
    model = shared(backend, name)
    names = [point for key, point in attention_view(model).hook_names(0).items() if key != "pattern"]
    kept = []

    def keep(activation, hook):
        kept.append((activation, activation.clone()))

    with model.hooks(fwd_hooks=[(point, keep) for point in names]), ablate(model, [(0, 1)], part):
        assert not torch.equal(logits(model), intact(backend, name))
    assert len(kept) >= 5
    assert all(torch.equal(activation, copy) for activation, copy in kept)


@some_models
def test_caches_and_hooks_inside(backend, name):
    model, view = shared(backend, name), attention_view(shared(backend, name))
    names = view.hook_names(1)
    part = a_part(name)
    calls = []
    with ablate(model, [(1, 1)], part):
        expected, shown = logits(model), recorded(model, ("pattern",))[1, "pattern"]
        with torch.no_grad():
            cached, cache = model.run_with_cache(zoo.prompt())
            hooked = model.run_with_hooks(zoo.prompt(), fwd_hooks=[(names["z"], lambda z, hook: calls.append(z.shape))])
        again = logits(model)
    assert torch.equal(cached, expected)
    assert torch.equal(hooked, expected)
    assert torch.equal(again, expected)
    assert torch.equal(cache[names["pattern"]], shown)
    assert len(calls) == 1
    with torch.no_grad():
        listed = model.run_with_hooks(zoo.prompt(), fwd_hooks=ablation_hooks(model, [(1, 1)], part))
    assert torch.equal(listed, expected)


@some_models
def test_a_list_of_hooks_serves_one_run_after_another(backend, name):
    model = shared(backend, name)
    hooks = ablation_hooks(model, [(0, 0), (1, 1)], "antisymmetric")
    prompts = [zoo.prompt(), zoo.prompt(batch=1, length=11, seed=3), zoo.prompt()]
    with torch.no_grad():
        found = [model.run_with_hooks(prompt, fwd_hooks=hooks) for prompt in prompts]
    for prompt, result in zip(prompts, found, strict=True):
        with ablate(model, [(0, 0), (1, 1)], "antisymmetric"):
            assert torch.equal(logits(model, prompt), result)


@some_models
@pytest.mark.parametrize("layers", [(0, 0), (0, 1)])
def test_nested_contexts_on_different_heads_are_one_context(backend, name, layers):
    model = shared(backend, name)
    one, other = (layers[0], 0), (layers[1], 2)
    for part in ("symmetric", a_part(name)):
        with ablate(model, [one, other], part):
            together = logits(model)
        with ablate(model, [one], part), ablate(model, [other], part):
            nested = logits(model)
        # One batched product or two: measured 0.0, allowed rounding of logits of size 1.
        assert float((nested - together).abs().max()) < 2e-6
        with ablate(model, [one], part):
            alone = logits(model)
        assert float((alone - together).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("backend", "name"), [("bridge", "llama"), pytest.param("hooked", "llama", marks=zoo.needs_hooked)]
)
def test_without_all_three_parts_attention_is_uniform(backend, name):
    model = shared(backend, name)
    heads = [(0, 1), (1, 3)]
    with ExitStack() as stack:
        for part in ("symmetric", "antisymmetric", "rope_phase"):
            stack.enter_context(ablate(model, heads, part))
        patterns = recorded(model, ("pattern",))
    uniform = torch.ones(zoo.PROMPT_LENGTH, zoo.PROMPT_LENGTH).tril()
    uniform = uniform / uniform.sum(-1, keepdim=True)
    for layer, head in heads:
        # Scores of size 10 cancel in float32: measured 1e-6 (of a score), 4e-7 in the pattern.
        assert float((patterns[layer, "pattern"][:, head] - uniform).abs().max()) < 2e-6
