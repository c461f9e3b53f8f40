"""Which is first, to 25 steps: the median of D_head below its null, previous-token attention, phase, or formation?

    python benchmarks/formation_order.py out/formation_order   # adds a row per run; goes on where it was stopped
    python benchmarks/formation_order.py                       # trains nothing: the answers of the stored rows

Schedule, fixed before the first run. The runs of `tlspectral study constrained --preset paper`, each trained anew from
its seed: seeds 0 to 2 outside, the five arms inside, some 12 CPU minutes a run. A run is measured every 100 steps, and
every 25 from 300 steps before its published formation by the loss until 200 steps after formation by both criteria. A
finished run is a row of `docs/results/constrained/formation_order.csv`, and is not trained again; weights lie in the
folder alone. The eventual head is that with the largest `prev` at the last step. Events, each the first step of the
stretch that lasts to the end of the run, as signatures "lock in" in "Fingerprint, Not Blueprint" (FP, section 9):

* `prev_from`: `prev` of the eventual head is .5 or more.
* `median_from`: the median of D_head over heads is below 97.5 % of such medians under the null of equal singular values
  (`tls.head_history`, 100 draws).
* `phase_from`: the percentile of the eventual head by `rope_imag_frac` is .9 or more, the first place of eight heads.
  Rotary runs. First crossings, which the coarser `histories.csv` has, stand beside it: `prev_first`, `phase_first`.
* `formed_loss`, `formed_both`: formation, at the evaluations every 25 steps.

Two events are ordered where their steps differ. Three sentences of FP, which says them of two Pythias:

* Q2, "population suppression is a post-formation process": in how many runs is `median_from` before `formed_loss`? With
  an exact binomial interval (95 %) of that share. "contradicted" if the interval of the free arms, whose median no
  penalty moves, lies above one half; "confirmed" if below; else "open". Six of six have the interval from .54.
* Q1, "the signature locks in with the behavior [...] neither leads": `phase_from` against `prev_from` in the rotary
  runs. "contradicted" if one of the two is first in more of the ordered runs by a sign test (p < .05), else "not
  contradicted". With the mean lag.
* "Previous-token behavior jumps first": in how many runs is `prev_from` before `formed_loss`? "contradicted" or
  "confirmed" as for Q2, of all runs.

Arms of a seed begin with the same weights and are not independent. So intervals of mean lags are of all 27 resamples of
the three seeds, and the number of seeds in which all runs agree is printed beside each count; three seeds alone decide
nothing (3 of 3 have the interval from .29). Check: formation at the multiples of 100 is that of the published run, and
the eventual head that of `histories.csv`.

Amendment of 2026-11-29, after the runs; what follows is post hoc. The words above count runs as independent, and no
family was named. So each question is asked again with the seed as the unit: in how many seeds is one event first in all
arms? Two-sided sign tests, one family of seven, Holm. Three seeds allow no p below .25: "no power", whatever is seen.

A median over eight heads mixes the layer of the previous-token head (0) with that of the induction heads (1). So the
fall of D_head is dated by layer, its tenth and its half, in the ten free runs that FP published (every 100 steps,
weights as stored, formation by the loss between two evaluations). Five seeds, one family of six (two layers and both,
tenth and half): no p below .0625. Arms whose penalty sets D_head to 0 are left out.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import scipy.stats
import typer
from matplotlib.figure import Figure
from tlspectral_studies.common.checkpoints import saved_checkpoints
from tlspectral_studies.common.saved_training import SavedTraining
from tlspectral_studies.fingerprint.constrained import ARMS, PRESETS, formation, train_cell
from tlspectral_studies.fingerprint.constrained.saved_cells import cell_name
from tlspectral_studies.fingerprint.formation_layers import LAYERS, agreeing_seeds, falls_by_layer, previous_token_leads
from tlspectral_studies.fingerprint.history_questions import formation_crossing, median_leaves_null
from tlspectral_studies.fingerprint.published import published_constrained
from tlspectral_studies.fingerprint.replication.sentences.power import holm, signs_power

import tlspectral as tls
from tlspectral.algebra.nulls import one_thread
from tlspectral.plots.style import BLUE, GREEN, INK, ORANGE, PALE, dress, legend_below, new_figure
from tlspectral.tables.atomic_writes import whole_file

SEEDS, EVERY, BEFORE = 3, 25, 300
PAPER = PRESETS["paper"]
PRESET = replace(PAPER, name="paper every 25", training=replace(PAPER.training, evaluate_every=EVERY))
PREV_LEVEL, PHASE_LEVEL, SIGNIFICANT = 0.5, 0.9, 0.05
STORED = Path("docs/results/constrained")
NEITHER = "neither"


def lasting_from(steps: pd.Series, reached: pd.Series) -> float:
    """Return the first step of the stretch in which something holds to the end; NaN if it does not at the end."""
    others = np.flatnonzero(~reached.to_numpy(dtype=bool))
    start = int(others[-1]) + 1 if len(others) else 0
    return float(steps.iloc[start]) if start < len(steps) else float("nan")


def row_of(arm: str, seed: int, window_from: int, work: Path) -> dict[str, object]:
    """Train a run, or go on with it, measure its history and return its row."""
    name = cell_name(ARMS[arm], seed)
    saved = SavedTraining(work / name, {"cell": name, "settings": PRESET.settings()})
    with one_thread():
        train_cell(PRESET, ARMS[arm], seed, saved=saved, until=window_from)
        run = train_cell(replace(PRESET, save_every=EVERY), ARMS[arm], seed, saved=saved)
    evaluations, vocabulary = run.tables["evaluations"], PRESET.task.vocabulary
    formed = formation(evaluations, vocabulary=vocabulary).iloc[0]
    coarse = formation(evaluations[evaluations["step"] % 100 == 0], vocabulary=vocabulary).iloc[0]
    checkpoints = saved_checkpoints(work / name, f"{arm}, seed {seed}")
    history = tls.head_history(checkpoints, max_se=None, folder=work / f"history-{name}")
    track = history.track()
    crossing = formation_crossing(track) if track["rope_imag_frac_pct"].notna().all() else None
    leaves = median_leaves_null(history.summary)
    return {
        "arm": arm,
        "seed": seed,
        "head": track["name"].iloc[-1],
        "window_from": window_from,
        "last_step": int(formed["last_step"]),
        "formed_loss": formed["formed_loss"],
        "formed_both": formed["formed_both"],
        "formed_loss_100": coarse["formed_loss"],
        "formed_both_100": coarse["formed_both"],
        "prev_first": (track["step"][track["prev"] >= PREV_LEVEL]).min(),
        "prev_from": lasting_from(track["step"], track["prev"] >= PREV_LEVEL),
        "median_from": leaves.step if leaves.side == "below" else None,
        "phase_first": None if crossing is None else crossing.phase.step,
        "phase_from": None
        if crossing is None
        else lasting_from(track["step"], track["rope_imag_frac_pct"] >= PHASE_LEVEL),
    }


def first_of(runs: pd.DataFrame, one: str, other: str) -> pd.Series:
    """Return which of two events is first in each run, or `neither`; an event that never comes is the later one."""
    a, b = (runs[column].fillna(np.inf) for column in (one, other))
    return pd.Series(np.where(a < b, one, np.where(b < a, other, NEITHER)), index=runs.index)


def counted(runs: pd.DataFrame, one: str, other: str) -> tuple[str, tuple[float, float]]:
    """Return in how many runs an event is before another, in words, and the exact interval of the share."""
    first = first_of(runs, one, other)
    k, n = int((first == one).sum()), len(runs)
    interval = scipy.stats.binomtest(k, n).proportion_ci(method="exact")
    seeds = (first == one).groupby(runs["seed"]).all()
    lags = (runs[other] - runs[one]).dropna()
    text = f"{one} before {other} in {k} of {n} runs [{interval.low:.2f}, {interval.high:.2f}]"
    text += f", at the same step in {(first == NEITHER).sum()}; all runs of a seed: {seeds.sum()} of {len(seeds)} seeds"
    if len(lags):
        means = lags.groupby(runs["seed"]).mean().to_numpy()
        resampled = [np.mean(drawn) for drawn in itertools.product(means, repeat=len(means))]
        low, high = np.quantile(resampled, [0.025, 0.975])
        text += f"; mean lead {lags.mean():.0f} steps [{low:.0f}, {high:.0f}], {lags.min():.0f} to {lags.max():.0f}"
    return text, (float(interval.low), float(interval.high))


def verdict(interval: tuple[float, float], above: str, below: str) -> str:
    """Return the word for an interval above or below one half, else `open`."""
    return above if interval[0] > 0.5 else below if interval[1] < 0.5 else "open"


def answers(runs: pd.DataFrame) -> str:
    """Return what is printed of the rows: each sentence with its counts, intervals and verdict; and the checks."""
    free = runs[runs["arm"].str.endswith("free")]
    rotary = runs[runs["arm"].str.startswith("rope")]
    lines = [runs.to_string(index=False), f"{len(runs)} of {SEEDS * len(ARMS)} runs"]
    text, interval = counted(free, "median_from", "formed_loss")
    lines += [f"Q2, free arms: {text}: {verdict(interval, 'contradicted', 'confirmed')}"]
    lines += [f"  all arms: {counted(runs, 'median_from', 'formed_loss')[0]}"]
    for label, chosen in (("rotary arms", rotary), *((str(arm), rows) for arm, rows in rotary.groupby("arm"))):
        for one, other in (("phase_from", "prev_from"), ("phase_first", "prev_first")):
            first = first_of(chosen, one, other)
            k, m = int((first == one).sum()), int((first == other).sum())
            p = scipy.stats.binomtest(k, k + m).pvalue if k + m else float("nan")
            said = f"Q1, {label}: {counted(chosen, one, other)[0]}; the other first in {m}; sign test p = {p:.3f}"
            if label == "rotary arms" and one == "phase_from":
                said += ": contradicted" if p < SIGNIFICANT else ": not contradicted"
            lines.append(said)
    text, interval = counted(runs, "prev_from", "formed_loss")
    lines += [f"prev first: {text}: {verdict(interval, 'confirmed', 'contradicted')}"]
    lines += [f"  by both criteria: {counted(runs, 'prev_from', 'formed_both')[0]}"]
    lines += [f"  phase: {counted(rotary, 'phase_from', 'formed_loss')[0]}"]
    published = tls.read_table(STORED / "beside_published.parquet")
    both = runs.merge(published, on=["arm", "seed"], suffixes=("", "_grid"))
    same = (both["formed_loss_100"] == both["formed_loss_published"]).sum()
    same_both = (both["formed_both_100"] == both["formed_both_published"]).sum()
    heads = runs.merge(pd.read_csv(STORED / "histories.csv"), on=["arm", "seed"], suffixes=("", "_100"))
    lines.append(
        f"check: of {len(runs)} runs {same} form at the published step by the loss, {same_both} by both; "
        f"{(heads['head'] == heads['head_100']).sum()} have the head of histories.csv"
    )
    return "\n".join([*lines, "", by_seed(runs), "", by_layer()])


def by_seed(runs: pd.DataFrame) -> str:
    """Return the seven questions with the seed as the unit: seeds, p, p after Holm, least p and the word."""
    free, rotary = (
        runs[getattr(runs["arm"].str, how)(what)] for how, what in (("endswith", "free"), ("startswith", "rope"))
    )
    asked = {
        "Q2, free arms": (free, "median_from", "formed_loss"),
        "Q2, all arms": (runs, "median_from", "formed_loss"),
        "Q1": (rotary, "phase_from", "prev_from"),
        "Q1, first crossing": (rotary, "phase_first", "prev_first"),
        "prev, by the loss": (runs, "prev_from", "formed_loss"),
        "prev, by both": (runs, "prev_from", "formed_both"),
        "phase": (rotary, "phase_from", "formed_loss"),
    }
    rows = []
    for name, (chosen, one, other) in asked.items():
        first = chosen.assign(one=first_of(chosen, one, other) == one, other=first_of(chosen, one, other) == other)
        ahead, behind = (int(first.groupby("seed")[side].all().sum()) for side in ("one", "other"))
        p = scipy.stats.binomtest(ahead, ahead + behind).pvalue if ahead + behind else 1.0
        rows.append((name, ahead, behind, chosen["seed"].nunique(), p))
    adjusted = holm(np.array([row[-1] for row in rows]))
    lines = ["with the seed as the unit, Holm over seven:"]
    for (name, ahead, behind, seeds, p), corrected in zip(rows, adjusted, strict=True):
        least = signs_power(seeds)
        said = "no power" if least.least_p > SIGNIFICANT else "decided" if corrected < SIGNIFICANT else "open"
        lines.append(
            f"{name}: first in {ahead}, second in {behind} of {seeds} seeds; p = {p:.3f}, Holm {corrected:.3f}; least "
            f"p {least.least_p:.3g}, finds a share of {least.smallest:.2f}: {said}"
        )
    return "\n".join(lines)


def layers_of_free_runs() -> pd.DataFrame:
    """Return when the median of each layer falls in FP's published free runs, a row per run and layer."""
    return falls_by_layer(published_constrained(), vocabulary=PAPER.task.vocabulary, arms=("ape_free", "rope_free"))


