"""Metrics of the ready tasks: next-token loss, and the difference between the logits of two answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.containers import are_columns, column_names, plain, values
from tlspectral.errors import shown
from tlspectral.errors.settings import whole_number
from tlspectral.models.reading.view import AttentionView, require_causal
from tlspectral.models.running.batches import Note, PackedTokens
from tlspectral.models.running.prompts import require_vocabulary


def next_token_loss(
    logits: Float[Tensor, "rows predicted d_vocab"], tokens: Int[Tensor, "rows pos"], mask: Bool[Tensor, "rows pos"]
) -> Float64[Tensor, "rows"]:
    """Return the mean next-token cross-entropy of each sequence, in nats per real token.

    Use it as `metric=` of a `Task`. `logits`: of consecutive positions that end with the last but one, so give the task
    `predict=slice(start, -1)`. `tokens`: ids of the sequences; the last ones are the targets. `mask`: True for real
    tokens; padding does not count.
    """
    n_predicted = logits.shape[1]
    targets, counted = tokens[:, -n_predicted:], mask[:, -n_predicted:]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    by_position = in_float64(losses.view(targets.shape))
    counted = counted.to(by_position.device)
    return by_position.where(counted, 0.0).sum(-1) / counted.sum(-1)


@dataclass(frozen=True)
class LogitDifference:
    """Metric of a `Task`: mean logit of the correct answers minus mean logit of the wrong answers, after a prompt.

    `tls.logit_difference` makes it. `for_model` turns its answers into token ids.

    Attributes:
        correct, wrong: an answer (token text or id) for all prompts; or a list over prompts, each entry an answer or a
            list of answers.
    """

    correct: Any
    wrong: Any

    def __post_init__(self) -> None:
        for side in ("correct", "wrong"):
            object.__setattr__(self, side, _by_place(getattr(self, side), side))

    def for_model(self, view: AttentionView, prompts: PackedTokens) -> "AnsweredDifference":
        """Return an `AnsweredDifference`: this metric with its answers as token ids of the model behind `view`.

        `prompts`: the tokenised prompts, for their number and for notes about the space before an answer. Raises
        ValueError if an answer is not one token of this model or is both correct and wrong, or if the numbers of
        answers and prompts differ; UnsupportedArchitecture for an encoder.
        """
        require_causal(view, "it predicts no next token; give a tls.Task with a metric on the logits of a masked token")
        n = len(prompts.tokens)
        self.require_answers(n)
        correct, wrong = (
            _answer_ids(view, answers, n, side) for side, answers in (("correct", self.correct), ("wrong", self.wrong))
        )
        for index, (right, other) in enumerate(zip(correct, wrong, strict=True)):
            if both := set(right) & set(other):
                raise ValueError(
                    f"prompt {index}: token {min(both)} is a correct and a wrong answer: remove it from one"
                )
        return AnsweredDifference(correct, wrong, _answer_notes(view, prompts, correct, wrong))

    def require_answers(self, n_prompts: int) -> None:
        """Raise ValueError if `correct` or `wrong` is a list whose length is not the number of prompts."""
        for side, given in (("correct", self.correct), ("wrong", self.wrong)):
            if isinstance(given, list) and len(given) != n_prompts:
                raise ValueError(
                    f"{side} lists the answers of {len(given)} prompts, and there are {n_prompts} prompts: give one "
                    f"answer for all prompts, or a list with the answer or answers of each of the {n_prompts} prompts"
                )

    def of_prompts(self, rows: list[int]) -> "LogitDifference":
        """Return a new metric with the answers of the prompts whose numbers are in `rows`."""
        kept = (
            [given[row] for row in rows] if isinstance(given, list) else given for given in (self.correct, self.wrong)
        )
        return LogitDifference(*kept)


@dataclass(frozen=True)
class AnsweredDifference:
    """The metric `LogitDifference` for one model: called with logits, it returns the logit difference of each prompt.

    Attributes:
        correct, wrong: for each prompt, the token ids of its answers.
        notes: remarks on answers whose leading space does not fit the end of their prompt.
    """

    correct: list[list[int]]
    wrong: list[list[int]]
    notes: tuple[Note, ...] = ()

    @property
    def answers(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each prompt a tuple (correct ids, wrong ids)."""
        return [(tuple(right), tuple(other)) for right, other in zip(self.correct, self.wrong, strict=True)]

    def __call__(self, logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return correct minus wrong logit of each prompt [sequences], at the last predicted position.

        `logits`: [sequences, predicted, d_vocab]. `tokens` and `mask` are not used.
        """
        last = logits[:, -1]
        weights = torch.zeros_like(last)
        for row, (right, other) in enumerate(zip(self.correct, self.wrong, strict=True)):
            weights[row, right] = 1 / len(right)
            weights[row, other] = -1 / len(other)
        return (last * weights).sum(-1)


def _by_place(given: Any, side: str) -> Any:
    """Read answers given by a user: `correct=` or `wrong=` of `tls.logit_difference`. Return one answer (text or id),
    or a new list over prompts.

    An entry of the list is an answer or a list of answers. `side`: "correct" or "wrong", the name of the argument in
    messages. Raises TypeError for anything else, and for a value with two readings.
    """
    listed = None if isinstance(given, set | frozenset) else values(given)
    if listed is None:
        if isinstance(given, Mapping | set | frozenset) or column_names(given) is not None:
            raise TypeError(
                f"{side}={shown(given)} is not an answer: give a token as text or id, or a list with the answer of "
                "each prompt"
            )
        return _answer(given, side)
    if are_columns(given) and len(given) > 1:
        raise TypeError(
            f"{side} has two readings: a {type(given).__name__} of {len(given)} arrays or lists is a first and a "
            "second answer of each prompt, or the answers of each prompt. Write list(zip(first, second)) for the first "
            "reading, a list of lists for the second"
        )
    by_prompt = []
    for index, answers in enumerate(listed):
        where, several = f"{side} of prompt {index}", None if isinstance(answers, set | frozenset) else values(answers)
        by_prompt.append(_answer(answers, where) if several is None else [_answer(answer, where) for answer in several])
    return by_prompt


def _answer(given: Any, where: str) -> str | int:
    """Return an answer given by a user as text or as an int (token id). Raises TypeError, which names the argument
    `where`, for another value.
    """
    value = plain(given)
    if isinstance(value, str):
        return str(value)
    number = whole_number(value)
    if number is None:
        raise TypeError(
            f"{where} is {shown(value)}: give a token as text, such as ' Mary', or its id, such as "
            "model.to_single_token(' Mary')"
        )
    return number


def _answer_notes(
    view: AttentionView, prompts: PackedTokens, correct: list[list[int]], wrong: list[list[int]]
) -> tuple[Note, ...]:
    """Return a tuple of notes (name, numbers of the prompts, message) on answers whose leading space does not fit.

    `correct`, `wrong`: token ids of the answers of each prompt. A note has one of two names. "joined_word": the prompt
    ends in a letter, and an answer lacks the space that begins a new word. "space_at_end": the prompt ends in a space,
    and an answer begins with a space or is another token after a space. () if the model behind `view` has no tokenizer.
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
        if str(tokenizer.convert_ids_to_tokens(row[-1])).endswith(_SPACES):
            for token, text in zip(ids, texts, strict=True):
                together = tokenizer(tokenizer.decode([*row, token]), add_special_tokens=False, verbose=False).input_ids
                spaced = str(tokenizer.convert_ids_to_tokens(token)).startswith(_SPACES)
                if spaced or list(together[-2:]) != [row[-1], token]:
                    note(
                        "space_at_end",
                        index,
                        f"prompt {index} ends in a space, and the token {text!r} does not follow a space in text, "
                        "where the space belongs to the next word's token: remove the space from the prompt, and begin "
                        "the answer with it",
                    )
                    break
        for text in (text for text in texts if end[-1:].isalpha() and text[:1].isalpha()):
            spaced = tokenizer(f" {text}", add_special_tokens=False).input_ids
            if len(spaced) == 1 and spaced[0] not in ids:
                note(
                    "joined_word",
                    index,
                    f"prompt {index} ends in {end!r}, and {text!r} goes on with that word; {f' {text}'!r} is another "
                    "token: begin an answer with a space if it is a word of its own",
                )
                break
    return tuple(Note(name, rows, message) for name, (rows, message) in found.items())


_SPACES = (" ", "\u0120", "\u2581")  # a space in tokens: plain, in GPT-2, in SentencePiece


def _answer_ids(view: AttentionView, answers: Any, n_prompts: int, side: str) -> list[list[int]]:
    """Return a list of answer ids for each of `n_prompts` prompts.

    `answers`: one answer for all, or a list per prompt. `side`: "correct" or "wrong". Raises ValueError for an answer
    that is not one token of the model behind `view`, and for an empty list.
    """
    if not isinstance(answers, list):
        return [[_token_id(view, answers, side)]] * n_prompts
    ids = []
    for index, several in enumerate(answers):
        chosen = several if isinstance(several, list) else [several]
        if not chosen:
            raise ValueError(f"{side} is an empty list for prompt {index}: give one answer or more")
        where = f"{side} of prompt {index}"
        ids.append(list(dict.fromkeys(_token_id(view, answer, where) for answer in chosen)))
    return ids


def _is_token(tokenizer: Any, text: str) -> bool:
    """Return True if a text is one token of the tokenizer, other than the token for unknown text."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return len(ids) == 1 and ids[0] != tokenizer.unk_token_id


def _token_id(view: AttentionView, answer: str | int, where: str) -> int:
    """Return the token id of an answer (text or id) for the model behind `view`.

    Raises ValueError, which begins with `where`, if the answer is not one token of the model.
    """
    tokenizer: Any = getattr(view.model, "tokenizer", None)
    token = answer
    if isinstance(answer, str):
        if tokenizer is None:
            raise ValueError(
                f"{where} is {shown(answer)}, and this model has no tokenizer to read text: give answers as token ids"
            )
        ids: Sequence[int] = tokenizer(answer, add_special_tokens=False).input_ids
        if len(ids) != 1:
            texts = [tokenizer.decode([token]) for token in ids]
            others = [other for other in (answer.strip(), f" {answer.strip()}") if _is_token(tokenizer, other)]
            advice = f"give {' or '.join(map(repr, others))}, or " if others else "give "
            raise ValueError(
                f"{where}: {shown(answer)} is {len(ids)} tokens, {shown(texts)}; an answer is one token: {advice}the "
                "id of the token that tells answers apart"
            )
        token = int(ids[0])
        if token == tokenizer.unk_token_id and answer.strip() != tokenizer.unk_token:
            raise ValueError(
                f"{where}: the tokenizer does not know {shown(answer)} and reads it as {shown(tokenizer.unk_token)}: "
                "give another answer, or a token id"
            )
    try:
        require_vocabulary(view.d_vocab, torch.tensor(token))
    except ValueError as error:
        text = f" {shown(answer)}:" if isinstance(answer, str) else ""
        raise ValueError(f"{where}:{text} {error}") from error
    return int(token)
