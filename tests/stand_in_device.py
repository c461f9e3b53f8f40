"""A stand-in for accelerators on a machine that has none: tensors with real data that say they lie on another device.

`placed(tensor, "lazy:0")`, `tensor.to("lazy:0")`, `model.to("lazy:0")` and `torch.arange(3, device="lazy:0")` make
tensors whose `device` is `lazy:0` inside `with StandInDevice():`. Their data lie on the CPU, and every operation is
computed there, so probes, self-checks, `.item()` and backward passes run and give the numbers of the CPU to the bit.
As on a real accelerator, an operation raises where

* it gets tensors of two devices (CPU tensors without dimensions and CPU indices are allowed, as in PyTorch),
* it draws with the CPU's generator on the device,
* `StandInDevice(float64=False)` is open and its result is in float64, as on a device such as mps,
* `.numpy()` is called before `.cpu()`.

`lazy` is a device type that PyTorch knows and does not initialise, and whose backward passes run in the caller's
thread; `lazy:0` and `lazy:1` are two devices. The meta device would have no data: no probe and no check could run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE, SECOND_DEVICE = "lazy:0", "lazy:1"

_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXED = (
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
)
_WIDE = (torch.float64, torch.complex128)


class WrongDevice(RuntimeError):
    """An operation that a real device would refuse."""


class Placed(Tensor):
    """A tensor that says it lies on a device; `on_cpu` holds its numbers."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor, device: torch.device) -> "Placed":
        made = Tensor._make_wrapper_subclass(
            cls,
            on_cpu.shape,
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=device,
        )
        made.on_cpu = on_cpu
        return made

    def __repr__(self, **_: Any) -> str:
        return f"{self.on_cpu!r} on {self.device}"

    def tolist(self) -> Any:
        return self.on_cpu.tolist()

    def numpy(self, *given: Any, **named: Any) -> Any:
        raise WrongDevice(f"a tensor on {self.device} is no numpy array: call .cpu() first")

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {}, float64=True)


class StandInDevice(TorchDispatchMode):
    """While it is open there are devices `lazy:0`, `lazy:1`; see the head of this file.

    Args:
        float64: the devices have this type.
    """

    def __init__(self, *, float64: bool = True):
        super().__init__()
        self.float64 = float64

    def __enter__(self) -> Any:
        # torch.tensor(..., device=...) then makes a CPU tensor and moves it, as under PyTorch's fake tensors.
        self.before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self.before)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {}, float64=self.float64)


def _computed(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], *, float64: bool) -> Any:
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    named = kwargs.get("device")
    device = _device_of(func, args, leaves) if named is None else torch.device(named)
    if device.type == "lazy":
        generator = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Generator)), None)
        if generator is not None:
            raise WrongDevice(f"{func}: expected a generator of {device} but found one of {generator.device}")
    if named is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    unwrapped = tree_map(lambda x: x.on_cpu if isinstance(x, Placed) else x, (args, kwargs))
    out = func(*unwrapped[0], **unwrapped[1])
    # A copy to the CPU that also widens is refused too: PyTorch converts on the device that it copies from.
    on_device = device.type == "lazy" or (func in _COPIES and any(isinstance(x, Placed) for x in leaves))
    if not float64 and on_device and any(isinstance(x, Tensor) and x.dtype in _WIDE for x in tree_leaves(out)):
        raise WrongDevice(f"{func}: no float64 on {[device, *(x.device for x in leaves)]}")
    if device.type != "lazy":
        return out
    placed = tree_map(lambda x: Placed(x, device) if isinstance(x, Tensor) else x, out)
    if any(isinstance(x, Placed) for x in leaves):
        return return_and_correct_aliasing(func, args, kwargs, placed)
    return placed


def _device_of(func: Any, args: Any, leaves: list[Tensor]) -> torch.device:
    """Return the device that the operation's tensors share. Raises WrongDevice if there are two."""
    if func in _COPIES:
        return args[0].device
    if func in _INDEXED:
        leaves = [args[0], *(x for x in tree_leaves(args[1]) if isinstance(x, Placed)), *tree_leaves(args[2:3])]
    devices = {x.device for x in leaves if x.device.type != "cpu" or x.dim() > 0}
    if len(devices) > 1:
        found = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in leaves)
        raise WrongDevice(f"{func}: expected all tensors on one device, found {found}")
    return next(iter(devices), torch.device("cpu")) if len(leaves) else torch.device("cpu")
