"""The view of a model: where it came from, its layers one by one, and runs with hooks."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from typing import Any, Literal

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import RotaryGeometry, in_float64, per_pair, turned_further
from tlspectral.errors import BadHead, BadWeights, ScoreMismatch, UnsupportedArchitecture
from tlspectral.models.hooking.exclusive import modules_of
from tlspectral.models.hooking.placing import Hook, hooks_on, send_captures_by_name
from tlspectral.models.hooking.user_hooks import user_hooks, warn_of_hooks
from tlspectral.models.reading import bridge, hooked_transformer
from tlspectral.models.reading.blocks import (
    Block,
    SkippedLayer,
    blocks_of,
    hook_names,
    is_encoder,
    kind_of,
    read_layers,
    require_no_repeats,
    skipped_among,
    writes_more,
)
from tlspectral.models.reading.digests import Sums, digest_of, digest_of_named, kept_digest, recorded_weights
from tlspectral.models.reading.layer import (
    AttentionLayer,
    LiveFactors,
    OutputFactors,
    RawAttention,
    fold_attention,
    fold_output,
    hashed_sides,
    live_factors,
    require_readable,
)
from tlspectral.models.reading.norms import NO_NORM, MlpInput, Normalization, is_centred
from tlspectral.models.reading.reader import Reader
from tlspectral.selection import Head, Heads, from_end, head_name, head_pair, named_heads, which_exist

READERS: dict[str, Reader] = {"bridge": bridge, "hooked": hooked_transformer}
"""The module of this room that reads each kind of model."""

_PLAIN = (bool, int, float, str)
_marks = count()


@dataclass(eq=False)
class AttentionView:
    """A model's attention layers, read alike on every backend. Weights are copied only when a layer is asked for.

    The model, a TransformerBridge or HookedTransformer, is never changed. `n_ctx` is the longest prompt. `kept` holds
    the layers that were read, by number and by whether gradients are recorded, while `measured` is open; None
    otherwise: a layer is then read each time that it is asked for, since the model may have changed. `sums` are those
    of its weights, by which `kept_digest` sees changes, for as long.
    """

    model: Any = field(repr=False)
    backend: Literal["bridge", "hooked"]
    n_layers: int
    d_model: int
    d_vocab: int
    n_ctx: int
    kept: dict[tuple[int, bool], RawAttention] | None = field(default=None, repr=False)
    sums: Sums | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        sizes = f"{self.n_layers} layers, d_model {self.d_model}, d_vocab {self.d_vocab}, n_ctx {self.n_ctx}"
        return f"AttentionView({getattr(self.model.cfg, 'model_name', None)}, {self.backend}: {sizes})"

    def __getstate__(self) -> dict[str, Any]:
        send_captures_by_name()
        own = {name: value for name, value in self.__dict__.items() if name != "hook_points"}
        return own | {"kept": None, "sums": None}

    @property
    def reader(self) -> Reader:
        """The functions that read this kind of model."""
        return READERS[self.backend]

    @property
    def _spectral_geometry(self) -> Callable[..., RotaryGeometry | None] | None:
        return getattr(self.model, "spectral_geometry", None)

    @property
    def device(self) -> torch.device:
        """Device of the model, where token ids have to be."""
        return next(self.model.parameters()).device

    @property
    def source(self) -> dict[str, Any]:
        """Where the model came from: `model`, `revision`, `backend`, and what else `load_model` recorded.

        `user_hooks`: how much of the user's acts in the model now, by hook point, module or where else it stands, if
        there is anything: hooks, those of all modules included, replaced forwards and modules, parametrized weights.
        `skipped_layers`: `layer, kind, reason` of each layer without heads that can be read, if there are any.
        """
        name = getattr(self.model.cfg, "model_name", None)
        known = getattr(self.model, "tlspectral_source", None) or {"model": name, "revision": None}
        others = {"user_hooks": user_hooks(self.model), "skipped_layers": [one._asdict() for one in self.skipped]}
        return {**known, "backend": self.backend, **{name: value for name, value in others.items() if value}}

    @property
    def skipped(self) -> list[SkippedLayer]:
        """Layers without heads that can be read: the state-space layers of a hybrid, for one."""
        return self._found[0]

    @cached_property
    def _found(self) -> tuple[list[SkippedLayer], dict[int, int]]:
        """The layers without heads that can be read, and the number of query heads of the others."""
        n_heads: dict[int, int] = {}

        def read(index: int) -> None:
            n_heads[index] = len(self._stored(index).w_q)

        return skipped_among(range(self.n_layers), read, lambda index: kind_of(self.blocks[index].module)), n_heads

    @cached_property
    def hook_points(self) -> dict[str, Any]:
        """The hook points by name. Looked up once, since a bridge collects them anew each time it is asked."""
        return self.model.hook_dict

    def hooks_on(self, hooks: Iterable[Hook]) -> AbstractContextManager[None]:
        """Put hooks on the model until the context ends, see `threads.hooks_on`."""
        return hooks_on(self.model, self.hook_points, hooks)

    @property
    def blocks(self) -> list[Block]:
        """The layers as the model holds them, in the order of their numbers."""
        return blocks_of(self.model)

    @property
    def has_embedding_norm(self) -> bool:
        """Whether a norm stands behind the embedding, as in BLOOM."""
        return hasattr(self.model, "embed_ln") or bool(getattr(self.model.cfg, "post_embedding_ln", False))

    @cached_property
    def layers(self) -> list[int]:
        """Layers whose heads can be read. Raises UnsupportedArchitecture for a model without one."""
        return read_layers(self.n_layers, self.skipped)

    @property
    def start_token(self) -> int:
        """Id that opens a detector sequence: BOS, else EOS, else 0; in an encoder CLS."""
        tokenizer = getattr(self.model, "tokenizer", None)
        names = ("bos_token_id", "eos_token_id") if self.causal else ("cls_token_id",)
        found = (getattr(tokenizer, name, None) for name in names)
        return int(next((one for one in found if one is not None), 0))

    def raw(self, index: int) -> RawAttention:
        """Return the parameters of one layer as the model holds them.

        Raises BadHead for no such layer, UnsupportedArchitecture for one that cannot be read.

        The rotary geometry of a model with learnable rotary positions is what its method `spectral_geometry` returns.
        """
        raw = self._stored(index)
        return raw if self._spectral_geometry is None else replace(raw, rotary=self._spectral_geometry(index))

    def _stored(self, index: int) -> RawAttention:
        if not 0 <= index < self.n_layers:
            raise BadHead(f"layer {index} does not exist: the model has layers 0 to {self.n_layers - 1}")
        if self.kept is None:
            return self.reader.read_attention(self.model, index)
        key = index, torch.is_grad_enabled()
        if key not in self.kept:
            self.kept[key] = self.reader.read_attention(self.model, index)
        return self.kept[key]

    def layer(self, index: int) -> AttentionLayer:
        """Return the query-key side of one layer, folded in float64 on the CPU.

        Raises BadHead for no such layer; UnsupportedArchitecture, BadWeights for one that cannot be read.
        """
        return fold_attention(self.raw(index), index)

    def live_factors(self, index: int, heads: list[int] | None, *, folded: bool) -> LiveFactors:
        """Return W_Q and W_K of some heads of a layer (None: all), folded or as stored, with gradients.

        Raises BadHead for no such layer; UnsupportedArchitecture for one that cannot be read, or not with gradients.
        """
        raw = self._stored(index)
        if folded and self._spectral_geometry is not None:
            raw = replace(raw, rotary=self._spectral_geometry(index, live=True))
        factors = live_factors(raw, index, heads, folded=folded)
        for role, weight in (("W_Q", raw.w_q), ("W_K", raw.w_k)):
            self._require_gradient(weight, index, role)
        return factors

    def _require_gradient(self, weight: Tensor, index: int, role: str) -> None:
        """Refuse a weight without gradient, unless it is a frozen parameter or the attention has no trainable one."""
        if weight.requires_grad or not torch.is_grad_enabled():
            return
        trainable = {True: [], False: []}
        for parameter in self.blocks[index].module.attn.parameters():
            trainable[parameter.requires_grad].append(parameter.untyped_storage().data_ptr())
        if trainable[True] and weight.untyped_storage().data_ptr() not in trainable[False]:
            raise UnsupportedArchitecture(
                f"layer {index}, {role}: it is read as a copy that passes no gradient to the parameters of this "
                f"{type(self.model).__name__}; load the model unprocessed, or read the number inside torch.no_grad()"
            )

    def output(self, index: int) -> OutputFactors:
        """Return the value and output weights of one layer, folded in float64 on the CPU.

        Raises BadHead for no such layer; UnsupportedArchitecture, BadWeights for one that cannot be read.
        """
        return fold_output(self.raw(index), index)

    def behind(self, index: int) -> tuple[Tensor | None, Normalization, float]:
        """Return what follows W_O in a layer: b_O, the norm behind the attention, a factor on what the layer adds.

        Raises BadHead for no such layer, UnsupportedArchitecture for a norm that cannot be read.
        """
        self._stored(index)
        return self.reader.read_output(self.model, index)

    def mlp_input(self, index: int) -> MlpInput | None:
        """Return where a layer shows what its MLP reads, by its name in the model; None without an MLP.

        Raises UnsupportedArchitecture for a norm that cannot be read, or without such a hook point.
        """
        name, block = self.blocks[index]
        if block._modules.get("mlp") is None:
            return None
        point, norm = self.reader.read_mlp_input(self.model, index)
        return MlpInput(f"{name}.{point}", norm)

    def attention_factor(self, index: int) -> float:
        """Return the factor between what passes `attention_out` and what the layer adds: 1, but in Falcon-H1."""
        wrapped = getattr(self.blocks[index].module, "original_component", None)
        return float(getattr(wrapped, "attn_out_multiplier", 1.0))

    def n_heads(self, index: int) -> int:
        """Return the number of query heads of a layer. Raises BadHead for no such layer."""
        known = self.__dict__.get("_found")  # one layer alone is read where not all have been
        return known[1][index] if known is not None and index in known[1] else len(self.raw(index).w_q)

    def rotary(self, index: int) -> RotaryGeometry | None:
        """Return the rotary geometry of a layer, None where it has no rotary positions. Raises BadHead for no layer.

        Raises ScoreMismatch for a layer whose pairs do not rotate by one angle per token. What needs no frequencies,
        such as an ablation that takes cos and sin from the run, reads `layer(index).rotary` instead.
        """
        rotary = self.raw(index).rotary
        if rotary is not None and rotary.mismatch is not None:
            raise ScoreMismatch(f"{self.source['model']}, layer {index}: {rotary.mismatch}")
        return rotary

    def writes_more(self, index: int) -> bool:
        """Return whether a layer writes more than its heads and its MLP do: a mixer (`"L2MIX"`), or an unnamed MLP."""
        return writes_more(self.blocks[index].module)

    def rotary_tables(self, index: int, n_positions: int, captured: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return the scaled (cos, sin) that the layer applied, [(batch,) pos, columns]; None where it exposes none.

        `captured` is what `capture_until` returns. Tables of a spectral layer are per head and pair, [(batch,) heads,
        pos, pairs].
        """
        tables = self.reader.rotary_tables(self.model, index, n_positions, captured)
        geometry = None if self._spectral_geometry is None else self._spectral_geometry(index)
        if tables is None or geometry is None or not geometry.per_head:
            return tables
        unchanged = self._stored(index).rotary
        assert unchanged is not None  # `geometry` is this one, turned further
        cos, sin = (per_pair(table, unchanged) for table in tables)
        return turned_further(cos, sin, geometry.theta - unchanged.theta)

    @property
    def causal(self) -> bool:
        """Whether a query sees no later token; False for an encoder."""
        return self.backend != "bridge" or not is_encoder(self.model)

    @property
    def tokens_point(self) -> str:
        """Name of the hook point that token ids pass; where there is none for them, the point of their embeddings."""
        return "embed.hook_in" if "embed.hook_in" in self.hook_points else "hook_embed"

    def passed_by(self, ids: Int[Tensor, "sequences pos"]) -> Tensor:
        """Return what passes `tokens_point` in a run of these token ids, in front of the user's hooks."""
        return ids if self.tokens_point == "embed.hook_in" else self.model.embed(ids)

    def hook_names(self, index: int) -> dict[str, str]:
        """Return the names of a layer's hook points by what passes there; `reading/blocks.py` has a picture."""
        return hook_names(self.blocks[index])

    def embedding(self) -> Tensor:
        """Return W_E [d_vocab, d_model] as stored.

        Raises UnsupportedArchitecture for a projection between it and the residual stream (OPT 350M).
        """
        w_e = self.model.W_E
        if w_e.shape[-1] != self.d_model:
            raise UnsupportedArchitecture(
                f"the embedding W_E has {w_e.shape[-1]} columns and the residual stream {self.d_model}: the projection "
                "between them is not modelled. From a folder or a hub name, detectors=False gives the columns that "
                "need no embedding"
            )
        return w_e

    def unembedding(self) -> tuple[Tensor, Normalization]:
        """Return W_U [d_model, d_vocab] as stored, and the norm in front of it. An encoder's is refused."""
        require_causal(self, "it has no W_U that reads the residual stream without a nonlinear layer between")
        return self.model.W_U, self.reader.final_normalization(self.model)

    def weights_digest(self) -> str:
        """Return the SHA-256 of all parameters of the model, shapes and types included, the same on both lines.

        A bias of zeros does not count, as TransformerLens 3.9 gives an unembedding one that the model has not; nor does
        how deep a bridge has wrapped a component.
        """
        weights = {name.replace("._original_component", ""): value for name, value in self.model.named_parameters()}

        def make() -> str:
            return digest_of_named(
                {name: value for name, value in weights.items() if not name.endswith("bias") or bool(value.any())}
            )

        return kept_digest(self.model, tuple(weights), weights.values(), make, self.sums)

    def state(self) -> Hashable:
        """Return a value that changes when the model's own forward pass can have changed; compare it with `==`.

        It covers all parameters and buffers, compared as in `kept_digest`, and of each module its class and the
        numbers, flags and strings that it and its configuration hold. Hooks are not covered: see `acting_on`.
        """
        modules = modules_of(self.model)
        tensors = {id(value): value for each in modules for held in (each._parameters, each._buffers)
                   for value in held.values() if value is not None}  # fmt: skip
        configs = {id(value): value for each in modules for value in (vars(each).get("config"), vars(each).get("cfg"))
                   if hasattr(value, "__dict__")}  # fmt: skip
        plain = tuple(
            (type(each), *(item for item in vars(each).items() if type(item[1]) in _PLAIN and item[0] != "training"))
            for each in (*modules, *configs.values())
        )
        return kept_digest(self.model, "state", tensors.values(), lambda: str(next(_marks)), self.sums), plain

    def ends_digest(self) -> str:
        """Return the SHA-256 of embedding, unembedding and the norm in front of it, as stored; of an encoder W_E's."""
        w_u, norm = self.unembedding() if self.causal else (None, NO_NORM)
        ends = {"W_E": self.embedding(), "W_U": w_u, "final norm gain": norm.gain}

        def make() -> str:
            for role, value in ends.items():
                require_readable(value, role)
            return digest_of(ends.values())

        return kept_digest(self.model, "ends", ends.values(), make, self.sums)

    def layer_digest(self, index: int) -> str:
        """Return the SHA-256 of a layer's query-key side as stored, then the SHA-256 of its values and output.

        Raises as `raw`, and BadWeights for a weight on the meta device.
        """
        sides = enumerate(hashed_sides(self.raw(index)))
        return "".join(
            kept_digest(self.model, (index, n), side, partial(digest_of, side), self.sums) for n, side in sides
        )

    def origin(self, layers: Iterable[int] | None = None, *, processing: bool = False) -> dict[str, Any]:
        """Return `source` and the `recorded_weights` of some layers (None: all), which a table carries in its `attrs`.

        A layer's hash is of its attention weights, the input norm, embedding, unembedding and final norm, as stored.
        Skipped layers have none, nor has a model of which no head table can be made. `processing`: the table's numbers
        also follow TransformerLens' weight processing, and what that left is recorded.
        """
        try:
            ends = self.ends_digest()
            chosen = self.layers if layers is None else sorted({*layers} & {*self.layers})
            digests = {index: self.layer_digest(index) + ends for index in chosen}
        except (UnsupportedArchitecture, BadWeights):
            return {**self.source, "n_layers": self.n_layers}
        state = {"processing": self.processing} if processing and digests else {}
        return {**self.source, **state, **recorded_weights(digests, self.n_layers)}

    @property
    def processing(self) -> dict[str, bool]:
        """What TransformerLens' weight processing left, as its first layer with heads shows.

        `value_biases`: some head has a bias of values, which `fold_value_biases` moves into the bias of the layer's
        output. `centred_writes`: what heads write has mean zero over d_model, as under `center_writing_weights`.
        """
        raw = self.raw(next(iter(self.layers)))  # a model is processed as a whole
        return {
            "value_biases": raw.b_v is not None and bool(raw.b_v.any()),
            "centred_writes": is_centred(raw.w_o, torch.finfo(raw.w_o.dtype).eps),
        }

    def position_embedding(self) -> Tensor | None:
        """Return W_pos [n_ctx, d_model] of a model with learned absolute positions, None elsewhere."""
        if self.model.cfg.positional_embedding_type != "standard":
            return None
        return self.model.pos_embed.W_pos[-self.n_ctx :]  # OPT stores two rows before position 0


