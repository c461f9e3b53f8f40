"""The whole page: checks of the table, its template, and the policy that forbids it every request."""

import base64
import hashlib
import os
from html import escape
from importlib.resources import files
from string import Template

import numpy as np
import pandas as pd

from tlspectral.report.head_data import head_data
from tlspectral.report.sections import (
    check_kernels,
    column_meanings,
    detector_note,
    detector_tables,
    facts,
    kernel_figures,
    null_table,
    provenance,
    statuses,
)
from tlspectral.selection import head_name
from tlspectral.tables import whole_file
from tlspectral.tables.required import require

_NEEDED = ("layer", "head", "dir_frac", "D_head")
_FRAME_HEIGHT = 800  # pixels


class Page(str):
    """The HTML of a page. A notebook shows it in a frame, without a request."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {_FRAME_HEIGHT}px; border: 0"
        return f'<iframe title="report" style="{style}" srcdoc="{escape(self)}"></iframe>'


def report(
    heads: pd.DataFrame, path: str | os.PathLike[str] | None = None, *, kernels: pd.DataFrame | None = None
) -> Page:
    """One self-contained page about a table of heads.

    On it: the heads as a grid that can be coloured by any column, the plane of dir_frac and D_head with the null, the
    strongest heads of each detector with their kernels, the heads against their nulls, statuses, provenance, and
    the meaning of every column. Pointing at a head shows its row, a click pins it, and the page's address then ends in
    its name (`#L16H0`), so that a link can lead to a head. Style, script and data are in the file, whose
    policy forbids every request and every other script. Without scripts the tables remain.

    Args:
        heads: table of `analyze_heads`. Needed: `layer, head, dir_frac, D_head`; what else is there is shown, with
            "not computed" for NaN. Columns of your own can be chosen in the grid if they are numeric.
        path: file to write; None writes none.
        kernels: table of `relative_position_kernel`, drawn for the heads that lead a detector.

    Returns:
        The page's HTML, a string that a notebook shows as the page.

    Raises:
        ValueError: a needed column is missing, no rows, a layer or head that is no whole number, two rows for one head,
            or kernels of other heads.
        FileNotFoundError: the folder of `path` does not exist.

    What it does not establish: anything beyond the table. A head that stands out on the page should be examined
    further: by ablation, on other prompts, in another seed of the model.
    """
    table = _checked(heads)
    if kernels is not None:
        check_kernels(kernels, table)
    page = Page(_page(table, kernels))
    if path is not None:
        with whole_file(path) as partial:
            partial.write_text(page, encoding="utf-8")
    return page


def _checked(heads: pd.DataFrame) -> pd.DataFrame:
    """The table with a RangeIndex, text as column names, integer layers and heads, and a name in every row."""
    require(heads, _NEEDED, "analyze_heads")
    table = heads.reset_index(drop=True)
    table.columns = [str(name) for name in table.columns]
    for column in ("layer", "head"):
        numbers = np.asarray(pd.to_numeric(table[column], errors="coerce"), dtype=np.float64)
        odd = np.flatnonzero(~(np.isfinite(numbers) & (numbers % 1 == 0)))
        if len(odd):
            raise ValueError(f"the column {column} holds {table[column].iloc[odd[0]]}: give whole numbers")
        table[column] = numbers.astype(np.int64)
    repeated = np.flatnonzero(table.duplicated(["layer", "head"]))
    if len(repeated):
        layer, head = (table[column].iloc[repeated[0]] for column in ("layer", "head"))
        raise ValueError(f"the table has two rows for L{layer}H{head}: give a table of one model, a row per head")
    short = list(map(head_name, table["layer"], table["head"]))
    table["name"] = table["name"].fillna(pd.Series(short)).astype(str) if "name" in table else short
    return table


def _page(heads: pd.DataFrame, kernels: pd.DataFrame | None) -> str:
    style, script, template = (_part(name) for name in ("style.css", "script.js", "page.html"))
    policy = (
        f"default-src 'none'; script-src {_fingerprint(script)}; style-src {_fingerprint(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    model = str(heads.attrs.get("model") or "unnamed model")
    revision = heads.attrs.get("revision")
    return Template(template).substitute(
        policy=escape(policy, quote=False),
        style=style,
        script=script,
        data=head_data(heads),
        model=escape(model),
        revision=f"revision {escape(str(revision))}" if revision else "",
        facts=facts(heads),
        detector_note=escape(detector_note(heads)),
        detector_tables=detector_tables(heads),
        kernels=kernel_figures(kernels, heads) if kernels is not None else "",
        kernels_hidden="" if kernels is not None else "hidden",
        null_table=null_table(heads),
        null_draws=escape(str(heads.attrs.get("null_draws", "an unrecorded number of"))),
        statuses=statuses(heads),
        provenance=provenance(heads.attrs),
        column_meanings=column_meanings(heads),
    )


def _part(name: str) -> str:
    return files("tlspectral.report").joinpath(name).read_text(encoding="utf-8")


def _fingerprint(source: str) -> str:
    """Content-security-policy hash of the page's only script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
