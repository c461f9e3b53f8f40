"""Prompts as a caller gives them, as token ids of one tensor with the length of each prompt."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.models.attention.padding import PackedTokens, refuse_padding, right_packed
from tlspectral.models.attention.view import AttentionView

_FORMS = (
    "prompts are strings, token ids [sequences, pos], a list of one-dimensional tensors or lists of ids, or a "
    "tokenizer's batch with input_ids and attention_mask"
)


def packed_prompts(view: AttentionView, prompts: Any) -> PackedTokens:
    """Return the ids of prompts, each from position 0 on, on the CPU, and their lengths.

    Args:
        view: of the model.
        prompts: strings, tokenised as by `model.to_tokens`; token ids [sequences, pos], or [pos] of one prompt; a list
            of one-dimensional tensors or lists of ids; or a tokenizer's batch with `input_ids` and `attention_mask`.

    Raises:
        ValueError: no prompt, an empty one, one longer than the context, ids that the model does not have, ids that
            look padded and come without a mask, a mask that does not fit, or strings without a tokenizer.
        TypeError: prompts of no such form.
    """
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
    check_ids(view, packed)
    return packed


def even_rows(tokens: Int[Tensor, "sequences pos"]) -> PackedTokens:
    """Return sequences of one length, all of whose tokens are real."""
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
    return even_rows(tokens.cpu())


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


def check_ids(view: AttentionView, packed: PackedTokens) -> None:
    """Refuse prompts that the model cannot read. Raises ValueError."""
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
