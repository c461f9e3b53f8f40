"""The sections of one head's card, made from tables: each as HTML, and as text for a terminal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from tlspectral.errors import did_you_mean
from tlspectral.report.drawings import Rows, kernel_drawing, phase_drawing
from tlspectral.report.head_data import NULL_METRICS, shown_columns
from tlspectral.selection.heads_as_written import head_pairs
from tlspectral.selection.node_names import head_name
from tlspectral.tables.head_columns import column_title
from tlspectral.tables.printed import short_number
from tlspectral.tables.same_model import require_same_model
from tlspectral.tables.schema import require

Pair = tuple[int, int]
Given = pd.DataFrame | Sequence[pd.DataFrame] | None
"""One table, several tables of the same kind, or None."""

NO_READING = "no reading"
_LISTED = 8  # edges and sources
_SAID = ("task", "replace", "sink", "sinks", "n_sequences", "n_distinct")  # keys of `attrs` that are added to each row
_WHOLE = frozenset({"direction", "rank", "peak", "predicted_peak"})
_MINUS = "\N{MINUS SIGN}"


class Html(str):
    """A string that is HTML already, so that `listing` does not escape it in a table cell."""

    __slots__ = ()


@dataclass(frozen=True)
class Section:
    """One section of a head's card, as HTML and as text.

    Attributes:
        title: heading.
        note: meaning of the numbers, and what they do not establish; "" for none.
        body: HTML in which every text from a table is escaped.
        text: the same content as lines of plain text.
        wide: True if the section takes the whole width of the page.
    """

    title: str
    note: str
    body: str
    text: str
    wide: bool = False

    def html(self) -> str:
        """Return the section as an HTML string: a section element with heading, note and body."""
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        look = ' class="wide"' if self.wide else ""
        return f"<section{look}><h3>{escape(self.title)}</h3>{note}{self.body}</section>"


@dataclass(frozen=True)
class _Kind:
    """How a kind of table, such as sweeps, is checked and shown on a card.

    Attributes:
        plural: the kind's name in messages, such as "sweeps".
        made_by: name of the function that makes such a table.
        needed: columns that the table must have.
        sections: function that gets a head's name and its rows of the table (dicts), and returns card sections.
    """

    plural: str
    made_by: str
    needed: tuple[str, ...]
    sections: Callable[[str, Rows], list[Section]]


class Evidence:
    """The rows of all further tables of a report or card, by kind of table and by head; `sections` makes a head's card
    from them.

    `heads` is the head table. `tables` maps kinds such as "sweep" to a table, several tables or None. Raises ValueError
    for tables of other heads or weights, and TypeError for a name that is not a kind of table.
    """

    def __init__(self, heads: pd.DataFrame, tables: Mapping[str, Given]):
        self._rows: dict[str, dict[Pair, list[Mapping[Any, Any]]]] = {}
        known, names = set(head_pairs(heads)), [name for name in _KINDS if name != "edges_out"]
        for name, given in tables.items():
            if name not in names:
                raise TypeError(f"{name}= is unknown: give tables as {', '.join(names)}{did_you_mean(name, names)}")
            kind, by_head = _KINDS[name], self._rows.setdefault(name, {})
            for table in [] if given is None else [given] if isinstance(given, pd.DataFrame) else given:
                for pair, row in _checked(table, heads, known, kind, name):
                    by_head.setdefault(pair, []).append(row)
                    if name == "edges" and pair == (row["receiver_layer"], row["receiver_head"]):
                        self._rows.setdefault("edges_out", {}).setdefault((row["layer"], row["head"]), []).append(row)

    def rows(self, name: str) -> Mapping[Pair, Rows]:
        """Return a dict from (layer, head) to the head's rows (dicts) of one kind of table, `name` such as "sweep"; {}
        if no such table was given.
        """
        return self._rows.get(name, {})

    def columns(self) -> dict[str, dict[Pair, float]]:
        """Return columns of numbers by which the page can colour its grid of heads: a dict from title to {(layer,
        head): number}.

        They are effects of removal from sweeps, exclusion indices, and fits of predicted kernels. Each part, mode, task
        and replacement has its own column.
        """
        columns_by_title: dict[str, dict[Pair, float]] = {}
        for name, (column, title_start) in _COLOURED.items():
            for pair, rows in self.rows(name).items():
                for row in (row for row in rows if _missing(row.get("frequency"))):
                    details = [str(row[key]) for key in _TOLD if not _missing(row.get(key))]
                    title = f"{title_start} ({column})" + ": " * bool(details) + ", ".join(details)
                    columns_by_title.setdefault(title, {})[pair] = row.get(column, np.nan)
        return columns_by_title

    def sections(self, pair: Pair) -> list[Section]:
        """Return the card sections of the head `pair` (layer, head) in the order of the card; a table without rows of
        this head has no section.
        """
        sections_of_head = []
        for name, kind in _KINDS.items():
            rows = self.rows(name).get(pair)
            if rows:
                sections_of_head += kind.sections(head_name(*pair), rows)
        return sections_of_head


def _checked(
    table: pd.DataFrame, heads: pd.DataFrame, known: set[Pair], kind: _Kind, name: str
) -> list[tuple[Pair, dict[Any, Any]]]:
    """Check a table of one kind against the head table, and return a list of ((layer, head), row), where row is a dict.

    `known` are the heads of the head table `heads`; `kind` and its `name`, such as "edges", describe the table. Rows of
    sets in a sweep are left out. Rows also contain entries of the table's `attrs`, such as the task. A row of edges
    belongs to the head that receives; an edge with an effect on a task belongs to all heads that it reaches. Raises
    ValueError for other heads or weights.
    """
    require(table, kind.needed, kind.made_by, name=f"table of {kind.plural}")
    require_same_model(heads, table.attrs, f"the {kind.plural}")
    fields = ("receiver_layer", "receiver_head") if name == "edges" else _OF_HEAD
    rows = (table if name != "sweep" else table.loc[table["head"] >= 0]).to_dict("records")
    from_attrs = {key: table.attrs[key] for key in _SAID if key in table.attrs and key not in table}
    pairs = [(int(row[fields[0]]), int(row[fields[1]])) for row in rows]
    for pair in dict.fromkeys(pairs):
        if pair not in known:
            raise ValueError(
                f"the {kind.plural} have rows for {head_name(*pair)}, which the table of heads lacks: give tables of "
                "the same model"
            )
    found_rows = [(pair, {**row, **from_attrs}) for pair, row in zip(pairs, rows, strict=True)]
    for pair, row in list(found_rows) if name == "edges" else []:
        if pd.isna(row["attention"]):  # an effect on a task belongs to all heads that the edge reaches
            found_rows += [
                (other, row) for other in known.intersection(head_pairs(row["reached"].split(", "))) - {pair}
            ]
    return found_rows


def row_section(heads: pd.DataFrame, pair: Pair) -> Section:
    """Return the card section with the row of head `pair` (layer, head) in the head table: metrics next to their null,
    then all other columns.
    """
    (row,) = heads.loc[(heads["layer"] == pair[0]) & (heads["head"] == pair[1])].to_dict("records")
    metrics = []
    for metric in (name for name in NULL_METRICS if name in row and pd.notna(row[name])):
        ends = {"null": "_null_mean", "null sd": "_null_std", "z": "_z", "at or below": "_null_pct"}
        metrics.append(
            {"metric": column_title(metric), "head": row[metric]}
            | {heading: row.get(metric + end) for heading, end in ends.items()}
        )
    beside = {f"{metric}{end}" for metric in NULL_METRICS for end in ("", "_z", "_null_pct")}
    others = [
        {"column": column_title(name), "value": row[name], "± se": row.get(f"{name}_se")}
        for name in shown_columns(heads)
        if name not in beside and pd.notna(row[name])
    ]
    tables = [listing(part) for part in (metrics, others) if part]
    note = (
        "Null: random directions with the head's own singular values. At or below: share of its draws that are not "
        "above the head."
    )
    return Section(
        "Row", note if metrics else "", "".join(html for html, _ in tables), "\n".join(text for _, text in tables)
    )


def composition_section(rows: Rows) -> Section:
    """Return the card section with the 8 earlier heads whose output the head's keys can read best: score, chance and
    rank.

    `rows` are the head's rows of `k_composition`, as dicts.
    """
    best = sorted(rows, key=lambda row: row["rank"])[:_LISTED]
    shown = ("score", "chance", "rank")
    cells = [{"sender": head_name(row["layer"], row["head"]), **_chosen(row, *shown)} for row in best]
    note = "Earlier heads whose output this head's keys can read, by weights. It does not show that the keys read it."
    return Section("K-composition", note, *listing(cells))


def _pairs(name: str, rows: Rows) -> list[Section]:
    """Return [card section] with text passages in which head `name` attends from a query to a key.

    `rows` are the head's rows of `top_pairs`, as dicts.
    """
    cells = [_chosen(row, "interval", "attention", "kind", "context") for row in rows]
    note = (
        "Text where this head attends: the key is shaded by its attention, the query is underlined. top: the largest "
        "pairs; high, middle, low: random pairs from the upper, middle and lower third of the rest. "
    )
    if "sinks" in rows[0]:
        note += "Attention sinks of the layer are left out. "
    elif not rows[0].get("sink"):
        note += "The first token of a prompt is left out. "
    n_prompts, distinct = rows[0].get("n_sequences"), rows[0].get("n_distinct")
    note += (
        ""
        if distinct in (None, n_prompts)
        else f"{distinct} of {n_prompts} prompts are distinct; equal ones count once. "
    )
    shaded = [{**cell, "context": _shaded(row)} for cell, row in zip(cells, rows, strict=True)]
    body = listing(shaded)[0]
    note += "It does not show that the model needs this attention."
    return [Section("Where on text", note, body, listing(cells)[1], wide=True)]


def _shaded(row: Mapping[Any, Any]) -> Html:
    """Return the text around a query and a key as HTML: the query underlined, the key shaded by its attention in ten
    steps.

    `row` is a row of `top_pairs`.
    """
    query, key = (escape(row[f"{side}_token"]) for side in ("query", "key"))
    marked = f"<u>{query}</u>"
    text = escape(row["context"]).replace(escape(f"<{row['query_token']}>"), marked, 1)
    inner = marked if row["query"] == row["key"] else key
    shade = min(9, int(10 * row["attention"]))
    return Html(text.replace(f"[{inner}]", f'<mark class="shade{shade}">{inner}</mark>', 1))


def _kernel(name: str, rows: Rows) -> list[Section]:
    """Return [card section] with the mean attention score by distance of the key, as a drawing and as text.

    `rows` are the rows of head `name` in `relative_position_kernel`, as dicts.
    """
    best = max(rows, key=lambda row: -np.inf if pd.isna(row["score"]) else row["score"])
    predicted = any(pd.notna(row.get("predicted")) for row in rows)
    note = "Mean attention score before the softmax by offset (position of the key minus the query, in tokens)." + (
        " Dashed: predicted from the mean query and key, a fit that is close by construction." if predicted else ""
    )
    text = f"largest mean score {short_number(best['score'])} at offset {best['offset']}"
    body = f'<div class="kernels">{kernel_drawing(rows, name)}</div>'
    return [Section("By distance", note, body, text)]


def _prediction(name: str, rows: Rows) -> list[Section]:
    """Return [card section] that compares the measured mean score by distance with its prediction.

    `rows` are the head's rows of `kernel_prediction`, as dicts; `name` is not shown.
    """
    cells = [
        {**_chosen(row, "r", "peak", "predicted_peak", "band"), "its share": row.get(f"share_{row.get('band')}")}
        for row in rows
    ]
    note = (
        "Kernel predicted from one set of prompts, compared with the kernel measured on others. band: the third of "
        "frequencies that contributes most."
    )
    return [Section("Prediction by distance", note, *listing(cells))]


def _frequencies(name: str, rows: Rows) -> list[Section]:
    """Return [card section] with the norms of Im(M_t) and Re(M_t), the parts of the query-key matrix by rotary
    frequency.

    `rows` are the rows of head `name` in `frequency_table`, as dicts.
    """
    largest = max(rows, key=lambda row: row["im_norm"])
    text = (
        f"Im(M_t) is largest at pair {largest['frequency']} (wavelength {short_number(largest['wavelength'])} tokens)"
    )
    note = "Norms of Im(M_t) (lower bars) and Re(M_t) (upper bars) by rotary pair; below, wavelengths in tokens."
    body = f'<div class="kernels phase">{phase_drawing(rows, name)}</div>'
    return [Section("Phase by frequency", note, body, text)]


def _directions(name: str, rows: Rows) -> list[Section]:
    """Return [card section] with words that stand for the singular directions of the head's matrices.

    `rows` are the head's rows of `head_directions`, as dicts. Directions without significant words are counted, not
    listed. `name`, the head's name, is not shown.
    """
    sides: dict[tuple[Any, ...], list[Mapping[Any, Any]]] = {}
    for row in rows:
        sides.setdefault((row["kind"], row["direction"], row["side"]), []).append(row)
    read = [
        {**_chosen(words[0], "kind", "direction", "share", "side", "qvalue"), "words": " ".join(map(_quoted, words))}
        for words in sides.values()
        if words[0]["word"] != NO_READING or pd.notna(words[0]["token"])
    ]
    note = (
        f"{len(read)} of {len(sides)} sides of singular directions have words with larger loadings than on random "
        f"directions (q < .05). {_MINUS} marks a negative loading."
    )
    body, text = listing(read) if read else ("", "no reading")
    return [Section("Directions in words", note, body, text)]


def _quoted(row: Mapping[Any, Any]) -> str:
    """Return the word in a row of `head_directions` in quotes, behind a minus sign if its loading is negative."""
    sign = _MINUS if row["loading"] < 0 else ""
    return f"{sign}\N{LEFT SINGLE QUOTATION MARK}{row['word']}\N{RIGHT SINGLE QUOTATION MARK}"


def _edges(title: str, *ends: str) -> Callable[[str, Rows], list[Section]]:
    """Return a function that gets a head's name and its rows of `edge_effects` (dicts), and returns [card section] with
    the heading `title`.

    `ends` are the columns that name the other end of an edge, such as "sender". The section lists the 8 largest
    effects.
    """

    def sections(name: str, rows: Rows) -> list[Section]:
        best = sorted(rows, key=lambda row: -abs(row["delta"]) if pd.notna(row["delta"]) else np.inf)[:_LISTED]
        shown = (*ends, "attention", "delta", "± se", "control_delta", "qvalue", "task", "replace")
        left = f" The {_LISTED} largest of {len(rows)}." if len(rows) > _LISTED else ""
        note = f"Effect of cutting one edge alone.{left} Edges that matter only together do not show."
        return [Section(title, note, *listing([_chosen(row, *shown) for row in best]))]

    return sections


def _sweep(name: str, rows: Rows) -> list[Section]:
    """Return [card section] with the effects of removing parts of the head.

    `rows` are the head's rows of `ablation_sweep`, as dicts: delta is the metric without the part minus the intact
    metric. `name`, the head's name, is not shown.
    """
    tested = ("delta_p", "delta_p_floor", "control_delta", "control_p", "control_p_floor")
    shown = ("part", "task", "delta", "± se", *tested, "replace")
    note = (
        "delta: metric without this part of the head minus the metric of the intact model. Other heads may take over."
    )
    return [Section("Ablation", note, *listing([_chosen(row, *shown) for row in rows]))]


def _positional(name: str, rows: Rows) -> list[Section]:
    """Return [card section] with the head's positional and symbolic scores, or [] if all rows are about single
    frequencies.

    `rows` are the head's rows of `positional_symbolic`, as dicts. `name`, the head's name, is not shown.
    """
    whole = [row for row in rows if _missing(row.get("frequency"))]
    if not whole:
        return []
    note = (
        "When two blocks of a prompt swap: s_pos is 1 if attention stays at its positions, s_sym is 1 if it follows "
        "the blocks."
    )
    shown = ("mode", "s_pos", "s_sym", "exclusion_index", "logit_std")
    return [Section("Positional or symbolic", note, *listing([_chosen(row, *shown) for row in whole]))]


_OF_HEAD = ("layer", "head")
_TOLD = ("part", "mode", "task", "replace")
_EDGE = (*_OF_HEAD, "sender", "receiver", "receiver_layer", "receiver_head", "reached", "attention", "delta")
_PAIR = (*_OF_HEAD, "interval", "attention", "query", "key", "query_token", "key_token", "kind", "context")
_KINDS = {
    "pairs": _Kind("pairs", "top_pairs", _PAIR, _pairs),
    "kernels": _Kind("kernels", "relative_position_kernel", (*_OF_HEAD, "offset", "score"), _kernel),
    "prediction": _Kind("predictions", "heads.kernel_prediction", (*_OF_HEAD, "r", "peak"), _prediction),
    "frequencies": _Kind(
        "frequencies", "frequency_table", (*_OF_HEAD, "frequency", "wavelength", "re_norm", "im_norm"), _frequencies
    ),
    "positional": _Kind("positional scores", "positional_symbolic", (*_OF_HEAD, "s_pos", "s_sym"), _positional),
    "sweep": _Kind("sweeps", "ablation_sweep", (*_OF_HEAD, "part", "delta"), _sweep),
    "edges": _Kind("edges", "edge_effects", _EDGE, _edges("Edges in", "sender", "receiver")),
    "edges_out": _Kind("edges", "edge_effects", _EDGE, _edges("Edges out", "receiver")),
    "directions": _Kind(
        "directions",
        "head_directions",
        (*_OF_HEAD, "kind", "direction", "side", "token", "word", "loading"),
        _directions,
    ),
}  # in the order of the card

_COLOURED = {
    "sweep": ("delta", "effect of removal"),
    "positional": ("exclusion_index", "exclusion index"),
    "prediction": ("r", "fit of the predicted kernel"),
}


def _chosen(row: Mapping[Any, Any], *columns: str) -> dict[str, Any]:
    """Return the named columns of a row as a dict; the name "± se" stands for the column delta_se. A missing column is
    None.
    """
    return {column: row.get("delta_se") if column == "± se" else row.get(column) for column in columns}


def listing(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Return rows (dicts with equal keys) as two strings, (HTML table, aligned plain text), without columns that are
    missing in every row.

    Keys are the headings. Floats have three significant digits.
    """
    columns = [column for column in rows[0] if not all(_missing(row[column]) for row in rows)]
    by_column = [_written(column, [row[column] for row in rows]) for column in columns]
    cells = [list(line) for line in zip(*by_column, strict=True)]
    look = ["" if any(isinstance(row[column], str) for row in rows) else ' class="number"' for column in columns]
    titles = "".join(f'<th scope="col"{kind}>{escape(column)}</th>' for column, kind in zip(columns, look, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{cell}</td>' for cell, kind in zip(line, look, strict=True))}</tr>"
        for line in ([cell if isinstance(cell, Html) else escape(cell) for cell in line] for line in cells)
    )
    text = pd.DataFrame(cells, columns=columns).to_string(index=False)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>", text


def _missing(value: Any) -> bool:
    """Return whether a table cell is None or NaN."""
    return bool(pd.isna(value))


def _written(column: str, values: list[Any]) -> list[str]:
    """Return the cells `values` of the column named `column` as a list of texts: floats with three significant digits,
    or as whole numbers for ranks and the like.
    """
    decimals = 0 if column in _WHOLE else 4 if column == "± se" else 3
    texts = []
    for value in values:
        if isinstance(value, float | np.floating) and not _missing(value):
            text = f"{value:.0f}" if column in _WHOLE else short_number(float(value), decimals)
            texts.append(text.replace("-", _MINUS))
        else:
            texts.append(_cell(value))
    return texts


def _cell(value: Any) -> str:
    """Return a table cell that is not a float as text: "" for None or NaN, "yes" or "no" for booleans."""
    if _missing(value):
        return ""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    return value if isinstance(value, str) else str(value).replace("-", _MINUS)
