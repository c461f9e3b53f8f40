"""Rotary positions: which columns of a head form complex pairs, how fast each pair turns, and what phase a head uses.

Conventions. A head's columns `(re_t, im_t)` are one complex coordinate, `w_t = W[:, re_t] + i W[:, im_t]`, that turns
by `theta_t` radians per token. For a query at position m and a key at position n the score is

    s(m, n) = sum_t  cos((m - n) theta_t) Re B_t  -  sin((m - n) theta_t) Im B_t,      B_t = x_m^T M_t x_n,

with `M_t = w_q^t conj(w_k^t)^T`. "Fingerprint, Not Blueprint" (FP) counts the offset the other way, key minus query,
which turns its eq. 5 into `s(D) - s(-D) = sum_t 2 sin(D theta_t) Im B_t`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from tlspectral.containers import are_columns, is_array, plain, values

Frequencies = Iterable[Any] | Tensor
"""Some rotary pairs of a layer: their indices, or a boolean mask."""

_HAVE_FLOAT64 = ("cpu", "cuda")


@dataclass(frozen=True)
class RotaryGeometry:
    """The rotary pairs of a layer and how fast they rotate, as the model itself applies them.

    In an ordinary model all heads of a layer rotate alike. A spectral one ("Bifocal Attention", eq. 2) has frequencies
    of its own per query head, and multiplies the query's pairs by `gain * exp(i phase)`, so that `M_t` becomes
    `gain_t exp(i phase_t) M_t`.

    Attributes:
        theta: radians per token of each pair, in the model's own order (the first pair rotates fastest); of a spectral
            layer [heads, pairs], equal within the query heads that share keys.
        real_index, imag_index: columns of the head that hold each pair's real and imaginary coordinate.
        d_head: columns of the head; those in no pair are not rotated.
        attention_scaling: factor on rotated queries and on rotated keys (YaRN, LongRoPE); it enters a score squared.
        valid_up_to: tokens up to which `theta` holds, None where it does not depend on the length.
        gain, phase: of a spectral layer, factor and radians on each pair of the queries; None in an ordinary one.
        mismatch: why the model does not rotate by `theta`, so that nothing is computed from it; None where it does.
    """

    theta: Float64[Tensor, "*heads pairs"]
    real_index: Int64[Tensor, "pairs"]
    imag_index: Int64[Tensor, "pairs"]
    d_head: int
    attention_scaling: float = 1.0
    valid_up_to: int | None = None
    gain: Float64[Tensor, "heads pairs"] | None = None
    phase: Float64[Tensor, "heads pairs"] | None = None
    mismatch: str | None = None

    @property
    def n_pairs(self) -> int:
        """Number of complex pairs."""
        return self.theta.shape[-1]

    @property
    def per_head(self) -> bool:
        """True for a spectral layer, whose heads have frequencies, gain and phase of their own."""
        return self.theta.ndim == 2

    @property
    def still_columns(self) -> Int64[Tensor, "columns"]:
        """Columns that are in no pair and are not rotated."""
        still = torch.ones(self.d_head, dtype=torch.bool)
        still[self.real_index] = still[self.imag_index] = False
        return still.nonzero().flatten()

    def of_heads(self, heads: list[int] | slice) -> "RotaryGeometry":
        """Return a spectral layer's geometry for some query heads, in the given order; an ordinary one as it is."""
        if not self.per_head:
            return self
        gain, phase = (None if value is None else value[heads] for value in (self.gain, self.phase))
        return replace(self, theta=self.theta[heads], gain=gain, phase=phase)

    @property
    def rotary_fraction(self) -> float:
        """Share of the head's columns that are rotated."""
        return 2 * self.n_pairs / self.d_head

    def position_tables(
        self, n_positions: int
    ) -> tuple[Float64[Tensor, "*heads pos pairs"], Float64[Tensor, "*heads pos pairs"]]:
        """Return scaled cos and sin of each pair at positions 0 .. n_positions - 1, in float64; spectral ones per head.

        A model's own float32 tables drift from these with the position (about 1e-4 in a score at 1000 tokens), so
        interventions on a running model use the model's tables.
        """
        angle = torch.arange(n_positions, dtype=torch.float64)[:, None] * self.theta[..., None, :]
        return self.attention_scaling * angle.cos(), self.attention_scaling * angle.sin()


