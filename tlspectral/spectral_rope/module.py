"""`SpectralRoPE`: learnable frequency, amplitude and phase as an additional rotation beside the model's own.

"Bifocal Attention" (BA, section 3.1, eq. 2) rotates each complex pair of a query or key at position m by `f(x, m) = A
(x exp(i (m Omega + Phi)))`. Rotations compose. A model that already rotates its pairs by `m theta` therefore needs only
the residual, `A exp(i (m (Omega - theta) + Phi))`, before or after its own rotation. At `Omega = theta, Phi = 0, A = 1`
this is a multiplication by 1, and the output is unchanged bit by bit.
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
from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings, whole_number
from tlspectral.selection.heads_as_written import from_end, which_exist

Scope = Literal["model", "layer", "group", "head"]
"""Heads that share spectral parameters: all of the model, of a layer, of a group that shares keys, or none."""
Side = Literal["query", "key"]


@checked_settings
class SpectralRoPE(nn.Module):
    """Learnable rotation of the queries and keys of one attention layer, on top of the model's own RoPE.

    It is the module of "Bifocal Attention" (BA); `tls.to_spectral` makes one per layer. Call it with queries or keys.

    >>> import torch
    >>> from tlspectral.spectral_rope import SpectralRoPE
    >>> columns = {"real_index": torch.tensor([0, 1]), "imag_index": torch.tensor([2, 3])}
    >>> rope = SpectralRoPE(torch.tensor([1.0, 0.1]), 2, 1, **columns)
    >>> queries = torch.randn(1, 5, 2, 4)
    >>> rope(queries, torch.arange(5), "query").equal(queries)
    True

    Parameters, each [rows, pairs]: `omega`, the frequencies in radians per token, starting at `theta`; `phase`,
    radians, starting at 0; `gain`, a factor, starting at 1. Phase and gain act on queries only.

    Args:
        theta: the model's inverse frequencies [pairs], radians per token; also precision and device of the parameters.
        n_heads, n_kv_heads: query heads, and key/value heads that they share in groups.
        real_index, imag_index: columns of a head with the two coordinates of each pair.
        scope: rows of the parameters: "model" and "layer" one, "group" one per key/value head. "head" (default):
            `omega` one per key/value head, `phase` and `gain` one per query head.
        log_omega: True learns `log_omega_shift`, with `omega = theta exp(shift)`; steps are relative. Default: False.
        shared_phase: True lets the phase act on queries and keys, which cancels in every score. Default: False.
        phase_noise: standard deviation of the phase at the start, radians. Default: 0; BA has 1e-3. seed: of the noise.
        heads: query heads that learn, in whole groups. Default: all.
        frequencies: pairs that learn, by index or as a boolean mask. Default: all.

    Raises:
        ValueError: sizes that do not fit together, heads or pairs that do not exist, part of a group, or a noise or
            seed that is not a finite number.

    Not established: that a learned frequency is needed. At integer positions omega and omega + 2 pi act alike, and its
    gradient grows with the distance of the tokens, so compare a change with a control. More: docs/training.md.
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
        _require_tensors(theta=theta, real_index=real_index, imag_index=imag_index)
        _check_shape(len(theta), n_heads, n_kv_heads, scope, phase_noise)
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.scope, self.log_omega, self.shared_phase = scope, log_omega, shared_phase
        chosen, by_group = _chosen_heads(heads, n_heads, n_kv_heads)
        pairs = torch.ones(len(theta), dtype=torch.bool) if frequencies is None else pair_mask(frequencies, len(theta))
        if not pairs.any():
            raise ValueError("no frequency is chosen: give at least one, or leave frequencies= out for all")
        self.adjacent = _adjacent(real_index, imag_index)
        self.everywhere = bool(chosen.all() and pairs.all())
        start = theta.detach().clone()
        # Constants of the rotated model. `_compared` puts some of them into the state dict, for a check when loading.
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
        """Return the constants that must agree when a state dict is loaded: theta, query_mask, shared_phase and tied.

        A dict from these names to a tuple: the constant as a tensor, and what a message says if a saved constant
        differs.
        """
        return {
            "theta": (self.theta, "other inverse frequencies (another rotary base or scaling)"),
            "query_mask": (self.query_mask, "other heads= or frequencies="),
            "shared_phase": (torch.tensor(self.shared_phase), "another shared_phase="),
            "tied": (torch.tensor(self.scope == "model"), "another scope="),
        }

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Add parameters and the constants of `_compared` to the dict `destination`, in place, under names that begin
        with `prefix`. torch calls this method. `keep_vars`: True keeps the parameters' gradient graph, False detaches
        them.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: value for name, (value, _) in self._compared().items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load this module's parameters from `state_dict`, where their names begin with `prefix`; torch calls this
        method.

        Each constant of `_compared` that differs adds a message to `error_msgs`, each missing one its name to
        `missing_keys`. Other arguments are passed to torch's method. `state_dict` is not changed.
        """
        learned = dict(state_dict)
        for name, (own, difference) in self._compared().items():
            stored = learned.pop(prefix + name, None)
            if stored is None:
                missing_keys.append(prefix + name)
            elif not _same(stored, own):
                error_msgs.append(f"{prefix}{name}: {difference} in the model that was saved")
        super()._load_from_state_dict(
            learned, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def forward(
        self,
        x: Float[Tensor, "batch pos heads d_head"],
        positions: Int64[Tensor, "#batch pos"] | Int64[Tensor, "pos"],
        side: Side,
    ) -> Float[Tensor, "batch pos heads d_head"]:
        """Return a new tensor, queries or keys with the learned rotation applied, in shape and dtype of `x`; unrotated
        columns stay.

        Args:
            x: queries, one per query head; or keys, one per key/value head or repeated to one per query head.
            positions: of the tokens. Only differences matter, so they may start at any number.
            side: "query" or "key", the kind of `x`. Only queries get the gain.

        Raises ValueError for another number of heads than the layer has.
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
            partner = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
            cos, sin = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
        else:
            real, imag = turning.chunk(2, -1)
            partner = torch.cat([imag, real], -1)
            cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        rotated = turning * cos + partner * sin
        return (torch.cat([rotated, still], -1) if still.shape[-1] else rotated).to(x.dtype)

    def shift_by_head(self) -> Float64[Tensor, "heads pairs"]:
        """Return the change of each frequency from its start, in radians per token, for each query head."""
        return self._shift(self.query_mask).expand_as(self.query_mask).detach().cpu().double()

    def omega_by_head(self) -> Float64[Tensor, "heads pairs"]:
        """Return the present frequencies, in radians per token, for each query head; equal to `theta` at the start."""
        return self.theta.cpu().double() + self.shift_by_head()

    def phase_by_head(self, *, live: bool = False) -> Float64[Tensor, "heads pairs"]:
        """Return the phase added to the angle between query and key, in radians, for each query head.

        It is 0 with `shared_phase`. `live`: True keeps the gradient to the parameter; False returns a copy without it.
        """
        if self.shared_phase:
            return torch.zeros(self.n_heads, len(self.theta), dtype=torch.float64)
        phase = self._chosen(self.phase, self.query_mask, 0.0).expand_as(self.query_mask)
        return (phase if live else phase.detach()).cpu().double()

    def gain_by_head(self, *, live: bool = False) -> Float64[Tensor, "heads pairs"]:
        """Return the factor on each rotary pair of the queries, for each query head. `live`: True keeps the gradient to
        the parameter; False returns a copy without it.
        """
        gain = self._chosen(self.gain, self.query_mask, 1.0).expand_as(self.query_mask)
        return (gain if live else gain.detach()).cpu().double()

    def _shift(self, mask: Bool[Tensor, "heads pairs"]) -> Float[Tensor, "#heads pairs"]:
        """Return the change of each frequency from its start, in radians per token; 0 where `mask` is False.

        `mask`: True for pairs that learn, a row per query head or per key/value head.
        """
        # In 16 bits the angle at position 1000 would be wrong by radians.
        theta = widened(self.theta)
        shift = theta * widened(self.log_omega_shift).expm1() if self.log_omega else widened(self.omega) - theta
        return self._chosen(shift, mask, 0.0)

    def _chosen(
        self, rows: Float[Tensor, "rows pairs"], mask: Bool[Tensor, "heads pairs"], start: float
    ) -> Float[Tensor, "#heads pairs"]:
        """Return parameter rows repeated for the heads that share them, with the value `start` where `mask` is False.

        `rows`: the parameter, with a row per group of heads that share it, or a single row for all. `mask`: True for
        pairs that learn, a row per head.
        """
        if len(rows) > 1:
            rows = rows.repeat_interleave(len(mask) // len(rows), dim=0)
        return rows if self.everywhere else torch.where(mask, rows, start)

    def _mask_for(self, heads: int, side: Side) -> Bool[Tensor, "heads pairs"]:
        """Return a boolean tensor, True for pairs that learn, for queries or keys with `heads` heads.

        `side`: "query" or "key". Raises ValueError if the layer does not have so many heads.
        """
        if heads == self.n_heads:
            return self.query_mask
        if side == "key" and heads == self.n_kv_heads:
            return self.key_mask
        allowed = self.n_heads if side == "query" else f"{self.n_kv_heads} or {self.n_heads}"
        raise ValueError(
            f"x= is a {side} tensor of {heads} heads; this module rotates {allowed} heads: give all heads of the layer"
        )


def _same(stored: Tensor, own: Tensor) -> bool:
    """Return True if two tensors have the same shape and values; floats may differ by rounding of their precision."""
    if stored.shape != own.shape or stored.dtype.is_floating_point != own.dtype.is_floating_point:
        return False
    if not own.dtype.is_floating_point:
        return bool((stored.to(own.device) == own).all())
    # Two backends read the same frequencies 1e-7 apart; another base or scaling is off by hundredths and more.
    coarse = max(torch.finfo(value.dtype).eps for value in (stored, own))
    return torch.allclose(stored.cpu().double(), own.cpu().double(), rtol=max(1e-4, 2 * coarse), atol=1e-12)


def checked_seed(seed: Any) -> int:
    """Return the seed as an integer. Raises ValueError if it is not a whole number."""
    number = whole_number(seed)
    if number is None:
        raise ValueError(f"seed= must be a whole number, found {shown(seed)}")
    return number


def _adjacent(real_index: Int64[Tensor, "pairs"], imag_index: Int64[Tensor, "pairs"]) -> bool:
    """Return True if rotary pair t has the adjacent columns (2 t, 2 t + 1), False if it has the columns (t, t + pairs).
    `real_index`, `imag_index`: columns of the real and imaginary coordinates.

    Raises ValueError for other pairs.
    """
    pairs = real_index.tolist(), imag_index.tolist()
    for adjacent in (False, True):
        if pairs == tuple(columns.tolist() for columns in pair_columns(2 * len(real_index), adjacent=adjacent)):
            return adjacent
    raise ValueError(
        "real_index= and imag_index= must be the columns (t, t + pairs) or (2 t, 2 t + 1) for t = 0, 1, ...; found "
        f"{pairs[0][:8]} and {pairs[1][:8]}"
    )


def _require_tensors(**columns: Tensor) -> None:
    """Raise TypeError unless the arguments are tensors with one axis: `theta` of real numbers, the rest whole."""
    for name, values in columns.items():
        real = name == "theta"
        if not isinstance(values, Tensor) or values.ndim != 1 or values.is_floating_point() is not real:
            kind = "real" if real else "whole"
            raise TypeError(f"{name} must be a tensor of {kind} numbers of shape [pairs]; found {shown(values)}")


def _check_shape(pairs: int, n_heads: int, n_kv_heads: int, scope: Scope, phase_noise: float) -> None:
    """Raise ValueError for an unknown `scope`, no rotary `pairs`, query heads that do not divide by key/value heads, or
    a `phase_noise` (radians) that is negative or not finite.
    """
    if scope not in get_args(Scope):
        raise ValueError(f"scope must be one of {', '.join(map(repr, get_args(Scope)))}; not {shown(scope)}")
    if not pairs:
        raise ValueError("theta= is empty, so there are no rotary pairs: give one frequency per pair")
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(
            f"{n_heads} query heads cannot share {n_kv_heads} key/value heads evenly: n_heads must be a multiple of "
            "n_kv_heads"
        )
    if not isinstance(phase_noise, Real) or isinstance(phase_noise, bool) or not 0 <= phase_noise < math.inf:
        raise ValueError(
            f"phase_noise= must be a standard deviation in radians, finite and from 0 up; found {shown(phase_noise)}"
        )


def _chosen_heads(
    heads: Iterable[int] | None, n_heads: int, n_kv_heads: int
) -> tuple[Bool[Tensor, "heads"], Bool[Tensor, "kv_heads"]]:
    """Return two boolean masks: query heads that learn, and key/value heads that learn.

    `heads`: indices of query heads that learn; None for all. `n_heads`, `n_kv_heads`: numbers of query and of key/value
    heads. Raises ValueError for heads that do not exist, for some but not all query heads that share a key/value head,
    and for no head.
    """
    if heads is None:
        return torch.ones(n_heads, dtype=torch.bool), torch.ones(n_kv_heads, dtype=torch.bool)
    chosen = torch.zeros(n_heads, dtype=torch.bool)
    for entry in heads:
        head = whole_number(entry)
        if head is None:
            raise ValueError(f"heads= takes indices of query heads, whole numbers; found {shown(entry)}")
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
            f"heads {list(members)} share key/value head {torn[0]}, so their omega must be equal, but only {inside} "
            "are chosen: choose all heads of a group or none"
        )
    if not chosen.any():
        raise ValueError("no head is chosen: give at least one, or leave heads= out for all")
    return chosen, groups.all(1)
