"""`run_circuit` and `faithfulness`: the value of a task when only some edges carry the clean prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.integrate
import torch
from jaxtyping import Bool, Float, Float64, Int

from tlspectral.errors import shown, warn_caller
from tlspectral.errors.settings import checked_settings, counted
from tlspectral.hooks.circuits.carried import carried_interval, require_gap
from tlspectral.hooks.circuits.estimates import Method, edge_estimates
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.hooks.circuits.pairs import Mask, Pairs, pairs_of
from tlspectral.models.reading import measured
from tlspectral.selection.node_names import naming_nodes
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.same_model import require_same_model
from tlspectral.tables.schema import Schema, columns, require, require_one_row
from tlspectral.tasks import MetricValue, Task
from tlspectral.tasks.task_sequences import metric_value_from

SIZES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Default sizes of circuits, as shares of all edges."""

_FEWEST_TO_CHOOSE = 16  # distinct pairs below which choose='bootstrap' is refused

FAITHFULNESS = Schema(
    "faithfulness",
    columns("""
        circuit        | label         | edges (the largest), relabelled (the same with the heads of each layer
                       |               | exchanged), random (as many edges between the same layers) or procedure (the
                       |               | circuits that bootstrap samples choose, of each pair those chosen without it).
        draw           | index         | Which relabelled or random circuit, or bootstrap sample; else 0.
        share          | share         | Share of all edges that are kept, keys and values of a group counted once.
        share_expanded | share         | The same with those of a group counted for each of its heads.
        n_edges        | count         | Edges that are kept.
        n_live         | count         | Those of them on a path of kept edges from the embedding to the logits.
        value          | of the metric | Value of the circuit, mean over pairs.
        faithfulness   | share         | (value - that of no edge) / (that of all - that of no edge); may exceed 1.
        low?           | share         | Lower end of a 95 % interval over pairs (Fieller), for edges alone. NaN below 8
                       |               | distinct pairs, or if pairs differ from their mean by less than .05 of the gap.
                       |               | The interval is for these edges, not for the way in which they were chosen.
        high?          | share         | Upper end.
        unseen?        | share         | 1 - .05^(1/n) for n distinct pairs: up to this share of all pairs may behave
                       |               | unlike every drawn pair (95 %), for edges alone.
        worst?         | share         | Lower end if these unseen pairs carried nothing: (1 - unseen) low, or (1 -
                       |               | unseen) faithfulness where there is no interval. The upper end stays `high`.
    """),
)


def run_circuit(model: Any, edges: Any, task: Task) -> MetricValue:
    """Evaluate a task when only the given edges carry the clean prompt and all others the counterfactual one.

    Use it to test a set of edges that you chose. Example: without any edge, the model runs as on the counterfactual
    prompt.

    >>> import tlspectral as tls, torch
    >>> model = tls.load_model("tiny-rope")
    >>> prompt = torch.tensor([[1, 5, 6, 7, 5]])
    >>> pair = torch.tensor([[1, 5, 8, 7, 5]])
    >>> task = tls.logit_difference(prompt, 6, 8, counterfactual=pair)
    >>> none = tls.run_circuit(model, [], task)
    >>> abs(float(none) - tls.evaluate(model, task.denoising()).value) < 1e-4
    True

    The model runs on the clean prompts. A receiver (queries, keys or values of a head, an MLP, the logits) reads along
    a kept edge what the sender (a head, an MLP, the embedding) writes in this run, and along every other edge what it
    wrote on the counterfactual prompt. All norms are computed again.

    Args:
        model: TransformerBridge or HookedTransformer.
        edges: the kept edges: a table with columns `sender` and `receiver`, such as from `edge_effects`, or pairs of
            names such as ("L16H0", "L18KV2.k") or ("L20MLP", "logits").
        task: a `Task` with `counterfactual=`, a second prompt for each prompt.

    Returns:
        A `MetricValue`, usable as a number: `.value` is the mean over pairs in the unit of the metric, `.se` its
        standard error, `.per_sequence` the value of each pair. All edges give `tls.evaluate(model, task)`, no edge
        gives `tls.evaluate(model, task.denoising())`.

    Raises:
        BadHead: the model does not have an edge.
        ValueError: the task has no counterfactual prompts, its prompts do not fit, `edges` is not a table or pairs of
            names, or the table is from other weights or has effects at positions.
        UnsupportedArchitecture, EditNotHonored: the residual stream is not a sum of readable writes.

    Not established: that the model uses this circuit, since other edges can carry as much (`faithfulness` draws some),
    or that it is specific to the task: a task that needs more edges falls to its counterfactual value under any small
    circuit. More: docs/circuits.md
    """
    with measured(model) as view, torch.no_grad():
        pairs = pairs_of(view, task)
        _compare(edges, pairs)
        [values] = pairs.circuit_values([pairs.graph.kept(edges)])
        return metric_value_from(view, pairs.sequences, values)


