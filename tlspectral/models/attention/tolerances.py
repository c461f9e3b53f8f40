"""How much two computations of one quantity may differ by rounding, and errors if they differ by more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.models.hooking.deferred_checks import judged
from tlspectral.models.hooking.exclusive import naming_open_contexts
from tlspectral.tables.printed import short_number

Quantity = Literal[
    "scores", "pattern", "term sum", "rotation", "live scores", "live reads", "live pattern", "live z", "stream",
    "same run",
]  # fmt: skip


@dataclass(frozen=True)
class Noise:
    """The largest difference that rounding explains: absolute + relative * size.

    wide: (absolute, relative) for float32 and wider.
    half: (absolute, relative) for 16-bit types.
    in_eps: the numbers in `half` are multiples of the type's resolution (eps).
    """

    wide: tuple[float, float]
    half: tuple[float, float]
    in_eps: bool = False


NOISE: dict[Quantity, Noise] = {
    # For rebuilt scores; size is the largest score. Measured on 17 architectures in float32: 1.2e-5 at scores of 12. A
    # wrong scale, pairing or norm is off by tenths. 16-bit storage rounds the scores themselves.
    "scores": Noise((1e-5, 1e-5), (0.0, 4.0), in_eps=True),
    # For the softmax of rebuilt scores; size is the largest score. Measured: 7e-7 in float32. A pattern lies in [0, 1]
    # and shows less of 16-bit rounding (0.008 in bfloat16). With more allowed it would hide a scale wrong by half.
    "pattern": Noise((1e-5, 0.0), (0.0, 1.0), in_eps=True),
    # For the sum of a score's terms; size is the score, in 16 bits the largest. Measured: at most 1.6e-2 of what is
    # allowed over the zoo in float32 and 3.4e-2 in SmolLM2-135M; in 16 bits 0.41 over six tiny models and 0.18 in
    # SmolLM2, as scores, queries, keys and the stream at each addition are rounded. A norm or a source that is left out
    # is off by tenths.
    "term sum": Noise((1e-4, 1e-5), (0.0, 4.0), in_eps=True),
    # For cos and sin beside the tables of the frequencies. Measured: 2e-6 over 24 positions in float32, 4e-3 in
    # bfloat16, which some models use whatever they are stored in. Another base is off by tenths.
    "rotation": Noise((1e-2, 0.0), (1e-2, 0.0)),
    # For a run's own scores beside the scores of its queries and keys, by head; size is the largest score. Measured:
    # 3e-7 in float32, 0.009 in bfloat16. Another pairing, other angles or an edit of queries or keys moves scores by
    # tenths.
    "live scores": Noise((1e-4, 1e-4), (0.1, 0.1)),
    # For queries, keys or values beside what is read from the stream, by head; size is the largest. Measured over the
    # zoo: 5e-7 in float32, 0.006 in bfloat16. An edit of the attention's input moves them by tenths.
    "live reads": Noise((1e-7, 1e-4), (1e-4, 0.1)),
    # For a pattern beside the pattern of a run's own queries and keys. Measured: 7e-7 in float32, 0.014 in bfloat16. A
    # part that another block removed moves a pattern by tenths.
    "live pattern": Noise((1e-4, 0.0), (0.1, 0.0)),
    # For the z of each token beside pattern times values; size is its norm. Measured: 4e-7 in float32, 0.011 in
    # bfloat16. Padding that a layer does not show, a cache or an edit of z moves some token by tenths.
    "live z": Noise((0.0, 1e-3), (0.0, 0.1)),
    # For a residual stream, or what attention adds to it, beside the sum of its parts; size is the largest value.
    # Measured over the zoo: 5e-7 in float32, 0.005 in bfloat16, rounded at each addition. A norm behind that is left
    # out, a multiplier or a bias that is not read is off by hundredths.
    "stream": Noise((0.0, 1e-4), (0.0, 0.1)),
    # For two runs that compute the same from the same activations; size is the largest value. Measured on five models:
    # 0 in float32 and bfloat16. What is fed to a norm of one layer, times 1.1, moves logits by 1e-5.
    "same run": Noise((0.0, 2e-6), (0.0, 1.0), in_eps=True),
}


LOOK_FOR_HOOKS = "look for hooks that edit queries, keys, scores or the pattern, or run verify_scores"
"""Advice in errors where a run's attention does not follow from its own queries and keys."""


def noise_of(what: Quantity, stored: torch.dtype) -> tuple[float, float]:
    """Return (absolute, relative): the largest allowed difference of a quantity is absolute + relative * size.

    what: the quantity, a key of `NOISE` such as "scores" or "stream". stored: type in which the model stores it.
    """
    noise, eps = NOISE[what], torch.finfo(stored).eps
    if eps < 1e-4:
        return noise.wide
    absolute, relative = noise.half
    return (absolute * eps, relative * eps) if noise.in_eps else noise.half


def require_close(
    difference: Float[Tensor, "*shape"],
    size: Float[Tensor, "*shape"],
    stored: torch.dtype,
    what: Quantity,
    where: str | Sequence[str],
    advice: str,
    error: Callable[[str], Exception],
) -> None:
    """Raise `error` if two computations of a quantity differ by more than rounding explains.

    difference: absolute differences between the computations; each is judged separately.
    size: size of each value; the allowed difference grows with it (`NOISE`).
    stored: type in which the model stores the quantity. what: the quantity, a key of `NOISE`.
    where: beginning of the message (one for all, or one per difference). advice: end of the message.
    error: class of the exception.

    In a hook of a pass inside `checked_at_end` the check waits until the pass ends.
    """
    judge = partial(nearest_bound, stored=stored, what=what, where=where, advice=advice, error=error)
    judged((difference, size), judge)


def nearest_bound(
    difference: Float[Tensor, "*shape"],
    size: Float[Tensor, "*shape"],
    stored: torch.dtype,
    what: Quantity,
    where: str | Sequence[str],
    advice: str,
    error: Callable[[str], Exception],
) -> tuple[float, float]:
    """Return (the difference nearest to its bound, that bound).

    Raises `error` if a difference exceeds its bound or is NaN.

    difference: absolute differences between two computations; each is judged separately.
    size: size of each value, as `NOISE` defines it for the quantity.
    stored: type in which the model stores the quantity. what: the quantity, a key of `NOISE`.
    where: beginning of the message, which says what differs (one for all, or one per difference).
    advice: end of the message; the names of open `ablate` blocks follow it.
    error: class of the exception.
    """
    absolute, relative = noise_of(what, stored)
    difference, size = (tensor.detach().cpu().double() for tensor in (difference, size))
    excess = (difference - absolute - relative * size).nan_to_num(torch.inf, torch.inf, -torch.inf).flatten()
    index = int(excess.argmax())
    largest_difference, of_size = float(difference.flatten()[index]), float(size.flatten()[index])
    allowed = absolute + relative * of_size
    if not largest_difference <= allowed:
        compared = where if isinstance(where, str) else where[index]
        raise error(
            f"{compared} by {largest_difference:.2e} (allowed {allowed:.2e}, largest {short_number(of_size)}); "
            f"{advice}{naming_open_contexts()}"
        )
    return largest_difference, allowed
