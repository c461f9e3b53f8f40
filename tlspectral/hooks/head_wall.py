"""`wall`: attention of all heads on one sentence, and how removing each head changes the model's answer."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64, UInt8
from torch import Tensor

from tlspectral.errors import did_you_mean, shown
from tlspectral.errors.settings import checked_settings
from tlspectral.heads.detectors.sinks import LEAST
from tlspectral.hooks.measured_wall import FEWEST_PROMPTS, KEPT_CONTROLS, LEVELS, Removal, Wall
from tlspectral.hooks.parts import Output
from tlspectral.hooks.parts.checked_calls import bound_parts
from tlspectral.hooks.sweeps.layer_effects import LayerReplays
from tlspectral.models.attention.prompt_patterns import patterns_of
from tlspectral.models.loading.finding import PACKAGED
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.partial_runs import LAST, IntactRun, intact_run
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.running.text import texts_in_a_row
from tlspectral.selection.node_names import head_name
from tlspectral.tables.progress import bar
from tlspectral.tasks import MetricValue, Task
from tlspectral.tasks.control_tests import beside_control
from tlspectral.tasks.metric_value import standard_error
from tlspectral.tasks.metrics import AnsweredDifference
from tlspectral.tasks.task_sequences import Replays, TaskSequences, replayed_values, task_sequences

SENTENCES = (
    "When Mary and John went to the store, John gave a drink to",
    "The war lasted from the year 1732 to the year 17",
    "Alice was tired of sitting by her sister on the bank. Alice was tired of sitting by",
)
"""Default sentences: a packaged model gets all three, any other model the first."""

BESIDE_OTHERS = 12
"""How many of the heads with the largest effects are compared with the other heads of their layers."""

_JUDGES = 4  # queries behind a key that may be a second sink, at least
_WATCHED = 5  # most probable next tokens
_SEGMENT = 8  # ids of a segment that is repeated for a model without a tokenizer


def first_sentences(model: Any) -> list[Any]:
    """Return the default sentences of a report as a list: three texts for a packaged model, one for any other model.

    A model without a tokenizer gets one tensor of token ids [pos]: its start token, then eight random ids twice.
    """
    with measured(model, report_hooks=False) as view:
        if getattr(view.model, "tokenizer", None) is None:
            segment = np.random.default_rng(0).permutation(np.arange(1, view.d_vocab))[:_SEGMENT].tolist()
            return [torch.tensor([view.start_token, *segment, *segment])[: view.n_ctx]]
        name = str(view.source["model"]).lower()
        return list(SENTENCES if name in PACKAGED else SENTENCES[:1])


@checked_settings
def wall(
    model: Any,
    prompt: Any = None,
    *,
    task: Task | None = None,
    removal: bool = True,
    control: Literal["random"] | None = None,
) -> Wall:
    """Show the attention of all heads on one sentence, and how removing each head changes the model's answer.

    Use it for a first look at a model, or at one prompt of a task.

        wall = tls.hooks.wall(model, "The war lasted from the year 1732 to the year 17")
        wall.removal.effects["delta"]  # effect of removing each head
        tls.report.report(tls.analyze_heads(model), "report.html", walls=wall)

    Each head's output is set to zero, one head at a time. The effect is the change of the probability of the model's
    own next token, or with `task` the change of the task's metric, mean over its prompts.

    Args:
        model: TransformerBridge or HookedTransformer.
        prompt: text, or an array of token ids [pos], of 2 to 128 tokens. Default: a sentence about Mary and John; for a
            model without a tokenizer eight random ids, twice.
        task: prompts with a metric of the next token after each prompt, such as `tls.logit_difference(...)`; give it
            instead of `prompt`. Attention and probabilities are shown for its first prompt.
        removal: False only shows attention. Default: True, heads are removed (never in an encoder).
        control: compares a head's effect with the effects of the other heads of its layer. Default: for the twelve
            largest effects. "random": for all effects.

    Returns:
        A `Wall`: `.tokens`, `.heads` (a row per head), `.attention` ([heads, query, key], 0 to 1) and `.removal` (a
        `Removal` with `.effects`, or None). `wall.table()` is a DataFrame for `tls.write_table`. Columns (`?`: not in
        every table): `layer, head, name, kv_head, pattern, second_sink, second_sink_share, probabilities?, top_token?,
        top_probability?, delta?, delta_se?, control_delta?, control_p?, control_p_floor?`.

    Raises:
        ValueError: both prompt and task, several prompts, fewer than 2 or more than 128 tokens, or a task that does not
            measure the next token after each prompt.
        UnsupportedArchitecture: a layer does not return its attention, or a task is given for an encoder.
        EditNotHonored: the model ignores the edit.

    Not established: why a head attends where it does, or what it does on other text. Other heads may replace a removed
    one. One sentence gives no standard error, and among many heads some effects are large by chance.
    """
    if prompt is not None and task is not None:
        raise ValueError("prompt= and task= were both given: give one; the sentence of a task is its first prompt")
    if control not in (None, "random"):
        raise ValueError(
            f"control must be None or 'random', not {shown(control)}{did_you_mean(str(control), ['random'])}"
        )
    if prompt is None and task is None:
        prompt = first_sentences(model)[0]
    with measured(model) as view:
        by_layer = heads_by_layer(view, None)
        sequences = _sequences(view, prompt, task)
        ids = sequences.tokens[0, : sequences.lengths[0]]
        if len(ids) < 2:
            raise ValueError(f"the sentence has {len(ids)} token: give a sentence of 2 to 128 tokens")
        weights = patterns_of(view, by_layer, ids[None])
        levels = np.rint(np.clip(np.stack(weights), 0.0, 1.0) * LEVELS).astype(np.uint8)
        listed = [(layer, head) for layer, heads in by_layer.items() for head in heads]
        folded = {layer: view.layer(layer) for layer in by_layer}
        sinks = _second_sinks(levels, [layer for layer, _ in listed], causal=view.causal)
        heads = pd.DataFrame(
            {
                "layer": [layer for layer, _ in listed],
                "head": [head for _, head in listed],
                "name": [head_name(layer, head) for layer, head in listed],
                "kv_head": [folded[layer].kv_head(head) for layer, head in listed],
                "second_sink": [sinks[layer][0] for layer, _ in listed],
                "second_sink_share": [sinks[layer][1] for layer, _ in listed],
            }
        )
        why_not = "" if removal else "No head was removed: this was left out."
        if removal and not view.causal:
            why_not = "No head was removed: an encoder predicts no next token."
        special = set(getattr(getattr(view.model, "tokenizer", None), "all_special_ids", ()))
        return Wall(
            tuple(texts_in_a_row(view, ids.tolist())),
            tuple(int(token) in special for token in ids),
            heads,
            levels,
            view.causal,
            None if why_not else _removal(view, sequences, by_layer, task is not None, control),
            why_not,
            view.origin(processing=True),
        )


def _sequences(view: AttentionView, prompt: Any, task: Task | None) -> TaskSequences:
    """Return the tokenized prompts of `task`; without a task, `prompt` with a placeholder metric.

    `view` is the model. The placeholder is the probability of token id 0, which is replaced later. Raises ValueError
    for several prompts, and for a task that does not read exactly the last position of each prompt.
    """
    if task is None:
        packed = packed_prompts(view, prompt)
        if len(packed.tokens) != 1:
            raise ValueError(
                f"{len(packed.tokens)} prompts were given, and a wall shows one sentence: call wall() for each prompt"
            )
        metric = partial(_probability, 0)  # `_removal` replaces it once the model's next token is known
        return TaskSequences(packed.tokens, packed.lengths, LAST, metric, True, "next token", notes=packed.notes)
    sequences = task_sequences(view, task)
    last, predicted = sequences.lengths - 1, sequences.predicted
    if isinstance(predicted, slice):
        predicted = torch.arange(sequences.tokens.shape[1])[predicted].expand(len(last), -1)
    if predicted.shape[1] != 1 or not torch.equal(predicted[:, 0], last):
        raise ValueError(
            f"the task {sequences.name} reads {predicted.shape[1]} positions of each prompt, and a wall shows the next "
            "token: give a task with predict=-1, such as one of tls.logit_difference"
        )
    return sequences


def _second_sinks(
    levels: UInt8[np.ndarray, "heads query key"], layers: list[int], *, causal: bool
) -> dict[int, tuple[int, float]]:
    """Return a dict from layer to its second attention sink: (position of the key, attention); else (-1, NaN).

    `levels` is attention as integers from 0 to 255, `layers` the layer of each head, `causal` True for a decoder. The
    first key is left out. The attention of a key is a mean over the layer's heads and over at least 4 later queries; in
    an encoder over all other queries. A sink gets more than .15, and more than twice an even share of the keys that
    these queries see. `attention_sinks` has stricter bounds and would find no sink in so short a prompt.
    """
    n, second_sinks = levels.shape[1], {}
    for layer in dict.fromkeys(layers):
        attention = levels[np.array(layers) == layer].astype(np.float64).mean(0) / LEVELS
        best, second_sinks[layer] = 0.0, (-1, float("nan"))
        for key in range(1, n - _JUDGES if causal else n):
            queries = np.arange(key + 1, n) if causal else np.delete(np.arange(n), key)
            share, n_seen = float(attention[queries, key].mean()), float((queries + 1).mean()) if causal else float(n)
            if share > max(best, LEAST, 2 / n_seen):
                best, second_sinks[layer] = share, (key, share)
    return second_sinks


def _probabilities(logits: Float[Tensor, "*copies d_vocab"]) -> Float64[Tensor, "*copies d_vocab"]:
    return logits.float().cpu().double().softmax(-1)


def _probability(
    answer: int, logits: Float[Tensor, "sequences predicted d_vocab"], tokens: Tensor, mask: Tensor
) -> Float64[Tensor, "sequences"]:
    """Return the probability of the token id `answer` at the last position of each sequence: the metric without a task.

    `logits` are the logits at the positions that the metric reads. `tokens` and `mask` are not used; every metric gets
    them.
    """
    return _probabilities(logits[:, -1])[:, answer]


class _WithoutEach(NamedTuple):
    """Results of the runs in which the output of one head is zero. Axis 0 has one run per head, in the order of layers.

    Attributes:
        values: the metric of each prompt.
        watched: probability of each watched token (chosen once, before heads are removed) after the first prompt.
        top: for each run, the most probable token after the first prompt in this run: its id and its probability.
    """

    values: Float64[np.ndarray, "heads sequences"]
    watched: Float64[np.ndarray, "heads watched"]
    top: list[tuple[int, float]]


def _without_each(
    intact: IntactRun, sequences: TaskSequences, by_layer: dict[int, list[int]], watched: list[int]
) -> _WithoutEach:
    """Run the prompts with the output of one head set to zero, for each head in `by_layer`; return the `_WithoutEach`.

    `intact` is the run without ablation, `sequences` the prompts with their metric, `by_layer` a dict from layer to
    heads, `watched` the ids of the tokens whose next-token probabilities are kept. A bar shows the progress.
    """
    view, part = intact.view, Output("zero").fixed(intact.view, sequences)
    bound = bound_parts(part, view, by_layer, every=True)
    layers = [LayerReplays(view, sequences, layer, heads, bound[layer]) for layer, heads in by_layer.items()]
    n = sum(map(len, by_layer.values()))
    kept: dict[int, tuple[Tensor, int, float]] = {}
    with bar(n, "wall", "head") as shown:

        def read(heads: list[int], batch: slice, logits: Tensor) -> None:
            if batch.start:
                return
            for head, probabilities in zip(heads, _probabilities(logits[:, 0, -1]), strict=True):
                top = int(probabilities.argmax())
                kept[head] = probabilities[watched], top, float(probabilities[top])
            shown.update(len(kept) - shown.n)

        replays = [Replays(of_layer.layer, len(of_layer.replays), of_layer.hooks) for of_layer in layers]
        values = replayed_values(intact, sequences, replays, read).numpy()
    return _WithoutEach(
        values, torch.stack([kept[head][0] for head in range(n)]).numpy(), [kept[head][1:] for head in range(n)]
    )


def _removal(
    view: AttentionView, sequences: TaskSequences, by_layer: dict[int, list[int]], of_task: bool, control: str | None
) -> Removal:
    """Run the prompts, set the output of each head to zero in turn, and return the `Removal` with all effects.

    `sequences` are the prompts with their metric, `by_layer` is a dict from layer to heads. `of_task`: True measures
    the task's metric; False the probability of the model's own next token. `control`: "random" compares every head with
    the other heads of its layer; None only the twelve with the largest effects.
    """
    intact, logits = _intact(view, sequences, by_layer)
    probabilities = _probabilities(logits[0, -1])
    top = probabilities.topk(min(_WATCHED, len(probabilities))).indices.tolist()
    answered = sequences.metric if isinstance(sequences.metric, AnsweredDifference) else None
    correct, wrong = ([], []) if answered is None else (answered.correct[0], answered.wrong[0])
    watched = [*dict.fromkeys([*correct, *wrong, *top])][: max(_WATCHED, len(correct) + len(wrong))]
    if not of_task:
        sequences = replace(sequences, metric=partial(_probability, watched[0]))
    ablated = _without_each(intact, sequences, by_layer, watched)
    intact_values = sequences.measured(logits).cpu().numpy()
    deltas = ablated.values - intact_values  # [heads, sequences]
    ids = sequences.tokens[0, : sequences.lengths[0]].tolist()
    texts = {token: texts_in_a_row(view, [*ids, token])[-1] for token in {*watched, *(top for top, _ in ablated.top)}}
    value, answer = MetricValue(intact_values, distinct=sequences.distinct), texts[watched[0]]
    return Removal(
        measure=sequences.name if of_task else f"probability of {answer!r}",
        of_task=of_task,
        n_prompts=len(sequences.tokens),
        value=value.value,
        value_se=value.se if _has_errors(sequences) else float("nan"),
        watched=tuple(texts[token] for token in watched),
        correct=len(correct) if of_task else 1,
        wrong=len(wrong),
        intact=probabilities[watched].numpy(),
        without=ablated.watched,
        top=tuple((texts[top], probability) for top, probability in ablated.top),
        effects=_effects(deltas, by_layer, sequences, every=control is not None),
    )


def _intact(
    view: AttentionView, sequences: TaskSequences, by_layer: dict[int, list[int]]
) -> tuple[IntactRun, Float[Tensor, "sequences predicted d_vocab"]]:
    """Run the prompts without ablation. Return the run and its logits at the metric's positions.

    `view` is the model. `sequences` are the prompts with their metric. The run keeps the residual streams from which
    the layers in `by_layer` (dict from layer to heads) can be run again.
    """
    batches: list[Tensor] = []
    intact = intact_run(
        view,
        sequences.tokens,
        sequences.predicted,
        by_layer,
        batch=sequences.rows_at_once(view),
        reduce=lambda _, logits: batches.append(logits),
    )
    return intact, torch.cat(batches)


def _has_errors(sequences: TaskSequences) -> bool:
    """Return True if `sequences`, the prompts of a task, has 8 or more distinct prompts, enough for standard errors."""
    distinct = len(sequences.tokens) if sequences.distinct is None else int(sequences.distinct.max()) + 1
    return distinct >= FEWEST_PROMPTS


def _effects(
    deltas: Float64[np.ndarray, "heads sequences"],
    by_layer: dict[int, list[int]],
    sequences: TaskSequences,
    *,
    every: bool,
) -> pd.DataFrame:
    """Return a DataFrame with a row per head: `delta, delta_se`, and `control_delta, control_p, control_p_floor`.

    `deltas` are effects of removing each head, in the order of `by_layer` (dict from layer to heads). The control of a
    head are the effects of the other heads of its layer. `every`: True compares all heads; otherwise the twelve with
    the largest effects. Rows that are not compared have NaN. `delta_se` is NaN for fewer than 8 distinct prompts in
    `sequences`.
    """
    size = np.abs(deltas.mean(1))
    compared = set(range(len(deltas)) if every else np.argsort(-size, kind="stable")[:BESIDE_OTHERS].tolist())
    rows, first = [], 0
    for heads in by_layer.values():
        of_layer = deltas[first : first + len(heads)]
        for index, delta in enumerate(of_layer):
            row: dict[str, float] = dict.fromkeys(KEPT_CONTROLS, float("nan"))
            if first + index in compared and len(heads) > 1:
                others = np.delete(of_layer, index, axis=0)
                beside = beside_control(delta[None], others[None], sequences.distinct)
                row = {name: float(beside[name][0]) for name in KEPT_CONTROLS}
            error = standard_error(delta, sequences.distinct) if _has_errors(sequences) else float("nan")
            rows.append({"delta": float(delta.mean()), "delta_se": error, **row})
        first += len(heads)
    return pd.DataFrame(rows)


def removal_seconds(model: Any, prompt: Any = None, *, task: Task | None = None) -> float:
    """Estimate the CPU seconds that `wall` needs to remove all heads on one sentence; return a float.

        tls.hooks.head_wall.removal_seconds(model, "The war lasted from 1732 to 17")

    `model`, `prompt` (default: the first of `first_sentences`) and `task` are the arguments of `wall`. The heads of the
    first layer are removed and timed. Heads of later layers cost less, because only their own and later layers run
    again: with L layers, the last one costs 1 / L of the first.
    """
    with measured(model, report_hooks=False) as view:
        by_layer = heads_by_layer(view, None)
        sequences = _sequences(view, first_sentences(model)[0] if prompt is None and task is None else prompt, task)
        intact, _ = _intact(view, sequences, {})
        layer = view.layers[0]
        began = time.process_time()
        _without_each(intact, sequences, {layer: by_layer[layer]}, [0])
        spent = time.process_time() - began
        sizes = (len(heads) * (view.n_layers - index) / (view.n_layers - layer) for index, heads in by_layer.items())
        return spent * sum(sizes) / len(by_layer[layer])
