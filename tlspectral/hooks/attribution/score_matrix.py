"""`scores`: attention scores of a head on one prompt, whole or a part, checked against the model's run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tlspectral.hooks.attribution.score_terms import readable_group
from tlspectral.hooks.attribution.stream_terms import traced_run
from tlspectral.hooks.parts import Part, PartName, part_of
from tlspectral.hooks.parts.checked_calls import bound_parts, change_of
from tlspectral.models.attention.head_scores import HeadScores, rotation_tables
from tlspectral.models.attention.run_scores import require_own_pattern, visible_keys
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import one_head
from tlspectral.models.reading.layer import fold_attention, require_even_scale, softcapped
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.running.text import token_text
from tlspectral.selection.heads_as_written import Head
from tlspectral.selection.node_names import head_name


def scores(model: Any, prompt: Any, head: Head, part: Part | PartName | None = None) -> pd.DataFrame:
    """Return the attention scores of a head between all tokens of a prompt, before softcap, mask and softmax.

    >>> import tlspectral as tls, torch
    >>> model, tokens = tls.load_model("tiny-rope"), torch.arange(3, 20).repeat(2)
    >>> frame = tls.scores(model, tokens, "L1H0")
    >>> frame.shape, frame.loc[33].idxmax(axis=1).tolist()
    ((34, 34), [(17, '3')])

    Use it to study the whole matrix of scores, or the part of it that `ablate` would remove. Scores are recomputed in
    float64 from the stream that enters the layer, with biases and ALiBi. They are returned only if the model's
    attention is their softmax.

    Args:
        model: TransformerBridge or HookedTransformer.
        prompt: one prompt: text, or token ids [pos].
        head: "L5H1", (5, 1) or a table row: one head.
        part: a name such as "symmetric" (M_S), or `tls.parts.Symmetric`, `Antisymmetric`, `RopePhase` or `Band`.
            Default: None, the whole scores. M_S, M_A and Im(M_t) add up to the scores without biases and ALiBi.

    Returns:
        DataFrame of scores in logits: rows are queries, columns are keys. Both axes have two levels, position and
        token: `frame.loc[33]` is the query at position 33. It includes keys that the mask hides. `attrs`: `head`,
        `part`, `softcap`, and the model's origin.

    Raises:
        BadHead: the head does not exist.
        ScoreMismatch: the model's attention is not the softmax of these scores, for example under hooks that edit it.
        UnsupportedArchitecture, BadWeights: the layer cannot be read, or has no such part.
        ValueError, TypeError: the prompt is not exactly one prompt, or the part is not a part of queries and keys.

    Not established: which pairs of tokens matter, because mask and softmax are not applied. More: docs/attribution.md
    """
    removed = None if part is None else part_of(part)
    if removed is not None and (removed.acts_on != "scores" or removed.needs_tokens or removed.at is not None):
        raise ValueError(
            f"{removed!r} is not a part of the scores of all queries: give Symmetric, Antisymmetric, RopePhase or Band "
            "of tls.parts, without at="
        )
    with measured(model) as view:
        layer, index = one_head(view, head)
        prompts = packed_prompts(view, prompt).tokens
        if len(prompts) != 1:
            raise ValueError(f"scores are of one prompt; found {len(prompts)} prompts: give one of them")
        tokens = prompts[0]
        of_head, whole, seen = checked_scores(view, layer, index, tokens)
        shown = whole
        if removed is not None:
            bound = bound_parts(removed, view, {layer: [index]})
            # A layer that `bound` leaves out has nothing of this part.
            shown = -change_of(bound[layer], of_head, seen)[0][0, 0] if layer in bound else torch.zeros_like(whole)
        texts = [token_text(view, token) for token in tokens.tolist()]
        axes = [
            pd.MultiIndex.from_arrays([range(len(tokens)), texts], names=[side, "token"]) for side in ("query", "key")
        ]
        frame = pd.DataFrame(shown.numpy(), index=axes[0], columns=axes[1])
        name = None if removed is None else repr(removed)
        frame.attrs = {**view.origin([layer]), "head": head_name(layer, index), "part": name}
        frame.attrs["softcap"] = of_head.layer.softcap
        return frame


def checked_scores(
    view: AttentionView, layer: int, index: int, tokens: Int[Tensor, "pos"]
) -> tuple[HeadScores, Float64[Tensor, "pos pos"], Bool[Tensor, "pos pos"]]:
    """Run the model in `view` on one prompt. Return the `HeadScores` of one head, its scores, and the mask of keys that
    its queries see.

    `layer` and `index` name the head, `tokens` are ids of the prompt. Scores [query, key] are in float64, with biases
    and ALiBi, before softcap and mask. Raises ScoreMismatch if the model's attention is not their softmax, and
    UnsupportedArchitecture, BadWeights or ValueError for a layer that cannot be read on this prompt.
    """
    raw, names, length = view.raw(layer), view.hook_names(layer), len(tokens)
    require_even_scale(raw, layer, length)
    run = traced_run(view, tokens[None], layer, list(range(length)), sources=False)
    tables = rotation_tables(view, raw.rotary, layer, length, run.captured)
    group, first = readable_group(raw, index)
    if tables is not None and group.rotary is not None and group.rotary.per_head:
        rows = slice(first, first + len(group.w_q))
        tables = tables[0][rows], tables[1][rows]
    of_group = HeadScores.of_stream(fold_attention(group, layer), run.residual[None], tables)
    of_head = replace(of_group.of_head(index - first), layer=raw, heads=[index])
    whole = of_head.whole()[0, 0]
    if raw.alibi is not None:
        whole = whole + raw.alibi.bias(torch.arange(length))[index].to(whole)
    seen = visible_keys(view, layer, length, run.captured).cpu()
    seen = seen.expand(1, view.n_heads(layer), length, length)[0, index]
    row = softcapped(whole, raw.softcap).masked_fill(~seen, -torch.inf)
    pattern = run.captured[names["pattern"]][0, index].cpu().double()
    require_own_pattern(row, pattern, raw.storage_dtype, f"layer {layer}")
    return of_head, whole, seen
