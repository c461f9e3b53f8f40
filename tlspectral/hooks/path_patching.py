"""`edge_effects`: change of a head's attention, or of a task, when one sender is cut from the input of a receiver."""

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

from tlspectral.errors import shown, warn_caller
from tlspectral.errors.settings import checked_settings, whole_number
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
from tlspectral.models.running.long_prompts import refuse_long
from tlspectral.models.stream.writes import INPUT_POINTS, require_stream
from tlspectral.selection.receivers_as_written import Receivers
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
"""Number of edges with the largest estimates that `screen="gradient"` measures."""

MOST = 2_000
"""Largest number of edges that are measured for a task of pairs without a screen (one takes .1 s on SmolLM2-135M)."""

Measure = Literal["prev", "dup", "ind", "attention", "task"]
"""The quantity whose change is `delta`: a head's attention, or the metric of the task.

"prev", "dup", "ind": attention to the previous token, the same token, the token after the same token. "attention": at
`Task.attention`. "task": the metric.
"""

EDGE_EFFECTS = Schema(
    "edge_effects",
    (
        *columns("""
            sender         | label          | The writer: a head (L16H0), a mixer (L2MIX), an MLP (L3MLP) or embedding.
            layer          | index          | Layer of the sender; -1 for embedding.
            head           | index          | Head of the sender; -1 for other senders.
            receiver       | label          | The reader: input of a head (L18H6.q) or shared by heads (L18KV2.k).
            receiver_layer | index          | Layer of the receiver; for logits the number of layers.
            receiver_head  | index          | Head whose attention is measured; for a task the first head named, or -1.
            input          | label          | Input that loses the write: q, k or v of a head, mlp or logits.
            reached?       | label          | Heads whose input changes with the cut; an effect on a task is due to all.
            position?      | label          | Position whose write is cut, as given in at=. With at=.
            attention?     | probability    | Intact attention of receiver_head, mean over queries and sequences. NaN
                           |                | for a task.
            delta          | of the measure | Attention or metric with the edge cut minus the intact value.
            delta_se       | of the measure | Standard error of delta over sequences, paired; NaN for one sequence.
        """),
        *CONTROL_COLUMNS,
        *columns("""
            pvalue?       | probability | As control_p, with the draws of all senders of the receiver pooled.
            pvalue_floor? | probability | Smallest possible pvalue, 1 / (1 + draws of all senders of the receiver).
            qvalue?       | probability | pvalue corrected for the number of rows (Benjamini-Hochberg).
            k_composition? | ratio      | Composition score from weights, mean over the receiver's heads. NaN for
                          |             | senders that are not heads.
            estimate?     | of the metric | First-order estimate of delta. With screen.
            estimate_se?  | of the metric | Standard error of estimate over pairs; NaN if pairs have no estimates of
                          |             | their own.
            selected?     | share       | Share of bootstrap samples of pairs in which the screen chooses the edge. A
                          |             | property of the estimate on such prompts, not of the mechanism.
            measured?     | label       | Why delta was measured: top (largest estimates), ranks such as 51 to 500
                          |             | (drawn at random), logits (near the largest), or empty: not measured.
            eap_name?     | label       | Name in EAP and MIB: a16.h0->a18.h6<k>. With pairs.
        """),
    ),
    "`tls.edge_effects`",
)


