"""The parts of a score in float64: they sum to it, over norms, biases, bands and tables.

What explicit operators M_t say, pair by pair, is compared in running models by `conformance.edits`.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlspectral.algebra.rotary import RotaryGeometry, pair_columns
from tlspectral.hooks.parts import Antisymmetric, Band, RopePhase, Symmetric
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.attention.score_side import Rotation, side
from tlspectral.models.reading.layer import AttentionLayer
from tlspectral.models.reading.norms import Normalization, QueryKeyNorm

invariant = settings(max_examples=30, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
# d_head, columns that turn, adjacent pairs: halves, adjacent, a part of either, a column left over, one pair, no RoPE.
SHAPES = [(8, 8, False), (8, 8, True), (16, 4, False), (16, 4, True), (7, 6, False), (2, 2, True), (6, 0, False)]
shapes = st.sampled_from(SHAPES)
rotary_shapes = st.sampled_from(SHAPES[:-1])
norms = st.booleans()
BATCH, HEADS, TOKENS, WIDTH = 2, 3, 7, 9
CONTENT = ("symmetric", "antisymmetric")
# Everything here is float64 on scores of size 10: measured at most 6e-14. A wrong sign, pair or transpose is off by 1.
ROUNDING = 1e-11


class Case:
    """Random tokens, weights and biases of one layer, with everything by two ways: the package's and by definition."""

    def __init__(self, seed, shape, *, norm=False, scaling=1.0):
        d_head, rotary_dim, adjacent = shape
        rng = np.random.default_rng(seed)
        self.tokens = rng.standard_normal((BATCH, TOKENS, WIDTH))
        self.w_q, self.w_k = rng.standard_normal((2, HEADS, WIDTH, d_head))
        self.b_q, self.b_k = rng.standard_normal((2, HEADS, d_head))
        self.norms = [None, None]
        if norm:
            self.norms = [QueryKeyNorm(torch.from_numpy(rng.uniform(0.5, 2, d_head)), 1e-3, False) for _ in "qk"]
        real, imag = pair_columns(rotary_dim, adjacent=adjacent)
        theta = torch.from_numpy(rng.uniform(0, 1, len(real)))
        self.geometry = RotaryGeometry(theta, real, imag, d_head, scaling) if rotary_dim else None
        self.still = [c for c in range(d_head) if c not in {*real.tolist(), *imag.tolist()}]
        self.scale = 0.3
        self.rotation = None
        if self.geometry is not None:
            self.rotation = Rotation(self.geometry, *self.geometry.position_tables(TOKENS))
        self.query = self.side(self.w_q, self.b_q, self.norms[0])
        self.key = self.side(self.w_k, self.b_k, self.norms[1])

    def side(self, w, b, norm):
        captured = np.einsum("bpd,hdk->bphk", self.tokens, w) + b
        return side(torch.from_numpy(captured), torch.from_numpy(b), norm, self.rotation)

    def turn(self, rotation):
        self.query, self.key = (replace(at, rotation=rotation) for at in (self.query, self.key))

    def scores(self):
        return HeadScores(self.layer(), list(range(HEADS)), self.query, self.key)

    def layer(self):
        w_q, w_k, b_q, b_k = (torch.from_numpy(x) for x in (self.w_q, self.w_k, self.b_q, self.b_k))
        none = Normalization("none", None, None, 0.0)
        q_norm, k_norm = self.norms
        return AttentionLayer(
            layer=0, w_q=w_q, b_q=b_q, w_k=w_k, b_k=b_k, norm=none, q_norm=q_norm, k_norm=k_norm,
            score_scale=self.scale, softcap=None, alibi=None, rotary=self.geometry, storage_dtype=torch.float64,
        )  # fmt: skip

    def removal(self, part, pairs=None, include_bias=False):
        kinds = {kind.name: kind for kind in (Symmetric, Antisymmetric, RopePhase)}
        value = Band(range(self.geometry.n_pairs)) if part == "rotary_band" else kinds[part](include_bias=include_bias)
        return added(value, self.scores(), pairs).numpy()


def added(part, scores, pairs=None):
    """What removing a part adds to the scores of every pair of tokens."""
    part, allowed = part if pairs is None else replace(part, frequencies=pairs), torch.ones(TOKENS, TOKENS).bool()
    difference, meant = part.change(scores, allowed)
    assert torch.equal(meant, allowed)
    return difference


def close(found, expected):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING)


# --- invariants ---


@invariant
@given(seeds, shapes, norms, st.booleans())
def test_the_parts_sum_to_the_score(seed, shape, norm, bias):
    case = Case(seed, shape, norm=norm, scaling=1.3)
    parts = CONTENT if case.geometry is None else (*CONTENT, "rope_phase")
    removed = sum(case.removal(part, include_bias=bias) for part in parts)
    score = case.scores().whole() if bias else case.scores().inside()
    assert float(score.abs().max()) > 0.1
    close(-removed, score.numpy())


