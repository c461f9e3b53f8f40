"""Rotary positions: the pairs of columns that rotate together, their frequencies, and the phase that a head uses.

Conventions. Columns `(re_t, im_t)` of a head form one complex coordinate, `w_t = W[:, re_t] + i W[:, im_t]`. It rotates
by `theta_t` radians per token. The score of a query at position m and a key at position n is

    s(m, n) = sum_t  cos((m - n) theta_t) Re B_t  -  sin((m - n) theta_t) Im B_t,      B_t = x_m^T M_t x_n,

with `M_t = w_q^t conj(w_k^t)^T`. "Fingerprint, Not Blueprint" (FP) counts the distance D as key minus query. Its eq. 5
is then `s(D) - s(-D) = sum_t 2 sin(D theta_t) Im B_t`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Complex128, Float, Float64, Int64, Shaped
from torch import Tensor

from tlspectral.containers import are_columns, is_array, plain, values
from tlspectral.errors import shown

Frequencies = Iterable[Any] | Tensor
"""Some rotary pairs of a layer: their indices, or a boolean mask."""

_HAVE_FLOAT64 = ("cpu", "cuda")


@dataclass(frozen=True)
class RotaryGeometry:
    """The rotary pairs of one layer and their frequencies, as the model applies them.

    In an ordinary model all heads of a layer rotate alike. A spectral layer (learned rotations, "Bifocal Attention",
    eq. 2) has frequencies for each query head. It also multiplies the query's pairs by `gain * exp(i phase)`, which
    turns M_t (the complex query-key matrix of pair t) into `gain_t exp(i phase_t) M_t`.

    Attributes:
        theta: radians per token of each pair [pairs], in the model's own order (the first pair rotates fastest). In a
            spectral layer [heads, pairs]; query heads that share keys have equal rows.
        real_index, imag_index: columns of the head with the real and the imaginary coordinate of each pair.
        d_head: number of columns of the head; columns in no pair are not rotated.
        attention_scaling: factor on rotated queries and on rotated keys (YaRN, LongRoPE); a score has its square.
        valid_up_to: number of tokens up to which `theta` is right; None if it does not depend on the length.
        gain, phase: factor and radians on each pair of the queries in a spectral layer; None in an ordinary layer.
        mismatch: reason why the model's rotation differs from `theta`; nothing is computed then. None if they agree.
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
        """Number of rotary pairs of a head in this layer."""
        return self.theta.shape[-1]

    @property
    def per_head(self) -> bool:
        """True for a spectral layer, where each head has its own frequencies, gain and phase."""
        return self.theta.ndim == 2

    @property
    def still_columns(self) -> Int64[Tensor, "columns"]:
        """Indices [columns] of the columns of a head (of queries and keys) that are not rotated."""
        still = torch.ones(self.d_head, dtype=torch.bool)
        still[self.real_index] = still[self.imag_index] = False
        return still.nonzero().flatten()

    def of_heads(self, heads: list[int] | slice) -> "RotaryGeometry":
        """Return a geometry with the rows of some query heads, in the given order; an ordinary layer, whose heads
        rotate alike, returns itself.
        """
        if not self.per_head:
            return self
        gain, phase = (None if value is None else value[heads] for value in (self.gain, self.phase))
        return replace(self, theta=self.theta[heads], gain=gain, phase=phase)

    @property
    def rotary_fraction(self) -> float:
        """Share of the head's columns that rotate, from 0 to 1."""
        return 2 * self.n_pairs / self.d_head

    def position_tables(
        self, n_positions: int
    ) -> tuple[Float64[Tensor, "*heads pos pairs"], Float64[Tensor, "*heads pos pairs"]]:
        """Return float64 cos and sin of each pair's angle at positions 0 to n_positions - 1, times `attention_scaling`.

        Both are [positions, pairs], with a head axis in front for a spectral layer. A model's own float32 tables differ
        from these more with each position (about 1e-4 in a score at 1000 tokens), so interventions on a running model
        use the model's tables.
        """
        angle = torch.arange(n_positions, dtype=torch.float64)[:, None] * self.theta[..., None, :]
        return self.attention_scaling * angle.cos(), self.attention_scaling * angle.sin()