@checked_settings
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
    """Cut each edge from a sender to a receiver, one at a time, and measure how attention or a task changes.

    Use it to find which earlier heads and MLPs feed a head. A cut subtracts a write from the receiver's input alone.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> edges = tls.edge_effects(model, "L1H0.k", measure="ind")
    >>> edges.loc[edges["delta"].idxmin(), "sender"]
    'L0H3'

    Args:
        model: a TransformerBridge or HookedTransformer.
        receivers: "L18H6.q", "L18KV2.k", "L3MLP", "logits", a list, `{"k": heads}`, or a table with a column
            `receiver`. Default: every receiver; this needs a task of pairs (with `counterfactual=`).
        senders: heads ("L5H1", "L5", "L5KV1"), "embedding", "L3MLP", "L2MIX" (mixer: a state-space block), a list; or
            "heads", "mlps", "mixers" for all. Default: all earlier heads; with pairs also MLPs and the embedding.
        task: prompts and metric. Default: 16 repeated random sequences and the induction loss.
        measure: the receiving head's attention to the previous token ("prev"), to an earlier copy of the query's token
            ("dup"), to the token after that copy ("ind"), or at `Task.attention` ("attention"); or the metric ("task").
            Default: "ind" for one receiver of queries or keys on repeated sequences, else "task".
        replace: "mean" (default), "zero", "resample" (another sequence), or "counterfactual" (default with pairs).
        control: "random" also subtracts 20 random writes of equal size; a number sets how many.
        at: cut only the write at this position (name or number; a list: a row each). Default: all positions.
        screen: "gradient" estimates every edge (for a task of pairs), then measures the 50 largest and a random sample
            of the others. A number replaces 50.
        method: of edge attribution patching: "EAP", "EAP-IG" (default: integrated gradients), "EAP-QK" (new softmax).
        folder: keeps finished jobs; the same call resumes from it. seed: of sequences and controls.

    Returns:
        DataFrame, a row per sender and receiver. Columns (`?`: not in every table): `sender, layer, head, receiver,
        receiver_layer, receiver_head, input, reached?, position?, attention?, delta, delta_se, control_delta?,
        control_delta_se?, control_excess?, control_p?, control_p_floor?, control_draws?, excess_z?, pvalue?,
        pvalue_floor?, qvalue?, k_composition?, estimate?, estimate_se?, selected?, measured?, eap_name?`. `delta` is
        the value with the cut minus the intact value (probability, or unit of the metric).

    Raises: BadHead, ValueError, UnsupportedArchitecture, ScoreMismatch, EditNotHonored (an open `ablate(into=)` edits a
    receiver), IncompatibleCheckpoint (the folder holds other work).

    Not established: that an edge without effect carries nothing; other edges may carry the same (cut several by
    `ablate(..., into=)`). More: docs/wiring.md, docs/circuits.md
    """
    with measured(model) as view:
        require_stream(view)
        # The task comes before the receivers, because by default its pairs define them.
        chosen_task = task_of("induction" if task is None else task, seed=seed, n_sequences=SEQUENCES)
        of_pairs = chosen_task.counterfactual is not None
        draws = _draws(receivers, measure, replace, control, screen, method, of_pairs)
        most = None if screen is None else MEASURED if screen == "gradient" else int(screen)
        replace = _replaced(receivers, replace, of_pairs)
        pairs = pairs_of(view, chosen_task) if replace == "counterfactual" else None
        sequences = task_sequences(view, chosen_task) if pairs is None else pairs.sequences
        refuse_long(sequences.tokens.shape[1], "an edge is cut in", "")
        places = {} if at is None else _places(sequences, at)
        ends = _ends(view, receivers, pairs)
        measure = measure or _measure(ends, chosen_task, pairs)
        queried = None if measure == "task" else _queried(ends, sequences, chosen_task, measure)
        cuts = _cuts(view, ends, senders, pairs, places, queried, replace)
        if receivers is None and screen is None and len(cuts.edges) > MOST:
            raise ValueError(
                f"{len(cuts.edges):,} edges would be measured one by one (at most {MOST:,} are): give "
                f"screen='gradient', which measures the {MEASURED} with the largest estimates, or name receivers="
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
            **_attrs(view, sequences, pairs, cuts),
            **({"n_edges": len(table), **stability} if estimates else {}),
        )
        if estimates:
            made.attrs.update(_screen_quality(made))
        return made


