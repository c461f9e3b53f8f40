"""Quantised tiny models, the same models with plain weights, and what each function makes of both.

`python tests/support/quantised_models.py` prints the table of docs/models.md, with bitsandbytes and torchao installed.
"""

import copy
import logging
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor, nn

import tlspectral as tls
from tlspectral.errors import BadWeights
from tlspectral.spectral_rope import load_spectral, merge, save_spectral

PROMPT = torch.tensor([1, *range(3, 20), *range(3, 20)])


class StandIn(nn.Module):
    """A linear layer with weights of 8 bits in blocks of 16, and with `activations` an input of 8 bits."""

    def __init__(self, linear: nn.Linear, *, activations: bool = False):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        blocks = linear.weight.detach().unflatten(1, (-1, 16))
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("packed", (blocks / scale).round().to(torch.int8))
        self.bias, self.activations = linear.bias, activations

    def dequantised(self) -> Tensor:
        return (self.packed.to(self.scale.dtype) * self.scale).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.activations:
            step = x.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
            x = (x / step).round() * step
        return nn.functional.linear(x, self.dequantised().to(x.dtype), self.bias)


# A class of a user's own in a model counts as a change by the user, so the stand-in comes from an installed library.
_LIBRARY = types.ModuleType("stand_in_quantiser")
_LIBRARY.__file__ = "/site-packages/stand_in_quantiser.py"
vars(_LIBRARY)["StandIn"], sys.modules[_LIBRARY.__name__] = StandIn, _LIBRARY
StandIn.__module__ = _LIBRARY.__name__


def _each_linear(model: Any, make: Callable[[nn.Linear], nn.Module]) -> Any:
    """Replace each linear layer of a model, but for the unembedding, in place."""
    for owner in [*model.modules()]:
        for name, layer in [*owner.named_children()]:
            if type(layer) is nn.Linear and name != "lm_head":
                setattr(owner, name, make(layer).eval())
    return model


def _filled(layer: Any, weight: nn.Parameter, linear: nn.Linear) -> Any:
    layer.weight = weight
    if linear.bias is not None:
        layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    return layer.to(weight.device)  # which quantises


def nf4_layer(linear: nn.Linear) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    kinds = {"bias": linear.bias is not None, "compute_dtype": linear.weight.dtype, "quant_type": "nf4"}
    layer = Linear4bit(linear.in_features, linear.out_features, **kinds)
    return _filled(layer, Params4bit(linear.weight.detach().clone(), quant_type="nf4", module=layer), linear)


def _llm_int8(linear: nn.Linear) -> nn.Module:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    layer = Linear8bitLt(linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False)
    return _filled(layer, Int8Params(linear.weight.detach().clone(), requires_grad=False), linear)


def _torchao(config: str, **settings: Any) -> Callable[[Any], Any]:
    def quantised(model: Any) -> Any:
        from torchao import quantization

        quantization.quantize_(model, getattr(quantization, config)(**settings))
        return model

    return quantised


def _plain(layer: Any) -> Tensor:
    """The weight of a quantised layer as its own library de-quantises it."""
    if isinstance(layer, StandIn):
        return layer.dequantised()
    state = getattr(layer.weight, "quant_state", None)
    if state is not None:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(layer.weight.data, state)
    return layer.weight.dequantize()


class Kind(NamedTuple):
    """A way to quantise. package: what it needs; quantised: changes a model in place and returns it."""

    package: str
    quantised: Callable[[Any], Any]


WEIGHTS = {
    "stand-in": Kind("torch", lambda model: _each_linear(model, StandIn)),
    "nf4": Kind("bitsandbytes", lambda model: _each_linear(model, nf4_layer)),
    "int8": Kind("torchao", _torchao("Int8WeightOnlyConfig")),
    "int4": Kind("torchao", _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4)),
}
"""Ways that quantise the weights alone."""

ACTIVATIONS = {
    "stand-in": Kind("torch", lambda model: _each_linear(model, lambda linear: StandIn(linear, activations=True))),
    "LLM.int8": Kind("bitsandbytes", lambda model: _each_linear(model, _llm_int8)),
    "int8 dynamic": Kind("torchao", _torchao("Int8DynamicActivationInt8WeightConfig")),
}
"""Ways that quantise the inputs of layers too."""