def attention_view(model: Any) -> AttentionView:
    """Return the view of a TransformerBridge or HookedTransformer, however loaded, folded or raw.

    Raises TypeError for another object, UnsupportedArchitecture for a bridge of an encoder with a decoder, and for a
    model whose config says that its layers run several times in one pass.
    """
    if getattr(model, "only_weights", False):
        raise TypeError(
            f"{model} holds the files of weights, which analyze_heads reads layer by layer, and no model that runs: "
            "load it with load_model, without weights='files'"
        )
    if hasattr(model, "original_model") and hasattr(model, "adapter"):
        backend = "bridge"
        require_no_repeats(getattr(model.original_model, "config", None), type(model.original_model).__name__)
        if not blocks_of(model):
            lists = ", ".join(name for name in model.adapter.component_mapping if "block" in name) or "none"
            raise UnsupportedArchitecture(
                f"{type(model.original_model).__name__} has no list of layers that is read (its lists: {lists})"
            )
    elif hasattr(model, "blocks") and hasattr(model, "cfg") and hasattr(model, "run_with_hooks"):
        backend = "hooked"
    else:
        raise TypeError(
            f"{type(model).__name__} is neither a TransformerBridge nor a HookedTransformer; "
            "make one with tlspectral.load_model, of a name or of a model of transformers"
        )
    cfg = model.cfg
    return AttentionView(
        model=model,
        backend=backend,
        n_layers=len(blocks_of(model)),
        d_model=int(cfg.d_model),
        d_vocab=int(cfg.d_vocab),
        n_ctx=bridge.context_length(model) if backend == "bridge" else int(cfg.n_ctx),
    )


