"""One function written three ways: as trained, with norms folded, and with gains moved into the next weights.

`TABLES` are what is measured of it; none of them may depend on how the function is written.
"""

import functools
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
import zoo
from pair_prompts import prompt_pairs
from positional_measurements import EQUAL_BLOCKS, block_prompt

import tlspectral as tls
from tlspectral.hooks import parts

PROMPTS, SWAPPED = prompt_pairs(8, 14, seed=3)
KINDS = {
    "LN": {"normalization_type": "LN", "positional_embedding_type": "standard"},
    "RMS gated": {"normalization_type": "RMS", "gated_mlp": True, "n_key_value_heads": 2},
    "LN parallel": {"normalization_type": "LN", "parallel_attn_mlp": True},
    "RMS standard": {"normalization_type": "RMS", "positional_embedding_type": "standard"},
    "spectral": {"normalization_type": "RMS", "spectral": True},
    "spectral LN parallel": {"normalization_type": "LN", "parallel_attn_mlp": True, "spectral": True},
}
"""Architectures of two layers. Positions are rotary unless said otherwise."""


@functools.cache
def written(kind: str) -> dict[str, Any]:
    """A random model as it is trained, with folded norms, and with moved gains. Not to be changed."""
    trained, folded, moved = (built(**KINDS[kind]) for _ in range(3))
    moved.load_state_dict(drawn(trained).state_dict())
    with torch.no_grad():
        _move_gains(moved)
    state = trained.state_dict()
    # Folding alone: the other steps change what heads write, so zero ablation and sums over sources depend on them.
    others = dict.fromkeys(("center_writing_weights", "center_unembed", "fold_value_biases"), False)
    folded.load_and_process_state_dict({name: one.clone() for name, one in state.items()}, fold_ln=True, **others)
    return {"as trained": trained.eval(), "folded": folded.eval(), "moved": moved.eval()}