def pair_columns(rotary_dim: int, *, adjacent: bool) -> tuple[Int64[Tensor, "pairs"], Int64[Tensor, "pairs"]]:
    """Return two index tensors [pairs]: columns of the real and of the imaginary coordinates of a head's rotary pairs.

    Args:
        rotary_dim: number of rotated columns, even; they are the first columns of the head.
        adjacent: True for pairs (0, 1), (2, 3), ... (GPT-J, Cohere); False for (t, t + rotary_dim / 2) (NeoX, Llama).
    """
    columns = torch.arange(rotary_dim)
    if adjacent:
        return columns[0::2], columns[1::2]
    return columns[: rotary_dim // 2], columns[rotary_dim // 2 :]


def require_one_reading(frequencies: Any) -> None:
    """Raise ValueError if `frequencies`, a user's choice of rotary pairs, has two readings; the message says both.

    Such values are two columns as torch.where returns them (heads and their pairs), and an array of the numbers 0 and 1
    (two pairs, or a mask).
    """
    columns = are_columns(frequencies) and len(frequencies) > 1
    is_mask = str(getattr(frequencies, "dtype", "")).endswith("bool")
    if columns or (not is_mask and getattr(frequencies, "ndim", 1) > 1 and frequencies.shape[-1] > 1):
        raise ValueError(
            "frequencies= takes one list of rotary pairs, found several arrays or columns. They may be heads beside "
            "their pairs, as torch.where returns them: give only the pairs; they apply to all chosen heads"
        )
    if isinstance(frequencies, Iterable) and hasattr(frequencies, "__len__") and not isinstance(frequencies, str):
        numbers = values(frequencies) or []
        if len(numbers) > 2 and {*map(str, numbers)} <= {"0", "1"}:
            raise ValueError(
                f"frequencies={numbers[:8]} has two readings: the pairs 0 and 1, or a mask of {len(numbers)} pairs. "
                "Write [0, 1] for the pairs, True and False for the mask"
            )


def pair_mask(frequencies: Frequencies, n_pairs: int) -> Bool[Tensor, "pairs"]:
    """Return a boolean mask [pairs], True for chosen rotary pairs; `frequencies` (a user's choice) holds their indices,
    or is a mask; `n_pairs` is the number of rotary pairs of a head.

    Raises:
        ValueError: a mask of another length, numbers that are not indices, pairs that do not exist, or a value with two
            readings, such as an array of 0 and 1.
    """
    require_one_reading(frequencies)
    listed = not isinstance(frequencies, Tensor) and isinstance(frequencies, Iterable)
    entries = [values(entry) if is_array(entry) else plain(entry) for entry in frequencies] if listed else frequencies
    try:
        numbers = torch.as_tensor(entries).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"frequencies= must be indices of rotary pairs, such as [0, 1], or a mask; found {shown(frequencies)}"
        ) from error
    if numbers.dtype == torch.bool:
        if numbers.shape != (n_pairs,):
            raise ValueError(
                f"the mask has {numbers.numel()} entries for {n_pairs} rotary pairs: give frequencies= one per pair"
            )
        return numbers
    if numbers.is_floating_point() and numbers.numel():
        raise ValueError(f"frequencies= takes indices of pairs or a boolean mask, not {numbers.dtype}: give integers")
    indices = numbers.long().flatten()
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= n_pairs):
        raise ValueError(
            f"frequencies are 0 to {n_pairs - 1}, found {shown(indices.tolist())}: give indices of rotary pairs"
        )
    mask = torch.zeros(n_pairs, dtype=torch.bool)
    mask[indices] = True
    return mask


def widened(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return values in float32, or in their own dtype if it is wider: half precision would round away angles and small
    differences of scores.
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))


