"""`edge_effects`: what a head's attention, or a task, loses when one sender is taken out of what a receiver reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.stats
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tlspectral.errors import warn_caller
from tlspectral.hooks.circuits.estimates import STEPS, Method, edge_estimates
from tlspectral.hooks.circuits.pairs import Pairs, pairs_of
from tlspectral.hooks.circuits.stability import ENOUGH, estimate_errors, overlaps, selected_share
from tlspectral.hooks.edges.measuring import Edge, Prepared, QueryKeyPairs, by_kind, edge_columns, edges_between
from tlspectral.hooks.edges.reached import Reached, reached
from tlspectral.hooks.edges.receiving import refuse_open_receivers
from tlspectral.hooks.edges.senders import Replaced, Sender, cached_run, chosen_senders
from tlspectral.hooks.positions import asked_positions, listed_positions
from tlspectral.hooks.screening import agreement, missed_edges, screened_edges
from tlspectral.models.reading import measured
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import TOKENS_OF_JOB, attention_positions, batch_on, filled
from tlspectral.models.stream.writes import INPUT_POINTS, require_stream
from tlspectral.selection import Receivers, whole_number
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import Measurement, configured_jobs
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks import Task
from tlspectral.tasks.control_tests import CONTROL_COLUMNS
from tlspectral.tasks.identity import sequences_identity
from tlspectral.tasks.repeated import RepeatedSegments, detector_pairs, segment_length_of
from tlspectral.tasks.task import task_of
from tlspectral.tasks.task_sequences import TaskSequences, intact_values, metric_value_of, task_sequences

SEQUENCES = 16
DRAWS = 20

MEASURED = 50
"""Edges with the largest estimates that `screen="gradient"` chooses and measures."""

MOST = 2_000
"""Edges of pairs that are measured without a screen; a tenth of a second each on SmolLM2-135M."""

Measure = Literal["prev", "dup", "ind", "attention", "task"]
"""What an edge has an effect on: a head's attention, as a detector reads it or at `Task.attention`, or the metric."""