def built(*, spectral: bool = False, **changes: Any) -> Any:
    """A HookedTransformer of two layers with learned or rotary positions. Its weights are not drawn."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    shape = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_head": 8, "d_mlp": 48, "n_ctx": 32, "act_fn": "gelu"}
    shape |= {"d_vocab": zoo.VOCABULARY, "seed": 0, "default_prepend_bos": False, "device": "cpu"}
    shape |= {"positional_embedding_type": "rotary", "rotary_dim": 8, "init_weights": False, **changes}
    make = tls.SpectralHookedTransformer if spectral else HookedTransformer
    return make(HookedTransformerConfig(**shape))


@torch.no_grad()
def drawn(model: Any) -> Any:
    """The model with random weights: gains around 1 and biases around 0, as training leaves them."""
    stream = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=stream)
        if "spectral" in name:
            parameter += 0.2 * values
        elif parameter.ndim == 1 or ".b_" in name or "._b_" in name:
            parameter.copy_(0.3 * values + float(name.endswith(".w")))
        else:
            wide = 3.0 if name.endswith(("W_Q", "W_K")) else 1.0
            parameter.copy_(values if "embed.W_" in name else wide * values / parameter.shape[-2] ** 0.5)
    return model


def _move_gains(model: Any) -> None:
    """Halve or double each column of a norm and do the opposite to the weights that read it, which no bit notices."""
    stream = torch.Generator().manual_seed(1)
    for block in model.blocks:
        attention, mlp = block.attn, block.mlp
        inputs = [getattr(attention, name) for name in ("W_Q", "_W_K", "_W_V") if hasattr(attention, name)]
        inputs += [getattr(attention, name) for name in ("W_K", "W_V") if name in attention._parameters]
        _move(block.ln1, inputs, stream)
        _move(block.ln2, [mlp.W_in, *([mlp.W_gate] if hasattr(mlp, "W_gate") else [])], stream)
    _move(model.ln_final, [model.unembed.W_U], stream)


def _move(norm: Any, weights: list[Any], stream: torch.Generator) -> None:
    factor = 2.0 ** torch.randint(0, 2, norm.w.shape, generator=stream).mul(2).sub(1)
    for parameter in norm.parameters():
        parameter /= factor
    for weight in weights:
        weight *= factor[:, None]


@functools.cache
def task(kind: str) -> Any:
    """Pairs with the answers by which the two sides differ in each."""
    model = written(kind)["as trained"]
    change = (zoo.logits(model, PROMPTS) - zoo.logits(model, SWAPPED))[:, -1]
    return tls.logit_difference(PROMPTS, change.argmax(-1), change.argmin(-1), counterfactual=SWAPPED)


@functools.cache
def circuit_edges(kind: str) -> pd.DataFrame:
    """Estimates of all edges of the model as it is trained. Without `attrs`, which say of which weights they are."""
    table = _estimates(written(kind)["as trained"], kind, "EAP")
    return pd.DataFrame({name: table[name].to_numpy() for name in ("sender", "receiver", "estimate")})


def _estimates(model: Any, kind: str, method: Any) -> pd.DataFrame:
    table = tls.edge_effects(model, task=task(kind), screen=2, method=method)
    return _by_name(table.filter(["receiver", "sender", "estimate", "estimate_se"]))


def _by_name(table: pd.DataFrame) -> pd.DataFrame:
    """The rows in the order of what they are of, not of their size, which rounding can exchange."""
    names = [column for column in table if not pd.api.types.is_float_dtype(table[column])]
    return table.sort_values(names, ignore_index=True)


def _circuit(model: Any, kind: str) -> pd.DataFrame:
    value = tls.run_circuit(model, circuit_edges(kind)[::3], task(kind)).value
    return pd.DataFrame({"value": [value]})


def _qk_terms(by: Any) -> Any:
    def table(model: Any, kind: str) -> pd.DataFrame:
        return _by_name(tls.qk_attribution(model, PROMPTS[0], "L1H1", 10, 4, by=by))

    return table


def _sweep(part: Any) -> Any:
    # delta_p counts random signs, which rounding can exchange, and its floor the differences that are not 0.
    return lambda model, kind: tls.ablation_sweep(model, part, task=task(kind)).drop(
        columns=["delta_p", "delta_p_floor"]
    )


Table = Callable[[Any, str], pd.DataFrame]
OF_MLPS: dict[str, Table] = {
    "edge_effects": lambda model, kind: tls.edge_effects(model, ["L0MLP", "L1MLP", "logits"], task=task(kind)),
    "EAP": lambda model, kind: _estimates(model, kind, "EAP"),
    "EAP-IG": lambda model, kind: _estimates(model, kind, "EAP-IG"),
    "run_circuit": _circuit,
    "faithfulness": lambda model, kind: tls.faithfulness(model, circuit_edges(kind), task(kind), sizes=[0.1, 0.4]),
}
"""What is measured of a model of a kind by edges into its MLPs, by name."""

OF_ROTATIONS: dict[str, Table] = {
    "frequency_table": lambda model, kind: tls.frequency_table(model),
    "qk_attribution frequency": _qk_terms("frequency"),
    "ablation_sweep rope_phase": _sweep("rope_phase"),
    "ablation_sweep band": _sweep(parts.Band([0])),
}
"""What a model with rotary positions has."""

OF_HEADS: dict[str, Table] = {
    "analyze_heads": lambda model, kind: tls.analyze_heads(model, null_draws=2, n_sequences=4, max_se=None),
    "detect_heads": lambda model, kind: tls.detect_heads(model, prompts=PROMPTS),
    "copying_scores": lambda model, kind: tls.heads.copying_scores(model),
    "k_composition": lambda model, kind: tls.k_composition(model),
    "relative_position_kernel": lambda model, kind: tls.relative_position_kernel(model, prompts=PROMPTS),
    "kernel_prediction": lambda model, kind: tls.heads.kernel_prediction(model, prompts=PROMPTS),
    "top_pairs": lambda model, kind: _by_name(tls.top_pairs(model, "L1", PROMPTS, n=4)),
    "scores": lambda model, kind: tls.scores(model, PROMPTS[0], "L1H1"),
    "scores antisymmetric": lambda model, kind: tls.scores(model, PROMPTS[0], "L1H1", "antisymmetric"),
    "qk_attribution source": _qk_terms("source"),
    "qk_attribution mode": _qk_terms("mode"),
    "ov_attribution": lambda model, kind: _by_name(tls.ov_attribution(model, PROMPTS[0], "L1H1", 10, by="source")),
    "head_directions": lambda model, kind: tls.head_directions(model, "L1H1", draws=20),
    "ablation_sweep symmetric": _sweep("symmetric"),
    "ablation_sweep antisymmetric": _sweep("antisymmetric"),
    "ablation_sweep mode": _sweep(parts.Mode(0)),
    "ablation_sweep output": _sweep("output"),
    "ablation_sweep zero": _sweep(parts.Output("zero")),
    "ablation_sweep random": lambda model, kind: tls.ablation_sweep(
        model, "antisymmetric", heads="L1", task=task(kind), control="random", draws=2
    ).drop(columns=["delta_p", "delta_p_floor", "control_draws"]),
    "edges into heads": lambda model, kind: tls.edge_effects(model, ["L1H1.q", "L1H1.k", "L1H1.v"], task=task(kind)),
    "positional_symbolic": lambda model, kind: tls.positional_symbolic(model, block_prompt()),
    "logit_shares": lambda model, kind: tls.positional.logit_shares(model, EQUAL_BLOCKS),
    "qk_penalty": lambda model, kind: pd.DataFrame({"share": [tls.heads.qk_penalty(model, "antisymmetric").item()]}),
}
"""What is measured of heads."""

TABLES = OF_MLPS | OF_ROTATIONS | OF_HEADS


def has(kind: str, table: str) -> bool:
    return table not in OF_ROTATIONS or KINDS[kind].get("positional_embedding_type", "rotary") == "rotary"
