"""Records of tensors in one line."""

from dataclasses import fields, is_dataclass
from typing import Any


def one_line(record: Any) -> str:
    """Return a dataclass as one line: the shapes of its tensors, and the class names of records within it.

    Fields that are None are left out, and fields with `repr=False`.
    """
    shown = []
    for field in fields(record):
        value = getattr(record, field.name)
        if not field.repr or value is None:
            continue
        shape = getattr(value, "shape", None)
        text = type(value).__name__ if is_dataclass(value) else repr(value) if shape is None else str(list(shape))
        shown.append(f"{field.name}={text}")
    return f"{type(record).__name__}({', '.join(shown)})"
