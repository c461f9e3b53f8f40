"""Losses with standard errors, on repeated random tokens (induction) and on text, and the effect of an ablation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.ablation.scoring import ScoredSequences, induction_sequences, language_sequences, whole_rows
from tlspectral.ablation.text import text_tokens
from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.attention.padding import TokenMask
from tlspectral.models.attention.replay import logits_at
from tlspectral.tables.html_summary import html_summary

_RESAMPLES = 9_999  # all sign flips up to 13 sequences, a sample of them above


@dataclass(frozen=True)
class Loss:
    """Mean next-token cross-entropy in nats, with the losses of the sequences it is the mean of."""

    per_sequence: Float64[np.ndarray, "sequences"]

    @property
    def value(self) -> float:
        """Mean over sequences."""
        return float(self.per_sequence.mean())

    @property
    def stderr(self) -> float:
        """Standard error of the mean over sequences; NaN for a single one."""
        return standard_error(self.per_sequence)

    def __repr__(self) -> str:
        return f"Loss(value={self.value:.4f}, stderr={self.stderr:.4f}, sequences={len(self.per_sequence)})"


@dataclass(frozen=True)
class Effect:
    """A mean difference of losses over the same sequences.

    Attributes:
        value: mean difference in nats; stderr: its standard error.
        pvalue: two-sided sign-flip test of no difference: exact up to 13 sequences, above from 9,999 seeded flips, and
            so no finer than 1e-4 there.
    """

    _repr_html_ = html_summary

    value: float
    stderr: float
    pvalue: float


def induction_loss(
    model: Any,
    *,
    n_sequences: int = 200,
    segment_length: int = 64,
    tokens: Int[Tensor, "sequences pos"] | None = None,
    seed: int = 0,
) -> Loss:
    """Loss on the second copy of random repeated segments, which the model can copy (FP sections 5, 8).

    The sequences are those of `detect_heads`; with segments of L tokens, positions L+1 .. 2L-1 predict. Hooks on the
    model stay in force, so that inside `ablate(...)` this is the loss of the ablated model; hooks on the unembedding
    see the scored positions alone. Memory does not grow with the number of sequences.

    Args:
        model: a TransformerBridge or HookedTransformer.
        n_sequences: sequences drawn; the standard error is over them.
        segment_length: L, at most (n_ctx - 1) // 2.
        tokens: sequences of your own, [sequences, 1 + 2 L]; None draws them.
        seed: of the draw.

    Raises:
        ValueError: `tokens` that are no repeated sequences, or fewer than two sequences to draw.

    What it does not establish: that a head with an effect here is an induction head. Every head that
    the second copy needs has one: so do heads that feed induction, and heads whose removal damages the model as such.
    """
    view = attention_view(model)
    return scored_loss(
        view,
        induction_sequences(view, tokens, n_sequences=n_sequences, segment_length=segment_length, seed=seed),
    )


def language_loss(
    model: Any,
    tokens_or_text: Int[Tensor, "sequences pos"] | str | Sequence[str] | None = None,
    *,
    attention_mask: TokenMask | None = None,
    n_sequences: int = 64,
    sequence_length: int = 128,
) -> Loss:
    """Loss on text, of every position but the last (FP section 5): the mean over sequences of each sequence's mean.

    Documents are joined, with EOS between them, and cut into rows of one length. Give prompts that are to be
    scored one by one as token ids, and prompts of unequal length padded, with their mask:

        batch = model.tokenizer(prompts, padding=True, return_tensors="pt")
        language_loss(model, batch.input_ids, attention_mask=batch.attention_mask)

    Args:
        model: a TransformerBridge or HookedTransformer; hooks on it stay in force.
        tokens_or_text: token ids; a document or several (this needs the model's tokenizer); the name of a data set,
            one word without spaces (its column `text` is streamed: this needs a network and `datasets`); or None, the
            public-domain book that comes with the package.
        attention_mask: for token ids that are padded, on either side: 1 for real tokens, 0 for padding. Padding is
            neither seen by the model nor scored.
        n_sequences: rows that are cut from text, the first ones; token ids are taken whole.
        sequence_length: tokens in such a row, BOS included, at most the context.

    Raises:
        ValueError: text without a tokenizer, token ids that are no sequences of this model or look padded and come
            without a mask, or a mask that does not fit.

    What it does not establish: a held-out loss. The packaged book was in most training sets; it compares a model with
    itself.
    """
    view = attention_view(model)
    if isinstance(tokens_or_text, Tensor):
        return scored_loss(view, language_sequences(tokens_or_text, view, attention_mask))
    if attention_mask is not None:
        raise ValueError("attention_mask says which token ids are padding, and rows of text have none: leave it out")
    tokens = text_tokens(view, tokens_or_text, n_sequences=n_sequences, sequence_length=sequence_length)
    return scored_loss(view, whole_rows(tokens, view))


def scored_loss(view: AttentionView, sequences: ScoredSequences) -> Loss:
    """Loss of the model as it is now, batch by batch."""
    losses = []
    with torch.no_grad():
        for start in range(0, len(sequences.tokens), rows := sequences.rows_at_once(view)):
            batch = slice(start, start + rows)
            losses.append(sequences.losses(logits_at(view, sequences.tokens[batch], sequences.scored), batch)[0].cpu())
    return Loss(torch.cat(losses).numpy())


def paired_effect(ablated: Loss, intact: Loss, *, seed: int = 0) -> Effect:
    """Effect of an ablation on the loss: `ablated - intact`, sequence by sequence.

    Args:
        ablated, intact: losses over the same sequences.
        seed: of the flips, where they are a sample.

    Raises:
        ValueError: losses over different numbers of sequences, or over one.
    """
    if ablated.per_sequence.shape != intact.per_sequence.shape or len(intact.per_sequence) < 2:
        raise ValueError(
            f"a paired effect needs two losses over the same two or more sequences, found "
            f"{len(ablated.per_sequence)} and {len(intact.per_sequence)}"
        )
    difference = ablated.per_sequence - intact.per_sequence
    return Effect(float(difference.mean()), standard_error(difference), sign_flip_p(difference, seed))


def standard_error(per_sequence: Float64[np.ndarray, "sequences"]) -> float:
    """Standard error of a mean over sequences; NaN for a single one."""
    return float(scipy.stats.sem(per_sequence)) if len(per_sequence) > 1 else float("nan")


def sign_flip_p(difference: Float64[np.ndarray, "sequences"], seed: int) -> float:
    """Two-sided p of a mean difference under flips of its signs; NaN for a single sequence."""
    if len(difference) < 2:
        return float("nan")
    test = scipy.stats.permutation_test(
        (difference,),
        lambda values, axis: values.mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=_RESAMPLES,
        random_state=seed,  # pyright: ignore  (the name in every scipy since 1.11)
    )
    return float(test.pvalue)
