"""Ablated runs of the zoo: which models, what their hook points record, and what an ablation has to leave behind."""

import functools
from contextlib import contextmanager

import pytest
import torch
import zoo

from tlspectral.hooks import ablate, parts
from tlspectral.models.reading import attention_view
from tlspectral.models.stream.writes import z_of
from tlspectral.tasks import evaluate
from tlspectral.tasks.repeated import repeated_sequences

DELEGATED = ("gptj", "opt", "gptneo", "llama4", "nanochat")
LEARNED_POSITIONS = ("gpt2", "opt", "gptneo")
NO_ROPE = (*LEARNED_POSITIONS, "bloom")
SCORES = [("bridge", "llama"), ("bridge", "gemma2"), pytest.param("hooked", "qwen2", marks=zoo.needs_hooked)]
# Edits of scores on two backends, and delegating bridges with and without rotary positions.
ROUTES = [("bridge", "llama"), SCORES[-1], ("bridge", "gptj"), ("bridge", "gptneo")]
some_models = pytest.mark.parametrize(("backend", "name"), ROUTES)
rotary_parts = ("rope_phase", "rotary_band")
block_parts = ("content", "position", "interaction")


def one_of_each(prompt):
    """A part of every kind, by name; those in blocks of the prompt."""
    plain = [parts.Symmetric(), parts.Antisymmetric(), parts.RopePhase(), parts.Output()]
    of_blocks = [kind(prompt) for kind in (parts.Content, parts.Position, parts.Interaction)]
    return {
        part.name: part for part in [*plain, parts.Band([0]), parts.Mode(0), parts.LongRange(3, sinks=1), *of_blocks]
    }


@functools.cache
def intact(backend, name):
    """Logits of the shared model on the prompt, from a twin: this may be asked for inside an ablation."""
    return logits(getattr(zoo, backend)(name))


logits = zoo.logits


@functools.cache
def repetitions(name="llama", count=5, length=10):
    """Sequences in which a segment comes twice, for the bridge of an architecture. Not to be changed."""
    return repeated_sequences(
        attention_view(zoo.shared("bridge", name)), n_sequences=count, segment_length=length, seed=1
    )


def ablated(model, heads, part, tokens=None, **named):
    """Logits of a run without a part of some heads."""
    with ablate(model, heads, part, **named):
        return logits(model, tokens)


def left_padded(pad=5, length=19):
    """Tokens, the same behind padding, and the mask of these."""
    tokens = zoo.prompt(length=length)
    padded = torch.cat([torch.zeros(len(tokens), pad, dtype=torch.long), tokens], 1)
    return tokens, padded, (torch.arange(pad + length) >= pad).long().expand_as(padded)


def rotary_layers(view):
    return [index for index in range(view.n_layers) if view.rotary(index) is not None]


def applicable(view, part):
    return rotary_layers(view) if part in rotary_parts else list(range(view.n_layers))


def a_part(name):
    return "antisymmetric" if name in (*NO_ROPE, "llama4", *zoo.ENCODERS) else "rope_phase"


@contextmanager
def recording(model, names):
    """What passes the named hook points, as it is when every hook entered so far has acted."""
    seen = {}

    def keep(activation, hook, name):
        seen[name] = activation.detach().clone()

    with model.hooks(fwd_hooks=[(name, functools.partial(keep, name=name)) for name in names]):
        yield seen


def recorded(model, points, tokens=None, layers=None):
    """The run's activations by (layer, point), for the points that a layer has."""
    view = attention_view(model)
    layers = range(view.n_layers) if layers is None else layers
    wanted = {
        (index, point): name
        for index in layers
        for point, name in view.hook_names(index).items()
        if point in points
    }  # fmt: skip
    with recording(model, wanted.values()) as seen:
        logits(model, tokens)
    found = {key: seen[name] for key, name in wanted.items() if name in seen}
    by_head = {(index, point) for index, point in found if point == "z"}
    return found | {key: z_of(found[key], view.raw(key[0]).w_o) for key in by_head}


def delegated(backend, name):
    """Whether the bridge leaves attention to the wrapped module, so that z is edited and the pattern handed on."""
    return backend == "bridge" and name in (*DELEGATED, "gemma3n", "gemma4", *zoo.ENCODERS)


def allowed_keys(name, layer, length):
    """Causal, within a window where the architecture has one; all keys in an encoder."""
    if name in zoo.ENCODERS:
        return torch.ones(length, length, dtype=torch.bool)
    offset = torch.arange(length)[:, None] - torch.arange(length)
    windowed = name == "mistral" or (name in ("gemma2", "gemma3", "gemma3n", "gemma4") and layer % 2 == 0)
    if name == "llama4" and layer == 1:  # in chunks
        chunk = torch.arange(length) // (2 * zoo.WINDOW)
        return (offset >= 0) & (chunk[:, None] == chunk)
    windowed = windowed or (name == "gptneo" and layer % 2 == 1)
    return (offset >= 0) & (offset < zoo.WINDOW) if windowed else offset >= 0


@functools.cache
def in_dtype(backend, name, dtype):
    return zoo.converted(getattr(zoo, backend)(name), dtype)


def rows_are_ablated_runs(model, rows, part, task):
    """Each row of a sweep is the score of a run without the part of that head, and its paired change."""
    intact = evaluate(model, task)
    for row in rows.itertuples():
        with ablate(model, row, part):
            without = evaluate(model, task)
        found, effect = [row.value, row.delta, row.delta_se], without - intact
        # Measured: at most 1e-6 of float32 (replayed, stacked runs); effects are 1e-4 and more.
        assert found == pytest.approx([without.value, effect.value, effect.se], abs=1e-5)


def interrupt(activation, hook):
    raise KeyboardInterrupt
