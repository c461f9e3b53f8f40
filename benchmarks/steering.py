"""Is steering cheaper than banning: a penalty for the first 300 steps, or one head made so at the start.

    python benchmarks/steering.py out/steering --jobs 2    # train and print; goes on where it was stopped
    python benchmarks/steering.py                          # trains nothing: answers and figure of the stored runs

"Fingerprint, Not Blueprint" (FP, section 10) says of a companion note, its reference 11, that "ban-free assistance
[...] selects the same implementations far more cheaply than banning them (1.3x vs. 2.9x for the
antisymmetric-to-symmetric flip) while solution-specific initialization accelerates formation outright". The note was
not to be had, so that what assists is our reading: a penalty that ends before the circuit forms.

Schedule, fixed before the first run. Sizes of the preset `quick`, seeds 0 to 4, four arms for each kind of positions:

* free: `ape_free`, `rope_free`.
* banned: `ape_sym` (symmetric M) and `rope_imag` (no Im(M_t)), weight 10 in all steps.
* assisted: the same penalty and weight in the first 300 steps, none from there on.
* one head: no penalty; at the start L0H0 has what the ban would leave. With learned absolute positions W_K = W_Q, so
  that M = W_Q W_Q^T is symmetric. With rotary positions the second column of every rotary pair of W_Q and of W_K is a
  copy of the first, so that all M_t are real.

A run ends 1000 steps after both criteria of formation hold, or at step 4000. A run that does not form counts as formed
at step 4000. The share is `dir_frac` with learned absolute positions and `rope_imag_frac` with rotary ones, of the
weights as stored; the head is that with the largest `prev` at the last evaluation of a run that formed.

* Check: free and banned runs form at the steps of the stored quick grid, of which they are the same runs.
* Cost: mean step of formation by both criteria over that of the free arm, beside 1.3 and 2.9; also by the loss alone.
  Steering is "cheaper" if the assisted arm forms earlier than the banned one (p < .05), "as dear" if that is not shown
  and its mean delay behind the free arm is three quarters of the banned arm's or more, else "not decided".
* Does it stay? "It stays" if at the end of the runs the assisted arm's shares are below the free arm's (p < .05), and
  four of five or more are below the middle of the free and the banned arm's median; "it does not" if at most one of
  five is; else "in part". The same at step 1300, 1000 steps after assistance ended, is printed beside it.
* FP's sentence holds where steering is cheaper and it stays (withdrawn, see the amendment).
* One head: does the arm form earlier than the free arm (p < .05: "accelerates")? Is its share at the end below the
  free arm's? Is L0H0 the head at the end more often than one in four, the rate of a random head of its layer?

Twelve tests in one family (Holm), six for each kind of positions: one-sided Mann-Whitney tests, exact with ties, that
the assisted arm forms earlier than the banned, and later than the free; that its share is below the free arm's; that
the one-head arm forms earlier than the free, and that its share is below; and an exact binomial test that L0H0 is the
head. Five runs against five have p = 1/252 at the least, .048 after Holm if all twelve tests stand in front of it. That
banned runs form later than free ones is known from the stored grid and is not tested again.

Amendment of 2026-11-29, after the runs. FP's sentence is of ban-free assistance, which a ban that ends is not: it is no
longer judged here, but in `benchmarks/steering_windows.py`, which has four windows, a bonus, and an initial head that
solves the previous token. The assisted arm is compared with the banned and the free one by the loss (FP's rule) as
well, as paired differences over seeds with Student's 95 % intervals; these are post hoc and in no family.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import scipy.stats
import typer
from matplotlib.figure import Figure
from statsmodels.stats.multitest import multipletests
from tlspectral_studies.common.model import AttentionOnlyTransformer
from tlspectral_studies.common.seed_intervals import t_interval
from tlspectral_studies.fingerprint.constrained import ARMS, PRESETS, Arm, constrained_grid
from tlspectral_studies.fingerprint.constrained.penalties import rotary_pairs
from tlspectral_studies.fingerprint.statistics.rank_tests import mann_whitney

from tlspectral.plots.style import BLUE, GREEN, GREY, INK, RED, dress, legend_below, new_figure
from tlspectral.tables import read_table

ASSISTED, BEHIND, SEEDS = 300, 1000, 5
PRESET = replace(PRESETS["quick"], name="steering", stop_after=BEHIND)
LEVEL, SAME_COST, MOST, FEW = 0.05, 0.75, 0.8, 0.2
SHARE = {"ape": "dir_frac_raw", "rope": "rope_imag_frac_raw"}
BANNED = {"ape": "ape_sym", "rope": "rope_imag"}
KINDS = ("free", "banned", "assisted", "one head")


def symmetric_first_head(model: AttentionOnlyTransformer) -> None:
    """Give L0H0 its W_Q as W_K, in place: M = W_Q W_Q^T is symmetric."""
    attention = model.layers[0].attn
    attention.W_K[0] = attention.W_Q[0]


STORED = Path("docs/results/constrained")


def real_first_head(model: AttentionOnlyTransformer) -> None:
    """Copy the first column of every rotary pair of L0H0 onto the second, in place: every M_t is real."""
    attention, pairs = model.layers[0].attn, rotary_pairs(model.config)
    assert pairs is not None
    for weight in (attention.W_Q, attention.W_K):
        weight[0][:, pairs.imag_index] = weight[0][:, pairs.real_index]


ONE_HEAD = {"ape": ("standard", symmetric_first_head), "rope": ("rotary", real_first_head)}


def arms_of(positions: str) -> dict[str, Arm]:
    """Return the four arms of a kind of positions, `ape` or `rope`."""
    banned = ARMS[BANNED[positions]]
    embedding, initial = ONE_HEAD[positions]
    return {
        "free": ARMS[f"{positions}_free"],
        "banned": banned,
        "assisted": replace(banned, name=f"{positions}_assisted", penalty_until=ASSISTED),
        "one head": Arm(f"{positions}_one_head", embedding, initial_weights=initial),
    }


def runs_of(tables: dict[str, pd.DataFrame]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row per run, and every 100 steps `prev` and share of the head that it has at the end."""
    names = {arm.name: (positions, kind) for positions in SHARE for kind, arm in arms_of(positions).items()}
    rows, tracks = [], []
    for run in tables["formation"].itertuples():
        positions, kind = names[str(run.arm)]
        heads = tables["heads"].query("arm == @run.arm and seed == @run.seed")
        heads = heads.rename(columns={SHARE[positions]: "share"})
        by_step = {int(step): table.set_index("name") for step, table in heads.groupby("step")}
        at_end = by_step[int(run.last_step)]
        after = by_step[min(ASSISTED + BEHIND, int(run.last_step))]
        head = str(at_end["prev"].idxmax())
        rows.append(
            {
                "positions": positions,
                "kind": kind,
                "arm": run.arm,
                "seed": run.seed,
                "formed_loss": run.formed_loss,
                "formed_both": run.formed_both,
                "last_step": run.last_step,
                "head": head,
                "prev": at_end.loc[head, "prev"],
                "share": at_end.loc[head, "share"],
                "head_1300": str(after["prev"].idxmax()),
                "share_1300": after.loc[after["prev"].idxmax(), "share"],
                "mean_share_300": by_step[ASSISTED]["share"].mean(),
                "L0H0_share_0": by_step[0].loc["L0H0", "share"],
                "L0H0_share": at_end.loc["L0H0", "share"],
            }
        )
        track = heads[(heads["name"] == head) & (heads["step"] % 100 == 0)]
        tracks.append(track[["step", "prev", "share"]].assign(arm=run.arm, seed=run.seed))
    return pd.DataFrame(rows), pd.concat(tracks, ignore_index=True)[["arm", "seed", "step", "prev", "share"]]


