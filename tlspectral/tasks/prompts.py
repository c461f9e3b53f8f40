"""Prompts of the ready tasks: repeated random segments, and rows of text, which comes with the package or is given."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.detectors import repeated_sequences
from tlspectral.detectors.sequences import segment_length_of
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.padding import PackedTokens, TokenMask, even_rows
from tlspectral.models.attention.prompts import check_ids, refuse_padding, right_packed

_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")
_ROWS_READ = 2_000


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


def packaged_text() -> str:
    """*Alice's Adventures in Wonderland* (Carroll, 1865), 143 kB, in the public domain; see `data/text/NOTICE.md`.

    Models have read it in training, so a loss on it is no held-out loss.
    """
    return (files("tlspectral") / "data" / "text" / "alice.txt").read_text(encoding="utf-8")


def text_tokens(
    view: AttentionView, text: str | Sequence[str] | None, *, n_sequences: int, sequence_length: int
) -> Int[Tensor, "sequences pos"]:
    """Text as rows of tokens, each opened by BOS (else EOS, else 0), documents separated by EOS.

    Rows are cut one after the other from the joined documents, `n_sequences` at most. An incomplete last row is
    dropped, unless it is the only one.

    Args:
        view: of a model that has a tokenizer.
        text: a document, several, the name of a data set (one word without spaces, as `NeelNanda/pile-10k`: the column
            `text` of its split `train` is streamed), or None for `packaged_text`.
        n_sequences: rows at most.
        sequence_length: tokens in a row, BOS included, at most the context.

    Raises:
        ValueError: the model has no tokenizer, the text has no token, or it is no text.
        ImportError: a data set is named and `datasets` is not installed.
    """
    tokenizer = getattr(view.model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer, so text cannot be read: pass token ids, [sequences, pos]")
    documents = _documents(text)
    width = min(sequence_length, view.n_ctx) - 1
    if width < 1 or n_sequences < 1:
        raise ValueError(f"found {n_sequences} sequences of {width + 1} tokens: at least one of two tokens is needed")
    separator = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    ids: list[int] = []
    for document in documents:
        ids += (separator if ids else []) + list(tokenizer(document, add_special_tokens=False, verbose=False).input_ids)
        if len(ids) >= n_sequences * width:
            break
    if not ids:
        raise ValueError("the text has no token")
    rows = max(1, min(n_sequences, len(ids) // width))
    body = torch.tensor(ids[: rows * width]).view(rows, -1)
    return torch.cat([torch.full((rows, 1), view.start_token), body], dim=1)


def _documents(text: Any) -> Iterable[str]:
    if text is None:
        return [packaged_text()]
    if not isinstance(text, str):
        # A tokenizer returns a mapping, whose keys would be read as documents.
        documents: list[Any] = [text] if isinstance(text, Mapping) else list(text)
        strange = [type(document).__name__ for document in documents if not isinstance(document, str)]
        if strange:
            raise ValueError(
                f"text is a string or a list of strings; found {strange[0]}. Give token ids as a tensor "
                "[sequences, pos], with attention_mask= where they are padded"
            )
        return documents
    return _dataset(text) if _DATASET.fullmatch(text) else [text]


def _dataset(name: str) -> Iterable[str]:
    from datasets import load_dataset

    return [row["text"] for row in islice(load_dataset(name, split="train", streaming=True), _ROWS_READ)]
