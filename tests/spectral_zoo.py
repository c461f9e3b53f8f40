"""Spectral models of the zoo: which ones, moved from their start, trained a little, and all that must stay."""

import functools

import pytest
import torch
import zoo

from tlspectral.spectral_rope import to_spectral

NO_ROPE = ("gpt2", "opt", "gptneo", "bloom")
NORMED = ("qwen3", "gemma3", "olmo2")
BRIDGES = tuple(name for name in zoo.ARCHITECTURES + zoo.LENGTH_DEPENDENT if name not in NO_ROPE)
HOOKED = tuple(name for name in zoo.HOOKED_ARCHITECTURES if name not in NO_ROPE)
# Grouped keys at hook_q; at hook_rot_q; delegated attention; a partial rotation with biases; the other backend.
SOME = [("bridge", "llama"), ("bridge", "qwen3"), ("bridge", "gptj"), ("bridge", "neox")]
SOME += [pytest.param("hooked", name, marks=zoo.needs_hooked) for name in ("qwen2", "qwen3")]
some_models = pytest.mark.parametrize(("backend", "name"), SOME)


@functools.cache
def base(backend, name):
    """A model that no test changes."""
    return getattr(zoo, backend)(name)


def logits(model, tokens=None, **options):
    with torch.no_grad():
        return model(zoo.prompt() if tokens is None else tokens, return_type="logits", **options)


def move(spectral, *, only=("omega", "log_omega_shift", "phase", "gain"), seed=0, size=0.2):
    """Some spectral parameters displaced by a seeded draw, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in spectral.spectral.named_parameters():
            if name.rsplit(".", 1)[-1] in only:
                parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)
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


def same_to_the_bit(one, other):
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