def values(runs: pd.DataFrame, positions: str, kind: str, column: str) -> np.ndarray:
    """Return a column of an arm: steps of formation, 4000 where there is none, or shares of runs that formed."""
    these = runs[(runs["positions"] == positions) & (runs["kind"] == kind)]
    if column.startswith("formed"):
        return these[column].fillna(these["last_step"]).to_numpy(dtype=float)
    return these.loc[these["formed_both"].notna(), column].to_numpy(dtype=float)


def tests_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per test of the schedule, with p and p after Holm over all of them."""
    rows = []
    for positions in SHARE:
        for kind, other, column, alternative in (
            ("assisted", "banned", "formed_both", "less"),
            ("assisted", "free", "formed_both", "greater"),
            ("assisted", "free", "share", "less"),
            ("one head", "free", "formed_both", "less"),
            ("one head", "free", "share", "less"),
        ):
            ours, theirs = (values(runs, positions, which, column) for which in (kind, other))
            test = mann_whitney(ours, theirs, alternative=alternative)
            row = {"positions": positions, "of": kind, "against": other, "what": column, "is": alternative}
            rows.append(row | {"shift": test.hodges_lehmann, "n": len(ours), "p": test.pvalue})
        formed = runs.query("positions == @positions and kind == 'one head' and formed_both.notna()")
        hits = int((formed["head"] == "L0H0").sum())
        p = scipy.stats.binomtest(hits, len(formed), 0.25, alternative="greater").pvalue if len(formed) else np.nan
        row = {"positions": positions, "of": "one head", "against": "1 in 4", "what": "L0H0 is the head"}
        rows.append(row | {"is": "greater", "shift": hits, "n": len(formed), "p": p})
    table = pd.DataFrame(rows)
    table["holm"] = multipletests(table["p"].fillna(1.0), method="holm")[1]
    return table


def below_middle(runs: pd.DataFrame, positions: str, column: str) -> tuple[int, int, float]:
    """Return how many assisted runs have a share nearer to the banned arm's, of how many, and the middle."""
    middle = np.mean([np.median(values(runs, positions, kind, column)) for kind in ("free", "banned")])
    shares = values(runs, positions, "assisted", column)
    return int((shares < middle).sum()), len(shares), float(middle)


