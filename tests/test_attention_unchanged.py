"""The view of a model changes nothing in it: tensors, modules, flags and hooks."""

import contextlib

import pytest
import torch
import zoo
from attention_models import fresh
from model_state import assert_unchanged, state_of, warm
from zoo import shared

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.attention import attention_view


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("opt", torch.float64)])
def test_what_is_read_is_not_the_models_memory(name, dtype):
    """In float64 on the CPU a conversion returns the model's own memory."""
    model = fresh("bridge", name).to(dtype)
    before = state_of(model)
    view = attention_view(model)
    layer, output = view.layer(0), view.output(0)
    theta = [] if layer.rotary is None else [layer.rotary.theta]
    for tensor in (layer.w_q, layer.w_k, layer.b_q, output.w_v, output.w_o, *theta):
        tensor.zero_()
    assert_unchanged(model, before)


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
@pytest.mark.parametrize("error", [None, RuntimeError])
def test_run_evaluates_and_puts_every_training_flag_back(backend, error):
    model = warm(fresh(backend, "gpt2"))
    model.train()
    getattr(model, "original_model", model).train()  # the embedding's dropout is not among the bridge's own modules
    model.blocks[0].eval()
    roots = [model, getattr(model, "original_model", model)]
    before = state_of(model)
    view = attention_view(model)
    names = view.hook_names(1)
    during = []

    def look(x, hook):
        during.append(any(module.training for root in roots for module in root.modules()) or torch.is_grad_enabled())
        if error:
            raise error("from a hook")

    with pytest.raises(error, match="from a hook") if error else contextlib.nullcontext():
        view.run(zoo.prompt(), [(names["residual"], look)], last=names["pattern"])
    assert during == [False]
    assert any(flags[1] for flags in before[1].values())  # some were in training mode
    assert_unchanged(model, before)


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
@pytest.mark.parametrize("name", ["gpt2"])
def test_run_stops_before_the_last_mlp(backend, name):
    model = shared(backend, name)
    view = attention_view(model)
    calls = []
    points = ["blocks.0.hook_mlp_out", "blocks.1.attn.hook_pattern", "blocks.1.hook_mlp_out", "unembed.hook_out"]
    points = [point for point in points if point in model.hook_dict]
    assert points[:3] == ["blocks.0.hook_mlp_out", "blocks.1.attn.hook_pattern", "blocks.1.hook_mlp_out"]
    hooks = [(point, lambda x, hook, point=point: calls.append(point)) for point in points]
    view.run(zoo.prompt(), hooks, last="blocks.1.attn.hook_pattern")
    assert calls == points[:2]


def test_hooks_of_the_user_stay_and_act_first():
    model = fresh("bridge", "gpt2")
    view = attention_view(model)
    names = view.hook_names(0)
    order = []
    model.add_hook(names["residual"], lambda x, hook: order.append("user"))
    view.run(zoo.prompt(), [(names["residual"], lambda x, hook: order.append("ours"))], last=names["pattern"])
    assert order == ["user", "ours"]
    assert len(model.hook_dict[names["residual"]].fwd_hooks) == 1


def test_a_point_that_never_fires_is_refused():
    view = attention_view(shared("bridge", "neox"))
    with pytest.raises(UnsupportedArchitecture, match=r"blocks\.0\.attn\.hook_rot_q never fired"):
        view.run(zoo.prompt(), [], last="blocks.0.attn.hook_rot_q")
