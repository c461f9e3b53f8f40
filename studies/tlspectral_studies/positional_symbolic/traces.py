"""Single heads in detail: attention before and after swaps, norms per rotary frequency."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading import measured
from tlspectral.models.reading.digests import digest_of
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.layer import RawAttention
from tlspectral.models.reading.view import AttentionView
from tlspectral.positional.block_weights import SwapMode
from tlspectral.positional.readout import LastQuery, Moved, normed, read_prompt
from tlspectral.positional.scores import block_means
from tlspectral.positional.swapped_prompts import require_settings
from tlspectral.selection.heads_as_written import Heads
from tlspectral.tables.head_columns import HEAD_COLUMNS
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks.block_prompt import BlockPrompt, chosen_swaps, tokenized_for

_columns = partial(columns, shared=HEAD_COLUMNS)

ATTENTION_TRACES = Schema(
    "attention_traces",
    _columns("""
        layer, head, name
        frequency | index                 | Index of the rotary pair that is shown alone; NA for the whole head.
        swap_i    | index                 | Index of the first of the two swapped blocks.
        swap_j    | index                 | Index of the second of them, above swap_i.
        block     | index                 | Index of a slot for a block in the prompt, from 0, whichever block is in it.
        before    | attention probability | Mean attention weight of the last query to a token in that slot.
        after     | attention probability | The same after the swap, with the block that is then in the slot.
    """),
)
FREQUENCY_NORMS = Schema(
    "frequency_norms",
    _columns("""
        layer, head, name
        frequency  | index                   | Index of the rotary pair.
        logit_norm | logit x attention scale | Root mean square, over visible tokens before the last query, of what the
                   |                         | rotary pair adds to its score, before the model's score scale.
        key_norm   | of the model's keys     | Root mean square, over the same tokens, of the length of the key's two
                   |                         | coordinates of the pair, after key norm and with the model's attention
                   |                         | scaling.
    """),
)


def attention_traces(
    model: Any,
    prompt: BlockPrompt,
    heads: Heads,
    *,
    swaps: Iterable[tuple[int, int]],
    frequencies: Iterable[int] | None = None,
    mode: SwapMode = "prompt",
) -> pd.DataFrame:
    """Mean attention of the last query to each block, before and after each swap of two blocks.

    Args:
        model: a TransformerBridge or HookedTransformer.
        prompt: the blocks; the query is the last token of the suffix.
        heads: (layer, head) pairs, or a DataFrame with these columns.
        swaps: pairs of block indices; each takes a pass under "prompt".
        frequencies: indices of rotary pairs to be shown alone, beside the whole head. Their logits have the model's
            score scale, no softcap and no ALiBi, as in `positional_symbolic`.
        mode: "prompt": the words swap and the model runs again; "key": the keys of one pass swap and are rotated
            to their new positions. See `positional_symbolic`.

    Returns:
        DataFrame sorted by all but the last two columns, the whole head first. Columns: `layer, head, name, frequency,
        swap_i, swap_j, block, before, after`. A head is positional if `after` equals `before`, symbolic if the two
        slots have exchanged their weights.

    Raises:
        BadHead: a head that does not exist.
        ValueError: a frequency that does not exist, or no heads.
        ValueError, UnsupportedArchitecture, ScoreMismatch: as `positional_symbolic`.

    Source: "Decoupling Positional and Symbolic Attention Behavior" (PS, section 3.3, Figure 1E).

    What it does not establish: how the head behaves under other swaps; the scores are means over many.
    """
    require_settings(mode)
    with measured(model) as view:
        wanted = heads_by_layer(view, heads)
        pairs = [] if frequencies is None else sorted({index(frequency) for frequency in frequencies})
        chosen = chosen_swaps(len(prompt.blocks), swaps)
        intact = tokenized_for(view.model, prompt, chosen if mode == "prompt" else [])
        _require_frequencies(view, wanted if pairs else (), pairs)
        before: dict[_Trace, Tensor] = {}
        after: dict[tuple[int, int], dict[_Trace, Tensor]] = {swap: {} for swap in chosen}

        def take(layer: int, seen: LastQuery) -> None:
            before.update(_traces(layer, seen, wanted[layer], pairs, intact))
            for swap in chosen if mode == "key" else []:
                moved = (_key_order(intact, swap), torch.arange(len(seen.visible)))
                after[swap].update(_traces(layer, seen, wanted[layer], pairs, intact.swapped(*swap), moved))

        def take_swapped(swap: tuple[int, int], layer: int, seen: LastQuery) -> None:
            after[swap].update(_traces(layer, seen, wanted[layer], pairs, intact.swapped(*swap)))

        read_prompt(view, intact.tokens(), wanted, take)
        for swap in chosen if mode == "prompt" else []:
            read_prompt(view, intact.swapped(*swap).tokens(), wanted, partial(take_swapped, swap))

        rows = [
            (*trace, *swap, block, *both)
            for trace, means in before.items()
            for swap in chosen
            for block, both in enumerate(zip(means.tolist(), after[swap][trace].tolist(), strict=True))
        ]
        names = [column.name for column in ATTENTION_TRACES.columns if column.name != "name"]
        table = pd.DataFrame(rows, columns=names).astype({"frequency": "Int64"})
        table = table.sort_values(names[:6], na_position="first", ignore_index=True)
        return ATTENTION_TRACES.frame(table, {**_provenance(view, intact), "mode": mode})


def frequency_norms(model: Any, prompt: BlockPrompt, heads: Heads) -> pd.DataFrame:
    """Norms of the last query's logits and of the keys at each rotary frequency of some heads.

    Args:
        model: a TransformerBridge or HookedTransformer.
        prompt: its blocks are not distinguished here; the query is the last token of the suffix.
        heads: (layer, head) pairs, or a DataFrame with these columns.

    Returns:
        DataFrame sorted by head and frequency. Columns: `layer, head, name, frequency, logit_norm, key_norm`. Logits
        are those of `positional_symbolic(..., per_frequency=True, logit_scale=1.0)`.

    Raises:
        BadHead: a head that does not exist.
        ValueError: no heads.
        ValueError, UnsupportedArchitecture, ScoreMismatch: as `positional_symbolic`, also for a layer without rotary
            positions.

    Source: PS, section 3.3, Figure 1D, which names both norms and defines neither.

    What it does not establish: that a frequency decides where the head looks: a logit that is large and equal for all
    keys changes nothing. One attention sink can make up most of a norm.
    """
    with measured(model) as view:
        wanted = heads_by_layer(view, heads)
        intact = prompt.tokenized(model)
        _require_frequencies(view, wanted, [])
        rows: list[tuple[float, ...]] = []
        keys: dict[int, Tensor] = {}

        def keep(activation: Tensor, hook: Any, layer: int) -> None:
            keys[layer] = activation[0].detach().clone()

        def take(layer: int, seen: LastQuery) -> None:
            visible = seen.visible[:-1].nonzero().flatten()
            lengths = _pair_lengths(view.raw(layer), keys.pop(layer), seen)[..., visible]
            logits = replace(seen, score_scale=1.0).frequency_logits()[..., visible]
            for head in wanted[layer]:
                of_logits = logits[head].square().mean(-1).sqrt().tolist()
                of_keys = lengths[head].square().mean(-1).sqrt().tolist()
                rows.extend(
                    (layer, head, pair, *both) for pair, both in enumerate(zip(of_logits, of_keys, strict=True))
                )

        hooks = [(view.hook_names(layer)["key"], partial(keep, layer=layer)) for layer in wanted]
        read_prompt(view, intact.tokens(), wanted, take, hooks)
        names = [column.name for column in FREQUENCY_NORMS.columns if column.name != "name"]
        table = pd.DataFrame(rows, columns=names).sort_values(names[:3], ignore_index=True)
        return FREQUENCY_NORMS.frame(table, _provenance(view, intact))


class _Trace(NamedTuple):
    layer: int
    head: int
    frequency: int | None


def _traces(
    layer: int, seen: LastQuery, heads: list[int], pairs: list[int], prompt: BlockPrompt, moved: Moved | None = None
) -> dict[_Trace, Float64[Tensor, "blocks"]]:
    """Block means of some heads of a layer, whole and at each of the frequencies."""
    moved = None if moved is None else (moved[0].to(seen.visible.device), moved[1].to(seen.visible.device))
    whole = block_means(seen.head_logits(moved=moved).softmax(-1), prompt.spans()).cpu()
    means = {_Trace(layer, head, None): whole[head] for head in heads}
    if pairs:
        alone = block_means(seen.frequency_logits(moved=moved).softmax(-1), prompt.spans()).cpu()
        means |= {_Trace(layer, head, pair): alone[head, pair] for head in heads for pair in pairs}
    return means


def _key_order(prompt: BlockPrompt, swap: tuple[int, int]) -> Int[Tensor, "pos"]:
    """Index of the key at each position after the blocks of a swap are exchanged."""
    prefix, *blocks, suffix = torch.arange(len(prompt.tokens())).split([len(piece) for piece in prompt.pieces])
    return BlockPrompt(prefix, blocks, suffix).swapped(*swap).tokens()


def _pair_lengths(raw: RawAttention, keys: Tensor, seen: LastQuery) -> Float64[Tensor, "heads pairs pos"]:
    """Length of each key's two coordinates at each frequency, times the length of the model's (cos, sin)."""
    rotary: Any = raw.rotary
    k = normed(raw, "key", keys)
    real, imag = rotary.real_index.to(k.device), rotary.imag_index.to(k.device)
    pairs = seen.n_pairs
    lengths = torch.hypot(k[..., real], k[..., imag]).permute(1, 2, 0)
    lengths = lengths.repeat_interleave(len(seen.contents) // len(lengths), dim=0)
    return lengths * torch.hypot(seen.places[..., :pairs, :], seen.places[..., pairs : 2 * pairs, :])


def _provenance(view: AttentionView, prompt: BlockPrompt) -> dict[str, Any]:
    tokens = prompt.tokens()
    return {
        **view.origin(),
        "n_blocks": len(prompt.blocks),
        "n_tokens": len(tokens),
        "tokens_sha256": digest_of([tokens]),
    }


def _require_frequencies(view: AttentionView, layers: Iterable[int], frequencies: Sequence[int]) -> None:
    """Refuse layers without rotary positions (UnsupportedArchitecture), and frequencies not theirs (ValueError)."""
    for layer in layers:
        rotary = view.rotary(layer)
        if rotary is None:
            raise UnsupportedArchitecture(f"layer {layer} has no rotary positions, so its heads have no frequencies")
        for frequency in frequencies:
            if not 0 <= frequency < rotary.n_pairs:
                raise ValueError(f"frequency {frequency}: those of layer {layer} are 0 to {rotary.n_pairs - 1}")
