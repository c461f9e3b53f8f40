"""The whole page: checks of the table, its template, and the policy that forbids it every request."""

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
    """Make one self-contained page about a table of heads.

        heads = tls.analyze_heads(model)
        pairs = tls.top_pairs(model)
        kernels = tls.relative_position_kernel(model)
        phase = tls.ablation_sweep(model, "rope_phase")
        wall = tls.hooks.wall(model, "The cat sat on the mat, and the cat slept")
        tls.report.report(heads, "report.html", walls=wall, pairs=pairs, kernels=kernels, sweep=phase)

    On it: all heads on the sentences of `walls`, the strongest heads of each detector, the heads as a grid that can be
    coloured by any column and by what sweeps, positional scores and predictions say of each, the plane of dir_frac and
    D_head with the null, kernels, the heads against their nulls, statuses, provenance, and the meaning of every column.
    Pointing at a head shows its row. A click pins it and opens its card, with what the other tables hold of it, first
    the text where it attends most (`head_card` shows the same). The page's address then ends in its name (`#L16H0`),
    and a link with it leads to the card. For some models (`tlspectral/report/head_pages.txt`) the head's public page on
    Neuronpedia is linked beside its row, by a click alone. Style, script and data are in the file, whose policy forbids
    every request and every other script. Without scripts the tables remain.

    Args:
        table: table of `analyze_heads` or `tables.join`. Needed: `layer, head, dir_frac, D_head`; what else is there is
            shown, with "not computed" for NaN. Columns of your own can be chosen in the grid if they are numeric.
        path: file to write; None writes none.
        walls: what `tls.hooks.wall` returns, or a list: sentences that the reader chooses from, 1 MB each at most.
        tables: `pairs=` of `top_pairs`, `kernels=` of `relative_position_kernel`, `prediction=` of
            `heads.kernel_prediction`, `frequencies=` of `frequency_table`, `positional=` of `positional_symbolic`,
            `sweep=` of `ablation_sweep`, `edges=` of `edge_effects`, `directions=` of `head_directions`; of each one
            table or a list of tables. What is not given is not on the cards. Kernels are also drawn for the heads that
            lead a detector.

    Returns:
        The page's HTML, a string that a notebook shows as the page.

    Raises:
        ValueError: a needed column is missing, no rows, a layer or head that is no whole number, two rows for one head,
            another table or wall of other heads or weights, or a sentence too long for the page.
        TypeError: another keyword than these.
        FileNotFoundError: the folder of `path` does not exist.
        OSError: the disk is full; the message names `path`, and an older page there stays.

    What it does not establish: anything beyond the tables. A head that stands out on the page should be examined
    further: by ablation, on other prompts, in another seed of the model.
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
    """Return the content security policy of a page: its own style and script, and no request."""
    scripts = "" if script is None else f"script-src {_fingerprint(script)}; "
    policy = f"default-src 'none'; {scripts}style-src {_fingerprint(style)}; img-src data:; base-uri 'none'; "
    return escape(policy + "form-action 'none'", quote=False)


def _model(heads: pd.DataFrame) -> str:
    return str(heads.attrs.get("model") or "unnamed model")


def _checked(heads: pd.DataFrame) -> pd.DataFrame:
    """Return the table with a RangeIndex, text as column names, integer layers and heads, and a name in every row."""
    require(heads, _NEEDED, "analyze_heads")
    table = heads.reset_index(drop=True)
    table.columns = [str(name) for name in table.columns]
    for column in ("layer", "head"):
        numbers = [whole_number(value) for value in table[column]]
        if None in numbers:
            raise ValueError(f"the column {column} holds {table[column].iloc[numbers.index(None)]}: give whole numbers")
        table[column] = numbers
    require_one_row(table, ["layer", "head"], "give a table of one model, a row per head")
    short = list(map(head_name, table["layer"], table["head"]))
    table["name"] = table["name"].fillna(pd.Series(short)).astype(str) if "name" in table else short
    return table


def _page(heads: pd.DataFrame, evidence: Evidence, walls: list[Wall]) -> str:
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
    """Return the table with the columns of the other tables by which the grid can be coloured."""
    pairs = list(zip(heads["layer"], heads["head"], strict=True))
    more = {title: [by_head.get(pair, np.nan) for pair in pairs] for title, by_head in evidence.columns().items()}
    coloured = heads.assign(**{title: values for title, values in more.items() if title not in heads})
    coloured.attrs = heads.attrs
    return coloured


def _cards(heads: pd.DataFrame, evidence: Evidence) -> str:
    """Return the bodies of all cards as data that the page's script parses when a card is opened; none is empty."""
    bodies = {
        f"L{layer}H{head}": "".join(section.html() for section in sections)
        for layer, head in zip(heads["layer"], heads["head"], strict=True)
        if (sections := evidence.sections((layer, head)))
    }
    return f'<script type="application/json" id="cards">{script_json(bodies)}</script>' if bodies else ""


def _part(name: str) -> str:
    return files("tlspectral.report").joinpath(name).read_text(encoding="utf-8")


def _fingerprint(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
