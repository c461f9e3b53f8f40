"""Models, block prompts and measurements that the tests of `positional_symbolic` share."""

import functools
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.models.attention import attention_view
from tlspectral.positional import BlockPrompt, positional_symbolic
from tlspectral.positional.block_weights import BlockReading, joined_columns, query_scores
from tlspectral.positional.measure import tokenized_for
from tlspectral.positional.prompts import chosen_swaps

# TransformerLens 3.9 pairs the wrong coordinates in Cohere's bridge, so its attention is not that of any reading.
BRIDGES = zoo.RIGHT
LEARNED_POSITIONS = ("gpt2", "opt", "gptneo")
WITHOUT_ROPE = (*LEARNED_POSITIONS, "bloom")
# Grouped keys, YaRN, partial rotary, adjacent pairs, query/key norm, softcap and windows, rope in some layers, ALiBi.
PECULIAR = ("llama", "yarn", "neox", "gptj", "qwen3", "gemma2", "gemma3", "mistral", "smollm3", "bloom")
SCORES = ["s_pos", "s_sym", "exclusion_index", "logit_std", "tau", "alpha_ess"]


def model_cases():
    """Every model; those without a peculiarity of their own are left to the slow tests."""
    for backend, names in (("bridge", BRIDGES), ("hooked", zoo.HOOKED_ARCHITECTURES)):
        fast = (*PECULIAR, "gpt2") if backend == "bridge" else ("llama", "gpt2", "bloom")
        for name in names:
            marks = [zoo.needs_hooked] * (backend == "hooked") + [pytest.mark.slow] * (name not in fast)
            yield pytest.param(backend, name, marks=marks)


every_model = pytest.mark.parametrize(("backend", "name"), list(model_cases()))
modes = pytest.mark.parametrize("mode", ["prompt", "key"])


def block_prompt(lengths=(3, 4, 2, 3, 2), prefix=3, suffix=3, seed=1):
    """A prompt of blocks, unequal unless asked for; behind the window of 8 lie the last two of them in part."""
    tokens = zoo.prompt(1, prefix + sum(lengths) + suffix, seed)[0]
    pieces = tokens.split([prefix, *lengths, suffix])
    return BlockPrompt(pieces[0], pieces[1:-1], pieces[-1])


def measured(model, prompt=None, **options):
    options = {"show_progress": False, "exclude_first_block": False, **options}
    return positional_symbolic(model, block_prompt() if prompt is None else prompt, **options)


def differ(first, second, columns=SCORES):
    """Largest difference of two tables; NaN have to be in the same places."""
    assert first[columns].isna().equals(second[columns].isna())
    return float((first[columns] - second[columns]).abs().max().max())


class QueryScores(NamedTuple):
    """Scores of one suffix behind the blocks, and the logits behind it before any swap."""

    heads: pd.DataFrame
    frequencies: pd.DataFrame | None
    correlation: dict[str, Any]
    last_logits: torch.Tensor


def measure_queries(
    view,
    prefix,
    blocks,
    suffixes,
    *,
    mode="prompt",
    swaps=None,
    exclude_first_block=True,
    per_frequency=False,
    advance=lambda count: None,
):
    """`positional_symbolic` for several suffixes behind the same blocks, which the model reads once for all of them."""
    chosen = chosen_swaps(len(blocks), swaps, exclude_first_block=exclude_first_block)
    prompts = [tokenized_for(view, BlockPrompt(prefix, blocks, suffix), chosen, mode) for suffix in suffixes]
    reading = BlockReading(view, prompts, chosen, mode, per_frequency=per_frequency)
    tables, logits = reading.intact(advance)
    if mode == "prompt":
        tables = joined_columns([tables, reading.swapped(chosen, advance)])
    scores, correlations = query_scores(tables, [chosen] * len(prompts), None, 0)
    return [
        QueryScores(one["heads"], one.get("frequencies"), correlation, last.cpu().double())
        for one, correlation, last in zip(scores, correlations, logits, strict=True)
    ]


def agreement_of_shared_prefill(model, mode, per_frequency):
    view = attention_view(model)
    pieces = [piece % view.d_vocab for piece in block_prompt().pieces]
    prompt = BlockPrompt(pieces[0], pieces[1:-1], pieces[-1])
    suffixes = [prompt.suffix, prompt.suffix.flip(0)[:2], prompt.prefix[1:2]]
    options = {"mode": mode, "per_frequency": per_frequency, "exclude_first_block": False}
    options["swaps"] = [(0, 3), (2, 4)]
    together = measure_queries(view, prompt.prefix, prompt.blocks, suffixes, **options)
    assert len(together) == len(suffixes)
    worst = 0.0
    for suffix, found in zip(suffixes, together, strict=True):
        (alone,) = measure_queries(view, prompt.prefix, prompt.blocks, [suffix], **options)
        worst = max(worst, differ(found.heads, alone.heads))
        if per_frequency:
            worst = max(worst, differ(found.frequencies, alone.frequencies))
        worst = max(worst, float((found.last_logits - alone.last_logits).abs().max()))
        tokens = torch.cat([prompt.prefix, *prompt.blocks, suffix])
        logits = view.logits(tokens[None])[0, -1].detach().double()
        worst = max(worst, float((found.last_logits - logits).abs().max()))
    return worst


@functools.cache
def tiny(name):
    return tls.load_model(name, device="cpu")
