"""The residual rotation by itself: the identity at the start, eq. 2 of the paper after it, rows, masks and refusals."""

import copy
import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlspectral.rotary import RotaryGeometry, pair_columns, rotate, with_gain_and_phase
from tlspectral.spectral_rope import SpectralRoPE
from tlspectral.spectral_rope import module as spectral_module

invariant = settings(max_examples=30, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
scopes = st.sampled_from(["model", "layer", "group", "head"])
# d_head, rotary_dim, heads, key/value heads: the whole head, a quarter of it, a column left over; grouped or not.
shapes = st.sampled_from([(8, 8, 4, 2), (16, 4, 3, 3), (7, 6, 4, 1), (8, 8, 6, 2)])
POSITIONS = 9
ROWS = {
    # omega, phase and gain of 6 query heads on 2 key/value heads
    "model": (1, 1),
    "layer": (1, 1),
    "group": (2, 2),
    "head": (2, 6),
}


def module(shape=(8, 8, 4, 2), *, adjacent=False, dtype=torch.float64, theta=None, **options):
    _, rotary_dim, heads, kv_heads = shape
    pairs = rotary_dim // 2
    theta = 10.0 ** -torch.linspace(0, 3, pairs, dtype=torch.float64) if theta is None else theta
    real, imag = pair_columns(rotary_dim, adjacent=adjacent)
    return SpectralRoPE(theta.to(dtype), heads, kv_heads, real_index=real, imag_index=imag, **options)


def normal(seed, *shape, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def move(rotary, seed=0, *, size=0.3):
    """Every parameter displaced by a seeded draw, in place."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    with torch.no_grad():
        for parameter in rotary.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    return rotary


def activations(seed, shape, dtype=torch.float64):
    d_head, _, heads, kv_heads = shape
    return (
        normal(seed, 2, POSITIONS, heads, d_head, dtype=dtype),
        normal(seed + 1, 2, POSITIONS, kv_heads, d_head, dtype=dtype),
    )


def by_theta(x, rotary, positions):
    """The model's own rotation, of [batch, pos, heads, d_head]."""
    angle = positions[:, None].double() * rotary.theta.double()
    geometry = geometry_of(rotary, x.shape[-1])
    return rotate(x.transpose(1, 2), angle.cos(), angle.sin(), geometry).transpose(1, 2)


def geometry_of(rotary, d_head, **more):
    return RotaryGeometry(rotary.theta.double(), rotary.real_index, rotary.imag_index, d_head, **more)


def turned_scores(rotary, q, k, *, start=0):
    """Scores of the whole rotation, the model's own and the residual, at positions start, start + 1, ..."""
    positions = torch.arange(start, start + q.shape[1])
    q, k = (rotary(by_theta(x, rotary, positions), positions, side) for x, side in ((q, "query"), (k, "key")))
    return scores(rotary, q, k)


def scores(rotary, q, k):
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


# --- the start ---


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_start_stays_the_identity_in_another_precision(dtype):
    rotary = module(dtype=torch.float32).to(dtype)
    assert rotary.omega.dtype == rotary.theta.dtype == dtype
    q, _ = activations(0, (8, 8, 4, 2), torch.float32)
    assert torch.equal(rotary(q, torch.arange(POSITIONS), "query"), q)


def test_moved_parameters_act_the_same_in_float64():
    rotary = move(module(dtype=torch.float32))
    q, _ = activations(0, (8, 8, 4, 2), torch.float32)
    wide = copy.deepcopy(rotary).to(torch.float64)
    # Noise 1e-6 of float32 angles up to 20 rad; a theta that did not move along would leave a rounding of theta only,
    # but one that was converted from another value would be off by tenths.
    torch.testing.assert_close(
        wide(q.double(), torch.arange(POSITIONS), "query").float(),
        rotary(q, torch.arange(POSITIONS), "query"),
        rtol=0,
        atol=2e-5,
    )
    torch.testing.assert_close(wide.omega_by_head(), rotary.omega_by_head(), rtol=0, atol=1e-6)  # rounding of float32


def test_parameters_in_sixteen_bits_make_angles_in_float32():
    rotary = move(module(dtype=torch.bfloat16))
    q, _ = activations(0, (8, 8, 4, 2), torch.float32)
    positions = torch.arange(POSITIONS) + 1000
    exact = copy.deepcopy(rotary).to(torch.float64)(q.double(), positions, "query")
    # Angles of 500 rad in float32: 1e-4. In 16 bits they are off by radians.
    torch.testing.assert_close(rotary(q, positions, "query").double(), exact, rtol=0, atol=2e-2)


def test_noise_is_seeded_and_as_large_as_asked():
    phases = [module((8, 8, 64, 64), phase_noise=1e-3, seed=seed).phase.detach() for seed in (0, 0, 1)]
    assert torch.equal(phases[0], phases[1])
    assert not torch.equal(phases[0], phases[2])
    # 256 draws: the standard error of the standard deviation is 4.4 %; 1e-3 as a variance would give 0.03.
    assert float(phases[0].std()) == pytest.approx(1e-3, rel=0.2)


# --- the definition ---


@invariant
@given(seeds, shapes, scopes, st.booleans(), st.booleans())
def test_own_rotation_and_residual_are_equation_2(seed, shape, scope, adjacent, log_omega):
    rotary = move(module(shape, scope=scope, adjacent=adjacent, log_omega=log_omega), seed)
    positions = torch.arange(POSITIONS)
    for x, side in zip(activations(seed, shape), ("query", "key"), strict=True):
        found = rotary(by_theta(x, rotary, positions), positions, side).detach().numpy()
        # Noise 1e-14 at angles of some radians; a wrong sign, a phase on the key or gain twice are off by tenths.
        np.testing.assert_allclose(found, equation_2(x, rotary, side=side), rtol=0, atol=1e-12)


def test_float32_is_equation_2_within_its_noise():
    rotary = move(module(dtype=torch.float32))
    positions = torch.arange(POSITIONS)
    q, _ = activations(0, (8, 8, 4, 2), torch.float32)
    found = rotary(by_theta(q.double(), rotary, positions).float(), positions, "query").detach()
    exact = torch.from_numpy(equation_2(q.double(), copy.deepcopy(rotary).double(), side="query"))
    assert float((found - exact).abs().max()) < 1e-5  # measured 1e-6; the wrong sign of a phase gives 1


def test_sixteen_bit_activations_are_turned_in_float32():
    rotary = move(module(dtype=torch.float32))
    q, _ = activations(0, (8, 8, 4, 2), torch.bfloat16)
    wide = rotary(q.float(), torch.arange(POSITIONS), "query")
    assert torch.equal(rotary(q, torch.arange(POSITIONS), "query"), wide.bfloat16())


@invariant
@given(seeds, shapes, scopes)
def test_repeated_keys_turn_like_grouped_ones(seed, shape, scope):
    rotary = move(module(shape, scope=scope), seed)
    _, k = activations(seed, shape)
    group = rotary.n_heads // rotary.n_kv_heads
    grouped = rotary(k, torch.arange(POSITIONS), "key").repeat_interleave(group, dim=2)
    assert torch.equal(rotary(k.repeat_interleave(group, dim=2), torch.arange(POSITIONS), "key"), grouped)


def test_columns_in_no_pair_and_the_input_stay():
    rotary = move(module((16, 4, 3, 3)))
    q, _ = activations(0, (16, 4, 3, 3))
    before = q.clone()
    turned = rotary(q, torch.arange(POSITIONS), "query")
    assert torch.equal(turned[..., 4:], q[..., 4:])
    assert not torch.equal(turned[..., :4], q[..., :4])
    assert torch.equal(q, before)


# --- what a score sees ---


@invariant
@given(seeds, shapes, scopes, st.integers(1, 1000))
def test_translation_invariance_is_not_broken(seed, shape, scope, start):
    rotary = move(module(shape, scope=scope), seed)
    q, k = activations(seed, shape)
    # Angles of up to 2000 rad are rounded to 1e-13 each. (The paper, section 5.1, says that the phase breaks it.)
    torch.testing.assert_close(turned_scores(rotary, q, k, start=start), turned_scores(rotary, q, k), rtol=0, atol=1e-9)


@invariant
@given(seeds, shapes, scopes)
def test_shared_phase_cancels(seed, shape, scope):
    rotary = move(module(shape, scope=scope, shared_phase=True), seed)
    q, k = activations(seed, shape)
    with_phase = turned_scores(rotary, q, k)
    assert torch.equal(rotary.phase_by_head(), torch.zeros(rotary.n_heads, len(rotary.theta), dtype=torch.float64))
    with torch.no_grad():
        rotary.phase.zero_()
    torch.testing.assert_close(turned_scores(rotary, q, k), with_phase, rtol=0, atol=1e-12)  # rounding, 1e-14


@pytest.mark.parametrize("shared", [True, False])
def test_gradient_on_a_shared_phase_is_rounding(shared):
    rotary = module(shared_phase=shared)
    q, k = activations(0, (8, 8, 4, 2))
    turned_scores(rotary, q, k).softmax(-1).square().sum().backward()
    phase, others = rotary.phase.grad.abs(), (rotary.omega.grad.abs(), rotary.gain.grad.abs())
    assert all(bool((gradient > 1e-3).all()) for gradient in others)
    if shared:
        assert float(phase.max()) < 1e-13  # measured 1e-15
    else:
        assert bool((phase > 1e-3).all())


def test_gain_acts_once():
    rotary = module()
    q, k = activations(0, (8, 8, 4, 2))
    plain = turned_scores(rotary, q, k)
    with torch.no_grad():
        rotary.gain.fill_(3.0)
    torch.testing.assert_close(turned_scores(rotary, q, k), 3 * plain, rtol=1e-12, atol=1e-12)


@invariant
@given(seeds, shapes, scopes)
def test_gain_and_phase_are_gauge(seed, shape, scope):
    """The same scores with W_Q multiplied by gain exp(i phase) per pair, and no spectral gain or phase."""
    rotary = move(module(shape, scope=scope), seed)
    d_head, _, heads, kv_heads = shape
    x = normal(seed, 2, POSITIONS, 5)
    w_q, w_k = normal(seed + 1, heads, 5, d_head), normal(seed + 2, kv_heads, 5, d_head)
    q, k = (torch.einsum("bpd,hdk->bphk", x, w) for w in (w_q, w_k))
    geometry = geometry_of(rotary, d_head, gain=rotary.gain_by_head(), phase=rotary.phase_by_head())
    folded = torch.einsum("bpd,hdk->bphk", x, with_gain_and_phase(w_q, geometry))
    expected = turned_scores(rotary, q, k)
    with torch.no_grad():
        rotary.phase.zero_()
        rotary.gain.fill_(1.0)
    torch.testing.assert_close(turned_scores(rotary, folded, k), expected, rtol=0, atol=1e-11)  # noise 1e-13


# --- rows ---


@pytest.mark.parametrize("scope", ROWS)
@pytest.mark.parametrize("log_omega", [True, False])
def test_rows_by_scope(scope, log_omega):
    rotary = module((8, 8, 6, 2), scope=scope, log_omega=log_omega)
    key_rows, query_rows = ROWS[scope]
    found = {name: tuple(value.shape) for name, value in rotary.named_parameters()}
    omega = "log_omega_shift" if log_omega else "omega"
    assert found == {omega: (key_rows, 4), "phase": (query_rows, 4), "gain": (query_rows, 4)}
    assert set(rotary.state_dict()) == set(found)
    assert tuple(rotary.omega.shape) == (key_rows, 4)


def test_a_shared_phase_has_a_row_per_key():
    assert module((8, 8, 6, 2), shared_phase=True).phase.shape == (2, 4)


@pytest.mark.parametrize(
    ("scope", "key_row", "query_row"),
    [
        ("layer", [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
        ("group", [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]),
        ("head", [0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_every_head_has_the_row_of_its_group(scope, key_row, query_row):
    rotary = move(module((8, 8, 6, 2), scope=scope))
    torch.testing.assert_close(rotary.omega_by_head(), rotary.omega.detach()[key_row], rtol=0, atol=1e-15)
    assert torch.equal(rotary.phase_by_head(), rotary.phase.detach()[query_row])
    assert torch.equal(rotary.gain_by_head(), rotary.gain.detach()[query_row])


def test_unmoved_frequencies_are_reported_exactly():
    rotary = module(dtype=torch.float32)
    assert torch.equal(rotary.omega_by_head(), rotary.theta.double().expand(4, 4))
    assert torch.equal(rotary.shift_by_head(), torch.zeros(4, 4, dtype=torch.float64))


# --- geometric heads and pairs ---


@pytest.mark.parametrize("scope", ROWS)
@pytest.mark.parametrize("log_omega", [True, False])
def test_other_heads_and_pairs_stay_geometric(scope, log_omega):
    rotary = move(module((8, 8, 6, 2), scope=scope, heads=[3, 4, 5], frequencies=[1, 3], log_omega=log_omega))
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


@pytest.mark.parametrize(
    "frequencies", [[1, 3], (3, 1), torch.tensor([1, 3]), [False, True, False, True], iter([1, 3])]
)
def test_frequencies_are_indices_or_a_mask(frequencies):
    assert module(frequencies=frequencies).query_mask[0].tolist() == [False, True, False, True]


# --- frequencies on a logarithmic scale ---


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
    q, k = activations(0, (8, 8, 4, 2))
    for rotary in (linear, logarithmic):
        turned_scores(rotary, q, k).softmax(-1).square().sum().backward()
    chain_rule = linear.theta * linear.omega.grad
    torch.testing.assert_close(logarithmic.log_omega_shift.grad, chain_rule, rtol=1e-10, atol=1e-13)  # rounding


# --- refusals ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"phase_noise": -1.0}, "standard deviation"),
        ({"phase_noise": float("nan")}, "standard deviation"),
        ({"heads": [4]}, "head 4 does not exist: heads are 0 to 3"),
        ({"heads": [-1]}, "head -1 does not exist"),
        ({"heads": []}, "no head is chosen"),
        ({"heads": [0, 1, 3]}, r"heads \[2, 3\] share key/value head 1, .* only \[3\] are chosen"),
        ({"frequencies": []}, "no frequency is chosen"),
        ({"frequencies": [4]}, r"frequencies are 0 to 3, found \[4\]"),
        ({"frequencies": [-1]}, "frequencies are 0 to 3"),
        ({"frequencies": [0.5]}, "indices of pairs or a boolean mask"),
        ({"frequencies": [True, False]}, "2 entries for 4 rotary pairs"),
        ({"frequencies": [False] * 4}, "no frequency is chosen"),
    ],
)
def test_choices_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        module(**options)


def test_an_unknown_scope_is_refused():
    check = inspect.unwrap(spectral_module._check_shape)  # without the type checks of tests, which come first
    with pytest.raises(ValueError, match="scope must be one of 'model', 'layer', 'group', 'head'; not 'heads'"):
        check(4, 4, 2, "heads", 0.0)


@pytest.mark.parametrize(
    ("shape", "said"), [((8, 8, 4, 3), "4 query heads cannot share 3"), ((8, 0, 4, 2), "no rotary pairs")]
)
def test_sizes_that_do_not_fit_are_refused(shape, said):
    with pytest.raises(ValueError, match=said):
        module(shape)


@pytest.mark.parametrize(("heads", "side"), [(2, "query"), (3, "query"), (3, "key")])
def test_activations_of_another_model_are_refused(heads, side):
    with pytest.raises(ValueError, match=f"{side} tensor of {heads} heads"):
        module()(torch.zeros(1, 2, heads, 8), torch.arange(2), side)