@checked_settings
def faithfulness(
    model: Any,
    edges: pd.DataFrame | None,
    task: Task,
    *,
    sizes: Sequence[float] | Float[np.ndarray, "sizes"] | None = None,
    null: int | None = None,
    rank: Literal["selected"] | None = None,
    choose: Literal["bootstrap"] | None = None,
    draws: int = 50,
    method: Method = "EAP-IG",
    seed: int = 0,
) -> pd.DataFrame:
    """Measure how much of a task the largest edges carry, at several sizes, beside random circuits of equal size.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> prompts, pairs = ([[1, k, v, 7, k] for k in (2, 3, 4, 5)] for v in (6, 8))
    >>> found_on, task = tls.logit_difference(prompts, 6, 8, counterfactual=pairs).split()
    >>> edges = tls.edge_effects(model, task=found_on)
    >>> shares = tls.faithfulness(model, edges, task, sizes=[0.5, 1.0], null=0)
    >>> shares["faithfulness"].round(1).tolist()
    [1.0, 1.0]

    A circuit is a set of edges that carry the clean prompt; all others carry the counterfactual. `faithfulness` is
    (m(circuit) - m(none)) / (m(all) - m(none)), with m the mean metric over pairs. It may exceed 1.

    Args:
        model: TransformerBridge or HookedTransformer.
        edges: a table with `sender`, `receiver` and `estimate` (or `delta`); circuits take the largest. None: `choose`
            chooses the edges.
        task: a `Task` with `counterfactual=`; give other pairs than the edges were found on.
        sizes: shares of all edges, above 0 and at most 1. Default: ten sizes from .001 to 1.
        null: number of relabelled circuits (heads of each layer exchanged), and as many random circuits (edges between
            the same layers), for each circuit of edges. Default: 20, or 1 with `choose`.
        rank: "selected" takes first the edges that most bootstrap samples choose. Default: None, by |estimate|.
        choose: "bootstrap" measures the procedure: bootstrap samples of the pairs choose edges, and the pairs outside a
            sample evaluate them. Needs 16 distinct pairs. Default: None.
        draws: number of bootstrap samples with `choose`. Default: 50. seed: of null circuits and samples. Default: 0.
        method: with `choose`, edge attribution patching: "EAP", "EAP-IG" (default) or "EAP-QK", as in `edge_effects`.

    Returns:
        DataFrame, a row per circuit. Columns (`?`: not in every table): `circuit, draw, share, share_expanded, n_edges,
        n_live, value, faithfulness, low?, high?, unseen?, worst?`. `attrs` has both ends of the scale (`value_all`,
        `value_none`, `gap`) and areas under the curve (`cpr`, `cmd`).

    Raises:
        BadHead: the model does not have an edge.
        ValueError: both sides of the pairs differ too little, or an argument does not fit.
        UnsupportedArchitecture, EditNotHonored: the residual stream is not a sum of readable writes.

    Not established: that the model uses these edges. If random circuits of equal size carry as much, a high value says
    only that there were enough edges. More: docs/circuits.md
    """
    if (edges is None) != (choose == "bootstrap") or choose not in (None, "bootstrap"):
        raise ValueError(
            f"edges= and choose={shown(choose)} do not go together: give a table of edges, or edges=None with "
            "choose='bootstrap', which chooses edges on the task itself"
        )
    shares, null = _shares(sizes), (20 if choose is None else 1) if null is None else null
    null = counted(null, 0, "null is how many circuits of each size are drawn")
    with measured(model) as view, torch.no_grad():
        pairs = pairs_of(view, task)
        rng = np.random.default_rng(seed)
        if edges is None:
            choices = _bootstrap_choices(pairs, method, draws, rng)
        else:
            _compare(edges, pairs)
            every_pair = np.ones(len(pairs.sequences.tokens), dtype=bool)
            choices = [(_ranked(pairs.graph, edges, rank), every_pair)]
        intact, none = pairs.plain_values()
        gap, gap_se = require_gap(pairs.sequences, intact, none, ("on the clean", "on the counterfactual prompts"))
        measurement = Measurement(
            FAITHFULNESS,
            {
                "task": pairs.sequences.name,
                "null": null,
                "seed": seed,
                **({"rank": rank} if choose is None else {"choose": choose, "draws": draws, "method": method}),
            },
            origin=pairs.view.origin(),
        )
        circuits = _circuits(pairs.graph, choices, shares, null, rng)
        values = pairs.circuit_values([circuit.mask for circuit in circuits])
        rows = [
            _row(pairs, circuit, value, intact, none, with_interval=choose is None)
            for circuit, value in zip(circuits, values, strict=True)
        ]
        if choose is not None:
            rows += _procedure(rows, values, choices, none, intact - none)
        table = pd.DataFrame(rows)
        return measurement.table(
            table,
            n_pairs=len(intact),
            batch=pairs.rows_at_once,
            tokens_sha256=pairs.sequences.digest,
            **pairs.sequences.noted,
            value_all=float(intact.mean()),
            value_none=float(none.mean()),
            gap=gap,
            gap_se=gap_se,
            **_areas(table.loc[table["circuit"] == ("edges" if choose is None else "procedure")]),
        )


