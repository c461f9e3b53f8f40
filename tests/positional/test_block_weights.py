"""Several suffixes behind one prefill, batches of any size, and the softmax that swapped keys share."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import zoo
from positional_measurements import agreement_of_shared_prefill, block_prompt, differ, measure_queries, modes, tiny
from zoo import shared

from tlspectral.positional.block_weights import QueryPasses
from tlspectral.positional.exclusion import swapped_key_means


@pytest.mark.slow
@modes
def test_native_models_keep_no_cache_and_are_run_in_full(mode):
    assert agreement_of_shared_prefill(tiny("tiny-rope"), mode, True) < 1e-3


@pytest.mark.slow
def test_small_batches_give_what_large_ones_do(batch_size, spied):
    suffix = block_prompt().suffix
    measure = partial(measure_queries, shared("bridge", "gemma2"), [suffix, suffix.flip(0), zoo.prompt(1, 2)[0]])
    large = measure(per_frequency=True)
    contexts = spied(QueryPasses, "run", at=1)
    measure(per_frequency=True)
    assert [len(batch) for batch in contexts] == [1, 6]
    contexts.clear()
    batch_size(held=2)
    small = measure(per_frequency=True)
    assert [len(batch) for batch in contexts] == [1] * 7
    for first, second in zip(large, small, strict=True):
        # float32 matrix products of other shapes: measured 2e-5.
        assert differ(first.heads, second.heads) < 1e-3
        assert differ(first.frequencies, second.frequencies) < 1e-3


def moved_all_anew(logits_at, spans, i, j, n):
    """What `swapped_key_means` gives for one swap, from a softmax over all positions."""
    blocks = [list(range(*span)) for span in spans]
    order = list(blocks)
    order[i], order[j] = order[j], order[i]
    keys = [*range(spans[0][0]), *(key for block in order for key in block), *range(spans[-1][1], n)]
    weights = logits_at((torch.tensor(keys), torch.arange(n))).softmax(-1)
    ends = torch.tensor([spans[0][0], *(len(block) for block in order)]).cumsum(0).tolist()
    return torch.stack([weights[..., ends[b] : ends[b + 1]].mean(-1) for b in (i, j)], dim=-1)


@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])
@pytest.mark.parametrize("lengths", [(2, 2, 2, 2), (1, 4, 2, 3)])
@pytest.mark.parametrize("prefix", [0, 2])
def test_the_updated_softmax_is_the_softmax(size, lengths, prefix):
    n = prefix + sum(lengths) + 2
    bounds = torch.tensor([prefix, *lengths]).cumsum(0).tolist()
    spans = list(pairwise(bounds))
    swaps = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    for seed in range(20):
        table = size * torch.randn(3, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

        def logits_at(moved, table=table):
            return table[:, moved[0], moved[1]]

        found = swapped_key_means(logits_at, logits_at((torch.arange(n), torch.arange(n))), spans, swaps)
        expected = torch.stack([moved_all_anew(logits_at, spans, i, j, n) for i, j in swaps])
        # Relative to each weight, however small: a denominator by subtraction has lost all digits at size 30, and
        # exponentials with the old maximum overflow at 3000. Measured 5e-13, from logits of 1e4 rounded to 2e-12.
        assert torch.allclose(found, expected, rtol=1e-10, atol=0)
