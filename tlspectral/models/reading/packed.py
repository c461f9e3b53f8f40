"""Linear layers whose weights are packed: quantised by bitsandbytes, torchao or another library.

`computed_weights` reads them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tlspectral.errors import BadWeights

_WRAPPED = "_original_component"  # TransformerLens puts it into the names of modules that it wraps


class LoraLayer(nn.Module):
    """A packed linear layer, and the factors of LoRA adapters that are added to its output.

    base: the packed layer. factors: pairs (A [rank, in], B [out, rank]); the scaling is part of B. The delta B A is
    read from the factors, because in 16 bits W + B A would lose digits of it.
    """

    def __init__(self, base: Any, factors: list[tuple[Tensor, Tensor]]):
        super().__init__()
        self.base = base
        self.in_features, self.out_features = int(base.in_features), int(base.out_features)
        self.lora_a = nn.ParameterList(nn.Parameter(a, requires_grad=False) for a, _ in factors)
        self.lora_b = nn.ParameterList(nn.Parameter(b, requires_grad=False) for _, b in factors)

    @property
    def bias(self) -> Any:
        """The bias of the packed layer; None without one."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the packed layer for x, plus x A^T B^T of each adapter."""
        output = self.base(x)
        for a, b in zip(self.lora_a, self.lora_b, strict=True):
            output = output + ((x.to(a.dtype) @ a.T) @ b.T).to(output.dtype)
        return output

    def delta(self) -> Tensor:
        """Return the sum of B A over the adapters, [out, in] in float64 on the CPU."""
        total = torch.zeros(self.out_features, self.in_features, dtype=torch.float64)
        for a, b in zip(self.lora_a, self.lora_b, strict=True):
            total += b.detach().cpu().double() @ a.detach().cpu().double()
        return total


def is_packed(module: Any) -> bool:
    """Return True for a linear layer without a plain floating-point weight: quantised, or made from other tensors.

    A module of a bridge that wraps such a layer is not one.
    """
    if _WRAPPED in module._modules or not isinstance(vars(module).get("in_features"), int):
        return False
    weight = getattr(module, "weight", None)
    if type(module) is nn.Linear and type(weight) is nn.Parameter:
        return False  # nothing unpacks it: the weight is plain, or the layer cannot run
    return isinstance(module, LoraLayer) or is_packed_tensor(weight)


def is_packed_tensor(weight: Any) -> bool:
    """Return True unless a weight is a plain tensor of 16 bits or more; a packed one needs scales or unpacking."""
    if not isinstance(weight, Tensor):
        return True
    plain = weight.dtype.is_floating_point and weight.dtype.itemsize >= 2
    return not plain or is_traceable_wrapper_subclass(weight) or getattr(weight, "quant_state", None) is not None


def packed_layers(module: Any) -> dict[str, Any]:
    """Return the packed linear layers in a module, a dict from name to layer; the name is as in the wrapped model."""
    return {".".join(path): layer for path, layer in _packed_in(module, (), set())}


def _packed_in(module: Any, path: tuple[str, ...], met: set[int]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, layer) of each packed layer in a module, each once. met: ids of modules that were visited."""
    if id(module) in met:
        return
    met.add(id(module))
    if is_packed(module):
        yield path, module
        return
    for name, part in module._modules.items():
        if part is not None:
            yield from _packed_in(part, path if name == _WRAPPED else (*path, name), met)


def kind_of_layer(layer: Any) -> str:
    """Return a packed layer's kind for messages: its class, and the class of its weight if that says more."""
    weight = getattr(layer, "weight", None)
    inside = f" with {type(weight).__name__}" if is_traceable_wrapper_subclass(weight) else ""
    return f"a {type(layer).__name__}{inside}"


def refuse_packed(model: Any, where: str, why: str) -> None:
    """Raise BadWeights if a model or a part of one has packed layers. where, why: beginning and end of the message."""
    for path, layer in packed_layers(getattr(model, "original_model", model)).items():
        raise BadWeights(f"{where}: {path}, {kind_of_layer(layer)}, has quantised weights, {why}")


def keep_packing(layer: Any) -> None:
    """Let a layer of bitsandbytes keep its weights as they are, in place; nothing is done to another layer.

    On a CPU with AVX512 in bfloat16 the first pass would otherwise pack the weights anew and round their scales.
    """
    if getattr(layer, "support_avx512bf16_for_cpu", False):
        layer.support_avx512bf16_for_cpu = False


# --- the stored numbers, for hashes ---


def stored_tensors(value: Any) -> list[Tensor]:
    """Return the plain tensors that a weight consists of: itself, or packed numbers and their scales. None: none."""
    if value is None:
        return []
    if is_traceable_wrapper_subclass(value):
        names = value.__tensor_flatten__()[0]
        return [tensor for name in names for tensor in stored_tensors(getattr(value, name, None))]
    tensors, state = [value.detach().as_subclass(Tensor)], getattr(value, "quant_state", None)
    while state is not None:  # of bitsandbytes, which can quantise the scales too
        tensors += [part for part in (state.absmax, state.code, state.offset) if isinstance(part, Tensor)]
        state = getattr(state, "state2", None)
    scales = getattr(value, "SCB", None)  # of bitsandbytes in 8 bits
    return tensors if scales is None else [*tensors, scales]


def stored_in(module: Any) -> list[Tensor]:
    """Return the plain tensors that the parameters and buffers of a module consist of, in order."""
    held = (values for part in module.modules() for values in (part._parameters, part._buffers))
    return [tensor for values in held for value in values.values() for tensor in stored_tensors(value)]


def packed_numbers(module: Any) -> list[Tensor]:
    """Return the plain tensors that the packed layers of a module consist of, in the order of their names."""
    return [tensor for _, layer in sorted(packed_layers(module).items()) for tensor in stored_in(layer)]


def stored_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by name, with the plain tensors of a packed weight in its place: `name.0`, `name.1`, ..."""
    stored: dict[str, Tensor] = {}
    for name, value in weights.items():
        parts = stored_tensors(value) if is_packed_tensor(value) else [value]
        stored |= {name: parts[0]} if len(parts) == 1 else {f"{name}.{n}": part for n, part in enumerate(parts)}
    return stored
