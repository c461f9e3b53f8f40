"""Read the weight of a packed layer from the layer's outputs: `W = module(I) - module(0)`.

The layer runs in the type in which the model runs it, without its bias: in 16 bits a large bias would cancel digits of
W. W is then exact in that type. A layer that also quantises its input gives a W too, and does not compute x W. So each
layer is tried on 16 tokens of a run, and on the same with the largest coordinate times 20: the RMS of
`module(x) - W x - b`, relative to the RMS of `module(x)`, has a bound.

The bound in 16 bits is half an eps of the output, .0039 in bfloat16: plain layers are off by .0017 to .0018, layers
that quantise their input by .006 to .4. In float32 the rounding of sums is larger than half an eps (6e-8): plain layers
of 64 to 8192 inputs are off by 9e-8 to 4e-7, at most a tenth of `2 eps sqrt(inputs)`, the bound there.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tlspectral.errors import BadWeights
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.reading.digests import Seen, seen
from tlspectral.models.reading.packed import (
    LoraLayer,
    is_packed,
    keep_packing,
    kind_of_layer,
    packed_layers,
    stored_in,
)

_TOKENS = 16
_FACTOR = 20.0
_ROWS = 1024  # of the identity that a layer computes at a time
_REMEMBERED = 2**30


class _Trial(NamedTuple):
    """What a run showed of a layer.

    dtype: type in which the layer computes. off: RMS of module(x) - W x - b, relative to the RMS of module(x); the
    larger of both trials. allowed: its bound.
    """

    dtype: torch.dtype
    off: float
    allowed: float


class _Read(NamedTuple):
    """A weight that was read: its layer's stored tensors at that time, W [out, in] and the bias."""

    stored: tuple[Seen, ...]
    weight: Tensor
    bias: Tensor | None


_trials: WeakKeyDictionary[Any, _Trial] = WeakKeyDictionary()
_read: WeakKeyDictionary[Any, _Read] = WeakKeyDictionary()


def with_plain_weights(module: Any, model: Any) -> Any:
    """Return a module in which each packed layer is a plain `nn.Linear` with the weight that the layer computes with.

    It shares everything else with the given module, and is to be read, not run. A module without packed layers is
    returned itself. model: the bridge that holds the module. Raises BadWeights for a layer that is not linear.
    """
    if not any(map(is_packed, module.modules())):
        return module
    require_linear(model)
    return _with_plain(module, {})


