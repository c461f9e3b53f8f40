"""Five arms on three formal languages: BA's Table 1, Fig. 4 (loss per step, lock-in step) and structure gap (1.2)."""

import pandas as pd

from tlspectral.tables.schema import columns
from tlspectral_studies.bifocal.evolution import BATCH_LOSS
from tlspectral_studies.bifocal.language_runs import LanguageRun, finish_language_runs, tune_and_train
from tlspectral_studies.bifocal.llama import ARMS, LlamaConfig, parameter_counts
from tlspectral_studies.bifocal.schedule import LanguageSchedule, describe_tables
from tlspectral_studies.common.run_folder import RunFolder
from tlspectral_studies.common.seed_intervals import intervals, means_and_differences, paired_differences


def _with_interval(name: str, what: str, unit: str) -> str:
    return f"""
            {name}      | {unit} | Mean over seeds of the {what}.
            {name}_low  | {unit} | Lower end of its 95 % t interval; NaN for one seed.
            {name}_high | {unit} | Upper end of that interval.
    """


describe_tables(
    "languages",
    {
        "table1_runs": """
            language, arm, learning_rate, seed, loss, accuracy
            lock_in | step | First step at which the loss falls as `lock_in_step` has it. NaN: none.
        """,
        "table1": """
            language, arm, learning_rate
            seeds    | count | Runs behind the row.
            lock_ins | count | Runs with a lock_in.
        """
        + _with_interval("loss", "loss on fresh sequences", "nat per scored token")
        + _with_interval("loss_difference", "loss less that of standard, NaN for standard", "nat per scored token")
        + _with_interval("accuracy", "accuracy on fresh sequences", "share")
        + _with_interval("accuracy_difference", "accuracy less that of standard, NaN for standard", "share")
        + """
            entropy_floor       | nat per scored token | Loss that no model can go below.
            sequence_floor      | nat per token        | The same over all tokens, also those that no prefix decides.
            chance_loss         | nat per scored token | Loss of the best guess that sees no sequence.
            chance_accuracy     | share                | Frequency of the most frequent answer.
            backbone_parameters | count                | Numbers learned in the backbone; the same in every arm.
            spectral_parameters | count                | Numbers learned in the rotary positions.
        """,
        "learning_rates": """
            language, arm, learning_rate, seed, loss
            chosen | flag | Whether this rate, at a tie the lowest, has the lowest held-out loss of the arm.
        """,
    },
)
describe_tables(
    "memorisation",
    {
        "memorisation": """
            language, arm, learning_rate, seed
            training_loss | nat per scored token | Mean loss of the last 20 steps on the same sequences.
            loss, accuracy
        """
    },
)
describe_tables("languages", {"losses": "language, arm, seed, step, loss"}, BATCH_LOSS)
describe_tables("memorisation", {"memorisation_losses": "language, arm, seed, step, loss"}, BATCH_LOSS)
describe_tables(
    "structure-gap",
    {
        "structure_gap_runs": """
            language, arm, seed, size, loss, accuracy
            tokens | count | Scored tokens behind the row.
            trained
        """,
        "structure_gap": """
            language, arm, size
            mean | share | Mean over seeds of accuracy.
            low, high, n, trained
        """,
        "structure_gap_beyond": """
            language, arm
            mean | share | Mean over seeds of accuracy over all sizes beyond training, less that of the arm standard.
            low, high, n
        """,
    },
    columns("""
        size    | count | Depth of the bracket words, or letters of noise, of the test's sequences.
        trained | flag  | Whether training had sequences of this size.
    """),
)
REFERENCE = "standard"
_WINDOW = 10
_WITHIN = 20


def lock_in_step(losses: pd.DataFrame, entropy_floor: float) -> int | None:
    """Find the first step at which the loss has lost more than half of its distance to the floor within 20 steps.

    Smoothed loss: mean of the last 10 steps. The step is the first s with
    `smooth(s) - floor < (smooth(s - 20) - floor) / 2`; the two windows share no step. BA (Fig. 4) shows such a fall at
    step 150 and does not define it.

    Args:
        losses: columns `step, loss`, of `evolve`.
        entropy_floor: lowest possible loss, nats per scored token.

    Returns:
        The step, or None where no such fall happens.
    """
    smooth = pd.Series(losses["loss"].rolling(_WINDOW).mean())
    above = smooth - entropy_floor
    fell = losses.loc[above < above.shift(_WITHIN) / 2, "step"]
    return int(fell.iloc[0]) if len(fell) else None


def arms_on_languages(folder: RunFolder, schedule: LanguageSchedule, *, n_jobs: int = 1) -> dict[str, pd.DataFrame]:
    """Train every arm on every language and compare.

    Returns:
        `table1_runs`: a row per run. `table1`: a row per language and arm, means over seeds with 95 % t intervals,
        beside `standard`, floors and chance. `learning_rates`: the tuning. `losses`: of every run and step.

    What it does not establish: an arm is better where its interval of differences holds 0; nor anything about models
    of another size, or trained for longer.
    """
    arms = list(ARMS)
    rates, runs = tune_and_train(folder, schedule, arms, n_jobs=n_jobs)
    measured = held_out_table(runs, schedule)
    return {
        "table1_runs": measured,
        "table1": compared(measured, schedule),
        "learning_rates": rates,
        "losses": stacked(runs, "losses"),
    }


