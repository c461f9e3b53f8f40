"""The answers to a block task: their tokens, their probability, and how often the model gives them."""

from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.models.reading import measured
from tlspectral.models.running.partial_runs import logits_at
from tlspectral.models.running.prompts import require_vocabulary
from tlspectral.positional.block_task import first_token
from tlspectral.tables.measurement import Measurement, stacked
from tlspectral.tables.schema import Schema, columns

if TYPE_CHECKING:
    from tlspectral.positional.block_task import BlockDraw, BlockTask

BLOCK_ANSWERS = Schema(
    "block_answers",
    columns("""
        draw                 | index       | Number of the list of blocks, from 0.
        query                | index       | Index of the block of the list that is asked about, from 0.
        answer               | text        | The right answer.
        probability          | probability | That the model gives to the first token of the right answer after the
                             |             | prompt.
        rank                 | index       | Rank of that token among all by probability; 1 is the most probable.
        relative_probability | share       | probability over that of the first tokens of all choices of the draw.
        chance               | share       | Share of the draw's choices that have the right answer's first token.
    """),
    "`tlspectral.positional.task_answers`",
)


def task_answers(model: Any, task: "BlockTask", *, seed: int = 0) -> pd.DataFrame:
    """Measure how a model answers a block task: probability and rank of the right answer after each prompt.

    Args:
        model: a TransformerBridge or HookedTransformer; hooks on it stay in force.
        task: a `BlockTask`; its `draws` and `queries` say which prompts.
        seed: of the draws, as in `positional_symbolic`.

    Returns:
        DataFrame, a row per prompt. Columns of `block_answers`: `draw, query, answer, probability, rank,
        relative_probability, chance`. The model's accuracy is `(rank == 1).mean()`.

    Raises:
        ValueError: text without a tokenizer, a tokenizer that joins segments, or the prompt's end with the answer, a
            prompt that is too long, or answers that are no ids of the model.
        UnsupportedArchitecture: an encoder.

    What it does not establish: that the answer was read off the block: choices differ in how probable they are in any
    text, which `chance` does not take into account.
    """
    with measured(model) as view:
        scored = task.task(seed=seed)
        packed, asked = scored.prompts.packed(view), scored.prompts.prompts
        tables = []
        with torch.no_grad():
            for number, (_, draw, query) in enumerate(asked):
                tokens = packed.tokens[number, : packed.lengths[number]]
                logits = logits_at(view, tokens[None], slice(len(tokens) - 1, len(tokens)))[0]
                tables.append(
                    answers_table(getattr(view.model, "tokenizer", None), draw, (query,), logits.cpu().double())
                )
        settings = {"task": task.name, "draws": len(task.seeds(seed)), "seed": seed}
        table = stacked(tables).assign(draw=pd.DataFrame(scored.labels)["draw"])
        return Measurement(BLOCK_ANSWERS, settings, view.origin()).table(table)


def answers_table(
    tokenizer: Any, draw: "BlockDraw", queries: tuple[int, ...], logits: Float64[Tensor, "queries d_vocab"]
) -> pd.DataFrame:
    """Return probability and rank of the right answer after each prompt of a draw, as `task_answers` without `draw`."""
    rows = []
    for query, prompt_logits in zip(queries, logits, strict=True):
        question = draw.question(query)
        first_tokens = {one: first_token(tokenizer, question.suffix, one) for one in {*draw.choices, question.answer}}
        require_vocabulary(prompt_logits.shape[0], torch.tensor(list(first_tokens.values())))
        answer = first_tokens[question.answer]
        probabilities = prompt_logits.softmax(0)
        chosen = [first_tokens[choice] for choice in draw.choices]
        rows.append(
            {
                "query": query,
                "answer": str(question.answer),
                "probability": float(probabilities[answer]),
                "rank": 1 + int((prompt_logits > prompt_logits[answer]).sum()),
                "relative_probability": float(probabilities[answer] / probabilities[sorted(set(chosen))].sum()),
                "chance": chosen.count(answer) / len(chosen),
            }
        )
    return pd.DataFrame(rows)
