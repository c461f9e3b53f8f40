"""What a training of stacked heads has logged, and the file from which it goes on when it was stopped."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from tlspectral.errors import BadWeights, IncompatibleCheckpoint
from tlspectral_studies.common.saved_training import (
    read_tensors,
    restore_training,
    tensors_below,
    training_tensors,
    write_state,
)
from tlspectral_studies.positional_symbolic.canonical.model import CanonicalHeads, CanonicalRun
from tlspectral_studies.positional_symbolic.canonical.schedule import CanonicalSchedule
from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalTask

_SECONDS_BETWEEN_FILES = 60.0


@dataclass
class TrainingLog:
    """Measurements of every run at the logged steps, step 0 included.

    Attributes:
        steps: steps done.
        losses: mean cross-entropy since the step before, [runs]; 0 at step 0.
        frequencies: radians per token, [runs, pairs].
        correct: right answers by position, [runs, positions]; None where nothing was measured.
    """

    steps: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    frequencies: list[Tensor] = field(default_factory=list)
    correct: list[Tensor | None] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Steps done at the last logged one."""
        return self.steps[-1] if self.steps else 0

    def note(
        self,
        step: int,
        frequencies: Float64[Tensor, "runs pairs"],
        loss: Tensor,
        correct: Int64[Tensor, "runs positions"] | None,
    ) -> None:
        """Add a logged step."""
        self.steps.append(step)
        self.losses.append(loss.double())
        self.frequencies.append(frequencies.clone())
        self.correct.append(correct)


@dataclass
class TrainingState:
    """The file of one training: its weights, the moments of its optimizer and its log at the last saved step.

    Attributes:
        model, optimizer: of the training; changed in place by `resume`.
        n_measured: prompts on which right answers are counted.
    """

    file: Path
    model: CanonicalHeads
    optimizer: torch.optim.Optimizer
    schedule: CanonicalSchedule
    n_measured: int
    written: float = field(default_factory=time.monotonic, init=False)

    @property
    def made_with(self) -> dict[str, Any]:
        """Everything that the weights depend on, as JSON."""
        model = self.model
        made_with = {
            "task": asdict(model.task),
            "runs": [asdict(run) for run in model.runs],
            "schedule": asdict(self.schedule),
            "measured": self.n_measured,
            "learned": len(model.learned_frequencies) > 0,
            "device": model.W_E.device.type,
        }
        return json.loads(json.dumps(made_with))

    def save(self, log: TrainingLog) -> None:
        """Write the file, at the end of the training or where the last one is a minute old, and no job is further."""
        finished = log.done == self.schedule.steps
        if not finished and time.monotonic() - self.written < _SECONDS_BETWEEN_FILES:
            return
        tensors = training_tensors(self.model, self.optimizer)
        if finished:  # the moments have done their work, and are two thirds of the file
            tensors = {name: value for name, value in tensors.items() if not name.startswith("optimizer.")}
        correct = [counts for counts in log.correct if counts is not None]
        for name, values in (("losses", log.losses), ("frequencies", log.frequencies), ("correct", correct)):
            tensors |= {f"log.{name}": torch.stack(values)} if values else {}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_state(self.file, tensors, {"made_with": self.made_with, "steps": log.steps}, log.done)
        self.written = time.monotonic()

    def resume(self) -> TrainingLog:
        """Bring the training to the last saved step and return its log, an empty one where nothing was saved.

        Raises:
            IncompatibleCheckpoint: the file is of another training, or damaged.
        """
        if not self.file.exists():
            return TrainingLog()
        tensors, facts = _read(self.file)
        if facts["made_with"] != self.made_with:
            raise IncompatibleCheckpoint(
                f"{self.file} is of another training ({facts['made_with']} there, {self.made_with} now): remove it, "
                "or choose another folder"
            )
        restore_training(self.model, self.optimizer, tensors)
        steps, log = facts["steps"], tensors_below("log", tensors)
        correct: list[Tensor | None] = [None] * len(steps) if "correct" not in log else list(log["correct"])
        return TrainingLog(steps, list(log["losses"]), list(log["frequencies"]), correct)


def saved_heads(file: Path) -> CanonicalHeads:
    """Return the heads in a file that `train_canonical` or `canonical_sweep` has written, on the CPU.

    Raises:
        IncompatibleCheckpoint: the file is damaged, or another file.
    """
    tensors, facts = _read(file)
    made_with = facts["made_with"]
    runs = [CanonicalRun(tuple(run["frequencies"]), run["seed"]) for run in made_with["runs"]]
    heads = CanonicalHeads(CanonicalTask(**made_with["task"]), runs, learn_frequencies=made_with["learned"])
    heads.load_state_dict(tensors_below("model", tensors))
    return heads


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        return read_tensors(file)
    except BadWeights as error:
        raise IncompatibleCheckpoint(f"{error}: remove it, and the training starts from its first step") from error
