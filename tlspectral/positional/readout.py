"""Read the last query of a prompt in a layer, in a form that gives the logit of every key at every position.

For rotary pair t let `z_t = q_t conj(k_t)`, with q rotated to its own position and k not rotated. The score of key k at
position j is

    sum_t ( cos(j theta_t) Re z_t + sin(j theta_t) Im z_t )  +  the product of the non-rotary columns.

It is a product of a vector of contents (one per key) and a vector of places (one per position). The sum over t is the
decomposition by frequency of "Decoupling Positional and Symbolic Attention Behavior" (PS, appendix B.3).
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64, rotate, times_phase, with_gain_and_phase
from tlspectral.models.attention.head_scores import rotation_tables
from tlspectral.models.attention.run_scores import require_own_pattern, visible_keys
from tlspectral.models.hooking.strips import OfStrips, Strip
from tlspectral.models.reading.alibi import Alibi
from tlspectral.models.reading.layer import RawAttention, require_every_key, softcapped
from tlspectral.models.reading.norms import QueryKeyNorm, double
from tlspectral.models.reading.view import AttentionView, Hook
from tlspectral.models.running.passes import require_patterns, require_single_runs, run_until

Moved = tuple[Int[Tensor, "n"], Int[Tensor, "n"]]
"""Indices of keys, and the position at which each key is read."""


@dataclass(frozen=True)
class LastQuery:
    """Factors of the last query's logits in one layer of one prompt: logit = score_scale * contents . places.

    Attributes:
        contents: for each key: Re z_t of all rotary pairs t, then Im z_t, then the product of the non-rotary columns.
            z_t = q_t conj(k_t), with the query q rotated to its position and the key k not rotated.
        places: for each position: cos of all pairs, then sin, then 1, with the model's attention scaling. A layer with
            learned rotations (`to_spectral`) has one table per head.
        alibi: the model's ALiBi bias, or None.
        visible: True for positions that the query may attend to; the last position is the query itself.
        score_scale: factor on query-key products, the model's own or `logit_scale`.
        softcap: the model's softcap on scores, or None.
    """

    contents: Float64[Tensor, "heads coordinates keys"]
    places: Float64[Tensor, "*heads coordinates keys"]
    alibi: Alibi | None
    visible: Bool[Tensor, "keys"]
    score_scale: float
    softcap: float | None

    @property
    def n_pairs(self) -> int:
        """Number of rotary pairs, 0 in a layer without rotary positions."""
        return self.places.shape[-2] // 2

    def head_logits(self, moved: Moved | None = None) -> Float64[Tensor, "heads n"]:
        """Return the logits of the last query for every head, with ALiBi and softcap; -inf at masked positions.

        `moved`: (indices of keys, their new positions). Default: all keys in place.
        """
        contents, places, visible = self._placed(moved)
        product = "hrn,rn->hn" if places.ndim == 2 else "hrn,hrn->hn"
        logits = self.score_scale * torch.einsum(product, contents, places)
        if self.alibi is not None:
            positions = torch.arange(len(self.visible), device=logits.device) if moved is None else moved[1]
            logits = logits + self.alibi.bias(positions)
        return softcapped(logits, self.softcap).masked_fill(~visible, -torch.inf)

    def frequency_logits(self, moved: Moved | None = None) -> Float64[Tensor, "heads pairs n"]:
        """Return the contribution of each rotary pair to each head's logits, before ALiBi and softcap; -inf at masked
        positions.

        `moved`: (indices of keys, their new positions). Default: all keys in place.
        """
        contents, places, visible = self._placed(moved)
        pairs = self.n_pairs
        logits = contents[:, :pairs] * places[..., :pairs, :]
        logits.addcmul_(contents[:, pairs : 2 * pairs], places[..., pairs : 2 * pairs, :])
        return logits.mul_(self.score_scale).masked_fill_(~visible, -torch.inf)

    def _placed(self, moved: Moved | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors: contents, places and visibility of the `moved` keys at their new positions. None: of
        all keys in place.
        """
        if moved is None:
            return self.contents, self.places, self.visible
        keys, positions = moved
        return self.contents[..., keys], self.places[..., positions], self.visible[positions]


