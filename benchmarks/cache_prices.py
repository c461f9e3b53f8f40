"""Prices of a short cache: what the loss of later tokens costs if key/value groups keep a window and the first tokens.

    python benchmarks/cache_prices.py groups smollm2-135m          # each group alone
    python benchmarks/cache_prices.py sets smollm2-135m 8 1024 64  # half of the groups; rows, tokens of a row, window
    python benchmarks/cache_prices.py layers smollm2-135m          # that half beside halves of all layers
    python benchmarks/cache_prices.py page                         # the tables of docs/results/cache_prices.md

and the same for gemma3-270m. The first two resume from out/cache_prices. `SETS` lists the calls of `sets` that the page
shows.

Schedule. `tls.cache_prices` on rows of the packaged book, one behind the other, each with a start token; 4 first tokens
stay visible. As many other rows, which come next in the book, choose groups and price nothing.

* Each group alone: `ALONE`.
* A set together: the half of all groups with the least attention to keys outside window and first tokens on the other
  rows, beside 39 random sets with as many groups of each layer. Gemma 3 270M has one group in each layer, so no random
  set of the same layers exists: its half is priced without a control.
* `layers`: the same half beside 39 random halves of the groups of all layers.

The number is the paired difference: the set's change of the loss less that of a random set on the same rows, mean over
the random sets, with the standard error over eight rows (two rows give none), and p = (1 + random sets that cost no
more) / (1 + random sets). The p of all sets with a control are corrected together by Benjamini-Hochberg. Chosen groups
are said to beat random ones where q < .05. A group alone is said to have a price if q < .05 (t test of its 8 paired
differences, corrected over the model's groups by Benjamini-Hochberg). The joint price of a set is compared with the sum
of its groups' prices alone.

Fixed on 29 November 2026 in four steps.

1. Before the first run: 512 tokens and windows 64, 128, 256. Before any number was read it was cut to 256 tokens
   (Gemma: 128) and window 64, because 512 tokens took more time than there was. These two sets are rows of the page.
2. After these numbers were read, and a faster way to hide keys: rows of 1,024 tokens, with windows 64, 128 and 256; one
   set in 2 rows of 8,192 tokens; groups alone at window 128. When SmolLM2's set at 64 was read, the rest of the
   processor's time was counted, and window 256, the rows of 8,192 tokens, and Gemma's groups and other windows were
   given up; none of their numbers had been read. The p of SmolLM2's three sets are corrected together.
3. `layers` was added at the same time, because step 1 had shown that the score chooses layers more than groups in them.
   It prices the set of step 1 (8 rows of 256 tokens, window 64) beside random halves, and has a p of its own.
4. In the evening most sizes that step 2 gave up were run after all, before any of their numbers was read: window 256 in
   8 rows of 1,024 tokens and in 2 rows of 8,192, and Gemma's groups alone at 1,024 tokens. Gemma's sets at windows 64
   and 256, which have no control, were left out. Strips have 64 queries from here on, because this takes less time;
   numbers differ by rounding. The p of SmolLM2's five sets are corrected together. Two rows give no error, so their set
   is judged by p and q alone.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
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
from tlspectral.hooks.sweeps.layer_effects import group_sets
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.long_prompts import strips_of
from tlspectral.models.running.text import text_tokens
from tlspectral.plots.style import GREY, INK, RED, dress, new_figure
from tlspectral.tasks.metrics import next_token_loss

FOLDER, WORK = Path("docs/results/cache"), Path("out/cache_prices")
MODELS = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
SINKS, DRAWS = 4, 39
ALONE = {"smollm2-135m": (8, 1024, 128), "gemma3-270m": (8, 1024, 128)}
"""Rows, tokens of a row and window of groups alone, by model."""

OF_LAYERS = (8, 256, 64)
"""Rows, tokens of a row and window of the set that `layers` compares with halves of all layers."""

SETS = {
    "smollm2-135m": [(8, 256, 64), (8, 1024, 64), (8, 1024, 128), (8, 1024, 256), (2, 8192, 256)],
    "gemma3-270m": [(8, 128, 64), (8, 1024, 128)],
}
"""Sets of the page by model: rows, tokens of a row, window."""

app = typer.Typer(no_args_is_help=True, add_completion=False)


def opened(model_name: str, n_rows: int, length: int) -> tuple[AttentionView, torch.Tensor, torch.Tensor]:
    """Return the view of a model, the rows that are priced, and the rows that choose."""
    torch.set_num_threads(1)
    view = attention_view(tls.load_model(model_name))
    rows = text_tokens(view, None, n_sequences=2 * n_rows, sequence_length=length)
    return view, rows[:n_rows], rows[n_rows:]


def by_strips() -> AbstractContextManager[None]:
    """Return a context in which attention is computed in strips of 64 queries, from 1,024 tokens on.

    The library takes 256 queries, from 2,048 tokens on. This takes less time, and numbers differ by rounding.
    """
    return strips_of(64, 1024)


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
    n_rows, length, window = ALONE[model_name]
    view, rows, _ = opened(model_name, n_rows, length)
    begun, folder = process_time(), WORK / f"{model_name}-groups"
    with by_strips():
        table = tls.cache_prices(view.model, rows, windows=[window], sinks=SINKS, draws=DRAWS, folder=folder)
    stored(table, f"{model_name}-groups", begun)


@app.command()
def sets(model_name: str, n_rows: int, length: int, window: int, draws: int = DRAWS) -> None:
    """Price the groups of least distant attention together, beside random sets, and write a row."""
    view, rows, choosing = opened(model_name, n_rows, length)
    begun, name = process_time(), set_name(model_name, n_rows, length, window)
    options = {"windows": [window], "sinks": SINKS, "draws": draws, "folder": WORK / name}
    with by_strips():
        table = tls.cache_prices(view.model, rows, groups=False, chosen_on=choosing, **options)
    names = table.attrs["sets"][str(window)][CHOSEN]
    stored(table.assign(groups=" ".join(names)), name, begun)


@app.command()
def layers(model_name: str) -> None:
    """Price random halves of the groups of all layers, beside the stored half of `sets`, and write a row per half."""
    n_rows, length, window = OF_LAYERS
    view, rows, _ = opened(model_name, n_rows, length)
    begun, own = process_time(), priced_set(model_name, *OF_LAYERS)["groups"].split()
    every, generator = [*group_sets(view, view.layers)], np.random.default_rng(0)
    halves = {"chosen": own, **{str(n): [*generator.choice(every, len(own), replace=False)] for n in range(DRAWS)}}
    part = tls.parts.LongRange(window, sinks=SINKS)
    task = tls.Task(rows, next_token_loss, predict=slice(window + SINKS, -1), higher_is_better=False)
    intact, deltas = tls.evaluate(view.model, task).per_sequence, {}
    for half, names in halves.items():
        with tls.ablate(view.model, names, part):
            deltas[half] = [*(tls.evaluate(view.model, task).per_sequence - intact)]
    named = [" ".join(name for name in every if name in halves[half]) for half in deltas]
    table = pd.DataFrame({"name": [*deltas], "delta": [*map(np.mean, deltas.values())], "groups": named})
    stored(table.assign(delta_by_row=[*deltas.values()]), f"{model_name}-layers", begun)


def numbers(text: str) -> np.ndarray:
    """Return the numbers of a cell that holds a list."""
    return np.array(str(text).split(), dtype=float)


def set_name(model_name: str, n_rows: int, length: int, window: int) -> str:
    """Return the name of the stored table of a set."""
    return f"{model_name}-{n_rows}x{length}-set{window}"


def priced_set(model_name: str, n_rows: int, length: int, window: int) -> pd.Series:
    """Return the stored row of a model's chosen half."""
    return pd.read_csv(FOLDER / f"{set_name(model_name, n_rows, length, window)}.csv").iloc[0]


