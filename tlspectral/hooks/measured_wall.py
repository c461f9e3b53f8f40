"""A wall of heads as it was measured: attention on one sentence, and what its answer loses without each head.

Pages and figures read it without a model, and a table keeps it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Float64, UInt8

from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.schema import Schema, columns

Sentence = tuple[str, ...]

LEVELS = 255
"""Steps of attention from 0 to 1 that are kept."""

FEWEST_PROMPTS = 8
"""Distinct prompts of a task from which effects have standard errors."""

KEPT_CONTROLS = ("control_delta", "control_p", "control_p_floor")
"""Columns of a comparison with the other heads of the layer."""

WALL = Schema(
    "wall",
    (
        *HEAD,
        *columns("""
            kv_head    | index | Key/value head that the head reads.
            pattern    | text  | Attention on the sentence, queries down and keys across, as base64 of a byte per
                       |       | weight, 255 for 1. In a decoder, of keys up to the query alone.
            second_sink | index | Place of the key, other than the first, that takes the most attention of later queries
                       |       | in the layer, if it is a second sink of this sentence; else -1.
            second_sink_share | share | Its mean attention, over the heads of the layer and those queries; else NaN.
            probabilities? | numbers | Next-token probability of each watched token without the head.
            top_token?  | text | The most probable next token without the head.
            top_probability? | probability | Its probability without the head.
            delta?     | of the metric | Value without the head less the intact value, mean over prompts.
            delta_se?  | of the metric | Standard error of delta over prompts; NaN below 8 distinct prompts.
            control_delta? | of the metric | Mean of delta over the other heads of the layer. NaN where not compared.
            control_p? | probability | Share of the layer's heads, this one included, with an effect at least as large,
                       |             | in absolute values. NaN where not compared, as of a layer with one head.
            control_p_floor? | probability | Smallest control_p that there can be, 1 / heads of the layer.
        """),
    ),
    "`tls.hooks.wall`; `tlspectral report MODEL` writes it",
)


@dataclass(frozen=True, eq=False, repr=False)
class Removal:
    """The next token of a sentence, intact and without each head, and what the answer loses.

    Attributes:
        measure: the quantity that `effects` change, such as `probability of " Mary"`, or the name of a task.
        of_task: whether it is the metric of a task, in its units; else a probability.
        n_prompts: over how many prompts the effects are a mean.
        value, value_se: the quantity without any ablation; NaN for no standard error.
        watched: tokens as text, the answers of a task or the model's own next token first.
        correct, wrong: how many of the first watched tokens are correct answers, and how many behind these wrong ones.
        intact: probability of each watched token without any ablation.
        without: the same without each head.
        top: the most probable token without each head, and its probability.
        effects: a row per head: `delta, delta_se, control_delta, control_p, control_p_floor`, see `WALL`.
    """

    measure: str
    of_task: bool
    n_prompts: int
    value: float
    value_se: float
    watched: Sentence
    correct: int
    wrong: int
    intact: Float64[np.ndarray, "watched"]
    without: Float64[np.ndarray, "heads watched"]
    top: tuple[tuple[str, float], ...]
    effects: pd.DataFrame

    @property
    def deltas(self) -> Float64[np.ndarray, "heads"]:
        """The change of the quantity without each head."""
        return self.effects["delta"].to_numpy(np.float64)


@dataclass(frozen=True, eq=False, repr=False)
class Wall:
    """All heads of a model on one sentence.

    Attributes:
        tokens: the sentence's tokens as text, those of its parts that are no whole letters as a box.
        special: which tokens are special tokens of the tokenizer, such as the start token.
        heads: a row per head: `layer, head, name, kv_head, second_sink, second_sink_share`, see `WALL`.
        levels: attention of each head, from a query (row) to a key, in `LEVELS` steps.
        causal: whether queries see no later key.
        removal: what the answer loses; None where nothing was removed.
        why_not: why nothing was removed, else empty.
        origin: `attrs` that tell the model.
    """

    tokens: Sentence
    special: tuple[bool, ...]
    heads: pd.DataFrame
    levels: UInt8[np.ndarray, "heads query key"]
    causal: bool
    removal: Removal | None
    why_not: str
    origin: Mapping[str, Any]

    def __repr__(self) -> str:
        removed = self.why_not if self.removal is None else self.removal.measure
        return f"Wall({self.sentence!r}, {len(self.heads)} heads; {removed})"

    @property
    def sentence(self) -> str:
        """The sentence, without special tokens."""
        words = (token for token, special in zip(self.tokens, self.special, strict=True) if not special)
        return "".join(words).strip()

    @property
    def attention(self) -> Float[np.ndarray, "heads query key"]:
        """Attention of each head, to the nearest of `LEVELS` steps."""
        return self.levels / np.float32(LEVELS)

    @cached_property
    def seen(self) -> Bool[np.ndarray, "query key"]:
        """Which pairs of a query and a key are kept in `pattern` texts: in a decoder none of a later key."""
        return _seen(len(self.tokens), causal=self.causal)

    def pattern_text(self, head: int) -> str:
        """Return the attention of one head (its row of `heads`) as base64, a byte for each pair that can be seen."""
        return base64.b64encode(self.levels[head][self.seen].tobytes()).decode("ascii")

    def table(self) -> pd.DataFrame:
        """Return a table from which `wall_of_table` makes the same wall; `write_table` keeps it."""
        frame = self.heads.assign(pattern=[self.pattern_text(head) for head in range(len(self.heads))])
        attrs: dict[str, Any] = {
            "tokens": list(self.tokens),
            "special": list(self.special),
            "causal": self.causal,
            "why_not": self.why_not,
        }
        if self.removal is not None:
            removal = self.removal
            frame = frame.assign(
                probabilities=removal.without.tolist(),
                top_token=[token for token, _ in removal.top],
                top_probability=[probability for _, probability in removal.top],
                **{name: removal.effects[name].to_numpy() for name in removal.effects},
            )
            attrs["removal"] = {name: getattr(removal, name) for name in _OF_ALL_HEADS}
            attrs["removal"] |= {"watched": list(removal.watched), "intact": removal.intact.tolist()}
        return WALL.frame(frame[[one.name for one in WALL.columns if one.name in frame]], {**self.origin, **attrs})


def _seen(n: int, *, causal: bool) -> Bool[np.ndarray, "query key"]:
    whole = np.ones((n, n), dtype=bool)
    return np.tril(whole) if causal else whole


_OF_ALL_HEADS = ("measure", "of_task", "n_prompts", "value", "value_se", "correct", "wrong")
_OF_A_WALL = ("tokens", "special", "causal", "why_not", "removal", "table", "columns")


def wall_of_table(table: pd.DataFrame) -> Wall:
    """Return the wall whose `table()` this is, as it was measured."""
    attrs, of_heads = table.attrs, ["layer", "head", "name", "kv_head", "second_sink", "second_sink_share"]
    removal, told = None, attrs.get("removal")
    if told is not None:
        removal = Removal(
            measure=str(told["measure"]),
            of_task=bool(told["of_task"]),
            n_prompts=int(told["n_prompts"]),
            value=float(told["value"]),
            value_se=float("nan") if told["value_se"] is None else float(told["value_se"]),
            correct=int(told["correct"]),
            wrong=int(told["wrong"]),
            watched=tuple(told["watched"]),
            intact=np.array(told["intact"], dtype=np.float64),
            without=np.array([list(row) for row in table["probabilities"]], dtype=np.float64),
            top=tuple(zip(table["top_token"], table["top_probability"].astype(float), strict=True)),
            effects=pd.DataFrame({name: table[name].to_numpy() for name in ("delta", "delta_se", *KEPT_CONTROLS)}),
        )
    n, causal = len(attrs["tokens"]), bool(attrs["causal"])
    levels = np.zeros((len(table), n, n), dtype=np.uint8)
    seen = _seen(n, causal=causal)
    for index, text in enumerate(table["pattern"]):
        levels[index][seen] = np.frombuffer(base64.b64decode(text), dtype=np.uint8)
    return Wall(
        tuple(attrs["tokens"]),
        tuple(attrs["special"]),
        pd.DataFrame({name: table[name].to_numpy() for name in of_heads}),
        levels,
        causal,
        removal,
        str(attrs["why_not"]),
        {str(name): value for name, value in attrs.items() if name not in _OF_A_WALL},
    )
