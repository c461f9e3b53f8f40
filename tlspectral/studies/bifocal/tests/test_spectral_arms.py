"""The small Llama and its arms: one start for all, a second hand's forward pass, what is learned."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from spectral_arms import ALL_ARMS, LANGUAGE, SMALL, backbone, jitter_spectral, model
from zoo import generator

from tlspectral.studies.bifocal.evolution import spectral_modules
from tlspectral.studies.bifocal.formal_languages import answers_of
from tlspectral.studies.bifocal.llama import ARMS, PHASE_NOISE_ARMS, LlamaConfig, SpectralLlama, parameter_counts


def tokens(n=3, seed=0):
    return LANGUAGE.sample(n, generator(seed)).tokens


@pytest.mark.parametrize("arm", [name for name in ALL_ARMS if name != "standard"])
def test_all_arms_of_a_seed_start_with_the_same_backbone_and_function(arm):
    standard, other = model("standard", seed=3), model(arm, seed=3)
    weights, same, different = (backbone(one) for one in (standard, other, model(arm, seed=4)))
    assert list(weights) == list(same)
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert not torch.equal(weights["embed.weight"], different["embed.weight"])
    if arm in ARMS:  # without phase noise, to the bit
        batch = LANGUAGE.sample(4, generator())
        at = answers_of(batch).position
        assert torch.equal(standard(batch.tokens), other(batch.tokens))
        assert torch.equal(standard(batch.tokens, at), other(batch.tokens, at))


def test_shared_phase_noise_cancels_and_query_noise_does_not():
    config = replace(SMALL, n_layers=1)
    standard = model("standard", config=config)(tokens()).double()
    shared, query = (
        (SpectralLlama(config, replace(PHASE_NOISE_ARMS[arm], phase_noise=1.0))(tokens()) - standard).abs().max()
        for arm in ("full_noise_shared", "full_noise")
    )
    # Measured: 1.5e-8 and 1.7e-4 on logits of 0.2; a phase on one side only gives the second.
    assert shared < 2e-7
    assert query > 5e-6


def test_parameter_counts_are_those_that_are_learned():
    spectral = {arm: parameter_counts(LlamaConfig(9), ARMS[arm])["spectral"] for arm in ARMS}
    assert spectral == {"standard": 0, "omega": 128, "full": 384, "bifocal": 192, "placebo": 256}
    for size, weights in ((7, 397_696), (9, 398_208), (11, 398_720)):
        assert parameter_counts(LlamaConfig(size), ARMS["full"])["backbone"] == weights
    for arm in ("standard", "omega", "full", "placebo"):
        built = model(arm)
        learned = sum(value.numel() for value in built.parameters() if value.requires_grad)
        assert learned == sum(parameter_counts(SMALL, ARMS[arm]).values())


def test_the_model_by_a_second_hand():
    """Complex numbers in float64, one head at a time, with spectral parameters off their start."""
    built = jitter_spectral(model("full"))
    ids, state = tokens(), {name: value.detach().double() for name, value in built.state_dict().items()}

    def norm(x, gain):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    x = state["embed.weight"][ids]
    position = torch.arange(ids.shape[1], dtype=torch.float64)[:, None]
    for layer in range(2):
        at = {name.split(".", 2)[2]: value for name, value in state.items() if name.startswith(f"blocks.{layer}.")}
        n = norm(x, at["attention_norm.weight"])
        heads = []
        for head in range(4):
            q, k, v = (n @ at[f"attention.{role}_proj.weight"][4 * head : 4 * head + 4].T for role in "qkv")
            omega, gain, phase = (at[f"attention.spectral.{name}"][head] for name in ("omega", "gain", "phase"))
            pairs = [torch.complex(part[..., :2], part[..., 2:]) for part in (q, k)]
            turned_q = pairs[0] * gain * torch.polar(torch.ones_like(phase), position * omega + phase)
            turned_k = pairs[1] * torch.polar(torch.ones_like(phase), position * omega)
            scores = (turned_q @ turned_k.conj().mT).real / 2
            future = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
            heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ at["attention.o_proj.weight"].T
        n = norm(x, at["mlp_norm.weight"])
        gate, up = (n @ at[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ at["mlp.down_proj.weight"].T
    expected = norm(x, state["norm.weight"]) @ state["unembed.weight"].T
    # Measured: 3e-8 on logits of 0.2. A gain, phase or frequency that is off by 0.3: 7e-5 and more.
    torch.testing.assert_close(built(ids).double(), expected, atol=5e-7, rtol=0)


def test_logits_at_chosen_positions_are_those_of_the_whole_and_do_not_see_the_future():
    built = jitter_spectral(model("full"))
    batch = LANGUAGE.sample(5, generator(2))
    at = answers_of(batch).position
    before = built(batch.tokens)
    whole = before.gather(1, at[:, :, None].expand(-1, -1, SMALL.d_vocab))
    # Measured: equal; another kernel may round. A neighbour's logits are off by 0.3.
    torch.testing.assert_close(built(batch.tokens, at), whole, atol=1e-6, rtol=0)
    changed = batch.tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % SMALL.d_vocab
    after = built(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], atol=1e-7, rtol=0)  # measured: equal
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


def test_placebo_is_gauge():
    """Gain and phase of the placebo can be taken into W_Q: what it learns the standard model can be."""
    placebo, standard = jitter_spectral(model("placebo")), model("standard")
    for module in spectral_modules(placebo).values():
        with torch.no_grad():
            module.omega.copy_(module.theta)  # the placebo does not learn it
    ids = tokens()
    assert (placebo(ids) - standard(ids)).abs().max() > 2e-6
    with torch.no_grad():
        for theirs, attention in zip(placebo.attentions(), standard.attentions(), strict=True):
            assert theirs.spectral is not None
            factor = torch.polar(theirs.spectral.gain, theirs.spectral.phase)[:, :, None]  # heads pairs 1
            rows = attention.q_proj.weight.unflatten(0, (4, 4))
            turned = torch.complex(rows[:, :2], rows[:, 2:]) * factor
            attention.q_proj.weight.copy_(torch.cat([turned.real, turned.imag], 1).flatten(0, 1))
    # Measured: 3e-8.
    torch.testing.assert_close(placebo(ids), standard(ids), atol=2e-7, rtol=0)
