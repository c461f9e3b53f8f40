"""Constrained training in tests: a preset of six steps, and small models with no gain of 1 and no bias of 0."""

from dataclasses import replace

import torch
from tlspectral_studies.common import AttentionOnlyTransformer, RandomMapTask, TrainingSettings, TransformerConfig
from tlspectral_studies.fingerprint.constrained import Preset
from zoo import generator

TINY = Preset(
    "tiny",
    TransformerConfig(d_model=16, n_heads=2, d_head=8, d_vocab=8, n_ctx=16),
    RandomMapTask(vocabulary=8, length=16),
    TrainingSettings(steps=6, batch_size=4, warmup_steps=2, decay_share=0.0, evaluate_every=2, evaluation_sequences=8),
    stop_after=2,
)
SMALL = replace(TINY.config, rotary_adjacent_pairs=False, unembed_bias=True)


def model(positions="rotary", seed=0, **changes):
    """With biases and gains off 0 and 1, and larger queries and keys, so that none can be left out unseen."""
    built = AttentionOnlyTransformer(replace(SMALL, positional_embedding_type=positions, **changes), seed=seed).eval()
    stream = generator(seed)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith(("W_Q", "W_K")):
                parameter *= 3
            elif ".W_" not in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=stream)
    return built


def dense_phase(w_q, w_k, adjacent=False):
    """M_t of one head as complex [pairs, d, d]: columns (2t, 2t + 1) are a pair, or (t, t + d_head / 2)."""
    pairs = w_q.shape[-1] // 2
    real = [2 * t if adjacent else t for t in range(pairs)]
    imaginary = [2 * t + 1 if adjacent else t + pairs for t in range(pairs)]
    query, key = (torch.complex(weight[:, real], weight[:, imaginary]) for weight in (w_q, w_k))
    return torch.einsum("it,jt->tij", query, key.conj())


def matrices(built):
    """W_Q and W_K of every head, [d_model, d_head], in float64."""
    for block in built.layers:
        yield from zip(block.attn.W_Q.detach().double(), block.attn.W_K.detach().double(), strict=True)