def by_layer() -> str:
    """Return the fall of D_head by layer in FP's published free runs, and which attention is first in all 25."""
    falls, lines = layers_of_free_runs(), ["FP's published free runs, by layer:"]
    tests = {
        (layer, what): agreeing_seeds(falls[falls["layer"] == layer], f"{what}_after")
        for layer in LAYERS
        for what in ("onset", "half")
    }
    adjusted = dict(zip(tests, holm(np.array([p for _, _, p in tests.values()])), strict=True))
    for layer in LAYERS:
        own = falls[falls["layer"] == layer]
        least = signs_power(own["seed"].nunique())
        said = f"layer {layer}: share done at formation {own['share'].min():.2f} to {own['share'].max():.2f}"
        for what in ("onset", "half"):
            after, seeds, _ = tests[layer, what]
            said += (
                f"; {what} after formation in {own[f'{what}_after'].sum()} of {len(own)} runs, {after} of {seeds} seeds"
            )
            said += f" (Holm {adjusted[layer, what]:.3f})"
        lines.append(f"{said}; least p {least.least_p:.4f}")
        for arm, table in own.groupby("arm"):
            means = {name: f"{table[name].min():.2f} to {table[name].max():.2f}" for name in ("at_formation", "end")}
            lines.append(f"  {arm}: median at formation {means['at_formation']}, at the end {means['end']}")
    for row in previous_token_leads(published_constrained(), vocabulary=PAPER.task.vocabulary).itertuples():
        lines.append(f"prev of the {row.of} before {row.against} at {row.level}: {row.first} of {row.runs}")
    return "\n".join(lines)


