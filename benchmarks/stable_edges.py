"""Are the edges that bootstrap samples choose again the right ones, and would other pairs choose them: stable edges.

    python benchmarks/stable_edges.py planted                 # models whose edges are known, 200 seeds
    python benchmarks/stable_edges.py smollm2-135m            # overlap, null and faithfulness on three tasks; resumable
    python benchmarks/stable_edges.py gemma3-270m
    python benchmarks/stable_edges.py page                    # the tables and the figure, from what the others wrote

Schedule, fixed before the first run. An edge is stable where `selected` is at least .9: 900 of 1,000 bootstrap samples
of the pairs have it among the `n` of largest estimate.

`planted`: attention-only models of three layers and four heads. Seven edges carry a token's sign from the embedding to
the logits, on directions of their own; one of the two ways is half as strong. All other weights are random and read
and write a subspace of their own, which carries nothing of the sign, so that other edges have estimates of random sign.
200 seeds, 8, 16 and 32 pairs, both methods, n = 14 (twice as many as are planted). Printed: the share of stable edges
that are planted, and the share of the planted ones that are stable; the same of the 14 largest, of as many largest as
are stable, and of stable edges whose measured effect is beyond two standard errors. The noise was set on the seeds
1,000 to 1,009, so that EAP has .8 of the planted edges among the seven largest with 8 pairs.

Models: 64 pairs of three tasks (the start token that `benchmarks/circuits.py` chose), EAP-IG, n = 50.

* Overlap: 20 random pairs of disjoint samples of 4, 8, 16 and 32 pairs. Jaccard index of the 50 largest, of the stable
  ones, and of as many largest as are stable in each sample; the share of one sample's sets that is among the other's 50
  largest. The goal is .9 for stable sets. It is met or not for each task and number of pairs.
* What `edge_effects` extrapolates from 16 and 32 of the pairs (10 draws each), beside the index that disjoint samples
  of 16 and 32 have.
* Null: each pair's whole row of estimates gets a random sign, 20 times, with 16 and 64 pairs. Stable edges are counted.
* Faithfulness: edges chosen on 32 pairs, scored on the 32 others, in 3 splits and both directions; n is 50, and .5 % of
  the edges. Stable set, as many largest, and a random set of the same size between the same layers. Mean over
  directions, and the difference of the first two with its standard error over the splits. Stable sets count as better,
  or worse, where the difference is beyond 2.57 of it (t with 5 degrees of freedom).
"""

import json
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import typer
from circuits import PAIRS, chosen_start
from jaxtyping import Bool, Float64
from matplotlib.figure import Figure
from tlspectral_studies.common.pair_tasks import PairTask, pair_task
from tqdm import tqdm

import tlspectral as tls
from tlspectral.hooks.circuits.circuit import random_circuit
from tlspectral.hooks.circuits.estimates import Method, edge_estimates
from tlspectral.hooks.circuits.pairs import Pairs, pairs_of
from tlspectral.hooks.circuits.stability import overlaps, selected_share
from tlspectral.models.reading import attention_view
from tlspectral.plots.style import BLUE, GREY, INK, ORANGE, dress, legend_below, new_figure

FOLDER = Path("docs/results/stable_edges")
TASKS: tuple[PairTask, ...] = ("ioi swapped", "agreement", "opposites")
STABLE = 0.9
CHOSEN = 50
SEEDS, PLANTED_PAIRS, PLANTED_CHOSEN = 200, (8, 16, 32), 14
PLANTED_METHODS: tuple[Method, ...] = ("EAP", "EAP-IG")
SPLITS, SIZES = 20, (4, 8, 16, 32)
Terms = Float64[np.ndarray, "pairs edges"]
Chosen = Bool[np.ndarray, "edges"]

SIGNS, OTHERS, POSITIONS = 12, 12, 8
"""Of planted models: tokens that carry a sign, half of them either, tokens that carry none, and tokens of a prompt."""
NOISE = 4.0
"""Half of the size of what tokens write into the subspace of all other weights; that of their sign is 1."""


