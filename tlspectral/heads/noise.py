"""How far the head table moves under the rounding of the stored weights."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tlspectral.attention import AttentionLayer, AttentionView, RawAttention, attention_view, fold_attention
from tlspectral.nulls import one_thread
from tlspectral.rotary import phase_metrics, phase_norms
from tlspectral.spectra import head_metrics

NOISE_COLUMNS = (
    "dir_frac",
    "D_head",
    "lam_mass",
    "imag_mass",
    "henrici",
    "content_pos_frac",
    "spectral_radius",
    "prin_angle_mean",
    "rope_imag_frac",
    "freq_centroid",
    "hi_freq_dir",
)
_BLOCK = 32  # weights that share one scale in the 4-bit formats of llama.cpp, along the input dimension


class StorageSteps(NamedTuple):
    """The grid that stored weights lie on: its name, and the distance of neighbouring values at each weight."""

    kind: str
    step: Float[Tensor, "heads d_model d_head"]


def weight_noise_band(model: Any, *, draws: int = 20, seed: int = 0, show_progress: bool = False) -> pd.DataFrame:
    """Standard deviation of each spectral column when query and key weights move within their storage steps.

    Each draw adds to every weight of W_Q and W_K a uniform amount within half a step of the grid that the weight lies
    on, which is what rounding to that grid may have removed. The grid is read from the weights themselves: blocks of 32
    with at most 16 values (4-bit files, also after de-quantising), bfloat16, float16, else the dtype of the tensor.

    Args:
        model: a TransformerBridge or HookedTransformer with raw weights. Folding moves weights off their grid; what is
            found is in `attrs["storage"]`, so look there for a model that should be quantised.
        draws: perturbed copies of each layer.
        seed: of the perturbations, keyed by layer.
        show_progress: a bar over layers.

    Returns:
        DataFrame `layer, head` and for each spectral and phase column `<column>_sd` (ddof 1 over draws) and
        `<column>_shift` (mean of the perturbed values less the value); NaN where the column has no value.

    Raises:
        ValueError: fewer than two draws.
        UnsupportedArchitecture, BadWeights: a layer cannot be read.

    What it does not establish: how far the unquantised model's numbers lie from these. Quantising is not independent
    noise, and weights elsewhere in the model moved too.
    """
    if draws < 2:
        raise ValueError(f"a standard deviation needs at least two draws, found draws={draws}")
    view = attention_view(model)
    pieces, kinds = [], set()
    with one_thread():
        for index in tqdm(range(view.n_layers), desc="noise", unit="layer", leave=False, disable=not show_progress):
            piece, kind = _layer_band(view, index, draws, seed)
            pieces.append(piece)
            kinds |= kind
    table = pd.concat(pieces, ignore_index=True)
    table.attrs = {**view.source, "storage": sorted(kinds), "draws": draws, "seed": seed}
    return table


def storage_steps(weight: Float[Tensor, "heads d_model d_head"]) -> StorageSteps:
    """The grid of a weight as stored, found from its values."""
    values = weight.detach().cpu().float()
    heads, d_model, d_head = values.shape
    if d_model % _BLOCK == 0:
        blocks = values.reshape(heads, d_model // _BLOCK, _BLOCK, d_head)
        ordered = blocks.sort(dim=2).values
        distinct = (ordered.diff(dim=2) > 0).sum(2) + 1
        if bool((distinct <= 16).all()):
            step = (ordered[:, :, -1] - ordered[:, :, 0]) / 15
            return StorageSteps("4-bit blocks of 32", step.repeat_interleave(_BLOCK, dim=1))
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(values, values.to(dtype).float()):
            return StorageSteps(str(dtype).removeprefix("torch."), _float_steps(values, dtype))
    return StorageSteps(str(weight.dtype).removeprefix("torch."), _float_steps(values, weight.dtype))


def _float_steps(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance to the next representable number: eps times the power of two below."""
    limits = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().clamp_min(limits.smallest_normal)).exponent - 1
    return torch.ldexp(torch.full_like(values, limits.eps), exponent)


def _layer_band(view: AttentionView, index: int, draws: int, seed: int) -> tuple[pd.DataFrame, set[str]]:
    raw = view.raw(index)
    steps = storage_steps(raw.w_q), storage_steps(raw.w_k)
    # Keyed by layer, so that a layer's band does not depend on which others were asked for.
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence([seed, index]).generate_state(1)[0]))
    exact = _columns(view.layer(index))
    moved = [_columns(fold_attention(_perturbed(raw, steps, generator), index)) for _ in range(draws)]
    heads = len(next(iter(exact.values())))
    columns: dict[str, Any] = {"layer": np.full(heads, index), "head": np.arange(heads)}
    for name in NOISE_COLUMNS:
        drawn = np.stack([at.get(name, np.full(heads, np.nan)) for at in moved])
        columns[f"{name}_sd"] = drawn.std(axis=0, ddof=1)
        columns[f"{name}_shift"] = drawn.mean(axis=0) - exact.get(name, np.full(heads, np.nan))
    return pd.DataFrame(columns), {at.kind for at in steps}


def _perturbed(raw: RawAttention, steps: tuple[StorageSteps, StorageSteps], generator: torch.Generator) -> RawAttention:
    def moved(weight: Tensor, at: StorageSteps) -> Tensor:
        shift = torch.rand(at.step.shape, generator=generator, dtype=torch.float64) - 0.5
        return weight.detach().cpu().double() + shift * at.step.double()

    return replace(raw, w_q=moved(raw.w_q, steps[0]), w_k=moved(raw.w_k, steps[1]))


def _columns(layer: AttentionLayer) -> dict[str, np.ndarray]:
    w_q, w_k = layer.operator_factors()
    metrics = head_metrics(w_q, w_k, storage_dtype=layer.storage_dtype, effective_dimension=layer.effective_dimension)
    found = {name: getattr(metrics, name) for name in NOISE_COLUMNS if hasattr(metrics, name)}
    if layer.rotary is not None:
        phase = phase_metrics(phase_norms(w_q, w_k, layer.rotary), layer.rotary)
        found |= {name: value.numpy() for name, value in phase._asdict().items()}
    return found
