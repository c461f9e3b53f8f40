"""Three published scores of retrieval heads on one needle task: do they agree, and what does removing each top five do?

    python benchmarks/retrieval.py measure smollm2-135m    # some three minutes of CPU on one thread
    python benchmarks/retrieval.py measure gemma3-270m
    python benchmarks/retrieval.py page                    # the tables of docs/results/retrieval.md

Schedule, fixed before the first run. `tls.tasks.needle` with 20 prompts of 80 tokens, seed 0, no two with a name or an
answer in common; `split(0.5)`: the scores are of 10 prompts, and the removals are measured on the 10 others.

Scores of a head, each the mean over the 10 prompts:

* attention: from the last token to the answer in the needle. Beside it `largest`, the share of prompts in which the
  head's largest attention is there: the retrieval score of Wu et al. (2404.15574), teacher-forced and of one step.
* question: from the tokens of the question to all tokens of the needle, mean over the former and sum over the latter:
  the QRScore of QRHead (2506.09944), without the subtraction of a null query.
* write: the direct contribution at the last token to logit(answer) - logit(answer of the pair), from the tokens of the
  needle less from all others (`ov_attribution`): after LOCOS (2607.01002), with the pair's answer subtracted.

Rank correlations are over all heads (Spearman); errors are the standard deviation over 500 bootstrap samples of the
prompts. Removal: the five heads of largest score, their output replaced by its mean over the 10 first prompts, position
by position. Beside each five 39 random fives with as many heads of each layer, drawn with seed 0 from all heads. The
number is the effect on the logit difference less the effect of a random five on the same prompts, its mean over the 39,
with the standard error over the 10 prompts, and p = (1 + random fives with an effect as large) / 40; the smallest is
.025. Six p values are corrected by Benjamini-Hochberg. A score is said to find heads that matter where q < .05. Top
fives of two scores are compared by the paired difference of their effects.

Amended on 29 November 2026, before any number was read: 20 prompts of 80 tokens, where 32 of 128 would have taken too
much time.
"""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from scipy.stats import sem

import tlspectral as tls
from tlspectral.hooks.sweeps.controls import head_sets
from tlspectral.hooks.sweeps.layer_effects import set_values
from tlspectral.models.reading import attention_view
from tlspectral.plots.style import GREY, INK, RED, dress, new_figure
from tlspectral.selection.heads_as_written import head_pairs
from tlspectral.selection.node_names import head_name
from tlspectral.tasks.control_tests import control_test
from tlspectral.tasks.task_sequences import intact_values, task_sequences

FOLDER = Path("docs/results/retrieval")
MODELS = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
SCORES = {"attention": "attention to the answer", "question": "question to needle", "write": "write along the answer"}
PROMPTS, LENGTH, TOP, DRAWS, SAMPLES = 20, 80, 5, 39, 500

app = typer.Typer(no_args_is_help=True, add_completion=False)


def scores_by_prompt(model: object, task: tls.Task) -> dict[str, pd.DataFrame]:
    """Return a frame for each score, with a row per head (its name) and a column per prompt."""
    places = task.positions
    columns: dict[str, list[pd.Series]] = {name: [] for name in ("attention", "largest", "question", "write")}
    for row in range(len(task.prompts)):
        prompt, size = task.prompts[row : row + 1], task.prompts.shape[1]
        needle, answer, question = (places[name][row] for name in ("needle", "answer", "question"))
        to_answer, to_needle = torch.zeros(size, size), torch.zeros(size, size)
        to_answer[-1, answer] = 1
        to_needle[question:, needle : answer + 2] = 1  # the answer and the full stop behind it
        one = tls.detect_heads(model, prompts=prompt, pattern=to_answer).set_index("name")
        columns["attention"].append(one["pattern"])
        columns["largest"].append(one["pattern_largest"])
        of_question = tls.detect_heads(model, prompts=prompt, pattern=to_needle).set_index("name")
        columns["question"].append(of_question["pattern"])
        pair = task.metric.correct[row], task.metric.wrong[row]
        writes = tls.ov_attribution(model, prompt, None, -1, direction=pair)
        signs = np.where(writes["position"].between(needle, answer + 1), 1.0, -1.0)
        columns["write"].append((writes["contribution"] * signs).groupby(writes["name"]).sum().reindex(one.index))
    return {name: pd.concat(values, axis=1, ignore_index=True) for name, values in columns.items()}


