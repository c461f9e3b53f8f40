"""`analyze_heads`: prove the operators, then spectra, null, phase, copying and detectors of every head."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from os import PathLike
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tlspectral import __version__
from tlspectral.attention import AttentionLayer, AttentionView, attention_view
from tlspectral.checkpoints import CheckpointLayers, layer_named, streamable_checkpoint
from tlspectral.composition import EmbeddingMoments, copying_of_layer, unembedding_times_embedding
from tlspectral.detectors import detect_heads
from tlspectral.errors import BadHead
from tlspectral.heads.extras import position_directions, position_shares, score_asymmetries
from tlspectral.heads.null import LayerSpectra, null_columns
from tlspectral.loading import load_model
from tlspectral.nulls import NULL_COLUMNS, one_thread
from tlspectral.operators import check_scores
from tlspectral.rotary import phase_metrics, phase_norms
from tlspectral.spectra import HeadMetrics, head_metrics
from tlspectral.tables import COLUMNS, EXTRA_COLUMNS, HEAD_COLUMNS

_EXTRAS = tuple(column.name for column in EXTRA_COLUMNS)


def analyze_heads(
    model: Any,
    *,
    layers: Iterable[int] | None = None,
    null_draws: int = 300,
    null_blocks: Literal["shared", "fresh"] = "shared",
    detectors: bool = True,
    tokens: Int[Tensor, "*batch pos"] | None = None,
    extras: Iterable[str] = (),
    n_jobs: int = 1,
    seed: int = 0,
    show_progress: bool = True,
) -> pd.DataFrame:
    """One row per attention head: the spectrum of its norm-folded QK operator against the matched random null.

    The operators are first checked against the model's own attention scores (`verify_scores`); a model that they do not
    reproduce gets no table. The model is not changed.

    Args:
        model: a TransformerBridge or HookedTransformer, or a name or path for `load_model`. With `detectors=False` a
            folder of safetensors is read layer by layer instead, without loading the model (then `outside_m` is NaN).
        layers: layers to tabulate, None for all.
        null_draws: draws of the null per head; the error of a z is about sqrt((1 + z^2/2) / draws).
        null_blocks: `"shared"` draws the random frames once for all heads, so their Monte-Carlo error is common;
            statements about a population of z need `"fresh"`.
        detectors: also run the model on repeated sequences (`detect_heads`), the only slow part on a big model.
        tokens: prompts, [batch, pos], for the self-check, `outside_m` and `score_asym`; None draws 24 random ids.
        extras: `"score_asym"`, `"position_share"`.
        n_jobs: worker processes for the null; the table is the same for any number.
        seed: of the null and of the detector sequences.
        show_progress: a bar per layer.

    Returns:
        DataFrame sorted by layer and head with all columns of `tlspectral.tables.HEAD_COLUMNS`, NaN where a number was
        not computed or has no meaning. `attrs` say which model, weights, versions, seeds and checks it comes from.

    Raises:
        ScoreMismatch, UnsupportedArchitecture, BadWeights: the model cannot be trusted or read; the message says where.
        BadHead: a layer that does not exist.
        ValueError: an unknown extra or kind of block, or fewer than two draws.

    What it does not establish: what a head is for. Spectra are properties of weights; detectors of behaviour on random
    tokens; only an ablation shows that a part of an operator is used.
    """
    extras = tuple(extras)
    _check_arguments(null_draws, null_blocks, extras)
    source = _opened(model, detectors)
    indices = _checked_layers(layers, source.n_layers)
    bar = partial(tqdm, unit="layer", leave=False, disable=not show_progress)
    with one_thread():
        measured = _measure(source, indices, tokens, extras, partial(bar, desc="spectra"))
    nulls = null_columns(
        [layer.spectra for layer in measured],
        draws=null_draws,
        blocks=null_blocks,
        seed=seed,
        n_jobs=n_jobs,
        progress=partial(bar, desc="null"),
    )
    table = pd.concat([pd.DataFrame(at.columns | null) for at, null in zip(measured, nulls, strict=True)])
    detected = None
    if detectors and isinstance(source, AttentionView):
        detected = detect_heads(source.model, seed=seed, show_progress=show_progress)
        table = table.merge(detected, on=["layer", "head"], how="left", validate="one_to_one")
    table["D_head_pct"] = scipy.stats.rankdata(table["D_head"], nan_policy="omit") / table["D_head"].notna().sum()
    controlled = {name: float(table[name].mean()) for name in table if name.endswith("_controlled")}
    wanted = [column.name for column in HEAD_COLUMNS] + [name for name in _EXTRAS if name in extras]
    limits = [layer.valid_up_to for layer in measured if layer.valid_up_to is not None]
    table = table.reindex(columns=wanted).reset_index(drop=True)
    table.attrs = {
        **source.source,
        "weights_sha256": hashlib.sha256("".join(layer.digest for layer in measured).encode()).hexdigest(),
        "versions": _versions(),
        "seed": seed,
        "null_draws": null_draws,
        "null_blocks": null_blocks,
        "control_variate": {name.removesuffix("_controlled"): share for name, share in controlled.items()},
        "score_check": max((layer.check for layer in measured), key=lambda at: at["worst_error"] / at["tolerance"]),
        "detectors": detected.attrs if detected is not None else None,
        "rotary_valid_up_to": min(limits) if limits else None,
        "columns": {name: COLUMNS[name].meaning for name in wanted},
    }
    return table


@dataclass(frozen=True)
class _MeasuredLayer:
    """What one pass over a layer gives; its null comes later."""

    columns: dict[str, Any]
    spectra: LayerSpectra
    digest: str
    valid_up_to: int | None
    check: dict[str, Any]


def _opened(model: Any, detectors: bool) -> AttentionView | CheckpointLayers:
    if not isinstance(model, str | PathLike):
        return attention_view(model)
    streamed = None if detectors else streamable_checkpoint(model)
    return attention_view(load_model(model)) if streamed is None else CheckpointLayers(streamed)


def _measure(
    source: AttentionView | CheckpointLayers,
    indices: Sequence[int],
    tokens: Int[Tensor, "*batch pos"] | None,
    extras: Sequence[str],
    progress: Callable[..., Iterable[int]],
) -> list[_MeasuredLayer]:
    """Everything but null and detectors, one layer's factors in memory at a time."""
    streamed = isinstance(source, CheckpointLayers)
    if streamed and "score_asym" in extras:
        raise ValueError("score_asym needs the model's activations: pass a loaded model, or leave detectors=True")
    whole = None if streamed else check_scores(source, tokens)
    asymmetries = score_asymmetries(source, tokens) if not streamed and "score_asym" in extras else None
    ends = source.ends if streamed else source
    ends_digest = ends.ends_digest()
    moments, circuit = EmbeddingMoments(ends), unembedding_times_embedding(ends)
    directions = position_directions(ends) if "position_share" in extras else None
    measured = []
    for index in progress(indices):
        view, at = (source.layer_view(index), 0) if streamed else (source, index)
        with layer_named(index) if streamed else nullcontext():
            check = check_scores(view, tokens) if whole is None else whole
            layer = _measure_layer(view.layer(at), index, check.of_layer(at) | {"layer": index}, moments, directions)
            output = view.output(at)
        columns = copying_of_layer(output, circuit)
        if not streamed:  # a streamed layer's input is not its own, and the share depends on it
            columns["outside_m"] = check.outside_m[at]
        if asymmetries is not None:
            columns["score_asym"] = asymmetries[index]
        digest = layer.digest + output.digest + ends_digest
        del output  # before the next layer is read
        measured.append(replace(layer, columns=layer.columns | columns, digest=digest))
    return measured


