"""The packaged models, loaded once per process, with what is measured on them. Not to be changed: load one's own."""

import functools

import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.models.loading.source import TINY
from tlspectral.studies.common import RandomMapTask

BACKENDS = ("bridge", "hooked") if zoo.HAS_HOOKED else ("bridge",)
CONSTRAINED = ("tiny-ape-sym", "tiny-rope-imag", "tiny-rope-sym")

every_model = pytest.mark.parametrize("name", TINY)
free_model = pytest.mark.parametrize("name", [name for name in TINY if name not in CONSTRAINED])
constrained_model = pytest.mark.parametrize("name", CONSTRAINED)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@functools.cache
def loaded(name, backend="bridge"):
    return tls.load_model(name, backend=backend, device="cpu")


@functools.cache
def detected(name, backend="bridge"):
    return tls.detect_heads(loaded(name, backend))


@functools.cache
def analyzed(name):
    return tls.analyze_heads(loaded(name), detectors=False, null_draws=5, show_progress=False)


def sequences(n_sequences=8, seed=0):
    return RandomMapTask().sample(n_sequences, torch.Generator().manual_seed(seed))
