"""Two groups of models compared again: with each model left out, and by other numbers of top heads."""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from tlspectral.stats.permutation import model_permutation_test
from tlspectral.stats.top_heads import top_head_percentile
from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.fingerprint.statistics.reasons import REASONS, documented

_columns = partial(
    columns,
    shared=(
        *columns("""
            gap       | of the values | Lowest value of the upper group less the highest of the other.
            separated | flag          | Whether gap is above 0.
            pvalue    | probability   | Two-sided share of labelings whose difference of means is as large.
            floor     | probability   | Smallest pvalue that any labeling of these values could have.
        """),
        *REASONS,
    ),
)
LEAVE_ONE_MODEL_OUT = Schema(
    "leave_one_model_out",
    _columns("""
        left_out       | label | The model that is left out of the test.
        separated, gap, pvalue, floor
        n_permutations | count | Labelings of the models that are left.
        reason
    """),
)
TOP_K_SENSITIVITY = Schema(
    "top_k_sensitivity",
    _columns("""
        k     | count | Strongest heads per model whose median percentile is compared.
        gap, separated
        upper | label | Group of models that is above.
        pvalue, floor
    """),
)


def leave_one_model_out(
    values: Mapping[str, float] | pd.Series, groups: Mapping[str, Hashable] | pd.Series
) -> pd.DataFrame:
    """Repeat the permutation test with each model left out ("Fingerprint, Not Blueprint", section 6).

    Args:
        values: one value per model, by name: a mapping or a Series.
        groups: the group of each model, by name; two groups.

    Returns:
        DataFrame, a model a row. Columns: `left_out, separated, gap, pvalue, floor, n_permutations, reason`. Where the
        model left out was its group's only one, NaN with a reason.

    Raises:
        ValueError: a model without a value or without a group, other than two groups, or a value that is not finite.

    What it does not establish: robustness to models that were never in. Each p has its own floor, which is higher than
    that of all models together.
    """
    of_model = _grouped_models(values, groups)
    rows: list[dict[str, Any]] = []
    for left_out in of_model:
        rest: dict[Hashable, list[float]] = {group: [] for group, _ in of_model.values()}
        for model, (group, value) in of_model.items():
            if model != left_out:
                rest[group].append(value)
        first, second = rest.values()
        if first and second:
            rows.append({"left_out": left_out, "reason": None} | vars(model_permutation_test(first, second)))
        else:
            reason = f"{left_out} is the only model of its group"
            rows.append({"left_out": left_out, "separated": False, "n_permutations": 0, "reason": reason})
    return documented(rows, LEAVE_ONE_MODEL_OUT)


def top_k_sensitivity(
    tables: Mapping[str, pd.DataFrame],
    groups: Mapping[str, Hashable] | pd.Series,
    ks: Sequence[int] = (1, 2, 3, 5, 10, 20),
) -> pd.DataFrame:
    """Test whether other numbers of top heads separate two groups of models ("Fingerprint, Not Blueprint", section 6).

    Args:
        tables: the head table of each model, by name.
        groups: the group of each model, by name; two groups.
        ks: numbers of top heads by prev, whose median percentile of D_head is compared.

    Returns:
        DataFrame, a k a row. Columns: `k, gap, separated, upper, pvalue, floor`.

    Raises:
        ValueError: what `top_head_percentile` and `leave_one_model_out` refuse; the message names the model.

    What it does not establish: independent confirmation: the sets of heads are nested.
    """
    of_model = _grouped_models(tables, groups)
    first, second = dict.fromkeys(group for group, _ in of_model.values())
    rows: list[dict[str, Any]] = []
    for k in ks:
        medians: dict[Hashable, list[float]] = {first: [], second: []}
        for model, (group, table) in of_model.items():
            try:
                percentile = top_head_percentile(table, k=k)
            except ValueError as error:
                raise ValueError(f"{model}: {error}") from error
            medians[group].append(percentile.statistic)
        first_medians, second_medians = medians[first], medians[second]
        upper = (
            first if min(first_medians) - max(second_medians) >= min(second_medians) - max(first_medians) else second
        )
        rows.append({"k": k, "upper": upper} | vars(model_permutation_test(first_medians, second_medians)))
    return documented(rows, TOP_K_SENSITIVITY)


def _grouped_models(
    values: Mapping[str, Any] | pd.Series, groups: Mapping[str, Hashable] | pd.Series
) -> dict[str, tuple[Hashable, Any]]:
    """Return group and value of each model, in the order of `values`. Refuse other than two groups."""
    value_of, group_of = dict(values.items()), dict(groups.items())
    unmatched = sorted(set(value_of) ^ set(group_of), key=str)
    if unmatched:
        raise ValueError(f"models {unmatched} have a value or a group, but not both")
    labels = list(dict.fromkeys(group_of[model] for model in value_of))
    if len(labels) != 2:
        raise ValueError(f"two groups are compared, found {labels}")
    return {str(model): (group_of[model], value) for model, value in value_of.items()}
