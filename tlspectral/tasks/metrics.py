"""Metrics of ready tasks: next-token loss, and the difference of the logits of answers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import warn_caller
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.causality import require_causal
from tlspectral.models.attention.padding import PackedTokens
from tlspectral.models.attention.prompts import require_vocabulary


def next_token_loss(
    logits: Float[Tensor, "rows scored d_vocab"], tokens: Int[Tensor, "rows pos"], mask: Bool[Tensor, "rows pos"]
) -> Float64[Tensor, "rows"]:
    """Return the mean next-token cross-entropy of each sequence in nats, over its real tokens.

    `logits` are those of the positions from one on to the last but one: `predict=slice(start, -1)`, start 0 or more.
    """
    n_scored = logits.shape[1]
    targets, counted = tokens[:, -n_scored:], mask[:, -n_scored:]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    by_position = in_float64(losses.view(targets.shape))
    counted = counted.to(by_position.device)
    return by_position.where(counted, 0.0).sum(-1) / counted.sum(-1)


@dataclass(frozen=True)
class LogitDifference:
    """Mean logit of the correct answers less that of the wrong ones, at the one position that is predicted.

    Attributes:
        correct, wrong: answers, of all prompts or a list with those of each prompt: a token as text or id, or several.
    """

    correct: Any
    wrong: Any

    def for_model(self, view: AttentionView, prompts: PackedTokens) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return the metric with the answers as token ids of a model. Raises as `logit_difference`."""
        require_causal(view, "it predicts no next token; score the logits of a masked token by a metric of your own")
        correct, wrong = (
            _answer_ids(view, answers, len(prompts.tokens), side)
            for side, answers in (("correct", self.correct), ("wrong", self.wrong))
        )
        for index, (right, other) in enumerate(zip(correct, wrong, strict=True)):
            if both := set(right) & set(other):
                raise ValueError(f"prompt {index}: token {min(both)} is a correct and a wrong answer")
        _warn_of_missing_space(view, prompts, [{*right, *other} for right, other in zip(correct, wrong, strict=True)])
        return partial(_logit_difference, correct, wrong)

    def of_prompts(self, rows: list[int]) -> "LogitDifference":
        """Return the metric of some of the prompts."""
        kept = (
            given if isinstance(given, str | int) or getattr(given, "ndim", 1) == 0 else [given[row] for row in rows]
            for given in (self.correct, self.wrong)
        )
        return LogitDifference(*kept)


def _warn_of_missing_space(view: AttentionView, prompts: PackedTokens, answers: list[set[int]]) -> None:
    """Warn where a prompt ends in a letter and an answer lacks the space that begins a new word."""
    tokenizer = getattr(view.model, "tokenizer", None)
    if tokenizer is None:
        return
    for index, ids in enumerate(answers):
        last = int(prompts.tokens[index, prompts.lengths[index] - 1])
        end, *texts = (tokenizer.decode([one]) for one in (last, *ids))
        for text in (text for text in texts if end[-1:].isalpha() and text[:1].isalpha()):
            spaced = tokenizer(f" {text}", add_special_tokens=False).input_ids
            if len(spaced) == 1 and spaced[0] not in ids:
                warn_caller(
                    f"prompt {index} ends in {end!r}, and {text!r} goes on with that word; {f' {text}'!r} is another "
                    "token: begin answers with a space if they are words of their own"
                )
                return


def _logit_difference(
    correct: list[list[int]], wrong: list[list[int]], logits: Tensor, tokens: Tensor, mask: Tensor
) -> Tensor:
    last = logits[:, -1]
    weights = torch.zeros_like(last)
    for row, (right, other) in enumerate(zip(correct, wrong, strict=True)):
        weights[row, right] = 1 / len(right)
        weights[row, other] = -1 / len(other)
    return (last * weights).sum(-1)


def _answer_ids(view: AttentionView, answers: Any, n_prompts: int, side: str) -> list[list[int]]:
    if isinstance(answers, str | int):
        return [[_token_id(view, answers, side)]] * n_prompts
    given = list(answers)
    if len(given) != n_prompts:
        raise ValueError(
            f"{side} is one answer for all prompts, or a list with the answer or answers of each of the {n_prompts} "
            f"prompts; found {len(given)}"
        )
    ids = []
    for index, several in enumerate(given):
        single = isinstance(several, str | int) or getattr(several, "ndim", 1) == 0
        chosen = [several] if single or not isinstance(several, Iterable) else list(several)
        if not chosen:
            raise ValueError(f"prompt {index} has no {side} answer")
        ids.append(list(dict.fromkeys(_token_id(view, answer, side) for answer in chosen)))
    return ids


def _token_id(view: AttentionView, answer: Any, side: str) -> int:
    if not isinstance(answer, str):
        token = int(answer)
        try:
            require_vocabulary(view.d_vocab, torch.tensor(token))
        except ValueError as error:
            raise ValueError(f"{side}: {error}") from error
        return token
    tokenizer = getattr(view.model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"{side}: this model has no tokenizer, so {answer!r} cannot be read: give token ids")
    ids: Sequence[int] = tokenizer(answer, add_special_tokens=False).input_ids
    if len(ids) != 1:
        texts = [tokenizer.decode([token]) for token in ids]
        raise ValueError(
            f"{side}: {answer!r} is {len(ids)} tokens, {texts}; an answer is one token: begin it with a space if a "
            "word follows a space in the prompt, or give the id of the token that tells answers apart"
        )
    return int(ids[0])
