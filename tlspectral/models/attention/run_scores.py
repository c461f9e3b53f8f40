"""Which keys the queries of a run see, and the check that its attention is the softmax of scores."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.errors import ScoreMismatch
from tlspectral.models.attention.tolerances import LOOK_FOR_HOOKS, require_close
from tlspectral.models.reading.view import AttentionView


def visible_keys(
    view: AttentionView, index: int, n_positions: int, captured: dict[str, Tensor]
) -> Bool[Tensor, "batch heads queries keys"]:
    """Return which keys the queries of a layer see, from the scores that it exposes, or causal ones without padding.

    `captured` has these scores, or some of them. Batch and heads are 1 where all are alike.
    """
    name = view.hook_names(index).get("scores")
    if name is None:
        return view.reader.seen_keys(view.model, index, n_positions)[None, None]
    return view.reader.unmasked(view.model, index, captured[name])


def require_own_pattern(
    scores: Float[Tensor, "*rows keys"],
    pattern: Float[Tensor, "*rows keys"],
    stored: torch.dtype,
    where: str,
    *,
    largest: float | None = None,
) -> None:
    """Refuse attention of a run that is not the softmax of the scores of its queries and keys, -inf where masked.

    `largest` is the largest |score| of the layer where it is known, else the largest of these. Raises ScoreMismatch.
    """
    size = scores.masked_fill(scores.isinf(), 0.0).abs().max()
    require_close(
        (scores.softmax(-1) - pattern.to(scores.device).to(scores)).abs().max(),  # widened where there is float64
        size if largest is None else torch.full_like(size, largest),
        stored,
        "pattern",
        f"{where}: the attention of the run differs from that of its queries and keys",
        LOOK_FOR_HOOKS,
        ScoreMismatch,
    )