def planted_model(seed: int) -> tuple[Any, set[tuple[str, str]]]:
    """Return a model in which seven known edges carry a sign to the logits, and those edges."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig  # version 3.9 makes it from a config alone

    drawn = np.random.default_rng(seed)
    config = HookedTransformerConfig(n_layers=3, d_model=64, d_head=8, n_heads=4, n_ctx=POSITIONS, attn_only=True,
        d_vocab=SIGNS + OTHERS + 2, normalization_type="LN", positional_embedding_type="standard", device="cpu",
        seed=seed)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = HookedTransformer(config).eval()
    # Directions that a norm's centring leaves alone: six channels, and the subspace of everything else.
    basis = np.linalg.qr(np.column_stack([np.ones(64), drawn.standard_normal((64, 63))]))[0][:, 1:]
    channels, rest = basis[:, :6].T, basis[:, 6:]

    def noise(*shape: int) -> np.ndarray:
        return drawn.standard_normal((*shape, rest.shape[1])) @ rest.T

    half = SIGNS // 2
    shared = noise(half) / np.sqrt(57)  # a token of one sign and its partner write the same else
    embedding = np.concatenate([shared, shared, noise(OTHERS + 2) / np.sqrt(57)]) * NOISE * 2
    embedding[:half] += channels[0]
    embedding[half:SIGNS] -= channels[0]
    heads = [list(drawn.permutation(4)) for _ in range(3)]
    # Head, the channels that its values read, those that it writes, and how strongly.
    planted = [(0, heads[0][0], [0], 1, 1.0), (0, heads[0][1], [0], 2, 0.5), (1, heads[1][0], [1], 3, 1.0),
        (1, heads[1][1], [2], 4, 1.0), (2, heads[2][0], [3, 4], 5, 1.0)]  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for module in model.modules():
            if type(module).__name__ == "LayerNorm":
                module.w.fill_(1.0)
        model.embed.W_E.copy_(torch.from_numpy(embedding))
        for layer in range(3):
            attention: Any = model.blocks[layer].attn
            for head in range(4):
                for name in ("W_Q", "W_K", "W_V"):
                    getattr(attention, name)[head] = torch.from_numpy(noise(8).T / 8)
                attention.W_O[head] = torch.from_numpy(noise(8) / 8)
        for layer, head, read, written, strength in planted:
            attention = model.blocks[layer].attn
            for slot, channel in enumerate(read):
                attention.W_V[head][:, slot] = torch.from_numpy(channels[channel])
                attention.W_O[head][slot] = torch.from_numpy(2 * strength * channels[written])
        unembedding = noise(2) / 8
        unembedding += np.stack([channels[5], -channels[5]])
        model.unembed.W_U[:, -2:] = torch.from_numpy(unembedding.T)
    names = {written: f"L{layer}H{head}" for layer, head, _, written, _ in planted} | {0: "embedding"}
    edges = {(names[channel], f"{names[written]}.v") for _, _, read, written, _ in planted for channel in read} | {
        (names[5], "logits")
    }
    return model, edges


def planted_task(seed: int, n: int) -> tls.Task:
    """Return pairs of prompts with one token of either sign at a random place, all other tokens of no sign."""
    drawn = np.random.default_rng([seed, 1])
    sides = [drawn.integers(SIGNS, SIGNS + OTHERS, size=(n, POSITIONS)) for _ in range(2)]
    places = drawn.integers(0, POSITIONS - 1, size=n)
    for side, sign in zip(sides, (0, 1), strict=True):
        side[np.arange(n), places] = drawn.integers(0, SIGNS // 2, size=n) + sign * SIGNS // 2
    clean, other = map(torch.from_numpy, sides)
    first, second = SIGNS + OTHERS, SIGNS + OTHERS + 1
    return tls.logit_difference(clean, first, second, counterfactual=other)


def terms_of(pairs: Pairs, method: Any) -> Terms:
    """Return the terms of the estimates of all possible edges, a row per pair."""
    found = edge_estimates(pairs, method)
    if found.units != "pairs" or (found.sizes != 1).any():
        raise ValueError(f"{found.units} of {found.sizes.max()} pairs, where each pair was to have a row")
    return found.terms[:, 0][:, pairs.graph.possible]


def largest(terms: Terms, n: int) -> Chosen:
    """Return which edges are the n of largest estimate."""
    chosen = np.zeros(terms.shape[1], dtype=bool)
    chosen[np.argsort(-np.abs(terms.sum(0)), kind="stable")[:n]] = True
    return chosen


def stable(terms: Terms, n: int, seed: int) -> Chosen:
    """Return which edges nine of ten bootstrap samples have among the n largest."""
    return selected_share(terms, n, seed) >= STABLE


def planted(seeds: range) -> pd.DataFrame:
    """Return how many edges of each choice are planted, a row per seed, number of pairs, method and choice.

    `no_effect` are those of the others whose measured effect is within two standard errors of 0.
    """
    rows = []
    for seed in tqdm(seeds, "planted"):
        model, known = planted_model(seed)
        for n, method in product(PLANTED_PAIRS, PLANTED_METHODS):
            table = tls.edge_effects(
                model, task=planted_task(seed, n), screen=PLANTED_CHOSEN, method=method
            ).sort_values("estimate", key=np.abs, ascending=False)
            right = np.array([edge in known for edge in zip(table["sender"], table["receiver"], strict=True)])
            small = (table["delta"].abs() < 2 * table["delta_se"]).to_numpy()
            held = (table["selected"] >= STABLE).to_numpy()
            place = np.arange(len(table))
            choices = {"stable": held, "stable, with an effect": held & ~small, "as many largest": place < held.sum(),
                "7 largest": place < len(known), "14 largest": place < PLANTED_CHOSEN}  # fmt: skip
            rows += [
                {"seed": seed, "pairs": n, "method": method, "choice": choice, "n": int(some.sum()),
                 "planted": int((some & right).sum()), "no_effect": int((some & ~right & small).sum()),
                 "edges": len(table)}
                for choice, some in choices.items()
            ]  # fmt: skip
    return pd.DataFrame(rows)


def jaccard(one: Chosen, two: Chosen) -> float:
    """Return the Jaccard index of two sets; NaN of two empty ones."""
    both = (one | two).sum()
    return float((one & two).sum() / both) if both else np.nan


def overlap_rows(terms: Terms) -> pd.DataFrame:
    """Compare what disjoint samples of the pairs choose."""
    rows = []
    for size in SIZES:
        for split in range(SPLITS):
            order = np.random.default_rng([size, split]).permutation(len(terms))
            samples = [terms[part] for part in (order[:size], order[size : 2 * size])]
            top = [largest(one, CHOSEN) for one in samples]
            held = [stable(one, CHOSEN, split) for one in samples]
            same = [largest(one, int(some.sum())) for one, some in zip(samples, held, strict=True)]
            for choice, (one, two) in {"largest": top, "stable": held, "as many largest": same}.items():
                again = (one & top[1]).sum() + (two & top[0]).sum()
                rows.append({
                    "pairs": size, "split": split, "choice": choice, "n": (one.sum() + two.sum()) / 2,
                    "jaccard": jaccard(one, two), "again": again / max(1, one.sum() + two.sum()),
                })  # fmt: skip
    return pd.DataFrame(rows)


def extrapolation_rows(terms: Terms) -> pd.DataFrame:
    """Return what `edge_effects` would say in `attrs` from some of the pairs."""
    rows = []
    for size in (16, 32):
        for draw in range(10):
            some = np.random.default_rng([size, draw, 2]).permutation(len(terms))[:size]
            rows.append({"pairs": size, "draw": draw, **overlaps(terms[some], CHOSEN, draw)})
    return pd.DataFrame(rows)


def null_rows(terms: Terms) -> pd.DataFrame:
    """Count stable edges where the sign of each pair's row is drawn."""
    rows = []
    for size in (16, 64):
        for draw in range(20):
            drawn = np.random.default_rng([size, draw, 3])
            some = terms[drawn.permutation(len(terms))[:size]]
            signs = drawn.choice([-1.0, 1.0], size=size)
            rows.append({"pairs": size, "draw": draw, "stable": int(stable(some * signs[:, None], CHOSEN, draw).sum())})
    return pd.DataFrame(rows)


