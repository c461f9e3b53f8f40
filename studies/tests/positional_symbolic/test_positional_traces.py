"""Traces are the model's own attention on swapped prompts, and norms those of keys that are turned one by one."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from positional_measurements import block_prompt
from reference_keys import KeysInPlaces
from tlspectral_studies.positional_symbolic.traces import attention_traces, frequency_norms
from zoo import shared

from tlspectral.models.reading import attention_view
from tlspectral.positional import positional_symbolic
from tlspectral.positional.scores import swap_scores
from tlspectral.tasks.block_prompt import BlockPrompt

# gpt2: learned positions; yarn: scaled rotary tables, grouped keys; qwen3: query/key norm; mistral: a window; gemma2:
# softcap; bloom: ALiBi; opt: attention left to transformers; neox: only a quarter of the columns turns.
MODELS = [("bridge", name) for name in ("gpt2", "yarn", "gemma2", "bloom")]
SLOW = [("bridge", name) for name in ("qwen3", "mistral", "opt", "neox")]
if zoo.HAS_HOOKED:
    MODELS.append(("hooked", "llama"))
    SLOW.append(("hooked", "gpt2"))
SWAPS = [(1, 3), (0, 4), (2, 3)]
HEADS = [(0, 1), (1, 0), (1, 2)]


def model_means(model, prompt, layer, head):
    """Block means of the last row of the model's own pattern, token by token."""
    name = attention_view(model).hook_names(layer)["pattern"]
    with torch.no_grad():
        _, cache = model.run_with_cache(prompt.tokens()[None])
    row = cache[name][0, head, -1].double()
    row = torch.nn.functional.pad(row, (len(prompt.tokens()) - len(row), 0))
    return [float(row[start:stop].mean()) for start, stop in prompt.spans()]


def of(table, layer, head, frequency, swap):
    which = table["frequency"].isna() if frequency is None else table["frequency"].eq(frequency).fillna(False)
    which &= (table["layer"] == layer) & (table["head"] == head)
    return table.loc[which & (table["swap_i"] == swap[0]) & (table["swap_j"] == swap[1])]


@pytest.mark.fast(2)
@pytest.mark.parametrize(("backend", "name"), [*MODELS, *zoo.also_slow(*SLOW)])
def test_traces_are_block_means_of_the_models_own_pattern(backend, name):
    model, prompt = shared(backend, name), block_prompt()
    table = attention_traces(model, prompt, HEADS, swaps=SWAPS)
    assert len(table) == len(HEADS) * len(SWAPS) * 5
    for layer, head in HEADS:
        before = model_means(model, prompt, layer, head)
        for swap in SWAPS:
            rows = of(table, layer, head, None, swap)
            after = model_means(model, prompt.swapped(*swap), layer, head)
            # Float32 patterns: off by 2e-7 at most when measured; a wrong border of one token moves a mean by 1e-3.
            np.testing.assert_allclose(rows["before"], before, atol=2e-6)
            np.testing.assert_allclose(rows["after"], after, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "per_frequency"), [("prompt", False), ("prompt", True), ("key", True)])
