"""The folder of one training: its weights at saved steps, and all that it needs to go on from the last of them.

`step500.safetensors` holds the weights after 500 steps under TransformerLens' names, `state.safetensors` weights,
optimizer, generator of sequences and measurements at the last saved step. Both can be read without this package.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from tlspectral.errors import BadWeights, IncompatibleCheckpoint
from tlspectral.models.reading.digests import digest_of_named
from tlspectral.tables.atomic_writes import whole_file
from tlspectral.tables.parquet import naming_file
from tlspectral_studies.common.model import AttentionOnlyTransformer, TransformerConfig
from tlspectral_studies.common.trainer import Training

_STATE = "state.safetensors"
_WEIGHTS = re.compile(r"step(0|[1-9]\d*)\.safetensors")


@dataclass(frozen=True)
class SavedTraining:
    """The folder of one training.

    Attributes:
        path: the folder; it is made when the first step is saved.
        made_with: everything that the weights depend on, as JSON. Files carry it, and files of another are refused.
    """

    path: Path
    made_with: Mapping[str, Any]

    def save(self, training: Training, done: int, measured: Mapping[str, Any]) -> None:
        """Write the weights after `done` steps, then the state to go on from. Each file appears when it is complete.

        A state that another job has saved after more steps stays.

        Args:
            training: as it is after `done` steps.
            done: steps taken.
            measured: what was measured so far, as JSON.
        """
        weights = training.model.state_dict()
        facts = {"made_with": self.made_with, "config": asdict(training.model.config)}
        state = {**training_tensors(training.model, training.optimizer), "stream": training.stream.get_state()}
        self.path.mkdir(parents=True, exist_ok=True)
        write_tensors(self.path / f"step{done}.safetensors", weights, {**facts, "step": done})
        write_state(self.path / _STATE, state, {**facts, "measured": measured}, done)

    def resume(self, training: Training) -> tuple[int, dict[str, Any]] | None:
        """Bring a training that has just begun to the last saved step.

        Args:
            training: of `begin_training`, with the same settings as the saved one; changed in place.

        Returns:
            Steps done and what was measured up to there; None if nothing was saved.

        Raises:
            IncompatibleCheckpoint: the state is that of another training, or is damaged.
        """
        file = self.path / _STATE
        if not file.exists():
            return None
        try:
            state, facts = read_tensors(file)
        except BadWeights as error:
            raise IncompatibleCheckpoint(
                f"{error}: remove {self.path}, and the training starts from its first step"
            ) from error
        self._require_made_with(facts)
        if facts["config"] != asdict(training.model.config):
            raise IncompatibleCheckpoint(
                f"{file} is the state of another training, of the model {facts['config']} (now "
                f"{asdict(training.model.config)}): remove {self.path}, or choose another folder"
            )
        restore_training(training.model, training.optimizer, state)
        training.stream.set_state(state["stream"])
        return facts["step"], facts["measured"]

    def require_own(self) -> None:
        """Refuse a folder that holds the state of another training by IncompatibleCheckpoint.

        Nothing is said of a damaged state, which `resume` refuses.
        """
        found = None
        with suppress(FileNotFoundError, BadWeights), _opened(self.path / _STATE) as (_, facts):
            found = facts
        if found is not None:
            self._require_made_with(found)

    def _require_made_with(self, facts: Mapping[str, Any]) -> None:
        made_with = json.loads(json.dumps(dict(self.made_with)))
        if facts["made_with"] != made_with:
            raise IncompatibleCheckpoint(
                f"{self.path / _STATE} is the state of another training ({facts['made_with']} there, {made_with} now): "
                f"remove {self.path}, or choose another folder"
            )


def saved_steps(path: Path) -> dict[int, Path]:
    """Return the files of weights in the folder of a training, by step; none where nothing was saved."""
    files = path.iterdir() if path.is_dir() else ()
    steps = {int(match[1]): file for file in files if (match := _WEIGHTS.fullmatch(file.name))}
    return dict(sorted(steps.items()))


def saved_model(file: Path) -> AttentionOnlyTransformer:
    """Return the model of a file of weights, on the CPU.

    Raises:
        BadWeights: the file is damaged.
    """
    weights, facts = read_tensors(file)
    model = AttentionOnlyTransformer(TransformerConfig(**facts["config"]))
    model.load_state_dict(weights)
    return model


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return weights and moments of a training as named tensors, for `restore_training`."""
    moments = optimizer.state_dict()["state"]
    return {
        **{f"model.{name}": value for name, value in model.state_dict().items()},
        **{f"optimizer.{i}.{name}": value for i, values in moments.items() for name, value in values.items()},
    }


def restore_training(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Put the tensors of `training_tensors` into a model and its optimizer, in place."""
    model.load_state_dict(tensors_below("model", state))
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors_below("optimizer", state).items():
        index, moment = name.split(".")
        moments.setdefault(int(index), {})[moment] = value
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})


def write_tensors(file: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors with facts as JSON and a hash of the tensors. The file appears when it is complete."""
    here = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    facts = {**facts, "sha256": digest_of_named(here)}
    with naming_file(file), whole_file(file) as partial:
        partial.write_bytes(save(here, {"tlspectral": json.dumps(facts)}))


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and facts of `write_tensors`. Raises BadWeights if the file is damaged."""
    with _opened(file) as (opened, facts):
        # Copies: the file may be replaced, and rounding can depend on how memory is aligned.
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    if digest_of_named(tensors) != facts["sha256"]:
        raise BadWeights(f"{file} does not hold the numbers that were written to it")
    return tensors, facts


def write_state(file: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], done: int) -> None:
    """Write what a training goes on from after `done` steps, unless another job has saved it after more steps."""
    with suppress(FileNotFoundError, BadWeights), _opened(file) as (_, stored):
        if stored.get("step", 0) > done:
            return
    write_tensors(file, tensors, {**facts, "step": done})


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open a file once, for its tensors and facts: another job may replace it meanwhile."""
    try:
        with safe_open(file, "pt") as opened:
            yield opened, json.loads((opened.metadata() or {})["tlspectral"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise BadWeights(f"{file} is not a file of a saved training ({error})") from error


def tensors_below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose name begins with `prefix.`, without it."""
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}