@pytest.mark.slow
@invariant
@given(seeds, rotary_shapes, norms, st.booleans())
def test_bands_of_a_partition_sum_to_the_rotary_product(seed, shape, norm, bias):
    case = Case(seed, shape, norm=norm)
    group = np.random.default_rng(seed).integers(0, 3, case.geometry.n_pairs)
    for part, with_bias in (("rotary_band", False), ("rope_phase", bias)):
        whole = case.removal(part, None, with_bias)
        close(sum(case.removal(part, group == g, with_bias) for g in range(3)), whole)
    scores = case.scores()
    product = scores.turning_between(case.query.content, case.key.content)
    close(case.removal("rotary_band"), -product.numpy())
    still = case.geometry.still_columns
    assert still.tolist() == case.still
    of_still = case.scale * case.query.content[..., still] @ case.key.content[..., still].mT
    close((product + of_still).numpy(), scores.inside().numpy())


@pytest.mark.slow
@invariant
@given(seeds, shapes)
def test_factors_of_norms_may_differ_between_columns(seed, shape):
    """Equal ones give the parts of a factor per token; other ones are put back column by column."""
    case = Case(seed, shape, norm=True)
    d_head = case.query.content.shape[-1]
    per_token = {part: case.removal(part) for part in CONTENT}
    for name in ("query", "key"):
        at = getattr(case, name)
        setattr(case, name, replace(at, token_scale=at.token_scale[..., None].expand(*at.token_scale.shape, d_head)))
    for part in CONTENT:
        close(case.removal(part), per_token[part])
    if case.geometry is not None:
        return
    # Without rotation: C(j, i) from columns without their factors, which are put back at the other token.
    factor = torch.from_numpy(np.random.default_rng(seed).uniform(0.5, 2, case.key.content.shape))
    case.key = replace(case.key, token_scale=factor)
    q, a = (x.numpy() for x in (case.query.content, case.query.token_scale))
    k, b = (x.numpy() for x in (case.key.content, case.key.token_scale))
    exchanged = case.scale * np.einsum("bhjc,bhic,bhic,bhjc->bhij", q / a, k / b, a, b)
    close(-case.removal("symmetric") * 2, case.scores().inside().numpy() + exchanged)


# --- details ---


def test_tables_may_differ_within_a_batch_or_be_one_for_all():
    case = Case(0, (8, 8, False))
    cos, sin = case.geometry.position_tables(TOKENS + 3)
    pairs = [(cos[:TOKENS], sin[:TOKENS]), (2 * cos[3:], 2 * sin[3:])]
    found = []
    for i, (c, s) in enumerate(pairs):
        case.turn(Rotation(case.geometry, c[None], s[None]))
        found.append({part: case.removal(part)[i] for part in (*CONTENT, "rope_phase")})
    case.turn(Rotation(case.geometry, *(torch.stack(tables) for tables in zip(*pairs, strict=True))))
    for part in (*CONTENT, "rope_phase"):
        close(case.removal(part), np.stack([each[part] for each in found]))


@pytest.mark.parametrize(
    ("dtype", "widened"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64,) * 2]
)
def test_sides_are_never_half_precision(dtype, widened):
    captured, bias = torch.randn(1, 5, 2, 4, generator=torch.Generator().manual_seed(0)).to(dtype), torch.ones(2, 4)
    found = side(captured, bias.double(), None, None)
    assert found.whole.dtype == found.content.dtype == widened
    assert found.whole.shape == (1, 2, 5, 4)
    assert torch.equal(found.whole.transpose(1, 2).to(dtype), captured)
    assert torch.equal(found.content, found.whole - 1)
    assert found.token_scale is None


def test_a_side_under_a_norm():
    captured = torch.randn(1, 5, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bias, gain = torch.full((2, 4), 0.5, dtype=torch.float64), torch.arange(1.0, 5.0, dtype=torch.float64)
    found = side(captured, bias, QueryKeyNorm(gain, 0.1, False), None)
    rms = (captured.square().mean(-1, keepdim=True) + 0.1).sqrt()
    close(found.whole.transpose(1, 2).numpy(), (captured / rms * gain).numpy())
    close(found.content.transpose(1, 2).numpy(), ((captured - 0.5) / rms * gain).numpy())  # the rms of the whole vector
    close(found.token_scale.transpose(1, 2).numpy(), (1 / rms[..., 0]).numpy())
    ungained = side(captured, bias, QueryKeyNorm(None, 0.1, False), None)
    close((ungained.whole * gain).numpy(), found.whole.numpy())


def test_parts_are_differentiable():
    case = Case(0, (4, 4, False), norm=True)
    layer = case.layer()
    stream = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, TOKENS, HEADS, 4, dtype=torch.float64, generator=stream) for _ in range(2)]
    for part in (Symmetric(), Antisymmetric(), RopePhase(), Band(())):

        def total(q, k, part=part):
            query = side(q, layer.b_q, layer.q_norm, case.rotation)
            key = side(k, layer.b_k, layer.k_norm, case.rotation)
            return added(part, HeadScores(layer, list(range(HEADS)), query, key)).square().sum()

        assert torch.autograd.gradcheck(total, tuple(x.requires_grad_() for x in inputs), fast_mode=True)
