"""Columns that changed their meaning under the same name, and a check which of these changes a table follows.

`Schema.frame` writes `attrs["meanings"]` into every table that `CHANGES` names: the number of changes at the time the
table was made. A table without this number is older than the first change. `read_table`, `join` and `compare_heads`
warn about columns of older tables that mean something else now.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tlspectral.errors import warn_caller

MEANINGS = "meanings"
"""Key in `attrs` of the number of changes that a table follows."""

_JOIN = "join("  # how the name of a joined table begins
_WITHOUT_PAIRS = ("induction", "language")  # tasks


@dataclass(frozen=True)
class Change:
    """A change in the meaning of columns that keep their names.

    Attributes:
        tables: names of the tables, as in their schemas. Tables made from these tables change too.
        text: the old and the new meaning.
        touched: function that gets a table made before the change, and its `attrs`. It returns the columns whose
            meaning changed; an empty list means that no number of this table differs.
    """

    tables: tuple[str, ...]
    text: str
    touched: Callable[[pd.DataFrame, Mapping[Any, Any]], list[str]]


def with_values(*names: str) -> Callable[[pd.DataFrame, Mapping[Any, Any]], list[str]]:
    """Return a function for `Change.touched`: it gets a table and its `attrs`, and lists the columns `names` that have
    any value.

    It also finds these columns with a prefix from `join` and with the endings `_a`, `_b` and `_diff` of
    `compare_heads`.
    """
    pattern = re.compile(rf"(?:.+_)?(?:{'|'.join(names)})(?:_a|_b|_diff)?")

    def touched(table: pd.DataFrame, attrs: Mapping[Any, Any]) -> list[str]:
        return [str(name) for name in table if pattern.fullmatch(str(name)) and table[name].notna().any()]

    return touched


def _outputs(table: pd.DataFrame, attrs: Mapping[Any, Any]) -> list[str]:
    """Return the names of columns about removed head outputs in an old sweep, a table with its `attrs`, which do not
    record what replaced an output.

    In a table with a row per part this is the column "part". The list is empty for the tasks "induction" and
    "language", whose prompts have no pairs, because the meaning did not change for them.
    """
    if "replace" in attrs or attrs.get("task") in _WITHOUT_PAIRS:
        return []
    if "part" in table:
        return ["part"] if (table["part"] == "output").any() else []
    return [str(name) for name in table if re.match(r"(?:.+_)?output_", str(name))]


def _band_controls(table: pd.DataFrame, attrs: Mapping[Any, Any]) -> list[str]:
    """Return the names of the control columns with values of a sweep that removed rotary bands; [] for any other sweep.

    `table` is the sweep. `attrs`, its metadata, is not used.
    """
    if "part" in table and (table["part"] == "rotary_band").any():
        return [str(name) for name in table if str(name).startswith("control_") and table[name].notna().any()]
    return [str(name) for name in table if re.match(r"(?:.+_)?rotary_band_control_", str(name))]


def _group_controls(table: pd.DataFrame, attrs: Mapping[Any, Any]) -> list[str]:
    """Return the names of the control columns with values of an old sweep over sets of heads, if a set may consist of
    whole key/value groups; [] for any other sweep.

    `table` is the sweep, `attrs` its metadata. An old sweep does not say how many heads share keys.
    """
    sets = attrs.get("sets")
    if not isinstance(sets, Mapping) or not any(map(_whole_blocks, sets.values())):
        return []
    return [str(name) for name in table if re.match(r"(?:.+_)?control_", str(name)) and table[name].notna().any()]


def _whole_blocks(names: Iterable[str]) -> bool:
    """Return True if heads such as "L5H2" and "L5H3" form whole blocks of two or more consecutive heads, as groups that
    share keys do.
    """
    heads: dict[str, set[int]] = {}
    for name in names:
        layer, _, head = str(name).partition("H")
        heads.setdefault(layer, set()).add(int(head))
    most = min(map(len, heads.values()), default=0)
    return any(
        all({head // size * size + place for head in own for place in range(size)} == own for own in heads.values())
        for size in range(2, most + 1)
    )


CHANGES = (
    Change(
        ("analyze_heads", "analyze_models.heads", "head_history.heads", "copying_scores", "compare_heads"),
        "Before, W_U was used as the model held it, and the numbers depended on how the model was loaded; now W_U is "
        "centred over the vocabulary",
        with_values("copying", "positivity"),
    ),
    Change(
        ("ablation_sweep", "summarize_sweep"),
        'Before, the part "output" set the output to zero on every task; now, on a task of pairs, the output is '
        'replaced by the head\'s output on the paired prompt, and Output("zero") sets it to zero',
        _outputs,
    ),
    Change(
        ("ablation_sweep",),
        "Before, the control of a Band was random scores of equal size; now it is random sets of the head's "
        "frequencies",
        _band_controls,
    ),
    Change(
        ("faithfulness",),
        "Before, the interval was a percentile interval of a bootstrap over pairs; now it is Fieller's",
        with_values("low", "high"),
    ),
    Change(
        ("positional_symbolic", "head_history.positional", "head_history.frequencies"),
        "Before, swaps were counted in layers whose window hides one of the two blocks from the query; now these swaps "
        "are left out",
        with_values("s_pos", "s_sym"),
    ),
    Change(
        ("ov_attribution",),
        "Before, under LayerNorm, writes were measured with their mean over d_model, which no reader sees; now the "
        "mean is removed first",
        with_values("norm", "cosine"),
    ),
    Change(
        ("ablation_sweep",),
        "Before, the control of a set of whole key/value groups was random sets of heads; now it is random sets of "
        "groups",
        _group_controls,
    ),
)
"""All changes, oldest first. Add a new change at the end, because tables store the number of changes they follow."""


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
    """Return a dict from earlier to present column names of a table; `name` is its `attrs["table"]`. Empty if nothing
    was renamed.
    """
    return RENAMED.get(name, {}) if isinstance(name, str) else {}


def followed(attrs: Mapping[Any, Any]) -> int:
    """Return how many entries of `CHANGES` (changes in the meaning of columns) were in force when a table was made,
    from its `attrs`; 0 if they do not say.
    """
    number = attrs.get(MEANINGS)
    return number if isinstance(number, int) and not isinstance(number, bool) else 0


def carried(table: pd.DataFrame) -> dict[str, int]:
    """Return {"meanings": n} for the `attrs` of a new table that is made from the columns of `table`.

    n is the number of changes in the meaning of columns that the new table follows: all, if no column of `table` has an
    older meaning, otherwise as many as `table` follows, by its `attrs`.
    """
    return {MEANINGS: followed(table.attrs) if other_meanings(table) else len(CHANGES)}


def changed(name: str) -> bool:
    """Return whether any column of the table `name`, such as "faithfulness", ever changed its meaning."""
    return any(name in change.tables for change in CHANGES)


def changes_of_function(name: str) -> int:
    """Return how often columns of a function's tables changed their meaning; `name` is one of its tables, such as
    `"head_history.heads"`.
    """
    function = name.partition(".")[0]
    return sum(any(table.partition(".")[0] == function for table in change.tables) for change in CHANGES)


def other_meanings(table: pd.DataFrame) -> dict[int, list[str]]:
    """Return a dict from the index of a change in `CHANGES` to the names of the table's columns that still have the
    older meaning.
    """
    older: dict[int, list[str]] = {}
    for columns, attrs in _sources(table):
        for place, change in enumerate(CHANGES[followed(attrs) :], followed(attrs)):
            if attrs.get("table") in change.tables and (names := change.touched(columns, attrs)):
                older[place] = [*older.get(place, []), *names]
    return older


def first_table(attrs: Mapping[Any, Any]) -> str | None:
    """Return the name of a table from its `attrs`, such as "ablation_sweep", or None; for a joined table, the name of
    the first table in it.
    """
    name = attrs.get("table")
    if not isinstance(name, str) or not name.startswith(_JOIN):
        return name if isinstance(name, str) else None
    first = re.split(r"[,)]", name.removeprefix(_JOIN))[0]
    return "analyze_heads" if first == "heads" else first


def _sources(table: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, Mapping[Any, Any]]]:
    """Yield (columns as a DataFrame, `attrs`) of a table; for a result of `join`, yield them for every table that was
    joined.
    """
    attrs = table.attrs
    made_by, joined = attrs.get("table"), attrs.get("joined")
    if not (isinstance(made_by, str) and made_by.startswith(_JOIN) and isinstance(joined, dict)):
        yield table, attrs
        return
    bare = table.copy(deep=False)
    bare.attrs = {}
    sources = {str(name): source for name, source in joined.items() if isinstance(source, dict)}
    # The columns of a table that was joined by keyword begin with this keyword.
    labelled = {name: source for name, source in sources.items() if not name.startswith(str(source.get("table")))}
    by_label = {name: [column for column in bare if str(column).startswith(f"{name}_")] for name in labelled}
    unlabelled = bare.drop(columns=[column for columns in by_label.values() for column in columns], errors="ignore")
    yield unlabelled, {**attrs, "table": first_table(attrs)}
    yield from ((bare[by_label[name]] if name in labelled else unlabelled, source) for name, source in sources.items())


def warn_of_older(table: pd.DataFrame, title: str) -> None:
    """Give a warning for each change that makes a column of the table mean something else now; `title` names the table
    in it.

    A table from a newer version of tlspectral also gets a warning.
    """
    if followed(table.attrs) > len(CHANGES):
        warn_caller(
            f"{title} was made by a newer version of tlspectral, whose columns may mean something else: upgrade "
            "tlspectral"
        )
    for place, names in other_meanings(table).items():
        warn_caller(
            f"{title} was made before a change, or does not record its version: {_listed(names)} may mean something "
            f"else than now. {CHANGES[place].text}. Make the table again before you compare it with new tables"
        )


def _listed(names: Iterable[str]) -> str:
    """Return column names as one text: at most six names, then the number of the rest."""
    shown = list(names)
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} others" if len(shown) > 6 else "")
