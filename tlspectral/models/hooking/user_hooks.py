"""Find, name and temporarily remove everything that a user has put on a model or into torch that acts in its passes.

Libraries place hooks and replace methods too. They are recognised by the module in which a function is defined.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tlspectral.errors import warn_caller
from tlspectral.models.hooking.exclusive import exclusive, model_name, modules_of
from tlspectral.models.hooking.interrupts import undoing, uninterrupted

_NAMED = 6  # places in a warning
_OF_LOADING = ("tlspectral.spectral_rope.", "tlspectral.models.running.cache_name.")  # hooks of models made here
_LIBRARIES = ("transformer_lens.", "transformers.", "accelerate.", "torch.", *_OF_LOADING)
_CHECKING = ("jaxtyping.", "beartype.", "typeguard.")
# These libraries replace methods by others that compute the same. In torch only these three modules do so. Any other
# function of torch in the place of a method was put there by the user.
_REPLACING = (
    "transformer_lens.", "transformers.", "accelerate.", "tlspectral.", "peft.", "kernels.", "liger_kernel.",
    "torch._dynamo.", "torch.distributed.", "torch.utils._contextlib.", *_CHECKING,
)  # fmt: skip
_READ = ("transformer_lens", "transformers", "torch")  # methods of their classes are checked for replacements
_UTILITIES = "torch.nn.utils."  # weight_norm, spectral_norm and prune change a weight in front of each pass
_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
_GLOBAL = {
    "forward pre-hook": "_global_forward_pre_hooks",
    "forward hook": "_global_forward_hooks",
    "backward pre-hook": "_global_backward_pre_hooks",
    "backward hook": "_global_backward_hooks",
}
_RUN = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "_compiled_call_impl", "_slow_forward")
_OF_MODULES = frozenset(dir(nn.Module))
_WRAPPING = ("builtins", "functools")  # modules of objects that only hold a function
_FUNCTIONS = frozenset((FunctionType, MethodType, BuiltinFunctionType, partial))


class Acting(NamedTuple):
    """A change by the user that acts in the passes of a model.

    Attributes:
        name: the hook point or module; "blocks.0.mlp.forward" for a replaced method; for changes elsewhere, a
            description.
        of_context: True if a `with` block placed it.
        holder, key: dictionary and key where it is stored; None if it cannot be removed.
    """

    name: str
    of_context: bool
    holder: MutableMapping[Any, Any] | None = None
    key: Any = None


def user_hooks(model: Any) -> dict[str, int]:
    """Return a dict from hook point or module of `model` to the number of the user's changes there, without changes by
    libraries.

    Counted are hooks of TransformerLens and of PyTorch (forward and backward); hooks of all modules
    (`register_module_forward_hook`); replaced methods and modules; parametrized weights; open modes of torch. Hooks of
    an open ablation count.
    """
    counts: dict[str, int] = {}
    for acting in acting_on(model):
        counts[acting.name] = counts.get(acting.name, 0) + 1
    return counts


def warn_of_hooks(model: Any) -> None:
    """Warn (UserWarning) if hooks of the user that no `with` block placed (a forgotten `add_hook`) are on `model` and
    would act in a measurement.

    The warning names up to six places and says how to take the hooks off. The hooks stay.
    """
    by_name: dict[str, list[bool]] = {}
    for acting in acting_on(model):
        by_name.setdefault(acting.name, []).append(acting.of_context)
    left = [name for name, of_contexts in by_name.items() if not all(of_contexts)]
    if left:
        warn_caller(
            f"{model_name(model)}: hooks of yours are on the model, at {listed(left)}, and change the measurement. To "
            "take them off: model.reset_hooks(including_permanent=True); for hooks of PyTorch handle.remove(); for a "
            "replaced forward set the old one back. To keep them without this warning: `with model.hooks(...)`"
        )


def not_without_hooks(model: Any, otherwise: str) -> str:
    """Return advice for an error where a run does not match the weights: take the user's hooks off; it names them.

    otherwise: the advice that is returned if the user has no hooks on the model.
    """
    names = [*user_hooks(model)]
    return (
        f"hooks are on the model, at {', '.join(names[:_NAMED])}: take them off and check again" if names else otherwise
    )


def acts_inside(model: Any, points: Mapping[str, Any]) -> bool:
    """Return True if a change by the user acts in the model at a place other than a hook point.

    `without_hooks` does not remove such a change, and the model can behave differently with it. Results of a probe must
    not be remembered then. points: `model.hook_dict`.
    """
    at_points: set[int] = set()
    for acting in acting_on(model):
        at_points = at_points or {id(point._forward_hooks) for point in points.values()}
        if id(acting.holder) not in at_points:
            return True
    return False


def listed(names: list[str]) -> str:
    """Return the first six names of a list as text, and the number of further names: "a, b and 3 others"."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} others" if len(names) > _NAMED else "")


