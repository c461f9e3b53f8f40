"""Whether accuracy is U-shaped over the position of the answer: its ends against its middle."""

import pandas as pd

from tlspectral.tables.schema import Schema, columns, require
from tlspectral_studies.common.seed_intervals import intervals
from tlspectral_studies.positional_symbolic.canonical.behaviour import CANONICAL

ANSWER_SHAPE = Schema(
    "answer_shape",
    columns(
        """
        task, n_frequencies, angle
        mean | share | Mean over seeds of accuracy at the ends less that in the middle: positive is a U.
        low, high
        n    | count | Seeds.
        """,
        CANONICAL,
    ),
    "`tlspectral_studies.positional_symbolic.canonical.answer_shape`; `tlspectral study canonical -o FOLDER` writes it "
    "as answer_shape.parquet",
)
_ARM = ["task", "n_frequencies", "angle"]


def answer_shape(by_position: pd.DataFrame, *, edge: int = 4) -> pd.DataFrame:
    """Accuracy where the answer stands at an end of the context less that where it stands in the middle.

    Positive is U-shaped, negative an inverted U. The ends are the first and the last `edge` positions, the middle the
    2 `edge` around the centre. Right answers are pooled over positions, seed by seed.

    Args:
        by_position: table of `canonical_sweep`. Needed: `task, n_frequencies, angle, seed, position, n, correct`.
        edge: positions at each end.

    Returns:
        DataFrame, an arm a row. Columns: `task, n_frequencies, angle, mean, low, high, n`.

    Raises:
        ValueError: a column is missing, the table has no rows, or ends and middle overlap.

    Source: "Decoupling Positional and Symbolic Attention Behavior" (PS, section 5, Figure 3A, Theorems 7 and 8).

    What it does not establish: a shape between ends and middle. For partial induction the answer is the later one of
    two occurrences, so that hardly any stands at the beginning.
    """
    require(by_position, (*_ARM, "seed", "position", "n", "correct"), "the canonical sweep")
    length = int(by_position["position"].max()) + 1
    if not 1 <= edge <= length // 4:
        raise ValueError(f"edge is {edge}: ends and middle of {length} positions do not overlap for 1 to {length // 4}")
    position = by_position["position"]
    at_end = (position < edge) | (position >= length - edge)
    in_middle = (position >= length // 2 - edge) & (position < length // 2 + edge)
    accuracy = {}
    for name, inside in (("ends", at_end), ("middle", in_middle)):
        sums = by_position[inside].groupby([*_ARM, "seed"], sort=False)[["correct", "n"]].sum()
        accuracy[name] = sums["correct"] / sums["n"]
    difference = (accuracy["ends"] - accuracy["middle"]).rename("difference").reset_index()
    return ANSWER_SHAPE.frame(intervals(difference, _ARM, "difference"))
