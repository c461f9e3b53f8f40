"""Directions that a write to the stream is measured along: of two answers, of what a receiver reads, or a vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.hooks.attribution.heads_run import HeadsRun
from tlspectral.hooks.edges.reached import reached
from tlspectral.models.attention.tolerances import nearest_bound
from tlspectral.models.reading.layer import require_own_projections, softcapped
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens
from tlspectral.models.running.text import token_text
from tlspectral.models.stream.writes import layer_reads
from tlspectral.selection import Receiver, whole_number
from tlspectral.tasks.metrics import LogitDifference

FORMS = (
    'a direction is a pair of answers (" Mary", " John") or of token ids, a receiver such as "L18KV2.k" or "L20H3.q", '
    "or a vector [d_model]"
)


@dataclass(frozen=True)
class Answers:
    """Logit of the first of two tokens less the logit of the second."""

    first: int
    second: int

    def layer(self, view: AttentionView) -> int:
        """Return the layer that reads, heads of earlier ones being measured."""
        return view.n_layers

    def point(self, view: AttentionView) -> str:
        """Return the hook point of the stream that is read."""
        return view.hook_names(view.n_layers - 1)["residual_after"]

    def said(self, view: AttentionView) -> str:
        """Return the direction in words."""
        return f"{token_text(view, self.first)!r} - {token_text(view, self.second)!r}"

    def vector(self, view: AttentionView, run: HeadsRun) -> tuple[Float64[Tensor, "d_model"], dict[str, Any]]:
        """Return the direction, and what `attrs` say of it.

        Raises UnsupportedArchitecture where the run's logits are not linear behind the final norm, but for a softcap.
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
        own, found = _double(run.logits[both]), softcapped(stream @ vectors + constants, cap)
        nearest_bound(
            (found - own).abs(),
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
    """What a receiver reads of a write, along the whole vector that it reads of the stream."""

    receiver: Receiver

    def layer(self, view: AttentionView) -> int:
        """Return the layer of the receiver."""
        return self.receiver.layer

    def point(self, view: AttentionView) -> str:
        """Return the hook point of the stream that is read."""
        return view.hook_names(self.receiver.layer)["residual"]

    def said(self, view: AttentionView) -> str:
        """Return the name of the receiver."""
        return self.receiver.name

    def vector(self, view: AttentionView, run: HeadsRun) -> tuple[Float64[Tensor, "d_model"], dict[str, Any]]:
        """Return the direction, and what `attrs` say of it."""
        read = layer_reads(view.raw(self.receiver.layer), self.receiver.input, _double)[0]
        stream = run.stream(self.point(view))
        weight = read.norm.token_scale(stream) * read.weight[self.receiver.head]
        whole = stream @ weight
        return weight @ (whole / whole.norm()), {"read_norm": float(whole.norm())}


@dataclass(frozen=True)
class Vector:
    """A vector, along which nothing is normed."""

    values: Float64[Tensor, "d_model"]

    def layer(self, view: AttentionView) -> int:
        """Return the number of layers: a vector is of no layer."""
        return view.n_layers

    def point(self, view: AttentionView) -> None:
        """Return None, as no stream is read."""

    def said(self, view: AttentionView) -> str:
        """Return that it is a vector."""
        return "vector"

    def vector(self, view: AttentionView, run: HeadsRun) -> tuple[Float64[Tensor, "d_model"], dict[str, Any]]:
        """Return the vector, of which there is nothing to say."""
        return self.values, {}


Direction = Answers | Read | Vector


def direction_of(view: AttentionView, prompts: PackedTokens, given: Any) -> Direction:
    """Return a direction as `ov_attribution` takes it. Raises as that."""
    if isinstance(given, str | Receiver):
        (found,) = reached(view, given)
        receiver = found.receiver
        if receiver.input not in ("q", "k", "v"):
            raise ValueError(
                f"{receiver.name} reads many vectors: {FORMS}; for the logits give the two answers"
                if receiver.input == "logits"
                else f"the direction of {receiver.name} is not one of queries, keys or values: {FORMS}"
            )
        require_own_projections(
            view.raw(receiver.layer), receiver.layer, f"what {receiver.name} reads is not linear behind one norm"
        )
        return Read(receiver)
    if isinstance(given, list | tuple) and len(given) == 2 and all(_is_answer(one) for one in given):
        answers = LogitDifference(*given).for_model(view, prompts)
        return Answers(answers.correct[0][0], answers.wrong[0][0])
    if isinstance(given, np.ndarray):
        given = torch.as_tensor(given)
    if not isinstance(given, Tensor) or not given.is_floating_point():
        raise TypeError(f"{FORMS}; found {type(given).__name__}")
    if given.shape != (view.d_model,):
        raise ValueError(f"a direction is a vector of {view.d_model} numbers; found shape {tuple(given.shape)}")
    values = _double(given)
    if not bool(values.isfinite().all()) or not bool(values.any()):
        raise ValueError("a direction is a vector of finite numbers, not all of them 0")
    return Vector(values)


def _double(values: Tensor) -> Tensor:
    return in_float64(values.detach()).cpu()


def _is_answer(given: Any) -> bool:
    return isinstance(given, str) or whole_number(given) is not None


def _factor(view: AttentionView) -> float:
    """Return the factor on the logits behind the unembedding (Cohere, Granite, Falcon-H1)."""
    config = getattr(getattr(view.model, "original_model", None), "config", None)
    times = [getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier")]
    divided = getattr(config, "logits_scaling", None)
    return float(np.prod([one for one in times if one is not None])) / float(divided or 1.0)


def _softcap(view: AttentionView) -> float | None:
    cap = getattr(view.model.cfg, "output_logits_soft_cap", None)
    return float(cap) if cap is not None and cap > 0 else None
