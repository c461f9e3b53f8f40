"""Hooks of the user that are on the model while a table is made are named in its attributes."""

import functools
import json
import re
import types
import warnings

import pytest
import torch
import transformers
import zoo
from head_tables import analyze
from spectral_zoo import moved

import tlspectral as tls
from tlspectral.hooks import ablate, ablation_hooks
from tlspectral.models.hooking.user_hooks import acting_on, without_user_hooks
from tlspectral.models.reading import attention_view

MODELS = [("bridge", "llama"), ("bridge", "gpt2"), pytest.param("hooked", "qwen2", marks=zoo.needs_hooked)]
every_line = pytest.mark.parametrize(("backend", "name"), MODELS)


def hooks_in(table):
    return table.attrs.get("user_hooks")


def found(model):
    return attention_view(model).source.get("user_hooks")


@pytest.mark.tl4
@pytest.mark.slow
@every_line
def test_a_steering_hook_is_named_in_the_table(backend, name):
    model = getattr(zoo, backend)(name)
    plain = analyze(model, detectors=True, null_draws=2)
    assert "user_hooks" not in plain.attrs
    assert "user_hooks" not in plain.attrs["detectors"]
    point = "blocks.0.hook_resid_pre"
    with model.hooks(fwd_hooks=[(point, lambda x, hook: x.roll(1, -1)), (point, lambda x, hook: None)]):
        table = analyze(model, detectors=True, null_draws=2)
    assert hooks_in(table) == table.attrs["detectors"]["user_hooks"] == {point: 2}
    json.dumps(table.attrs, allow_nan=False)
    with model.hooks(fwd_hooks=[(point, lambda x, hook: None)]):
        swept = tls.ablation_sweep(model, "antisymmetric", heads=[(0, 0)])
    assert hooks_in(swept) == {point: 1}
    assert not table["prev"].equals(plain["prev"])
    assert table["D_head"].equals(plain["D_head"])
    assert "user_hooks" not in analyze(model, null_draws=2).attrs


@pytest.mark.tl4
@pytest.mark.slow
@every_line
def test_which_hooks_count(backend, name):
    model = getattr(zoo, backend)(name)
    with torch.no_grad():
        model(zoo.prompt())
        model.run_with_cache(zoo.prompt())
    assert found(model) is None  # those that libraries place do not
    with ablate(model, [(0, 1)], "antisymmetric"):
        assert "blocks.0.attn.hook_attn_scores" in found(model)
    assert found(model) is None
    with model.hooks(fwd_hooks=ablation_hooks(model, [(0, 1)], "output")):
        assert found(model) == {"blocks.0.attn.hook_z": 1}
    attention = model.blocks[1].attn

    def note(extra, module, inputs, output):
        pass

    attention.register_forward_hook(functools.partial(note, 0))
    attention.register_forward_pre_hook(lambda module, inputs: None)
    model.add_perma_hook("blocks.0.attn.hook_z", lambda z, hook: None)
    counts = found(model)
    assert counts.pop("blocks.0.attn.hook_z") == 1
    assert list(counts.values()) == [2]
    assert re.search(r"\.1\.(self_)?attn$", next(iter(counts)))


def test_hooks_of_a_spectral_model_do_not_count():
    assert found(moved("bridge", "llama")) is None


STEER = ("blocks.0.hook_resid_pre", lambda x, hook: x.roll(1, -1))
MEASURED = {
    "heads": lambda model: analyze(model, null_draws=2),
    "detectors": lambda model: tls.detect_heads(model, n_sequences=2, segment_length=4),
    "sweep": lambda model: tls.ablation_sweep(model, "antisymmetric", heads=[(0, 0)], task=TASK),
    "edges": lambda model: tls.edge_effects(model, "L1H0.q", task=TASK, measure="task"),
    "circuit": lambda model: tls.run_circuit(model, [], PAIRS),
    "writes": lambda model: tls.ov_attribution(model, zoo.prompt(1, 8), "L1H0", 7),
    "score": lambda model: tls.qk_attribution(model, zoo.prompt(1, 8), "L1H0", 7, 2),
}
TASK = tls.logit_difference(zoo.prompt(2, 8), 5, 6)
PAIRS = tls.logit_difference(zoo.prompt(2, 8), 5, 6, counterfactual=zoo.prompt(2, 8, seed=1))


@pytest.mark.fast(2)
@pytest.mark.tl4
@pytest.mark.parametrize("measured", [*MEASURED])
def test_a_forgotten_hook_is_said_once(measured):
    model = zoo.bridge("llama")
    with model.hooks(fwd_hooks=[STEER]):  # a block that is open is meant: noted in attrs alone
        MEASURED[measured](model)
    model.add_hook(*STEER)
    said = (
        r"hooks of yours are on the model, at blocks\.0\.hook_resid_pre, .*model\.reset_hooks\(including_permanent=True"
    )
    with pytest.warns(UserWarning, match="hooks of yours are on the model") as caught:
        MEASURED[measured](model)
    [warning] = [one for one in caught if "hooks of yours are on the model" in str(one.message)]
    assert re.search(said, str(warning.message))
    assert warning.filename == __file__
    model.reset_hooks()
    MEASURED[measured](model)


