"""TransformerLens' native models (`boot_native`): every feature that enters an attention score is read right."""

import functools

import pytest
import torch
from conformance.reading import standard_frequencies

import tlspectral as tls
from tlspectral.heads.operators.verification import check_prompt
from tlspectral.models.reading import attention_view

SHAPE = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_head": 8, "d_vocab": 40, "n_ctx": 64, "attn_only": True}
ROTARY = {"positional_embedding_type": "rotary"}
FEATURES = {
    "standard": {"positional_embedding_type": "standard"},
    "rotary": ROTARY,
    "partial rotary": {**ROTARY, "rotary_dim": 4},
    "rotary base": {**ROTARY, "rotary_base": 100},
    "linear scaling": {**ROTARY, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 scaling": {
        **ROTARY,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
    },
    "grouped keys": {**ROTARY, "n_key_value_heads": 2},
    "softcap": {"attn_scores_soft_cap": 5.0},
    "score scale": {"attn_scale": 7.0},
    "LNPre": {"normalization_type": "LNPre"},
    "RMSPre": {"normalization_type": "RMSPre"},
    "no norm": {"normalization_type": None},
    "gated MLP": {"attn_only": False, "gated_mlp": True, "act_fn": "silu", "normalization_type": "RMS"},
    "eps": {"eps": 0.3},
}


@functools.cache
def native(feature):
    """A model with norms and biases off 1 and 0 and enlarged queries and keys, so that no check passes vacuously."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    config = TransformerBridgeConfig.from_dict({"seed": 0, **SHAPE, **FEATURES[feature]})
    config.rope_scaling = FEATURES[feature].get("rope_scaling")  # a dictionary leaves it out
    model = TransformerBridge.boot_native(config, device="cpu").eval()
    stream = torch.Generator().manual_seed(0)
    # Without a norm the stream is small.
    enlarged = 12.0 if feature == "no norm" else 3.0
    with torch.no_grad():
        for name, parameter in model.original_model.named_parameters():
            if "ln" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=stream)
            elif ".attn." in name and (".q." in name or ".k." in name):
                parameter *= enlarged
    return model


@pytest.mark.parametrize("feature", FEATURES)
def test_scores_are_reproduced(feature):
    model = native(feature)
    view = attention_view(model)
    name = view.hook_names(1)["pattern"]
    pattern = view.capture(check_prompt(view), [name], last=name)[name]
    # Neither flat, as with scores near 0 with which anything agrees, nor of one key.
    assert 0.2 < float(pattern[..., 8:, :].amax(-1).median()) < 0.999
    assert tls.verify_scores(model).max() < 1e-5
    if feature == "llama3 scaling":
        tls.verify_scores(model, torch.randint(0, 40, (2, 64), generator=torch.Generator().manual_seed(1)))


def test_rotary_geometry_is_that_of_the_tables():
    def theta(feature):
        return tls.qk_operators(native(feature)).rotary(1).theta

    plain = standard_frequencies(10000.0, 8)
    for feature, expected in [
        ("rotary", plain),
        ("linear scaling", plain / 4),
        ("rotary base", standard_frequencies(100.0, 8)),
        ("partial rotary", standard_frequencies(10000.0, 4)),
    ]:
        torch.testing.assert_close(theta(feature), expected, rtol=1e-6, atol=0)  # the tables are float32
    # Of wavelengths 6, 63, 628 and 6283 tokens all but the first are longer than the original context of 32.
    torch.testing.assert_close(theta("llama3 scaling")[1:], plain[1:] / 8, rtol=1e-6, atol=0)
    partial = tls.qk_operators(native("partial rotary")).rotary(0)
    assert (partial.real_index.tolist(), partial.imag_index.tolist()) == ([0, 2], [1, 3])
    assert partial.rotary_fraction == 0.5


@pytest.mark.tl4
@pytest.mark.slow
def test_the_table_of_heads():
    model = native("grouped keys")
    table = tls.analyze_heads(model, null_draws=2)
    assert len(table) == 8
    assert table[["dir_frac", "prev", "copying"]].notna().all(axis=None)
    assert table.attrs["score_check"]["compared"] == "pattern"
    assert len(tls.k_composition(model, (1, 3))) == 4
