"""`analyze_heads`: check the operators, then measure spectra, null, phase, copying and detectors of every head."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Literal

import pandas as pd
import scipy.stats

from tlspectral.errors import BadHead
from tlspectral.heads.detectors.heads import require_max_se
from tlspectral.heads.loaded import DETECTORS, OF_ACTIVATIONS, LoadedLayers
from tlspectral.heads.streamed import streamed_layers
from tlspectral.heads.weight_columns import NullSettings, forget_blocks
from tlspectral.models.opening import open_layers
from tlspectral.models.reading.digests import recorded_weights
from tlspectral.models.reading.view import AttentionView, heads_by_layer
from tlspectral.models.running.batches import even_rows
from tlspectral.models.running.given import given_prompts
from tlspectral.selection import Heads
from tlspectral.tables.head_columns import ANALYZE_HEADS, COLUMNS, EXTRA_COLUMNS, HEAD_COLUMNS, LATENT_COLUMNS
from tlspectral.tables.measurement import Measurement, stacked
from tlspectral.tables.same_model import require_same_model
from tlspectral.tables.schema import require
from tlspectral.tasks.repeated import repeated_sequences
from tlspectral.version import __version__

_EXTRAS = tuple(column.name for column in EXTRA_COLUMNS)
_PACKAGES = ("transformer-lens", "transformers", "torch", "numpy", "scipy")


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
    """Return one row per attention head: the spectrum of its norm-folded QK operator against the matched random null.

    >>> import tlspectral as tls
    >>> heads = tls.analyze_heads(tls.load_model("tiny-rope"), null_draws=2, n_sequences=8)
    >>> heads.loc[heads["ind"] > 0.5, "name"].tolist()
    ['L1H0', 'L1H1', 'L1H2', 'L1H3']

    The operators are first checked against the model's own attention scores (`verify_scores`); a model that they do not
    reproduce gets no table. The model is not changed.

    Args:
        model: a TransformerBridge or HookedTransformer, a model of transformers, or a name or path for `load_model`.
            `load_model(name, weights="files")`, and a name with `detectors=False`, is read from its files instead,
            layer by layer, without loading it: queries, keys and norms, from the hub only their files. Architectures:
            `models.checkpoints.layers.STREAMED_MODEL_TYPES`. Each layer's scores are checked on random residual
            streams. `outside_m, self_match, copying, positivity` are NaN, and `weights_sha256` is of what was read.
        heads: heads to tabulate, as in `ablate`: `"L5H1"`, `"L5"` for all of a layer, `"L-1"` for the last one, or a
            list of these; None for all. Their rows are as in the whole table, but `D_head_pct` is the percentile
            among them. Only the layers of these heads are read from files.
        null_draws: draws of the null per head; the error of a z is about sqrt((1 + z^2/2) / draws). 100 are enough to
            rank heads (Spearman correlation of z with the z of 300 draws: .9995 and more); take 300 or more for
            statements about a population of heads.
        null_blocks: `"shared"` draws the random frames once for all heads, so their Monte-Carlo error is common;
            statements about a population of z need `"fresh"`.
        null_dtype: of the eigenvalues of the draws. `"float32"` is used for d_head of 64 or more, and for heads where
            its rounding stays below 1 % of the Monte-Carlo error; all others, and the heads' own spectra, are in
            float64. The random frames are the same.
        detectors: also run the model on repeated sequences (`detect_heads`); of files nothing is run.
        n_sequences, max_se: of the detectors, as in `detect_heads`: sequences at most, and the standard error below
            which no more are run; `max_se=None` runs all.
        prompts: in any form that `Task` takes (strings, ids [batch, pos], a tokenizer's batch), for the
            self-check, `outside_m`, `score_asym` and `content_scale`; None draws 24 random ids.
        extras: `"score_asym"`, `"position_share"`, `"content_scale"`. With the last, M of latent attention weighs its
            content block by the `b` of the prompts' tokens, without the first, in place of the `b` of white input.
        folder: a folder that keeps a file for each layer, and one for the detectors. The next call makes what is
            missing, and returns the same table. No hash shows hooks on a loaded model: attention on the prompts and on
            one sequence is compared with the first call's.
        n_jobs: threads of a loaded model, each with one thread of BLAS. 1 takes all cores that the process may use;
            `OMP_NUM_THREADS` and `torch.set_num_threads` are obeyed. For a model that is read from its files, worker
            processes, which share the layers. In a block of `joblib.parallel_config` with a backend, Dask included, any
            number but 1 is workers of that backend, which share layers or the null. The table is always the same.
        seed: of the null and of the detector sequences.

    Returns:
        DataFrame sorted by layer and head with all columns of `tls.tables.describe_columns()`, NaN where a number was
        not computed or has no meaning. `attrs` hold model, weights, versions, seeds and checks; and as `user_hooks`, if
        any, how many hooks and replaced forwards of yours act in the model, by place; they act in the detectors.

    Raises:
        ScoreMismatch, UnsupportedArchitecture, BadWeights: the model cannot be trusted or read; the message says where.
        BadHead: a layer or head that does not exist, or none at all.
        IncompatibleCheckpoint: `folder` holds work on other weights, hooks, prompts or settings.
        ValueError: an unknown extra, kind of block or dtype, fewer than two draws or sequences, a `max_se` that is not
            above 0, or an argument that does not fit the model.
        FileNotFoundError, TypeError, ImportError: a name that cannot be loaded (see `load_model`).

    What it does not establish: what a head is for. Spectra are properties of weights; detectors of behaviour on random
    tokens; only an ablation shows that a part of an operator is used.
    """
    extras = tuple(extras)
    unknown = [name for name in extras if name not in _EXTRAS]
    if unknown:
        raise ValueError(f"unknown extras {unknown}; there are {', '.join(_EXTRAS)}")
    null = NullSettings(seed, null_draws, null_blocks, null_dtype)
    require_max_se(max_se)
    with open_layers(model, load=detectors, report_hooks=True) as source:
        chosen = heads_by_layer(source, heads)
        if not chosen:
            raise BadHead("heads= chooses none: a table has one head at least")
        score = None
        if isinstance(source, AttentionView):
            # Drawn first, so that a wrong number of them is refused before the null is computed.
            sequences = even_rows(repeated_sequences(source, n_sequences=n_sequences, seed=seed)) if detectors else None
            given = None if prompts is None else given_prompts(prompts)  # a generator can be read once
            loaded = LoadedLayers(source, chosen, null, extras, given, sequences, max_se, n_jobs)
            identity, jobs, score = loaded.identity(), loaded.jobs(), loaded.attention
            n_jobs = 1  # each job uses all threads, and one of them runs the model
        else:
            needs = ["prompts"] * (prompts is not None) + [name for name in extras if name in OF_ACTIVATIONS]
            if needs:
                raise ValueError(
                    f"{needs[0]} needs the model's activations: pass a loaded model, or leave detectors=True"
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
    """Refuse a table of `analyze_heads`, of some or all layers, that was not made from this model's weights.

    Raises ValueError for other weights (or, where hashes cannot be compared, another name or revision), or layers that
    the model does not have. A table without `attrs` does not name its weights, and passes.
    """
    require(heads, ("layer", "head"), "analyze_heads", name="table of heads")
    layers = sorted({int(layer) for layer in heads["layer"]})
    require_same_model(heads, view.origin(layer for layer in layers if layer < view.n_layers), "the loaded weights")
    if layers[-1] >= view.n_layers:
        raise ValueError(
            f"the head table has a layer {layers[-1]} and the model has layers 0 to {view.n_layers - 1}: give the "
            "table of this model"
        )
