"""Rows of the conformance suite, and the register of what is asked of them."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import pytest
import zoo
from ablation_runs import DELEGATED, NO_ROPE, logits, recorded
from model_state import state_of, warm

from tlspectral.models.attention import attention_view
from tlspectral.operators import check_scores

POINTS = ("residual", "residual_after", "attention_out", "mlp_out", "query", "key", "value", "scores", "pattern", "z",
          "cos", "sin")  # fmt: skip


# What is to hold, in which case, of which rows, and in the fast tests of one in how many.
PROPERTIES: list[tuple[Callable[..., None], tuple[Any, ...], Callable[..., bool], int]] = []


class Row:
    """One model, which no property may change, and its run on the prompt of the zoo."""

    def __init__(self, backend: str, name: str) -> None:
        self.backend, self.name = backend, name
        self.rotary = name not in NO_ROPE
        self.read_right = backend == "hooked" or name not in zoo.READ_WRONG
        # The bridge leaves attention to the wrapped module, so that scores are rebuilt and z is edited.
        self.delegated = backend == "bridge" and name in DELEGATED

    @cached_property
    def model(self) -> Any:
        """The model, as it was before the first property acted on it: see `state` and `logits`."""
        model = warm(zoo.shared(self.backend, self.name))
        self.state, self.logits = state_of(model), logits(model)
        return model

    @cached_property
    def view(self) -> Any:
        return attention_view(self.model)

    @cached_property
    def layers(self) -> range:
        return range(self.view.n_layers)

    @cached_property
    def run(self) -> dict[tuple[int, str], Any]:
        """What passes the hook points, by (layer, point). Not to be changed."""
        return recorded(self.model, POINTS)

    @property
    def captured(self) -> dict[str, Any]:
        """The same by the model's own names of its hook points."""
        return {self.view.hook_names(layer)[point]: value for (layer, point), value in self.run.items()}

    @cached_property
    def check(self) -> Any:
        return check_scores(self.view)


def right(row: Row, *case: Any) -> bool:
    """Whether the model's scores are those of its published weights: TransformerLens 3.9 errs on one architecture."""
    return row.read_right


def rotating(row: Row, *case: Any) -> bool:
    return row.rotary


def asked(of: Callable[..., bool] = lambda row, *case: True, every: int = 1, **cases: Iterable[Any]) -> Any:
    """Ask a property of the rows and cases that `of` picks, once for every combination of the values of `cases`.

    What costs much is asked of one row in `every`, another one for each case; the slow tests ask the others.
    """

    def register(holds: Callable[..., None]) -> Callable[..., None]:
        PROPERTIES.extend((holds, case, of, every) for case in itertools.product(*cases.values()))
        return holds

    return register


def label(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(str(part) for part in value if part)
    return str(value)


def cases(backend: str) -> Iterator[Any]:
    """Every property of every row of a backend, as pytest takes them: the row, what is to hold, and the case."""
    bridges = (*zoo.ARCHITECTURES, *zoo.LENGTH_DEPENDENT, "codegen")
    names = bridges if backend == "bridge" else zoo.HOOKED_ARCHITECTURES
    for number, name in enumerate(names):
        row = Row(backend, name)
        for turn, (holds, case, of, every) in enumerate(PROPERTIES, number):
            if not of(row, *case):
                continue
            marks = [*getattr(holds, "pytestmark", []), *([zoo.needs_hooked] if backend == "hooked" else [])]
            marks += [pytest.mark.slow] if turn % every else []
            said = "-".join([name, holds.__name__, *map(label, case)])
            yield pytest.param((backend, name), holds, case, id=said, marks=marks)
