"""Learnable rotary positions in a Hugging Face model: a copy of the same class whose attention rotates further.

An attention module of transformers calls `apply_rotary_pos_emb(q, k, cos, sin)`, a function of its file, after its
query/key norm. In the copy it calls `_rotated`, which applies the learned rotation as well. The learned module and the
positions travel in the place of `cos`, so nothing is kept between calls.
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
from tlspectral.models.hooking.methods import methods_replaced
from tlspectral.models.loading.copies import copy_of_object
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.key_value_cache import HeldLayers, beyond_rounding
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
_EMBEDDING_HOOK = "tlspectral_embedding_hook"  # attribute with the handle of the hook that checkpointing needs


class _Table(NamedTuple):
    """Stand-in for the argument `cos` of a rotation function. It carries the data of the learned rotation.

    Attributes:
        cos: the model's cos table.
        own: the model's rotation function.
        positions: of the tokens [batch, pos].
        rotary: the module with the layer's learned rotation.
    """

    cos: Tensor
    own: Callable[..., Any]
    positions: Tensor
    rotary: SpectralRoPE


class RotatedAttention(Swapped):
    """Attention module of a Hugging Face model that also applies the learned rotation `spectral`.

    `swap` gives its methods to the model's own attention module.

    Attributes:
        spectral: the module with the learned rotation.
        rotated_forward: the module's forward pass, with the learned rotation behind its own.
        own_rotation: the model's function that rotates queries and keys.
    """

    spectral: SpectralRoPE
    rotated_forward: Callable[..., Any]
    own_rotation: Callable[..., Any]

    @classmethod
    def more(cls, own: type) -> dict[str, Any]:
        """Return a dict of attributes for a subclass of the attention class `own`.

        `rotated_forward` is its forward pass with `_rotated` as rotation, `own_rotation` its original rotation. Raises
        UnsupportedArchitecture if the class does not call `apply_rotary_pos_emb`.
        """
        forward = inspect.unwrap(own.forward)
        if _ROTATION not in forward.__code__.co_names:
            raise UnsupportedArchitecture(
                f"{own.__name__} does not call {_ROTATION}, the function that learned rotations replace: take another "
                "model"
            )
        known = {**forward.__globals__, _ROTATION: _rotated}
        rotated = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
        rotated.__kwdefaults__ = forward.__kwdefaults__
        return {"rotated_forward": rotated, "own_rotation": staticmethod(forward.__globals__[_ROTATION])}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the attention module's forward pass with learned rotations and return its outputs.

        Raises UnsupportedArchitecture if its layer does not pass token positions.
        """
        tables, positions = kwargs.get("position_embeddings"), kwargs.get("position_ids")
        if tables is None or positions is None:
            raise UnsupportedArchitecture(
                f"{self.own.__name__} is not given position_ids and position_embeddings by its layer, so learned "
                "frequencies have no token positions: take another model"
            )
        cos, sin = tables
        kwargs["position_embeddings"] = (_Table(cos, self.own_rotation, positions, self.spectral), sin)
        return self.rotated_forward(*args, **kwargs)


