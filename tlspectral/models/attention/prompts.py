"""Reads prompts in the forms that callers give, as token ids of one tensor. Ids that look padded need a mask."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.models.attention.causality import require_causal
from tlspectral.models.attention.padding import PackedTokens, TokenMask, even_rows
from tlspectral.models.attention.view import AttentionView

_FORMS = (
    "prompts are strings, token ids [sequences, pos], a list of one-dimensional tensors or lists of ids, or a "
    "tokenizer's batch with input_ids and attention_mask"
)


def packed_prompts(view: AttentionView, prompts: Any) -> PackedTokens:
    """Return the ids of prompts, each from position 0 on, on the CPU, and their lengths.

    Prompts are strings, tokenised as by `model.to_tokens` but never cut; token ids [sequences, pos], or [pos] of one
    prompt; a list of one-dimensional tensors or lists of ids; or a tokenizer's batch with `input_ids` and
    `attention_mask`. Those of a ready task, which have `packed`, are made for the model.

    Raises:
        ValueError: no prompt, an empty one, one longer than the context, ids that the model does not have, ids that
            look padded and come without a mask, a mask that does not fit, strings without a tokenizer, or prompts of
            lengths between which the model changes its rotary frequencies.
        UnsupportedArchitecture: prompts of unequal length for an encoder.
        TypeError: prompts of no such form.
    """
    if hasattr(prompts, "packed"):
        return prompts.packed(view)
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise TypeError(f"{_FORMS}; found a mapping with {', '.join(map(str, prompts)) or 'nothing'}")
        tokens, mask = torch.as_tensor(prompts["input_ids"]), prompts.get("attention_mask")
        if mask is not None:
            return packed_rows(view, tokens, torch.as_tensor(mask))
    elif isinstance(prompts, Tensor | np.ndarray):
        tokens = torch.as_tensor(prompts)
    elif isinstance(prompts, Sequence) and len(prompts):
        packed = _of_list(view, prompts)
        check_ids(view, packed)
        return packed
    else:
        raise TypeError(f"{_FORMS}; found {_described(prompts)}")
    packed = packed_rows(view, tokens[None] if tokens.ndim == 1 else tokens)
    refuse_padding(view, tokens, "give a batch with input_ids and attention_mask, 1 for real tokens and 0 for padding")
    return packed


def packed_rows(view: AttentionView, tokens: Tensor, attention_mask: TokenMask | None = None) -> PackedTokens:
    """Return token ids [sequences, pos], each sequence from position 0 on, on the CPU, and their lengths.

    Without a mask all of them are real. Raises as `packed_prompts`, but not for ids that look padded.
    """
    if tokens.ndim != 2 or not _whole(tokens):
        raise TypeError(f"{_FORMS}; found a tensor of {tokens.dtype} with shape {tuple(tokens.shape)}")
    packed = even_rows(tokens.cpu()) if attention_mask is None else right_packed(tokens, attention_mask)
    check_ids(view, packed)
    return packed


def _of_list(view: AttentionView, prompts: Sequence[Any]) -> PackedTokens:
    if all(isinstance(prompt, str) for prompt in prompts):
        if getattr(view.model, "tokenizer", None) is None:
            raise ValueError("this model has no tokenizer, so text cannot be read: give token ids, [sequences, pos]")
        # By itself `to_tokens` cuts a prompt at the context, and what is scored would not be what was given.
        rows = [view.model.to_tokens(prompt, truncate=False)[0].cpu().long() for prompt in prompts]
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
    """Refuse prompts that the model cannot read: ValueError; UnsupportedArchitecture for an encoder's padding.

    Prompts of unequal length run together, so those that a run of the longest would read in another way are refused.
    """
    tokens = packed.tokens
    if len(tokens) == 0 or tokens.shape[1] == 0:
        raise ValueError("there are no prompts")
    if packed.padded:
        require_causal(view, "it would read what fills up shorter prompts; give prompts of one length")
    if tokens.shape[1] > view.n_ctx:
        long = int(packed.lengths.argmax())
        raise ValueError(
            f"prompt {long} has {tokens.shape[1]} tokens, and the model's context is {view.n_ctx}: give shorter prompts"
        )
    require_vocabulary(view.d_vocab, tokens)
    if packed.padded:
        _require_one_rotation(view, packed)


def _require_one_rotation(view: AttentionView, packed: PackedTokens) -> None:
    """Refuse prompts that rotary frequencies of the longest would rotate in another way than alone. ValueError."""
    longest = int(packed.lengths.argmax())
    switch = view.frequency_switch(int(packed.lengths[longest]))
    shorter = [] if switch is None else (packed.lengths <= switch).nonzero().flatten().tolist()
    if shorter:
        short = shorter[0]
        raise ValueError(
            f"prompt {short} has {int(packed.lengths[short])} tokens and prompt {longest} has "
            f"{int(packed.lengths[longest])}: rotary frequencies of this model depend on the length of a run, and are "
            f"others past {switch} tokens (LongRoPE, dynamic NTK), so that in one run prompt {short} would not score "
            "as it does alone; give prompts of one length, or those on each side of the switch by themselves"
        )


def require_vocabulary(d_vocab: int, ids: Int[Tensor, "*ids"]) -> None:
    """Refuse token ids that a vocabulary of this size does not have. Raises ValueError."""
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= d_vocab:
        raise ValueError(f"token ids are 0 to {d_vocab - 1}; found {least if least == most else f'{least} to {most}'}")


def _whole(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype is torch.bool)


def _described(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:80]


def right_packed(tokens: Int[Tensor, "sequences pos"], attention_mask: TokenMask) -> PackedTokens:
    """Move the real tokens of each row to the left and cut columns that are padding in all rows.

    A decoder needs no mask for such a row, since no real token attends to what follows it; for an encoder `check_ids`
    refuses it. The rows are filled with their last real token, which no model takes for padding. Raises ValueError for
    a mask that does not fit.
    """
    mask = attention_mask.cpu()
    if mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and tokens {tuple(tokens.shape)}: give one each"
        )
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"attention_mask is 1 for real tokens and 0 for padding; found {mask.unique().tolist()}")
    real = mask.bool()
    lengths = real.sum(1)
    first = real.long().argmax(1)
    positions = torch.arange(tokens.shape[1])
    contiguous = (positions >= first[:, None]) & (positions < (first + lengths)[:, None])
    for row in range(len(tokens)):
        if int(lengths[row]) == 0:
            raise ValueError(f"attention_mask marks no real token in row {row}")
        if not torch.equal(real[row], contiguous[row]):
            raise ValueError(
                f"attention_mask has padding between the real tokens of row {row}: leave it out of the row"
            )
    longest = int(lengths.max()) if len(tokens) else tokens.shape[1]
    source_positions = first[:, None] + torch.minimum(torch.arange(longest), lengths[:, None] - 1)
    return PackedTokens(tokens.cpu().gather(1, source_positions), lengths)


def refuse_padding(view: AttentionView, tokens: Int[Tensor, "*batch pos"], way_out: str) -> None:
    """Refuse token ids that look padded. Without a tokenizer nothing is known of padding, and nothing is refused.

    A row looks padded if it begins or ends with the tokenizer's padding id. One such id at the beginning is allowed
    where the model opens sequences with it (padding id = BOS or EOS). Raises ValueError, which ends with `way_out`.
    """
    tokenizer = getattr(view.model, "tokenizer", None)
    pad: Any = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return
    opening = [getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")]
    allowed = 1 if pad in opening else 0
    padded = torch.atleast_2d(tokens.cpu()).flatten(0, -2) == pad
    leading, trailing = (side.long().cumprod(1).sum(1) for side in (padded, padded.flip(1)))
    wrong = ((leading > allowed) | (trailing > 0)).nonzero().flatten().tolist()
    if not wrong:
        return
    row = wrong[0]
    side = f"begins with {int(leading[row])}" if int(leading[row]) > allowed else f"ends with {int(trailing[row])}"
    raise ValueError(
        f"row {row} of the tokens {side} of the padding id {pad} ({len(wrong)} of {len(padded)} rows are like "
        f"this), and padding would be measured like text: {way_out}"
    )
