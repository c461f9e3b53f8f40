"""The table of `positional_symbolic`: what it says of its making, and the model as before."""

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest
import zoo
from model_state import assert_unchanged, state_of
from positional_measurements import SCORES, block_prompt, differ, measure_queries, measured, modes, words
from zoo import shared

from tlspectral.hooks import ablate
from tlspectral.positional import positional_symbolic
from tlspectral.tasks.block_prompt import BlockPrompt

pytestmark = pytest.mark.lowest


@pytest.mark.slow
@modes
@pytest.mark.parametrize("per_frequency", [False, True])
def test_the_table_says_what_it_was_made_with(mode, per_frequency):
    model, prompt = shared("bridge", "llama"), block_prompt()
    table = positional_symbolic(model, prompt, mode=mode, per_frequency=per_frequency, tau=0.02, seed=3)
    keys = ["layer", "head", "name", "frequency"] if per_frequency else ["layer", "head", "name"]
    errors = [f"{score}_se" for score in SCORES[:4]]
    assert list(table) == [*keys, *SCORES, *errors]
    assert table[errors].isna().all(axis=None)  # one prompt
    assert table.index.equals(pd.RangeIndex(len(table)))
    assert table[keys].equals(table[keys].sort_values(keys))
    assert (table["tau"] == 0.02).all()
    assert table["alpha_ess"].between(1, 6).all()
    attrs = table.attrs
    json.dumps(attrs, allow_nan=False)
    expected = {"mode": mode, "tau": 0.02, "swaps": "kept", "logit_scale": None, "n_swaps": 6}
    expected |= {"n_blocks": 5, "n_tokens": 20, "seed": 3, "backend": "bridge", "per_frequency": per_frequency}
    assert {name: attrs[name] for name in expected} == expected
    # The correlation is over heads in both tables.
    assert attrs["correlation"]["n_heads"] == 8
    heads = positional_symbolic(model, prompt, mode=mode, tau=0.02)
    assert attrs["correlation"]["pearson"] == pytest.approx(heads["s_pos"].corr(heads["s_sym"]), abs=1e-12)


@pytest.mark.slow
def test_the_first_block_is_left_out_unless_asked_for():
    model, prompt = shared("bridge", "llama"), block_prompt()
    without = positional_symbolic(model, prompt)
    chosen = measured(model, prompt, swaps=[(4, 1), (1, 2), (3, 1), (2, 3), (4, 2), (3, 4)])
    assert differ(without, chosen) == 0
    assert without.attrs["n_swaps"] == 6
    assert measured(model, prompt).attrs["n_swaps"] == 10
    assert differ(without, measured(model, prompt)) > 1e-2


@pytest.mark.slow
@modes
def test_a_list_is_measured_prompt_by_prompt(mode):
    model, prompts = shared("bridge", "llama"), [block_prompt(seed=seed) for seed in (1, 2, 3)]
    alone = [positional_symbolic(model, prompt, mode=mode) for prompt in prompts]
    values = np.array([table[SCORES] for table in alone])
    found, by_draw = (positional_symbolic(model, prompts, mode=mode, by=by) for by in (None, "draw"))
    # float32 passes run again: measured 1e-8; prompts differ by tenths.
    np.testing.assert_allclose(found[SCORES], values.mean(0), atol=1e-6)
    errors = found[[f"{score}_se" for score in SCORES[:4]]]
    np.testing.assert_allclose(errors, values[..., :4].std(0, ddof=1) / 3**0.5, atol=1e-6)
    for number, table in enumerate(alone):
        assert differ(by_draw[by_draw["draw"] == number].reset_index(drop=True), table) < 1e-6
    assert (found.attrs["n_prompts"], found.attrs["n_blocks"]) == (3, 5)


def test_text_and_its_tokens_give_the_same():
    model = words()
    blocks = ["w10 w11 w12 ", "w13 w14 ", "w15 w16 ", "w17 w18 w19 "]
    text = BlockPrompt("<s> w4 w5 ", blocks, "w20 w21")
    assert measured(model, text).equals(measured(model, text.tokenized(model)))
    # Each piece is fine where it stands, but the last block has no space to end on when another follows it.
    uneven = BlockPrompt("<s> ", [*blocks[:3], "w17"], " w20 w21")
    assert len(measured(model, uneven, mode="key")) == 8  # runs no swapped prompt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name"),
    [("bridge", "gpt2"), ("bridge", "gptj"), pytest.param("hooked", "qwen2", marks=zoo.needs_hooked)],
)
def test_the_model_is_as_before(backend, name):
    model = getattr(zoo, backend)(name)
    prompt = block_prompt()
    suffixes = [prompt.suffix, zoo.prompt()[0, :2]]  # together with a cache, which a bridge wires in its first pass
    measure = partial(measure_queries, model, suffixes)
    evaluated = {mode: [found.heads for found in measure(mode=mode)] for mode in ("prompt", "key")}
    for root in (model, getattr(model, "original_model", model)):
        root.train()
    before = state_of(model)
    for mode, expected in evaluated.items():
        again = measure(mode=mode)
        # Dropout acts in training, in GPT-2 with 0.1.
        assert all(differ(first.heads, second) < 1e-9 for first, second in zip(again, expected, strict=True))
        assert differ(positional_symbolic(model, prompt, mode=mode), expected[0]) < 1e-3
    assert_unchanged(model, before)


def test_hooks_on_the_model_stay_in_force():
    model, prompt = shared("bridge", "llama"), block_prompt()
    intact = measured(model, prompt)
    with ablate(model, [(0, 1)], "output"):
        ablated = measured(model, prompt)
    below = intact["layer"] == 0
    assert differ(intact[below], ablated[below]) < 1e-5
    assert differ(intact[~below], ablated[~below]) > 1e-3


@pytest.mark.slow
@modes
def test_every_query_is_scored_as_if_the_prompt_ended_there(mode):
    model, prompt = shared("bridge", "llama"), block_prompt()
    heads, pairs = (positional_symbolic(model, prompt, mode=mode, per_frequency=f, by="query") for f in (False, True))
    assert heads["query"].unique().tolist() == pairs["query"].unique().tolist() == [17, 18, 19]
    assert heads.attrs["n_tokens"] == 20
    for end, position in enumerate((17, 18, 19)):
        until = BlockPrompt(prompt.prefix, prompt.blocks, prompt.suffix[: end + 1])
        alone = positional_symbolic(model, until, mode=mode)
        own = heads[heads["query"] == position].reset_index(drop=True)
        # float32 behind a cache: 3e-5 as in test_positional_batches; queries differ by tenths.
        assert differ(own, alone) < 1e-3
    assert differ(own, heads[heads["query"] == 17].reset_index(drop=True)) > 1e-2