def pair_columns(rotary_dim: int, *, adjacent: bool) -> tuple[Int64[Tensor, "pairs"], Int64[Tensor, "pairs"]]:
    """Return the columns of the real and imaginary coordinates of the first `rotary_dim` columns of a head.

    Args:
        rotary_dim: even number of rotated columns.
        adjacent: True for pairs (0, 1), (2, 3), ... (GPT-J, Cohere); False for (t, t + rotary_dim / 2) (NeoX, Llama).
    """
    columns = torch.arange(rotary_dim)
    if adjacent:
        return columns[0::2], columns[1::2]
    return columns[: rotary_dim // 2], columns[rotary_dim // 2 :]


def require_one_reading(frequencies: Any) -> None:
    """Refuse heads beside pairs, as torch.where returns them of [heads, pairs], and a mask of the numbers 0 and 1.

    Raises ValueError with both readings.
    """
    columns = are_columns(frequencies) and len(frequencies) > 1
    is_mask = str(getattr(frequencies, "dtype", "")).endswith("bool")
    if columns or (not is_mask and getattr(frequencies, "ndim", 1) > 1 and frequencies.shape[-1] > 1):
        raise ValueError(
            "frequencies are one list of rotary pairs; several arrays or columns may be heads beside their pairs, as "
            "torch.where returns them, or pairs alone: give the pairs, for all heads that are chosen"
        )
    if isinstance(frequencies, Iterable) and hasattr(frequencies, "__len__") and not isinstance(frequencies, str):
        numbers = values(frequencies) or []
        if len(numbers) > 2 and {*map(str, numbers)} <= {"0", "1"}:
            raise ValueError(
                f"frequencies={numbers[:8]} have two readings: the pairs 0 and 1, or a mask of {len(numbers)} pairs. "
                "Write [0, 1] for the first, booleans for the second"
            )


def pair_mask(frequencies: Frequencies, n_pairs: int) -> Bool[Tensor, "pairs"]:
    """Return a mask of the chosen rotary pairs, given by indices or by a boolean mask.

    Raises:
        ValueError: a mask of another length, numbers that are no indices, pairs that do not exist, or a value with two
            readings, see `require_one_reading`.
    """
    require_one_reading(frequencies)
    listed = not isinstance(frequencies, Tensor) and isinstance(frequencies, Iterable)
    entries = [values(one) if is_array(one) else plain(one) for one in frequencies] if listed else frequencies
    given = torch.as_tensor(entries).cpu()
    if given.dtype == torch.bool:
        if given.shape != (n_pairs,):
            raise ValueError(f"the mask has {given.numel()} entries for {n_pairs} rotary pairs")
        return given
    if given.is_floating_point() and given.numel():
        raise ValueError(f"frequencies are indices of pairs or a boolean mask, not {given.dtype}")
    indices = given.long().flatten()
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= n_pairs):
        raise ValueError(f"frequencies are 0 to {n_pairs - 1}, found {indices.tolist()}")
    mask = torch.zeros(n_pairs, dtype=torch.bool)
    mask[indices] = True
    return mask


