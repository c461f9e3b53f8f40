"""The head table of a loaded model: a job for each layer, and one for the detectors."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import joblib
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.algebra.nulls import one_thread
from tlspectral.heads.copying import EmbeddingMoments, copying_of_layer, unembedding_times_embedding
from tlspectral.heads.detectors.heads import measured_detectors
from tlspectral.heads.operators.verification import LayerCheck, check_scores, checked_prompts
from tlspectral.heads.threads import in_threads, thread_count
from tlspectral.heads.weight_columns import (
    MeasuredHeads,
    NullSettings,
    ReadStreams,
    blocks_at_once,
    measure_heads,
    of_heads,
    position_directions,
    read_streams,
    with_null,
)
from tlspectral.models.reading.layer import AttentionLayer, OutputFactors, folded_groups
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens
from tlspectral.models.running.passes import capture_until
from tlspectral.selection import head_name
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import backend_configured
from tlspectral.version import __version__

DETECTORS = "detectors"
"""Name of the job of the detectors."""

OF_ACTIVATIONS = ("score_asym", "content_scale")
"""Extras that need a run of the model."""


@dataclass(frozen=True)
class LoadedLayers:
    """The layers of a loaded model, measured one after the other, each on all threads.

    The self-check runs, and the sums over the vocabulary are made, when a layer is measured that no folder holds.

    Attributes:
        prompts: of the self-check and of `extras`; None for the random prompt.
        sequences: of the detectors; None without them.
        n_jobs: threads, as `thread_count` counts them. In a block of `joblib.parallel_config` with a backend any number
            but 1 is workers of that backend, for the null.
    """

    view: AttentionView
    chosen: dict[int, list[int]]
    null: NullSettings
    extras: Collection[str]
    prompts: Any
    sequences: PackedTokens | None
    max_se: float | None
    n_jobs: int

    def identity(self) -> dict[str, Any]:
        """Return by what, beside the settings, a folder of this table is told apart."""
        # A layer that is wanted whole is stored whole, and any later call that wants it whole reads it.
        partly = {layer: heads for layer, heads in self.chosen.items() if len(heads) < self.view.n_heads(layer)}
        ran = self.sequences
        return {
            "weights": self.view.weights_digest,
            "prompts": None if self.prompts is None else lambda: checked_prompts(self.view, self.prompts).hashed(),
            "extras": sorted(self.extras),
            "heads": [[layer, head] for layer, heads in partly.items() for head in heads],
            "n_sequences": None if ran is None else len(ran.tokens),
            "max_se": None if ran is None or self.max_se is None else float(self.max_se),
            "detectors": None if ran is None else ran.hashed(),
            "tlspectral": __version__,
        }

    def attention(self) -> dict[str, float]:
        """Return numbers of each head that other hooks on the model would change, by what they are of.

        They are means over queries of attention, weighted by a random number for each key: on the prompts of the
        self-check, and on the first sequence of the detectors, since a hook can act on long prompts alone.
        """
        packed = {"the prompts": checked_prompts(self.view, self.prompts)}
        if self.sequences is not None:
            packed["a sequence"] = PackedTokens(self.sequences.tokens[:1], self.sequences.lengths[:1])
        points = {layer: self.view.hook_names(layer)["pattern"] for layer in self.view.layers}
        found: dict[str, float] = {}
        for name, one in packed.items():
            captured = capture_until(self.view, one.tokens, points.values(), last=points[max(points)])
            weights = torch.rand(one.tokens.shape[1], generator=torch.Generator().manual_seed(0)).double()
            for layer, point in points.items():
                if point in captured:  # a layer that hands on no pattern is refused by the self-check
                    of_heads = (captured[point].cpu().double() @ weights).mT[one.real].mean(0)
                    found |= {f"{head_name(layer, i)} on {name}": value for i, value in enumerate(of_heads.tolist())}
        return found

    def jobs(self) -> list[Job]:
        """Return a job for each layer, in order, then the job of the detectors."""
        jobs = [Job(f"L{index:03d}", partial(self.table, index, heads)) for index, heads in self.chosen.items()]
        if self.sequences is not None:
            measure = partial(measured_detectors, self.view, self.sequences, max_se=self.max_se, seed=self.null.seed)
            jobs.append(Job(DETECTORS, measure))
        return jobs

    def table(self, index: int, heads: list[int]) -> pd.DataFrame:
        """Measure some heads of a layer. `attrs` hold `check`, `digest` and `valid_up_to` of the layer."""
        check, layer, streams = self.checks[index], self.view.layer(index), self.streams
        circuit, moments, directions = self.circuit, self.moments, self.directions  # made here, not in the threads
        columns: dict[str, Any] = {"outside_m": check.outside_m}
        if streams is not None and "content_scale" in self.extras:
            layer = streams.with_content_scale(layer)
        if streams is not None and "score_asym" in self.extras:
            with one_thread():
                columns["score_asym"] = streams.score_asymmetry(layer)

        def measure(group: tuple[AttentionLayer, OutputFactors]) -> MeasuredHeads:
            found = measure_heads(group[0], index, moments=moments, directions=directions)
            return replace(found, columns=found.columns | copying_of_layer(group[1], circuit))

        groups = folded_groups(layer, self.view.output(index))
        measured = of_heads(in_threads(measure, groups, thread_count(self.n_jobs)), heads)
        attrs = {"check": check.record, "valid_up_to": layer.valid_up_to}
        del layer, groups  # before the null
        columns = {name: values[heads] for name, values in columns.items()}
        measured = replace(measured, columns=measured.columns | columns)
        table = with_null(measured, self.null, self._each(measured))
        table.attrs = {**attrs, "digest": self.view.layer_digest(index) + self.ends}
        return table

    def _each(self, measured: MeasuredHeads) -> Callable[..., Iterable[Any]]:
        """Return a `map` over heads: in threads, or in the workers that the caller configured."""
        if self.n_jobs not in (None, 1) and backend_configured():
            workers = joblib.Parallel(self.n_jobs)
            return lambda function, items: workers(joblib.delayed(function)(item) for item in items)
        threads = min(thread_count(self.n_jobs), blocks_at_once(measured, self.null))
        return lambda function, items: in_threads(function, items, threads)

    # What all layers need, made when the first of them is measured. Large products run on all threads of torch.

    @cached_property
    def checks(self) -> dict[int, LayerCheck]:
        """Results of the self-check by layer."""
        return check_scores(self.view, self.prompts)

    @cached_property
    def ends(self) -> str:
        """Hash of embedding, unembedding and final norm."""
        return self.view.ends_digest()

    @cached_property
    def moments(self) -> EmbeddingMoments:
        """Sums over the vocabulary, for `self_match`."""
        return EmbeddingMoments(self.view)

    @cached_property
    def circuit(self) -> Float64[Tensor, "d_model d_model"] | None:
        """W_U W_E, for `copying`."""
        return unembedding_times_embedding(self.view)

    @cached_property
    def streams(self) -> ReadStreams | None:
        """Residual streams on the prompts, for extras that need them."""
        return read_streams(self.view, self.prompts) if {*self.extras} & {*OF_ACTIVATIONS} else None

    @cached_property
    def directions(self) -> Float64[Tensor, "d_model directions"] | None:
        """Directions of learned positions, if asked for."""
        return position_directions(self.view) if "position_share" in self.extras else None
