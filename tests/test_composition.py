"""Composition, copying and self-match against dense d x d formulas on weights read from Hugging Face's own modules."""

import functools
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral import composition
from tlspectral.attention import attention_view
from tlspectral.composition import EmbeddingMoments
from tlspectral.errors import BadHead
from tlspectral.operators import qk_operators

NAMES = ("gpt2", "neox", "llama", "qwen3", "gemma3")  # LayerNorm twice, RMS with grouped keys, q/k norm, gain 1 + w


@dataclass(frozen=True)
class DenseLayer:
    """A layer's factors, folded by dense matrices: [heads, d_model, d_head], and w_o [heads, d_head, d_model]."""

    w_q: np.ndarray
    w_k: np.ndarray
    w_v: np.ndarray
    w_o: np.ndarray
    centring: np.ndarray

    @property
    def qk(self):
        """M, [heads, d_model, d_model]."""
        return self.w_q @ self.w_k.transpose(0, 2, 1)

    @property
    def ov(self):
        """W_V W_O, written without its mean under LayerNorm."""
        return self.w_v @ self.w_o @ self.centring


@dataclass(frozen=True)
class DenseModel:
    """Layers, W_E as stored [vocabulary, d_model], W_U with the final norm folded in [d_model, vocabulary]."""

    layers: list
    w_e: np.ndarray
    w_u: np.ndarray


def _array(parameter):
    return parameter.detach().double().numpy()


def _by_head(matrix, heads):
    """[d_model, heads x d_head] as [heads, d_model, d_head]."""
    return matrix.reshape(len(matrix), heads, -1).transpose(1, 0, 2)


def _folding(norm, add_one=False):
    """What a norm's mean and gain do to a row vector before a weight, as a dense matrix; then the mean alone."""
    gain = _array(norm.weight) + add_one
    centring = np.eye(len(gain))
    if "LayerNorm" in type(norm).__name__:
        centring -= 1 / len(gain)
    return centring @ np.diag(gain), centring


