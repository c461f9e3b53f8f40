"""`to_spectral`: a copy of a model with learnable rotary positions in its attention modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tlspectral.algebra.rotary import Frequencies, RotaryGeometry
from tlspectral.errors import EditNotHonored, ScoreMismatch
from tlspectral.models.hooking.interrupts import uninterrupted
from tlspectral.models.hooking.placing import without_hooks
from tlspectral.models.loading.checks import avoid_lost_cache
from tlspectral.models.loading.copies import deep_copy, other_parameters
from tlspectral.models.loading.roads import load_other
from tlspectral.models.reading import attention_view
from tlspectral.models.running.batches import probe_tokens
from tlspectral.models.running.partial_runs import module_hooks, require_gradients
from tlspectral.models.running.passes import require_single_runs, whole_logits
from tlspectral.selection import Heads
from tlspectral.spectral_rope.hugging_face import (
    avoid_lost_cache_of_object,
    is_spectral_object,
    plain_object,
    rotated_object,
)
from tlspectral.spectral_rope.module import Scope
from tlspectral.spectral_rope.points import place
from tlspectral.spectral_rope.spectral_layers import by_layer, spectral_geometry, spectral_layers
from tlspectral.spectral_rope.weights_identity import logits_of

_PREFIX = "spectral."
PROBE_LENGTH = 8


def _moved(place: Any) -> Any:
    return lambda model: model.to(place)


class SpectralModel(nn.Module):
    """A copy of a TransformerBridge or HookedTransformer whose queries and keys have learnable rotations.

    Made by `to_spectral`. Calls, `run_with_cache`, `run_with_hooks`, `hooks`, `generate`, `cfg`, `tokenizer`, weights
    and everything else are the copy's, key/value caches, `position_ids`, gradient checkpointing, threads and
    torch.compile included; parameters and state dict also have `spectral.{layer}.log_omega_shift` (or `.omega`),
    `.phase` and `.gain`. Hooks at `hook_q` and `hook_k` see what they see without it (backward hooks there see the
    gradient behind the spectral rotation); scores and patterns are the spectral model's.

    Attributes:
        base: the model that it was made from, which is left as it is.
        spectral: one `SpectralRoPE` by layer.
    """

    def __init__(self, base: Any, rotated: Any, layers: nn.ModuleDict):
        super().__init__()
        self.__dict__["base"] = base  # no submodule: what is done to all modules is not done to it
        self.rotated = rotated
        self.spectral = layers
        self.training = base.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("base", "rotated") or name.startswith("__"):  # a copy has no attributes yet
                raise
            return getattr(self.rotated, name)

    def __copy__(self) -> SpectralModel:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> SpectralModel:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if hasattr(self.rotated, "original_model"):
            raise TypeError(
                "a spectral bridge cannot be pickled, as no TransformerBridge can: keep its parameters by "
                "save_spectral, or its state_dict()"
            )
        return super().__reduce_ex__(protocol)

    def save_pretrained(self, *given: Any, **named: Any) -> None:
        """Refuse by TypeError: the wrapped model would be saved without its rotations, by names that nothing reads."""
        raise TypeError(
            f"a spectral {type(self.rotated).__name__} has no save_pretrained: keep its parameters by save_spectral, "
            "or give to_spectral the model of transformers, which has one"
        )

    def forward(self, *given: Any, **named: Any) -> Any:
        """Run as the base's forward pass does."""
        return self.rotated(*given, **named)

    @uninterrupted
    def hooks(self, *given: Any, **named: Any) -> Iterator[SpectralModel]:
        """Do as the base's method, but yield this model."""
        with self.rotated.hooks(*given, **named):
            yield self

    def spectral_parameters(self) -> Iterator[nn.Parameter]:
        """Return the learnable frequencies, phases and gains alone."""
        return self.spectral.parameters()

    def spectral_geometry(self, layer: int, *, live: bool = False) -> RotaryGeometry | None:
        """Return the rotary geometry of a layer as it acts now: frequencies per head, gain, phase; None without rotary.

        With `live`, gradients pass through gain and phase to the spectral parameters.
        """
        own = attention_view(self.rotated).rotary(layer)
        return spectral_geometry(own, by_layer(self.spectral).get(layer), live=live)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the copied model by its own names, then the spectral ones."""
        before = f"{prefix}." if prefix else ""
        yield from self.rotated.named_parameters(prefix, recurse, remove_duplicate)
        yield from self.spectral.named_parameters(f"{before}spectral", recurse, remove_duplicate)

    def state_dict(self, *given: Any, **named: Any) -> Any:
        """Return the state of the copied model and the spectral parameters; by torch's rules inside another module."""
        if given or named.get("destination") is not None or named.get("prefix"):
            return super().state_dict(*given, **named)
        options = {"keep_vars": named.get("keep_vars", False)}
        return dict(self.rotated.state_dict(**options)) | self.spectral.state_dict(prefix=_PREFIX, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returned; the rest goes to the copied model. Raises RuntimeError as torch does."""
        spectral = {name.removeprefix(_PREFIX): value for name, value in state_dict.items() if name.startswith(_PREFIX)}
        base = {name: value for name, value in state_dict.items() if not name.startswith(_PREFIX)}
        self.spectral.load_state_dict(spectral, strict=strict, assign=assign)
        return self.rotated.load_state_dict(base, strict=strict, **({"assign": True} if assign else {}))

    def to(self, *given: Any, **named: Any) -> SpectralModel:
        """Move to a device or precision."""
        self.rotated.to(*given, **named)
        named.pop("print_details", None)
        self.spectral.to(*(value for value in given if not isinstance(value, bool)), **named)
        return self

    def cuda(self, device: Any = None) -> SpectralModel:
        """Move to a GPU, as `to`."""
        return self.to("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)

    # As `to`, where torch would leave the config of the copied model as it was.
    cpu, mps = _moved("cpu"), _moved("mps")
    float, double = _moved(torch.float32), _moved(torch.float64)
    half, bfloat16 = _moved(torch.float16), _moved(torch.bfloat16)


def to_spectral(
    model: Any,
    *,
    scope: Scope = "head",
    heads: Heads | None = None,
    frequencies: Frequencies | None = None,
    log_omega: bool = True,
    shared_phase: bool = False,
    phase_noise: float = 0.0,
    seed: int = 0,
    share_weights: bool = True,
) -> Any:
    """Make a new model with learnable frequency, amplitude and phase per rotary pair ("Bifocal Attention", section 3).

    >>> import tlspectral as tls, torch
    >>> model, tokens = tls.load_model("tiny-rope"), torch.arange(2, 9)[None]
    >>> tls.to_spectral(model)(tokens).equal(model(tokens))
    True

    BA's "surgical integration": the model's own inverse frequencies (rope scaling included) are the start, and the new
    model's logits are checked to be the old one's to the bit. The argument is left as it was. With `heads` and
    `frequencies` some pairs are spectral and the rest stay geometric: BA's two modalities in one model. Train it with
    `torch.optim.AdamW(tlspectral.spectral_rope.parameter_groups(spectral, lr=1e-3))`, where frequencies have a rate of
    their own.

    Args:
        model: with rotary positions: a TransformerBridge or HookedTransformer, folded or not, or a causal language
            model of transformers.
        scope: `"head"`, `"group"` (of query heads that share keys), `"layer"` or `"model"`: what shares parameters.
        heads: (layer, head) pairs or a DataFrame with these columns; None for all. Whole groups of heads that share
            keys.
        frequencies: indices of rotary pairs (0 is the model's first) or a boolean mask over them; None for all.
        log_omega: learn the logarithm of each frequency against its start, so that a step is relative; see
            `SpectralRoPE`. With `False` the frequency itself is learned and may reach 0 or change its sign, but at
            AdamW's default rate one step then undoes what slow pairs do in a long context.
        shared_phase, phase_noise: see `SpectralRoPE`.
        seed: of the phase noise.
        share_weights: the new model's weights lie where the given model's do, and are frozen: an optimizer given all
            its parameters trains the spectral ones alone. With requires_grad_ on others, or a state dict loaded, both
            models change. False: weights of its own, which ask for a gradient as the model's do.

    Returns:
        A `SpectralModel`; of a model of transformers, one of its own class, with the spectral parameters in its
        attention modules (`{attention}.spectral.log_omega_shift`). It trains (`labels=`, Trainer, gradient
        checkpointing, torch.compile), generates and is copied as that does; `save_pretrained` writes the spectral
        parameters and the name of the base (its weights, where they are others than that name means), which
        `load_spectral` and `load_model` read. One cached step is compared with an uncached pass; where they differ, a
        warning says so, and it generates without a key/value cache.

    Raises:
        UnsupportedArchitecture, BadWeights: no rotary positions, or a layer cannot be read, or (of transformers) it
            rotates in another way; the message names it.
        BadHead: a head that does not exist.
        ValueError: a model that is spectral already, choices that do not fit the model, a noise or seed that is no
            finite number, or torch.inference_mode.
        EditNotHonored: the model does not use queries or keys that are rotated at its hook points.
        ScoreMismatch: the logits at the start are not the model's own to the bit.

    What it does not establish: that the model gains by it. That takes a matched run of the model as it was.
    """
    if is_spectral_object(model) or getattr(model, "spectral_geometry", None) is not None:
        advice = "make the new one from its .base" if hasattr(model, "base") else "train it as it is"
        raise ValueError(f"the model is spectral already: {advice}")
    of_transformers = hasattr(model, "get_input_embeddings") and not hasattr(model, "run_with_hooks")
    view = attention_view(_bridge_of(model) if of_transformers else model)
    require_gradients(view, "to_spectral")
    require_single_runs(view)
    layers = spectral_layers(
        view,
        scope=scope,
        heads=heads,
        frequencies=frequencies,
        log_omega=log_omega,
        shared_phase=shared_phase,
        phase_noise=phase_noise,
        seed=seed,
    )
    if of_transformers:
        spectral = rotated_object(model, view, by_layer(layers), shared=share_weights)
        run, run_base = partial(logits_of, spectral), partial(logits_of, plain_object(spectral))
        _prove(run, run_base, layers, view.d_vocab, not phase_noise)
        avoid_lost_cache_of_object(spectral, probe_tokens(view.d_vocab, PROBE_LENGTH))
        return spectral
    rotated = _copied(model, shared=share_weights)
    place(attention_view(rotated), by_layer(layers))
    spectral = SpectralModel(model, rotated, layers)
    with without_hooks(model, view.hook_points):
        _prove(
            partial(whole_logits, attention_view(spectral)),
            partial(whole_logits, view),
            layers,
            view.d_vocab,
            not phase_noise,
        )
    avoid_lost_cache(spectral)
    return spectral


def _bridge_of(model: Any) -> Any:
    """Return a bridge of a model of transformers, whose layers are read and which does not generate."""
    return load_other(model, None, None, backend="bridge", device=None, dtype=None, tokenizer=None)


def _copied(model: Any, *, shared: bool) -> Any:
    tokenizer = getattr(model, "tokenizer", None)
    memo: dict[int, Any] = {id(tokenizer): tokenizer}
    for root in (model, getattr(model, "original_model", model)) if shared else ():
        weights = other_parameters(root)
        for parameter in weights.values():
            parameter.requires_grad_(False)
        memo |= weights | {id(buffer): buffer for buffer in root.buffers()}
    with without_hooks(model, model.hook_dict):
        copied = deep_copy(model, memo)
    for point in copied.hook_dict.values():
        point.fwd_hooks, point.bwd_hooks = [], []
        point._backward_hooks.clear()
    return copied


def _prove(
    run: Callable[[Tensor], Tensor],
    run_base: Callable[[Tensor], Tensor],
    layers: nn.ModuleDict,
    d_vocab: int,
    identical: bool,
) -> None:
    """Run both models once: their logits must be equal, and must depend on every rotated query and key."""
    tokens = probe_tokens(d_vocab, PROBE_LENGTH)
    rotated: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, module: Any, given: tuple[Any, ...], output: Float[Tensor, "batch pos heads d_head"]) -> None:
        rotated[layer, given[2]] = output

    modules = by_layer(layers)
    keeping = [(module.register_forward_hook, partial(keep, layer)) for layer, module in modules.items()]
    with module_hooks(keeping):
        with torch.enable_grad():
            logits = run(tokens)
            total = logits.sum()
        with torch.no_grad():
            base_logits = run_base(tokens)
    missing = [(layer, side) for layer in modules for side in ("query", "key") if (layer, side) not in rotated]
    if not missing:
        used = torch.autograd.grad(total, list(rotated.values()), allow_unused=True)
        missing = [site for site, gradient in zip(rotated, used, strict=True) if gradient is None]
    if missing:
        layer, side = missing[0]
        raise EditNotHonored(
            f"layer {layer}: the model does not use a {side} that is rotated there, so it cannot be made spectral on "
            "this backend"
        )
    if identical and not torch.equal(logits, base_logits):
        worst = float((logits.detach() - base_logits).abs().max())
        raise ScoreMismatch(
            f"the spectral model's logits at the start differ from the model's own by {worst:.1e}, so it is not "
            "returned; is the model deterministic?"
        )
