"""The experiments on learnable rotary positions, by name; each can be interrupted and resumed.

`tlspectral study learn NAME -o FOLDER`, with a name of `EXPERIMENTS`. Experiments on the formal languages share their
runs: what `languages` has trained, `structure-gap` and `resonance` read.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path

from tlspectral.studies.bifocal import code_columns, columns, equivalence_columns, learned_frequency_columns
from tlspectral.studies.bifocal.code_adaptation import (
    FULL_BACKBONE,
    FULL_CODE,
    CodeSchedule,
    code_experiment,
    fine_tuning,
)
from tlspectral.studies.bifocal.context_extension import FULL_EXTENSION, ExtensionSchedule, extension_experiment
from tlspectral.studies.bifocal.depth_manifold import manifold
from tlspectral.studies.bifocal.equivalence import arms_with_power
from tlspectral.studies.bifocal.languages import arms_on_languages, memorisation, structure_gap
from tlspectral.studies.bifocal.learned_frequency import SEEDS, learned_frequency
from tlspectral.studies.bifocal.modulo import FULL_MODULO, ModuloSchedule, modulo_experiment
from tlspectral.studies.bifocal.resonance import resonance_experiment
from tlspectral.studies.bifocal.schedule import DYCK, FULL, EquivalenceSchedule, LanguageSchedule
from tlspectral.studies.common.run_folder import open_run_folder
from tlspectral.studies.positional_symbolic.canonical import CanonicalSchedule
from tlspectral.tables import named, write_table

_TABLES = {
    table.name.removeprefix("experiments."): table
    for part in (learned_frequency_columns, columns, code_columns, equivalence_columns)
    for table in part.TABLES
}

LANGUAGE_EXPERIMENTS = {
    "languages": arms_on_languages,
    "memorisation": memorisation,
    "structure-gap": structure_gap,
    "resonance": resonance_experiment,
    "manifold": manifold,
}
EXPERIMENTS = (
    "learned-frequency",
    *LANGUAGE_EXPERIMENTS,
    "equivalence",
    "modulo",
    "longer-context",
    "source-code",
    "fine-tuning",
)
FULL_FREQUENCY = CanonicalSchedule()
QUICK_FREQUENCY = CanonicalSchedule(steps=4, batch_size=8, warmup_steps=1, validation_samples=64, log_every=2)


def run_experiment(
    name: str,
    output: Path,
    *,
    languages: LanguageSchedule = FULL,
    dyck: EquivalenceSchedule = DYCK,
    modulo: ModuloSchedule = FULL_MODULO,
    extension: ExtensionSchedule = FULL_EXTENSION,
    code: CodeSchedule = FULL_CODE,
    backbone: CodeSchedule = FULL_BACKBONE,
    heads: CanonicalSchedule = FULL_FREQUENCY,
    n_jobs: int = 1,
    device: str = "cpu",
    command: str = "",
    show_progress: bool = False,
) -> list[Path]:
    """Run an experiment, or finish one that was interrupted, and write its tables as parquet.

    Args:
        name: of `EXPERIMENTS`.
        output: folder; runs are kept in folders of their own in it, tables in the folder itself.
        languages, dyck, modulo, extension, code, backbone, heads: the schedules.
        n_jobs: processes, one thread each; the tables do not depend on it.
        device: where the models are trained.
        command: recorded in the tables' `attrs`.
        show_progress: bars over runs.

    Returns:
        The tables' paths.

    Raises:
        ValueError: an unknown name.
        IncompatibleCheckpoint: the folder's runs were made with another schedule, other versions or on another kind of
            device.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"{name!r} is no experiment; there are {', '.join(EXPERIMENTS)}")
    if name == "learned-frequency":
        settings = {**asdict(heads), "weights": "N(0, 1/d_model)"}
        folder = open_run_folder(output / "headline_runs", settings, command=command, device=device)
        make = partial(learned_frequency, folder, heads)
        seeds = list(SEEDS)
    elif name == "equivalence":
        settings = dyck.settings()
        folder = open_run_folder(output / "equivalence_runs", settings, command=command, device=device)
        make = partial(arms_with_power, folder, dyck)
        seeds = list(dyck.seeds)
    elif name == "modulo":
        settings = modulo.settings()
        folder = open_run_folder(output / "modulo_runs", settings, command=command, device=device)
        make = partial(modulo_experiment, folder, modulo)
        seeds = list(modulo.seeds)
    elif name == "longer-context":
        settings = extension.settings()
        folder = open_run_folder(output / "extension_runs", settings, command=command, device=device)
        make = partial(extension_experiment, folder, extension)
        seeds = list(extension.seeds)
    elif name in ("source-code", "fine-tuning"):
        chosen, run = (code, code_experiment) if name == "source-code" else (backbone, fine_tuning)
        settings = chosen.settings()
        runs = "code_runs" if name == "source-code" else "backbone_runs"
        folder = open_run_folder(output / runs, settings, command=command, device=device)
        make = partial(run, folder, chosen)
        seeds = [chosen.seed]
    else:
        settings = languages.settings()
        folder = open_run_folder(output / "language_runs", settings, command=command, device=device)
        make = partial(LANGUAGE_EXPERIMENTS[name], folder, languages)
        seeds = list(languages.seeds)
    paths = []
    for table_name, table in make(n_jobs=n_jobs, show_progress=show_progress).items():
        table.attrs = {**folder.provenance, "experiment": name, "schedule": settings, "seeds": seeds}
        paths.append(output / f"{table_name}.parquet")
        write_table(named(table, _TABLES[table_name]), paths[-1])
    return paths
