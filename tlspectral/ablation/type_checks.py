"""`check_head_types`: what removing the heads of a type costs where it should matter and where it should not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor
from tqdm.auto import tqdm

from tlspectral.ablation.columns import CHECK_HEAD_TYPES
from tlspectral.ablation.effects import replayed_scores
from tlspectral.heads.same_model import require_table_of
from tlspectral.heads.types.retrieval import planted_facts
from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.hooks.replacement import Replace, Replacement, from_reference
from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.attention.replay import IntactRun
from tlspectral.models.attention.selection import heads_by_layer
from tlspectral.models.text import packaged_text, text_tokens
from tlspectral.selection import head_name
from tlspectral.tables import named
from tlspectral.tables.required import require
from tlspectral.tasks import (
    ScoredSequences,
    Task,
    induction,
    intact_values,
    language,
    scored_sequences,
    standard_error,
)

HEADS = 4
"""Heads of a type that are removed: few, so that as many random heads do not cost all that a task is worth."""
LEVEL = 0.05
SEQUENCES, REFERENCE, LENGTH = 16, 32, 32


class Expectation(NamedTuple):
    """What removing heads of a type is expected to cost on a task, beside random heads of the same layers.

    `cost` is "more" or "less" than random heads at p of `LEVEL`, or "no more": not more at that level.
    """

    task: str
    cost: Literal["more", "less", "no more"]


EXPECTED: dict[str, tuple[Expectation, Expectation]] = {
    # Previous-token heads give induction heads their keys (Elhage et al. 2021; Olsson et al. 2022). In shuffled text
    # the previous token says little.
    "previous_token": (Expectation("copy", "more"), Expectation("shuffled text", "no more")),
    # Both match a token with its earlier copy, which text without repeated segments asks for less (Olsson et al. 2022;
    # Wang et al. 2022).
    "duplicate": (Expectation("copy", "more"), Expectation("text", "no more")),
    "induction": (Expectation("copy", "more"), Expectation("text", "no more")),
    # A head that attends to a sink is dormant: what it writes there is next to nothing (Gu et al. 2025, "When attention
    # sink emerges"; Guo et al. 2024, "Active-dormant attention heads").
    "first_token": (Expectation("text", "less"), Expectation("copy", "no more")),
    # Positional heads are the last to be pruned (Voita et al. 2019); the order of words is gone in shuffled text.
    "local": (Expectation("text", "more"), Expectation("shuffled text", "no more")),
    # A head that reads its own token can serve what follows from that token, as in text; in a copy of random ids it is
    # another token that says what follows. Clark et al. 2019 describe the pattern and expect nothing.
    "self": (Expectation("text", "more"), Expectation("copy", "no more")),
    # McDougall et al. 2023: it takes from predictions of tokens that stand in the text, and are wrong.
    "copy_suppression": (Expectation("wrong copies", "more"), Expectation("copy", "no more")),
    # Wu et al. 2024: without retrieval heads a fact is not found, and text is as good.
    "retrieval": (Expectation("planted facts", "more"), Expectation("text", "no more")),
}
"""The task that heads of a type are expected to matter for, and one that they are not; fixed before it was run."""
REPLACED: dict[str, Replace] = {"first_token": "zero"}
"""What stands in place of an output: its mean, but for sinks, which write much the same in every text."""


def check_head_types(
    model: Any, types: pd.DataFrame, *, random_sets: int = 19, seed: int = 0, show_progress: bool = True
) -> pd.DataFrame:
    """Remove heads that are claimed for a type, and as many random heads, on two tasks.

    The (at most) four claimed heads with the highest score are removed together. Their outputs become their mean at the
    same position over 32 other sequences of the task, and 0 for `first_token`. Tasks, 16 sequences each: "copy", the
    loss on the second copy of random segments of 32 tokens; "text", the loss on rows of 65 tokens of the packaged book,
    from its second third on (random ids for a model without tokenizer); "shuffled text", the loss on the same tokens in
    random order; "wrong copies", the probability of earlier tokens of a text other than the next one; "planted facts",
    the mean logit of the facts not asked for less that of the one asked for. A random set has a head of the same layer,
    not claimed for the type, for every head that is removed; of any layer where there is none left. No two sets are
    equal while there are others.

    Args:
        model: the model of the table.
        types: table of `head_types`.
        random_sets: sets of random heads.
        seed: of sets and sequences.
        show_progress: a bar over sets.

    Returns:
        DataFrame `type, n_claimed, heads, task, expected, delta, delta_stderr, random_mean, random_min, random_max,
        pvalue, passed`, two rows for each type with claimed heads. `delta` is the score without the heads less that
        with them. `expected` says what removing them should cost beside random heads: "more", "less" or "no more".
        `pvalue` is the share of sets, the heads themselves counted as one, that cost as much ("less": as little). A row
        passes at p of .05 at most, where "no more" is expected above it.

    Raises:
        ValueError: a table of another model, or one without claimed heads.

    What it does not establish: that the heads do it alone, or that each of them does it. That a type fails can be the
    choice of its tasks. With 19 sets, heads like random ones pass "more" in one of twenty cases.
    """
    require(types, ("layer", "head", "type", "score", "claimed"), "head_types", name="table of head types")
    require_table_of(model, types)
    view = attention_view(model)
    claims = types.loc[types["claimed"]].sort_values("score", ascending=False, kind="stable")
    kinds = [kind for kind in EXPECTED if (claims["type"] == kind).any()]
    if not kinds:
        raise ValueError("the table claims no head of any type, so there is nothing to check")
    everyone = [(layer, head) for layer, heads in heads_by_layer(view, None).items() for head in heads]
    prepared: dict[str, _Prepared] = {}
    rng = np.random.default_rng(seed)
    rows = []
    with tqdm(
        total=len(kinds) * (random_sets + 1), desc="head types", unit="set", leave=False, disable=not show_progress
    ) as bar:
        for kind in kinds:
            of_kind = claims.loc[claims["type"] == kind]
            claimed = list(zip(of_kind["layer"].tolist(), of_kind["head"].tolist(), strict=True))
            chosen = claimed[:HEADS]
            sets = [chosen, *_random_sets(rng, chosen, [head for head in everyone if head not in claimed], random_sets)]
            costs: dict[Expectation, list[np.ndarray]] = {expected: [] for expected in EXPECTED[kind]}
            for heads in sets:
                for expected, found in costs.items():
                    if expected.task not in prepared:
                        prepared[expected.task] = _prepared(view, expected.task, seed)
                    found.append(prepared[expected.task].without(heads, REPLACED.get(kind, "mean")))
                bar.update(1)
            described = {
                "type": kind,
                "n_claimed": len(claimed),
                "heads": ", ".join(head_name(*pair) for pair in chosen),
            }
            rows += [{**described, **_row(expected, found)} for expected, found in costs.items()]
    table = pd.DataFrame(rows)
    table.attrs = {
        **view.origin(),
        "random_sets": random_sets,
        "n_sequences": SEQUENCES,
        "seed": seed,
        "intact": {name: float(task.values.mean()) for name, task in prepared.items()},
    }
    return named(table, CHECK_HEAD_TYPES)


def _row(expected: Expectation, costs: list[np.ndarray]) -> dict[str, Any]:
    """Return what is said of the first cost, that of the type's heads, beside the others."""
    own, *random = (float(cost.mean()) for cost in costs)
    as_far = [other <= own if expected.cost == "less" else other >= own for other in random]
    pvalue = (1 + sum(as_far)) / (1 + len(random))
    return {
        "task": expected.task,
        "expected": expected.cost,
        "delta": own,
        "delta_stderr": standard_error(costs[0]),
        "random_mean": float(np.mean(random)),
        "random_min": min(random),
        "random_max": max(random),
        "pvalue": pvalue,
        "passed": (pvalue <= LEVEL) is (expected.cost != "no more"),
    }