@dataclass(frozen=True)
class _Cuts:
    """The edges (sender to receiver) that a call of `edge_effects` cuts.

    Attributes:
        edges: all edges, one row of the table each.
        ends: the receivers.
        senders: heads, MLPs, mixers and the embedding whose writes are cut.
        below: senders stand in layers 0 to `below` - 1.
        places: from the name of a position (`at=`) to the position in each sequence.
        queried: queries and keys whose attention is measured; None: the effect is measured on the task.
        replace: what replaces a cut write.
    """

    edges: list[Edge]
    ends: list[Reached]
    senders: list[Sender]
    below: int
    places: dict[str, Int[Tensor, "sequences"]]
    queried: QueryKeyPairs | None
    replace: Replaced

    @property
    def identity(self) -> dict[str, Any]:
        """Dict `places, senders, receivers` with the names and positions of this call, which identifies stored jobs.

        A folder of stored jobs is used again only if its dict is equal.
        """
        return {
            "places": {name: positions.tolist() for name, positions in self.places.items()},
            "senders": [sender.name for sender in self.senders],
            "receivers": [[end.receiver.name, list(end.asked)] for end in self.ends],
        }


def _ends(view: AttentionView, receivers: Receivers | None, pairs: Pairs | None) -> list[Reached]:
    """Return the receivers of a call of `edge_effects`; None stands for all receivers of the model.

    `view` is the model. `pairs` are the clean and counterfactual prompts, None for a task without pairs. With pairs,
    receivers are sorted as in a forward pass. Raises ValueError for an empty list, BadHead for a receiver that does not
    exist, EditNotHonored for a receiver that an open `ablate(into=)` block edits.
    """
    if receivers is None and pairs is not None:
        receivers = pairs.graph.receivers
    ends = [] if receivers is None else reached(view, receivers)
    if not ends:
        raise ValueError("no receivers were given: write a name such as 'L18H6.k', or a list of names")
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
    """Return the edges from the senders to the receivers `ends`, as a `_Cuts`.

    `view` is the model, `senders` the argument of `edge_effects`, `pairs` the clean and counterfactual prompts or None.
    `places` is a dict from the name of a position (`at=`) to the position in each sequence. `queried` are the queries
    and keys whose attention is measured; None: a task is measured. `replace` says what replaces a cut write. Raises
    ValueError if a receiver has no earlier sender, BadHead for a sender that does not exist.
    """
    # An MLP also reads what heads of its own layer write; queries, keys and values do not.
    below = min(view.n_layers, 1 + max(end.receiver.layer - (end.receiver.input in "qkv") for end in ends))
    writers = chosen_senders(view, senders, below) if pairs is None or senders is not None else pairs.graph.senders
    if pairs is not None:
        writers = sorted(writers, key=lambda sender: pairs.graph.sender_index[sender.name])
    edges = edges_between(view, writers, ends, each_head=queried is not None, places=[*places] or [None])
    # With pairs the default is all receivers, and some may stand before every sender: not an error.
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
    """Cut the edges marked in `is_measured`; return a DataFrame with a row per measured edge: `delta, ...`.

    `view` is the model. With `attention, delta, delta_se`, and with draws the comparison with controls. The index
    is the edge's place in `edges`. `sequences` are the prompts with the metric, `cuts` the settings of the call,
    `draws` the number of control writes per edge, `seed` draws them. A job covers some kinds of receivers (layer and
    input); `measurement` runs the jobs, or loads stored ones.
    """
    kinds = by_kind(edges, np.flatnonzero(is_measured).tolist())
    # On a task, a job has as many edges as fill a pass. Attention needs no pass: a job has one kind of receiver.
    tokens = TOKENS_OF_JOB if measurement.folder is not None else batch_on(view.device).tokens
    each = (1 + draws) * sequences.tokens.numel()
    sizes = {kind: len(rows) * each if cuts.queried is None else tokens for kind, rows in kinds.items()}
    rows_of = {
        "-".join(f"{what}_L{layer:03d}" for layer, what in dict.fromkeys((some[0], some[-1]))): [
            row for kind in some for row in kinds[kind]
        ]
        for some in filled(sizes, tokens)
    }
    # The receiver "logits" has a layer of its own (n_layers); it is replayed from the last layer.
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
    """Return a DataFrame with a row per edge and the columns that name it.

    With `sender, layer, head, receiver, receiver_layer, receiver_head, input, reached`, and with `at=` `position`.
    `pairs` are the clean and counterfactual prompts, or None. With pairs, the column `eap_name` has the edge's name in
    the notation of edge attribution patching (EAP), such as "a16.h0->a18.h6<k>".
    """
    return pd.DataFrame([
        {**edge.names, **({} if pairs is None else {"eap_name": pairs.graph.eap_name(edge)})} for edge in edges
    ])  # fmt: skip


