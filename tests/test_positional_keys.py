"""Key mode of `positional_symbolic`: explicit permutations, every key rotated anew."""

from itertools import pairwise

import pytest
import torch
from positional_measurements import SCORES, block_prompt, every_model, measured
from reference_keys import KeysInPlaces
from zoo import shared

from tlspectral.models.attention import attention_view
from tlspectral.positional import BlockPrompt
from tlspectral.positional.exclusion import exclusion_split, swapped_key_means
from tlspectral.positional.scores import swap_scores


def explicit_key_scores(keys, prompt, weights_of):
    """s_pos and the rest from keys permuted one swap at a time, with everything computed anew."""
    before, after = [], []
    intact = weights_of(range(keys.n))
    spans = prompt.spans()
    numbered = BlockPrompt(
        *(lambda pieces: (pieces[0], pieces[1:-1], pieces[-1]))(
            torch.arange(keys.n).split([len(piece) for piece in prompt.pieces])
        )
    )
    for i in range(len(spans)):
        for j in range(i + 1, len(spans)):
            swapped = numbered.swapped(i, j)
            moved = weights_of(swapped.tokens().tolist())
            before.append(torch.stack([intact[..., slice(*spans[b])].mean(-1) for b in (i, j)], dim=-1))
            after.append(torch.stack([moved[..., slice(*swapped.spans()[b])].mean(-1) for b in (i, j)], dim=-1))
    return swap_scores(torch.stack(before), torch.stack(after))


@every_model
def test_swapped_keys_are_keys_permuted_and_turned_anew(backend, name):
    model = shared(backend, name)
    assert_explicit_key_scores(model, block_prompt())
    if name == "llama":
        assert_explicit_key_scores(model, block_prompt((3, 3, 3, 3)))


def assert_explicit_key_scores(model, prompt):
    view = attention_view(model)
    table = measured(model, prompt, mode="key")
    layer = view.n_layers - 1
    keys = KeysInPlaces(view, layer, prompt.tokens())
    assert (keys.heads(range(keys.n)) - keys.pattern).abs().max() < 1e-5
    expected = explicit_key_scores(keys, prompt, keys.heads)
    found = table[table["layer"] == layer]
    for column in ("s_pos", "s_sym", "tau", "alpha_ess"):
        values = torch.tensor(found[column].to_numpy())
        # float64 on both sides: measured 2e-14 (alpha_ess, about 5). A key at the wrong place moves scores by tenths.
        assert torch.allclose(values, getattr(expected, column), rtol=1e-9, atol=1e-12, equal_nan=True), column


@every_model
def test_the_exclusion_index_is_theorem_1_over_all_keys_in_all_places(backend, name):
    model, prompt = shared(backend, name), block_prompt()
    view = attention_view(model)
    layer = view.n_layers - 1
    keys = KeysInPlaces(view, layer, prompt.tokens())
    split = exclusion_split(keys.placed(keys.logits))
    table = measured(model, prompt, mode="key")
    found = table[table["layer"] == layer]
    # Measured 3e-15 on numbers of size 1; the query's own key among them moves them by 1e-2 and more.
    assert torch.tensor(found["exclusion_index"].to_numpy()) == pytest.approx(split.index, abs=1e-12)
    assert torch.tensor(found["logit_std"].to_numpy()) == pytest.approx(split.variance.sqrt(), rel=1e-12)
    assert (split.variance <= split.pos + split.sym).all()


@pytest.mark.parametrize("name", ["llama", "yarn", "neox", "gptj", "qwen3", "gemma3"])
def test_rotary_pairs_are_scored_as_heads_of_two_columns(name):
    model, prompt = shared("bridge", name), block_prompt()
    view = attention_view(model)
    layer = view.n_layers - 1
    keys = KeysInPlaces(view, layer, prompt.tokens())
    table = measured(model, prompt, mode="key", per_frequency=True)
    assert list(table) == ["layer", "head", "frequency", *SCORES]
    found = table[table["layer"] == layer]
    n_pairs = view.rotary(layer).n_pairs
    assert found["frequency"].tolist() == list(range(n_pairs)) * view.n_heads(layer)
    expected = explicit_key_scores(keys, prompt, keys.pairs)
    split = exclusion_split(keys.placed(keys.pair_logits))
    columns = {column: getattr(expected, column) for column in ("s_pos", "s_sym", "tau", "alpha_ess")}
    columns |= {"exclusion_index": split.index, "logit_std": split.variance.sqrt()}
    for column, values in columns.items():
        # Measured 2e-14; a pair of the wrong columns, or a 1/sqrt(d), moves scores by tenths.
        assert torch.tensor(found[column].to_numpy()) == pytest.approx(values.flatten(), rel=1e-9, abs=1e-12), column


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