@contextmanager
def measured(model: Any, *, report_hooks: bool = True) -> Iterator[AttentionView]:
    """Open a measurement: yield the `AttentionView` of a model, which reads the weights of each layer once.

        with measured(model) as view:
            chosen = heads_by_layer(view, heads)

    Nothing in the block may change the weights. With `report_hooks` a warning lists the hooks that a user left on the
    model, because they change the numbers. Give False for a measurement that does not run the model, and in `evaluate`,
    whose value is meant to include the caller's hooks. Raises as `attention_view`.
    """
    view = attention_view(model)
    if report_hooks:
        warn_of_hooks(model)
    view.kept, view.sums = {}, {}
    try:
        yield view
    finally:
        view.kept = view.sums = None


def vocabulary_chunks(weight: Tensor, *, axis: int, size: int = 4096) -> Iterator[Float64[Tensor, "..."]]:
    """Yield chunks of an embedding along its vocabulary axis, in float64; it is never copied whole.

    They are on the embedding's device, or on the CPU if the device has no float64. Products of a large vocabulary take
    minutes on one thread, and a part of a second on a card.
    """
    for chunk in weight.detach().split(size, dim=axis):
        yield in_float64(chunk)


def require_causal(view: AttentionView, why: str) -> None:
    """Refuse an encoder where only a decoder has an answer, with the reason. Raises UnsupportedArchitecture."""
    if not view.causal:
        raise UnsupportedArchitecture(f"{view.source['model']} is an encoder, whose tokens see later ones too: {why}")