def _attrs(view: AttentionView, sequences: TaskSequences, pairs: Pairs | None, cuts: _Cuts) -> dict[str, Any]:
    """Return a dict of attrs of the table of `edge_effects`: facts about the prompts, positions, hashes of pairs.

    `norm_behind_held` has the layers with a norm after the attention, `pairs_sha256` the hashes (with `pairs`),
    `positions` the positions of `at=`. `view` is the model, `sequences` are the prompts with the metric, `cuts` the
    settings of the call.
    """
    return {
        **sequences.recorded(view),
        "norm_behind_held": [
            layer for layer in view.layers if layer < cuts.below and view.behind(layer)[1].kind != "none"
        ],
        **({} if pairs is None else {"pairs_sha256": pairs.digests}),
        **({"positions": [positions.tolist() for positions in cuts.places.values()]} if cuts.places else {}),
    }


def _screen_quality(made: pd.DataFrame) -> dict[str, Any]:
    """Return a dict of attrs on the screen: `rank_correlation_top`, `rank_correlation_control` and `missed`.

    `made` is the table of `edge_effects`. The two correlations are Spearman's, of estimate and effect, over the edges
    with the largest estimates and over edges drawn at random. `missed` has the rows of `missed_edges`.
    """
    # Edges labelled "logits" are neither the largest nor drawn at random, so they are in neither group.
    top, drawn = made["measured"] == "top", ~made["measured"].isin(("", "top", "logits"))
    # missed_edges calls an effect large from this median on. With a median of 0 every effect would be large.
    large = float(made.loc[top, "delta"].abs().median())
    return {
        "rank_correlation_top": agreement(made.loc[top])[0],
        "rank_correlation_control": agreement(made.loc[drawn])[0],
        "missed": missed_edges(made).to_dict("records") if large > 0 else [],
    }


def _replaced(receivers: Receivers | None, replace: Replaced | None, of_pairs: bool) -> Replaced:
    """Return the value of `replace` with its default filled in.

    The default is "counterfactual" for a task with counterfactual prompts, and always for all receivers (None),
    otherwise "mean". `receivers` and `replace` are the arguments of `edge_effects`. `of_pairs`: True if the task has
    counterfactual prompts. Raises ValueError if "counterfactual" is needed and the task has no pairs.
    """
    if receivers is None or replace is None:
        replace = "counterfactual" if receivers is None or of_pairs else "mean"
    if replace == "counterfactual" and not of_pairs:
        raise ValueError(
            "replace='counterfactual' and receivers=None need paired prompts: give a Task with counterfactual="
        )
    return replace


def _measure(ends: list[Reached], task: Task, pairs: Pairs | None) -> Measure:
    """Return the default of `measure`: "ind" or "task".

    It is "ind" (attention of induction heads) for one receiver of queries or keys in `ends`, if `task` has repeated
    sequences and there are no `pairs`; otherwise "task".
    """
    repeated = pairs is None and isinstance(task.prompts, RepeatedSegments)
    return "ind" if repeated and len(ends) == 1 and ends[0].receiver.input in ("q", "k") else "task"


