"""`edge_effects`: what a head's attention, or a task, loses when one sender is taken out of what a receiver reads."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.stats
import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.heads.composition import composition_into
from tlspectral.heads.detectors.sequences import detector_offsets, segment_length_of
from tlspectral.hooks.circuits.estimates import Method
from tlspectral.hooks.circuits.every_edge import edges_of_pairs
from tlspectral.hooks.edges.cut import refuse_open_receivers
from tlspectral.hooks.edges.reached import Reached, reached
from tlspectral.hooks.edges.receiving import QueryKeyPairs, ReceiverLayer, Replayed, receiver_layer
from tlspectral.hooks.edges.senders import CachedRun, Replaced, Sender, cached_run, chosen_senders
from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.attention.causality import require_stream
from tlspectral.models.attention.padding import attention_positions
from tlspectral.models.attention.writes import INPUT_POINTS, Input
from tlspectral.selection import Receivers, head_name
from tlspectral.tables import WorkPart, stacked
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.schema import Schema, columns
from tlspectral.tables.work import configured_jobs
from tlspectral.tasks import (
    ScoredSequences,
    Task,
    intact_values,
    score_of,
    scored_sequences,
    standard_error,
    task_of,
)
from tlspectral.tasks.score import CONTROL_COLUMNS, beside_control

SEQUENCES = 16

Measure = Literal["prev", "dup", "ind", "attention", "task"]

EDGE_EFFECTS = Schema(
    "edge_effects",
    (
        *columns("""
            sender         | label          | What writes: a head (L16H0), a mixer (L2MIX), an MLP (L3MLP) or embedding.
            layer          | index          | Layer of the sender; -1 for embedding.
            head           | index          | Head of the sender; -1 for all but heads.
            receiver       | label          | What reads: of a head (L18H6.q), or shared by heads (L18KV2.k).
            receiver_layer | index          | Layer of the receiver.
            receiver_head  | index          | Head whose attention is measured; for a task the first asked for.
            input          | label          | What reads without the sender: q, k or v of a head, mlp or logits.
            reached?       | label          | Heads whose input changes with the edge; an effect on a task is of all.
            attention?     | probability    | Intact, of receiver_head, mean over queries and sequences; NaN for a task.
            delta          | of the measure | Cut edge less intact model: of that attention, or of the task's metric.
            delta_se       | of the measure | Standard error of delta over sequences, paired; NaN for one.
        """),
        *CONTROL_COLUMNS,
        *columns("""
            pvalue?       | probability | As control_p, among the effects of all senders of the receiver.
            qvalue?       | probability | pvalue corrected for the number of rows (Benjamini-Hochberg).
            k_composition? | ratio      | Composition score from weights, mean over the receiver's heads; else NaN.
            estimate?     | of the metric | First-order estimate of delta. With screen.
            measured?     | label       | top (of the largest estimates), control (random others) or empty. With screen.
            eap_name?     | label       | Name in EAP and MIB: a16.h0->a18.h6<k>. Of pairs.
        """),
    ),
    "`tls.edge_effects`",
)


def edge_effects(
    model: Any,
    receivers: Receivers | None = None,
    *,
    senders: Any = None,
    task: Task | Literal["induction", "language"] | None = None,
    measure: Measure | None = None,
    replace: Replaced | Literal["counterfactual"] = "mean",
    control: Literal["random"] | None = None,
    draws: int = 20,
    screen: Literal["gradient"] | None = None,
    method: Method = "EAP-IG",
    folder: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Cut each edge from a sender into what a receiver reads, one at a time.

    An edge is cut by taking what the sender wrote in the intact run out of what the receiver reads; everything else
    stays as it is. The input norm, a query/key norm, rotation, softcap and masks are computed again as the model has
    them, so that the numbers are those of a forward pass under `ablate(..., into=)`, from one pass of the model.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> edges = tls.edge_effects(model, "L1H0.k", measure="ind")
    >>> edges.loc[edges["delta"].idxmin(), "sender"]
    'L0H3'

    Args:
        model: a TransformerBridge or HookedTransformer; hooks on it stay in force.
        receivers: what reads: `"L18H6.q"`, `"L18KV2.k"` or a list of them (`tlspectral.receivers` makes one of heads),
            or a table with a column `receiver`. Heads that share keys or values all get the edit; the column `reached`
            names them. None is everything that reads, of a task of pairs.
        senders: writers of earlier layers. None: every earlier head. Heads in any form; or a list of heads and of
            `"heads"`, `"embedding"`, `"L3MLP"`, `"mlps"`, `"L2MIX"`, `"mixers"`. A mixer is what a layer of a hybrid
            has in the place of heads or beside them; its write is what the layer adds less its heads and its MLP.
        task: prompts, and for `measure="task"` the metric; None is 16 repeated sequences with segments of 64 tokens and
            the induction loss. Sequences [BOS, r, r] of your own, [sequences, 1 + 2 L]: `tls.tasks.induction(prompts)`.
        measure: what the edge has an effect on. `"prev"`, `"dup"` and `"ind"`: the attention of a head that reads
            queries or keys, as in `detect_heads`, on repeated sequences; `"attention"`: from the query to the key that
            `Task.attention` names. `"task"`: the metric, when this edge alone is cut and the model goes on from the
            receiver's layer. None is `"ind"` for one receiver of queries or keys, else `"task"`.
        replace: `"mean"` takes away the sender's write less its mean over positions and sequences, `"zero"` all of it;
            `"counterfactual"` puts what the sender writes on the pair of each prompt in its place. It is the only one
            for a task of pairs without receivers, and for receivers that are MLPs (`"L3MLP"`) or `"logits"`.
        control: `"random"` also takes away, in place of the write, one of equal norm at each token in random directions
            (the sender's output map, its directions replaced by Haar-random ones). For `pvalue`, control effects of all
            senders of a receiver are pooled.
        draws: random writes per sender. `control_p` is not below 1 / (1 + draws): 19 reach .05.
        screen: `"gradient"`, of pairs, estimates every edge to first order, then measures the 50 largest and 50 random
            others. Without receivers there are too many edges to measure them all.
        method: of the estimate: `"EAP"`, gradients at the clean run, or `"EAP-IG"`, their mean over five embeddings
            between the counterfactual and the clean one, which takes five times as long and ranks early edges better.
        folder: a folder with one file per layer of receivers, of pairs one for estimates and one for effects; a run
            that was stopped is resumed from there. Layers are shared out as `joblib.parallel_config(n_jobs=)` says.
        seed: of sequences and control draws.

    Returns:
        DataFrame, a row per sender and receiver, for a measure of attention one per head that was asked for (all of a
        group, by its receiver's name), sorted by receiver, then sender; of pairs one per edge, with a screen the
        largest estimate first. Columns: `sender, layer, head, receiver, receiver_layer, receiver_head, input, reached?,
        attention?, delta, delta_se, control_delta?, control_delta_se?, control_excess?, control_p?, pvalue?, qvalue?,
        k_composition?, estimate?, measured?, eap_name?`. A sender in the receiver's layer or behind has no
        row. `attrs` hold model and settings; `norm_behind_held`: layers of senders with a norm behind the attention
        (Gemma 2 and 3, OLMo 2), in which a head's write is its share with that norm's scale held.

    Raises:
        BadHead: a head or a receiver that does not exist.
        ValueError: attention measured at values, on which it does not depend, or at queries and keys that the
            sequences do not have; a receiver without earlier senders; an unknown option.
        UnsupportedArchitecture: a residual stream that is no sum of what heads and MLPs write; layers that cannot be
            read.
        ScoreMismatch: the attention of the run is not that of its own queries and keys.
        EditNotHonored: a block of `ablate(..., into=)` is open on a receiver.
        IncompatibleCheckpoint: the folder holds other work.

    Source: path patching (Wang et al. 2023, section 3; Goldowsky-Dill et al. 2023) with the receiver's input norm
    recomputed, not frozen.

    What it does not establish: that an edge without effect carries nothing. Others can stand in, and some edges matter
    only together: cut those with `ablate(..., into=)`. The null of `pvalue` holds writes of all senders, so one that
    writes little has to beat the noise of those that write much. `k_composition` does not say that a path is used.
    """
    view = attention_view(model)
    require_stream(view)
    if receivers is None or replace == "counterfactual":
        _check_pairs(measure, replace, control, screen)
        return edges_of_pairs(view, EDGE_EFFECTS, receivers, senders, task, screen and method, folder, seed)
    if screen is not None:
        raise ValueError("screen='gradient' is of pairs: give replace='counterfactual' and a Task with counterfactual=")
    ends = reached(view, receivers)
    if not ends:
        raise ValueError("no receivers were given: name what reads, such as 'L18H6.k'")
    measure = measure or ("task" if len(ends) > 1 or ends[0].receiver.input == "v" else "ind")
    _check(ends, measure, replace, control, draws)
    by_part = {key: list(some) for key, some in groupby(ends, key=lambda end: (end.receiver.layer, end.receiver.input))}
    for (layer, what), some in by_part.items():
        point = view.model.hook_dict[view.hook_names(layer)[INPUT_POINTS[what]]]
        refuse_open_receivers(point, [end.receiver.head for end in some])
    chosen_task = task_of("induction" if task is None else task, seed=seed, n_sequences=SEQUENCES)
    sequences = scored_sequences(view, chosen_task)
    writers = chosen_senders(view, senders, ends[-1].receiver.layer)
    for end in ends:
        if not any(sender.layer < end.receiver.layer for sender in writers):
            raise ValueError(f"{end.receiver.name}: none of the senders lies in an earlier layer")
    pairs = None if measure == "task" else _pairs(sequences, chosen_task, measure)
    how: dict[str, Any] = {"replace": replace, "draws": draws if control == "random" else 0, "seed": seed}
    measurement = Measurement(
        EDGE_EFFECTS,
        {"task": sequences.name, "control": control, "measure": measure, **how},
        origin=view.origin(),
        identity={
            "weights": view.weights_digest,
            "tokens": sequences.digest,
            "senders": [sender.name for sender in writers],
            "receivers": [[end.receiver.name, list(end.asked)] for end in ends],
        },
        folder=folder,
        score=lambda: score_of(view, sequences).value,
        n_jobs=configured_jobs(),
    )
    layers = sorted({layer for layer, _ in by_part})
    of_part = partial(_part_table, writers, pairs, partial(CachedRun.removed, **how))
    parts = measurement.made(
        [
            WorkPart(f"{what}_L{layer:03d}", partial(of_part, layer, what, some), items=len(some))
            for (layer, what), some in by_part.items()
        ],
        description="edges",
        unit="layer",
        items="receivers",
        prepare=partial(_prepared, view, sequences, layers, writers, measure),
    )
    table = stacked(parts.values())
    if control is not None:
        table["qvalue"] = scipy.stats.false_discovery_control(table["pvalue"])
    return measurement.table(
        table,
        n_sequences=len(sequences.tokens),
        tokens_sha256=sequences.digest,
        norm_behind_held=[
            layer for layer in view.layers if layer < layers[-1] and view.behind(layer)[1].kind != "none"
        ],
    )


