"""Prompts as a caller gives them, as token ids of one tensor with the length of each prompt."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.detectors import repeated_sequences
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.padding import PackedTokens, TokenMask, refuse_padding, right_packed
from tlspectral.tasks.text import text_tokens

_FORMS = (
    "prompts are strings, token ids [sequences, pos], a list of one-dimensional tensors or lists of ids, or a "
    "tokenizer's batch with input_ids and attention_mask"
)


def packed_prompts(view: AttentionView, prompts: Any) -> PackedTokens:
    """Return the ids of prompts, each from position 0 on, on the CPU, and their lengths.

    Args:
        view: of the model.
        prompts: see `Task`.

    Raises:
        ValueError: no prompt, an empty one, one longer than the context, ids that the model does not have, ids that
            look padded and come without a mask, a mask that does not fit, or strings without a tokenizer.
        TypeError: prompts of no such form.
    """
    if isinstance(prompts, RepeatedSegments | TextRows):
        return prompts.packed(view)
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping):
        packed = _of_batch(view, prompts)
    elif isinstance(prompts, Tensor | np.ndarray):
        packed = _of_rows(view, torch.as_tensor(prompts))
    elif isinstance(prompts, Sequence) and len(prompts):
        packed = _of_list(view, prompts)
    else:
        raise TypeError(f"{_FORMS}; found {_described(prompts)}")
    _check_ids(view, packed)
    return packed


@dataclass(frozen=True, eq=False)
class RepeatedSegments:
    """Repeated random segments `[BOS, r, r]`, drawn as by `detect_heads`, or given as `tokens`."""

    n_sequences: int
    segment_length: int
    tokens: Tensor | None
    seed: int

    def packed(self, view: AttentionView) -> PackedTokens:
        """Return the sequences.

        Raises:
            ValueError: `tokens` that are no repeated sequences, or no room for two tokens in a segment.
        """
        tokens = self.tokens
        if tokens is None:
            tokens = repeated_sequences(view, self.n_sequences, self.segment_length, seed=self.seed)
        tokens = tokens.cpu()
        length = (tokens.shape[1] - 1) // 2
        fits = tokens.shape[1] == 1 + 2 * length and length >= 2 and len(tokens) > 0
        if not fits or not torch.equal(tokens[:, 1 : 1 + length], tokens[:, 1 + length :]):
            refuse_padding(view, tokens, "sequences [BOS, r, r] have none")
            raise ValueError(
                "tokens of the induction task are sequences [BOS, r, r]: one token, a segment of two or more tokens "
                f"and the same segment again; found shape {tuple(tokens.shape)}"
            )
        return _even(tokens)


@dataclass(frozen=True, eq=False)
class TextRows:
    """Rows of text, or token ids with their mask, of which every position predicts its next token."""

    tokens_or_text: Any
    attention_mask: TokenMask | None
    n_sequences: int
    sequence_length: int

    def packed(self, view: AttentionView) -> PackedTokens:
        """Return the rows.

        Raises:
            ValueError: as `language_loss`.
        """
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
            packed = None if tokens.ndim != 2 else _even(tokens.cpu())
        elif mask is not None:
            raise ValueError(
                "attention_mask says which token ids are padding, and rows of text have none: leave it out"
            )
        else:
            width = self.sequence_length
            packed = _even(text_tokens(view, tokens, n_sequences=self.n_sequences, sequence_length=width))
        shape = tuple(tokens.shape) if packed is None else tuple(packed.tokens.shape)
        if packed is None or shape[0] == 0 or not 2 <= shape[1] <= view.n_ctx:
            raise ValueError(
                f"tokens are [sequences, pos] with 2 to {view.n_ctx} positions (the context); found {shape}"
            )
        _check_ids(view, packed)
        return packed


def _even(tokens: Int[Tensor, "sequences pos"]) -> PackedTokens:
    return PackedTokens(tokens.long(), torch.full((len(tokens),), tokens.shape[1]))


def _of_batch(view: AttentionView, batch: Mapping[str, Any]) -> PackedTokens:
    if "input_ids" not in batch:
        raise TypeError(f"{_FORMS}; found a mapping with {', '.join(map(str, batch)) or 'nothing'}")
    tokens = torch.as_tensor(batch["input_ids"])
    mask = batch.get("attention_mask")
    return _of_rows(view, tokens) if mask is None else right_packed(tokens, torch.as_tensor(mask))


def _of_rows(view: AttentionView, tokens: Tensor) -> PackedTokens:
    if tokens.ndim == 1:
        tokens = tokens[None]
    if tokens.ndim != 2 or not _whole(tokens):
        raise TypeError(f"{_FORMS}; found a tensor of {tokens.dtype} with shape {tuple(tokens.shape)}")
    refuse_padding(view, tokens, "give a batch with input_ids and attention_mask, 1 for real tokens and 0 for padding")
    return _even(tokens.cpu())


def _of_list(view: AttentionView, prompts: Sequence[Any]) -> PackedTokens:
    if all(isinstance(prompt, str) for prompt in prompts):
        rows = [_tokenised(view, prompt) for prompt in prompts]
    else:
        rows = [_row(prompt) for prompt in prompts]
        for index, row in enumerate(rows):
            refuse_padding(view, row, f"that is prompt {index}; give only its real tokens")
    lengths = torch.tensor([len(row) for row in rows])
    if int(lengths.min()) == 0:
        raise ValueError(f"prompt {int(lengths.argmin())} has no token")
    longest = int(lengths.max())
    tokens = torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in rows])
    return PackedTokens(tokens, lengths)


def _tokenised(view: AttentionView, prompt: str) -> Int[Tensor, "pos"]:
    if getattr(view.model, "tokenizer", None) is None:
        raise ValueError("this model has no tokenizer, so text cannot be read: give token ids, [sequences, pos]")
    return view.model.to_tokens(prompt)[0].cpu().long()


def _row(prompt: Any) -> Int[Tensor, "pos"]:
    if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable):
        raise TypeError(f"{_FORMS}; found {_described(prompt)} in the list")
    row = torch.as_tensor(prompt)
    if row.ndim == 2 and len(row) == 1:
        row = row[0]
    if row.ndim != 1 or not (_whole(row) or row.numel() == 0):
        raise TypeError(f"{_FORMS}; found {_described(prompt)} in the list")
    return row.cpu().long()


def _check_ids(view: AttentionView, packed: PackedTokens) -> None:
    tokens = packed.tokens
    if len(tokens) == 0 or tokens.shape[1] == 0:
        raise ValueError("there are no prompts")
    if tokens.shape[1] > view.n_ctx:
        long = int(packed.lengths.argmax())
        raise ValueError(f"prompt {long} has {tokens.shape[1]} tokens, and the model's context is {view.n_ctx}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= view.d_vocab:
        raise ValueError(f"token ids are 0 to {view.d_vocab - 1}; found {int(tokens.min())} to {int(tokens.max())}")


def _whole(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype is torch.bool)


def _described(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:80]
