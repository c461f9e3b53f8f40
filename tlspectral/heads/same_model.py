"""The check that a head table was made from the weights of a model."""

from typing import Any

import pandas as pd

from tlspectral.models.attention import attention_view
from tlspectral.tables.required import require
from tlspectral.tables.same_model import require_same_model


def require_table_of(model: Any, heads: pd.DataFrame) -> None:
    """Refuse a table of `analyze_heads`, of some or all layers, that was not made from this model's weights.

    Raises ValueError for other weights (or, where hashes cannot be compared, another name or revision), or layers that
    the model does not have. A table without `attrs` does not name its weights, and passes.
    """
    require(heads, ("layer", "head"), "analyze_heads", name="table of heads")
    view = attention_view(model)
    layers = sorted({int(layer) for layer in heads["layer"]})
    require_same_model(heads, view.origin(layer for layer in layers if layer < view.n_layers), "the loaded weights")
    if layers[-1] >= view.n_layers:
        raise ValueError(
            f"the head table has a layer {layers[-1]} and the model has layers 0 to {view.n_layers - 1}: give the "
            "table of this model"
        )