def figures() -> dict[str, Figure]:
    """Draw the stored rows, and return the figure by its file name."""
    drawn = {"formation_order.png": draw(pd.read_csv(STORED / "formation_order.csv"))}
    return drawn | {"formation_layers.png": draw_layers()}


def draw_layers() -> Figure:
    """Draw the median of D_head of each layer in FP's published free runs, from formation by the loss on."""
    runs, falls = published_constrained(), layers_of_free_runs().set_index(["arm", "seed", "layer"])
    colors = {"0": BLUE, "1": ORANGE, "both": INK}
    figure = new_figure(8.2, 3.2)
    entries = []
    for axes, arm in zip(figure.subplots(1, 2, sharey=True), ("ape_free", "rope_free"), strict=True):
        for seed, heads in runs.heads[runs.heads["arm"] == arm].groupby("seed"):
            for layer, color in colors.items():
                own = heads if layer == "both" else heads[heads["layer"] == int(layer)]
                medians = own.groupby("step")["D_head_raw"].median()
                found = falls.loc[(arm, seed, layer)]
                steps = medians.index - found["formed"]
                label = "both layers" if layer == "both" else f"layer {layer}"
                lines = axes.plot(steps, medians, color=color, lw=0.8, ls=":" if layer == "both" else "-")
                middle = (found["start"] + found["end"]) / 2
                marks = axes.plot(found["half"] - found["formed"], middle, "o", color=color, ms=4)
                if seed == 0 and arm == "ape_free":
                    entries += [(lines[0], label), (marks[0], f"{label}: half of the fall")]
        axes.axvline(0, color=INK, lw=0.8)
        axes.set(xlabel="steps from formation by the loss", xlim=(-900, 2500))
        axes.set_title(arm, fontsize=10, color=INK, loc="left")
        dress(axes)
    figure.axes[0].set_ylabel("median of D_head")
    legend_below(figure, entries, [], columns=3)
    return figure


