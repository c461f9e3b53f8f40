"""Turn prompts in the forms that callers give into one tensor of token ids. Ids that look padded need a mask."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tlspectral.errors import kind_of, not_a, shown, warn_caller
from tlspectral.models.reading.view import AttentionView, require_causal
from tlspectral.models.running.batches import Note, PackedTokens, TokenMask, even_rows
from tlspectral.models.running.given import FORMS, given_prompts, whole


def packed_prompts(view: AttentionView, prompts: Any) -> PackedTokens:
    """Return the token ids of prompts as a `PackedTokens`: each prompt from position 0 on, on the CPU, with its length.

    view: the model, with tokenizer, vocabulary and context. prompts: strings, tokenised as by `model.to_tokens` but
    never cut; token ids [sequences, pos], or [pos] for one prompt; a list of one-dimensional tensors or lists of ids;
    or a tokenizer's batch with `input_ids` and `attention_mask`. Arrays and columns of a table are read in order,
    without their labels. An object with a method `packed` (a task) makes its prompts for the model. Warnings report
    properties that a caller may not expect, such as two start tokens.

    Raises:
        ValueError: no prompt; an empty prompt; a prompt longer than the context; ids outside the vocabulary; ids that
            look padded but have no mask; a mask that does not fit; strings without a tokenizer; or lengths between
            which the model changes its rotary frequencies.
        UnsupportedArchitecture: prompts of unequal length for an encoder.
        TypeError: prompts in another form.
    """
    packed = read_prompts(view, prompts)
    for note in packed.notes:
        warn_caller(note.message)
    return packed


def read_prompts(view: AttentionView, prompts: Any) -> PackedTokens:
    """Return the token ids of prompts as a `PackedTokens`, without warnings; the texts of the warnings are in its
    `notes`.

    view: the model. prompts: strings, token ids, or a tokenizer's batch, in any form that `packed_prompts` takes.
    Raises ValueError or TypeError for prompts that cannot be read, UnsupportedArchitecture for an encoder with prompts
    of unequal length.
    """
    copied = given_prompts(prompts)
    if hasattr(copied, "packed"):
        made = copied.packed(view)
        return replace(made, tokens=made.tokens.clone(), lengths=made.lengths.clone())
    if isinstance(copied, dict) and "attention_mask" in copied:
        packed = packed_rows(view, copied["input_ids"], copied["attention_mask"])
    elif isinstance(copied, list):
        packed = _of_list(view, copied)
        check_ids(view, packed)
    else:
        tokens = copied["input_ids"] if isinstance(copied, dict) else copied
        packed = packed_rows(view, tokens)
        refuse_padding(
            view, tokens, "give a batch with input_ids and attention_mask, 1 for real tokens and 0 for padding"
        )
    return replace(packed, notes=prompt_notes(view, packed, copied))


def packed_rows(view: AttentionView, tokens: Tensor, attention_mask: TokenMask | None = None) -> PackedTokens:
    """Return token ids [sequences, pos] as a `PackedTokens`: each sequence from position 0 on, on the CPU.

    view: the model. attention_mask: 1 for real tokens, 0 for padding; None: all are real. Raises ValueError for a mask
    that does not fit, or for prompts that the model cannot read; TypeError for a tensor of another shape or type. Ids
    that look padded are allowed.
    """
    if tokens.ndim != 2 or not whole(tokens):
        raise TypeError(f"{FORMS}; found a tensor of {tokens.dtype} with shape {tuple(tokens.shape)}")
    packed = even_rows(tokens.cpu()) if attention_mask is None else right_packed(tokens, attention_mask)
    check_ids(view, packed)
    return packed


def _of_list(view: AttentionView, prompts: list[Any]) -> PackedTokens:
    """Return `prompts`, a list of texts or of tensors of ids, as a `PackedTokens`.

    view: the model, with the tokenizer. Raises ValueError for a prompt without tokens, ids that look padded, or texts
    for a model without a tokenizer.
    """
    if isinstance(prompts[0], str):
        if all(kind_of(prompt) in ("a head", "a receiver", "a part") for prompt in prompts):
            named = prompts[0] if len(prompts) == 1 else prompts
            raise ValueError(f"{not_a(named, 'a prompt')}: give text, or token ids [sequences, pos]")
        if getattr(view.model, "tokenizer", None) is None:
            raise ValueError("this model has no tokenizer, so text cannot be read: give token ids, [sequences, pos]")
        # By default `to_tokens` cuts a prompt at the context, so another text than the given one would be scored.
        rows = [view.model.to_tokens(prompt, truncate=False)[0].cpu().long() for prompt in prompts]
    else:
        rows = prompts
        for index, row in enumerate(rows):
            refuse_padding(view, row, f"that is prompt {index}; give only its real tokens")
    lengths = torch.tensor([len(row) for row in rows])
    if int(lengths.min()) == 0:
        raise ValueError(f"prompt {int(lengths.argmin())} has no token: leave it out, or give it text or ids")
    longest = int(lengths.max())
    tokens = torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in rows])
    return PackedTokens(tokens, lengths)


def check_ids(view: AttentionView, packed: PackedTokens) -> None:
    """Raise ValueError if the model in `view` cannot read the prompts `packed`, UnsupportedArchitecture for an encoder
    with padding.

    Not readable: no prompts, a prompt longer than the context, or ids outside the vocabulary. Prompts of unequal length
    run together; they are refused if a run at the longest length would rotate a shorter prompt differently.
    """
    tokens = packed.tokens
    if len(tokens) == 0 or tokens.shape[1] == 0:
        raise ValueError("there are no prompts: give at least one prompt with at least one token")
    if packed.padded:
        require_causal(view, "it would also read the padding of shorter prompts; give prompts of one length")
    if tokens.shape[1] > view.n_ctx:
        long = int(packed.lengths.argmax())
        raise ValueError(
            f"prompt {long} has {tokens.shape[1]} tokens, and the model's context is {view.n_ctx}: give shorter prompts"
        )
    require_vocabulary(view.d_vocab, tokens)
    if packed.padded:
        _require_one_rotation(view, packed)


def _require_one_rotation(view: AttentionView, packed: PackedTokens) -> None:
    """Raise ValueError if the rotary frequencies for the longest prompt in `packed` differ from those that a shorter
    prompt has alone.

    view: the model.
    """
    longest = int(packed.lengths.argmax())
    switch = view.reader.frequency_switch(view.model, int(packed.lengths[longest]))
    shorter = [] if switch is None else (packed.lengths <= switch).nonzero().flatten().tolist()
    if shorter:
        short = shorter[0]
        raise ValueError(
            f"prompt {short} has {int(packed.lengths[short])} tokens and prompt {longest} has "
            f"{int(packed.lengths[longest])}: past {switch} tokens this model uses other rotary frequencies (LongRoPE, "
            f"dynamic NTK), so in one run prompt {short} would not score as it does alone; give prompts of one length, "
            f"or prompts up to {switch} tokens and longer ones in separate calls"
        )


def require_vocabulary(d_vocab: int, ids: Int[Tensor, "*ids"]) -> None:
    """Raise ValueError if some of these token ids are outside a vocabulary of `d_vocab` tokens."""
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= d_vocab:
        raise ValueError(
            f"token ids are 0 to {d_vocab - 1}; found {least if least == most else f'{least} to {most}'}: use this "
            "model's tokenizer"
        )


def right_packed(tokens: Int[Tensor, "sequences pos"], attention_mask: TokenMask) -> PackedTokens:
    """Return ids as a `PackedTokens`: real tokens of each row moved to the left, columns of padding cut off.

    attention_mask: 1 for real tokens, 0 for padding. The rest of a row is filled with its last real token, which no
    model takes for padding. A decoder needs no mask for such rows, because no real token attends to later ones; for an
    encoder `check_ids` refuses them. Raises ValueError for a mask that does not fit.
    """
    if not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"attention_mask= must be a tensor of 1 and 0 with the shape of the ids; found {shown(attention_mask)}"
        )
    mask = attention_mask.cpu()
    if mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and tokens {tuple(tokens.shape)}: give one number per token"
        )
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            f"attention_mask: give 1 for real tokens and 0 for padding; found {mask.unique().tolist()}"[:200]
        )
    real = mask.bool()
    lengths = real.sum(1)
    first = real.long().argmax(1)
    positions = torch.arange(tokens.shape[1])
    contiguous = (positions >= first[:, None]) & (positions < (first + lengths)[:, None])
    for row in range(len(tokens)):
        if int(lengths[row]) == 0:
            raise ValueError(f"attention_mask marks no real token in row {row}: leave the row out, or mark its tokens")
        if not torch.equal(real[row], contiguous[row]):
            raise ValueError(
                f"attention_mask has padding between the real tokens of row {row}: leave it out of the row"
            )
    longest = int(lengths.max()) if len(tokens) else tokens.shape[1]
    source_positions = first[:, None] + torch.minimum(torch.arange(longest), lengths[:, None] - 1)
    return PackedTokens(tokens.cpu().gather(1, source_positions), lengths)


def refuse_padding(view: AttentionView, tokens: Int[Tensor, "*batch pos"], way_out: str) -> None:
    """Raise ValueError for token ids `tokens` that look padded. way_out: advice, the end of the message.

    A row looks padded if it begins or ends with the padding id of the tokenizer of the model in `view`. One such id at
    the beginning is allowed if it is also BOS or EOS, with which models open sequences. Without a tokenizer nothing is
    refused.
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
    """Return a number for each sequence; equal sequences (tokens of all sides, and answers) have the same number.

    sides: the prompts, and their counterfactuals if there are any. answers: one per sequence.
    """
    rows = (
        [row[:n] for row, n in zip(prompts.tokens.tolist(), prompts.lengths.tolist(), strict=True)] for prompts in sides
    )
    return numbered(zip(*rows, answers, strict=True))


