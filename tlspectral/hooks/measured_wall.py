"""`Wall`: attention of all heads on one sentence, and how removing each head changes the model's answer.

Figures and report pages are made from a `Wall` without the model. A table stores it.
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
"""Attention weights from 0 to 1 are rounded to this many steps."""

FEWEST_PROMPTS = 8
"""Effects have standard errors if the task has at least so many distinct prompts."""

KEPT_CONTROLS = ("control_delta", "control_p", "control_p_floor")
"""Columns that compare a head with the other heads of its layer."""

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
    """Effects of removing each head on one sentence or task: the field `removal` of a `Wall`.

    `tls.hooks.wall(model, "The war lasted from 1732 to 17").removal` makes it. Without a head means: its output is
    zero.

    Attributes:
        measure: name of the quantity whose change is `effects`: `probability of " Mary"`, or the name of a task.
        of_task: True if the quantity is the metric of a task, in its units; False if it is a probability.
        n_prompts: number of prompts that effects are averaged over.
        value, value_se: the quantity with no head removed, and its standard error; NaN if it has none.
        watched: tokens as text whose probabilities are kept. The task's answers or the model's next token come first.
        correct, wrong: the first `correct` watched tokens are correct answers, the next `wrong` tokens wrong answers.
        intact: probability of each watched token with no head removed.
        without: probability of each watched token without each head.
        top: for each head, the most probable token without the head, and its probability.
        effects: a row per head: `delta` (value without the head minus `value`), `delta_se`, and the comparison with the
            other heads of its layer, `control_delta, control_p, control_p_floor`.
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
        """Change of the quantity (`measure`) when each head is removed: the column `delta` of `effects` as an array."""
        return self.effects["delta"].to_numpy(np.float64)


@dataclass(frozen=True, eq=False, repr=False)
class Wall:
    """Attention of all heads of a model on one sentence, and effects of removing each head.

        wall = tls.hooks.wall(model, "The war lasted from the year 1732 to the year 17")
        tls.report.report(tls.analyze_heads(model), "report.html", walls=wall)

    `tls.plots` and `tls.report` draw it; `wall.table()` is a DataFrame that `tls.write_table` stores.

    Attributes:
        tokens: the sentence's tokens as text. A token that is only a fraction of a letter is shown as a box.
        special: for each token, whether it is a special token of the tokenizer, such as the start token.
        heads: DataFrame, a row per head: `layer, head, name`, `kv_head` (the key/value head that it reads), and
            `second_sink, second_sink_share` (position of the layer's second attention sink or -1, and its attention).
        levels: attention of each head, queries down and keys across, as integers from 0 to `LEVELS` (255 stands for
            attention 1). The property `attention` has the same as numbers from 0 to 1.
        causal: True if queries see no later key.
        removal: a `Removal`, the effects of removing each head; None if no head was removed.
        why_not: the reason if no head was removed, else empty.
        origin: dict of `attrs` that name the model.

    Not established: why a head attends where it does, or what it does on other text.
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
        measure = self.why_not if self.removal is None else self.removal.measure
        return f"Wall({self.sentence!r}, {len(self.heads)} heads; {measure})"

    @property
    def sentence(self) -> str:
        """The sentence of the wall as text, without special tokens."""
        words = (token for token, special in zip(self.tokens, self.special, strict=True) if not special)
        return "".join(words).strip()

    @property
    def attention(self) -> Float[np.ndarray, "heads query key"]:
        """Attention of each head, 0 to 1, rounded to multiples of 1 / 255."""
        return self.levels / np.float32(LEVELS)

    @cached_property
    def seen(self) -> Bool[np.ndarray, "query key"]:
        """Mask of the pairs of query and key that `pattern` texts keep: in a decoder, keys up to the query."""
        return _seen(len(self.tokens), causal=self.causal)

    def pattern_text(self, head: int) -> str:
        """Return the attention of one head as base64 text, one byte per True entry of `seen`.

        `head` is the row of the head in `heads`.
        """
        return base64.b64encode(self.levels[head][self.seen].tobytes()).decode("ascii")

    def table(self) -> pd.DataFrame:
        """Return the wall as a DataFrame with a row per head, for `tls.write_table`.

        Columns are the columns of `heads`, `pattern` (attention as base64 text) and, if heads were removed,
        `probabilities, top_token, top_probability` and the effects (`delta, delta_se`, ...). Tokens and the measured
        quantity are in its attrs. `wall_of_table` turns it back into a `Wall`.
        """
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
            attrs["removal"] = {name: getattr(removal, name) for name in _REMOVAL_FIELDS}
            attrs["removal"] |= {"watched": list(removal.watched), "intact": removal.intact.tolist()}
        return WALL.frame(
            frame[[column.name for column in WALL.columns if column.name in frame]], {**self.origin, **attrs}
        )


def _seen(n: int, *, causal: bool) -> Bool[np.ndarray, "query key"]:
    whole = np.ones((n, n), dtype=bool)
    return np.tril(whole) if causal else whole


_REMOVAL_FIELDS = ("measure", "of_task", "n_prompts", "value", "value_se", "correct", "wrong")
_WALL_KEYS = ("tokens", "special", "causal", "why_not", "removal", "table", "columns")


def wall_of_table(table: pd.DataFrame) -> Wall:
    """Turn a table that `Wall.table` made (also read from a file) back into the same `Wall`."""
    attrs, head_columns = table.attrs, ["layer", "head", "name", "kv_head", "second_sink", "second_sink_share"]
    removal, stored = None, attrs.get("removal")
    if stored is not None:
        removal = Removal(
            measure=str(stored["measure"]),
            of_task=bool(stored["of_task"]),
            n_prompts=int(stored["n_prompts"]),
            value=float(stored["value"]),
            value_se=float("nan") if stored["value_se"] is None else float(stored["value_se"]),
            correct=int(stored["correct"]),
            wrong=int(stored["wrong"]),
            watched=tuple(stored["watched"]),
            intact=np.array(stored["intact"], dtype=np.float64),
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
        pd.DataFrame({name: table[name].to_numpy() for name in head_columns}),
        levels,
        causal,
        removal,
        str(attrs["why_not"]),
        {str(name): value for name, value in attrs.items() if name not in _WALL_KEYS},
    )
