"""The view of a model: its origin, its layers, and runs with hooks."""

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
from tlspectral.errors import BadHead, BadWeights, ScoreMismatch, UnsupportedArchitecture, not_a, shown
from tlspectral.errors import kind_of as kind_of_argument
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
from tlspectral.models.reading.computed_weights import with_plain_weights
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
from tlspectral.models.reading.packed import (
    packed_numbers,
    refuse_packed,
    stored_tensors,
    stored_weights,
)
from tlspectral.models.reading.reader import Reader
from tlspectral.selection.heads_as_written import (
    recorded_groups,
)

READERS: dict[str, Reader] = {"bridge": bridge, "hooked": hooked_transformer}
"""The module that reads each kind of model, by its backend."""

_PLAIN = (bool, int, float, str)
_marks = count()


@dataclass(eq=False)
class AttentionView:
    """A model's attention layers, with the same methods for every backend. Weights are copied only on request.

    `attention_view(model)` makes it, or `with measured(model) as view`.

    model: TransformerBridge or HookedTransformer; it is never changed.
    backend: "bridge" or "hooked".
    n_layers, d_model, d_vocab: sizes of the model.
    n_ctx: longest prompt in tokens.
    kept: layers read so far, by (layer, gradients recorded), while `measured` is open. None otherwise: every request
    then reads the layer again, because the model may have changed.
    sums: sums of weights by which `kept_digest` notices changes, while `measured` is open.
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
        """The module with the functions that read this kind of model (`Reader`): for a bridge or for a
        HookedTransformer.
        """
        return READERS[self.backend]

    @property
    def _spectral_geometry(self) -> Callable[..., RotaryGeometry | None] | None:
        """The model's function from layer to rotary geometry if it has learnable rotary positions; None for other
        models.
        """
        return getattr(self.model, "spectral_geometry", None)

    @property
    def device(self) -> torch.device:
        """Device of the model, where token ids have to be."""
        return next(self.model.parameters()).device

    @property
    def source(self) -> dict[str, Any]:
        """Origin of the model: a dict with `model`, `revision`, `backend` and everything else `load_model` recorded.

        Two keys are present only if they apply. `user_hooks`: from hook point, module or other place to the number of
        the user's hooks and changes there (hooks, replaced forwards and modules, parametrized weights).
        `skipped_layers`: `layer, kind, reason` of each layer whose heads cannot be read.
        """
        name = getattr(self.model.cfg, "model_name", None)
        known = getattr(self.model, "tlspectral_source", None) or {"model": name, "revision": None}
        further = {"user_hooks": user_hooks(self.model), "skipped_layers": [skip._asdict() for skip in self.skipped]}
        return {**known, "backend": self.backend, **{name: value for name, value in further.items() if value}}

    @property
    def skipped(self) -> list[SkippedLayer]:
        """Layers whose heads cannot be read, such as the state-space layers of a hybrid model: a list of `SkippedLayer`
        (layer, kind, reason).
        """
        return self._found[0]

    @cached_property
    def _found(self) -> tuple[list[SkippedLayer], dict[int, int]]:
        """A pair: the list of layers whose heads cannot be read (`SkippedLayer`), and a dict from each other layer to
        its number of query heads.
        """
        n_heads: dict[int, int] = {}

        def read(index: int) -> None:
            n_heads[index] = len(self._stored(index).w_q)

        return skipped_among(range(self.n_layers), read, lambda index: kind_of(self.blocks[index].module)), n_heads

    @cached_property
    def hook_points(self) -> dict[str, Any]:
        """The hook points of the model, a dict from name to module.

        A bridge collects the dict anew at every request; here it is collected once.
        """
        return self.model.hook_dict

    def hooks_on(self, hooks: Iterable[Hook]) -> AbstractContextManager[None]:
        """Place hooks on the model, for this thread only, until the `with` block ends.

        hooks: pairs of hook point name and function of (activation, hook point). Raises EditNotHonored if another
        thread runs the model, or if a hook is removed early.
        """
        return hooks_on(self.model, self.hook_points, hooks)

    @property
    def blocks(self) -> list[Block]:
        """The layers of the model as a list of `Block`, in the order of their numbers."""
        return blocks_of(self.model)

    @property
    def has_embedding_norm(self) -> bool:
        """True if a norm follows the embedding, as in BLOOM."""
        return hasattr(self.model, "embed_ln") or bool(getattr(self.model.cfg, "post_embedding_ln", False))

    @cached_property
    def layers(self) -> list[int]:
        """Indices of the layers whose heads can be read, a sorted list. Raises UnsupportedArchitecture if there are
        none.
        """
        return read_layers(self.n_layers, self.skipped)

    @property
    def start_token(self) -> int:
        """Token id that opens a detector sequence: BOS, else EOS, else 0; CLS in an encoder."""
        tokenizer = getattr(self.model, "tokenizer", None)
        names = ("bos_token_id", "eos_token_id") if self.causal else ("cls_token_id",)
        ids = (getattr(tokenizer, name, None) for name in names)
        return int(next((token for token in ids if token is not None), 0))

    def raw(self, index: int) -> RawAttention:
        """Return the parameters of layer `index` as a `RawAttention` (`.w_q`, `.b_q`, `.norm`, ...): tensors of the
        model or views of them, not folded.

        For a model with learnable rotary positions, the rotary geometry comes from its method `spectral_geometry`.
        Raises BadHead if the layer does not exist, UnsupportedArchitecture if it cannot be read.
        """
        raw = self._stored(index)
        return raw if self._spectral_geometry is None else replace(raw, rotary=self._spectral_geometry(index))

    def _stored(self, index: int) -> RawAttention:
        """Return the parameters of layer `index` as stored, a `RawAttention`; from `kept` if `measured` is open and has
        read the layer before.

        Raises BadHead if the layer does not exist, UnsupportedArchitecture if it cannot be read.
        """
        if not 0 <= index < self.n_layers:
            raise BadHead(f"layer {index} does not exist: the model has layers 0 to {self.n_layers - 1}")
        if self.kept is None:
            return self.reader.read_attention(self.model, index)
        key = index, torch.is_grad_enabled()
        if key not in self.kept:
            self.kept[key] = self.reader.read_attention(self.model, index)
        return self.kept[key]

    def layer(self, index: int) -> AttentionLayer:
        """Return the query and key weights of layer `index` as an `AttentionLayer`: copies in float64 on the CPU, norms
        folded in.

        Raises BadHead if the layer does not exist; UnsupportedArchitecture or BadWeights if it cannot be read.
        """
        return fold_attention(self.raw(index), index)

    def live_factors(self, index: int, heads: list[int] | None, *, folded: bool) -> LiveFactors:
        """Return a `LiveFactors` of some heads of a layer: `.w_q`, `.w_k` (with gradients to the model's parameters)
        and `.rotary`, the rotary geometry.

        index: the layer. heads: None for all. folded: True folds norms in. Raises BadHead if the layer does not exist;
        UnsupportedArchitecture if it cannot be read, or only as a copy without gradients; BadWeights for quantised
        weights, which pass no gradient.
        """
        refuse_packed(self.blocks[index].module, f"layer {index}", "which pass no gradient: load the model unquantised")
        raw = self._stored(index)
        if folded and self._spectral_geometry is not None:
            raw = replace(raw, rotary=self._spectral_geometry(index, live=True))
        factors = live_factors(raw, index, heads, folded=folded)
        for role, weight in (("W_Q", raw.w_q), ("W_K", raw.w_k)):
            self._require_gradient(weight, index, role)
        return factors

    def _require_gradient(self, weight: Tensor, index: int, role: str) -> None:
        """Raise UnsupportedArchitecture if a weight passes no gradient although the layer's attention is trainable.

        A frozen parameter passes, and so does an attention without trainable parameters. index: the layer. role: name
        of the weight, such as "W_Q", for the message.
        """
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
        """Return the value and output weights of layer `index` as `OutputFactors`: copies in float64 on the CPU, norms
        folded in.

        Raises BadHead if the layer does not exist; UnsupportedArchitecture or BadWeights if it cannot be read.
        """
        return fold_output(self.raw(index), index)

    def behind(self, index: int) -> tuple[Tensor | None, Normalization, float]:
        """Return (b_O, norm after the attention, factor on what the layer adds) of layer `index`.

        b_O: bias after W_O, None without one. Raises BadHead if the layer does not exist, UnsupportedArchitecture for
        an unsupported norm.
        """
        self._stored(index)
        return self.reader.read_output(self.model, index)

    def mlp_input(self, index: int) -> MlpInput | None:
        """Return, as `MlpInput`, the hook point (`.point`, full name) of the MLP input of layer `index` and the norm
        before it (`.norm`); None without an MLP.

        Raises UnsupportedArchitecture if the norm is not supported or no hook point shows the input.
        """
        name, block = self.blocks[index]
        if block._modules.get("mlp") is None:
            return None
        point, norm = self.reader.read_mlp_input(self.model, index)
        return MlpInput(f"{name}.{point}", norm)

    def attention_factor(self, index: int) -> float:
        """Return the factor from the activation at `attention_out` to what layer `index` adds to the stream; 1 except
        in Falcon-H1.
        """
        wrapped = getattr(self.blocks[index].module, "original_component", None)
        return float(getattr(wrapped, "attn_out_multiplier", 1.0))

    def n_heads(self, index: int) -> int:
        """Return the number of query heads of layer `index`. Raises BadHead if the layer does not exist."""
        known = self.__dict__.get("_found")  # one layer alone is read where not all have been
        return known[1][index] if known is not None and index in known[1] else len(self.raw(index).w_q)

    def heads_per_group(self, index: int) -> int:
        """Return the number of query heads that share the keys and values of layer `index`; 1 if heads share none.

        It is the number of heads that the receiver "L5KV0.k" reaches: in latent attention, all heads of the layer.
        Raises BadHead if the layer does not exist.
        """
        raw = self.raw(index)
        return len(raw.w_q) // raw.n_kv_receivers

    def rotary(self, index: int) -> RotaryGeometry | None:
        """Return the rotary geometry of a layer, None without rotary positions.

        Code that needs no frequencies, such as an ablation that takes cos and sin from the run, reads
        `raw(index).rotary` instead. Raises BadHead if the layer does not exist, and ScoreMismatch if its pairs do not
        rotate by one angle per token.
        """
        rotary = self.raw(index).rotary
        if rotary is not None and rotary.mismatch is not None:
            raise ScoreMismatch(f"{self.source['model']}, layer {index}: {rotary.mismatch}")
        return rotary

    def writes_more(self, index: int) -> bool:
        """Return True if layer `index` has a writer besides heads and MLP: a mixer (`"L2MIX"`) or an MLP without hook
        point.
        """
        return writes_more(self.blocks[index].module)

    def rotary_tables(self, index: int, n_positions: int, captured: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return the scaled (cos, sin) that a layer applied in a run, [(batch,) pos, columns]; None if it shows none.

        index: the layer. n_positions: tokens of the prompt. captured: activations of the run, from hook point name to
        tensor. With learnable rotary positions the tables are [(batch,) heads, pos, pairs].
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
        """True if no query sees a later token; False for an encoder."""
        return self.backend != "bridge" or not is_encoder(self.model)

    @property
    def tokens_point(self) -> str:
        """Name of the hook point that token ids pass, else the hook point of their embeddings."""
        return "embed.hook_in" if "embed.hook_in" in self.hook_points else "hook_embed"

    def passed_by(self, ids: Int[Tensor, "sequences pos"]) -> Tensor:
        """Return the activation at `tokens_point` for the token ids `ids`, before hooks of the user: the ids or their
        embeddings.
        """
        return ids if self.tokens_point == "embed.hook_in" else self.model.embed(ids)

    def hook_names(self, index: int) -> dict[str, str]:
        """Return a dict from what a hook point of layer `index` shows ("residual", "query", "z", "pattern", ...) to its
        name ("blocks.0.attn.hook_q").
        """
        return hook_names(self.blocks[index])

    def embedding(self) -> Tensor:
        """Return W_E [d_vocab, d_model] as stored.

        Raises UnsupportedArchitecture if a projection stands between W_E and the residual stream (OPT 350M).
        """
        w_e = self.model.W_E
        if w_e.shape[-1] != self.d_model:
            raise UnsupportedArchitecture(
                f"the embedding W_E has {w_e.shape[-1]} columns and the residual stream {self.d_model}: a projection "
                "between them is not supported. analyze_heads(folder or hub name, detectors=False) gives the columns "
                "that need no embedding"
            )
        return w_e

    def unembedding(self) -> tuple[Tensor, Normalization]:
        """Return W_U [d_model, d_vocab] as stored, and the norm before it as a `Normalization`.

        Raises UnsupportedArchitecture for an encoder.
        """
        require_causal(self, "between its residual stream and W_U stands a nonlinear layer")
        plain = with_plain_weights(self.model.unembed, self.model)
        w_u = self.model.W_U if plain is self.model.unembed else plain.W_U
        return w_u, self.reader.final_normalization(self.model)

    def weights_digest(self) -> str:
        """Return the SHA-256 (hex) of all parameters with names, shapes and types; equal in TransformerLens 3 and 4.

        Zero biases do not count, because TransformerLens 3.9 adds one to an unembedding that has none. The depth at
        which a bridge wraps a module does not count either. With ALiBi a HookedTransformer has a table of positions
        that no pass reads; it holds what was in memory, and does not count.
        """
        named = {name.replace("._original_component", ""): value for name, value in self.model.named_parameters()}
        if self.backend == "hooked" and self.model.cfg.positional_embedding_type == "alibi":
            del named["pos_embed.W_pos"]
        weights = stored_weights(named)

        def make() -> str:
            return digest_of_named(
                {name: value for name, value in weights.items() if not name.endswith("bias") or bool(value.any())}
            )

        return kept_digest(self.model, tuple(weights), weights.values(), make, self.sums)

    def state(self) -> Hashable:
        """Return a value that differs (`!=`) from an earlier one if the model's forward pass can have changed.

        It covers all parameters and buffers, and for each module its class and the numbers, flags and strings of module
        and config. Hooks are not covered: see `acting_on`.
        """
        modules = modules_of(self.model)
        tensors = {id(value): value for part in modules for held in (part._parameters, part._buffers)
                   for value in held.values() if value is not None}  # fmt: skip
        configs = {id(value): value for part in modules for value in (vars(part).get("config"), vars(part).get("cfg"))
                   if hasattr(value, "__dict__")}  # fmt: skip
        plain = tuple(
            (type(part), *(item for item in vars(part).items() if type(item[1]) in _PLAIN and item[0] != "training"))
            for part in (*modules, *configs.values())
        )
        held = [part for value in tensors.values() for part in stored_tensors(value)]
        return kept_digest(self.model, "state", held, lambda: str(next(_marks)), self.sums), plain

    def ends_digest(self) -> str:
        """Return the SHA-256 (hex) of embedding, unembedding and final norm as stored; encoder: of the embedding.

        Of a quantised unembedding the packed numbers count.
        """
        w_u, norm = self.unembedding() if self.causal else (None, NO_NORM)
        ends = {"W_E": self.embedding(), "W_U": w_u, "final norm gain": norm.gain}
        packed = packed_numbers(self.model.unembed) if self.causal else []
        stored = [ends["W_E"], norm.gain, *packed] if packed else [*ends.values()]

        def make() -> str:
            for role, value in ends.items():
                require_readable(value, role)
            return digest_of(stored)

        return kept_digest(self.model, "ends", stored, make, self.sums)

    def layer_digest(self, index: int) -> str:
        """Return the two SHA-256 (hex) of layer `index`, joined: of its query and key weights as stored, then of W_V
        and W_O. Of a layer with quantised weights: of its norms and biases, then of the packed numbers.

        Raises BadHead if the layer does not exist, UnsupportedArchitecture if it cannot be read, BadWeights for a
        weight on the meta device.
        """
        raw = self.raw(index)
        sides = hashed_sides(raw)
        if packed := packed_numbers(self.blocks[index].module.attn):
            sides = [value for value in sides[0] if value is not raw.w_q and value is not raw.w_k], packed
        return "".join(
            kept_digest(self.model, (index, n), side, partial(digest_of, side), self.sums)
            for n, side in enumerate(sides)
        )

    def origin(self, layers: Iterable[int] | None = None, *, processing: bool = False) -> dict[str, Any]:
        """Return the origin of the model for a table's `attrs`: a dict with the entries of `source` (`model`,
        `revision`, ...) and hashes of weights by layer.

        A layer's hash covers its attention weights, input norm, embedding, unembedding and final norm, as stored.
        Skipped layers have no hash, and neither has a model from which no head table can be made.

        layers: None for all. processing: True adds two flags about TransformerLens' weight processing (`processing`),
        for tables whose numbers depend on it.
        """
        try:
            ends = self.ends_digest()
            chosen = self.layers if layers is None else sorted({*layers} & {*self.layers})
            digests = {index: self.layer_digest(index) + ends for index in chosen}
        except (UnsupportedArchitecture, BadWeights):
            return {**self.source, "n_layers": self.n_layers}
        state = {"processing": self.processing} if processing and digests else {}
        groups = recorded_groups({index: self.heads_per_group(index) for index in digests})
        return {**self.source, **state, **recorded_weights(digests, self.n_layers), **groups}

    @property
    def processing(self) -> dict[str, bool]:
        """What TransformerLens' weight processing left, as two flags, judged by the first layer with heads.

        `value_biases`: some head has a bias of values (`fold_value_biases` would move it into the bias of the layer's
        output). `centred_writes`: what heads write has mean zero over d_model, as after `center_writing_weights`.
        """
        raw = self.raw(next(iter(self.layers)))  # a model is processed as a whole
        return {
            "value_biases": raw.b_v is not None and bool(raw.b_v.any()),
            "centred_writes": is_centred(raw.w_o, torch.finfo(raw.computed_in or raw.w_o.dtype).eps),
        }

    def position_embedding(self) -> Tensor | None:
        """Return W_pos [n_ctx, d_model] of a model with learned absolute positions, a view of the model's tensor; None
        for other models.
        """
        if self.model.cfg.positional_embedding_type != "standard":
            return None
        return self.model.pos_embed.W_pos[-self.n_ctx :]  # OPT stores two rows before position 0


def attention_view(model: Any) -> AttentionView:
    """Return an `AttentionView`: the attention layers of a model, with the same methods for every kind of model.

    Use it to look at weights of single layers. To measure a model, open it by `measured`, which reads each layer once.

    >>> import tlspectral as tls
    >>> from tlspectral.models.reading import attention_view
    >>> view = attention_view(tls.load_model("tiny-rope"))
    >>> view
    AttentionView(tiny-rope, bridge: 2 layers, d_model 64, d_vocab 32, n_ctx 128)
    >>> view.layer(0).w_q.shape
    torch.Size([4, 64, 16])

    Args:
        model: TransformerBridge or HookedTransformer, however loaded, folded or raw.

    Returns:
        The view, which reads weights when a method asks for them. `.layer(0)`: W_Q and W_K of layer 0, norms folded in,
        in float64. `.raw(0)`: all weights as stored. `.source`: origin of the model, a dict. `.layers`: numbers of the
        layers whose heads can be read.

    Raises:
        TypeError: `model` is another object, such as a model of transformers: give it to `load_model` first.
        UnsupportedArchitecture: `model` is a bridge of an encoder with a decoder, or its config repeats layers in one
            pass.
    """
    if getattr(model, "only_weights", False):
        raise TypeError(
            f"{shown(model)} holds the files of weights for analyze_heads, not a model that runs: load it with "
            "load_model, without weights='files'"
        )
    if hasattr(model, "original_model") and hasattr(model, "adapter"):
        backend = "bridge"
        require_no_repeats(getattr(model.original_model, "config", None), type(model.original_model).__name__)
        if not blocks_of(model):
            lists = ", ".join(name for name in model.adapter.component_mapping if "block" in name) or "none"
            raise UnsupportedArchitecture(
                f"{type(model.original_model).__name__} has no list of layers that is read (its lists: {lists}): load "
                "a model with one stack of decoder layers"
            )
    elif hasattr(model, "blocks") and hasattr(model, "cfg") and hasattr(model, "run_with_hooks"):
        backend = "hooked"
    else:
        mistaken = "" if kind_of_argument(model) in ("", "a model") else f"{not_a(model, 'a model')}; a "
        raise TypeError(
            f"{mistaken}{type(model).__name__} is neither a TransformerBridge nor a HookedTransformer: load it with "
            "tlspectral.load_model(...), which takes a name or a model of transformers"
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
    """Open a model for a measurement: yield its `AttentionView`, which reads the weights of each layer only once.

    Use it in a function of your own that measures a model. Nothing in the block may change the weights.

    >>> import tlspectral as tls
    >>> from tlspectral.models.reading import measured
    >>> with measured(tls.load_model("tiny-rope")) as view:
    ...     view.layer(1).n_heads
    4

    Args:
        model: TransformerBridge or HookedTransformer.
        report_hooks: True (default) warns of hooks that a user left on the model, because they change the numbers. Give
            False if the measurement does not run the model, or if it is meant to include the hooks (as `evaluate`
            does).

    Returns:
        A context manager that yields the `AttentionView`. `.layer(0)`: W_Q and W_K of layer 0, norms folded in, in
        float64. `.raw(0)`: all weights as stored. `.source`: origin of the model, a dict. `.layers`: numbers of the
        layers whose heads can be read.

    Raises:
        TypeError: `model` is another object, such as a model of transformers: give it to `load_model` first.
        UnsupportedArchitecture: `model` is a bridge of an encoder with a decoder, or its config repeats layers in one
            pass.
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
    """Yield the embedding `weight` in float64 in chunks along its vocabulary axis; it is never copied whole.

    axis: the vocabulary axis. size: tokens of a chunk. The chunks are on the embedding's device if it has float64, else
    on the CPU, where products of a large vocabulary take minutes on one thread.
    """
    for chunk in weight.detach().split(size, dim=axis):
        yield in_float64(chunk)


def require_causal(view: AttentionView, why: str) -> None:
    """Raise UnsupportedArchitecture if the model in `view` is an encoder. why: the reason, the end of the message."""
    if not view.causal:
        raise UnsupportedArchitecture(
            f"{view.source['model']} is an encoder, in which tokens also see later tokens; a decoder is needed here: "
            f"{why}"
        )
