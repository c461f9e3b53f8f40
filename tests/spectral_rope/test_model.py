"""A spectral model and its base: what becomes spectral, and what stays as it was.

What is refused is in test_spectral_refusals.py.
"""

import copy
import functools
import io
import pickle

import pandas as pd
import pytest
import torch
import zoo
from model_state import assert_unchanged, state_of
from spectral_zoo import assert_on_its_own, base, logits, move, moved, on_both_backends, some_models, train

from tlspectral.models.reading import attention_view
from tlspectral.spectral_rope import merge, to_spectral


@pytest.mark.slow
@some_models
def test_the_base_is_untouched_before_during_and_after_training(backend, name):
    model = getattr(zoo, backend)(name).train()
    before = logits(model)  # first: transformers puts hooks of its own on a model's modules when it first runs
    about = state_of(model)
    spectral = to_spectral(model)
    assert_unchanged(model, about)
    with spectral.hooks(fwd_hooks=[("blocks.0.attn.hook_q", lambda x, hook: x)]):
        logits(spectral)
        assert torch.equal(logits(model), before)
    train(spectral)
    assert_unchanged(model, about)
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(spectral), before)
    assert spectral.base is model
    assert spectral.training
    assert not to_spectral(model.eval()).training


@on_both_backends
def test_names_state_dicts_files_and_copies(backend, name):
    model, spectral = base(backend, name), moved(backend, name)
    own = [f"spectral.{index}.{part}" for index in range(2) for part in ("log_omega_shift", "phase", "gain")]
    assert sorted(dict(spectral.named_parameters())) == sorted([*dict(model.named_parameters()), *own])
    compared = [f"spectral.{at}.{part}" for at in range(2) for part in ("theta", "query_mask", "shared_phase", "tied")]
    assert sorted(spectral.state_dict()) == sorted([*model.state_dict(), *own, *compared])
    assert [id(p) for p in spectral.spectral_parameters()] == [
        id(p) for key, p in spectral.named_parameters() if key.startswith("spectral.")
    ]
    assert {f"0.{key}" for key in own} <= set(torch.nn.Sequential(spectral).state_dict())
    file = io.BytesIO()
    torch.save(spectral.state_dict(), file)
    file.seek(0)
    other = to_spectral(getattr(zoo, backend)(name))
    other.load_state_dict(torch.load(file))
    assert torch.equal(logits(other), logits(spectral))
    kept = {key: value for key, value in spectral.state_dict().items() if key != "spectral.0.log_omega_shift"}
    with pytest.raises(RuntimeError, match=r"0\.log_omega_shift"):
        other.load_state_dict(kept)
    assert_on_its_own(copy.deepcopy(spectral), spectral)
    assert copy.copy(spectral).spectral is spectral.spectral
    if backend == "hooked":
        assert_on_its_own(pickle.loads(pickle.dumps(spectral)), spectral)
        return
    for dump in (pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
        with pytest.raises(TypeError, match=r"a spectral bridge cannot be pickled.*save_spectral"):
            dump(spectral)
    with pytest.raises(TypeError, match="has no save_pretrained: keep its parameters by save_spectral"):
        spectral.save_pretrained("nowhere")


# Another choice of heads, pairs or scope, and what is said of it. Each moves logits by .02 and more if it is let pass.
OTHERS = {
    "heads": ({"heads": [(0, 0), (0, 1), (1, 2), (1, 3)]}, r"0\..*query_mask: other heads= or frequencies="),
    "pairs": ({"frequencies": [0, 2]}, r"0\..*query_mask: other heads= or frequencies="),
    "phase": ({"scope": "layer", "shared_phase": True}, r"0\..*shared_phase: another shared_phase="),
    "scope": ({"scope": "model"}, r"0\..*tied: another scope="),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", OTHERS)
def test_a_state_dict_of_other_choices_is_refused(what):
    options, said = OTHERS[what]
    scope = {"scope": "layer"} if "scope" in options else {}
    for made in (functools.partial(base, "bridge", "llama"), functools.partial(zoo.hf_model, "llama")):
        spectral = move(to_spectral(made(), **options))
        again = to_spectral(made(), **options)
        again.load_state_dict(spectral.state_dict())
        assert torch.equal(logits(again), logits(spectral))
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=said):
                to_spectral(made(), **scope).load_state_dict(spectral.state_dict(), strict=strict)


def test_a_state_dict_of_other_inverse_frequencies_is_refused():
    spectral, other = to_spectral(base("bridge", "llama")), to_spectral(base("bridge", "llama3"))
    with pytest.raises(RuntimeError, match=r"0\.theta: other inverse frequencies"):
        other.spectral.load_state_dict(spectral.spectral.state_dict())
    start = {index: module.theta.clone() for index, module in spectral.spectral.items()}
    rounded = {
        key: value.bfloat16() if "theta" in key else value for key, value in spectral.spectral.state_dict().items()
    }
    spectral.spectral.load_state_dict(rounded)  # of a model that was bfloat16: its own frequencies stay
    assert all(torch.equal(module.theta, start[index]) for index, module in spectral.spectral.items())


@pytest.mark.slow
@some_models
def test_a_shared_phase_has_a_gradient_of_rounding_alone(backend, name):
    spectral = to_spectral(base(backend, name), shared_phase=True, log_omega=False)
    spectral(zoo.prompt(), return_type="loss").backward(inputs=list(spectral.spectral_parameters()))
    for module in spectral.spectral.values():
        assert float(module.phase.grad.abs().max()) < 1e-5 * float(module.omega.grad.abs().max())
    before = logits(spectral)
    move(spectral, only=("phase",))
    # Rounding of logits of order 1: 1e-6; on the query alone the same phases move them by tenths.
    torch.testing.assert_close(logits(spectral), before, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_the_inverse_frequencies_are_the_models_own():
    for name in ("llama3", "yarn", "gemma3"):
        model = base("bridge", name)
        view = attention_view(model)
        for index, module in to_spectral(model).spectral.items():
            own = view.rotary(int(index)).theta
            assert torch.equal(module.theta, own.float())
            assert torch.equal(module.omega, own.float().expand_as(module.omega))


@on_both_backends
def test_to_moves_the_spectral_parameters_too(backend, name):
    model = getattr(zoo, backend)(name)
    spectral = to_spectral(model)
    assert spectral.to(torch.float64) is spectral
    assert {parameter.dtype for parameter in spectral.parameters()} == {torch.float64}
    found = logits(spectral)
    assert found.dtype == torch.float64
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(found, logits(copy.deepcopy(model).to(torch.float64)))
    move(spectral)
    assert not torch.equal(logits(spectral), found)
    for change, dtype in ((spectral.float, torch.float32), (spectral.bfloat16, torch.bfloat16)):
        assert {parameter.dtype for parameter in change().parameters()} == {dtype}


@pytest.mark.slow
def test_half_precision_keeps_parity_and_float32_frequencies():
    model = zoo.bridge("llama").to(torch.bfloat16)
    spectral = to_spectral(model)
    assert {parameter.dtype for parameter in spectral.spectral_parameters()} == {torch.float32}
    assert torch.equal(logits(spectral), logits(model))


# --- layers, heads and frequencies that become spectral ---


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "rows"), [("head", (2, 4)), ("group", (2, 2)), ("layer", (1, 1)), ("model", (1, 1))])
def test_scopes(scope, rows):
    spectral = to_spectral(base("bridge", "llama"), scope=scope)
    for module in spectral.spectral.values():
        assert (len(module.omega), len(module.phase), len(module.gain)) == (rows[0], rows[1], rows[1])
    expected = 3 if scope == "model" else 6
    assert len(list(spectral.spectral_parameters())) == expected
    assert len(list(spectral.parameters())) == len(list(spectral.base.parameters())) + expected
    move(spectral)
    same = torch.equal(spectral.spectral["0"].omega_by_head(), spectral.spectral["1"].omega_by_head())
    assert same == (scope == "model")
    train(spectral)
    assert same == torch.equal(spectral.spectral["0"].gain_by_head(), spectral.spectral["1"].gain_by_head())


