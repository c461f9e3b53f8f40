"""`positional_symbolic` and `logit_shares`: by keys rotated anew, position by position, and by words that swap."""

import functools

import numpy as np
import pytest
import torch
from ablation_runs import LEARNED_POSITIONS, block_parts, logits, one_of_each, recorded
from positional_measurements import (
    EQUAL_BLOCKS,
    PLACES,
    agreement_of_shared_prefill,
    block_prompt,
    differ,
    hidden,
    measured,
)
from positional_recomputation import components, explicit_key_scores, tables_of
from reference_keys import KeysInPlaces

import tlspectral as tls
from tlspectral.positional import logit_shares
from tlspectral.positional.exclusion import exclusion_split
from tlspectral.positional.shares import split_logits

from .rows import asked, right, rotating_right


@functools.lru_cache(maxsize=2)
def table_of(row, mode, per_frequency=False):
    return measured(row.model, mode=mode, per_frequency=per_frequency)


@functools.lru_cache(maxsize=1)
def keys_of(row):
    return KeysInPlaces(row.view, row.layers[-1], block_prompt().tokens())


def of_last_layer(row, table):
    return table[table["layer"] == row.layers[-1]]


# --- by keys ---


@asked(right, every=6)
def swapped_keys_are_keys_permuted_and_rotated_anew(row):
    keys, found = keys_of(row), of_last_layer(row, table_of(row, "key"))
    # The model in float32 against float64: measured 4e-7.
    assert (keys.heads(range(keys.n)) - keys.pattern).abs().max() < 1e-5
    expected = explicit_key_scores(keys, block_prompt(), keys.heads)
    for column in ("s_pos", "s_sym", "tau", "alpha_ess"):
        values = torch.tensor(found[column].to_numpy())
        # float64 on both sides: measured 2e-14 (alpha_ess, about 5). A key at the wrong place moves scores by tenths.
        assert torch.allclose(values, getattr(expected, column), rtol=1e-9, atol=1e-12, equal_nan=True), column
    split = exclusion_split(keys.placed(keys.logits))
    # Measured 3e-15 on numbers of size 1; the query's own key among them moves them by 1e-2 and more.
    assert torch.tensor(found["exclusion_index"].to_numpy()) == pytest.approx(split.index, abs=1e-12)
    assert torch.tensor(found["logit_std"].to_numpy()) == pytest.approx(split.variance.sqrt(), rel=1e-12)
    assert (split.variance <= split.pos + split.sym).all()


@asked(lambda row: rotating_right(row) and row.name != "smollm3", every=5)  # whose last layer has no positions
def rotary_pairs_are_scored_as_heads_of_two_columns(row):
    table, keys = table_of(row, "key", per_frequency=True), keys_of(row)
    assert list(table)[:4] == ["layer", "head", "name", "frequency"]
    layer = row.layers[-1]
    found = of_last_layer(row, table)
    assert found["frequency"].tolist() == list(range(row.view.rotary(layer).n_pairs)) * row.view.n_heads(layer)
    expected = explicit_key_scores(keys, block_prompt(), keys.pairs)
    split = exclusion_split(keys.placed(keys.pair_logits))
    columns = {column: getattr(expected, column) for column in ("s_pos", "s_sym", "tau", "alpha_ess")}
    columns |= {"exclusion_index": split.index, "logit_std": split.variance.sqrt()}
    for column, values in columns.items():
        # Measured 2e-14; a pair of the wrong columns, or a 1/sqrt(d), moves scores by tenths.
        assert torch.tensor(found[column].to_numpy()) == pytest.approx(
            values.flatten(), rel=1e-9, abs=1e-12, nan_ok=True
        ), column


# --- words and keys ---


def keys_that_swap(row, per_frequency):
    """A learned position is in the key vector, and without rotary positions there are no frequencies."""
    every_layer = row.name != "llama4"  # whose last query sees no block in the layer that rotates
    return (every_layer and rotating_right(row)) or (row.name == "bloom" and not per_frequency)


@asked(keys_that_swap, every=12, per_frequency=(False, True))
def in_the_first_layer_words_that_swap_are_keys_that_swap(row, per_frequency):
    words, keys = (table_of(row, mode, per_frequency) for mode in ("prompt", "key"))
    first = words["layer"] == 0
    # The model computes keys in float32, alike in any order: measured 2e-7.
    assert differ(words[first], keys[first]) < 1e-5
    # Deeper the keys themselves differ, and the table would show it if one mode were the other.
    if row.name != "neox" and row.backend == "bridge":
        assert differ(words[~first], keys[~first]) > 1e-2