def test_weights_and_scores_of_evaluate_are_read_under_hooks_without_a_warning():
    model = zoo.bridge("llama")
    model.add_hook(*STEER)
    tls.heads.copying_scores(model)
    tls.evaluate(model, TASK)
    with ablate(model, "L0H1", "output"):
        tls.evaluate(model, TASK)


GLOBAL = torch.nn.modules.module


class Half(torch.nn.Module):
    """Half of what another module gives, or of a weight."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner or torch.nn.Identity()

    def forward(self, *given):
        return 0.5 * self.inner(*given)


class HalfLinear(torch.overrides.TorchFunctionMode):
    """Every linear layer gives half of what it gives."""

    def __torch_function__(self, function, kinds, given=(), named=None):
        result = function(*given, **(named or {}))
        return 0.5 * result if function is torch.nn.functional.linear else result


def inside(model):
    """The MLP of layer 0, of transformers in a bridge."""
    return getattr(model.blocks[0].mlp, "original_component", None) or model.blocks[0].mlp


def halving(forward):
    return lambda *given, **named: 0.5 * forward(*given, **named)


def instance(patch, model):
    patch.setitem(vars(inside(model)), "forward", halving(inside(model).forward))


def bound(patch, model):
    kind = type(inside(model))
    patch.setitem(vars(inside(model)), "forward", types.MethodType(halving(kind.forward), inside(model)))


def wrapped(patch, model):
    forward = inside(model).forward
    patch.setitem(vars(inside(model)), "forward", functools.wraps(forward)(halving(forward)))


def under_no_grad(patch, model):
    patch.setitem(vars(inside(model)), "forward", torch.no_grad()(halving(inside(model).forward)))


def another(patch, model):
    other = model.blocks[1].mlp
    patch.setitem(vars(inside(model)), "forward", getattr(other, "original_component", other).forward)


def of_torch(patch, model):
    patch.setitem(vars(inside(model)), "forward", functools.partial(torch.mul, other=0.5))


def call(patch, model):
    patch.setitem(vars(inside(model)), "_call_impl", halving(inside(model)._call_impl))


def of_class(patch, model):
    patch.setattr(type(inside(model)), "forward", halving(type(inside(model)).forward))


def of_class_wrapped(patch, model):
    forward = type(inside(model)).forward
    patch.setattr(type(inside(model)), "forward", functools.wraps(forward)(halving(forward)))


def of_every_call(patch, model):
    call, halved = torch.nn.Module.__call__, inside(model)

    def acting(self, *given, **named):
        result = call(self, *given, **named)
        return 0.5 * result if self is halved else result

    patch.setattr(torch.nn.Module, "__call__", acting)


def module(patch, model):
    block = getattr(model.blocks[0], "original_component", None) or model.blocks[0]
    patch.setitem(block._modules, "mlp", Half(block._modules["mlp"]))


def parametrized(patch, model):
    linear = next(each for each in inside(model).modules() if isinstance(each, torch.nn.Linear))
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Half())


def normed(patch, model):
    linear = next(each for each in inside(model).modules() if isinstance(each, torch.nn.Linear))
    torch.nn.utils.weight_norm(linear)
    with torch.no_grad():
        linear.weight_g *= 0.5


def forward_hook(patch, model):
    act = lambda each, given, output: 0.5 * output if each is inside(model) else None  # noqa: E731
    patch.handle = GLOBAL.register_module_forward_hook(act)


def pre_hook(patch, model):
    act = lambda each, given: (0.5 * given[0],) if each is inside(model) else None  # noqa: E731
    patch.handle = GLOBAL.register_module_forward_pre_hook(act)


def mode(patch, model):
    patch.mode = HalfLinear()
    patch.mode.__enter__()


def backward(patch, model):
    inside(model).register_full_backward_hook(lambda each, inputs, outputs: None)


def backward_of_all(patch, model):
    patch.handle = GLOBAL.register_module_full_backward_hook(lambda each, inputs, outputs: None)


MLP = r"blocks\.0\.mlp"
ACTING = {
    instance: rf"{MLP}\.forward",
    bound: rf"{MLP}\.forward",
    wrapped: rf"{MLP}\.forward",
    under_no_grad: rf"{MLP}\.forward",
    another: rf"{MLP}\.forward",
    of_torch: rf"{MLP}\.forward",
    call: rf"{MLP}\._call_impl",
    of_class: r"LlamaMLP\.forward of transformers\.models\.llama\.modeling_llama",
    of_class_wrapped: r"LlamaMLP\.forward of transformers\.models\.llama\.modeling_llama",
    of_every_call: r"Module\.__call__ of torch\.nn\.modules\.module",
    module: rf"{MLP} \(Half\)",
    parametrized: rf"{MLP}\.gate_proj\.weight \(parametrized\)",
    normed: rf"{MLP}\.gate_proj",
    forward_hook: "forward hook of all modules of torch",
    pre_hook: "forward pre-hook of all modules of torch",
    mode: "HalfLinear, a mode of torch",
    backward: rf"{MLP} \(backward\)",
    backward_of_all: "backward hook of all modules of torch",
}


@pytest.fixture
def patch():
    """A monkeypatch that also takes off a handle and leaves a mode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.handle = patch.mode = None
        try:
            yield patch
        finally:
            if patch.handle is not None:
                patch.handle.remove()
            if patch.mode is not None:
                patch.mode.__exit__(None, None, None)


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.filterwarnings("ignore:For backward hooks to be called")  # of torch, as a model returns no tuple
@pytest.mark.parametrize(("act", "name"), ACTING.items(), ids=[act.__name__ for act in ACTING])
def test_everything_that_acts_is_said(act, name, patch):
    model = zoo.bridge("llama")
    plain = zoo.logits(model)
    assert found(model) is None
    act(patch, model)
    assert (not torch.equal(zoo.logits(model), plain)) == ("backward" not in act.__name__)
    [(said, count)] = found(model).items()
    assert re.fullmatch(name, said)
    assert count == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = MEASURED["sweep"](model)
    assert hooks_in(table) == {said: 1}
    told = [str(one.message) for one in caught if "hooks of yours are on the model" in str(one.message)]
    assert len(told) == (act is not mode)  # a mode is a block that is open
    assert all(said in one for one in told)


