"""Prompts, tasks, parameters and tables that items of `compare_trees.py` are computed on: the same in every tree."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
import zoo

SPECTRAL = ("omega", "log_omega_shift", "phase", "gain")
"""Parameters of a spectral layer that a test moves."""

LENGTHS = (3, 3, 3, 3)
"""Blocks of a prompt, where an item does not say otherwise."""


def block_prompt(make: Callable[..., Any], model: Any, lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> Any:
    """A `BlockPrompt` of 3 random ids, blocks of the given lengths and 3 more."""
    pieces = tokens_for(model, 1, 6 + sum(lengths), seed)[0].split([3, *lengths, 3])
    return make(pieces[0], pieces[1:-1], pieces[-1])


def spectral_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Spectral parameters by the number of their layer and their own name."""
    found = {}
    for path, value in model.named_parameters():
        parts = path.split(".")
        if "spectral" in parts and parts[-1] in SPECTRAL:
            found[f"{next(part for part in parts if part.isdigit())}.{parts[-1]}"] = value
    return found


def last_token_score(logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A metric of one's own: logit of token 5 less that of token 7, at the last predicted position."""
    return logits[:, -1, 5] - logits[:, -1, 7]


def vocabulary_of(model: Any) -> int:
    """Ids that every item may use: those of the zoo, or as many as a smaller model has."""
    cfg = getattr(model, "cfg", None) or model.config
    return min(97, getattr(cfg, "d_vocab", None) or getattr(cfg, "vocab_size", 97))


def tokens_for(model: Any, sequences: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids [sequences, length] that a model knows; of no model, ids below 30."""
    return zoo.prompt(sequences, length, seed) % (30 if model is None else vocabulary_of(model))


def rows_for(model: Any, count: int) -> list[torch.Tensor]:
    """Prompts of unequal length, with tokens that come twice."""
    tokens = tokens_for(model, count, 20, seed=6) % 12 + 3
    return [row[: 20 - 4 * (index % 3)] for index, row in enumerate(tokens)]


def token_blocks(base: type, drawn: type, question: type, model: Any) -> Any:
    """A block task of token ids: five blocks of three tokens, a question about each."""
    vocabulary = vocabulary_of(model)

    @dataclasses.dataclass(frozen=True)
    class Blocks(base):  # type: ignore[misc, valid-type]
        n_blocks: int = 5

        def draw(self, seed: int) -> Any:
            tokens = zoo.prompt(1, 18, 50 + seed)[0] % vocabulary
            blocks = tuple(tokens[3:].split(3))
            asked = [question(index, block[:2], int(block[2])) for index, block in enumerate(blocks)]
            return drawn(tokens[:3], blocks, tuple(asked), tuple(int(block[2]) for block in blocks))

    return Blocks()


def fixed_table(n_layers: int = 6, n_heads: int = 5, seed: int = 0, missing: bool = True) -> pd.DataFrame:
    """A table of heads with correlated columns, ties and a few missing values, for statistics."""
    rng = np.random.default_rng(seed)
    n = n_layers * n_heads
    layer = np.repeat(np.arange(n_layers), n_heads)
    shared = rng.normal(size=n) + 0.5 * rng.normal(size=n_layers)[layer]
    table = pd.DataFrame({"layer": layer, "head": np.tile(np.arange(n_heads), n_layers)})
    for index, name in enumerate(("D_head", "dir_frac", "rope_imag_frac", "freq_centroid", "prev", "D_head_pct")):
        table[name] = rng.normal(size=n) + (0.3 + 0.2 * index) * shared
    table["prev"] = table["prev"].rank(pct=True).round(1)
    if missing:
        table.loc[[3, 17], "D_head"] = np.nan
    return table
