"""How much of six behaviours circuits carry, beside circuits of equal size: the tables of docs/results/circuits.md.

Run `python benchmarks/circuits.py smollm2-135m STEP`, and the same for `gemma3-270m`. What a step has written is not
made again. The tasks are those of `tlspectral_studies.common.pair_tasks`: 64 pairs drawn with seed 0, split in halves.

`pilot` scores both sides of every task behind three start tokens: the one that `model.to_tokens` puts there, none, and
the end of text. Every other step uses the first, unless another is right more often by .05 on the clean side.

`curves` ranks edges on one half by EAP-IG, measures the 50 largest and 50 random ones, and scores circuits of .001 to 1
of all edges on the other half, with 10 relabelled and 10 random circuits of each size. 20 minutes a task.

`transfer` finds edges on each template of indirect objects, and scores the largest 2 % and 10 % on each template, on
other pairs (16 on either side), with one relabelled and one random circuit.

`parts` takes M_S, M_A and Im(M_t) of the five heads whose measured edges are largest out of what they pass along those
edges, and, 19 times, out of as many random receivers of the same kinds in later layers.

`page` needs no model: it prints the tables of the page from what the other steps of both models have written, and draws
`docs/images/circuits.png`.

`speed` writes nothing: it prints CPU seconds of all estimates, memory, and how they agree with exact effects, on 16
pairs of 15 tokens.
"""

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pandas as pd
import typer
from matplotlib.figure import Figure
from tlspectral_studies.common.markdown_table import markdown_table
from tlspectral_studies.common.pair_tasks import IOI_TEMPLATES, NAMES, PairTask, Start, pair_task

import tlspectral as tls
from tlspectral.hooks.circuits.estimates import Method, edge_estimates
from tlspectral.hooks.circuits.pairs import pairs_of
from tlspectral.models.reading import attention_view
from tlspectral.plots.style import INK, legend_below, new_figure

FOLDER = Path("docs/results/circuits")
PAIRS, NULL, KEPT, HEADS, DRAWS = 64, 10, 2_000, 5, 19
SMALLEST_GAIN = 0.05  # in accuracy, for which another start token is taken
SHOWN = (0.005, 0.02, 0.1)  # shares of the edges on the page
Step = Literal["pilot", "curves", "transfer", "parts", "page", "speed"]


def pilot(model: Any) -> pd.DataFrame:
    """Score both sides of every task behind each start token."""
    rows = []
    for name in get_args(PairTask):
        for start in get_args(Start):
            task = pair_task(model, name, n=PAIRS, start=start)
            clean, other = tls.evaluate(model, task), tls.evaluate(model, task.denoising())
            right = (clean.per_sequence > 0).mean(), (other.per_sequence < 0).mean()
            rows.append((name, start, *right, clean.value, clean.se, other.value, other.se))
    both = ["clean", "clean_se", "counterfactual", "counterfactual_se"]
    return pd.DataFrame(rows, columns=["task", "start", "right_clean", "right_counterfactual", *both])


def chosen_start(scores: pd.DataFrame, name: str) -> Start:
    """Return the start token of a task: the model's own, unless another is right more often."""
    right = scores[scores["task"] == name].set_index("start")["right_clean"]
    best = str(right.idxmax())
    if right[best] - right["own"] < SMALLEST_GAIN:
        return "own"
    print(f"{name}: right on {right['own']:.2f} behind the model's own start token, on {right[best]:.2f} with {best!r}")
    return best  # pyright: ignore[reportReturnType]


def curves(model: Any, scores: pd.DataFrame, file: Path, name: PairTask) -> None:
    """Write edges and faithfulness of one task."""
    start = chosen_start(scores, name)
    fit, held_out = pair_task(model, name, n=PAIRS, start=start).split(0.5)
    edges = tls.edge_effects(model, task=fit, screen="gradient", method="EAP-IG")
    found = {kind: edges.attrs[f"rank_correlation_{kind}"] for kind in ("top", "control")}
    table = tls.faithfulness(model, edges, held_out, null=NULL)
    table.attrs |= {"start": start, **found}
    kept = edges.head(KEPT).copy()
    tls.write_table(kept, file.with_suffix(".edges.parquet"))
    tls.write_table(table, file.with_suffix(".faithfulness.parquet"))
    curve = table[table["circuit"] == "edges"].set_index("share")["faithfulness"].round(2)
    print(f"{name}: start {start}, {found}, {curve.to_dict()}", flush=True)


