"""The positional-scheme contrast for any models: where the strongest previous-token heads stand by D_head."""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from tlspectral.stats import ModelPermutation, model_permutation_test, top_head_percentile
from tlspectral.studies.fingerprint.columns import SCHEME_HEADS, SCHEME_MODELS
from tlspectral.tables import named

ROPE, NOT_ROPE = "RoPE", "not RoPE"


@dataclass(frozen=True, eq=False)
class SchemeContrast:
    """Models with and without rotary positions, by the percentile of their strongest previous-token heads.

    Attributes:
        models: a model a row: `model, scheme, n_heads, k, percentile` (median over the top k of rank / n), `midrank`
            (of `(rank - 1/2) / n`).
        heads: a head a row: `model, scheme, layer, head, percentile`.
        test: RoPE against the rest, one value per model, RoPE tending to be higher; None where a group is empty.
    """

    models: pd.DataFrame
    heads: pd.DataFrame
    test: ModelPermutation | None


def scheme_contrast(tables: Mapping[str, pd.DataFrame], *, k: int = 5) -> SchemeContrast:
    """Compare models as in Table 2 and Fig. 2a of "Fingerprint, Not Blueprint" (FP, section 6).

    Args:
        tables: table of heads by model: `layer, head, D_head, prev`. A model counts as rotary if `rope_imag_frac` is
            there and not all NaN.
        k: previous-token heads per model.

    Returns:
        `SchemeContrast`.

    Raises:
        ValueError: no table, a missing column, or fewer than k heads with both numbers; the message names the model.

    What it does not establish: that positions make the difference. Models are few, share data and code, and differ in
    more than their positions; a percentile says nothing of how far apart heads are.
    """
    if not tables:
        raise ValueError("no table was given: give at least one table of heads")
    rows, members = [], []
    for model, table in tables.items():
        try:
            found = top_head_percentile(table, k=k)
        except ValueError as error:
            raise ValueError(f"{model}: {error}") from error
        scheme = ROPE if "rope_imag_frac" in table and table["rope_imag_frac"].notna().any() else NOT_ROPE
        rows.append((model, scheme, found.n, k, found.statistic, found.statistic_midrank))
        members += [
            (model, scheme, *head, percentile) for head, percentile in zip(found.heads, found.percentiles, strict=True)
        ]
    models = pd.DataFrame(rows, columns=["model", "scheme", "n_heads", "k", "percentile", "midrank"])
    rotary = models["scheme"] == ROPE
    test = None
    if rotary.any() and not rotary.all():
        groups = (models.loc[chosen, "percentile"].to_numpy(dtype=float) for chosen in (rotary, ~rotary))
        test = model_permutation_test(*groups, alternative="greater")
    heads = pd.DataFrame(members, columns=["model", "scheme", "layer", "head", "percentile"])
    return SchemeContrast(named(models, SCHEME_MODELS), named(heads, SCHEME_HEADS), test)
