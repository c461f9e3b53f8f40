"""Summary of a table of heads as text for a terminal: the first screen, and all lists."""

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

if TYPE_CHECKING:
    import pandas as pd


_BESIDE = {"D_head_null_mean": "null mean", "D_head_null_pct": "null at or below", "D_head_z": "z"}
"""Short titles of columns that stand beside the column they belong to."""


def read_heads(path: Path) -> "pd.DataFrame":
    """Return the head table in a parquet file as a DataFrame. Raises ValueError if the file holds another table."""
    from tlspectral.tables import read_table
    from tlspectral.tables.schema import require

    heads = read_table(path)
    require(heads, ("layer", "head", "D_head", "dir_frac"), "analyze_heads", name=f"table in {path}")
    return heads


_WIDE = 80  # characters of a line of the first screen
_APART = 3  # spaces between two lists


class _Cell(NamedTuple):
    """One entry of a list: the name of a head (bold on a terminal), its numbers, and its null or chance (dim)."""

    name: str = ""
    text: str = ""
    null: str = ""

    def padded(self, width: int) -> str:
        """Return the cell as text of at least `width` characters, with styles on a terminal."""
        styled = _styled(self.name, bold=True) + self.text + _styled(self.null, dim=True)
        return styled + " " * (width - sum(map(len, self)))


def _styled(text: str, **style: bool) -> str:
    """Return the text with the style (`bold` or `dim`) if standard output is a terminal and NO_COLOR is not set."""
    plain = not text or not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))
    return text if plain else typer.style(text, **style)


def first_screen(heads: "pd.DataFrame", top: int) -> str:
    """Return the text that `tlspectral show` prints about a head table, results first: the `top` strongest heads of
    each detector that are above chance, the `top` heads furthest from their null, medians over heads, and one line each
    of model, status and provenance.

    With five heads or fewer it has at most 23 lines of at most 80 characters.
    """
    from tlspectral.tables.detector_columns import DETECTORS

    lines = [_counted(heads), ""]
    if any(name in heads and heads[name].notna().any() for name in DETECTORS):
        lines.append("Strongest heads: mean attention on random repeated tokens, ± standard error")
        lines += _side_by_side([_detector_list(heads, name, top) for name in DETECTORS])
    else:
        lines.append("No detector scores in this table.")
    lines.append("")
    if "D_head_z" in heads and heads["D_head_z"].notna().any():
        lines.append("D_head, the rotational share, against random heads with the same singular values")
        lines += _side_by_side(_null_lists(heads, top))
    else:
        lines.append("No null in this table.")
    lines += ["", *_medians(heads)]
    attrs, versions = heads.attrs, heads.attrs.get("versions")
    version = f"tlspectral {versions['tlspectral']}" if isinstance(versions, dict) and "tlspectral" in versions else ""
    weights = f"weights {str(attrs['weights_sha256'])[:12]}" if attrs.get("weights_sha256") else ""
    origin = ", ".join(filter(None, (weights, version))) or "provenance not recorded"
    lines += [_cut(_statuses(heads)), f"{origin}; more: tlspectral show TABLE --all"]
    return "\n".join(lines)


def _medians(heads: "pd.DataFrame") -> list[str]:
    """Return two or three lines of text: medians over heads of D_head, the share of M_A and the share of Im(M_t), each
    beside the value of random heads.
    """
    from tlspectral.tables.head_columns import null_band

    said = {"D_head": "D_head", "dir_frac": "dir_frac (M_A)", "rope_imag_frac": "rope_imag_frac (Im(M_t))"}
    medians = []
    for column, text in said.items():
        if column in heads and heads[column].notna().any():
            band = (0.5,) if column == "rope_imag_frac" else null_band(heads, column)
            random = f" (random {band[0]:.3g})" if band is not None else ""
            # No line breaks inside of one median.
            medians.append(f"{text} {heads[column].dropna().median():.3f}{random}".replace(" ", "\N{NO-BREAK SPACE}"))
    wrapped = textwrap.wrap(f"Medians over heads: {', '.join(medians)}", _WIDE)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped] if medians else []


