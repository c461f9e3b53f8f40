"""Scores when blocks swap, and shares of content and position, with every key in its place computed anew."""

from dataclasses import replace

import torch
from positional_measurements import PLACES, cut_prompt
from reference_keys import KeysInPlaces

from tlspectral.models.reading import attention_view
from tlspectral.positional.scores import swap_scores


def explicit_key_scores(keys, prompt, weights_of):
    """s_pos and the rest from keys of visible blocks, permuted one swap at a time, with everything computed anew."""
    before, after = [], []
    intact = weights_of(range(keys.n))
    spans = prompt.spans()
    for start, stop in spans:
        if not keys.seen[start:stop].any():
            intact[..., start:stop] = torch.nan
    numbered = cut_prompt(torch.arange(keys.n), map(len, prompt.pieces))
    for i in range(len(spans)):
        for j in range(i + 1, len(spans)):
            swapped = numbered.swapped(i, j)
            moved = weights_of(swapped.tokens().tolist())
            before.append(torch.stack([intact[..., slice(*spans[b])].mean(-1) for b in (i, j)], dim=-1))
            after.append(torch.stack([moved[..., slice(*swapped.spans()[b])].mean(-1) for b in (i, j)], dim=-1))
    return swap_scores(torch.stack(before), torch.stack(after))


def tables_of(model, layer, tokens):
    """Logits before a softcap, [heads, offset, k, j], every key rotated anew, and the reference they come from."""
    keys = KeysInPlaces(attention_view(model), layer, tokens)
    cap, keys.raw = keys.raw.softcap, replace(keys.raw, softcap=None)
    table = torch.empty(len(keys.q), PLACES.width, 4, 4, dtype=torch.float64)
    for shift in range(4):
        order = list(range(keys.n))
        for place, start in enumerate(PLACES.starts):
            content = PLACES.starts[(place + shift) % 4]
            order[start : start + 3] = range(content, content + 3)
        found = keys.logits(order)
        for place, start in enumerate(PLACES.starts):
            table[:, :, (place + shift) % 4, place] = found[:, start : start + 3]
    return table, keys, cap


def components(table):
    """The three parts of every table, each [.., k, j], by the formulas."""
    mean = table.mean((-2, -1), keepdim=True)
    content = (table.mean(-1, keepdim=True) - mean).expand_as(table)
    position = (table.mean(-2, keepdim=True) - mean).expand_as(table)
    return {"content": content, "position": position, "interaction": table - mean - content - position}
