"""`sufficient_heads`: a small set of heads that keeps an answer, chosen by learned gates and judged on other pairs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64

from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings, counted
from tlspectral.hooks.circuits.carried import carried_interval, require_gap
from tlspectral.hooks.sufficient.gate_training import STEPS, largest, trained_gates
from tlspectral.hooks.sufficient.gated_runs import GatedRuns, gated_runs
from tlspectral.hooks.sufficient.shared_pairs import folds_by_answer, require_apart, rows_of
from tlspectral.hooks.sweeps.controls import SETS, sets_apart
from tlspectral.models.reading import measured
from tlspectral.models.reading.view import AttentionView
from tlspectral.selection.node_names import head_name
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.progress import announce
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks import Task
from tlspectral.tasks.control_tests import draws_floor
from tlspectral.tasks.identity import sequences_identity
from tlspectral.tasks.metric_value import standard_error
from tlspectral.tasks.task import task_of
from tlspectral.tasks.task_sequences import TaskSequences, metric_value_from, metric_value_of, task_sequences

_NEAR_ONE = 0.1  # a set is sufficient if |1 - kept| is at most this

SUFFICIENT_HEADS = Schema(
    "sufficient_heads",
    (
        *HEAD,
        *columns("""
            gate            | share         | The head's gate in the fit that chose the set: 1 keeps its own write, 0
                            |               | replaces it by its write on the pair (without pairs: its mean write, or
                            |               | 0).
            chosen          | flag          | True for the heads of the set.
            selected        | share         | Share of all fits (penalties, starts, folds) in which the gate is among
                            |               | the n largest.
            leaves_delta    | of the metric | Value of the set without this head, less the value of the set. Mean over
                            |               | the held pairs (without held=: the pairs of task). NaN for other heads.
            leaves_delta_se | of the metric | Standard error of leaves_delta over pairs.
            delta           | of the metric | Value of the model with this head alone replaced, less the intact value.
                            |               | Mean over the pairs of task.
            delta_se        | of the metric | Standard error of delta over pairs.
            estimate        | of the metric | First-order estimate of delta (attribution patching).
        """),
    ),
    "`tls.sufficient_heads`",
)


@checked_settings
def sufficient_heads(
    model: Any,
    task: Task,
    held: Task | None = None,
    *,
    n: int = 5,
    sizes: Sequence[int] | None = None,
    penalties: Sequence[float] = (0.003, 0.01, 0.03),
    starts: int = 3,
    draws: int = SETS,
    folder: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Find n heads that keep an answer while all other heads write what they write on the paired prompt.

    Learned gates choose the set on `task`. `held`, pairs that share no answer and no template with `task`, judges the
    set.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> prompts, pairs = ([[1, k, v, 7, k] for k in (2, 3, 4, 5)] for v in (6, 8))
    >>> task = tls.logit_difference(prompts, 6, 8, counterfactual=pairs)
    >>> table = tls.sufficient_heads(model, task, n=2, starts=1, draws=3)
    >>> table.loc[table["chosen"], "name"].tolist()
    ['L1H2', 'L1H3']

    Args:
        model: TransformerBridge or HookedTransformer.
        task: a `Task` with `counterfactual=`. Without pairs, heads outside the set write their mean over the prompts at
            the same position, or 0 if prompts differ in length.
        held: at least eight other pairs. Columns `answer` and `template` of its labels replace the token-based check.
        n: heads in the set. sizes: further sizes, cut from the same gates, for `attrs["sets"]`.
        penalties: prices per open gate; a fit for each, from each of `starts` random starts. The fit with the smallest
            |1 - kept| on `task`, after the cut to n heads, chooses the set.
        draws: random sets with as many heads in the same layers, leaving out the chosen heads where the layer has
            others.
        folder: keeps finished fits; the same call resumes from it. seed: of starts and random sets.

    Returns:
        DataFrame, a row per head. Columns: `layer, head, name, gate, chosen, selected, leaves_delta, leaves_delta_se,
        delta, delta_se, estimate`. `attrs`: `heads`; with held `kept` (share of the gap that the set keeps), `low`,
        `high`, `unseen`, `worst`, `verdict`, `held_pairs`; without held `kept_procedure` (folds by answer). `fits` and
        `sets` list all fits, and the set of each size beside random sets, single effects, EAP and its complement.

    Raises:
        ValueError: held pairs share an answer or a template with `task`; the gap between all heads and no head is too
            small; the metric has no gradient; or a setting does not fit.
        EditNotHonored, UnsupportedArchitecture: gates do not act in this model.
        IncompatibleCheckpoint: the folder holds other work.

    Not established: that the set is the only one, or the smallest: it is *a* small set. It holds one of several heads
    that replace each other. MLPs and embeddings are always kept. More: docs/circuits.md
    """
    n = counted(n, 1, "n is how many heads the set has")
    starts = counted(starts, 1, "starts is how many random starts each penalty gets")
    draws = counted(draws, 1, "draws is how many random sets the set is compared with")
    prices = _prices(penalties)
    with measured(model) as view, torch.no_grad():
        chosen_task = task_of(task)
        fit = task_sequences(view, chosen_task)
        judged = None if held is None else task_sequences(view, task_of(held))
        if judged is not None:
            require_apart(view, fit, judged)
        cuts = _cuts(n, sizes, sum(view.n_heads(layer) for layer in view.layers))
        work = _Work(view, fit, judged, n, cuts, prices, starts, draws, seed)
        announce(work.cost())
        measurement = Measurement(
            SUFFICIENT_HEADS,
            {"task": fit.name, "n": n, "penalties": prices, "starts": starts, "draws": draws, "seed": seed},
            origin=view.origin(),
            identity={
                "weights": view.weights_digest,
                "fit": sequences_identity(fit, chosen_task),
                "held": None if judged is None or held is None else sequences_identity(judged, task_of(held)),
                "sizes": cuts,
                "steps": STEPS,
            },
            folder=folder,
            score=lambda: metric_value_of(view, fit).per_sequence,
        )
        for runs in (work.runs(0), work.judging):
            require_gap(runs.sequences, runs.every.values, runs.none.values, ("with all heads", "with none"))
        gates = _Gates(measurement.made(work.fits(), description="gates", unit="fit"), prices, starts)
        cut = measurement.made(work.cut_jobs(gates), description="sets of all fits", unit="fold")
        effects = measurement.first(Job("effects", work.effects))
        found = _Found(work, gates, cut)
        sets = measurement.first(Job("sets", partial(work.judged_sets, found, effects)))
        return measurement.table(
            _head_rows(work, gates, found, effects, sets),
            n_pairs=len(fit.tokens),
            n_held=None if judged is None else len(judged.tokens),
            replace=work.runs(0).replace,
            tokens_sha256=fit.digest,
            **fit.noted,
            **_attrs(work, gates, found, sets),
        )


