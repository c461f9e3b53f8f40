"""The three kinds of `direction` of `ov_attribution`: a pair of answers, a receiver, or a vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import UnsupportedArchitecture, shown
from tlspectral.errors.settings import whole_number
from tlspectral.hooks.attribution.heads_run import HeadsRun
from tlspectral.hooks.edges.reached import reached
from tlspectral.models.attention.tolerances import nearest_bound
from tlspectral.models.reading.layer import require_own_projections, softcapped
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import even_rows
from tlspectral.models.running.text import token_text
from tlspectral.models.stream.writes import layer_reads
from tlspectral.selection.node_names import Receiver
from tlspectral.tasks.metrics import LogitDifference

FORMS = (
    'give a pair of answers (" Mary", " John") or of token ids, a receiver such as "L18KV2.k" or "L20H3.q", or a '
    "vector [d_model]"
)


@dataclass(frozen=True)
class Answers:
    """The direction that raises the logit of token id `first` over the logit of token id `second`.

    `ov_attribution` measures what heads write along it.
    """

    first: int
    second: int

    def layer(self, view: AttentionView) -> int:
        """Return the layer before which measured heads stand: the number of layers, because logits come last.

        `view` is the model.
        """
        return view.n_layers

    def point(self, view: AttentionView) -> str:
        """Return the name of the hook point of the stream behind the last layer, which the logits read.

        `view` is the model.
        """
        return view.hook_names(view.n_layers - 1)["residual_after"]

    def in_words(self, view: AttentionView) -> str:
        """Return the direction in words, such as "' Mary' - ' John'".

        `view` is the model, whose tokenizer gives the texts.
        """
        return f"{token_text(view, self.first)!r} - {token_text(view, self.second)!r}"

    def vector(self, view: AttentionView, run: HeadsRun) -> tuple[Float64[Tensor, "d_model"], dict[str, Any]]:
        """Return the direction, and a dict of attrs: `logit_difference`, `outside_stream` and `final_softcap`.

        `run` has the stream behind the last layer and the logits at the query. The inner product of a write with the
        direction is its contribution to logit(first) - logit(second). The final norm keeps its scale in the run.
        `logit_difference` is the model's own, `outside_stream` its part from biases, `final_softcap` the softcap of the
        logits or None. Raises UnsupportedArchitecture if the run's logits do not follow from final norm, unembedding
        and softcap.
        """
        assert run.logits is not None
        both = [self.first, self.second]
        w_u, norm = view.unembedding()
        norm, columns = norm.as_(_double), _double(w_u[:, both])
        stream, factor, cap = run.stream(self.point(view)), _factor(view), _softcap(view)
        gained = columns if norm.gain is None else norm.gain[:, None] * columns
        vectors = factor * norm.token_scale(stream) * (gained - gained.mean(0) if norm.kind == "LN" else gained)
        constants = torch.zeros(2, dtype=torch.float64)
        for bias in (None if norm.bias is None else norm.bias @ columns, getattr(view.model, "b_U", None)):
            if bias is not None:
                constants = constants + factor * (bias if bias.shape == (2,) else _double(bias[both]))
        own, rebuilt = _double(run.logits[both]), softcapped(stream @ vectors + constants, cap)
        nearest_bound(
            (rebuilt - own).abs(),
            _double(run.logits.abs().max()).expand(2),
            run.logits.dtype,
            "term sum",
            "the logits of the two answers are not those of the final norm and the unembedding; they differ",
            "give the direction as a vector",
            UnsupportedArchitecture,
        )
        notes = {
            "logit_difference": float(own[0] - own[1]),
            "outside_stream": float(constants[0] - constants[1]),
            "final_softcap": cap,
        }
        return vectors[:, 0] - vectors[:, 1], notes


@dataclass(frozen=True)
class Read:
    """The direction of a receiver (queries, keys or values of a head): along the vector that it reads in the run."""

    receiver: Receiver

    def layer(self, view: AttentionView) -> int:
        """Return the layer of the receiver; only heads of earlier layers can be measured.

        `view` is the model.
        """
        return self.receiver.layer

    def point(self, view: AttentionView) -> str:
        """Return the name of the hook point of the stream that enters the receiver's layer.

        `view` is the model.
        """
        return view.hook_names(self.receiver.layer)["residual"]

    def in_words(self, view: AttentionView) -> str:
        """Return the name of the receiver, such as "L18KV2.k".

        `view` is the model.
        """
        return self.receiver.name

    def vector(self, view: AttentionView, run: HeadsRun) -> tuple[Float64[Tensor, "d_model"], dict[str, Any]]:
        """Return the direction, and a dict with `read_norm`, the length of the whole vector that the receiver reads.

        `view` is the model. `run` has the stream that enters the receiver's layer at the query. With r = norm(x) W, the
        vector that the receiver reads of the stream x, the inner product of a write with the direction is the write's
        component along r / |r|.
        """
        read = layer_reads(view.raw(self.receiver.layer), self.receiver.input, _double)[0]
        stream = run.stream(self.point(view))
        weight = read.norm.token_scale(stream) * read.weight[self.receiver.head]
        whole = stream @ weight
        return weight @ (whole / whole.norm()), {"read_norm": float(whole.norm())}


@dataclass(frozen=True)
class Vector:
    """A direction given as a vector, `values`; a write gets its inner product with this vector, without any norm."""

    values: Float64[Tensor, "d_model"]

    def layer(self, view: AttentionView) -> int:
        """Return the layer before which measured heads stand: the number of layers, because no layer reads a vector.

        `view` is the model.
        """
        return view.n_layers

    def point(self, view: AttentionView) -> None:
        """Return None: a vector needs no stream of the run.

        `view` is the model.
        """

    def in_words(self, view: AttentionView) -> str:
        """Return "vector", for attrs.

        `view` is the model.
        """
        return "vector"

    def vector(self, view: AttentionView, run: HeadsRun) -> tuple[Float64[Tensor, "d_model"], dict[str, Any]]:
        """Return the vector itself, and an empty dict of attrs. The model `view` and its run `run` are not used."""
        return self.values, {}


Direction = Answers | Read | Vector


def directions_of(
    view: AttentionView, prompts: Sequence[Int[Tensor, "one pos"]], given: Any
) -> Sequence[Direction | None]:
    """Return the direction of each prompt: `Answers`, `Read` (a receiver) or `Vector`; None for each if none is given.

    `given` is what a user gave to `ov_attribution`: a pair of answers, a tuple of two lists of answers, the metric of a
    task of `tls.logit_difference`, a receiver's name, or a vector [d_model]. `prompts` are token ids of each prompt,
    `view` is the model. Raises BadHead, ValueError, TypeError or UnsupportedArchitecture if it is not usable.
    """
    if given is None:
        return [None] * len(prompts)
    metric: LogitDifference | None = None
    if isinstance(given, LogitDifference):
        metric = given
    elif not isinstance(given, list | tuple) or len(given) != 2:
        pass
    elif all(isinstance(answer, str) or whole_number(answer) is not None for answer in given):
        metric = LogitDifference(*given)
    elif all(isinstance(side, list | tuple) for side in given):
        if not isinstance(given, tuple) or not all(isinstance(side, list) for side in given):
            raise TypeError(
                f"direction={shown(given)} has two readings, a pair for each prompt or the first and the second "
                "answers of all prompts: give a tuple of two lists over prompts, ([first, ...], [second, ...])"
            )
        metric = LogitDifference(*given)
    if metric is None:
        return [_direction_of_all(view, given)] * len(prompts)
    metric.require_answers(len(prompts))
    return [_answers(view, metric.of_prompts([number]), tokens) for number, tokens in enumerate(prompts)]


def _answers(view: AttentionView, metric: LogitDifference, tokens: Int[Tensor, "one pos"]) -> Answers:
    """Return the direction of one prompt, `tokens`, whose answers are in `metric`. `view` is the model.

    Raises ValueError if an answer is not one token of the model, or a side has several answers.
    """
    made = metric.for_model(view, even_rows(tokens))
    both = [made.correct[0], made.wrong[0]]
    if any(len(side) != 1 for side in both):
        raise ValueError(
            f"direction= is the difference of two logits; found {len(both[0])} correct and {len(both[1])} wrong "
            "answers of a prompt: give one of each"
        )
    return Answers(both[0][0], both[1][0])


def _direction_of_all(view: AttentionView, given: Any) -> Read | Vector:
    """Return the direction that all prompts share: a receiver by its name, or a vector [d_model].

    `view` is the model, `given` the user's argument. Raises BadHead, ValueError, TypeError or UnsupportedArchitecture
    if it is neither.
    """
    if isinstance(given, str | Receiver):
        (end,) = reached(view, given)
        receiver = end.receiver
        if receiver.input not in ("q", "k", "v"):
            raise ValueError(
                "direction='logits' is not one direction, because each token has its own: for the logits give the two "
                'answers, such as direction=(" Mary", " John")'
                if receiver.input == "logits"
                else f"direction={receiver.name!r} is not queries, keys or values of a head: {FORMS}"
            )
        require_own_projections(
            view.raw(receiver.layer), receiver.layer, f"the input of {receiver.name} is not linear behind one norm"
        )
        return Read(receiver)
    if isinstance(given, np.ndarray):
        given = torch.as_tensor(given)
    if not isinstance(given, Tensor) or not given.is_floating_point():
        raise TypeError(f"direction= cannot be a {type(given).__name__}: {FORMS}")
    if given.shape != (view.d_model,):
        raise ValueError(f"direction= must be a vector [{view.d_model}] (d_model); found shape {tuple(given.shape)}")
    values = _double(given)
    if not bool(values.isfinite().all()) or not bool(values.any()):
        raise ValueError("direction= has NaN, infinite numbers, or only zeros: give finite numbers, not all of them 0")
    return Vector(values)


def _double(values: Tensor) -> Tensor:
    """Return a copy of a tensor without gradients, in float64 on the CPU."""
    return in_float64(values.detach()).cpu()


def _factor(view: AttentionView) -> float:
    """Return the constant by which a model multiplies its logits (Cohere, Granite, Falcon-H1); 1 for other models."""
    config = getattr(getattr(view.model, "original_model", None), "config", None)
    multipliers = [getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier")]
    divisor = getattr(config, "logits_scaling", None)
    return float(np.prod([factor for factor in multipliers if factor is not None])) / float(divisor or 1.0)


def _softcap(view: AttentionView) -> float | None:
    """Return the softcap of the model's logits; None without one."""
    cap = getattr(view.model.cfg, "output_logits_soft_cap", None)
    return float(cap) if cap is not None and cap > 0 else None
