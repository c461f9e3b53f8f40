"""`top_pairs`: the pairs of query and key on text that get the most attention of a head, with the text around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float32, Int32
from torch import Tensor

from tlspectral.errors import warn_caller
from tlspectral.errors.settings import checked_settings, counted
from tlspectral.heads.detectors.heads import sequences_at_once
from tlspectral.heads.detectors.patterns import PATTERNS
from tlspectral.heads.detectors.sinks import Sinks, asked_for_sinks, found_sinks
from tlspectral.models.hooking.strips import Strip
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, even_rows, in_batches
from tlspectral.models.running.long_prompts import strips_for, strips_noted
from tlspectral.models.running.passes import read_patterns
from tlspectral.models.running.prompts import distinct_rows, equality_notes, packed_prompts, repeated_queries
from tlspectral.models.running.text import text_tokens, token_text
from tlspectral.selection.heads_as_written import Heads
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.progress import bar
from tlspectral.tables.schema import Schema, columns

SEQUENCES, LENGTH = 64, 128
"""Default text: rows of the packaged book, and tokens in each row."""

LOWER, DRAWN = ("high", "middle", "low"), 3
"""Names of the thirds below the least ranked attention, and number of pairs drawn from each third."""

KINDS = {
    "start": "first_token",
    "previous": "previous_token",
    "self": "self",
    "induction": "induction",
    "duplicate": "duplicate",
}
"""Kinds of a pair and the patterns that mark them. The first pattern that marks a pair gives its kind."""

_OF_ONE_QUERY = 2
_BEFORE, _BEHIND = 6, 1  # tokens of context before and after the pair
_TO_WHOLE_WORDS = 6  # most tokens added on a side to complete a word
_ON_ONE_LINE = str.maketrans({"\n": "\N{RETURN SYMBOL}", "\r": "", "\t": " "})

TOP_PAIRS = Schema(
    "top_pairs",
    (
        *HEAD,
        *columns("""
            rank        | index       | Place among the head's pairs by attention, 1 for the largest, at most two of
                        |             | one query; missing for drawn pairs.
            interval    | label       | top for the ranked pairs. For drawn ones the third below the least attention of
                        |             | these, from 0 on, that they lie in: high, middle or low.
            attention   | probability | Attention of the query to the key, as the model has it.
            prompt      | index       | Prompt, from 0, the first that has the pair.
            query       | index       | Position of the query in its prompt, from 0.
            key         | index       | Position of the key.
            query_token | text        | Text of the query's token where it stands, a line end as one sign; its id
                        |             | without a tokenizer.
            key_token   | text        | The same of the key's token.
            offset      | token       | Position of the key less that of the query; -1 is the previous token.
            kind        | label       | start (position 0), previous, self, induction (behind an earlier token equal to
                        |             | the query's) or duplicate (an earlier token equal to the query's), the first
                        |             | that holds, or other. In an encoder next, and no induction.
            context     | text        | The text around the pair, in whole words: [key], <query>. What lies far from
                        |             | both is " ... ".
        """),
    ),
    "`tls.top_pairs`",
)


@checked_settings
def top_pairs(
    model: Any,
    heads: Heads | None = None,
    prompts: Any = None,
    *,
    n: int = 10,
    sink: bool = False,
    sinks: str | None = None,
) -> pd.DataFrame:
    """Return the pairs of query and key with the most attention of each head, and random pairs from below them.

    Use it to see what a head attends to in words.

    >>> import tlspectral as tls
    >>> pairs = tls.top_pairs(tls.load_model("tiny-rope"), "L0H3", [list(range(1, 20))], n=2)
    >>> pairs.loc[pairs["rank"].notna(), "kind"].tolist()
    ['previous', 'previous']

    The `n` largest pairs have a rank, at most two per query. Below them, the range from 0 to the last ranked attention
    is cut into thirds (`high`, `middle`, `low`). From each third, three queries whose largest pair lies there are
    drawn.

    Args:
        model: a TransformerBridge or HookedTransformer. Hooks on it stay in force.
        heads: "L5H1", (5, 1), "L5" (a layer), "L5KV1" (a key/value group), a list of these, or a table with columns
            `layer` and `head`. Default: all.
        prompts: strings, token ids [batch, pos], lists of ids, or a tokenizer's batch; padding is not counted. Default:
            64 rows of 128 tokens of "Alice" (Carroll 1865).
        n: number of ranked pairs per head.
        sink: True includes pairs whose key is the first token of the prompt.
        sinks: "found" leaves out all attention sinks of the layer instead (`tls.heads.attention_sinks`).

    Returns:
        DataFrame sorted by layer, head and falling attention within an interval. Columns: `layer, head, name, rank,
        interval, attention, prompt, query, key, query_token, key_token, offset, kind, context`. `rank` is 1 for the
        largest and missing for drawn pairs; `interval` is "top" or the name of the third; `attention` a probability.
        `prompt`, `query` and `key` count from 0; `offset` is key less query, in tokens; `context` is the text around
        the pair, as "[key] ... <query>". `kind` is the first that fits the token ids: `start` (first token),
        `previous`, `self`, `induction` (after an earlier token equal to the query's), `duplicate` (an equal token),
        else `other`.

    Raises:
        BadHead: a head does not exist.
        ValueError, TypeError: prompts cannot be read, `n` is below 1, the model has no tokenizer for the default text,
            `sink=True` with `sinks`, or no key can be judged as a sink.
        UnsupportedArchitecture: the model exposes no attention pattern.

    Not established: that the model needs these tokens, or that the head attends so on other text. The largest pairs are
    extremes: `detect_heads(prompts=)` gives means with errors. More: docs/detectors.md.
    """
    n = counted(n, 1, "n is how many pairs get a rank")
    without_sinks = asked_for_sinks(sinks, sink=sink)
    with measured(model) as view:
        chosen = heads_by_layer(view, heads)
        if prompts is None:
            packed = even_rows(text_tokens(view, None, n_sequences=SEQUENCES, sequence_length=LENGTH))
        else:
            packed = packed_prompts(view, prompts)
        distinct = distinct_rows([packed], [()] * len(packed.tokens))
        equal = equality_notes(distinct, "pairs of equal prompts are one pair, which has one rank")
        for note in equal:
            warn_caller(note.message)
        packed = replace(packed, notes=(*packed.notes, *equal))
        at_once = sequences_at_once(view, packed.tokens.shape[1])
        layer_sinks = found_sinks(view, packed, chosen, at_once) if without_sinks else None
        if layer_sinks is not None:
            layer_sinks.require(chosen)
        rows: list[tuple[Any, ...]] = []
        for layer, (attention, keys) in _largest_of_queries(view, chosen, packed, sink, layer_sinks, at_once).items():
            for column, head in enumerate(chosen[layer]):
                rows += _chosen(attention[:, column], keys[:, column], n, (layer, head))
        known = ["layer", "head", "rank", "interval", "attention", "prompt", "query", "key"]
        table = pd.DataFrame(rows, columns=known).astype({"rank": "Int64"})
        table["offset"] = table["key"] - table["query"]
        attrs = {
            "n_sequences": len(distinct),
            "n_distinct": int(distinct.max()) + 1,
            "n": n,
            **({"sink": bool(sink)} if layer_sinks is None else layer_sinks.noted),
            "seed": 0,
            "batch": at_once,
        }
        at_once = strips_for(view, packed.tokens.shape[1])
        attrs |= strips_noted(at_once)
        described = _with_words(view, packed, _with_kinds(table, packed, at_once, view.causal))
        return TOP_PAIRS.frame(described, {**view.origin(), **attrs, **packed.noted})


def _largest_of_queries(
    view: AttentionView,
    chosen: dict[int, list[int]],
    packed: PackedTokens,
    sink: bool,
    sinks: Sinks | None,
    at_once: int,
) -> dict[int, tuple[Float32[Tensor, "prompts heads queries 2"], Int32[Tensor, "prompts heads queries 2"]]]:
    """Run the prompts `packed` and return a dict from layer to two tensors: the two largest attention weights of each
    query (larger first; 0 if missing), and their keys.

    `view` is the open model, `chosen` has heads by layer. `sink`: True keeps the first key of each prompt, which is
    otherwise left out. With `sinks`, all attention sinks are left out instead. A query that an earlier prompt also has
    gets 0. `at_once` prompts run together. Raises UnsupportedArchitecture for a layer that exposes no attention
    pattern.
    """
    if not chosen:
        return {}
    (n_prompts, width), first = packed.tokens.shape, 0 if sink or sinks is not None else 1
    shape = {layer: (n_prompts, len(heads), width, _OF_ONE_QUERY) for layer, heads in chosen.items()}
    largest_of_layers = {
        layer: (torch.zeros(size), torch.zeros(size, dtype=torch.int32)) for layer, size in shape.items()
    }
    choice = {
        layer: torch.cat(
            [
                view.reader.seen_keys(view.model, layer, strip.n_keys, strip.start).cpu().sum(1) > 1
                for strip in strips_for(view, width)
            ]
        )
        for layer in chosen
    }
    new = packed.real & ~repeated_queries(view, packed)

    def keep(rows: slice, layer: int, pattern: Tensor, strip: Strip) -> None:
        seen = pattern.detach()[..., first:]
        if len(chosen[layer]) < seen.shape[1]:
            seen = seen[:, chosen[layer]]
        counted = (new[rows] & choice[layer])[:, None, strip.queries]
        if sinks is not None:
            is_sink = sinks.found[layer][rows, None, None, : strip.n_keys]
            seen = seen.masked_fill(is_sink.to(seen.device), 0.0)
            counted = counted & sinks.prompts(layer)[rows, None, None]
        attention, keys = largest_of_layers[layer]
        for place in range(_OF_ONE_QUERY if seen.shape[-1] else 0):  # max, twice: half the time of topk
            largest, where = seen.max(-1)
            attention[rows, :, strip.queries, place] = largest.cpu().float().where(counted, 0.0)
            keys[rows, :, strip.queries, place] = where.cpu().int() + first
            if place == 0:
                seen = seen.scatter(-1, where[..., None], 0.0)

    def run(rows: slice) -> int:
        read_patterns(view, packed.tokens[rows], [*chosen], partial(keep, rows))
        return rows.stop - rows.start

    with bar(n_prompts, "top pairs", "seq") as shown:
        for done in in_batches(n_prompts, at_once, run):
            shown.update(done)
    return largest_of_layers


def _chosen(
    attention: Float32[Tensor, "prompts queries 2"],
    keys: Int32[Tensor, "prompts queries 2"],
    n: int,
    head: tuple[int, int],
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of one head: the `n` ranked pairs, then the randomly drawn pairs.

    A row is a tuple `layer, head, rank, interval, attention, prompt, query, key`. `attention` and `keys` hold the two
    largest weights of each query; among equal weights the earlier prompt and query come first. `head` is (layer, head).
    """
    weights, places = attention.flatten().numpy(), keys.flatten().numpy()
    n_queries = attention.shape[1]

    def rows(pairs: Any, interval: str, ranked: bool) -> Iterator[tuple[Any, ...]]:
        for rank, pair in enumerate(pairs[np.argsort(-weights[pairs], kind="stable")], 1):
            prompt, query = divmod(int(pair) // _OF_ONE_QUERY, n_queries)
            values = (rank if ranked else None, interval, float(weights[pair]), prompt, query, int(places[pair]))
            yield (*head, *values)

    nth = min(n, weights.size)
    large = np.flatnonzero((weights > 0) & (weights >= np.partition(weights, -nth)[-nth]))
    top = large[np.argsort(-weights[large], kind="stable")[:n]]
    yield from rows(top, "top", ranked=True)
    if not len(top):
        return
    # One random order of all queries: rounding that moves one query over a bound then changes no other draw.
    order = np.random.default_rng([0, *head]).permutation(weights.size // _OF_ONE_QUERY) * _OF_ONE_QUERY
    largest, least = weights[order], weights[top[-1]]
    bounds = [least * share / len(LOWER) for share in range(len(LOWER), -1, -1)]
    for interval, (high, low) in zip(LOWER, pairwise(bounds), strict=True):
        yield from rows(order[(largest < high) & (largest >= low) & (largest > 0)][:DRAWN], interval, ranked=False)


def _with_kinds(table: pd.DataFrame, packed: PackedTokens, at_once: list[Strip], causal: bool) -> pd.DataFrame:
    """Return a copy of `table` with a column `kind`, such as "previous" or "induction": the first pattern that the
    token ids of a pair fit, else "other".

    `table` has `prompt`, `query` and `key`; `packed` the token ids of the prompts. `at_once` are the strips of queries
    that are looked at together. `causal` is False for an encoder, which has "next" and no "induction".
    """
    kinds = KINDS if causal else {**KINDS, "next": "next_token"}
    kind = np.full(len(table), "other", dtype=object)
    for prompt, places in table.groupby("prompt").indices.items():
        tokens = packed.tokens[prompt : prompt + 1]  # type: ignore[operator]
        query, key = (torch.from_numpy(table[side].to_numpy()[places]) for side in ("query", "key"))
        for strip in at_once:
            inside = ((query >= strip.start) & (query < strip.stop)).nonzero().flatten()
            for name in reversed(kinds):
                if len(inside) and (causal or name != "induction"):  # an encoder sees the successor itself
                    marked = PATTERNS[kinds[name]](tokens, strip)[0][query[inside] - strip.start, key[inside]]
                    kind[places[inside[marked].numpy()]] = name
    return table.assign(kind=kind)


def _with_words(view: AttentionView, packed: PackedTokens, table: pd.DataFrame) -> pd.DataFrame:
    """Return a copy of `table` with columns `query_token`, `key_token` (texts) and `context`: text around the pair,
    "[key] ... <query>".

    `view` has the tokenizer. `table` has `prompt`, `query` and `key`; `packed` the token ids of the prompts.
    """
    ids, lengths = packed.tokens.tolist(), packed.lengths.tolist()
    known: dict[tuple[int | None, int], str] = {}
    between = "" if getattr(view.model, "tokenizer", None) is not None else " "

    def word(prompt: int, position: int) -> str:
        pair = (ids[prompt][position - 1] if position else None, ids[prompt][position])
        if pair not in known:
            known[pair] = _text_behind(view, *pair).translate(_ON_ONE_LINE)
        return known[pair]

    def begins_word(prompt: int, position: int) -> bool:
        return not (word(prompt, position - 1)[-1:].isalnum() and word(prompt, position)[:1].isalnum())

    def context(prompt: int, query: int, key: int) -> str:
        near, far = min(query, key), max(query, key)
        first, last = max(0, near - _BEFORE), min(lengths[prompt], far + 1 + _BEHIND)
        for _ in range(_TO_WHOLE_WORDS if between == "" else 0):
            first -= int(first > 0 and not begins_word(prompt, first))
            last += int(last < lengths[prompt] and not begins_word(prompt, last))
        words, left_out = [], False
        for position in range(first, last):
            if near + _BEFORE < position < far - _BEFORE:
                words += [] if left_out else [" ... "]
                left_out = True
                continue
            text = word(prompt, position)
            text = f"<{text}>" if position == query else text
            words.append(f"[{text}]" if position == key else text)
        return between.join(words)

    places = list(table[["prompt", "query", "key"]].itertuples(index=False, name=None))
    return table.assign(
        query_token=[word(prompt, query) for prompt, query, _ in places],
        key_token=[word(prompt, key) for prompt, _, key in places],
        context=[context(*place) for place in places],
    )


def _text_behind(view: AttentionView, before: int | None, token: int) -> str:
    """Return the text of the id `token` when it follows the id `before` (None: the prompt begins with it).

    `view` has the tokenizer; without one the text is the id. Tokenizers add or drop a space at the start of a text, so
    both tokens are decoded together and the text of `before` is removed.
    """
    alone = token_text(view, token)
    tokenizer: Any = getattr(view.model, "tokenizer", None)
    if tokenizer is None or before is None or max(before, token) >= len(tokenizer):
        return alone
    read: Callable[..., str] = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    front, joined = read([before]), read([before, token])
    return joined[len(front) :] if joined.startswith(front) and len(joined) > len(front) else alone
