"""Does the likeness of two heads predict that one stands in for the other? And are moved heads found again?

    python benchmarks/twins.py planted        # SmolLM2 beside copies of it whose heads were moved, and noise
    python benchmarks/twins.py smollm2-135m   # joint effects of pairs of heads; resumable by task
    python benchmarks/twins.py gemma3-270m
    python benchmarks/twins.py page           # the tables of the page, from what the others wrote

Schedule, fixed before the first run.

`planted`: copies of SmolLM2-135M-Instruct. Key/value groups move to random places in all layers, the heads of a group
are exchanged at random, and the basis inside of W_Q, W_K, W_V and W_O is drawn at random (a complex number per rotary
pair; a rotation and scaling for values). Before that, noise of 0, 1, 3 and 10 times the RMS of each head's W_Q, W_K,
W_V and W_O is added to it. Seed 0. Counted: heads whose nearest head by `qk`, and by `ov`, is their own. Goal: all 270
without noise, and likeness equal to that of the unmoved model to 1e-6. The null: the largest |likeness| of 72,900 pairs
after one random turn of the stream, and its largest distance from the mean in standard deviations.

Pairs: `tls.head_likeness(model)`. *Above* are all pairs with qk > .3. *Below* are as many of the pairs that share keys
and have qk <= .3, drawn with seed 0. They are the control.

Tasks: 12 repeated random sequences with segments of 16 tokens, loss in nats (`induction`; seed 0), where heads write
their mean over 32 other sequences; 16 pairs of indirect objects (`ioi swapped`, seed 0), logit difference, where heads
write what they write on the paired prompt. Harm is the rise of the loss, or the fall of the difference. The *excess*
of a pair is the harm of both heads together less the sum of the harms of either head. It is above 0 if either head
stands in for the other. Its error is over sequences, its p by sign flips, its q by Benjamini-Hochberg over the pairs of
a model and task.

Questions, for each of two models and two tasks:

1. Is the mean excess of pairs above larger than that of pairs below? Difference, and two-sided p by 9,999 random
   exchanges of the labels; Holm's correction over the four.
2. Does qk go with the excess among all these pairs? Spearman's correlation, and a partial one without the size of the
   single effects (the sum of their absolute values), p over layers (`tls.stats.partial_spearman`).
3. The same for ov, and for qk times ov: secondary, decided before the run, not corrected.

Likeness predicts redundancy if question 1 has a corrected p below .05 with a positive difference on three of the four
or more. If on one or two, it does so on some tasks. Otherwise it does not.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from tlspectral_studies.common.pair_tasks import pair_task

import tlspectral as tls
from tlspectral.heads.likeness import Likeness, likeness_of
from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.hooks.parts import Part
from tlspectral.hooks.parts.checked_calls import bound_parts
from tlspectral.models.reading import attention_view, measured
from tlspectral.models.reading.layer import RawAttention
from tlspectral.plots.style import BLUE, GREY, INK, ORANGE, dress, legend_below, new_figure
from tlspectral.selection.heads_as_written import head_pair
from tlspectral.tasks.metric_value import sign_flip_p
from tlspectral.tasks.repeated import repeated_sequences
from tlspectral.tasks.task_sequences import Replays, intact_values, replayed_values, task_sequences

FOLDER = Path("docs/results/twins")
MODELS = ("smollm2-135m", "gemma3-270m")
TASKS = ("induction", "indirect objects")
LEVEL, TWINS = 0.3, 0.5
SEQUENCES, SEGMENT, REFERENCE, PAIRS = 12, 16, 32, 16
NOISE = (0.0, 1.0, 3.0, 10.0)
PERMUTATIONS = 9_999


# --- planted ---


def moved_copy(name: str, noise: float, seed: int = 0) -> tuple[Any, list[int]]:
    """Return a copy of a packaged model of transformers whose heads were moved, and the new place of each head.

    The gains of the input norms are taken along, so that the folded operators only move.
    """
    model = tls.load_model(name)
    view = attention_view(model)
    layers = [block.attn for block in model.blocks]
    drawn, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    raws = [view.raw(index) for index in view.layers]
    n_heads, n_keys = len(raws[0].w_q), len(raws[0].w_k)
    shared, d_head = n_heads // n_keys, raws[0].w_q.shape[2]
    moved = drawn.permutation(len(layers) * n_keys)
    inner = np.stack([drawn.permutation(shared) for _ in moved])

    def noisy(values: torch.Tensor) -> torch.Tensor:
        rms = values.square().mean((1, 2), keepdim=True).sqrt()
        return values + noise * rms * torch.randn(values.shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        gains = [_gain(raw) for raw in raws]
        weights = [{key: noisy(getattr(raw, f"w_{key}").double()) for key in "qkvo"} for raw in raws]
        places = [0] * (len(layers) * n_heads)
        new = [{key: torch.zeros_like(value) for key, value in of_layer.items()} for of_layer in weights]
        for old, at in enumerate(moved):
            (layer, key), (to_layer, to_key) = divmod(old, n_keys), divmod(int(at), n_keys)
            factor = torch.view_as_complex(torch.randn(d_head // 2, 2, generator=generator, dtype=torch.float64))
            basis = torch.linalg.qr(torch.randn(d_head, d_head, generator=generator, dtype=torch.float64)).Q
            basis = basis * (0.5 + 1.5 * torch.rand(d_head, generator=generator, dtype=torch.float64))
            gain = (gains[layer] / gains[to_layer])[:, None]
            new[to_layer]["k"][to_key] = _times(weights[layer]["k"][key] * gain, 1 / factor.conj())
            new[to_layer]["v"][to_key] = weights[layer]["v"][key] * gain @ basis
            for head in range(shared):
                source, target = key * shared + head, to_key * shared + int(inner[old, head])
                new[to_layer]["q"][target] = _times(weights[layer]["q"][source] * gain, factor)
                new[to_layer]["o"][target] = torch.linalg.solve(basis, weights[layer]["o"][source])
                places[layer * n_heads + source] = to_layer * n_heads + target
        for of_layer, attention in zip(new, layers, strict=True):
            for key, values in of_layer.items():
                flat = values.flatten(0, 1).T if key == "o" else values.transpose(1, 2).flatten(0, 1)
                getattr(attention, key).original_component.weight.data.copy_(flat)
    return model, places


def _gain(raw: RawAttention) -> torch.Tensor:
    """Return the gain of a layer's input norm."""
    assert raw.norm.gain is not None
    return raw.norm.gain.double()