def priced_groups(model_name: str) -> pd.DataFrame:
    """Return the stored row of each group of a model alone, with `pvalue` (t test over rows) and `qvalue`."""
    table = pd.read_csv(FOLDER / f"{model_name}-groups.csv")
    table["pvalue"] = 2 * t.sf((table["delta"] / table["delta_se"]).abs(), ALONE[model_name][0] - 1)
    table["qvalue"] = tls.stats.benjamini_hochberg(table["pvalue"]).q
    return table


def all_sets(model_name: str) -> pd.DataFrame:
    """Return the stored rows of a model's sets, with `rows`, `length`, and `qvalue` over these sets."""
    table = pd.DataFrame([priced_set(model_name, *size) for size in SETS[model_name]]).reset_index(drop=True)
    table[["rows", "length"]] = [size[:2] for size in SETS[model_name]]
    return table.assign(qvalue=tls.stats.benjamini_hochberg(table["excess_p"]).q)


def of_layers(model_name: str) -> pd.Series:
    """Return what the stored set costs beside random halves of all layers: `delta, excess, excess_se, excess_p`, and
    `drawn`, the prices of the random halves.
    """
    table = pd.read_csv(FOLDER / f"{model_name}-layers.csv").set_index("name")
    by_row = np.stack([numbers(cell) for cell in table["delta_by_row"]])
    drawn, paired = by_row[1:].mean(1), by_row[0] - by_row[1:].mean(0)
    excess_p = (1 + (drawn <= by_row[0].mean()).sum()) / (1 + len(drawn))
    error = paired.std(ddof=1) / len(paired) ** 0.5
    return pd.Series(
        {"delta": by_row[0].mean(), "excess": paired.mean(), "excess_se": error, "excess_p": excess_p, "drawn": drawn}
    )