def _prices(penalties: Any) -> list[float]:
    """Return `penalties` as a list of numbers. Raises ValueError unless all are positive."""
    prices = np.asarray(penalties, dtype=object).ravel().tolist()
    if not prices or not all(isinstance(price, int | float) and 0 < price < np.inf for price in prices):
        raise ValueError(
            f"penalties= must be a list of positive numbers, such as (0.003, 0.01); found {shown(penalties)}"
        )
    return [float(price) for price in prices]


def _cuts(n: int, sizes: Any, n_heads: int) -> list[int]:
    """Return all sizes of sets, ascending: `sizes` and n. Raises ValueError for a size that the model does not have."""
    cuts = {n, *(counted(size, 1, "an entry of sizes is how many heads a set has") for size in sizes or ())}
    if max(cuts) >= n_heads:
        raise ValueError(f"a set has fewer heads than the model, which has {n_heads}; found n= or sizes= {max(cuts)}")
    return sorted(cuts)


@dataclass(frozen=True)
class _Work:
    """What one call of `sufficient_heads` measures, and its jobs.

    Attributes:
        view: the model.
        fit: the pairs that train gates.
        judged: the held pairs; None without.
        n: heads in the set.
        cuts: all sizes of sets, ascending.
        prices: penalties per open gate.
        starts: random starts for each penalty.
        draws: random sets of each size.
        seed: seed of starts and random sets.
    """

    view: AttentionView
    fit: TaskSequences
    judged: TaskSequences | None
    n: int
    cuts: list[int]
    prices: list[float]
    starts: int
    draws: int
    seed: int

    @cached_property
    def folds(self) -> list[tuple[Any, Any]]:
        """List of (rows that train, rows that judge): all rows, then the folds by answer unless `held` is given."""
        every = np.arange(len(self.fit.tokens))
        return [(every, every[:0]), *([] if self.judged is not None else folds_by_answer(self.fit))]

    @cached_property
    def _made(self) -> dict[Any, GatedRuns]:
        return {}

    def runs(self, fold: int | str, side: int = 0) -> GatedRuns:
        """Return the runs on the pairs that train (side 0) or judge (side 1) a fold, or on the held pairs ("held")."""
        if (fold, side) not in self._made:
            sequences = self.fit if fold == 0 else self.judged if fold == "held" else None
            if sequences is None:
                sequences = rows_of(self.fit, self.folds[int(fold)][side])
            self._made[fold, side] = gated_runs(self.view, sequences)
        return self._made[fold, side]

    @property
    def judging(self) -> GatedRuns:
        """The runs that judge sets: on the held pairs, or without them on the pairs of the task."""
        return self.runs(0 if self.judged is None else "held")

    def cost(self) -> str:
        """Return a line on the number of passes, and on a CPU the seconds that they will take, roughly."""
        n_fits, n_heads = len(self.prices) * self.starts, sum(map(self.view.n_heads, self.view.layers))
        trained = sum(len(rows) for rows, _ in self.folds) * n_fits * STEPS
        judging = self.fit if self.judged is None else self.judged
        cut = sum(len(rows) for rows, _ in self.folds) * n_fits * len(self.cuts)
        tried = len(judging.tokens) * (len(self.cuts) * (self.draws + 4) + self.n + n_fits)
        text = (
            f"sufficient_heads: {n_fits * len(self.folds)} fits of {STEPS} steps, {trained:,} passes of a pair forward "
            f"and backward; {cut + tried + n_heads * len(self.fit.tokens):,} passes forward"
        )
        if self.view.device.type != "cpu":
            return text
        # A backward pass in the gates alone costs as much as a forward pass; runs begin at their first changed layer.
        passes = 2 * trained + 0.5 * (cut + tried + n_heads * len(self.fit.tokens))
        calls = 2 * STEPS * len(self.prices) * len(self.folds) * self.view.n_layers * _LAYER_SECONDS
        return f"{text}; about {_rounded(calls + passes * _pass_seconds(self.view, self.fit))} CPU seconds"

    def fits(self) -> list[Job]:
        """Return the jobs that train gates, one for each fold and penalty, with all starts in one batch."""

        def train(fold: int, place: int) -> pd.DataFrame:
            seeds = [[self.seed, place, start, fold] for start in range(self.starts)]
            gates = trained_gates(self.runs(fold), self.prices[place], seeds)
            return pd.DataFrame({f"start{start}": row for start, row in enumerate(gates)})

        return [
            Job(f"fit_{fold}_{place}", partial(train, fold, place), items=self.starts)
            for fold in range(len(self.folds))
            for place in range(len(self.prices))
        ]

    def cut_jobs(self, gates: _Gates) -> list[Job]:
        """Return the jobs that cut the gates of each fold to every size, and measure these sets on the fold's pairs."""

        def cut(fold: int) -> pd.DataFrame:
            sets = np.concatenate([largest(gates.of_fold(fold), size) for size in self.cuts])
            runs = self.runs(fold)
            kept = _kept(runs, runs.values(sets))
            table = pd.DataFrame({"size": np.repeat(self.cuts, gates.n_fits), "kept": kept})
            if not fold:
                return table
            # The set that this fold would return, on the pairs that it has not seen.
            own = gates.of_fold(fold)[int((1 - table.loc[table["size"] == self.n, "kept"]).abs().argmin())]
            test = self.runs(fold, 1)
            value = test.values(largest(own, self.n)[None])[0]
            table.attrs = {
                "carried": float((value - test.none.values).sum()),
                "whole": float((test.every.values - test.none.values).sum()),
            }
            return table

        return [Job(f"cut_{fold}", partial(cut, fold)) for fold in range(len(self.folds))]

    def effects(self) -> pd.DataFrame:
        """Replace every head alone; return its effect `delta` with `delta_se`, and the first-order `estimate`."""
        runs, n = self.runs(0), len(self.runs(0).heads)
        deltas = runs.values(~np.eye(n, dtype=bool)) - runs.every.values
        _, slopes = runs.slopes(torch.ones(1, n, device=self.view.device))
        return pd.DataFrame({
            "delta": deltas.mean(1),
            "delta_se": [standard_error(delta, runs.sequences.distinct) for delta in deltas],
            "estimate": -slopes[0].numpy(),
        })  # fmt: skip

    def judged_sets(self, found: _Found, effects: pd.DataFrame) -> pd.DataFrame:
        """Measure sets on the judging pairs; return a row per set with its value on each pair, and both ends.

        The columns are `set` (learned, single effects, EAP, complement, random, leaves, fit, all, none), `n`, `draw`
        (number of the random set, head left out, or fit), `heads` (indices) and `values`. `effects` are the effects of
        single heads on the task.
        """
        runs = self.judging
        sign = np.sign(self.runs(0).every.values.mean() - self.runs(0).none.values.mean())
        rows: list[tuple[str, int, int, Bool[np.ndarray, "heads"]]] = []
        for size in self.cuts:
            own = found.set_of(size)
            rows.append(("learned", size, 0, own))
            rows.append(("complement", size, 0, ~own))
            for name, column in (("single effects", "delta"), ("EAP", "estimate")):
                rows.append((name, size, 0, largest(-sign * effects[column].to_numpy(float), size)))
            rows += [("random", size, draw, drawn) for draw, drawn in enumerate(self._random(own, size))]
        own = found.set_of(self.n)
        for head in np.flatnonzero(own):
            without = own.copy()
            without[head] = False
            rows.append(("leaves", self.n, int(head), without))
        rows += [("fit", self.n, number, other) for number, other in enumerate(largest(found.gates.of_fold(0), self.n))]
        values = runs.values(np.stack([kept for *_, kept in rows]))
        whole = [("all", runs.every.values), ("none", runs.none.values)]
        return pd.DataFrame({
            "set": [*(name for name, *_ in rows), *(name for name, _ in whole)],
            "n": [*(size for _, size, *_ in rows), len(runs.heads), 0],
            "draw": [*(draw for _, _, draw, _ in rows), 0, 0],
            "heads": [*(np.flatnonzero(kept).tolist() for *_, kept in rows), [], []],
            "values": [*values.tolist(), *(ends.tolist() for _, ends in whole)],
        })  # fmt: skip

    def _random(self, own: Bool[np.ndarray, "heads"], size: int) -> list[Bool[np.ndarray, "heads"]]:
        """Return random sets with as many heads in each layer as the set `own`, without its heads where possible."""
        heads = self.runs(0).heads
        by_layer: dict[int, list[int]] = {}
        for place in np.flatnonzero(own):
            by_layer.setdefault(heads[place][0], []).append(heads[place][1])
        n_heads = {layer: self.view.n_heads(layer) for layer in by_layer}
        drawn = sets_apart(n_heads, by_layer, self.draws, np.random.default_rng([self.seed, size]))
        return [np.array([head in of_set for head in heads]) for of_set in map(set, drawn)]


