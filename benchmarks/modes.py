"""What carries the scores of an induction head and of a previous-token head: sources, modes, frequencies.

Run `python benchmarks/modes.py`: SmolLM2-135M, some ten CPU minutes; tables that are there are drawn again.

* Terms: mean rows of `qk_attribution` with errors, over 24 scores of repeated random tokens, from each query to the
  key that the head is named for: the token behind the query's first copy, or the one before the query.
* Share: on 8 rows of text of 64 tokens, the share of the variance of the scores, over the keys that a query sees and
  without the mean of its row (which the softmax does not see), that the K largest modes leave nothing of: 1 less the
  variance of the scores less theirs over the variance of the scores.
* Ablation: the induction loss without the K largest modes of the previous-token head, or without all others, beside
  the five draws of the sweep's control: as many random directions, whose scores have the same RMS. Five draws give no
  p below .17, so the effects are shown beside the range of the draws.
"""

import time
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import tlspectral as tls
from tlspectral.models.reading import attention_view
from tlspectral.models.running.text import text_tokens
from tlspectral.plots.style import BLUE, GREY, INK, ORANGE, RED, dress, legend_below, new_figure
from tlspectral.tasks.repeated import repeated_sequences

HEADS = {"L18H6": "induction", "L16H0": "previous token"}
FOLDER, SEGMENT, TEXTS, LENGTH = Path("docs/results/modes"), 24, 8, 64
COUNTS = (1, 2, 4, 8, 16, 32)


def asked(view, kind: str) -> list[tuple]:
    """Three queries of each of eight repeats, with the key that the head is named for."""
    rows = repeated_sequences(view, n_sequences=8, segment_length=SEGMENT)
    first = rows.shape[1] - 2 * SEGMENT
    places = [first + SEGMENT + 3, first + SEGMENT + 11, first + SEGMENT + 19]
    behind = {"induction": SEGMENT - 1, "previous token": 1}[kind]
    return [(row, query, query - behind) for row in rows for query in places]


def terms(model, view) -> pd.DataFrame:
    """The twelve largest rows of every division of both heads."""
    found = []
    for head, kind in HEADS.items():
        for by in ("source", "mode", "frequency"):
            began = time.process_time()
            remove = None if by == "frequency" else 4
            table = tls.qk_attribution(model, asked(view, kind), head, by=by, top=12, remove=remove)
            cost = time.process_time() - began
            print(f"{head} by {by}: {cost:.1f} CPU s, score {table.attrs['score']:.2f} ± {table.attrs['score_se']:.2f}")
            found.append(table.assign(head=head, by=by, score=table.attrs["score"]))
    return pd.concat(found, ignore_index=True)


def shares(model, view) -> pd.DataFrame:
    """Share of the variance of scores on text that the K largest modes carry."""
    texts = text_tokens(view, None, n_sequences=TEXTS, sequence_length=LENGTH)
    seen = np.tril(np.ones((LENGTH, LENGTH), dtype=bool))
    seen[:, 0] = False  # the sink
    found = []
    for head in HEADS:
        for number, row in enumerate(texts):
            whole = without_row_means(tls.scores(model, row, head).to_numpy(), seen)
            for count in (*COUNTS, 64):
                part = without_row_means(tls.scores(model, row, head, tls.parts.Mode(range(count))).to_numpy(), seen)
                share = 1 - np.square(whole - part)[seen].sum() / np.square(whole)[seen].sum()
                found.append({"head": head, "text": number, "modes": count, "share": share})
    return pd.DataFrame(found)


