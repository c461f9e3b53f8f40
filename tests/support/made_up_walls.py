"""Walls of made-up numbers."""

import numpy as np
import pandas as pd
from made_up_heads import heads

from tlspectral.hooks.measured_wall import LEVELS, Removal, Wall

STRANGE = ("<s>", ' "quo\'te"', "</script><b>", "\n", "\N{WHITE RECTANGLE}", "\N{SLIGHTLY SMILING FACE}",
           " \N{HEBREW LETTER ALEF}\N{HEBREW LETTER BET}", "\t&amp;", " $x$", " end")  # fmt: skip
"""Tokens that a page may get wrong."""


def wall(
    layers: int = 3,
    per_layer: int = 4,
    tokens=STRANGE,
    *,
    causal: bool = True,
    removal: bool = True,
    task: bool = False,
) -> Wall:
    """Random attention, with rows that sum to 1, and effects of which that of L1H2 is by far the largest loss."""
    generator, n, count = np.random.default_rng(1), len(tokens), layers * per_layer
    weights = generator.exponential(size=(count, n, n)) ** 2
    weights = np.tril(weights) if causal else weights
    weights /= weights.sum(-1, keepdims=True)
    layer, head = np.repeat(np.arange(layers), per_layer), np.tile(np.arange(per_layer), layers)
    frame = pd.DataFrame(
        {"layer": layer, "head": head, "name": [f"L{a}H{b}" for a, b in zip(layer, head, strict=True)]}
    )
    frame["kv_head"] = head // 2
    frame["second_sink"], frame["second_sink_share"] = np.where(layer == 1, 3, -1), np.where(layer == 1, 0.25, np.nan)
    known = heads().attrs
    return Wall(
        tuple(tokens),
        (True, *[False] * (n - 1)),
        frame,
        np.rint(weights * LEVELS).astype(np.uint8),
        causal,
        _removal(generator, count, per_layer + 2, task) if removal else None,
        "" if removal else "No head was removed: this was left out.",
        {name: known[name] for name in ("model", "revision", "weights_sha256")},
    )


def _removal(generator: np.random.Generator, count: int, largest: int, task: bool) -> Removal:
    intact = np.array([0.8, 0.1, 0.04, 0.02, 0.01])
    deltas = 0.05 * generator.normal(size=count)
    deltas[largest] = -0.6
    without = np.tile(intact, (count, 1))
    without[:, 0] += deltas
    effects = pd.DataFrame({"delta": deltas, "delta_se": np.full(count, 0.01 if task else np.nan)})
    effects["control_delta"], effects["control_p"], effects["control_p_floor"] = np.nan, np.nan, np.nan
    effects.loc[largest, ["control_delta", "control_p", "control_p_floor"]] = [-0.01, 0.25, 0.25]
    top = [(" answer</p>", 0.8 + delta) for delta in deltas]
    top[largest] = (" other", 0.5)
    return Removal(
        measure="logit difference" if task else "probability of ' answer</p>'",
        of_task=task,
        n_prompts=8 if task else 1,
        value=0.8,
        value_se=0.02 if task else float("nan"),
        watched=(" answer</p>", " other", "\n", " c", " d"),
        correct=1,
        wrong=1 if task else 0,
        intact=intact,
        without=without,
        top=tuple(top),
        effects=effects,
    )