def with_error(value: float, error: float, digits: int = 3) -> str:
    """Return a number with its standard error as text; without an error (NaN) the number alone."""
    return f"{value:.{digits}f}" + ("" if np.isnan(error) else f" ± {error:.{digits}f}")


def rows_of_page() -> Iterator[str]:
    """Yield the rows of the tables of the page: halves together, beside all layers, groups alone, dearest groups."""
    for name, title in MODELS.items():
        for row in all_sets(name).itertuples():
            cells = [title, f"{row.rows} x {row.length:,}", f"{row.window}", f"{row.could_differ}"]
            cells += [with_error(row.delta, row.delta_se)]
            if row.could_differ:
                draws = numbers(row.excess_draws)
                cells += [f"{row.delta - row.excess:.3f}", with_error(row.excess, row.excess_se, 4)]
                cells += [f"{draws.min():.3f} to {draws.max():.3f}", f"{row.excess_p:.3f}"]
                cells += [f"{row.qvalue:.3f}"]
            else:
                cells += ["none exists", "", "", "", ""]
            yield f"| {' | '.join(cells)} |"
    row = of_layers("smollm2-135m")
    drawn = row["drawn"]
    yield (
        f"| {row['delta']:.3f} | {drawn.mean():.3f} ({drawn.min():.3f} to {drawn.max():.3f}) | "
        f"{with_error(row['excess'], row['excess_se'], 4)} | {row['excess_p']:.3f} |"
    )
    for name, title in MODELS.items():
        alone, chosen = priced_groups(name), priced_set(name, *ALONE[name])
        own = alone["name"].isin(chosen["groups"].split())
        yield (
            f"| {title} | {len(alone)} | {(alone['qvalue'] < 0.05).sum()} | {alone['delta'].median():.4f} | "
            f"{alone['delta'].sum():.3f} | {alone['delta'][own].sum():.3f} | {chosen['delta']:.3f} |"
        )
    for name, title in MODELS.items():
        for row in priced_groups(name).nlargest(5, "delta").itertuples():
            q = f"{row.qvalue:.3f}" if row.qvalue >= 0.0005 else "< 0.0005"
            yield f"| {title} | {row.name} | {with_error(row.delta, row.delta_se)} | {q} |"


@app.command()
def page() -> None:
    """Print the rows of the tables of the page."""
    for row in rows_of_page():
        print(row)


def figures() -> dict[str, Figure]:
    """Return the figure of the page by file name: groups alone by layer, and chosen halves beside random sets."""
    figure = new_figure(7.2, 4.9)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2.5))
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
        axes, table = figure.add_subplot(grid[1, number]), all_sets(name)
        for place, row in table.iterrows():
            if row["could_differ"]:
                drawn = row["delta"] - numbers(row["excess_draws"])
                axes.plot(drawn, np.full(len(drawn), place + 0.3), "o", color=GREY, markersize=3, alpha=0.6)
            axes.errorbar(row["delta"], place, xerr=row["delta_se"], fmt="o", color=RED, markersize=4, capsize=2)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        names = [f"{row.length:,} tokens, {row.window}" for row in table.itertuples()]
        axes.set_yticks(table.index, names, fontsize=7)
        axes.set_ylim(len(table) - 0.3, -0.6)
        axes.set_xlabel("price of half the groups (nats)")
        dress(axes)
    return {"cache_prices.png": figure}


if __name__ == "__main__":
    app()