def in_float64(values: Shaped[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """Return values in float64, on their own device if it is a CPU or CUDA device, otherwise on the CPU."""
    return (values if values.device.type in _HAVE_FLOAT64 else values.cpu()).double()


def in_float64_on_cpu(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return values for matrix products of a measurement: in float64 on the CPU, in at least float32 on another device.

    On a device float64 can be 64 times slower. Sums over tokens use `summed` instead.
    """
    return values.double() if values.device.type == "cpu" else widened(values)


def summed(
    values: Float[Tensor, "*shape"], axes: int | tuple[int, ...], *, keepdim: bool = False
) -> Float64[Tensor, "*summed"]:
    """Return the sum of `values` over `axes`, accumulated in float64; on the CPU if the device may lack float64.
    `keepdim`: True keeps the summed axes with length 1.
    """
    values = values if values.device.type in _HAVE_FLOAT64 else values.cpu()
    return values.sum(axes, keepdim=keepdim, dtype=torch.float64)


def times_phase(
    real: Float[Tensor, "*shape"],
    imag: Float[Tensor, "*shape"],
    cos: Float[Tensor, "*table"],
    sin: Float[Tensor, "*table"],
) -> tuple[Float[Tensor, "*product"], Float[Tensor, "*product"]]:
    """Return the real and the imaginary part, two tensors, of `(real + i imag) (cos + i sin)`, which rotates each pair
    by its angle.
    """
    return real * cos - imag * sin, imag * cos + real * sin


def rotate(
    x: Float[Tensor, "*batch pos d_head"],
    cos: Float[Tensor, "*heads #pos pairs"],
    sin: Float[Tensor, "*heads #pos pairs"],
    geometry: RotaryGeometry,
) -> Float[Tensor, "*batch pos d_head"]:
    """Return a copy of `x` (queries or keys) with each rotary pair rotated by its angle at its position; other columns
    are unchanged.

    `cos`, `sin`: tables of the angles. `-sin` instead of `sin` rotates backwards. `geometry` tells which columns form a
    pair. Tables with a head axis need `x` of shape [..., heads, pos, d_head].
    """
    real, imag = x[..., geometry.real_index], x[..., geometry.imag_index]
    rotated = x.clone()
    rotated[..., geometry.real_index], rotated[..., geometry.imag_index] = times_phase(real, imag, cos, sin)
    return rotated


def with_gain_and_phase(
    queries: Float[Tensor, "*batch heads rows d_head"], geometry: RotaryGeometry
) -> Float[Tensor, "*batch heads rows d_head"]:
    """Return a copy of the queries multiplied by `gain * exp(i phase)` of a layer with learned rotations; in an
    ordinary layer, `queries` itself.

    `geometry`: the layer's rotary pairs with gain and phase. `queries`: queries, or the rows of W_Q [heads, d_model,
    d_head]. Both uses give the same score, because the factor depends only on head and pair.
    """
    if geometry.gain is None or geometry.phase is None:
        return queries
    gain, phase = (value[:, None].to(queries.dtype).to(queries.device) for value in (geometry.gain, geometry.phase))
    return rotate(queries, gain * phase.cos(), gain * phase.sin(), geometry)


def pairs_and_rest(
    factor: Float64[Tensor, "heads rows d_head"], rotary: RotaryGeometry | None
) -> tuple[Complex128[Tensor, "heads pairs rows"], Float64[Tensor, "heads rows columns"]]:
    """Return a factor in two tensors: complex rotary pairs [heads, pairs, rows], and the columns that do not rotate
    [heads, rows, columns].

    `factor` is W_Q or W_K [heads, rows, d_head]. Without `rotary`, the first tensor has no pairs.
    """
    if rotary is None:
        return torch.complex(factor, factor).mT[:, :0], factor
    pairs = torch.complex(factor[..., rotary.real_index], factor[..., rotary.imag_index]).mT
    return pairs, factor[..., rotary.still_columns]


def per_pair(table: Float[Tensor, "*batch pos columns"], geometry: RotaryGeometry) -> Float[Tensor, "*batch pos pairs"]:
    """Return a model's cos or sin table with one column per rotary pair; it may be a view of `table`.

    `geometry` gives the number of pairs. Models store one column per pair, two equal halves, or each column twice in a
    row.
    """
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
    """Return two new tables, a model's cos and sin with `shift` added to the frequencies, with a new axis for the heads
    and in float32 or wider.

    `cos`, `sin`: tables for positions 0, 1, .... `shift`: radians per token, for each head and pair.
    """
    angle = torch.arange(cos.shape[-2], dtype=torch.float64)[:, None] * shift[:, None, :]  # heads pos pairs
    cos, sin = (widened(table)[..., None, :, :] for table in (cos, sin))
    more_cos, more_sin = angle.cos().to(cos), angle.sin().to(cos)
    return times_phase(cos, sin, more_cos, more_sin)


class PhaseNorms(NamedTuple):
    """Frobenius norms of `Re M_t` (`re`) and `Im M_t` (`im`), each [heads, pairs].

    M_t is the complex query-key matrix of rotary pair t.
    """

    re: Float64[Tensor, "heads pairs"]
    im: Float64[Tensor, "heads pairs"]


def phase_norms(
    w_q: Float64[Tensor, "heads d_model d_head"],
    w_k: Float64[Tensor, "heads d_model d_head"],
    geometry: RotaryGeometry,
) -> PhaseNorms:
    """Return `PhaseNorms` (`.re`, `.im`, each [heads, pairs]): Frobenius norms of the real and the imaginary part of
    every M_t, the complex query-key matrix of rotary pair t.

    `w_q`, `w_k`: weights of the heads. `geometry`: columns of the pairs. See "Fingerprint, Not Blueprint", section 7.
    Only inner products of columns are needed. With a, c the real and imaginary columns of W_Q and b, d of W_K: `Re M_t
    = a b^T + c d^T` and `Im M_t = c b^T - a d^T`. A vanishing part has rounding of about 1e-8 of `||M_t||`.
    `attention_scaling` is left out, as it multiplies every M_t alike. For a layer with learned rotations `w_q` must
    already contain gain and phase (`with_gain_and_phase`), because they mix real and imaginary parts.
    """
    re, im = phase_squares(w_q, w_k, geometry)
    return PhaseNorms(re.clamp_min(0).sqrt(), im.clamp_min(0).sqrt())


def phase_squares(
    w_q: Float[Tensor, "heads d_model d_head"],
    w_k: Float[Tensor, "heads d_model d_head"],
    geometry: RotaryGeometry,
) -> tuple[Float[Tensor, "heads pairs"], Float[Tensor, "heads pairs"]]:
    """Return the squared norms of `Re M_t` and `Im M_t` as two tensors [heads, pairs], with gradients.

    `w_q`, `w_k`: weights of the heads. `geometry`: columns of the pairs. M_t is the complex query-key matrix of rotary
    pair t. The square of a vanishing part is rounding, which can be negative.
    """
    aa, cc, ac = _pair_products(w_q, geometry)
    bb, dd, bd = _pair_products(w_k, geometry)
    return aa * bb + cc * dd + 2 * ac * bd, cc * bb + aa * dd - 2 * ac * bd


def _pair_products(
    w: Float[Tensor, "heads d_model d_head"], geometry: RotaryGeometry
) -> tuple[Float[Tensor, "heads pairs"], ...]:
    """Return three tensors [heads, pairs] of inner products of each pair's columns: real.real, imag.imag, real.imag.

    `w`: W_Q or W_K of the heads. `geometry`: which columns are the real and imaginary coordinates of each pair. One
    head is computed at a time, to save memory.
    """
    products = []
    for head in w:
        real, imag = head[:, geometry.real_index], head[:, geometry.imag_index]
        products.append(torch.stack([(real * real).sum(0), (imag * imag).sum(0), (real * imag).sum(0)]))
    return tuple(torch.stack(products, dim=1))


class PhaseMetrics(NamedTuple):
    """Three numbers per head about Im(M_t), the directional part of its rotary pairs; `phase_metrics` returns it.

    rope_imag_frac: share of Im(M_t) in all rotary pairs, 0 to 1. freq_centroid: mean frequency of Im(M_t), radians per
    token. hi_freq_dir: share of Im(M_t) in the first half of the pairs, 0 to 1.
    """

    rope_imag_frac: Float64[Tensor, "heads"]
    freq_centroid: Float64[Tensor, "heads"]
    hi_freq_dir: Float64[Tensor, "heads"]


def phase_metrics(norms: PhaseNorms, geometry: RotaryGeometry) -> PhaseMetrics:
    """Return `PhaseMetrics`, three tensors [heads] about the rotary phase of each head ("Fingerprint, Not Blueprint",
    section 7).

    `norms`: Frobenius norms of Re M_t and Im M_t. `geometry`: frequencies of the pairs. M_t is the complex query-key
    matrix of rotary pair t, theta_t its frequency.

    * `rope_imag_frac` = sum ||Im M_t|| / sum (||Re M_t|| + ||Im M_t||), norms not squared, in [0, 1].
    * `freq_centroid` = sum theta_t ||Im M_t|| / sum ||Im M_t||, radians per token.
    * `hi_freq_dir` = share of sum ||Im M_t|| in the first n_pairs // 2 pairs. Pairs of a layer with learned rotations
      keep their order, whatever their learned frequencies are.

    NaN where a denominator is zero. Not established: that a head uses its phase; an ablation can show this.
    """
    im_total = norms.im.sum(1)
    total = im_total + norms.re.sum(1)
    nan = torch.tensor(float("nan"), dtype=torch.float64)
    share = torch.where(total > 0, im_total / total, nan)
    centroid = torch.where(im_total > 0, (norms.im * geometry.theta).sum(1) / im_total, nan)
    high = torch.where(im_total > 0, norms.im[:, : geometry.n_pairs // 2].sum(1) / im_total, nan)
    return PhaseMetrics(share, centroid, high)