_Choice = tuple[Int[np.ndarray, "edges"], Bool[np.ndarray, "pairs"]]
"""All edges, largest first, as indices into the flattened mask; and a mask of the pairs on which they are evaluated."""


@dataclass(frozen=True)
class _Circuit:
    """A circuit to run.

    Attributes:
        names: dict with its columns that are known before the run: `circuit, draw`, shares and numbers of edges.
        mask: True for kept edges.
        evaluated: True for pairs on which it is evaluated.
    """

    names: dict[str, Any]
    mask: Mask
    evaluated: Bool[np.ndarray, "pairs"]


def _circuits(
    graph: Graph, choices: list[_Choice], shares: list[float], null: int, rng: np.random.Generator
) -> list[_Circuit]:
    """Return for each share and choice a circuit of the largest edges, each followed by its null circuits.

    `graph` has the possible edges. A choice is an order of the edges (indices into the flattened mask, largest first)
    and a mask of the pairs that evaluate the circuit. `shares` are sizes as shares of all edges. `null` is the number
    of relabelled and of random circuits for each, drawn with `rng`; at a share of 1 there are none. Warns if every null
    circuit of a share equals the circuit itself.
    """
    n_edges = int(graph.possible.sum())
    circuits: list[_Circuit] = []
    for share, (number, (order, evaluated)) in product(shares, enumerate(choices)):
        mask = np.zeros(graph.possible.size, dtype=bool)
        mask[order[: max(1, round(share * n_edges))]] = True
        mask = mask.reshape(graph.possible.shape)
        drawn = [("edges", number, mask)]
        # All edges are one circuit only, so there is nothing to draw at a share of 1.
        for draw in range(number * null, (number + 1) * null if share < 1 else 0):
            drawn += [
                ("relabelled", draw, relabelled_circuit(graph, mask, rng)),
                ("random", draw, random_circuit(graph, mask, rng)),
            ]
        circuits += [
            _Circuit({"circuit": kind, "draw": draw, **_sizes(graph, circuit)}, circuit, evaluated)
            for kind, draw, circuit in drawn
        ]
        if len(drawn) > 1 and all((circuit == mask).all() for _, _, circuit in drawn):
            warn_caller(
                f"at a share of {share} every random circuit is the circuit itself, so there is no null: the model has "
                "too few other edges between the same layers; give smaller sizes="
            )
    return circuits


def _row(
    pairs: Pairs,
    circuit: _Circuit,
    value: Float64[np.ndarray, "pairs"],
    intact: Float64[np.ndarray, "pairs"],
    none: Float64[np.ndarray, "pairs"],
    *,
    with_interval: bool,
) -> dict[str, Any]:
    """Return the row of a circuit as a dict from column to value.

    Columns: the circuit's `names`, `value` (mean metric over its evaluated pairs) and `faithfulness`. `value`, `intact`
    and `none` are the metric of each pair in the circuit, on the clean and on the counterfactual prompt. With
    `with_interval`, a circuit of the user's own edges also gets `low, high` (95 % interval), `unseen` and `worst`.
    """
    whole, evaluated = intact - none, circuit.evaluated
    row = {**circuit.names, "value": float(value[evaluated].mean())}
    row["faithfulness"] = float((value - none)[evaluated].mean() / whole[evaluated].mean())
    if with_interval and row["circuit"] == "edges":
        row |= carried_interval(pairs.sequences, value, intact, none)
    return row