def test_scores_of_the_traces_are_those_of_positional_symbolic(mode, per_frequency):
    model, prompt = shared("bridge", "llama"), block_prompt()
    pairs = [0, 3, 5]
    table = attention_traces(model, prompt, HEADS, swaps=SWAPS, frequencies=pairs, mode=mode)
    scores = positional_symbolic(model, prompt, mode=mode, swaps=SWAPS, per_frequency=per_frequency)
    for layer, head in HEADS:
        for pair in pairs if per_frequency else [None]:
            v = [of(table, layer, head, pair, swap).set_index("block").loc[list(swap)] for swap in sorted(SWAPS)]
            before, after = (torch.tensor(np.array([one[when] for one in v])) for when in ("before", "after"))
            found = swap_scores(before, after)
            row = scores[(scores["layer"] == layer) & (scores["head"] == head)]
            row = row[row["frequency"] == pair].iloc[0] if per_frequency else row.iloc[0]
            # Two orders of the same float64 sums, then 0.1 of a difference as temperature: equal to 1e-9 or better;
            # exchanged slots or a frequency off by one change a score by 1e-2.
            assert float(found.s_pos) == pytest.approx(row["s_pos"], abs=1e-8)
            assert float(found.s_sym) == pytest.approx(row["s_sym"], abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yarn", "qwen3", "neox"])
def test_key_traces_are_those_of_keys_turned_one_by_one(name):
    model, prompt, swap = shared("bridge", name), block_prompt(), (1, 3)
    table = attention_traces(model, prompt, [(1, 2)], swaps=[swap], frequencies=[1], mode="key")
    keys = KeysInPlaces(attention_view(model), 1, prompt.tokens())
    # Where the token at each place of the swapped prompt came from, by moving labels instead of tokens.
    first, *blocks, last = torch.arange(keys.n).split([len(piece) for piece in prompt.pieces])
    swapped = BlockPrompt(first, blocks, last).swapped(*swap)
    source = swapped.tokens().tolist()
    for frequency, weights in ((None, keys.heads(source)[2]), (1, keys.pairs(source)[2, 1])):
        expected = [float(weights[start:stop].mean()) for start, stop in swapped.spans()]
        # Float32 queries and keys of the model: 1e-6 when measured; keys that are not turned differ by 1e-2.
        np.testing.assert_allclose(of(table, 1, 2, frequency, swap)["after"], expected, atol=1e-5)


def test_both_modes_agree_in_the_first_layer_and_not_beyond():
    model, prompt = shared("bridge", "llama"), block_prompt()
    by_mode = [attention_traces(model, prompt, HEADS, swaps=SWAPS, frequencies=[2], mode=m) for m in ("prompt", "key")]
    first = by_mode[0]["layer"] == 0
    # The model's float32 keys: 4e-8 when measured.
    np.testing.assert_allclose(*(table.loc[first, "after"] for table in by_mode), atol=1e-6)
    assert np.abs(np.subtract(*(table.loc[~first, "after"] for table in by_mode))).max() > 1e-3
    np.testing.assert_array_equal(*(table["before"] for table in by_mode))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yarn", "qwen3", "neox", "mistral"])
def test_norms_are_those_of_an_explicit_rotation(name):
    """Over the tokens before the query, of which Mistral's window shows the last ones."""
    model, prompt = shared("bridge", name), block_prompt()
    table = frequency_norms(model, prompt, [(1, 2), (0, 0), (1, 1)])
    assert table[["layer", "head"]].drop_duplicates().to_numpy().tolist() == [[0, 0], [1, 1], [1, 2]]
    for (layer, head), rows in table.groupby(["layer", "head"]):
        keys = KeysInPlaces(attention_view(model), int(layer), prompt.tokens())  # pandas 2 gives integers of numpy
        rotary, context = keys.raw.rotary, [position for position in range(keys.n - 1) if keys.seen[position]]
        assert rows["frequency"].tolist() == list(range(rotary.n_pairs))
        logits = keys.pair_logits(range(keys.n))[head][:, context] / keys.raw.score_scale
        turned = torch.stack([keys.turned(keys.k[position], position)[head] for position in context])
        lengths = turned[:, rotary.real_index].square() + turned[:, rotary.imag_index].square()
        # Float32 tables of the model against float64 ones: 1e-6 when measured; the query's own key, a wrong group
        # of heads or YaRN's factor left out are 1e-2 or more.
        np.testing.assert_allclose(rows["logit_norm"], logits.square().mean(-1).sqrt(), rtol=1e-5)
        np.testing.assert_allclose(rows["key_norm"], lengths.mean(0).sqrt(), rtol=1e-5)


def test_tables_are_sorted_typed_and_say_where_they_come_from():
    model, prompt = shared("bridge", "llama"), block_prompt()
    heads = pd.DataFrame({"layer": [1, 0], "head": [2, 3]})
    table = attention_traces(model, prompt, heads, swaps=[(3, 1), (1, 3)], frequencies=[4, 4, 1])
    norms = frequency_norms(model, prompt, heads)
    for found in (table, norms):
        assert found.attrs["n_tokens"] == len(prompt.tokens())
    assert str(table["frequency"].dtype) == "Int64"
    keys = ["layer", "head", "frequency", "swap_i", "swap_j", "block"]
    assert table[keys].drop_duplicates().to_numpy(object).tolist() == [
        [layer, head, frequency, 1, 3, block]
        for layer, head in ((0, 3), (1, 2))
        for frequency in (pd.NA, 1, 4)
        for block in range(5)
    ]
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