def memorisation(folder: RunFolder, schedule: LanguageSchedule, *, n_jobs: int = 1) -> dict[str, pd.DataFrame]:
    """Train on the same few sequences in every step, as a control: one seed, the middle learning rate.

    Every arm reaches losses of BA's size here in 400 steps, and none on fresh sequences.

    Returns:
        `memorisation`: a row per run, `training_loss` is the mean of the last 20 steps, `loss` and `accuracy` are on
        fresh sequences. `memorisation_losses`: as `losses` of `arms_on_languages`.
    """
    rate = sorted(schedule.rates)[len(schedule.rates) // 2]
    wanted = [
        LanguageRun(plan.language.name, arm, rate, schedule.seeds[0], memorise=True)
        for plan in schedule.plans
        for arm in ARMS
    ]
    runs = finish_language_runs(folder, schedule, wanted, n_jobs=n_jobs)
    measured = held_out_table(runs, schedule).drop(columns=["lock_in"])
    ends = [float(tables["losses"]["loss"].tail(20).mean()) for tables in runs.values()]
    return {"memorisation": measured.assign(training_loss=ends), "memorisation_losses": stacked(runs, "losses")}


def held_out_table(runs: dict[LanguageRun, dict[str, pd.DataFrame]], schedule: LanguageSchedule) -> pd.DataFrame:
    """A row per run: `language, arm, learning_rate, seed, loss, accuracy, lock_in`."""
    rows = []
    for run, tables in runs.items():
        held_out = tables["held_out"].iloc[0]
        floor = schedule.plan(run.language).language.entropy_floor
        rows.append(
            {
                "language": run.language,
                "arm": run.arm,
                "learning_rate": run.learning_rate,
                "seed": run.seed,
                "loss": float(held_out["loss"]),
                "accuracy": float(held_out["accuracy"]),
                "lock_in": lock_in_step(tables["losses"], floor),
            }
        )
    return pd.DataFrame(rows).astype({"lock_in": "float64"})


def compared(measured: pd.DataFrame, schedule: LanguageSchedule) -> pd.DataFrame:
    """The table `table1` of `arms_on_languages` from its rows per run."""
    key = ["language", "arm"]
    grouped = measured.groupby(key, sort=False)
    table = grouped.agg(
        learning_rate=("learning_rate", "first"), seeds=("seed", "count"), lock_ins=("lock_in", "count")
    ).reset_index()
    for measure in ("loss", "accuracy"):
        found = means_and_differences(measured, ["language"], measure, reference=REFERENCE).drop(columns="n")
        names = {name: measure if name == "mean" else f"{measure}_{name}" for name in found.columns.drop(key)}
        table = table.merge(found.rename(columns=names), on=key)
    languages = {plan.language.name: plan.language for plan in schedule.plans}
    for name in ("entropy_floor", "sequence_floor", "chance_loss", "chance_accuracy"):
        table[name] = [float(getattr(languages[language], name)) for language in table["language"]]
    counts = [
        parameter_counts(LlamaConfig(len(languages[language].vocabulary)), ARMS[arm])
        for language, arm in zip(table["language"], table["arm"], strict=True)
    ]
    return table.assign(
        backbone_parameters=[count["backbone"] for count in counts],
        spectral_parameters=[count["spectral"] for count in counts],
    )


def stacked(runs: dict[LanguageRun, dict[str, pd.DataFrame]], name: str) -> pd.DataFrame:
    """Concatenate one table of all runs, with `language, arm, seed`."""
    tables = [of_run[name].assign(language=run.language, arm=run.arm, seed=run.seed) for run, of_run in runs.items()]
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def structure_gap(folder: RunFolder, schedule: LanguageSchedule, *, n_jobs: int = 1) -> dict[str, pd.DataFrame]:
    """Measure accuracy of the models of `languages` by depth of the word and by length of the noise.

    Dyck-3 is trained at depths 4 to 8 and tested up to 24; Bio-Rotation at 100 to 200 noise letters and up to 400.
    Modulo-7 has no such size.

    Returns:
        `structure_gap_runs`: a row per run and size. `structure_gap`: the accuracy's mean over seeds per size.
        `structure_gap_beyond`: `differences_beyond`.

    What it does not establish: why accuracy falls. Longer inputs are new positions, new distances and new depths alike.
    """
    _, runs = tune_and_train(folder, schedule, list(ARMS), n_jobs=n_jobs)
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
    """Average accuracy over all sizes beyond training, per seed, and take `paired_differences` to `standard`.

    Args:
        runs: `structure_gap_runs` of `structure_gap`.
    """
    beyond = runs.loc[~runs["trained"]].groupby(["language", "arm", "seed"], sort=False)["accuracy"].mean()
    return paired_differences(beyond.reset_index(), ["language"], "accuracy", reference=REFERENCE)