def transfer(model: Any) -> pd.DataFrame:
    """Score circuits that were found on one template on each, on pairs of another draw."""
    tasks = [[pair_task(model, "ioi swapped", n=PAIRS // 4, seed=seed, templates=[template]) for seed in (0, 1)]
             for template in IOI_TEMPLATES]  # fmt: skip
    rows = []
    for source, (fit, _) in enumerate(tasks):
        edges = tls.edge_effects(model, task=fit, screen="gradient", method="EAP-IG")
        for target, (_, held_out) in enumerate(tasks):
            table = tls.faithfulness(model, edges, held_out, sizes=[0.02, 0.1], null=1)
            rows.append(table.assign(found_on=source, scored_on=target))
            print(source, target, table["faithfulness"].round(2).to_list(), flush=True)
    return pd.concat(rows, ignore_index=True)


def parts(model: Any, edges: pd.DataFrame, task: tls.Task) -> pd.DataFrame:
    """Take parts of the heads that matter out of the edges that matter, and out of random ones of the same kinds."""
    of_heads = edges.query("measured == 'top' and head >= 0 and input in ('q', 'k', 'v')")
    strength = of_heads["delta"].abs().groupby(of_heads["sender"]).sum().nlargest(HEADS)
    intact = tls.evaluate(model, task)
    rows = []
    for sender in strength.index:
        own = of_heads.loc[of_heads["sender"] == sender, ["receiver", "input", "layer"]]
        found = list(zip(own["receiver"], own["input"], strict=True))
        chosen = [[name for name, _ in found], *_others(model, int(own["layer"].iloc[0]), found)]
        for part in ("M_S", "M_A", "Im(M_t)"):
            effects = []
            for into in chosen:
                with tls.ablate(model, sender, part, into=into):
                    effects.append(tls.evaluate(model, task) - intact)
            size = np.abs([float(effect) for effect in effects])
            rows.append({
                "sender": sender, "receivers": ", ".join(chosen[0]), "part": part,
                "delta": float(effects[0]), "delta_se": effects[0].se, "control_delta": float(size[1:].mean()),
                "control_p": float((size >= size[0]).mean()),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def _others(model: Any, layer: int, found: list[tuple[str, str]]) -> Iterator[list[str]]:
    """Yield as many receivers of the same kinds behind a layer, none of those that were found."""
    drawn, groups = np.random.default_rng(0), model.cfg.n_key_value_heads or model.cfg.n_heads
    later = range(layer + 1, model.cfg.n_layers)
    shared = "KV" if groups < model.cfg.n_heads else "H"
    there = {
        what: [f"L{one}{name}{index}.{what}" for one in later for index in range(n)]
        for what, name, n in (("q", "H", model.cfg.n_heads), ("k", shared, groups), ("v", shared, groups))
    }
    for _ in range(DRAWS):
        others: list[str] = []
        for _, what in found:
            free = sorted(set(there[what]) - {name for name, _ in found} - set(others))
            others.append(str(drawn.choice(free)))
        yield others


def print_page(folder: Path) -> None:
    """Print what circuits carry, and draw the curves of indirect objects."""
    files = sorted(folder.glob("*.faithfulness.parquet"))
    tables = {file.name.removesuffix(".faithfulness.parquet"): tls.read_table(file) for file in files}
    rows = []
    for name, table in tables.items():
        row = {"model and task": name, "start token": table.attrs.get("start", "own")}
        for share in SHOWN:
            near = table[(table["share"] / share - 1).abs() < 0.1].groupby("circuit")["faithfulness"]
            mean, most = near.mean(), near.max()
            controls = ", ".join(f"{mean[kind]:.2f} ({most[kind]:.2f})" for kind in ("relabelled", "random"))
            row[f"{share:.1%} of edges; relabelled, random: mean (most)"] = f"{mean['edges']:.2f}; {controls}"
        row["EAP-IG with effects, largest, random"] = f"{table.attrs['top']:.2f}, {table.attrs['control']:.2f}"
        rows.append(row)
    typer.echo("\n".join(markdown_table(rows[0], (row.values() for row in rows))))
    for name, figure in figures(folder).items():
        figure.savefig(f"docs/images/{name}")


def figures(folder: Path = FOLDER) -> dict[str, Figure]:
    """Draw the stored curves of indirect objects, and return the figure by its file name."""
    figure = new_figure(8.4, 6.6)
    files = sorted(folder.glob("*ioi*.faithfulness.parquet"))
    for axes, file in zip(figure.subplots(2, 2, sharey=True).flat, files, strict=True):
        tls.plots.faithfulness(tls.read_table(file), ax=axes)
        axes.set_title(file.name.removesuffix(".faithfulness.parquet"), fontsize=10, color=INK, loc="left")
        axes.label_outer()
        legend = axes.get_legend()
        entries = list(zip(legend.legend_handles, [text.get_text() for text in legend.get_texts()], strict=True))
        note = legend.get_title().get_text()
        legend.remove()
    legend_below(figure, entries, [note], columns=3)
    return {"circuits.png": figure}


def print_speed(model: Any) -> None:
    """Estimate every edge of one short task by both methods, and measure some."""
    drawn = np.random.default_rng(0)
    names = [drawn.permutation(NAMES[:8])[:2] for _ in range(16)]
    prompts, pairs = ([IOI_TEMPLATES[0].format(a=a, b=b, s=s, place="store", object="book") for a, b, s in each]
        for each in ([(a, b, b) for a, b in names], [(a, b, a) for a, b in names]))  # fmt: skip
    right, wrong = ([f" {pair[at]}" for pair in names] for at in (0, 1))
    task = tls.logit_difference(prompts, right, wrong, counterfactual=pairs)
    for method in get_args(Method):
        made = pairs_of(attention_view(model), task)
        start = time.process_time()
        edge_estimates(made, method)
        seconds = time.process_time() - start
        attrs = tls.edge_effects(model, task=task, screen="gradient", method=method).attrs
        agree = {kind: round(attrs[f"rank_correlation_{kind}"], 2) for kind in ("top", "control")}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        n_edges = int(made.graph.possible.sum())
        print(f"{method}: {n_edges:,} edges of {tuple(made.sequences.tokens.shape)} tokens in {seconds:.1f} CPU s, "
            f"peak {peak:.1f} GiB, rank correlation with exact effects {agree}")  # fmt: skip


def main(
    model_name: str,
    step: Annotated[Step, typer.Argument()] = "curves",
    folder: Path = FOLDER,
    only: str | None = None,
) -> None:
    """Run one step on one model; `--only` takes one task of the curves."""
    if step == "page":
        print_page(folder)
        return
    model = tls.load_model(model_name)
    if step == "speed":
        print_speed(model)
        return
    folder.mkdir(parents=True, exist_ok=True)
    scores_file = folder / f"{model_name}-pilot.csv"
    if not scores_file.exists():
        pilot(model).round(3).to_csv(scores_file, index=False)
    scores = pd.read_csv(scores_file)
    table_file = folder / f"{model_name}-{step}.csv"
    if step == "pilot":
        print(scores.to_string())
    elif step == "transfer" and not table_file.exists():
        transfer(model).round(4).to_csv(table_file, index=False)
    elif step == "parts" and not table_file.exists():
        edges = pd.read_parquet(folder / f"{model_name}-ioi-swapped.edges.parquet")
        _, held_out = pair_task(model, "ioi swapped", n=PAIRS, start=chosen_start(scores, "ioi swapped")).split(0.5)
        parts(model, edges, held_out).round(4).to_csv(table_file, index=False)
    elif step == "curves":
        for name in get_args(PairTask):
            file = folder / f"{model_name}-{name.replace(' ', '-')}"
            if only in (None, name) and not file.with_suffix(".faithfulness.parquet").exists():
                curves(model, scores, file, name)


if __name__ == "__main__":
    typer.run(main)
