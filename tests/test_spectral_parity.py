"""Spectral models are their base to the bit at the start, and eq. 2 of the paper after it."""

import torch
import zoo
from spectral_zoo import base, logits, move, moved, some_models

from tlspectral.models.attention import attention_view
from tlspectral.spectral_rope import to_spectral

# --- the start ---


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
