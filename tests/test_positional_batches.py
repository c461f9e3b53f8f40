"""Several suffixes behind one prefill, and batches of any size: measured as each alone."""

import pytest
import zoo
from positional_measurements import (
    WITHOUT_ROPE,
    agreement_of_shared_prefill,
    block_prompt,
    differ,
    every_model,
    measure_queries,
    modes,
    tiny,
)
from zoo import shared

from tlspectral.models.attention import attention_view
from tlspectral.positional.passes import QueryPasses


@every_model
def test_suffixes_that_share_a_prefill_are_measured_as_each_alone(backend, name):
    rotary = name not in WITHOUT_ROPE
    # float32 passes over parts of a prompt: measured 3e-5 (alpha_ess, of size 5). A shifted position, a wrong row of
    # the batch or a cache that grew under an earlier suffix moves scores by tenths.
    assert agreement_of_shared_prefill(shared(backend, name), "prompt", rotary) < 1e-3


@modes
def test_native_models_keep_no_cache_and_are_run_in_full(mode):
    assert agreement_of_shared_prefill(tiny("tiny-rope"), mode, True) < 1e-3


@pytest.mark.parametrize("name", ["gptj", "gemma3", "mistral", "bloom"])
def test_keys_of_a_shared_prefill_can_be_permuted(name):
    assert agreement_of_shared_prefill(shared("bridge", name), "key", name not in WITHOUT_ROPE) < 1e-3


def test_small_batches_give_what_large_ones_do(monkeypatch):
    view, prompt = attention_view(shared("bridge", "gemma2")), block_prompt()
    suffixes = [prompt.suffix, prompt.suffix.flip(0), zoo.prompt(1, 2)[0]]
    arguments = (view, prompt.prefix, prompt.blocks, suffixes)
    large = measure_queries(*arguments, per_frequency=True)
    sizes = []
    inner = QueryPasses.run

    def counted(self, contexts, reduce):
        sizes.append(len(contexts))
        return inner(self, contexts, reduce)

    monkeypatch.setattr(QueryPasses, "run", counted)
    measure_queries(*arguments, per_frequency=True)
    assert sizes == [1, 6]
    sizes.clear()
    monkeypatch.setattr("tlspectral.positional.passes._BYTES_AT_ONCE", 1)
    small = measure_queries(*arguments, per_frequency=True)
    assert sizes == [1] * 7
    for first, second in zip(large, small, strict=True):
        # float32 matrix products of other shapes: measured 2e-5.
        assert differ(first.heads, second.heads) < 1e-3
        assert differ(first.frequencies, second.frequencies) < 1e-3


@modes
def test_progress_counts_layers(mode):
    view, prompt = attention_view(shared("bridge", "llama")), block_prompt()
    done = []
    suffixes = [prompt.suffix, prompt.suffix.flip(0)]
    measure_queries(
        view, prompt.prefix, prompt.blocks, suffixes, mode=mode, swaps=[(1, 2), (2, 3)], advance=done.append
    )
    assert sum(done) == 2 * 3 * view.n_layers
    assert len(done) >= 2 * view.n_layers  # the bar moves within a pass, by keys too