def heads_by_layer(view: Any, heads: Heads | None) -> dict[int, list[int]]:
    """Return the chosen heads by layer (None: all), layers and heads sorted, each head once; "L5" is all of a layer.

    `view` is an `AttentionView`, or `WeightFiles`.
    Raises BadHead for a layer or head that does not exist, or heads in no form of `Heads`.
    """
    if heads is None:
        return {layer: list(range(view.n_heads(layer))) for layer in view.layers}
    chosen: dict[int, set[int]] = {}
    for layer, head in named_heads(heads):
        index = from_end(layer, view.n_layers)
        if index is None:
            called = f"L{layer}" if head is None else head_name(layer, head)
            raise BadHead(f"{called} does not exist: the model has layers {which_exist(layer, view.n_layers)}")
        n_heads, own = view.n_heads(index), chosen.setdefault(index, set())
        if head is None:
            own.update(range(n_heads))
            continue
        if (counted := from_end(head, n_heads)) is None:
            raise BadHead(
                f"{head_name(layer, head)} does not exist: layer {index} has heads {which_exist(head, n_heads)}"
            )
        own.add(counted)
    return {layer: sorted(chosen[layer]) for layer in sorted(chosen)}


def one_head(view: Any, head: Head) -> tuple[int, int]:
    """Return layer and head of one head, counted from 0 on. `view` and errors are as for `heads_by_layer`."""
    [(layer, [index])] = heads_by_layer(view, [head_pair(head)]).items()
    return layer, index
