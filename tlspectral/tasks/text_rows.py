"""`TextRows`: prompts of the task `language`, cut from the packaged book or from the caller's text."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, TokenMask
from tlspectral.models.running.prompts import packed_rows, refuse_padding
from tlspectral.models.running.text import text_tokens


@dataclass(frozen=True, eq=False)
class TextRows:
    """Prompts of the task "language": rows of text or token ids, in which every position predicts the next token.

    Attributes:
        given: token ids [sequences, pos], text or the name of a data set; None for the packaged book.
        attention_mask: for padded ids, 1 for real tokens and 0 for padding; otherwise None.
        n_sequences: number of rows to cut from text.
        sequence_length: tokens in such a row.
    """

    given: Any
    attention_mask: TokenMask | None
    n_sequences: int
    sequence_length: int

    def packed(self, view: AttentionView) -> PackedTokens:
        """Return the rows as a `PackedTokens` batch: token ids for the model behind `view`, with their lengths.

        Raises ValueError for text without a tokenizer, ids that the model lacks, and ids that look padded without a
        mask.
        """
        tokens, mask = self.given, self.attention_mask
        if not isinstance(tokens, Tensor):
            if mask is not None:
                raise ValueError(
                    "attention_mask= needs prompts= as token ids, because rows of text have no padding: leave it out"
                )
            tokens = text_tokens(view, tokens, n_sequences=self.n_sequences, sequence_length=self.sequence_length)
        elif mask is None:
            way_out = "give attention_mask=, 1 for real tokens and 0 for padding (all 1 if these ids are text)"
            refuse_padding(view, tokens, way_out)
        packed = packed_rows(view, tokens, mask)
        if int(packed.lengths.min()) < 2:
            row = int(packed.lengths.argmin())
            raise ValueError(
                f"row {row} has {int(packed.lengths[row])} real token, so it predicts none: leave this row out"
            )
        return packed
