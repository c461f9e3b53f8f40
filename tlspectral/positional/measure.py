"""`positional_symbolic`: whether a head's attention stays or follows the blocks when two blocks of a prompt swap."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor
from tqdm.auto import tqdm

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.attention import AttentionView, RawAttention, attention_view
from tlspectral.models.attention.layer import digest_of
from tlspectral.positional.columns import POSITIONAL_SYMBOLIC
from tlspectral.positional.exclusion import ExclusionSplit, frequency_exclusion, head_exclusion, swapped_key_means
from tlspectral.positional.passes import QueryPasses
from tlspectral.positional.prompts import BlockPrompt, Segment, chosen_swaps
from tlspectral.positional.readout import LastQuery, require_reproduced
from tlspectral.positional.scores import SwapScores, block_means, score_correlation, swap_scores
from tlspectral.tables import named

Mode = Literal["prompt", "key"]


def positional_symbolic(
    model: Any,
    prompt: BlockPrompt,
    *,
    mode: Mode = "prompt",
    tau: float | None = None,
    exclude_first_block: bool = True,
    per_frequency: bool = False,
    logit_scale: float | None = None,
    swaps: Iterable[Sequence[int]] | None = None,
    seed: int = 0,
    show_progress: bool = True,
) -> pd.DataFrame:
    """Positional and symbolic score of every head, or of every rotary frequency of every head, on one prompt.

    Blocks i and j of the prompt swap, and the attention that its last token pays to the two slots is compared before
    and after: `s_pos` is high where it stays in the slots, `s_sym` where it follows the blocks. A slot is as long as
    the block in it, so a swap of blocks of unequal length shifts the tokens between them.

    There are two kinds of swap, and they answer different questions:

    * `mode="prompt"`: the words swap and the model runs again, the experiment of PS. Deeper layers see other keys.
    * `mode="key"`: the keys of one pass swap and are rotated to their new positions with the model's own cos and sin,
      Definition 2 of PS itself. Without rotary positions or ALiBi every head is symbolic here, with index exactly 0: a
      learned position is part of the key vector and moves with it. For such models use `"prompt"`.

    Both agree in the first layer of a model without learned positions. Hooks that are on the model stay in force, as
    long as they leave the scores to the layer's own queries and keys.

    Args:
        model: a TransformerBridge or HookedTransformer.
        prompt: the blocks; the query is the last token of the suffix.
        mode: see above.
        tau: temperature of the weighting of swaps, in attention weight, or None: 0.1 times the largest |d_i - d_j| of
            that head (and frequency), which does not depend on how much attention the blocks get at all. PS gives no
            value, and results depend on it.
        exclude_first_block: leave out swaps that touch `blocks[0]`, which holds the attention sink of many prompts: the
            sink stays in the first slot under `"prompt"` and moves with its keys under `"key"`.
        per_frequency: rows per rotary pair instead, from the same passes. Logits are then `L_t` of PS appendix B.3:
            no softcap and no ALiBi, and non-rotary columns are in no row.
        logit_scale: factor on the products of queries and keys. None takes the model's own for heads and 1 per
            frequency, as PS has no 1/sqrt(d) there.
        swaps: pairs of block indices; None takes all pairs.
        seed: of the null of the correlation.
        show_progress: a bar over passes.

    Returns:
        DataFrame `layer, head[, frequency], s_pos, s_sym, exclusion_index, logit_std, tau, alpha_ess`, sorted.
        `exclusion_index` = sym / (pos + sym) of PS Theorem 1 over all visible tokens before the query: 0 symbolic, 1
        positional, independent of tau, swaps and scale. `logit_std`, of the logits of the same tokens: if it is small
        the softmax is flat and both scores are near 1. `alpha_ess`: effective number of swaps behind the scores.
        Scores are NaN for heads whose window shows none of the swaps.
        `attrs`: provenance, settings, and `correlation` of the two scores over heads (of the heads also for frequency
        rows) with its null, see `score_correlation`.

    Raises:
        ValueError: an unknown mode; tau or logit_scale not positive and finite; swaps that do not exist or of which
            none is left; text that the tokenizer joins across blocks, before or after a swap; a prompt too long.
        UnsupportedArchitecture: no attention pattern, or no rotary positions to take frequencies of.
        ScoreMismatch: a layer's attention is not the softmax of its captured queries and keys.

    Source: "Decoupling Positional and Symbolic Attention Behavior" (PS, sections 3.1 to 3.3, appendix B.3).

    What it does not establish: how the model solves the task, or what a head is for. A negative correlation of
    the two scores is largely geometry: with f and f' the angles of v and v', `s_pos^2 + s_sym^2 = 1 + sin 2f sin 2f'`
    at each swap. Compare it with the null, in which heads differ only in how often they follow. Both scores near 1
    mean that there was little attention to move.
    """
    view = attention_view(model)
    chosen = chosen_swaps(len(prompt.blocks), swaps, exclude_first_block=exclude_first_block)
    with tqdm(total=1 + len(chosen), desc="swaps", leave=False, disable=not show_progress) as bar:
        (query_scores,) = measure_queries(
            view,
            prompt.prefix,
            prompt.blocks,
            [prompt.suffix],
            mode=mode,
            tau=tau,
            exclude_first_block=exclude_first_block,
            logit_scale=logit_scale,
            swaps=chosen,
            per_frequency=per_frequency,
            seed=seed,
            advance=bar.update,
        )
    table = query_scores.heads if query_scores.frequencies is None else query_scores.frequencies
    table.attrs = {
        **view.origin(),
        "mode": mode,
        "tau": tau,
        "exclude_first_block": exclude_first_block,
        "per_frequency": per_frequency,
        "logit_scale": logit_scale,
        "n_swaps": len(chosen),
        "n_blocks": len(prompt.blocks),
        "n_tokens": len(query_scores.tokens),
        "tokens_sha256": digest_of([query_scores.tokens]),
        "seed": seed,
        "correlation": query_scores.correlation,
    }
    return named(table, POSITIONAL_SYMBOLIC)


class QueryScores(NamedTuple):
    """Scores of one query's prompt, and before any swap its tokens and the model's output.

    Attributes:
        correlation: of the scores over heads, see `score_correlation`.
    """

    heads: pd.DataFrame
    frequencies: pd.DataFrame | None
    correlation: dict[str, Any]
    last_logits: Float64[Tensor, "d_vocab"]
    tokens: Int[Tensor, "pos"]


def measure_queries(
    view: AttentionView,
    prefix: Segment,
    blocks: Iterable[Segment],
    suffixes: Iterable[Segment],
    *,
    mode: Mode = "prompt",
    tau: float | None = None,
    exclude_first_block: bool = True,
    logit_scale: float | None = None,
    swaps: Iterable[Sequence[int]] | None = None,
    per_frequency: bool = False,
    seed: int = 0,
    advance: Callable[[int], Any] | None = None,
) -> list[QueryScores]:
    """`positional_symbolic` for several suffixes behind the same blocks, which the model reads once for all of them.

    A single suffix is measured with plain passes, so that hooks that refuse a key/value cache work. `advance` is called
    with the number of prompts done, which are `len(suffixes) * (1 + number of swaps)` in all. Raises as
    `positional_symbolic`.
    """
    for name, value in (("tau", tau), ("logit_scale", logit_scale)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, or None for the default; found {value}")
    require_mode(mode)
    blocks, advance = tuple(blocks), advance or (lambda count: None)
    chosen = chosen_swaps(len(blocks), swaps, exclude_first_block=exclude_first_block)
    prompts = [tokenized_for(view, BlockPrompt(prefix, blocks, suffix), chosen, mode) for suffix in suffixes]
    if not prompts:
        raise ValueError("no suffix was given, so there is no query to measure")
    layers = [view.raw(index) for index in range(view.n_layers)]
    longest = max(len(prompt.tokens()) for prompt in prompts)
    require_valid_length(layers, longest)
    resolutions = _resolutions(layers, logit_scale, per_frequency)
    context, passes = prompts[0], QueryPasses(view, layers, [torch.as_tensor(prompt.suffix) for prompt in prompts])
    inputs = [{name: _ScoreInputs() for name in resolutions} for _ in prompts]
    collector = _Collector(layers, resolutions, context.spans(), chosen, inputs)
    logits = passes.run(_fronts([context]), partial(collector.take_intact, swap_keys=mode == "key"))
    advance(len(prompts) * (1 if mode == "prompt" else 1 + len(chosen)))
    if mode == "prompt":
        at_once = passes.contexts_at_once(longest)
        for start in range(0, len(chosen), at_once):
            batch = chosen[start : start + at_once]
            swapped = [context.swapped(i, j) for i, j in batch]
            spans = [[prompt.spans()[i], prompt.spans()[j]] for prompt, (i, j) in zip(swapped, batch, strict=True)]
            passes.run(_fronts(swapped), partial(collector.take_swapped, spans))
            advance(len(prompts) * len(batch))
    return [
        _query_scores(of_query, chosen, tau, seed, logits[query][0], prompts[query].tokens())
        for query, of_query in enumerate(inputs)
    ]


def require_mode(mode: str) -> None:
    """Refuse an unknown mode. Raises ValueError."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}; not {mode!r}")


