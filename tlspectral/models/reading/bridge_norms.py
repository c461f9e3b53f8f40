"""Reads the norms of a TransformerBridge, and finds by a call of each how its parameters enter."""

from dataclasses import replace
from itertools import product
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from einops import rearrange
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading.layer import require_readable
from tlspectral.models.reading.norms import NO_NORM, Normalization, QueryKeyNorm, double
from tlspectral.models.reading.special_cases import NORMS_ON_STREAM

_forms: WeakKeyDictionary[Any, tuple[tuple[Any, ...], tuple[Literal["LN", "RMS"], float]]] = WeakKeyDictionary()


def input_norm(block: Any, model: Any, d_model: int, layer: int) -> Normalization:
    """Return the norm in front of the attention of a block, none where norms stand behind attention and MLP.

    In OLMo 2 these act on what is written. In GPT, OPT 350M and BERT they act on the stream, so that what the next
    layer reads is normalised, with gain and bias.
    """
    norm = getattr(block, "ln1", getattr(block, "norm", None))
    layer_module = getattr(block, "original_component", None)
    if (
        norm is None
        or _is_behind(norm)
        or norm.name == "attention.output.LayerNorm"
        or model.cfg.architecture in NORMS_ON_STREAM
        or getattr(layer_module, "do_layer_norm_before", None) is False
    ):
        return NO_NORM
    found = read_normalization(norm.original_component, model, (d_model,), f"layer {layer}, input norm")
    factor = float(getattr(layer_module, "attention_in_multiplier", 1.0))  # Falcon-H1 has one behind this norm
    return found if factor == 1.0 or found.gain is None else replace(found, gain=factor * found.gain)


def query_key_norm(attention: Any, name: str, model: Any, layer: int, heads: int, d_head: int) -> QueryKeyNorm | None:
    """Return the norm of queries or keys by its name in the attention bridge; None without one."""
    module = getattr(attention._modules.get(name), "original_component", None)
    if module is None:  # Llama 4 has one of both, without a gain, that the bridge does not hold
        module = getattr(attention.original_component, "qk_norm", None)
    if module is None:
        return None
    where = f"layer {layer}, {name}"
    modules = list(getattr(module, "norms", [module]))  # StableLM 2 12B has one for each head
    shape = tuple(getattr(getattr(modules[0], "weight", None), "shape", (d_head,)))
    over_heads = shape == (heads * d_head,) and heads > 1
    if not over_heads and shape not in ((d_head,), (heads, d_head)):
        raise UnsupportedArchitecture(
            f"{where} has a gain of shape {shape}, not one per column of a head ({d_head},), of each head "
            f"({heads}, {d_head}) or of all heads at once ({heads * d_head},)"
        )
    norms = [read_normalization(each, model, shape, where) for each in modules]
    norm, centred = norms[0], norms[0].kind == "LN"
    if norm.bias is not None or (centred and over_heads):
        form = "a bias" if norm.bias is not None else "a mean over all heads"
        raise UnsupportedArchitecture(
            f"{where} is a {norm.kind} norm with {form}; only a norm that scales what is linear in the residual stream "
            "keeps M a bilinear form"
        )
    gains = [each.gain for each in norms if each.gain is not None]
    gain = torch.stack(gains) if len(gains) > 1 else norm.gain
    if over_heads and gain is not None:
        gain = rearrange(gain, "(head d_head) -> head d_head", head=heads)
    return QueryKeyNorm(gain, norm.eps, over_heads, centred)


def read_normalization(module: Any, model: Any, shape: tuple[int, ...], where: str) -> Normalization:
    """Read a norm's parameters and find by one call of the module how they enter.

    Flags do not tell this reliably (Gemma and Nemotron multiply by 1 + weight, some norms have no weight), so the
    module is given one random vector and must act as one of the known forms. Where it acts as one alone, that is kept,
    as code decides it and not the weights.
    """
    if isinstance(module, torch.nn.Identity):  # a native model of normalization_type None
        return NO_NORM
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    named = (getattr(module, "variance_epsilon", None), getattr(module, "eps", None), getattr(model.cfg, "eps", None))
    eps = next((float(value) for value in named if value is not None), 1e-5)
    require_readable(weight, f"{where} gain")
    require_readable(bias, f"{where} bias")
    written = (type(module).forward, shape, eps, weight is None, bias is None)
    known = _forms.get(module)
    if known is not None and known[0] == written:
        return _form(*known[1], weight, bias, eps)
    anchor = weight if weight is not None else next(module.parameters(), next(iter(model.parameters())))
    probe = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 1.0
    with torch.no_grad():
        # The class's forward, so that no hook a user placed on the module sees the probe.
        response = type(module).forward(module, probe.to(anchor)[None])[0].cpu().double()
    kinds = list(product(("LN", "RMS"), (0.0,) if weight is None else (0.0, 1.0)))
    forms = [_form(*kind, weight, bias, eps) for kind in kinds]
    errors = _norm_errors(forms, probe.double(), response)
    best = errors.index(min(errors))
    # bf16 rounds the response by 4e-3 of its size; a missing mean or a missing 1 + moves it by far more.
    like = [error <= 2e-2 for error in errors]
    if not any(like):
        raise UnsupportedArchitecture(
            f"{where}: {type(module).__name__} is neither a LayerNorm nor an RMS norm with a plain gain"
        )
    if sum(like) == 1:
        _forms[module] = written, kinds[best]
    return forms[best]


def _form(
    kind: Literal["LN", "RMS"], added: float, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Normalization:
    """Return a norm whose gain is the weight, or 1.0 more."""
    return Normalization(kind, 1.0 + in_float64(weight) if added and weight is not None else weight, bias, eps)


def _norm_errors(forms: list[Normalization], probe: Tensor, response: Tensor) -> list[float]:
    """Return the largest error of each form of a norm against a module's response, relative to the size of each column.

    Each column has its own scale: trained gains reach 200, and a gain of another column that is off by 1 must be seen.
    """
    units = torch.stack([form.normalized(probe) for form in forms])
    gains = torch.stack([torch.ones_like(probe) * (1 if form.gain is None else double(form.gain)) for form in forms])
    shift = torch.zeros(1) if forms[0].bias is None else double(forms[0].bias)
    sizes = (units.abs() + 1) * gains.abs().maximum(gains[0].abs()) + shift.abs()  # the first is as stored
    return ((response - units * gains - shift).abs() / sizes.clamp_min(1e-30)).flatten(1).amax(-1).tolist()


def norm_behind(block: Any) -> Any:
    """Return the norm behind the attention of a block, as a bridge holds it; None without one."""
    modules = block._modules
    if str(getattr(block, "hook_aliases", {}).get("hook_attn_out")).startswith("ln2."):
        return modules["ln2"]  # of OLMo hybrid in TransformerLens 3
    norm = modules.get("ln1_post")
    return modules["ln1"] if norm is None and _is_behind(modules.get("ln1")) else norm


def _is_behind(norm: Any) -> bool:
    # OLMo 2 has no norm in front of its attention; TransformerLens 3 calls the one behind it ln1.
    return getattr(norm, "name", None) == "post_attention_layernorm"
