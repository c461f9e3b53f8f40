"""Positional and symbolic heads on the binding task with 256 pairs, the length of PS appendix B.5, beside 16 pairs.

    python benchmarks/positional_256.py measure smollm2-135m     # resumable; --lists 4 measures heads on four lists
    python benchmarks/positional_256.py measure gemma3-270m
    python benchmarks/positional_256.py page                     # tables and the figure, from what the others wrote

Schedule, fixed before the first run. One list with all nine queries (of seed 1,000, which is not used again, its scores
unread) took 64 CPU seconds for SmolLM2-135M and 43 for Gemma 3 270M, so all ten lists run.

`BindingTask("plain", n)` with n = 16 and 256: some 150 and 1,700 tokens, within the 8,192 and 32,768 of the two models.
Nine blocks, evenly spaced; a question about each; ten lists from seed 0; keys swap (`mode="key"`), all pairs but those
with the first block (`swaps="kept"`, 28); per rotary pair and per head. If time ends before ten lists, those that are
finished are reported, by their number. Not run: `mode="prompt"`, which is B.5's own way and takes 28 to 36 more passes
of every list, and `swaps="all"`; the command is `tlspectral positional MODEL --template plain --pairs 256 --swaps all`.

Gemma 3's layers but 5, 11 and 17 have a window of 512 tokens, which shows three of the nine blocks at 256 pairs and all
at 16. Swaps of which a block is hidden are left out, so that these local heads have three swaps. They are reported
apart from the 12 heads of global layers, and stand in no statement about both.

What counts as which outcome:

* Answered: the right answer's first token is the most probable of all in more than half of the 90 prompts. Otherwise
  the scores are read as attention on this text, and not as a way in which colours are bound to names. SmolLM2, which
  was trained to chat, is also asked in ChatML (`"qwen2"`), of which only the answers are reported.
* The place of the answer: `relative_probability`, mean over the first two of the nine places, the three in the middle
  and the last two. Start less middle and end less middle, exact sign-flip test over lists, Holm over the two. Both
  above 0 with p < .05: lost in the middle. Only one: the start, or the end, is better. Both below: an inverted U. Else:
  nothing that ten lists show.
* Lengths: rank correlation over heads of the means over lists. The index is a property of the head over lengths too at
  .8 or more (two tasks of one length had .89 and .88), else it is not; the scores likewise. Beside it stands the
  correlation of two lists of one length.
* Rotary pairs: the number of pairs whose median index is .5 or more is the border. If it is at a wavelength that grows
  as what the query sees, it moves by n_pairs * log(tokens ratio) / log(base) pairs. A move of 3/4 to 5/4 of that: the
  border goes with the length; below 1/4: it belongs to the pair; else between.
* Queries (PS, Figure 7): rank correlation over the nine places of the median over heads. `s_pos` at .8 or more and
  `s_sym` at -.8 or less: heads turn from symbolic to positional as in PS.
* Depth (PS, footnote 2): medians of the earlier and the later layers; `s_pos` higher in the earlier and `s_sym` in the
  later ones, both with p < .05 (Mood): as in PS. Of SmolLM2 alone, as Gemma 3's layers differ in what they see.
* The correlation of the two scores is given beside its null, and decides nothing.

Changed before any number was read, as the machine had a fifth of a core for each model: at 256 pairs heads are measured
on as many lists as time allows (`--lists`), the answers on all ten. Two lists were read; the other eight were run
afterwards, with nothing changed.
"""

import math
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from positional_profiles import SCORES, by_pair, profile, shared
from tlspectral_studies.fingerprint.replication.sentences.power import holm
from tlspectral_studies.positional_symbolic.medians import median_tests

import tlspectral as tls
from tlspectral.plots.style import BLUE, INK, ORANGE, dress, legend_below, new_figure
from tlspectral.positional import BindingTask
from tlspectral.tables import read_table
from tlspectral.tables.measurement import unbundled

FOLDER = Path("docs/results/positional")
RUNS = Path("out/positional_256")
PAIRS = (16, 256)
LISTS = 10
GROUPS: dict[str, dict[str, tuple[int, ...]]] = {
    "smollm2-135m": {"all": tuple(range(30))},
    "gemma3-270m": {
        "global": (5, 11, 17),
        "local": tuple(layer for layer in range(18) if layer not in (5, 11, 17)),
    },
}
"""Layers of a model that see the same part of a prompt."""
BASES = {"all": 1e5, "global": 1e6, "local": 1e4}
WINDOW = 512
PLACES = {"start": (0, 1), "middle": (3, 4, 5), "end": (7, 8)}
TABLES = ("answers", "profiles", "shared", "pairs", "places", "medians", "decided")

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class LaterLists(BindingTask):
    """The binding task without its first lists."""

    first: int = field(default=0, repr=False)

    def seeds(self, seed: int) -> tuple[int, ...]:
        """Return the seeds of the other lists."""
        return super().seeds(seed)[self.first :]


