"""Several threads run one spectral model, or it and its base: all get their own logits, and nothing stays behind."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import zoo
from model_state import assert_unchanged, state_of
from spectral_zoo import logits, moved, on_both_backends, some_models

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate

PROMPTS = [zoo.prompt(length=length, seed=length) for length in (24, 17, 9, 5)]
ROUNDS = 6  # of four threads that start together, each with a prompt of its own length


@on_both_backends
def test_threads_of_spectral_models_of_one_base_get_their_own_logits(backend, name):
    spectral, other = moved(backend, name), moved(backend, name, scope="layer")
    jobs = [(spectral, prompt) for prompt in PROMPTS] + [(other, PROMPTS[0])]
    expected, about = [logits(*job) for job in jobs], state_of(spectral.base)
    together = Barrier(len(jobs))

    def run(job):
        together.wait()
        return [logits(*job) for _ in range(ROUNDS)]

    with ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(run, jobs))
    for wanted, found in zip(expected, results, strict=True):
        assert all(torch.equal(one, wanted) for one in found)
    assert_unchanged(spectral.base, about)


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