@pytest.mark.slow
@some_models
def test_other_heads_and_pairs_stay_geometric(backend, name):
    """Also after training steps with weight decay, which moves parameters that have no gradient."""
    view = attention_view(base(backend, name))
    group = view.n_heads(1) // len(view.raw(1).w_k)
    heads = [(1, head) for head in range(view.n_heads(1) - group, view.n_heads(1))]
    spectral = to_spectral(base(backend, name), heads=heads, frequencies=[0])
    assert list(spectral.spectral) == ["1"]
    train(spectral, weight_decay=0.5)
    assert torch.equal(spectral.spectral_geometry(0).theta, view.rotary(0).theta)
    assert spectral.spectral_geometry(0).gain is None
    geometry = spectral.spectral_geometry(1)
    chosen = torch.zeros_like(geometry.theta, dtype=torch.bool)
    chosen[-group:, 0] = True
    assert torch.equal(geometry.theta != view.rotary(1).theta, chosen)
    assert torch.equal(geometry.gain != 1, chosen)
    assert torch.equal(geometry.phase != 0, chosen)
    with torch.no_grad():
        own, found = (
            model.run_with_cache(zoo.prompt())[1]["blocks.1.attn.hook_pattern"] for model in (spectral.base, spectral)
        )
    differs = (own != found).any(0).any(-1).any(-1)
    assert torch.equal(differs, chosen.any(1))


@pytest.mark.slow
def test_heads_are_pairs_or_a_table_and_frequencies_may_be_an_iterator():
    table = pd.DataFrame({"layer": [0, 0], "head": [2, 3], "score": [0.5, 0.4]})
    for heads in (table, [(0, 3), (0, 2), (0, 3)], iter([(0, 2), (0, 3)])):
        spectral = to_spectral(base("bridge", "llama"), heads=heads)
        assert spectral.spectral["0"].query_mask.any(1).tolist() == [False, False, True, True]
    for module in to_spectral(base("bridge", "llama"), frequencies=iter([1, 2])).spectral.values():
        assert module.query_mask[0].nonzero().flatten().tolist() == [1, 2]


def test_layers_without_rotary_positions_have_no_module():
    spectral = to_spectral(base("bridge", "smollm3"))
    assert list(spectral.spectral) == ["0", "2"]
    assert spectral.spectral_geometry(1) is None


@pytest.mark.slow
def test_noise_differs_between_layers_and_seeds_and_not_between_calls():
    one, again, other = (to_spectral(base("bridge", "llama"), phase_noise=1e-3, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.spectral["0"].phase, again.spectral["0"].phase)
    assert not torch.equal(one.spectral["0"].phase, one.spectral["1"].phase)
    assert not torch.equal(one.spectral["0"].phase, other.spectral["0"].phase)
    assert not torch.equal(logits(one), logits(one.base))


def test_the_proof_is_not_seen_by_hooks_on_the_model():
    model, calls = zoo.bridge("llama"), []
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", lambda x, hook: calls.append(1))]):
        to_spectral(model)
    assert not calls


def test_a_query_norm_is_no_hindrance_where_nothing_has_moved():
    spectral = to_spectral(base("bridge", "qwen3"))
    assert torch.equal(logits(merge(spectral)), logits(spectral))