def _kept(runs: GatedRuns, values: Float64[np.ndarray, "sets pairs"]) -> Float64[np.ndarray, "sets"]:
    """Return the share of the gap between all heads and no head that each set keeps, by its values of each pair."""
    whole, none = runs.every.values.mean(), runs.none.values.mean()
    return (values.mean(1) - none) / (whole - none)


@dataclass(frozen=True)
class _Gates:
    """The trained gates of all fits.

    Attributes:
        tables: tables of the jobs that trained them, by name.
        prices: penalties per open gate.
        starts: random starts for each penalty.
    """

    tables: dict[str, pd.DataFrame]
    prices: list[float]
    starts: int

    @property
    def n_fits(self) -> int:
        """Number of fits in each fold."""
        return len(self.prices) * self.starts

    def of_fold(self, fold: int) -> Float64[np.ndarray, "fits heads"]:
        """Return the gates of all fits of a fold: all starts of the first penalty, then of the second, and so on."""
        tables = [self.tables[f"fit_{fold}_{place}"] for place in range(len(self.prices))]
        return np.concatenate([table.to_numpy(float).T for table in tables])


@dataclass(frozen=True)
class _Found:
    """The sets that the gates choose on the task.

    Attributes:
        work: the call.
        gates: the gates of all fits.
        cut: tables of the jobs that cut them, by name.
    """

    work: _Work
    gates: _Gates
    cut: dict[str, pd.DataFrame]

    def kept(self, size: int, fold: int = 0) -> Float64[np.ndarray, "fits"]:
        """Return the share that the set of each fit keeps on the pairs that trained it."""
        table = self.cut[f"cut_{fold}"]
        return table.loc[table["size"] == size, "kept"].to_numpy(float)

    def best(self, size: int) -> int:
        """Return the number of the fit whose set of this size has the smallest |1 - kept|."""
        return int(np.abs(1 - self.kept(size)).argmin())

    def set_of(self, size: int) -> Bool[np.ndarray, "heads"]:
        """Return the set of a size as a mask over heads."""
        return largest(self.gates.of_fold(0)[self.best(size)], size)

    @property
    def selected(self) -> Float64[np.ndarray, "heads"]:
        """Share of all fits in which a head is among the n largest gates."""
        folds = range(len(self.work.folds))
        return np.concatenate([largest(self.gates.of_fold(fold), self.work.n) for fold in folds]).mean(0)