def _draws(receivers: Any, measure: Any, replace: Any, control: Any, screen: Any, method: Any, of_pairs: bool) -> int:
    """Return the number of control draws for the arguments of `edge_effects`; 0 without a control.

    `receivers`, `measure`, `replace`, `control`, `screen` and `method` are the user's arguments. `of_pairs`: True if
    the task has counterfactual prompts. Raises ValueError for unknown options and options that exclude each other.
    """
    of_all = receivers is None
    for name, value, known in (
        ("measure", measure, (None, "prev", "dup", "ind", "attention", "task")),
        ("replace", replace, (None, "mean", "zero", "resample", "counterfactual")),
        ("screen", None if _is_count(screen) else screen, (None, "gradient")),
        ("method of screen='gradient'", method, (None, *STEPS)),
    ):
        if not isinstance(value, str | type(None)) or value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; not {shown(value)}")
    if _is_count(screen) and int(screen) < 1:
        raise ValueError(f"screen must be 'gradient' or a number of edges, 1 or more, not {shown(screen)}")
    if of_all and measure not in (None, "task"):
        raise ValueError(
            f"measure={shown(measure)} needs receivers=: without receivers only measure='task' is possible"
        )
    if of_all and replace not in (None, "counterfactual"):
        raise ValueError(
            f"replace={shown(replace)} needs receivers=: without them edges are replaced by the counterfactual"
        )
    if of_all and control is not None:
        raise ValueError("control= needs receivers=; for the control of a whole circuit use tls.faithfulness()")
    if screen is not None and not of_all and (replace not in (None, "counterfactual") or not of_pairs):
        raise ValueError("screen= needs paired prompts: give a Task with counterfactual=, and leave replace= out")
    if method is not None and screen is None:
        raise ValueError(f"method={shown(method)} needs a screen: give screen='gradient' too")
    if control is None:
        return 0
    draws = DRAWS if isinstance(control, str) and control == "random" else whole_number(control)
    if draws is None or draws < 1:
        raise ValueError(f"control must be 'random' or a number of draws, 1 or more, not {shown(control)}")
    return draws


def _is_count(screen: Any) -> bool:
    return not isinstance(screen, str) and whole_number(screen) is not None


def _places(sequences: TaskSequences, at: Any) -> dict[str, Int[Tensor, "sequences"]]:
    """Return a dict from the name of each position in `at` to that position in each sequence, counted from 0.

    `at` is the argument of `edge_effects`; None gives an empty dict. Raises ValueError for a position that a prompt
    does not have, TypeError for an array that may be read in two ways.
    """
    return {str(label): positions for label, positions in asked_positions(sequences, listed_positions(at) or [])}


def _queried(ends: list[Reached], sequences: TaskSequences, task: Task, measure: Measure) -> QueryKeyPairs:
    """Return the positions of queries and keys whose attention `measure` reads, for each sequence.

    `ends` are the receivers, `sequences` the tokenized prompts of `task`. Raises ValueError for receivers without
    attention, and for sequences that the measure does not fit.
    """
    for receiver in (end.receiver for end in ends):
        if receiver.input not in ("q", "k"):
            why = "attention does not depend on values" if receiver.input == "v" else "it has no attention"
            raise ValueError(f"{receiver.name}: {why}: give measure='task', or a receiver of queries or keys")
    if measure == "attention":
        positions = attention_positions(sequences.lengths, task.attention)
        if positions is None:
            raise ValueError("measure='attention' needs a Task with attention=, a query and a key position per prompt")
        return QueryKeyPairs(positions[:, :1], positions[:, 1:])
    length = segment_length_of(sequences.tokens)
    if length is None or sequences.padded:
        raise ValueError(
            f"measure={shown(measure)} needs repeated sequences [BOS, r, r], and the task has other prompts: give "
            "measure='attention' or 'task'"
        )
    queries, keys = (
        torch.tensor(positions).expand(len(sequences.tokens), -1) for positions in detector_pairs(measure, length)
    )
    return QueryKeyPairs(queries, keys)


