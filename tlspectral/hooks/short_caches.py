"""`cache_prices`: what the loss of later tokens costs, if key/value groups keep a window and the first tokens alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.containers import values as listed_values
from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings, counted
from tlspectral.heads.detectors.heads import sequences_at_once
from tlspectral.hooks.measured_wall import FEWEST_PROMPTS
from tlspectral.hooks.parts import LongRange
from tlspectral.hooks.sweeps.controls import HeadSet, SetControl, set_control
from tlspectral.hooks.sweeps.layer_effects import chosen_sets, group_sets, set_values
from tlspectral.models.hooking.strips import Strip
from tlspectral.models.reading import measured
from tlspectral.models.reading.view import AttentionView, require_causal
from tlspectral.models.running.batches import TOKENS_OF_JOB, PackedTokens, batch_on, filled, in_batches
from tlspectral.models.running.long_prompts import is_long
from tlspectral.models.running.partial_runs import IntactRun, intact_run, share_behind
from tlspectral.models.running.passes import read_patterns
from tlspectral.models.running.prompts import packed_prompts, read_prompts, within
from tlspectral.selection.heads_as_written import Heads
from tlspectral.selection.node_names import group_name, head_name
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import Measurement, stacked
from tlspectral.tables.progress import bar
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks.control_tests import draws_floor
from tlspectral.tasks.identity import sequences_identity
from tlspectral.tasks.metric_value import standard_error
from tlspectral.tasks.metrics import next_token_loss
from tlspectral.tasks.task import Task
from tlspectral.tasks.task_sequences import MetricValues, TaskSequences, metric_value_of, task_sequences

CHOSEN = "least distant attention"
"""Name of the set of groups that `chosen_on=` chooses."""

CACHE_PRICES = Schema(
    "cache_prices",
    columns("""
        window          | token   | Keys that a query still sees, its own token among them, besides the first ones.
        kind            | label   | group: one key/value group alone; set: the groups of a set together.
        layer           | index   | Layer of the group; -1 for a set.
        kv_head         | index   | Number of the group in its layer; -1 for a set.
        name            | label   | Name of the group, such as "L5KV1", or of the set.
        n_groups        | number  | Groups whose distant keys are hidden.
        loss            | nat     | Next-token loss per token behind window and first tokens, mean over rows.
        delta           | nat     | loss less the intact loss of the same tokens.
        delta_se        | nat     | Standard error of delta over distinct rows; NaN for fewer than 8.
        excess          | nat     | delta less that of random sets on the same rows, mean over rows and sets. Below 0
                        |         | the groups cost less than random ones. Of a group: other groups of the layer.
        excess_se       | nat     | Standard error of excess over distinct rows, for these random sets; NaN for fewer
                        |         | than 8.
        excess_p        | probability | (1 + random sets with a delta no larger) / (1 + random sets).
        excess_p_floor  | probability | Smallest excess_p that any set could have beside so many random sets.
        excess_draws    | numbers | delta less that of each random set, mean over rows, in nats.
        excess_draws_se | numbers | Standard error of each of them over distinct rows; NaN for fewer than 8.
        could_differ    | number  | Groups of the set that a random set can exchange: as many groups of each layer, so
                        |         | none of a layer that is in the set as a whole.
    """),
    "`tls.cache_prices`",
)


@checked_settings
def cache_prices(
    model: Any,
    prompts: Any,
    *,
    windows: Any,
    sinks: int = 4,
    groups: bool | Mapping[str, Any] = True,
    chosen_on: Any = None,
    share: float = 0.5,
    draws: int = 39,
    folder: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Measure how much the loss rises if key/value groups keep only the first keys and a window of the last keys.

    >>> import tlspectral as tls, torch
    >>> model = tls.load_model("tiny-rope")
    >>> rows = torch.randint(1, 31, (8, 17), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    >>> table = tls.cache_prices(model, rows, windows=[8], sinks=1)
    >>> table.nlargest(1, "delta")["name"].tolist()
    ['L1KV0']

    Use it to see which groups can have a short cache, and whether a way of choosing groups beats chance. The loss
    counts only tokens whose query would lose a key.

    Args:
        model: TransformerBridge or HookedTransformer, with eager attention. A decoder.
        prompts: rows of text or token ids, in a form of `tls.Task`; standard errors need eight distinct rows or more.
        windows: numbers of last keys that stay visible, the query's own token among them.
        sinks: first tokens that stay visible, the start token among them. Default: 4.
        groups: True (default): each key/value group alone. False: none. A dict {"name": ["L5KV1", ...]}: each set of
            whole groups together ("L5": all groups of a layer; heads must be whole groups).
        chosen_on: other rows; a row that is also in `prompts` is an error. Adds a set for each window: the groups that
            attend least to the keys that would be hidden, on these rows. A group's score is the largest of its heads.
        share: share of all groups that `chosen_on` chooses. Default: half.
        draws: random sets beside each set, with as many groups of each layer. Default: 39, so the smallest p is .025.
        folder: keeps the result of each finished set, random sets too; the same call resumes from it.
        seed: seed of the random sets.

    Returns:
        DataFrame, a row per window and group or set. Columns: `window, kind, layer, kv_head, name, n_groups, loss,
        delta, delta_se, excess, excess_se, excess_p, excess_p_floor, excess_draws, excess_draws_se, could_differ`.

    Raises:
        BadHead, ValueError, TypeError: a group does not exist, a row is too short, or a row is in both `prompts` and
            `chosen_on`.
        EditNotHonored: the model discards the mask. UnsupportedArchitecture: it is an encoder.
        IncompatibleCheckpoint: the folder holds other work, or work under other hooks on the model.

    Not established: a price on other text or lengths, or the joint price of several sets that are each cheap alone. A
    layer has few groups, so the `excess_p` of a single group cannot be small.
    """
    if not isinstance(groups, bool | Mapping):
        raise TypeError(
            f"groups= must be True (each group alone), False, or a dict of sets; found {shown(groups)}: for example "
            'groups={"short": ["L5KV1", "L6KV0"]}'
        )
    sinks = counted(sinks, 0, "sinks is a number of first tokens")
    draws = counted(draws, 1, "draws is a number of random sets")
    sizes = _windows(windows)
    with measured(model) as view:
        require_causal(view, "hidden keys are those before a query")
        given = _given_sets(view, groups) if isinstance(groups, Mapping) and groups else {}
        if not groups and chosen_on is None:
            raise ValueError(f"groups={shown(groups)} prices nothing: give groups=True, a dict of sets, or chosen_on=")
        _require_length(read_prompts(view, prompts).lengths, max(sizes), sinks, "prompts")
        task = Task(prompts, next_token_loss, predict=slice(min(sizes) + sinks, -1), higher_is_better=False)
        sequences = task_sequences(view, task)
        width = sequences.tokens.shape[1]
        tails = {size: replace(sequences, metric=_Tail(width - 1 - size - sinks)) for size in sizes}
        sets = {size: dict(given) for size in sizes}
        if chosen_on is not None:
            for size, chosen in _least_distant(view, chosen_on, sequences, sizes, sinks, share).items():
                sets[size][CHOSEN] = chosen
        measurement = Measurement(
            CACHE_PRICES,
            {"windows": sizes, "sinks": sinks, "draws": draws, "seed": seed},
            origin=view.origin(processing=False),
            identity={
                "weights": view.weights_digest,
                **sequences_identity(sequences, task),
                "tokens_of_job": TOKENS_OF_JOB,
                "groups": groups is True,
                "sets": {str(size): _named(view, of_size) for size, of_size in sets.items()},
            },
            folder=folder,
            score=lambda: metric_value_of(view, sequences).per_sequence,
        )

        def prepared() -> tuple[IntactRun, dict[int, Float64[np.ndarray, "rows"]]]:
            """Run the model once; return the run, and the loss of each row behind each window."""
            losses = {size: MetricValues(tail, 1) for size, tail in tails.items()}

            def add(batch: slice, logits: Tensor) -> None:
                for of_size in losses.values():
                    of_size.add(batch, logits)

            at_once = sequences.rows_at_once(view)
            run = intact_run(view, sequences.tokens, sequences.predicted, view.layers, batch=at_once, reduce=add)
            return run, {size: of_size.result()[0].numpy() for size, of_size in losses.items()}

        controls = {(size, name): set_control(view, heads) for size in sizes for name, heads in sets[size].items()}
        # By window, layer and name: the groups of a layer one by one, or (layer -1) a named set and its random sets.
        hidden: dict[tuple[int, int, str], list[HeadSet]] = {}
        for size in sizes:
            for layer in view.layers if groups is True else ():
                hidden[size, layer, ""] = [_pairs(heads) for heads in group_sets(view, [layer]).values()]
            for name, heads in sets[size].items():
                drawn = controls[size, name].sets(draws, np.random.default_rng([seed, size]))
                hidden[size, -1, name] = [_pairs(heads), *drawn]
        tokens_of_job = TOKENS_OF_JOB if folder is not None else batch_on(view.device).tokens
        jobs: dict[tuple[int, int, str], list[Job]] = {}
        for (size, layer, name), of_rows in hidden.items():
            label = f"window{size}_L{layer}" if layer >= 0 else f"window{size}_set{[*sets[size]].index(name)}"
            share_of_pass = is_long(width) * share_behind(view, min(of_rows[0])[0])  # short rows need no estimate
            jobs[size, layer, name] = [
                Job(
                    f"{label}_{some[0]:03d}",
                    partial(_losses_without, LongRange(size, sinks), tails[size], [of_rows[number] for number in some]),
                    items=len(some),
                    passes=len(some) * share_of_pass,
                )
                for some in filled(dict.fromkeys(range(len(of_rows)), sequences.tokens.numel()), tokens_of_job)
            ]
        tables = measurement.made([*chain(*jobs.values())], description="cache prices", unit="set", prepare=prepared)
        rows: list[dict[str, Any]] = []
        for (size, layer, name), of_rows in jobs.items():
            made = stacked([tables[job.name] for job in of_rows])
            losses, deltas = (made[column].to_numpy().reshape(-1, len(sequences.tokens)) for column in made)
            if layer >= 0:
                described = _groups_alone(layer, losses, deltas, sequences.distinct)
            else:
                described = [_set_together(name, controls[size, name], losses, deltas, sequences.distinct)]
            rows += [{"window": size, **row} for row in described]
        return measurement.table(
            pd.DataFrame(rows),
            sets={str(size): _named(view, of_size) for size, of_size in sets.items() if of_size},
            **sequences.recorded(view),
        )


