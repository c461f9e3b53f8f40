"""Which keys the queries of a run see, and a check that a run's attention is the softmax of its scores."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.errors import ScoreMismatch
from tlspectral.models.attention.tolerances import LOOK_FOR_HOOKS, require_close
from tlspectral.models.reading.view import AttentionView


def visible_keys(
    view: AttentionView, index: int, n_positions: int, captured: dict[str, Tensor], first: int = 0
) -> Bool[Tensor, "batch heads queries keys"]:
    """Return a bool mask [batch, heads, queries, keys]: True for the keys that the queries of a layer see.

    view: the model. index: the layer. n_positions: tokens of the prompt. captured: activations of the run, from hook
    point name to tensor, with all or some of the layer's scores. first: the first query, where the hook point shows no
    scores.

    The mask is read from the scores that the layer's hook point shows, if any. Otherwise the layer's own mask is
    assumed, without padding. Axes of batch and heads have length 1 if the mask is the same for all.
    """
    name = view.hook_names(index).get("scores")
    if name is None:
        return view.reader.seen_keys(view.model, index, n_positions, first)[None, None]
    return view.reader.unmasked(view.model, index, captured[name])


def require_own_pattern(
    scores: Float[Tensor, "*rows keys"],
    pattern: Float[Tensor, "*rows keys"],
    stored: torch.dtype,
    where: str,
    *,
    largest: float | None = None,
) -> None:
    """Raise ScoreMismatch unless a run's attention pattern is the softmax of `scores`, up to rounding.

    scores: rebuilt from queries and keys, -inf where masked.
    pattern: attention of the run.
    stored: type in which the model computes.
    largest: largest |score| of the layer; default: of these scores.
    where: the layer, beginning of the message.
    """
    size = scores.masked_fill(scores.isinf(), 0.0).abs().max()
    require_close(
        (scores.softmax(-1) - pattern.to(scores.device).to(scores)).abs().max(),  # widened where there is float64
        size if largest is None else torch.full_like(size, largest),
        stored,
        "pattern",
        f"{where}: the attention of the run differs from the softmax of its queries' and keys' scores",
        LOOK_FOR_HOOKS,
        ScoreMismatch,
    )