def draw(runs: pd.DataFrame) -> Figure:
    """Draw the events of each run along its steps."""
    events = {
        "median_from": ("o", 7, BLUE, "median of D_head below its null"),
        "phase_from": ("D", 9, ORANGE, "phase of the eventual head: first of eight"),
        "prev_from": ("s", 6, GREEN, "its previous-token attention: .5"),
        "formed_loss": ("|", 12, INK, "formed, by the loss"),
        "formed_both": ("x", 7, INK, "formed, by both criteria"),
    }
    sorted_runs = runs.sort_values("arm", key=lambda arms: arms.map(list(ARMS).index), kind="stable")
    figure = new_figure(8.2, 1.2 + 0.3 * len(runs))
    axes = figure.subplots()
    rows, entries = np.arange(len(runs)), []
    axes.hlines(rows, sorted_runs["window_from"], sorted_runs["last_step"], color=PALE, lw=9, zorder=0)
    for name, (marker, size, color, label) in events.items():
        # Only squares are filled, so that events at one step stay visible.
        filled = color if marker == "s" else "none"
        look = {"color": color, "markerfacecolor": filled, "markersize": size}
        entries += [(line, label) for line in axes.plot(sorted_runs[name], rows, marker, **look)]
    axes.set_yticks(
        rows, [f"{arm}, seed {seed}" for arm, seed in zip(sorted_runs["arm"], sorted_runs["seed"], strict=True)]
    )
    axes.invert_yaxis()
    axes.set(xlabel="step (grey: measured every 25 steps, else every 100)", xlim=(0, None))
    dress(axes)
    legend_below(figure, entries, [], columns=2)
    return figure


