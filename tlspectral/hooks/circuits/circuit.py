"""`run_circuit` and `faithfulness`: how much of a behaviour some edges carry, against circuits of equal size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.integrate
import scipy.stats
import torch
from jaxtyping import Bool, Float, Float64, Int

from tlspectral.errors import shown, warn_caller
from tlspectral.hooks.circuits.estimates import Method, edge_estimates
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.hooks.circuits.pairs import Mask, Pairs, pairs_of
from tlspectral.hooks.removed_off_target import refuse_off_target
from tlspectral.models.hooking.exclusive import naming_open_contexts
from tlspectral.models.reading import measured
from tlspectral.selection import counted, naming_nodes
from tlspectral.stats.ratio import ratio_interval, unseen_share
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.same_model import require_same_model
from tlspectral.tables.schema import Schema, columns, require, require_one_row
from tlspectral.tasks import MetricValue, Task
from tlspectral.tasks.metric_value import row_sums, standard_error
from tlspectral.tasks.task_sequences import metric_value_from

SIZES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of all edges."""

_FEWEST = 8  # distinct pairs with an interval
_FEWEST_TO_CHOOSE = 16  # distinct pairs whose bootstrap samples choose circuits

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


def _a_circuit_for_each(call: str, tasks: list[str]) -> str:
    """Return two lines of code: the circuit on each task, and the whole model."""
    listed = ", ".join(tasks)
    return f"values = [{call} for task in ({listed})]\nintact = [tls.evaluate(model, task) for task in ({listed})]"