def answers(model: Any, name: str, task: BindingTask, kept: Path, lists: int) -> pd.DataFrame:
    """The answers of each prompt of all lists, with the number of its list and the place of its block among the nine.

    Lists that are not among the first ones in `kept` are read for their answers alone, with one head.
    """
    folders = {seed: kept for seed in task.seeds(0)[:lists]}
    rest = LaterLists(task.template, task.n_blocks, first=lists, draws=LISTS)
    if lists < LISTS:
        other = kept.with_name(f"{kept.name}_answers{lists}")
        tls.positional_symbolic(model, rest, mode="key", heads=[(0, 0)], per_frequency=True, folder=other)
        folders |= dict.fromkeys(rest.seeds(0), other)
    tables = []
    for number, (seed, folder) in enumerate(folders.items()):
        table = unbundled(read_table(folder / f"key_frequencies_draw{seed}.parquet"))["answers"]
        tables.append(table.assign(draw=number, place=range(len(table)), model=name, pairs=task.n_blocks))
    return pd.concat(tables, ignore_index=True).drop(columns="answer").assign(template=task.template)


def sign_flip_p(differences: np.ndarray) -> float:
    """Exact two-sided p of a mean of differences, whose signs are flipped in all ways."""
    signs = np.array(list(product((-1, 1), repeat=len(differences))))
    # A flip that gives the observed mean back counts whatever its sum rounds to.
    return float(np.mean(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-12))


def by_place(table: pd.DataFrame) -> dict[str, Any]:
    """Start and end less the middle of the nine places, of the probability among the choices."""
    wide = table.pivot(index="draw", columns="place", values="relative_probability")
    means = {name: wide[list(places)].mean(axis=1) for name, places in PLACES.items()}
    row: dict[str, Any] = {name: values.mean() for name, values in means.items()}
    for name in ("start", "end"):
        difference = (means[name] - means["middle"]).to_numpy()
        row |= {f"{name}_less": difference.mean(), f"{name}_se": difference.std(ddof=1) / math.sqrt(len(difference))}
        row[f"{name}_p"] = sign_flip_p(difference)
    adjusted = holm(np.array([row["start_p"], row["end_p"]]))
    return row | {"start_holm": adjusted[0], "end_holm": adjusted[1]}


def measured(model: Any, name: str, pairs: int, lists: int) -> dict[str, Any]:
    """Measure one length: tables of heads, of lists, of queries, of rotary pairs, and the answers."""
    task = BindingTask("plain", pairs, draws=lists)
    kept = RUNS / f"{name}_{pairs}"
    options: dict[str, Any] = {"mode": "key", "folder": kept}
    frequencies = tls.positional_symbolic(model, task, per_frequency=True, **options)
    return {
        "frequencies": frequencies,
        "heads": tls.positional_symbolic(model, task, **options),
        "lists": tls.positional_symbolic(model, task, by="draw", **options),
        "queries": tls.positional_symbolic(model, task, by="query", **options),
        "answers": answers(model, name, task, kept, lists),
    }


def tables_of(name: str, found: dict[int, dict[str, Any]]) -> dict[str, pd.DataFrame]:
    """The tables of a model from what was measured at both lengths."""
    rows: dict[str, list[Any]] = {table: [] for table in TABLES}
    for pairs, one in found.items():
        attrs, asked = one["heads"].attrs, {"model": name, "pairs": pairs}
        rows["answers"].append(one["answers"])
        rows["decided"].append({**asked, **by_place(one["answers"])})
        if len(GROUPS[name]) == 1:
            rows["medians"].append(median_tests(one["heads"]).assign(**asked))
        for group, layers in GROUPS[name].items():
            within = {
                what: one[what][one[what]["layer"].isin(layers)]
                for what in ("frequencies", "heads", "lists", "queries")
            }
            tokens = float(np.mean(attrs["n_tokens"]))
            rows["profiles"].append(
                {**asked, "group": group, "heads": len(within["heads"]), "lists": attrs["draws"], "tokens": tokens}
                | {f"correlation_{what}": attrs["correlation"][what] for what in ("pearson", "null_mean", "null_share")}
                | profile(within["lists"])
                | {"alpha_ess": within["heads"]["alpha_ess"].median(), "tau": within["heads"]["tau"].median()}
            )
            rows["pairs"].append(by_pair(name, f"binding {pairs}", within["frequencies"]).assign(group=group))
            medians = within["queries"].groupby("query")[list(SCORES)].median().reset_index()
            rows["places"].append(medians.assign(place=range(len(medians)), group=group, **asked))
    for group, layers in GROUPS[name].items():
        of_lists = {f"{n} pairs": one["lists"][one["lists"]["layer"].isin(layers)] for n, one in found.items()}
        rows["shared"] += [{**row, "group": group} for row in shared(name, of_lists)]
    return {
        table: pd.DataFrame(each) if isinstance(each[0], dict) else pd.concat(each, ignore_index=True)
        for table, each in rows.items()
        if each
    }


