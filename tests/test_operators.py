"""Operators of heads: thin factors against dense matrices, on both backends, read only when asked for."""

import numpy as np
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import shared

from tlspectral.errors import BadHead, UnsupportedArchitecture
from tlspectral.models.attention import attention_view, view
from tlspectral.operators import QKOperator, QKOperators, ov_operators, qk_operators
from tlspectral.rotary import RotaryGeometry, pair_columns

some_models = pytest.mark.parametrize("name", ["gpt2", "neox", "llama", "qwen3", "gptj", "bloom"])
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
    """Two multisets of complex numbers: each is matched with the nearest one left."""
    left = list(expected)
    assert len(found) == len(left)
    for value in found:
        nearest = min(range(len(left)), key=lambda i: abs(left[i] - value))
        assert abs(left.pop(nearest) - value) <= limit


# --- one head ---


@invariant
@given(seeds, shapes)
def test_parts_add_up_and_are_what_their_names_say(seed, shape):
    operator = random_operator(seed, *shape)
    m, s, a = operator.dense(), operator.symmetric().dense(), operator.antisymmetric().dense()
    # Rounding of float64 at entries of about 10; a lost half or sign is of order 1.
    torch.testing.assert_close(s + a, m, rtol=0, atol=1e-13)
    torch.testing.assert_close(s, s.T, rtol=0, atol=1e-13)
    torch.testing.assert_close(a, -a.T, rtol=0, atol=1e-13)
    for part, dense in ((operator.symmetric(), s), (operator.antisymmetric(), a)):
        assert part.norm() == pytest.approx(float(torch.linalg.norm(dense)), rel=1e-12)
    squares = operator.symmetric().norm() ** 2 + operator.antisymmetric().norm() ** 2
    assert squares == pytest.approx(float(m.square().sum()), rel=1e-12)


def assert_spectrum_is_numpys(operator):
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
    symmetric = np.linalg.eigvalsh((m + m.T) / 2)
    found = np.sort(np.append(spectrum.symmetric_eigenvalues, np.zeros(len(m) - len(spectrum.symmetric_eigenvalues))))
    np.testing.assert_allclose(found, symmetric, rtol=0, atol=1e-13 * scale)


@invariant
@given(seeds, shapes)
def test_spectrum_against_dense(seed, shape):
    assert_spectrum_is_numpys(random_operator(seed, *shape))


@some_models
def test_spectrum_of_a_models_head_against_dense(name):
    for operator in operators(name):
        assert_spectrum_is_numpys(operator)


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


def test_schur_angles_of_a_rotation_and_a_reflection():
    # M = w_q w_k^T on three coordinates: a turn by 0.5 rad in one plane, -2 on the third axis.
    turn = torch.tensor([[np.cos(0.5), -np.sin(0.5), 0.0], [np.sin(0.5), np.cos(0.5), 0.0], [0.0, 0.0, -2.0]])
    w_q = torch.cat([turn.double(), torch.zeros(4, 3, dtype=torch.float64)])
    w_k = torch.eye(7, 3, dtype=torch.float64)
    operator = QKOperator(0, 0, w_q, w_k, None)
    # `turn` is rounded to float32 on the way: 1e-8.
    np.testing.assert_allclose(np.sort(operator.schur_angles()), [0.5, np.pi], rtol=0, atol=1e-6)
    assert operator.spectrum().eigenvector_condition == pytest.approx(1.0, abs=1e-6)  # normal


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


@invariant
@given(seeds, st.booleans())
def test_swapping_query_and_key_transposes_the_real_part_and_turns_the_imaginary_one(seed, adjacent):
    operator = random_operator(seed, 12, 8, adjacent=adjacent)
    swapped = QKOperator(0, 0, operator.w_k, operator.w_q, operator.rotary)
    for t in range(operator.rotary.n_pairs):
        there, back = operator.phase(t), swapped.phase(t)
        torch.testing.assert_close(back.re.dense(), there.re.dense().T, rtol=0, atol=1e-14)
        torch.testing.assert_close(back.im.dense(), -there.im.dense().T, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["neox", "llama", "qwen3", "gptj", "phi", "gemma3", "stablelm_norms"])
def test_phases_of_a_models_head_add_up_to_its_operator(name):
    operator = operators(name)[1, 0]
    still = still_columns(operator.rotary)
    assert len(still) == {"neox": 12, "gptj": 4, "phi": 6, "stablelm_norms": 12}.get(name, 0)
    total = operator.w_q[:, still] @ operator.w_k[:, still].T
    for t in range(operator.rotary.n_pairs):
        total = total + operator.phase(t).re.dense()
    torch.testing.assert_close(total, operator.dense(), rtol=0, atol=1e-13 * float(operator.dense().abs().max()))


@pytest.mark.parametrize("t", [-1, 2, 99])
def test_a_pair_that_does_not_exist(t):
    with pytest.raises(IndexError, match=rf"L1H0: pair {t} does not exist; pairs are 0 to 1"):
        operators("neox")[1, 0].phase(t)


@pytest.mark.parametrize(("name", "layer"), [("gpt2", 0), ("bloom", 1), ("smollm3", 1)])
def test_no_rotary_positions_no_phase(name, layer):
    ops = operators(name)
    assert ops.rotary(layer) is None
    with pytest.raises(UnsupportedArchitecture, match=f"L{layer}H2: the layer has no rotary positions, so no phase"):
        ops[layer, 2].phase(0)


def test_rotary_of_a_layer():
    ops = operators("smollm3")
    assert ops.rotary(0).n_pairs == 6
    assert torch.equal(ops.rotary(0).theta, ops[0, 0].rotary.theta)
    with pytest.raises(BadHead):
        ops.rotary(4)


# --- backends ---


