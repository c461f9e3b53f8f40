"""`evaluate`: the value of a model on a task. `induction_loss` and `language_loss` evaluate a ready task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tlspectral.errors.settings import checked_settings
from tlspectral.models.reading import measured
from tlspectral.models.running.batches import TokenMask
from tlspectral.tasks.metric_value import MetricValue
from tlspectral.tasks.task import Task, induction, language, task_of
from tlspectral.tasks.task_sequences import metric_value_of, task_sequences


def evaluate(model: Any, task: Task | str) -> MetricValue:
    """Evaluate a model on a task: run its prompts and return the mean of its metric, with a standard error.

    >>> import tlspectral as tls
    >>> model, task = tls.load_model("tiny-rope"), tls.tasks.induction(n_sequences=8)
    >>> intact = tls.evaluate(model, task)
    >>> with tls.ablate(model, "L0H3", "output"):
    ...     effect = tls.evaluate(model, task) - intact
    >>> round(effect.value, 1)
    3.2

    Use it inside and outside of `ablate(...)` to measure one ablation. Hooks on the model act as usual; a hook on the
    unembedding sees only the positions that the task predicts.

    Args:
        model: a TransformerBridge or HookedTransformer.
        task: a `tls.Task`, for example from `tls.logit_difference(...)`; or "induction" or "language", the ready tasks
            with their defaults.

    Returns:
        A `MetricValue`, which is a number: the mean over sequences, in the unit of the task's metric (nats per token
            for "induction" and "language", logits for `logit_difference`). `.se` is the standard error over sequences,
            where equal sequences count once; `.per_sequence` is an array of values; `.table()` is a DataFrame. The
            difference of two values of a task is a paired `Effect` with `.value`, `.se` and `.pvalue`.

    Raises:
        ValueError, TypeError: prompts, positions, labels or a metric that do not fit the model or each other.
        ValueError: the call is inside `torch.autocast`, which would round the value to 16 bits.
        UnsupportedArchitecture: the model is an encoder, and the metric needs the next token.

    Not established: that the metric measures the ability the task is named after. Prompts are a sample, and `.se` does
    not cover prompts of another kind.
    """
    with measured(model, report_hooks=False) as view:
        return metric_value_of(view, task_sequences(view, task_of(task)))


@checked_settings
def induction_loss(
    model: Any,
    prompts: Int[Tensor, "sequences pos"] | None = None,
    *,
    n_sequences: int = 200,
    segment_length: int = 64,
    seed: int = 0,
) -> MetricValue:
    """Return the loss on the second copy of a repeated random segment, in nats per token.

    Use it to see how well a model copies from its context ("Fingerprint, Not Blueprint", sections 5 and 8).

    >>> import tlspectral as tls
    >>> print(tls.tasks.induction_loss(tls.load_model("tiny-rope")))
    0.1104 ± 0.0004

    A sequence is `[BOS, r, r]`: a start token, then a segment r of L random tokens twice. The loss is the mean over
    positions L+1 to 2L-1. It is the same as `tls.evaluate(model, tls.tasks.induction(...))`.

    Args:
        model: a TransformerBridge or HookedTransformer; hooks on it act as usual.
        prompts: your own sequences of this form, token ids [sequences, 1 + 2 L]. Default: draw them.
        n_sequences: number of sequences to draw. Default: 200. Memory does not grow with it.
        segment_length: L, at most (context - 1) // 2; a larger L is cut to that. Default: 64.
        seed: seed of the draw. Default: 0.

    Returns:
        A `MetricValue`, which is a number: the mean over sequences in nats per token. `.se` is its standard error over
            sequences, `.per_sequence` an array of values.

    Raises:
        UnsupportedArchitecture: the model is an encoder, which sees the token to predict.
        ValueError: `prompts` are not repeated sequences, the model cannot read them, or fewer than two are to be drawn.

    Not established: that a head with an effect here is an induction head. Heads that feed induction have an effect too,
    and so do heads whose removal damages the model in general.
    """
    return evaluate(model, induction(prompts, n_sequences=n_sequences, segment_length=segment_length, seed=seed))


@checked_settings
def language_loss(
    model: Any,
    prompts: Int[Tensor, "sequences pos"] | str | Sequence[str] | None = None,
    *,
    attention_mask: TokenMask | None = None,
    n_sequences: int = 64,
    sequence_length: int = 128,
) -> MetricValue:
    """Return the next-token loss on text, in nats per token ("Fingerprint, Not Blueprint", section 5).

    Use it to see whether an ablation hurts the model on ordinary text.

    >>> import torch
    >>> import tlspectral as tls
    >>> tokens = torch.tensor([[1, 5, 6, 7, 5], [2, 3, 4, 3, 4]])
    >>> print(tls.tasks.language_loss(tls.load_model("tiny-rope"), tokens))
    3.3725 ± 0.6056

    All positions but the last predict the next token. Documents are joined with EOS between them and cut into rows of
    one length. To evaluate prompts one by one, give token ids, padded if their lengths differ:

        batch = model.tokenizer(prompts, padding=True, return_tensors="pt")
        tls.tasks.language_loss(model, batch.input_ids, attention_mask=batch.attention_mask)

    Args:
        model: a TransformerBridge or HookedTransformer; hooks on it act as usual.
        prompts: token ids [sequences, pos]; one or several documents (the model needs a tokenizer); or the name of a
            data set, one word, whose column `text` is streamed (needs a network and `datasets`). Default: the
            public-domain book in this package.
        attention_mask: for padded token ids (padding left or right): 1 for real tokens and 0 for padding. The model
            does not see padding.
        n_sequences: number of rows to cut from text, from its beginning. Default: 64. If you give token ids, all rows
            are used.
        sequence_length: tokens in such a row, BOS included. Default: 128, at most the context.

    Returns:
        A `MetricValue`, which is a number: the mean over sequences of the mean loss of each sequence, in nats per
            token. `.se` is its standard error over sequences, `.per_sequence` an array of values.

    Raises:
        UnsupportedArchitecture: the model is an encoder, which sees the token to predict.
        ValueError: text without a tokenizer, ids that the model does not have, ids that look padded without a mask, or
            a mask that does not fit.

    Not established: a held-out loss. Most models were trained on the packaged book: compare a model with itself.
    """
    size = {"n_sequences": n_sequences, "sequence_length": sequence_length}
    return evaluate(model, language(prompts, attention_mask=attention_mask, **size))
