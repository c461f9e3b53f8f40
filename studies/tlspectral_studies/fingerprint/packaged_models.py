"""Make the packaged checkpoints: `python -m tlspectral_studies.fingerprint.packaged_models tiny-rope`.

A checkpoint is trained, loaded into the TransformerBridge that `load_model` will return, measured there, and written
as a file of weights and a record of settings and measures. On the machine and versions of the record, a second run
writes the same files again.
"""

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from safetensors.torch import save
from torch import Tensor

from tlspectral.algebra.nulls import one_thread
from tlspectral.heads.detectors import detect_heads
from tlspectral.models.loading.packaged import bridge_from_weights, models_folder
from tlspectral.tables.atomic_writes import whole_file
from tlspectral.version import __version__
from tlspectral_studies.common.model import TransformerConfig
from tlspectral_studies.common.random_map import RandomMapTask
from tlspectral_studies.common.trainer import Penalty, TrainingRun, TrainingSettings, train
from tlspectral_studies.fingerprint.constrained.measures import spectral_columns
from tlspectral_studies.fingerprint.constrained.presets import ARMS, Arm

_DIGITS = 5  # of the numbers in a record
# Measured: at most 1.2e-5 on logits of up to 6, float32 sums in another order; a wrong pairing or scale is off by more
# than 0.1.
_PARITY = 1e-4


@dataclass(frozen=True)
class Recipe:
    """Everything that a checkpoint depends on."""

    config: TransformerConfig
    task: RandomMapTask = field(default_factory=RandomMapTask)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    penalty: Penalty | None = None
    penalty_weight: float = 0.0


def _constrained(arm: Arm, seed: int) -> Recipe:
    """An arm of FP's grid; under a constraint the circuit forms later, and not with every seed within these steps."""
    config = TransformerConfig(positional_embedding_type=arm.positional_embedding_type)
    training = TrainingSettings(steps=2500, seed=seed)
    return Recipe(config, RandomMapTask(), training, arm.penalty, arm.penalty_weight)


RECIPES = {
    "tiny-ape": Recipe(TransformerConfig(positional_embedding_type="standard")),
    "tiny-ape-sym": _constrained(ARMS["ape_sym"], seed=0),
    "tiny-rope": Recipe(TransformerConfig(positional_embedding_type="rotary")),
    "tiny-rope-imag": _constrained(ARMS["rope_imag"], seed=0),
    "tiny-rope-sym": _constrained(ARMS["rope_sym"], seed=1),  # with seed 0 no circuit had formed by step 2100
}
# Fields that are left out of a record at their defaults: the records of the first checkpoints lack them.
_NEWER_FIELDS = ("rotary_adjacent_pairs", "unembed_bias")


def make_checkpoint(name: str, folder: Path, *, recipe: Recipe | None = None) -> Path:
    """Train a checkpoint and write `NAME.safetensors` and `NAME.json` into a folder; returns the path of the latter.

    Args:
        name: one of `RECIPES`, or any name where `recipe` is given.
        folder: where to write; made if needed.
        recipe: what to train; None takes the one of that name.

    Raises:
        ValueError: an unknown name.
        RuntimeError: TransformerLens' model does not compute what the trained one does; nothing is written.
    """
    if recipe is None and name not in RECIPES:
        raise ValueError(f"{name!r} is no packaged checkpoint; there are {', '.join(RECIPES)}")
    recipe = recipe or RECIPES[name]
    # Sums are split by thread, so that another number of threads would give other last digits.
    with one_thread():
        run = train(
            recipe.config, recipe.task, recipe.training, penalty=recipe.penalty, penalty_weight=recipe.penalty_weight
        )
        metrics = _metrics(name, recipe, run)
    data = save({key: value.contiguous() for key, value in _weights(run).items()})
    record = {
        "name": name,
        "what": f"attention-only transformer of {recipe.config.n_layers} layers trained on the random-map task",
        "command": f"python -m tlspectral_studies.fingerprint.packaged_models {name}",
        "sha256": hashlib.sha256(data).hexdigest(),
        "config": _config_record(recipe.config),
        "task": asdict(recipe.task),
        "training": asdict(recipe.training),
        **_penalty_record(recipe),
        "metrics": metrics,
        "history": run.history.round(_DIGITS).to_dict(orient="records"),
        "versions": _versions(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / f"{name}.safetensors") as partial:
        partial.write_bytes(data)
    with whole_file(folder / f"{name}.json") as partial:
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return folder / f"{name}.json"


def _config_record(config: TransformerConfig) -> dict[str, Any]:
    default = TransformerConfig()
    newer = {name for name in _NEWER_FIELDS if getattr(config, name) == getattr(default, name)}
    return {name: value for name, value in asdict(config).items() if name not in newer}


def _penalty_record(recipe: Recipe) -> dict[str, Any]:
    if recipe.penalty is None:
        return {}
    name = getattr(recipe.penalty, "__name__", repr(recipe.penalty))
    return {"penalty": {"name": name, "weight": recipe.penalty_weight}}


def _weights(run: TrainingRun) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in run.model.state_dict().items()}


def _metrics(name: str, recipe: Recipe, run: TrainingRun) -> dict[str, Any]:
    """Final losses, how far TransformerLens' logits are from the trained model's, and the detector scores.

    Of a constrained model also `spectra`: `dir_frac` and `rope_imag_frac` of each head.
    """
    config = {**asdict(recipe.config), "model_name": name}
    bridge = bridge_from_weights(config, _weights(run), torch.device("cpu"), torch.float32)
    tokens = recipe.task.sample(8, torch.Generator().manual_seed(0)).tokens
    with torch.no_grad():
        difference = (bridge(tokens) - run.model(tokens)).abs().max().item()
    if not difference <= _PARITY:
        raise RuntimeError(
            f"{name}: TransformerLens' logits differ by {difference:.1e} from those of the trained model"
        )
    heads = detect_heads(bridge, max_se=None)
    last = run.history.iloc[-1].drop("step").round(_DIGITS)
    metrics = {
        **last.to_dict(),
        "logit_difference": difference,
        "detectors": {key: value for key, value in heads.attrs.items() if key != "table"},
        "heads": _rounded(heads, ["layer", "head", "prev", "dup", "ind"]),
    }
    if recipe.penalty is not None:
        spectra = spectral_columns(run.model, folded=True)
        for column in ("dir_frac", "rope_imag_frac"):
            heads[column] = spectra[column].flatten()  # both by layer, then head
        metrics["spectra"] = _rounded(heads.dropna(axis=1), ["layer", "head", "dir_frac", "rope_imag_frac"])
    return metrics


def _rounded(heads: pd.DataFrame, columns: list[str]) -> list[dict[str, Any]]:
    return heads.filter(columns).round(_DIGITS).to_dict(orient="records")


def _versions() -> dict[str, str]:
    packages = ("torch", "transformer-lens", "safetensors")
    return {
        "tlspectral": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def main(
    name: Annotated[str, typer.Argument(help=f"Which checkpoint: {', '.join(RECIPES)}.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder; default: where load_model looks.")
    ] = None,
) -> None:
    """Train a packaged checkpoint and write its weights and its record: two to four minutes."""
    try:
        path = make_checkpoint(name, output or models_folder())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(str(path))


if __name__ == "__main__":
    typer.run(main)
