"""Prices of a short cache: what the loss of later tokens costs if key/value groups keep a window and the first tokens.

    python benchmarks/cache_prices.py sets smollm2-135m      # chosen groups together, beside 39 random sets
    python benchmarks/cache_prices.py groups smollm2-135m    # each group alone
    python benchmarks/cache_prices.py page                   # the tables of docs/results/cache_prices.md

and the same for gemma3-270m. Both resume from out/cache_prices.

Schedule, fixed before the first run (29 November 2026). `tls.cache_prices` on rows of the packaged book, one behind the
other, each with a start token; 4 first tokens stay visible. Rows 0 to 7 are priced, rows 8 to 15 choose groups and
price nothing.

* Each group alone: window 128, 8 rows of 512 tokens. 1,024 tokens would take twice to three times the CPU budget.
* A set together: the half of all groups with the least attention to keys outside window and first tokens, on rows 8 to
  15; windows 64, 128 and 256; 39 random sets with as many groups of each layer beside each. 8,192 x 2 tokens would take
  more than the CPU budget, and two rows give no error.
* Gemma 3 270M has one group in each layer, so no random set of the same layers exists. Its sets are compared with 39
  random sets of as many layers, drawn with seed 0 from all layers.

The number is the paired difference: the set's change of the loss less that of a random set on the same rows, mean over
the 39 sets, with the standard error over the 8 rows, and p = (1 + random sets that cost no more) / 40. The p of all
sets of both models are corrected together by Benjamini-Hochberg. Chosen groups are said to beat random ones where
q < .05.

Amended on 29 November 2026, before any number was read. A pass over 8 x 512 tokens took 15 CPU seconds on a shared
processor, and 400 such passes are more than the budget. So rows have 256 tokens, and the window of groups alone is 64.
Sets are priced in this order, as far as the budget allows: SmolLM2 at 64, Gemma at 64, SmolLM2 at 32, Gemma at 32.
A group alone is said to have a price if q < .05 (t test of its 8 paired differences, corrected over the model's groups
by Benjamini-Hochberg). The joint price of a set is compared with the sum of its groups' prices alone.

Amended on the same day, after SmolLM2's set at 64 and before any number of Gemma: the processor has no time for 39
random sets of Gemma's layers, nor for window 32. Gemma's half is priced without a control. One set has a p, so no p of
sets is corrected. Before any number of Gemma also: its rows have 128 tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from time import process_time

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import t

import tlspectral as tls
from tlspectral.hooks.short_caches import CHOSEN
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.text import text_tokens
from tlspectral.plots.style import GREY, INK, RED, dress, new_figure

FOLDER, WORK = Path("docs/results/cache"), Path("out/cache_prices")
MODELS = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
LENGTHS = {"smollm2-135m": 256, "gemma3-270m": 128}
ROWS, WINDOW, SINKS, DRAWS = 8, 64, 4, 39

app = typer.Typer(no_args_is_help=True, add_completion=False)


def opened(model_name: str) -> tuple[AttentionView, torch.Tensor, torch.Tensor]:
    """Return the view of a model, the rows that are priced, and the rows that choose."""
    torch.set_num_threads(1)
    view = attention_view(tls.load_model(model_name))
    rows = text_tokens(view, None, n_sequences=2 * ROWS, sequence_length=LENGTHS[model_name])
    return view, rows[:ROWS], rows[ROWS:]


def stored(table: pd.DataFrame, name: str, begun: float) -> None:
    """Write a table of results, with lists as numbers between spaces, and print its cost."""
    lists = [column for column in table if table[column].map(lambda value: isinstance(value, list)).any()]
    table = table.assign(
        **{column: [" ".join(f"{value:.5g}" for value in values) for values in table[column]] for column in lists}
    )
    FOLDER.mkdir(parents=True, exist_ok=True)
    table.to_csv(FOLDER / f"{name}.csv", index=False, float_format="%.6g")
    print(f"{name}: {process_time() - begun:.0f} CPU seconds", flush=True)


@app.command()
def groups(model_name: str) -> None:
    """Price each group of a model alone, and write a row per group."""
    view, rows, _ = opened(model_name)
    begun, folder = process_time(), WORK / f"{model_name}-groups"
    table = tls.cache_prices(view.model, rows, windows=[WINDOW], sinks=SINKS, draws=DRAWS, folder=folder)
    stored(table, f"{model_name}-groups", begun)


@app.command()
def sets(model_name: str) -> None:
    """Price the groups of least distant attention together, beside random sets, and write a row."""
    view, rows, choosing = opened(model_name)
    begun, name = process_time(), f"{model_name}-set{WINDOW}"
    options = {"windows": [WINDOW], "sinks": SINKS, "draws": DRAWS, "folder": WORK / name}
    table = tls.cache_prices(view.model, rows, groups=False, chosen_on=choosing, **options)
    names = table.attrs["sets"][str(WINDOW)][CHOSEN]
    stored(table.assign(groups=" ".join(names)), name, begun)


def numbers(text: str) -> np.ndarray:
    """Return the numbers of a cell that holds a list."""
    return np.array(str(text).split(), dtype=float)


def priced_set(model_name: str) -> pd.Series:
    """Return the stored row of a model's chosen half at `WINDOW`."""
    return pd.read_csv(FOLDER / f"{model_name}-set{WINDOW}.csv").iloc[0]


