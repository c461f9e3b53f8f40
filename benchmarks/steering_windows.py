"""Is steering cheaper than banning, whatever the window, and without a ban?

    python benchmarks/steering_windows.py out/windows            # trains seeds without stored rows; can be resumed
    python benchmarks/steering_windows.py out/windows --seeds 3  # trains none but the first three
    python benchmarks/steering_windows.py                        # trains nothing: the answers of the stored rows

`benchmarks/steering.py` has one window, a penalty in the first 300 steps. A penalty that hinders learning while it
lasts makes a run that begins later, so that its cost follows from the window. And "Fingerprint, Not Blueprint" (FP,
section 10) writes of **ban-free** assistance, and of an initialization that is specific to a solution.

Schedule, fixed on 2026-11-29 before the first run. Learned absolute positions and a symmetric M, to which FP's 1.3x and
2.9x belong; sizes of the preset `quick`, seeds 0 to 4, seeds outside. Rotary arms are cut: no time for them. Arms:

* windows: the penalty of `ape_sym`, weight 10, in the first 50, 100 and 200 steps. 300 is `ape_assisted` of
  `steering.csv`, where `ape_free` and `ape_sym` are, too. All four windows are reported, and none is chosen.
* bonus: nothing is forbidden. For 300 steps the loss has the symmetric share of M as a bonus, weight 1: minus
  ||M_S||^2 / ||M||^2, mean over heads, the denominator detached. Its gradient enlarges M_S and leaves M_A alone. The
  weight was chosen on seed 99, where it brings the mean `dir_frac` from .70 to .20 in 300 steps.
* previous: no penalty and no bonus. L0H0 begins as a previous-token head with a symmetric M: W_K and W_Q = W_K times
  fixed signs, fitted for 200 steps of Adam to attend to the previous token in random sequences, all else as drawn. On
  seed 99 its `prev` is then .51.

A run ends 200 steps after both criteria of formation hold, or at step 4000, which counts as its step if it did not
form. The share is `dir_frac` of the stored weights of the head with the largest `prev`, 200 steps after formation; of
stored runs the last value of `steering_tracks.csv` by then (every 100 steps).

* Cost: ratio to the free run of the same seed, by the loss (FP's rule) and by both criteria side by side: mean and
  Student's 95 % interval over seeds. "Cheaper": the arm forms before the banned one, one-sided Mann-Whitney test, exact
  with ties, p < .05 after Holm over the four windows, and the 95 % interval of the paired difference lies below 0;
  "dearer" if the interval lies above 0; else "open".
* "It stays" if the 95 % interval of the mean share lies below the middle of the free and the banned arm's mean, "it
  does not stay" if above, else "open". The test that the share is below the free arm's has p after Holm over the four.
* FP's sentence is judged where the treatment is FP's, for the bonus alone: it "holds" if the bonus is cheaper and
  stays, "does not hold" if it is dearer or does not stay, else "open". FP says it of no arm that has a ban.
* "Solution-specific initialization accelerates formation outright": "accelerates" if the arm `previous` forms before
  the free one (p < .05), and the interval of the paired difference lies below 0; else "open".

Families (Holm): four windows, for each criterion and for the share; the tests of the bonus and of `previous`, five in
one. Five seeds against five have p = 1/252 at the least, .016 after Holm over four, .020 over five. If fewer seeds are
finished, the answers name them; with four no p is below .05 after Holm.

Seeds 0 to 2 were trained and read first. Seeds 3 and 4 followed, with the schedule as it stands above. What other tests
of the same runs give is printed beside the verdicts (`other_readings`); it is no part of the schedule.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import scipy.stats
import torch
import typer
from jaxtyping import Float
from matplotlib.figure import Figure
from statsmodels.stats.multitest import multipletests
from tlspectral_studies.common.markdown_table import markdown_table
from tlspectral_studies.common.model import AttentionOnlyTransformer
from tlspectral_studies.common.seed_intervals import t_interval
from tlspectral_studies.fingerprint.constrained import ARMS, PRESETS, Arm, Preset, constrained_grid
from tlspectral_studies.fingerprint.statistics.rank_tests import mann_whitney
from torch import Tensor

from tlspectral.heads.operators.penalty import antisymmetric_squares
from tlspectral.plots.style import BLUE, GREEN, INK, ORANGE, RED, dress, new_figure
from tlspectral.tables.atomic_writes import whole_file

SEEDS, BEHIND, LEVEL = 5, 200, 0.05
WINDOWS, BONUS_STEPS, BONUS_WEIGHT = (50, 100, 200, 300), 300, 1.0
PRESET = replace(PRESETS["quick"], name="steering windows", stop_after=BEHIND)
STORED = Path("docs/results/constrained")
FREE, BANNED, BONUS, PREVIOUS = "ape_free", "ape_sym", "ape_bonus", "ape_previous"
CRITERIA = ("formed_loss", "formed_both")


def window_arm(steps: int) -> str:
    """Return the name of the arm with a penalty in that many first steps."""
    return "ape_assisted" if steps == 300 else f"ape_window_{steps}"


def symmetric_bonus(model: AttentionOnlyTransformer) -> Float[Tensor, ""]:
    """Return minus the symmetric share of M, `||M_S||^2 / ||M||^2`, mean over heads, with a detached denominator."""
    shares = []
    for block in model.layers:
        part, whole = antisymmetric_squares(block.attn.W_Q, block.attn.W_K)
        shares.append(((whole - part) / whole.detach()).mean())
    return -torch.stack(shares).mean()


def previous_first_head(model: AttentionOnlyTransformer, steps: int = 200) -> None:
    """Make L0H0 a previous-token head with a symmetric M, in place: W_K is fitted, W_Q is W_K with fixed signs."""
    block, config = model.layers[0], model.config
    stream = torch.Generator().manual_seed(0)
    factor = block.attn.W_K[0].detach().clone().requires_grad_()
    signs = torch.ones(config.d_head)
    signs[::2] = -1  # a positive semidefinite M would have each position attend to itself
    optimizer = torch.optim.Adam([factor], lr=0.02)
    for _ in range(steps):
        tokens = torch.randint(0, config.d_vocab, (4, config.n_ctx), generator=stream)
        x = block.ln1(model.embedded(tokens)).detach()  # batch pos d_model
        with torch.enable_grad():
            scores = (x @ (factor * signs)) @ (x @ factor).mT / config.d_head**0.5  # batch query key
            scores = scores.masked_fill(block.attn.get_buffer("future"), -torch.inf)
            loss = -scores.log_softmax(-1).diagonal(-1, -2, -1).mean()
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
    block.attn.W_K[0], block.attn.W_Q[0] = factor.detach(), (factor * signs).detach()


def trained_arms() -> list[Arm]:
    """Return the arms of the schedule that are trained here, in the order of their training."""
    banned = ARMS[BANNED]
    windows = [replace(banned, name=window_arm(steps), penalty_until=steps) for steps in (100, 50, 200)]
    bonus = Arm(BONUS, "standard", symmetric_bonus, BONUS_WEIGHT, penalty_until=BONUS_STEPS)
    return [*windows, bonus, Arm(PREVIOUS, "standard", initial_weights=previous_first_head)]


def rows_of(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return a row per trained run: steps of formation, and the final previous-token head with its `dir_frac`."""
    rows = []
    for run in tables["formation"].to_dict(orient="records"):
        heads = tables["heads"]
        at_end = heads[
            (heads["arm"] == run["arm"]) & (heads["seed"] == run["seed"]) & (heads["step"] == run["last_step"])
        ]
        head = at_end.loc[at_end["prev"].idxmax()]
        named = {name: run[name] for name in ("arm", "seed", *CRITERIA, "last_step")}
        rows.append({**named, "head": head["name"], "prev": head["prev"], "share": head["dir_frac_raw"]})
    return pd.DataFrame(rows)


