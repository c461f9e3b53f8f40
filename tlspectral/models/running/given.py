"""Copy prompts and numbers from the containers of callers; later changes of the caller's objects have no effect."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.containers import plain
from tlspectral.errors import kind_of, not_a, shown

FORMS = (
    "prompts are strings, token ids [sequences, pos], a list of one-dimensional tensors or lists of ids, or a "
    "tokenizer's batch with input_ids and attention_mask"
)

_NOT_PROMPTS = ("a model", "a task", "a part", "a function", "the value of a task", "a dictionary of features")


def numbers(given: Any) -> Tensor:
    """Return the numbers in any container as a new tensor on the CPU, in their order; labels are ignored.

    given: a tensor on any device, an array, a pandas Series or Index, or lists of these.

    >>> import pandas as pd
    >>> numbers(pd.Series([7, 5], index=[1, 0])).tolist()
    [7, 5]

    Raises TypeError for a value that is not a number, ValueError for rows of unequal length.
    """
    if isinstance(given, Tensor):
        return given.detach().cpu().clone()
    if hasattr(given, "__array__"):  # of numpy, and of pandas, whose own indexing is by label
        array = np.asarray(given)
        given = array.tolist() if array.dtype.kind == "O" else array
    if _listed(given):
        given = list(given)
        if any(isinstance(item, Iterable) for item in given):
            rows = [numbers(item) for item in given]
            if len({row.shape for row in rows}) > 1:
                shapes = sorted({tuple(row.shape) for row in rows})
                raise ValueError(f"found rows of shapes {shapes}: give rows of one length"[:200])
            return torch.stack(rows)
    array = given if isinstance(given, np.ndarray) else np.array(plain(given))
    if array.dtype.kind not in "biufc":
        raise TypeError(f"found {described(given)}, where numbers are expected: give a tensor, an array or a list")
    return torch.from_numpy(array.astype(np.int64) if array.dtype.kind in "iu" else array.copy())


def given_prompts(prompts: Any) -> Any:
    """Copy prompts into one of four forms and return the copy; later changes of the argument have no effect.

    The forms: a list of strings; a list of one-dimensional tensors; token ids [sequences, pos]; a dict with `input_ids`
    and, if it was given, `attention_mask`, each [sequences, pos]. A string is one prompt. An object with a method
    `packed` (a task), which makes prompts once the model is known, is returned unchanged.

    Raises TypeError for prompts in another form; ValueError for a mask whose lengths differ from its ids.
    """
    if hasattr(prompts, "packed"):
        return prompts
    if kind_of(prompts) in _NOT_PROMPTS or _names_heads(prompts):
        raise TypeError(f"{not_a(prompts, 'prompts')}: {FORMS}")
    if isinstance(prompts, str):
        return [str(prompts)]
    if isinstance(prompts, Mapping):
        return _batch(prompts)
    if isinstance(prompts, Tensor) or (hasattr(prompts, "__array__") and np.asarray(prompts).dtype.kind in "biufc"):
        return _rows(numbers(prompts))
    listed = list(np.asarray(prompts)) if hasattr(prompts, "__array__") and np.ndim(prompts) else prompts
    listed = list(listed) if _listed(listed) else []
    if not listed:
        raise TypeError(f"{FORMS}; found {described(prompts)}")
    if isinstance(listed[0], str):
        strange = [index for index, prompt in enumerate(listed) if not isinstance(prompt, str)]
        if strange:
            raise TypeError(f"{FORMS}; found {described(listed[strange[0]])} in the list, prompt {strange[0]}")
        return [str(prompt) for prompt in listed]
    return [_row(prompt, index) for index, prompt in enumerate(listed)]


def _names_heads(prompts: Any) -> bool:
    """Return True if `prompts` is a table with columns `layer` and `head`: they would pass for token ids."""
    columns = getattr(prompts, "columns", None)
    return columns is not None and not callable(columns) and {"layer", "head"} <= {*map(str, columns)}


def n_prompts_of(prompts: Any) -> int | None:
    """Return the number of prompts in `prompts`; None if only the model determines it (a task).

    prompts: in a form of `given_prompts`: a list, a tensor of ids, or a tokenizer's batch.
    """
    listed = prompts["input_ids"] if isinstance(prompts, dict) else prompts
    return len(listed) if hasattr(listed, "__len__") else None


def chosen_prompts(prompts: Any, rows: list[int]) -> Any:
    """Return the prompts at the indices `rows`, in the form in which `prompts` is; `prompts` stays unchanged.

    prompts: in a form of `given_prompts`: a list, a tensor of ids, or a tokenizer's batch.
    """
    if isinstance(prompts, dict):
        return {name: values[rows] for name, values in prompts.items()}
    return prompts[rows] if isinstance(prompts, Tensor) else [prompts[row] for row in rows]


def _row(prompt: Any, index: int) -> Int[Tensor, "pos"]:
    """Return one prompt's token ids as a tensor [pos].

    prompt: ids in any container. index: number of the prompt, for the TypeError that is raised if it is not a list of
    ids.
    """
    try:
        row = numbers(prompt)
    except (TypeError, ValueError):
        row = None
    if row is not None and row.ndim == 2 and len(row) == 1:
        row = row[0]
    if row is None or row.ndim != 1 or not (whole(row) or row.numel() == 0):
        raise TypeError(f"{FORMS}; found {described(prompt)} in the list, prompt {index}")
    return row.long()


def _batch(batch: Mapping[str, Any]) -> Any:
    """Return a tokenizer's batch as a dict of tensors: "input_ids" and, if it was given, "attention_mask".

    Lists of unequal length are padded at the end; without a mask they are returned as a list of tensors. Raises
    TypeError without `input_ids`, ValueError for a mask whose lengths differ from its ids.
    """
    if "input_ids" not in batch:
        raise TypeError(f"{FORMS}; found a mapping with {', '.join(map(str, batch))[:80] or 'nothing'}")
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    try:
        tensors = {"input_ids": numbers(ids)} | ({} if mask is None else {"attention_mask": numbers(mask)})
    except ValueError:  # lists of unequal length
        rows = [_row(row, index) for index, row in enumerate(ids)]
        if mask is None:
            return rows
        masks = [numbers(row).long() for row in mask]
        if [len(row) for row in rows] != [len(row) for row in masks]:
            raise ValueError(
                "attention_mask has rows of other lengths than input_ids: give one number per id"
            ) from None
        columns = {"input_ids": rows, "attention_mask": masks}
        return {
            name: torch.nn.utils.rnn.pad_sequence(rows_of_ids, batch_first=True)
            for name, rows_of_ids in columns.items()
        }
    except TypeError as error:
        raise TypeError(f"{FORMS}; input_ids and attention_mask: {error}") from error
    return {name: _rows(values) for name, values in tensors.items()}


def _rows(values: Tensor) -> Tensor:
    """Return the tensor `values` as rows: one axis becomes one row of two axes, and more axes stay unchanged.

    Raises TypeError for a tensor of one number.
    """
    if values.ndim == 0:
        raise TypeError(f"{FORMS}; found one number, {values.item()}")
    return values[None] if values.ndim == 1 else values


def whole(values: Tensor) -> bool:
    """Return True if the tensor `values` has an integer type."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype is torch.bool)


def described(value: Any) -> str:
    """Return the type and the beginning of `value` as one text, for a message."""
    return f"{type(value).__name__} {shown(value, 80)}"


def _listed(given: Any) -> bool:
    """Return True if `given` is a container such as a list, not text, an array, a tensor, a mapping or a set."""
    return isinstance(given, Iterable) and not isinstance(
        given, np.ndarray | Tensor | str | bytes | Mapping | set | frozenset
    )
