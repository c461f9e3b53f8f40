"""Drawings of one head as SVG: kernel, eigenvalues, phase by frequency, attention. They need no script."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from jaxtyping import Complex, Float

from tlspectral.tables.printed import short_number

Rows = Sequence[Mapping[Any, Any]]

_WIDTH, _HEIGHT = 220, 116
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 6, 8, 22  # of the axes within a drawing
_SIDE = 260  # of the plane of eigenvalues
_LETTER = 6.6  # width of a letter of a token, in pixels
_LONGEST = 14  # letters; longer tokens are cut
_FAINT = 0.005  # attention weights below it are left white


def kernel_drawing(rows: Rows, name: str) -> str:
    """Return an SVG string that draws the mean attention score against the offset of the key, with its prediction
    dashed.

    `rows` are dicts with `offset` (tokens), `score` and sometimes `predicted`; `name` is the head, for the label. An
    offset without a score is a gap. If no score is finite, the result is the HTML text "not computed".
    """
    rows = sorted(rows, key=lambda row: row["offset"])
    offsets, scores = (np.array([row[column] for row in rows], dtype=float) for column in ("offset", "score"))
    predicted = np.array([row.get("predicted", np.nan) for row in rows], dtype=float)
    finite = np.isfinite(scores)
    if not finite.any():
        return '<p class="none">not computed</p>'
    both = np.concatenate([scores[finite], predicted[np.isfinite(predicted)]])
    low, high = both.min(), both.max()
    span, reach = (high - low) or 1.0, np.ptp(offsets) or 1.0
    across = _LEFT + (offsets - offsets.min()) / reach * (_WIDTH - _LEFT - _RIGHT)

    def up(values: Float[np.ndarray, " offsets"]) -> Float[np.ndarray, " offsets"]:
        return _HEIGHT - _BOTTOM - (values - low) / span * (_HEIGHT - _TOP - _BOTTOM)

    best, circle_styles = int(np.nanargmax(scores)), ('r="1.5"', 'r="2.6" class="best"')
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" {circle_styles[index == best]}/>'
        for index, (x, y, seen) in enumerate(zip(across, up(scores), finite, strict=True))
        if seen
    )
    dashed = f'<path class="predicted" d="{_path(across, up(predicted))}"/>' if np.isfinite(predicted).any() else ""
    ends = ((offsets.min(), across.min(), "start"), (offsets.max(), across.max(), "end"))
    ticks = "".join(_text(x, _HEIGHT - 7, signed(offset), anchor) for offset, x, anchor in ends)
    values = "".join(
        _text(_LEFT - 6, y, signed(round(value, 1)), "end")
        for value, y in ((high, _TOP + 4), (low, _HEIGHT - _BOTTOM + 1))
    )
    lowest = scores[finite].min()
    label = f"{name}: highest mean score {scores[best]:.2f} at offset {offsets[best]:.0f}, lowest {lowest:.2f}"
    base = _HEIGHT - _BOTTOM + 5
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'<path class="axis" d="M{_LEFT} {base}H{_WIDTH - _RIGHT}"/>'
        f'{dashed}<path class="line" d="{_path(across, up(scores))}"/>{dots}{ticks}{values}</svg>'
    )


def eigenvalue_drawing(values: Complex[np.ndarray, " k"], cloud: Complex[np.ndarray, " n"], name: str) -> str:
    """Return an SVG string with a head's eigenvalues as dots in the complex plane, over the eigenvalues of random
    matrices.

    `values` are the head's eigenvalues, `cloud` the random matrices' eigenvalues, `name` the head. Both axes have the
    same scale.
    """
    reach = 1.05 * float(max(np.abs(part(np.concatenate([values, cloud]))).max() for part in (np.real, np.imag))) or 1.0
    middle = _SIDE / 2

    def places(numbers: Complex[np.ndarray, " n"]) -> list[tuple[float, float]]:
        scale = middle / reach
        return [
            (middle + scale * x, middle - scale * y) for x, y in zip(np.real(numbers), np.imag(numbers), strict=True)
        ]

    # One path for all dots of the cloud, because thousands of circles would be slow and large.
    points = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places(cloud))
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in places(values))
    label = f"{name}: {len(values)} eigenvalues in the complex plane over {len(cloud)} of null draws"
    edge = short_number(reach / 1.05)
    return (
        f'<svg class="plane" viewBox="0 0 {_SIDE} {_SIDE}" role="img" aria-label="{escape(label)}">'
        f'<path class="axis" d="M0 {middle}H{_SIDE}M{middle} 0V{_SIDE}"/><path class="cloud" d="{points}"/>{dots}'
        f"{_text(_SIDE - 2, middle - 5, f'Re {edge}', 'end')}{_text(middle + 5, 12, f'Im {edge}', 'start')}</svg>"
    )


def phase_drawing(rows: Rows, name: str) -> str:
    """Return an SVG string with a bar per rotary frequency: the norm of Im(M_t) below, the norm of Re(M_t) on top,
    values on hover.

    `rows` are dicts with `frequency, wavelength, im_norm, re_norm`; `name` is the head, for the label.
    """
    rows = sorted(rows, key=lambda row: row["frequency"])
    highest = max((row["re_norm"] + row["im_norm"] for row in rows), default=0.0) or 1.0
    step = (_WIDTH - _LEFT - _RIGHT) / len(rows)
    base, room = _HEIGHT - _BOTTOM, _HEIGHT - _TOP - _BOTTOM
    bars = []
    for place, row in enumerate(rows):
        im, re = (room * row[part] / highest for part in ("im_norm", "re_norm"))
        x, width = _LEFT + place * step, max(step - 1, 0.6)
        hover_text = (
            f"pair {row['frequency']}: {short_number(row['wavelength'])} tokens; Im {short_number(row['im_norm'])}, "
            f"Re {short_number(row['re_norm'])}"
        )
        bars.append(
            f'<g><title>{hover_text}</title><rect class="im" x="{x:.1f}" y="{base - im:.1f}" width="{width:.1f}" '
            f'height="{im:.1f}"/><rect class="re" x="{x:.1f}" y="{base - im - re:.1f}" width="{width:.1f}" '
            f'height="{re:.1f}"/></g>'
        )
    largest = max(rows, key=lambda row: row["im_norm"])
    wavelength = short_number(largest["wavelength"])
    label = f"{name}: Im(M_t) is largest at pair {largest['frequency']}, wavelength {wavelength} tokens"
    ends = ((rows[0], _LEFT, "start"), (rows[-1], _WIDTH - _RIGHT, "end"))
    ticks = "".join(_text(x, _HEIGHT - 7, short_number(row["wavelength"]), anchor) for row, x, anchor in ends)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(bars)}{ticks}'
        f"{_text(_LEFT - 6, _TOP + 8, f'{highest:.2g}', 'end')}</svg>"
    )


def attention_drawing(weights: Float[np.ndarray, "pos pos"], tokens: Sequence[str], name: str) -> str:
    """Return an SVG string with attention weights [query, key] as squares: a row per query, a column per key, numbers
    on hover.

    `tokens` label rows and columns, `name` is the head. Weights below .005 are white.
    """
    shown = [visible(token)[:_LONGEST] for token in tokens]
    cell, count = 15, len(shown)
    label = 8 + max(map(len, shown)) * _LETTER
    squares = []
    for query, key in np.argwhere(weights >= _FAINT).tolist():
        weight = float(weights[query, key])
        spoken_text = f"{visible(tokens[query])} ({query}) looks at {visible(tokens[key])} ({key}): {weight:.3f}"
        squares.append(
            f'<rect x="{label + key * cell:.0f}" y="{label + query * cell:.0f}" width="{cell - 1}" height="{cell - 1}" '
            f'fill-opacity="{weight:.3f}"><title>{escape(spoken_text)}</title></rect>'
        )
    words = "".join(
        _text(label - 5, label + place * cell + 11, escape(word), "end")
        + f'<text transform="translate({label + place * cell + 11:.0f} {label - 5:.0f}) rotate(-90)">'
        f"{escape(word)}</text>"
        for place, word in enumerate(shown)
    )
    side = label + count * cell
    frame = f'<path class="axis" d="M{label - 1:.0f} {label - 1:.0f}V{side:.0f}H{side:.0f}"/>'
    spoken_text = f"{name}: attention of {count} tokens, a row per query and a column per key"
    return (
        f'<svg class="attention" width="{side:.0f}" height="{side:.0f}" viewBox="0 0 {side:.0f} {side:.0f}" '
        f'role="img" aria-label="{escape(spoken_text)}">{frame}{"".join(squares)}{words}</svg>'
    )


def visible(token: str) -> str:
    """Return a token as text on one line, with visible marks for spaces, line ends and tabs."""
    return token.replace(" ", "\N{OPEN BOX}").replace("\n", "\N{RETURN SYMBOL}").replace("\t", "\N{RIGHTWARDS ARROW}")


def signed(value: float) -> str:
    """Return a number as text with up to six significant digits and a true minus sign."""
    return f"{value:g}".replace("-", "\N{MINUS SIGN}")


def _path(across: Float[np.ndarray, " n"], up: Float[np.ndarray, " n"]) -> str:
    """Return the `d` attribute of an SVG path through points with pixel coordinates (across, up); a value that is not
    finite makes a gap.
    """
    steps, pen = [], "M"
    for x, y in zip(across, up, strict=True):
        if np.isfinite(y):
            steps.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L" if np.isfinite(y) else "M"
    return "".join(steps)


def _text(x: float | int, y: float | int, content: str, anchor: str) -> str:
    """Return an SVG text element with `content` at the pixels (x, y); `anchor` is start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'
