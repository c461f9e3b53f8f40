"""Records of tensors in one line."""

from dataclasses import fields, is_dataclass
from typing import Any


def one_line(self: Any) -> str:
    """Return a dataclass as one line: the shapes of its tensors, and the class names of records within it.

    It is the `__repr__` of such a class. Fields that are None are left out, and fields with `repr=False`.
    """
    shown = []
    for field in fields(self):
        value = getattr(self, field.name)
        if not field.repr or value is None:
            continue
        shape = getattr(value, "shape", None)
        text = type(value).__name__ if is_dataclass(value) else repr(value) if shape is None else str(list(shape))
        shown.append(f"{field.name}={text}")
    return f"{type(self).__name__}({', '.join(shown)})"
