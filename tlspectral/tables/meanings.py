"""Columns that changed their meaning under one name, and which of these changes a table follows.

`Schema.frame` writes `attrs["meanings"]` into every table that one of `CHANGES` names: how many changes there were when
the table was made. A table without that number was written before the first of them. `read_table`, `join` and
`compare_heads` say which columns of an older table mean something else now.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tlspectral.errors import warn_caller

MEANINGS = "meanings"
"""The name in `attrs`."""

_JOIN = "join("  # how the name of a joined table begins
_WITHOUT_PAIRS = ("induction", "language")  # tasks


@dataclass(frozen=True)
class Change:
    """A change of what columns mean that keep their names.

    Attributes:
        tables: names of the tables, as in their schemas. What changes in a table shows in those made from it, too.
        text: what the columns were before, and what they are now.
        touched: given a table and the `attrs` that say how its numbers were made, the columns that the change concerns.
            It is asked only of a table that was made before the change. None where no number of the table differs.
    """

    tables: tuple[str, ...]
    text: str
    touched: Callable[[pd.DataFrame, Mapping[Any, Any]], list[str]]


def with_values(*names: str) -> Callable[[pd.DataFrame, Mapping[Any, Any]], list[str]]:
    """Return a `touched` of some columns, unless all their values are missing.

    They are also found with a name in front, as `join` puts it, and with the endings of `compare_heads`.
    """
    pattern = re.compile(rf"(?:.+_)?(?:{'|'.join(names)})(?:_a|_b|_diff)?")

    def touched(table: pd.DataFrame, attrs: Mapping[Any, Any]) -> list[str]:
        return [str(name) for name in table if pattern.fullmatch(str(name)) and table[name].notna().any()]

    return touched


def _outputs(table: pd.DataFrame, attrs: Mapping[Any, Any]) -> list[str]:
    """Return where a sweep takes outputs away without saying what replaces them, on a task that may be of pairs."""
    if "replace" in attrs or attrs.get("task") in _WITHOUT_PAIRS:
        return []
    if "part" in table:
        return ["part"] if (table["part"] == "output").any() else []
    return [str(name) for name in table if re.match(r"(?:.+_)?output_", str(name))]


def _band_controls(table: pd.DataFrame, attrs: Mapping[Any, Any]) -> list[str]:
    """Return the columns of the control where some rows of a sweep are of bands."""
    if "part" in table and (table["part"] == "rotary_band").any():
        return [str(name) for name in table if str(name).startswith("control_") and table[name].notna().any()]
    return [str(name) for name in table if re.match(r"(?:.+_)?rotary_band_control_", str(name))]


CHANGES = (
    Change(
        ("analyze_heads", "analyze_models.heads", "head_history.heads", "copying_scores", "compare_heads"),
        "W_U was taken as the model held it, so that the numbers hung on how the model was loaded; now it is centred "
        "over the vocabulary",
        with_values("copying", "positivity"),
    ),
    Change(
        ("ablation_sweep", "summarize_sweep"),
        'The part "output" was the output set to zero on every task; on a task of pairs it is now what the head writes '
        'on the pair of each prompt, and zero is Output("zero")',
        _outputs,
    ),
    Change(
        ("ablation_sweep",),
        "The control of a Band was random scores of equal size; now it is random sets of the head's frequencies",
        _band_controls,
    ),
    Change(
        ("faithfulness",),
        "The interval was of percentiles of a bootstrap over pairs; now it is Fieller's",
        with_values("low", "high"),
    ),
    Change(
        ("positional_symbolic", "head_history.positional", "head_history.frequencies"),
        "In layers with a window, on prompts that are longer, swaps counted of which the window hides a block from the "
        "query; now they are left out",
        with_values("s_pos", "s_sym"),
    ),
    Change(
        ("ov_attribution",),
        "Under LayerNorm, writes were measured with their mean over d_model, which no reader sees; now without it",
        with_values("norm", "cosine"),
    ),
)
"""The changes, the oldest first. A new one goes to the end: tables hold how many there were."""


RENAMED = {
    "band_effects": {
        "random_delta": "control_delta",
        "random_delta_se": "control_delta_se",
        "random_delta_min": "control_delta_min",
        "random_delta_max": "control_delta_max",
        "random_score_rms": "control_rms",
        "random_overlap": "control_overlap",
    }
}
"""By table, from the name of a column in an earlier release to its name now."""


def renamed_columns(name: Any) -> Mapping[str, str]:
    """Return a dict from earlier to present names of the columns of the table `name`; empty for other values."""
    return RENAMED.get(name, {}) if isinstance(name, str) else {}


def followed(attrs: Mapping[Any, Any]) -> int:
    """Return how many of the changes a table follows, by its `attrs`: 0 where they do not say."""
    number = attrs.get(MEANINGS)
    return number if isinstance(number, int) and not isinstance(number, bool) else 0


def carried(table: pd.DataFrame) -> dict[str, int]:
    """Return what a table that holds the columns of another one says in its `attrs` of their meaning."""
    return {MEANINGS: followed(table.attrs) if other_meanings(table) else len(CHANGES)}


def changed(name: str) -> bool:
    """Return whether columns of a table changed their meaning."""
    return any(name in change.tables for change in CHANGES)


def changes_of_function(name: str) -> int:
    """Return how many changes the tables of a function have had, of which this is one (`"head_history.heads"`)."""
    function = name.partition(".")[0]
    return sum(any(table.partition(".")[0] == function for table in change.tables) for change in CHANGES)


def other_meanings(table: pd.DataFrame) -> dict[int, list[str]]:
    """Return the columns of a table that have an older meaning, by the place of the change among `CHANGES`."""
    found: dict[int, list[str]] = {}
    for columns, attrs in _sources(table):
        for place, change in enumerate(CHANGES[followed(attrs) :], followed(attrs)):
            if attrs.get("table") in change.tables and (names := change.touched(columns, attrs)):
                found[place] = [*found.get(place, []), *names]
    return found


def first_table(attrs: Mapping[Any, Any]) -> str | None:
    """Return the name of a table by its `attrs`; for a joined one, the name of the first table in it."""
    name = attrs.get("table")
    if not isinstance(name, str) or not name.startswith(_JOIN):
        return name if isinstance(name, str) else None
    first = re.split(r"[,)]", name.removeprefix(_JOIN))[0]
    return "analyze_heads" if first == "heads" else first


def _sources(table: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, Mapping[Any, Any]]]:
    """Yield a table and its `attrs`; of a joined one the columns and `attrs` of each table that is in it."""
    attrs = table.attrs
    made_by, joined = attrs.get("table"), attrs.get("joined")
    if not (isinstance(made_by, str) and made_by.startswith(_JOIN) and isinstance(joined, dict)):
        yield table, attrs
        return
    bare = table.copy(deep=False)
    bare.attrs = {}
    sources = {str(name): one for name, one in joined.items() if isinstance(one, dict)}
    # A table that was joined by keyword is called by it, and so are its columns.
    labelled = {name: one for name, one in sources.items() if not name.startswith(str(one.get("table")))}
    of_label = {name: [column for column in bare if str(column).startswith(f"{name}_")] for name in labelled}
    others = bare.drop(columns=[column for columns in of_label.values() for column in columns], errors="ignore")
    yield others, {**attrs, "table": first_table(attrs)}
    yield from ((bare[of_label[name]] if name in labelled else others, one) for name, one in sources.items())


def warn_of_older(table: pd.DataFrame, said: str) -> None:
    """Warn where columns of a table mean something else now; `said` names the table."""
    if followed(table.attrs) > len(CHANGES):
        warn_caller(
            f"{said} was made by a newer version of tlspectral, in which columns may mean something else than in this "
            "one: upgrade tlspectral"
        )
    for place, names in other_meanings(table).items():
        warn_caller(
            f"{said} was made before a change, or does not say: {_listed(names)} may mean something else than now. "
            f"{CHANGES[place].text}. Make the table again before its numbers are set beside new ones"
        )


def _listed(names: Iterable[str]) -> str:
    """Return names of columns as a sentence has them, at most six."""
    shown = list(names)
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} others" if len(shown) > 6 else "")
