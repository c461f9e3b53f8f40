"""The experiments on learnable rotary positions, by name; each can be interrupted and resumed.

`tlspectral study learn NAME -o FOLDER`, with a name of `EXPERIMENTS`. Experiments on the formal languages share their
runs: what `languages` has trained, `structure-gap` and `resonance` read.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tlspectral.tables import write_table
from tlspectral.tables.schema import known_schemas
from tlspectral_studies.bifocal.code_adaptation import (
    FULL_BACKBONE,
    FULL_CODE,
    CodeSchedule,
    code_experiment,
    fine_tuning,
)
from tlspectral_studies.bifocal.context_extension import FULL_EXTENSION, ExtensionSchedule, extension_experiment
from tlspectral_studies.bifocal.depth_manifold import manifold
from tlspectral_studies.bifocal.equivalence import arms_with_power
from tlspectral_studies.bifocal.languages import arms_on_languages, memorisation, structure_gap
from tlspectral_studies.bifocal.learned_frequency import SEEDS, learned_frequency
from tlspectral_studies.bifocal.modulo import FULL_MODULO, ModuloSchedule, modulo_experiment
from tlspectral_studies.bifocal.resonance import resonance_experiment
from tlspectral_studies.bifocal.schedule import DYCK, FULL, EquivalenceSchedule, LanguageSchedule
from tlspectral_studies.bifocal.setting_search import (
    FULL_SETTING,
    LEARNED_SETTING,
    SettingSchedule,
    learned_experiment,
    setting_experiment,
)
from tlspectral_studies.common.run_folder import open_run_folder
from tlspectral_studies.positional_symbolic.canonical import CanonicalSchedule

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
    "setting",
    "setting-learned",
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
    setting: SettingSchedule = FULL_SETTING,
    learned: SettingSchedule = LEARNED_SETTING,
    extension: ExtensionSchedule = FULL_EXTENSION,
    code: CodeSchedule = FULL_CODE,
    backbone: CodeSchedule = FULL_BACKBONE,
    heads: CanonicalSchedule = FULL_FREQUENCY,
    n_jobs: int = 1,
    device: str = "cpu",
    command: str = "",
) -> list[Path]:
    """Run an experiment, or finish one that was interrupted, and write its tables as parquet.

    Args:
        name: of `EXPERIMENTS`.
        output: folder; runs are kept in folders of their own in it, tables in the folder itself.
        languages, dyck, modulo, setting, learned, extension, code, backbone, heads: the schedules.
        n_jobs: processes, one thread each; the tables do not depend on it.
        device: where the models are trained.
        command: recorded in the tables' `attrs`.

    Returns:
        The tables' paths.

    Raises:
        ValueError: an unknown name.
        IncompatibleCheckpoint: the folder's runs were made with another schedule, other versions or on another kind of
            device.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"{name!r} is no experiment; there are {', '.join(EXPERIMENTS)}")
    # What is run, with which schedule, the folder of its runs, their seeds.
    others: dict[str, tuple[Any, Any, str, tuple[int, ...]]] = {
        "learned-frequency": (learned_frequency, heads, "headline_runs", SEEDS),
        "equivalence": (arms_with_power, dyck, "equivalence_runs", dyck.seeds),
        "modulo": (modulo_experiment, modulo, "modulo_runs", modulo.seeds),
        "setting": (setting_experiment, setting, "setting_search_runs", setting.seeds),
        "setting-learned": (learned_experiment, learned, "setting_learned_runs", learned.seeds),
        "longer-context": (extension_experiment, extension, "extension_runs", extension.seeds),
        "source-code": (code_experiment, code, "code_runs", (code.seed,)),
        "fine-tuning": (fine_tuning, backbone, "backbone_runs", (backbone.seed,)),
    }
    of_languages = (LANGUAGE_EXPERIMENTS.get(name), languages, "language_runs", languages.seeds)
    run, schedule, runs, seeds = others.get(name, of_languages)
    settings = schedule_settings(schedule)
    folder = open_run_folder(output / runs, settings, command=command, device=device)
    make = partial(run, folder, schedule)
    attrs = {**folder.provenance, "experiment": name, "schedule": settings, "seeds": list(seeds)}
    paths = []
    for table_name, table in make(n_jobs=n_jobs).items():
        table.attrs = {}
        paths.append(output / f"{table_name}.parquet")
        write_table(known_schemas()[f"experiments.{table_name}"].frame(table, attrs), paths[-1])
    return paths


def schedule_settings(schedule: Any) -> dict[str, Any]:
    """Everything that the runs of a schedule depend on, as JSON: the settings of their folder."""
    settings = asdict(schedule)
    if isinstance(schedule, LanguageSchedule):
        return {**settings, "plans": {plan.language.name: asdict(plan) for plan in schedule.plans}}
    if isinstance(schedule, EquivalenceSchedule):
        return {**settings, "language": schedule.plan.language.name}
    return {**settings, "weights": "N(0, 1/d_model)"} if isinstance(schedule, CanonicalSchedule) else settings