def last_query(
    raw: RawAttention,
    query: Float[Tensor, "*asked"],
    keys: Float[Tensor, "keys *width"],
    tables: tuple[Float64[Tensor, "*heads keys pairs"], Float64[Tensor, "*heads keys pairs"]] | None,
    visible: Bool[Tensor, "keys"],
) -> LastQuery:
    """Return the `LastQuery` (factors of the last query's logits) of one layer and prompt, in float64.

    Args:
        raw: attention weights and settings of the layer.
        query: query of the last position, before query norm and rotation: [heads, d_head], or the latent [width].
        keys: keys of all positions, before key norm and rotation, one per key/value head or per query head.
        tables: the model's own cos and sin, with a head axis if rotations are learned; None without rotary positions.
        visible: True for positions that the last query may attend to.
    """
    q = normed(raw, "query", query[None])[0]
    k = rearrange(normed(raw, "key", keys), "key kv_head d_head -> kv_head d_head key")
    n_kv = len(k)
    non_rotary = torch.arange(q.shape[1], device=q.device)
    coordinates: list[Tensor] = []
    places = torch.ones(1, k.shape[-1], dtype=q.dtype, device=q.device)

    if tables is not None and raw.rotary is not None:
        cos, sin = (table.to(q.device) for table in tables)
        last = with_gain_and_phase(q[:, None], raw.rotary)
        q = rotate(last, cos[..., -1:, :], sin[..., -1:, :], raw.rotary)[:, 0]
        real, imag = raw.rotary.real_index.to(q.device), raw.rotary.imag_index.to(q.device)
        non_rotary = raw.rotary.still_columns.to(q.device)
        grouped = rearrange(q, "(kv_head group) d_head -> kv_head group d_head 1", kv_head=n_kv)
        z = times_phase(grouped[:, :, real], grouped[:, :, imag], k[:, None, real], -k[:, None, imag])
        coordinates = [rearrange(part, "kv_head group pair key -> (kv_head group) pair key") for part in z]
        places = torch.cat([cos.mT, sin.mT, places.expand(*cos.shape[:-2], -1, -1)], dim=-2)
    still = rearrange(q[:, non_rotary], "(kv_head group) d_head -> kv_head group d_head", kv_head=n_kv)
    rest = einsum(still, k[:, non_rotary], "kv_head group d_head, kv_head d_head key -> kv_head group key")
    return LastQuery(
        contents=torch.cat([*coordinates, rearrange(rest, "kv_head group key -> (kv_head group) 1 key")], dim=1),
        places=places,
        alibi=raw.alibi,
        visible=visible.to(q.device),
        score_scale=raw.score_scale,
        softcap=raw.softcap,
    )


def require_reproduced(layer: int, seen: LastQuery, pattern: Float[Tensor, "heads n"], raw: RawAttention) -> None:
    """Raise ScoreMismatch unless the softmax of our recomputed logits equals the model's attention pattern.

    `layer`: number of the layer, for the message. `raw`: its attention weights and settings. `seen`: factors of the
    recomputed logits. `pattern`: the last query's row of the model's pattern; a layer with a window may give only its
    last columns. The tolerance for patterns is the same as in `verify_scores`.
    """
    logits = seen.head_logits()
    theirs = torch.nn.functional.pad(pattern.detach(), (logits.shape[-1] - pattern.shape[-1], 0))
    require_own_pattern(logits, theirs, raw.storage_dtype, f"layer {layer}")


