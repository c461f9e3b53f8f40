"""Spectral models of the zoo: which ones, moved from their start, trained a little, and all that must stay."""

import pytest
import torch
import zoo

from tlspectral.spectral_rope import to_spectral

NORMED = ("qwen3", "gemma3", "olmo2")
# Grouped keys at hook_q; at hook_rot_q; delegated attention; a partial rotation with biases; the other backend.
SOME = [("bridge", "llama"), ("bridge", "qwen3"), ("bridge", "gptj")]
SOME += [pytest.param("bridge", "neox", marks=pytest.mark.slow)]
SOME += [pytest.param("hooked", "qwen2", marks=[zoo.needs_hooked, pytest.mark.slow])]
SOME += [pytest.param("hooked", "qwen3", marks=zoo.needs_hooked)]
some_models = pytest.mark.parametrize(("backend", "name"), SOME)
on_both_backends = pytest.mark.parametrize(
    ("backend", "name"), [("bridge", "llama"), pytest.param("hooked", "qwen3", marks=zoo.needs_hooked)]
)


base = zoo.shared  # a model that no test changes


logits = zoo.logits


def move(spectral, *, only=("omega", "log_omega_shift", "phase", "gain"), seed=0):
    """Some parameters of a spectral model, or of one of its rotations, displaced by a seeded draw, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in getattr(spectral, "spectral", spectral).named_parameters():
            if name.rsplit(".", 1)[-1] in only:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return spectral


def moved(backend, name, **options):
    return move(to_spectral(base(backend, name), **options))


def train(spectral, steps=2, **options):
    optimizer = torch.optim.AdamW(list(spectral.spectral_parameters()), lr=1e-2, **options)
    for step in range(steps):
        loss = spectral(zoo.prompt(seed=step), return_type="loss")
        optimizer.zero_grad()
        loss.backward(inputs=list(spectral.spectral_parameters()))
        optimizer.step()


def greedy(model, tokens, steps):
    """Tokens with those that have the highest logit after them, by whole passes."""
    for _ in range(steps):
        tokens = torch.cat([tokens, logits(model, tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


def assert_on_its_own(other, spectral):
    """A copy computes the same, and what is done to it is not done to the model."""
    before = logits(spectral)
    assert torch.equal(logits(other), before)
    move(other, seed=1)
    assert torch.equal(logits(spectral), before)
    assert not torch.equal(logits(other), before)


def config(**changes):
    return {
        "n_layers": 2,
        "d_model": 32,
        "n_heads": 4,
        "d_head": 8,
        "d_vocab": zoo.VOCABULARY,
        "n_ctx": 64,
        "act_fn": "silu",
        "d_mlp": 64,
        "normalization_type": "RMS",
        "n_key_value_heads": 2,
        "positional_embedding_type": "rotary",
        "rotary_dim": 8,
        "seed": 0,
        "initializer_range": 0.4,
        "device": "cpu",
    } | changes
