"""In-context learning as one number: the loss on a repeated random segment less that on its first copy."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.models.attention import attention_view
from tlspectral.tasks import Score, induction, score_of, scored_sequences, standard_error


@dataclass(frozen=True)
class InContextScore:
    """Losses on the two copies of repeated segments, and their difference.

    Attributes:
        first, second: losses of the first and of the second copy, over the same sequences.
    """

    first: Score
    second: Score

    @property
    def value(self) -> float:
        """Mean over sequences of second minus first, in nats per token; negative where the copy is easier."""
        return float((self.second.per_sequence - self.first.per_sequence).mean())

    @property
    def stderr(self) -> float:
        """Standard error of the mean of the differences, sequence by sequence."""
        return standard_error(self.second.per_sequence - self.first.per_sequence)


def in_context_score(
    model: Any,
    *,
    n_sequences: int = 200,
    segment_length: int = 64,
    tokens: Int[Tensor, "sequences pos"] | None = None,
    seed: int = 0,
) -> InContextScore:
    """Loss on the second copy of random repeated segments minus that on the first (FP section 9).

    The sequences are those of `detect_heads`. With segments of L tokens, positions 1 .. L-1 predict the first copy and
    L+1 .. 2L-1 the second, L - 1 each; FP has L = 64. Hooks on the model stay in force.

    Args:
        model: a TransformerBridge or HookedTransformer.
        n_sequences: sequences drawn; the standard error is over them.
        segment_length: L, at most (n_ctx - 1) // 2.
        tokens: sequences of your own, [sequences, 1 + 2 L]; None draws them.
        seed: of the draw.

    Raises:
        ValueError: `tokens` that are no repeated sequences, or fewer than two sequences to draw.

    Source: "Fingerprint, Not Blueprint" (FP, section 9).

    What it does not establish: that copying got better. The difference falls as well when the first copy gets worse,
    and late in training it does: a model that has learned text finds random tokens ever less likely, far above
    log(d_vocab). Read `second` by itself, or `induction_loss`, before calling a lower score better induction.
    """
    task = induction(n_sequences=n_sequences, segment_length=segment_length, tokens=tokens, seed=seed)
    view = attention_view(model)
    second = scored_sequences(view, task)
    # Attention is causal, so the second copy does not change the losses of the first.
    width = second.tokens.shape[1] // 2 + 1
    lengths = torch.full((len(second.tokens),), width)
    first = replace(second, tokens=second.tokens[:, :width], lengths=lengths, scored=slice(1, width - 1))
    return InContextScore(score_of(view, first), score_of(view, second))
