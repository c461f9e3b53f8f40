"""Spectral models are their base to the bit at the start, and eq. 2 of the paper after it."""

import numpy as np
import pytest
import torch
import zoo
from reference_keys import normed
from spectral_zoo import BRIDGES, HOOKED, base, logits, move, moved, some_models

from tlspectral.models.attention import attention_view
from tlspectral.spectral_rope import to_spectral

MODELS = [("bridge", name) for name in BRIDGES]
MODELS += [pytest.param("hooked", name, marks=zoo.needs_hooked) for name in HOOKED]
every_model = pytest.mark.parametrize(("backend", "name"), MODELS)


# --- the start ---


@every_model
@pytest.mark.parametrize(
    "options",
    [{}, {"scope": "layer", "log_omega": False}, {"scope": "group", "shared_phase": True}],
    ids=["head", "layer-linear", "group-shared"],
)
def test_start_is_the_model_itself_to_the_bit(backend, name, options):
    model = base(backend, name)
    tokens = zoo.prompt(length=40)  # beyond the length at which some rotary modules switch
    spectral = to_spectral(model, **options)
    assert torch.equal(logits(spectral, tokens), logits(model, tokens))


@every_model
def test_every_parameter_has_a_gradient_at_the_start(backend, name):
    model = base(backend, name)
    view = attention_view(model)
    spectral = to_spectral(model, log_omega=False)
    loss = spectral(zoo.prompt(), return_type="loss")
    loss.backward(inputs=list(spectral.spectral_parameters()))
    rotary = [index for index in range(view.n_layers) if view.rotary(index) is not None]
    assert [int(index) for index in spectral.spectral] == rotary
    for module in spectral.spectral.values():
        for parameter in (module.omega, module.phase, module.gain):
            # Rounding is 1e-9 and the smallest seen 1e-6, of a pair that hardly turns.
            assert float(parameter.grad.abs().amax()) > 1e-5
            assert bool((parameter.grad != 0).all())


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


def test_the_inverse_frequencies_are_the_models_own():
    for name in ("llama3", "yarn", "gemma3"):
        model = base("bridge", name)
        view = attention_view(model)
        for index, module in to_spectral(model).spectral.items():
            own = view.rotary(int(index)).theta
            assert torch.equal(module.theta, own.float())
            assert torch.equal(module.omega, own.float().expand_as(module.omega))


# --- the definition ---


def equation_2_scores(view, index, q, k, geometry):
    """Scaled and capped scores of A (x exp(i (m Omega + Phi))) in complex numpy, from q and k before any rotation."""
    raw, own = view.raw(index), view.rotary(index)

    q, k = normed(q.double(), raw.q_norm).numpy(), normed(k.double(), raw.k_norm).numpy()
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    re, im = own.real_index.numpy(), own.imag_index.numpy()
    still = np.setdiff1d(np.arange(q.shape[-1]), np.concatenate([re, im]))
    angle = np.arange(q.shape[1])[:, None, None] * geometry.theta.numpy()
    z_q = geometry.gain.numpy() * (q[..., re] + 1j * q[..., im]) * np.exp(1j * (angle + geometry.phase.numpy()))
    z_k = (k[..., re] + 1j * k[..., im]) * np.exp(1j * angle)
    scores = own.attention_scaling**2 * np.einsum("bqht,bkht->bhqk", z_q, z_k.conj()).real
    scores += np.einsum("bqhc,bkhc->bhqk", q[..., still], k[..., still])
    scores = raw.score_scale * scores
    return scores if raw.softcap is None else raw.softcap * np.tanh(scores / raw.softcap)


@every_model
def test_moved_parameters_are_equation_2(backend, name):
    if name in zoo.READ_WRONG:
        pytest.skip("TransformerLens 3.9 pairs the wrong coordinates in Cohere's bridge")
    spectral = moved(backend, name)
    view = attention_view(base(backend, name))
    for index in map(int, spectral.spectral):
        names = view.hook_names(index)
        compared = "scores" if "scores" in names else "pattern"
        with torch.no_grad():
            _, cache = spectral.run_with_cache(
                zoo.prompt(), names_filter=[names[at] for at in ("query", "key", compared)]
            )
        ours = equation_2_scores(
            view, index, cache[names["query"]], cache[names["key"]], spectral.spectral_geometry(index)
        )
        theirs = cache[names[compared]].double().numpy()
        if compared == "pattern":
            seen = np.tril(np.ones(ours.shape[-2:], dtype=bool))
            weights = np.exp(np.where(seen, ours, -np.inf) - ours.max())
            ours = weights / weights.sum(-1, keepdims=True)
        seen = np.broadcast_to(np.tril(np.ones(ours.shape[-2:], dtype=bool)), ours.shape) & (theirs > -1e30)
        # float32 noise of scores up to 20, with the model's own tables: measured 1e-5; without the spectral part, with
        # the phase on the other side or with a gain on both, off by units.
        assert np.abs(ours - theirs)[seen].max() < 4e-5, index
        assert not np.array_equal(ours, theirs)


@some_models
def test_left_padding_changes_nothing(backend, name):
    spectral = moved(backend, name)
    tokens = zoo.prompt(length=12)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), tokens], dim=1)
    mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.ones_like(tokens)], dim=1)
    found = logits(spectral, padded, attention_mask=mask)[:, 5:]
    # Rounding 1e-6; the effect of the spectral parameters themselves is above 0.1.
    torch.testing.assert_close(found, logits(spectral, tokens), rtol=0, atol=2e-5)
    assert float((logits(spectral, tokens) - logits(base(backend, name), tokens)).abs().max()) > 0.05
