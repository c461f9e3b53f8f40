"""The token sequences that an ablation is scored on: which positions predict, and the loss of each sequence."""

import hashlib
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tlspectral.detectors import repeated_sequences
from tlspectral.hooks.ablation import Removal
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.padding import TokenMask, refuse_padding, right_packed
from tlspectral.rotary import in_float64

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
        lengths: tokens of each sequence, where rows are longer; what follows is padding and is not scored.
    """

    tokens: Int[Tensor, "sequences pos"]
    first: int
    name: str
    lengths: Int[Tensor, "sequences"] | None = None

    @property
    def scored(self) -> slice:
        """Positions whose logits are needed."""
        return slice(self.first, self.tokens.shape[1] - 1)

    @property
    def digest(self) -> str:
        """Hash of the tokens and of what is scored."""
        content = self.tokens.long().contiguous().numpy().tobytes()
        lengths = "" if self.lengths is None else str(self.lengths.tolist())
        return hashlib.sha256(content + f"{tuple(self.tokens.shape)}{self.first}{lengths}".encode()).hexdigest()

    def losses(
        self, logits: Float[Tensor, "rows scored d_vocab"], sequences: slice
    ) -> Float[Tensor, "copies sequences"]:
        """Mean cross-entropy of each sequence in nats, over its own positions.

        `logits` may be of several stacked copies of the sequences.
        """
        targets = self.tokens[sequences, self.first + 1 :].to(logits.device)
        copies = len(logits) // len(targets)
        # Half precision is widened, because effects are means of small differences.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        token_losses = torch.nn.functional.cross_entropy(
            wide.flatten(0, 1), targets.repeat(copies, 1).flatten(), reduction="none"
        )
        by_position = in_float64(token_losses.view(copies, *targets.shape))
        if self.lengths is None:
            return by_position.mean(-1)
        counted = self._real(sequences)[:, self.first + 1 :].to(by_position.device)
        return by_position.where(counted, 0.0).sum(-1) / counted.sum(-1)

    def unpadded(self, removal: Removal, sequences: slice) -> Removal:
        """Return a removal in a run of these sequences, with allowed pairs limited to those without padding.

        Padding follows the sequence, so only queries of padding see keys of padding: masking queries is enough.
        """
        if self.lengths is None or removal.allowed is None:
            return removal
        queries = self._real(sequences)[:, None, :, None].to(removal.allowed.device)
        return replace(removal, allowed=(removal.allowed & queries).expand_as(removal.difference))

    def _real(self, sequences: slice) -> Bool[Tensor, "rows pos"]:
        """Tell which positions are tokens of their sequence, and not padding."""
        assert self.lengths is not None
        return torch.arange(self.tokens.shape[1]) < self.lengths[sequences, None]

    def rows_at_once(self, view: AttentionView) -> int:
        """Number of sequences in one run, which bounds its tokens and scored logits by the kind of device."""
        on_cpu = view.device.type == "cpu"
        tokens, logits = (_CPU_TOKENS, _CPU_LOGITS) if on_cpu else (_GPU_TOKENS, _GPU_LOGITS)
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
    fits = tokens.shape[1] == 1 + 2 * length and length >= 2 and len(tokens) > 0
    if not fits or not torch.equal(tokens[:, 1 : 1 + length], tokens[:, 1 + length :]):
        refuse_padding(view, tokens, "sequences [BOS, r, r] have none")
        raise ValueError(
            "tokens of the induction task are sequences [BOS, r, r]: one token, a segment of two or more tokens and "
            f"the same segment again; found shape {tuple(tokens.shape)}"
        )
    return ScoredSequences(tokens, length + 1, "induction")


def language_sequences(
    tokens: Int[Tensor, "sequences pos"], view: AttentionView, attention_mask: TokenMask | None = None
) -> ScoredSequences:
    """Sequences that a caller gave, of which every position predicts its next token.

    Args:
        tokens: ids, padded on either side if there is a mask.
        view: of the model.
        attention_mask: 1 for real tokens; None where all are.

    Raises:
        ValueError: no sequence of two tokens, one longer than the context, ids that the model does not have, a mask
            that does not fit, or tokens that look padded without one.
    """
    if attention_mask is None:
        refuse_padding(
            view,
            tokens,
            "give attention_mask=, 1 for real tokens and 0 for padding (all 1 if these ids are text)",
        )
        return whole_rows(tokens, view)
    packed = right_packed(tokens, attention_mask)
    if len(packed.lengths) and int(packed.lengths.min()) < 2:
        row = int(packed.lengths.argmin())
        raise ValueError(f"row {row} has {int(packed.lengths[row])} real token, and nothing is predicted: leave it out")
    sequences = whole_rows(packed.tokens, view)
    # Rows of one length are scored as if they had come without padding, to the bit.
    return sequences if len(packed.lengths.unique()) == 1 else replace(sequences, lengths=packed.lengths)


def whole_rows(tokens: Int[Tensor, "sequences pos"], view: AttentionView) -> ScoredSequences:
    """Rows without padding, of which every position predicts its next token. Raises as `language_sequences`."""
    tokens = tokens.cpu()
    if tokens.ndim != 2 or len(tokens) == 0 or not 2 <= tokens.shape[1] <= view.n_ctx:
        raise ValueError(
            f"tokens are [sequences, pos] with 2 to {view.n_ctx} positions (the context); found {tuple(tokens.shape)}"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= view.d_vocab:
        raise ValueError(f"token ids are 0 to {view.d_vocab - 1}; found {int(tokens.min())} to {int(tokens.max())}")
    return ScoredSequences(tokens, 0, "language")