def _counted(heads: "pd.DataFrame") -> str:
    """Return a line of at most 80 characters with the model's name and its numbers of heads and layers; the middle of a
    long name is left out.
    """
    attrs = heads.attrs
    revision = f" ({attrs['revision']})" if attrs.get("revision") else ""
    name, counts = f"{attrs.get('model', 'unnamed model')}{revision}", f": {_numbers_of(heads)}"
    most = _WIDE - len(counts)
    if len(name) > most:
        name = f"{name[: most // 3]}...{name[len(name) - (most - most // 3 - 3) :]}"
    return name + counts


def _numbers_of(heads: "pd.DataFrame") -> str:
    """Return the numbers of heads and layers of a head table as text, such as "8 heads in 2 layers"."""
    return f"{len(heads)} heads in {heads['layer'].nunique()} layers"


def _cut(line: str) -> str:
    """Return a line of text with at most 80 characters."""
    return textwrap.shorten(line, _WIDE, placeholder=" ...")


def _detector_list(heads: "pd.DataFrame", name: str, top: int) -> list[_Cell]:
    """Return the cells of one detector: its kind, its chance level, and its `top` strongest heads above chance."""
    from tlspectral.tables.detector_columns import DETECTORS, detector_chance, heads_above_chance
    from tlspectral.tables.printed import short_number

    chance = detector_chance(heads, name)
    levels = sorted(chance.values()) if isinstance(chance, dict) else [] if chance is None else [chance]
    said = " to ".join(dict.fromkeys(f"{level:.3f}" for level in (levels[0], levels[-1]))) if levels else "not recorded"
    cells = [_Cell(text=DETECTORS[name].kind), _Cell(null=f"chance {said}")]
    strongest = heads_above_chance(heads, name, top)
    if strongest is None:
        return [cells[0], _Cell(text="not computed")]
    if strongest.empty:
        return [*cells, _Cell(text="none above chance")]
    errors = strongest[f"{name}_se"] if f"{name}_se" in strongest else [float("nan")] * len(strongest)
    for head, score, error in zip(_names(strongest), strongest[name], errors, strict=True):
        text = f" {short_number(score)}" + (f" ± {short_number(error, 4)}" if error == error else "")
        cells.append(_Cell(head, text))
    return cells


def _null_lists(heads: "pd.DataFrame", top: int) -> Iterator[list[_Cell]]:
    """Yield two lists of cells: a title and the `top` heads whose D_head is furthest above its null, then below."""
    for title, rows in zip(("furthest above", "furthest below"), _furthest(heads, top), strict=True):
        cells = [_Cell(text=title)]
        means = rows["D_head_null_mean"] if "D_head_null_mean" in rows else [float("nan")] * len(rows)
        for head, value, mean, z in zip(_names(rows), rows["D_head"], means, rows["D_head_z"], strict=True):
            null = f" (null {mean:.3f}, z {z:+.1f})" if mean == mean else f" (z {z:+.1f})"
            cells.append(_Cell(head, f" {value:.3f}", null))
        yield cells if len(rows) else [*cells, _Cell(text="none")]


def _furthest(heads: "pd.DataFrame", top: int) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """Return the rows of the `top` heads whose D_head is furthest above its null, and of the `top` furthest below."""
    ordered = heads.dropna(subset=["D_head_z"]).sort_values("D_head_z", kind="stable")
    return ordered.query("D_head_z > 0").iloc[::-1].head(top), ordered.query("D_head_z < 0").head(top)


def _names(heads: "pd.DataFrame") -> list[str]:
    """Return the names of the rows' heads, all of the same width."""
    from tlspectral.selection.node_names import head_name

    names = heads["name"] if "name" in heads else map(head_name, heads["layer"], heads["head"])
    texts = list(map(str, names))
    return [text.ljust(max(map(len, texts))) for text in texts]


