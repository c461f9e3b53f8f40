"""A figure of heads' eigenvalues in the complex plane, over the eigenvalues of their null."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tlspectral.errors.settings import checked_settings
from tlspectral.heads.operators.factored import QKOperators
from tlspectral.heads.operators.null_eigenvalues import null_eigenvalues
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.plots.style import BLUE, GREY, INK, PALE, dress, legend_below, new_figure
from tlspectral.selection.heads_as_written import Heads
from tlspectral.selection.node_names import head_name

_MOST_HEADS = 12
_DRAWS = 30


@checked_settings
def eigenvalues(model: Any, heads: Heads, *, seed: int = 0) -> Figure:
    """Draw the eigenvalues λ of heads' query-key matrices M in the complex plane, over the eigenvalues of random
    matrices.

    >>> import tlspectral as tls
    >>> figure = tls.plots.eigenvalues(tls.load_model("tiny-rope"), "L0H3")
    >>> figure.axes[0].get_title(loc="left").split(",")[0]
    'L0H3: D_head 0.24'

    Use it to see whether a head's spectrum is unusual. M is W_Q W_K^T with norms folded in. The null is 30 matrices
    with the head's singular values and random directions ("Fingerprint, Not Blueprint", section 3). Their eigenvalues
    fill a disc; the circle shows their root mean square modulus. The title gives D_head, Σ|Im λ| / Σ|λ| (0: all real,
    1: all imaginary), of the head and the mean over the null.

    Args:
        model: a TransformerBridge or HookedTransformer. It is not run.
        heads: 1 to 12 heads: "L5H1", (5, 1), "L5" (layer 5), "L5KV1" (a key/value group), a list of these, or a table
            with layer and head.
        seed: seed of the null; `analyze_heads` with the same seed has the same draws. Default: 0.

    Returns:
        matplotlib Figure with a panel per head, real part across and imaginary part up, in units of the score
        before the model's scale (1 / sqrt(d_head) in most models).

    Raises:
        BadHead: a head does not exist, or no head is given.
        ValueError: more than 12 heads.
        UnsupportedArchitecture, BadWeights: a layer cannot be read.

    Not established: what the head attends to, or anything about rotary positions, because M is the head at distance 0.
    """
    with measured(model, report_hooks=False) as view:
        operators = QKOperators(view)
        pairs = [(layer, head) for layer, some in sorted(heads_by_layer(view, heads).items()) for head in some]
        if not 0 < len(pairs) <= _MOST_HEADS:
            raise ValueError(f"{len(pairs)} heads given: give 1 to {_MOST_HEADS} heads, each has a panel")
        columns = min(2 if len(pairs) <= 4 else 3, len(pairs))
        rows = -(-len(pairs) // columns)
        figure = new_figure(2.65 * columns + 0.4, 2.85 * rows + 0.8)
        panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
        angle = np.linspace(0.0, 2.0 * np.pi, 181)
        for axes, pair in zip(panels, pairs, strict=False):
            spectrum = operators[pair].spectrum()
            values: Any = spectrum.eigenvalues.numpy()
            cloud: Any = null_eigenvalues(view.layer(pair[0]), spectrum.singular_values, _DRAWS, seed).numpy()
            axes.axhline(0.0, color=PALE, linewidth=0.8, zorder=0)
            axes.axvline(0.0, color=PALE, linewidth=0.8, zorder=0)
            axes.plot(cloud.real.ravel(), cloud.imag.ravel(), ".", color=PALE, markersize=2.5, gid="null", zorder=1)
            radius = float(np.sqrt((np.abs(cloud) ** 2).mean()))
            axes.plot(radius * np.cos(angle), radius * np.sin(angle), color=GREY, linewidth=0.9, gid="circle", zorder=2)
            axes.plot(values.real, values.imag, "o", color=BLUE, markersize=3.5, gid="eigenvalues", zorder=3)
            reach = 1.06 * max(np.abs(part(both)).max() for both in (values, cloud) for part in (np.real, np.imag))
            axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xlabel=r"Re $\lambda$")
            own, of_null = (_rotational(one) for one in (values, cloud))
            axes.set_title(
                f"{head_name(*pair)}: D_head {own:.2f}, null {of_null:.2f}", fontsize=9, color=INK, loc="left"
            )
            dress(axes)
            axes.tick_params(labelsize=8)
        for axes in panels[::columns]:
            axes.set_ylabel(r"Im $\lambda$")
        for axes in panels[len(pairs) :]:
            axes.set_axis_off()
        handles = [
            (Line2D([], [], color=BLUE, marker="o", linestyle="none"), "of the head"),
            (Line2D([], [], color=PALE, marker=".", linestyle="none"), f"of {_DRAWS} draws of its null"),
            (Line2D([], [], color=GREY), "root mean square modulus of the draws"),
        ]
        legend_below(figure, handles, [], columns=1)
        return figure


def _rotational(values: Any) -> float:
    """Return D_head, Σ|Im λ| / Σ|λ| (0 to 1), of complex eigenvalues [k], or its mean over draws for eigenvalues
    [draws, k].
    """
    modulus = np.abs(values).sum(-1)
    return float((np.abs(values.imag).sum(-1) / np.where(modulus > 0, modulus, 1.0)).mean())