def require_valid_length(layers: Iterable[RawAttention], length: int) -> None:
    """Raise ValueError if a prompt of `length` tokens is longer than one of the layers can score.

    Beyond their limits, layers hide keys or change their rotary frequencies or score scale.
    """
    layers = list(layers)
    require_every_key(layers, length, "others where blocks swap: use fewer blocks")
    limits = [raw.valid_up_to for raw in layers if raw.valid_up_to is not None]
    if limits and length > min(limits):
        raise ValueError(
            f"the prompt has {length} tokens, but this model's rotary frequencies or score scale change beyond "
            f"{min(limits)}: use fewer blocks"
        )


ContextKeys = dict[tuple[int, str], Tensor]
"""Keys [prompts, pos, kv_heads, d_head] and tables of cos and sin [pos, columns] of a run, by layer and hook point."""


def context_hooks(view: AttentionView, held: ContextKeys) -> list[Hook]:
    """Return hooks as (hook name, function) that store every layer's keys, and its tables of cos and sin, in the dict
    `held` by (layer, "key", "cos" or "sin") while contexts run.

    Later runs that read only the suffixes use these entries.
    """
    return [
        (name, partial(_hold_context, held, layer, point))
        for layer in view.layers
        for point, name in view.hook_names(layer).items()
        if point in ("key", "cos", "sin")
    ]


def _hold_context(held: ContextKeys, layer: int, point: str, activation: Tensor, hook: Any) -> None:
    """Store a copy of an activation as `held[layer, point]`; `point` is "key", "cos" or "sin". It is the hook function
    of `context_hooks`; `hook` is not used.
    """
    kept = activation.detach() if point == "key" else _one_row(activation)
    held[layer, point] = kept.clone()  # keys may be a view into queries, keys and values of all positions


LastQueryCallback = Callable[[int, int, LastQuery, Tensor], None]