def main(
    folder: Annotated[Path | None, typer.Argument(help="Folder of weights and histories; none: stored rows.")] = None,
    output: Path = STORED / "formation_order.csv",
    figure: Path = Path("docs/images/formation_order.png"),
    layers: Path = Path("docs/images/formation_layers.png"),
) -> None:
    """Train and measure the runs that have no row yet, print the answers of all rows and draw them."""
    rows = pd.read_csv(output) if output.exists() else pd.DataFrame(columns=["arm", "seed"])
    if folder is not None:
        published = tls.read_table(STORED / "beside_published.parquet").set_index(["arm", "seed"])
        for seed, arm in itertools.product(range(SEEDS), ARMS):
            if ((rows["arm"] == arm) & (rows["seed"] == seed)).any():
                continue
            window_from = int(published.loc[(arm, seed), "formed_loss_published"]) - BEFORE
            row = row_of(arm, seed, window_from, folder)
            rows = pd.DataFrame([*rows.to_dict(orient="records"), row])
            with whole_file(output) as partial:
                rows.to_csv(partial, index=False)
            typer.echo(str(row))
    if rows.empty:
        raise typer.BadParameter("no run is stored yet: name a folder")
    typer.echo(answers(rows))
    draw(rows).savefig(figure)
    draw_layers().savefig(layers)


if __name__ == "__main__":
    typer.run(main)
