"""A head's preference by distance from its mean query and key alone, and which frequencies it consists of.

With the mean query `q_t` and the mean key `k_t` of rotary pair t as complex numbers, and D tokens from the key to the
query,

    s(D) = Re sum_t q_t conj(k_t) exp(i theta_t D)  +  the product over non-rotary columns,

times the model's scale. Nothing is fitted.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import RotaryGeometry, with_gain_and_phase
from tlspectral.models.attention import softcapped

BANDS = ("high", "middle", "low")


@dataclass(frozen=True)
class Preference:
    """What the mean query and key of some heads of a layer contribute to the mean score, by distance.

    Attributes:
        by_pair: contribution of each rotary pair.
        non_rotary: contribution of the non-rotary columns, equal at every distance.
        theta: radians per token of each pair.
        softcap: of the layer's scores, None without one.
    """

    by_pair: Float64[Tensor, "heads pairs distances"]
    non_rotary: Float64[Tensor, "heads"]
    theta: Float64[Tensor, "heads pairs"]
    softcap: float | None

    @property
    def predicted(self) -> Float64[Tensor, "heads distances"]:
        """The score at each distance, behind the softcap if there is one."""
        return softcapped(self.by_pair.sum(1) + self.non_rotary[:, None], self.softcap)


def preference(
    geometry: RotaryGeometry,
    score_scale: float,
    softcap: float | None,
    query: Float64[Tensor, "heads d_head"],
    key: Float64[Tensor, "heads d_head"],
    distances: Int[Tensor, "distances"],
) -> Preference:
    """Return the preference of some query heads by distance; `geometry` is that of these heads.

    `query`, `key`: means of these heads after bias and query/key norm, before rotation, gain and phase.
    """
    query = with_gain_and_phase(query[:, None], geometry)[:, 0]
    q, k = (torch.complex(x[:, geometry.real_index], x[:, geometry.imag_index]) for x in (query, key))
    theta = geometry.theta.cpu().double().expand(len(query), -1)
    rotations = torch.polar(torch.ones(1, dtype=torch.float64), theta[..., None] * distances)
    scale = score_scale * geometry.attention_scaling**2
    return Preference(
        scale * ((q * k.conj())[..., None] * rotations).real,
        score_scale * (query * key)[:, geometry.still_columns].sum(1),
        theta,
        softcap,
    )


def band_shares(
    by_pair: Float64[np.ndarray, "pairs distances"], theta: Float64[np.ndarray, " pairs"]
) -> tuple[Float64[np.ndarray, " bands"], list[Int[np.ndarray, " chosen"]]]:
    """Return each band's share of the variance of the preference over distances, and the pairs of each band.

    Bands are thirds of the pairs from fast to slow, as in `band_effects`. The share is the covariance of the band's
    contribution with the whole over the variance of the whole: shares sum to 1, and a band that works against the
    others has a negative one. NaN where the whole does not vary.
    """
    bands = [np.sort(third) for third in np.array_split(np.argsort(-np.abs(theta), kind="stable"), len(BANDS))]
    centred = by_pair - by_pair.mean(1, keepdims=True)
    whole = centred.sum(0)
    variance = float(whole @ whole)
    scale = float(np.abs(by_pair).max(initial=0.0))
    if not variance > len(whole) * (1e-12 * scale) ** 2:
        return np.full(len(BANDS), np.nan), bands
    return np.array([float(centred[band].sum(0) @ whole) / variance for band in bands]), bands


def correlation(
    measured: Float64[np.ndarray, " offsets"],
    predicted: Float64[np.ndarray, " offsets"],
    known: Bool[np.ndarray, " offsets"],
) -> float:
    """Return Pearson's r over the known offsets; NaN for fewer than three, or where either does not vary."""
    one, other = measured[known], predicted[known]
    if len(one) < 3 or min(np.ptp(one), np.ptp(other)) <= 1e-9 * max(np.abs(one).max(), np.abs(other).max()):
        return float("nan")
    return float(np.corrcoef(one, other)[0, 1])