def acting_on(model: Any) -> Iterator[Acting]:
    """Yield an `Acting` for each change by the user (hook, replaced method or module) that acts in passes of a model.

    Searched are the model, the classes of its modules, and torch.
    """
    modules = modules_of(model)
    yield from acting_in(model, modules)
    yield from _replaced_in_classes({type(module) for module in modules})
    for what, holder in _GLOBAL.items():
        hooks = getattr(torch_modules, holder)
        for key, hook in hooks.items():
            if not of_a_library(hook):
                yield Acting(f"{what} of all modules of torch", False, hooks, key)
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if not _is_of(_LIBRARIES, type(mode).__module__):
            yield Acting(f"{type(mode).__name__}, a mode of torch", True)


def acting_in(model: Any, modules: Iterable[Any] | None = None) -> Iterator[Acting]:
    """Yield an `Acting` for each change by the user inside a TransformerLens or transformers model, in module order.

    modules: the model's modules, if they are known already.
    """
    modules = modules_of(model) if modules is None else modules
    roots = {id(root): root for root in (getattr(model, "original_model", model), model)}
    built = _root(type(getattr(model, "original_model", model))) in _READ
    changed = [(module, of_module) for module in modules if (of_module := [*_of_module(module, roots, built)])]
    if not changed:  # names take six times as long
        return
    named = {id(module): name for root in roots.values() for name, module in reversed([*root.named_modules()])}
    order = {key: place for place, key in enumerate(reversed(named))}
    points = {id(point): name for name, point in getattr(model, "hook_dict", {}).items()}
    for module, of_module in sorted(changed, key=lambda pair: order.get(id(pair[0]), -1)):
        inside = named.get(id(module), "").replace("_original_component.", "").removesuffix("._original_component")
        name = points.get(id(module), inside) or type(module).__name__
        for what, of_context, holder, key in of_module:
            yield Acting(name + what, of_context, holder, key)


_Found = tuple[str, bool, MutableMapping[Any, Any] | None, Any]


def _of_module(module: Any, roots: Mapping[int, Any], built: bool) -> Iterator[_Found]:
    """Yield (suffix of the name, of_context, holder, key) for each change by the user on one module, as in `Acting`.

    of_context: True if a `with` block placed it. holder, key: dictionary and key where it is stored, or None.

    roots: the models themselves, by id; of these only methods that run in a pass are checked. built: True if a library
    built the model, so that modules of the user's own classes must have been inserted.
    """
    own, kind = vars(module), type(module)
    for kinds, held, what in ((_FORWARD, "fwd_hooks", ""), (_BACKWARD, "bwd_hooks", " (backward)")):
        if own[kinds[0]] or own[kinds[1]]:
            handles = {handle.hook.id: handle for handle in getattr(module, held, ())}
            for hooks in (own[kinds[0]], own[kinds[1]]):
                for key, hook in hooks.items():
                    handle = handles.get(key)
                    if not of_a_library(getattr(handle, "user_hook", None) or hook):
                        yield what, getattr(handle, "context_level", None) is not None, hooks, key
    inner = id(module) not in roots and not _is_own(kind.__module__)
    for name, value in [item for item in own.items() if type(item[1]) in _FUNCTIONS or item[0] in _RUN]:
        if name in _RUN:
            replaced = value is not None and _is_replaced(module, value, True)
        else:
            replaced = inner and name not in _OF_MODULES and _is_replaced(module, value, hasattr(kind, name))
        if replaced:
            yield f".{name}", False, own, name
    parametrized = own["_modules"].get("parametrizations")
    for weight in parametrized or ():
        yield f".{weight} (parametrized)", False, None, None
    for name, child in own["_modules"].items() if built and kind is not ParametrizationList else ():
        if child is None or id(child) in roots:
            continue
        if (name.startswith("hook_") and not hasattr(child, "fwd_hooks")) or _is_own(type(child).__module__):
            yield f".{name} ({type(child).__name__})", False, None, None


def _is_nnsights(module: Any, forward: Any) -> bool:
    """Return True if `forward`, stored on a module, is nnsight's object that runs the `forward` of the module's class.

    It changes nothing outside a trace of nnsight. False for one around another function, which a user has put there.
    """
    body = getattr(getattr(forward, "state", None), "original", None)
    return type(forward).__module__.startswith("nnsight.") and body is type(module).forward