@dataclass(frozen=True)
class _Tail:
    """Metric: the next-token loss of the last `n` predictions of each row, in nats per token."""

    n: int

    def __call__(
        self,
        logits: Float[Tensor, "rows predicted d_vocab"],
        tokens: Int[Tensor, "rows pos"],
        mask: Bool[Tensor, "rows pos"],
    ) -> Float64[Tensor, "rows"]:
        """Return the loss of each row; `mask` is True for real tokens."""
        return next_token_loss(logits[:, -self.n :], tokens, mask)


def _losses_without(
    part: LongRange,
    rows: TaskSequences,
    sets: list[HeadSet],
    prepared: tuple[IntactRun, dict[int, Float64[np.ndarray, "rows"]]],
) -> pd.DataFrame:
    """Return each prompt's `loss` while a set of heads sees no far keys, and `delta`, this loss less the intact loss.

    The table has a row per set and prompt, sorted by set. `part` hides the keys. `rows` are the prompts; their metric
    is the loss of tokens after the window. `prepared` is a pair: the intact run, and its losses by window.
    """
    intact, losses = prepared
    values = set_values(part, rows, sets, intact).numpy()
    return pd.DataFrame({"loss": values.ravel(), "delta": (values - losses[part.window]).ravel()})


def _groups_alone(
    layer: int,
    losses: Float64[np.ndarray, "groups rows"],
    deltas: Float64[np.ndarray, "groups rows"],
    distinct: Int[np.ndarray, "rows"] | None,
) -> list[dict[str, Any]]:
    """Return the rows of the table for each group of a layer alone, beside the layer's other groups.

    `deltas` are changes of `losses`; `distinct` says which prompts are equal.
    """
    return [
        {"kind": "group", "layer": layer, "kv_head": group, "name": group_name(layer, group), "n_groups": 1,
         "loss": losses[group].mean(), "could_differ": int(len(deltas) > 1),
         **_beside(deltas[group], np.delete(deltas, group, axis=0), distinct)}
        for group in range(len(deltas))
    ]  # fmt: skip