def computed_in(module: Any) -> torch.dtype | None:
    """Return the coarsest type in which packed layers of a module compute; None if no layer is packed."""
    kinds = (_trials[part].dtype for part in module.modules() if part in _trials)
    return max(kinds, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def require_linear(model: Any) -> None:
    """Raise BadWeights if a packed layer of the attention or the unembedding of a bridge is not linear.

    The message names the layer, how far it is off and the bound. The bridge runs once; later calls remember the result.
    """
    roots = [block.attn for block in model.blocks if "attn" in block._modules]
    roots += [model.unembed] if hasattr(model, "unembed") else []
    read = {id(part) for root in roots for part in root.modules()}
    layers = {path: layer for path, layer in packed_layers(model.original_model).items() if id(layer) in read}
    if any(layer not in _trials for layer in layers.values()):
        _try(model, layers)
    for path, layer in layers.items():
        dtype, off, allowed = _trials[layer]
        if not off <= allowed:
            raise BadWeights(
                f"{path}, {kind_of_layer(layer)}, is not linear: module(x) - W x - b is {off:.2g} of its output "
                f"(allowed in {str(dtype).removeprefix('torch.')}: {allowed:.2g}), so it rounds its input too, and no "
                "W says what it computes. Quantise the weights alone (load_in_4bit of bitsandbytes, "
                "Int8WeightOnlyConfig of torchao), or load the model unquantised"
            )


@torch.no_grad()
def _try(model: Any, layers: dict[str, Any]) -> None:
    """Run a bridge on 16 random tokens (seed 0), and note for each of these layers how linear it is on its inputs."""
    inputs: dict[Any, Tensor] = {}

    def keep(layer: Any, given: tuple[Any, ...]) -> None:
        inputs[layer] = given[0].detach().flatten(0, -2)[-_TOKENS:]

    length = min(_TOKENS, int(model.cfg.n_ctx))
    tokens = torch.randint(0, int(model.cfg.d_vocab), (1, length), generator=torch.Generator().manual_seed(0))
    hooks = [layer.register_forward_pre_hook(keep) for layer in layers.values()]
    try:
        with evaluating(model):
            model(tokens.to(next(model.parameters()).device))
    except (RuntimeError, TypeError, AttributeError) as error:
        path, layer = next(iter(layers.items()))
        reason = " ".join(str(error).split())[:300]
        raise BadWeights(
            f"{path}, {kind_of_layer(layer)}, has quantised weights, and the model does not run ({reason}), so it is "
            "not known what they compute: load the model unquantised"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    for path, layer in layers.items():
        if layer not in inputs:
            raise BadWeights(
                f"{path}, {kind_of_layer(layer)}, does not run when the model does, so it cannot be tried what it "
                "computes: load the model unquantised"
            )
        _trials[layer] = _tried(getattr(layer, "base", layer), inputs[layer], path)


@torch.no_grad()
def _tried(layer: Any, x: Tensor, path: str) -> _Trial:
    """Return the `_Trial` of a packed layer on x [tokens, in], and on x with its largest coordinate times 20.

    path: name of the layer in messages. Raises BadWeights if the layer adds a bias that cannot be taken off, and
    computes in 16 bits.
    """
    dtype, stretched = _type_of(layer, x), x.clone()
    stretched[:, int(x.abs().mean(0).argmax())] *= _FACTOR
    both = torch.stack([x, stretched])
    plain, bias = _alone(layer, with_bias=False), layer.bias
    constant = plain(x.new_zeros(1, x.shape[-1]))[0]
    if bool(constant.any()):
        if torch.finfo(dtype).eps > torch.finfo(torch.float32).eps:
            raise BadWeights(
                f"{path}, {kind_of_layer(layer)}, adds a bias that cannot be taken off, and {dtype} loses digits of W "
                "beside it: load the model with dtype='float32', or unquantised"
            )
        bias = constant
    outputs = _alone(layer, with_bias=True)(both).double()
    expected = torch.zeros_like(outputs)
    for inputs, rows in _rows(plain, constant, x):
        expected += both[..., inputs].double() @ rows
    if bias is not None:
        expected += bias.double()
    off = (outputs - expected).square().mean((1, 2)).sqrt() / outputs.square().mean((1, 2)).sqrt()
    eps = torch.finfo(dtype).eps
    allowed = eps / 2 if eps > 1e-4 else 2 * eps * math.sqrt(x.shape[-1])
    return _Trial(dtype, float(off.nan_to_num(torch.inf).max()), allowed)


def _type_of(layer: Any, x: Tensor) -> torch.dtype:
    """Return the type in which a packed layer computes: the type of its input x, or a coarser one that it states."""
    stated = getattr(layer, "compute_dtype", None)  # of bitsandbytes in 4 bits
    state = getattr(getattr(layer, "weight", None), "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):  # packed anew by an earlier pass of the user's
        stated = torch.bfloat16
    kinds = [x.dtype, *([stated] if isinstance(stated, torch.dtype) and stated.is_floating_point else [])]
    return max(kinds, key=lambda dtype: torch.finfo(dtype).eps)


def _alone(layer: Any, *, with_bias: bool) -> Any:
    """Return a shallow copy of a layer that can be run by itself: in evaluation mode, without hooks.

    The copy shares the weights with the layer, and does not change them.
    """
    copied = copy.copy(layer)
    held = vars(copied)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        held[name] = OrderedDict()
    held["training"] = False
    keep_packing(copied)
    if not with_bias:
        for name in ("_parameters", "_buffers"):
            held[name] = {key: value for key, value in held[name].items() if key != "bias"}
        held.pop("bias", None)
        held["_parameters"]["bias"] = None
    return copied


def _rows(plain: Any, constant: Tensor, like: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of inputs, their rows of W^T in float64), some inputs at a time.

    plain: the layer without bias. constant: its output for zeros. like: an input, which gives width, type and device.
    """
    width = like.shape[-1]
    for first in range(0, width, _ROWS):
        inputs = slice(first, min(first + _ROWS, width))
        identity = torch.eye(width, dtype=like.dtype, device=like.device)[inputs]
        yield inputs, plain(identity).double() - constant.double()


def _with_plain(module: Any, done: dict[int, Any]) -> Any:
    """Return a module with plain layers in the place of packed ones. done: from id of a module to its replacement."""
    if id(module) not in done:
        if is_packed(module):
            done[id(module)] = _plain_linear(module)
        elif not any(map(is_packed, module.modules())):
            done[id(module)] = module
        else:
            copied = done[id(module)] = copy.copy(module)
            parts = module._modules.items()
            vars(copied)["_modules"] = {name: part and _with_plain(part, done) for name, part in parts}
    return done[id(module)]


def _plain_linear(layer: Any) -> nn.Linear:
    """Return a frozen `nn.Linear` with the weight and the bias of a packed layer that a run has shown to be linear.

    W has the type in which the layer computes; with LoRA at least float32.
    """
    read = _remembered(layer)
    with torch.device("meta"):
        linear = nn.Linear(1, 1, bias=False)
    linear.out_features, linear.in_features = read.weight.shape
    linear.weight = nn.Parameter(read.weight, requires_grad=False)
    if read.bias is not None:
        linear.bias = read.bias if isinstance(read.bias, nn.Parameter) else nn.Parameter(read.bias, requires_grad=False)
    return linear


@torch.no_grad()
def _remembered(layer: Any) -> _Read:
    """Return W and the bias of a packed layer, from memory if its stored numbers have not changed.

    The weights read last are remembered, up to 1 GiB.
    """
    stored = tuple(seen(tensor, {}) for tensor in stored_in(layer))
    known = _read.get(layer)
    if known is not None and len(known.stored) == len(stored) and all(map(Seen.same, known.stored, stored)):
        return known
    _read.pop(layer, None)
    packed, dtype = getattr(layer, "base", layer), _trials[layer].dtype
    device = next(iter(stored_in(packed))).device
    zeros = torch.zeros(1, int(packed.in_features), dtype=dtype, device=device)
    plain = _alone(packed, with_bias=False)
    constant = plain(zeros)[0]
    weight = torch.cat([rows.to(dtype) for _, rows in _rows(plain, constant, zeros)]).T
    if isinstance(layer, LoraLayer):
        precision = torch.promote_types(dtype, torch.float32)
        weight = (weight.double() + layer.delta().to(device)).to(precision)
    read = _read[layer] = _Read(stored, weight, constant if bool(constant.any()) else packed.bias)
    held = sum(other.weight.nbytes for other in _read.values())
    for other in [*_read]:
        if held <= _REMEMBERED or other is layer:
            break
        held -= _read.pop(other).weight.nbytes
    return read
