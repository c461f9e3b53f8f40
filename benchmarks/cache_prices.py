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
"""

from collections.abc import Iterator
from pathlib import Path
from time import process_time

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from scipy.stats import t

import tlspectral as tls
from tlspectral.hooks.short_caches import CHOSEN
from tlspectral.hooks.sweeps.layer_effects import set_values
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.text import text_tokens
from tlspectral.plots.style import GREY, INK, RED, dress, new_figure
from tlspectral.tasks.metrics import next_token_loss
from tlspectral.tasks.task_sequences import intact_values, task_sequences

FOLDER, WORK = Path("docs/results/cache"), Path("out/cache_prices")
MODELS = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
ROWS, LENGTH, SINKS, DRAWS = 8, 256, 4, 39
WINDOW = 64
"""The window of groups alone."""

app = typer.Typer(no_args_is_help=True, add_completion=False)


def opened(model_name: str) -> tuple[AttentionView, torch.Tensor, torch.Tensor]:
    """Return the view of a model, the rows that are priced, and the rows that choose."""
    torch.set_num_threads(1)
    view = attention_view(tls.load_model(model_name))
    rows = text_tokens(view, None, n_sequences=2 * ROWS, sequence_length=LENGTH)
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
def sets(model_name: str, window: int = WINDOW) -> None:
    """Price the groups of least distant attention together, beside random sets, and write a row."""
    view, rows, choosing = opened(model_name)
    begun, name = process_time(), f"{model_name}-set{window}"
    options = {"windows": [window], "sinks": SINKS, "draws": DRAWS, "folder": WORK / name}
    table = tls.cache_prices(view.model, rows, groups=False, chosen_on=choosing, **options)
    names = table.attrs["sets"][str(window)][CHOSEN]
    table = table.assign(groups=" ".join(names))
    if not table["could_differ"].any():
        table = of_any_layers(view, rows, table, window)
    stored(table, name, begun)


def of_any_layers(view: AttentionView, rows: torch.Tensor, table: pd.DataFrame, window: int) -> pd.DataFrame:
    """Return `table`, the row of a set of whole layers, with its excess over random sets of as many layers."""
    chosen = sorted({int(name.partition("KV")[0][1:]) for name in table["groups"].iloc[0].split()})
    rng, drawn = np.random.default_rng(0), [tuple(chosen)]
    while len(drawn) <= DRAWS:
        one = tuple(sorted(rng.choice(view.n_layers, len(chosen), replace=False).tolist()))
        drawn += [one] if one not in drawn else []
    runs = [[(layer, head) for layer in layers for head in range(view.n_heads(layer))] for layers in drawn]
    task = tls.Task(rows, next_token_loss, predict=slice(window + SINKS, -1), higher_is_better=False, name="text")
    sequences = task_sequences(view, task)
    intact, losses = intact_values(view, sequences, [*view.layers])
    deltas = []
    for number, run in enumerate(runs):
        file = WORK / f"{view.source['model']}-{window}-layers" / f"{number}.npy"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, set_values(tls.parts.LongRange(window, SINKS), sequences, [run], intact).numpy()[0] - losses)
        deltas.append(np.load(file))
    own, others = deltas[0], np.stack(deltas[1:])
    paired = own - others
    error = paired.std(1, ddof=1) / np.sqrt(len(losses))
    return table.assign(
        excess=paired.mean(),
        excess_se=paired.mean(0).std(ddof=1) / np.sqrt(len(losses)),
        excess_p=(1 + int((paired.mean(1) >= 0).sum())) / (1 + DRAWS),
        excess_draws=[paired.mean(1).tolist()],
        excess_draws_se=[error.tolist()],
        drawn_layers=" | ".join(" ".join(map(str, layers)) for layers in drawn[1:]),
    )


def numbers(text: str) -> np.ndarray:
    """Return the numbers of a cell that holds a list."""
    return np.array(str(text).split(), dtype=float)


def priced_sets() -> pd.DataFrame:
    """Return a row per stored set, with `model`, `random` (mean price of the random sets) and `qvalue`."""
    files = [(name, FOLDER / f"{name}-set{window}.csv") for name in MODELS for window in (WINDOW, WINDOW // 2)]
    table = pd.concat([pd.read_csv(file).assign(model=name) for name, file in files if file.exists()])
    table = table.reset_index(drop=True).assign(random=table["delta"].to_numpy() - table["excess"].to_numpy())
    table["qvalue"] = tls.stats.benjamini_hochberg(table["excess_p"]).q
    return table


def priced_groups(model_name: str) -> pd.DataFrame:
    """Return the stored row of each group of a model alone, with `pvalue` (t test over rows) and `qvalue`."""
    table = pd.read_csv(FOLDER / f"{model_name}-groups.csv")
    table["pvalue"] = 2 * t.sf((table["delta"] / table["delta_se"]).abs(), ROWS - 1)
    table["qvalue"] = tls.stats.benjamini_hochberg(table["pvalue"]).q
    return table


def rows_of_page() -> Iterator[str]:
    """Yield the rows of the tables of the page: sets, groups alone, the dearest groups."""
    sets_of_models = priced_sets()
    for row in sets_of_models.itertuples():
        draws = numbers(row.excess_draws)
        yield (
            f"| {MODELS[row.model]} | {row.window} | {row.n_groups} | {row.loss - row.delta:.2f} | "
            f"{row.delta:.3f} ± {row.delta_se:.3f} | {row.random:.3f} | {row.excess:.3f} ± {row.excess_se:.3f} | "
            f"{draws.min():.3f} to {draws.max():.3f} | {row.excess_p:.3f} | {row.qvalue:.2f} |"
        )
    for name, title in MODELS.items():
        alone = priced_groups(name)
        chosen = sets_of_models[(sets_of_models["model"] == name) & (sets_of_models["window"] == WINDOW)].iloc[0]
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
    """Return the figure of the page by file name: groups alone by layer, and chosen sets beside random sets."""
    figure = new_figure(7.2, 4.2)
    sets_of_models = priced_sets()
    for number, (name, title) in enumerate(MODELS.items()):
        axes, alone = figure.add_subplot(2, 2, 1 + number), priced_groups(name)
        for found, color in ((False, GREY), (True, RED)):
            some = alone[(alone["qvalue"] < 0.05) == found]
            axes.errorbar(some["layer"], some["delta"], yerr=some["delta_se"], fmt="o", color=color, markersize=3)
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.set_xlabel("layer of the group")
        axes.set_ylabel("price alone (nats)" if number == 0 else "")
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        dress(axes)
        axes, own = figure.add_subplot(2, 2, 3 + number), sets_of_models[sets_of_models["model"] == name]
        for place, row in enumerate(own.itertuples()):
            drawn = row.delta - numbers(row.excess_draws)
            axes.plot(drawn, np.full(len(drawn), -place - 0.2), "o", color=GREY, markersize=3, alpha=0.6)
            axes.errorbar(row.delta, -place, xerr=row.delta_se, fmt="o", color=RED, markersize=5, capsize=2)
        axes.set_yticks([-place for place in range(len(own))], [f"window {window}" for window in own["window"]])
        axes.set_ylim(-len(own) + 0.4, 0.6)
        axes.set_xlabel("price of half the groups together (nats)")
        dress(axes)
    return {"cache_prices.png": figure}


if __name__ == "__main__":
    app()