class _Resolution(NamedTuple):
    """How logits and exclusion splits of heads, or of their frequencies, are made from what a query sees."""

    logits: Callable[..., Float64[Tensor, "*rows n"]]
    exclusion: Callable[[LastQuery], ExclusionSplit]


@dataclass(frozen=True)
class _ScoreInputs:
    """Input of the scores by layer: d_b of all blocks, (d'_i, d'_j) of each swap in order, and exclusion splits."""

    before: dict[int, Float64[Tensor, "*rows blocks"]] = field(default_factory=dict)
    after: dict[int, list[Float64[Tensor, "*rows 2"]]] = field(default_factory=dict)
    splits: dict[int, ExclusionSplit] = field(default_factory=dict)


@dataclass(frozen=True)
class _Collector:
    """Collects the input of the scores from passes of the model; `inputs` has it by query and resolution."""

    layers: list[RawAttention]
    resolutions: dict[str, _Resolution]
    spans: list[tuple[int, int]]
    swaps: list[tuple[int, int]]
    inputs: list[dict[str, _ScoreInputs]]

    def take_intact(
        self, prompt: int, query: int, layer: int, seen: LastQuery, pattern: Tensor, *, swap_keys: bool
    ) -> None:
        """Read a pass over the unchanged prompt; with `swap_keys` also compute what swapped keys of it would give."""
        require_reproduced(layer, seen, pattern, self.layers[layer])
        for name, resolution in self._rows_of(seen):
            inputs, logits = self.inputs[query][name], resolution.logits(seen)
            inputs.before[layer] = block_means(logits.softmax(-1), self.spans).cpu()
            inputs.splits[layer] = ExclusionSplit(*(part.cpu() for part in resolution.exclusion(seen)))
            if swap_keys:
                after = swapped_key_means(partial(resolution.logits, seen), logits, self.spans, self.swaps)
                inputs.after[layer] = list(after.cpu())

    def take_swapped(
        self, spans: list[list[tuple[int, int]]], prompt: int, query: int, layer: int, seen: LastQuery, pattern: Tensor
    ) -> None:
        """Read a pass over prompts with two blocks swapped; `spans` are the positions of the two after the swap."""
        for name, resolution in self._rows_of(seen):
            means = block_means(resolution.logits(seen).softmax(-1), spans[prompt])
            self.inputs[query][name].after.setdefault(layer, []).append(means.cpu())

    def _rows_of(self, seen: LastQuery) -> Iterator[tuple[str, _Resolution]]:
        """The resolutions; a layer without rotary pairs has no frequencies."""
        return (row for row in self.resolutions.items() if row[0] == "heads" or seen.n_pairs > 0)


