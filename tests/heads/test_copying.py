"""Copying and self-match against the dense circuit, for every norm, unembedding and precision that enters them."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from reference_circuits import (
    DenseLayer,
    DenseModel,
    array_of,
    bridge,
    dense_copying,
    dense_model,
    dense_self_match,
    edited,
    edited_hf,
    reference,
)

import tlspectral as tls
from tlspectral.heads import copying as copying_room
from tlspectral.heads.copying import EmbeddingMoments
from tlspectral.models.reading import attention_view


@pytest.mark.slow
def test_the_scores_are_the_columns_of_the_head_table():
    """Whose numbers are those of the dense circuits (test_head_columns)."""
    found = tls.heads.copying_scores(bridge("gemma3"))
    heads = tls.analyze_heads(bridge("gemma3"), null_draws=2, detectors=False)
    pd.testing.assert_frame_equal(found, heads[list(found)], check_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "factor", "sign"),
    [(torch.float32, "v_proj", 1), (torch.float32, "o_proj", -1), (torch.bfloat16, "v_proj", -1),
     (torch.bfloat16, "o_proj", 1), (torch.float64, "o_proj", -1)],
)  # fmt: skip
def test_a_head_of_lower_rank_that_copies_or_negates_all_it_reads(dtype, factor, sign):
    """W_V and W_O of rank 5 of 12: the other seven eigenvalues are rounding of storage, of either sign."""
    generator = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64)).Q[:, :5]

    def plant(model):
        model.to(dtype)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        model.model.norm.weight.fill_(1.0)
        layer = model.model.layers[0]
        layer.input_layernorm.weight.fill_(1.0)
        values = layer.self_attn.v_proj.weight[:12].double()
        layer.self_attn.o_proj.weight[:, 12:24] = (sign * values).T.to(layer.self_attn.o_proj.weight)  # of head 1
        # Of the two factors one is whole, so that the rank is that of the other alone.
        lower = basis @ (basis.T @ values)
        if factor == "v_proj":
            layer.self_attn.v_proj.weight[:12] = lower.to(layer.self_attn.v_proj.weight)
        else:
            layer.self_attn.o_proj.weight[:, 12:24] = (sign * lower).T.to(layer.self_attn.o_proj.weight)

    table = tls.heads.copying_scores(edited("llama", plant))
    assert table.loc[1, "copying"] == float(sign > 0)
    # Measured: 1e-16 in float64, 2e-3 in bfloat16, from the factors' own rounding; a random head is below .9.
    assert table.loc[1, "positivity"] == pytest.approx(sign, abs=1e-2)
    assert table.loc[[0, 2, 3], "positivity"].abs().max() < 0.9


def test_a_head_whose_circuit_is_nilpotent_or_that_writes_nothing_has_no_copying():
    """W_O W_U W_E W_V of rank 1 and trace 0: its only eigenvalue is 0, and what eigvals gives is rounding."""
    first, second = torch.linalg.qr(torch.randn(12, 2, generator=torch.Generator().manual_seed(0)).double()).Q.T

    def plant(model):
        model.double()
        layer = model.model.layers[1]
        read, write = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        read[:12] = first[:, None] * read[0].clone()
        write[:, :12] = write[:, :1].clone() * second

    table = tls.heads.copying_scores(edited("llama", plant))
    assert table.loc[4, ["copying", "positivity"]].isna().all()

    def silence(model):
        model.model.layers[1].self_attn.o_proj.weight[:, :12] = 0  # head 0

    silent = tls.heads.copying_scores(edited("llama", silence))
    assert silent.loc[4, ["copying", "positivity"]].isna().all()
    expected = tls.heads.copying_scores(bridge("llama")).drop(index=4)
    pd.testing.assert_frame_equal(silent.drop(index=4), expected, check_exact=True)


def compatible(name):
    model = zoo.bridge(name)
    model.enable_compatibility_mode(disable_warnings=True)
    return model


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("load", [compatible, pytest.param(zoo.hooked, marks=zoo.needs_hooked)])
def test_a_head_has_one_value_however_the_model_was_loaded(name, load):
    """TransformerLens's default processing subtracts W_U's mean over the vocabulary, which no probability sees."""
    found, raw, dense = tls.heads.copying_scores(load(name)), tls.heads.copying_scores(bridge(name)), reference(name)
    copying, positivity = (
        np.concatenate(part) for part in zip(*[dense_copying(x, dense) for x in dense.layers], strict=True)
    )
    for table in (found, raw):
        # Measured: 3e-7, weights folded in float32; a W_U that is not centred moves positivity by up to 0.1.
        np.testing.assert_allclose(table["positivity"], positivity, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(table["copying"], copying)


def test_weights_of_16_bits_are_folded_in_float64():
    """The gain 1 + w too: Gemma itself adds the 1 in float32, and in bfloat16 it would round by 4e-3."""
    model = edited("gemma3", lambda model: model.bfloat16())
    dense = dense_model("gemma3", zoo.hf_model("gemma3").bfloat16())
    positivity = np.concatenate([dense_copying(layer, dense)[1] for layer in dense.layers])
    # As in float32: rounding of eigenvalues, 1e-14. A gain rounded to bfloat16 moves them by 1e-4 and more.
    np.testing.assert_allclose(tls.heads.copying_scores(model)["positivity"], positivity, rtol=0, atol=1e-10)


def toy(**changes):
    """A HookedTransformer made from a config, as in toy-model papers."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    shape = {"n_layers": 1, "d_model": 16, "n_ctx": 12, "n_heads": 2, "d_head": 8, "d_vocab": 11, "act_fn": "relu"}
    cfg = HookedTransformerConfig(**{**shape, "normalization_type": "LN", "seed": 0, **changes})
    model = HookedTransformer(cfg, move_to_device=False)
    with torch.no_grad():
        model.ln_final.w += 0.3 * torch.arange(16) / 16
    return model