@zoo.needs_hooked
@pytest.mark.parametrize("name", zoo.HOOKED_ARCHITECTURES)
def test_both_backends_give_the_same_operators(name):
    ours, theirs = operators(name, "hooked"), operators(name)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        m = other.dense()
        # float32 folding of HookedTransformer: measured 1.0e-7 of max |M|. A wrong kv head or norm is off by tenths.
        torch.testing.assert_close(one.dense(), m, rtol=0, atol=3e-7 * float(m.abs().max()))
        assert (one.layer, one.head) == (other.layer, other.head)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_query_key_norm_gains_are_in_the_operator(name):
    model = shared("bridge", name)
    layer = attention_view(model).layer(0)
    for head, operator in enumerate(operators(name)[i] for i in range(4)):
        for found, factor, norm in (
            (operator.w_q, layer.w_q[head], layer.q_norm),
            (operator.w_k, layer.w_k[layer.kv_head(head)], layer.k_norm),
        ):
            assert float((norm.gain - 1).abs().max()) > 0.1  # a gain of 1 would prove nothing
            torch.testing.assert_close(found, factor * norm.gain, rtol=1e-15, atol=0)


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


def test_positions_slices_and_ends():
    ops = operators("llama")
    everything = positions(ops)
    assert positions([ops[-1], ops[-8]]) == [(1, 3), (0, 0)]
    for cut in (slice(None), slice(2, 6), slice(None, None, 3), slice(-3, None), slice(None, None, -1), slice(5, 2)):
        assert positions(ops[cut]) == everything[cut]
    assert torch.equal(ops[5].w_q, ops[1, 1].w_q)
    assert torch.equal(ops[np.int64(1), np.int64(1)].w_k, ops[1, 1].w_k)
    assert positions(reversed(ops)) == everything[::-1]


@pytest.mark.parametrize("at", [8, -9, 100])
def test_position_out_of_range(at):
    with pytest.raises(IndexError):
        operators("llama")[at]


@pytest.mark.parametrize("at", [(2, 0), (-3, 0), (0, 4), (0, -1), (9, 9)])
def test_head_that_does_not_exist(at):
    with pytest.raises(BadHead, match=rf"L{at[0]}H{at[1]} does not exist: the model has layers 0 to 1"):
        operators("llama")[at]


def test_head_out_of_range_is_told_the_heads_of_its_layer():
    with pytest.raises(BadHead, match="layer 1 has heads 0 to 3"):
        operators("llama")[1, 4]


def test_layers_are_folded_when_asked_for_and_one_is_kept(monkeypatch):
    reads = []
    real = view.fold_attention
    monkeypatch.setattr(view, "fold_attention", lambda raw, index: reads.append(index) or real(raw, index))
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


def test_the_public_function_gives_the_same():
    ops = qk_operators(shared("bridge", "llama"))
    assert isinstance(ops, QKOperators)
    assert torch.equal(ops[1, 2].w_q, operators("llama")[1, 2].w_q)


# --- output-value ---


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_ov_operators_against_the_published_weights(name):
    hf = zoo.hf_model(name)
    for layer in range(2):
        found = ov_operators(shared("bridge", name), layer)
        assert [(op.layer, op.head) for op in found] == [(layer, head) for head in range(zoo.HEADS)]
        if name == "gpt2":
            block = hf.transformer.h[layer]
            gain, d_head = block.ln_1.weight.double(), zoo.WIDTH // zoo.HEADS
            value, output = block.attn.c_attn.weight.double()[:, 2 * zoo.WIDTH :], block.attn.c_proj.weight.double()
        else:
            block = hf.model.layers[layer]
            gain, d_head = block.input_layernorm.weight.double(), block.self_attn.head_dim
            gain = gain + (name == "gemma2")
            value, output = (getattr(block.self_attn, f"{side}_proj").weight.double().T for side in "vo")
        centring = torch.eye(zoo.WIDTH, dtype=torch.float64) - 1 / zoo.WIDTH
        for head, operator in enumerate(found):
            kv_head = head if name == "gpt2" else head // 2
            w_v = gain[:, None] * value[:, kv_head * d_head : (kv_head + 1) * d_head]
            dense = (w_v @ output[head * d_head : (head + 1) * d_head]).detach()
            if name == "gpt2":
                dense = centring @ dense @ centring
            # Rounding of float64, except Gemma's 1 + w in float32. The wrong kv head or side is off by its own size.
            limit = 3e-7 if name == "gemma2" else 1e-14
            torch.testing.assert_close(operator.dense(), dense, rtol=0, atol=limit * float(dense.abs().max()))
            torch.testing.assert_close(operator.product().dense(), operator.dense(), rtol=0, atol=1e-14)


@zoo.needs_hooked
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_ov_operators_of_both_backends(name):
    for ours, theirs in zip(*(ov_operators(shared(b, name), 1) for b in ("hooked", "bridge")), strict=True):
        expected = theirs.dense()
        # Folding in float32 as above; HookedTransformer's own centring of what is written is a no-op on ours.
        torch.testing.assert_close(ours.dense(), expected, rtol=0, atol=3e-7 * float(expected.abs().max()))


def test_ov_operators_repeat_grouped_values_and_keep_outputs_apart():
    found = ov_operators(shared("bridge", "llama"), 0)
    assert torch.equal(found[0].w_v, found[1].w_v)
    assert torch.equal(found[2].w_v, found[3].w_v)
    assert not torch.equal(found[1].w_v, found[2].w_v)
    assert not torch.equal(found[0].w_o, found[1].w_o)


@pytest.mark.parametrize("layer", [-1, 2])
def test_ov_operators_of_a_layer_that_does_not_exist(layer):
    with pytest.raises(BadHead, match=f"layer {layer} does not exist"):
        ov_operators(shared("bridge", "llama"), layer)