def dense_model(name, model=None):
    """The dense reference of a zoo model (or of `model`, one of that architecture), from Hugging Face's own weights."""
    model = model or zoo.hf_model(name)
    heads = model.config.num_attention_heads
    one = name.startswith("gemma")
    layers = []
    if name == "gpt2":
        for block in model.transformer.h:
            fold, centring = _folding(block.ln_1)
            parts = np.split(_array(block.attn.c_attn.weight), 3, axis=1)
            w_q, w_k, w_v = (_by_head(fold @ part, heads) for part in parts)
            w_o = _array(block.attn.c_proj.weight).reshape(heads, -1, zoo.WIDTH)
            layers.append(DenseLayer(w_q, w_k, w_v, w_o, centring))
        unfold = _folding(model.transformer.ln_f)[0]
        return DenseModel(layers, _array(model.transformer.wte.weight), unfold @ _array(model.lm_head.weight).T)
    if name == "neox":
        for block in model.gpt_neox.layers:
            fold, centring = _folding(block.input_layernorm)
            joint = _array(block.attention.query_key_value.weight).reshape(heads, 3, -1, zoo.WIDTH)
            w_q, w_k, w_v = (fold @ joint[:, part].transpose(0, 2, 1) for part in range(3))
            w_o = _array(block.attention.dense.weight).T.reshape(heads, -1, zoo.WIDTH)
            layers.append(DenseLayer(w_q, w_k, w_v, w_o, centring))
        unfold = _folding(model.gpt_neox.final_layer_norm)[0]
        w_u = _array(model.embed_out.weight if hasattr(model, "embed_out") else model.lm_head.weight).T
        return DenseModel(layers, _array(model.gpt_neox.embed_in.weight), unfold @ w_u)
    for block in model.model.layers:
        fold, centring = _folding(block.input_layernorm, one)
        attention, kv_heads = block.self_attn, model.config.num_key_value_heads
        w_q = _by_head(fold @ _array(attention.q_proj.weight).T, heads)
        w_k, w_v = (
            np.repeat(_by_head(fold @ _array(part.weight).T, kv_heads), heads // kv_heads, axis=0)
            for part in (attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            w_q, w_k = w_q * (_array(attention.q_norm.weight) + one), w_k * (_array(attention.k_norm.weight) + one)
        w_o = _array(attention.o_proj.weight).T.reshape(heads, -1, zoo.WIDTH)
        layers.append(DenseLayer(w_q, w_k, w_v, w_o, centring))
    unfold = _folding(model.model.norm, one)[0]
    return DenseModel(layers, _array(model.model.embed_tokens.weight), unfold @ _array(model.lm_head.weight).T)


def dense_copying(layer, dense):
    """`copying` and `positivity` of a layer's heads, from the k x k product spelled out."""
    eigenvalues = [np.linalg.eigvals(o @ dense.w_u @ dense.w_e @ v) for o, v in zip(layer.w_o, layer.w_v, strict=True)]
    copying = [np.mean(found.real > 0) for found in eigenvalues]
    return copying, [found.real.sum() / np.abs(found).sum() for found in eigenvalues]


def dense_self_match(layer, dense):
    """`self_match` of a layer's heads, from the whole vocabulary x vocabulary matrix."""
    scores = dense.w_e @ layer.qk @ dense.w_e.T
    diagonal = np.eye(len(dense.w_e), dtype=bool)
    return [(one[diagonal].mean() - one[~diagonal].mean()) / np.sqrt((one**2).mean()) for one in scores]


@functools.cache
def reference(name):
    return dense_model(name)


@functools.cache
def bridge(name):
    return zoo.bridge(name)


def edited(name, change, seed=0):
    """A bridge of a zoo model whose weights were changed first."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = edited_hf(name, change, seed)
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)


def edited_hf(name, change, seed=0):
    model = zoo.hf_model(name, seed)
    with torch.no_grad():
        change(model)
    return model


# --- composition ---


def dense_scores(dense, layer, head, kind):
    target = dense.layers[layer]
    qk, ov = target.qk[head], target.ov[head]
    scores = {}
    for earlier in range(layer):
        for at, source in enumerate(dense.layers[earlier].ov):
            operator = {"k": qk, "q": qk.T, "v": ov}[kind]
            product = source @ operator if kind == "v" else operator @ source.T
            scores[earlier, at] = np.linalg.norm(product) / (np.linalg.norm(operator) * np.linalg.norm(source))
    return scores


@pytest.mark.parametrize("kind", ["k", "q", "v"])
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_the_dense_operators(name, kind):
    dense, last = reference(name), len(reference(name).layers) - 1
    for head in range(len(dense.layers[last].qk)):
        table = tls.k_composition(bridge(name), (last, head), kind=kind)
        expected = dense_scores(dense, last, head, kind)
        found = table.set_index(["layer", "head"])["score"]
        assert set(found.index) == set(expected)
        for at, score in expected.items():
            # Measured: 1e-15 relative. A gain or a centring left out moves scores by 1e-3 and more.
            assert found[at] == pytest.approx(score, rel=1e-10)


def test_the_kinds_differ():
    scores = [tls.k_composition(bridge("llama"), (1, 0), kind=kind)["score"].tolist() for kind in "kqv"]
    assert scores[0] != scores[1] != scores[2] != scores[0]


def test_the_keys_are_meant_unless_said():
    pd.testing.assert_frame_equal(
        tls.k_composition(bridge("llama"), (1, 0)), tls.k_composition(bridge("llama"), (1, 0), kind="k")
    )


@pytest.mark.parametrize("target", [(1, 2), (3, 0)])
def test_the_table_ranks_all_heads_of_all_earlier_layers(target):
    table = tls.k_composition(bridge("gemma3"), target)
    assert list(table) == ["layer", "head", "score", "chance", "rank"]
    assert isinstance(table.index, pd.RangeIndex)
    pairs = list(zip(table["layer"], table["head"], strict=True))
    assert sorted(pairs) == [(layer, head) for layer in range(target[0]) for head in range(zoo.HEADS)]
    assert table["score"].is_monotonic_decreasing
    assert table["rank"].tolist() == list(range(1, 1 + len(pairs)))
    assert (table["chance"] == zoo.WIDTH**-0.5).all()
    assert table["score"].between(0, 1).all()


def test_ties_stand_in_the_order_of_layers_and_heads():
    def same_outputs(model):
        """Value and output weights of layers 0 and 1 are alike, and within them those of all heads."""
        first = model.model.layers[0]
        for layer in model.model.layers[:2]:
            layer.input_layernorm.weight.fill_(1.0)
            for name in ("v_proj", "o_proj"):
                getattr(layer.self_attn, name).weight.copy_(getattr(first.self_attn, name).weight)
            values, outputs = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
            k = len(values) // model.config.num_key_value_heads
            values.copy_(values[:k].repeat(len(values) // k, 1))
            outputs.copy_(outputs[:, :k].repeat(1, outputs.shape[1] // k))

    model = edited("smollm3", same_outputs)
    table = tls.k_composition(model, (2, 1))
    assert table["score"].nunique() == 1
    assert list(zip(table["layer"], table["head"], strict=True)) == [(i, j) for i in range(2) for j in range(4)]
    assert table["rank"].tolist() == list(range(1, 9))


def test_layer_0_composes_with_nothing():
    table = tls.k_composition(bridge("llama"), (0, 1))
    assert list(table) == ["layer", "head", "score", "chance", "rank"]
    assert len(table) == 0


@pytest.mark.parametrize("target", [(2, 0), (-1, 0), (1, 4), (1, -1), (0, 4)])
@pytest.mark.parametrize("kind", ["k", "v"])
def test_heads_that_do_not_exist_are_refused(target, kind):
    with pytest.raises(BadHead, match="the model has layers 0 to 1"):
        tls.k_composition(bridge("llama"), target, kind=kind)


def test_an_unknown_kind_is_refused():
    # Outside tests the annotation is not enforced; under jaxtyping's hook the type check comes first.
    with pytest.raises((ValueError, TypeError), match="kind"):
        tls.k_composition(bridge("llama"), (1, 0), kind="o")


@pytest.mark.parametrize(("name", "dimension"), [("llama", zoo.WIDTH), ("gpt2", zoo.WIDTH - 1)])
def test_random_frames_score_at_chance(name, dimension):
    """The square of a score has mean 1/n for frames that are uniform in the n dimensions: n = d - 1 under LayerNorm."""
    squares = []
    for seed in range(6):
        model = zoo.bridge(name, seed)
        for head in range(zoo.HEADS):
            squares += (tls.k_composition(model, (1, head))["score"] ** 2).tolist()
    # Measured over 18 seeds: 1.01 +- 0.02 (llama), 0.99 +- 0.02 (gpt2), groups of 6 seeds 0.979 to 1.025; a norm of the
    # wrong operator, or a chance of 1/d_head, is off by far more.
    assert np.mean(squares) * dimension == pytest.approx(1, abs=0.1)


def test_a_planted_pair_scores_far_above_chance():
    """A head that writes into the directions its successor's keys read."""

    def plant(model):
        first, second = model.model.layers
        second.input_layernorm.weight.fill_(1.0)
        k = second.self_attn.k_proj.weight.shape[0] // 2
        # Head 2 of layer 0 writes what key head 1 (read by heads 2 and 3) reads.
        first.self_attn.o_proj.weight[:, 2 * k : 3 * k] = second.self_attn.k_proj.weight[k:].T

    model = edited("llama", plant)
    for head in (2, 3):
        table = tls.k_composition(model, (1, head))
        assert (table.loc[0, "layer"], table.loc[0, "head"]) == (0, 2)
        # k = 12 shared directions of unlike sizes: 1/sqrt(12) and more, against a chance of 0.144.
        assert table.loc[0, "score"] > 1 / np.sqrt(12)
        assert table.loc[1, "score"] < 0.25
    assert (tls.k_composition(model, (1, 0))["score"] < 0.25).all()


def test_a_head_that_writes_nothing_has_no_score_and_comes_last():
    def silence(model):
        model.model.layers[0].self_attn.o_proj.weight[:, 12:24] = 0  # head 1

    model = edited("llama", silence)
    table = tls.k_composition(model, (1, 0))
    assert table["head"].tolist()[-1] == 1
    assert table["score"].isna().tolist() == [False, False, False, True]


def test_a_target_that_reads_nothing_has_no_scores():
    def silence(model):
        model.model.layers[1].self_attn.q_proj.weight[:12] = 0  # head 0

    model = edited("llama", silence)
    assert tls.k_composition(model, (1, 0))["score"].isna().all()
    assert tls.k_composition(model, (1, 1))["score"].notna().all()


# --- copying ---


@pytest.mark.parametrize("name", NAMES)
def test_copying_is_that_of_the_dense_circuit(name):
    table, dense = tls.copying_scores(bridge(name)), reference(name)
    assert list(table) == ["layer", "head", "copying", "positivity"]
    assert table[["layer", "head"]].to_numpy().tolist() == [
        [layer, head] for layer, at in enumerate(dense.layers) for head in range(len(at.qk))
    ]
    copying, positivity = zip(*[dense_copying(layer, dense) for layer in dense.layers], strict=True)
    np.testing.assert_array_equal(table["copying"], np.concatenate(copying))
    # Measured: 1e-14, rounding of eigenvalues; a gain or centring left out moves it by 1e-3 and more.
    np.testing.assert_allclose(table["positivity"], np.concatenate(positivity), rtol=0, atol=1e-10)


def test_the_gain_of_a_norm_that_stores_it_less_1():
    """Gemma multiplies by 1 + w in the input norm and in the final norm: both enter."""
    dense = reference("gemma3")
    scores = tls.copying_scores(bridge("gemma3"))["positivity"]
    model = zoo.hf_model("gemma3")
    for norm in [model.model.norm, *(layer.input_layernorm for layer in model.model.layers)]:
        before = norm.weight.detach().clone()
        with torch.no_grad():
            norm.weight -= 1  # the reference now reads the plain weight
        wrong = dense_model("gemma3", model)
        with torch.no_grad():
            norm.weight.copy_(before)
        missed = np.concatenate([dense_copying(layer, wrong)[1] for layer in wrong.layers])
        assert np.abs(missed - scores).max() > 1e-2
    right = np.concatenate([dense_copying(layer, dense)[1] for layer in dense.layers])
    np.testing.assert_allclose(scores, right, rtol=0, atol=1e-10)  # as above


@pytest.mark.parametrize("sign", [1, -1])
def test_a_head_that_copies_or_negates(sign):
    """With W_U = W_E^T an OV operator that is the identity on its subspace has only positive eigenvalues."""

    def plant(model):
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        model.model.norm.weight.fill_(1.0)
        layer = model.model.layers[0]
        layer.input_layernorm.weight.fill_(1.0)
        layer.self_attn.o_proj.weight[:, 12:24] = sign * layer.self_attn.v_proj.weight[:12].T  # head 1, value head 0

    model = edited("llama", plant)
    table = tls.copying_scores(model)
    assert table.loc[1, "copying"] == float(sign > 0)
    # Measured: 1e-16; the circuit is symmetric there, so its eigenvalues are real.
    assert table.loc[1, "positivity"] == pytest.approx(sign, abs=1e-12)
    assert table.loc[[0, 2, 3], "positivity"].abs().max() < 0.9


def test_a_head_that_writes_nothing_has_no_copying():
    def silence(model):
        model.model.layers[1].self_attn.o_proj.weight[:, :12] = 0  # head 0

    model = edited("llama", silence)
    silent = tls.copying_scores(model)
    assert silent.loc[4, ["copying", "positivity"]].isna().all()
    expected = tls.copying_scores(bridge("llama")).drop(index=4)
    pd.testing.assert_frame_equal(silent.drop(index=4), expected, check_exact=True)


@pytest.mark.skipif(not zoo.HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize("name", ["gpt2", "neox", "llama", "qwen3"])
def test_a_centred_unembedding_enters_as_the_model_holds_it(name):
    """TransformerLens's default processing subtracts W_U's mean over the vocabulary, and that alone shows here."""
    found, dense = tls.copying_scores(zoo.hooked(name)), reference(name)
    centred = DenseModel(dense.layers, dense.w_e, dense.w_u - dense.w_u.mean(1, keepdims=True))
    copying, positivity = (
        np.concatenate(part) for part in zip(*[dense_copying(x, centred) for x in dense.layers], strict=True)
    )
    # Measured: 3e-7, weights folded in float32; centring moves positivity by up to 0.1.
    np.testing.assert_allclose(found["positivity"], positivity, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found["copying"], copying)
    raw = tls.copying_scores(bridge(name))
    assert (found["positivity"] - raw["positivity"]).abs().max() > 1e-3


def test_weights_of_16_bits_are_folded_in_float64():
    """The gain 1 + w too: Gemma itself adds the 1 in float32, and in bfloat16 it would round by 4e-3."""
    model = edited("gemma3", lambda model: model.bfloat16())
    dense = dense_model("gemma3", zoo.hf_model("gemma3").bfloat16())
    positivity = np.concatenate([dense_copying(layer, dense)[1] for layer in dense.layers])
    # As in float32: rounding of eigenvalues, 1e-14. A gain rounded to bfloat16 moves them by 1e-4 and more.
    np.testing.assert_allclose(tls.copying_scores(model)["positivity"], positivity, rtol=0, atol=1e-10)


def toy(**changes):
    """A HookedTransformer made from a config, as in toy-model papers."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    shape = {"n_layers": 1, "d_model": 16, "n_ctx": 12, "n_heads": 2, "d_head": 8, "d_vocab": 11, "act_fn": "relu"}
    cfg = HookedTransformerConfig(**{**shape, "normalization_type": "LN", "seed": 0, **changes})
    model = HookedTransformer(cfg, move_to_device=False)
    with torch.no_grad():
        model.ln_final.w += 0.3 * torch.arange(16) / 16
    return model


@pytest.mark.skipif(not zoo.HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
def test_a_model_that_answers_in_another_vocabulary_has_no_copying():
    """As in modular arithmetic: the output tokens are not the input tokens, so there is nothing to copy."""
    table = tls.copying_scores(toy(d_vocab_out=7))
    assert len(table) == 2
    assert table[["copying", "positivity"]].isna().all(axis=None)
    assert tls.copying_scores(toy(d_vocab_out=11))["positivity"].notna().all()


@pytest.mark.skipif(not zoo.HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize("final_rms", [False, True])
def test_the_final_norm_may_be_of_another_kind_than_the_others(final_rms):
    model = toy(final_rms=final_rms)
    w_e, w_u, w_v, w_o = (_array(part) for part in (model.W_E, model.W_U, model.W_V[0], model.W_O[0]))
    centring = np.eye(16) - 1 / 16
    unfold = (np.eye(16) if final_rms else centring) @ np.diag(_array(model.ln_final.w))
    dense = DenseModel([DenseLayer(w_v, w_v, centring @ w_v, w_o, centring)], w_e, unfold @ w_u)
    expected = dense_copying(dense.layers[0], dense)[1]
    # Measured: 1e-15; a centring too many moves positivity by 1e-2.
    np.testing.assert_allclose(tls.copying_scores(model)["positivity"], expected, rtol=0, atol=1e-10)


# --- self-match ---


def self_match(model):
    view = attention_view(model)
    moments = EmbeddingMoments(view)
    return [moments.self_match(*view.layer(index).operator_factors()) for index in range(view.n_layers)]


@pytest.mark.parametrize("name", NAMES)
def test_self_match_is_that_of_the_whole_vocabulary(name):
    dense = reference(name)
    for found, layer in zip(self_match(bridge(name)), dense.layers, strict=True):
        # Measured: 1e-15 on scores of 0.1 to 1; the mean off the diagonal, left out, moves them by 1e-3.
        np.testing.assert_allclose(found, dense_self_match(layer, dense), rtol=0, atol=1e-11)


def test_a_head_that_matches_each_token_with_itself():
    """W_Q = W_K makes the diagonal a sum of squares."""

    def plant(model):
        attention = model.model.layers[0].self_attn
        attention.q_proj.weight[:12] = attention.k_proj.weight[:12]
        attention.q_proj.weight[12:24] = -attention.k_proj.weight[:12]

    dense = dense_model("llama", edited_hf("llama", plant))
    found = self_match(edited("llama", plant))[0]
    assert found[0] > 1
    assert found[1] == -found[0]
    np.testing.assert_allclose(found, dense_self_match(dense.layers[0], dense), rtol=0, atol=1e-11)


def test_a_zero_head_has_no_self_match():
    def silence(model):
        model.model.layers[0].self_attn.q_proj.weight[:12] = 0

    model = edited("llama", silence)
    assert np.isnan(self_match(model)[0]).tolist() == [True, False, False, False]


# --- the vocabulary in pieces ---


@pytest.mark.parametrize("size", [1, 10, 96])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_size_of_vocabulary_pieces_does_not_matter(monkeypatch, name, size):
    model = bridge(name)
    copying, matching = tls.copying_scores(model), self_match(model)
    seen = []

    def pieces(weight, *, axis):
        for piece in whole(weight, axis=axis, size=size):
            seen.append(piece.shape[axis])
            yield piece

    whole = composition.vocabulary_chunks
    monkeypatch.setattr(composition, "vocabulary_chunks", pieces)
    # Measured: 1e-14, the order of sums in float64; a lost piece moves both by 1e-3 and more.
    pd.testing.assert_frame_equal(tls.copying_scores(model), copying, rtol=0, atol=1e-11)
    np.testing.assert_allclose(self_match(model), matching, rtol=0, atol=1e-11)
    assert max(seen) == size
    assert sum(seen) == 3 * zoo.VOCABULARY  # W_U and W_E for copying, W_E for self-match


def test_a_vocabulary_of_several_pieces_by_default():
    weight = torch.arange(2 * 10_000, dtype=torch.float32).reshape(2, 10_000)
    pieces = list(composition.vocabulary_chunks(weight, axis=1))
    assert [piece.shape[1] for piece in pieces] == [4096, 4096, 1808]
    assert {piece.dtype for piece in pieces} == {torch.float64}
    assert torch.equal(torch.cat(pieces, dim=1), weight.double())


def test_nothing_of_the_model_changes():
    model = zoo.bridge("gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tls.copying_scores(model)
    tls.k_composition(model, (1, 0))
    qk_operators(model)[1, 0].dense().zero_()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