def _bootstrap_choices(pairs: Pairs, method: Method, draws: int, rng: np.random.Generator) -> list[_Choice]:
    """Return for each bootstrap sample an order of all edges, largest estimate first, and a mask of pairs.

    The order holds indices into the flattened mask [receivers, senders]. The mask is True for pairs that are not in the
    sample. `method` is the way of estimating ("EAP", "EAP-IG" or "EAP-QK"), `draws` the number of samples, `rng` draws
    them. Raises ValueError for fewer than 16 distinct pairs, or if estimates cannot be divided among pairs.
    """
    n, distinct = len(pairs.sequences.tokens), pairs.sequences.distinct
    unit = np.arange(n) if distinct is None else distinct
    n_units = int(unit.max()) + 1
    if n_units < _FEWEST_TO_CHOOSE:
        raise ValueError(
            f"choose='bootstrap' needs {_FEWEST_TO_CHOOSE} distinct pairs, and the task has {n_units}: give more "
            "pairs, or a table of edges without choose="
        )
    number = counted(draws, 1, "draws is how many bootstrap samples choose edges")
    estimates = edge_estimates(pairs, method)
    if estimates.units != "pairs":
        raise ValueError(
            f"choose='bootstrap' resamples pairs, and estimates of this task exist only for {estimates.units}: give a "
            "table of edges without choose="
        )
    flat = np.flatnonzero(pairs.graph.possible)
    terms = estimates.terms[:, 0].reshape(n_units, -1)[:, flat]
    choices: list[_Choice] = []
    while len(choices) < number:
        times = rng.multinomial(n_units, np.full(n_units, 1 / n_units))
        if (times == 0).any():  # of 16 pairs one sample of 10^7 holds all
            choices.append((flat[np.argsort(-np.abs(times @ terms), kind="stable")], times[unit] == 0))
    return choices


def _procedure(
    rows: list[dict[str, Any]],
    values: Float64[np.ndarray, "circuits pairs"],
    choices: list[_Choice],
    none: Float64[np.ndarray, "pairs"],
    whole: Float64[np.ndarray, "pairs"],
) -> list[dict[str, Any]]:
    """Return a row named `procedure` for each size, as a dict: the mean over pairs of circuits chosen without the pair.

    The row has `circuit, draw, share, share_expanded, n_edges, n_live, value, faithfulness`. `rows` and `values` are
    the rows and per-pair values of all circuits, `choices` the bootstrap samples. `none` is the value of no edge and
    `whole` the gap (clean minus counterfactual value) of each pair.
    """
    procedure: list[dict[str, Any]] = []
    of_edges = [(row, value) for row, value in zip(rows, values, strict=True) if row["circuit"] == "edges"]
    out = np.stack([evaluated for _, evaluated in choices])  # [draws, pairs]
    known = out.any(0)  # a pair that every sample holds has no value from a circuit chosen without it
    for start in range(0, len(of_edges), len(choices)):
        some = of_edges[start : start + len(choices)]
        values = np.stack([value for _, value in some])
        value = (values * out)[:, known].sum(0) / out[:, known].sum(0)
        first = some[0][0]  # all circuits of a size have equally many edges; other counts are means
        means = {name: float(np.mean([row[name] for row, _ in some])) for name in ("share_expanded", "n_live")}
        means["n_live"] = round(means["n_live"])
        carried = float((value - none[known]).mean() / whole[known].mean())
        procedure.append({
            "circuit": "procedure", "draw": 0, "share": first["share"], "n_edges": first["n_edges"], **means,
            "value": float(value.mean()), "faithfulness": carried,
        })  # fmt: skip
    return procedure