def train_missing(folder: Path, output: Path, seeds: int, preset: Preset = PRESET) -> None:
    """Train the arms of each seed that has not all its rows in `output`, and add the rows there after each seed."""
    arms = trained_arms()
    order = {arm.name: place for place, arm in enumerate(arms)}
    for seed in range(seeds):
        stored = pd.read_csv(output) if output.exists() else pd.DataFrame(columns=["arm", "seed"])
        of_seed = stored["seed"] == seed
        if of_seed.sum() == len(arms):
            continue
        made = rows_of(constrained_grid(folder, preset, arms=arms, seeds=[seed])).round(4)
        rows = pd.concat([stored[~of_seed], made])
        rows = rows.iloc[np.lexsort((rows["seed"], rows["arm"].map(order)))]  # arms outside, as they are trained
        with whole_file(output) as partial:
            rows.to_csv(partial, index=False)
        typer.echo(f"seed {seed} of {seeds} is trained")


def beside_stored(trained: pd.DataFrame) -> pd.DataFrame:
    """Return trained runs below the stored free, banned and 300-step runs of the same seeds, in equal columns."""
    stored, tracks = (pd.read_csv(STORED / f"steering{name}.csv") for name in ("", "_tracks"))
    rows = []
    for run in stored[stored["arm"].isin([FREE, BANNED, window_arm(300)])].to_dict(orient="records"):
        track = tracks[(tracks["arm"] == run["arm"]) & (tracks["seed"] == run["seed"])]
        then = track[track["step"] <= run["formed_both"] + BEHIND].iloc[-1]
        named = {name: run[name] for name in ("arm", "seed", *CRITERIA, "last_step", "head")}
        rows.append({**named, "prev": then["prev"], "share": then["share"]})
    both = pd.concat([pd.DataFrame(rows), trained], ignore_index=True)
    counted = trained.groupby("seed")["arm"].nunique()
    return both[both["seed"].isin(counted[counted == counted.max()].index)]