def verdicts(runs: pd.DataFrame, tests: pd.DataFrame) -> list[str]:
    """Return the answers in the words of the schedule, a line for each kind of positions."""
    lines = []
    for positions in SHARE:
        holm = tests[tests["positions"] == positions].set_index(["of", "against", "what"])["holm"].sort_index()
        mean = {kind: values(runs, positions, kind, "formed_both").mean() for kind in KINDS}
        dear = (mean["assisted"] - mean["free"]) >= SAME_COST * (mean["banned"] - mean["free"])
        cheaper = holm["assisted", "banned", "formed_both"] < LEVEL
        cost = "cheaper" if cheaper else "as dear" if dear else "not decided"
        below, n, middle = below_middle(runs, positions, "share")
        stays = below >= MOST * n and holm["assisted", "free", "share"] < LEVEL
        stay = "it stays" if stays else "it does not stay" if below <= FEW * n else "it stays in part"
        early, n_early, middle_early = below_middle(runs, positions, "share_1300")
        fast = "accelerates" if holm["one head", "free", "formed_both"] < LEVEL else "acceleration not shown"
        lines.append(
            f"{positions}: steering is {cost}; {stay} ({below} of {n} below {middle:.3f}; at step 1300 {early} of "
            f"{n_early} below {middle_early:.3f}); FP's sentence is of another treatment; one head: {fast}"
        )
    return lines


def paired(runs: pd.DataFrame) -> list[str]:
    """Return the assisted arm less the banned and the free one on the same seeds, by the loss and by both criteria."""
    lines = []
    for positions, column in itertools.product(SHARE, ("formed_loss", "formed_both")):
        assisted = values(runs, positions, "assisted", column)
        for other in ("banned", "free"):
            differences = assisted - values(runs, positions, other, column)
            found = t_interval(pd.Series(differences))
            lines.append(
                f"{positions}, {column}: assisted less {other} {found['mean']:.0f} ({found['low']:.0f} to "
                f"{found['high']:.0f}), earlier in {(differences < 0).sum()} of {len(differences)}"
            )
    return lines


def answers(runs: pd.DataFrame) -> str:
    """Return what is printed of the runs: costs, shares, tests, verdicts, and the check against the stored grid."""
    rows = []
    for positions in SHARE:
        for kind in KINDS:
            both, loss = (values(runs, positions, kind, f"formed_{name}") for name in ("both", "loss"))
            free = [values(runs, positions, "free", f"formed_{name}") for name in ("both", "loss")]
            these = runs[(runs["positions"] == positions) & (runs["kind"] == kind)]
            ratios = both / free[0]
            rows.append(
                {
                    "positions": positions,
                    "kind": kind,
                    "formed": int(these["formed_both"].notna().sum()),
                    "mean_both": both.mean(),
                    "sd_both": both.std(ddof=1),
                    "delay_both": both.mean() - free[0].mean(),
                    "ratio_both": both.mean() / free[0].mean(),
                    "ratios": f"{ratios.min():.2f}-{ratios.max():.2f}",
                    "mean_loss": loss.mean(),
                    "delay_loss": loss.mean() - free[1].mean(),
                    "ratio_loss": loss.mean() / free[1].mean(),
                    "share_300": these["mean_share_300"].mean(),
                    "share_1300": np.median(values(runs, positions, kind, "share_1300")),
                    "share": np.median(values(runs, positions, kind, "share")),
                    "prev": np.median(values(runs, positions, kind, "prev")),
                    "L0H0": int((these["head"] == "L0H0").sum()),
                    "L0H0_share": these["L0H0_share"].median(),
                }
            )
    tests = tests_of(runs)
    stored = read_table("docs/results/constrained/formation.parquet")
    both = runs.merge(stored, on=["arm", "seed"], suffixes=("", "_stored"))
    same = [
        (both[name].fillna(-1) == both[f"{name}_stored"].fillna(-1)).mean() for name in ("formed_loss", "formed_both")
    ]
    return "\n".join(
        [
            pd.DataFrame(rows).round(3).to_string(index=False),
            *page_rows(runs),
            tests.round(4).to_string(index=False),
            *verdicts(runs, tests),
            *paired(runs),
            f"check: of {len(both)} runs of the stored grid {same[0]:.0%} form at its step by the loss, "
            f"{same[1]:.0%} by both criteria",
        ]
    )


