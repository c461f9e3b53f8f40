"""Models of the zoo as the tests of the attention view use them, fresh to be changed."""

import zlib

import pytest
import torch
import zoo

BRIDGES = zoo.ARCHITECTURES + zoo.LENGTH_DEPENDENT
MODELS = [("bridge", name) for name in BRIDGES]
MODELS += [pytest.param("hooked", name, marks=zoo.needs_hooked) for name in zoo.HOOKED_ARCHITECTURES]
LAYER_NORM = ("gpt2", "neox", "phi", "gptj", "opt", "gptneo", "bloom", "cohere")
every_model = pytest.mark.parametrize(("backend", "name"), MODELS)


def fresh(backend, name, **options):
    return getattr(zoo, backend)(name, **options)


def poke(parameter, value):
    with torch.no_grad():
        parameter.view(-1)[0] = value


def skip_unless_sampled(full, model, case, of=3):
    """Run every model in one case of each three (`of`) alone, unless all are asked for: `ARGS=--full`."""
    if not full and (zlib.crc32(repr(model).encode()) + case) % of:
        pytest.skip(f"one case of a model in {of}; all with --full")
