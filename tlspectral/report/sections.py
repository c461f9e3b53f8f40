"""The sections of the page as plain HTML, which need no script and can be printed."""

from collections.abc import Mapping
from html import escape
from typing import Any

import pandas as pd

from tlspectral.report.card_sections import Html, listing
from tlspectral.report.drawings import Rows, kernel_drawing
from tlspectral.report.head_data import BAND_DEVIATIONS, NULL_METRICS
from tlspectral.tables.detector_columns import DETECTORS, detector_chance, heads_above_chance
from tlspectral.tables.head_columns import COLUMNS, column_title, null_band
from tlspectral.tables.schema import Column, columns_of

_TOP_HEADS = 5  # of each detector
_NOT_COMPUTED = '<p class="none">not computed</p>'
_NONE_ABOVE = '<p class="none">none above chance</p>'
_TAIL = 0.025
_NAMED_HEADS = 24  # heads named for each status; the rest is counted
_MOST_DRAWN = 24  # kernels


def counts(heads: pd.DataFrame) -> str:
    """Return a sentence with the number of heads and layers in a head table."""
    layers = heads["layer"].nunique()
    return f"{len(heads):,} heads in {layers:,} layer{'s' * (layers != 1)}."


def detector_tables(heads: pd.DataFrame) -> str:
    """Return HTML with a table per detector: its five strongest heads above chance, their scores, standard errors,
    D_head and its null.

    "" if the head table has no detector scores.
    """
    if not _has_detectors(heads):
        return ""
    return "".join(
        f"<div><h3>{detector.title} heads <code>{name}</code></h3>{_detector_table(heads, name)}</div>"
        for name, detector in DETECTORS.items()
    )


def _has_detectors(heads: pd.DataFrame) -> bool:
    """Return whether the head table has a value in any detector column (prev, dup, ind)."""
    return any(name in heads and heads[name].notna().any() for name in DETECTORS)


def _detector_table(heads: pd.DataFrame, name: str) -> str:
    """Return an HTML table of the five heads with the highest score of the detector `name`, such as "prev", without
    heads at chance; or the HTML text "none above chance" or "not computed".
    """
    rows = [
        {
            "head": _head_link(row),
            "score": row[name],
            "± se": row.get(f"{name}_se"),
            column_title("D_head"): row["D_head"],
            "null mean": row.get("D_head_null_mean"),
            "null at or below": row.get("D_head_null_pct"),
        }
        for row in _top_heads(heads, name)
    ]
    if rows:
        return listing(rows)[0]
    return _NOT_COMPUTED if heads_above_chance(heads, name, _TOP_HEADS) is None else _NONE_ABOVE


def _top_heads(heads: pd.DataFrame, detector: str) -> list[dict[Any, Any]]:
    """Return the rows (dicts) of the five heads with the highest score of a detector, highest first, without heads at
    chance; [] if all are at chance.
    """
    strongest = heads_above_chance(heads, detector, _TOP_HEADS)
    return [] if strongest is None else strongest.to_dict("records")


def _head_link(row: Mapping[Any, Any]) -> Html:
    """Return an HTML link with the head's name, which selects the head in the page's grid and plane; `row` is its row
    of the head table.
    """
    return Html(f'<a href="#L{int(row["layer"])}H{int(row["head"])}">{escape(str(row["name"]))}</a>')


def detector_note(heads: pd.DataFrame) -> str:
    """Return sentences for the page that explain the detector tables: on which prompts heads were scored, the chance
    level, and the columns D_head and null.
    """
    if not _has_detectors(heads):
        return "This table has no detector scores, so it does not show what the heads attend to."
    beside = (
        f"{column_title('D_head')}: sum of |Im λ| over sum of |λ|, λ the eigenvalues of M. null mean: the mean over "
        "random heads with the same singular values. null at or below: share of these random heads that are not above "
        "the head."
    )
    detectors = heads.attrs.get("detectors")
    if not isinstance(detectors, dict):
        return f"This table does not record the prompts of its detectors. {beside}"
    text = (
        f"Scores: mean attention on {detectors.get('n_sequences', 'some')} random sequences [BOS, r, r], where r has "
        f"{detectors.get('segment_length', 'some')} tokens, with standard errors over sequences."
    )
    return " ".join(filter(None, (text, _chance_note(heads), beside)))


def _chance_note(heads: pd.DataFrame) -> str:
    """Return a sentence with the detectors' chance levels, by layer if attention windows differ; "" if the head table
    does not record them.
    """
    levels = {name: _level(level) for name in DETECTORS if (level := detector_chance(heads, name)) is not None}
    if len(set(levels.values())) == 1:
        return f"Chance is {levels.popitem()[1]}. Heads at chance are left out."
    by_name = "; ".join(f"{name} {level}" for name, level in levels.items())
    return f"Chance: {by_name}. Heads at chance are left out." if levels else ""


