"""Learnable rotary positions in a Hugging Face model: a copy of it, of its own class, with them in its attention.

An attention module of transformers calls a function of its file, `apply_rotary_pos_emb(q, k, cos, sin)`, after its
query/key norm. In the copy it calls one that rotates further. What that needs travels in the place of `cos`, so that
nothing is kept between calls.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from types import FunctionType
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from tlspectral.errors import IncompatibleCheckpoint, UnsupportedArchitecture, warn_caller
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.loading.copies import copy_of_object
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.key_value_cache import HeldLayers, beyond_rounding
from tlspectral.models.running.partial_runs import methods_replaced
from tlspectral.spectral_rope.module import SpectralRoPE
from tlspectral.spectral_rope.saving import save_with_base
from tlspectral.spectral_rope.swapped import Swapped, is_swapped, swap, swap_back
from tlspectral.spectral_rope.weights_identity import (
    IDENTITY,
    from_tensor,
    logits_of,
    require_identity,
)

_ROTATION = "apply_rotary_pos_emb"
_ASKING = "tlspectral_embedding_hook"  # attribute with the handle of the hook that checkpointing needs


class _Table(NamedTuple):
    """What stands in for `cos`: the model's own, its rotation, positions of the tokens, the module that rotates on."""

    cos: Tensor
    own: Callable[..., Any]
    positions: Tensor
    rotary: SpectralRoPE


class RotatedAttention(Swapped):
    """An attention module of transformers whose queries and keys are rotated further; `spectral` is part of it."""

    spectral: SpectralRoPE
    rotated_forward: Callable[..., Any]
    own_rotation: Callable[..., Any]

    @classmethod
    def more(cls, own: type) -> dict[str, Any]:
        """Return the forward pass of a class of attention, with another rotation."""
        forward = inspect.unwrap(own.forward)
        if _ROTATION not in forward.__code__.co_names:
            raise UnsupportedArchitecture(f"{own.__name__} calls no {_ROTATION}, where learned rotations are put in")
        known = {**forward.__globals__, _ROTATION: _rotated}
        rotated = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
        rotated.__kwdefaults__ = forward.__kwdefaults__
        return {"rotated_forward": rotated, "own_rotation": staticmethod(forward.__globals__[_ROTATION])}

    def forward(self, *given: Any, **named: Any) -> Any:
        """Run as the attention module's own method does, with learned rotations."""
        tables, positions = named.get("position_embeddings"), named.get("position_ids")
        if tables is None or positions is None:
            raise UnsupportedArchitecture(
                f"{self.own.__name__} is not given position_ids and position_embeddings by its layer, so a learned "
                "frequency does not know where its tokens stand"
            )
        cos, sin = tables
        named["position_embeddings"] = (_Table(cos, self.own_rotation, positions, self.spectral), sin)
        return self.rotated_forward(*given, **named)