def _random_sets(
    rng: np.random.Generator, chosen: list[tuple[int, int]], others: list[tuple[int, int]], n: int
) -> list[list[tuple[int, int]]]:
    """Return sets of as many of the others, each head from the layer of a chosen one while there are any.

    Where these layers have too few different sets, heads of any layer are drawn. Raises ValueError for too few others.
    """
    if len(others) < len(chosen):
        raise ValueError(f"{len(chosen)} heads are removed and {len(others)} are not claimed: too few are left to draw")
    drawn: list[list[tuple[int, int]]] = []
    tries = 0
    while len(drawn) < n:
        left = [others[index] for index in rng.permutation(len(others))]
        found = []
        for layer, _ in chosen:
            same = [head for head in left if head[0] == layer] or left
            head = left[0] if tries > 20 * n else same[0]
            found.append(head)
            left.remove(head)
        if sorted(found) not in map(sorted, drawn) or tries > 40 * n:
            drawn.append(found)
        tries += 1
    return drawn


@dataclass(frozen=True)
class _Prepared:
    """A task as the intact model does it, and the mean outputs of all heads, by layer, over other sequences of it."""

    sequences: ScoredSequences
    intact: IntactRun
    values: Float64[np.ndarray, "sequences"]
    means: dict[int, Replacement]

    def without(self, heads: list[tuple[int, int]], replace: Replace) -> Float64[np.ndarray, "sequences"]:
        """Return the score of each sequence without some heads, less that with them."""
        view = self.intact.view
        by_layer = heads_by_layer(view, heads)
        hooks = []
        for layer, chosen in by_layer.items():
            replacement = None if replace == "zero" else self.means[layer]
            hooks += LayerAblation(view, view.layer(layer), chosen, "output", replacement=replacement).hooks()
        return replayed_scores(self.intact, self.sequences, min(by_layer), hooks) - self.values


