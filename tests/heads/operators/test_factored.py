"""Operators of heads: thin factors against dense matrices, on both backends, read only when asked for."""

import numpy as np
import pytest
import scipy.optimize
import torch
import zoo
from attention_models import fresh, poke
from conformance.reading import operator
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_circuits import NAMES, reference
from zoo import shared

from tlspectral.algebra.rotary import RotaryGeometry, pair_columns
from tlspectral.errors import BadHead, UnsupportedArchitecture
from tlspectral.heads.operators.factored import QKOperator, QKOperators, ov_operators, qk_operators
from tlspectral.models.reading import attention_view, view
from tlspectral.models.reading import bridge as bridge_reader

invariant = settings(max_examples=30, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
# (d_model, d_head): narrow, joint space fills the stream, head wider than the stream.
shapes = st.sampled_from([(20, 4), (12, 8), (6, 8)])


def operators(name, backend="bridge"):
    """`qk_operators` without beartype's check of the result, which reads a random head."""
    return QKOperators(attention_view(shared(backend, name)))


def random_operator(seed, d_model, d_head, adjacent=False):
    rng = np.random.default_rng(seed)
    w_q, w_k = (torch.from_numpy(rng.standard_normal((d_model, d_head))) for _ in range(2))
    real, imag = pair_columns(d_head // 2 // 2 * 2, adjacent=adjacent)  # half of the head turns
    theta = torch.from_numpy(rng.uniform(0, 1, len(real)))
    return QKOperator(0, 0, w_q, w_k, RotaryGeometry(theta, real, imag, d_head))


def assert_same_points(found, expected, limit):
    """Two multisets of complex numbers, matched so that the distances have the least sum."""
    assert len(found) == len(expected)
    distances = np.abs(np.subtract.outer(found, expected))
    assert distances[scipy.optimize.linear_sum_assignment(distances)].max() <= limit


# --- one head ---


@invariant
@given(seeds, shapes)
def test_spectrum_against_dense(seed, shape):
    operator = random_operator(seed, *shape)
    m = operator.dense().numpy()
    spectrum, k = operator.spectrum(), min(operator.w_q.shape)
    scale = np.linalg.norm(m)
    values = np.linalg.svd(m, compute_uv=False)
    # Noise of a few eps of ||M||: 1e-15. Eigenvalues move by that times their condition, of up to 1e2 here, and M's
    # other eigenvalues, which are 0, by its root if the null space is defective: hence dense zeros up to 1e-6.
    np.testing.assert_allclose(spectrum.singular_values, values[:k], rtol=0, atol=1e-13 * scale)
    assert values[k:].max(initial=0) < 1e-13 * scale
    dense = np.linalg.eigvals(m)
    dense = dense[np.argsort(-np.abs(dense))]
    assert_same_points(spectrum.eigenvalues.numpy(), dense[:k], 1e-10 * scale)
    assert np.abs(dense[k:]).max(initial=0) < 1e-6 * scale
    assert (np.diff(np.abs(spectrum.eigenvalues.numpy())) <= 1e-12 * scale).all()
    assert_same_points(np.linalg.eigvals(operator.core().numpy()), dense[:k], 1e-10 * scale)
    np.testing.assert_allclose(operator.symmetric().dense(), (m + m.T) / 2, rtol=0, atol=1e-13)
    np.testing.assert_allclose(operator.antisymmetric().dense(), (m - m.T) / 2, rtol=0, atol=1e-13)
    symmetric = np.linalg.eigvalsh((m + m.T) / 2)
    found = np.sort(np.append(spectrum.symmetric_eigenvalues, np.zeros(len(m) - len(spectrum.symmetric_eigenvalues))))
    np.testing.assert_allclose(found, symmetric, rtol=0, atol=1e-13 * scale)


@invariant
@given(seeds, shapes)
def test_schur_angles_are_the_arguments_of_the_eigenvalues(seed, shape):
    operator = random_operator(seed, *shape)
    eigenvalues = operator.spectrum().eigenvalues.numpy()
    size = np.abs(eigenvalues).max()
    imaginary = np.where(np.abs(eigenvalues.imag) < 1e-13 * size, 0.0, eigenvalues.imag)
    expected = np.angle(eigenvalues.real + 1j * imaginary)[imaginary >= 0]  # one of each conjugate pair
    # Noise 1e-14 times the condition of the eigenvalue over its size; angles of another matrix differ by tenths.
    np.testing.assert_allclose(np.sort(operator.schur_angles()), np.sort(expected), rtol=0, atol=1e-8)


# --- phase ---


def still_columns(rotary):
    turning = {*rotary.real_index.tolist(), *rotary.imag_index.tolist()}
    return [column for column in range(rotary.d_head) if column not in turning]


@invariant
@given(seeds, st.sampled_from([(20, 4), (12, 8)]), st.booleans())
def test_phase_parts_against_dense_complex(seed, shape, adjacent):
    operator = random_operator(seed, *shape, adjacent=adjacent)
    rotary = operator.rotary
    still = still_columns(rotary)
    total = operator.w_q[:, still] @ operator.w_k[:, still].T
    for t in range(rotary.n_pairs):
        re, im = rotary.real_index[t], rotary.imag_index[t]
        w_q, w_k = (torch.complex(w[:, re], w[:, im]) for w in (operator.w_q, operator.w_k))
        dense = torch.outer(w_q, w_k.conj())
        phase = operator.phase(t)
        # Rounding of two products each; a wrong sign or a forgotten conjugate is of order 1.
        torch.testing.assert_close(phase.re.dense(), dense.real, rtol=0, atol=1e-14)
        torch.testing.assert_close(phase.im.dense(), dense.imag, rtol=0, atol=1e-14)
        assert phase.re.left.shape == phase.im.right.shape == (shape[0], 2)
        total = total + phase.re.dense()
    torch.testing.assert_close(total, operator.dense(), rtol=0, atol=1e-13)


def test_rotary_of_a_layer():
    ops = operators("smollm3")
    assert ops.rotary(0).n_pairs == 6
    assert torch.equal(ops.rotary(0).theta, ops[0, 0].rotary.theta)
    assert ops.rotary(1) is None


NO_PHASE = r"phase\(t\) needs rotary positions, and this layer has none"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: operators("neox")[1, 0].phase(-1), IndexError, "L1H0: pair -1 does not exist; pairs are 0 to 1"),
        (lambda: operators("neox")[1, 0].phase(2), IndexError, "L1H0: pair 2 does not exist; pairs are 0 to 1"),
        (lambda: operators("gpt2")[0, 2].phase(0), UnsupportedArchitecture, f"L0H2: {NO_PHASE}"),
        (lambda: operators("smollm3")[1, 2].phase(0), UnsupportedArchitecture, f"L1H2: {NO_PHASE}"),
        (lambda: operators("smollm3").rotary(4), BadHead, "layer 4 does not exist"),
        (lambda: operators("llama")[8], IndexError, "out of range"),
        (lambda: operators("llama")[-9], IndexError, "out of range"),
        (lambda: operators("llama")[2, 0], BadHead, "L2H0 does not exist: the model has layers 0 to 1$"),
        (lambda: operators("llama")[-3, 0], BadHead, "L-3H0 does not exist"),
        (lambda: operators("llama")[0, -5], BadHead, "L0H-5 does not exist"),
        (lambda: operators("llama")[1, 4], BadHead, "L1H4 does not exist: layer 1 has heads 0 to 3"),
        (lambda: operators("llama")[1.5], BadHead, "1.5 names no head"),
        (lambda: ov_operators(shared("bridge", "llama"), 2), BadHead, "layer 2 does not exist"),
        (lambda: ov_operators(shared("bridge", "llama"), -1), BadHead, "layer -1 does not exist"),
    ],
)
def test_heads_pairs_and_layers_that_are_not_there(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_layer_norms_of_queries_and_keys_are_in_the_operator():
    """A LayerNorm of a head takes the mean out of its columns, so that one singular value of M is 0."""
    model, view = zoo.hf_model("stablelm_norms"), attention_view(shared("bridge", "stablelm_norms"))
    layer, attention = view.layer(1), model.model.layers[1].self_attn
    for head in range(4):
        found = operators("stablelm_norms")[1, head]
        centring = torch.eye(16, dtype=torch.float64) - 1 / 16
        for factor, raw, norms, index in (
            (found.w_q, layer.w_q, attention.q_layernorm.norms, head),
            (found.w_k, layer.w_k, attention.k_layernorm.norms, head // 2),
        ):
            gain = norms[index].weight.detach().double()
            # Rounding of float64. The gain of another head or no mean taken out moves columns by tenths.
            torch.testing.assert_close(factor, raw[index] @ centring * gain, rtol=1e-12, atol=1e-12)
        assert torch.linalg.matrix_rank(found.dense()) == 15


# --- the sequence ---


def positions(found):
    return [(op.layer, op.head) for op in found]


def test_a_sequence_of_all_heads():
    ops = operators("llama")
    everything = positions(ops)
    for cut in (slice(None), slice(2, 6), slice(None, None, -1), slice(5, 2)):
        assert positions(ops[cut]) == everything[cut]
    assert positions([ops[-1], ops[-8], ops["L1H2"], ops[np.int64(1), np.int64(1)]]) == [(1, 3), (0, 0), (1, 2), (1, 1)]
    assert positions(reversed(ops)) == everything[::-1]
    public = qk_operators(shared("bridge", "llama"))
    assert isinstance(public, QKOperators)
    assert torch.equal(public[1, 2].w_q, ops[6].w_q)


def test_layers_are_folded_when_asked_for_and_one_is_kept(spied):
    reads = spied(view, "fold_attention", at=1)
    ops = operators("gemma3")
    assert len(ops) == 16
    assert reads == []
    ops[2, 0], ops[2, 3], ops[8]
    assert reads == [2]
    ops[0, 0], ops[2, 0]
    assert reads == [2, 0, 2]
    reads.clear()
    list(ops)
    assert reads == [0, 1, 2, 3]


@pytest.mark.parametrize(("key", "read"), [("L0H3", {0}), (0, {0}), ((2, 1), {0, 2}), (5, {0, 1}), (-1, {0, 1, 2, 3})])
def test_one_operator_is_read_without_the_layers_behind_it(spied, key, read):
    reads = spied(bridge_reader, "read_attention", at=1)
    # Not by `qk_operators`, of which the check of types reads some item.
    QKOperators(attention_view(shared("bridge", "smollm3")))[key]
    assert {*reads} == read


def test_operators_and_views_are_one_line():
    model = zoo.shared("bridge", "llama")
    view, operators = attention_view(model), qk_operators(model)
    factors = "w_q=[48, 12], w_k=[48, 12]"
    assert repr(operators[1, 2]) == f"QKOperator(layer=1, head=2, {factors}, rotary=RotaryGeometry)"
    for record in (view, operators):
        assert "bridge: 2 layers, d_model 48" in repr(record)
    for record in (view, operators, operators[1, 2].spectrum(), view.layer(1), view.raw(1), view.output(1)):
        text = repr(record)
        assert "\n" not in text
        assert "tensor(" not in text
        assert len(text) < 300


# --- the published weights; that every form of a model has their operator, conformance/reading.py asks ---


@pytest.mark.parametrize("name", [*NAMES, "gemma2", "olmo2"])
def test_operators_of_the_paper_from_the_published_weights(name):
    # Rounding of float64 alone, except Gemma's 1 + w, which is summed in float32 as the model does. The next kv head,
    # the other side, gain w instead of 1 + w, or no centring are off by 1e-2 and more.
    limit = 3e-7 if name.startswith("gemma") else 1e-14
    layers = attention_view(shared("bridge", name))
    for index, dense in enumerate(reference(name).layers):
        found, outputs = operator(layers.layer(index)), ov_operators(shared("bridge", name), index)
        for m, output, *expected in zip(found, outputs, dense.qk, dense.ov, strict=True):
            for one, other in zip((m, output.dense()), expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=limit * np.abs(other).max())


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_16_bit_gain_is_not_rounded_again(name):
    # Gemma's own module adds the 1 in float32; in bfloat16 the sum would be rounded by 4e-3.
    layer = attention_view(fresh("bridge", name).to(torch.bfloat16)).layer(0)
    assert (layer.storage_dtype, layer.w_q.dtype) == (torch.bfloat16, torch.float64)
    stored = zoo.hf_model(name).model.layers[0].input_layernorm.weight.detach().bfloat16().double()
    expected = stored + (name == "gemma2")
    torch.testing.assert_close(layer.norm.gain.detach().double(), expected, rtol=1e-7, atol=0)


def test_digest_tells_weights_apart():
    model = fresh("bridge", "qwen2")
    digest = attention_view(model).layer_digest
    first = [digest(index) for index in range(2)]
    assert first == [attention_view(shared("bridge", "qwen2")).layer_digest(index) for index in range(2)]
    assert first[0] != first[1]
    poke(model.blocks[0].attn.original_component.k_proj.bias, 0.25)
    assert digest(0) != first[0]
    assert digest(1) == first[1]
