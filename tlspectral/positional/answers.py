"""Whether a model can do the binding task: the probability that it gives to the colour that was asked for."""

from typing import Any

import pandas as pd
from jaxtyping import Float64
from torch import Tensor

from tlspectral.positional.binding import BindingDraw
from tlspectral.positional.prompts import BlockPrompt


def answers_table(
    tokenizer: Any,
    draw: BindingDraw,
    queries: tuple[int, ...],
    prompts: list[BlockPrompt],
    logits: Float64[Tensor, "queries d_vocab"],
) -> pd.DataFrame:
    """How probable the right colour is after each prompt of a draw.

    Args:
        tokenizer: the model's; where it makes several tokens of a colour, the first one counts.
        draw: the pairs.
        queries: which pair each prompt asks about.
        prompts: as text.
        logits: the model's output after each prompt.

    Returns:
        DataFrame `query, answer, probability, rank, relative_probability, chance`; see `PositionalSymbolicProfile`.

    Raises:
        ValueError: a tokenizer that joins the prompt's end with the answer.

    What it does not establish: that the model read the line of the name. Colours differ in how often a draw has them,
    which `chance` allows for, and in how probable they are in any text, which it does not.
    """
    rows = []
    for query, prompt, of_prompt in zip(queries, prompts, logits, strict=True):
        suffix = str(prompt.suffix)
        first = {colour: _first_token(tokenizer, suffix, f" {colour}") for colour in set(draw.colours)}
        answer = first[draw.colours[query]]
        probabilities = of_prompt.softmax(0)
        listed = [first[colour] for colour in draw.colours]
        among = probabilities[sorted(set(listed))].sum()
        rows.append(
            {
                "query": query,
                "answer": draw.answer(query),
                "probability": float(probabilities[answer]),
                "rank": 1 + int((of_prompt > of_prompt[answer]).sum()),
                "relative_probability": float(probabilities[answer] / among),
                "chance": listed.count(answer) / len(listed),
            }
        )
    return pd.DataFrame(rows)


def _first_token(tokenizer: Any, text: str, answer: str) -> int:
    """First token of an answer where it follows the text."""
    before = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    both = tokenizer(text + answer, add_special_tokens=False, verbose=False).input_ids
    if len(both) <= len(before) or both[: len(before)] != before:
        raise ValueError(
            f"this tokenizer joins the end of the prompt with the answer {answer!r}: no first token to read"
        )
    return int(both[len(before)])