def _measure_layer(
    layer: AttentionLayer, index: int, check: dict[str, Any], moments: EmbeddingMoments, directions: Tensor | None
) -> _MeasuredLayer:
    """What the query-key factors say. They are freed on return, so that two layers' never meet."""
    w_q, w_k = layer.operator_factors()
    metrics = head_metrics(w_q, w_k, storage_dtype=layer.storage_dtype, effective_dimension=layer.effective_dimension)
    columns = _identity_columns(layer, index) | _metric_columns(metrics) | _phase_columns(layer, w_q, w_k)
    columns["self_match"] = moments.self_match(w_q, w_k)
    columns["position_share"] = position_shares(w_q, w_k, directions)
    return _MeasuredLayer(
        columns=columns,
        spectra=_layer_spectra(layer, index, metrics),
        digest=layer.digest,
        valid_up_to=layer.rotary.valid_up_to if layer.rotary else None,
        check=check,
    )


def _check_arguments(null_draws: int, null_blocks: str, extras: Sequence[str]) -> None:
    unknown = [name for name in extras if name not in _EXTRAS]
    if unknown:
        raise ValueError(f"unknown extras {unknown}; there are {', '.join(_EXTRAS)}")
    if null_blocks not in ("shared", "fresh"):
        raise ValueError(f"null_blocks must be 'shared' or 'fresh', not {null_blocks!r}")
    if null_draws < 2:
        raise ValueError(f"the null needs at least two draws, found null_draws={null_draws}")


def _checked_layers(layers: Iterable[int] | None, n_layers: int) -> list[int]:
    chosen = sorted({int(index) for index in (range(n_layers) if layers is None else layers)})
    wrong = [index for index in chosen if not 0 <= index < n_layers]
    if wrong or not chosen:
        raise BadHead(f"layers {wrong or chosen} cannot be tabulated: the model has layers 0 to {n_layers - 1}")
    return chosen


def _identity_columns(layer: AttentionLayer, index: int) -> dict[str, Any]:
    heads = np.arange(layer.n_heads)
    return {
        "layer": np.full(layer.n_heads, index),
        "head": heads,
        "name": [f"L{index}H{head}" for head in heads],
        "kv_head": [layer.kv_head(int(head)) for head in heads],
        "bilinear": [layer.bilinear] * layer.n_heads,
    }


def _metric_columns(metrics: HeadMetrics) -> dict[str, Any]:
    names = {column.name for column in HEAD_COLUMNS}
    return {name: value for name, value in vars(metrics).items() if name in names}


def _phase_columns(layer: AttentionLayer, w_q: Tensor, w_k: Tensor) -> dict[str, Any]:
    if layer.rotary is None:
        return {}
    phase = phase_metrics(phase_norms(w_q, w_k, layer.rotary), layer.rotary)
    columns = {name: value.numpy() for name, value in phase._asdict().items()}
    return columns | {"rotary_fraction": np.full(layer.n_heads, layer.rotary.rotary_fraction)}


def _layer_spectra(layer: AttentionLayer, index: int, metrics: HeadMetrics) -> LayerSpectra:
    observed = {name: getattr(metrics, name) for name in NULL_COLUMNS}
    return LayerSpectra(index, layer.effective_dimension, metrics.singular_values, observed)


def _versions() -> dict[str, str]:
    packages = ("transformer-lens", "transformers", "torch", "numpy", "scipy")
    return {"tlspectral": __version__} | {package: version(package) for package in packages}
