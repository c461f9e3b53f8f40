"""`head_card`: one page with everything that was measured on one head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tlspectral.errors import BadHead, earlier_calls
from tlspectral.heads.analysis import require_table_of
from tlspectral.heads.frequencies import frequency_table
from tlspectral.heads.operators.factored import QKOperators
from tlspectral.heads.operators.null_eigenvalues import null_eigenvalues
from tlspectral.models.attention.prompt_patterns import prompt_patterns
from tlspectral.models.reading import measured
from tlspectral.models.reading.view import AttentionView
from tlspectral.report.card_sections import Evidence, Given, Section, composition_section, row_section
from tlspectral.report.drawings import attention_drawing, eigenvalue_drawing, visible
from tlspectral.report.page import Page, card_page
from tlspectral.selection.heads_as_written import Head, pair_in_table
from tlspectral.selection.node_names import head_name
from tlspectral.tables.head_columns import column_title
from tlspectral.tables.printed import short_number
from tlspectral.tables.same_model import require_same_model
from tlspectral.tables.schema import require, require_table

NULL_DRAWS = 30
"""Draws of the null behind the eigenvalues. More draws would make the cloud of points a blot."""


@dataclass(frozen=True, repr=False)
class HeadCard:
    """The card of one attention head, made by `tls.report.head_card`: a notebook shows a page, a terminal text.

        heads = tls.analyze_heads(model)
        card = tls.report.head_card(heads, "L16H0", model=model)  # model: adds eigenvalues
        Path("L16H0.html").write_text(card.html)

    It only holds what `head_card` was given; it measures nothing and cannot be changed.

    Attributes:
        name: name of the head, such as L16H0.
        sections: the measured sections, a tuple in the order of the page. Each section has `title`, `note` (meaning and
            limits of the numbers), `body` (HTML) and `text`.
        html: the page as a string of HTML, without scripts or requests.

    Not established: what the head does. `head_card` raises BadHead for a head that the table lacks.
    """

    name: str
    sections: tuple[Section, ...]
    html: Page

    def __repr__(self) -> str:
        parts = [f"{section.title}\n{section.text}" for section in self.sections]
        return "\n\n".join([self.name, *parts])

    def _repr_html_(self) -> str:
        return self.html._repr_html_()


@earlier_calls(heads="table")
def head_card(
    table: pd.DataFrame,
    head: Head,
    *,
    composition: pd.DataFrame | None = None,
    model: Any = None,
    prompt: Any = None,
    **tables: Given,
) -> HeadCard:
    """Show one head on one page: its row in the head table, and its rows in further tables.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> heads = tls.analyze_heads(model, null_draws=10)
    >>> card = tls.report.head_card(heads, "L0H3", model=model)
    >>> [section.title for section in card.sections]
    ['Eigenvalues', 'Phase by frequency', 'Row']

    Use it to read all that you measured on a head in one place. `tls.report.report` makes a page for all heads.

    Args:
        table: table of `tls.analyze_heads` or `tls.tables.join`.
        head: "L16H0", (16, 0) or a table row.
        composition: table of `tls.k_composition(model, head)` for this head, or of `tls.k_composition(model)`.
        model: the TransformerBridge or HookedTransformer that `table` was made from. It adds the eigenvalues of the
            query-key matrix over 30 random matrices with its singular values and, without `frequencies=`, the phase by
            frequency.
        prompt: text or token ids [pos], at most 128 tokens. Needs `model`, which runs once with the hooks placed on it;
            the card then shows the head's attention on this prompt.
        tables: further tables by keyword, each a table or a list, for this head or for more heads: `pairs=` (of
            `top_pairs`), `kernels=` (`relative_position_kernel`), `prediction=` (`heads.kernel_prediction`),
            `frequencies=` (`frequency_table`), `positional=` (`positional_symbolic`), `sweep=` (`ablation_sweep`),
            `edges=` (`edge_effects`), `directions=` (`head_directions`).

    Returns:
        `HeadCard` with `name`, `sections` (a tuple; each has `title, note, body, text`) and `html` (a string).

    Raises:
        BadHead: `head` is not a head, or is not in the table.
        ValueError: a table or model has other weights, a table lacks a column, a prompt is given without a model, or
            the prompt has several sequences or more than 128 tokens.
        TypeError: a keyword is not one of these tables.
        UnsupportedArchitecture, BadWeights: the layer cannot be read, or does not return its attention.

    Not established: more than each table does. A table that you do not give is not on the card. Agreement of several
    tables is not a proof, because they come from the same weights. More: docs/report.md
    """
    require(table, ("layer", "head"), "analyze_heads", name="table of heads")
    pair = pair_in_table(head, table, "the table of heads")
    if not ((table["layer"] == pair[0]) & (table["head"] == pair[1])).any():
        raise BadHead(f"{head_name(*pair)} is not among the {len(table)} heads of the table: choose one of these")
    if prompt is not None and model is None:
        raise ValueError("prompt= needs the model that attends to it: give model= too")
    of_model: list[Section] = []
    on_prompt: list[Section] = []
    if model is not None:
        with measured(model, report_hooks=prompt is not None) as view:
            require_table_of(view, table)
            of_model.append(_eigenvalues(view, pair, table))
            if tables.get("frequencies") is None and view.layer(pair[0]).rotary is not None:
                of_all = frequency_table(model)
                tables["frequencies"] = of_all.loc[(of_all["layer"] == pair[0]) & (of_all["head"] == pair[1])]
            if prompt is not None:
                on_prompt.append(_attention(view, pair, prompt))
    evidence = Evidence(table, tables)
    sections = evidence.sections(pair)
    first = int(pair in evidence.rows("pairs"))  # the section of pairs stands first, then the sections of the model
    sections[first:first] = of_model
    if composition is not None:
        sections.append(_composition(table, pair, composition))
    sections += [*on_prompt, row_section(table, pair)]
    name = head_name(*pair)
    return HeadCard(name, tuple(sections), card_page(pair, table, sections))


def _eigenvalues(view: AttentionView, pair: tuple[int, int], heads: pd.DataFrame) -> Section:
    """Return the card section with the eigenvalues of M, the query-key matrix W_Q W_K^T of head `pair` (layer, head).

    They are drawn over the eigenvalues of 30 random matrices with M's singular values. `view` is the view of the model,
    `heads` the head table, which gives D_head and the seed of the random matrices.
    """
    spectrum = QKOperators(view)[pair].spectrum()
    cloud = null_eigenvalues(
        view.layer(pair[0]), spectrum.singular_values, NULL_DRAWS, int(heads.attrs.get("seed") or 0)
    )
    values = spectrum.eigenvalues.numpy()
    name = head_name(*pair)
    (row,) = heads.loc[(heads["layer"] == pair[0]) & (heads["head"] == pair[1])].to_dict("records")
    ratio = ""
    if pd.notna(row.get("D_head")):  # NaN where the eigenvalues are rounding
        of_draws = float((cloud.imag.abs().sum(1) / cloud.abs().sum(1)).mean())
        known = column_title("D_head")
        own, random = short_number(row["D_head"]), short_number(of_draws)
        ratio = f"{known} sum |Im λ| / sum |λ| {own}, of {NULL_DRAWS} null draws {random}; "
    return Section(
        "Eigenvalues",
        f"Eigenvalues λ of M in the complex plane, over those of {NULL_DRAWS} draws of its null (grey).",
        eigenvalue_drawing(values, cloud.flatten().numpy(), name),
        f"{len(values)} eigenvalues λ; {ratio}largest modulus {short_number(np.abs(values).max())}, of null draws "
        f"{short_number(float(cloud.abs().max()))}",
    )


def _composition(heads: pd.DataFrame, pair: tuple[int, int], table: pd.DataFrame) -> Section:
    """Return the card section about the earlier heads whose output the keys of head `pair` (layer, head) can read, from
    weights.

    `table` is a result of `k_composition`, `heads` the head table. Raises ValueError if `table` belongs to another head
    or other weights.
    """
    name = head_name(*pair)
    require_table(table, f"give the result of tls.k_composition(model, {name!r})", name="composition")
    if "receiver" in table:  # the table of all pairs of heads
        table = table.loc[table["receiver"] == f"{name}.k"]
    require(table, ("layer", "head", "score", "chance", "rank"), f"k_composition(model, {name!r})", name="composition")
    require_same_model(heads, table.attrs, "the scores of composition")
    if table["layer"].max() != pair[0] - 1:
        raise ValueError(
            f"composition= ends with layer {table['layer'].max()}, but {name} reads layers 0 to {pair[0] - 1}: give "
            f"k_composition(model, {name!r})"
        )
    return composition_section(table.to_dict("records"))


def _attention(view: AttentionView, pair: tuple[int, int], prompt: Any) -> Section:
    """Run the model behind `view` on `prompt` (text or token ids), and return the card section with the attention of
    head `pair` (layer, head): an SVG drawing, and a line of text per query with its strongest key.
    """
    (weights,), tokens = prompt_patterns(view, {pair[0]: [pair[1]]}, prompt)
    strongest = weights.argmax(1)
    lines = [
        f"{visible(tokens[query])} looks at {visible(tokens[key])} ({key - query}): {weights[query, key]:.2f}"
        for query, key in enumerate(strongest.tolist())
    ]
    return Section(
        "Attention on the prompt",
        "A row per query, a column per key; the weight is shown on hover. Weights below .005 are white. This is one "
        "prompt: the head may look elsewhere on another.",
        attention_drawing(weights, tokens, head_name(*pair)),
        "\n".join(lines),
        wide=True,
    )
