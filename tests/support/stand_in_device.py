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

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

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
        return _computed(func, types, args, kwargs or {}, float64=True)


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
        return _computed(func, types, args, kwargs or {}, float64=self.float64)


def _computed(func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any], *, float64: bool) -> Any:
    from_device, named = Placed in types, kwargs.get("device")
    if not from_device and named is None:
        return func(*args, **kwargs)
    leaves = list(_leaves((*args, *kwargs.values())))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    device = _device_of(func, args, tensors) if named is None else torch.device(named)
    on_device = device.type == "lazy"
    if on_device:
        generator = next((x for x in leaves if isinstance(x, torch.Generator)), None)
        if generator is not None:
            raise WrongDevice(f"{func}: expected a generator of {device} but found one of {generator.device}")
    unwrapped = {name: _mapped(_data, x) for name, x in kwargs.items()}
    if named is not None:
        unwrapped["device"] = torch.device("cpu")
    out = func(*_mapped(_data, args), **unwrapped)
    # A copy to the CPU that also widens is refused too: PyTorch converts on the device that it copies from.
    computed_there = on_device or (from_device and func in _COPIES)
    if not float64 and computed_there and any(isinstance(x, Tensor) and x.dtype in _WIDE for x in _leaves((out,))):
        raise WrongDevice(f"{func}: no float64 on {[device, *(x.device for x in tensors)]}")
    if not on_device:
        return out
    placed = _mapped(lambda x: Placed(x, device) if isinstance(x, Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, placed) if from_device else placed


# torch's functions for trees do the same, and took two thirds of the time of a test.


def _leaves(values: Any) -> Iterator[Any]:
    """What stands in arguments or results of an operation, also in lists."""
    for x in values:
        if isinstance(x, (list, tuple)):
            yield from _leaves(x)
        else:
            yield x


def _mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """The same with every leaf changed."""
    return type(x)([_mapped(change, one) for one in x]) if type(x) in (list, tuple) else change(x)


def _data(x: Any) -> Any:
    return x.on_cpu if isinstance(x, Placed) else x


def _device_of(func: Any, args: Any, tensors: list[Tensor]) -> torch.device:
    """Return the device that the operation's tensors share. Raises WrongDevice if there are two."""
    if func in _COPIES:
        return args[0].device
    if func in _INDEXED:
        tensors = [args[0], *(x for x in args[1] if isinstance(x, Placed)), *args[2:3]]
    devices = {x.device for x in tensors if x.device.type != "cpu" or x.dim() > 0}
    if len(devices) > 1:
        found = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
        raise WrongDevice(f"{func}: expected all tensors on one device, found {found}")
    return next(iter(devices))


OF_GAINS = {"_to_copy", "detach", "add", "aminmax", "stack", "abs", "permute"}
"""What reads, checks and hashes a norm's gain, which may be stored as 1 + w: float64 numbers as many as it has."""


class Float64Numbers(TorchDispatchMode):
    """While it is open it counts, by operation, the float64 numbers that a stand-in device computes."""

    def __init__(self):
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in _leaves((out,)):
            if isinstance(x, Placed) and x.dtype in _WIDE and x._base is None:
                self.of[func.overloadpacket.__name__] += x.numel()
        return out
