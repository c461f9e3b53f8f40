"""Measures of a constrained run at an evaluation: losses, and attention, kernels and spectra of every head."""

from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tlspectral.algebra.rotary import phase_metrics, phase_norms
from tlspectral.algebra.spectra import head_metrics
from tlspectral_studies.common.gradient_steps import to_device_of
from tlspectral_studies.common.model import Attended, AttentionOnlyTransformer
from tlspectral_studies.common.random_map import (
    RandomMapBatch,
    induction_attention,
    previous_token_attention,
    token_losses,
)
from tlspectral_studies.common.trainer import Penalty
from tlspectral_studies.fingerprint.constrained.penalties import rotary_pairs

KERNEL_OFFSETS = range(-8, 1)
_SPECTRA = ("dir_frac", "D_head", "rope_imag_frac")


@torch.no_grad()
def measure(
    model: AttentionOnlyTransformer, batch: RandomMapBatch, penalty: Penalty | None
) -> dict[str, list[dict[str, Any]]]:
    """Measure a model on sequences of the task (FP section 10).

    Args:
        model: as it is; nothing of it is changed.
        batch: the sequences.
        penalty: its value is recorded; NaN for None.

    Returns:
        Rows of `evaluations`, `heads` and `kernels`, without arm, seed and step. Attention and kernels are means over
        the queries from a quarter of the sequence on.

    What it does not establish: that a head with a high `prev` or `ind` is what the loss depends on.
    """
    batch = RandomMapBatch(*to_device_of(model, *batch))
    logits, layers = model.with_attention(batch.tokens)
    losses = token_losses(logits, batch.tokens)
    prev, ind = previous_token_attention(layers).cpu(), induction_attention(layers, batch.tokens).cpu()
    kernels = position_kernels(layers).cpu()
    spectra = {**spectral_columns(model, folded=True), **spectral_columns(model, folded=False)}
    heads = list(product(range(model.config.n_layers), range(model.config.n_heads)))
    evaluation = {
        "loss": losses.mean().item(),
        "ce_pred": losses[batch.predictable].mean().item(),
        "ce_unpred": losses[batch.noise].mean().item(),
        "prev_best": prev.max().item(),
        "ind_best": ind.max().item(),
        "penalty": float("nan") if penalty is None else penalty(model).item(),
    }
    of_heads = [
        {
            "layer": layer,
            "head": head,
            "prev": prev[layer, head].item(),
            "ind": ind[layer, head].item(),
            **{name: float(values[layer, head]) for name, values in spectra.items()},
        }
        for layer, head in heads
    ]
    of_offsets = [
        {"layer": layer, "head": head, "offset": offset, "score": kernels[layer, head, column].item()}
        for layer, head in heads
        for column, offset in enumerate(KERNEL_OFFSETS)
    ]
    return {"evaluations": [evaluation], "heads": of_heads, "kernels": of_offsets}


def position_kernels(layers: list[Attended]) -> Float[Tensor, "layers heads offsets"]:
    """Mean score before the softmax by `KERNEL_OFFSETS`, over sequences and queries from a quarter of them on."""
    first = layers[0].scores.shape[-1] // 4
    # Entry i of the diagonal is query i - offset, key i.
    return torch.stack(
        [
            torch.stack(
                [
                    layer.scores.diagonal(offset, dim1=-2, dim2=-1)[..., max(first + offset, 0) :].mean((0, -1))
                    for offset in KERNEL_OFFSETS
                ],
                dim=-1,
            )
            for layer in layers
        ]
    )


def spectral_columns(
    model: AttentionOnlyTransformer, *, folded: bool
) -> dict[str, Float64[np.ndarray, "layers heads"]]:
    """`dir_frac`, `D_head` and `rope_imag_frac` of every head, in float64.

    Args:
        model: whose `W_Q`, `W_K` are read.
        folded: with the gain of the norm in front folded in, and centred as LayerNorm centres; names are then plain.
            Else of the weights as they are stored (FP section 10), and names end in `_raw`.

    Returns:
        [layers, heads] by name; `rope_imag_frac` is NaN without rotary positions.
    """
    config = model.config
    geometry = rotary_pairs(config)
    columns: dict[str, list[Any]] = {name: [] for name in _SPECTRA}
    for block in model.layers:
        w_q, w_k = (weight.detach().cpu().double() for weight in (block.attn.W_Q, block.attn.W_K))
        if folded:
            gain = block.ln1.w.detach().cpu().double()[:, None]
            w_q, w_k = (gain * weight for weight in (w_q, w_k))
            w_q, w_k = (weight - weight.mean(1, keepdim=True) for weight in (w_q, w_k))
        metrics = head_metrics(
            w_q, w_k, storage_dtype=torch.float32, effective_dimension=config.d_model - (1 if folded else 0)
        )
        columns["dir_frac"].append(metrics.dir_frac)
        columns["D_head"].append(metrics.D_head)
        if geometry is None:
            columns["rope_imag_frac"].append(np.full(config.n_heads, np.nan))
        else:
            columns["rope_imag_frac"].append(
                phase_metrics(phase_norms(w_q, w_k, geometry), geometry).rope_imag_frac.numpy()
            )
    return {name if folded else f"{name}_raw": np.stack(values) for name, values in columns.items()}
