"""Attention sinks at several thresholds: how many there are, and what entropy and distance are without them.

`python benchmarks/sinks.py measure MODEL` writes docs/results/sinks/MODEL.csv (two minutes of CPU for SmolLM2-135M or
Gemma 3 270M on one thread), a row per threshold and layer; `python benchmarks/sinks.py page` prints the table of
docs/results/sinks.md. Text is 64 x 64 tokens of the packaged book.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typer

import tlspectral as tls
from tlspectral.heads.detectors.heads import sequences_at_once
from tlspectral.heads.detectors.sinks import LEAST, found_sinks
from tlspectral.heads.detectors.spread import Spread
from tlspectral.models.hooking.strips import OfStrips, Strip
from tlspectral.models.reading import attention_view
from tlspectral.models.running.batches import even_rows
from tlspectral.models.running.passes import run_until
from tlspectral.models.running.text import text_tokens

FOLDER = Path("docs/results/sinks")
MODELS = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
SEQUENCES, LENGTH = 64, 64
THRESHOLDS = (0.05, 0.1, LEAST, 0.2, 0.25, 0.3, 0.4)
GROUPS = {"smollm2-135m": ((0, 2), (3, 9), (10, 10), (12, 29)), "gemma3-270m": ((0, 17),)}
"""Layers that the page takes together, first and last."""

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def measure(model_name: str) -> None:
    """Measure the heads of a model without the sinks of each threshold, and write a row per threshold and layer."""
    torch.set_num_threads(1)
    view = attention_view(tls.load_model(model_name))
    prompts = even_rows(text_tokens(view, None, n_sequences=SEQUENCES, sequence_length=LENGTH))
    at_once = sequences_at_once(view, LENGTH)
    sinks = found_sinks(view, prompts, view.layers, at_once)
    spreads = {least: Spread(view, prompts, None, replace(sinks, least=least)) for least in THRESHOLDS}

    def read(layer: int, rows: slice, pattern: torch.Tensor, strip: Strip, hook: Any) -> None:
        for spread in spreads.values():
            spread.read(layer, pattern, strip, rows)

    for start in range(0, SEQUENCES, at_once):
        rows = slice(start, min(start + at_once, SEQUENCES))
        hooks = [(view.hook_names(layer)["pattern"], OfStrips(partial(read, layer, rows))) for layer in view.layers]
        run_until(view, prompts.tokens[rows], hooks, last=hooks[-1][0])
        for spread in spreads.values():
            spread.end_batch(rows)
    layers = [layer for layer in view.layers for _ in range(view.n_heads(layer))]
    table = []
    for least, spread in spreads.items():
        heads = pd.DataFrame({"layer": layers, **spread.measured()})
        for layer, own in heads.groupby("layer"):
            found = replace(sinks, least=least).found[int(layer)]  # type: ignore[arg-type]
            counts = {"first": float(found[:, 0].sum()) / SEQUENCES, "others": float(found[:, 1:].sum()) / SEQUENCES}
            columns = ["distance", "distance_sinkless", "distance_no_sinks", "entropy", "entropy_sinkless"]
            medians = own[[*columns, "entropy_no_sinks", "sink_share"]].median()
            table.append({"least": least, "layer": layer, **counts, **medians})
    FOLDER.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(table).round(4).to_csv(FOLDER / f"{model_name}.csv", index=False)


def rows_of_page() -> Iterator[str]:
    """Yield the rows of the page's table: means over layers that are taken together, a column per threshold."""
    for name, title in MODELS.items():
        table = pd.read_csv(FOLDER / f"{name}.csv")
        for first, last in GROUPS[name]:
            mean = table[table["layer"].between(first, last)].groupby("least").mean()
            layers = f"{title}, {first}" + ("" if first == last else f" to {last}")
            for column, said, digits in (("first", "first token", 2), ("others", "other sinks", 2)):
                yield _row(layers, said, ["", ""], mean[column], digits)
            for column, digits in (("distance", 1), ("entropy", 2)):
                without = [_number(mean[each].iloc[0], digits) for each in (column, f"{column}_sinkless")]
                yield _row(layers, column, without, mean[f"{column}_no_sinks"], digits)


def _row(layers: str, said: str, without: list[str], values: pd.Series, digits: int) -> str:
    return f"| {' | '.join([layers, said, *without, *(_number(value, digits) for value in values)])} |"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".removeprefix("0" if value < 1 else "")


@app.command()
def page() -> None:
    """Print the table of docs/results/sinks.md."""
    for row in rows_of_page():
        typer.echo(row)


if __name__ == "__main__":
    app()
