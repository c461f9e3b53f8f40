"""Heads on text: how far they attend with the first token and without, and detectors beside random repeats.

`python benchmarks/on_text.py measure MODEL` writes docs/results/on_text/MODEL.csv (a minute or two of CPU for
SmolLM2-135M or Gemma 3 270M on one thread); `python benchmarks/on_text.py page` prints the numbers of
docs/results/heads.md and draws its picture. Text is 64 x 128 tokens of the packaged book; repeats are 200 sequences.
"""

from pathlib import Path

import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import tlspectral as tls
from tlspectral.models.reading import attention_view
from tlspectral.models.running.text import text_tokens
from tlspectral.plots.style import BLUE, GREY, INK, draw_dots, dress, new_figure

FOLDER = Path("docs/results/on_text")
MODELS = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
SEQUENCES, LENGTH = 64, 128
SPREAD = ("entropy", "distance", "start_share", "entropy_sinkless", "distance_sinkless", "sinkless_rows")
PAIRS = (
    ("start_share", "distance"),
    ("start_share", "distance_sinkless"),
    ("start_share", "entropy"),
    ("start_share", "entropy_sinkless"),
    ("prev_repeats", "prev"),
    ("ind_repeats", "ind"),
)
LABELS = {
    "start_share": "attention to the first token",
    "distance": "mean distance, tokens",
    "distance_sinkless": "without the first token",
    "prev": "prev on text",
    "prev_repeats": "prev on repeats",
    "ind": "ind on text",
    "ind_repeats": "ind on repeats",
}
DRAWN = [pair for pair in PAIRS if "entropy" not in pair[1]]

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def measure(model_name: str) -> None:
    """Measure the heads of a model on text and on repeats, and write one row a head."""
    torch.set_num_threads(1)
    model = tls.load_model(model_name)
    tokens = text_tokens(attention_view(model), None, n_sequences=SEQUENCES, sequence_length=LENGTH)
    text = tls.detect_heads(model, prompts=tokens)
    columns = [column for name in ("prev", "ind", *SPREAD) for column in (name, f"{name}_se")]
    repeats = tls.detect_heads(model, max_se=None)[["prev", "prev_se", "ind", "ind_se"]].add_suffix("_repeats")
    table = pd.concat([text[["layer", "head", "name", *columns]], repeats], axis=1)
    uniform = {name: text.attrs["chance"][name] for name in ("prev", "ind", *SPREAD)}
    last = {"layer": -1, "head": -1, "name": "uniform", **uniform}
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = pd.concat([table, pd.DataFrame([last])], ignore_index=True)
    rows.round(5).to_csv(FOLDER / f"{model_name}.csv", index=False)


@app.command()
def page() -> None:
    """Print rank correlations with intervals, and the strongest heads on text and on repeats; draw the picture."""
    for name, title in MODELS.items():
        table, uniform = stored(name)
        print(f"{title}: {len(table)} heads; median {table[list(SPREAD)].median().round(3).to_dict()}")
        print("  uniform", uniform[["prev", "ind", *SPREAD]].astype(float).round(3).to_dict())
        print(f"  first token above half: {(table['start_share'] > 0.5).mean():.2f} of heads")
        for x, y in PAIRS:
            found = tls.stats.layer_bootstrap(table, x, y, controls=())
            low, high = found.interval_jackknife
            print(f"  {x} and {y}: {table[x].corr(table[y], method='spearman'):.2f} ({low:.2f} to {high:.2f})")
        for detector in ("prev", "ind"):
            tops = [table.nlargest(10, column).set_index("name") for column in (detector, f"{detector}_repeats")]
            best = [
                f"{top.index[0]} {top.iloc[0][detector]:.2f}, {top.iloc[0][f'{detector}_repeats']:.2f}" for top in tops
            ]
            print(f"  {detector}: {len(tops[0].index.intersection(tops[1].index))} of the top ten agree; best {best}")
    for name, figure in figures().items():
        figure.savefig(f"docs/images/{name}")


def stored(name: str) -> tuple[pd.DataFrame, pd.Series]:
    """Return the stored table of heads of a model, and the row of uniform attention."""
    rows = pd.read_csv(FOLDER / f"{name}.csv")
    return rows[rows["layer"] >= 0], rows[rows["layer"] < 0].iloc[0]


def figures() -> dict[str, Figure]:
    """Draw the stored tables, a column for each model, and return the figure by its file name."""
    figure = new_figure(7.2, 2.5 * len(DRAWN))
    for (name, title), panels in zip(MODELS.items(), figure.subplots(len(DRAWN), len(MODELS)).T, strict=True):
        table, uniform = stored(name)
        for panel, (x, y) in zip(panels, DRAWN, strict=True):
            draw(panel, table, uniform, x, y)
        panels[0].text(
            0.98, float(uniform["distance"]), "uniform attention", fontsize=9, color=GREY, ha="right", va="top"
        )
        panels[0].set_title(f"{title}, {len(table)} heads", fontsize=10, color=INK, loc="left")
    return {"on_text.png": figure}


def draw(panel: Axes, table: pd.DataFrame, uniform: pd.Series, x: str, y: str) -> None:
    """Draw heads as dots, and the value of uniform attention as a dashed line."""
    draw_dots(panel, table[[x, y]].to_numpy(float), 16, BLUE, "heads")
    panel.axhline(float(uniform[y]), color=GREY, linewidth=0.9, linestyle="--", zorder=1)
    panel.set(xlabel=LABELS[x], ylabel=LABELS[y], ylim=(0, None), xlim=(0, 1))
    dress(panel)


if __name__ == "__main__":
    app()
