"""Relative-position kernels on the page: one small SVG per head."""

from html import escape

import numpy as np
import pandas as pd

from tlspectral.report.head_data import DETECTORS
from tlspectral.report.sections import head_link, top_heads
from tlspectral.tables.required import require
from tlspectral.tables.same_model import require_same_model

_MOST_DRAWN = 24
_WIDTH, _HEIGHT = 220, 116
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 6, 8, 22  # of the axes within the drawing


def check_kernels(kernels: pd.DataFrame, heads: pd.DataFrame) -> None:
    """Refuse a table with kernels of other heads or another model.

    Raises:
        ValueError: a missing column, another model's kernels, or a kernel of a head that the table of heads lacks.
    """
    require(kernels, ("layer", "head", "offset", "score"), "relative_position_kernel", name="table of kernels")
    require_same_model(heads, kernels.attrs, "the kernels")
    known = set(zip(heads["layer"], heads["head"], strict=True))
    unknown = [pair for pair in _head_pairs(kernels) if pair not in known]
    if unknown:
        layer, head = unknown[0]
        raise ValueError(
            f"the kernels hold L{layer}H{head}, which the table of heads lacks: give tables of the same model"
        )


def kernel_figures(kernels: pd.DataFrame, heads: pd.DataFrame) -> str:
    """Drawings of the kernels of each detector's strongest heads, or of the table's first ones if it has none of those.

    Args:
        kernels: of `relative_position_kernel`, checked.
        heads: the table of heads.
    """
    available = _head_pairs(kernels)
    wanted: dict[tuple[int, int], str] = {}
    for detector in DETECTORS:
        for row in top_heads(heads, detector).to_dict("records"):
            pair = (int(row["layer"]), int(row["head"]))
            if pair in available:
                score = f"{detector} {row[detector]:.2f}"
                wanted[pair] = f"{wanted[pair]}, {score}" if pair in wanted else score
    drawn = wanted or dict.fromkeys(available, "")
    chosen = list(drawn)[:_MOST_DRAWN]
    rows = {(row["layer"], row["head"]): row for row in heads.to_dict("records")}
    grouped = {pair: table.sort_values("offset") for pair, table in kernels.groupby(["layer", "head"])}
    figures = "".join(
        f"<figure><figcaption>{head_link(rows[pair])} <small>{escape(drawn[pair])}</small></figcaption>"
        f"{_drawing(grouped[pair], str(rows[pair]['name']))}</figure>"
        for pair in chosen
    )
    left_out = len(available) - len(chosen)
    note = f'<p class="note">{left_out:,} more in the table of kernels.</p>' if left_out else ""
    return f'<div class="kernels">{figures}</div>{note}'


def _head_pairs(kernels: pd.DataFrame) -> list[tuple[int, int]]:
    pairs = kernels[["layer", "head"]].drop_duplicates()
    return [(int(layer), int(head)) for layer, head in zip(pairs["layer"], pairs["head"], strict=True)]


def _drawing(kernel: pd.DataFrame, name: str) -> str:
    """SVG of score against offset, on a scale of its own; an offset without keys is a gap."""
    offsets, scores = kernel["offset"].to_numpy(float), kernel["score"].to_numpy(float)
    finite = np.isfinite(scores)
    if not finite.any():
        return '<p class="none">not computed</p>'
    low, high = scores[finite].min(), scores[finite].max()
    span, reach = (high - low) or 1.0, np.ptp(offsets) or 1.0
    across = _LEFT + (offsets - offsets.min()) / reach * (_WIDTH - _LEFT - _RIGHT)
    up = _HEIGHT - _BOTTOM - (scores - low) / span * (_HEIGHT - _TOP - _BOTTOM)
    steps, pen = [], "M"
    for x, y, seen in zip(across, up, finite, strict=True):
        if seen:
            steps.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L" if seen else "M"
    best, looks = int(np.nanargmax(scores)), ('r="1.5"', 'r="2.6" class="best"')
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" {looks[index == best]}/>'
        for index, (x, y, seen) in enumerate(zip(across, up, finite, strict=True))
        if seen
    )
    ticks = "".join(
        f'<text x="{x:.1f}" y="{_HEIGHT - 7}" text-anchor="{anchor}">{_signed(offset)}</text>'
        for offset, x, anchor in (
            (offsets.min(), across.min(), "start"),
            (offsets.max(), across.max(), "end"),
        )
    )
    values = "".join(
        f'<text x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end">{_signed(round(value, 1))}</text>'
        for value, y in ((high, _TOP + 4), (low, _HEIGHT - _BOTTOM + 1))
    )
    label = f"{name}: highest mean score {scores[best]:.2f} at offset {offsets[best]:.0f}, lowest {low:.2f}"
    base = _HEIGHT - _BOTTOM + 5
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'<path class="axis" d="M{_LEFT} {base}H{_WIDTH - _RIGHT}"/>'
        f'<path class="line" d="{"".join(steps)}"/>{dots}{ticks}{values}</svg>'
    )


def _signed(value: float) -> str:
    return f"{value:g}".replace("-", "\N{MINUS SIGN}")
