"""Profiles of heads on block tasks of one prompt length: whether the task is answered, the scores, and what they share.

Run `python benchmarks/positional_profiles.py FOLDER`; some ten CPU minutes for both packaged models. What was measured
is kept in `FOLDER/runs`, and the same command continues there. Heads are scored only on tasks whose answers' first
token is the most probable one in more than half of the prompts; swaps by key, ten lists, five questions a list.

Writes, and prints as Markdown, `profiles.csv` (a row per model and task), `shared.csv` (rank correlations over heads
between lists of a task and between tasks), `agreement.csv` (with columns of the head table) and `pairs.csv` (the
exclusion index by rotary pair); and `heads_MODEL_TASK.parquet`.
"""

from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from tlspectral_studies.common.markdown_table import markdown_table
from tlspectral_studies.positional_symbolic.agreement import score_agreement

import tlspectral as tls
from tlspectral.plots import exclusion_plane, positional_symbolic_plane
from tlspectral.positional import BindingTask, task_answers
from tlspectral.positional.ready_tasks import CopyingTask, KeyValueTask, ListIndexTask, NeedleTask

MODELS = ("smollm2-135m", "gemma3-270m")
# Some 150 tokens each; the list index has nine items at most, which is 43 tokens.
TASKS = {
    "copying": CopyingTask(18, 72, queries=5),
    "needle": NeedleTask(9),
    "key-value": KeyValueTask(16, queries=5),
    "binding": BindingTask("plain", 16, queries=5),
    "list-index": ListIndexTask(9, queries=5),
}
ANSWERED = 0.5
SCORES = ("s_pos", "s_sym", "exclusion_index")
HEADS = ["layer", "head"]


def answers(model: Any, name: str) -> dict[str, Any]:
    """How a model answers a task: share of prompts, mean probability, chance, and the length of the prompts."""
    task = TASKS[name]
    found = task_answers(model, task)
    lists = [task.draw(seed) for seed in task.seeds(0)]
    bos = model.tokenizer.bos_token or ""
    lengths = [len(task.prompt(one, block, bos=bos).tokenized(model).tokens()) for one in lists for block in one.asked]
    return {
        "prompts": len(found),
        "tokens": float(np.mean(lengths)),
        "accuracy": (found["rank"] == 1).mean(),
        "probability": found["probability"].mean(),
        "chance": found["chance"].mean(),
    }


def profile(by_list: pd.DataFrame) -> dict[str, float]:
    """Medians over heads of the mean over lists, and the least and largest median of one list."""
    means, medians = by_list.groupby(HEADS)[list(SCORES)].mean(), by_list.groupby("draw")[list(SCORES)].median()
    row = {}
    for score in SCORES:
        row |= {
            score: means[score].median(),
            f"{score}_low": medians[score].min(),
            f"{score}_high": medians[score].max(),
        }
    first, third = means["exclusion_index"].quantile([0.25, 0.75])
    return {**row, "index_q1": first, "index_q3": third}


def shared(model: str, tables: dict[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Rank correlations over heads: of two lists of a task, and of the means over lists of two tasks."""
    rows = []
    for score in SCORES:
        lists = {name: one.pivot(index=HEADS, columns="draw", values=score) for name, one in tables.items()}
        rows += [
            {"model": model, "score": score, "between": "lists", "what": name, **_least_and_most(wide)}
            for name, wide in lists.items()
        ]
        means = pd.DataFrame({name: wide.mean(axis=1) for name, wide in lists.items()})
        if len(tables) > 1:
            rows.append({"model": model, "score": score, "between": "tasks", "what": "all", **_least_and_most(means)})
    return rows


def _least_and_most(wide: pd.DataFrame) -> dict[str, float]:
    """Least, mean and largest rank correlation of two columns."""
    rho = [wide[a].corr(wide[b], method="spearman") for a, b in combinations(wide.columns, 2)]
    return {"least": min(rho), "mean": float(np.mean(rho)), "most": max(rho)}


def by_pair(model: str, name: str, frequencies: pd.DataFrame) -> pd.DataFrame:
    """Median over heads of the exclusion index of each rotary pair, and the share of heads with s_pos above s_sym."""
    above = (frequencies["s_pos"] > frequencies["s_sym"]).groupby(frequencies["frequency"]).mean()
    index = frequencies.groupby("frequency")["exclusion_index"].median()
    return pd.DataFrame({"model": model, "task": name, "index": index, "s_pos_above": above}).reset_index()


def main(folder: Annotated[Path, typer.Argument(help="Where tables and what was measured are kept.")]) -> None:
    """Measure, write and print."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    profiles, correlations, pairs, agreements = [], [], [], []
    for model_name in MODELS:
        model = tls.load_model(model_name)
        heads = tls.analyze_heads(model, null_draws=2, max_se=None)
        tables = {}
        for name, task in TASKS.items():
            row = {"model": model_name, "task": name, **answers(model, name)}
            if row["accuracy"] > ANSWERED:
                kept = folder / "runs" / f"{model_name}_{name}"
                frequencies = tls.positional_symbolic(model, task, mode="key", per_frequency=True, folder=kept)
                tables[name] = tls.positional_symbolic(model, task, mode="key", by="draw", folder=kept)
                scores = tls.positional_symbolic(model, task, mode="key", folder=kept)
                row |= profile(tables[name])
                pairs.append(by_pair(model_name, name, frequencies))
                agreed = score_agreement(scores, heads)[["score", "column", "spearman", "layer_null_high"]]
                agreements.append(agreed.assign(model=model_name, task=name))
                tls.write_table(scores, folder / f"heads_{model_name}_{name}.parquet")
                if model_name == MODELS[0] and name == next(iter(TASKS)):
                    positional_symbolic_plane(scores).savefig(folder / "plane.png", dpi=150)
                    exclusion_plane(scores).savefig(folder / "exclusion.png", dpi=150)
            profiles.append(row)
            typer.echo(f"{model_name} {name}: answered in {row['accuracy']:.2f}")
        correlations += shared(model_name, tables)
        for name, frame in (
            ("profiles", pd.DataFrame(profiles)),
            ("shared", pd.DataFrame(correlations)),
            ("agreement", pd.concat(agreements, ignore_index=True)),
            ("pairs", pd.concat(pairs, ignore_index=True)),
        ):
            frame.round(4).to_csv(folder / f"{name}.csv", index=False)
            if name != "pairs":
                cells = frame.map(lambda value: f"{value:.2f}" if isinstance(value, float) else str(value))
                typer.echo("\n".join(markdown_table(frame.columns, cells.to_numpy().tolist())))


if __name__ == "__main__":
    typer.run(main)
