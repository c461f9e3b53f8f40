"""The layers of a model: one list, or the two of HRM, through which a pass goes several times."""

from typing import Any, NamedTuple


class Block(NamedTuple):
    """A layer of a model: its name there, its module, and how often it runs in a pass."""

    name: str
    module: Any
    runs: int


def blocks_of(model: Any) -> list[Block]:
    """Return the layers of a model as they are numbered: of HRM those of the fast stack L, then those of the slow H."""
    runs = {"blocks": 1}
    if hasattr(model, "L_blocks"):
        cycles = model.original_model.config
        runs = {"L_blocks": cycles.H_cycles * cycles.L_cycles, "H_blocks": cycles.H_cycles}
    return [
        Block(f"{stack}.{index}", module, count)
        for stack, count in runs.items()
        for index, module in enumerate(getattr(model, stack, ()))
    ]
