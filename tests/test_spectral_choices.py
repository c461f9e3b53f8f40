"""Which layers, heads and frequencies become spectral, and which choices are refused."""

import pandas as pd
import pytest
import torch
import zoo
from spectral_zoo import NO_ROPE, base, logits, move, moved, same_to_the_bit, some_models, train

from tlspectral.errors import BadHead, EditNotHonored, ScoreMismatch, UnsupportedArchitecture
from tlspectral.models.attention import attention_view
from tlspectral.spectral_rope import model as spectral_model
from tlspectral.spectral_rope import to_spectral

# --- choices ---


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


def test_one_omega_for_layers_that_turn_differently_is_refused():
    with pytest.raises(ValueError, match="layers 0 and 1 have different inverse frequencies"):
        to_spectral(base("bridge", "gemma3"), scope="model")


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


def test_heads_are_pairs_or_a_table():
    table = pd.DataFrame({"layer": [0, 0], "head": [2, 3], "score": [0.5, 0.4]})
    for heads in (table, [(0, 3), (0, 2), (0, 3)], iter([(0, 2), (0, 3)])):
        spectral = to_spectral(base("bridge", "llama"), heads=heads)
        assert spectral.spectral["0"].query_mask.any(1).tolist() == [False, False, True, True]


def test_frequencies_may_be_an_iterator():
    spectral = to_spectral(base("bridge", "llama"), frequencies=iter([1, 2]))
    for module in spectral.spectral.values():
        assert module.query_mask[0].nonzero().flatten().tolist() == [1, 2]


def test_layers_without_rotary_positions_have_no_module():
    spectral = to_spectral(base("bridge", "smollm3"))
    assert list(spectral.spectral) == ["0", "2"]
    assert spectral.spectral_geometry(1) is None
    with pytest.raises(UnsupportedArchitecture, match="layer 1 has no rotary positions"):
        to_spectral(base("bridge", "smollm3"), heads=[(0, 0), (0, 1), (1, 0), (1, 1)])


def test_noise_differs_between_layers_and_not_between_calls():
    one, two = (to_spectral(base("bridge", "llama"), phase_noise=1e-3) for _ in range(2))
    assert same_to_the_bit(dict(one.spectral.named_parameters()), dict(two.spectral.named_parameters()))
    assert not torch.equal(one.spectral["0"].phase, one.spectral["1"].phase)
    assert not torch.equal(
        to_spectral(base("bridge", "llama"), phase_noise=1e-3, seed=1).spectral["0"].phase, one.spectral["0"].phase
    )
    assert not torch.equal(logits(one), logits(one.base))


def test_geometry_is_the_parameters_by_head():
    spectral = moved("bridge", "yarn")
    own, found = attention_view(base("bridge", "yarn")).rotary(0), spectral.spectral_geometry(0)
    module = spectral.spectral["0"]
    assert torch.equal(found.theta, own.theta + module.shift_by_head())
    assert torch.equal(found.gain, module.gain.detach().double())
    assert torch.equal(found.phase, module.phase.detach().double())
    assert found.attention_scaling == own.attention_scaling != 1
    assert torch.equal(found.real_index, own.real_index)
    fresh = to_spectral(base("bridge", "yarn")).spectral_geometry(0)
    assert torch.equal(fresh.theta, own.theta.expand(4, -1))


# --- refusals ---


@pytest.mark.parametrize("name", NO_ROPE)
def test_a_model_without_rotary_positions_is_refused(name):
    with pytest.raises(UnsupportedArchitecture, match="none of the 2 layers has rotary positions"):
        to_spectral(base("bridge", name))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"heads": [(2, 0)]}, BadHead, "L2H0 does not exist"),
        ({"heads": [(0, 4)]}, BadHead, "L0H4 does not exist"),
        ({"heads": []}, ValueError, "no head is chosen"),
        ({"heads": [(0, 0), (0, 1), (1, 2)]}, ValueError, r"layer 1: heads \[2, 3\] share key/value head 1"),
        ({"frequencies": [6]}, ValueError, "layer 0: frequencies are 0 to 5"),
        ({"phase_noise": -1.0}, ValueError, "standard deviation"),
    ],
)
def test_choices_that_do_not_fit_are_refused(options, error, said):
    with pytest.raises(error, match=said):
        to_spectral(base("bridge", "llama"), **options)


def test_a_spectral_model_is_not_made_spectral_again():
    with pytest.raises(ValueError, match="spectral already"):
        to_spectral(to_spectral(base("bridge", "llama")))


def test_something_else_is_a_type_error():
    with pytest.raises(TypeError, match="neither a TransformerBridge nor a HookedTransformer"):
        to_spectral(torch.nn.Linear(2, 2))


def test_a_hook_point_that_never_fires_is_refused(monkeypatch):
    monkeypatch.setattr(spectral_model, "place", lambda view, layers: None)
    with pytest.raises(EditNotHonored, match="layer 0: the model does not use a query"):
        to_spectral(base("bridge", "neox"))


def test_a_start_that_is_not_the_model_is_refused(monkeypatch):
    def off(*given, **options):
        layers = build(*given, **options)
        with torch.no_grad():
            layers["1"].gain[0, 0] += 1e-3
        return layers

    build = spectral_model.spectral_layers
    monkeypatch.setattr(spectral_model, "spectral_layers", off)
    with pytest.raises(ScoreMismatch, match="at the start differ"):
        to_spectral(base("bridge", "llama"))


def test_the_proof_is_not_seen_by_hooks_on_the_model():
    model, calls = zoo.bridge("llama"), []
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", lambda x, hook: calls.append(1))]):
        to_spectral(model)
    assert not calls