def page_rows(runs: pd.DataFrame) -> list[str]:
    """Return the rows of the table of steering in `docs/results/constrained.md`."""
    rows = []
    for positions in SHARE:
        free = [values(runs, positions, "free", f"formed_{name}").mean() for name in ("both", "loss")]
        for kind in KINDS:
            both, loss = (values(runs, positions, kind, f"formed_{name}") for name in ("both", "loss"))
            these = runs[(runs["positions"] == positions) & (runs["kind"] == kind)]
            shares = values(runs, positions, kind, "share")
            cells = [
                f"`{these['arm'].iloc[0]}`",
                f"{these['formed_both'].notna().sum()} of {len(these)}",
                f"{both.mean():.0f} ({both.std(ddof=1):.0f})",
                f"{both.mean() / free[0]:.2f}",
                f"{loss.mean():.0f}",
                f"{loss.mean() / free[1]:.2f}",
                f"{these['mean_share_300'].mean():.3f}",
                f"{np.median(values(runs, positions, kind, 'share_1300')):.3f}",
                f"{np.median(shares):.3f} ({shares.min():.3f} to {shares.max():.3f})",
                f"{(these['head'] == 'L0H0').sum()}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def figures() -> dict[str, Figure]:
    """Draw the stored runs, and return the figure by its file name."""
    runs, tracks = (pd.read_csv(STORED / f"steering{name}.csv") for name in ("", "_tracks"))
    return {"steering.png": draw(runs, tracks)}


def draw(runs: pd.DataFrame, tracks: pd.DataFrame) -> Figure:
    """Draw the steps of formation, and the share of the final head over training."""
    colors = dict(zip(KINDS, (INK, RED, BLUE, GREEN), strict=True))
    figure = new_figure(8.4, 6.0)
    titles = {"ape": "learned absolute positions", "rope": "rotary positions"}
    entries: dict[str, Any] = {}
    panels = figure.subplots(2, 2, width_ratios=(1, 1.3))
    for (positions, title), (left, right) in zip(titles.items(), panels, strict=True):
        for place, kind in enumerate(KINDS):
            steps = values(runs, positions, kind, "formed_both")
            left.plot(np.full(len(steps), place) + np.linspace(-0.15, 0.15, len(steps)), steps, "o", color=colors[kind])
            left.hlines(steps.mean(), place - 0.3, place + 0.3, color=colors[kind])
            arm = arms_of(positions)[kind].name
            for _, track in tracks[tracks["arm"] == arm].groupby("seed"):
                [entries[kind]] = right.plot(track["step"], track["share"], color=colors[kind], lw=1, alpha=0.8)
        left.set_xticks(range(len(KINDS)), KINDS)
        left.set(ylabel="step of formation", ylim=(0, None))
        left.set_title(title, fontsize=10, color=INK, loc="left")
        look = {"color": GREY, "lw": 0.8, "ls": "--"}
        entries["the penalty of `assisted` ends"] = right.axvline(ASSISTED, **look)
        right.set(xlabel="step", ylabel=f"{SHARE[positions].removesuffix('_raw')} of the final head", ylim=(0, None))
        dress(left)
        dress(right)
    legend_below(figure, [(artist, text) for text, artist in entries.items()], [], columns=5)
    return figure


def main(
    folder: Annotated[Path | None, typer.Argument(help="Folder of the runs; none: the stored tables of runs.")] = None,
    output: Path = STORED,
    figure: Path = Path("docs/images/steering.png"),
    jobs: Annotated[int, typer.Option(help="Processes, one thread each.")] = 1,
    seeds: Annotated[int, typer.Option(help="Fewer than the schedule's five: an answer on the way.")] = SEEDS,
) -> None:
    """Train the arms, write a row per run, print the answers and draw the figure."""
    files = [output / f"steering{name}.csv" for name in ("", "_tracks")]
    if folder is not None:
        arms = [arm for positions in SHARE for arm in arms_of(positions).values()]
        tables = constrained_grid(folder, PRESET, arms=arms, seeds=seeds, n_jobs=jobs)
        for table, file in zip(runs_of(tables), files, strict=True):
            table.round(4).to_csv(file, index=False)
    runs, tracks = (pd.read_csv(file) for file in files)
    typer.echo(answers(runs))
    draw(runs, tracks).savefig(figure)


if __name__ == "__main__":
    typer.run(main)