@zoo.needs_hooked
@pytest.mark.slow
@pytest.mark.parametrize("act", [instance, bound, of_class, module, forward_hook, pre_hook])
def test_everything_that_acts_in_a_hooked_transformer_is_said(act, patch):
    model = zoo.hooked("llama")
    plain = zoo.logits(model)
    act(patch, model)
    assert not torch.equal(zoo.logits(model), plain)
    assert len(found(model)) == 1


def _own_model():
    """A model whose class is of a user, with a module of another class of the user."""

    class OwnLlama(transformers.LlamaForCausalLM):
        pass

    OwnLlama.__name__ = "LlamaForCausalLM"  # by which TransformerLens knows it
    given = zoo.hf_model("llama")
    given.__class__ = OwnLlama
    given.model.layers[0].mlp.act_fn = Half(given.model.layers[0].mlp.act_fn)
    return tls.load_model(given)


@pytest.mark.slow
@pytest.mark.tl4
def test_what_libraries_replace_is_not_said():
    model = zoo.bridge("llama")
    mlp = inside(model)
    for forward in (mlp.forward, torch.compile(mlp.forward)):
        vars(mlp)["forward"] = forward
        assert found(model) is None
    del vars(mlp)["forward"]
    with torch.device("cpu"):
        assert found(model) is None
    assert found(_own_model()) is None  # it is the user's own whole
    assert found(zoo.bridge("falcon")) is None  # TransformerLens replaces forwards of its linear layers


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize("name", [*zoo.RIGHT, *zoo.LENGTH_DEPENDENT, *zoo.ENCODERS_HERE])
def test_no_model_as_it_is_loaded_has_hooks_of_the_user(name):
    model = zoo.bridge(name)
    with torch.no_grad():
        model(zoo.prompt())
        model.run_with_cache(zoo.prompt())
    assert found(model) is None


def test_a_replaced_forward_of_a_model_that_is_loaded_acts_in_the_copy_and_is_said():
    given = zoo.hf_model("llama")
    given.model.layers[0].mlp.forward = halving(given.model.layers[0].mlp.forward)
    assert [*found(tls.load_model(given))] == ["blocks.0.mlp.forward"]


def test_what_is_taken_off_is_put_back_in_its_order():
    model, order = zoo.bridge("llama"), []
    for number in range(3):
        model.blocks[0].attn.register_forward_hook(lambda *given, number=number: order.append(number))
    instance_patch = halving(inside(model).forward)
    vars(inside(model))["forward"] = instance_patch
    zoo.logits(model)
    before = [(one.name, one.key) for one in acting_on(model)]
    with without_user_hooks(model) as stays:
        assert stays == []
        assert [*acting_on(model)] == []
        zoo.logits(model)
    assert [(one.name, one.key) for one in acting_on(model)] == before
    assert vars(inside(model))["forward"] is instance_patch
    zoo.logits(model)
    assert order == [0, 1, 2, 0, 1, 2]
