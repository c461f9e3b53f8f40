"""The sections of the page in plain HTML, which need no script and can be printed."""

from collections.abc import Mapping
from html import escape
from typing import Any

import pandas as pd

from tlspectral.report.drawings import Rows, kernel_drawing
from tlspectral.report.head_data import BAND_DEVIATIONS, DETECTORS, NULL_METRICS, detector_chance
from tlspectral.tables import COLUMNS
from tlspectral.tables.head_columns import column_title
from tlspectral.tables.null_band import null_band
from tlspectral.tables.schema import columns_of

_TOP_HEADS = 5  # of each detector
_NOT_COMPUTED = '<span class="none">not computed</span>'
_NUMBER = ' class="number"'
_TAIL = 0.025
_NAMED_HEADS = 24  # of one status; more are only counted
_PROVENANCE = (
    ("model", "Model"),
    ("revision", "Revision"),
    ("checkpoint", "Checkpoint"),
    ("file", "File"),
    ("sha256", "SHA-256 of the file"),
    ("weights_sha256", "SHA-256 of the weights"),
    ("backend", "Backend"),
    ("seed", "Seed"),
    ("null_draws", "Null draws per head"),
    ("null_blocks", "Null blocks"),
    ("null_dtype", "Null eigenvalues"),
    ("score_check", "Self-check"),
    ("detectors", "Detectors"),
    ("user_hooks", "Hooks that were on the model"),
    ("rotary_valid_up_to", "Rotary angles valid up to"),
    ("versions", "Versions"),
)
_NO_LIMIT = (None, "rotary_valid_up_to")
_MOST_DRAWN = 24  # kernels


def facts(heads: pd.DataFrame) -> str:
    """Number of heads, median D_head, heads outside their null, and the self-check."""
    layers = heads["layer"].nunique()
    entries = [("Heads", f"{len(heads):,}", f"in {layers:,} layer{'s' * (layers != 1)}")]
    if heads["D_head"].notna().any():
        band = null_band(heads, "D_head")
        beside = f"null {band[0]:.3f}" if band else "no null in this table"
        entries.append((f"Median {column_title('D_head')}", f"{heads['D_head'].median():.3f}", beside))
    counts = _tails(heads, "D_head")
    if counts:
        below, above, drawn = counts
        outside = f"{below + above:,} of {drawn:,}"
        entries.append((f"{column_title('D_head')} outside its null", outside, f"{below:,} below, {above:,} above"))
    check = heads.attrs.get("score_check") or {}
    if check.get("worst_error") is not None:
        allowed = f"tolerance {check['tolerance']:.1e}" if check.get("tolerance") is not None else "worst error"
        entries.append(("Self-check", f"{check['worst_error']:.1e}", f"worst score error; {allowed}"))
    else:
        entries.append(("Self-check", "not made", "see Provenance"))
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b> <span>{escape(beside)}</span></dd></div>"
        for name, value, beside in entries
    )


def detector_tables(heads: pd.DataFrame) -> str:
    """Tables of the strongest heads of each detector: scores with standard errors, and D_head with its null."""
    if not _has_detectors(heads):
        return ""
    return "".join(_detector_table(heads, name, title) for name, title in DETECTORS.items())


def _has_detectors(heads: pd.DataFrame) -> bool:
    return any(name in heads and heads[name].notna().any() for name in DETECTORS)


def _detector_table(heads: pd.DataFrame, name: str, title: str) -> str:
    head = f'<h3>{title} heads <code class="unit">{name}</code></h3>'
    ranked = _top_heads(heads, name)
    if ranked.empty:
        return f"<div>{head}<p>{_NOT_COMPUTED}</p></div>"
    chance = detector_chance(heads)
    rows = []
    for row in ranked.to_dict("records"):
        deviation = row.get(f"{name}_se")
        error = "" if deviation is None or pd.isna(deviation) else f" <small>± {deviation:.4f}</small>"
        rows.append(
            f'<tr><th scope="row">{_head_link(row)}</th>'
            f'<td class="meter">{_meter(row[name], chance)}</td>'
            f'<td class="number">{row[name]:.3f}{error}</td>'
            f'<td class="number">{_number(row.get("D_head"))}</td>'
            f'<td class="number">{_number(row.get("D_head_null_mean"))}</td>'
            f'<td class="number">{_number(row.get("D_head_null_pct"))}</td></tr>'
        )
    score = '<th scope="col" colspan="2" class="number">score <small>± se</small></th>'
    titles = _titles("head") + score + _titles(column_title("D_head"), "null mean", "null at or below", look=_NUMBER)
    return f"<div>{head}{_table(titles, rows)}</div>"