def by_seed(runs: pd.DataFrame, arm: str, column: str) -> pd.Series:
    """Return a column of an arm by seed; a run that did not form has its last step and no share."""
    these = runs[runs["arm"] == arm].set_index("seed").sort_index()
    if column in CRITERIA:
        return these[column].fillna(these["last_step"])
    return these.loc[these["formed_both"].notna(), column]


def less(runs: pd.DataFrame, arm: str, other: str, column: str) -> float:
    """Return p of a one-sided Mann-Whitney test that an arm's values are below another's; NaN without values."""
    ours, theirs = (by_seed(runs, name, column).to_numpy(dtype=float) for name in (arm, other))
    return mann_whitney(ours, theirs, alternative="less").pvalue if min(len(ours), len(theirs)) > 1 else float("nan")


def holm(pvalues: list[float]) -> list[float]:
    """Return p after Holm over a family; a test without values counts as 1."""
    return [float(p) for p in multipletests(np.nan_to_num(pvalues, nan=1.0), method="holm")[1]]


def row_of(runs: pd.DataFrame, arm: str) -> dict[str, object]:
    """Return what is said of an arm beside the free and the banned one: ratios, paired differences, share."""
    row: dict[str, object] = {"arm": arm, "formed": int(by_seed(runs, arm, "share").size)}
    for column in CRITERIA:
        steps, free, banned = (by_seed(runs, name, column) for name in (arm, FREE, BANNED))
        row |= {f"{column}_steps": steps.mean(), f"{column}_ratio": t_interval(steps / free)}
        row |= {f"{column}_less_banned": t_interval(steps - banned), f"{column}_less_free": t_interval(steps - free)}
    middle = (by_seed(runs, FREE, "share").mean() + by_seed(runs, BANNED, "share").mean()) / 2
    return row | {"share": t_interval(by_seed(runs, arm, "share")), "middle": middle}


def cost_word(interval: dict[str, float], p: float) -> str:
    """Return `cheaper`, `dearer` or `open` for a paired difference from the banned arm and its p after Holm."""
    if interval["low"] > 0:
        return "dearer"
    return "cheaper" if interval["high"] < 0 and p < LEVEL else "open"