@refuse_off_target(_a_circuit_for_each)
def run_circuit(model: Any, edges: Any, task: Task) -> MetricValue:
    """Evaluate the clean prompts when only these edges carry what the model computes.

    Example: without any edge, the model runs as on the counterfactual prompt.

    >>> import tlspectral as tls, torch
    >>> model = tls.load_model("tiny-rope")
    >>> prompt = torch.tensor([[1, 5, 6, 7, 5]])
    >>> task = tls.logit_difference(prompt, 6, 8, counterfactual=torch.tensor([[1, 5, 8, 7, 5]]))
    >>> none, swapped = tls.run_circuit(model, [], task), tls.evaluate(model, task.denoising())
    >>> abs(float(none) - float(swapped)) < 1e-4
    True

    Along a kept edge a receiver reads what its sender writes, computed anew in this run; along every other edge what
    the sender wrote on the counterfactual prompt. Queries of a head, keys and values of a group, MLPs and the logits
    have an input each, and every norm is taken again. All edges kept is the clean run, none the counterfactual one.

    Args:
        model: a TransformerBridge or HookedTransformer.
        edges: the kept edges: a table with columns `sender` and `receiver`, or pairs of names, such as
            `("L16H0", "L18KV2.k")` or `("L20MLP", "logits")`. A warning says where a table was found on the same pairs,
            or has effects of another kind: on another task or measure, or of another replacement.
        task: a `Task` with `counterfactual=`.

    Returns:
        A `MetricValue`, which is used as a number: the mean over pairs, with `.se` and `.per_sequence`. Less
        `tls.evaluate(model, task)`, the value of all edges, it is the paired difference over prompts. The value of no
        edge is `tls.evaluate(model, task.denoising())`. For another task, call it again: values of two tasks are not
        compared, as their units may differ.

    Raises:
        BadHead: an edge that the model does not have.
        ValueError: a task without counterfactual prompts, such as `"language"`, since a circuit is a cut to the pair,
            or prompts that do not fit, see `Task`; edges that are no pairs of names; a table of other weights, or with
            effects at positions.
        UnsupportedArchitecture, EditNotHonored: a model whose residual stream is no sum of writes.

    Source: path patching of all edges at once (Goldowsky-Dill et al. 2023, section 3; Conmy et al. 2023, section 2.3).

    What it does not establish: that the circuit is the one that the model uses. Other sets of edges can carry as much:
    see `faithfulness`, which draws some. That a circuit carries the task and not another one: a task that needs more
    edges falls to its `counterfactual` under any small circuit, so set a circuit of equal size beside it.
    """
    with measured(model) as view, torch.no_grad():
        pairs = pairs_of(view, task)
        _compare(edges, pairs)
        [values] = pairs.circuit_values([pairs.graph.kept(edges)])
        return metric_value_from(view, pairs.sequences, values)


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
    """Measure how much of a behaviour the largest edges carry, over their number, beside circuits of equal size.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> prompts, pairs = ([[1, key, value, 7, key] for key in (2, 3, 4, 5)] for value in (6, 8))
    >>> found_on, task = tls.logit_difference(prompts, 6, 8, counterfactual=pairs).split()
    >>> edges = tls.edge_effects(model, task=found_on)
    >>> tls.faithfulness(model, edges, task, sizes=[0.5, 1.0], null=0)["faithfulness"].round(1).tolist()
    [1.0, 1.0]

    `faithfulness` is (m(circuit) - m(none)) / (m(all) - m(none)), m the mean metric over pairs. It may exceed 1.

    Args:
        model: a TransformerBridge or HookedTransformer.
        edges: a table of edges with `sender`, `receiver` and `estimate` (or, without one, `delta`), from which the
            circuits take the largest. Edges that it lacks come last. What it says of itself is compared as in
            `run_circuit`. None: edges are chosen on the task itself, with `choose`.
        task: a `Task` with `counterfactual=`; with a table of other pairs than those on which the edges were found
            (`Task.split`): a warning says so where they share one.
        sizes: shares of all edges, above 0 and up to 1; None for .001 to 1 in ten steps.
        null: how many relabelled and random circuits of each circuit of edges, 0 or more. Each takes a forward pass of
            the clean prompts. None is 20, and 1 with `choose`.
        rank: `"selected"` takes the edges of largest `selected` first, and among equals the edges of largest estimate.
        choose: `"bootstrap"` measures the procedure in place of one circuit. Edges are estimated on the task; each of
            `draws` bootstrap samples of its pairs chooses the largest, and the circuit is evaluated on the pairs that
            are not in the sample. It takes 16 distinct pairs or more.
        draws: bootstrap samples of `choose`; each takes a pass of all pairs per size, and two more per null.
        method: of the estimate that `choose` makes.
        seed: of null and bootstrap.

    Returns:
        DataFrame, a row per circuit. Columns: `circuit, draw, share, share_expanded, n_edges, n_live, value,
        faithfulness, low?, high?, unseen?, worst?`. `attrs` hold the ends of the scale (`value_all`, `value_none` and
        the standard error of their `gap`), and areas by trapezoid over the share with groups expanded, as MIB counts
        edges: `cpr` (under the curve), `cmd` (between it and 1), and the same over the logarithm of the share,
        `cpr_log`, `cmd_log`.

    Raises:
        ValueError: a gap between both sides that is small beside its error, so that no share of it is a number; a table
            with several effects of an edge, or none; sizes that are no shares; a table and `choose`, or neither; with
            `choose` fewer than 16 distinct pairs; a task without counterfactual prompts, prompts that do not fit, or a
            table of other weights.
        BadHead: an edge that the model does not have.
        UnsupportedArchitecture, EditNotHonored: a model whose residual stream is no sum of writes.

    Source: Mueller et al. 2025 (MIB), section 3, for the ratio of means and areas. The nulls are this package's.

    What it does not establish: that the edges are the ones which the model uses. The interval is of the given edges on
    other pairs like these: that another sample would have chosen other edges is not in it, see `selected` of
    `edge_effects`. Where random circuits of the same size carry as much, a high value says that there were enough
    edges. The linear area hardly tells rankings apart. The curve of the procedure is of samples that hold .63 of the
    distinct pairs, which choose a little worse, and it has no interval, since its pairs share their circuits.
    """
    if (edges is None) != (choose == "bootstrap") or choose not in (None, "bootstrap"):
        raise ValueError(
            "give a table of edges, or edges=None and choose='bootstrap', which estimates them on the task"
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
        gap, gap_se = _gap(pairs, intact, none)
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


def _gap(pairs: Pairs, intact: Float64[np.ndarray, "pairs"], none: Float64[np.ndarray, "pairs"]) -> tuple[float, float]:
    """Return the mean gap between both sides of the pairs, and its standard error.

    Raises ValueError where its 95 % interval holds 0, so that a share of it could be any number.
    """
    distinct = pairs.sequences.distinct
    gap, gap_se = float((intact - none).mean()), standard_error(intact - none, distinct)
    n_distinct = len(intact) if distinct is None else int(distinct.max()) + 1
    # Written so that a gap or an error that is NaN, as of one distinct pair, is refused too.
    if abs(gap) > scipy.stats.t.ppf(0.975, n_distinct - 1) * gap_se:
        return gap, gap_se
    if not np.isfinite(gap):
        reason = ", which is no number: see what the metric returns on these prompts"
    elif n_distinct < 2:
        reason = " of one distinct pair, whose error is not known: give two distinct pairs or more"
    elif gap_se == 0:
        reason = " on every pair: give pairs whose sides the model tells apart"
    else:
        reason = f" with standard error {gap_se:.2g}: give more pairs, or others that the model tells apart"
    raise ValueError(
        f"{pairs.sequences.name}: the value is {intact.mean():.3g} on the clean and {none.mean():.3g} on the "
        f"counterfactual prompts, so that no share of their gap is a number. The gap is {gap:.2g}{reason}"
        f"{naming_open_contexts()}"
    )


_Choice = tuple[Int[np.ndarray, "edges"], Bool[np.ndarray, "pairs"]]


@dataclass(frozen=True)
class _Circuit:
    """A circuit that is run, with the columns that are known before, and the pairs on which it is evaluated."""

    names: dict[str, Any]
    mask: Mask
    evaluated: Bool[np.ndarray, "pairs"]


def _circuits(
    graph: Graph, choices: list[_Choice], shares: list[float], null: int, rng: np.random.Generator
) -> list[_Circuit]:
    """Return the circuit of each share and choice, each with its null circuits. Warns where these are no others."""
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
                f"at a share of {share} every random circuit is the circuit itself, so that there is no null: the "
                "model has too few other edges between the same layers"
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
    """Return the row of a circuit from its value on each pair; of edges of the caller's table with an interval."""
    whole, evaluated = intact - none, circuit.evaluated
    row = {**circuit.names, "value": float(value[evaluated].mean())}
    row["faithfulness"] = float((value - none)[evaluated].mean() / whole[evaluated].mean())
    if with_interval and row["circuit"] == "edges":
        distinct = pairs.sequences.distinct
        # Equal pairs are one draw: the interval is over their sums.
        carried, of_all = row_sums(value - none, distinct), row_sums(whole, distinct)
        few = len(of_all) < _FEWEST
        row["low"], row["high"] = (np.nan, np.nan) if few else ratio_interval(carried, of_all)
        row["unseen"] = unseen_share(len(of_all))
        low = row["faithfulness"] if np.isnan(row["low"]) else row["low"]
        # Pairs that carry nothing do not raise a negative end.
        row["worst"] = min(low, (1 - row["unseen"]) * low)
    return row


def _bootstrap_choices(pairs: Pairs, method: Method, draws: int, rng: np.random.Generator) -> list[_Choice]:
    """Return for each bootstrap sample of pairs the order of all edges, the largest first, and the pairs out of it."""
    n, distinct = len(pairs.sequences.tokens), pairs.sequences.distinct
    unit = np.arange(n) if distinct is None else distinct
    n_units = int(unit.max()) + 1
    if n_units < _FEWEST_TO_CHOOSE:
        raise ValueError(
            f"choose='bootstrap' takes {_FEWEST_TO_CHOOSE} distinct pairs, and there are {n_units}: give more, or a "
            "table of edges"
        )
    number = counted(draws, 1, "draws is how many bootstrap samples choose edges")
    estimates = edge_estimates(pairs, method)
    if estimates.units != "pairs":
        raise ValueError(f"choose='bootstrap' draws pairs, and estimates of this task are of {estimates.units}")
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
    """Return a row for each size: of each pair the mean value of the circuits that were chosen without it."""
    found: list[dict[str, Any]] = []
    of_edges = [(row, value) for row, value in zip(rows, values, strict=True) if row["circuit"] == "edges"]
    out = np.stack([evaluated for _, evaluated in choices])  # [draws, pairs]
    known = out.any(0)  # a pair that every sample holds has no value from a circuit chosen without it
    for start in range(0, len(of_edges), len(choices)):
        some = of_edges[start : start + len(choices)]
        values = np.stack([value for _, value in some])
        value = (values * out)[:, known].sum(0) / out[:, known].sum(0)
        first = some[0][0]  # all have as many edges; what else is counted is a mean
        means = {name: float(np.mean([row[name] for row, _ in some])) for name in ("share_expanded", "n_live")}
        means["n_live"] = round(means["n_live"])
        carried = float((value - none[known]).mean() / whole[known].mean())
        found.append({
            "circuit": "procedure", "draw": 0, "share": first["share"], "n_edges": first["n_edges"], **means,
            "value": float(value.mean()), "faithfulness": carried,
        })  # fmt: skip
    return found


def _ranked(graph: Graph, edges: pd.DataFrame, rank: str | None = None) -> Int[np.ndarray, "edges"]:
    """Return all possible edges, as places in the flat mask, the largest effect first.

    With `rank="selected"` the edges of largest `selected` come first. Raises ValueError for other words, and a table
    that lacks what they name.
    """
    if rank not in (None, "selected"):
        raise ValueError(f"rank is 'selected' or None, the size of the estimate; found {shown(rank)}")
    if not isinstance(edges, pd.DataFrame):
        raise ValueError(
            "edges are ranked by a table with sender, receiver and estimate, such as that of edge_effects; found "
            f"{type(edges).__name__}{naming_nodes(edges)}"
        )
    column = "estimate" if "estimate" in edges else "delta"
    if column not in edges:
        raise ValueError("edges have neither estimate nor delta: give a table of edge_effects")
    require(edges, ("sender", "receiver"), "edge_effects", name="table of edges")
    rows, places = graph.places(edges)
    named = pd.DataFrame({"row": rows, "place": places, "effect": edges[column].to_numpy(float)}).drop_duplicates()
    named["sender"] = [graph.senders[place].name for place in named["place"]]
    named["receiver"] = [graph.receivers[row].name for row in named["row"]]
    require_one_row(named, ["sender", "receiver"], "rank edges by one number each", name="table of edges")
    if named["effect"].isna().all():
        raise ValueError(f"no edge of the table has a value in its column {column}: give a table of edge_effects")
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
        raise ValueError("selected is missing: a metric of all prompts at once has no estimate per pair")
    return flat[np.lexsort((-size, -selected.ravel()[flat]))]


def relabelled_circuit(graph: Graph, mask: Mask, rng: np.random.Generator) -> Mask:
    """Return the circuit with the heads of each layer exchanged, groups as a whole: as many of its edges are live."""
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
    """Return random edges, as many between two layers, and of each kind of sender and receiver, as the circuit has."""
    drawn = np.zeros_like(mask)
    of_receivers = [(one.layer, one.input) for one in graph.receivers]
    of_senders = [(one.layer, one.kind) for one in graph.senders]
    rows = pd.factorize(pd.Series(of_receivers))[0]
    places = pd.factorize(pd.Series(of_senders))[0]
    for row in np.unique(rows[mask.any(1)]):
        for place in np.unique(places[mask[rows == row].any(0)]):
            block = np.ix_(rows == row, places == place)
            there = np.argwhere(graph.possible[block])
            chosen = there[rng.permutation(len(there))[: int(mask[block].sum())]]
            inside = np.zeros(graph.possible[block].shape, dtype=bool)
            inside[tuple(chosen.T)] = True
            drawn[block] = inside
    return drawn


def _sizes(graph: Graph, mask: Mask) -> dict[str, Any]:
    """Return how many edges a circuit has, counted in three ways."""
    group = np.array([
        graph.n_heads[one.layer] // graph.n_kv_heads[one.layer] if one.shared else 1 for one in graph.receivers
    ])  # fmt: skip
    return {
        "share": float(mask.sum() / graph.possible.sum()),
        "share_expanded": float(group @ mask.sum(1) / (group @ graph.possible.sum(1))),
        "n_edges": int(mask.sum()),
        "n_live": int(graph.on_a_path(mask).sum()),
    }


def _areas(table: pd.DataFrame) -> dict[str, float]:
    """Return the areas of the curve of the ranked edges, over the share of edges and over its logarithm."""
    table = table.sort_values("share_expanded")
    share, found = table["share_expanded"].to_numpy(), table["faithfulness"].to_numpy()
    areas = {}
    for suffix, x in (("", share), ("_log", np.log10(share))):
        length = x[-1] - x[0] if suffix else 1.0
        for name, y in (("cpr", found), ("cmd", np.abs(1 - found))):
            areas[name + suffix] = float(scipy.integrate.trapezoid(y, x) / length) if len(x) > 1 else float("nan")
    return areas


def _shares(sizes: Any) -> list[float]:
    """Return the shares of all edges that circuits keep. Raises ValueError for what are none."""
    shares = np.asarray(SIZES if sizes is None else sizes)
    if (
        shares.ndim != 1
        or not shares.size
        or shares.dtype.kind not in "iuf"
        or not ((shares > 0) & (shares <= 1)).all()
    ):
        raise ValueError(f"sizes are a list of shares of all edges, above 0 and up to 1; found {shown(sizes)}"[:200])
    return shares.tolist()


def _compare(edges: Any, pairs: Pairs) -> None:
    """Compare what a table of edges says of itself with the model and the pairs that a circuit is run on.

    Raises ValueError for other weights and for effects at positions. Warns of effects that are of another kind than
    the effects of the circuit, and of pairs on which the edges were found.
    """
    if not isinstance(edges, pd.DataFrame):
        return
    if "position" in edges:
        shown = ", ".join(repr(str(one)) for one in edges["position"].unique()[:3])
        raise ValueError(
            f"the table of edges has effects at positions ({shown}), and a circuit keeps an edge at all of them: make "
            "the table without at=. If the edges are meant at all positions, give their names: "
            "list(zip(edges['sender'], edges['receiver']))"
        )
    require_same_model(edges, pairs.view.origin(), "the circuit's model", name="table of edges")
    of_circuit = {"task": pairs.sequences.name, "measure": "task", "replace": "counterfactual"}
    other = {name: edges.attrs[name] for name in of_circuit if edges.attrs.get(name) not in (None, of_circuit[name])}
    if other:
        warn_caller(
            f"the effects in the table of edges are of {_spelled(other)}, and the circuit is of "
            f"{_spelled({name: of_circuit[name] for name in other})}: what matters to one need not matter to the other"
        )
    known = set(edges.attrs.get("pairs_sha256") or ())
    shared = sum(one in known for one in pairs.digests)
    if shared:
        warn_caller(
            f"{shared} of {len(pairs.digests)} pairs are among those on which the edges were found, and of these "
            "the circuit carries more: find edges on one half of task.split(), and evaluate them on the other"
        )


def _spelled(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