def _top_heads(heads: pd.DataFrame, detector: str) -> pd.DataFrame:
    """Rows of the strongest heads of a detector, strongest first; none where it was not computed."""
    if detector not in heads:
        return heads.iloc[:0]
    return heads.dropna(subset=[detector]).sort_values(detector, ascending=False, kind="stable").head(_TOP_HEADS)


def _head_link(row: Mapping[Any, Any]) -> str:
    """A head's name as a link that pins the head in the grid and in the plane."""
    return f'<a href="#L{int(row["layer"])}H{int(row["head"])}">{escape(str(row["name"]))}</a>'


def detector_note(heads: pd.DataFrame) -> str:
    """Sentences about the detectors and their prompts, as far as the table records them."""
    if not _has_detectors(heads):
        return "This table was made without detectors: it says nothing of what the heads attend to."
    beside = (
        f"{column_title('D_head')}: sum of |Im l| over sum of |l|, l the eigenvalues; null mean: the same of "
        "random heads with the head's singular values; null at or below: share of these at or below the head's."
    )
    detectors = heads.attrs.get("detectors")
    if not isinstance(detectors, dict):
        return f"This table does not say what its detectors ran on. {beside}"
    text = (
        f"Mean attention on {detectors.get('n_sequences', 'some')} random sequences [BOS, r, r], r of "
        f"{detectors.get('segment_length', 'some')} tokens; standard errors over sequences."
    )
    chance = detector_chance(heads)
    return f"{text} {beside}" if chance is None else f"{text} The tick on a bar is chance, {chance:.3f}. {beside}"


def null_table(heads: pd.DataFrame) -> str:
    """Table of the heads against their nulls, one row per metric."""
    rows = []
    for metric in NULL_METRICS:
        band, counts = null_band(heads, metric), _tails(heads, metric)
        # Without dropna, pandas 2 warns of a column that is empty.
        cells = [_number(heads[metric].dropna().median()) if metric in heads else _NOT_COMPUTED]
        cells.append(f"{band[0]:.3f} <small>± {BAND_DEVIATIONS * band[1]:#.2g}</small>" if band else _NOT_COMPUTED)
        if counts:
            below, above, drawn = counts
            cells += [f"{below:,}", f"{drawn - below - above:,}", f"{above:,}"]
        else:
            cells += [_NOT_COMPUTED] * 3
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        rows.append(f'<tr><th scope="row">{column_title(metric)}</th>{numbers}</tr>')
    numbers = ("median head", "null <small>± 2 sd</small>", "heads below", "inside", "above")
    return _table(_titles("metric") + _titles(*numbers, look=_NUMBER), rows)


def _tails(heads: pd.DataFrame, metric: str) -> tuple[int, int, int] | None:
    """Heads in the lower and the upper tail of their own null's draws, and all heads that have one."""
    column = f"{metric}_null_pct"
    drawn = heads[column].dropna() if column in heads else pd.Series(dtype=float)
    if drawn.empty:
        return None
    return int((drawn <= _TAIL).sum()), int((drawn >= 1 - _TAIL).sum()), len(drawn)


def statuses(heads: pd.DataFrame) -> str:
    """Table of statuses: their numbers of heads, and the names of heads that are not ok."""
    if "status" not in heads:
        return f"<p>{_NOT_COMPUTED}</p>"
    rows, of_head = [], heads["status"].fillna("missing")
    for status, count in of_head.value_counts().items():
        chosen = heads[of_head == status]
        named = ", ".join(_head_link(row) for row in chosen.head(_NAMED_HEADS).to_dict("records"))
        more = f" and {len(chosen) - _NAMED_HEADS:,} more" if len(chosen) > _NAMED_HEADS else ""
        listed = "all others" if status == "ok" and count < len(heads) else "all heads"
        which = listed if status == "ok" else named + more
        rows.append(
            f'<tr><th scope="row"><code>{escape(str(status))}</code></th><td class="number">{count:,}</td>'
            f"<td>{which}</td></tr>"
        )
    table = _table(_titles("status") + _titles("heads", look=_NUMBER) + _titles("which"), rows)
    return f'{table}<p class="note">{escape(COLUMNS["status"].meaning)}</p>'