def _head_rows(work: _Work, gates: _Gates, found: _Found, effects: pd.DataFrame, sets: pd.DataFrame) -> pd.DataFrame:
    """Return the table of heads without attrs: gates, choice, and effects of leaving heads out."""
    heads, own = work.runs(0).heads, found.set_of(work.n)
    table = pd.DataFrame(heads, columns=["layer", "head"])
    table["gate"] = gates.of_fold(0)[found.best(work.n)]
    table["chosen"], table["selected"] = own, found.selected
    table["leaves_delta"], table["leaves_delta_se"] = np.nan, np.nan
    value = _values(sets, "learned", work.n)[0]
    leaves = sets[sets["set"] == "leaves"]
    for place, without in zip(leaves["draw"], leaves["values"], strict=True):
        change = np.array(without) - value
        table.loc[place, ["leaves_delta", "leaves_delta_se"]] = (
            change.mean(), standard_error(change, work.judging.sequences.distinct),
        )  # fmt: skip
    return table.assign(**{name: effects[name].to_numpy(float) for name in effects})


def _values(sets: pd.DataFrame, name: str, size: int) -> Float64[np.ndarray, "sets pairs"]:
    """Return the values of each pair in the sets of a kind and size."""
    rows = sets[(sets["set"] == name) & (sets["n"] == size)]
    return np.array(rows["values"].tolist(), dtype=float).reshape(len(rows), len(sets["values"].iloc[0]))


