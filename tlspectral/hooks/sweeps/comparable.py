"""What makes a cut the same on several tasks, and its control one that `excess_z` can be taken from."""

from collections.abc import Iterable, Mapping
from typing import Any

from tlspectral.hooks.off_target import FEWEST_DRAWS
from tlspectral.hooks.parts import Output, Part
from tlspectral.hooks.positions import is_one_position
from tlspectral.hooks.sweeps.controls import other_sets
from tlspectral.models.reading.view import AttentionView


def require_comparable(
    view: AttentionView,
    part: Part,
    listed: list[Any] | None,
    control: Any,
    draws: int | None,
    chosen: Mapping[Any, Any],
) -> None:
    """Refuse what is no same cut on several tasks, and fewer draws than `excess_z` takes. Raises ValueError.

    `listed` are positions that were asked for, `chosen` sets by name, or heads by layer.
    """
    if control is None:
        raise ValueError("off_target= compares each effect with draws of the control: give control='random' too")
    if draws is not None and draws < FEWEST_DRAWS:
        raise ValueError(f"excess_z of off_target= takes {FEWEST_DRAWS} draws or more: found draws={draws}")
    if isinstance(part, Output) and part.reference is not None:
        raise ValueError(
            "with off_target= what is put in is taken from each task's own prompts, and a reference= belongs to one: "
            "leave it out"
        )
    if any(not is_one_position(one) for one in listed or ()):
        raise ValueError(
            "positions of each prompt belong to one task: for off_target= give numbers, or names that each task has in "
            "Task(..., positions=)"
        )
    n_heads = {layer: view.n_heads(layer) for layer in view.layers}
    for name, one in chosen.items():
        if isinstance(one, Mapping):
            what, there = f"the set {name!r} has {{}} other sets", other_sets(n_heads, {**one})
        elif part.beside_heads:
            what, there = f"a head of layer {name} has {{}} other heads", n_heads[name] - 1
        else:
            continue
        if there < FEWEST_DRAWS:
            raise ValueError(
                f"{what.format(there)} of its layers for its control, and excess_z of off_target= takes "
                f"{FEWEST_DRAWS}: remove more heads together, such as heads={{'name': ['L0H1', 'L1H2']}}"
            )


def require_one_replacement(placed: Iterable[tuple[str, Part]]) -> None:
    """Refuse settled outputs that become their pairs on one task and zero on another. Raises ValueError.

    `placed` are the names of tasks and the part as it is removed there.
    """
    found = {task: part.replace for task, part in placed if isinstance(part, Output)}
    if len(set(found.values())) > 1:
        said = ", ".join(f"{how!r} on {task!r}" for task, how in found.items())
        raise ValueError(
            f"the output of a head would become {said}, as not all of these tasks have pairs, and that is not the same "
            "cut: say one replacement for all, such as tls.parts.Output('mean')"
        )