def _prepared(view: AttentionView, name: str, seed: int) -> _Prepared:
    sequences, others = (scored_sequences(view, _task(view, name, seed, reference)) for reference in (False, True))
    everyone = heads_by_layer(view, None)
    intact, values = intact_values(view, sequences, list(everyone))
    return _Prepared(sequences, intact, values, from_reference(view, everyone, "mean", others, seed))


def _task(view: AttentionView, name: str, seed: int, reference: bool) -> Task:
    """Return a task, or the same on other sequences, to take means from."""
    n, of_text = (REFERENCE, slice(-REFERENCE, None)) if reference else (SEQUENCES, slice(SEQUENCES))
    rows_seed, seed = seed, 2 * seed + reference
    if name == "copy":
        return induction(n_sequences=n, segment_length=LENGTH, seed=seed)
    words = getattr(view.model, "tokenizer", None) is not None
    book = packaged_text()[len(packaged_text()) // 3 :]  # its types were measured on the beginnings of its halves
    if name == "planted facts":
        facts = planted_facts(view, book if words else None, n, seed=seed)
        assert facts is not None  # heads were claimed for it
        return Task(facts.tokens, _preference(facts.says, facts.answer), predict=-1, name=name, higher_is_better=False)
    generator = torch.Generator().manual_seed(seed)
    width = min(2 * LENGTH + 1, view.n_ctx)
    if words:
        rows = text_tokens(view, [book], n_sequences=8 * REFERENCE, sequence_length=width)
        tokens = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(rows_seed))[of_text]]
    else:
        tokens = torch.randint(0, view.d_vocab, (n, width), generator=generator)
        tokens[:, 0] = view.start_token
    if name == "shuffled text":
        order = torch.stack([torch.randperm(width - 1, generator=generator) for _ in tokens]) + 1
        tokens = torch.cat([tokens[:, :1], tokens.gather(1, order)], dim=1)
    if name == "wrong copies":
        return Task(tokens, _wrong_copies, predict=slice(1, -1), name=name, higher_is_better=False)
    return language(tokens, attention_mask=torch.ones_like(tokens))


def _wrong_copies(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the probability of all tokens before or at a position that are not the next one, mean over positions."""
    probabilities = logits.softmax(-1)
    n, width = logits.shape[1], tokens.shape[1]
    copied = torch.zeros_like(probabilities)
    for column, position in enumerate(range(width - 1 - n, width - 1)):
        copied[:, column].scatter_(1, tokens[:, : position + 1], 1.0)
    copied.scatter_(2, tokens[:, width - n :, None], 0.0)
    return (probabilities * copied).sum(-1).mean(1)


def _preference(says: Tensor, answer: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the metric of planted facts: the mean logit of the facts not asked for, less that of the one asked for."""

    def preference(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        of_facts = logits[:, -1].gather(1, says.to(logits.device))
        right = logits[:, -1].gather(1, answer[:, None].to(logits.device))[:, 0]
        return (of_facts.sum(1) - right) / (says.shape[1] - 1) - right

    return preference
