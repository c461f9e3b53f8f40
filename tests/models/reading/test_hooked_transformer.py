"""OLMo 2 and OLMoE as HookedTransformers, whose queries and keys are normalised over all heads at once."""

import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading import attention_view

pytestmark = zoo.needs_hooked


@pytest.fixture(scope="module")
def olmo2():
    """Built from a config, as TransformerLens loads OLMo 2 from the hub alone."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    cfg = HookedTransformerConfig(
        n_layers=2, d_model=48, n_ctx=64, d_head=12, n_heads=4, d_mlp=64, d_vocab=97, act_fn="silu", gated_mlp=True,
        normalization_type="RMS", positional_embedding_type="rotary", rotary_dim=12, final_rms=True, seed=0,
        original_architecture="Olmo2ForCausalLM",
    )  # fmt: skip
    model = HookedTransformer(cfg, move_to_device=False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "ln" in name:
                weight += 0.3 * torch.randn_like(weight) + 0.6 * ("_norm" in name)
    return model.eval()


@pytest.mark.slow
def test_olmo2_has_no_norm_in_front(olmo2):
    raw = attention_view(olmo2).raw(0)
    assert raw.norm.kind == "none"
    assert raw.q_norm.over_heads
    assert raw.q_norm.gain.shape == (4, 12)
    # Measured 3e-6 at scores of 8. The norm behind the attention in front of it is off by tenths.
    assert float(tls.verify_scores(olmo2).max()) < 1e-5
    table = tls.analyze_heads(olmo2, null_draws=2)
    assert set(table["bilinear"]) == {"up_to_token_scale"}
    assert table[["D_head", "prev", "ind"]].notna().all(axis=None)
    with torch.no_grad(), tls.ablate(olmo2, [(0, 1)], "rope_phase"):
        without = olmo2(zoo.prompt())
    assert not torch.equal(olmo2(zoo.prompt()), without)


def test_olmoe_is_the_same_on_both_backends(folder):
    path = folder("olmoe")
    hooked, bridge = (attention_view(tls.load_model(path, backend=backend)) for backend in ("hooked", "bridge"))
    for index in range(2):
        one, other = hooked.layer(index), bridge.layer(index)
        assert one.q_norm.over_heads
        assert one.k_norm.gain.shape == (2, 12)
        for found, expected in zip(one.operator_factors(), other.operator_factors(), strict=True):
            # Folding in float32 rounds the weights of one of them: 6e-8.
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert float(tls.verify_scores(hooked.model).max()) < 1e-5


def test_positions_beside_the_stream_are_refused_by_name():
    from transformer_lens import HookedTransformer

    cfg = {"n_layers": 1, "d_model": 16, "d_head": 4, "n_heads": 4, "d_vocab": 20, "n_ctx": 12, "attn_only": True}
    model = HookedTransformer(cfg | {"positional_embedding_type": "shortformer", "device": "cpu", "seed": 0})
    for measure in (tls.verify_scores, tls.analyze_heads, lambda model: tls.ablate(model, "L0H1", "symmetric")):
        with pytest.raises(
            UnsupportedArchitecture, match=r"layer 0: .*'shortformer' .*bilinear in stream \+ positions"
        ):
            measure(model)