def _attrs(work: _Work, gates: _Gates, found: _Found, sets: pd.DataFrame) -> dict[str, Any]:
    """Return the attrs of the table: the share that the set keeps, its interval, all fits, and sets of all sizes."""
    names = [head_name(*head) for head in work.runs(0).heads]
    whole, none = (_values(sets, end, size)[0] for end, size in (("all", len(names)), ("none", 0)))
    key = "kept_training" if work.judged is None else "kept"

    def share(value: Float64[np.ndarray, "*sets pairs"]) -> Any:
        return ((value - none).mean(-1) / (whole - none).mean()).tolist()

    of_fits = share(_values(sets, "fit", work.n))
    opened = [{
        "fold": fold, "penalty": gates.prices[number // work.starts], "start": number % work.starts,
        "kept_training": float(kept), "open": int((gates.of_fold(fold)[number] > 0.5).sum()),
        "heads": [names[place] for place in np.flatnonzero(largest(gates.of_fold(fold)[number], work.n))],
        **({"kept": of_fits[number]} if work.judged is not None else {}),
    } for fold in range(len(work.folds)) for number, kept in enumerate(found.kept(work.n, fold))]  # fmt: skip
    rows: list[dict[str, Any]] = []
    for size in work.cuts:
        [own] = _values(sets, "learned", size)
        drawn = share(_values(sets, "random", size))
        for name in ("learned", "single effects", "EAP", "complement"):
            [value] = _values(sets, name, size)
            places = sets.loc[(sets["set"] == name) & (sets["n"] == size), "heads"].iloc[0]
            listed = [] if name == "complement" else [names[int(place)] for place in places]
            row: dict[str, Any] = {"set": name, "n": size, "heads": listed, "value": float(value.mean())}
            row |= {"value_se": standard_error(value, work.judging.sequences.distinct), key: share(value)}
            if work.judged is not None:
                row |= carried_interval(work.judged, value, whole, none)
            rows.append(row)
        row = {"set": "random", "n": size, "heads": [], key: float(np.mean(drawn)) if drawn else None, "draws": drawn}
        if work.judged is not None:
            near = sum(abs(1 - other) <= abs(1 - share(own)) for other in drawn)
            pvalue = (1 + near) / (1 + len(drawn)) if drawn else float("nan")
            row |= {"p": pvalue, "p_floor": draws_floor(len(drawn))}
        rows.append(row)
    attrs: dict[str, Any] = {
        "heads": [names[place] for place in np.flatnonzero(found.set_of(work.n))],
        "value_all": float(whole.mean()),
        "value_none": float(none.mean()),
        "kept_training": float(found.kept(work.n)[found.best(work.n)]),
        "fits": opened,
        "sets": rows,
    }
    return attrs | (_procedure(work, found) if work.judged is None else _verdict(work, sets, whole, none))


def _verdict(
    work: _Work, sets: pd.DataFrame, whole: Float64[np.ndarray, "pairs"], none: Float64[np.ndarray, "pairs"]
) -> dict[str, Any]:
    """Judge the set on the held pairs: return `kept` with its interval, the verdict, and each pair."""
    assert work.judged is not None
    [value] = _values(sets, "learned", work.n)
    kept = float((value - none).mean() / (whole - none).mean())
    near = abs(1 - kept) <= _NEAR_ONE
    texts = metric_value_from(work.view, work.judged, value).texts or ()
    pairs = [
        {
            "prompt": text,
            "value": own,
            "value_all": of_all,
            "value_none": closed,
            "kept": _ratio(own - closed, of_all - closed),
        }
        for text, own, of_all, closed in zip(texts, value.tolist(), whole.tolist(), none.tolist(), strict=True)
    ]
    return {
        "kept": kept,
        **carried_interval(work.judged, value, whole, none),
        "verdict": "sufficient" if near else "overshoots" if kept > 1 else "not sufficient",
        "held_pairs": pairs,
    }


def _procedure(work: _Work, found: _Found) -> dict[str, Any]:
    """Return `kept_procedure`: the share that sets keep which were chosen without the answers of the judged pairs.

    None if the task has no folds by answer.
    """
    folds = [found.cut[f"cut_{fold}"].attrs for fold in range(1, len(work.folds))]
    whole = sum(fold["whole"] for fold in folds)
    kept = sum(fold["carried"] for fold in folds) / whole if folds and whole else None
    return {"kept": None, "verdict": "not judged: give held=", "kept_procedure": kept, "folds": len(folds)}


def _ratio(part: float, whole: float) -> float:
    """Return part / whole, NaN for a whole of 0."""
    return part / whole if whole else float("nan")


def _pass_seconds(view: AttentionView, sequences: TaskSequences) -> float:
    """Return about how many CPU seconds a forward pass of one pair takes.

    It follows from the number of weights, the positions behind the first difference of the pairs, and the time of one
    matrix product of this model's width. No pass is run.
    """
    weights = sum(parameter.numel() for block in view.blocks for parameter in block.module.parameters())
    other, width = sequences.counterfactual, sequences.tokens.shape[1]
    differs = None if other is None else (sequences.tokens != other.tokens).any(0)
    first = 0 if differs is None or not differs.any() else int(differs.float().argmax())
    products = weights * (width - first) + view.d_vocab * view.d_model * sequences.n_predicted
    left, right = torch.ones(64, view.d_model), torch.ones(view.d_model, 4 * view.d_model)
    _ = left @ right  # the first product is slower
    began = time.process_time()
    for _ in range(_PRODUCTS):
        _ = left @ right
    of_product = (time.process_time() - began) / (_PRODUCTS * left.numel() * right.shape[1])
    return _OVERHEAD * products * of_product


_PRODUCTS = 8  # timed matrix products
_OVERHEAD = 1.7  # measured: time of a pass over the time of its products
_LAYER_SECONDS = 2e-3  # measured: time of the Python code of a layer, in a pass of any size


def _rounded(seconds: float) -> str:
    """Return a number of seconds as text with two significant digits."""
    return f"{float(f'{seconds:.1e}'):,.0f}" if seconds >= 10 else f"{seconds:.1f}"
