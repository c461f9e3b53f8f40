"""Stored tables of the experiments beside BA's Table 1 and its sentence about resonance, as Markdown."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from tlspectral.tables import read_table
from tlspectral_studies.bifocal.formal_languages import BioRotation, Dyck3, FormalLanguage, Modulo7
from tlspectral_studies.bifocal.languages import REFERENCE
from tlspectral_studies.common.markdown_table import markdown_table
from tlspectral_studies.common.seed_intervals import means_and_differences

TABLE_1 = {
    "dyck3": ("Dyck-3", 0.4293, 0.0008),
    "bio_rotation": ("Bio-Rotation", 1.0725, 0.0009),
    "modulo7": ("Modulo", 0.4583, 0.0009),
}
"""BA's task, and its losses of the standard and the spectral model, by the name of the language here."""

_LANGUAGES = {language.name: language for language in (Dyck3((4, 8)), BioRotation((100, 200)), Modulo7())}
_LEARNED = 1 / 3


def is_learned(language: FormalLanguage, accuracy: float) -> bool:
    """Whether an accuracy on fresh sequences is a third of the way from chance to 1 or more."""
    return accuracy >= language.chance_accuracy + (1 - language.chance_accuracy) * _LEARNED


_WITHIN = 1.5  # largest ratio to BA's losses with which a setting counts as BA's, as the schedule has it


def beside_paper(folder: Path) -> str:
    """What experiments of `tlspectral study learn` wrote, beside what BA prints.

    Args:
        folder: of their tables; those that are not there are left out.

    Raises:
        FileNotFoundError: it has none of them.
    """
    made = {
        "table1": table1_beside,
        "equivalence": ratios,
        "resonance": excess,
        "setting_search": nearest_settings,
        "setting_comparison": arms_in_setting,
        "setting_learned": standard_in_setting,
        "setting_learned_runs": answers_in_setting,
    }
    paths = {name: folder / f"{name}.parquet" for name in made}
    found = [make(read_table(paths[name])) for name, make in made.items() if paths[name].exists()]
    if not found:
        raise FileNotFoundError(f"{folder} has none of {', '.join(f'{name}.parquet' for name in made)}")
    return "\n\n".join(found)


def table1_beside(table: pd.DataFrame) -> str:
    """BA's losses, ours of every arm with accuracy, and chance: a row per language; which have no power.

    Args:
        table: `table1` of `arms_on_languages`.

    What it does not establish: a difference between the arms, for which it has `loss_difference` and its interval.
    """
    arms = list(dict.fromkeys(table["arm"]))
    rows, notes = [], []
    for language, found in table.groupby("language", sort=False):
        of_arm, (task, standard, spectral) = found.set_index("arm"), TABLE_1[str(language)]
        first = of_arm.iloc[0]
        cells = [_loss(of_arm.loc[arm, "loss"], of_arm.loc[arm, "accuracy"]) for arm in arms]
        chance = _loss(first["chance_loss"], first["chance_accuracy"])
        rows.append([task, f"{standard}, {spectral}", *cells, chance])
        below = bool((found["loss_high"] < found["chance_loss"]).any())
        power = "" if below else "; no interval is below chance, so that there is no power to compare arms"
        times = of_arm.loc[REFERENCE, "loss"] / standard
        notes.append(f"* {task}: `{REFERENCE}` has {times:.2f} times the loss of BA's{power}.")
    header = ["task", "BA: standard, spectral", *(f"`{arm}`" for arm in arms), "chance"]
    return "\n".join([*markdown_table(header, rows), *notes])


def ratios(table: pd.DataFrame) -> str:
    """Loss on Dyck-3, difference and ratio to `standard` with 95 % intervals, and the margin of equivalence, by arm.

    Args:
        table: `equivalence` of `arms_with_power`; of its views the common rate.
    """
    rows = []
    for _, row in table.loc[table["view"] == "equal"].iterrows():
        cells = ["", "", ""]
        if row["arm"] != REFERENCE:
            cells = [
                _interval(row[["difference_mean", "difference_low", "difference_high"]], "+.3f"),
                _interval(row[["ratio", "ratio_low", "ratio_high"]], ".3f"),
                f"{row['bound']:.3f}",
            ]
        rows.append([f"`{row['arm']}`", f"{row['mean']:.3f}", *cells])
    header = ["arm", "loss", "less `standard`, same seeds (95 %)", "ratio (95 %)", "margin"]
    return "\n".join(markdown_table(header, rows)[:-1])


def excess(table: pd.DataFrame) -> str:
    """Gain of resonance beyond that of random moves of the same size, in thousandths: arms by languages, turning pairs.

    Args:
        table: `resonance` of `resonance_experiment`. Arms whose frequencies do not move are left out.
    """
    moving = table.loc[(table["measure"] == "excess") & (table["mean"] != 0)]
    turning = moving.loc[moving["pairs"] == "turning"].set_index(["arm", "language"])
    languages = list(dict.fromkeys(table["language"]))
    rows = []
    for arm in dict.fromkeys(moving["arm"]):
        cells = (turning.loc[(arm, language), ["mean", "low", "high"]] * 1000 for language in languages)
        rows.append([f"`{arm}`", *(_interval(cell, "+.1f") for cell in cells)])
    every = moving.loc[moving["pairs"] == "all", "mean"] * 1000
    lines = markdown_table(["arm", *(TABLE_1[language][0] for language in languages)], rows)
    return "\n".join([*lines, f"Over all pairs it is {every.min():+.1f} to {every.max():+.3f}."])


