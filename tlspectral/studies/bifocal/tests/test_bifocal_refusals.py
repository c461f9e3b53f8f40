"""What the study refuses, each with the words that say what to do."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from spectral_arms import SMALL, model

from tlspectral.studies.bifocal import figures
from tlspectral.studies.bifocal.code_text import source_files
from tlspectral.studies.bifocal.evolution import EvolutionSettings, parameter_groups
from tlspectral.studies.bifocal.formal_languages import BioRotation, Dyck3
from tlspectral.studies.bifocal.llama import SpectralArm

REFUSED = {
    "no depth": (lambda: Dyck3((0, 3)), "at least 1"),
    "depths in reverse": (lambda: Dyck3((4, 3)), "in this order"),
    "no noise": (lambda: BioRotation((0, 3)), "at least 1"),
    "no motif": (lambda: BioRotation(motif=0), "at least one letter"),
    "a parameter that is none": (lambda: SpectralArm(("theta",)), "theta cannot be learned"),
    "half a pair": (lambda: replace(SMALL, d_model=18), "whole number of rotary pairs"),
    "a long text": (lambda: model()(torch.zeros(1, 65, dtype=torch.int64)), "65 tokens .* n_ctx=64"),
    "nothing to train": (
        lambda: parameter_groups(model("standard"), EvolutionSettings(), frozen_backbone=True),
        "no parameter asks for a gradient",
    ),
    "no package": (lambda: source_files("no_such_package_at_all"), "not installed as a package of files"),
}


@pytest.mark.parametrize(("call", "said"), REFUSED.values(), ids=REFUSED)
def test_a_value_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


REFERENCES = pd.DataFrame({"language": ["dyck3"], "entropy_floor": 0.0, "chance_loss": 1.3, "chance_accuracy": 0.25})
RUNS = pd.DataFrame({"task": ["index"], "start": 0.1, "seed": 0, "success": True})
FIGURES = {
    "evolution": (figures.evolution, "step layer head frequency omega"),
    "resonance": (figures.resonance_evolution, "step pairs resonance"),
    "phases": (figures.phase_evolution, "step mean_abs start_abs drift"),
    "manifold": (figures.depth_manifold_plane, "layer head depth pc1 pc2 between"),
    "positions": (figures.position_losses, "adapted position loss low high"),
    "losses": (lambda table: figures.training_losses(table, REFERENCES), "language seed step loss"),
    "gap": (lambda table: figures.structure_gap_curves(table, REFERENCES), "language size mean low high trained"),
    "paths": (lambda table: figures.frequency_paths(table, RUNS), "task start seed step omega"),
}


@pytest.mark.parametrize(("draw", "columns"), FIGURES.values(), ids=FIGURES)
def test_a_figure_without_rows_or_without_a_column_is_refused(draw, columns):
    table = pd.DataFrame(columns=columns.split())
    with pytest.raises(ValueError, match="has no rows: give a table of"):
        draw(table)
    for column in table:
        with pytest.raises(ValueError, match=f"has no column {column}: give a table of"):
            draw(table.drop(columns=column))


@pytest.mark.parametrize(
    ("draw", "second", "column"),
    [
        (lambda table: figures.training_losses(one_row("losses"), table), REFERENCES, "chance_loss"),
        (lambda table: figures.structure_gap_curves(one_row("gap"), table), REFERENCES, "chance_accuracy"),
        (lambda table: figures.frequency_paths(one_row("paths"), table), RUNS, "success"),
    ],
)
def test_a_second_table_without_a_column_is_refused(draw, second, column):
    with pytest.raises(ValueError, match=f"has no column {column}: give a table of the experiment"):
        draw(second.drop(columns=column))


def one_row(figure):
    return pd.DataFrame({name: [0] for name in FIGURES[figure][1].split()})
