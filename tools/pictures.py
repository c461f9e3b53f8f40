"""Make the pictures of the pages of results from the stored tables: `python tools/pictures.py [NAME...]`.

No model is needed. `python tools/gallery.py` makes the pictures of the gallery. `TRAINED` lists the pictures that need
a training or a measurement, each with its command.
"""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pandas as pd
import typer
from matplotlib.figure import Figure

from tlspectral import plots
from tlspectral.tables import read_table

ROOT = Path(__file__).resolve().parents[1]
IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "docs" / "results"
BENCHMARKS = (
    "cache_prices",
    "circuits",
    "formation_order",
    "head_sets",
    "head_rankers",
    "long_sinks",
    "modes",
    "on_text",
    "positional_256",
    "retrieval",
    "stable_edges",
    "steering",
    "steering_windows",
    "twins",
)
TRAINED = {
    "compare.png": "the command below the picture in docs/results/fingerprint.md, with -o docs/images/compare.png",
    "formal_languages.png": "tlspectral study learn languages -o out/spectral; tlspectral study evolution out/spectral",
    "formation.png": "tlspectral study constrained -o out/constrained; tlspectral study formation out/constrained",
    "recipe.png": "the Python of docs/your_question.md",
    "scale.png": "python benchmarks/scale.py -o docs/images/scale.png",
}


def of_benchmarks() -> Iterator[tuple[str, Figure]]:
    """Yield the file name and the figure of each picture that a benchmark draws from its stored tables."""
    for name in BENCHMARKS:
        yield from import_module(name).figures().items()


def of_studies() -> Iterator[tuple[str, Figure]]:
    """Yield the file name and the figure of each picture that a study draws from stored tables."""
    from tlspectral_studies.bifocal import figures
    from tlspectral_studies.positional_symbolic.figures import accuracy_against_angle

    spectral = {
        name: read_table(RESULTS / "spectral" / f"{name}.parquet")
        for name in (
            "setting_search",
            "structure_gap",
            "table1",
            "extension_positions",
            "headline_paths",
            "headline_runs",
        )
    }
    yield "bifocal_setting.png", figures.setting_losses(spectral["setting_search"])
    yield "structure_gap.png", figures.structure_gap_curves(spectral["structure_gap"], spectral["table1"])
    yield "spectral_evolution.png", figures.frequency_paths(spectral["headline_paths"], spectral["headline_runs"])
    yield "longer_context.png", figures.position_losses(spectral["extension_positions"])
    accuracy = pd.read_csv(RESULTS / "positional" / "canonical_quick.csv")
    yield "canonical_tasks.png", accuracy_against_angle(accuracy)
    heads = read_table(RESULTS / "positional" / "heads_smollm2-135m_copying.parquet")
    yield "positional_plane.png", plots.positional_symbolic_plane(heads)
    yield "positional_exclusion.png", plots.exclusion_plane(heads)


SOURCES: tuple[Callable[[], Iterator[tuple[str, Figure]]], ...] = (of_benchmarks, of_studies)


def main(names: list[str] = typer.Argument(None, help="Files of docs/images; none: all.")) -> None:  # noqa: B008
    """Write the pictures of stored tables, and name the pictures that need a training or a measurement."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    for source in SOURCES:
        for name, figure in source():
            if not names or name in names:
                figure.savefig(IMAGES / name)
                print(name, flush=True)
    for name, command in TRAINED.items():
        if not names or name in names:
            print(f"{name} needs a training or a measurement: {command}")


if __name__ == "__main__":
    typer.run(main)