EDGE_EFFECTS = Schema(
    "edge_effects",
    (
        *columns("""
            sender         | label          | What writes: a head (L16H0), a mixer (L2MIX), an MLP (L3MLP) or embedding.
            layer          | index          | Layer of the sender; -1 for embedding.
            head           | index          | Head of the sender; -1 for all but heads.
            receiver       | label          | What reads: of a head (L18H6.q), or shared by heads (L18KV2.k).
            receiver_layer | index          | Layer of the receiver; of logits the number of layers.
            receiver_head  | index          | Head whose attention is measured; for a task the first asked for, or -1.
            input          | label          | What reads without the sender: q, k or v of a head, mlp or logits.
            reached?       | label          | Heads whose input changes with the edge; an effect on a task is of all.
            position?      | label          | Where the sender's write is cut, as it was asked for. With at=.
            attention?     | probability    | Intact, of receiver_head, mean over queries and sequences; NaN for a task.
            delta          | of the measure | Cut edge less intact model: of that attention, or of the task's metric.
            delta_se       | of the measure | Standard error of delta over sequences, paired; NaN for one.
        """),
        *CONTROL_COLUMNS,
        *columns("""
            pvalue?       | probability | As control_p, among the effects of all senders of the receiver.
            pvalue_floor? | probability | Smallest possible pvalue, 1 / (1 + draws of all senders of the receiver).
            qvalue?       | probability | pvalue corrected for the number of rows (Benjamini-Hochberg).
            k_composition? | ratio      | Composition score from weights, mean over the receiver's heads; else NaN.
            estimate?     | of the metric | First-order estimate of delta. With screen.
            estimate_se?  | of the metric | Standard error of estimate over pairs; NaN where there is none of each pair.
            selected?     | share       | Bootstrap samples of pairs in which the edge is among as many largest as were
                          |             | chosen. It is of the estimate on such prompts, not of the mechanism.
            measured?     | label       | What measures delta: top (the largest estimates), random others by their ranks
                          |             | (51 to 500), logits (all near the largest that write there), or empty.
            eap_name?     | label       | Name in EAP and MIB: a16.h0->a18.h6<k>. With pairs.
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
    replace: Replaced | None = None,
    control: Literal["random"] | int | None = None,
    at: Any = None,
    screen: Literal["gradient"] | int | None = None,
    method: Method | None = None,
    folder: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Cut each edge from a sender into what a receiver reads, one at a time.

    An edge is cut by taking what the sender wrote in the intact run out of what the receiver reads; everything else
    stays as it is. The input norm, a query/key norm, rotation, softcap and masks are computed again as the model has
    them, so that the numbers are what a forward pass under `ablate(..., into=)` gives, from one pass of the model.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> edges = tls.edge_effects(model, "L1H0.k", measure="ind")
    >>> edges.loc[edges["delta"].idxmin(), "sender"]
    'L0H3'

    Args:
        model: a TransformerBridge or HookedTransformer; hooks on it stay in force.
        receivers: what reads: `"L18H6.q"`, `"L18KV2.k"`, `"L3MLP"`, `"logits"`, a list, `{"k": heads, "q": others}`, or
            a table with a column `receiver`. Heads that share keys or values, or a latent that these
            are projected from, all get the edit; the column `reached` names them. None is everything that reads, of a
            task of pairs.
        senders: writers of earlier layers, and for an MLP the heads of its own that it reads. None: every such head, of
            pairs every MLP and the embedding too. Heads in any form; or a list of heads and of `"heads"`,
            `"embedding"`, `"L3MLP"`, `"mlps"`, `"L2MIX"`, `"mixers"`. A mixer is what a layer of a hybrid has in the
            place of heads or beside them; its write is what the layer adds less its heads and its MLP.
        task: prompts, and for `measure="task"` the metric; None is 16 repeated sequences with segments of 64 tokens and
            the induction loss. Sequences [BOS, r, r] of your own, [sequences, 1 + 2 L]: `tls.tasks.induction(prompts)`.
        measure: what the edge has an effect on. `"prev"`, `"dup"` and `"ind"`: the attention of a head that reads
            queries or keys, as in `detect_heads`, on repeated sequences; `"attention"`: from the query to the key that
            `Task.attention` names. `"task"`: the metric, when this edge alone is cut and the model goes on from the
            receiver's layer. None is `"ind"` for one receiver of queries or keys on repeated sequences (no task, or
            the induction task), else `"task"`.
        replace: what stands in the place of the sender's write: its `"mean"` over positions and sequences, `"zero"`,
            its write on another sequence of the task (`"resample"`), or on the pair of each prompt
            (`"counterfactual"`), which is the only one without receivers. None: the pair where the task has
            `counterfactual=`, else the mean; `attrs["replace"]` says which.
        control: `"random"` also takes away, in place of the write, 20 of equal norm at each token in random directions
            (the sender's output map, its directions replaced by Haar-random ones); a number says how many draws.
            For `pvalue`, control effects of all senders of a receiver are pooled. `control_p_floor` and `pvalue_floor`
            are the smallest possible p: 19 draws reach a `control_p` of .05. With 20 draws the call took 13 times as
            long on SmolLM2-135M.
        at: the position at which the sender writes what is cut, or a list of positions, a row for each: names of the
            task's positions, or numbers, negative from the end of each prompt; or `[[3, 4]]`, a position of each
            prompt, which the column `position` calls given. None: all positions at once.
        screen: how many edges of pairs are chosen; `"gradient"` is 50. Every edge is estimated to first order, and the
            largest are measured. So are those to the logits up to rank 200, and of the others 30 of ranks 51 to 500,
            20 of ranks 501 to 5,000 and 20 beyond, drawn at random (all in proportion to the number chosen): what the
            screen may have missed is in `attrs["missed"]`, see `tls.hooks.missed_edges`. `selected` says which of the
            largest another sample of pairs would choose. Without receivers there are too many edges to measure all.
        method: of the estimate: `"EAP"`, gradients at the clean run, or `"EAP-IG"`, their mean over five embeddings
            between the counterfactual and the clean one (None), which takes four times as long. EAP can have the wrong
            sign. `"EAP-QK"` makes the whole change of queries and keys, takes norms and the softmax of the rows that
            read them again, and multiplies what that changes by the gradient in the attention; it is EAP for all other
            receivers, and for queries and keys whose norm runs over all heads (OLMo 2). It takes three times as long as
            EAP, and more in deeper models: each write is projected in each later layer.
        folder: a folder with one file per job, and one for estimates; a run that was stopped is resumed from there. A
            job is of consecutive layers of receivers, as many as fill a pass of the model, and for attention of one
            layer. Jobs are shared out as `joblib.parallel_config(n_jobs=)` says.
        seed: of sequences and control draws.

    Returns:
        DataFrame, a row per sender and receiver, for a measure of attention one per head that was asked for (all of a
        group, by its receiver's name), sorted by receiver, then sender; of pairs one per edge, with a screen the
        largest estimate first. Columns: `sender, layer, head, receiver, receiver_layer, receiver_head, input, reached?,
        position?, attention?, delta, delta_se, control_delta?, control_delta_se?, control_excess?, control_p?,
        control_p_floor?, control_draws?, excess_z?, pvalue?, pvalue_floor?, qvalue?, k_composition?, estimate?,
        estimate_se?, selected?, measured?, eap_name?`. A sender that writes behind the receiver has no row. `attrs`
        hold model and settings; `norm_behind_held`: layers of senders with a norm behind the attention (Gemma 2 and 3,
        OLMo 2), in which a head's write is its share with that norm's scale held.

        With a screen `attrs` also hold `overlap_half`: what the largest edges of two disjoint halves of the pairs have
        in common (Jaccard index, mean of 100 splits), so that it is of half as many pairs; `overlap_quarter`; and
        `overlap_extrapolated`, of two samples as large as this one, and `units_extrapolated`, how many distinct pairs
        would give .9, which follow from both by a power law and have no error. `units` says what was drawn: `"pairs"`,
        `"blocks"` of them where estimates take more than 1 GiB, or `"all"`: a metric whose value of a prompt depends on
        other prompts has no estimate per pair, and `estimate_se` and `selected` are NaN.

    Raises:
        BadHead: a head or a receiver that does not exist.
        ValueError: attention measured at values, on which it does not depend, or at queries and keys that the
            sequences do not have; a receiver without earlier senders; positions that prompts do not have, or that the
            table would call alike; an unknown option, or options that do not go together.
        TypeError: a position that is no whole number.
        UnsupportedArchitecture: a residual stream that is no sum of what heads and MLPs write; layers that cannot be
            read.
        ScoreMismatch: the attention of the run does not follow from its own queries and keys (measured, or by EAP-QK).
        EditNotHonored: a block of `ablate(..., into=)` is open on a receiver; by EAP-QK also a model whose output does
            not depend on the z that it shows.
        IncompatibleCheckpoint: the folder holds other work.

    Source: path patching (Wang et al. 2023, section 3; Goldowsky-Dill et al. 2023) with the receiver's input norm
    recomputed, not frozen. Estimates: Syed et al. 2023 (EAP), Hanna et al. 2024 (EAP-IG), and after AtP* (Kramár et al.
    2024), there for nodes, EAP-QK.

    What it does not establish: that an edge without effect carries nothing. Others can stand in, and some edges matter
    only together: cut those with `ablate(..., into=)`. The null of `pvalue` holds writes of all senders, so one that
    writes little has to beat the noise of those that write much. `k_composition` does not say that a path is used. An
    edge of `selected` 1 is stable as an estimate on prompts of this kind; that says nothing of other prompts, nor that
    it does what its estimate says.
    """
    with measured(model) as view:
        require_stream(view)
        # Before the receivers: where none are given, they are those of the task's pairs.
        chosen_task = task_of("induction" if task is None else task, seed=seed, n_sequences=SEQUENCES)
        of_pairs = chosen_task.counterfactual is not None
        draws = _draws(receivers, measure, replace, control, screen, method, of_pairs)
        most = None if screen is None else MEASURED if screen == "gradient" else int(screen)
        replace = _replaced(receivers, replace, of_pairs)
        pairs = pairs_of(view, chosen_task) if replace == "counterfactual" else None
        sequences = task_sequences(view, chosen_task) if pairs is None else pairs.sequences
        places = {} if at is None else _places(sequences, at)
        ends = _ends(view, receivers, pairs)
        measure = measure or _measure(ends, chosen_task, pairs)
        queried = None if measure == "task" else _queried(ends, sequences, chosen_task, measure)
        cuts = _cuts(view, ends, senders, pairs, places, queried, replace)
        if receivers is None and screen is None and len(cuts.edges) > MOST:
            raise ValueError(
                f"{len(cuts.edges):,} edges would be measured one by one: give screen='gradient', which estimates all "
                f"and measures the {MEASURED} largest and some others, or receivers"
            )
        measurement = Measurement(
            EDGE_EFFECTS,
            {
                "task": sequences.name,
                "measure": measure,
                "replace": replace,
                "control": "random" if draws else None,
                "draws": draws,
                "seed": seed,
                **({} if pairs is None else {"method": None if most is None else method or "EAP-IG", "screen": most}),
                **({"at": [*places]} if places else {}),
            },
            origin=view.origin(processing=True),
            identity={
                "weights": view.weights_digest,
                **sequences_identity(sequences, chosen_task),
                "pairs": None if pairs is None else pairs.digests,
                "tokens_of_job": TOKENS_OF_JOB,
                **cuts.identity,
            },
            folder=folder,
            score=lambda: metric_value_of(view, sequences).per_sequence,
            n_jobs=configured_jobs(),
        )
        edges, estimates, stability = cuts.edges, {}, {}
        if pairs is not None and most is not None:
            order, estimates, stability = _screened(measurement, pairs, edges, method or "EAP-IG", places, most, seed)
            edges = [edges[row] for row in order]
        is_measured = estimates["measured"] != "" if estimates else np.full(len(edges), True)
        effects = _effects(measurement, view, sequences, cuts, edges, is_measured, draws, seed)
        table = _names(edges, pairs).assign(**estimates).join(effects)
        if draws:
            table["qvalue"] = scipy.stats.false_discovery_control(table["pvalue"])
        made = measurement.table(
            table,
            **_said(view, sequences, pairs, cuts),
            **({"n_edges": len(table), **stability} if estimates else {}),
        )
        if estimates:
            made.attrs.update(_screen_quality(made))
        return made


@dataclass(frozen=True)
class _Cuts:
    """The edges that a call cuts, and what it takes to cut them."""

    edges: list[Edge]
    ends: list[Reached]
    senders: list[Sender]
    below: int  # the first layer whose writes no receiver reads
    places: dict[str, Int[Tensor, "sequences"]]
    queried: QueryKeyPairs | None  # None: the effect is on the task
    replace: Replaced

    @property
    def identity(self) -> dict[str, Any]:
        """What of the cuts a folder of stored work is bound to."""
        return {
            "places": {name: positions.tolist() for name, positions in self.places.items()},
            "senders": [sender.name for sender in self.senders],
            "receivers": [[end.receiver.name, list(end.asked)] for end in self.ends],
        }


def _ends(view: AttentionView, receivers: Receivers | None, pairs: Pairs | None) -> list[Reached]:
    """Return the receivers, in the order of a forward pass for pairs, each with the heads that its cut reaches.

    `receivers` None is every receiver of the pairs. Raises ValueError for an empty list, BadHead for what does not
    exist, and EditNotHonored for receivers that an open context edits.
    """
    if receivers is None and pairs is not None:
        receivers = pairs.graph.receivers
    ends = [] if receivers is None else reached(view, receivers)
    if not ends:
        raise ValueError("no receivers were given: name what reads, such as 'L18H6.k'")
    for receiver in (end.receiver for end in ends if end.receiver.input in INPUT_POINTS):
        points = [view.hook_points.get(name) for name in view.hook_names(receiver.layer).values()]
        refuse_open_receivers(points, receiver.input, [receiver.head])
    return ends if pairs is None else sorted(ends, key=lambda end: pairs.graph.receiver_index[end.receiver])


def _cuts(
    view: AttentionView,
    ends: list[Reached],
    senders: Any,
    pairs: Pairs | None,
    places: dict[str, Int[Tensor, "sequences"]],
    queried: QueryKeyPairs | None,
    replace: Replaced,
) -> _Cuts:
    """Return the edges from the senders to the receivers. Raises ValueError for receivers that no sender reaches."""
    # An MLP also reads what heads of its own layer write; queries, keys and values do not.
    below = min(view.n_layers, 1 + max(end.receiver.layer - (end.receiver.input in "qkv") for end in ends))
    writers = chosen_senders(view, senders, below) if pairs is None or senders is not None else pairs.graph.senders
    if pairs is not None:
        writers = sorted(writers, key=lambda sender: pairs.graph.sender_index[sender.name])
    edges = edges_between(view, writers, ends, each_head=queried is not None, places=[*places] or [None])
    # Receivers of pairs are by default all there are, and some may lie before every given sender.
    _require_senders(edges, ends if pairs is None else [])
    return _Cuts(edges, ends, writers, below, places, queried, replace)


def _effects(
    measurement: Measurement,
    view: AttentionView,
    sequences: TaskSequences,
    cuts: _Cuts,
    edges: list[Edge],
    is_measured: Bool[np.ndarray, "edges"],
    draws: int,
    seed: int,
) -> pd.DataFrame:
    """Cut the edges that are to be measured, a job for some kinds of receivers.

    Returns their columns, indexed by the edge's place among `edges`.
    """
    kinds = by_kind(edges, np.flatnonzero(is_measured).tolist())
    # On a task as many as fill a pass. Attention is computed of one kind, without a pass.
    tokens = TOKENS_OF_JOB if measurement.folder is not None else batch_on(view.device).tokens
    each = (1 + draws) * sequences.tokens.numel()
    sizes = {kind: len(rows) * each if cuts.queried is None else tokens for kind, rows in kinds.items()}
    rows_of = {
        "-".join(f"{what}_L{layer:03d}" for layer, what in dict.fromkeys((some[0], some[-1]))): [
            row for kind in some for row in kinds[kind]
        ]
        for some in filled(sizes, tokens)
    }
    # Logits count as a layer of their own, and are computed from the last one.
    layers = sorted({min(layer, view.n_layers - 1) for layer, _ in kinds})
    columns_by_job = measurement.made(
        [
            Job(
                name,
                partial(edge_columns, [edges[row] for row in rows], sequences, draws, cuts.queried),
                items=len(rows),
            )
            for name, rows in rows_of.items()
        ],
        description="edges",
        unit="edge",
        prepare=partial(_prepared, view, sequences, layers, cuts, seed),
    )
    return pd.concat([columns_by_job[name].set_axis(rows) for name, rows in rows_of.items()])


def _names(edges: list[Edge], pairs: Pairs | None) -> pd.DataFrame:
    """Return the columns that say which edge a row is of."""
    return pd.DataFrame([
        {**edge.names, **({} if pairs is None else {"eap_name": pairs.graph.eap_name(edge)})} for edge in edges
    ])  # fmt: skip


def _said(view: AttentionView, sequences: TaskSequences, pairs: Pairs | None, cuts: _Cuts) -> dict[str, Any]:
    """Return what a table says of the prompts, and the layers whose heads write through a norm that is held."""
    return {
        **sequences.recorded(view),
        "norm_behind_held": [
            layer for layer in view.layers if layer < cuts.below and view.behind(layer)[1].kind != "none"
        ],
        **({} if pairs is None else {"pairs_sha256": pairs.digests}),
        **({"positions": [positions.tolist() for positions in cuts.places.values()]} if cuts.places else {}),
    }


def _screen_quality(made: pd.DataFrame) -> dict[str, Any]:
    """Return how far estimates and effects agree, and what the screen may have missed, of a table with a screen."""
    # Of edges to the logits all near the chosen ones are measured: neither the largest nor drawn at random.
    top, drawn = made["measured"] == "top", ~made["measured"].isin(("", "top", "logits"))
    # A missed effect counts as large from this median on: where it is 0, every effect would.
    large = float(made.loc[top, "delta"].abs().median())
    return {
        "rank_correlation_top": agreement(made.loc[top])[0],
        "rank_correlation_control": agreement(made.loc[drawn])[0],
        "missed": missed_edges(made).to_dict("records") if large > 0 else [],
    }


def _replaced(receivers: Receivers | None, replace: Replaced | None, of_pairs: bool) -> Replaced:
    """Return what stands in the place of a write. Raises ValueError for pairs that the task does not have."""
    if receivers is None or replace is None:
        replace = "counterfactual" if receivers is None or of_pairs else "mean"
    if replace == "counterfactual" and not of_pairs:
        raise ValueError("all edges, and edges to a counterfactual, are of pairs: give a Task with counterfactual=")
    return replace


def _measure(ends: list[Reached], task: Task, pairs: Pairs | None) -> Measure:
    """Return what edges have an effect on where the caller does not say."""
    repeated = pairs is None and isinstance(task.prompts, RepeatedSegments)
    return "ind" if repeated and len(ends) == 1 and ends[0].receiver.input in ("q", "k") else "task"


def _draws(receivers: Any, measure: Any, replace: Any, control: Any, screen: Any, method: Any, of_pairs: bool) -> int:
    """Return the draws of the control. Raises ValueError for options that do not exist or do not go together."""
    of_all = receivers is None
    for name, value, known in (
        ("measure", measure, (None, "prev", "dup", "ind", "attention", "task")),
        ("replace", replace, (None, "mean", "zero", "resample", "counterfactual")),
        ("screen", None if _is_count(screen) else screen, (None, "gradient")),
        ("method of screen='gradient'", method, (None, *STEPS)),
    ):
        if not isinstance(value, str | type(None)) or value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; not {value!r}")
    if _is_count(screen) and int(screen) < 1:
        raise ValueError(f"screen is how many edges are chosen, 1 or more, not {screen!r}")
    if of_all and measure not in (None, "task"):
        raise ValueError(f"measure={measure!r} is of one receiver: an edge of pairs has an effect on the task")
    if of_all and replace not in (None, "counterfactual"):
        raise ValueError(f"without receivers, edges are cut to the counterfactual: leave replace={replace!r} out")
    if of_all and control is not None:
        raise ValueError("control='random' is of given receivers; the control of a circuit is in faithfulness()")
    if screen is not None and not of_all and (replace not in (None, "counterfactual") or not of_pairs):
        raise ValueError("screen='gradient' is of pairs: give a Task with counterfactual=, and leave replace= out")
    if method is not None and screen is None:
        raise ValueError(f"method={method!r} is how a screen estimates effects: give screen='gradient' too")
    if control is None:
        return 0
    draws = DRAWS if isinstance(control, str) and control == "random" else whole_number(control)
    if draws is None or draws < 1:
        raise ValueError(f"control must be 'random' or a number of draws, 1 or more, not {control!r}")
    return draws


def _is_count(screen: Any) -> bool:
    return not isinstance(screen, str) and whole_number(screen) is not None


def _places(sequences: TaskSequences, at: Any) -> dict[str, Int[Tensor, "sequences"]]:
    """Return the position of each sequence at which edges are cut, by a name.

    Raises ValueError for no such position.
    """
    return {str(asked): positions for asked, positions in asked_positions(sequences, listed_positions(at) or [])}


def _queried(ends: list[Reached], sequences: TaskSequences, task: Task, measure: Measure) -> QueryKeyPairs:
    """Return the queries and keys that attention is measured at. Raises ValueError where there is none."""
    for receiver in (end.receiver for end in ends):
        if receiver.input not in ("q", "k"):
            why = "a head's attention does not depend on its values" if receiver.input == "v" else "it has no attention"
            raise ValueError(f"{receiver.name}: {why}: give measure='task', or queries or keys")
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
    queries, keys = (torch.tensor(one).expand(len(sequences.tokens), -1) for one in detector_pairs(measure, length))
    return QueryKeyPairs(queries, keys)


def _require_senders(edges: list[Edge], ends: list[Reached]) -> None:
    without = {end.receiver for end in ends} - {edge.end.receiver for edge in edges}
    if without:
        raise ValueError(f"{min(without).name}: none of the senders lies in an earlier layer")
    if not edges:
        raise ValueError("none of the senders writes before one of the receivers reads")


def _screened(
    measurement: Measurement,
    pairs: Pairs,
    edges: list[Edge],
    method: Method,
    places: dict[str, Int[Tensor, "sequences"]],
    most: int,
    seed: int,
) -> tuple[Int[np.ndarray, "edges"], dict[str, np.ndarray], dict[str, Any]]:
    """Return the order of the edges by the size of their estimates, the columns of the screen in it, and attrs."""
    graph, distinct = pairs.graph, pairs.sequences.distinct
    rows = [graph.receiver_index[edge.end.receiver] for edge in edges]
    columns = [graph.sender_index[edge.sender.name] for edge in edges]
    at = [[*places].index(edge.place) if edge.place is not None else 0 for edge in edges]

    def estimated() -> pd.DataFrame:
        found = edge_estimates(pairs, method, [*places.values()])
        terms = found.terms[:, at, rows, columns]
        columns_of = {
            "estimate": terms.sum(0),
            "estimate_se": estimate_errors(terms, found.sizes),
            "selected": selected_share(terms, most, seed),
        }
        return pd.DataFrame({**columns_of, "units": found.units, "n_units": len(terms), **overlaps(terms, most, seed)})

    screen = measurement.first(Job("estimates", estimated))
    n_pairs = len(pairs.sequences.tokens) if distinct is None else int(distinct.max()) + 1
    if n_pairs < ENOUGH:
        warn_caller(f"{n_pairs} distinct pairs: other pairs may choose other edges; give {ENOUGH} or more")
    to_logits = np.array([edge.end.receiver.input == "logits" for edge in edges])
    order, words = screened_edges(screen["estimate"].to_numpy(), to_logits, most, seed)
    found = {name: screen[name].to_numpy()[order] for name in ("estimate", "estimate_se", "selected")}
    stability = screen.drop(columns=["estimate", "estimate_se", "selected"]).to_dict("records")[0]
    return order, {**found, "measured": words[order]}, {k: None if pd.isna(v) else v for k, v in stability.items()}


def _prepared(view: AttentionView, sequences: TaskSequences, layers: list[int], cuts: _Cuts, seed: int) -> Prepared:
    """Return the intact run that every job of some layers cuts edges of."""
    of_task = cuts.queried is None
    # Attention follows from stored queries and keys of these layers; for the metric the model runs on from them.
    run = cached_run(view, sequences, cuts.senders, cuts.below, () if of_task else layers, cuts.replace, seed)
    return Prepared(run, intact_values(view, sequences, layers) if of_task else None, cuts.places)
