"""Prompts of the ready tasks: repeated random segments, and rows of text, which comes with the package or is given."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from tlspectral.detectors import repeated_sequences
from tlspectral.detectors.sequences import segment_length_of
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.padding import PackedTokens, TokenMask, even_rows
from tlspectral.models.attention.prompts import check_ids, refuse_padding, right_packed
from tlspectral.models.text import text_tokens


@runtime_checkable
class PromptsOfModel(Protocol):
    """Prompts that are made when the model is known."""

    def packed(self, view: AttentionView) -> PackedTokens:
        """Return the prompts as token ids of one model."""
        ...


@dataclass(frozen=True, eq=False)
class RepeatedSegments:
    """Repeated random segments `[BOS, r, r]`, drawn as by `detect_heads`, or given as `tokens`."""

    n_sequences: int
    segment_length: int
    tokens: Tensor | None
    seed: int

    def packed(self, view: AttentionView) -> PackedTokens:
        """Return the sequences. Raises ValueError as `induction_loss`."""
        tokens = self.tokens
        if tokens is None:
            tokens = repeated_sequences(view, self.n_sequences, self.segment_length, seed=self.seed)
        tokens = tokens.cpu()
        if len(tokens) == 0 or segment_length_of(tokens) is None:
            refuse_padding(view, tokens, "sequences [BOS, r, r] have none")
            raise ValueError(
                "tokens of the induction task are sequences [BOS, r, r]: one token, a segment of two or more tokens "
                f"and the same segment again; found shape {tuple(tokens.shape)}"
            )
        return even_rows(tokens)


@dataclass(frozen=True, eq=False)
class TextRows:
    """Rows of text, or token ids with their mask, of which every position predicts its next token."""

    tokens_or_text: Any
    attention_mask: TokenMask | None
    n_sequences: int
    sequence_length: int

    def packed(self, view: AttentionView) -> PackedTokens:
        """Return the rows. Raises ValueError as `language_loss`."""
        tokens, mask = self.tokens_or_text, self.attention_mask
        if isinstance(tokens, Tensor) and mask is not None:
            packed = right_packed(tokens, mask)
            if len(packed.lengths) and int(packed.lengths.min()) < 2:
                row = int(packed.lengths.argmin())
                raise ValueError(
                    f"row {row} has {int(packed.lengths[row])} real token, and nothing is predicted: leave it out"
                )
        elif isinstance(tokens, Tensor):
            way_out = "give attention_mask=, 1 for real tokens and 0 for padding (all 1 if these ids are text)"
            refuse_padding(view, tokens, way_out)
            packed = None if tokens.ndim != 2 else even_rows(tokens.cpu())
        elif mask is not None:
            raise ValueError(
                "attention_mask says which token ids are padding, and rows of text have none: leave it out"
            )
        else:
            width = self.sequence_length
            packed = even_rows(text_tokens(view, tokens, n_sequences=self.n_sequences, sequence_length=width))
        shape = tuple(tokens.shape) if packed is None else tuple(packed.tokens.shape)
        if packed is None or shape[0] == 0 or not 2 <= shape[1] <= view.n_ctx:
            raise ValueError(
                f"tokens are [sequences, pos] with 2 to {view.n_ctx} positions (the context); found {shape}"
            )
        check_ids(view, packed)
        return packed