def _resolutions(layers: list[RawAttention], scale: float | None, per_frequency: bool) -> dict[str, _Resolution]:
    heads = _Resolution(partial(LastQuery.head_logits, scale=scale), partial(head_exclusion, scale=scale))
    if not per_frequency:
        return {"heads": heads}
    if all(raw.rotary is None for raw in layers):
        raise UnsupportedArchitecture("no layer of this model has rotary positions: there are no frequencies to score")
    pairs = _Resolution(partial(LastQuery.frequency_logits, scale=scale), partial(frequency_exclusion, scale=scale))
    return {"heads": heads, "frequencies": pairs}


def tokenized_for(view: AttentionView, prompt: BlockPrompt, swaps: list[tuple[int, int]], mode: Mode) -> BlockPrompt:
    """The prompt as token ids. Its text must keep its tokens under every swap. Raises as `positional_symbolic`."""
    tokenized = prompt.tokenized(view.model)
    if prompt.is_text and mode == "prompt":
        for i, j in swaps:
            prompt.swapped(i, j).require_borders(view.model.tokenizer, f" (after blocks {i} and {j} swap)")
    return tokenized


def require_valid_length(layers: list[RawAttention], length: int) -> None:
    """Refuse a prompt beyond the length up to which rotary frequencies and score scale hold. Raises ValueError."""
    limits = [raw.valid_up_to for raw in layers if raw.valid_up_to is not None]
    if limits and length > min(limits):
        raise ValueError(
            f"the prompt has {length} tokens, but this model's rotary frequencies or score scale change beyond "
            f"{min(limits)}: use fewer blocks"
        )