class SpectralPreTrained(Swapped):
    """A Hugging Face model with learned rotations in its attention modules."""

    base: Any
    get_input_embeddings: Callable[[], nn.Module]
    named_parameters: Callable[[], Iterator[tuple[str, nn.Parameter]]]
    modules: Callable[[], Iterator[Any]]

    @property
    def spectral(self) -> nn.ModuleDict:
        """One `SpectralRoPE` by layer."""
        return nn.ModuleDict(
            {str(module.layer_idx): module.spectral for module in self.modules() if _is_rotated(module)}
        )

    def spectral_parameters(self) -> Iterator[nn.Parameter]:
        """Return the learnable frequencies, phases and gains alone."""
        return self.spectral.parameters()

    def save_pretrained(self, save_directory: str | os.PathLike[str], **named: Any) -> None:
        """Write the spectral parameters and the name of the base, or its weights, as `save_with_base` has it.

        Other arguments have no effect. Raises FileExistsError for a folder that holds another model, OSError for a full
        disk.
        """
        save_with_base(self, save_directory, lambda: plain_object(self), trains_weights=self._trains_weights())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load as the model's own does; the tensors of a file of `save_pretrained` go to the spectral parameters.

        Raises RuntimeError for such a file that was saved of other weights. A Trainer loads spectral parameters and
        weights one after the other, by `strict=False`: weights that were saved beside them are then not compared.
        """
        if IDENTITY not in state_dict:
            return self.own.load_state_dict(self, state_dict, strict=strict, assign=assign)
        layers = dict(state_dict)
        identity = from_tensor(layers.pop(IDENTITY))
        weights_come = identity.get("stored", False) and not strict
        try:
            loaded = self.spectral.load_state_dict(layers, strict=strict, assign=assign)
            if not weights_come:
                require_identity(identity, self, "this state dict")
        except IncompatibleCheckpoint as error:
            advice = "; its weights are in the folder `base` beside it" if identity.get("stored") else ""
            raise RuntimeError(f"{error}{advice}") from error
        return loaded

    def _trains_weights(self) -> bool:
        return any(".spectral." not in name and value.requires_grad for name, value in self.named_parameters())

    def gradient_checkpointing_enable(self, *given: Any, **named: Any) -> None:
        """Do as the model's own. Embeddings ask for a gradient, as reentrant checkpointing of frozen weights needs."""
        # transformers puts a hook there each time, and leaves it when checkpointing is switched off.
        with warnings.catch_warnings(), methods_replaced(self, {"enable_input_require_grads": lambda: None}):
            warnings.simplefilter("ignore", FutureWarning)  # transformers calls this one through the name that is new
            self.own.gradient_checkpointing_enable(self, *given, **named)
        if _ASKING not in vars(self):
            vars(self)[_ASKING] = self.get_input_embeddings().register_forward_hook(_ask_for_gradient)

    def gradient_checkpointing_disable(self) -> None:
        """Do as the model's own. Embeddings no longer ask for a gradient, unless the caller made them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.own.gradient_checkpointing_disable(self)
        if _ASKING in vars(self):
            vars(self).pop(_ASKING).remove()


def rotated_object(model: Any, view: AttentionView, layers: Mapping[int, SpectralRoPE], *, shared: bool) -> Any:
    """Return a copy of a Hugging Face model with a spectral module in each attention module of `layers`.

    `view` is the view of a bridge made of it. Raises UnsupportedArchitecture for attention that rotates in another way.
    """
    copied = copy_of_object(model, str(model.config._name_or_path or type(model).__name__), shared=shared)
    for parameter in copied.parameters():
        parameter.requires_grad_(not shared and parameter.requires_grad)
    paths = {id(module): path for path, module in view.model.original_model.named_modules()}
    for index, rotary in layers.items():
        path = paths[id(view.blocks[index].module.attn)].replace("_original_component.", "")
        attention = copied.get_submodule(path)
        if not hasattr(attention, "layer_idx"):
            attention.layer_idx = index
        swap(attention, RotatedAttention)
        attention.spectral = rotary
    swap(copied, SpectralPreTrained)
    copied.__dict__["base"] = model
    return copied


def avoid_lost_cache_of_object(model: Any, tokens: Int64[Tensor, "1 pos"]) -> None:
    """Let a spectral model of transformers generate without its cache, with a warning, if a cached step is wrong.

    It is compared with the uncached pass of the same tokens.
    """
    held = HeldLayers([layer for layer in model.modules() if any(map(_is_rotated, layer.children()))])
    with evaluating(model), torch.no_grad():
        with held.noted():
            logits_of(model, tokens)
        with held.compared():
            held.end = tokens.shape[1] - 1
            read = model(input_ids=tokens[:, :-1].to(model.device), use_cache=True)
            held.end += 1
            named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
            model(input_ids=tokens[:, -1:].to(model.device), use_cache=True, **{named: read[named]})
    difference = held.difference
    if beyond_rounding(model, difference):
        model.config.use_cache = model.generation_config.use_cache = False
        warn_caller(
            f"{type(model).__name__}: the spectral model loses the key/value cache under transformers "
            f"{version('transformers')} (what its layers write behind cached tokens differs from an uncached pass by "
            f"{difference:.1e} of its size), so its config says use_cache=False and it generates without one; "
            "try another version of transformers"
        )


def plain_object(model: Any) -> Any:
    """Return a copy of a spectral Hugging Face model without its rotations, with weights of its own."""
    copied = copy_of_object(model, type(model).__name__, shared=False)
    for module in copied.modules():
        if _is_rotated(module):
            del module.spectral
    copied.__dict__.pop("base")
    copied.__dict__.pop(_ASKING, None)
    swap_back(copied)
    return copied


def is_spectral_object(model: Any) -> bool:
    """Return whether this is a Hugging Face model of `to_spectral`."""
    return is_swapped(model, SpectralPreTrained)


def _ask_for_gradient(module: Any, given: tuple[Any, ...], output: Tensor) -> None:
    output.requires_grad_(True)


def _is_rotated(module: Any) -> bool:
    return is_swapped(module, RotatedAttention)


def _rotated(q: Tensor, k: Any, cos: Any, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    if isinstance(cos, Tensor):
        raise UnsupportedArchitecture(
            "the attention rotates queries and keys one by one (Gemma 3n and 4), and learned rotations take the place "
            "of a function of both: take another model"
        )
    q, k = cos.own(q, k, cos.cos, *given, **named)
    if named.get("unsqueeze_dim", 1) == 2:  # [batch, pos, heads, d_head]
        return cos.rotary(q, cos.positions, "query"), cos.rotary(k, cos.positions, "key")
    q = cos.rotary(q.transpose(1, 2), cos.positions, "query").transpose(1, 2)
    return q, cos.rotary(k.transpose(1, 2), cos.positions, "key").transpose(1, 2)