def _level(level: float | dict[str, float]) -> str:
    """Return a chance level as text with three decimals; for a dict by layer, each level with its layers, such as
    "0.031 in L0 L1".
    """
    if not isinstance(level, dict):
        return f"{level:.3f}"
    layers: dict[str, list[str]] = {}
    for layer, value in level.items():
        layers.setdefault(f"{value:.3f}", []).append(layer)
    return ", ".join(f"{value} in {' '.join(names)}" for value, names in layers.items())


def null_table(heads: pd.DataFrame) -> str:
    """Return an HTML table with a row per metric that has a null: median over heads, median null mean ± 2 sd, and how
    many heads lie below, inside or above the central 95 % of their own null draws.
    """
    rows = []
    for metric in NULL_METRICS:
        band = null_band(heads, metric)
        if metric not in heads or band is None:
            continue
        row: dict[str, Any] = {"metric": column_title(metric), "median head": heads[metric].dropna().median()}
        row |= {"null": band[0], "± 2 sd": BAND_DEVIATIONS * band[1]}
        column = f"{metric}_null_pct"
        drawn = heads[column].dropna() if column in heads else pd.Series(dtype=float)
        below, above = int((drawn <= _TAIL).sum()), int((drawn >= 1 - _TAIL).sum())
        tails = (below, len(drawn) - below - above, above) if len(drawn) else (None, None, None)
        rows.append({**row, **dict(zip(("heads below", "inside", "above"), tails, strict=True))})
    return listing(rows)[0] if rows else _NOT_COMPUTED


def statuses(heads: pd.DataFrame) -> str:
    """Return an HTML table with a row per value of the column status: the number of heads and, unless it is ok, their
    names.
    """
    if "status" not in heads:
        return _NOT_COMPUTED
    rows, of_head = [], heads["status"].fillna("missing")
    for status, count in of_head.value_counts().items():
        names = Html("all others" if count < len(heads) else "all heads")
        if status != "ok":
            named = ", ".join(map(_head_link, heads[of_head == status].head(_NAMED_HEADS).to_dict("records")))
            names = Html(named + (f" and {count - _NAMED_HEADS:,} more" if count > _NAMED_HEADS else ""))
        rows.append({"status": str(status), "heads": count, "which": names})
    return f'{listing(rows)[0]}<p class="note">{escape(COLUMNS["status"].meaning)}</p>'


def provenance(attrs: Mapping[Any, Any]) -> str:
    """Return HTML with a line per entry in the `attrs` of the head table: model, settings, versions."""
    shown = {str(key): value for key, value in attrs.items() if key != "columns"} or {"provenance": "not recorded"}
    return "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(said(value))}</dd></div>" for key, value in shown.items())


def said(value: Any) -> str:
    """Return a value from a table's `attrs` as text on one line: floats with three significant digits, lists and dicts
    without brackets.
    """
    if isinstance(value, dict):
        return ", ".join(f"{key} {said(item)}" for key, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(said, value)) or "none"
    if value is None:
        return "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def column_meanings(heads: pd.DataFrame) -> str:
    """Return an HTML table with a row per column of the head table: meaning, unit and range, source, and limits."""
    known = {**COLUMNS, **columns_of(heads.attrs)}
    rows = []
    for name in map(str, heads):
        column = known.get(name, Column(name, "Not a column of tlspectral: the user added it.", source=""))
        rows.append(
            {
                "column": name,
                "meaning": f"{column.label}: {column.meaning}" if column.label else column.meaning,
                "unit; range": f"{column.unit}; {column.range}".strip("; "),
                "source": column.source,
                "what it does not establish": column.does_not_establish,
            }
        )
    return listing(rows)[0]


def kernel_figures(kernels: Mapping[tuple[int, int], Rows], heads: pd.DataFrame) -> str:
    """Return HTML with a drawing of mean score by distance for each of the strongest heads per detector, at most 24.

    `kernels` is a dict from (layer, head) to rows of `relative_position_kernel`, `heads` the head table. If no strong
    head has a kernel, the first heads of `kernels` are drawn.
    """
    leading = [(row["layer"], row["head"]) for detector in DETECTORS for row in _top_heads(heads, detector)]
    chosen = ([pair for pair in dict.fromkeys(leading) if pair in kernels] or list(kernels))[:_MOST_DRAWN]
    rows = {(row["layer"], row["head"]): row for row in heads.to_dict("records")}
    figures = "".join(
        f"<figure><figcaption>{_head_link(rows[pair])}</figcaption>"
        f"{kernel_drawing(kernels[pair], str(rows[pair]['name']))}</figure>"
        for pair in chosen
    )
    left_out = len(kernels) - len(chosen)
    note = f'<p class="note">{left_out:,} more in the table of kernels.</p>' if left_out else ""
    return f'<div class="kernels">{figures}</div>{note}'
