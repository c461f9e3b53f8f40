"""What `compare_trees.py` computes: models, and items by name, function and plain settings."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zoo
import zoo_shapes
from tree_calls import Calls
from tree_inputs import LENGTHS
from tree_tables import Item, refusal_items, refused_model_items, statistic_items

HEADS = ["L0H1", "L1H0", "L1H2"]
QUICK = {"null_draws": 4}
PEEK = {"null_draws": 2, "detectors": False}
PLAIN_PARTS = ("symmetric", "antisymmetric", "rope_phase", "output")


@dataclass(frozen=True)
class Group:
    """Items that share a model; `build` makes it when the first of them is missing."""

    name: str
    build: Callable[[Calls], Any]
    items: Callable[[], Iterator[Item]]


def weight_items(heads: list[str]) -> Iterator[Item]:
    """Metrics of weights."""
    first, last = heads[0], heads[-1]
    yield Item("heads", "analyze_heads", {**QUICK, "extras": ("score_asym", "position_share"), "seed": 1})
    fresh = {"null_draws": 3, "null_blocks": "fresh", "null_dtype": "float64", "detectors": False}
    yield Item("heads-some", "analyze_heads", {**fresh, "heads": heads})
    yield Item("heads-prompts", "analyze_heads", {**PEEK, "prompts": 3, "extras": ("score_asym",)})
    yield Item("frequencies", "plain", {"function": "frequency_table"})
    yield Item("copying", "plain", {"function": "copying_scores"})
    yield Item("verify", "plain", {"function": "verify_scores"})
    yield Item("rounding", "plain", {"function": "weight_noise_draws", "draws": 2})
    for kind in "qkv":
        yield Item(f"composition-{kind}", "k_composition", {"head": last, "kind": kind})
    yield Item("operators", "operators", {"heads": [first, last]})
    for part in PLAIN_PARTS[:3]:
        yield Item(f"penalty-{part}", "qk_penalty", {"part": part})
        yield Item(f"penalty-{part}-some", "qk_penalty", {"part": part, "heads": [last], "folded": False})
    for kind, task in (("qk", None), ("ov", None), ("qk", "own")):
        name = f"directions-{kind}" + ("-task" if task else "")
        yield Item(name, "directions", {"head": last, "kind": kind, "task": task})


def detector_items(heads: list[str]) -> Iterator[Item]:
    """What heads do: detectors and kernels."""
    drawn = {"n_sequences": 3, "segment_length": 9}
    yield Item("detect", "detect_heads", {**drawn, "seed": 2})
    yield Item("detect-prompts", "detect_heads", {"prompts": 4})
    for pattern in ("first_token", "local", "self", "two back"):
        yield Item(f"detect-{pattern.replace(' ', '-')}", "detect_heads", {**drawn, "pattern": pattern})
    yield Item("detect-prompts-pattern", "detect_heads", {"prompts": 4, "pattern": "two back"})
    yield Item("pairs", "top_pairs", {"n": 3})
    yield Item("kernel", "kernels", {"function": "relative_position_kernel"})
    yield Item("kernel-padded", "kernels", {"function": "relative_position_kernel", "padded": True, "offsets": [-3, 0]})
    yield Item("kernel-judged", "kernels", {"function": "kernel_prediction"})
    for task in ("induction", "language", "padded", "difference", "own"):
        yield Item(f"task-{task}", "evaluate", {"task": task})


def ablation_items(heads: list[str]) -> Iterator[Item]:
    """Parts removed while the model runs."""
    options: list[tuple[str, str, dict[str, Any]]] = [(part, part, {}) for part in PLAIN_PARTS]
    options += [(f"{part}-bias", part, {"include_bias": True}) for part in PLAIN_PARTS[:3]]
    options += [
        ("phase-some", "rope_phase", {"frequencies": [0]}),
        ("band", "rotary_band", {"frequencies": [0, 1]}),
        ("output-mean", "output", {"replace": "mean"}),
        ("output-reference", "output", {"replace": "mean", "reference": True}),
        ("output-resample", "output", {"replace": "resample", "seed": 3}),
        ("long", "long_range", {"window": 4, "sinks": 1}),
        *((part, part, {"blocks": LENGTHS}) for part in ("content", "position", "interaction")),
        # Queries behind the blocks see all of these within the window of 8 that some of the zoo have.
        ("content-window", "content", {"blocks": (1, 1, 1)}),
    ]
    for name, part, more in options:
        yield Item(f"ablate-{name}", "ablate", {"heads": heads, "part": part, **more})
    for part in ("symmetric", "rope_phase"):
        yield Item(f"ablate-{part}-loss", "ablate", {"heads": heads[0], "part": part, "score": "padded"})
        yield Item(f"ablate-{part}-gradient", "ablate", {"heads": heads, "part": part, "score": "gradient"})
        yield Item(f"hooks-{part}", "ablation_hooks", {"heads": heads, "part": part})
    for what in "qkv":
        edge = {"heads": heads[0], "into": [heads[-1]], "input": what}
        for part in ("output", "antisymmetric", "rope_phase"):
            yield Item(f"ablate-into-{what}-{part}", "ablate", {**edge, "part": part})


def sweep_items(heads: list[str]) -> Iterator[Item]:
    """Sweeps over heads, and bands of frequencies."""
    rows: list[tuple[str, str, str, dict[str, Any]]] = [
        ("phase", "rope_phase", "induction", {"control": "random", "seed": 1}),
        ("symmetric", "symmetric", "language", {}),
        ("antisymmetric", "antisymmetric", "padded", {"control": "random"}),
        ("output", "output", "difference", {}),
        ("output-mean", "output", "padded", {"replace": "mean"}),
        ("output-resample", "output", "language", {"replace": "resample", "reference": True}),
        ("long", "long_range", "own", {"window": 4, "sinks": 1}),
        ("position", "position", "language", {"blocks": LENGTHS, "control": "random"}),
        ("interaction", "interaction", "language", {"blocks": (1, 1, 1)}),
    ]
    for name, part, task, more in rows:
        yield Item(f"sweep-{name}", "sweep", {"part": part, "task": task, "heads": heads, **more})
    stored = {"task": "induction", "heads": heads, "folder": True}
    yield Item("sweep-stored", "sweep", {"part": "antisymmetric", "control": "random", **stored})
    yield Item("sweep-screen", "sweep", {"part": "symmetric", "task": "own", "screen": "gradient"})
    yield Item("bands", "bands", {"heads": heads[:2], "task": "induction"})


def edge_items(heads: list[str]) -> Iterator[Item]:
    """Edges between heads, and one score as a sum."""
    last = heads[-2:]
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("k", "ind", {"control": "random"}),
        ("q", "prev", {}),
        ("k", "dup", {"replace": "zero", "senders": ["heads", "embedding", "mlps"]}),
        ("q", "attention", {}),
        ("v", "task:induction", {}),
        ("k", "task:own", {"control": "random"}),
        ("q", "task:padded", {"replace": "zero"}),
    ]
    for what, measure, more in rows:
        name = "-".join(["edges", what, measure.replace("task:", "task-"), *more])
        yield Item(name, "edges", {"heads": last, "what": what, "measure": measure, **more})
    yield Item("edges-stored", "edges", {"heads": last, "what": "v", "measure": "task:language", "folder": True})
    given = {"head": heads[-1], "query": -1, "key": 13}
    yield Item("attribution", "attribution", given)
    yield Item("attribution-removed", "attribution", {**given, "top": 6, "remove": 3})
    yield Item("attribution-top", "attribution", {**given, "top": 4})


def positional_items(heads: list[str]) -> Iterator[Item]:
    """Positional and symbolic scores."""
    for mode in ("prompt", "key"):
        yield Item(f"positional-{mode}", "positional", {"mode": mode})
        yield Item(f"positional-{mode}-frequency", "positional", {"mode": mode, "per_frequency": True, "swaps": "all"})
    more = {"mode": "key", "prompts": 2, "tau": 0.1, "logit_scale": 1.0, "swaps": "all"}
    yield Item("positional-several", "positional", {**more, "lengths": (3, 3, 3)})
    yield Item("positional-queries", "positional", {"mode": "key", "by": "query", "swaps": [(1, 2), (0, 3)]})
    task = {"swapped": 4, "queries": 2, "draws": 2}
    yield Item("task-prompt", "on_task", {**task, "mode": "prompt"})
    yield Item("task-key", "on_task", {**task, "mode": "key", "per_frequency": True, "swaps": "per_query"})
    yield Item("task-stored", "on_task", {**task, "mode": "prompt", "swaps": "all", "folder": True})
    yield Item("shares", "on_blocks", {"function": "logit_shares"})
    traces = {"function": "attention_traces", "heads": heads[:2], "swaps": [(1, 2)]}
    yield Item("traces", "on_blocks", {**traces, "frequencies": [0, 1]})
    yield Item("traces-key", "on_blocks", {**traces, "mode": "key"})
    yield Item("norms", "on_blocks", {"function": "frequency_norms", "heads": heads[:2]})


def spectral_items(build: Callable[[], Any] | None = None, heads: list[str] | None = None) -> Iterator[Item]:
    """Models with learned rotary positions."""
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("head", "logits", {}),
        ("group", "gradients", {"scope": "group", "log_omega": False}),
        ("layer", "gradients", {"scope": "layer", "shared_phase": True}),
        ("model", "logits", {"scope": "model", "phase_noise": 0.1, "seed": 1}),
        ("some", "logits", {"scope": "group", "frequencies": [0], "share_weights": False}),
        ("merge", "merge", {"scope": "head"}),
    ]
    if build is None:
        rows.append(("heads", "heads", {}))
    for name, ask, more in rows:
        yield Item(f"spectral-{name}-{ask}", "spectral", {"ask": ask, "build": build, **more})


def model_items(heads: list[str], other: Callable[[], Any] | None = None) -> Iterator[Item]:
    """Everything that is computed of one model."""
    for room in (weight_items, detector_items, ablation_items, sweep_items, edge_items, positional_items):
        yield from room(heads)
    yield from spectral_items()
    if other is not None:
        yield Item("compared", "compare_heads", {"other": other, **QUICK})


# --- the zoo ---


def _loaded(name: str) -> Callable[[Calls], Any]:
    return lambda calls: calls.get("load_model")(zoo.hf_model(name))


def _in_bfloat16(_: Calls) -> Any:
    model = zoo.bridge("llama").to(torch.bfloat16)
    model.original_model.to(torch.bfloat16)
    return model


def _folder_items(names: tuple[str, ...]) -> Iterator[Item]:
    """Models that are read from their files, and loaded from them."""
    for name in names:
        yield Item(f"{name}-heads", "from_folder", {"function": "analyze_heads", "model": name, **PEEK})
        stored = {**PEEK, "heads": HEADS, "folder": True}
        yield Item(f"{name}-stored", "from_folder", {"function": "analyze_heads", "model": name, **stored})
        yield Item(f"{name}-composition", "from_folder", {"function": "k_composition", "model": name, "head": "L1H1"})


def zoo_groups() -> Iterator[Group]:
    """Every architecture of the zoo, on both backends, and the forms of it that only some tests ask for."""
    for name in (*zoo.ARCHITECTURES, *zoo.LENGTH_DEPENDENT):
        other = functools.partial(zoo.bridge, name, 1)
        yield Group(
            f"bridge-{name}", lambda _, name=name: zoo.bridge(name), functools.partial(model_items, HEADS, other)
        )
    for name in zoo.HOOKED_ARCHITECTURES if zoo.HAS_HOOKED else ():
        yield Group(f"hooked-{name}", lambda _, name=name: zoo.hooked(name), functools.partial(model_items, HEADS))
    if zoo.HAS_HOOKED:
        raw = functools.partial(zoo.hooked, "qwen2", fold_ln=False)
        yield Group("hooked-qwen2-raw", lambda _: raw(), functools.partial(model_items, HEADS))
    yield Group("bridge-llama-bfloat16", _in_bfloat16, functools.partial(model_items, HEADS))
    for name in zoo_shapes.MORE_SHAPES:
        yield Group(f"loaded-{name}", _loaded(name), functools.partial(model_items, HEADS))
    for name in ("llama", "qwen3", "gemma3", "neox", "yarn"):
        build = functools.partial(zoo.hf_model, name)
        yield Group(f"transformers-{name}", lambda _, build=build: build(), functools.partial(spectral_items, build))
    yield Group(
        "folders", lambda _: None, functools.partial(_folder_items, ("llama", "qwen3", "gemma2", "neox", "gpt2"))
    )
    yield Group("refusals", lambda _: zoo.bridge("llama"), refusal_items)
    yield Group("refused-models", lambda _: None, refused_model_items)


# --- packaged models ---

TINY = ("tiny-rope", "tiny-rope-sym", "tiny-rope-imag", "tiny-ape", "tiny-ape-sym")


def packaged_groups() -> Iterator[Group]:
    """The packaged two-layer models, histories, statistics of tables."""
    for name in TINY:
        build = lambda calls, name=name: calls.get("load_model")(name)  # noqa: E731
        yield Group(name, build, functools.partial(model_items, HEADS))
    yield Group("histories", lambda _: None, history_items)
    yield Group("statistics", lambda _: None, statistic_items)
    yield Group("spectral-hooked", lambda _: None, _from_scratch)


def _from_scratch() -> Iterator[Item]:
    for log_omega in (False, True):
        yield Item(f"log-{log_omega}", "from_scratch", {"log_omega": log_omega})


def history_items() -> Iterator[Item]:
    """Head tables over the tiny models, and over models of the zoo as steps."""
    names = ["tiny-rope-sym", "tiny-rope-imag", "tiny-rope"]
    pairs = [((0, 3), (1, 0))]
    yield Item("files", "history", {"checkpoints": names, "null_draws": 3, "detectors": False, "pairs": pairs})
    given = {"checkpoints": names[1:], "null_draws": 3, "task": "induction", "blocks": True, "seed": 2, "folder": True}
    yield Item("detectors", "history", given)
    steps = lambda: [(step, zoo.bridge("llama", seed)) for seed, step in enumerate((0, 5, 9))]  # noqa: E731
    yield Item("steps", "history", {"checkpoints": steps, "null_draws": 3, "pairs": [((0, 1), (1, 2))]})


# --- demo models ---

DEMO = {"smollm2-135m": ["L0H1", "L16H0"], "gemma3-270m": ["L0H1", "L5H2"]}


def demo_groups() -> Iterator[Group]:
    """The demo models: a few heads and sequences."""
    for name, heads in DEMO.items():
        build = lambda calls, name=name: calls.get("load_model")(name)  # noqa: E731
        yield Group(name, build, functools.partial(demo_items, heads))


def demo_items(heads: list[str]) -> Iterator[Item]:
    """A few heads of a real model, on a few short sequences of text or random ids."""
    first, last = heads
    given = {"null_draws": 3, "detectors": False, "heads": heads}
    yield Item("heads", "analyze_heads", {**given, "extras": ("score_asym", "position_share")})
    yield Item("frequencies", "plain", {"function": "frequency_table"})
    yield Item("verify", "plain", {"function": "verify_scores"})
    for kind in "kv":
        yield Item(f"composition-{kind}", "k_composition", {"head": last, "kind": kind})
    yield Item("penalty", "qk_penalty", {"part": "antisymmetric", "heads": heads, "gradient": False})
    yield Item("directions", "directions", {"head": first, "kind": "qk"})
    yield Item("detect", "detect_heads", {"n_sequences": 2, "segment_length": 16})
    yield Item("detect-text", "detect_heads", {"prompts": 3, "pattern": "local"})
    for part in PLAIN_PARTS:
        yield Item(f"ablate-{part}", "ablate", {"heads": heads, "part": part})
    yield Item("ablate-mean-loss", "ablate", {"heads": last, "part": "output", "replace": "mean", "score": "text"})
    for what in "qkv":
        edge = {"heads": first, "into": [last], "input": what}
        yield Item(f"ablate-into-{what}", "ablate", {**edge, "part": "output"})
    yield Item("sweep", "sweep", {"part": "rope_phase", "task": "text", "heads": heads, "control": "random"})
    yield Item("bands", "bands", {"heads": [last], "task": "text"})
    senders = {"senders": [first, "embedding"], "heads": [last]}
    yield Item("edges", "edges", {**senders, "what": "k", "measure": "ind"})
    yield Item("edges-task", "edges", {**senders, "what": "v", "measure": "task:text"})
    yield Item("attribution", "attribution", {"head": last, "query": -1, "key": 9, "top": 8, "remove": 2})
    for mode in ("prompt", "key"):
        yield Item(f"positional-{mode}", "positional", {"mode": mode, "lengths": (3, 3, 3), "per_frequency": True})
    task = {"size": 6, "swapped": 3, "queries": 2, "draws": 1, "heads": heads}
    yield Item("task", "on_task", {**task, "mode": "key"})
    yield Item("shares", "on_blocks", {"function": "logit_shares"})
    yield Item("spectral", "spectral", {"ask": "logits", "scope": "layer"})


def groups(part: str) -> Iterator[Group]:
    """Groups of a part: `zoo`, `packaged`, `demo`, or `all`."""
    chosen = {"zoo": zoo_groups, "packaged": packaged_groups, "demo": demo_groups}
    for name, make in chosen.items():
        if part in (name, "all"):
            yield from make()


@functools.cache
def saved_folder(name: str) -> Path:
    """A checkpoint folder of a model of the zoo, which stays until the process ends."""
    return zoo.save_folder(name, zoo.temporary("zoo_") / name)
