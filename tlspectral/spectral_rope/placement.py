"""Hooks that rotate queries and keys of a running model, after every other hook at the same point.

Rotations commute, so the residual acts where queries and keys are made (`hook_q`, `hook_k`), before the model's own
rotation. After a query/key norm, which does not commute with a gain per column, it acts after the model's own rotation
(`hook_rot_q`, `hook_rot_k`). Hooks of others at the same point see what they see without it, whenever they were added.

The hooks are on the model while one thread runs it; passes of the base in other threads are left as they are.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, get_args

import torch
from torch import Tensor

from tlspectral.errors import EditNotHonored
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.threads import exclusive, model_name
from tlspectral.spectral_rope.module import Side, SpectralRoPE


@dataclass(frozen=True)
class Site:
    """One hook point that a layer's residual rotation acts on."""

    layer: int
    side: Side
    name: str
    point: Any
    rotary: SpectralRoPE


@dataclass(frozen=True)
class Pass:
    """A forward pass in progress.

    Attributes:
        cached: tokens that a key/value cache holds already.
        gradients: gradients were on when it began.
        new: new tokens by layer.
    """

    cached: int
    thread: int = field(default_factory=get_ident)
    gradients: bool = field(default_factory=torch.is_grad_enabled)
    new: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """Residual rotations of a model's layers, put on their hook points for as long as the model runs.

    Attributes:
        sites: where they act.
        checkpointed: modules that can compute their forward pass again in the backward pass (gradient checkpointing).
        passes: those in progress, innermost last.
    """

    sites: Sequence[Site]
    checkpointed: Sequence[Any]
    passes: list[Pass] = field(default_factory=list)

    @contextmanager
    def active(self, model: Any, cached: int) -> Iterator[None]:
        """Rotate queries and keys of this thread's passes inside; an inner use does not rotate twice."""
        if torch.is_grad_enabled() and any(m.training and m.gradient_checkpointing for m in self.checkpointed):
            raise EditNotHonored(
                f"{model_name(model)}: gradient checkpointing is on, and computes blocks again in the backward pass "
                "without their spectral rotations, so that gradients would be wrong; switch it off "
                "(gradient_checkpointing_disable() on the wrapped model, .original_model), or run in evaluation mode "
                "or without gradients"
            )
        with exclusive(model):
            self.passes.append(Pass(cached))
            try:
                with ExitStack() as stack:
                    if len(self.passes) == 1:
                        for site in self.sites:
                            stack.enter_context(self._placed(site))
                    yield
            finally:
                self.passes.pop()

    @contextmanager
    def _placed(self, site: Site) -> Iterator[None]:
        point = site.point
        point.add_hook(lambda x, hook: self._rotated(site, x), is_permanent=True)  # reset_hooks keeps permanent hooks
        handle = point.fwd_hooks[-1]
        thread = get_ident()

        def go_last(module: Any, inputs: Any) -> None:
            if get_ident() != thread:
                return
            if handle.hook.id not in module._forward_hooks:
                raise EditNotHonored(
                    f"{site.name}: the spectral rotation was taken off this hook point while the model ran; do not "
                    "remove permanent hooks inside a hook"
                )
            module._forward_hooks.move_to_end(handle.hook.id)

        first = point.register_forward_pre_hook(go_last)
        try:
            yield
        finally:
            first.remove()
            handle.hook.remove()
            point.fwd_hooks = [other for other in point.fwd_hooks if other is not handle]

    def _rotated(self, site: Site, x: Tensor) -> Tensor | None:
        run, length = next(iter(self.passes[-1:]), None), x.shape[1]
        if run is None or run.thread != get_ident():
            return None
        if run.gradients and not torch.is_grad_enabled():
            raise EditNotHonored(
                f"{site.name}: gradients are on for this pass but off in this block, as torch.utils.checkpoint has it "
                "with use_reentrant=True: the block would be computed again in the backward pass without its spectral "
                "rotations, so that gradients would be wrong; run the block without it"
            )
        start = run.cached
        if site.side == "query":
            run.new[site.layer] = length
        elif start and length != run.new[site.layer]:
            if length != start + run.new[site.layer]:  # some models pass on all keys, the cached ones first
                raise EditNotHonored(
                    f"{site.name}: {length} keys for {run.new[site.layer]} new tokens after {start} cached ones: their "
                    "positions are unknown; run without a key/value cache"
                )
            start = 0
        return site.rotary(x, torch.arange(start, start + length, device=x.device), site.side)


def checkpointed_modules(model: Any) -> list[Any]:
    """Modules of a wrapped Hugging Face model that have gradient checkpointing, switched on or not."""
    # A bridge's modules pass on attributes of the modules that they wrap, and only the latter checkpoint.
    wrapped = getattr(model, "original_model", model)
    return [
        module
        for module in wrapped.modules()
        if "gradient_checkpointing" in vars(module) or hasattr(type(module), "gradient_checkpointing")
    ]


def sites_of(view: AttentionView, layers: Mapping[int, SpectralRoPE]) -> list[Site]:
    """The hook points of every spectral layer."""
    points = view.model.hook_dict
    sites = []
    for index, rotary in layers.items():
        raw = view.raw(index)
        normed = raw.q_norm is not None or raw.k_norm is not None
        for side in get_args(Side):
            name = f"blocks.{index}.attn.hook_{'rot_' if normed else ''}{side[0]}"
            sites.append(Site(index, side, name, points[name], rotary))
    return sites


def cached_tokens(forward: Any, given: Iterable[Any], named: Mapping[str, Any]) -> int:
    """How many tokens the key/value cache among the arguments of a forward pass holds; 0 without one."""
    arguments = dict(zip(inspect.signature(forward).parameters, given, strict=False)) | dict(named)
    if arguments.get("position_ids") is not None:
        raise EditNotHonored(
            "position_ids were given, but the spectral rotation counts positions from the start of the sequence; "
            "leave them out"
        )
    cache = arguments.get("past_kv_cache")
    if cache is not None:
        return int(cache[0].past_keys.shape[1])
    cache = arguments.get("past_key_values")
    if cache is None:
        return 0
    if not hasattr(cache, "get_seq_length"):
        raise EditNotHonored(
            f"past_key_values is a {type(cache).__name__}, whose length is unknown; pass a transformers Cache"
        )
    return int(cache.get_seq_length())