def without_row_means(scores: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Scores less the mean of their row over the keys that the query sees."""
    return scores - np.where(seen, scores, 0).sum(1, keepdims=True) / np.maximum(seen.sum(1, keepdims=True), 1)


def ablations(model) -> pd.DataFrame:
    """Induction loss without modes of the previous-token head."""
    found, task = [], tls.tasks.induction(n_sequences=16)
    for all_but in (False, True):
        for count in COUNTS:
            part = tls.parts.Mode(range(count), all_but=all_but)
            table = tls.ablation_sweep(model, part, heads=["L16H0"], task=task, control="random")
            draws = [np.mean(draw) for draw in table["control_draws"].iloc[0]] if "control_draws" in table else [np.nan]
            table = table.drop(columns="control_draws", errors="ignore")
            found.append(table.assign(modes=count, all_but=all_but, draw_min=min(draws), draw_max=max(draws)))
            print(part, table[["delta", "delta_se", "control_delta", "control_p"]].round(3).to_string(index=False))
    return pd.concat(found, ignore_index=True)


def figures() -> dict[str, Figure]:
    """Draw the stored tables: the terms of each head, the shares, the ablations. Returns figures by file name."""
    rows, share, ablated = (pd.read_csv(FOLDER / f"smollm2-135m-{name}.csv") for name in ("terms", "share", "ablation"))
    return {
        "modes_terms.png": draw_terms(rows),
        "modes_share.png": draw_shares(share),
        "modes_ablation.png": draw_ablations(ablated),
    }


def draw_terms(rows: pd.DataFrame) -> Figure:
    """Draw the ten largest terms of both heads, a row of panels for each division of the score."""
    figure = new_figure(8.4, 8.6)
    panels = figure.subplots(3, 2)
    for line, by in zip(panels, ("source", "mode", "frequency"), strict=True):
        for axes, head in zip(line, HEADS, strict=True):
            of = rows[(rows["head"] == head) & (rows["by"] == by) & (rows["query_term"] != "rest")].iloc[:10]
            alike = of["query_term"] == of["key_term"]
            names = np.where(alike, of["query_term"], of["query_term"] + " \N{MULTIPLICATION SIGN} " + of["key_term"])
            axes.barh(range(len(of)), of["total"], xerr=of["total_se"], color=BLUE, ecolor=INK)
            axes.axvline(0, color=GREY, linewidth=0.8)
            axes.set_yticks(range(len(of)), names)
            axes.invert_yaxis()
            axes.set_title(f"{head} by {by}, score {of['score'].iloc[0]:.1f}", fontsize=10, color=INK, loc="left")
            dress(axes)
            axes.tick_params(axis="y", labelsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("term of the score (logits)")
        dress(axes)
    return figure


def draw_shares(share: pd.DataFrame) -> Figure:
    """Draw the share of the variance of scores by the number of modes."""
    figure = new_figure(5.6, 3.4)
    axes = figure.subplots()
    for head, colour, mark in zip(HEADS, (BLUE, ORANGE), "os", strict=True):
        of = share[share["head"] == head].groupby("modes")["share"]
        look = {"marker": mark, "color": colour, "label": f"{head} ({HEADS[head]})"}
        axes.errorbar(of.mean().index, of.mean(), of.sem(), **look)
    axes.set(xscale="log", xlabel="largest modes", ylabel="share of the scores' variance")
    axes.set_xticks([*COUNTS, 64], list(map(str, [*COUNTS, 64])))
    axes.minorticks_off()
    dress(axes)
    legend_below(figure, list(zip(*axes.get_legend_handles_labels(), strict=True)), [], columns=2)
    return figure


def draw_ablations(ablated: pd.DataFrame) -> Figure:
    """Draw the induction loss without modes (red) beside the loss without random directions (grey)."""
    figure = new_figure(7.6, 3.4)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, all_but in zip(panels, (False, True), strict=True):
        of = ablated[ablated["all_but"] == all_but]
        axes.errorbar(
            of["modes"], of["control_delta"], of["control_delta_se"], marker="s", color=GREY, label="random directions"
        )
        axes.errorbar(of["modes"], of["delta"], of["delta_se"], marker="o", color=RED, label="modes")
        axes.set(xscale="log", xlabel="largest modes " + ("kept" if all_but else "removed"))
        axes.set_xticks(COUNTS, list(map(str, COUNTS)))
        axes.minorticks_off()
        dress(axes)
    panels[0].set_ylabel("induction loss, less intact (nat)")
    dress(panels[0])
    legend_below(figure, list(zip(*panels[0].get_legend_handles_labels(), strict=True)), [], columns=2)
    return figure


def main() -> None:
    """Measure, write the tables and draw them."""
    model = tls.load_model("smollm2-135m")
    view = attention_view(model)
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = {
        "terms": lambda: terms(model, view),
        "share": lambda: shares(model, view),
        "ablation": lambda: ablations(model),
    }
    for name, make in made.items():
        began, file = time.process_time(), FOLDER / f"smollm2-135m-{name}.csv"
        if not file.exists():
            make().to_csv(file, index=False)
        print(f"{name}: {time.process_time() - began:.0f} CPU s", flush=True)
    for name, figure in figures().items():
        figure.savefig(f"docs/images/{name}")


if __name__ == "__main__":
    main()
