"""What prompts become that a caller may not expect: two start tokens, unknown or empty text, rows that are equal."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.padding import Note, PackedTokens


def distinct_rows(sides: Sequence[PackedTokens], answers: Iterable[Any]) -> Int[np.ndarray, "sequences"]:
    """Number the sequences so that those which are equal in tokens on all sides, and in answers, have one number."""
    rows = ([row[:n] for row, n in zip(one.tokens.tolist(), one.lengths.tolist(), strict=True)] for one in sides)
    known: dict[str, int] = {}
    return np.array([known.setdefault(repr(row), len(known)) for row in zip(*rows, answers, strict=True)])


def equality_notes(distinct: Int[np.ndarray, "sequences"]) -> tuple[Note, ...]:
    """Return what is to be said of the numbers of `distinct_rows`: nothing where all differ."""
    n, different = len(distinct), int(distinct.max()) + 1
    if different == n:
        return ()
    first = int(np.flatnonzero(np.bincount(distinct)[distinct] > 1)[0])
    again = int(np.flatnonzero(distinct == distinct[first])[1])
    message = (
        f"of {n} prompts {different} are distinct (prompt {again} is prompt {first} again): standard errors and p are "
        "of the distinct ones, and the mean is over all"
    )
    return (Note("distinct_rows", different, message),)


def prompt_notes(view: AttentionView, packed: PackedTokens, given: Any) -> tuple[Note, ...]:
    """Return what packed prompts became, by a look at their first ids and at those that stand for unknown text.

    `given` are the prompts in a form of `given_prompts`. Without a tokenizer nothing is known, and nothing is noted.
    Values are indices of prompts, but of `end_token_in_front`, which is that token.

        start_token_twice   The first two ids are the start token: the text has one, and one is put in front of it.
        end_token_in_front  Text is read with the end token in front, since the tokenizer has no start token.
        unknown_text        Text has a word that the tokenizer does not know, so that another id stands for it.
        empty               Text has no token of its own.
    """
    tokenizer: Any = getattr(view.model, "tokenizer", None)
    if tokenizer is None:
        return ()
    tokens, notes = packed.tokens, []
    texts: list[str] = given if isinstance(given, list) and isinstance(given[0], str) else []
    start, end, unknown = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "unk"))

    def add(name: str, which: Bool[Tensor, "sequences"], what: str) -> None:
        rows = which.nonzero().flatten().tolist()
        if rows:
            notes.append(Note(name, rows, f"{len(rows)} of {len(tokens)} prompts {what}, such as prompt {rows[0]}"))

    if start is not None and tokens.shape[1] > 1:
        twice = (tokens[:, :2] == start).all(1) & (packed.lengths > 1)
        add(
            "start_token_twice",
            twice,
            f"begin with two start tokens {tokenizer.bos_token!r} (leave it out of the text)",
        )
    # TransformerLens gives a tokenizer without a start token its end token for one; what it was made with stays.
    made_with = getattr(tokenizer, "init_kwargs", {})
    if texts and end is not None and made_with.get("bos_token", "") is None and bool((tokens[:, 0] == end).any()):
        notes.append(
            Note(
                "end_token_in_front",
                tokenizer.eos_token,
                f"the tokenizer has no start token, so text is read with its end token {tokenizer.eos_token!r} in "
                "front, as by model.to_tokens: for the text alone, give ids, model.to_tokens(text, prepend_bos=False)",
            )
        )
    if unknown is not None and unknown not in (start, end) and (texts or isinstance(given, dict)):
        add(
            "unknown_text",
            ((tokens == unknown) & packed.real).any(1),
            f"have text that the tokenizer does not know, which it reads as {tokenizer.unk_token!r}",
        )
    if texts:
        few = [length < 3 for length in packed.lengths.tolist()]  # there is room for what is put around text
        without = [
            short and not tokenizer(text, add_special_tokens=False).input_ids
            for short, text in zip(few, texts, strict=True)
        ]
        add("empty", torch.tensor(without), "are empty, so that the model reads only what is put around text")
    return tuple(notes)
