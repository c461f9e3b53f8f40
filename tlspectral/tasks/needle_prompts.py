"""`needle`: a task with one fact hidden in filler text and a question about it at the end."""

from __future__ import annotations

import random
from typing import Any

import pandas as pd
import torch

from tlspectral.errors.settings import checked_settings, counted
from tlspectral.models.reading.view import AttentionView, attention_view
from tlspectral.models.running.text import packaged_text, packaged_words, tokens_text
from tlspectral.tasks.task import Task, logit_difference

_FACT, _QUESTION = " The secret word of {name} is", " What is the secret word of {name}? The secret word of {name} is"
_LEAST_FILLER = 8  # tokens of filler, below which nothing is hidden
_SENTENCE_ENDS = (".", "!", "?", ".'", "!'", "?'", '."', '!"', '?"')


@checked_settings
def needle(model: Any, *, n_prompts: int = 16, length: int = 128, seed: int = 0) -> Task:
    """Make the task "needle": a fact hidden in the packaged book, a question at the end, and an answer of one token.

    >>> import tlspectral as tls
    >>> model = tls.load_model("smollm2-135m")
    >>> task = tls.tasks.needle(model, n_prompts=8, length=96)
    >>> round(float(tls.evaluate(model, task)), 1)
    10.4

    Use it to find and to remove retrieval heads. A prompt is filler text with the needle "The secret word of NAME is
    ANSWER." between two sentences, then the question. Its pair differs only in the needle's answer. The needle of
    `tls.positional.NeedleTask` is another task: a line among lines, as blocks that swap.

    Args:
        model: a TransformerBridge or HookedTransformer, for its tokenizer.
        n_prompts: number of prompts, two or more. Default: 16. No two share a name or an answer, until the words run
            out.
        length: tokens of each prompt, start token, needle and question included. Default: 128.
        seed: seed of names, answers, filler and the needle's place. Default: 0.

    Returns:
        A `Task` for `tls.evaluate`, `tls.ablation_sweep` and others; `split` halves it. Its metric is the logit of the
            needle's answer minus the logit of the pair's answer, at the end. Named positions: "needle" (first token of
            the fact), "answer" (in the fact), "question" (its first token), "end". `attention` is from the end to the
            answer. `labels`: name, answer, other (the pair's answer), depth (0: needle first, 1: last in the filler).

    Raises:
        ValueError: the model has no tokenizer, the length leaves no room or exceeds the context, or the tokenizer has
            too few words of one token.

    Not established: that the model retrieves long context. The question repeats words of the needle, so induction can
    answer it. Compare `length` settings, and the model on the pairs.

    Source: the needle in a haystack of Kamradt (2023), with one token as the answer.
    """
    view = attention_view(model)
    tokenizer: Any = getattr(view.model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer, so no fact can be written: give tls.logit_difference token ids")
    n_prompts = counted(n_prompts, 2, "n_prompts is the number of prompts of the task")
    length = counted(length, 1, "length is the number of tokens of a prompt")
    if length > view.n_ctx:
        raise ValueError(f"length={length} exceeds the model's context of {view.n_ctx} tokens: give a smaller length")

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    rng = random.Random(seed)
    names, words = packaged_words("names"), packaged_words("nouns")
    rng.shuffle(names)
    rng.shuffle(words)
    answers = [token for token in ({word: ids(f" {word}") for word in words}).values() if len(token) == 1]
    if len(answers) < 4:
        raise ValueError(f"only {len(answers)} of {len(words)} nouns are one token here: use another model")
    book, stop = ids(packaged_text()), ids(".")
    rows, pairs, labels = [], [], []
    places: dict[str, list[int]] = {"needle": [], "answer": [], "question": []}
    for number in range(n_prompts):
        name = names[number % len(names)]
        right, other = (answers[(2 * number + side) % len(answers)] for side in range(2))
        fact, question = (ids(text.format(name=name)) for text in (_FACT, _QUESTION))
        room = length - 1 - len(fact) - len(right) - len(stop) - len(question)
        if room < _LEAST_FILLER:
            raise ValueError(
                f"length={length} leaves {max(room, 0)} tokens for filler: give a length of "
                f"{length - room + _LEAST_FILLER} or more"
            )
        filler, cut = _filler(view, book, room, rng)
        before = [view.start_token, *filler[:cut]]
        behind = [*stop, *filler[cut:]]
        rows.append([*before, *fact, *right, *behind, *question])
        pairs.append([*before, *fact, *other, *behind, *question])
        for place, at in zip(places, (len(before), len(before) + len(fact), length - len(question)), strict=True):
            places[place].append(at)
        texts = (tokens_text(view, token).strip() for token in (right, other))
        labels.append((name, *texts, cut / room))
    task = logit_difference(
        torch.tensor(rows),
        [int(row[at]) for row, at in zip(rows, places["answer"], strict=True)],
        [int(row[at]) for row, at in zip(pairs, places["answer"], strict=True)],
        counterfactual=torch.tensor(pairs),
        positions={**places, "end": -1},
        name="needle",
    )
    frame = pd.DataFrame(labels, columns=["name", "answer", "other", "depth"])
    return Task(
        task.prompts, task.metric, predict=-1, counterfactual=task.counterfactual, positions=task.positions,
        attention=[[length - 1, at] for at in places["answer"]], labels=frame, higher_is_better=True, name=task.name,
    )  # fmt: skip


def _filler(view: AttentionView, book: list[int], room: int, rng: random.Random) -> tuple[list[int], int]:
    """Return `room` tokens of the book from a random place on, and where the needle is put among them.

    `book` are token ids, `view` is the model with the tokenizer, `rng` draws. The needle stands in front (0) or behind
    a sentence.
    """
    first = rng.randrange(max(1, len(book) - room))
    filler = (book * (1 + room // len(book)))[first : first + room]
    ends = [at + 1 for at, token in enumerate(filler) if tokens_text(view, [token]).strip() in _SENTENCE_ENDS]
    return filler, rng.choice([0, *ends])
