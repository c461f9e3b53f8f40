"""Rows of text as prompts of a ready task: text comes with the package or is given."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, TokenMask
from tlspectral.models.running.prompts import packed_rows, refuse_padding
from tlspectral.models.running.text import text_tokens


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
