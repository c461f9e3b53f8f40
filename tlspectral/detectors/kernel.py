"""`relative_position_kernel`: mean attention scores by how far the key lies behind the query."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tlspectral.detectors.columns import RELATIVE_POSITION_KERNEL
from tlspectral.errors import EditNotHonored, ScoreMismatch
from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.attention.padding import even_rows
from tlspectral.models.attention.prompts import packed_prompts
from tlspectral.models.attention.scores import pattern_tolerance, rebuilt_scores
from tlspectral.models.attention.selection import heads_by_layer
from tlspectral.models.attention.threads import user_hooks
from tlspectral.rotary import in_float64
from tlspectral.selection import Heads
from tlspectral.tables import named

BATCH = 25
FARTHEST_OFFSET = 20
_KERNEL_SEQUENCES, _KERNEL_LENGTH = 48, 96


def relative_position_kernel(model: Any, heads: Heads, tokens: Any = None) -> pd.DataFrame:
    """Return the mean attention score by how far the key lies behind the query (FP section 7, figure 3).

    Scores are captured as the model computes them, scaled and before the softmax, so that inside `ablate(...)` they are
    those of the ablated model. The mean is over sequences and all queries that have such a key unmasked. Where a bridge
    computes attention itself (GPT-J, OPT, GPT-Neo, tiny-rope), the scores are rebuilt from the weights and the layer's
    input in float64, and their softmax has to be the model's pattern.

    Args:
        model: a TransformerBridge or HookedTransformer.
        heads: as in `ablate`.
        tokens: prompts in any form that `Task` takes: strings, ids [sequences, pos], or a tokenizer's batch, whose
            padding is not counted. None draws 48 seeded sequences of BOS and 95 random ids. FP used text.

    Returns:
        DataFrame `layer, head, offset, score`; offset = key - query, from -20 (or as far as prompts reach) to 0; NaN
        where every such key is masked. `attrs` say which model and weights.

    Raises:
        BadHead: a head that does not exist.
        ScoreMismatch: rebuilt scores do not give the model's pattern.
        EditNotHonored: a layer whose scores are rebuilt has hooks on z, as those of an ablation there.
        ValueError, TypeError: tokens that cannot be read; see `Task`.

    What it does not establish: that the head attends by position. Contents contribute to the mean as well, and a
    softmax sees only differences within a query's row.
    """
    view = attention_view(model)
    chosen = heads_by_layer(view, heads)
    columns = ["layer", "head", "offset", "score"]
    if not chosen:
        return named(pd.DataFrame.from_records([], columns=columns), RELATIVE_POSITION_KERNEL)
    hooked = user_hooks(view.model)
    for layer in chosen:
        names = view.hook_names(layer)
        if "scores" not in names and names["z"] in hooked:
            raise EditNotHonored(
                f"layer {layer}: this bridge computes attention itself and an ablation edits z, so there are no "
                f"ablated scores to read; take the hooks off {names['z']} (leave the `ablate` block)"
            )
    prompts = even_rows(_random_prompts(view)) if tokens is None else packed_prompts(view, tokens)
    n_offsets = min(FARTHEST_OFFSET + 1, prompts.tokens.shape[1])
    totals = {layer: torch.zeros(2, n_offsets, len(indices), dtype=torch.float64) for layer, indices in chosen.items()}
    for start in range(0, len(prompts.tokens), BATCH):
        rows = slice(start, start + BATCH)
        captured: dict[str, Tensor] = {}
        hooks: list[tuple[str, Callable[[Tensor, Any], None]]] = []
        for layer, indices in chosen.items():
            names, add = view.hook_names(layer), _by_offset(indices, totals[layer], prompts.real[rows])
            if "scores" in names:
                hooks.append((names["scores"], add))
            else:
                points = [names[point] for point in ("residual", "cos", "sin", "pattern") if point in names]
                hooks += [(name, partial(_hold, captured, name)) for name in points]
        view.run(prompts.tokens[rows], hooks, last=hooks[-1][0])
        for layer, indices in chosen.items():
            if "scores" not in view.hook_names(layer):
                _by_offset(indices, totals[layer], prompts.real[rows])(_rebuilt(view, layer, captured), None)
    table_rows = []
    for layer, indices in chosen.items():
        means = (totals[layer][0] / totals[layer][1]).numpy()  # [offsets, heads]; 0 / 0 is NaN
        table_rows += [
            (layer, head, -offset, means[offset, column])
            for column, head in enumerate(indices)
            for offset in reversed(range(n_offsets))
        ]
    table = pd.DataFrame.from_records(table_rows, columns=columns)
    table.attrs = dict[Any, Any](view.origin())
    return named(table, RELATIVE_POSITION_KERNEL)


def _random_prompts(view: AttentionView) -> Int[Tensor, "sequences pos"]:
    length = min(_KERNEL_LENGTH, view.n_ctx)
    tokens = torch.randint(0, view.d_vocab, (_KERNEL_SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = view.start_token
    return tokens


def _hold(captured: dict[str, Tensor], name: str, activation: Tensor, hook: Any) -> None:
    captured[name] = activation.detach()


def _rebuilt(view: AttentionView, layer: int, captured: dict[str, Tensor]) -> Float64[Tensor, "batch heads pos pos"]:
    """Return the scores of a layer that exposes only its pattern, -inf where it masks. Raises ScoreMismatch."""
    pattern = captured[view.hook_names(layer)["pattern"]].cpu()
    mask = ~view.causal_mask(layer, pattern.shape[-1]).cpu()
    scores = rebuilt_scores(view, layer, captured).total.masked_fill(mask, -torch.inf)
    error = float((scores.softmax(-1) - pattern.double()).abs().max())
    allowed = pattern_tolerance(pattern.dtype, float(scores.masked_fill(mask, 0.0).abs().max()))
    if not error <= allowed:
        raise ScoreMismatch(
            f"layer {layer}: the pattern rebuilt from the folded weights differs from the model's own by {error:.2e} "
            f"(allowed {allowed:.2e}); look for hooks that edit queries, keys or the pattern, or run verify_scores"
        )
    return scores


def _by_offset(
    heads: list[int], total: Float64[Tensor, "two offsets heads"], real: Bool[Tensor, "batch pos"]
) -> Callable[[Tensor, Any], None]:
    """Return a hook that adds the sum of unmasked scores of real tokens and their number, by offset and head."""

    def add(scores: Tensor, hook: Any) -> None:
        chosen = scores[:, heads]
        for offset in range(total.shape[1]):
            diagonal = in_float64(chosen.diagonal(-offset, dim1=-2, dim2=-1))  # [batch, heads, queries]
            unmasked = (diagonal > torch.finfo(scores.dtype).min / 2) & real[:, None, offset:].to(diagonal.device)
            total[0, offset] += diagonal.where(unmasked, 0.0).sum((0, 2)).cpu()
            total[1, offset] += unmasked.sum((0, 2)).cpu()

    return add