def correlations(scores: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return a row per pair of scores: their rank correlation over heads, and its error over bootstrap samples."""
    rng, n = np.random.default_rng(0), scores["write"].shape[1]
    samples = [rng.integers(n, size=n) for _ in range(SAMPLES)]
    rows = []
    for a, b in combinations(scores, 2):
        whole = scores[a].mean(axis=1).corr(scores[b].mean(axis=1), method="spearman")
        drawn = [
            scores[a][sample].mean(axis=1).corr(scores[b][sample].mean(axis=1), method="spearman") for sample in samples
        ]
        rows.append({"a": a, "b": b, "rank_correlation": whole, "rank_correlation_se": np.std(drawn, ddof=1)})
    return pd.DataFrame(rows)


@app.command()
def measure(model_name: str) -> None:
    """Score all heads on half of the prompts, remove the top fives on the other half, and write three tables."""
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    model = tls.load_model(model_name)
    choosing, held = tls.tasks.needle(model, n_prompts=PROMPTS, length=LENGTH).split(0.5)
    scores = scores_by_prompt(model, choosing)
    table = pd.concat(
        {name: values.mean(axis=1) for name, values in scores.items()}
        | {f"{name}_se": values.sem(axis=1) for name, values in scores.items()},
        axis=1,
    ).rename_axis("name")
    table.to_csv(FOLDER / f"{model_name}-scores.csv", float_format="%.6g")
    correlations(scores).to_csv(FOLDER / f"{model_name}-correlations.csv", index=False, float_format="%.6g")
    view, part = attention_view(model), tls.parts.Output("mean", reference=choosing.prompts)
    sequences = task_sequences(view, held)
    sets, labels = [], []
    for name in SCORES:
        own = sorted(head_pairs(table.nlargest(TOP, name).index.tolist()))
        by_layer: dict[int, list[int]] = {}
        for layer, head in own:
            by_layer.setdefault(layer, []).append(head)
        drawn = head_sets({layer: view.n_heads(layer) for layer in by_layer}, by_layer, DRAWS, np.random.default_rng(0))
        sets += [own, *drawn]
        labels += [(name, draw) for draw in range(-1, len(drawn))]
    intact, intact_value = intact_values(view, sequences, sorted({layer for one in sets for layer, _ in one}))
    effects = set_values(part.fixed(view, sequences), sequences, sets, intact).numpy() - intact_value
    removed = pd.DataFrame(labels, columns=["score", "draw"])
    removed["heads"] = [" ".join(head_name(*pair) for pair in one) for one in sets]
    prompts = pd.DataFrame(effects, columns=[f"prompt_{number}" for number in range(len(intact_value))])
    intact_row = pd.DataFrame([["intact", -1, "", *intact_value]], columns=[*removed, *prompts])
    removed = pd.concat([intact_row, pd.concat([removed, prompts], axis=1)], ignore_index=True)
    removed.to_csv(FOLDER / f"{model_name}-removed.csv", index=False, float_format="%.6g")


def effects_of(model_name: str) -> pd.DataFrame:
    """Return a row per score of a model, from its stored table: what removing its top five does.

    Columns: `score, heads, effect, effect_se, random` (mean of the random fives), `excess` (effect less the random
    ones, paired by prompt), `excess_se`, `pvalue`, `draws` (effects of the random fives) and `by_prompt`.
    """
    removed = pd.read_csv(FOLDER / f"{model_name}-removed.csv")
    prompts = [name for name in removed if name.startswith("prompt_")]
    rows = []
    for score in SCORES:
        of_score = removed[removed["score"] == score]
        own, drawn = (
            of_score.loc[which, prompts].to_numpy() for which in (of_score["draw"] < 0, of_score["draw"] >= 0)
        )
        effect, paired = own[0], own[0] - drawn.mean(0)
        _, pvalue = control_test(effect.mean(keepdims=True), drawn.mean(1)[None])
        rows.append({
            "score": score, "heads": of_score["heads"].iloc[0], "effect": effect.mean(), "effect_se": sem(effect),
            "random": drawn.mean(), "excess": paired.mean(), "excess_se": sem(paired), "pvalue": pvalue[0],
            "draws": drawn.mean(1), "by_prompt": effect,
        })  # fmt: skip
    return pd.DataFrame(rows)


def rows_of_page() -> Iterator[str]:
    """Yield the rows of the tables of the page, from the stored tables."""
    for name in MODELS:
        intact = pd.read_csv(FOLDER / f"{name}-removed.csv").iloc[0, 3:].to_numpy(float)
        yield f"| {MODELS[name]} | {intact.mean():.2f} ± {sem(intact):.2f} |"
    every = pd.concat([effects_of(name).assign(model=name) for name in MODELS], ignore_index=True)
    every["qvalue"] = tls.stats.benjamini_hochberg(every["pvalue"]).q
    for _, row in every.iterrows():
        yield (
            f"| {MODELS[row['model']]} | {SCORES[row['score']]} | {row['heads'].replace(' ', ', ')} | "
            f"{row['effect']:.2f} ± {row['effect_se']:.2f} | {row['random']:.2f} | "
            f"{row['excess']:.2f} ± {row['excess_se']:.2f} | {row['pvalue']:.3f} | {row['qvalue']:.2f} |"
        )
    by_score = {(row["model"], row["score"]): row["by_prompt"] for _, row in every.iterrows()}
    for a, b in combinations(SCORES, 2):
        paired = [by_score[name, a] - by_score[name, b] for name in MODELS]
        yield f"| {a} less {b} | " + " | ".join(f"{one.mean():.2f} ± {sem(one):.2f}" for one in paired) + " |"
    tables = [pd.read_csv(FOLDER / f"{name}-correlations.csv") for name in MODELS]
    for rows in zip(*(table.to_dict("records") for table in tables), strict=True):
        numbers = [f"{row['rank_correlation']:.2f} ± {row['rank_correlation_se']:.2f}" for row in rows]
        yield f"| {rows[0]['a']}, {rows[0]['b']} | " + " | ".join(numbers) + " |"


@app.command()
def page() -> None:
    """Print the rows of the tables of the page."""
    for row in rows_of_page():
        print(row)


def figures() -> dict[str, Figure]:
    """Return the figure of the page by file name: effects of the top fives beside those of random fives."""
    figure = new_figure(7.2, 2.6)
    for number, (name, title) in enumerate(MODELS.items()):
        axes = figure.add_subplot(1, 2, 1 + number)
        rows = effects_of(name)
        for place, row in enumerate(rows.itertuples()):
            height = len(rows) - 1 - place
            axes.plot(row.draws, np.full(len(row.draws), height - 0.22), "o", color=GREY, markersize=3, alpha=0.6)
            axes.errorbar(row.effect, height, xerr=row.effect_se, fmt="o", color=RED, markersize=5, capsize=2)
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.set_yticks(range(len(rows))[::-1], [SCORES[score] for score in rows["score"]] if number == 0 else [""] * 3)
        axes.set_ylim(-0.6, len(rows) - 0.6)
        axes.set_xlabel("change of the logit difference")
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        dress(axes)
    return {"retrieval.png": figure}


if __name__ == "__main__":
    app()