def _ranked(graph: Graph, edges: pd.DataFrame, rank: str | None = None) -> Int[np.ndarray, "edges"]:
    """Return all possible edges as indices into the flattened mask [receivers, senders], largest |effect| first.

    `graph` has the possible edges. Effects are the column `estimate`, or `delta`, of the table `edges`, which is not
    changed; edges that the table lacks come last. With rank="selected", edges of largest `selected` come first, and
    equal ones are sorted by |effect|. Raises ValueError for an unknown rank, or a table without the needed columns or
    values.
    """
    if rank not in (None, "selected"):
        raise ValueError(f"rank= must be 'selected' or None (by size of the estimate); found {shown(rank)}")
    if not isinstance(edges, pd.DataFrame):
        raise ValueError(
            "edges= must be a table with sender, receiver and estimate, such as from edge_effects; found "
            f"{type(edges).__name__}: give tls.edge_effects(model, task=task){naming_nodes(edges)}"
        )
    column = "estimate" if "estimate" in edges else "delta"
    if column not in edges:
        raise ValueError("the table of edges has neither estimate nor delta: give a table of edge_effects")
    require(edges, ("sender", "receiver"), "edge_effects", name="table of edges")
    rows, places = graph.places(edges)
    named = pd.DataFrame({"row": rows, "place": places, "effect": edges[column].to_numpy(float)}).drop_duplicates()
    named["sender"] = [graph.senders[place].name for place in named["place"]]
    named["receiver"] = [graph.receivers[row].name for row in named["row"]]
    require_one_row(named, ["sender", "receiver"], "rank edges by one number each", name="table of edges")
    if named["effect"].isna().all():
        raise ValueError(f"the column {column} of the table of edges is empty: give a table of edge_effects")
    effect = np.full(graph.possible.shape, np.nan)
    effect[named["row"], named["place"]] = named["effect"]
    flat, size = np.flatnonzero(graph.possible), np.abs(effect)
    # Edges that the table lacks come last.
    size = np.where(np.isnan(size), -np.inf, size).ravel()[flat]
    if rank is None:
        return flat[np.argsort(-size, kind="stable")]
    require(edges, ("selected",), "edge_effects(screen=)", name="table of edges")
    selected = np.full(graph.possible.shape, -1.0)
    selected[rows, places] = edges["selected"].to_numpy(float)
    if np.isnan(selected).any():
        raise ValueError(
            "rank='selected' needs a value of selected for each edge, and some are missing (a metric of all prompts at "
            "once has no estimates per pair): leave rank= out"
        )
    return flat[np.lexsort((-size, -selected.ravel()[flat]))]


def relabelled_circuit(graph: Graph, mask: Mask, rng: np.random.Generator) -> Mask:
    """Return the circuit `mask` with the heads of each layer exchanged at random, as a new mask [receivers, senders].

    `graph` has the senders and receivers, `rng` draws the exchange; `mask` is not changed. The result has equally many
    live edges, which lie on a path from embedding to logits. Heads that share keys and values move together.
    """
    rows, places = np.arange(len(graph.receivers)), np.arange(len(graph.senders))
    for layer, (n_heads, n_groups) in enumerate(zip(graph.n_heads, graph.n_kv_heads, strict=True)):
        if not n_heads:
            continue
        groups, size = rng.permutation(n_groups), n_heads // n_groups
        heads = np.concatenate([group * size + rng.permutation(size) for group in groups])
        first = graph.sender_index[f"L{layer}H0"]
        places[first : first + n_heads] = first + heads
        for what, exchanged in (("q", heads), ("k", groups), ("v", groups)):
            first = graph.kinds[layer, what].start
            rows[first : first + len(exchanged)] = first + exchanged
    return mask[np.ix_(rows, places)]


def random_circuit(graph: Graph, mask: Mask, rng: np.random.Generator) -> Mask:
    """Return a random circuit as a new mask [receivers, senders].

    `graph` has the possible edges, `rng` draws them. `mask` is a circuit, True for kept edges, and is not changed.
    Between every two layers, and every kind of sender and receiver, the random circuit has as many edges as `mask`.
    """
    drawn = np.zeros_like(mask)
    of_receivers = [(receiver.layer, receiver.input) for receiver in graph.receivers]
    of_senders = [(sender.layer, sender.kind) for sender in graph.senders]
    rows = pd.factorize(pd.Series(of_receivers))[0]
    places = pd.factorize(pd.Series(of_senders))[0]
    for row in np.unique(rows[mask.any(1)]):
        for place in np.unique(places[mask[rows == row].any(0)]):
            block = np.ix_(rows == row, places == place)
            candidates = np.argwhere(graph.possible[block])
            chosen = candidates[rng.permutation(len(candidates))[: int(mask[block].sum())]]
            inside = np.zeros(graph.possible[block].shape, dtype=bool)
            inside[tuple(chosen.T)] = True
            drawn[block] = inside
    return drawn


