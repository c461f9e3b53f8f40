"""What two tasks have in common: answers and templates of their prompts. Folds of a task by answer."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int

from tlspectral.errors import shown, warn_caller
from tlspectral.hooks.circuits.carried import FEWEST
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens
from tlspectral.models.running.text import tokens_text
from tlspectral.tasks.metrics import AnsweredDifference
from tlspectral.tasks.task_sequences import TaskSequences

FOLDS = 3
"""Most folds by answer."""

_NEAR = 2  # tokens by which templates may differ before they count as clearly different


def require_apart(view: AttentionView, task: TaskSequences, held: TaskSequences) -> None:
    """Raise ValueError unless `held` has eight distinct pairs that share no answer and no template with `task`.

    A template is a prompt without its answers and without the tokens in which it differs from its pair. Columns
    `answer` and `template` of the tasks' labels replace the values found in this way. Warns about held prompts whose
    template differs by two tokens or fewer from one in `task`. `view` is the model.
    """
    n = len(held.tokens) if held.distinct is None else int(held.distinct.max()) + 1
    if n < FEWEST:
        raise ValueError(f"held= has {n} distinct pairs: give {FEWEST} or more, or leave it out")
    if (task.counterfactual is None) != (held.counterfactual is None):
        lacking = "held" if held.counterfactual is None else "task"
        raise ValueError(f"{lacking}= has no counterfactual prompts and the other task has: give pairs in both or none")
    own, others = (_answers(view, sequences, what) for sequences, what in ((task, "task"), (held, "held")))
    common = sorted({answer for row in own for answer in row} & {answer for row in others for answer in row})
    if common:
        raise ValueError(
            f"held= and task= share the answers {shown(common)}: give held pairs with other answers, otherwise `kept` "
            "is no evidence for other prompts"
        )
    templates, held_templates = (
        _templates(view, sequences, answers) for sequences, answers in ((task, own), (held, others))
    )
    known = dict(zip(templates, range(len(templates)), strict=True))
    equal = [row for row, template in enumerate(held_templates) if template in known]
    if equal:
        prompt, row = _text(view, task, known[held_templates[equal[0]]]), equal[0]
        raise ValueError(
            f"{len(equal)} of {len(held_templates)} pairs of held= share a template with task=: "
            f"{shown(prompt, 70)} and {shown(_text(view, held, row), 70)}: give held pairs with another template"
        )
    near = [
        (row, known[template])
        for row, own_template in enumerate(held_templates)
        for template in known
        if _differing(own_template, template) <= _NEAR
    ]
    if near:
        warn_caller(
            f"{len({row for row, _ in near})} of {len(held_templates)} pairs of held= differ from a pair of task= in "
            f"{_NEAR} words or fewer besides the answers, such as {shown(_text(view, held, near[0][0]), 60)}: if these "
            "are one template, give held pairs with another; if not, name templates in Task(labels=), column `template`"
        )


def _answers(view: AttentionView, sequences: TaskSequences, what: str) -> list[frozenset[str]]:
    """Return for each prompt the set of its answers, right and wrong, as texts without spaces around them.

    `what` is the name of the argument, for a message. Raises ValueError if the answers are not known.
    """
    if sequences.labels is not None and "answer" in sequences.labels:
        return [frozenset([str(answer).strip()]) for answer in sequences.labels["answer"]]
    if not isinstance(sequences.metric, AnsweredDifference):
        raise ValueError(
            f"the answers of {what}= are not known, because its metric is not tls.logit_difference: name them in "
            "Task(labels=), a table with a column `answer`, or leave held= out"
        )
    texts = {
        token: tokens_text(view, [token]).strip() for row in sequences.metric.answers for side in row for token in side
    }
    return [
        frozenset(texts[token] for token in (*right, *wrong))
        for right, wrong in zip(sequences.metric.correct, sequences.metric.wrong, strict=True)
    ]


def _templates(
    view: AttentionView, sequences: TaskSequences, answers: Sequence[frozenset[str]]
) -> list[tuple[Hashable, ...]]:
    """Return the template of each prompt: its tokens, with None for its answers and where it differs from its pair.

    `answers` are the texts of the answers of each prompt. A column `template` of the labels replaces the tokens.
    """
    if sequences.labels is not None and "template" in sequences.labels:
        return [(str(template),) for template in sequences.labels["template"]]
    other = sequences.tokens if sequences.counterfactual is None else sequences.counterfactual.tokens
    texts = {int(token): tokens_text(view, [int(token)]).strip() for token in sequences.tokens.unique()}
    rows = zip(sequences.tokens.tolist(), other.tolist(), sequences.lengths.tolist(), answers, strict=True)
    return [
        tuple(
            None if token != paired or texts[token] in own else token
            for token, paired in zip(tokens[:length], pair[:length], strict=True)
        )
        for tokens, pair, length, own in rows
    ]


def _differing(template: tuple[Hashable, ...], other: tuple[Hashable, ...]) -> int:
    """Return in how many places two templates differ; their length if the lengths differ, or for a named template."""
    if len(template) != len(other) or len(template) == 1:
        return max(len(template), len(other), _NEAR + 1)
    return sum(first != second for first, second in zip(template, other, strict=True))


def _text(view: AttentionView, sequences: TaskSequences, row: int) -> str:
    """Return a prompt of a task as text."""
    if sequences.given_texts is not None:
        return sequences.given_texts[row]
    return tokens_text(view, sequences.tokens[row, : int(sequences.lengths[row])].tolist())


def folds_by_answer(sequences: TaskSequences) -> list[tuple[Int[np.ndarray, "chosen"], Int[np.ndarray, "others"]]]:
    """Return up to three folds of the prompts as (rows to train on, rows to judge), divided by the right answer.

    Prompts with a right answer in common are in one fold. The list is empty if all prompts are, or if the metric is not
    `tls.logit_difference`, so that the answers are not known. Folds have similar numbers of prompts.
    """
    if not isinstance(sequences.metric, AnsweredDifference):
        return []
    groups: list[tuple[set[int], list[int]]] = []
    for row, answers in enumerate(sequences.metric.correct):
        joined = [group for group in groups if group[0] & {*answers}]
        groups = [group for group in groups if group not in joined]
        known = {*answers}.union(*(own for own, _ in joined))
        groups.append((known, [*(member for _, rows in joined for member in rows), row]))
    if len(groups) < 2:
        return []
    folds: list[list[int]] = [[] for _ in range(min(FOLDS, len(groups)))]
    for _, rows in sorted(groups, key=lambda group: -len(group[1])):
        min(folds, key=len).extend(rows)
    every = np.arange(len(sequences.tokens))
    return [(np.setdiff1d(every, rows), np.array(sorted(rows))) for rows in folds]


def rows_of(sequences: TaskSequences, rows: Int[np.ndarray, "chosen"]) -> TaskSequences:
    """Return the task restricted to some prompts, given by number, with their pairs and answers.

    The metric has to be `AnsweredDifference`. Labels and named positions are left out.
    """
    assert isinstance(sequences.metric, AnsweredDifference)
    index, metric, other = torch.as_tensor(rows), sequences.metric, sequences.counterfactual
    distinct = None if sequences.distinct is None else np.unique(sequences.distinct[rows], return_inverse=True)[1]
    return replace(
        sequences,
        tokens=sequences.tokens[index],
        lengths=sequences.lengths[index],
        predicted=sequences.predicted if isinstance(sequences.predicted, slice) else sequences.predicted[index],
        metric=AnsweredDifference([metric.correct[row] for row in rows], [metric.wrong[row] for row in rows]),
        labels=None,
        counterfactual=None if other is None else PackedTokens(other.tokens[index], other.lengths[index]),
        positions={},
        distinct=distinct,
        given_texts=None,
    )
