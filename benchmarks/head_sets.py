"""How few heads keep an answer: sets of 1 to 40 heads of two models, on names and in a template that chose no head.

    python benchmarks/head_sets.py smollm2-135m     # some 4 CPU minutes, resumable in out/head_sets
    python benchmarks/head_sets.py gemma3-270m
    python benchmarks/head_sets.py page             # the table of docs/results/head_sets.md and its figure

Schedule, fixed before the first run. Three tasks. Six pairs of one template train gates (`sufficient_heads`, defaults:
three penalties, three starts), twelve pairs with other words, other answers and another template judge:

* names: indirect objects; the pair repeats the other name. Names 1 to 6 of a shuffled list train, 12 others judge.
* capitals: the pair has another country. Six countries train, six others judge.
* opposites: the pair has another word. Six words train, twelve others judge.

Templates were chosen before by one criterion: both models give the right answer on all pairs of both templates.

Sizes 1, 2, 3, 5, 8, 12, 20 and 40; n = 5; 19 random sets of each size; seed 0. Amended on 2026-11-29, before any
result, because the runs had to share a machine: two starts, eight held pairs, and sizes 1, 2, 3, 5, 10, 20 and 40.

Answers, for each model and task:

* The smallest size whose learned set is sufficient on held pairs (|1 - kept| at most .1), or "none"; and sizes at which
  the set overshoots.
* At each size which of learned gates, single effects and EAP is closest to 1; p of the learned set against random sets
  (not corrected for the number of sizes).
* Spread: kept on held pairs of the sets of five of all fits.
* Necessary: kept by the complement of the learned set. At most .1 counts as necessary.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from tlspectral_studies.common.markdown_table import markdown_table
from tlspectral_studies.common.pair_tasks import CAPITALS, NAMES, OPPOSITES

import tlspectral as tls
from tlspectral.plots.style import BLUE, GREEN, GREY, INK, ORANGE, dress, legend_below, new_figure

FOLDER = Path("docs/results/sufficient")
MODELS = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
SIZES, CHOSEN, STARTS = (1, 2, 3, 5, 10, 20, 40), 5, 2
TRAINED, JUDGED = 6, 8
TEMPLATES = {
    "names": (
        "When {a} and {b} went to the store, {s} gave a drink to",
        "After {a} and {b} arrived at the park, {s} decided to give a book to",
    ),
    "capitals": ("The capital of {} is the city of", "If you visit {}, go to its capital city,"),
    "opposites": ('The opposite of "{}" is "', 'It is not "{}" at all, it is "'),
}
SETS = {"learned": BLUE, "single effects": ORANGE, "EAP": GREEN}


def task_of(name: str, template: str, words: list[str]) -> tls.Task:
    """Return a task of pairs: neighbours in a circle of words, and for a half circle of pairs those two apart."""
    known = {"capitals": CAPITALS, "opposites": OPPOSITES}.get(name, {})
    n = TRAINED if len(words) == TRAINED and template == TEMPLATES[name][0] else JUDGED
    circle = [(words[at % len(words)], words[(at + 1 + at // len(words)) % len(words)]) for at in range(n)]
    prompts, pairs, right, wrong = [], [], [], []
    for number, (own, other) in enumerate(circle):
        if name == "names":
            first, second = (own, other) if number % 2 else (other, own)
            prompts.append(template.format(a=first, b=second, s=other))
            pairs.append(template.format(a=first, b=second, s=own))
            right.append(f" {own}")
            wrong.append(f" {other}")
        else:
            space = " " * (name == "capitals")
            prompts.append(template.format(own))
            pairs.append(template.format(other))
            right.append(space + known[own])
            wrong.append(space + known[other])
    return tls.logit_difference(prompts, right, wrong, counterfactual=pairs, name=name)


def tasks_of(model: Any, name: str) -> tuple[tls.Task, tls.Task]:
    """Return the pairs that train gates, and the pairs that judge sets. Words that are several tokens are left out."""
    known: Any = {"names": NAMES, "capitals": CAPITALS, "opposites": OPPOSITES}[name]
    space, encode = " " * (name != "opposites"), model.tokenizer
    answers = known if isinstance(known, dict) else {word: word for word in known}
    single = [
        word
        for word, answer in answers.items()
        if all(len(encode(space + text, add_special_tokens=False).input_ids) == 1 for text in (word, answer))
    ]
    # Opposites of each other (open, closed) stay on one side, because every word of the list has its answer beside it.
    words = [single[place] for place in np.random.default_rng(0).permutation(len(single))]
    training, judging = words[:TRAINED], words[TRAINED : TRAINED + JUDGED]
    return tuple(
        task_of(name, template, some) for template, some in zip(TEMPLATES[name], (training, judging), strict=True)
    )  # pyright: ignore[reportReturnType]


def measure(model_name: str, resumed: Path) -> None:
    """Find and judge sets of one model; write tables of sets, fits and heads."""
    model = tls.load_model(model_name)
    for name in TEMPLATES:
        file = FOLDER / f"{model_name}-{name}.parquet"
        if file.exists():
            continue
        trained, judged = tasks_of(model, name)
        table = tls.sufficient_heads(
            model, trained, judged, n=CHOSEN, sizes=list(SIZES), starts=STARTS, folder=resumed / f"{model_name}-{name}"
        )
        tls.write_table(table, file)
        typer.echo(f"{model_name} {name}: {table.attrs['heads']} keep {table.attrs['kept']:.2f}")


def results() -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield model, task and table of each stored result."""
    for model in MODELS:
        for name in TEMPLATES:
            yield model, name, tls.read_table(FOLDER / f"{model}-{name}.parquet")