def _side_by_side(lists: Iterable[Sequence[_Cell]]) -> list[str]:
    """Return lines of text with the lists as columns."""
    lists = list(lists)
    widths = [max(sum(map(len, cell)) for cell in cells) + _APART for cells in lists]
    rows = zip_longest(*lists, fillvalue=_Cell())
    return ["".join(cell.padded(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def summary(heads: "pd.DataFrame", top: int) -> str:
    """Return the text that `tlspectral show --all` prints about a head table: model, the `top` heads per detector that
    are above chance, the `top` heads furthest from their null, and numbers of statuses.
    """
    from tlspectral.tables.detector_columns import DETECTORS, heads_above_chance
    from tlspectral.tables.head_columns import column_title

    parts = [_provenance(heads), *random_heads(heads)]
    for name, detector in DETECTORS.items():
        strongest = heads_above_chance(heads, name, top)
        if strongest is not None:
            spectrum = ["D_head", "D_head_null_mean", "D_head_null_pct", "dir_frac", "rope_imag_frac"]
            rows = _rows(strongest, [name, f"{name}_se", *spectrum]) if len(strongest) else "none above chance"
            parts.append(f"{detector.title} heads, by {name}\n{rows}")
    if not any(name in heads and heads[name].notna().any() for name in DETECTORS):
        parts.append("No detector scores in this table.")
    rotational = column_title("D_head")
    columns = ["D_head", "D_head_null_mean", "D_head_z", "D_head_null_pct", "dir_frac"]
    if "D_head_z" in heads and heads["D_head_z"].notna().any():
        for side, rows in zip(("above", "below"), _furthest(heads, top), strict=True):
            if len(rows):
                parts.append(f"{rotational} furthest {side} its null\n{_rows(rows, columns)}")
    else:
        parts.append("No null in this table.")
    parts.append(_statuses(heads))
    return "\n\n".join(parts)


def changes(comparison: "pd.DataFrame", top: int) -> str:
    """Return the text that `tlspectral compare` prints: the models, what was left out, and the `top` heads that changed
    most in behaviour and spectrum.

    `comparison` is a table of `compare_heads`.
    """
    import pandas as pd

    from tlspectral.tables.head_columns import column_title
    from tlspectral.tables.printed import printed

    attrs = comparison.attrs
    alone, columns = attrs["left_out"]["heads"], attrs["left_out"]["columns"]
    lines = [f"{attrs['b']['model']} (b) against {attrs['a']['model']} (a): {len(comparison)} heads compared"]
    if any(alone.values()):
        lines.append(f"left out, in one table only: {alone['a']} heads of a, {alone['b']} of b")
    lines += [f"left out, {name}: {reason}" for name, reason in columns.items()]
    lines += _weights(comparison, top)
    if not attrs["bands"]:
        return "\n".join([*lines, "No column has a band: the tables have neither a null nor detector scores."])
    for family in ("behaviour", "spectrum"):
        changed = comparison.dropna(subset=[f"{family}_rank"]).sort_values(f"{family}_rank", kind="stable")
        if changed.empty:
            lines.append(f"{family}: no difference of {attrs['floor']:g} or more and beyond its band")
            continue
        counted = f"{len(changed)} of {len(comparison)} heads"
        lines.append(f"{family}: {counted} differ by {attrs['floor']:g} or more and beyond their band")
        ranked = changed.head(top)
        kinds = [f"{column_title(name)}: {attrs['bands'][name]}" for name in ranked[f"{family}_of"].unique()]
        lines.append(f"band: twice the sd of {'; '.join(kinds)}")
        shown = pd.DataFrame({"name": ranked["name"], "column": ranked[f"{family}_of"].map(column_title)})
        for part in ("a", "b", "diff", "band"):
            shown[part] = [row[f"{row[f'{family}_of']}_{part}"] for _, row in ranked.iterrows()]
        lines.append(printed(shown, 4))
    return "\n".join(lines)


def _weights(comparison: "pd.DataFrame", top: int) -> list[str]:
    """Return lines of text about weights: which layers have equal and different hashes and, if models were compared,
    the `top` heads whose matrices differ most.

    `comparison` is a table of `compare_heads`.
    """
    from tlspectral.heads.comparison import layers_named
    from tlspectral.tables.printed import printed

    attrs = comparison.attrs
    known = attrs["weights"]
    sentences = [f"differ in {layers_named(known['differ'])}"] if known.get("differ") else []
    sentences += [f"are equal in {layers_named(known['equal'])}"] if known.get("equal") else []
    lines = [f"weights of attention {' and '.join(sentences) or 'unknown: ' + known['unknown']}"]
    if "qk_change" not in comparison:
        if known.get("differ"):
            lines.append("To see how much each head differs, give the two models instead of their tables.")
        if known.get("differ") and not known["equal"]:
            lines.append("No layer is equal. If these are two trainings, heads with the same index are unrelated.")
        return lines
    lines += [f"outside of the operators, {name} differ in {layers_named(at)}" for name, at in attrs["outside"].items()]
    moved = [f"{name} is {now}" for name, now in attrs.get("moved", {}).items()]
    lines += [f"at another index in b: {', '.join(moved[:top])}{' ...' if len(moved) > top else ''}"] if moved else []
    largest = comparison.assign(largest=comparison[["qk_change", "ov_change"]].max(axis=1)).query("largest > 0")
    lines.append(f"operators: {len(largest)} of {len(comparison)} heads differ, relative to a")
    if len(largest):
        ordered = largest.sort_values("largest", ascending=False, kind="stable")
        lines.append(printed(ordered[["name", "qk_change", "ov_change"]].head(top), 4))
    return lines


_SHOWN = (
    "weights_sha256", "backend", "null_draws", "null_blocks", "seed", "detectors", "user_hooks", "versions",
    "rotary_valid_up_to",
)  # fmt: skip


def _provenance(heads: "pd.DataFrame") -> str:
    """Return lines of text about a head table: model, numbers of heads and layers, settings by their names in
    `attrs`, and the self-check.
    """
    from tlspectral.report.sections import said

    attrs = heads.attrs
    revision = f" ({attrs['revision']})" if attrs.get("revision") else ""
    lines = [f"{attrs.get('model', 'unnamed model')}{revision}: {_numbers_of(heads)}"]
    lines += [f"{key}: {said(attrs[key])}" for key in _SHOWN if attrs.get(key) not in (None, [])]
    return "\n".join([*lines, self_check(attrs)])


def random_heads(heads: "pd.DataFrame") -> list[str]:
    """Return a list with one line of text: the median D_head and dir_frac of random heads. It is empty for a head
    table without a null.
    """
    from tlspectral.tables.head_columns import column_title, null_band

    bands = {column: null_band(heads, column) for column in ("D_head", "dir_frac")}
    values = ", ".join(f"{column_title(column)} {band[0]:.3f}" for column, band in bands.items() if band is not None)
    return [f"Random heads: {values} (the heads' own singular values, random directions; medians)"] if values else []


def self_check(attrs: dict[Any, Any]) -> str:
    """Return a line of text with the error of the query-key matrices against the model's own scores, from the
    `attrs` of a head table.
    """
    from tlspectral.report.sections import said

    return f"self-check: {said(attrs.get('score_check') or 'not made')}"


def _rows(heads: "pd.DataFrame", columns: list[str]) -> str:
    """Return columns of the head table as aligned text, a line per head below titles in three lines; NaN and a
    missing column are a dash.
    """
    import pandas as pd

    from tlspectral.tables.head_columns import column_title
    from tlspectral.tables.printed import short_number

    shown = pd.DataFrame({"head": _names(heads)})
    for column in columns:
        decimals = 4 if column.endswith("_se") else 3
        values = heads[column] if column in heads else [float("nan")] * len(heads)
        shown[column] = [
            "-" if pd.isna(value) else f"{value:+.1f}" if column.endswith("_z") else short_number(value, decimals)
            for value in values
        ]
    titles = ["se" if column.endswith("_se") else _BESIDE.get(column, column_title(column)) for column in shown]
    words = [title.split(" ", 2) for title in titles]
    shown.columns = pd.MultiIndex.from_tuples([(*[""] * (3 - len(lines)), *lines) for lines in words])
    return shown.to_string(index=False, sparsify=False)


def _statuses(heads: "pd.DataFrame") -> str:
    """Return a line of text with the number of heads for each value of the column status."""
    if "status" not in heads:
        return "status: not in this table"
    odd = heads.loc[heads["status"] != "ok", "status"].value_counts()
    if odd.empty:
        return f"status: ok for all {len(heads)} heads"
    counts = ", ".join(f"{count} {status}" for status, count in odd.items())
    return f"status: {counts}, {len(heads) - odd.sum()} ok"
