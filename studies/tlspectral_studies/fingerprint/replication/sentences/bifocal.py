"""Sentences of "Bifocal Attention" (BA), by its own equation 2: it published no tables and no weights."""

import math
from collections.abc import Iterator

import numpy as np
import scipy.stats
from jaxtyping import Complex128, Float64

from tlspectral_studies.fingerprint.replication.claims import PublishedTables
from tlspectral_studies.fingerprint.replication.sentences.power import POWER, no_sample
from tlspectral_studies.fingerprint.replication.sentences.sentence import LEVEL, Choice, Power, Reading, Sentence

PAIRS, BASE = 16, 10_000.0
"""Rotary pairs of a head of BA's models (128 wide, 4 heads), and its base of frequencies."""

NOISE, SHIFT = 1e-3, 7.6e-4
"""Standard deviation of BA's initial phases, and the mean shift of phases that it reports, in radians."""

_GAP = 60  # BA's distance in figure 1
_BRIDGE, _STRICTER = 0.99, 0.995  # cos(omega N) that counts as near 1: BA gives no level
_DRAWS = 20_000
_ROUNDING = 1e-9  # relative; scores of unit vectors differ by 1e-13 in float64 at positions of a thousand
_EXACT = Power("exact: equation 2 in float64, no sample")


def spectral_score(
    query: Complex128[np.ndarray, "*b pairs"],
    key: Complex128[np.ndarray, "*b pairs"],
    positions: tuple[int, int],
    gain: Float64[np.ndarray, "pairs"],
    phases: tuple[Float64[np.ndarray, "pairs"], Float64[np.ndarray, "pairs"]],
) -> Float64[np.ndarray, "*b"]:
    """Score of a query and a key at two positions, by BA's equations 1 and 2."""
    (m, n), (of_query, of_key) = positions, phases
    turned = [
        gain * vector * np.exp(1j * (position * frequencies() + phase))
        for vector, position, phase in ((query, m, of_query), (key, n, of_key))
    ]
    return (turned[0] * turned[1].conj()).real.sum(-1)


def frequencies() -> Float64[np.ndarray, "pairs"]:
    """The geometric frequencies that BA starts from."""
    return BASE ** (-np.arange(PAIRS) / PAIRS)