def priced_groups(model_name: str) -> pd.DataFrame:
    """Return the stored row of each group of a model alone, with `pvalue` (t test over rows) and `qvalue`."""
    table = pd.read_csv(FOLDER / f"{model_name}-groups.csv")
    table["pvalue"] = 2 * t.sf((table["delta"] / table["delta_se"]).abs(), ROWS - 1)
    table["qvalue"] = tls.stats.benjamini_hochberg(table["pvalue"]).q
    return table


def rows_of_page() -> Iterator[str]:
    """Yield the rows of the tables of the page: chosen halves, groups alone, the dearest groups."""
    for name, title in MODELS.items():
        row = priced_set(name)
        cells = [title, f"{row['n_groups']} of {len(priced_groups(name))}", f"{row['could_differ']}"]
        cells += [f"{row['loss'] - row['delta']:.2f}", f"{row['delta']:.3f} ± {row['delta_se']:.3f}"]
        if row["could_differ"]:
            draws = numbers(row["excess_draws"])
            cells += [f"{row['delta'] - row['excess']:.3f}", f"{row['excess']:.4f} ± {row['excess_se']:.4f}"]
            cells += [f"{draws.min():.3f} to {draws.max():.3f}", f"{row['excess_p']:.3f}"]
        else:
            cells += ["none exists", "", "", ""]
        yield f"| {' | '.join(cells)} |"
    for name, title in MODELS.items():
        alone, chosen = priced_groups(name), priced_set(name)
        own = alone["name"].isin(chosen["groups"].split())
        yield (
            f"| {title} | {len(alone)} | {(alone['qvalue'] < 0.05).sum()} | {alone['delta'].median():.4f} | "
            f"{alone['delta'].sum():.3f} | {alone['delta'][own].sum():.3f} | {chosen['delta']:.3f} |"
        )
    for name, title in MODELS.items():
        for row in priced_groups(name).nlargest(5, "delta").itertuples():
            yield f"| {title} | {row.name} | {row.delta:.3f} ± {row.delta_se:.3f} | {row.qvalue:.3f} |"


@app.command()
def page() -> None:
    """Print the rows of the tables of the page."""
    for row in rows_of_page():
        print(row)


def figures() -> dict[str, Figure]:
    """Return the figure of the page by file name: groups alone by layer, and chosen halves beside random sets."""
    figure = new_figure(7.2, 3.6)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 1))
    for number, (name, title) in enumerate(MODELS.items()):
        axes, alone = figure.add_subplot(grid[0, number]), priced_groups(name)
        for found, color in ((False, GREY), (True, RED)):
            some = alone[(alone["qvalue"] < 0.05) == found]
            axes.errorbar(some["layer"], some["delta"], yerr=some["delta_se"], fmt="o", color=color, markersize=3)
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("layer of the group")
        axes.set_ylabel("price alone (nats)" if number == 0 else "")
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        dress(axes)
        axes, row = figure.add_subplot(grid[1, number]), priced_set(name)
        if row["could_differ"]:
            drawn = row["delta"] - numbers(row["excess_draws"])
            axes.plot(drawn, np.full(len(drawn), -0.4), "o", color=GREY, markersize=3, alpha=0.6)
        axes.errorbar(row["delta"], 0, xerr=row["delta_se"], fmt="o", color=RED, markersize=5, capsize=2)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_yticks([])
        axes.set_ylim(-0.8, 0.4)
        axes.set_xlabel("price of half the groups together (nats)")
        dress(axes)
    return {"cache_prices.png": figure}


if __name__ == "__main__":
    app()