class SpectralPreTrained(Swapped):
    """Methods of a Hugging Face model that `to_spectral` has made; its attention modules hold the learned rotations.
    `base`: the model from which it was made.
    """

    base: Any
    get_input_embeddings: Callable[[], nn.Module]
    named_parameters: Callable[[], Iterator[tuple[str, nn.Parameter]]]
    modules: Callable[[], Iterator[Any]]

    @property
    def spectral(self) -> nn.ModuleDict:
        """The `SpectralRoPE` modules, as a ModuleDict from the layer's number (as text)."""
        return nn.ModuleDict(
            {str(module.layer_idx): module.spectral for module in self.modules() if _is_rotated(module)}
        )

    def spectral_parameters(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the learnable frequencies, phases and gains of all layers, without the model's
        weights.
        """
        return self.spectral.parameters()

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write the spectral parameters to the folder `save_directory`, which `tls.load_model(folder)` reads.

        The folder also gets the name of the model they belong to or, if its weights have changed, these weights. Other
        arguments are ignored. Raises FileExistsError if the folder holds another model, OSError if the disk is full.
        """
        trains = any(".spectral." not in name and value.requires_grad for name, value in self.named_parameters())
        save_with_base(self, save_directory, lambda: plain_object(self), trains_weights=trains)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into this model, in place, a state dict of the whole model, or the spectral parameters that
        `save_pretrained` wrote.

        Returns torch's report of missing and unexpected keys. Raises RuntimeError if the spectral parameters were saved
        for other weights. This check is skipped if weights were stored beside the parameters and `strict=False`,
        because a Trainer then loads parameters and weights one after the other. `assign`: True takes the given tensors
        instead of copying their values.
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

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Enable gradient checkpointing on this model in place, with the arguments of its own method, and make the
        embedding output require a gradient.

        Reentrant checkpointing of frozen weights needs this gradient.
        """
        # transformers would add a hook to the embeddings at each call, and keep it when checkpointing is disabled.
        with warnings.catch_warnings(), methods_replaced(self, {"enable_input_require_grads": lambda: None}):
            warnings.simplefilter("ignore", FutureWarning)  # transformers calls this method by a deprecated name
            self.own.gradient_checkpointing_enable(self, *args, **kwargs)
        if _EMBEDDING_HOOK not in vars(self):
            vars(self)[_EMBEDDING_HOOK] = self.get_input_embeddings().register_forward_hook(_ask_for_gradient)

    def gradient_checkpointing_disable(self) -> None:
        """Disable gradient checkpointing; the embedding output no longer requires a gradient, unless a caller asked."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.own.gradient_checkpointing_disable(self)
        if _EMBEDDING_HOOK in vars(self):
            vars(self).pop(_EMBEDDING_HOOK).remove()


def rotated_object(model: Any, view: AttentionView, layers: Mapping[int, SpectralRoPE], *, shared: bool) -> Any:
    """Return a copy of a Hugging Face model whose attention modules apply the learned rotations in `layers`.

    `view`: view of a bridge made from the model. `layers`: `SpectralRoPE` modules by layer; the copy uses these
    objects. `shared`: True if the copy uses the model's own weight tensors, which are frozen; False copies them. The
    given model keeps its modules; it is stored as `base` of the copy. Raises UnsupportedArchitecture if the attention
    does not call `apply_rotary_pos_emb`.
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
    """Switch a spectral model's key/value cache off, with a warning, if a step with cache differs from a pass without.

    In this case the model is changed in place: `use_cache` is set to False in its config and generation config.
    `tokens`: ids of the prompt on which both are run.
    """
    held = HeldLayers([layer for layer in model.modules() if any(map(_is_rotated, layer.children()))])
    with evaluating(model), torch.no_grad():
        with held.noted():
            logits_of(model, tokens)
        with held.compared():
            held.end = tokens.shape[1] - 1
            read = model(input_ids=tokens[:, :-1].to(model.device), use_cache=True)
            held.end += 1
            cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
            model(input_ids=tokens[:, -1:].to(model.device), use_cache=True, **{cache_name: read[cache_name]})
    difference = held.difference
    if beyond_rounding(model, difference):
        model.config.use_cache = model.generation_config.use_cache = False
        warn_caller(
            f"{type(model).__name__}: the spectral model loses the key/value cache under transformers "
            f"{version('transformers')}: after cached tokens its layers' outputs differ from an uncached pass by "
            f"{difference:.1e} of their size. Its config now has use_cache=False, so it generates without a cache; "
            "to use one, try another version of transformers"
        )


def plain_object(model: Any) -> Any:
    """Return a copy of a spectral Hugging Face model without the learned rotations; the copy has its own weights."""
    copied = copy_of_object(model, type(model).__name__, shared=False)
    for module in copied.modules():
        if _is_rotated(module):
            del module.spectral
    copied.__dict__.pop("base")
    copied.__dict__.pop(_EMBEDDING_HOOK, None)
    swap_back(copied)
    return copied


def is_spectral_object(model: Any) -> bool:
    """Return whether `model` is a Hugging Face model made by `to_spectral`."""
    return is_swapped(model, SpectralPreTrained)


def _ask_for_gradient(module: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Make the output of the embeddings require a gradient; it is a forward hook and changes `output` in place.
    `module` and `inputs` are not used.
    """
    output.requires_grad_(True)


def _is_rotated(module: Any) -> bool:
    """Return whether `module` is an attention module that `swap` has given a learned rotation."""
    return is_swapped(module, RotatedAttention)


def _rotated(q: Tensor, k: Any, cos: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return (queries, keys), rotated as the model does, then by the learned rotation.

    It stands in for the function `apply_rotary_pos_emb` of a model. `q`, `k`: queries and keys. `cos`: a `_Table` with
    the model's cos table and the learned rotation. `args`, `kwargs`: the model's further arguments, such as its sin
    table. Raises UnsupportedArchitecture if `cos` is a tensor, because the attention then rotates queries and keys in
    two calls.
    """
    if isinstance(cos, Tensor):
        raise UnsupportedArchitecture(
            "the attention rotates queries and keys in two calls (Gemma 3n and 4, GPT-J), and learned rotations "
            "replace one call for both: take another model"
        )
    q, k = cos.own(q, k, cos.cos, *args, **kwargs)
    if kwargs.get("unsqueeze_dim", 1) == 2:  # [batch, pos, heads, d_head]
        return cos.rotary(q, cos.positions, "query"), cos.rotary(k, cos.positions, "key")
    q = cos.rotary(q.transpose(1, 2), cos.positions, "query").transpose(1, 2)
    return q, cos.rotary(k.transpose(1, 2), cos.positions, "key").transpose(1, 2)
