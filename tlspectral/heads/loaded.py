"""Jobs that make the head table of a loaded model: one job for each layer, one for the detectors."""

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
from tlspectral.selection.heads_as_written import HEADS_PER_GROUP
from tlspectral.selection.node_names import head_name
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import backend_configured
from tlspectral.version import __version__

DETECTORS = "detectors"
"""Name of the job that runs the detectors."""

OF_ACTIVATIONS = ("score_asym", "content_scale")
"""Extra columns that need a run of the model."""


@dataclass(frozen=True)
class LoadedLayers:
    """A loaded model and the settings of its head table. `jobs` lists the work: one layer at a time, each on all
    threads.

    Attributes:
        view: the model.
        chosen: the heads to tabulate, by layer.
        null: settings of the random null.
        extras: names of extra columns.
        prompts: prompts of the self-check and of `extras`. None: one random prompt.
        sequences: sequences for the detectors. None: no detectors.
        max_se: standard error at which the detectors stop. None: they run all sequences.
        n_jobs: number of threads, read by `thread_count`. Inside `joblib.parallel_config` with a backend, any number
            except 1 sends the null to the workers of that backend.
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
        """Return a dict that identifies the work of a resume folder: hashes of weights, prompts and detector sequences,
        extras, heads, `max_se`, version.

        A resume folder of another identity is refused.
        """
        # A layer with all its heads is left out: its file then serves every call that needs the whole layer.
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
        """Return a dict from a label such as "L0H1 on the prompts" to one number that hooks on the model would change.

        The number is the head's mean attention, each key weighted by a random number. A folder stores it, because no
        hash of weights shows hooks. It is measured on the prompts of the self-check and on the first detector sequence,
        since a hook can act on long prompts only.
        """
        packed = {"the prompts": checked_prompts(self.view, self.prompts)}
        if self.sequences is not None:
            packed["a sequence"] = PackedTokens(self.sequences.tokens[:1], self.sequences.lengths[:1])
        points = {layer: self.view.hook_names(layer)["pattern"] for layer in self.view.layers}
        means: dict[str, float] = {}
        for name, run in packed.items():
            captured = capture_until(self.view, run.tokens, points.values(), last=points[max(points)])
            weights = torch.rand(run.tokens.shape[1], generator=torch.Generator().manual_seed(0)).double()
            for layer, point in points.items():
                if point in captured:  # the self-check refuses a layer without a pattern
                    head_means = (captured[point].cpu().double() @ weights).mT[run.real].mean(0)
                    means |= {f"{head_name(layer, i)} on {name}": value for i, value in enumerate(head_means.tolist())}
        return means

    def jobs(self) -> list[Job]:
        """Return a list of jobs: one for each layer, in order, then the job of the detectors if `sequences` is set."""
        jobs = [Job(f"L{index:03d}", partial(self.table, index, heads)) for index, heads in self.chosen.items()]
        if self.sequences is not None:
            measure = partial(measured_detectors, self.view, self.sequences, max_se=self.max_se, seed=self.null.seed)
            jobs.append(Job(DETECTORS, measure))
        return jobs

    def table(self, index: int, heads: list[int]) -> pd.DataFrame:
        """Return the table of some heads of layer `index`, a row for each head.

        Its `attrs` are `check` (record of the self-check), `digest` (hash of the weights) and `valid_up_to` (longest
        valid prompt, None without a limit).
        """
        check, layer, streams = self.checks[index], self.view.layer(index), self.streams
        circuit, moments, directions = self.circuit, self.moments, self.directions  # computed before the threads start
        columns: dict[str, Any] = {"outside_m": check.outside_m}
        if streams is not None and "content_scale" in self.extras:
            layer = streams.with_content_scale(layer)
        if streams is not None and "score_asym" in self.extras:
            with one_thread():
                columns["score_asym"] = streams.score_asymmetry(layer)

        def measure(group: tuple[AttentionLayer, OutputFactors]) -> MeasuredHeads:
            group_heads = measure_heads(group[0], index, moments=moments, directions=directions)
            return replace(group_heads, columns=group_heads.columns | copying_of_layer(group[1], circuit))

        groups = folded_groups(layer, self.view.output(index))
        measured = of_heads(in_threads(measure, groups, thread_count(self.n_jobs)), heads)
        sizes = {HEADS_PER_GROUP: self.view.heads_per_group(index)}
        attrs = {"check": check.record, "valid_up_to": layer.valid_up_to, **sizes}
        del layer, groups  # frees memory before the null
        columns = {name: values[heads] for name, values in columns.items()}
        measured = replace(measured, columns=measured.columns | columns)
        table = with_null(measured, self.null, self._each(measured))
        table.attrs = {**attrs, "digest": self.view.layer_digest(index) + self.ends}
        return table

    def _each(self, measured: MeasuredHeads) -> Callable[..., Iterable[Any]]:
        """Return a function like `map`, by which `with_null` draws the null for each head of `measured`.

        The function maps in threads, or in joblib workers if the caller configured a backend.
        """
        if self.n_jobs not in (None, 1) and backend_configured():
            workers = joblib.Parallel(self.n_jobs)
            return lambda function, items: workers(joblib.delayed(function)(item) for item in items)
        threads = min(thread_count(self.n_jobs), blocks_at_once(measured, self.null))
        return lambda function, items: in_threads(function, items, threads)

    # Shared by all layers and computed with the first one. Large products use all threads of torch.

    @cached_property
    def checks(self) -> dict[int, LayerCheck]:
        """The results of the self-check, a dict from layer to `LayerCheck` (`.record`: error and tolerance of the
        rebuilt scores; `.outside_m`).
        """
        return check_scores(self.view, self.prompts)

    @cached_property
    def ends(self) -> str:
        """Hash (hex) of the model's embedding, unembedding and final norm."""
        return self.view.ends_digest()

    @cached_property
    def moments(self) -> EmbeddingMoments:
        """Gram matrix and sum of the model's token embedding, an `EmbeddingMoments`, from which `self_match` is
        computed.
        """
        return EmbeddingMoments(self.view)

    @cached_property
    def circuit(self) -> Float64[Tensor, "d_model d_model"] | None:
        """W_U W_E (unembedding times embedding), used for `copying`. None where no token can be copied."""
        return unembedding_times_embedding(self.view)

    @cached_property
    def streams(self) -> ReadStreams | None:
        """Inputs of all layers on the prompts, as `ReadStreams`, for the extras that need a run. None without such
        extras.
        """
        return read_streams(self.view, self.prompts) if {*self.extras} & {*OF_ACTIVATIONS} else None

    @cached_property
    def directions(self) -> Float64[Tensor, "d_model directions"] | None:
        """Singular directions of the learned positions, as columns. None unless `extras` has "position_share"."""
        return position_directions(self.view) if "position_share" in self.extras else None