def _times(weights: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return W_Q or W_K of a head with each rotary pair (t, t + d_head / 2) multiplied by a complex number."""
    pairs = torch.complex(*weights.chunk(2, dim=1)) * factor
    return torch.cat([pairs.real, pairs.imag], dim=1)


def _likeness(a: Any, b: Any) -> Likeness:
    with measured(a) as of_a, measured(b) as of_b:
        return likeness_of(of_a, of_b)


def turned_copy(name: str, seed: int = 0) -> Any:
    """Return a copy whose attention reads and writes a stream that was turned at random; gains are taken along."""
    model = tls.load_model(name)
    view = attention_view(model)
    d_model = view.d_model
    q, r = torch.linalg.qr(
        torch.randn(d_model, d_model, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    )
    turn = q * r.diagonal().sign()
    with torch.no_grad():
        for index, block in enumerate(model.blocks):
            gain = _gain(view.raw(index))
            for key in "qkv":
                weight = getattr(block.attn, key).original_component.weight
                weight.copy_((weight.double() * gain) @ turn.T / gain)
            weight = block.attn.o.original_component.weight
            weight.copy_(turn @ weight.double())
    return model


def planted() -> pd.DataFrame:
    """Return a table with a row for each amount of noise, and a last row for the turned stream."""
    base = tls.load_model("smollm2-135m")
    plain = _likeness(base, base)
    rows = []
    for noise in NOISE:
        copy, places = moved_copy("smollm2-135m", noise)
        found = _likeness(base, copy)
        row: dict[str, Any] = {"noise": noise}
        for name in ("qk", "ov"):
            values = getattr(found, name)
            own = values[np.arange(len(places)), places]
            others = values.copy()
            others[np.arange(len(places)), places] = -np.inf
            row |= {f"{name}_found": int((own > others.max(1)).sum()), f"{name}_median": float(np.median(own))}
            row[f"{name}_least"] = float(own.min())
            row[f"{name}_largest_other"] = float(others.max())
            row[f"{name}_moved_by"] = float(np.abs(values[:, places] - getattr(plain, name)).max())
        rows.append(row)
    found = _likeness(base, turned_copy("smollm2-135m"))
    row = {"noise": np.nan}
    for name in ("qk", "ov"):
        values, mean, sd = (getattr(found, f"{name}{end}") for end in ("", "_mean", "_null_sd"))
        row |= {f"{name}_largest_other": float(np.abs(values).max())}
        row |= {f"{name}_largest_z": float(np.abs((values - mean) / sd).max())}
    return pd.DataFrame([*rows, row])


# --- joint effects ---


def chosen_pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return the pairs above the level, and as many below that share keys, drawn with seed 0."""
    above = pairs.loc[pairs["qk"] > LEVEL]
    below = pairs.loc[(pairs["qk"] <= LEVEL) & pairs["shared_keys"]].sample(len(above), random_state=0)
    chosen = pd.concat([above.assign(group="above"), below.assign(group="below")], ignore_index=True)
    return chosen.loc[:, ["a", "b", "qk", "ov", "shared_keys", "group"]]


def harms(model: Any, task: tls.Task, part: Part, sets: list[tuple[str, ...]]) -> np.ndarray:
    """Return the harm without each set of heads, on each sequence: [sets, sequences]."""
    with measured(model) as view:
        sequences = task_sequences(view, task)
        part = part.fixed(view, sequences)
        layers = sorted({head_pair(name)[0] for names in sets for name in names})
        bound = bound_parts(part, view, {layer: [*range(view.n_heads(layer))] for layer in layers}, every=True)
        intact, value = intact_values(view, sequences, layers)

        def replay(names: tuple[str, ...]) -> Replays:
            by_layer: dict[int, list[int]] = {}
            for layer, head in map(head_pair, names):
                by_layer.setdefault(layer, []).append(head)

            def hooks_of(replays: slice, batch: slice) -> list[Any]:
                return [
                    hook
                    for layer, heads in by_layer.items()
                    for hook in LayerAblation(view, view.layer(layer), heads, bound[layer].of_rows(batch)).hooks()
                ]

            return Replays(min(by_layer), 1, hooks_of)

        values = replayed_values(intact, sequences, [replay(names) for names in sets]).numpy()
        return (values - value) * (-1 if sequences.higher_is_better else 1)


def prepared_task(model: Any, name: str) -> tuple[tls.Task, Part]:
    """Return a task of the schedule and the part that is removed on it."""
    if name == "induction":
        reference = repeated_sequences(attention_view(model), n_sequences=REFERENCE, segment_length=SEGMENT, seed=1)
        task = tls.tasks.induction(n_sequences=SEQUENCES, segment_length=SEGMENT, seed=0)
        return task, tls.parts.Output("mean", reference=reference)
    return pair_task(model, "ioi swapped", n=PAIRS, seed=0), tls.parts.Output("counterfactual")


def measure(name: str) -> None:
    """Measure the pairs of one model on both tasks, and write a file for each."""
    model = tls.load_model(name)
    pairs = chosen_pairs(tls.head_likeness(model))
    heads = sorted({*pairs["a"], *pairs["b"]}, key=head_pair)
    sets: list[tuple[str, ...]] = [*((head,) for head in heads), *zip(pairs["a"], pairs["b"], strict=True)]
    for task_name in TASKS:
        file = FOLDER / f"{name}-{task_name.replace(' ', '_')}.csv"
        if file.exists():
            continue
        start = time.process_time()
        task, part = prepared_task(model, task_name)
        harm = harms(model, task, part, sets)
        single = dict(zip(heads, harm[: len(heads)], strict=True))
        rows = []
        for (one, other), joint in zip(sets[len(heads) :], harm[len(heads) :], strict=True):
            first, second = single[one], single[other]
            excess = joint - first - second
            means = {"harm_a": first, "harm_b": second, "harm_both": joint, "excess": excess}
            rows.append(
                {side: float(values.mean()) for side, values in means.items()}
                | {f"{side}_se": float(values.std(ddof=1) / len(values) ** 0.5) for side, values in means.items()}
                | {"p": sign_flip_p(excess, 0)}
            )
        table = pd.concat([pairs, pd.DataFrame(rows)], axis=1)
        table["q"] = tls.stats.benjamini_hochberg(table["p"]).q
        table.to_csv(file, index=False, float_format="%.6g")
        print(f"{name}, {task_name}: {len(sets)} sets, {time.process_time() - start:.0f} CPU s", flush=True)


# --- the page ---


def answers() -> pd.DataFrame:
    """Return a row of answers for each model and task."""
    rows = []
    for model in MODELS:
        for task in TASKS:
            table = pd.read_csv(FOLDER / f"{model}-{task.replace(' ', '_')}.csv")
            above = (table["group"] == "above").to_numpy()
            excess = table["excess"].to_numpy()
            difference = excess[above].mean() - excess[~above].mean()
            drawn = np.random.default_rng(0)
            exchanged = np.array([drawn.permutation(above) for _ in range(PERMUTATIONS)])
            null = (exchanged @ excess) / above.sum() - (~exchanged @ excess) / (~above).sum()
            row: dict[str, Any] = {"model": model, "task": task, "pairs": len(table)}
            for group, of_group in table.groupby("group"):
                row[f"excess {group}"] = of_group["excess"].mean()
                row[f"{group} se"] = of_group["excess"].std() / len(of_group) ** 0.5
                row[f"{group} q<.05 +"] = int(((of_group["q"] < 0.05) & (of_group["excess"] > 0)).sum())
                row[f"{group} q<.05 -"] = int(((of_group["q"] < 0.05) & (of_group["excess"] < 0)).sum())
                row[f"{group} size"] = (of_group["harm_a"].abs() + of_group["harm_b"].abs()).mean()
            row |= {"difference": difference, "p": (1 + (np.abs(null) >= abs(difference)).sum()) / (1 + PERMUTATIONS)}
            size = (table["harm_a"].abs() + table["harm_b"].abs()).to_numpy()
            layers = table["a"].map(lambda head: head_pair(head)[0]).to_numpy()
            for name, values in (("qk", table["qk"]), ("ov", table["ov"]), ("qk ov", table["qk"] * table["ov"])):
                row[f"rho {name}"] = float(pd.Series(values).corr(table["excess"], method="spearman"))
                partial = tls.stats.partial_spearman(values.to_numpy(), excess, size, method="rank", layers=layers)
                row |= {f"partial {name}": partial.statistic, f"p {name}": partial.pvalue}
            rows.append(row)
    table = pd.DataFrame(rows)
    order = np.argsort(table["p"].to_numpy())
    holm = np.maximum.accumulate(table["p"].to_numpy()[order] * np.arange(len(table), 0, -1)).clip(max=1)
    table.loc[order, "p Holm"] = holm
    return table


def figures() -> dict[str, Figure]:
    """Draw the excess of each pair over its likeness, and return the figure by its file name."""
    figure = new_figure(7.6, 5.2)
    panels = figure.subplots(2, 2, sharex=True)
    shown: dict[str, Any] = {}
    for row, model in zip(panels, MODELS, strict=True):
        for axes, task in zip(row, TASKS, strict=True):
            table = pd.read_csv(FOLDER / f"{model}-{task.replace(' ', '_')}.csv")
            axes.axhline(0, color=GREY, linewidth=0.8)
            for group, colour in (("below", BLUE), ("above", ORANGE)):
                of_group = table[table["group"] == group]
                shown[f"likeness {group} .3"] = axes.errorbar(
                    of_group["qk"], of_group["excess"], of_group["excess_se"],
                    fmt="o", markersize=3, linewidth=0.8, color=colour,
                )  # fmt: skip
            axes.set_yscale("symlog", linthresh=0.01)
            axes.yaxis.set_major_formatter("{x:g}")  # powers of ten would have small letters
            axes.set_title(f"{model}, {task}", fontsize=10, color=INK, loc="left")
            dress(axes)
    figure.supylabel("harm of both less the sum (nats, logits)", fontsize=10, color=INK)
    notes = [
        "across: likeness of the query-key operators of two heads; bars: one standard error over sequences",
        "the scale is linear between -.01 and .01",
    ]
    legend_below(figure, [(artist, text) for text, artist in shown.items()], notes, columns=2)
    return {"twins.png": figure}


def main(what: str) -> None:
    """Run `planted`, the pairs of one model, or `page`."""
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if what == "planted":
        start = time.process_time()
        table = planted()
        table.to_csv(FOLDER / "planted.csv", index=False, float_format="%.6g")
        print(table.T.to_string(), f"\n{time.process_time() - start:.0f} CPU s")
    elif what == "page":
        with pd.option_context("display.precision", 3):
            print(pd.read_csv(FOLDER / "planted.csv").T.to_string())
            print(answers().T.to_string())
    else:
        measure(what)


if __name__ == "__main__":
    typer.run(main)
