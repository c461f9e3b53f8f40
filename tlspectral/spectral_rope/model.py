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
from tlspectral.errors.settings import checked_settings
from tlspectral.models.hooking.interrupts import uninterrupted
from tlspectral.models.hooking.placing import without_hooks
from tlspectral.models.loading.checks import avoid_lost_cache
from tlspectral.models.loading.copies import copy_without_hooks
from tlspectral.models.loading.roads import bridge_of
from tlspectral.models.reading import attention_view
from tlspectral.models.running.batches import probe_tokens
from tlspectral.models.running.partial_runs import module_hooks, require_gradients
from tlspectral.models.running.passes import require_single_runs, whole_logits
from tlspectral.selection.heads_as_written import Heads
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
    """Return a method (a function of the model) that moves the model to the device, or converts it to the dtype,
    `place`.

    The method changes the model in place and returns it.
    """
    return lambda model: model.to(place)


class SpectralModel(nn.Module):
    """A copy of a TransformerBridge or HookedTransformer whose queries and keys have learnable rotations.

    `tls.to_spectral(model)` makes it. It works like the copied model: calls, `run_with_cache`, `run_with_hooks`,
    `hooks`, `generate`, `cfg`, `tokenizer`, key/value caches, `position_ids`, gradient checkpointing, threads and
    torch.compile. Parameters and state dict also have `spectral.{layer}.log_omega_shift` (or `.omega`), `.phase` and
    `.gain`. Hooks at `hook_q` and `hook_k` see activations before the learned rotation (backward hooks there see the
    gradient after it). Scores and patterns include the rotation.

    Attributes:
        base: the model from which it was made; it is not changed.
        rotated: the copy that runs, with its rotations.
        spectral: the `SpectralRoPE` modules, as a ModuleDict from the layer's number (as text).
    """

    def __init__(self, base: Any, rotated: Any, layers: nn.ModuleDict):
        super().__init__()
        self.__dict__["base"] = base  # not a submodule: calls on all modules, such as `to`, must not reach it
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
                "a spectral bridge cannot be pickled, like any TransformerBridge: keep its parameters by "
                "save_spectral, or its state_dict()"
            )
        return super().__reduce_ex__(protocol)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Raise TypeError: the copied model would be saved without its rotations, by names that nothing reads."""
        raise TypeError(
            f"a spectral {type(self.rotated).__name__} has no save_pretrained: keep its parameters by save_spectral, "
            "or give to_spectral the model of transformers, whose spectral model has save_pretrained"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the copied model's forward pass with the learned rotations, and return its output."""
        return self.rotated(*args, **kwargs)

    @uninterrupted
    def hooks(self, *args: Any, **kwargs: Any) -> Iterator[SpectralModel]:
        """Place hooks in a `with` block, with the arguments of TransformerLens' `model.hooks`, and yield this model. At
        the end of the block the hooks are removed.
        """
        with self.rotated.hooks(*args, **kwargs):
            yield self

    def spectral_parameters(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the learnable frequencies, phases and gains of all layers, without the model's
        weights.
        """
        return self.spectral.parameters()

    def spectral_geometry(self, layer: int, *, live: bool = False) -> RotaryGeometry | None:
        """Return a layer's rotary pairs as they act now, a `RotaryGeometry` with `theta` (radians per token), `gain`
        and `phase` (radians), each [heads, pairs] where the layer is learned.

        The result is None for a layer without rotary positions. `live`: True lets gradients pass through gain and phase
        to the spectral parameters.
        """
        own = attention_view(self.rotated).rotary(layer)
        return spectral_geometry(own, by_layer(self.spectral).get(layer), live=live)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter): the copied model's parameters, then the spectral ones as `spectral.{layer}...`. The
        arguments are as in torch: `prefix` of the names, `recurse` into submodules, `remove_duplicate` for shared
        parameters.
        """
        before = f"{prefix}." if prefix else ""
        yield from self.rotated.named_parameters(prefix, recurse, remove_duplicate)
        yield from self.spectral.named_parameters(f"{before}spectral", recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a dict from name to tensor: the weights of the copied model, and the spectral parameters as
        `spectral.{layer}...`.

        With a destination or prefix, as inside another module, the names follow torch's rules.
        """
        if args or kwargs.get("destination") is not None or kwargs.get("prefix"):
            return super().state_dict(*args, **kwargs)
        options = {"keep_vars": kwargs.get("keep_vars", False)}
        return dict(self.rotated.state_dict(**options)) | self.spectral.state_dict(prefix=_PREFIX, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a dict that `state_dict` returned into this model, in place; names without `spectral.` go to the copied
        model.

        Returns torch's report of missing and unexpected names of the copied model. `strict=True` raises RuntimeError,
        as torch does, for such names; other shapes always raise it. `assign`: True takes the given tensors instead of
        copying their values.
        """
        spectral = {name.removeprefix(_PREFIX): value for name, value in state_dict.items() if name.startswith(_PREFIX)}
        base = {name: value for name, value in state_dict.items() if not name.startswith(_PREFIX)}
        self.spectral.load_state_dict(spectral, strict=strict, assign=assign)
        return self.rotated.load_state_dict(base, strict=strict, **({"assign": True} if assign else {}))

    def to(self, *args: Any, **kwargs: Any) -> SpectralModel:
        """Move the model in place to a device or precision (arguments of torch's `Module.to`), and return it."""
        self.rotated.to(*args, **kwargs)
        kwargs.pop("print_details", None)
        self.spectral.to(*(value for value in args if not isinstance(value, bool)), **kwargs)
        return self

    def cuda(self, device: Any = None) -> SpectralModel:
        """Move the model in place to a GPU, the default GPU or `device` (a number or name), and return it."""
        return self.to("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)

    # These call `to`, because torch's own methods would not update the config of the copied model.
    cpu, mps = _moved("cpu"), _moved("mps")
    float, double = _moved(torch.float32), _moved(torch.float64)
    half, bfloat16 = _moved(torch.float16), _moved(torch.bfloat16)


@checked_settings
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
    """Copy a model and make frequency, amplitude and phase of its rotary pairs learnable ("Bifocal Attention").

    >>> import tlspectral as tls, torch
    >>> model, tokens = tls.load_model("tiny-rope"), torch.arange(2, 9)[None]
    >>> tls.to_spectral(model)(tokens).equal(model(tokens))
    True

    The copy starts with the model's own frequencies, and its logits are checked to be equal bit by bit. Train it with
    `torch.optim.AdamW(tls.spectral_rope.parameter_groups(spectral, lr=1e-3))`.

    Args:
        model: TransformerBridge, HookedTransformer or causal language model of transformers, with rotary positions.
        scope: heads that share parameters: "head" (default: each has its own), "group" (query heads that share keys),
            "layer" or "model".
        heads: heads that learn: "L5H1", (5, 1), "L5", "L5KV1", a list, or a DataFrame; all heads that share keys.
            Default: all.
        frequencies: rotary pairs that learn, by index (0 is the model's first) or as a boolean mask. Default: all.
        log_omega: True (default) learns the logarithm of a frequency, so steps are relative. False learns the frequency
            itself, which may reach 0 or change its sign.
        shared_phase: True turns queries and keys by the phase, which cancels in every score. Default: False, queries
            only.
        phase_noise: standard deviation of the phase at the start, radians. Default: 0. seed: of the noise. Default: 0.
        share_weights: True (default) uses the given model's weights, frozen. False: weights of its own, which train.

    Returns:
        A `SpectralModel`, used like the given model; for a model of transformers, a model of its own class. If
            generation with a key/value cache fails a check, a warning is given and the model generates without a cache.

    Raises:
        UnsupportedArchitecture, BadWeights: no rotary positions, an unreadable layer, or another rotation function.
        BadHead: a head does not exist.
        ValueError: the model is spectral already, an argument does not fit it, or torch.inference_mode is on.
        EditNotHonored: the model ignores queries or keys that are rotated at its hook points.
        ScoreMismatch: the logits at the start differ from the model's own.

    Not established: that the model gains by it; compare with a matched run of the unchanged model. More:
    docs/training.md.
    """
    if is_spectral_object(model) or getattr(model, "spectral_geometry", None) is not None:
        advice = "make the new one from its .base" if hasattr(model, "base") else "train it as it is"
        raise ValueError(f"the model is spectral already: {advice}")
    of_transformers = hasattr(model, "get_input_embeddings") and not hasattr(model, "run_with_hooks")
    view = attention_view(bridge_of(model) if of_transformers else model)
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
    rotated = copy_without_hooks(model, shared=share_weights)
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


def _prove(
    run: Callable[[Tensor], Tensor],
    run_base: Callable[[Tensor], Tensor],
    layers: nn.ModuleDict,
    d_vocab: int,
    identical: bool,
) -> None:
    """Raise unless the spectral model's logits depend on every rotated query and key and equal the ordinary model's.

    `run`, `run_base`: functions from tokens to logits of the spectral and the ordinary model. They run on a short
    prompt of token ids below `d_vocab`. `layers`: learned modules. `identical`: False leaves out the comparison of
    logits, for a random start. Raises EditNotHonored for a rotation without effect, ScoreMismatch for other logits.
    """
    tokens = probe_tokens(d_vocab, PROBE_LENGTH)
    rotated: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, module: Any, inputs: tuple[Any, ...], output: Float[Tensor, "batch pos heads d_head"]) -> None:
        rotated[layer, inputs[2]] = output

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
            f"layer {layer}: the model does not use a {side} that is rotated at its hook point, so it cannot be made "
            "spectral on this backend: try another backend, or the model of transformers"
        )
    if identical and not torch.equal(logits, base_logits):
        worst = float((logits.detach() - base_logits).abs().max())
        raise ScoreMismatch(
            f"the spectral model's logits at the start differ from the model's own by {worst:.1e}: check that the "
            "model is deterministic, for example that two calls give equal logits"
        )
