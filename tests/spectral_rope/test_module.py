"""The residual rotation by itself: the identity at the start, eq. 2 of the paper after it, rows and masks."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spectral_modules import SHAPE, module
from spectral_zoo import move

from tlspectral.algebra.rotary import RotaryGeometry, rotate

invariant = settings(max_examples=30, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
scopes = st.sampled_from(["model", "layer", "group", "head"])
# d_head, rotary_dim, heads, key/value heads: the whole head, a quarter of it, a column left over; grouped or not.
shapes = st.sampled_from([(8, 8, 4, 2), (16, 4, 3, 3), (7, 6, 4, 1), (8, 8, 6, 2)])
POSITIONS = 9
# Of 6 query heads on 2 key/value heads, the row of each: of omega; of phase and gain.
ROWS = {
    "model": ([0] * 6, [0] * 6),
    "layer": ([0] * 6, [0] * 6),
    "group": ([0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]),
    "head": ([0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 4, 5]),
}


def normal(seed, *shape, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def activations(seed, shape, dtype=torch.float64):
    d_head, _, heads, kv_heads = shape
    return (
        normal(seed, 2, POSITIONS, heads, d_head, dtype=dtype),
        normal(seed + 1, 2, POSITIONS, kv_heads, d_head, dtype=dtype),
    )


def by_theta(x, rotary, positions):
    """The model's own rotation, of [batch, pos, heads, d_head]."""
    angle = positions[:, None].double() * rotary.theta.double()
    geometry = RotaryGeometry(rotary.theta.double(), rotary.real_index, rotary.imag_index, x.shape[-1])
    return rotate(x.transpose(1, 2), angle.cos(), angle.sin(), geometry).transpose(1, 2)


