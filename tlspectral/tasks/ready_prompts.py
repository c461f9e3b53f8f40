"""Prompts of the ready tasks: repeated random segments, and rows of text, which comes with the package or is given."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, TokenMask
from tlspectral.models.running.prompts import packed_rows, refuse_padding
from tlspectral.models.running.text import text_tokens
from tlspectral.tasks.repeated import given_sequences, repeated_sequences


@dataclass(frozen=True, eq=False)
class RepeatedSegments:
    """Repeated random segments `[BOS, r, r]`, drawn as by `detect_heads`, or given."""

    given: Tensor | None
    n_sequences: int
    segment_length: int
    seed: int

    def packed(self, view: AttentionView) -> PackedTokens:
        """Return the sequences. Raises ValueError for given ones that repeat nothing."""
        tokens = self.given
        if tokens is None:
            tokens = repeated_sequences(view, self.n_sequences, self.segment_length, seed=self.seed)
        return given_sequences(view, tokens)


@dataclass(frozen=True, eq=False)
class TextRows:
    """Rows of text, or token ids with their mask, of which every position predicts its next token."""

    given: Any
    attention_mask: TokenMask | None
    n_sequences: int
    sequence_length: int

    def packed(self, view: AttentionView) -> PackedTokens:
        """Return the rows. Raises ValueError for text without a tokenizer and for ids that do not fit."""
        tokens, mask = self.given, self.attention_mask
        if not isinstance(tokens, Tensor):
            if mask is not None:
                raise ValueError(
                    "attention_mask says which token ids are padding, and rows of text have none: leave it out"
                )
            tokens = text_tokens(view, tokens, n_sequences=self.n_sequences, sequence_length=self.sequence_length)
        elif mask is None:
            way_out = "give attention_mask=, 1 for real tokens and 0 for padding (all 1 if these ids are text)"
            refuse_padding(view, tokens, way_out)
        packed = packed_rows(view, tokens, mask)
        if int(packed.lengths.min()) < 2:
            row = int(packed.lengths.argmin())
            raise ValueError(
                f"row {row} has {int(packed.lengths[row])} real token, and nothing is predicted: leave it out"
            )
        return packed
