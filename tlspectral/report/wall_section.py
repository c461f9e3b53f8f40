"""The first section of the page: all heads on a sentence, and the answer's loss without each head."""

import base64
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
import pandas as pd

from tlspectral.hooks.measured_wall import FEWEST_PROMPTS, Removal, Wall
from tlspectral.report.card_sections import Html, listing
from tlspectral.report.head_data import script_json
from tlspectral.tables.detector_columns import DETECTORS, FRAMED, detector_chance, framed_kind
from tlspectral.tables.same_model import require_same_model

MOST_BYTES = 1_000_000
"""Bytes that one sentence may add to the page."""

LISTED = 12
"""Number of largest effects that are listed as text."""

_DIGITS = 5  # significant digits of probabilities and effects


def listed_walls(walls: Wall | Sequence[Wall] | None) -> list[Wall]:
    """Return the given walls as a list; None gives an empty list. Raises TypeError for anything else.

    A wall is a result of `tls.hooks.wall`: attention of all heads on one sentence, and effects of removing each head.
    """
    listed: list[Any] = [] if walls is None else list(walls) if isinstance(walls, list | tuple) else [walls]
    for wall in listed:
        if not isinstance(wall, Wall):
            raise TypeError(
                f"walls= has a {type(wall).__name__}: give the result of tls.hooks.wall, or a list of such results"
            )
    return listed


def require_room(wall: Wall) -> None:
    """Raise ValueError if the attention of all heads on the wall's sentence takes more than 1 MB, the room of the page;
    the message names the largest number of tokens.
    """
    n_heads, n_tokens = len(wall.heads), len(wall.tokens)
    room = MOST_BYTES * 3 // 4 * 9 // 10 // n_heads  # 3/4 because of base64, 9/10 because other numbers need a tenth
    if int(wall.seen.sum()) > room:
        most = int(np.sqrt(2 * room + 0.25) - 0.5) if wall.causal else int(np.sqrt(room))
        raise ValueError(
            f"the sentence {wall.sentence[:40]!r} has {n_tokens} tokens, and a page has room for {most} tokens of "
            f"{n_heads} heads (1 MB): give a shorter sentence"
        )


def wall_html(heads: pd.DataFrame, walls: list[Wall]) -> str:
    """Return HTML with the section about sentences: a frame into which the page's script draws, and a table of effects
    per wall.

    A wall is the attention of all heads on one sentence, with the effects of removing each head. `heads` is the head
    table. "" without walls.
    """
    if not walls:
        return ""
    tables = "".join(_as_text(heads, wall) for wall in walls)
    template = Template(files("tlspectral.report").joinpath("wall.html").read_text(encoding="utf-8"))
    return template.substitute(tables=tables, count=f"{len(walls[0].heads):,}")


def _as_text(heads: pd.DataFrame, wall: Wall) -> str:
    """Return HTML about one wall: the sentence as a heading, a note about the answer, and a table of the 12 heads with
    the largest changes.

    A wall is the attention of all heads on one sentence, with the change of the answer when each head is removed. If no
    head was removed, the HTML has the heading and the reason. `heads` is the head table, for the heads' kinds.
    """
    title = f"<h4>{escape(wall.sentence)}</h4>"
    if wall.removal is None:
        return f'{title}<p class="note">{escape(wall.why_not)}</p>'
    removal, kinds, names = wall.removal, _kinds(heads, wall), wall.heads["name"].tolist()
    effects = removal.effects.to_dict("records")
    rows = []
    for index in np.argsort(-np.abs(removal.deltas), kind="stable")[:LISTED].tolist():
        name, effect, (token, probability) = escape(names[index]), effects[index], removal.top[index]
        row = {
            "head": Html(f'<a href="#{name}">{name}</a>'),
            "on repeated tokens": DETECTORS[kinds[index]].kind if kinds[index] else "",
            "change": effect["delta"],
            "± se": effect["delta_se"],
            "others of its layer, mean": effect["control_delta"],
            "p": effect["control_p"],
            "next token without it": f"{shown(token)} ({probability:.2f})",
        }
        rows.append(row)
    return f'{title}<p class="note">{escape(answer_note(removal))}</p>{listing(rows)[0]}'


def answer_note(removal: Removal) -> str:
    """Return sentences (text) about the model's answer in `removal`, the effects of removing each head: its token or
    the task's metric, the value with all heads, and whether changes have standard errors.
    """
    if not removal.of_task:
        return (
            f"The answer is the model's own next token, {shown(removal.watched[0])}, with probability "
            f"{removal.value:.2f}. Numbers are changes of this probability. One sentence has no standard error."
        )
    error = "" if np.isnan(removal.value_se) else f" ± {removal.value_se:.2f}"
    few = "" if error else f" Fewer than {FEWEST_PROMPTS} distinct prompts have no standard error."
    return (
        f"Numbers are changes of {removal.measure}, mean over {removal.n_prompts} prompts: {removal.value:.2f}{error} "
        f"with all heads. Attention and probabilities are shown for the first prompt.{few}"
    )