@app.command()
def measure(
    model_name: str,
    lists: Annotated[int, typer.Option(help="Lists of 256 pairs on which heads are scored.")] = LISTS,
    chat: Annotated[bool, typer.Option(help="Ask SmolLM2 in ChatML too.")] = True,
) -> None:
    """Measure one model at both lengths."""
    torch.set_num_threads(1)
    model, found = tls.load_model(model_name), {}
    for pairs in PAIRS:
        started = time.process_time()
        found[pairs] = measured(model, model_name, pairs, LISTS if pairs < 256 else lists)
        typer.echo(f"{model_name}, {pairs} pairs: {time.process_time() - started:.0f} CPU s")
    tables = tables_of(model_name, found)
    if model_name == "smollm2-135m" and chat:
        told = [
            answers(model, model_name, BindingTask("qwen2", pairs), RUNS / f"{model_name}_{pairs}_chat", 0)
            for pairs in PAIRS
        ]
        tables["answers"] = pd.concat([tables["answers"], *told], ignore_index=True)
    for table, frame in tables.items():
        frame.to_csv(RUNS / f"{model_name}_{table}.csv", index=False)
    for pairs, one in found.items():
        tls.write_table(one["heads"], FOLDER / f"heads_{model_name}_binding{pairs}.parquet")


@app.command()
def page() -> None:
    """Write the tables of both models, what follows from them, and the figure."""
    tables = {}
    for table in TABLES:
        frames = [pd.read_csv(file) for name in GROUPS if (file := RUNS / f"{name}_{table}.csv").exists()]
        tables[table] = pd.concat(frames, ignore_index=True)
        if table != "medians":
            tables[table].round(4).to_csv(FOLDER / f"binding_{table}.csv", index=False)
        if table not in ("answers", "pairs", "places"):
            typer.echo(f"\n{table}\n{tables[table].round(3).to_string(index=False)}")
    grouped = tables["answers"].assign(first=tables["answers"]["rank"] == 1).groupby(["model", "template", "pairs"])
    typer.echo(grouped[["first", "probability", "relative_probability", "chance"]].mean().round(3).to_string())
    typer.echo(borders(tables["pairs"], tables["profiles"]).round(2).to_string(index=False))
    places = tables["places"].groupby(["model", "group", "pairs"])[["place", *SCORES]]
    typer.echo(places.corr(method="spearman").xs("place", level=-1).drop(columns="place").round(2).to_string())
    draw(tables).savefig("docs/images/positional_256.png")


def borders(pairs: pd.DataFrame, profiles: pd.DataFrame) -> pd.DataFrame:
    """The number of rotary pairs with a median index of .5 or more at both lengths, and the move that is expected."""
    rows = []
    for (model, group), table in pairs.groupby(["model", "group"]):
        count = table.assign(above=table["index"] >= 0.5).groupby("task")["above"].sum()
        short, long = (int(count[f"binding {n}"]) for n in PAIRS)
        tokens = profiles.set_index(["model", "group", "pairs"])["tokens"]
        seen = [tokens[model, group, n] for n in PAIRS]
        if group == "local":
            seen = [min(n, WINDOW) for n in seen]
        expected = table["frequency"].nunique() * math.log(seen[1] / seen[0]) / math.log(BASES[group])
        rows.append({"model": model, "group": group, "short": short, "long": long, "expected": expected,
            "of_expected": (long - short) / expected})  # fmt: skip
    return pd.DataFrame(rows)


def figures() -> dict[str, Figure]:
    """Draw the stored tables, and return the figure by its file name."""
    tables = {table: pd.read_csv(FOLDER / f"binding_{table}.csv") for table in ("answers", "pairs")}
    return {"positional_256.png": draw(tables)}


def draw(tables: dict[str, pd.DataFrame]) -> Figure:
    """Draw the answers by place, and the index by rotary pair."""
    figure = new_figure(8.2, 6.4)
    panels = figure.subplots(2, 2).flat
    colours = {16: ORANGE, 256: BLUE}
    axes = next(panels)
    plain = tables["answers"].query("template == 'plain'")
    for (model, pairs), table in plain.groupby(["model", "pairs"]):
        places = table.groupby("place")["relative_probability"]
        style = {"color": colours[pairs], "linestyle": "-" if model == "smollm2-135m" else "--"}
        axes.errorbar(range(1, 10), places.mean(), places.sem(), label=f"{model}, {pairs} pairs", **style)
    axes.set(xlabel="block that is asked about, of nine", ylabel="probability of the answer\namong the choices")
    dress(axes)
    entries = list(zip(*axes.get_legend_handles_labels(), strict=True))
    for axes, ((model, group), table) in zip(panels, tables["pairs"].groupby(["model", "group"]), strict=False):
        for pairs in PAIRS:
            one = table[table["task"] == f"binding {pairs}"]
            dashes = "-" if model == "smollm2-135m" else "--"
            axes.plot(one["frequency"], one["index"], color=colours[pairs], linestyle=dashes)
        axes.set(xlabel="rotary pair", ylabel="median exclusion index", ylim=(0, 1))
        axes.set_title(f"{model}, {group} heads", fontsize=10, color=INK, loc="left")
        dress(axes)
    legend_below(figure, entries, [], columns=2)
    return figure


if __name__ == "__main__":
    app()
