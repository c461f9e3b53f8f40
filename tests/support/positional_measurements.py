"""Models, block prompts and measurements that the tests of `positional_symbolic` share."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
import zoo
from ablation_runs import recorded

import tlspectral as tls
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import whole_logits
from tlspectral.positional import positional_symbolic
from tlspectral.positional.block_weights import BlockReading, joined_columns, query_scores
from tlspectral.tasks.block_places import BlockPlaces
from tlspectral.tasks.block_prompt import BlockPrompt, chosen_swaps, tokenized_for

SCORES = ["s_pos", "s_sym", "exclusion_index", "logit_std", "tau", "alpha_ess"]


modes = pytest.mark.parametrize("mode", ["prompt", "key"])


def cut_prompt(tokens, lengths):
    """A prompt of tokens that are cut into a prefix, blocks and a suffix of these lengths."""
    prefix, *blocks, suffix = tokens.split(list(lengths))
    return BlockPrompt(prefix, blocks, suffix)


def block_prompt(lengths=(3, 4, 2, 3, 2), prefix=3, suffix=3, seed=1):
    """A prompt of blocks, unequal unless asked for; behind the window of 8 lie the last two of them in part."""
    tokens = zoo.prompt(1, prefix + sum(lengths) + suffix, seed)[0]
    return cut_prompt(tokens, [prefix, *lengths, suffix])


EQUAL_BLOCKS = block_prompt((3, 3, 3, 3))  # three tokens before and behind
PLACES = BlockPlaces((3, 6, 9, 12), 3, (tuple(EQUAL_BLOCKS.tokens()[:15].tolist()),))


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


@functools.cache
def words():
    """A model with a word-level tokenizer: tokens end at spaces, so text without one is joined with what follows."""
    return tls.load_model(zoo.save_folder("llama", zoo.temporary("words_"), tokenizer=True))


def measured(model, prompt=None, **options):
    return positional_symbolic(model, block_prompt() if prompt is None else prompt, **{"swaps": "all", **options})


def differ(first, second, columns=SCORES):
    """Largest difference of two tables; NaN have to be in the same places."""
    assert first[columns].isna().equals(second[columns].isna())
    return float((first[columns] - second[columns]).abs().max().max())


def hidden(model, layer):
    """Whether a window hides a block from the last query."""
    view = attention_view(model)
    pattern = recorded(model, ("pattern",), EQUAL_BLOCKS.tokens()[None], [layer])[layer, "pattern"]
    return bool((pattern[0, 0, -1, PLACES.tokens().flatten()] == 0).any()) and view.n_layers > 0


class QueryScores(NamedTuple):
    """Scores of one suffix behind the blocks, and the logits behind it before any swap."""

    heads: pd.DataFrame
    frequencies: pd.DataFrame | None
    correlation: dict[str, Any]
    last_logits: torch.Tensor


def measure_queries(model, suffixes=None, prompt=None, *, mode="prompt", swaps="kept", per_frequency=False):
    """`positional_symbolic` for several suffixes behind the same blocks, which the model reads once for all of them."""
    prompt = block_prompt() if prompt is None else prompt
    chosen = chosen_swaps(len(prompt.blocks), swaps)
    moved = chosen if mode == "prompt" else []
    behind = [prompt.suffix] if suffixes is None else suffixes
    prompts = [tokenized_for(model, replace(prompt, suffix=suffix), moved) for suffix in behind]
    reading = BlockReading(attention_view(model), prompts, chosen, mode, per_frequency=per_frequency)
    tables, logits = reading.intact()
    if mode == "prompt":
        tables = joined_columns([tables, reading.swapped(chosen)])
    scores, correlations = query_scores(tables, [chosen] * len(prompts), None, 0)
    return [
        QueryScores(one["heads"], one.get("frequencies"), correlation, last.cpu().double())
        for one, correlation, last in zip(scores, correlations, logits, strict=True)
    ]


def agreement_of_shared_prefill(model, mode, per_frequency):
    view = attention_view(model)
    prompt = cut_prompt(block_prompt().tokens() % view.d_vocab, map(len, block_prompt().pieces))
    suffixes = [prompt.suffix, prompt.suffix.flip(0)[:2], prompt.prefix[1:2]]
    options = {"mode": mode, "per_frequency": per_frequency, "swaps": [(0, 3), (2, 4)]}
    together = measure_queries(model, suffixes, prompt, **options)
    assert len(together) == len(suffixes)
    worst = 0.0
    for suffix, found in zip(suffixes, together, strict=True):
        (alone,) = measure_queries(model, [suffix], prompt, **options)
        worst = max(worst, differ(found.heads, alone.heads))
        if per_frequency:
            worst = max(worst, differ(found.frequencies, alone.frequencies))
        worst = max(worst, float((found.last_logits - alone.last_logits).abs().max()))
        tokens = torch.cat([prompt.prefix, *prompt.blocks, suffix])
        logits = whole_logits(view, tokens[None])[0, -1].detach().double()
        worst = max(worst, float((found.last_logits - logits).abs().max()))
    return worst


@functools.cache
def tiny(name):
    return tls.load_model(name, device="cpu")
