"""Queries and keys of a head on the plane of one rotary pair: what `plots.rotary_plane` draws."""

from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.attention import attention_view
from tlspectral.models.attention.selection import heads_by_layer
from tlspectral.positional.block_weights import require_valid_length
from tlspectral.positional.columns import ROTARY_PROJECTIONS
from tlspectral.positional.prompts import BlockPrompt
from tlspectral.positional.readout import LastQuery, LastQueryReader, normed, require_reproduced
from tlspectral.rotary import with_gain_and_phase
from tlspectral.selection import Head, head_pair
from tlspectral.tables import named


def rotary_projections(model: Any, prompt: BlockPrompt, head: Head, frequency: int) -> pd.DataFrame:
    """The last query and all keys of a head on one rotary pair, rotated to their positions.

    The inner product of the query's row with a key's is what the pair adds to that key's score, before the score scale.

    Args:
        model: a TransformerBridge or HookedTransformer.
        prompt: the query is the last token of the suffix.
        head: (layer, head), or a name such as "L12H0".
        frequency: index of the rotary pair, 0 the model's first.

    Returns:
        DataFrame `kind` ("query" or "key"), `position`, `label` (the token's text; its id without a tokenizer), `x` and
        `y` (model units): the query, then the visible keys before it.

    Raises:
        BadHead: a head that does not exist.
        ValueError: a frequency that does not exist, and as `positional_symbolic`.
        UnsupportedArchitecture: a layer without rotary positions or without a pattern.
        ScoreMismatch: as `positional_symbolic`.

    Source: PS, section 5, Figure 3C.

    What it does not establish: how the head attends. A score is the sum over all pairs.
    """
    view = attention_view(model)
    layer, number = head_pair(head)
    heads_by_layer(view, [(layer, number)])
    tokens = prompt.tokenized(model).tokens()
    layers = [view.raw(index) for index in range(view.n_layers)]
    require_valid_length(layers, len(tokens))
    raw = layers[layer]
    if raw.rotary is None:
        raise UnsupportedArchitecture(f"layer {layer} has no rotary positions, so its heads have no frequencies")
    if not 0 <= frequency < raw.rotary.n_pairs:
        raise ValueError(f"frequency {frequency}: those of layer {layer} are 0 to {raw.rotary.n_pairs - 1}")
    held: dict[str, Tensor] = {}
    rows: list[tuple[str, int, float, float]] = []

    def hold(activation: Tensor, hook: Any, point: str) -> None:
        held[point] = activation[0].detach().clone()

    def take(found: int, row: int, seen: LastQuery, pattern: Tensor) -> None:
        if found != layer or raw.rotary is None:
            return
        require_reproduced(layer, seen, pattern, raw)
        query, keys = normed(held["query"][-1:], raw.q_norm), normed(held["key"], raw.k_norm)
        query = with_gain_and_phase(query.transpose(0, 1), raw.rotary)[number, 0]
        keys = keys[:, number * keys.shape[1] // len(seen.contents)]
        places = seen.places if seen.places.ndim == 2 else seen.places[number]
        turn = torch.complex(places[frequency], places[seen.n_pairs + frequency])
        real, imag = int(raw.rotary.real_index[frequency]), int(raw.rotary.imag_index[frequency])
        rotated = torch.complex(keys[:, real], keys[:, imag]) * turn
        last = torch.complex(query[real], query[imag]) * turn[-1]
        visible = seen.visible[:-1].nonzero().flatten().tolist()
        points = [("query", len(tokens) - 1, last), *(("key", place, rotated[place]) for place in visible)]
        rows.extend((kind, place, float(z.real), float(z.imag)) for kind, place, z in points)

    reader = LastQueryReader(view, layers, take)
    names = view.hook_names(layer)
    hooks = [(names[point], partial(hold, point=point)) for point in ("query", "key")]
    view.run(tokens[None], [*hooks, *reader.hooks()], last=view.hook_names(view.n_layers - 1)["pattern"])
    reader.require_all()
    table = pd.DataFrame(rows, columns=["kind", "position", "x", "y"])
    ids = [int(tokens[place]) for place in table["position"]]
    tokenizer = getattr(view.model, "tokenizer", None)
    table.insert(2, "label", [str(one) if tokenizer is None else tokenizer.decode([one]) for one in ids])
    table.attrs = {**view.source, "layer": layer, "head": number, "frequency": frequency}
    return named(table, ROTARY_PROJECTIONS)