@dataclass
class LastQueryReader:
    """Hooks that compute the `LastQuery` of each row of a batch, layer by layer, while the model runs.

    A layer's activations are dropped as soon as the layer has run.

    Attributes:
        view, layers: the model, and the attention weights of each layer.
        reduce: function that receives the layer, the row of the batch, its `LastQuery`, and the last row of the
            pattern.
        context: stored keys of an earlier run over contexts that this run continues; empty if this run reads whole
            prompts.
        copies: rows of the batch per context.
        seen: activations of the current layer, by hook point.
        finished: layers for which `reduce` was called.
    """

    view: AttentionView
    layers: dict[int, RawAttention]
    reduce: LastQueryCallback
    context: ContextKeys = field(default_factory=dict)
    copies: int = 1
    seen: dict[str, Tensor] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    def hooks(self) -> list[Hook]:
        """Return the hooks as a list of (hook name, function) for `fwd_hooks`; they can serve several runs, one after
        another.

        Raises UnsupportedArchitecture for a model that runs a layer several times in a pass.
        """
        require_single_runs(self.view)
        hooks: list[Hook] = []
        for layer in self.view.layers:
            names = self.view.hook_names(layer)
            held = [point for point in ("query", "key", "cos", "sin", "scores") if point in names]
            hooks += [(names[point], partial(self._hold, point)) for point in held if point != "scores"]
            hooks += [(names["scores"], OfStrips(self._hold_scores))] if "scores" in held else []
            hooks.append((names["pattern"], OfStrips(partial(self._finish, layer))))
        return hooks

    def require_all(self) -> None:
        """Raise UnsupportedArchitecture if a layer's pattern never arrived, so that `reduce` was not called for it."""
        require_patterns(self.view.layers, self.finished)

    def _hold(self, point: str, activation: Tensor, hook: Any) -> None:
        """Store an activation of the current layer in `seen`: the last position for queries, everything for keys.

        `point`: "query", "key", "cos" or "sin". `hook` is not used.
        """
        if point == "query":
            activation = activation[:, -1].clone()  # a copy, so that the other positions are freed
        elif point in ("cos", "sin"):
            activation = _one_row(activation)
        self.seen[point] = activation.detach()

    def _hold_scores(self, scores: Tensor, strip: Strip, hook: Any) -> None:
        """Store the scores of the last query in `seen`, of one row and head, because the mask is the same for all."""
        if strip.is_last:
            self.seen["scores"] = scores[:1, :1, -1:].detach().clone()

    def _finish(self, layer: int, pattern: Tensor, strip: Strip, hook: Any) -> None:
        """Compute the layer's `LastQuery` for each row of the batch and call `reduce`. It is the hook on the layer's
        attention `pattern`, acts on the strip with the last query, and empties `seen`.
        """
        if not strip.is_last:
            return
        seen, self.seen = self.seen, {}
        raw, query, key = self.layers[layer], seen.pop("query"), seen.pop("key")
        earlier, names = self.context.get((layer, "key")), self.view.hook_names(layer)
        n_keys = key.shape[1] + (0 if earlier is None else earlier.shape[1])
        front = {point: [self.context[layer, point]] for point in seen if (layer, point) in self.context}
        captured = {names[point]: torch.cat([*front.get(point, []), value]) for point, value in seen.items()}
        tables = rotation_tables(self.view, raw.rotary, layer, n_keys, captured)
        visible = visible_keys(self.view, layer, n_keys, captured, n_keys - 1)[0, 0, -1]
        # Under a window a layer may keep only its last keys.
        visible = torch.nn.functional.pad(visible, (n_keys - len(visible), 0))
        for row in range(len(query)):
            keys = key[row] if earlier is None else torch.cat([earlier[row // self.copies], key[row]])
            self.reduce(layer, row, last_query(raw, query[row], keys, tables, visible), pattern[row, :, -1])
        self.finished.add(layer)


def _one_row(table: Float[Tensor, "*batch pos columns"]) -> Float[Tensor, "pos columns"]:
    """Return the cos or sin table of the first row of a batch; without padding all rows have the same positions."""
    return table.detach().reshape(-1, *table.shape[-2:])[0]


def normed(
    raw: RawAttention, what: Literal["query", "key"], captured: Float[Tensor, "rows *width"]
) -> Float64[Tensor, "rows heads d_head"]:
    """Return queries or keys per head in float64, after the layer's query or key norm if it has one.

    `raw`: weights and settings of the layer. `what`: "query" or "key". `captured`: the activation at the layer's hook
    for queries or keys.
    """
    x, scale = raw.inputs(what, in_float64(captured.detach()))
    norm = raw.q_norm if what == "query" else raw.k_norm
    if isinstance(norm, QueryKeyNorm):
        return norm.as_(double).applied(x)
    return x if scale is None else x * scale


def read_prompt(
    view: AttentionView,
    tokens: Int[Tensor, "pos"],
    wanted: Collection[int],
    take: Callable[[int, LastQuery], None],
    hooks: Iterable[Hook] = (),
) -> None:
    """Run the model once over a prompt and call `take(layer, last_query)` for each layer in `wanted`, with the
    `LastQuery` (factors of the last query's logits).

    `tokens`: ids of the prompt. The run stops after the last attention pattern. `hooks`: further hooks as (hook name,
    function); they act before the hooks that read.

    Raises:
        ValueError: `wanted` is empty, or the prompt is longer than a layer can score.
        ScoreMismatch: attention is not the softmax of queries and keys.
    """
    if not wanted:
        raise ValueError('no heads were given: give at least one, such as heads="L0H3", or leave heads= out for all')
    layers = {index: view.raw(index) for index in view.layers}
    require_valid_length(layers.values(), len(tokens))

    def checked(layer: int, row: int, seen: LastQuery, pattern: Tensor) -> None:
        if layer in wanted:
            require_reproduced(layer, seen, pattern, layers[layer])
            take(layer, seen)

    reader = LastQueryReader(view, layers, checked)
    run_until(view, tokens[None], [*hooks, *reader.hooks()], last=view.hook_names(view.layers[-1])["pattern"])
    reader.require_all()
