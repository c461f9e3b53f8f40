"""How well numbers of heads find the heads that matter: scores, the page's tables and its picture."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
import typer
from matplotlib.figure import Figure
from tlspectral_studies.common.markdown_table import markdown_table

from tlspectral.plots.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, dress, legend_below, new_figure
from tlspectral.stats import partial_spearman
from tlspectral.stats.jackknife import jackknife

TOP_SHARE, LEVEL = 0.05, 0.95
GRADIENT, DEPTH, HALVES = "gradient estimate", "depth alone", "the other half"
HEAD = ["layer", "head"]
TINY = "tiny-"
MARKERS = {"mean": "o", "resample": "^", "zero": "s"}
PLAIN = {
    "D_head": "spectrum: D_head",
    "dir_frac": "spectrum: dir_frac",
    "weighted D_head": "spectrum on data: D_head",
    "weighted dir_frac": "spectrum on data: dir_frac",
    "previous token": "attention to the previous token",
    "induction": "attention to what followed before",
    "attention mass": "attention beyond the first token",
    "concentration": "concentration of queries and keys",
    "matrix entropy": "entropy of queries and keys",
    "participation ratio": "dimensions of what it writes",
    "LOCOS": "writes from the needle to the answer",
    "QR": "score of the needle",
}


def models_in(folder: Path) -> list[str]:
    """Return the models that a folder has truth of, large ones first."""
    names = [file.name.removesuffix("-truth.csv") for file in folder.glob("*-truth.csv")]
    return sorted(names, key=lambda name: (name.startswith(TINY), name))


def n_top(heads: int) -> int:
    """Return how many heads matter."""
    return max(1, round(TOP_SHARE * heads))


def top_of(sizes: np.ndarray) -> np.ndarray:
    """Return a mask of the largest 5 %."""
    mask = np.zeros(len(sizes), dtype=bool)
    mask[np.argsort(-sizes, kind="stable")[: n_top(len(sizes))]] = True
    return mask


def auc(numbers: np.ndarray, top: np.ndarray) -> float:
    """Return the probability that a head of the 5 % stands before one of the others; ties count half."""
    positive, negative = top.sum(), (~top).sum()
    if not positive or not negative:
        return np.nan
    ranks = scipy.stats.rankdata(numbers)
    return float((ranks[top].sum() - positive * (positive + 1) / 2) / (positive * negative))


def recall(numbers: np.ndarray, top: np.ndarray) -> float:
    """Return the share of the 5 % among as many heads ranked first; of tied heads the share that a draw would take."""
    ranks, first = scipy.stats.rankdata(-numbers, method="min"), int(top.sum())
    last = np.sort(ranks)[first - 1]
    sure, tied = ranks < last, ranks == last
    return float((top & sure).sum() + (top & tied).sum() * (first - sure.sum()) / tied.sum()) / first


def scores_of_model(folder: Path, name: str) -> pd.DataFrame:
    """Score every ranker on every truth of a model."""
    truth, numbers = pd.read_csv(folder / f"{name}-truth.csv"), pd.read_csv(folder / f"{name}-numbers.csv")
    tables = []
    for (ablation, task), rows in truth.groupby(["ablation", "task"], sort=False):
        halves = rows.pivot_table(index=HEAD, columns="half", values="delta")
        table = numbers.drop(columns="name").set_index(HEAD).reindex(halves.index)
        estimate = f"{GRADIENT}, {task}"
        table = table[[column for column in table if not column.startswith(GRADIENT)]].assign(
            **{GRADIENT: table[estimate]}
        )
        scored = _scores(table, halves.to_numpy())
        tables.append(scored.assign(model=name, ablation=ablation, task=task))
    return pd.concat(tables, ignore_index=True)


def _scores(table: pd.DataFrame, halves: np.ndarray) -> pd.DataFrame:
    sizes = np.abs(halves.mean(1))
    top = top_of(sizes)
    layers = table.index.get_level_values("layer").to_numpy()
    from_middle = -np.abs(layers - layers.max() / 2)
    depth = max((-layers, layers, from_middle), key=lambda order: auc(order, top))
    rows = []
    for ranker, column in {**table, DEPTH: pd.Series(depth, table.index)}.items():
        numbers = column.to_numpy(float)
        known = ~np.isnan(numbers)
        if not known.all():
            raise ValueError(f"{ranker}: no number for {(~known).sum()} of {len(known)} heads")
        value = auc(numbers, top)
        left_out = np.array([auc(numbers[layers != one], top[layers != one]) for one in np.unique(layers)])
        without = np.array([auc(depth[layers != one], top[layers != one]) for one in np.unique(layers)])
        low, high = jackknife(value, left_out, LEVEL)[0]
        beyond = value - auc(depth, top)
        beyond_low, beyond_high = jackknife(beyond, left_out - without, LEVEL)[0]
        within = partial_spearman(numbers, sizes, np.empty((len(sizes), 0)), method="rank", layers=layers)
        rows.append({
            "ranker": ranker, "auc": value, "auc_low": low, "auc_high": high, "recall": recall(numbers, top),
            "spearman": scipy.stats.spearmanr(numbers, sizes).statistic, "beyond_depth": beyond,
            "beyond_depth_low": beyond_low, "beyond_depth_high": beyond_high,
            "within_layers": within.statistic, "within_layers_p": within.pvalue,
            "rank_of_first": scipy.stats.rankdata(-numbers)[sizes.argmax()],
        })  # fmt: skip
    if halves.shape[1] == 2:
        one, other = np.abs(halves.T)
        both = [(numbers, truth, top_of(truth)) for numbers, truth in ((one, other), (other, one))]
        rows.append({
            "ranker": HALVES, "auc": np.mean([auc(numbers, top) for numbers, _, top in both]),
            "recall": np.mean([recall(numbers, top) for numbers, _, top in both]),
            "spearman": scipy.stats.spearmanr(one, other).statistic,
        })  # fmt: skip
    return pd.DataFrame(rows)


def print_page(scores: pd.DataFrame) -> None:
    """Print means over truths, a table for each large model, and one of the tiny ones."""
    large = scores[~scores["model"].str.startswith(TINY)]
    over_truths = large.assign(above=large["beyond_depth_low"] > 0).groupby(["ranker", "model"])
    means = over_truths[["auc", "recall", "above"]].agg({"auc": "mean", "recall": "mean", "above": "sum"})
    means["shown"] = [f"{row.auc:.2f} | {row.recall:.2f} | {row.above}" for row in means.itertuples()]
    by_model = means["shown"].unstack().loc[means["auc"].groupby("ranker").mean().sort_values(ascending=False).index]
    header = ["ranker", *(f"{name}: {what}" for name in by_model for what in ("AUC", "recall", "above depth"))]
    rows = (
        [ranker, *" | ".join(of_models).split(" | ")]
        for ranker, of_models in zip(by_model.index, by_model.values, strict=True)
    )
    typer.echo("\n".join(markdown_table(header, rows)))
    for model, of_model in large.groupby("model", sort=False):
        wide = {}
        for (ablation, task), rows in of_model.groupby(["ablation", "task"], sort=False):
            for row in rows.itertuples():
                entry = wide.setdefault(row.ranker, {"ranker": row.ranker})
                number = f"{row.auc:.2f} ({row.recall:.2f})"
                entry[f"{task}, {ablation}"] = f"**{number}**" if row.beyond_depth_low > 0 else number
        columns = list(next(iter(wide.values())))
        order = of_model.groupby("ranker")["auc"].mean().sort_values(ascending=False).index
        rows = ([wide[ranker].get(column, "") for column in columns] for ranker in order)
        typer.echo(f"\n{model}\n\n" + "\n".join(markdown_table(columns, rows)))
    tiny = scores[scores["model"].str.startswith(TINY) & (scores["ranker"] != HALVES)]
    ranks = tiny.pivot_table(index="ranker", columns="ablation", values="rank_of_first").sort_values("mean")
    rows = ([ranker, *(f"{rank:.1f}" for rank in of_ranker)] for ranker, of_ranker in ranks.iterrows())
    typer.echo("\ntiny models\n\n" + "\n".join(markdown_table(["ranker", *ranks], rows)))


def draw(scores: pd.DataFrame) -> Figure:
    """Draw the AUC of every ranker on every truth of the large models."""
    large = scores[~scores["model"].str.startswith(TINY)]
    means = large[large["ranker"] != HALVES].groupby(["ranker", "model"])["auc"].mean().groupby("ranker").mean()
    order, names = means.sort_values().index, list(large["model"].unique())
    colours = dict(zip(large["task"].unique(), (BLUE, ORANGE, GREEN, PURPLE), strict=True))
    figure = new_figure(8.4, 6.4)
    shown: dict[str, Any] = {}
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        of_model = large[large["model"] == name]
        for (task, ablation), rows in of_model.groupby(["task", "ablation"]):
            values, marker = rows.set_index("ranker")["auc"].reindex(order), MARKERS[ablation]
            look = {"color": colours[task], "alpha": 0.8, "markersize": 5}
            [shown[f"{task}, {ablation}"]] = axes.plot(values, range(len(order)), marker, **look)
        mean = of_model.groupby("ranker")["auc"].mean()
        [shown["mean"]] = axes.plot(mean.reindex(order), range(len(order)), "|", color=INK, markersize=15)
        if HALVES in mean:
            look = {"color": "#edf1e4", "linewidth": 0}
            shown["beyond what one half finds of the other"] = axes.axvspan(mean[HALVES], 1.01, **look)
        shown["chance"] = axes.axvline(0.5, color=GREY, linewidth=1)
        axes.set(xlim=(0, 1.01), xlabel="AUC")
        axes.grid(axis="y", color="#edeff2")
        axes.set_axisbelow(True)
        axes.set_yticks(range(len(order)), [PLAIN.get(ranker, ranker) for ranker in order])
        axes.set_title(name, fontsize=10, color=INK, loc="left")
        dress(axes)
    note = "AUC: chance that a head that matters is ranked before another"
    legend_below(figure, [(artist, text) for text, artist in shown.items()], [note], columns=3)
    return figure
