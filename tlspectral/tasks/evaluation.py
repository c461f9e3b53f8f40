"""`evaluate`: the value of a model on a task. `induction_loss` and `language_loss` are it with a ready task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tlspectral.models.reading import measured
from tlspectral.models.running.batches import TokenMask
from tlspectral.tasks.metric_value import MetricValue
from tlspectral.tasks.task import Task, induction, language, task_of
from tlspectral.tasks.task_sequences import metric_value_of, task_sequences


def evaluate(model: Any, task: Task | str) -> MetricValue:
    """Evaluate a model on a task.

    >>> import tlspectral as tls
    >>> model, task = tls.load_model("tiny-rope"), tls.tasks.induction(n_sequences=8)
    >>> intact = tls.evaluate(model, task)
    >>> with tls.ablate(model, "L0H3", "output"):
    ...     effect = tls.evaluate(model, task) - intact
    >>> effect.value > 1
    True

    Hooks on the model stay in force, so that inside `ablate(...)` this is the value of the ablated model; hooks on the
    unembedding see the predicted positions alone.

    Args:
        model: a TransformerBridge or HookedTransformer.
        task: a `Task`, or `"induction"` or `"language"` for these with their defaults.

    Returns:
        A `MetricValue`, which is used as a number: the mean over sequences, with `.se` and `.per_sequence`. The
        difference of two is the paired `Effect`.

    Raises:
        ValueError, TypeError: prompts, positions, labels or a metric that do not fit; see `Task`.
        ValueError: under `torch.autocast`, as in all that measures: it would round the value to 16 bits.
    """
    with measured(model, report_hooks=False) as view:
        return metric_value_of(view, task_sequences(view, task_of(task)))


def induction_loss(
    model: Any,
    prompts: Int[Tensor, "sequences pos"] | None = None,
    *,
    n_sequences: int = 200,
    segment_length: int = 64,
    seed: int = 0,
) -> MetricValue:
    """Evaluate the loss on the second copy of random repeated segments, which the model can copy (FP sections 5, 8).

    This is `evaluate(model, tls.tasks.induction(...))`: the sequences are the same as in `detect_heads`; with segments
    of L tokens, positions L+1 .. 2L-1 predict. Hooks on the model stay in force. Memory does not grow with the number
    of sequences.

    Args:
        model: a TransformerBridge or HookedTransformer.
        prompts: sequences of your own, [sequences, 1 + 2 L]; None draws them.
        n_sequences: sequences drawn; the standard error is over them.
        segment_length: L, at most (n_ctx - 1) // 2.
        seed: of the draw.

    Raises:
        UnsupportedArchitecture: an encoder, which sees the token that it would predict.
        ValueError: `prompts` that are no repeated sequences or that the model cannot read, or fewer than two to draw.

    What it does not establish: that a head with an effect here is an induction head. Every head that
    the second copy needs has one: so do heads that feed induction, and heads whose removal damages the model as such.
    """
    return evaluate(model, induction(prompts, n_sequences=n_sequences, segment_length=segment_length, seed=seed))


def language_loss(
    model: Any,
    prompts: Int[Tensor, "sequences pos"] | str | Sequence[str] | None = None,
    *,
    attention_mask: TokenMask | None = None,
    n_sequences: int = 64,
    sequence_length: int = 128,
) -> MetricValue:
    """Evaluate the loss on text, of every position but the last (FP section 5): the mean over sequences of their means.

    Documents are joined, with EOS between them, and cut into rows of one length. Give prompts that are to be
    evaluated one by one as token ids, and prompts of unequal length padded, with their mask:

        batch = model.tokenizer(prompts, padding=True, return_tensors="pt")
        language_loss(model, batch.input_ids, attention_mask=batch.attention_mask)

    Args:
        model: a TransformerBridge or HookedTransformer; hooks on it stay in force.
        prompts: token ids; a document or several (this needs the model's tokenizer); the name of a data set,
            one word without spaces (its column `text` is streamed: this needs a network and `datasets`); or None, the
            public-domain book that comes with the package.
        attention_mask: for token ids that are padded, on either side: 1 for real tokens, 0 for padding. Padding is
            neither seen by the model nor evaluated.
        n_sequences: rows that are cut from text, the first ones; token ids are taken whole.
        sequence_length: tokens in such a row, BOS included, at most the context.

    Raises:
        UnsupportedArchitecture: an encoder, which sees the token that it would predict.
        ValueError: text without a tokenizer, token ids that are no sequences of this model or look padded and come
            without a mask, or a mask that does not fit.

    What it does not establish: a held-out loss. The packaged book was in most training sets; it compares a model with
    itself.
    """
    size = {"n_sequences": n_sequences, "sequence_length": sequence_length}
    return evaluate(model, language(prompts, attention_mask=attention_mask, **size))