def shares(table: pd.DataFrame) -> pd.DataFrame:
    """Return the sets of a result as a table, a row per kind and size."""
    return pd.DataFrame(table.attrs["sets"]).set_index(["set", "n"]).sort_index()


def rows_of_page() -> Iterator[dict[str, str]]:
    """Yield the rows of the page's table."""
    for model, name, table in results():
        sets = shares(table)
        learned = sets.loc["learned"]
        off = pd.DataFrame({kind: (1 - sets.loc[kind, "kept"]).abs() for kind in SETS})
        closest = off.eq(off.min(axis=1), axis=0).sum()
        enough = [size for size in SIZES if abs(1 - learned.loc[size, "kept"]) <= 0.1]
        over = [str(size) for size in SIZES if learned.loc[size, "kept"] > 1.1]
        of_fits = [fit["kept"] for fit in table.attrs["fits"]]
        five = learned.loc[CHOSEN]
        yield {
            "model and task": f"{MODELS[model]}, {name}",
            "sufficient from": str(enough[0]) if enough else "none",
            "overshoots at": ", ".join(over) or "none",
            "five learned": f"{five['kept']:.2f} ({five['low']:.2f} to {five['high']:.2f})",
            "single effects, EAP": ", ".join(f"{sets.loc[(kind, CHOSEN), 'kept']:.2f}" for kind in [*SETS][1:]),
            "random (most), p": "{:.2f} ({:.2f}), {:.2f}".format(
                sets.loc[("random", CHOSEN), "kept"],
                max(sets.loc[("random", CHOSEN), "draws"]),
                sets.loc[("random", CHOSEN), "p"],
            ),
            "complement": f"{sets.loc[('complement', CHOSEN), 'kept']:.2f}",
            "all fits": f"{min(of_fits):.2f} to {max(of_fits):.2f}",
            "closest to 1": ", ".join(f"{closest[kind]}" for kind in SETS),
        }


def figures() -> dict[str, Figure]:
    """Draw what sets of each size keep on held pairs, and return the figure by its file name."""
    figure = new_figure(8.4, 6.0)
    entries: dict[str, Any] = {}
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, (model, name, table) in zip(panels.flat, results(), strict=True):
        sets = shares(table)
        drawn = [(size, kept) for size in SIZES for kept in sets.loc[("random", size), "draws"]]
        entries["random sets"] = axes.plot(*zip(*drawn, strict=True), ".", color=GREY, ms=3, alpha=0.6)[0]
        entries["sufficient"] = axes.axhspan(0.9, 1.1, color=GREY, alpha=0.15, lw=0)
        for kind, color in SETS.items():
            rows = sets.loc[kind].loc[[*SIZES]]
            if kind == "learned":
                axes.fill_between(SIZES, rows["low"], rows["high"], color=color, alpha=0.2, lw=0)
            entries[kind] = axes.plot(SIZES, rows["kept"], "o-", color=color, ms=4, lw=1.2)[0]
        axes.set_xscale("log")
        axes.set_xticks(SIZES, [str(size) for size in SIZES])
        axes.minorticks_off()
        axes.set_title(f"{MODELS[model]}: {name}", fontsize=10, color=INK, loc="left")
        axes.set(xlabel="heads", ylabel="kept", ylim=(-0.5, 1.8))
        axes.label_outer()
        dress(axes)
    legend_below(figure, [(artist, text) for text, artist in entries.items()], [], columns=5)
    return {"head_sets.png": figure}


def main(
    model_name: Annotated[str, typer.Argument(help="smollm2-135m, gemma3-270m or page.")],
    resumed: Path = Path("out/head_sets"),
) -> None:
    """Measure one model, or print the table of the page and draw its figure."""
    torch.set_num_threads(1)
    if model_name != "page":
        FOLDER.mkdir(parents=True, exist_ok=True)
        measure(model_name, resumed)
        return
    rows = [*rows_of_page()]
    typer.echo("\n".join(markdown_table(rows[0], (row.values() for row in rows))))
    for name, figure in figures().items():
        figure.savefig(f"docs/images/{name}")


if __name__ == "__main__":
    typer.run(main)
