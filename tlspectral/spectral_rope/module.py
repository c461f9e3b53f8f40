"""`SpectralRoPE`: rotary positions with learnable frequency, amplitude and phase, as a rotation beside the model's own.

"Bifocal Attention" (BA, section 3.1, eq. 2) rotates each complex pair of a query or key at position m by
`f(x, m) = A (x exp(i (m Omega + Phi)))`. Rotations compose, so a model that already rotates its pairs by `m theta`
needs only the residual, `A exp(i (m (Omega - theta) + Phi))`, before or after its own rotation. At
`Omega = theta, Phi = 0, A = 1` that is a multiplication by 1, and the model's output is unchanged to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn

from tlspectral.algebra.rotary import pair_columns, pair_mask, widened
from tlspectral.selection import from_end, which_exist, whole_number

Scope = Literal["model", "layer", "group", "head"]
"""Who has spectral parameters in common: the whole model, a layer, the heads of a group, or nobody."""
Side = Literal["query", "key"]


class SpectralRoPE(nn.Module):
    """The residual rotation of one attention layer, with its learnable parameters.

    Parameters: `omega` [key rows, pairs], radians per token, starting at `theta`; `phase` [query rows, pairs], radians,
    starting at 0; `gain` [query rows, pairs], a factor, starting at 1. Phase and gain act on the query alone: a
    score depends only on the difference of two phases, and a gain on both sides would act as its square.

    W_Q can take up gain and phase (`merge`), per head the factor `gain exp(i phase)` of M_t: they add functions only
    where W_Q is frozen. `omega` always does. None of the three breaks translation invariance.

    Args:
        theta: the model's own inverse frequencies, radians per token. The parameters take their precision and device.
        n_heads, n_kv_heads: query heads, and key/value heads that they share in groups.
        real_index, imag_index: columns of a head that hold each pair's two coordinates.
        scope: how many rows the parameters have. `"model"` and `"layer"`: one (`"model"` means that several layers are
            given the same parameters). `"group"`: one per key/value head. `"head"`: `omega`, on which a query and its
            key have to agree, one per key/value head; `phase` and `gain` one per query head.
        log_omega: the parameter is `log_omega_shift` instead, with `omega = theta exp(shift)`: a step is then relative,
            and a frequency keeps its sign, or stays 0.
        shared_phase: phase on queries and keys alike, a row per key at most. It cancels in every score: the no-op that
            BA's replacement of the module implies (section 3.2), for comparison. Its gradient is rounding,
            which Adam scales up, so a phase that has moved is no evidence of learning.
        phase_noise: standard deviation of the phase at the start, radians. BA has 1e-3. Phases get a gradient at
            exactly 0 too, so noise is not needed. It changes the scores at the start: 1e-3 moved unit Gaussian scores
            by 1.3e-3 of their RMS (0.0085 at most), 0.032 (if BA's number is a variance) by 0.04.
        heads: query heads that are spectral, None for all; the others keep the model's own rotation whatever their
            parameters are. Groups must be whole, as keys are shared.
        frequencies: pairs that are spectral, likewise: indices or a boolean mask.
        seed: of the noise.

    Raises:
        ValueError: sizes that do not fit together, heads or pairs that do not exist, part of a group, or a noise or
            seed that is no finite number.

    What it does not establish: that a learned frequency is needed. Omega is aliased modulo 2 pi at integer positions,
    and its gradient grows with the distance of the tokens, so a shift must be compared with a control.
    """

    theta: Tensor
    real_index: Tensor
    imag_index: Tensor
    query_mask: Tensor
    key_mask: Tensor
    omega: Tensor
    log_omega_shift: nn.Parameter
    phase: nn.Parameter
    gain: nn.Parameter

    def __init__(
        self,
        theta: Float[Tensor, "pairs"],
        n_heads: int,
        n_kv_heads: int,
        *,
        real_index: Int64[Tensor, "pairs"],
        imag_index: Int64[Tensor, "pairs"],
        scope: Scope = "head",
        log_omega: bool = False,
        shared_phase: bool = False,
        phase_noise: float = 0.0,
        heads: Iterable[int] | None = None,
        frequencies: Iterable[Any] | Tensor | None = None,
        seed: int = 0,
    ):
        super().__init__()
        _check_shape(len(theta), n_heads, n_kv_heads, scope, phase_noise)
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.scope, self.log_omega, self.shared_phase = scope, log_omega, shared_phase
        chosen, by_group = _chosen_heads(heads, n_heads, n_kv_heads)
        pairs = torch.ones(len(theta), dtype=torch.bool) if frequencies is None else pair_mask(frequencies, len(theta))
        if not pairs.any():
            raise ValueError("no frequency is chosen: leave frequencies=None for all")
        self.adjacent = _adjacent(real_index, imag_index)
        self.everywhere = bool(chosen.all() and pairs.all())
        start = theta.detach().clone()
        # All of them belong to the model that is rotated, and none is learned: a state dict has some to compare.
        for name, value in {
            "theta": start,
            "real_index": real_index,
            "imag_index": imag_index,
            "query_mask": chosen[:, None] & pairs,
            "key_mask": by_group[:, None] & pairs,
        }.items():
            self.register_buffer(name, value.to(theta.device), persistent=False)
        key_rows = {"model": 1, "layer": 1}.get(scope, n_kv_heads)
        query_rows = n_heads if scope == "head" else key_rows
        phase_rows = key_rows if shared_phase else query_rows
        if log_omega:
            self.log_omega_shift = nn.Parameter(start.new_zeros(key_rows, len(theta)))
        else:
            self.register_parameter("omega", nn.Parameter(start.repeat(key_rows, 1)))
        noise = torch.randn(phase_rows, len(theta), generator=torch.Generator().manual_seed(checked_seed(seed)))
        self.phase = nn.Parameter((phase_noise * noise).to(start))
        self.gain = nn.Parameter(start.new_ones(query_rows, len(theta)))

    def __getattr__(self, name: str) -> Any:
        if name == "omega" and "log_omega_shift" in self._parameters:
            return self.theta * self.log_omega_shift.exp()
        return super().__getattr__(name)

    def _compared(self) -> dict[str, tuple[Tensor, str]]:
        """Return what a state dict holds beside the parameters, by name, with the words for another value."""
        return {
            "theta": (self.theta, "other inverse frequencies, by another rotary base or scaling,"),
            "query_mask": (self.query_mask, "other heads= or frequencies="),
            "shared_phase": (torch.tensor(self.shared_phase), "another shared_phase="),
            "tied": (torch.tensor(self.scope == "model"), "another scope="),
        }

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: value for name, (value, _) in self._compared().items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        learned = dict(state_dict)
        for name, (own, what) in self._compared().items():
            stored = learned.pop(prefix + name, None)
            if stored is None:
                missing_keys.append(prefix + name)
            elif not _same(stored, own):
                error_msgs.append(f"{prefix}{name}: {what} in the model that was saved")
        super()._load_from_state_dict(
            learned, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def forward(
        self,
        x: Float[Tensor, "batch pos heads d_head"],
        positions: Int64[Tensor, "#batch pos"] | Int64[Tensor, "pos"],
        side: Side,
    ) -> Float[Tensor, "batch pos heads d_head"]:
        """Return queries or keys with the residual rotation on them; columns in no pair are left as they are.

        Args:
            x: queries, one per query head; or keys, one per key/value head or repeated to one per query head.
            positions: of the tokens. Only differences matter, so any start is right.
            side: which of the two `x` is.
        """
        mask = self._mask_for(x.shape[2], side)
        angle = positions[..., None, None] * self._shift(mask)  # (batch) pos heads pairs
        if side == "query" or self.shared_phase:
            angle = angle + self._chosen(self.phase, mask, 0.0)
        cos, sin = angle.cos(), angle.sin()
        if side == "query":
            gain = self._chosen(self.gain, mask, 1.0)
            cos, sin = gain * cos, gain * sin
        wide = widened(x)  # as models do: 16 bits are too coarse for a rotation
        cos, sin = cos.to(wide), sin.to(wide)
        turning, still = wide[..., : 2 * len(self.theta)], wide[..., 2 * len(self.theta) :]
        if self.adjacent:
            other = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
            cos, sin = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
        else:
            real, imag = turning.chunk(2, -1)
            other = torch.cat([imag, real], -1)
            cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        rotated = turning * cos + other * sin
        return (torch.cat([rotated, still], -1) if still.shape[-1] else rotated).to(x.dtype)

    def shift_by_head(self) -> Float64[Tensor, "heads pairs"]:
        """Return the shift of the model's own frequencies by the residual, radians per token, by query head."""
        return self._shift(self.query_mask).expand_as(self.query_mask).detach().cpu().double()

    def omega_by_head(self) -> Float64[Tensor, "heads pairs"]:
        """Return frequencies as they act, radians per token, by query head: `theta` exactly where nothing has moved."""
        return self.theta.cpu().double() + self.shift_by_head()

    def phase_by_head(self, *, live: bool = False) -> Float64[Tensor, "heads pairs"]:
        """Return phases of query against key, radians, by query head: 0 under `shared_phase`. `live`: with gradient."""
        if self.shared_phase:
            return torch.zeros(self.n_heads, len(self.theta), dtype=torch.float64)
        phase = self._chosen(self.phase, self.query_mask, 0.0).expand_as(self.query_mask)
        return (phase if live else phase.detach()).cpu().double()

    def gain_by_head(self, *, live: bool = False) -> Float64[Tensor, "heads pairs"]:
        """Return the amplitude on the query, by query head. `live`: with gradient."""
        gain = self._chosen(self.gain, self.query_mask, 1.0).expand_as(self.query_mask)
        return (gain if live else gain.detach()).cpu().double()

    def _shift(self, mask: Bool[Tensor, "heads pairs"]) -> Float[Tensor, "#heads pairs"]:
        # In 16 bits the angle at position 1000 would be off by radians.
        theta = widened(self.theta)
        shift = theta * widened(self.log_omega_shift).expm1() if self.log_omega else widened(self.omega) - theta
        return self._chosen(shift, mask, 0.0)

    def _chosen(
        self, rows: Float[Tensor, "rows pairs"], mask: Bool[Tensor, "heads pairs"], start: float
    ) -> Float[Tensor, "#heads pairs"]:
        """Repeat each row for the heads that share it, with `start` where a head or pair is not spectral."""
        if len(rows) > 1:
            rows = rows.repeat_interleave(len(mask) // len(rows), dim=0)
        return rows if self.everywhere else torch.where(mask, rows, start)

    def _mask_for(self, heads: int, side: Side) -> Bool[Tensor, "heads pairs"]:
        if heads == self.n_heads:
            return self.query_mask
        if side == "key" and heads == self.n_kv_heads:
            return self.key_mask
        allowed = self.n_heads if side == "query" else f"{self.n_kv_heads} or {self.n_heads}"
        raise ValueError(f"{side} tensor of {heads} heads; this module rotates {allowed}")


def _same(stored: Tensor, own: Tensor) -> bool:
    if stored.shape != own.shape or stored.dtype.is_floating_point != own.dtype.is_floating_point:
        return False
    if not own.dtype.is_floating_point:
        return bool((stored.to(own.device) == own).all())
    # Two backends read the same frequencies 1e-7 apart; another base or scaling is off by hundredths and more.
    coarse = max(torch.finfo(value.dtype).eps for value in (stored, own))
    return torch.allclose(stored.cpu().double(), own.cpu().double(), rtol=max(1e-4, 2 * coarse), atol=1e-12)


def checked_seed(seed: Any) -> int:
    """Return a seed as an integer. Raises ValueError for what is no whole number."""
    number = whole_number(seed)
    if number is None:
        raise ValueError(f"seed is a whole number, found {seed!r}")
    return number


def _adjacent(real_index: Int64[Tensor, "pairs"], imag_index: Int64[Tensor, "pairs"]) -> bool:
    given = real_index.tolist(), imag_index.tolist()
    for adjacent in (False, True):
        if given == tuple(columns.tolist() for columns in pair_columns(2 * len(real_index), adjacent=adjacent)):
            return adjacent
    raise ValueError(f"pairs are columns (t, t + pairs) or (2 t, 2 t + 1) of the first ones; found {given}")


def _check_shape(pairs: int, n_heads: int, n_kv_heads: int, scope: Scope, phase_noise: float) -> None:
    if scope not in get_args(Scope):
        raise ValueError(f"scope must be one of {', '.join(map(repr, get_args(Scope)))}; not {scope!r}")
    if not pairs:
        raise ValueError("there are no rotary pairs: theta is empty")
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(f"{n_heads} query heads cannot share {n_kv_heads} key/value heads evenly")
    if not isinstance(phase_noise, Real) or isinstance(phase_noise, bool) or not 0 <= phase_noise < math.inf:
        raise ValueError(
            f"phase_noise is a standard deviation in radians, a finite number from 0 up; found {phase_noise!r}"
        )


def _chosen_heads(
    heads: Iterable[int] | None, n_heads: int, n_kv_heads: int
) -> tuple[Bool[Tensor, "heads"], Bool[Tensor, "kv_heads"]]:
    if heads is None:
        return torch.ones(n_heads, dtype=torch.bool), torch.ones(n_kv_heads, dtype=torch.bool)
    chosen = torch.zeros(n_heads, dtype=torch.bool)
    for given in heads:
        head = whole_number(given)
        if head is None:
            raise ValueError(f"heads are the indices of query heads, whole numbers; found {given!r}")
        index = from_end(head, n_heads)
        if index is None:
            raise ValueError(f"head {head} does not exist: heads are {which_exist(head, n_heads)}")
        chosen[index] = True
    groups = rearrange(chosen, "(kv_head group) -> kv_head group", kv_head=n_kv_heads)
    torn = (groups.any(1) & ~groups.all(1)).nonzero().flatten().tolist()
    if torn:
        group = n_heads // n_kv_heads
        members = range(torn[0] * group, (torn[0] + 1) * group)
        inside = [head for head in members if chosen[head]]
        raise ValueError(
            f"heads {list(members)} share key/value head {torn[0]}, so their omega has to agree, but of them only "
            f"{inside} are chosen: choose all or none of a group"
        )
    if not chosen.any():
        raise ValueError("no head is chosen: leave heads=None for all")
    return chosen, groups.all(1)
