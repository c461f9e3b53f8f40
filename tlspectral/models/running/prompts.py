"""Reads prompts in the forms that callers give, as token ids of one tensor. Ids that look padded need a mask."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tlspectral.errors import warn_caller
from tlspectral.models.reading.view import AttentionView, require_causal
from tlspectral.models.running.batches import Note, PackedTokens, TokenMask, even_rows
from tlspectral.models.running.given import FORMS, given_prompts, whole


def packed_prompts(view: AttentionView, prompts: Any) -> PackedTokens:
    """Return the ids of prompts, each from position 0 on, on the CPU, and their lengths.

    Prompts are strings, tokenised as by `model.to_tokens` but never cut; token ids [sequences, pos], or [pos] of one
    prompt; a list of one-dimensional tensors or lists of ids; or a tokenizer's batch with `input_ids` and
    `attention_mask`. Arrays and columns of a table are read by place. Prompts of a ready task, which have `packed`, are
    made for the model. Warnings say what the prompts became that a caller may not expect, see `prompt_notes`.

    Raises:
        ValueError: no prompt, an empty one, one longer than the context, ids that the model does not have, ids that
            look padded and come without a mask, a mask that does not fit, strings without a tokenizer, or prompts of
            lengths between which the model changes its rotary frequencies.
        UnsupportedArchitecture: prompts of unequal length for an encoder.
        TypeError: prompts of no such form.
    """
    packed = read_prompts(view, prompts)
    for note in packed.notes:
        warn_caller(note.message)
    return packed


def read_prompts(view: AttentionView, prompts: Any) -> PackedTokens:
    """Return `packed_prompts` without its warnings, which stand in `notes`. Raises as `packed_prompts`."""
    given = given_prompts(prompts)
    if hasattr(given, "packed"):
        made = given.packed(view)
        return replace(made, tokens=made.tokens.clone(), lengths=made.lengths.clone())
    if isinstance(given, dict) and "attention_mask" in given:
        packed = packed_rows(view, given["input_ids"], given["attention_mask"])
    elif isinstance(given, list):
        packed = _of_list(view, given)
        check_ids(view, packed)
    else:
        tokens = given["input_ids"] if isinstance(given, dict) else given
        packed = packed_rows(view, tokens)
        refuse_padding(
            view, tokens, "give a batch with input_ids and attention_mask, 1 for real tokens and 0 for padding"
        )
    return replace(packed, notes=prompt_notes(view, packed, given))


def packed_rows(view: AttentionView, tokens: Tensor, attention_mask: TokenMask | None = None) -> PackedTokens:
    """Return token ids [sequences, pos], each sequence from position 0 on, on the CPU, and their lengths.

    Without a mask all of them are real. Raises as `packed_prompts`, but not for ids that look padded.
    """
    if tokens.ndim != 2 or not whole(tokens):
        raise TypeError(f"{FORMS}; found a tensor of {tokens.dtype} with shape {tuple(tokens.shape)}")
    packed = even_rows(tokens.cpu()) if attention_mask is None else right_packed(tokens, attention_mask)
    check_ids(view, packed)
    return packed


def _of_list(view: AttentionView, prompts: list[Any]) -> PackedTokens:
    if isinstance(prompts[0], str):
        if getattr(view.model, "tokenizer", None) is None:
            raise ValueError("this model has no tokenizer, so text cannot be read: give token ids, [sequences, pos]")
        # By itself `to_tokens` cuts a prompt at the context, and what is scored would not be what was given.
        rows = [view.model.to_tokens(prompt, truncate=False)[0].cpu().long() for prompt in prompts]
    else:
        rows = prompts
        for index, row in enumerate(rows):
            refuse_padding(view, row, f"that is prompt {index}; give only its real tokens")
    lengths = torch.tensor([len(row) for row in rows])
    if int(lengths.min()) == 0:
        raise ValueError(f"prompt {int(lengths.argmin())} has no token")
    longest = int(lengths.max())
    tokens = torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in rows])
    return PackedTokens(tokens, lengths)


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
    switch = view.reader.frequency_switch(view.model, int(packed.lengths[longest]))
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


# --- what prompts became that a caller may not expect ---


def distinct_rows(sides: Sequence[PackedTokens], answers: Iterable[Any]) -> Int[np.ndarray, "sequences"]:
    """Number the sequences so that those which are equal in tokens on all sides, and in answers, have one number."""
    rows = ([row[:n] for row, n in zip(one.tokens.tolist(), one.lengths.tolist(), strict=True)] for one in sides)
    return numbered(zip(*rows, answers, strict=True))


def numbered(rows: Iterable[Any]) -> Int[np.ndarray, "rows"]:
    """Number rows in the order in which they come, equal ones alike."""
    known: dict[str, int] = {}
    return np.array([known.setdefault(repr(row), len(known)) for row in rows])


def repeated_queries(view: AttentionView, prompts: PackedTokens) -> Bool[Tensor, "sequences pos"]:
    """Return which positions an earlier prompt has with the same tokens up to there, so that a query attends alike.

    In an encoder, which sees later tokens too, those of a prompt that is equal as a whole.
    """
    tokens, real = prompts.tokens.numpy(), prompts.real.numpy()
    repeated, base = np.zeros(tokens.shape, dtype=bool), int(tokens.max()) + 1
    begun = np.zeros(len(tokens), dtype=np.int64)  # numbers the beginnings of prompts
    if not view.causal:
        begun = distinct_rows([prompts], [()] * len(tokens))
    for position in range(tokens.shape[1]):
        rows = np.flatnonzero(real[:, position])
        _, first, begun[rows] = np.unique(
            begun[rows] * base + tokens[rows, position], return_index=True, return_inverse=True
        )
        repeated[rows, position] = True
        repeated[rows[first], position] = False
    return torch.from_numpy(repeated)


def within(view: AttentionView, prompts: PackedTokens, others: PackedTokens) -> Bool[Tensor, "sequences"]:
    """Return which prompts are among others or, where no query sees a later token, are the beginning of one."""
    rows, longer = (
        [tuple(row[:n]) for row, n in zip(one.tokens.tolist(), one.lengths.tolist(), strict=True)]
        for one in (prompts, others)
    )
    beginnings = {
        length: {row[:length] for row in longer if len(row) == length or (view.causal and len(row) > length)}
        for length in {*map(len, rows)}
    }
    return torch.tensor([row in beginnings[len(row)] for row in rows])


def equality_notes(
    distinct: Int[np.ndarray, "sequences"],
    counted: str = "standard errors and p are of the distinct ones, and the mean is over all",
) -> tuple[Note, ...]:
    """Return what is to be said of the numbers of `distinct_rows`: nothing where all differ.

    `counted` says how equal prompts count, at the end of the message.
    """
    n, different = len(distinct), int(distinct.max()) + 1
    if different == n:
        return ()
    first = int(np.flatnonzero(np.bincount(distinct)[distinct] > 1)[0])
    again = int(np.flatnonzero(distinct == distinct[first])[1])
    message = f"of {n} prompts {different} are distinct (prompt {again} is prompt {first} again): {counted}"
    return (Note("distinct_rows", different, message),)


def prompt_notes(view: AttentionView, packed: PackedTokens, given: Any) -> tuple[Note, ...]:
    """Return what packed prompts became, by a look at their first ids and at those that stand for unknown text.

    `given` are the prompts in a form of `given_prompts`. Without a tokenizer nothing is known, and nothing is noted.
    Values are indices of prompts, but of `end_token_in_front`, which is that token.

        start_token_twice   The first two ids are the start token: the text has one, and one is put in front of it.
        end_token_in_front  Text is read with the end token in front, since the tokenizer has no start token.
        unknown_text        Text has a word that the tokenizer does not know, so that another id stands for it.
        empty               Text has no token of its own.
    """
    tokenizer: Any = getattr(view.model, "tokenizer", None)
    if tokenizer is None:
        return ()
    tokens, notes = packed.tokens, []
    texts: list[str] = given if isinstance(given, list) and isinstance(given[0], str) else []
    start, end, unknown = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "unk"))

    def add(name: str, which: Bool[Tensor, "sequences"], what: str) -> None:
        rows = which.nonzero().flatten().tolist()
        if rows:
            notes.append(Note(name, rows, f"{len(rows)} of {len(tokens)} prompts {what}, such as prompt {rows[0]}"))

    if start is not None and tokens.shape[1] > 1:
        twice = (tokens[:, :2] == start).all(1) & (packed.lengths > 1)
        add(
            "start_token_twice",
            twice,
            f"begin with two start tokens {tokenizer.bos_token!r} (leave it out of the text)",
        )
    # TransformerLens gives a tokenizer without a start token its end token for one; what it was made with stays.
    made_with = getattr(tokenizer, "init_kwargs", {})
    if texts and end is not None and made_with.get("bos_token", "") is None and bool((tokens[:, 0] == end).any()):
        notes.append(
            Note(
                "end_token_in_front",
                tokenizer.eos_token,
                f"the tokenizer has no start token, so text is read with its end token {tokenizer.eos_token!r} in "
                "front, as by model.to_tokens: for the text alone, give ids, model.to_tokens(text, prepend_bos=False)",
            )
        )
    if unknown is not None and unknown not in (start, end) and (texts or isinstance(given, dict)):
        add(
            "unknown_text",
            ((tokens == unknown) & packed.real).any(1),
            f"have text that the tokenizer does not know, which it reads as {tokenizer.unk_token!r}",
        )
    if texts:
        few = [length < 3 for length in packed.lengths.tolist()]  # there is room for what is put around text
        without = [
            short and not tokenizer(text, add_special_tokens=False).input_ids
            for short, text in zip(few, texts, strict=True)
        ]
        add("empty", torch.tensor(without), "are empty, so that the model reads only what is put around text")
    return tuple(notes)
