"""Read the norms of a TransformerBridge. One call of each norm shows how its parameters act."""

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
    """Return the norm before the attention of a layer as a `Normalization`; `NO_NORM` if its norms come after attention
    and MLP.

    block: the bridge of the layer. model: the whole bridge. d_model: width of the stream. layer: its number, for
    messages. In OLMo 2 norms act on what attention and MLP write. In GPT, OPT 350M and BERT they act on the stream
    itself, with gain and bias, so the next layer reads a normalised stream.
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
    norm_read = read_normalization(norm.original_component, model, (d_model,), f"layer {layer}, input norm")
    factor = float(getattr(layer_module, "attention_in_multiplier", 1.0))  # Falcon-H1 multiplies after this norm
    return norm_read if factor == 1.0 or norm_read.gain is None else replace(norm_read, gain=factor * norm_read.gain)


def query_key_norm(attention: Any, name: str, model: Any, layer: int, heads: int, d_head: int) -> QueryKeyNorm | None:
    """Return the norm of queries or keys in an attention module as a `QueryKeyNorm`; None without one.

    name: "q_norm", "k_norm" or "v_norm". model: the bridge. layer: the layer's number, for messages. heads, d_head: the
    sizes by which the gain is split. Raises UnsupportedArchitecture for a norm that cannot be folded into the weights.
    """
    module = getattr(attention._modules.get(name), "original_component", None)
    if module is None:  # Llama 4 has one norm without gain for queries and keys, which the bridge does not hold
        module = getattr(attention.original_component, "qk_norm", None)
    if module is None:
        return None
    where = f"layer {layer}, {name}"
    modules = list(getattr(module, "norms", [module]))  # StableLM 2 12B has one for each head
    shape = tuple(getattr(getattr(modules[0], "weight", None), "shape", (d_head,)))
    over_heads = shape == (heads * d_head,) and heads > 1
    if not over_heads and shape not in ((d_head,), (heads, d_head)):
        raise UnsupportedArchitecture(
            f"{where} has a gain of shape {shape}; supported shapes are ({d_head},) for all heads alike, "
            f"({heads}, {d_head}) by head and ({heads * d_head},) over all heads: take another model"
        )
    norms = [read_normalization(norm_module, model, shape, where) for norm_module in modules]
    norm, centred = norms[0], norms[0].kind == "LN"
    if norm.bias is not None or (centred and over_heads):
        form = "a bias" if norm.bias is not None else "a mean over all heads"
        raise UnsupportedArchitecture(
            f"{where} is a {norm.kind} norm with {form}, which is not supported: the score is bilinear in two tokens "
            "only if the norm is a scale per token of a linear map. Take another model"
        )
    gains = [norm_module.gain for norm_module in norms if norm_module.gain is not None]
    gain = torch.stack(gains) if len(gains) > 1 else norm.gain
    if over_heads and gain is not None:
        gain = rearrange(gain, "(head d_head) -> head d_head", head=heads)
    return QueryKeyNorm(gain, norm.eps, over_heads, centred)


def read_normalization(module: Any, model: Any, shape: tuple[int, ...], where: str) -> Normalization:
    """Return a norm module of a model as a `Normalization`: one call of the module shows how its parameters act.

    shape: shape of the weight. where: layer and role, for messages. Raises UnsupportedArchitecture if the module acts
    like none of the known forms.

    Flags are not reliable: Gemma and Nemotron multiply by 1 + weight, and some norms have no weight. So the module gets
    one random vector and has to act like one of the known forms. A form that is the only match is remembered, because
    the code decides it and not the weights.
    """
    if isinstance(module, torch.nn.Identity):  # a native model of normalization_type None
        return NO_NORM
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    stated = (getattr(module, "variance_epsilon", None), getattr(module, "eps", None), getattr(model.cfg, "eps", None))
    eps = next((float(value) for value in stated if value is not None), 1e-5)
    require_readable(weight, f"{where} gain")
    require_readable(bias, f"{where} bias")
    code_and_settings = (type(module).forward, shape, eps, weight is None, bias is None)
    known = _forms.get(module)
    if known is not None and known[0] == code_and_settings:
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
    matches = [error <= 2e-2 for error in errors]
    if not any(matches):
        raise UnsupportedArchitecture(
            f"{where}: {type(module).__name__} acts neither like a LayerNorm nor like an RMS norm (gain: weight or "
            "1 + weight): take another model"
        )
    if sum(matches) == 1:
        _forms[module] = code_and_settings, kinds[best]
    return forms[best]


def _form(
    kind: Literal["LN", "RMS"], added: float, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Normalization:
    """Return a `Normalization` of this kind with `bias` and `eps`, whose gain is `weight + added`; added is 0.0 or 1.0.

    weight, bias: parameters of the norm's module, None without one.
    """
    return Normalization(kind, 1.0 + in_float64(weight) if added and weight is not None else weight, bias, eps)


def _norm_errors(forms: list[Normalization], probe: Tensor, response: Tensor) -> list[float]:
    """Return for each form of a norm its largest error against a module's output `response` to the vector `probe`.

    forms: the norms that the module may be. Errors are relative to the size of each column. Trained gains reach 200,
    and a gain of another column that is off by 1 has to be noticed too.
    """
    units = torch.stack([form.normalized(probe) for form in forms])
    gains = torch.stack([torch.ones_like(probe) * (1 if form.gain is None else double(form.gain)) for form in forms])
    shift = torch.zeros(1) if forms[0].bias is None else double(forms[0].bias)
    sizes = (units.abs() + 1) * gains.abs().maximum(gains[0].abs()) + shift.abs()  # the first is as stored
    return ((response - units * gains - shift).abs() / sizes.clamp_min(1e-30)).flatten(1).amax(-1).tolist()


def norm_behind(block: Any) -> Any:
    """Return the bridge's module of the norm after the attention of the layer `block`; None without one."""
    modules = block._modules
    if str(getattr(block, "hook_aliases", {}).get("hook_attn_out")).startswith("ln2."):
        return modules["ln2"]  # OLMo hybrid in TransformerLens 3
    norm = modules.get("ln1_post")
    return modules["ln1"] if norm is None and _is_behind(modules.get("ln1")) else norm


def _is_behind(norm: Any) -> bool:
    # OLMo 2 has no norm before its attention; TransformerLens 3 calls the norm after it ln1.
    """Return True if a norm module comes after the attention, although its name in the bridge may be `ln1`."""
    return getattr(norm, "name", None) == "post_attention_layernorm"