def _is_replaced(module: Any, function: Any, method: bool) -> bool:
    """Return True if the user put this function on a module.

    method: True if it replaces a method of the class. Functions that libraries put there do not count, because they
    compute the same as the method. Methods of another module and plain functions of torch count as the user's.
    """
    owner = getattr(function, "__self__", function)
    if _is_nnsights(module, function):
        return False
    if owner is module:
        if getattr(type(module), function.__name__, None) is function.__func__:
            return False
    elif isinstance(owner, nn.Module) and method:
        return True
    libraries = _REPLACING if method else (*_LIBRARIES, *_REPLACING, "None.")
    return not all(_is_of(libraries, home) for home in _homes(function))


def _replaced_in_classes(kinds: Iterable[type]) -> Iterator[Acting]:
    """Yield an `Acting` for each method of a library's class that the user replaced for all modules of that class.

    kinds: classes of the model's modules.
    """
    methods = {
        (owner, name): vars(owner)[name]
        for kind in kinds
        for name in _RUN
        for owner in [next((ancestor for ancestor in kind.__mro__ if name in vars(ancestor)), object)]
        if _root(owner) in _READ and type(vars(owner)[name]) in _FUNCTIONS
    }
    for (owner, name), method in methods.items():
        if not all(_is_of((*_REPLACING, f"{_root(owner)}."), home) for home in _homes(method)):
            yield Acting(f"{owner.__name__}.{name} of {owner.__module__}", False)


def of_a_library(hook: Callable[..., Any]) -> bool:
    """Return True if a hook belongs to a library, judged by the module in which its function is defined."""
    return all(_is_of(_LIBRARIES, home) and not home.startswith(_UTILITIES) for home in _homes(hook))


def of_this_library(hook: Callable[..., Any]) -> bool:
    """Return True if a hook is a function of tlspectral, also one whose types are checked."""
    return all(_is_of(("tlspectral.", *_CHECKING), home) for home in _homes(hook))


def _homes(function: Any) -> Iterator[str]:
    """Yield the names of the modules in which `function`, and each function that it wraps, are defined."""
    while function is not None:
        while isinstance(function, partial):
            function = function.func
        # functools.wraps lends a function the __module__ of another, and not its globals
        scope = getattr(getattr(function, "__func__", function), "__globals__", {})
        home = getattr(function, "__module__", None)
        # update_wrapper also lends the __module__ to an object of another class, such as nnsight's.
        if "__module__" in getattr(function, "__dict__", ()) and type(function).__module__ not in _WRAPPING:
            home = type(function).__module__
        yield str(scope.get("__name__") or home)
        function = getattr(function, "__wrapped__", None)


def _is_of(libraries: tuple[str, ...], home: str | None) -> bool:
    """Return True if the module name `home`, such as "torch.nn", begins with one of the prefixes in `libraries`, such
    as "torch.".
    """
    return f"{home}.".startswith(libraries)


def _root(kind: type) -> str:
    """Return the name of the top-level package of the class `kind`, such as "torch"."""
    return kind.__module__.partition(".")[0]


@cache
def _is_own(home: str) -> bool:
    """Return True if a class is defined in the user's own files, not in an installed package.

    home: name of its module.
    """
    if _is_of((*_REPLACING, "torch."), home):
        return False
    file = getattr(sys.modules.get(home), "__file__", None) or ""
    return not {"site-packages", "dist-packages"} & {*file.replace("\\", "/").split("/")}


@uninterrupted
def without_user_hooks(model: Any) -> Iterator[list[str]]:
    """Take the user's changes off a model until the `with` block ends, then restore each at its place.

    Yields the names of changes that cannot be taken off: replaced methods of classes, replaced modules, parametrized
    weights, and modes of torch.
    """
    with exclusive(model):
        acting = [*acting_on(model)]
        taken: list[tuple[MutableMapping[Any, Any], Any, Any]] = []
        orders = {
            id(change.holder): (change.holder, [*change.holder])
            for change in acting
            if isinstance(change.holder, OrderedDict)
        }
        with undoing(_put_back, taken, [*orders.values()]):
            for holder, key in [(change.holder, change.key) for change in acting if change.holder is not None]:
                taken.append((holder, key, holder[key]))
                del holder[key]
            yield list(dict.fromkeys(change.name for change in acting if change.holder is None))


def _put_back(
    taken: list[tuple[MutableMapping[Any, Any], Any, Any]], orders: list[tuple[OrderedDict[Any, Any], list[Any]]]
) -> None:
    """Restore removed hooks and methods, and the order of their dictionaries.

    taken: (dictionary, key, value) of each removed item. orders: (dictionary, its keys in their old order).
    """
    for holder, key, value in taken:
        holder[key] = value
    for holder, order in orders:
        for key in order:
            if key in holder:
                holder.move_to_end(key)
