"""`edge_effects`: what a head's attention, or a task, loses when one source is taken out of what the head reads."""

import os
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.stats
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.composition.paths import composition_into
from tlspectral.detectors.sequences import detector_offsets, segment_length_of
from tlspectral.hooks.edge_reach import heads_reached
from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.attention.padding import attention_positions
from tlspectral.models.attention.selection import heads_by_layer
from tlspectral.models.attention.writes import Input
from tlspectral.selection import Heads, head_name
from tlspectral.tables import WorkPart, finished_parts, named, open_model_parts, stacked
from tlspectral.tasks import (
    ScoredSequences,
    Task,
    control_test,
    intact_values,
    score_of,
    scored_sequences,
    standard_error,
    task_of,
)
from tlspectral.wiring.columns import EDGE_EFFECTS
from tlspectral.wiring.sources import CachedRun, Replaced, Source, cached_run, chosen_sources
from tlspectral.wiring.targets import QueryKeyPairs, Replayed, TargetLayer, target_layer

SEQUENCES = 16

Score = Literal["prev", "dup", "ind", "attention"]


def edge_effects(
    model: Any,
    targets: Heads,
    *,
    input: Input = "k",
    sources: Any = None,
    score: Score = "ind",
    task: Task | Literal["induction", "language"] | None = None,
    tokens: Int[Tensor, "sequences pos"] | None = None,
    replace: Replaced = "mean",
    effect: Literal["attention", "task"] = "attention",
    control: Literal["random"] | None = None,
    draws: int = 20,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    n_jobs: int = 1,
    seed: int = 0,
    show_progress: bool = True,
) -> pd.DataFrame:
    """Cut each edge from an earlier head into a target's queries, keys or values, one at a time.

    An edge is cut by taking what the source wrote in the intact run out of what the target reads; everything else stays
    as it is. The input norm, a query/key norm, rotation, softcap and masks are computed again as the model has them, so
    that the numbers are those of a forward pass under `ablate(..., into=, input=)`, from one pass of the model.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> edges = tls.edge_effects(model, "L1H0", show_progress=False)
    >>> edges.loc[edges["delta"].idxmin(), "source"]
    'L0H3'

    Args:
        model: a TransformerBridge or HookedTransformer; hooks on it stay in force.
        targets: heads that read, in any form of `ablate`.
        input: what of the target is computed without the source. Heads that share keys or values all get the edit;
            the column `reached` names them.
        sources: writers of earlier layers. None: every earlier head. Heads in any form; or a list of heads and of
            `"heads"`, `"embedding"`, `"L3MLP"`, `"mlps"`.
        score: the attention that is measured. `"prev"`, `"dup"` and `"ind"` are those of `detect_heads` on repeated
            sequences; `"attention"` is from the query to the key that `Task.attention` names.
        task: prompts, and for `effect="task"` the metric; None is 16 repeated sequences with segments of 64 tokens and
            the induction loss.
        tokens: sequences [BOS, r, r] of your own, [sequences, 1 + 2 L].
        replace: `"mean"` takes away the source's write less its mean over positions and sequences, `"zero"` all of it.
        effect: `"attention"`: of the edge on the target's attention. `"task"`: on the metric, when this edge alone is
            cut and the model goes on from the target's layer.
        control: `"random"` also takes away, in place of the write, one of equal norm at each token in random directions
            (the source's output map, its directions replaced by Haar-random ones). For `pvalue`, control effects of all
            sources of a target are pooled.
        draws: random writes per source. `control_p` is not below 1 / (1 + draws): 19 reach .05.
        checkpoint_dir: a folder with one file per layer of targets; a run that was stopped is resumed from there.
        n_jobs: workers that share the layers of targets, as in `ablation_sweep`.
        seed: of sequences and control draws.
        show_progress: a bar over layers of targets.

    Returns:
        DataFrame, a row per source and target, sorted by target, then source: `source, layer, head, target,
        target_layer, target_head, input, reached, attention, delta, delta_stderr, k_composition`; with a control
        `control_delta, control_delta_stderr, control_excess, control_p, pvalue, qvalue`;
        `tables.describe_table("edge_effects")` says what each is. A source in the target's layer or behind has no row.
        `attrs` hold model and settings; `norm_behind_held`: layers of sources with a norm behind the attention (Gemma 2
        and 3, OLMo 2), in which a head's write is its share with that norm's scale held.

    Raises:
        BadHead: a head that does not exist.
        ValueError: `effect="attention"` of values, which attention does not depend on; a score that the sequences do
            not have; a target without earlier sources; an unknown option.
        UnsupportedArchitecture: a residual stream that is no sum of what heads and MLPs write; layers that cannot be
            read.
        ScoreMismatch: the attention of the run is not that of its own queries and keys.
        IncompatibleCheckpoint: the folder holds other work.

    Source: path patching (Wang et al. 2023, section 3; Goldowsky-Dill et al. 2023) with the receiver's input norm
    recomputed, not frozen.

    What it does not establish: that an edge without effect carries nothing. Others can stand in, and some edges matter
    only together: cut those with `ablate(..., into=)`.
    """
    _check(input, score, replace, effect, control, draws)
    view = attention_view(model)
    by_layer = heads_by_layer(view, targets)
    if not by_layer:
        raise ValueError("no targets were given: name the heads that read")
    chosen_task = task_of("induction" if task is None else task, tokens=tokens, seed=seed, n_sequences=SEQUENCES)
    sequences = scored_sequences(view, chosen_task)
    writers = chosen_sources(view, sources, max(by_layer))
    for layer, heads in by_layer.items():
        if not any(source.layer < layer for source in writers):
            raise ValueError(f"{head_name(layer, heads[0])}: none of the sources lies in an earlier layer")
    pairs = _pairs(sequences, chosen_task, score, required=effect == "attention")
    plan = _Plan(input, writers, pairs, replace, effect, draws if control == "random" else 0, seed)
    folder = None
    if checkpoint_dir is not None:
        settings = {
            "weights": view.weights_digest(),
            "tokens": sequences.digest,
            "task": sequences.name,
            "sources": [source.name for source in writers],
            "targets": {str(layer): heads for layer, heads in by_layer.items()},
            "score": score,
            "control": control,
            **plan.settings,
        }
        folder = open_model_parts(checkpoint_dir, settings, score_of(view, sequences).value, manifest="edges.json")
    parts = finished_parts(
        [
            WorkPart(f"{input}_L{layer:03d}", partial(_layer_table, plan, layer, heads), items=len(heads))
            for layer, heads in by_layer.items()
        ],
        folder,
        description=f"edges into {input}",
        unit="layer",
        items="targets",
        prepare=partial(_prepared, view, sequences, by_layer, plan),
        n_jobs=n_jobs,
        show_progress=show_progress,
    )
    table = stacked(parts.values())
    if plan.draws:
        corrected = scipy.stats.false_discovery_control(table["pvalue"])
        table.insert(list(table).index("pvalue") + 1, "qvalue", corrected)
    reached = {
        (layer, head): ", ".join(heads_reached(model, (layer, head), input).heads)
        for layer, heads in by_layer.items()
        for head in heads
    }
    targets = zip(table["target_layer"], table["target_head"], strict=True)
    table.insert(list(table).index("input") + 1, "reached", [reached[target] for target in targets])
    below = range(max(by_layer))
    table.attrs = {
        **view.origin(),
        "task": sequences.name,
        "score": score,
        "control": control,
        **plan.settings,
        "n_sequences": len(sequences.tokens),
        "tokens_sha256": sequences.digest,
        "norm_behind_held": [layer for layer in below if view.behind(layer)[1].kind != "none"],
    }
    return named(table, EDGE_EFFECTS)