def _require_senders(edges: list[Edge], ends: list[Reached]) -> None:
    """Raise ValueError if a receiver in `ends` has no edge, or if no edge exists."""
    without = {end.receiver for end in ends} - {edge.end.receiver for edge in edges}
    if without:
        raise ValueError(f"{min(without).name}: no sender stands in an earlier layer: give earlier senders=")
    if not edges:
        raise ValueError(
            "no sender stands in an earlier layer than a receiver: give earlier senders= or later receivers="
        )


def _screened(
    measurement: Measurement,
    pairs: Pairs,
    edges: list[Edge],
    method: Method,
    places: dict[str, Int[Tensor, "sequences"]],
    most: int,
    seed: int,
) -> tuple[Int[np.ndarray, "edges"], dict[str, np.ndarray], dict[str, Any]]:
    """Estimate all edges; return their order by |estimate|, the columns of the screen in this order, and attrs.

    The order is an array of indices into `edges`. The columns are `estimate, estimate_se, selected, measured`. The
    attrs say how stable the choice of the `most` largest edges is: `units, n_units, overlap_half, overlap_quarter,
    overlap_extrapolated, units_extrapolated`. `measurement` makes the estimates or loads stored ones, `method` is the
    kind of estimate, `places` are the positions of `at=`, `most` is the number of largest edges to measure, `seed`
    draws the random ones. Warns if there are few distinct pairs.
    """
    graph, distinct = pairs.graph, pairs.sequences.distinct
    rows = [graph.receiver_index[edge.end.receiver] for edge in edges]
    columns = [graph.sender_index[edge.sender.name] for edge in edges]
    at = [[*places].index(edge.place) if edge.place is not None else 0 for edge in edges]

    def estimated() -> pd.DataFrame:
        estimates = edge_estimates(pairs, method, [*places.values()])
        terms = estimates.terms[:, at, rows, columns]
        columns_of = {
            "estimate": terms.sum(0),
            "estimate_se": estimate_errors(terms, estimates.sizes),
            "selected": selected_share(terms, most, seed),
        }
        return pd.DataFrame(
            {**columns_of, "units": estimates.units, "n_units": len(terms), **overlaps(terms, most, seed)}
        )

    screen = measurement.first(Job("estimates", estimated))
    n_pairs = len(pairs.sequences.tokens) if distinct is None else int(distinct.max()) + 1
    if n_pairs < ENOUGH:
        warn_caller(f"{n_pairs} distinct pairs: other pairs may choose other edges; give {ENOUGH} or more pairs")
    to_logits = np.array([edge.end.receiver.input == "logits" for edge in edges])
    order, words = screened_edges(screen["estimate"].to_numpy(), to_logits, most, seed)
    ordered = {name: screen[name].to_numpy()[order] for name in ("estimate", "estimate_se", "selected")}
    stability = screen.drop(columns=["estimate", "estimate_se", "selected"]).to_dict("records")[0]
    return order, {**ordered, "measured": words[order]}, {k: None if pd.isna(v) else v for k, v in stability.items()}


def _prepared(view: AttentionView, sequences: TaskSequences, layers: list[int], cuts: _Cuts, seed: int) -> Prepared:
    """Run the model once for all jobs, and return the `Prepared`: writes of the senders and the intact run of the task.

    `sequences` are the prompts with the metric. `layers` are the layers from which the model is run again for each
    edge; if attention is measured, the layers whose queries and keys are kept instead. `cuts` are the settings of the
    call, `seed` draws controls and replacements.
    """
    of_task = cuts.queried is None
    # Attention is computed from stored queries and keys of these layers; the metric needs the model to run on.
    run = cached_run(view, sequences, cuts.senders, cuts.below, () if of_task else layers, cuts.replace, seed)
    return Prepared(run, intact_values(view, sequences, layers) if of_task else None, cuts.places)
