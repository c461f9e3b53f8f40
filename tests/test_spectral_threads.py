"""Several threads run one spectral model, or it and its base: all get their own logits, and nothing stays behind."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import zoo
from model_state import assert_unchanged, state_of
from spectral_zoo import base, logits, move, moved, some_models

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate
from tlspectral.spectral_rope import to_spectral

PROMPTS = [zoo.prompt(length=length, seed=length) for length in (24, 17, 9, 5)]
ROUNDS = 12  # of four threads that start together, each with a prompt of its own length


@some_models
def test_four_threads_get_the_logits_of_one(backend, name):
    spectral = moved(backend, name)
    expected, about = [logits(spectral, prompt) for prompt in PROMPTS], state_of(spectral.base)
    together = Barrier(4)

    def run(prompt):
        together.wait()
        return [logits(spectral, prompt) for _ in range(ROUNDS)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, PROMPTS))
    for wanted, found in zip(expected, results, strict=True):
        assert all(torch.equal(one, wanted) for one in found)
    assert_unchanged(spectral.base, about)


@some_models
def test_threads_of_two_spectral_models_of_one_base(backend, name):
    models = [moved(backend, name), move(to_spectral(base(backend, name)), seed=1)]
    expected = [logits(model) for model in models]
    together = Barrier(2)

    def run(model):
        together.wait()
        return [logits(model) for _ in range(ROUNDS)]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, models))
    for wanted, found in zip(expected, results, strict=True):
        assert all(torch.equal(one, wanted) for one in found)


@some_models
def test_the_base_in_another_thread_is_not_turned(backend, name):
    """While the spectral model is inside its first block, where its rotations are on the hook points of the base."""
    spectral = moved(backend, name)
    own, expected, found = logits(spectral.base), logits(spectral), []

    def run_base(activation, hook):
        if not found:
            found.append(None)
            with ThreadPoolExecutor(1) as pool:
                found[0] = pool.submit(logits, spectral.base).result()

    with spectral.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", run_base)]):
        assert torch.equal(logits(spectral), expected)
    assert torch.equal(found[0], own)


def test_an_open_ablation_refuses_passes_of_other_threads():
    """An ablation of the base is none of the spectral model."""
    spectral = moved("bridge", "llama")
    expected = logits(spectral)
    with ThreadPoolExecutor(1) as pool:
        for model in (spectral, spectral.base):
            intact = logits(model)
            with ablate(model, [(0, 1)], "symmetric"):
                ablated = logits(model)
                with pytest.raises(EditNotHonored, match="another thread"):
                    pool.submit(logits, model).result()
                if model is not spectral:
                    assert torch.equal(pool.submit(logits, spectral).result(), expected)
            assert not torch.equal(ablated, intact)
        assert torch.equal(pool.submit(logits, spectral).result(), expected)


@some_models
def test_copies_and_files_are_as_without_threads(backend, name):
    spectral = moved(backend, name)
    expected = logits(spectral)
    assert torch.equal(logits(copy.deepcopy(spectral)), expected)
    file = io.BytesIO()
    torch.save(spectral.state_dict(), file)
    file.seek(0)
    other = to_spectral(getattr(zoo, backend)(name))
    other.load_state_dict(torch.load(file))
    assert torch.equal(logits(other), expected)
    if backend == "hooked":  # TransformerLens' bridges cannot be pickled
        assert torch.equal(logits(pickle.loads(pickle.dumps(spectral))), expected)