def qwen2(dtype: torch.dtype = torch.float32) -> Any:
    """A tiny Qwen 2 of transformers with biases, large queries and keys, and norms that are not 1."""
    config = transformers.Qwen2Config(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, initializer_range=0.1,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.Qwen2ForCausalLM(config).eval()
        for path, value in model.named_parameters():
            if path.endswith("bias"):
                value += torch.randn_like(value)
            elif "norm" in path:
                value += 0.3 * torch.randn_like(value)
            elif path.endswith(("q_proj.weight", "k_proj.weight")):
                value *= 2
    return model.to(dtype)


def dequantised(model: Any) -> Any:
    """A copy of a quantised model with a plain linear layer for each quantised one: its library's own weight."""
    copied = copy.deepcopy(model)
    for owner in [*copied.modules()]:
        for name, layer in [*owner.named_children()]:
            weight = getattr(layer, "weight", None)
            if isinstance(layer, StandIn) or (isinstance(layer, nn.Linear) and type(weight) is not nn.Parameter):
                linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
                linear.weight = nn.Parameter(_plain(layer).detach().clone())
                if layer.bias is not None:
                    linear.bias = nn.Parameter(layer.bias.detach().clone())
                setattr(owner, name, linear.eval())
    return copied


# --- what functions make of a model ---


def _pairs() -> Any:
    torch.manual_seed(0)
    prompts = torch.randint(3, 97, (8, 12), generator=torch.Generator().manual_seed(1))
    others = prompts.clone()
    others[:, 4] = (others[:, 4] + 5) % 90 + 3
    return tls.logit_difference(prompts, 6, 8, counterfactual=others)


def _saved(model: Any) -> pd.DataFrame:
    """A spectral copy's logits after its parameters were saved and loaded again."""
    with tempfile.TemporaryDirectory() as folder:
        spectral = tls.to_spectral(model)
        save_spectral(spectral, Path(folder) / "learned.safetensors")
        again = load_spectral(model, Path(folder) / "learned.safetensors")
    return _logits(again)


@torch.no_grad()
def _logits(model: Any) -> pd.DataFrame:
    return pd.DataFrame(model(PROMPT[None])[0].float().numpy())


def _gradients(model: Any) -> pd.DataFrame:
    stream = {}
    hook = "blocks.1.hook_in" if "blocks.1.hook_in" in model.hook_dict else "blocks.1.hook_resid_pre"

    def keep(value: Tensor, hook: Any) -> Tensor:
        stream["x"] = value.detach().requires_grad_()
        return stream["x"]

    with model.hooks(fwd_hooks=[(hook, keep)]):
        model(PROMPT[None])[0, -1, 5].backward()
    return pd.DataFrame(stream["x"].grad[0].numpy())


Call = Callable[[Any], pd.DataFrame]
CALLS: dict[str, dict[str, Call]] = {
    "head table": {
        "analyze_heads": lambda model: tls.analyze_heads(model, null_draws=20, extras=["score_asym"]),
        "head_directions": lambda model: tls.head_directions(model, "L1H2"),
        "frequency_table": tls.frequency_table,
        "k_composition": tls.k_composition,
    },
    "detectors": {
        "detect_heads": tls.detect_heads,
        "relative_position_kernel": lambda model: tls.relative_position_kernel(model, "L1H1"),
    },
    "ablations": {
        part: lambda model, part=part: tls.ablation_sweep(model, part, control="random", draws=2)
        for part in ("symmetric", "antisymmetric", "rope_phase", "output")
    },
    "edges": {
        "edge_effects": lambda model: tls.edge_effects(model, ["L1H1.q", "L1KV1.k", "L1KV0.v", "L1MLP"], task=_pairs()),
    },
    "attribution": {
        "qk_attribution": lambda model: tls.qk_attribution(model, PROMPT, "L1H1", -1, 17, remove=3, top=8),
        "by token": lambda model: tls.ov_attribution(model, PROMPT, None, -2, direction=(6, 8)),
        "by source": lambda model: tls.ov_attribution(model, PROMPT, "L1", -2, direction=(6, 8), by="source"),
    },
    "gradients": {
        "of the stream": _gradients,
        "screen": lambda model: tls.ablation_sweep(model, "output", task=_pairs(), screen="gradient"),
        "EAP": lambda model: tls.edge_effects(model, task=_pairs(), screen="gradient", method="EAP"),
    },
    "gradients of W (`qk_penalty`)": {
        "qk_penalty": lambda model: pd.DataFrame({"value": [float(tls.heads.qk_penalty(model, "symmetric").detach())]})
    },
    "spectral copies (`to_spectral`)": {"to_spectral": lambda model: _logits(tls.to_spectral(model))},
    "saves (`save_spectral`)": {"save_spectral": _saved},
    "merged spectral copies (`merge`)": {"merge": lambda model: _logits(merge(tls.to_spectral(model)))},
    "pruned copies (`bake`)": {"bake": lambda model: _logits(tls.load_model(tls.hooks.bake(model, "L0H1")))},
}
"""The rows of the table: by row, the functions by name, each with a table of a model as its result."""


def largest_difference(found: pd.DataFrame, expected: pd.DataFrame) -> float:
    """The largest difference of two tables over all numbers, in units of the column's largest number.

    Rows are paired by their labels and whole numbers, not by their order, which can depend on rounding.
    """
    numbers = [name for name, of in expected.items() if of.dtype.kind == "f" or isinstance(of.iloc[0], list)]
    keys = [name for name in expected if name not in numbers]
    rows = [table.assign(**{key: table[key].astype(str) for key in keys}) for table in (found, expected)]
    if keys:
        rows = [table.sort_values(keys, kind="stable").reset_index(drop=True) for table in rows]
    if len(found) != len(expected) or not all(rows[0][key].equals(rows[1][key]) for key in keys):
        return float("nan")
    worst = 0.0
    for name in numbers:
        a, b = (np.array(table[name].tolist(), float) for table in rows)
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            return float("nan")
        size = np.nanmax(np.abs(b), initial=0.0)
        worst = max(worst, float(np.nanmax(np.abs(a - b), initial=0.0)) / max(size, 1e-3))
    return worst


SAME = 1e-3
"""What counts as the same. Measured: 0 where a layer de-quantises W and multiplies. Where it multiplies first (int8),
changes of a loss near 0 differ by 2.4e-4 of the largest. The unquantised W is off by .009 in 8 bits."""


def outcome(call: Call, model: Any, plain: Any) -> str:
    """ "yes" if a call says of a quantised model what it says of the plain one, "no" if it is refused."""
    try:
        found = call(model)
    except BadWeights as error:
        return "no" if "quantised weights" in str(error) else str(error)
    difference = largest_difference(found, call(plain))
    return "yes" if difference <= SAME else f"off by {difference:.1e}"


def activations(kind: Kind) -> str:
    """ "no" if `load_model` refuses a model whose layers quantise their inputs, by name and with the number."""
    with pytest.raises(BadWeights, match=r"layers\.0\.self_attn\.q_proj, a .* is not linear: .* is 0\.0\d+ of its out"):
        tls.load_model(kind.quantised(qwen2()))
    return "no"


def table() -> str:
    """The table of docs/models.md."""
    kinds = {name: kind for name, kind in WEIGHTS.items() if name != "stand-in"}
    refused = {activations(kind) for name, kind in ACTIVATIONS.items() if name != "stand-in"}
    models = {}
    for name, kind in kinds.items():
        quantised = kind.quantised(qwen2())
        models[name] = tls.load_model(quantised), tls.load_model(dequantised(quantised))
    lines = [f"| | {' | '.join(kinds)} | 8-bit activations |", "|---|" + (len(kinds) + 1) * "---|"]
    for row, calls in CALLS.items():
        found = [{outcome(call, *pair) for call in calls.values()} for pair in models.values()] + [refused]
        lines.append(f"| {row} | {' | '.join(', '.join(sorted(cell)) for cell in found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.stdout.write(table() + "\n")
