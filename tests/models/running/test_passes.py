"""Runs of a whole model leave it as it was, and the user's hooks in force."""

import contextlib

import pytest
import torch
import zoo
from attention_models import fresh
from model_state import assert_unchanged, state_of, warm
from zoo import shared

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import run_until


@pytest.mark.tl4
@pytest.mark.slow
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
        run_until(view, zoo.prompt(), [(names["residual"], look)], last=names["pattern"])
    assert during == [False]
    assert any(flags[1] for flags in before[1].values())  # some were in training mode
    assert_unchanged(model, before)


def test_hooks_of_the_user_stay_and_act_first():
    model = fresh("bridge", "gpt2")
    view = attention_view(model)
    names = view.hook_names(0)
    order = []
    model.add_hook(names["residual"], lambda x, hook: order.append("user"))
    run_until(view, zoo.prompt(), [(names["residual"], lambda x, hook: order.append("ours"))], last=names["pattern"])
    assert order == ["user", "ours"]
    assert len(model.hook_dict[names["residual"]].fwd_hooks) == 1


def test_a_point_that_never_fires_is_refused():
    view = attention_view(shared("bridge", "neox"))
    with pytest.raises(UnsupportedArchitecture, match=r"blocks\.0\.attn\.hook_rot_q never fired"):
        run_until(view, zoo.prompt(), [], last="blocks.0.attn.hook_rot_q")
