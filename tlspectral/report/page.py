"""The whole page: checks of the table, the template, and the security policy that forbids requests."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

import numpy as np
import pandas as pd

from tlspectral.errors import earlier_calls
from tlspectral.hooks.measured_wall import Wall
from tlspectral.report.card_sections import Evidence, Given, Section
from tlspectral.report.head_data import head_data, script_json
from tlspectral.report.head_pages import LINKED, page_link
from tlspectral.report.sections import (
    column_meanings,
    counts,
    detector_note,
    detector_tables,
    kernel_figures,
    null_table,
    provenance,
    statuses,
)
from tlspectral.report.wall_section import listed_walls, wall_html, wall_scripts
from tlspectral.selection import head_name, whole_number
from tlspectral.tables.atomic_writes import whole_file
from tlspectral.tables.parquet import naming_file
from tlspectral.tables.schema import require, require_one_row

_LEDE, _WALL_LEDE = (
    "The",
    "Attention of every head on a sentence, and what its answer loses without the head. Below: the",
)
_NEEDED = ("layer", "head", "dir_frac", "D_head")


class Page(str):
    """The HTML of a page. A notebook shows it in a frame, without a request."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 800px; border: 0"
        return f'<iframe title="report" style="{style}" srcdoc="{escape(self)}"></iframe>'


@earlier_calls(heads="table")
def report(
    table: pd.DataFrame,
    path: str | os.PathLike[str] | None = None,
    *,
    walls: Wall | Sequence[Wall] | None = None,
    **tables: Given,
) -> Page:
    """Make one self-contained HTML page about a table of heads.

    >>> import tempfile, tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> heads = tls.analyze_heads(model, null_draws=10)
    >>> kernels = tls.relative_position_kernel(model)
    >>> page = tls.report.report(heads, f"{tempfile.mkdtemp()}/report.html", kernels=kernels)
    >>> "<h2>Which heads do what</h2>" in page
    True

    Use it to look through a model, or to send results to others. The page shows all heads on the sentences of `walls`,
    the strongest heads of each detector, a grid of heads coloured by any column, the plane of dir_frac and D_head,
    kernels, nulls, statuses and provenance. A click on a head opens its card with its rows of the other tables.

    Args:
        table: table of `analyze_heads` or `tables.join`, with `layer, head, dir_frac, D_head`. All other columns are
            shown too.
        path: file to write; None (default) writes no file.
        walls: result of `tls.hooks.wall` or a list of them, at most 1 MB each.
        tables: tables of the same model, each one table or a list:
            - `pairs=` of `top_pairs`, `kernels=` of `relative_position_kernel`, `prediction=` of
              `heads.kernel_prediction`
            - `frequencies=` of `frequency_table`, `positional=` of `positional_symbolic`, `sweep=` of `ablation_sweep`
            - `edges=` of `edge_effects`, `directions=` of `head_directions`

    Returns:
        `Page`, the HTML as a string, which a notebook shows as the page.

    Raises:
        ValueError: `table` lacks a column or has no rows, a layer or head is not a whole number, a head has two rows, a
            table or wall has other heads or weights, or a sentence is too long for the page.
        TypeError: another keyword than these.
        FileNotFoundError: the folder of `path` does not exist.
        OSError: the disk is full; the message names `path`, and an older page stays.

    Not established: anything beyond the tables. Examine a head that stands out further: ablate it, try other prompts.
    More: docs/report.md
    """
    table, sentences = _checked(table), listed_walls(walls)
    page = Page(_page(table, Evidence(table, tables), sentences))
    if path is not None:
        with naming_file(path), whole_file(path) as partial:
            partial.write_text(page, encoding="utf-8")
    return page


def card_page(pair: tuple[int, int], heads: pd.DataFrame, sections: list[Section]) -> Page:
    """Return the page of one head's card, which has no script."""
    style, name = _part("style.css"), head_name(*pair)
    body = "".join(section.html() for section in sections)
    return Page(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style)}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(name)} of {escape(_model(heads))}</title><style>{style}</style></head><body><header>"
        f'<p class="eyebrow">{escape(_model(heads))}</p><h1>{escape(name)}</h1>{page_link(heads.attrs, pair)}</header>'
        f'<main class="evidence">{body}</main></body></html>'
    )


