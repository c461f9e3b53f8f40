"""What an ablation is scored on: token sequences, the positions that predict, and the loss of each sequence."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tlspectral.detectors import repeated_sequences
from tlspectral.models.attention import AttentionView

# Measured on two cores: larger batches are no faster, and logits of 2^26 entries are 256 MB in float32.
_CPU_TOKENS, _CPU_LOGITS = 2**11, 2**26
_GPU_TOKENS, _GPU_LOGITS = 2**16, 2**29


@dataclass(frozen=True)
class ScoredSequences:
    """Sequences of tokens of which positions `first` to the last but one predict their next token.

    Attributes:
        tokens: ids, on the CPU.
        first: the first position that predicts.
        name: of the task.
    """

    tokens: Int[Tensor, "sequences pos"]
    first: int
    name: str

    @property
    def scored(self) -> slice:
        """Positions whose logits are needed."""
        return slice(self.first, self.tokens.shape[1] - 1)

    @property
    def digest(self) -> str:
        """Hash of the tokens and of what is scored."""
        content = self.tokens.long().contiguous().numpy().tobytes()
        return hashlib.sha256(content + f"{tuple(self.tokens.shape)}{self.first}".encode()).hexdigest()

    def losses(
        self, logits: Float[Tensor, "rows scored d_vocab"], sequences: slice
    ) -> Float[Tensor, "copies sequences"]:
        """Mean cross-entropy of each sequence in nats; `logits` may be of several stacked copies of the sequences."""
        targets = self.tokens[sequences, self.first + 1 :].to(logits.device)
        copies = len(logits) // len(targets)
        # Half precision is widened: a mean of many small differences is what is looked for.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        each = torch.nn.functional.cross_entropy(
            wide.flatten(0, 1), targets.repeat(copies, 1).flatten(), reduction="none"
        )
        return each.view(copies, *targets.shape).double().mean(-1)

    def rows_at_once(self, view: AttentionView) -> int:
        """Sequences that a run may hold: a bound on tokens and on scored logits, by the kind of device."""
        small = view.device.type == "cpu"
        tokens, logits = (_CPU_TOKENS, _CPU_LOGITS) if small else (_GPU_TOKENS, _GPU_LOGITS)
        n_scored = len(range(self.tokens.shape[1])[self.scored])
        return max(1, min(tokens // self.tokens.shape[1], logits // (n_scored * view.d_vocab)))


def induction_sequences(
    view: AttentionView,
    tokens: Int[Tensor, "sequences pos"] | None,
    *,
    n_sequences: int,
    segment_length: int,
    seed: int,
) -> ScoredSequences:
    """Repeated random segments `[BOS, r, r]` as `detect_heads` draws them, scored on the second copy (FP section 8).

    With a segment of L tokens, positions L+1 .. 2L-1 predict: each has seen the token that follows.

    Raises:
        ValueError: `tokens` that are no repeated sequences, or no room for two tokens in a segment.
    """
    if tokens is None:
        tokens = repeated_sequences(view, n_sequences, segment_length, seed=seed)
    tokens = tokens.cpu()
    length = (tokens.shape[1] - 1) // 2
    whole = tokens.shape[1] == 1 + 2 * length and length >= 2 and len(tokens) > 0
    if not whole or not torch.equal(tokens[:, 1 : 1 + length], tokens[:, 1 + length :]):
        raise ValueError(
            "tokens of the induction task are sequences [BOS, r, r]: one token, a segment of two or more tokens and "
            f"the same segment again; found shape {tuple(tokens.shape)}"
        )
    return ScoredSequences(tokens, length + 1, "induction")


def language_sequences(tokens: Int[Tensor, "sequences pos"], view: Any) -> ScoredSequences:
    """Sequences of which every position predicts its next token.

    Raises:
        ValueError: no sequence of two tokens, one longer than the context, or ids that the model does not have.
    """
    tokens = tokens.cpu()
    if tokens.ndim != 2 or len(tokens) == 0 or not 2 <= tokens.shape[1] <= view.n_ctx:
        raise ValueError(
            f"tokens are [sequences, pos] with 2 to {view.n_ctx} positions (the context); found {tuple(tokens.shape)}"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= view.d_vocab:
        raise ValueError(f"token ids are 0 to {view.d_vocab - 1}; found {int(tokens.min())} to {int(tokens.max())}")
    return ScoredSequences(tokens, 0, "language")
