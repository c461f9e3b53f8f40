"""Freshly initialised models through the whole pipeline: their heads are draws of the null (FP section 9, step 0).

One test of folding, grouped keys, centring and n = d_model - 1 at once: any of them wrong shifts z or bends
percentiles.
"""

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
import transformers
import zoo
from transformer_lens.model_bridge.sources import build_bridge_from_module

import tlspectral as tls
from tlspectral.nulls import NULL_COLUMNS, dir_frac_null

WIDTH, HEADS, LAYERS = 96, 6, 20
_SHAPE = {
    "vocab_size": zoo.VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
}
FRESH = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=zoo.VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=32, n_positions=64
    ),
    "neox": lambda: transformers.GPTNeoXConfig(**_SHAPE),
    "llama": lambda: transformers.LlamaConfig(**_SHAPE, num_key_value_heads=2),
}


@pytest.fixture(scope="module", params=FRESH)
def fresh_table(request: pytest.FixtureRequest) -> pd.DataFrame:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FRESH[request.param](), attn_implementation="eager").eval()
    # Scores of a fresh model are near 0; larger weights leave the null alone and keep the self-check meaningful.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("c_attn.weight", "query_key_value.weight", "q_proj", "k_proj")):
                parameter *= 5
    architecture = type(model).__name__
    model.config.architectures = [architecture]
    bridge = build_bridge_from_module(model, architecture, hf_config=model.config, tokenizer=None)
    return tls.analyze_heads(bridge, detectors=False, null_blocks="fresh", null_draws=200, show_progress=False)


@pytest.mark.parametrize("column", NULL_COLUMNS)
def test_z_of_a_fresh_model_is_standard(fresh_table: pd.DataFrame, column: str) -> None:
    z = fresh_table[f"{column}_z"]
    heads = len(z)
    # Errors of mean and sd over 120 heads are 0.09 and 0.065, plus 7 % of z from 200 draws: four of each. Forgetting
    # that LayerNorm takes one dimension moves dir_frac's z by about 0.5; unfolded or uncentred factors by several.
    assert abs(z.mean()) < 4 / np.sqrt(heads)
    assert abs(z.std() - 1) < 4 / np.sqrt(2 * heads)


@pytest.mark.parametrize("column", NULL_COLUMNS)
def test_percentiles_of_a_fresh_model_are_uniform(fresh_table: pd.DataFrame, column: str) -> None:
    # Twelve tests; a threshold of 1e-3 lets 1 % of correct versions fail on another seed.
    assert scipy.stats.kstest(fresh_table[f"{column}_null_pct"], "uniform").pvalue > 1e-3


def test_published_gpt2_null_agrees_with_the_closed_form() -> None:
    # Over GPT-2's 144 heads in the release of "Fingerprint, Not Blueprint" (300 draws a head, CC-BY-4.0).
    published_mean, published_std = 0.7066436, 6.486e-4
    mean, std = dir_frac_null(np.ones((1, 64)), 767)
    # The published mean has a Monte-Carlo error of 3e-6; n = 768 instead of 767 would shift it by 6e-7, no gain at all
    # from centring is not visible here, a wrong order of the delta method would be (1e-4).
    assert mean[0] == pytest.approx(published_mean, abs=1e-5)
    # A flat spectrum stands for trained ones: the sd depends on the spectrum at order F4/F2^2/n. Error of 144 medians.
    assert std[0] == pytest.approx(published_std, rel=0.02)
