"""`analyze_heads`: the head table, with spectra, random null, phase, copying and detectors of every head."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Literal

import pandas as pd
import scipy.stats

from tlspectral.errors import BadHead, shown
from tlspectral.errors.settings import checked_settings
from tlspectral.heads.detectors.heads import require_max_se
from tlspectral.heads.loaded import DETECTORS, OF_ACTIVATIONS, LoadedLayers
from tlspectral.heads.streamed import streamed_layers
from tlspectral.heads.weight_columns import NullSettings, forget_blocks
from tlspectral.models.opening import open_layers
from tlspectral.models.reading.digests import recorded_weights
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import even_rows
from tlspectral.models.running.given import given_prompts
from tlspectral.selection.heads_as_written import HEADS_PER_GROUP, Heads, recorded_groups
from tlspectral.tables.head_columns import ANALYZE_HEADS, COLUMNS, EXTRA_COLUMNS, HEAD_COLUMNS, LATENT_COLUMNS
from tlspectral.tables.measurement import Measurement, stacked
from tlspectral.tables.same_model import require_same_model
from tlspectral.tables.schema import require
from tlspectral.tasks.repeated import repeated_sequences
from tlspectral.version import __version__

_EXTRAS = tuple(column.name for column in EXTRA_COLUMNS)
_PACKAGES = ("transformer-lens", "transformers", "torch", "numpy", "scipy")


@checked_settings
def analyze_heads(
    model: Any,
    *,
    heads: Heads | None = None,
    null_draws: int = 100,
    null_blocks: Literal["shared", "fresh"] = "shared",
    null_dtype: Literal["float32", "float64"] = "float32",
    detectors: bool = True,
    n_sequences: int = 200,
    max_se: float | None = 0.02,
    prompts: Any = None,
    extras: Iterable[str] = (),
    folder: str | os.PathLike[str] | None = None,
    n_jobs: int = 1,
    seed: int = 0,
) -> pd.DataFrame:
    """Return the head table: one row per attention head, with its query-key spectrum against a random null, and
    detectors.

    Start here. The operators are first checked against the model's own scores; a model that fails gets no table.

    >>> import tlspectral as tls
    >>> heads = tls.analyze_heads(tls.load_model("tiny-rope"), null_draws=2, n_sequences=8)
    >>> heads.loc[heads["ind"] > 0.5, "name"].tolist()
    ['L1H0', 'L1H1', 'L1H2', 'L1H3']

    Args:
        model: a TransformerBridge or HookedTransformer, a model of transformers, or a name or path for `load_model`.
            With `detectors=False`, a name is read from its files layer by layer.
        heads: "L5H1", (5, 1), "L5" (a layer), "L5KV1" (a key/value group), a list of these, or a table with columns
            `layer` and `head`. Default: all. `D_head_pct` is the percentile among these heads.
        null_draws: random matrices to compare each head with, 2 or more. Use 300 for statements about all heads.
        null_blocks: "shared" (the same random directions for all heads), or "fresh" for statements about all heads.
        null_dtype: precision of the null's eigenvalues: "float32" (only where rounding does not matter) or "float64".
        detectors: True also runs the model on random sequences that repeat a segment.
        n_sequences, max_se: at most `n_sequences` are run; fewer if every standard error is below `max_se` before.
        prompts: strings, token ids [batch, pos] or a tokenizer's batch, for check and extras. Default: 24 random ids.
        extras: more columns: "score_asym", "position_share" (learned positions), "content_scale" (latent attention).
        folder: keeps a file per layer; the same call resumes from it.
        n_jobs: threads for a loaded model (1: all cores); processes for a model that is read from files.
        seed: seed of the null and of the detectors.

    Returns:
        DataFrame sorted by layer and head. Main columns: `D_head` (Σ|Im λ| / Σ|λ|, the eigenvalues λ of M = W_Q W_K^T)
        and `dir_frac` (‖M_A‖ / ‖M‖, M_A the antisymmetric part), from 0 to 1, with their null (`D_head_null_mean`,
        `D_head_z`, ...); `rope_imag_frac` (share of phase); `prev`, `dup`, `ind` (mean attention, see `detect_heads`);
        `copying`. `tls.tables.describe_columns()` explains all. NaN: not computed or without meaning. `attrs` hold
        model, hashes, settings, check and your hooks.

    Raises:
        ScoreMismatch, UnsupportedArchitecture, BadWeights: the model cannot be trusted or read.
        BadHead: a head does not exist, or `heads` is empty.
        IncompatibleCheckpoint: `folder` holds work on other weights, hooks, prompts or settings.
        ValueError, FileNotFoundError, TypeError, ImportError: an unknown setting, or a model that cannot be loaded.

    Not established: what a head is for. Only an ablation shows that a part is used. More: docs/table.md.
    """
    extras = tuple(extras)
    unknown = [name for name in extras if not isinstance(name, str) or name not in _EXTRAS]
    if unknown:
        raise ValueError(f"unknown extras {shown(unknown)}: give some of {', '.join(_EXTRAS)}")
    null = NullSettings(seed, null_draws, null_blocks, null_dtype)
    require_max_se(max_se)
    with open_layers(model, load=detectors, report_hooks=True) as source:
        chosen = heads_by_layer(source, heads)
        if not chosen:
            raise BadHead("heads= is empty: give at least one head, such as heads='L5H1', or heads=None for all")
        score = None
        if isinstance(source, AttentionView):
            # Drawn first: a wrong n_sequences is then refused before the null is computed.
            sequences = even_rows(repeated_sequences(source, n_sequences=n_sequences, seed=seed)) if detectors else None
            copied_prompts = None if prompts is None else given_prompts(prompts)  # a generator can be read once
            loaded = LoadedLayers(source, chosen, null, extras, copied_prompts, sequences, max_se, n_jobs)
            identity, jobs, score = loaded.identity(), loaded.jobs(), loaded.attention
            n_jobs = 1  # each job uses all threads, and one of them runs the model
        else:
            needs = ["prompts"] * (prompts is not None) + [name for name in extras if name in OF_ACTIVATIONS]
            if needs:
                raise ValueError(
                    f"{needs[0]} needs the model's activations, but this model is read from its files: give a loaded "
                    "model, or leave detectors=True"
                )
            identity, jobs = streamed_layers(source, chosen, null, extras, folder)
        measurement = Measurement(ANALYZE_HEADS, asdict(null), source.source, identity, folder, score, n_jobs)
        try:
            tables = measurement.made(jobs, description="heads", unit="layer" if len(jobs) == len(chosen) else "job")
        finally:
            forget_blocks()
        detected = tables.pop(DETECTORS, None)
        layer_attrs = [layer_table.attrs for layer_table in tables.values()]
        table = stacked(tables.values())
        if detected is not None:
            table = table.merge(detected.drop(columns="name"), on=["layer", "head"], how="left", validate="one_to_one")
        table["D_head_pct"] = scipy.stats.rankdata(table["D_head"], nan_policy="omit") / table["D_head"].notna().sum()
        controlled = [name for name in table if name.endswith("_controlled")]
        control_variate = {name.removesuffix("_controlled"): float(table[name].mean()) for name in controlled}
        wanted = [column.name for column in (*HEAD_COLUMNS, *LATENT_COLUMNS) if column.always or column.name in table]
        wanted += [name for name in _EXTRAS if name in extras]
        limits = [attrs["valid_up_to"] for attrs in layer_attrs if attrs["valid_up_to"] is not None]
        return measurement.table(
            table.reindex(columns=[name for name in wanted if name != "name"]),
            **recorded_weights(
                {index: attrs["digest"] for index, attrs in zip(chosen, layer_attrs, strict=True)}, source.n_layers
            ),
            **recorded_groups(
                {index: attrs.get(HEADS_PER_GROUP) for index, attrs in zip(chosen, layer_attrs, strict=True)}
            ),
            versions={"tlspectral": __version__} | {package: version(package) for package in _PACKAGES},
            control_variate=control_variate,
            score_check=max(
                (attrs["check"] for attrs in layer_attrs), key=lambda check: check["worst_error"] / check["tolerance"]
            ),
            detectors=detected.attrs if detected is not None else None,
            rotary_valid_up_to=min(limits) if limits else None,
            columns={name: COLUMNS[name].meaning for name in wanted},
        )


def require_table_of(view: AttentionView, heads: pd.DataFrame) -> None:
    """Raise ValueError unless the head table `heads` (of all or some layers) was made from the weights of the model in
    `view`.

    Weights are compared by hash, or by name and revision where a hash is missing. A table without `attrs` passes.
    """
    require(heads, ("layer", "head"), "analyze_heads", name="table of heads")
    layers = sorted({int(layer) for layer in heads["layer"]})
    require_same_model(heads, view.origin(layer for layer in layers if layer < view.n_layers), "the loaded weights")
    if layers[-1] >= view.n_layers:
        raise ValueError(
            f"the head table has layer {layers[-1]}, but the model has layers 0 to {view.n_layers - 1}: give the table "
            "of this model, analyze_heads(model)"
        )