def stay_word(share: dict[str, float], middle: float) -> str:
    """Return `it stays`, `it does not stay` or `open` for the interval of a share and the middle between two arms."""
    if share["high"] < middle:
        return "it stays"
    return "it does not stay" if share["low"] > middle else "open"


def verdicts(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per arm: intervals, p after Holm over the families of the schedule, and the words."""
    windows = [window_arm(steps) for steps in WINDOWS]
    rows = {arm: row_of(runs, arm) for arm in (*windows, BONUS, PREVIOUS)}
    adjusted = {
        column: dict(zip(windows, holm([less(runs, arm, BANNED, column) for arm in windows]), strict=True))
        for column in CRITERIA
    }
    shares = dict(zip(windows, holm([less(runs, arm, FREE, "share") for arm in windows]), strict=True))
    ban_free = [(BONUS, BANNED, column) for column in CRITERIA] + [(BONUS, FREE, "share")]
    ban_free += [(PREVIOUS, FREE, column) for column in CRITERIA]
    p = dict(zip(ban_free, holm([less(runs, *test) for test in ban_free]), strict=True))
    table = []
    for arm, row in rows.items():
        said: dict[str, object] = {}
        for column in CRITERIA:
            if arm == PREVIOUS:
                holds = row[f"{column}_less_free"]["high"] < 0 and p[PREVIOUS, FREE, column] < LEVEL
                said |= {f"{column}_p": p[PREVIOUS, FREE, column], column: "accelerates" if holds else "open"}
            else:
                value = adjusted[column][arm] if arm in windows else p[BONUS, BANNED, column]
                said |= {f"{column}_p": value, column: cost_word(row[f"{column}_less_banned"], value)}
        said["share_p"] = shares.get(arm, p[BONUS, FREE, "share"] if arm == BONUS else float("nan"))
        said["stays"] = stay_word(row["share"], row["middle"])
        said["FP"] = ""
        if arm == BONUS:
            cost = said["formed_loss"]
            holds = cost == "cheaper" and said["stays"] == "it stays"
            fails = cost == "dearer" or said["stays"] == "it does not stay"
            said["FP"] = "holds" if holds else "does not hold" if fails else "open"
        table.append(row | said)
    return pd.DataFrame(table)


def page_tables(runs: pd.DataFrame) -> str:
    """Return the tables of `docs/results/constrained.md`: the cost by both criteria, and whether the share stays."""
    table, middle = verdicts(runs), 0.0
    costs, shares = [], []
    for row in table.to_dict(orient="records"):
        arm, cells = str(row["arm"]), []
        for column in CRITERIA:
            less_of = row[f"{column}_less_free" if arm == PREVIOUS else f"{column}_less_banned"]
            cells += [_interval(row[f"{column}_ratio"], 2), _interval(less_of, 0)]
            cells += [f"{row[column]} ({row[f'{column}_p']:.3f})"]
        costs.append([f"`{arm}`" + ", against free" * (arm == PREVIOUS), *cells])
        values, middle = by_seed(runs, arm, "share"), float(row["middle"])
        below = f"{(values < middle).sum()} of {len(values)}"
        p = "" if np.isnan(row["share_p"]) else f"{row['share_p']:.3f}"
        shares.append([f"`{arm}`", _interval(row["share"], 2), below, str(row["stays"]), p])
    names = ("ratio", "less banned, steps", "cheaper (p)")
    cost = markdown_table(["arm", *(f"by {by}: {name}" for by in ("the loss", "both") for name in names)], costs)
    header = ["arm", "share (95 %)", f"below the middle, {middle:.2f}", "stays", "below free, p"]
    return "\n".join([*cost, *markdown_table(header, shares)[:-1]])


def other_readings(runs: pd.DataFrame) -> list[str]:
    """Return what other tests of the same runs give, none of them in the schedule: without Holm, and paired t tests."""
    lines = []
    for arm in (*map(window_arm, WINDOWS), BONUS, PREVIOUS):
        other = FREE if arm == PREVIOUS else BANNED
        for column in CRITERIA:
            steps = [by_seed(runs, name, column) for name in (arm, other)]
            paired = scipy.stats.ttest_rel(*steps, alternative="less").pvalue
            first, p = int((steps[0] < steps[1]).sum()), less(runs, arm, other, column)
            found = f"in {first} of {len(steps[0])} seeds; p = {p:.4f} without Holm, {paired:.2g} by a paired t test"
            lines.append(f"{arm} before {other}, {column}: {found}")
    return lines


def answers(trained: pd.DataFrame) -> str:
    """Return what is printed of the runs: seeds, steps, rows of the page, and FP's sentence for the bonus."""
    runs = beside_stored(trained)
    table = verdicts(runs)
    seeds = sorted(runs["seed"].unique().tolist())
    steps = runs.assign(f=runs["formed_both"].fillna(runs["last_step"])).pivot(index="seed", columns="arm", values="f")
    lines = [f"seeds {seeds}; steps of formation by both criteria:", steps.to_string(), page_tables(runs)]
    for row in table.to_dict(orient="records"):
        less_of = {name: _interval(row[f"formed_loss_less_{name}"], 0) for name in ("free", "banned")}
        lines.append(f"{row['arm']}, by the loss: less free {less_of['free']}, less banned {less_of['banned']}")
    said = table.set_index("arm").loc[BONUS, "FP"]
    return "\n".join([*lines, *other_readings(runs), f"FP's sentence, of the bonus: {said}"])


def _interval(found: dict[str, float], digits: int) -> str:
    return f"{found['mean']:.{digits}f} ({found['low']:.{digits}f} to {found['high']:.{digits}f})"


def figures() -> dict[str, Figure]:
    """Draw the stored runs, and return the figure by its file name."""
    return {"steering_windows.png": draw(beside_stored(pd.read_csv(STORED / "steering_windows.csv")))}


def draw(runs: pd.DataFrame) -> Figure:
    """Draw formation over the free run's and the share of the head, by arm; a dot is a seed."""
    shown = {FREE: "free", **{window_arm(steps): f"{steps} steps" for steps in WINDOWS}, BANNED: "all steps"}
    shown |= {BONUS: "bonus", PREVIOUS: "one head"}
    colors = dict.fromkeys(shown, BLUE) | {FREE: INK, BANNED: RED, BONUS: GREEN, PREVIOUS: ORANGE}
    figure = new_figure(8.4, 3.4)
    left, right = figure.subplots(1, 2)
    for place, arm in enumerate(shown):
        ratio = by_seed(runs, arm, "formed_loss") / by_seed(runs, FREE, "formed_loss")
        for axes, values in ((left, ratio), (right, by_seed(runs, arm, "share"))):
            axes.plot(place + np.linspace(-0.15, 0.15, len(values)), values, "o", color=colors[arm], ms=4)
    for axes, label in ((left, "formation by the loss, over free"), (right, "dir_frac of the head")):
        axes.set_xticks(range(len(shown)), list(shown.values()), rotation=40, ha="right")
        axes.set(ylabel=label, ylim=(0, None))
        dress(axes)
    return figure


def main(
    folder: Annotated[Path | None, typer.Argument(help="Folder of the runs; none: the stored rows.")] = None,
    output: Path = STORED / "steering_windows.csv",
    figure: Path = Path("docs/images/steering_windows.png"),
    seeds: Annotated[int, typer.Option(help="Fewer than the schedule's five.")] = SEEDS,
) -> None:
    """Train the seeds that have no rows yet, write a row per run, print the answers and draw the figure."""
    if folder is not None:
        train_missing(folder, output, seeds)
    trained = pd.read_csv(output)
    typer.echo(answers(trained))
    draw(beside_stored(trained)).savefig(figure)


if __name__ == "__main__":
    typer.run(main)