def numbered(rows: Iterable[Any]) -> Int[np.ndarray, "rows"]:
    """Return a number for each row, counted in order of first appearance; equal rows have the same number."""
    known: dict[str, int] = {}
    return np.array([known.setdefault(repr(row), len(known)) for row in rows])


def repeated_queries(view: AttentionView, prompts: PackedTokens) -> Bool[Tensor, "sequences pos"]:
    """Return a bool mask [sequences, pos]: True at positions up to which an earlier one of `prompts` has the same
    tokens from its start.

    A query attends there as in the earlier prompt. In an encoder, which also sees later tokens, the whole prompt has to
    be equal. view: the model.
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
    """Return a bool for each of `prompts`: True if it is in `others`, or (if the model in `view` is a decoder) begins
    one of them.
    """
    rows, longer = (
        [
            tuple(row[:n])
            for row, n in zip(prompts_of_side.tokens.tolist(), prompts_of_side.lengths.tolist(), strict=True)
        ]
        for prompts_of_side in (prompts, others)
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
    """Return a tuple with a `Note` that some prompts are equal; an empty tuple if all are distinct.

    distinct: a number per prompt, equal for equal prompts, as `distinct_rows` returns it. counted: how equal prompts
    count, the end of the message.
    """
    n, different = len(distinct), int(distinct.max()) + 1
    if different == n:
        return ()
    first = int(np.flatnonzero(np.bincount(distinct)[distinct] > 1)[0])
    again = int(np.flatnonzero(distinct == distinct[first])[1])
    message = f"of {n} prompts {different} are distinct (prompt {again} is prompt {first} again): {counted}"
    return (Note("distinct_rows", different, message),)


def prompt_notes(view: AttentionView, packed: PackedTokens, given: Any) -> tuple[Note, ...]:
    """Return a tuple of `Note` (`.name`, `.value`, `.message`) on properties of prompts that a caller may not expect,
    judged by their ids.

    view: the model, with the tokenizer; without a tokenizer no notes are made. packed: the prompts as ids. given: the
    prompts in a form of `given_prompts`, such as a list of texts. A note's value is a list of prompt indices; the value
    of `end_token_in_front` is that token.

        start_token_twice   The first two ids are the start token: it is in the text and was also added.
        end_token_in_front  Text gets the end token in front, because the tokenizer has no start token.
        unknown_text        Text has a word that the tokenizer does not know and replaces by an unknown token.
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
    # TransformerLens sets a missing start token to the end token. `init_kwargs` still shows that it was missing.
    made_with = getattr(tokenizer, "init_kwargs", {})
    if texts and end is not None and made_with.get("bos_token", "") is None and bool((tokens[:, 0] == end).any()):
        notes.append(
            Note(
                "end_token_in_front",
                tokenizer.eos_token,
                f"the tokenizer has no start token, so its end token {tokenizer.eos_token!r} is put in front of text, "
                "as model.to_tokens does: for text without it give model.to_tokens(text, prepend_bos=False)",
            )
        )
    if unknown is not None and unknown not in (start, end) and (texts or isinstance(given, dict)):
        add(
            "unknown_text",
            ((tokens == unknown) & packed.real).any(1),
            f"have text that the tokenizer does not know, which it reads as {tokenizer.unk_token!r}",
        )
    if texts:
        few = [length < 3 for length in packed.lengths.tolist()]  # such a prompt may hold only added tokens
        without = [
            short and not tokenizer(text, add_special_tokens=False).input_ids
            for short, text in zip(few, texts, strict=True)
        ]
        add("empty", torch.tensor(without), "are empty, so the model reads only the tokens that are put around text")
    return tuple(notes)