def readings(table: pd.DataFrame) -> pd.Series:
    """Return the reading of BA's text that each setting stands for, by number of the setting.

    A reading is which tokens the loss counts, how an expression is worded where more than its answer counts, and
    whether sequences are fresh or few. Rates, schedules, batches and lengths are no readings: they move a loss, but not
    what it is a loss of.

    Args:
        table: `setting_search` of `setting_experiment`.
    """
    worded = table[table["language"] == "modulo7"].set_index("setting")
    wording = worded["lengths"].where(worded["scored"] != "answers", "")
    data = worded["sequences"].isna().map({True: "fresh", False: "few"})
    return worded["scored"] + wording.map(lambda words: f", {words}" if words else "") + ", " + data


def nearest_settings(table: pd.DataFrame) -> str:
    """The setting of each reading with losses nearest to BA's: losses of `standard` and largest ratio.

    Args:
        table: `setting_search` of `setting_experiment`.
    """
    rows = []
    worst, reading = table.groupby("setting")["worst"].first(), readings(table)
    for name, numbers in reading.groupby(reading, sort=False).groups.items():
        of_reading = worst.loc[list(numbers)]
        found = table.loc[table["setting"] == of_reading.idxmin()].set_index("language")
        first = found.iloc[0]
        rate = f"{first['learning_rate']:g}" + (", cosine" if first["cosine"] else "")
        cells = [_loss(found.loc[task, "loss"], found.loc[task, "accuracy"]) for task in TABLE_1]
        near = f"{(of_reading <= _WITHIN).sum()} of {len(of_reading)}"
        rows.append([str(name), rate, *cells, f"{first['worst']:.2f}", near])
    paper = [f"{standard}" for _, standard, _ in TABLE_1.values()]
    header = ["reading", "rate", *(task for task, _, _ in TABLE_1.values()), "worst", f"within {_WITHIN:g}"]
    return "\n".join(markdown_table(header, [["BA", "", *paper, "", ""], *rows])[:-1])


def arms_in_setting(table: pd.DataFrame) -> str:
    """Loss of every arm in the chosen setting, difference and ratio to `standard` with 95 % intervals, and the outcome.

    Args:
        table: `setting_comparison` of `setting_experiment`, or `setting_learned` of `learned_experiment`. Tasks that
            `standard` does not learn are left out, because their arms cannot be compared.
    """
    learned, rows = _learned(table), []
    for row in table.to_dict(orient="records"):
        if not learned[row["language"]]:
            continue
        cells = ["", "", "", "", ""]
        if row["arm"] != REFERENCE:
            cells = [
                _interval((row["difference_mean"], row["difference_low"], row["difference_high"]), "+.4f"),
                _interval((row["ratio"], row["ratio_low"], row["ratio_high"]), ".3f"),
                f"{row['pvalue_holm']:.2g}",
                f"{row['bound']:.4f}",
                row["outcome"],
            ]
        rows.append([TABLE_1[row["language"]][0], f"`{row['arm']}`", _loss(row["mean"], row["accuracy"]), *cells])
    header = ["task", "arm", "loss", "less `standard` (95 %)", "ratio (95 %)", "p (Holm)", "margin", "outcome"]
    return "\n".join(markdown_table(header, rows)[:-1])


def standard_in_setting(table: pd.DataFrame) -> str:
    """Losses of `standard` beside BA's, whether it learns each task, and the arms on the tasks that it learns.

    Args:
        table: `setting_learned` of `learned_experiment`.
    """
    learned, rows = _learned(table), []
    for row in table.loc[table["arm"] == REFERENCE].to_dict(orient="records"):
        (task, paper, _), chance = TABLE_1[row["language"]], _LANGUAGES[row["language"]].chance_accuracy
        cells = [f"{paper}", _interval((row["mean"], row["low"], row["high"]), ".3f"), f"{row['mean'] / paper:.2f}"]
        cells += [f"{row['accuracy']:.2f}", f"{chance:.2f}", "yes" if learned[row["language"]] else "no"]
        rows.append([task, *cells])
    header = ["task", "BA's loss", "`standard` (95 %)", "ratio", "answers right", "by chance", "learned"]
    return "\n".join([*markdown_table(header, rows), arms_in_setting(table)])


def answers_in_setting(runs: pd.DataFrame) -> str:
    """Loss and accuracy of answers on fresh sequences, and their differences to `standard` on the same seeds.

    Args:
        runs: `setting_learned_runs` of `learned_experiment`. All tasks are shown.
    """
    cells: dict[tuple[str, str], list[str]] = {}
    for measure in ("fresh_loss", "accuracy"):
        table = means_and_differences(runs, ["language"], measure, reference=REFERENCE)
        for row in table.to_dict(orient="records"):
            ends = (row["difference"], row["difference_low"], row["difference_high"])
            written = "" if row["arm"] == REFERENCE else _interval(ends, "+.3f")
            cells.setdefault((row["language"], row["arm"]), []).extend([f"{row['mean']:.3f}", written])
    rows = [[TABLE_1[language][0], f"`{arm}`", *found] for (language, arm), found in cells.items()]
    header = ["task", "arm", "loss of answers", "less `standard` (95 %)", "answers right", "less `standard` (95 %)"]
    return "\n".join(markdown_table(header, rows)[:-1])


def _learned(table: pd.DataFrame) -> dict[str, bool]:
    """Return for each language of a table of arms whether `standard` learns it."""
    standard = table[table["arm"] == REFERENCE].set_index("language")["accuracy"]
    return {str(name): is_learned(_LANGUAGES[str(name)], accuracy) for name, accuracy in standard.items()}


def _loss(loss: float, accuracy: float) -> str:
    return f"{loss:.3f} ({accuracy:.2f})"


def _interval(ends: Iterable[float], form: str) -> str:
    """A mean with the ends of its interval."""
    mean, low, high = ends
    return f"{mean:{form}} ({low:{form}} to {high:{form}})"