def turned_scores(rotary, q, k, *, start=0):
    """Scores of the whole rotation, the model's own and the residual, at positions start, start + 1, ..."""
    positions = torch.arange(start, start + q.shape[1])
    q, k = (rotary(by_theta(x, rotary, positions), positions, side) for x, side in ((q, "query"), (k, "key")))
    keys = k.repeat_interleave(rotary.n_heads // k.shape[2], dim=2)
    return torch.einsum("bqhd,bkhd->bhqk", q, keys)


def equation_2(x, rotary, *, side):
    """A (x exp(i (m Omega + Phi))) in numpy, straight from the parameters by head; keys without A and Phi."""
    x, heads = x.numpy(), x.shape[2]
    group = rotary.n_heads // heads
    omega = np.repeat(rotary.omega.detach().numpy(), rotary.n_heads // len(rotary.omega), axis=0)[::group]
    phase = np.repeat(rotary.phase.detach().numpy(), rotary.n_heads // len(rotary.phase), axis=0)[::group]
    gain = np.repeat(rotary.gain.detach().numpy(), rotary.n_heads // len(rotary.gain), axis=0)[::group]
    z = x[..., rotary.real_index.numpy()] + 1j * x[..., rotary.imag_index.numpy()]
    angle = np.arange(x.shape[1])[:, None, None] * omega
    turned = gain * z * np.exp(1j * (angle + phase)) if side == "query" else z * np.exp(1j * angle)
    result = x.copy()
    result[..., rotary.real_index.numpy()], result[..., rotary.imag_index.numpy()] = turned.real, turned.imag
    return result


@invariant
@given(
    seeds,
    shapes,
    scopes,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_start_is_the_identity_to_the_bit(seed, shape, scope, adjacent, log_omega, shared_phase, dtype):
    rotary = module(
        shape, scope=scope, adjacent=adjacent, log_omega=log_omega, shared_phase=shared_phase, dtype=torch.float32
    )
    for x, side in zip(activations(seed, shape, dtype), ("query", "key"), strict=True):
        turned = rotary(x, torch.arange(POSITIONS) + 10**6, side)
        assert turned.dtype == dtype
        assert torch.equal(turned, x)


@pytest.mark.parametrize(
    ("dtype", "start", "noise"),
    [
        # Float32 angles of up to 20 rad: 1e-6. A theta converted from another value would be off by tenths.
        (torch.float32, 0, 2e-5),
        # Parameters of 16 bits, angles of 500 rad in float32: 1e-4. Angles of 16 bits are off by radians.
        (torch.bfloat16, 1000, 2e-2),
    ],
)
def test_moved_parameters_act_the_same_in_float64(dtype, start, noise):
    rotary = move(module(dtype=dtype))
    q, _ = activations(0, SHAPE, torch.float32)
    positions = torch.arange(POSITIONS) + start
    assert torch.equal(module(dtype=torch.float32).to(dtype)(q, positions, "query"), q)  # the start stays the identity
    wide, found = copy.deepcopy(rotary).to(torch.float64), rotary(q, positions, "query")
    torch.testing.assert_close(wide(q.double(), positions, "query").float(), found, rtol=0, atol=noise)
    torch.testing.assert_close(wide.omega_by_head(), rotary.omega_by_head(), rtol=0, atol=1e-6)  # rounding of float32
    # Activations of 16 bits are turned in float32.
    short = q.bfloat16()
    assert torch.equal(rotary(short, positions, "query"), rotary(short.float(), positions, "query").bfloat16())


def test_noise_is_seeded_and_as_large_as_asked():
    phases = [module((8, 8, 64, 64), phase_noise=1e-3, seed=seed).phase.detach() for seed in (0, 0, 1)]
    assert torch.equal(phases[0], phases[1])
    assert not torch.equal(phases[0], phases[2])
    # 256 draws: the standard error of the standard deviation is 4.4 %; 1e-3 as a variance would give 0.03.
    assert float(phases[0].std()) == pytest.approx(1e-3, rel=0.2)


@invariant
@given(seeds, shapes, scopes, st.booleans(), st.booleans())
def test_own_rotation_and_residual_are_equation_2(seed, shape, scope, adjacent, log_omega):
    rotary = move(module(shape, scope=scope, adjacent=adjacent, log_omega=log_omega), seed=seed)
    positions = torch.arange(POSITIONS)
    for x, side in zip(activations(seed, shape), ("query", "key"), strict=True):
        own = by_theta(x, rotary, positions)
        before = own.clone()
        found = rotary(own, positions, side).detach().numpy()
        assert torch.equal(own, before)
        # Noise 1e-14 at angles of some radians; a wrong sign, a phase on the key or gain twice are off by tenths.
        np.testing.assert_allclose(found, equation_2(x, rotary, side=side), rtol=0, atol=1e-12)
    group, keys = rotary.n_heads // rotary.n_kv_heads, torch.from_numpy(found)  # the last ones; grouped or repeated
    repeated = rotary(own.repeat_interleave(group, dim=2), positions, "key")
    assert torch.equal(repeated, keys.repeat_interleave(group, dim=2))


@invariant
@given(seeds, shapes, scopes, st.integers(1, 1000))
def test_translation_invariance_is_not_broken(seed, shape, scope, start):
    rotary = move(module(shape, scope=scope), seed=seed)
    q, k = activations(seed, shape)
    # Angles of up to 2000 rad are rounded to 1e-13 each. (The paper, section 5.1, says that the phase breaks it.)
    torch.testing.assert_close(turned_scores(rotary, q, k, start=start), turned_scores(rotary, q, k), rtol=0, atol=1e-9)


@invariant
@given(seeds, shapes, scopes)
def test_shared_phase_cancels(seed, shape, scope):
    rotary = move(module(shape, scope=scope, shared_phase=True), seed=seed)
    q, k = activations(seed, shape)
    with_phase = turned_scores(rotary, q, k)
    assert torch.equal(rotary.phase_by_head(), torch.zeros(rotary.n_heads, len(rotary.theta), dtype=torch.float64))
    with torch.no_grad():
        rotary.phase.zero_()
    torch.testing.assert_close(turned_scores(rotary, q, k), with_phase, rtol=0, atol=1e-12)  # rounding, 1e-14


@pytest.mark.parametrize("scope", ROWS)
@pytest.mark.parametrize("log_omega", [True, False])
def test_every_head_has_the_row_of_its_scope(scope, log_omega):
    rotary = module((8, 8, 6, 2), scope=scope, log_omega=log_omega)
    key_row, query_row = ROWS[scope]
    found = {name: tuple(value.shape) for name, value in rotary.named_parameters()}
    rows = (max(query_row) + 1, 4)
    assert found == {"log_omega_shift" if log_omega else "omega": (max(key_row) + 1, 4), "phase": rows, "gain": rows}
    assert set(rotary.state_dict()) == {*found, "theta", "query_mask", "shared_phase", "tied"}
    move(rotary)
    torch.testing.assert_close(rotary.omega_by_head(), rotary.omega.detach()[key_row], rtol=0, atol=1e-15)
    assert torch.equal(rotary.phase_by_head(), rotary.phase.detach()[query_row])
    assert torch.equal(rotary.gain_by_head(), rotary.gain.detach()[query_row])


def test_unmoved_frequencies_are_reported_exactly_and_a_shared_phase_has_a_row_per_key():
    assert module((8, 8, 6, 2), shared_phase=True).phase.shape == (2, 4)
    rotary = module(dtype=torch.float32)
    assert torch.equal(rotary.omega_by_head(), rotary.theta.double().expand(4, 4))
    assert torch.equal(rotary.shift_by_head(), torch.zeros(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("scope", ROWS)
@pytest.mark.parametrize("log_omega", [True, False])
def test_other_heads_and_pairs_stay_geometric(scope, log_omega):
    pairs = torch.tensor([1, 3]) if log_omega else [False, True, False, True]  # indices or a mask
    rotary = move(module((8, 8, 6, 2), scope=scope, heads=[3, 4, 5], frequencies=pairs, log_omega=log_omega))
    positions = torch.arange(POSITIONS)
    for x, side, spectral in zip(activations(0, (8, 8, 6, 2)), ("query", "key"), ([3, 4, 5], [1]), strict=True):
        turned = rotary(x, positions, side)
        moved = (turned != x).any(0).any(0)  # heads columns
        expected = torch.zeros_like(moved)
        expected[torch.tensor(spectral)[:, None], torch.tensor([1, 3, 5, 7])] = True  # pairs (t, t + 4)
        assert torch.equal(moved, expected)
    spectral = torch.zeros(6, 4, dtype=torch.bool)
    spectral[3:, [1, 3]] = True
    assert torch.equal(rotary.shift_by_head() != 0, spectral)
    assert torch.equal(rotary.phase_by_head() != 0, spectral)
    assert torch.equal(rotary.gain_by_head() != 1, spectral)


def test_what_is_not_spectral_gets_no_gradient():
    rotary = module((8, 8, 6, 2), heads=[0, 1, 2], frequencies=[False, True, False, False])
    q, k = activations(0, (8, 8, 6, 2))
    turned_scores(rotary, q, k).square().sum().backward()
    assert (rotary.omega.grad != 0).nonzero().tolist() == [[0, 1]]
    assert (rotary.phase.grad != 0).nonzero().tolist() == [[0, 1], [1, 1], [2, 1]]
    assert (rotary.gain.grad != 0).nonzero().tolist() == [[0, 1], [1, 1], [2, 1]]


def test_log_frequencies_keep_sign_and_zero():
    rotary = module(theta=torch.tensor([1.0, 0.1, 0.0], dtype=torch.float64), shape=(6, 6, 2, 2), log_omega=True)
    with torch.no_grad():
        rotary.log_omega_shift.fill_(float(np.log(2)))
    torch.testing.assert_close(
        rotary.omega.detach(), torch.tensor([[2.0, 0.2, 0.0]], dtype=torch.float64).expand(2, 3), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(rotary.omega_by_head(), rotary.omega.detach(), rtol=1e-12, atol=0)
    assert not isinstance(rotary.omega, torch.nn.Parameter)


def test_a_step_on_the_logarithmic_scale_is_relative():
    linear, logarithmic = module(), module(log_omega=True)
    q, k = activations(0, SHAPE)
    for rotary in (linear, logarithmic):
        turned_scores(rotary, q, k).softmax(-1).square().sum().backward()
    chain_rule = linear.theta * linear.omega.grad
    torch.testing.assert_close(logarithmic.log_omega_shift.grad, chain_rule, rtol=1e-10, atol=1e-13)  # rounding
