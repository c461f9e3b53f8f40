"""Copies of a model's modules that share the storage of its parameters, without its hooks."""

import copy
import re
from collections import OrderedDict
from types import CellType, FunctionType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn

from tlspectral.errors import warn_caller

_HOOKS = re.compile(r"_(forward|backward)_(pre_)?hooks(_with_kwargs|_always_called)?")
_CAPTURING = "transformers.utils.output_capturing"  # whose hooks record attention patterns and hidden states
_SHOWN = 3
_givers: WeakKeyDictionary[Any, ReferenceType[Any]] = WeakKeyDictionary()


def note_given(model: Any, given: Any) -> None:
    """Remember of which object of transformers a model was made."""
    _givers[model] = ref(given)


def given_for(model: Any) -> Any:
    """Return the object of transformers of a copy of which `load_model` made a model; None where there is none (now).

    What is put on that object does not act in the model.
    """
    return _givers[model]() if model in _givers else None


def copy_of_object(given: Any, name: str, *, dtype: torch.dtype | None = None, shared: bool = True) -> Any:
    """Return a copy of a Hugging Face model with modules, buffers and config of its own, without hooks.

    Its parameters are other objects on the same storage, unless `dtype` is another one or `shared` is False. A warning
    names the modules whose hooks are left out.
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
            f"{name} has hooks of PyTorch on {names}{more}; they stay there, and do not act in the model that is made "
            "of it"
        )
    copied = deep_copy(given, memo)
    for module in copied.modules():
        # The mark of transformers that its own hooks, which are left out, are in place.
        vars(module).pop("_output_capturing_hooks_installed", None)
    return copied


def deep_copy(module: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a module in which a forward pass that was set on a submodule runs the copy's own weights.

    copy.deepcopy leaves functions as they are, so one that holds a submodule, as those that TransformerLens sets on
    Falcon's linear layers, would go on to run the weights of the original. Activations of the last pass that modules
    keep cannot be copied, and are None in the copy.
    """
    for owner in (*module.modules(), *getattr(module, "original_model", module).modules()):
        kept = (value for value in vars(owner).values() if isinstance(value, torch.Tensor) and not value.is_leaf)
        memo |= {id(value): None for value in kept}
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        forward = vars(part).get("forward")
        if not isinstance(forward, FunctionType) or forward.__closure__ is None:
            continue
        held = [cell.cell_contents for cell in forward.__closure__]
        cells = tuple(CellType(memo.get(id(value), value) if isinstance(value, nn.Module) else value) for value in held)
        other = FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, cells)
        other.__kwdefaults__ = forward.__kwdefaults__
        vars(part)["forward"] = other
    return copied


def other_parameters(module: nn.Module, dtype: torch.dtype | None = None) -> dict[int, nn.Parameter]:
    """Return, for the memo of a deep copy, other parameters on the same storage, or with values of another type."""
    return {
        id(parameter): nn.Parameter(
            parameter.detach() if dtype is None else parameter.detach().to(dtype), requires_grad=parameter.requires_grad
        )
        for owner in module.modules()
        for parameter in owner._parameters.values()
        if parameter is not None
    }
