"""The packaged models, loaded once per process, with what is measured on them. Not to be changed: load one's own."""

import functools

import torch
import zoo

import tlspectral as tls
from tlspectral.models.loading.packaged import read_packaged
from tlspectral.studies.common import AttentionOnlyTransformer, RandomMapTask, TransformerConfig

BACKENDS = ("bridge", "hooked") if zoo.HAS_HOOKED else ("bridge",)
CONSTRAINED = ("tiny-ape-sym", "tiny-rope-imag", "tiny-rope-sym")


@functools.cache
def loaded(name, backend="bridge"):
    return tls.load_model(name, backend=backend, device="cpu")


@functools.cache
def detected(name, backend="bridge"):
    return tls.detect_heads(loaded(name, backend))


@functools.cache
def analyzed(name):
    return tls.analyze_heads(loaded(name), detectors=False, null_draws=2)


def trained(name):
    """The plain-torch model that the weights were trained as."""
    record, weights = read_packaged(name)
    model = AttentionOnlyTransformer(TransformerConfig(**record["config"]))
    model.load_state_dict(weights)
    return model.eval()


def sequences(n_sequences=8, seed=0):
    return RandomMapTask().sample(n_sequences, torch.Generator().manual_seed(seed))
