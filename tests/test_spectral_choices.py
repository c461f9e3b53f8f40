"""Which layers, heads and frequencies become spectral. What is refused is in test_spectral_refusals.py."""

import pandas as pd
import pytest
import torch
import zoo
from spectral_zoo import base, logits, move, some_models, train

from tlspectral.models.attention import attention_view
from tlspectral.spectral_rope import to_spectral


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