def _check_pairs(measure: Measure | None, replace: str, control: str | None, screen: str | None) -> None:
    if measure not in (None, "task"):
        raise ValueError(f"measure={measure!r} is of one receiver: an edge of pairs has an effect on the task")
    if replace not in ("mean", "counterfactual"):
        raise ValueError(f"without receivers, edges are cut to the counterfactual: leave replace={replace!r} out")
    if control is not None:
        raise ValueError("control='random' is of given receivers; the control of a circuit is in faithfulness()")
    if screen not in (None, "gradient"):
        raise ValueError(f"screen must be None or 'gradient', not {screen!r}")


def _check(ends: list[Reached], measure: str, replace: str, control: str | None, draws: int) -> None:
    for name, value, known in (
        ("measure", measure, ("prev", "dup", "ind", "attention", "task")),
        ("replace", replace, ("mean", "zero")),
        ("control", control, (None, "random")),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; not {value!r}")
    if draws < 1:
        raise ValueError(f"draws must be 1 or more, not {draws}")
    of_values = [end.receiver.name for end in ends if end.receiver.input == "v"]
    if of_values and measure != "task":
        raise ValueError(
            f"{of_values[0]}: a head's attention does not depend on its values: give measure='task', or queries or keys"
        )


def _pairs(sequences: ScoredSequences, task: Task, measure: Measure) -> QueryKeyPairs:
    """Return the queries and keys that attention is measured at. Raises ValueError where the sequences have none."""
    if measure == "attention":
        positions = attention_positions(sequences.lengths, task.attention)
        if positions is None:
            raise ValueError("measure='attention' needs a Task with attention=, a query and a key position per prompt")
        return QueryKeyPairs(positions[:, :1], positions[:, 1:])
    length = segment_length_of(sequences.tokens)
    if length is None or sequences.padded:
        raise ValueError(
            f"measure={measure!r} is of repeated sequences [BOS, r, r], and these are others: give "
            "measure='attention' or 'task'"
        )
    queries = torch.arange(length + 1, 2 * length + 1).expand(len(sequences.tokens), -1)
    return QueryKeyPairs(queries, queries - detector_offsets(length)[measure])


def _prepared(
    view: AttentionView, sequences: ScoredSequences, layers: list[int], senders: list[Sender], measure: Measure
) -> tuple[CachedRun, Replayed | None]:
    run = cached_run(view, sequences, layers, senders)
    return run, Replayed(*intact_values(view, sequences, layers), sequences) if measure == "task" else None


@torch.no_grad()
def _part_table(
    senders: list[Sender],
    pairs: QueryKeyPairs | None,
    removed_of: Callable[[CachedRun, list[Sender]], Iterator[Tensor]],
    layer: int,
    what: Input,
    ends: list[Reached],
    prepared: tuple[CachedRun, Replayed | None],
) -> pd.DataFrame:
    """Measure edges into queries, keys or values of one layer, at each asked head or at each receiver for a task."""
    run, replayed = prepared
    receiver = receiver_layer(run, layer, what)
    senders = [sender for sender in senders if sender.layer < layer]
    measured = (
        [(end, [head]) for end in ends for head in end.asked]
        if replayed is None
        else [(end, list(end.asked)) for end in ends]
    )
    heads = [of_end[0] for _, of_end in measured]
    composition = _composition(run.view, layer, what, [of_end for _, of_end in measured], senders)
    intact = None
    if pairs is not None:
        for head in heads:
            receiver.require_own_pattern(head, pairs)
        intact = torch.stack([receiver.attention(head, pairs) for head in heads])
    by_group: list[Float64[np.ndarray, "draws receivers senders sequences"]] = []
    for _, group in groupby(senders, key=lambda sender: (sender.layer, sender.kind)):
        removed = removed_of(run, list(group))
        by_group.append(np.stack([_deltas(pairs, receiver, heads, intact, each, replayed) for each in removed]))
    deltas = np.concatenate(by_group, axis=2)
    attention = np.full(len(heads), np.nan) if intact is None else intact.mean(1).cpu().numpy()
    return pd.concat(
        [
            _end_table(senders, end, of_end, attention[index], deltas[:, index], composition[index])
            for index, (end, of_end) in enumerate(measured)
        ],
        ignore_index=True,
    )


def _deltas(
    pairs: QueryKeyPairs | None,
    receiver: ReceiverLayer,
    heads: list[int],
    intact: Float64[Tensor, "receivers sequences"] | None,
    removed: Tensor,
    replayed: Replayed | None,
) -> Float64[np.ndarray, "receivers senders sequences"]:
    """Return the effects of senders of one layer, given what is removed of the stream, on each of the heads."""
    residual = receiver.residual
    if receiver.what == "q" and pairs is not None:  # queries change at the marked positions alone
        rows = pairs.queries[..., None].to(residual.device)
        residual = residual.gather(1, rows.expand(-1, -1, residual.shape[-1]))
        removed = removed.gather(2, rows.expand(len(removed), -1, -1, removed.shape[-1]))
    change = receiver.reads.change(residual, removed)
    if replayed is not None:
        return replayed.deltas(receiver, heads, change)
    assert pairs is not None
    assert intact is not None
    effects = [receiver.attention(head, pairs, change) - own for head, own in zip(heads, intact, strict=True)]
    return torch.stack(effects).cpu().numpy()


def _end_table(
    senders: list[Sender],
    end: Reached,
    heads: list[int],
    intact: float,
    deltas: Float64[np.ndarray, "draws senders sequences"],
    composition: list[float],
) -> pd.DataFrame:
    """Tabulate the edges into one receiver; `heads` are the query heads that it is measured at."""
    delta, controls, receiver = deltas[0], deltas[1:], end.receiver
    table = pd.DataFrame(
        {
            "sender": [sender.name for sender in senders],
            "layer": [sender.layer for sender in senders],
            "head": [sender.head for sender in senders],
            "receiver": receiver.name,
            "receiver_layer": receiver.layer,
            "receiver_head": heads[0],
            "input": receiver.input,
            "reached": ", ".join(head_name(receiver.layer, head) for head in end.heads),
            "attention": intact,
            "delta": delta.mean(1),
            "delta_se": [standard_error(effect) for effect in delta],
        }
    )
    if len(controls):
        drawn = controls.mean(2)  # [draws, senders]
        table = table.assign(control_delta=drawn.mean(0), **beside_control(delta, controls.swapaxes(0, 1)))
        larger = (np.abs(drawn).ravel() >= np.abs(delta.mean(1))[:, None]).sum(1)
        table["pvalue"] = (1 + larger) / (1 + drawn.size)
    table["k_composition"] = composition
    return table


def _composition(
    view: AttentionView, layer: int, what: Input, ends: list[list[int]], senders: list[Sender]
) -> list[list[float]]:
    """Return the composition score of each sender with each receiver, mean over its heads; NaN for what is no head."""
    asked = sorted({head for heads in ends for head in heads})
    layers = sorted({sender.layer for sender in senders if sender.kind == "head"})
    scores = composition_into(view, layer, asked, what, layers)
    return [
        [
            float(scores[layer][[asked.index(one) for one in heads], head].mean()) if kind == "head" else float("nan")
            for layer, head, kind in senders
        ]
        for heads in ends
    ]