def _set_together(
    name: str,
    control: SetControl,
    losses: Float64[np.ndarray, "sets rows"],
    deltas: Float64[np.ndarray, "sets rows"],
    distinct: Int[np.ndarray, "rows"] | None,
) -> dict[str, Any]:
    """Return the row of the table for a set of groups together, beside its random sets.

    `control` is the source of the random sets. The first of `losses` and `deltas` belongs to the set, the others to the
    random sets; `distinct` says which prompts are equal.
    """
    could_differ = sum(min(len(some), control.of_layer[layer] - len(some)) for layer, some in control.chosen.items())
    return {"kind": "set", "layer": -1, "kv_head": -1, "name": name,
            "n_groups": sum(map(len, control.chosen.values())), "loss": losses[0].mean(), "could_differ": could_differ,
            **_beside(deltas[0], deltas[1:], distinct)}  # fmt: skip


def _beside(
    delta: Float64[np.ndarray, "rows"],
    others: Float64[np.ndarray, "draws rows"],
    distinct: Int[np.ndarray, "rows"] | None,
) -> dict[str, Any]:
    """Return the columns that compare an effect with those of random sets, paired by row.

    `delta` is the change of each row's loss, `others` that of each random set, `distinct` says which rows are equal.
    """
    n_distinct = len(delta) if distinct is None else int(distinct.max()) + 1

    def error(values: Float64[np.ndarray, "rows"]) -> float:
        return standard_error(values, distinct) if n_distinct >= FEWEST_PROMPTS else float("nan")

    paired, n = delta - others, len(others)
    return {
        "delta": delta.mean(),
        "delta_se": error(delta),
        "excess": paired.mean() if n else np.nan,
        "excess_se": error(paired.mean(0)) if n else np.nan,
        "excess_p": (1 + int((others.mean(1) <= delta.mean()).sum())) / (1 + n) if n else np.nan,
        "excess_p_floor": draws_floor(n),
        "excess_draws": paired.mean(1).tolist(),
        "excess_draws_se": [error(one) for one in paired],
    }


