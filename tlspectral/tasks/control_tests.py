"""Comparison of an effect with the effects of random draws on the same sequences: the test and its columns."""

from typing import Any

import numpy as np
from jaxtyping import Float64, Int

from tlspectral.tables.schema import columns
from tlspectral.tasks.metric_value import standard_error

CONTROL_COLUMNS = columns("""
    control_delta?    | of the metric | As delta, for the draws of the control, mean over them.
    control_delta_se? | of the metric | Standard error of control_delta, over draws and sequences; NaN for one draw.
    control_excess?   | of the metric | |delta| less the mean over draws of |control effect|.
    control_p?        | probability   | (1 + draws whose effect is as large as delta) / (1 + draws), in absolute values.
    control_p_floor?  | probability   | Smallest control_p that any effect could have beside the draws that were found.
    control_draws?    | numbers       | Effects of the draws of the control, each mean over sequences; control_delta is
                      |               | their mean. None where nothing was measured.
    excess_z?         | SD of draws   | delta less the mean of control_draws, over their standard deviation; NaN for
                      |               | fewer than 19 draws (of a Band: asked for), and where they are equal.
""")
"""Columns that compare an effect with the effects of its control."""

FEWEST_DRAWS = 19
"""Fewest draws for the column `excess_z`, which divides by the standard deviation over draws."""


def beside_control(
    deltas: Float64[np.ndarray, "rows sequences"],
    controls: Float64[np.ndarray, "rows draws sequences"],
    distinct: Int[np.ndarray, "sequences"] | None,
    asked: int | None = None,
) -> dict[str, Any]:
    """Compare effects of ablations with the effects of random draws of equal size.

    Return a dict from column name to values, one per row of `deltas`. The columns: control_delta (mean effect of the
    draws) and control_delta_se; control_excess (|effect| minus the mean |effect| of the draws); control_p and
    control_p_floor (share of draws at least as large, and its smallest value); control_draws (a list with the mean
    effect of each draw); excess_z ((effect minus mean of the draws) / their standard deviation; NaN below 19 draws).
    `deltas`: effect of each ablation on each sequence. `controls`: effect of each random draw on each sequence; a draw
    that is NaN was not found and is left out. `distinct`: an integer per sequence, the same for equal sequences; None
    if all differ. `asked`: number of draws that the caller wanted. Default: as in `controls`.
    """
    n_asked: int = controls.shape[1] if asked is None else asked
    missing = np.isnan(controls[:, :, 0])
    if missing.any():
        nothing = {column.name.rstrip("?"): [np.nan] for column in CONTROL_COLUMNS} | {"control_draws": [[]]}
        rows = [
            beside_control(delta[None], drawn[None, ~lacking], distinct, n_asked) if not lacking.all() else nothing
            for delta, drawn, lacking in zip(deltas, controls, missing, strict=True)
        ]
        return {name: [row[name][0] for row in rows] for name in nothing}
    drawn = controls.mean(2)
    n_draws = drawn.shape[1]
    over_sequences = np.array([standard_error(control, distinct) for control in controls.mean(1)])
    over_draws = drawn.std(1, ddof=1) / np.sqrt(n_draws) if n_draws > 1 else np.nan
    excess, pvalue = control_test(deltas.mean(1), drawn)
    error = np.hypot(over_sequences, over_draws)
    return {
        "control_delta": drawn.mean(1),
        "control_delta_se": error,
        "control_excess": excess,
        "control_p": pvalue,
        "control_p_floor": np.full(len(deltas), draws_floor(n_draws)),
        "control_draws": drawn.tolist(),
        "excess_z": excess_z(deltas.mean(1), drawn) if n_asked >= FEWEST_DRAWS else np.full(len(deltas), np.nan),
    }


def control_test(
    delta: Float64[np.ndarray, "rows"], controls: Float64[np.ndarray, "rows draws"]
) -> tuple[Float64[np.ndarray, "rows"], Float64[np.ndarray, "rows"]]:
    """Compare the sizes of effects with the sizes of random draws.

    Return `control_excess` and `control_p`, one per row.

    >>> import numpy as np
    >>> excess, pvalue = control_test(np.array([-3.0]), np.array([[1.0, -2.0, 0.5, 4.0]]))
    >>> float(excess[0]), float(pvalue[0])
    (1.125, 0.4)

    Args:
        delta: effect of each row, mean over sequences.
        controls: effects of the random draws on the same sequences, mean over sequences.

    Returns:
        Two arrays over rows. `control_excess`, in units of the metric: |delta| minus the mean of |control| over draws;
            it is positive if the effect is larger than an average draw, in either direction. `control_p`: (1 + number
            of draws with |control| >= |delta|) / (1 + number of draws). A small p says that the effect is larger. The
            smallest possible p is 1 / (1 + draws): p = .05 needs 19 draws. If effect and draws are exchangeable, p is
            .05 or less in at most 5 % of cases, whatever their distribution.

    Not established: that an effect differs from 0 (`paired_effect` tests this), or from a control effect of its own
    size and opposite sign.
    """
    size, drawn = np.abs(delta), np.abs(controls)
    as_large = (drawn >= size[..., None]).sum(-1)
    return size - drawn.mean(-1), (1 + as_large) / (1 + drawn.shape[-1])


def excess_z(
    delta: Float64[np.ndarray, "rows"], controls: Float64[np.ndarray, "rows draws"]
) -> Float64[np.ndarray, "rows"]:
    """Return (effect - mean of its random draws) / standard deviation of these draws, for each row.

    The result has no unit, so effects on two tasks can be compared. It is NaN for one draw, and if all draws are equal.

    >>> import numpy as np
    >>> draws = np.array([[-1.0, 0.0, 1.0], [2.0, 2.0, 2.0]])
    >>> excess_z(np.array([3.0, 3.0]), draws).tolist()
    [3.0, nan]

    Args:
        delta: effect of each row, mean over sequences.
        controls: effects of the draws on the same sequences, mean over sequences.

    Not established: a p-value; that is `control_p`. Draws are few and often skewed, so this is not a normal z.
    """
    if controls.shape[1] < 2:
        return np.full(len(delta), np.nan)
    with np.errstate(invalid="ignore"):  # draws may be infinite or NaN
        return np.array(
            [
                (effect - drawn.mean()) / drawn.std(ddof=1) if np.ptp(drawn) else np.nan
                for effect, drawn in zip(delta, np.ascontiguousarray(controls), strict=True)
            ]
        )


def draws_floor(draws: int) -> float:
    """Return 1 / (1 + draws), the smallest p-value of a test against `draws` random draws; NaN without draws.

    >>> draws_floor(19), draws_floor(4)
    (0.05, 0.2)
    """
    return 1 / (1 + draws) if draws else float("nan")
