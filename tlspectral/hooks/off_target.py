"""The same cut on other tasks, so that what it does to one task can be told from what it does to any."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tlspectral.tables.schema import Column, Schema, spelled
from tlspectral.tasks import Task
from tlspectral.tasks.task import task_of

FEWEST_DRAWS = 19
"""Draws of the control that `excess_z` takes at least: its standard deviation is taken over the draws."""

_COLUMNS = (
    ("delta", "of the metric", "Value without the part less the intact value, mean over the sequences of {task}."),
    ("delta_se", "of the metric", "Standard error of {name}_delta over the sequences of {task}."),
    ("control_p", "probability", "As control_p, on {task}: of the same draws of the control."),
    ("control_p_floor", "probability", "As control_p_floor, on {task}."),
    ("excess_z", "SD of draws", "As excess_z, on {task}: of the same draws of the control."),
)


def off_target_tasks(given: Any, target: Task, **ready: Any) -> dict[str, Task]:
    """Return other tasks by their names, those that are ready with settings such as `seed`.

    Raises ValueError for no list of tasks, and for two that tables would call alike, the target among them.
    """
    if isinstance(given, str | Task) or not isinstance(given, Sequence):
        raise ValueError(f"off_target is a list of tasks, each a tls.Task, 'induction' or 'language'; found {given!r}")
    found: dict[str, Task] = {}
    taken = {spelled(target.label): target.label}
    for one in given:
        task = task_of(one, **ready)
        name = spelled(task.label)
        if name in taken:
            raise ValueError(
                f"two tasks would be called {name!r} (the target is {target.label!r}): give one a name of its own, "
                "dataclasses.replace(task, name=...)"
            )
        taken[name] = task.label
        found[task.label] = task
    return found


def with_off_target(schema: Schema, tasks: Iterable[str]) -> Schema:
    """Return the schema of a sweep with columns of each other task, which begin with its name.

    Raises ValueError for a task by which a column would be called as one of the sweep.
    """
    known, columns = {column.name for column in schema.columns}, []
    for task in tasks:
        name = spelled(task)
        columns += [
            Column(f"{name}_{column}", said.format(name=name, task=f"the task {task}"), unit)
            for column, unit, said in _COLUMNS
        ]
    alike = [column.name for column in columns if column.name in known]
    if alike:
        raise ValueError(f"an off_target task would have the column {alike[0]}, which the sweep has: rename the task")
    return Schema(schema.name, (*schema.columns, *columns), schema.made_by)


def excess_z(delta: Iterable[float], draws: Iterable[Sequence[float]]) -> np.ndarray:
    """Return each effect less the mean of its draws, in their standard deviations; NaN for draws that are equal or one.

    >>> excess_z([3.0, 3.0], [[-1.0, 0.0, 1.0], [2.0, 2.0, 2.0]]).tolist()
    [3.0, nan]
    """
    rows = [(effect, np.asarray(drawn)) for effect, drawn in zip(delta, draws, strict=True)]
    return np.array(
        [
            (effect - drawn.mean()) / drawn.std(ddof=1) if len(drawn) > 1 and np.ptp(drawn) else np.nan
            for effect, drawn in rows
        ]
    )


def beside_off_target(table: pd.DataFrame, others: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of a sweep of one task with `excess_z`, and with columns of the other tasks' rows in this order.

    Each table has `delta, delta_se, control_p, control_p_floor` and `control_draws`.
    """
    table = table.assign(excess_z=excess_z(table["delta"], table["control_draws"]))
    for task, other in others.items():
        of_other = other.assign(excess_z=excess_z(other["delta"], other["control_draws"]))
        table = table.assign(**{f"{spelled(task)}_{column}": of_other[column].to_numpy() for column, *_ in _COLUMNS})
    return table


def least_z_differences(table: pd.DataFrame, tasks: Iterable[str]) -> dict[str, float | None]:
    """Return |excess_z| on the target less the largest on another task, by name (and position) of the row.

    It is None where one of these is missing; rows that a screen did not measure are left out.
    """
    table = table.dropna(subset="delta")
    names = table["name"] if "position" not in table else table["name"] + " at " + table["position"]
    others = table[[f"{spelled(task)}_excess_z" for task in tasks]].abs().max(axis=1, skipna=False)
    differences = table["excess_z"].abs() - others
    return {name: None if np.isnan(one) else float(one) for name, one in zip(names, differences, strict=True)}
