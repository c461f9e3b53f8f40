"""BA's structure gap (section 1.2): do models trained on shallow words and short noise answer on deep and long ones?"""

import pandas as pd

from tlspectral.studies.bifocal.language_runs import tune_and_train
from tlspectral.studies.bifocal.llama import ARMS
from tlspectral.studies.bifocal.schedule import LanguageSchedule
from tlspectral.studies.bifocal.seed_intervals import intervals, paired_differences
from tlspectral.studies.bifocal.table1 import REFERENCE, stacked
from tlspectral.studies.common.run_folder import RunFolder


def structure_gap(
    folder: RunFolder, schedule: LanguageSchedule, *, n_jobs: int = 1, show_progress: bool = False
) -> dict[str, pd.DataFrame]:
    """Accuracy of the models of `languages` by depth of the word and by length of the noise.

    Dyck-3 is trained at depths 4 to 8 and tested up to 24; Bio-Rotation at 100 to 200 noise letters and up to 400.
    Modulo-7 has no such size.

    Returns:
        `structure_gap_runs`: `language, arm, seed, size, loss, accuracy, tokens, trained` (whether training had the
        size). `structure_gap`: the accuracy's mean over seeds with its 95 % t interval per `language, arm, size`.
        `structure_gap_beyond`: per seed averaged over all sizes beyond training, then the paired difference of accuracy
        to `standard`, `language, arm, mean, low, high, n`.

    What it does not establish: why accuracy falls. Longer inputs are new positions, new distances and new depths alike.
    """
    _, runs = tune_and_train(folder, schedule, list(ARMS), n_jobs=n_jobs, show_progress=show_progress)
    table = stacked(runs, "by_size")
    table["trained"] = False
    for plan in schedule.plans:
        rows = table["language"] == plan.language.name
        table.loc[rows, "trained"] = table.loc[rows, "size"].between(*plan.language.sizes)
    by = ["language", "arm", "size"]
    return {
        "structure_gap_runs": table,
        "structure_gap": intervals(table, by, "accuracy").merge(table[[*by, "trained"]].drop_duplicates(), on=by),
        "structure_gap_beyond": differences_beyond(table),
    }


def differences_beyond(runs: pd.DataFrame) -> pd.DataFrame:
    """Accuracy over all sizes beyond training, per seed, as `paired_differences` to `standard`.

    Args:
        runs: `structure_gap_runs` of `structure_gap`.
    """
    beyond = runs.loc[~runs["trained"]].groupby(["language", "arm", "seed"], sort=False)["accuracy"].mean()
    return paired_differences(beyond.reset_index(), ["language"], "accuracy", reference=REFERENCE)
