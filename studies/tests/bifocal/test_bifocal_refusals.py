"""What the study refuses, each with the words that say what to do."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from spectral_arms import SMALL, model
from tlspectral_studies.bifocal import figures
from tlspectral_studies.bifocal.code_text import source_files
from tlspectral_studies.bifocal.evolution import EvolutionSettings, parameter_groups
from tlspectral_studies.bifocal.formal_languages import BioRotation, Dyck3
from tlspectral_studies.bifocal.llama import SpectralArm

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
    "losses": (figures.training_losses, "language seed step loss", REFERENCES, "chance_loss"),
    "gap": (figures.structure_gap_curves, "language size mean low high trained", REFERENCES, "chance_accuracy"),
    "paths": (figures.frequency_paths, "task start seed step omega", RUNS, "success"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_without_rows_or_without_a_column_is_refused(name):
    draw, columns, *second = FIGURES[name]
    table = pd.DataFrame({column: [0] for column in columns.split()})
    refused = {"has no rows": (table[:0], *second[:1])}
    refused |= {f"has no column {column}": (table.drop(columns=column), *second[:1]) for column in table}
    if second:
        other, column = second
        refused[f"has no column {column}"] = table, other.drop(columns=column)
    for said, given in refused.items():
        with pytest.raises(ValueError, match=f"{said}: give a table of"):
            draw(*given)
