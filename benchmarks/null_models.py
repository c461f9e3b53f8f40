"""Models and heads of random weights, in which an edge or the pairing of rotary columns carries nothing."""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from null_tables import Likeness, column, flat
from tlspectral_studies.fingerprint.statistics.placebos import permuted_geometries
from torch import Tensor

from tlspectral.algebra.rotary import RotaryGeometry, pair_columns
from tlspectral.heads.weight_columns import phase_columns
from tlspectral.hooks import Dictionary

D_MODEL, D_HEAD = 24, 8
PLACEBO_DRAWS = 19  # the least p is 1 / 20


def fresh_model(seed: int) -> Any:
    """Return a freshly initialised Llama of two layers with four heads; two queries share a key."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    config.architectures = ["LlamaForCausalLM"]
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    return build_bridge_from_module(model, "LlamaForCausalLM", hf_config=config, tokenizer=None)


def random_dictionary(seed: int) -> Dictionary:
    """Return 128 random directions for the stream of `fresh_model`, of which the 8 nearest to a stream are active."""
    decoder = torch.nn.functional.normalize(torch.randn(128, 32, generator=torch.Generator().manual_seed(seed)))

    def nearest(streams: Tensor) -> Tensor:
        projected = streams @ decoder.T
        largest = projected.topk(8, dim=-1)
        return torch.zeros_like(projected).scatter(-1, largest.indices, largest.values.clamp(min=0))

    return Dictionary(decoder, torch.zeros(32), nearest)


def heads_with_pairings(
    rng: np.random.Generator, shape: tuple[int, int], likeness: Likeness
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a head table and its draws of `permuted_pairing`, for weights whose columns are exchangeable.

    How much a key's weights are its query's differs from head to head, and `prev` goes with it. So `D_head` and `prev`
    correlate, and the model's own pairing of columns is one of all that could have been drawn.
    """
    n_heads = shape[1]
    alike = flat(column(rng, 1, shape, likeness))[0]
    w_q, own = (rng.standard_normal((len(alike), D_MODEL, D_HEAD)) for _ in range(2))
    w_k = alike[:, None, None] * w_q + own
    cores = np.linalg.eigvals(w_k.swapaxes(1, 2) @ w_q)
    m_norm = ((w_q.swapaxes(1, 2) @ w_q) * (w_k.swapaxes(1, 2) @ w_k)).sum((1, 2))
    trace = (cores**2).sum(1).real
    layer, head = np.divmod(np.arange(len(alike)), n_heads)
    table = pd.DataFrame(
        {
            "layer": layer,
            "head": head,
            "D_head": np.abs(cores.imag).sum(1) / np.abs(cores).sum(1),
            "dir_frac": np.sqrt((1 - trace / m_norm) / 2),
            "prev": np.exp(0.9 * (alike + rng.standard_normal(len(alike)))),
        }
    )
    theta = 100.0 ** (-torch.arange(0, D_HEAD, 2, dtype=torch.float64) / D_HEAD)
    geometry = RotaryGeometry(theta, *pair_columns(D_HEAD, adjacent=False), D_HEAD)
    phases = partial(phase_columns, torch.from_numpy(w_q), torch.from_numpy(w_k))
    drawn = permuted_geometries(geometry, PLACEBO_DRAWS, int(rng.integers(2**31)))
    draws = [table[["layer", "head"]].assign(draw=index, **phases(one)) for index, one in enumerate(drawn)]
    return table.assign(**phases(geometry)), pd.concat(draws, ignore_index=True)
