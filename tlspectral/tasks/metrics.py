"""Metrics of ready tasks: next-token loss, and the difference of the logits of answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.containers import are_columns, column_names, plain, values
from tlspectral.models.reading.view import AttentionView, require_causal
from tlspectral.models.running.batches import Note, PackedTokens
from tlspectral.models.running.given import described
from tlspectral.models.running.prompts import require_vocabulary
from tlspectral.selection import whole_number


def next_token_loss(
    logits: Float[Tensor, "rows predicted d_vocab"], tokens: Int[Tensor, "rows pos"], mask: Bool[Tensor, "rows pos"]
) -> Float64[Tensor, "rows"]:
    """Return the mean next-token cross-entropy of each sequence in nats, over its real tokens.

    `logits` are of the positions from one on to the last but one: `predict=slice(start, -1)`, start 0 or more.
    """
    n_predicted = logits.shape[1]
    targets, counted = tokens[:, -n_predicted:], mask[:, -n_predicted:]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    by_position = in_float64(losses.view(targets.shape))
    counted = counted.to(by_position.device)
    return by_position.where(counted, 0.0).sum(-1) / counted.sum(-1)


@dataclass(frozen=True)
class LogitDifference:
    """Mean logit of the correct answers less the mean logit of the wrong ones, at the one position that is predicted.

    Attributes:
        correct, wrong: answers, of all prompts or a list with the answers of each prompt: a token as text or id, or
            several.
    """

    correct: Any
    wrong: Any

    def __post_init__(self) -> None:
        for side in ("correct", "wrong"):
            object.__setattr__(self, side, _by_place(getattr(self, side), side))

    def for_model(self, view: AttentionView, prompts: PackedTokens) -> "AnsweredDifference":
        """Return the metric with the answers as token ids of a model.

        Raises ValueError, TypeError for answers that are none.
        """
        require_causal(view, "it predicts no next token; measure the logits of a masked token by a metric of your own")
        n = len(prompts.tokens)
        self.require_answers(n)
        correct, wrong = (
            _answer_ids(view, answers, n, side) for side, answers in (("correct", self.correct), ("wrong", self.wrong))
        )
        for index, (right, other) in enumerate(zip(correct, wrong, strict=True)):
            if both := set(right) & set(other):
                raise ValueError(f"prompt {index}: token {min(both)} is a correct and a wrong answer")
        return AnsweredDifference(correct, wrong, _answer_notes(view, prompts, correct, wrong))

    def require_answers(self, n_prompts: int) -> None:
        """Refuse lists that do not have the answers of so many prompts. Raises ValueError."""
        for side, given in (("correct", self.correct), ("wrong", self.wrong)):
            if isinstance(given, list) and len(given) != n_prompts:
                raise ValueError(
                    f"{side} is one answer for all prompts, or a list with the answer or answers of each of the "
                    f"{n_prompts} prompts; found {len(given)}"
                )

    def of_prompts(self, rows: list[int]) -> "LogitDifference":
        """Return the metric of some of the prompts."""
        kept = (
            [given[row] for row in rows] if isinstance(given, list) else given for given in (self.correct, self.wrong)
        )
        return LogitDifference(*kept)


@dataclass(frozen=True)
class AnsweredDifference:
    """`LogitDifference` with the token ids of the answers of each prompt, and what is to be said of them."""

    correct: list[list[int]]
    wrong: list[list[int]]
    notes: tuple[Note, ...] = ()

    @property
    def answers(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The answers of each prompt, by which equal rows are found."""
        return [(tuple(right), tuple(other)) for right, other in zip(self.correct, self.wrong, strict=True)]

    def __call__(self, logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the difference of each prompt."""
        last = logits[:, -1]
        weights = torch.zeros_like(last)
        for row, (right, other) in enumerate(zip(self.correct, self.wrong, strict=True)):
            weights[row, right] = 1 / len(right)
            weights[row, other] = -1 / len(other)
        return (last * weights).sum(-1)


def _by_place(given: Any, side: str) -> Any:
    """Return one answer, or a list by prompt with an answer or a list of several. Raises TypeError for no answer."""
    listed = None if isinstance(given, set | frozenset) else values(given)
    if listed is None:
        if isinstance(given, Mapping | set | frozenset) or column_names(given) is not None:
            raise TypeError(f"{side} is an answer or a list with those of each prompt; found {described(given)}")
        return _answer(given, side)
    if are_columns(given) and len(given) > 1:
        raise TypeError(
            f"{side} has two readings: a {type(given).__name__} of {len(given)} arrays or lists is a first and a "
            "second answer of each prompt, or the answers of each prompt. Write list(zip(first, second)) for the first "
            "reading, a list of lists for the second"
        )
    found = []
    for index, one in enumerate(listed):
        where, several = f"{side} of prompt {index}", None if isinstance(one, set | frozenset) else values(one)
        found.append(_answer(one, where) if several is None else [_answer(answer, where) for answer in several])
    return found


def _answer(given: Any, where: str) -> str | int:
    value = plain(given)
    if isinstance(value, str):
        return str(value)
    number = whole_number(value)
    if number is None:
        raise TypeError(f"{where}: an answer is a token as text or id; found {described(value)}")
    return number


def _answer_notes(
    view: AttentionView, prompts: PackedTokens, correct: list[list[int]], wrong: list[list[int]]
) -> tuple[Note, ...]:
    """Return what is to be said of answers that do not follow the end of a prompt as its text goes on.

    joined_word     The prompt ends in a letter and an answer lacks the space that begins a new word.
    space_at_end    The prompt ends in a space, and an answer begins with one, or is not read so behind a space.
    """
    tokenizer: Any = getattr(view.model, "tokenizer", None)
    if tokenizer is None:
        return ()
    found: dict[str, tuple[list[int], str]] = {}

    def note(name: str, index: int, message: str) -> None:
        found.setdefault(name, ([], message))[0].append(index)

    for index, (right, other) in enumerate(zip(correct, wrong, strict=True)):
        ids = dict.fromkeys([*right, *other])
        row = prompts.tokens[index, : prompts.lengths[index]].tolist()
        end, *texts = (tokenizer.decode([one]) for one in (row[-1], *ids))
        if _ends_in_space(tokenizer, row[-1]):
            for token, text in zip(ids, texts, strict=True):
                together = tokenizer(tokenizer.decode([*row, token]), add_special_tokens=False, verbose=False).input_ids
                spaced = str(tokenizer.convert_ids_to_tokens(token)).startswith(_SPACES)
                if spaced or list(together[-2:]) != [row[-1], token]:
                    note(
                        "space_at_end",
                        index,
                        f"prompt {index} ends in a space, and {text!r} does not follow one: in text the space is part "
                        "of the next word's token; end the prompt before it, and begin the answer with it",
                    )
                    break
        for text in (text for text in texts if end[-1:].isalpha() and text[:1].isalpha()):
            spaced = tokenizer(f" {text}", add_special_tokens=False).input_ids
            if len(spaced) == 1 and spaced[0] not in ids:
                note(
                    "joined_word",
                    index,
                    f"prompt {index} ends in {end!r}, and {text!r} goes on with that word; {f' {text}'!r} is another "
                    "token: begin answers with a space if they are words of their own",
                )
                break
    return tuple(Note(name, rows, message) for name, (rows, message) in found.items())


_SPACES = (" ", "\u0120", "\u2581")  # as tokens write a space: plain, of GPT-2, of SentencePiece


def _ends_in_space(tokenizer: Any, token: int) -> bool:
    return str(tokenizer.convert_ids_to_tokens(token)).endswith(_SPACES)


def _answer_ids(view: AttentionView, answers: Any, n_prompts: int, side: str) -> list[list[int]]:
    if not isinstance(answers, list):
        return [[_token_id(view, answers, side)]] * n_prompts
    ids = []
    for index, several in enumerate(answers):
        chosen = several if isinstance(several, list) else [several]
        if not chosen:
            raise ValueError(f"prompt {index} has no {side} answer")
        where = f"{side} of prompt {index}"
        ids.append(list(dict.fromkeys(_token_id(view, answer, where) for answer in chosen)))
    return ids


def _is_token(tokenizer: Any, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return len(ids) == 1 and ids[0] != tokenizer.unk_token_id


def _token_id(view: AttentionView, answer: str | int, where: str) -> int:
    tokenizer: Any = getattr(view.model, "tokenizer", None)
    token = answer
    if isinstance(answer, str):
        if tokenizer is None:
            raise ValueError(f"{where}: this model has no tokenizer, so {answer!r} cannot be read: give token ids")
        ids: Sequence[int] = tokenizer(answer, add_special_tokens=False).input_ids
        if len(ids) != 1:
            texts = [tokenizer.decode([token]) for token in ids]
            others = [other for other in (answer.strip(), f" {answer.strip()}") if _is_token(tokenizer, other)]
            advice = f"give {' or '.join(map(repr, others))}, or " if others else "give "
            raise ValueError(
                f"{where}: {answer!r} is {len(ids)} tokens, {texts}; an answer is one token: {advice}the id of the "
                "token that tells answers apart"
            )
        token = int(ids[0])
        if token == tokenizer.unk_token_id and answer.strip() != tokenizer.unk_token:
            raise ValueError(
                f"{where}: {answer!r} is no token that the tokenizer knows, which reads it as {tokenizer.unk_token!r}: "
                "give another answer, or a token id"
            )
    try:
        require_vocabulary(view.d_vocab, torch.tensor(token))
    except ValueError as error:
        shown = f" {answer!r}:" if isinstance(answer, str) else ""
        raise ValueError(f"{where}:{shown} {error}") from error
    return int(token)
