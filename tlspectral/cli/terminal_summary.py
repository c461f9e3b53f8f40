"""Summary of a table of heads as text for a terminal."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def summary(heads: "pd.DataFrame", top: int) -> str:
    """Return the text that `tlspectral show` prints about a head table: model, the `top` heads per detector, the
    `top` heads furthest from their null, and numbers of statuses.
    """
    from tlspectral.tables.detector_columns import DETECTORS
    from tlspectral.tables.head_columns import column_title

    parts = [_provenance(heads), *random_heads(heads)]
    for name, detector in DETECTORS.items():
        scored = heads.dropna(subset=[name]).nlargest(top, name) if name in heads else heads.iloc[:0]
        if len(scored):
            spectrum = ["D_head", "D_head_null_mean", "D_head_null_pct", "dir_frac", "rope_imag_frac"]
            parts.append(f"{detector.title} heads, by {name}\n{_rows(scored, [name, f'{name}_se', *spectrum])}")
    if not any(name in heads and heads[name].notna().any() for name in DETECTORS):
        parts.append("No detector scores in this table.")
    rotational = column_title("D_head")
    columns = ["D_head", "D_head_null_mean", "D_head_z", "D_head_null_pct", "dir_frac"]
    if "D_head_z" in heads and heads["D_head_z"].notna().any():
        ordered = heads.dropna(subset=["D_head_z"]).sort_values("D_head_z", kind="stable")
        above, below = ordered.query("D_head_z > 0").iloc[::-1].head(top), ordered.query("D_head_z < 0").head(top)
        if len(above):
            parts.append(f"{rotational} furthest above its null\n{_rows(above, columns)}")
        if len(below):
            parts.append(f"{rotational} furthest below its null\n{_rows(below, columns)}")
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
    lines = [
        f"{attrs.get('model', 'unnamed model')}{revision}: {len(heads)} heads in {heads['layer'].nunique()} layers"
    ]
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

    from tlspectral.selection import head_name
    from tlspectral.tables.head_columns import column_title
    from tlspectral.tables.printed import short_number

    names = heads["name"] if "name" in heads else map(head_name, heads["layer"], heads["head"])
    shown = pd.DataFrame({"head": list(map(str, names))})
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