@zoo.needs_hooked
def test_a_model_that_answers_in_another_vocabulary_has_no_copying():
    """As in modular arithmetic: the output tokens are not the input tokens, so there is nothing to copy."""
    table = tls.heads.copying_scores(toy(d_vocab_out=7))
    assert len(table) == 2
    assert table[["copying", "positivity"]].isna().all(axis=None)
    assert tls.heads.copying_scores(toy(d_vocab_out=11))["positivity"].notna().all()


@zoo.needs_hooked
@pytest.mark.parametrize("final_rms", [False, True])
def test_the_final_norm_may_be_of_another_kind_than_the_others(final_rms):
    model = toy(final_rms=final_rms)
    w_e, w_u, w_v, w_o = (array_of(part) for part in (model.W_E, model.W_U, model.W_V[0], model.W_O[0]))
    centring = np.eye(16) - 1 / 16
    unfold = (np.eye(16) if final_rms else centring) @ np.diag(array_of(model.ln_final.w))
    dense = DenseModel([DenseLayer(w_v, w_v, centring @ w_v, w_o, centring)], w_e, unfold @ w_u)
    expected = dense_copying(dense.layers[0], dense)[1]
    # Measured: 1e-15; a centring too many moves positivity by 1e-2.
    np.testing.assert_allclose(tls.heads.copying_scores(model)["positivity"], expected, rtol=0, atol=1e-10)


# --- self-match ---


def self_match(model):
    view = attention_view(model)
    moments = EmbeddingMoments(view)
    return [moments.self_match(*view.layer(index).operator_factors()) for index in range(view.n_layers)]


def test_a_head_that_matches_each_token_with_itself():
    """W_Q = W_K makes the diagonal a sum of squares. Other heads: test_head_columns."""

    def plant(model):
        attention = model.model.layers[0].self_attn
        attention.q_proj.weight[:12] = attention.k_proj.weight[:12]
        attention.q_proj.weight[12:24] = -attention.k_proj.weight[:12]
        attention.q_proj.weight[24:36] = 0

    dense = dense_model("llama", edited_hf("llama", plant))
    with np.errstate(invalid="ignore"):
        expected = dense_self_match(dense.layers[0], dense)
    found = self_match(edited("llama", plant))[0]
    assert found[0] > 1
    assert found[1] == -found[0]
    assert np.isnan(found).tolist() == [False, False, True, False]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


# --- the vocabulary in pieces ---


@pytest.mark.parametrize(("name", "size"), [("gpt2", 10), ("llama", 1), ("llama", 96)])
def test_the_size_of_vocabulary_pieces_does_not_matter(monkeypatch, name, size):
    model = bridge(name)
    copying, matching = tls.heads.copying_scores(model), self_match(model)
    seen = []

    def pieces(weight, *, axis):
        for piece in whole(weight, axis=axis, size=size):
            seen.append(piece.shape[axis])
            yield piece

    whole = copying_room.vocabulary_chunks
    monkeypatch.setattr(copying_room, "vocabulary_chunks", pieces)
    # Measured: 1e-14, the order of sums in float64; a lost piece moves both by 1e-3 and more.
    pd.testing.assert_frame_equal(tls.heads.copying_scores(model), copying, rtol=0, atol=1e-11)
    np.testing.assert_allclose(self_match(model), matching, rtol=0, atol=1e-11)
    assert max(seen) == size
    assert sum(seen) == 4 * zoo.VOCABULARY  # W_U for its mean, then with W_E for copying; W_E for self-match