def symmetry_is_broken(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 5.1: the phases broke translational symmetry."""
    rng, query, key = _vectors()
    gain = np.exp(0.1 * rng.standard_normal(PAIRS))
    own, other = (rng.standard_normal(PAIRS) for _ in range(2))
    moved = {
        name: _relative(*(spectral_score(query, key, (90 + by, 30 + by), gain, phases) for by in (0, 1000)))
        for name, phases in (("shared", (own, own)), ("apart", (own, other)))
    }
    worst = max(moved.values())
    yield Sentence(
        "sentence/ba_symmetry",
        "BA, section 5.1",
        "the model spontaneously learned to break translational symmetry",
        "change of scores by equation 2 when query and key both move by 1000 positions, with random gains and phases",
        len(query),
        _EXACT,
        Reading("scores change with phases that queries and keys share", moved["shared"], moved["shared"] > _ROUNDING),
        Reading("they change with phases of queries and keys apart", worst, worst > _ROUNDING, "shared phases"),
        "relative to the root mean square of scores; no per-pair gain or phase can break it",
    )


def identity_at_the_start(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 3.1: identity with the baseline at the start, with noise on the phases."""
    rng, query, key = _vectors()
    none, one = np.zeros(PAIRS), np.ones(PAIRS)
    own, other = (NOISE * rng.standard_normal(PAIRS) for _ in range(2))
    base = spectral_score(query, key, (90, 30), one, (none, none))
    apart, shared = (
        _relative(base, spectral_score(query, key, (90, 30), one, phases)) for phases in ((own, other), (own, own))
    )
    yield Sentence(
        "sentence/ba_identity",
        "BA, sections 3.1 and 5.2",
        "to ensure mathematical identity with the baseline at initialization (Safety Condition)",
        f"change of scores by equation 2 with phases drawn from N(0, {NOISE:g}), gain 1 and the standard frequencies",
        len(query),
        _EXACT,
        Reading("none with phases of queries and keys apart, which can act", apart, apart < _ROUNDING),
        None,
        "relative to the root mean square of scores; without noise the identity is exact",
        choices=(
            Choice(
                "phases",
                "of queries and keys apart",
                Reading("none with phases that both share, which cancel", shared, shared < _ROUNDING),
            ),
        ),
    )


def a_bridge_must_be_learned(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 2.2: standard frequencies are effectively random at a distance, cos(omega N) near 1 has to be learned."""
    angles = _GAP * frequencies()
    turning = angles >= math.pi
    every, fast = float(np.cos(angles).max()), float(np.cos(angles[turning]).max())
    yield Sentence(
        "sentence/ba_bridge",
        "BA, section 2.2",
        "the model needs a specific frequency omega such that cos(omega N) ~ 1; [standard] "
        "rotation becomes effectively random",
        f"largest cos(theta N) over the standard frequencies of a head with {PAIRS} pairs, N = {_GAP}",
        PAIRS,
        _EXACT,
        Reading(f"no standard frequency has it above {_BRIDGE}; the largest", every, every <= _BRIDGE),
        Reading(
            f"none that turns by half a turn or more over N has it above {_BRIDGE}; the largest",
            fast,
            fast <= _BRIDGE,
            "frequencies that hardly turn",
        ),
        f"hangs on the level that counts as near 1, and BA gives none: of {int(turning.sum())} pairs that turn the "
        f"largest has {fast:.3f} and the next {np.sort(np.cos(angles[turning]))[-2]:.3f}, so that at {_STRICTER} the "
        f"sentence holds weakened; {int((~turning).sum())} of {PAIRS} pairs hardly turn over {_GAP} tokens, so theirs "
        f"is near 1 from the start; of the distances from 10 to 2000 tokens {_bridged():.0%} have a pair that turns "
        f"and is above {_BRIDGE}",
        choices=(
            Choice(
                "level",
                f"{_BRIDGE} is near 1",
                Reading(
                    f"none that turns by half a turn or more over N has it above {_STRICTER}; the largest",
                    fast,
                    fast <= _STRICTER,
                ),
            ),
        ),
    )


def attention_is_monotonic(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 5.1: a linear phase forces attention to be monotonic; FP's kernels are of a standard RoPE model."""
    curves = tables.kernels.loc[~tables.kernels["ablated"] & (tables.kernels["offset"] < 0)]
    monotonic, falling = [], []
    for _, curve in curves.groupby(["layer", "head"]):
        scores = curve.sort_values("offset")["score"].to_numpy()
        monotonic.append(bool((np.diff(scores) >= 0).all()))
        falling.append(float(np.corrcoef(np.argsort(np.argsort(scores)), np.arange(len(scores)))[0, 1]))
    yield Sentence(
        "sentence/ba_monotonic",
        "BA, section 5.1",
        "In standard RoPE, the phase relationship [...] is strictly linear. This forces the attention mechanism to be "
        "monotonic",
        "published kernels of four heads of Pythia-410m (FP, Fig. 3): mean score by distance, 1 to 20 tokens",
        len(monotonic),
        no_sample(len(monotonic), "kernels", "; of one model, means over a corpus"),
        Reading("every kernel falls with distance throughout; how many do", float(sum(monotonic)), all(monotonic)),
        None,
        f"rank correlations of score with distance {', '.join(f'{-value:+.2f}' for value in falling)}",
    )


def phases_were_learned(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 5.1: learned phases with a mean shift of 7.6e-4, which says one thing of moduli and another of a sum."""
    draws = NOISE * np.random.default_rng(0).standard_normal((_DRAWS, PAIRS))
    signed_means = draws.mean(1)
    of_moduli, signed = (_two_sided(means, SHIFT) for means in (np.abs(draws).mean(1), signed_means))
    yield Sentence(
        "sentence/ba_phases",
        "BA, section 5.1",
        "learned phase shifts (Phi) evolved into a distinct oscillating Zig-Zag pattern (Mean Shift 7.6e-4 rad)",
        f"the printed mean shift against means over {PAIRS} phases of noise N(0, {NOISE:g}), {_DRAWS} draws",
        PAIRS,
        Power(
            f"two-sided p by draws, {2 / _DRAWS:.0e} at least",
            2 / _DRAWS,
            float(scipy.stats.norm.isf(LEVEL / 2) + scipy.stats.norm.isf(1 - POWER)) * float(signed_means.std()),
            "signed mean shift, rad",
        ),
        Reading(
            "it differs from phases never trained if it is a mean of moduli; two-sided p",
            of_moduli,
            of_moduli <= LEVEL,
        ),
        None,
        f"BA does not say whether the mean is of moduli, by which nothing was learned, or of signed phases, by which "
        f"p = {signed:.2g} and something was",
        choices=(
            Choice(
                "criterion",
                "a mean of moduli",
                Reading("it differs if it is a mean of signed phases; two-sided p", signed, signed <= LEVEL),
            ),
        ),
    )


def spectral_wins(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 4.3: solves tasks where the standard baseline failed."""
    yield Sentence(
        "sentence/ba_solves",
        "BA, section 4.3",
        "The Spectral-RoPE architecture effectively solves tasks where the Standard baseline failed",
        "held-out loss of both architectures on three formal languages",
        0,
        Power("none: one number per task and arm was printed, without seeds"),
        None,
        None,
        "needs the weights of BA's models or its runs; `tlspectral study learn languages` trains matched arms, and "
        "what came out is in docs/results/spectral_rope.md",
    )


def _bridged() -> float:
    """Share of distances from 10 to 2000 tokens at which a pair that turns by half a turn or more is near 1."""
    angles = np.arange(10, 2001)[:, None] * frequencies()
    return float(((np.cos(angles) > _BRIDGE) & (angles >= math.pi)).any(1).mean())


def _two_sided(draws: Float64[np.ndarray, "draws"], value: float) -> float:
    """p of a value by draws, two-sided."""
    below = float((draws <= value).mean())
    return min(1.0, 2 * min(below, 1 - below))


def _vectors() -> tuple[np.random.Generator, Complex128[np.ndarray, "b pairs"], Complex128[np.ndarray, "b pairs"]]:
    """A generator and 100 random queries and keys, as complex pairs."""
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((100, PAIRS)) + 1j * rng.standard_normal((100, PAIRS)) for _ in range(2))
    return rng, query, key


def _relative(before: Float64[np.ndarray, "b"], after: Float64[np.ndarray, "b"]) -> float:
    """Largest change over the root mean square."""
    return float(np.abs(after - before).max() / np.sqrt((before**2).mean()))
