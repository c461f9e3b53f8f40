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
from tlspectral.errors.settings import checked_settings, whole_number
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
from tlspectral.selection.node_names import head_name
from tlspectral.tables.atomic_writes import whole_file
from tlspectral.tables.parquet import naming_file
from tlspectral.tables.schema import require, require_one_row

_LEDE, _WALL_LEDE = (
    "The",
    "Attention of every head on a sentence, and what its answer loses without the head. Below: the",
)
_NEEDED = ("layer", "head", "dir_frac", "D_head")


class Page(str):
    """A string with the HTML of a page. A notebook shows it in a frame; nothing is requested from a network."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 800px; border: 0"
        return f'<iframe title="report" style="{style}" srcdoc="{escape(self)}"></iframe>'


@earlier_calls(heads="table")
@checked_settings
def report(
    table: pd.DataFrame,
    path: str | os.PathLike[str] | None = None,
    *,
    walls: Wall | Sequence[Wall] | None = None,
    **tables: Given,
) -> Page:
    """Make one self-contained HTML page about a table of heads, for a browser.

    >>> import tempfile, tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> heads = tls.analyze_heads(model, null_draws=10)
    >>> kernels = tls.relative_position_kernel(model)
    >>> path = f"{tempfile.mkdtemp()}/report.html"
    >>> page = tls.report.report(heads, path, kernels=kernels)
    >>> "<h2>Which heads do what</h2>" in page
    True

    Use it to look through a model, or to send results to others. The page shows the strongest heads of each detector, a
    grid of heads coloured by any column, the plane of dir_frac and D_head, kernels, nulls, statuses, provenance and,
    with `walls`, all heads on a sentence. A click on a head opens its card with its rows of the other tables.

    Args:
        table: table of `tls.analyze_heads` or `tls.tables.join`, with `layer, head, dir_frac, D_head`. All other
            columns are shown too.
        path: file to write. Default: no file.
        walls: result of `tls.hooks.wall` (attention of all heads on a sentence, and the change of the answer without
            each head), or a list of them, at most 1 MB each.
        tables: tables of the same model, each a table or a list:
            - `pairs=` of `top_pairs`, `kernels=` of `relative_position_kernel`, `prediction=` of
              `heads.kernel_prediction`
            - `frequencies=` of `frequency_table`, `positional=` of `positional_symbolic`, `sweep=` of `ablation_sweep`
            - `edges=` of `edge_effects`, `directions=` of `head_directions`

    Returns:
        `Page`, the HTML as a string; the last line of a notebook cell shows it. Numbers keep the units of their tables.

    Raises:
        ValueError: `table` lacks a column or has no rows, a layer or head is not a whole number, a head has two rows, a
            table or wall has other heads or weights, or a sentence is too long for the page.
        TypeError: a keyword is not one of these tables, or `walls` has something else than walls.
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
    """Return the HTML page with the card of head `pair` (layer, head): a header and its sections. It has no script.

    `heads` is the head table, for the model's name and the link to the head's public page.
    """
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
    """Return the content security policy of a page as text for a meta tag: it allows this `style` and `script` (their
    text, by hash; None for no script), and no requests.
    """
    scripts = "" if script is None else f"script-src {_fingerprint(script)}; "
    policy = f"default-src 'none'; {scripts}style-src {_fingerprint(style)}; img-src data:; base-uri 'none'; "
    return escape(policy + "form-action 'none'", quote=False)


def _model(heads: pd.DataFrame) -> str:
    """Return the model's name from the `attrs` of the head table, or "unnamed model"."""
    return str(heads.attrs.get("model") or "unnamed model")


def _checked(heads: pd.DataFrame) -> pd.DataFrame:
    """Return a checked copy of a head table: new index, text as column names, layers and heads as int, a name per row.

    Raises ValueError if a needed column is missing, a layer or head is not a whole number, or a head has two rows.
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
    """Return the HTML of the report, a page with all heads: the template filled with all sections, from the head table,
    the further tables and the walls.

    `evidence` holds the rows of the further tables. A wall is the attention of all heads on one sentence, with the
    effects of removing each head.
    """
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
    """Return a copy of the head table with further columns, such as effects of removal, by which the page's grid can be
    coloured.

    The columns come from the further tables in `evidence`; a head without a value has NaN.
    """
    pairs = list(zip(heads["layer"], heads["head"], strict=True))
    more = {title: [by_head.get(pair, np.nan) for pair in pairs] for title, by_head in evidence.columns().items()}
    coloured = heads.assign(**{title: values for title, values in more.items() if title not in heads})
    coloured.attrs = heads.attrs
    return coloured


def _cards(heads: pd.DataFrame, evidence: Evidence) -> str:
    """Return an HTML script element with a JSON dict from head name to the HTML of its card; "" if no head has a card.

    `heads` is the head table, `evidence` the rows of the further tables, from which cards are made.
    """
    bodies = {
        f"L{layer}H{head}": "".join(section.html() for section in sections)
        for layer, head in zip(heads["layer"], heads["head"], strict=True)
        if (sections := evidence.sections((layer, head)))
    }
    return f'<script type="application/json" id="cards">{script_json(bodies)}</script>' if bodies else ""


def _part(name: str) -> str:
    """Return the text of the file `name` in the package's folder `report`, such as "style.css"."""
    return files("tlspectral.report").joinpath(name).read_text(encoding="utf-8")


def _fingerprint(source: str) -> str:
    """Return the SHA-256 of a style or script as text in the form of a content security policy, 'sha256-...'."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