def _fronts(prompts: list[BlockPrompt]) -> Int[Tensor, "prompts pos"]:
    """Tokens of each prompt before its suffix; swaps do not change their number."""
    return torch.stack([prompt.tokens()[: -len(prompt.suffix)] for prompt in prompts])


def _query_scores(
    inputs: dict[str, _ScoreInputs],
    swaps: list[tuple[int, int]],
    tau: float | None,
    seed: int,
    logits: Tensor,
    tokens: Tensor,
) -> QueryScores:
    tables, correlation, slots = {}, {}, torch.tensor(swaps)
    for name, by_layer in inputs.items():
        # (d_i, d_j) of each swap, [swaps, *rows, 2]
        before = {layer: means[..., slots].movedim(-2, 0) for layer, means in by_layer.before.items()}
        scores = {layer: swap_scores(before[layer], torch.stack(by_layer.after[layer]), tau) for layer in before}
        rows = [_rows(layer, scores[layer], by_layer.splits[layer]) for layer in scores]
        tables[name] = pd.concat(rows, ignore_index=True)
        if name == "heads":
            joined = SwapScores(*(torch.cat(part, dim=-1) for part in zip(*scores.values(), strict=True)))
            correlation = score_correlation(torch.cat(list(before.values()), dim=1), joined, seed=seed)
    return QueryScores(tables["heads"], tables.get("frequencies"), correlation, logits.cpu().double(), tokens)


def _rows(layer: int, scores: SwapScores, split: ExclusionSplit) -> pd.DataFrame:
    shape = scores.s_pos.shape
    indices = torch.cartesian_prod(*(torch.arange(size) for size in shape)).reshape(-1, len(shape)).T
    columns: dict[str, Any] = {"layer": layer}
    columns |= dict(zip(("head", "frequency"), indices.numpy(), strict=False))
    values = {
        "s_pos": scores.s_pos,
        "s_sym": scores.s_sym,
        "exclusion_index": split.index,
        "logit_std": split.variance.sqrt(),
        "tau": scores.tau,
        "alpha_ess": scores.alpha_ess,
    }
    return pd.DataFrame(columns | {name: value.flatten().numpy() for name, value in values.items()})