def faithfulness_rows(pairs: Pairs, terms: Terms) -> pd.DataFrame:
    """Score stable sets and others of their size on the pairs that did not choose them."""
    graph, rows = pairs.graph, []
    intact, none = pairs.plain_values()
    for n in (CHOSEN, round(0.005 * terms.shape[1])):
        circuits, labels = [], []
        for split in range(3):
            order = np.random.default_rng([n, split, 4]).permutation(len(terms))
            for direction, fit in enumerate((order[: len(order) // 2], order[len(order) // 2 :])):
                held = stable(terms[fit], n, split)
                masks = {
                    "stable": held,
                    "as many largest": largest(terms[fit], int(held.sum())),
                    "n": largest(terms[fit], n),
                }
                whole = {choice: np.zeros_like(graph.possible) for choice in masks}
                for choice, some in masks.items():
                    whole[choice][graph.possible] = some
                whole["random"] = random_circuit(graph, whole["stable"], np.random.default_rng([n, split, direction]))
                scored = np.setdiff1d(order, fit)
                labels += [(split, direction, choice, scored) for choice in whole]
                circuits += [*whole.values()]
        for (split, direction, choice, scored), mask, values in zip(
            labels, circuits, pairs.circuit_values(circuits), strict=True
        ):
            carried = (values - none)[scored].mean() / (intact - none)[scored].mean()
            rows.append({"chosen": n, "split": split, "direction": direction, "choice": choice,
                "n": int(mask.sum()), "faithfulness": float(carried)})  # fmt: skip
    return pd.DataFrame(rows)


def measure(name: str, out: Path) -> None:
    """Write the tables of one model, those that are not there yet; estimates are kept in `out`."""
    model: Any = None
    pilot = pd.read_csv(f"docs/results/circuits/{name}-pilot.csv")
    out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        files = {what: FOLDER / f"{name}-{task.replace(' ', '-')}-{what}.csv" for what in STEPS}
        if all(file.exists() for file in files.values()):
            continue
        model = model or tls.load_model(name)
        pairs = pairs_of(attention_view(model), pair_task(model, task, n=PAIRS, start=chosen_start(pilot, task)))
        stored = out / f"{name}-{task.replace(' ', '-')}.npy"
        if not stored.exists():
            np.save(stored, terms_of(pairs, "EAP-IG"))
        terms = np.load(stored)
        for what, file in files.items():
            if not file.exists():
                rows = STEPS[what](pairs, terms).round(4)
                rows.to_csv(file, index=False)
                print(name, task, what, json.dumps(rows.describe().loc["mean"].round(3).to_dict()), flush=True)


STEPS: dict[str, Callable[[Pairs, Terms], pd.DataFrame]] = {
    "overlap": lambda pairs, terms: overlap_rows(terms),
    "extrapolation": lambda pairs, terms: extrapolation_rows(terms),
    "null": lambda pairs, terms: null_rows(terms),
    "faithfulness": faithfulness_rows,
}


def print_page() -> None:
    """Print the tables of the page from what has been measured, and draw the overlap over the number of pairs."""
    found = pd.read_csv(FOLDER / "planted.csv")
    found["right"], found["found"] = found["planted"] / found["n"].where(found["n"] > 0), found["planted"] / 7
    table = found.groupby(["method", "pairs", "choice"], sort=False)[["n", "right", "found", "no_effect"]].mean()
    print(table.round(2).to_string())
    for what in STEPS:
        for file in sorted(FOLDER.glob(f"*-{what}.csv")):
            rows = pd.read_csv(file)
            keys = [key for key in ("chosen", "pairs", "choice") if key in rows]
            print(f"\n{file.stem}\n{rows.groupby(keys, sort=False).mean(numeric_only=True).round(3).to_string()}")
            if what == "faithfulness":
                of = rows.pivot_table(index=["chosen", "split", "direction"], columns="choice", values="faithfulness")
                less = (of["stable"] - of["as many largest"]).groupby("chosen").agg(["mean", "sem"])
                print(f"stable less as many largest\n{less.round(3).to_string()}")
    for name, figure in figures().items():
        figure.savefig(f"docs/images/{name}")


def figures() -> dict[str, Figure]:
    """Draw the stored overlaps over the number of pairs, and return the figure by its file name."""
    files = sorted(FOLDER.glob("*-overlap.csv"))
    lines = -(-len(files) // 2)
    figure = new_figure(7.6, 2.7 * lines + 0.5)
    panels = figure.subplots(lines, 2, sharex=True, sharey=True, squeeze=False)
    shown = {}
    for axes, file in zip(panels.flat, files, strict=False):
        rows = pd.read_csv(file)
        for choice, style, colour in (
            ("largest", "o-", ORANGE), ("as many largest", "s--", INK), ("stable", "^-", BLUE)
        ):  # fmt: skip
            of = rows[rows["choice"] == choice].groupby("pairs")["jaccard"]
            label = "50 largest" if choice == "largest" else choice
            shown[label] = axes.errorbar(of.mean().index, of.mean(), of.std(), fmt=style, color=colour)
        shown["the goal for stable sets"] = axes.axhline(STABLE, color=GREY, linewidth=0.8, linestyle=":")
        axes.set(xscale="log")
        axes.set_xticks(SIZES, list(map(str, SIZES)))
        axes.minorticks_off()
        axes.set_title(file.stem.removesuffix("-overlap"), fontsize=10, color=INK, loc="left")
        dress(axes)
    for axes in panels.flat[len(files) :]:
        axes.set_axis_off()
    figure.supylabel("Jaccard index of what both samples choose", fontsize=10, color=INK)
    note = "across: pairs in each of two disjoint samples"
    legend_below(figure, [(artist, text) for text, artist in shown.items()], [note], columns=4)
    return {"stable_edges.png": figure}


def main(what: str, out: Path = Path("out/stable_edges")) -> None:
    """Run `planted`, the steps of one model, or `page`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if what == "planted":
        if not (file := FOLDER / "planted.csv").exists():
            planted(range(SEEDS)).to_csv(file, index=False)
    elif what == "page":
        print_page()
    else:
        measure(what, out)


if __name__ == "__main__":
    typer.run(main)
