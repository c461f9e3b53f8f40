"""Hooks of the user that are on the model while a table is made are named in its attributes."""

import functools
import json
import re

import pytest
import torch
import zoo
from head_tables import analyze
from spectral_zoo import moved

import tlspectral as tls
from tlspectral.hooks import ablate, ablation_hooks
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