def _windows(given: Any) -> list[int]:
    """Return `windows=` as a sorted list of whole numbers without duplicates. Raises ValueError or TypeError."""
    listed = listed_values(given)
    sizes = [counted(size, 1, "a window is a number of keys") for size in ([given] if listed is None else listed)]
    if not sizes:
        raise ValueError("windows=[] prices nothing: give numbers of keys, such as windows=[64, 256]")
    return sorted({*sizes})


def _require_length(lengths: Int[Tensor, "rows"], window: int, sinks: int, name: str) -> None:
    """Raise ValueError if a row has no scored token: none of its queries loses a key and predicts a token.

    `lengths` are tokens of each row, `name` is the argument, for the message.
    """
    least, row = window + sinks + 2, int(lengths.argmin())
    if int(lengths[row]) < least:
        raise ValueError(
            f"{name}: row {row} has {int(lengths[row])} tokens, and behind a window of {window} and {sinks} first "
            f"tokens nothing of it is predicted: give rows of {least} tokens or more, or smaller windows"
        )


def _pairs(by_layer: Mapping[int, Sequence[int]]) -> HeadSet:
    """Return heads by layer as a list of (layer, head)."""
    return [(layer, head) for layer, heads in by_layer.items() for head in heads]


def _named(view: AttentionView, sets: Mapping[str, dict[int, list[int]]]) -> dict[str, list[str]]:
    """Return the names of the groups of each set, such as "L5KV1". `sets` are query heads by layer of whole groups."""
    return {
        name: list(
            dict.fromkeys(group_name(layer, head // view.heads_per_group(layer)) for layer, head in _pairs(heads))
        )
        for name, heads in sets.items()
    }


def _given_sets(view: AttentionView, groups: Mapping[str, Heads]) -> dict[str, dict[int, list[int]]]:
    """Return the sets of groups that a user gave, as query heads by layer. `view` is the model.

    Raises BadHead for a group that does not exist, ValueError for an empty set or heads that are part of a group.
    """
    found = chosen_sets(view, groups)
    for name, by_layer in found.items():
        for layer, heads in by_layer.items():
            size = view.heads_per_group(layer)
            part = [head for head in heads if sum(other // size == head // size for other in heads) < size]
            if part:
                group = group_name(layer, part[0] // size)
                raise ValueError(
                    f"the set {shown(name)} has {head_name(layer, part[0])}, a part of {group}, whose heads share one "
                    f'cache: give whole groups, such as "{group}"'
                )
    return {str(name): by_layer for name, by_layer in found.items()}


def _least_distant(
    view: AttentionView,
    chosen_on: Any,
    priced: TaskSequences,
    sizes: list[int],
    sinks: int,
    share: float,
) -> dict[int, dict[int, list[int]]]:
    """Return for each window the groups with the least attention to keys outside of it and of the first tokens.

    A group's attention is the largest of its heads', mean over the queries of the rows `chosen_on` that have such keys.
    `priced` are the rows that are priced. Raises ValueError if a row is in both, or a row is too short.
    """
    rows = packed_prompts(view, chosen_on)
    _require_length(rows.lengths, max(sizes), sinks, "chosen_on")
    if bool(within(view, rows, priced).any()) or bool(within(view, priced, rows).any()):
        raise ValueError(
            "chosen_on= has a row of prompts=: groups are chosen on rows that price nothing; give other rows"
        )
    every = [*group_sets(view, view.layers).values()]
    n = round(share * len(every))
    if not 0 < n < len(every):
        raise ValueError(f"share={share} of {len(every)} groups is none or all of them: give a share between 0 and 1")
    mass = _distant_attention(view, rows, sizes, sinks)
    chosen: dict[int, dict[int, list[int]]] = {size: {} for size in sizes}
    for size in sizes:
        distant = [max(mass[pair][size] for pair in _pairs(group)) for group in every]
        for place in sorted(np.argsort(distant, kind="stable")[:n].tolist()):
            for layer, heads_of_group in every[place].items():
                chosen[size].setdefault(layer, []).extend(heads_of_group)
    return chosen


def _distant_attention(
    view: AttentionView, rows: PackedTokens, sizes: list[int], sinks: int
) -> dict[tuple[int, int], dict[int, float]]:
    """Return the attention of each head to keys outside of each window and of the first tokens, by (layer, head).

    The inner dict is by window. A value is a mean over the rows, and in a row over the queries that have such keys.
    """
    total: dict[int, Tensor] = {}  # by layer, [windows, rows, heads]

    def add(batch: slice, layer: int, pattern: Tensor, strip: Strip) -> None:
        # Attention to the keys up to each key. Sums of half precision would lose small weights.
        upto = pattern.detach().float().cumsum(-1)
        # The first queries of a prompt may come in a strip with fewer keys than there are sinks; they do not count.
        before = upto[..., min(sinks, strip.n_keys) - 1] if sinks else torch.zeros_like(upto[..., 0])
        query = torch.arange(strip.start, strip.stop, device=upto.device)
        real = rows.real[batch, None, strip.queries].to(upto.device)
        of_windows = []
        for size in sizes:
            last = (query - size).clamp_min(0).expand(*upto.shape[:-1])[..., None]
            distant = upto.gather(-1, last)[..., 0] - before
            counted = real & (query - size >= sinks)
            of_windows.append(distant.masked_fill(~counted, 0.0).sum(-1).cpu().double())
        values = torch.stack(of_windows)
        if layer not in total:
            total[layer] = torch.zeros(len(sizes), len(rows.tokens), values.shape[-1], dtype=torch.float64)
        if strip.is_first:  # a batch that ran out of memory runs again
            total[layer][:, batch] = 0.0
        total[layer][:, batch] += values

    def run(batch: slice) -> int:
        read_patterns(view, rows.tokens[batch], view.layers, partial(add, batch))
        return batch.stop - batch.start

    n_rows, width = rows.tokens.shape
    with bar(n_rows, "distant attention", "seq") as shown:
        for done in in_batches(n_rows, sequences_at_once(view, width), run):
            shown.update(done)
    n_queries = rows.lengths - torch.tensor(sizes)[:, None] - sinks
    means = {layer: (sums / n_queries[..., None]).mean(1) for layer, sums in total.items()}
    return {
        (layer, head): dict(zip(sizes, by_window.tolist(), strict=True))
        for layer, of_layer in means.items()
        for head, by_window in enumerate(of_layer.T)
    }