def shown(token: str) -> str:
    """Return a token in quotes, with visible marks for line ends and tabs."""
    marks = {"\n": "\N{RETURN SYMBOL}", "\t": "\N{RIGHTWARDS ARROW TO BAR}", "\r": "\N{RETURN SYMBOL}"}
    seen = "".join(marks.get(letter, letter) for letter in token)
    return f"\N{LEFT DOUBLE QUOTATION MARK}{seen}\N{RIGHT DOUBLE QUOTATION MARK}"


def _kinds(heads: pd.DataFrame, wall: Wall) -> list[str]:
    """Return a list with an entry per head of a wall: the detector with its largest score, such as "prev", or "" if no
    score in the head table reaches .3.
    """
    scores = {(row["layer"], row["head"]): row for row in heads.to_dict("records")}
    pairs = zip(wall.heads["layer"], wall.heads["head"], strict=True)
    return [framed_kind(scores.get(pair, {})) for pair in pairs]


def wall_scripts(heads: pd.DataFrame, walls: list[Wall]) -> str:
    """Return HTML script elements with the walls' data as JSON: one for all sentences together, then one per sentence;
    "" without walls.

    A wall is the attention of all heads on one sentence, with the effects of removing each head. `heads` is the head
    table. Raises ValueError if a wall has other weights than the table or other heads than the first wall, or its
    sentence is too long.
    """
    if not walls:
        return ""
    first = walls[0]
    for wall in walls:
        require_same_model(heads, wall.origin, "the walls")
        require_room(wall)
        if list(wall.heads["name"]) != list(first.heads["name"]):
            raise ValueError("the walls have different heads: give walls of one model")
    place = {pair: index for index, pair in enumerate(zip(heads["layer"], heads["head"], strict=True))}
    shared = {
        "layer": first.heads["layer"].tolist(),
        "head": first.heads["head"].tolist(),
        "kv": first.heads["kv_head"].tolist(),
        "row": [place.get(pair) for pair in zip(first.heads["layer"], first.heads["head"], strict=True)],
        "kind": _kinds(heads, first),
        "framed": FRAMED,
        "detectors": {
            name: kind.kind for name, kind in DETECTORS.items() if name in heads and heads[name].notna().any()
        },
        "chance": {name: detector_chance(heads, name) for name in DETECTORS},
        "sentences": [_short(wall) for wall in walls],
    }
    blocks = [("walls", shared), *((f"wall{number}", _sentence(wall)) for number, wall in enumerate(walls))]
    return "".join(
        f'<script type="application/json" id="{name}">{script_json(block)}</script>\n' for name, block in blocks
    )


def _short(wall: Wall) -> str:
    """Return the wall's sentence as text, with the number of prompts if effects are means over a task's prompts."""
    prompts = "" if wall.removal is None or not wall.removal.of_task else f" ({wall.removal.n_prompts} prompts)"
    return wall.sentence + prompts


def _sentence(wall: Wall) -> dict[str, Any]:
    """Return the data of one wall as a dict for the page's script: tokens, attention as base64 bytes, attention sinks,
    a note, and effects of removing each head (None if no head was removed).
    """
    of_layer = wall.heads.drop_duplicates("layer")
    sinks = {
        str(row["layer"]): [int(row["second_sink"]), _rounded(np.array([row["second_sink_share"]]))[0]]
        for row in of_layer.to_dict("records")
        if row["second_sink"] >= 0
    }
    levels = np.concatenate([head_levels[wall.seen] for head_levels in wall.levels])
    return {
        "tokens": list(wall.tokens),
        "special": [int(position) for position in wall.special],
        "causal": wall.causal,
        "pattern": base64.b64encode(levels.tobytes()).decode("ascii"),
        "sinks": sinks,
        "note": wall.why_not if wall.removal is None else answer_note(wall.removal),
        "removal": None if wall.removal is None else _removed(wall.removal),
    }


def _removed(removal: Removal) -> dict[str, Any]:
    """Return the effects of removing each head as a dict for the page's script: watched tokens with their
    probabilities, intact and without each head, and the columns of `removal.effects`.
    """
    texts = list(dict.fromkeys(token for token, _ in removal.top))
    effects = {name: _rounded(removal.effects[name].to_numpy(np.float64)) for name in removal.effects}
    return {
        "measure": removal.measure,
        "task": removal.of_task,
        "prompts": removal.n_prompts,
        "watched": list(removal.watched),
        "correct": removal.correct,
        "wrong": removal.wrong,
        "intact": _rounded(removal.intact),
        "without": [_rounded(row) for row in removal.without],
        "texts": texts,
        "top": [texts.index(token) for token, _ in removal.top],
        "share": _rounded(np.array([probability for _, probability in removal.top])),
        **effects,
    }


def _rounded(values: np.ndarray) -> list[float | None]:
    """Return numbers as a list for JSON, with 5 significant digits and None for NaN."""
    return [None if np.isnan(value) else float(f"{value:.{_DIGITS}g}") for value in values]