def provenance(attrs: Mapping[Any, Any]) -> str:
    """Provenance of the table, from its attrs."""
    known = [(title, attrs[key]) for key, title in _PROVENANCE if key in attrs and (attrs[key], key) != _NO_LIMIT]
    shown = {key for key, _ in _PROVENANCE} | {"columns"}
    rest = [(str(key), value) for key, value in attrs.items() if key not in shown]
    entries = known + rest or [("Provenance", None)]
    return "".join(f"<div><dt>{escape(title)}</dt><dd>{_said(value)}</dd></div>" for title, value in entries)


def _said(value: Any) -> str:
    if value is None:
        return '<span class="none">not recorded</span>'
    if isinstance(value, dict):
        return ", ".join(f"{escape(str(key))} {_said(item)}" for key, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(_said(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = escape(str(value))
    return f"<code>{text}</code>" if len(text) == 64 and text.isalnum() else text


def column_meanings(heads: pd.DataFrame) -> str:
    """Table with the meanings of the columns in this table."""
    rows, known = [], {**COLUMNS, **columns_of(heads.attrs)}
    for name in heads:
        column = known.get(str(name))
        label = f'<th scope="row"><code>{escape(str(name))}</code></th>'
        if column is None:
            rows.append(f'<tr>{label}<td colspan="4">Not a column of tlspectral: its maker added it.</td></tr>')
            continue
        cells = (
            f"{column.label}: {column.meaning}" if column.label else column.meaning,
            f"{column.unit}; {column.range}",
            column.source,
            column.does_not_establish,
        )
        rows.append(f"<tr>{label}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return _table(_titles("column", "meaning", "unit; range", "source", "what it does not establish"), rows)


def _titles(*titles: str, look: str = "") -> str:
    return "".join(f'<th scope="col"{look}>{title}</th>' for title in titles)


def _table(titles: str, rows: list[str]) -> str:
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _meter(score: float, chance: float | None) -> str:
    """SVG of a score as a bar from 0 to 1, with a tick at chance."""
    tick = "" if chance is None else f'<line x1="{100 * chance:.4g}" x2="{100 * chance:.4g}" y1="0" y2="8"/>'
    return (
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="rail" width="100" height="8"/>'
        f'<rect class="filled" width="{100 * score:.4g}" height="8"/>{tick}</svg>'
    )


def _number(value: Any) -> str:
    return _NOT_COMPUTED if value is None or pd.isna(value) else f"{value:.3f}".replace("-", "\N{MINUS SIGN}")


def kernel_figures(kernels: Mapping[tuple[int, int], Rows], heads: pd.DataFrame) -> str:
    """Drawings of the kernels of each detector's strongest heads, or of the table's first if it has none of those."""
    wanted: dict[tuple[int, int], str] = {}
    for detector in DETECTORS:
        for row in _top_heads(heads, detector).to_dict("records"):
            pair = (int(row["layer"]), int(row["head"]))
            if pair in kernels:
                score = f"{detector} {row[detector]:.2f}"
                wanted[pair] = f"{wanted[pair]}, {score}" if pair in wanted else score
    drawn = wanted or dict.fromkeys(kernels, "")
    chosen = list(drawn)[:_MOST_DRAWN]
    rows = {(row["layer"], row["head"]): row for row in heads.to_dict("records")}
    figures = "".join(
        f"<figure><figcaption>{_head_link(rows[pair])} <small>{escape(drawn[pair])}</small></figcaption>"
        f"{kernel_drawing(kernels[pair], str(rows[pair]['name']))}</figure>"
        for pair in chosen
    )
    left_out = len(kernels) - len(chosen)
    note = f'<p class="note">{left_out:,} more in the table of kernels.</p>' if left_out else ""
    return f'<div class="kernels">{figures}</div>{note}'
