"""`one_line`: the `__repr__` of dataclasses that hold tensors."""

from dataclasses import fields, is_dataclass
from typing import Any


def one_line(self: Any) -> str:
    """Return the dataclass instance `self` as one line of text, such as "CLASS(w_q=[12, 768, 64], layer=3)": shapes
    instead of tensors, class names instead of nested dataclasses.

    It serves as `__repr__`. Fields that are None, or declared with `repr=False`, are left out.
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