def widened(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return values in float32 at least. Half precision would round away angles and differences of scores."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def in_float64(values: Shaped[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """Return values in float64 on their own device, or on the CPU if the device may have no float64 (mps has none)."""
    return (values if values.device.type in _HAVE_FLOAT64 else values.cpu()).double()


def in_float64_on_cpu(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return values in float64 on the CPU, in float32 at least on a device, where float64 can be 64 times slower.

    For what is measured in products of matrices; sums over tokens are `summed`.
    """
    return values.double() if values.device.type == "cpu" else widened(values)


def summed(
    values: Float[Tensor, "*shape"], axes: int | tuple[int, ...], *, keepdim: bool = False
) -> Float64[Tensor, "*summed"]:
    """Return sums over axes, accumulated in float64, on the CPU if the device may have no float64 (mps has none)."""
    values = values if values.device.type in _HAVE_FLOAT64 else values.cpu()
    return values.sum(axes, keepdim=keepdim, dtype=torch.float64)


def times_phase(
    real: Float[Tensor, "*shape"],
    imag: Float[Tensor, "*shape"],
    cos: Float[Tensor, "*table"],
    sin: Float[Tensor, "*table"],
) -> tuple[Float[Tensor, "*product"], Float[Tensor, "*product"]]:
    """Return real and imaginary part of `(real + i imag) (cos + i sin)`: each pair rotated by its angle."""
    return real * cos - imag * sin, imag * cos + real * sin


def rotate(
    x: Float[Tensor, "*batch pos d_head"],
    cos: Float[Tensor, "*heads #pos pairs"],
    sin: Float[Tensor, "*heads #pos pairs"],
    geometry: RotaryGeometry,
) -> Float[Tensor, "*batch pos d_head"]:
    """Rotate each pair of `x` by its angle at its position; columns in no pair are left as they are.

    Pass `-sin` to rotate the other way. Tables per head go with an `x` of [..., heads, pos, d_head].
    """
    real, imag = x[..., geometry.real_index], x[..., geometry.imag_index]
    rotated = x.clone()
    rotated[..., geometry.real_index], rotated[..., geometry.imag_index] = times_phase(real, imag, cos, sin)
    return rotated


def with_gain_and_phase(
    queries: Float[Tensor, "*batch heads rows d_head"], geometry: RotaryGeometry
) -> Float[Tensor, "*batch heads rows d_head"]:
    """Return queries, or rows of W_Q [heads, d_model, d_head], times a spectral layer's `gain * exp(i phase)` per pair.

    Both give the same score: the factor depends on head and pair alone. An ordinary layer's are returned as they are.
    """
    if geometry.gain is None or geometry.phase is None:
        return queries
    gain, phase = (value[:, None].to(queries.dtype).to(queries.device) for value in (geometry.gain, geometry.phase))
    return rotate(queries, gain * phase.cos(), gain * phase.sin(), geometry)


def per_pair(table: Float[Tensor, "*batch pos columns"], geometry: RotaryGeometry) -> Float[Tensor, "*batch pos pairs"]:
    """Return one column per pair of a cos or sin table; models store one per pair, two halves, or interleaved."""
    n_pairs = geometry.n_pairs
    if table.shape[-1] == n_pairs:
        return table
    halves = torch.equal(table[..., :n_pairs], table[..., n_pairs:])
    return table[..., :n_pairs] if halves else table[..., 0::2]


def turned_further(
    cos: Float[Tensor, "*batch pos pairs"],
    sin: Float[Tensor, "*batch pos pairs"],
    shift: Float64[Tensor, "heads pairs"],
) -> tuple[Float[Tensor, "*batch heads pos pairs"], Float[Tensor, "*batch heads pos pairs"]]:
    """Return a model's own tables at positions 0, 1, ..., rotated by `shift` more radians per token, for every head."""
    angle = torch.arange(cos.shape[-2], dtype=torch.float64)[:, None] * shift[:, None, :]  # heads pos pairs
    cos, sin = (widened(table)[..., None, :, :] for table in (cos, sin))
    more_cos, more_sin = angle.cos().to(cos), angle.sin().to(cos)
    return times_phase(cos, sin, more_cos, more_sin)


class PhaseNorms(NamedTuple):
    """Frobenius norms of `Re M_t` and `Im M_t`, per head and pair."""

    re: Float64[Tensor, "heads pairs"]
    im: Float64[Tensor, "heads pairs"]


def phase_norms(
    w_q: Float64[Tensor, "heads d_model d_head"],
    w_k: Float64[Tensor, "heads d_model d_head"],
    geometry: RotaryGeometry,
) -> PhaseNorms:
    """Return norms of the real and imaginary part of each `M_t`, from inner products of columns alone (FP section 7).

    With a, c the real and imaginary columns of W_Q and b, d of W_K, `Re M_t = a b^T + c d^T` and
    `Im M_t = c b^T - a d^T`. A difference of squares leaves rounding of about 1e-8 of `||M_t||` where a part vanishes.
    The norms leave out `attention_scaling`, which multiplies every `M_t` alike. For a spectral layer `w_q` must
    contain gain and phase already (`with_gain_and_phase`), which mix real and imaginary parts.
    """
    re, im = phase_squares(w_q, w_k, geometry)
    return PhaseNorms(re.clamp_min(0).sqrt(), im.clamp_min(0).sqrt())


def phase_squares(
    w_q: Float[Tensor, "heads d_model d_head"],
    w_k: Float[Tensor, "heads d_model d_head"],
    geometry: RotaryGeometry,
) -> tuple[Float[Tensor, "heads pairs"], Float[Tensor, "heads pairs"]]:
    """Return the squared norms of the real and the imaginary part of each `M_t`, as `phase_norms` does; differentiable.

    Where a part vanishes, its square is rounding of either sign.
    """
    aa, cc, ac = _pair_products(w_q, geometry)
    bb, dd, bd = _pair_products(w_k, geometry)
    return aa * bb + cc * dd + 2 * ac * bd, cc * bb + aa * dd - 2 * ac * bd


def _pair_products(
    w: Float[Tensor, "heads d_model d_head"], geometry: RotaryGeometry
) -> tuple[Float[Tensor, "heads pairs"], ...]:
    """Return inner products real.real, imag.imag and real.imag of each pair's columns, one head in memory at a time."""
    products = []
    for head in w:
        real, imag = head[:, geometry.real_index], head[:, geometry.imag_index]
        products.append(torch.stack([(real * real).sum(0), (imag * imag).sum(0), (real * imag).sum(0)]))
    return tuple(torch.stack(products, dim=1))


class PhaseMetrics(NamedTuple):
    """Per head: how much of the rotary content is directional, and at which frequencies."""

    rope_imag_frac: Float64[Tensor, "heads"]
    freq_centroid: Float64[Tensor, "heads"]
    hi_freq_dir: Float64[Tensor, "heads"]


def phase_metrics(norms: PhaseNorms, geometry: RotaryGeometry) -> PhaseMetrics:
    """Return summaries of a head's phase content (FP section 7).

    * `rope_imag_frac` = sum ||Im M_t|| / sum (||Re M_t|| + ||Im M_t||), norms unsquared, in [0, 1];
    * `freq_centroid` = sum theta_t ||Im M_t|| / sum ||Im M_t||, radians per token;
    * `hi_freq_dir` = share of sum ||Im M_t|| in the first n_pairs // 2 pairs; the pairs of a spectral layer keep their
      order, whatever their frequencies are.

    NaN where a denominator is zero. None of them says that a head uses its phase: that takes an ablation.
    """
    im_total = norms.im.sum(1)
    total = im_total + norms.re.sum(1)
    nan = torch.tensor(float("nan"), dtype=torch.float64)
    share = torch.where(total > 0, im_total / total, nan)
    centroid = torch.where(im_total > 0, (norms.im * geometry.theta).sum(1) / im_total, nan)
    high = torch.where(im_total > 0, norms.im[:, : geometry.n_pairs // 2].sum(1) / im_total, nan)
    return PhaseMetrics(share, centroid, high)