@asked(lambda row: row.name in LEARNED_POSITIONS, every=3)
def without_rotary_positions_permuted_keys_take_their_logits_along(row):
    table = measured(row.model, EQUAL_BLOCKS, mode="key")
    whole = table if row.name != "gptneo" else table[table["layer"] == 0]  # its second layer has a window
    # Exactly: the logit does not know its position. Scores are cosines of equal vectors, up to rounding.
    assert (table["exclusion_index"] == 0).all()
    assert (whole["s_sym"] - 1).abs().max() < 1e-12
    assert whole["s_pos"].max() < 0.999
    assert (table["logit_std"] > 0.1).all()
    # Words that swap get other learned positions, which prompt mode shows.
    words = measured(row.model, EQUAL_BLOCKS)
    assert words["s_sym"].min() < 0.9
    assert (words["exclusion_index"] == 0).all()


# --- several suffixes ---


@asked(right, every=7, mode=("prompt", "key"))
def suffixes_that_share_a_prefill_are_measured_as_each_alone(row, mode):
    # float32 passes over parts of a prompt: measured 3e-5 (alpha_ess, of size 5). A shifted position, a wrong row of
    # the batch or a cache that grew under an earlier suffix moves scores by tenths.
    assert agreement_of_shared_prefill(row.model, mode, row.rotary) < 1e-3


# --- content, position and their interaction ---


@asked(right, every=6)
def shares_are_those_of_every_content_rotated_to_every_place(row):
    found = logit_shares(row.model, EQUAL_BLOCKS)
    assert found.attrs["n_blocks"] == 4
    for layer in row.layers:
        rows = found[found["layer"] == layer]
        table, _, _ = tables_of(row.model, layer, EQUAL_BLOCKS.tokens())
        expected = split_logits(table)
        shares = torch.stack([part.sum(-1) for part in expected]) / expected.total.sum(-1)
        if hidden(row.model, layer):
            assert rows[list(block_parts)].isna().all(axis=None)
            continue
        # float64 by two routes: measured 1e-13; shares of heads differ by tenths.
        np.testing.assert_allclose(rows[list(block_parts)].to_numpy().T, shares.numpy(), rtol=0, atol=1e-10)
        std = (expected.total.sum(-1) / (3 * 16)).sqrt()
        np.testing.assert_allclose(rows["table_std"], std.numpy(), rtol=1e-9)
        if row.name in LEARNED_POSITIONS:
            assert rows[["position", "interaction"]].to_numpy().max() < 1e-20


@asked(right, every=9, part=block_parts)
def what_is_left_is_the_softmax_of_the_scores_less_the_part(row, part):
    layer, heads, tokens = row.layers[-1], [1, 2], EQUAL_BLOCKS.tokens()
    if hidden(row.model, layer):
        with (
            pytest.raises(ValueError, match="does not see all blocks"),
            tls.ablate(row.model, [(layer, 1)], one_of_each(EQUAL_BLOCKS)[part]),
        ):
            logits(row.model, tokens[None])
        return
    with tls.ablate(row.model, [(layer, head) for head in heads], one_of_each(EQUAL_BLOCKS)[part]):
        seen = recorded(row.model, ("pattern", "z", "value"), tokens[None], [layer])
    for query in (len(tokens) - 1, PLACES.stop):  # the last query and the first one behind the blocks
        table, keys, cap = tables_of(row.model, layer, tokens[: query + 1])
        removed = components(table)[part].diagonal(dim1=-2, dim2=-1)  # heads offset blocks
        scores = keys.logits(range(query + 1))
        scores[:, PLACES.tokens().flatten()] -= removed.mT.flatten(1)
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        expected = scores.masked_fill(~keys.seen, -torch.inf).softmax(-1)
        # Model in float32: measured 4e-7; the parts move weights by hundredths and more where they are not 0.
        found = seen[layer, "pattern"][0, heads, query, : query + 1].double()
        torch.testing.assert_close(found, expected[heads], rtol=0, atol=1e-5)
        if "scores" not in row.view.hook_names(layer):  # z is edited by itself
            value = seen[layer, "value"][0].double().transpose(0, 1)
            groups = row.view.n_heads(layer) // len(value)
            if row.name in ("gemma3n", "gemma4"):  # values of norm 1
                value = value / (value.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            value = value.repeat_interleave(groups, 0)[heads, : query + 1]
            found = seen[layer, "z"][0, query, heads].double()
            torch.testing.assert_close(found, (expected[heads][:, None] @ value)[:, 0], rtol=0, atol=1e-5)
