"""Copy a model's modules without its hooks; parameters of the copy share storage with the original's."""

import copy
import re
from collections import OrderedDict
from types import CellType, FunctionType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn

from tlspectral.errors import warn_caller
from tlspectral.models.hooking.placing import without_hooks
from tlspectral.models.reading.packed import is_packed_tensor, keep_packing

_HOOKS = re.compile(r"_(forward|backward)_(pre_)?hooks(_with_kwargs|_always_called)?")
_CAPTURING = "transformers.utils.output_capturing"  # whose hooks record attention patterns and hidden states
_SHOWN = 3
_givers: WeakKeyDictionary[Any, ReferenceType[Any]] = WeakKeyDictionary()


def note_given(model: Any, given: Any) -> None:
    """Remember that `model` was made from the object `given` of transformers, without keeping `given` alive."""
    _givers[model] = ref(given)


def given_for(model: Any) -> Any:
    """Return the object of transformers from which `load_model` made `model`; None if it no longer exists or never did.

    The model is made from a copy of that object, so hooks on the object do not act in the model.
    """
    return _givers[model]() if model in _givers else None


def copy_of_object(given: Any, name: str, *, dtype: torch.dtype | None = None, shared: bool = True) -> Any:
    """Return a copy of the Hugging Face model `given`, with its own modules, buffers and config, without hooks; `given`
    stays as it is.

    Parameters of the copy are new objects on the storage of the original's, unless `dtype` is another type or `shared`
    is False: then they have their own storage. name: the model's name in a warning, which lists the modules whose hooks
    are left out.
    """
    memo: dict[int, Any] = other_parameters(given, dtype) if shared else {}
    hooked = []
    for module_name, module in given.named_modules():
        for hooks in [value for kind, value in vars(module).items() if _HOOKS.fullmatch(kind)]:
            memo[id(hooks)] = OrderedDict()
            if module_name not in hooked and any(
                getattr(hook, "__module__", "") != _CAPTURING for hook in hooks.values()
            ):
                hooked.append(module_name)
    if hooked:
        names = ", ".join(module_name or "the model" for module_name in hooked[:_SHOWN])
        more = f" and {len(hooked) - _SHOWN} others" if len(hooked) > _SHOWN else ""
        warn_caller(
            f"{name} has hooks of PyTorch on {names}{more}; they stay there, and do not act in the loaded model: put "
            "them on the loaded model"
        )
    copied = deep_copy(given, memo)
    for module in copied.modules():
        # transformers marks here that its own hooks are in place; the copy has none.
        vars(module).pop("_output_capturing_hooks_installed", None)
    return copied


def copy_without_hooks(model: Any, *, shared: bool) -> Any:
    """Return a copy of a TransformerLens model without its hooks.

    `shared`: True puts the given model's own weights, frozen, into the copy; False copies the weights.
    """
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


def deep_copy(module: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a module in which replaced `forward` functions run the weights of the copy.

    copy.deepcopy does not copy functions: a `forward` that refers to a submodule, as TransformerLens sets on Falcon's
    linear layers, would run the weights of the original. Activations kept from the last pass cannot be copied and
    become None.

    memo: dict from id of an object to the copy to use for it, as copy.deepcopy takes it; it is extended.
    """
    for owner in (*module.modules(), *getattr(module, "original_model", module).modules()):
        kept = (value for value in vars(owner).values() if isinstance(value, torch.Tensor) and not value.is_leaf)
        memo |= {id(value): None for value in kept}
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        keep_packing(part)
        forward = vars(part).get("forward")
        if not isinstance(forward, FunctionType) or forward.__closure__ is None:
            continue
        held = [cell.cell_contents for cell in forward.__closure__]
        cells = tuple(CellType(memo.get(id(value), value) if isinstance(value, nn.Module) else value) for value in held)
        rebuilt = FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, cells)
        rebuilt.__kwdefaults__ = forward.__kwdefaults__
        vars(part)["forward"] = rebuilt
    return copied


def other_parameters(module: nn.Module, dtype: torch.dtype | None = None) -> dict[int, nn.Parameter]:
    """Return a dict from id of each parameter of a module to a new parameter on the same storage.

    copy.deepcopy takes it as `memo`. With another `dtype` the new parameters have converted values in their own
    storage. Quantised weights are left out, so deepcopy copies them with their scales.
    """
    return {
        id(parameter): nn.Parameter(
            parameter.detach() if dtype is None else parameter.detach().to(dtype), requires_grad=parameter.requires_grad
        )
        for owner in module.modules()
        for parameter in owner._parameters.values()
        if parameter is not None and not is_packed_tensor(parameter)
    }
