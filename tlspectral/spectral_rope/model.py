"""`to_spectral`: a model of either backend with learnable rotary positions, around the model it was made from."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from tlspectral.errors import EditNotHonored, ScoreMismatch
from tlspectral.hooks.probe import without_hooks
from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.rotary import RotaryGeometry
from tlspectral.selection import Heads
from tlspectral.spectral_rope.layers import Frequencies, by_layer, spectral_geometry, spectral_layers
from tlspectral.spectral_rope.module import Scope
from tlspectral.spectral_rope.placement import Placement, cached_tokens, checkpointed_modules, sites_of

_PREFIX = "spectral."
_PROBE_LENGTH = 8


class SpectralModel(nn.Module):
    """A TransformerBridge or HookedTransformer with further, learnable rotations of its queries and keys.

    Made by `to_spectral`. It shares the modules of `base`, and rotates queries and keys only in its own passes: `base`
    computes what it did before. Calls, `run_with_cache`, `run_with_hooks`, `hooks`, `cfg`, `tokenizer`, weights and
    everything else are those of `base`; parameters and state dict also have `spectral.{layer}.log_omega_shift` (or
    `.omega`), `.phase` and `.gain`. Hooks at `hook_q` and `hook_k` see what they see without it (backward hooks there
    see the gradient behind the spectral rotation); scores and patterns are those of the spectral model.

    To train the spectral parameters on a frozen backbone, give an optimizer `parameter_groups(spectral, lr)` and call
    `loss.backward(inputs=list(model.spectral_parameters()))`, which leaves the gradients of `base` alone too. As the
    modules are shared, `to`, `train`, `requires_grad_`, `load_state_dict`, hooks added for good and an optimizer given
    `parameters()` act on `base`; copy it first where that is not wanted.

    A key/value cache that is handed to a pass works. Generation with one is refused: it would run `base` alone.
    Gradient checkpointing is refused in training: it would compute blocks again without their rotations. Passes of
    several threads run one after the other, also with those of other spectral models of the same `base`.

    Attributes:
        base: the model that it was made from.
        spectral: one `SpectralRoPE` by layer.
    """

    def __init__(self, base: Any, layers: nn.ModuleDict):
        super().__init__()
        self.base = base
        self.spectral = layers
        self.training = base.training
        view = attention_view(base)
        self._placement = Placement(sites_of(view, by_layer(layers)), checkpointed_modules(base))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("base", "_placement") or name.startswith("__"):  # a copy has no attributes yet
                raise
            return getattr(self.base, name)

    def forward(self, *given: Any, **named: Any) -> Any:
        """As the base's forward pass.

        Raises:
            EditNotHonored: `position_ids`; a cache of a kind whose length is unknown; gradient checkpointing is on;
                or another thread has an `ablate` block open on the model.
        """
        with self._spectral(given, named):
            return self.base(*given, **named)

    def run_with_cache(self, *given: Any, **named: Any) -> Any:
        """As the base's. Raises as `forward`."""
        with self._spectral(given, named):
            return self.base.run_with_cache(*given, **named)

    def run_with_hooks(self, *given: Any, **named: Any) -> Any:
        """As the base's. Raises as `forward`."""
        with self._spectral(given, named):
            return self.base.run_with_hooks(*given, **named)

    @contextmanager
    def hooks(self, *given: Any, **named: Any) -> Iterator["SpectralModel"]:
        """As the base's, but yields this model."""
        with self.base.hooks(*given, **named):
            yield self

    def generate(self, *given: Any, use_past_kv_cache: bool = True, **named: Any) -> Any:
        """As the base's, with `use_past_kv_cache=False` alone.

        Raises:
            EditNotHonored: a key/value cache was asked for, which is the default.
        """
        _refuse_cache("generate", use_past_kv_cache)
        with torch.no_grad(), self._placement.active(self.base, 0):
            return self.base.generate(*given, use_past_kv_cache=False, **named)

    def generate_stream(self, *given: Any, use_past_kv_cache: bool = True, **named: Any) -> Any:
        """As `generate`, but yields tokens as they come. Raises as `generate`."""
        _refuse_cache("generate_stream", use_past_kv_cache)
        stream = self.base.generate_stream(*given, use_past_kv_cache=False, **named)
        done = object()
        while True:
            # Between two tokens the base has no rotations: the caller may run it, in any thread.
            with torch.no_grad(), self._placement.active(self.base, 0):
                tokens = next(stream, done)
            if tokens is done:
                return
            yield tokens

    def hf_generate(self, *given: Any, **named: Any) -> Any:
        """Refused: it would run the wrapped Hugging Face model. Raises EditNotHonored."""
        raise EditNotHonored("hf_generate runs the wrapped model without its spectral rotations; use generate")

    def diffusion_generate(self, *given: Any, **named: Any) -> Any:
        """Refused: it would run the wrapped Hugging Face model. Raises EditNotHonored."""
        raise EditNotHonored("diffusion_generate runs the wrapped model without its spectral rotations")

    def spectral_parameters(self) -> Iterator[nn.Parameter]:
        """The learnable frequencies, phases and gains alone."""
        return self.spectral.parameters()

    def spectral_geometry(self, layer: int, *, live: bool = False) -> RotaryGeometry | None:
        """Rotary geometry of a layer as it acts now: per-head frequencies, gain and phase; None without rotary.

        With `live`, gradients pass through gain and phase to the spectral parameters.
        """
        own = attention_view(self.base).rotary(layer)
        return spectral_geometry(own, by_layer(self.spectral).get(layer), live=live)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the base by its own names, then the spectral ones."""
        before = f"{prefix}." if prefix else ""
        yield from self.base.named_parameters(prefix, recurse, remove_duplicate)
        yield from self.spectral.named_parameters(f"{before}spectral", recurse, remove_duplicate)

    def state_dict(self, *given: Any, **named: Any) -> Any:
        """That of the base by its own names, and the spectral parameters; by torch's rules inside another module."""
        if given or named.get("destination") is not None or named.get("prefix"):
            return super().state_dict(*given, **named)
        options = {"keep_vars": named.get("keep_vars", False)}
        return dict(self.base.state_dict(**options)) | self.spectral.state_dict(prefix=_PREFIX, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returned; the base's part goes to the base. Raises RuntimeError as torch does."""
        spectral = {name.removeprefix(_PREFIX): value for name, value in state_dict.items() if name.startswith(_PREFIX)}
        base = {name: value for name, value in state_dict.items() if not name.startswith(_PREFIX)}
        self.spectral.load_state_dict(spectral, strict=strict, assign=assign)
        return self.base.load_state_dict(base, strict=strict, **({"assign": True} if assign else {}))

    def to(self, *given: Any, **named: Any) -> "SpectralModel":
        """Move to a device or precision, the base and its modules included."""
        self.base.to(*given, **named)
        named.pop("print_details", None)
        self.spectral.to(*(value for value in given if not isinstance(value, bool)), **named)
        return self

    def cuda(self, device: Any = None) -> "SpectralModel":
        """Move to a GPU, as `to`."""
        return self.to("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)

    def cpu(self) -> "SpectralModel":
        """Move to the CPU, as `to`."""
        return self.to("cpu")

    def mps(self) -> "SpectralModel":
        """Move to Metal, as `to`."""
        return self.to("mps")

    def float(self) -> "SpectralModel":
        """Make the parameters float32, as `to`."""
        return self.to(torch.float32)

    def double(self) -> "SpectralModel":
        """Make the parameters float64, as `to`."""
        return self.to(torch.float64)

    def half(self) -> "SpectralModel":
        """Make the parameters float16, as `to`."""
        return self.to(torch.float16)

    def bfloat16(self) -> "SpectralModel":
        """Make the parameters bfloat16, as `to`."""
        return self.to(torch.bfloat16)

    def _spectral(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> AbstractContextManager[None]:
        return self._placement.active(self.base, cached_tokens(self.base.forward, given, named))


def to_spectral(
    model: Any,
    *,
    scope: Scope = "head",
    heads: Heads | None = None,
    frequencies: Frequencies = None,
    log_omega: bool = True,
    shared_phase: bool = False,
    phase_noise: float = 0.0,
    seed: int = 0,
) -> SpectralModel:
    """A new model with learnable frequency, amplitude and phase per rotary pair ("Bifocal Attention", section 3).

    BA's "surgical integration": the model's own inverse frequencies (rope scaling included) are the start, and the new
    model's logits are checked to be the old one's to the bit. The argument is left as it was. With `heads` and
    `frequencies` some pairs are spectral and the rest stay geometric: BA's two modalities in one model. Train it with
    `torch.optim.AdamW(tlspectral.spectral_rope.parameter_groups(spectral, lr=1e-3))`, where frequencies have a rate of
    their own.

    Args:
        model: a TransformerBridge or HookedTransformer with rotary positions, folded or not.
        scope: `"head"`, `"group"` (of query heads that share keys), `"layer"` or `"model"`: what shares parameters.
        heads: (layer, head) pairs or a DataFrame with these columns; None for all. Whole groups of heads that share
            keys.
        frequencies: indices of rotary pairs (0 is the model's first) or a boolean mask over them; None for all.
        log_omega: learn the logarithm of each frequency against its start, so that a step is relative; see
            `SpectralRoPE`. With `False` the frequency itself is learned and may reach 0 or change its sign, but at
            AdamW's default rate one step then undoes what slow pairs do in a long context.
        shared_phase, phase_noise: see `SpectralRoPE`.
        seed: of the phase noise.

    Raises:
        UnsupportedArchitecture, BadWeights: no rotary positions, or a layer cannot be read; the message names it.
        BadHead: a head that does not exist.
        ValueError: a model that is spectral already, or choices that do not fit the model.
        EditNotHonored: the model does not use queries or keys that are rotated at its hook points.
        ScoreMismatch: the logits at the start are not the model's own to the bit.

    What it does not establish: that the model gains by it. That takes a matched run of the model as it was.
    """
    view = attention_view(model)
    if getattr(model, "spectral_geometry", None) is not None:
        raise ValueError("the model is spectral already: make the new one from its .base")
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
    spectral = SpectralModel(model, layers)
    _prove(view, spectral, identical=not phase_noise)
    return spectral


def _refuse_cache(how: str, cache: bool) -> None:
    if cache:
        raise EditNotHonored(
            f"{how} with a key/value cache would give cached tokens the positions of new ones in the spectral "
            "rotation; pass use_past_kv_cache=False"
        )


def probe_tokens(view: AttentionView) -> Int64[Tensor, "1 pos"]:
    """A short prompt from the middle of the vocabulary: TransformerLens masks leading pad tokens, whose ids are low."""
    return (view.d_vocab // 2 + torch.arange(_PROBE_LENGTH))[None] % view.d_vocab


def _prove(view: AttentionView, spectral: SpectralModel, *, identical: bool) -> None:
    """Run both models once: their logits must be equal, and must depend on every rotated query and key."""
    tokens = probe_tokens(view)
    rotated: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, module: Any, given: tuple[Any, ...], output: Float[Tensor, "batch pos heads d_head"]) -> None:
        rotated[layer, given[2]] = output

    modules = by_layer(spectral.spectral)
    handles = [module.register_forward_hook(partial(keep, layer)) for layer, module in modules.items()]
    try:
        with without_hooks(view.model), torch.enable_grad():
            logits = attention_view(spectral).logits(tokens)
            with torch.no_grad():
                base_logits = view.logits(tokens)
    finally:
        for handle in handles:
            handle.remove()
    missing = [(layer, side) for layer in modules for side in ("query", "key") if (layer, side) not in rotated]
    if not missing:
        used = torch.autograd.grad(logits.sum(), list(rotated.values()), allow_unused=True)
        missing = [site for site, gradient in zip(rotated, used, strict=True) if gradient is None]
    if missing:
        layer, side = missing[0]
        raise EditNotHonored(
            f"layer {layer}: the model does not use a {side} that is rotated at its hook point, so it cannot be made "
            "spectral on this backend"
        )
    if identical and not torch.equal(logits, base_logits):
        worst = float((logits.detach() - base_logits).abs().max())
        raise ScoreMismatch(
            f"the spectral model's logits at the start differ from the model's own by {worst:.1e}, so it is not "
            "returned; is the model deterministic?"
        )
