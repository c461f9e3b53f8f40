"""Block prompts: what swaps do to tokens, and which of them are measured."""

import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from positional_measurements import cut_prompt, ids, words

from tlspectral.tasks.block_prompt import BlockPrompt, chosen_swaps

invariant = settings(max_examples=60, derandomize=True)
lengths = st.lists(st.integers(1, 4), min_size=3, max_size=6)


# --- tokens ---


@invariant
@given(lengths, st.data())
def test_a_swap_moves_two_blocks_and_nothing_else(block_lengths, data):
    prompt = cut_prompt(torch.arange(2 + sum(block_lengths) + 3), [2, *block_lengths, 3])  # every token is another
    i, j = sorted(data.draw(st.permutations(range(len(block_lengths))))[:2])
    swapped = prompt.swapped(i, j)
    order = list(range(len(block_lengths)))
    order[i], order[j] = j, i
    expected = torch.cat([prompt.prefix, *(prompt.blocks[block] for block in order), prompt.suffix])
    assert torch.equal(swapped.tokens(), expected)
    assert torch.equal(swapped.swapped(i, j).tokens(), prompt.tokens())
    for block, (start, stop) in zip(order, swapped.spans(), strict=True):
        assert torch.equal(swapped.tokens()[start:stop], prompt.blocks[block])


def test_text_has_the_tokens_of_its_pieces_and_no_start_token():
    prompt = BlockPrompt("w3 ", ["w4 w5 ", "w6 ", "w7 w8 "], "w9").tokenized(words())
    assert prompt.tokens().tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert prompt.spans() == [(1, 3), (3, 4), (4, 6)]
    assert not prompt.is_text
    full = cut_prompt(torch.zeros(zoo.CONTEXT, dtype=torch.int64), [2, 40, 40, 43, 3]).tokenized(words())
    assert len(full.tokens()) == zoo.CONTEXT
    # The start token is the caller's to write.
    for prefix, start in (("<s> ", [1]), ("", [])):
        prompt = BlockPrompt(prefix, ["w4 ", "w5 ", "w6 "], "w7").tokenized(words())
        assert prompt.tokens().tolist() == [*start, 4, 5, 6, 7]
    assert BlockPrompt(ids(), [ids(1), ids(2), ids(3)], ids(4)).spans() == [(0, 1), (1, 2), (2, 3)]


# --- which swaps ---


def test_all_pairs_of_the_kept_blocks_swap():
    assert chosen_swaps(4, "kept") == [(1, 2), (1, 3), (2, 3)]
    assert len(chosen_swaps(9, "all")) == 36


def test_swaps_are_sorted_and_counted_once():
    given_swaps = [(3, 1), (1, 3), (0, 2), (2, 1)]
    assert chosen_swaps(4, iter(given_swaps)) == [(0, 2), (1, 2), (1, 3)]