def _policy(style: str, script: str | None = None) -> str:
    """Return the content security policy of a page: it allows the page's own style and script, and no requests."""
    scripts = "" if script is None else f"script-src {_fingerprint(script)}; "
    policy = f"default-src 'none'; {scripts}style-src {_fingerprint(style)}; img-src data:; base-uri 'none'; "
    return escape(policy + "form-action 'none'", quote=False)


def _model(heads: pd.DataFrame) -> str:
    """Return the model's name from the table, or "unnamed model"."""
    return str(heads.attrs.get("model") or "unnamed model")


def _checked(heads: pd.DataFrame) -> pd.DataFrame:
    """Return a checked copy of the table: new index, text as column names, whole numbers as layers and heads, a name
    per row.
    """
    require(heads, _NEEDED, "analyze_heads")
    table = heads.reset_index(drop=True)
    table.columns = [str(name) for name in table.columns]
    for column in ("layer", "head"):
        numbers = [whole_number(value) for value in table[column]]
        if None in numbers:
            raise ValueError(f"the column {column} holds {table[column].iloc[numbers.index(None)]}: give whole numbers")
        table[column] = numbers
    require_one_row(table, ["layer", "head"], "give a table of one model, a row per head")
    names = list(map(head_name, table["layer"], table["head"]))
    table["name"] = table["name"].fillna(pd.Series(names)).astype(str) if "name" in table else names
    return table


def _page(heads: pd.DataFrame, evidence: Evidence, walls: list[Wall]) -> str:
    """Return the HTML of the page: the template filled with all sections."""
    style, script, template = (_part(name) for name in ("style.css", "script.js", "page.html"))
    script += _part("wall.js") if walls else ""
    revision, kernels = heads.attrs.get("revision"), evidence.rows("kernels")
    return Template(template).substitute(
        policy=_policy(style, script),
        style=style,
        script=script,
        data=head_data(_coloured(heads, evidence)),
        cards=_cards(heads, evidence),
        lede=_WALL_LEDE if walls else _LEDE,
        wall=wall_html(heads, walls),
        walls=wall_scripts(heads, walls),
        model=escape(_model(heads)),
        revision=f"revision {escape(str(revision))}" if revision else "",
        counts=counts(heads),
        detector_note=escape(detector_note(heads)),
        detector_tables=detector_tables(heads),
        kernels=kernel_figures(kernels, heads) if kernels else "",
        kernels_hidden="" if kernels else "hidden",
        linked=LINKED,
        null_table=null_table(heads),
        null_draws=escape(str(heads.attrs.get("null_draws", "an unrecorded number of"))),
        statuses=statuses(heads),
        provenance=provenance(heads.attrs),
        column_meanings=column_meanings(heads),
    )


def _coloured(heads: pd.DataFrame, evidence: Evidence) -> pd.DataFrame:
    """Return the head table with further columns from the tables in `evidence`, by which the page's grid can be
    coloured.
    """
    pairs = list(zip(heads["layer"], heads["head"], strict=True))
    more = {title: [by_head.get(pair, np.nan) for pair in pairs] for title, by_head in evidence.columns().items()}
    coloured = heads.assign(**{title: values for title, values in more.items() if title not in heads})
    coloured.attrs = heads.attrs
    return coloured


def _cards(heads: pd.DataFrame, evidence: Evidence) -> str:
    """Return a script element with the cards of all heads as JSON, which the page's script opens; "" if there are no
    cards.
    """
    bodies = {
        f"L{layer}H{head}": "".join(section.html() for section in sections)
        for layer, head in zip(heads["layer"], heads["head"], strict=True)
        if (sections := evidence.sections((layer, head)))
    }
    return f'<script type="application/json" id="cards">{script_json(bodies)}</script>' if bodies else ""


def _part(name: str) -> str:
    """Return the text of a file in this folder, such as "style.css"."""
    return files("tlspectral.report").joinpath(name).read_text(encoding="utf-8")


def _fingerprint(source: str) -> str:
    """Return the hash of a style or script, in the form that a content security policy needs."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