def _sizes(graph: Graph, mask: Mask) -> dict[str, Any]:
    """Return a dict with the columns `share, share_expanded, n_edges, n_live` of the circuit `mask`.

    `share` is its number of edges over all possible edges of `graph`, `share_expanded` the same with an edge to shared
    keys or values counted once for each head, `n_live` the number of edges on a path from embedding to logits.
    """
    group = np.array([
        graph.n_heads[end.layer] // graph.n_kv_heads[end.layer] if end.shared else 1 for end in graph.receivers
    ])  # fmt: skip
    return {
        "share": float(mask.sum() / graph.possible.sum()),
        "share_expanded": float(group @ mask.sum(1) / (group @ graph.possible.sum(1))),
        "n_edges": int(mask.sum()),
        "n_live": int(graph.on_a_path(mask).sum()),
    }


def _areas(table: pd.DataFrame) -> dict[str, float]:
    """Return a dict of areas of the curve of faithfulness over the share of edges: `cpr, cmd, cpr_log, cmd_log`.

    `cpr` is the area below the curve, `cmd` the area between the curve and 1; `cpr_log` and `cmd_log` are over the
    logarithm of the share. `table` has one row for each size, with `share_expanded` (the share that is meant) and
    `faithfulness`.
    """
    table = table.sort_values("share_expanded")
    share, carried = table["share_expanded"].to_numpy(), table["faithfulness"].to_numpy()
    areas = {}
    for suffix, x in (("", share), ("_log", np.log10(share))):
        length = x[-1] - x[0] if suffix else 1.0
        for name, y in (("cpr", carried), ("cmd", np.abs(1 - carried))):
            areas[name + suffix] = float(scipy.integrate.trapezoid(y, x) / length) if len(x) > 1 else float("nan")
    return areas


def _shares(sizes: Any) -> list[float]:
    """Return `sizes` as a list of shares of all edges, or the default ten. Raises ValueError unless 0 < share <= 1."""
    shares = np.asarray(SIZES if sizes is None else sizes)
    if (
        shares.ndim != 1
        or not shares.size
        or shares.dtype.kind not in "iuf"
        or not ((shares > 0) & (shares <= 1)).all()
    ):
        raise ValueError(
            f"sizes= must be a list of shares of all edges, above 0 and at most 1; found {shown(sizes)}: for example "
            "sizes=[0.01, 0.1]"
        )
    return shares.tolist()


def _compare(edges: Any, pairs: Pairs) -> None:
    """Raise or warn if a table of edges does not fit the model and the pairs of a circuit.

    `edges` in another form than a table pass unchecked. Raises ValueError for a table of other weights, or with effects
    at positions. Warns if its effects are of another task, measure or replacement, and if it was made on some of the
    same pairs.
    """
    if not isinstance(edges, pd.DataFrame):
        return
    if "position" in edges:
        shown = ", ".join(repr(str(position)) for position in edges["position"].unique()[:3])
        raise ValueError(
            f"the table of edges has effects at positions ({shown}), and a circuit keeps an edge at all positions: "
            "make the table without at=, or give the edges by name, list(zip(edges['sender'], edges['receiver']))"
        )
    require_same_model(edges, pairs.view.origin(), "the circuit's model", name="table of edges")
    of_circuit = {"task": pairs.sequences.name, "measure": "task", "replace": "counterfactual"}
    other = {name: edges.attrs[name] for name in of_circuit if edges.attrs.get(name) not in (None, of_circuit[name])}
    if other:
        warn_caller(
            f"the effects in the table of edges are of {_spelled(other)}, and the circuit is of "
            f"{_spelled({name: of_circuit[name] for name in other})}: other edges may matter; give a table with these "
            "settings"
        )
    known = set(edges.attrs.get("pairs_sha256") or ())
    shared = sum(digest in known for digest in pairs.digests)
    if shared:
        warn_caller(
            f"{shared} of {len(pairs.digests)} pairs are among those on which the edges were found, so the circuit "
            "looks better than on new pairs: find edges on one half of task.split(), and evaluate them on the other"
        )


def _spelled(settings: dict[str, Any]) -> str:
    """Return settings as text for a message, such as "task='induction', replace='mean'"."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