@dataclass(frozen=True)
class _Plan:
    """The settings that all edges share."""

    input: Input
    sources: list[Source]
    pairs: QueryKeyPairs | None
    replace: Replaced
    effect: Literal["attention", "task"]
    draws: int
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        """What tables and folders hold of it."""
        return {name: getattr(self, name) for name in ("input", "replace", "effect", "draws", "seed")}


def _check(input: str, score: str, replace: str, effect: str, control: str | None, draws: int) -> None:
    for name, value, known in (
        ("input", input, ("q", "k", "v")),
        ("score", score, ("prev", "dup", "ind", "attention")),
        ("replace", replace, ("mean", "zero")),
        ("effect", effect, ("attention", "task")),
        ("control", control, (None, "random")),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; not {value!r}")
    if draws < 1:
        raise ValueError(f"draws must be 1 or more, not {draws}")
    if input == "v" and effect == "attention":
        raise ValueError("a head's attention does not depend on its values: give effect='task', or input 'q' or 'k'")


def _pairs(sequences: ScoredSequences, task: Task, score: Score, *, required: bool) -> QueryKeyPairs | None:
    """Return the queries and keys that attention is measured at; None where they are not required and not there."""
    if score == "attention":
        positions = attention_positions(sequences.lengths, task.attention)
        if positions is not None:
            return QueryKeyPairs(positions[:, :1], positions[:, 1:])
        problem = "score='attention' needs a Task with attention=, a query and a key position per prompt"
    else:
        length = segment_length_of(sequences.tokens)
        if length is not None and not sequences.padded:
            queries = torch.arange(length + 1, 2 * length + 1).expand(len(sequences.tokens), -1)
            return QueryKeyPairs(queries, queries - detector_offsets(length)[score])
        problem = f"score={score!r} is of repeated sequences [BOS, r, r], and these are others: give score='attention'"
    if required:
        raise ValueError(problem)
    return None


def _prepared(
    view: AttentionView, sequences: ScoredSequences, by_layer: dict[int, list[int]], plan: _Plan
) -> tuple[CachedRun, Replayed | None]:
    run = cached_run(view, sequences, by_layer, plan.sources)
    if plan.effect == "attention":
        return run, None
    return run, Replayed(*intact_values(view, sequences, by_layer), sequences)


@torch.no_grad()
def _layer_table(
    plan: _Plan, layer: int, heads: list[int], prepared: tuple[CachedRun, Replayed | None]
) -> pd.DataFrame:
    """Measure the edges into heads of one layer."""
    run, replayed = prepared
    target = target_layer(run, layer, plan.input)
    sources = [source for source in plan.sources if source.layer < layer]
    intact = None
    if plan.pairs is not None:
        for head in heads:
            target.require_own_pattern(head, plan.pairs)
        intact = torch.stack([target.attention(head, plan.pairs) for head in heads])
    by_group: list[Float64[np.ndarray, "draws targets sources sequences"]] = []
    for _, group in groupby(sources, key=lambda source: (source.layer, source.kind)):
        removed = run.removed(list(group), plan.replace, draws=plan.draws, seed=plan.seed)
        by_group.append(np.stack([_deltas(plan, target, heads, intact, each, replayed) for each in removed]))
    deltas = np.concatenate(by_group, axis=2)
    attention = np.full(len(heads), np.nan) if intact is None else intact.mean(1).cpu().numpy()
    composition = _composition(run.view, plan, layer, heads, sources)
    return pd.concat(
        [
            _target_table(plan, sources, layer, head, attention[index], deltas[:, index], composition[index])
            for index, head in enumerate(heads)
        ],
        ignore_index=True,
    )


def _deltas(
    plan: _Plan,
    target: TargetLayer,
    heads: list[int],
    intact: Float64[Tensor, "targets sequences"] | None,
    removed: Tensor,
    replayed: Replayed | None,
) -> Float64[np.ndarray, "targets sources sequences"]:
    """Return the effects of sources of one layer, given what is removed of the stream, on each of the heads."""
    change = _change(plan, target, removed)
    if replayed is not None:
        return replayed.deltas(target, heads, change)
    assert plan.pairs is not None
    assert intact is not None
    effects = [target.attention(head, plan.pairs, change) - own for head, own in zip(heads, intact, strict=True)]
    return torch.stack(effects).cpu().numpy()


def _change(plan: _Plan, target: TargetLayer, removed: Tensor) -> Float64[Tensor, "sources sequences pos heads d_head"]:
    """Return how queries, keys or values of all heads of the layer change; queries at the marked positions alone."""
    residual = target.residual
    if plan.input == "q" and plan.effect == "attention":
        assert plan.pairs is not None
        rows = plan.pairs.queries[..., None].to(residual.device)
        residual = residual.gather(1, rows.expand(-1, -1, residual.shape[-1]))
        removed = removed.gather(2, rows.expand(len(removed), -1, -1, removed.shape[-1]))
    return target.reads.change(residual, removed)


def _target_table(
    plan: _Plan,
    sources: list[Source],
    layer: int,
    head: int,
    intact: float,
    deltas: Float64[np.ndarray, "draws sources sequences"],
    composition: list[float],
) -> pd.DataFrame:
    delta, controls = deltas[0], deltas[1:]
    table = pd.DataFrame(
        {
            "source": [source.name for source in sources],
            "layer": [source.layer for source in sources],
            "head": [source.head for source in sources],
            "target": head_name(layer, head),
            "target_layer": layer,
            "target_head": head,
            "input": plan.input,
            "attention": intact,
            "delta": delta.mean(1),
            "delta_stderr": [standard_error(effect) for effect in delta],
        }
    )
    if plan.draws:
        over_sequences = [standard_error(effect) for effect in controls.mean(0)]
        drawn = controls.mean(2)  # [draws, sources]
        table["control_delta"] = drawn.mean(0)
        over_draws = drawn.std(0, ddof=1) / np.sqrt(plan.draws) if plan.draws > 1 else np.nan
        table["control_delta_stderr"] = np.hypot(over_sequences, over_draws)
        table["control_excess"], table["control_p"] = control_test(delta.mean(1), drawn.T)
        larger = (np.abs(drawn).ravel() >= np.abs(delta.mean(1))[:, None]).sum(1)
        table["pvalue"] = (1 + larger) / (1 + drawn.size)
    table["k_composition"] = composition
    return table


def _composition(
    view: AttentionView, plan: _Plan, layer: int, heads: list[int], sources: list[Source]
) -> list[list[float]]:
    """Return the composition score of each target with each source, NaN for a source that is no head."""
    nans = [float("nan")] * len(heads)
    layers = sorted({source.layer for source in sources if source.kind == "head"})
    scores = composition_into(view, layer, heads, plan.input, layers)
    by_source = [scores[layer][:, head].tolist() if kind == "head" else nans for layer, head, kind in sources]
    return [list(of_target) for of_target in zip(*by_source, strict=True)]
