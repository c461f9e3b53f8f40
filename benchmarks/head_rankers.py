"""Which cheap number finds the heads that matter: the tables and the picture of docs/results/rankers.md.

Run `python benchmarks/head_rankers.py MODEL` for smollm2-135m, gemma3-270m, and the packaged tiny models, then
`python benchmarks/head_rankers.py page`, which needs no model. A sweep takes some 12 CPU minutes on SmolLM2 or Gemma 3.
Layers that were measured lie under `--work`, and what stands in a table is not measured again.

Schedule, fixed before anything ran.

* Truth: |change of a task's mean score| when one head is taken away, over all heads of SmolLM2-135M-Instruct (270) and
  Gemma 3 270M (72). Heads that matter are the 5 % with the largest: 14 and 4. Tasks: induction (random repeats), text
  (the packaged book), indirect objects (S2 swapped), capitals. Mean and resample ablations are made on two halves
  with other prompts (3 sequences, or 6 prompts); the truth is the mean of both, and how well one half ranks the other's
  heads bounds what a ranker can reach. Zero ablations are those of docs/results/every_head.md.
* Rankers: those of `ranker_numbers`. The direction was fixed: a ranker that ranks the other way round has an AUC below
  .5. Beside them depth (layer: the best of early, late and middle first, chosen on the truth) and one random draw.
  LOCOS and QR were added later, and their direction, prompts and form fixed before they were scored.
* Score: AUC of the 5 % against the others; 95 % intervals leave out one layer after the other. Depth alone is the null
  to beat. The spectra that are weighted by data earn columns in `analyze_heads` if they beat depth and the unweighted
  ones on more than half of the truths.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import typer
from matplotlib.figure import Figure
from ranker_numbers import HEAD, OF_NEEDLES, gradient_estimates, needle_numbers, numbers_of_heads
from ranker_scores import GRADIENT, draw, models_in, print_page, scores_of_model
from tlspectral_studies.common.pair_tasks import IOI_TEMPLATES, pair_task

import tlspectral as tls
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.text import text_tokens

HALVES, ROWS, PROMPTS = 2, 3, 6  # rows of random tokens and text, and pairs of prompts, of a half
FOLDER, PUBLISHED = Path("docs/results/rankers"), Path("docs/results/sweeps")
SWEEPS = {
    "mean": ("induction", "text", "indirect objects", "capitals"),
    "resample": ("induction", "indirect objects"),
}


def drawn_task(view: AttentionView, name: str, draw: int) -> tls.Task:
    """Return a task on prompts of their own for each draw; the first two are the halves of the truth."""
    tiny = view.model.tokenizer is None
    if name == "induction":
        return tls.tasks.induction(n_sequences=16 if tiny else ROWS, segment_length=24, seed=draw)
    if name == "text":
        text = text_tokens(view, None, n_sequences=(HALVES + 1) * ROWS, sequence_length=48)
        return tls.tasks.language(text[ROWS * draw : ROWS * (draw + 1)])
    if name == "capitals":
        return pair_task(view.model, "capitals", n=PROMPTS, seed=draw)
    return pair_task(view.model, "ioi swapped", n=PROMPTS, seed=draw, templates=IOI_TEMPLATES[:1])


def truths(view: AttentionView) -> Iterator[tuple[str, str]]:
    """Yield kind of ablation and task of each truth that is measured here."""
    for kind, tasks in SWEEPS.items():
        for task in tasks:
            if view.model.tokenizer is not None or task == "induction":
                yield kind, task


def measured_truth(view: AttentionView, kind: str, task: str, work: Path) -> pd.DataFrame:
    """Return the change of the score without each head, by one ablation on one task: a row per head and half."""
    tables = []
    for half in range(HALVES):
        began = time.process_time()
        sweep = tls.ablation_sweep(
            view.model,
            tls.parts.Output(kind),  # pyright: ignore[reportArgumentType]
            task=drawn_task(view, task, half),
            folder=work / f"{kind}-{task}-{half}".replace(" ", "-"),
        )
        tables.append(_truth(sweep, kind, task, half))
        seconds = time.process_time() - began
        print(f"{kind} {task} {half}: {seconds:.0f} CPU s, largest {sweep['delta'].abs().max():.2f}", flush=True)
    return pd.concat(tables, ignore_index=True)


def published_truth(view: AttentionView, name: str) -> list[pd.DataFrame]:
    """Return the published sweep of zeros, where there is one of these weights."""
    file = PUBLISHED / name / "output.parquet"
    if not file.exists():
        return []
    sweep = tls.read_table(file)
    if sweep.attrs["weights_sha256"] != view.origin()["weights_sha256"]:
        raise ValueError(f"{file} is of other weights than {name}: measure it again")
    return [_truth(sweep, "zero", "induction", 0)]


def _truth(sweep: pd.DataFrame, kind: str, task: str, half: int) -> pd.DataFrame:
    table = sweep[[*HEAD, "name", "delta", "delta_se"]].assign(ablation=kind, task=task, half=half)
    return table.assign(intact=sweep.attrs["intact_value"]).round(6)


def head_numbers(view: AttentionView, name: str) -> pd.DataFrame:
    """Return all that the heads are ranked by: a row per head."""
    began = time.process_time()
    file = PUBLISHED / name / "heads.parquet"
    full = {"null_draws": 300, "max_se": None}  # as the published tables
    table = numbers_of_heads(view, tls.read_table(file) if file.exists() else tls.analyze_heads(view.model, **full))
    for task in dict(truth[::-1] for truth in truths(view)):
        estimates = gradient_estimates(view, drawn_task(view, task, HALVES))
        table = table.merge(estimates.rename(columns={"estimate": f"{GRADIENT}, {task}"}), on=HEAD)
    print(f"rankers: {time.process_time() - began:.0f} CPU s", flush=True)
    return table


def figures() -> dict[str, Figure]:
    """Draw the stored scores, and return the figure by its file name."""
    return {"rankers.png": draw(pd.read_csv(FOLDER / "scores.csv"))}


def main(name: str, folder: Path = FOLDER, work: Path = Path("out/rankers")) -> None:
    """Measure one model, or print the page's tables and draw its picture (`page`)."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "page":
        scores = pd.concat([scores_of_model(folder, one) for one in models_in(folder)], ignore_index=True)
        scores.round(4).to_csv(folder / "scores.csv", index=False)
        print_page(scores)
        draw(scores).savefig("docs/images/rankers.png")
        return
    view = attention_view(tls.load_model(name))
    truth_file, numbers_file = folder / f"{name}-truth.csv", folder / f"{name}-numbers.csv"
    numbers = pd.read_csv(numbers_file) if numbers_file.exists() else head_numbers(view, name)
    if view.model.tokenizer is not None and not {*OF_NEEDLES} <= {*numbers}:
        began = time.process_time()
        numbers = numbers.merge(needle_numbers(view), on=HEAD)
        print(f"needles: {time.process_time() - began:.0f} CPU s", flush=True)
    numbers.round(6).to_csv(numbers_file, index=False)
    known = [pd.read_csv(truth_file)] if truth_file.exists() else published_truth(view, name)
    for kind, task in truths(view):
        if not any(((table["ablation"] == kind) & (table["task"] == task)).any() for table in known):
            known.append(measured_truth(view, kind, task, work / name))
            pd.concat(known, ignore_index=True).to_csv(truth_file, index=False)


if __name__ == "__main__":
    typer.run(main)
