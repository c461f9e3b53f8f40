"""FP section 9 and Fig. 4: when the imprint arises, over 22 checkpoints of two Pythia models."""

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from tlspectral_studies.fingerprint.history_questions import formation_crossing, half_of_fall, median_leaves_null
from tlspectral_studies.fingerprint.replication.claims import Claim, PublishedTables, value_at

_WHERE, _MEDIANS = "FP, section 9", "FP, section 9 and Fig. 4c"
_MODELS = ("pythia-410m", "pythia-160m")
_WIDTHS = {"pythia-410m": 1024, "pythia-160m": 768}
_BEFORE = 128  # last step of the first act, under half a thousand million tokens


def grid(tables: PublishedTables) -> Iterator[Claim]:
    """Checkpoints per model."""
    for name in _MODELS:
        yield Claim(f"section9/{name}/n", _WHERE, f"{name}: checkpoints", "22", float(len(tables.checkpoints[name])))


def first_act(tables: PublishedTables) -> Iterator[Claim]:
    """All measures are at the null before half a thousand million tokens (Fig. 4)."""
    for name in _MODELS:
        early = tables.checkpoints[name].pipe(_early)
        at_start = early.iloc[0]
        composition = early.filter(like="kcomp_").to_numpy()
        chance = _WIDTHS[name] ** -0.5
        for row, where, what, text, column in (
            ("prev0", _WHERE, "prev", "0.01", "prev"),
            ("phase0", _WHERE, "rope_imag_frac of the eventual head", "0.500", "rope_imag_frac"),
            ("median0", _MEDIANS, "median D_head", "0.61", "D_head_median"),
        ):
            what = f"{name}: {what} at step 0"
            yield Claim(f"section9/{name}/{row}", where, what, text, float(at_start[column]))
        yield Claim(
            f"section9/{name}/composition0",
            _WHERE,
            f"{name}: largest K-composition up to step {_BEFORE} over chance, at baseline",
            "1.0",
            float(composition.max() / chance),
            remark=f"chance is 1/sqrt(d_model) = {chance:.4f}",
        )


def formation(tables: PublishedTables) -> Iterator[Claim]:
    """The jump of behaviour between steps 512 and 1000 (Fig. 4a), and what follows within the window."""
    mean = float(np.mean([_at(tables.checkpoints[name], 1000, "prev") for name in _MODELS]))
    for name in _MODELS:
        track = tables.checkpoints[name]
        before, after = _at(track, 512, "prev"), _at(track, 1000, "prev")
        where = "FP, section 9 and Fig. 4a"
        yield Claim(f"section9/{name}/prev512", where, f"{name}: prev at step 512", "0.37", before)
        yield Claim(
            f"section9/{name}/prev1000",
            where,
            f"{name}: prev at step 1000",
            "0.95",
            after,
            if_differs=f"0.95 is printed for both models; it is the mean of the two, {mean:.3f}",
        )
    follow = tables.checkpoints["pythia-410m"]
    induction = formation_crossing(follow, behaviour="ind_of_8_6").behaviour
    yield Claim(
        "section9/pythia-410m/induction",
        _WHERE,
        "pythia-410m: step at which induction head 8.6 passes 0.5, within the window of 500 to 2000 steps",
        "<= 2000",
        np.nan if induction.step is None else float(induction.step),
    )


def phase_percentiles(tables: PublishedTables) -> Iterator[Claim]:
    """The percentile of the head's phase around formation (Fig. 4b)."""
    at_512, at_1000 = (
        {name: _at(tables.checkpoints[name], step, "rope_imag_frac_pct") for name in _MODELS} for step in (512, 1000)
    )
    small = tables.checkpoints["pythia-160m"]
    at_start, at_2000 = (_at(small, step, "rope_imag_frac_pct") for step in (0, 2000))
    lowest = small.loc[small["step"] >= 1000, "rope_imag_frac_pct"].min()
    where, what = "FP, section 9 and Fig. 4b", "phase percentile of the eventual head at step {}, {} of two models"
    yield Claim("section9/phase512/low", where, what.format(512, "lower"), "0.03", min(at_512.values()))
    yield Claim(
        "section9/phase512/high",
        where,
        what.format(512, "higher"),
        "0.04",
        max(at_512.values()),
        remark=f"mid-formation, but pythia-160m's head stands at {at_start:.2f} from step 0",
    )
    yield Claim(
        "section9/phase1000/low",
        where,
        what.format(1000, "lower"),
        "0.90",
        min(at_1000.values()),
        if_differs=f"pythia-160m is at {at_1000['pythia-160m']:.3f}; 0.90 is its step 2000 ({at_2000:.3f})",
        remark=f"it falls back to {lowest:.2f} later",
    )
    yield Claim("section9/phase1000/high", where, what.format(1000, "higher"), "0.99", max(at_1000.values()))


def lead_or_lag(tables: PublishedTables) -> Iterator[Claim]:
    """Q1: whether percentile or behaviour comes first, as finely as the checkpoints are spaced."""
    crossings = {name: formation_crossing(tables.checkpoints[name]) for name in _MODELS}
    together = sum(crossing.first == "neither" for crossing in crossings.values())
    by_d = tables.checkpoints["pythia-410m"].set_index("step")["D_head_pct"]
    yield Claim(
        "section9/q1",
        _WHERE,
        "models, of 2, whose behaviour (0.5) and phase percentile (0.9) pass between the same checkpoints",
        "2",
        float(together),
        remark=f"pythia-410m's percentile of D_head lags: {by_d[0]:.2f} at initialisation, {by_d[1000]:.2f} at "
        f"step 1000 and {by_d[2000]:.2f} at step 2000",
    )


def sculpting(tables: PublishedTables) -> Iterator[Claim]:
    """Act III and Q2: the median head leaves the null after formation (Fig. 4c); the head's phase at the end."""
    for name, median, phase in (("pythia-410m", "0.395", "0.578"), ("pythia-160m", "0.453", "0.578")):
        track = tables.checkpoints[name]
        for row, where, what, text, column in (
            ("median", _MEDIANS, "median D_head", median, "D_head_median"),
            ("phase", _WHERE, "rope_imag_frac of the head", phase, "rope_imag_frac"),
        ):
            what = f"{name}: {what} at the last step"
            yield Claim(f"section9/{name}/{row}", where, what, text, float(track[column].iloc[-1]))
        half = half_way(track)
        formed = formation_crossing(track).behaviour.step
        yield Claim(
            f"section9/{name}/q2",
            _WHERE,
            f"{name}: steps from formation until the median has made half of its way down, after it",
            "> 0",
            np.nan if half is None or formed is None else float(half - formed),
            remark=f"formation by step {formed}, half way by step {half}. The other reading, when the fall begins: "
            f"the median leaves a band of two standard errors about the constant null of Fig. 4c by step "
            f"{constant_null_departure(tables, name)}; the null matched to each step is not published, so that is "
            "no proof",
        )


def prediction(tables: PublishedTables) -> Iterator[Claim]:
    """Q3: percentile of the eventual head before it has formed; it is high by D_head in one of the models."""
    highest = {name: float(tables.checkpoints[name].pipe(_early)["rope_imag_frac_pct"].max()) for name in _MODELS}
    by_d = {name: float(tables.checkpoints[name].pipe(_early)["D_head_pct"].max()) for name in _MODELS}
    percentiles = ", ".join(f"{name} {value:.2f}" for name, value in by_d.items())
    yield Claim(
        "section9/q3",
        _WHERE,
        f"highest phase percentile of an eventual head up to step {_BEFORE}, not identifiable",
        "< 0.9",
        max(highest.values()),
        remark=f"by D_head: {percentiles}; two heads are too few to call that chance or not",
    )


def _early(track: pd.DataFrame) -> pd.DataFrame:
    return track.loc[track["step"] <= _BEFORE]


def _at(track: pd.DataFrame, step: int, column: str) -> float:
    return value_at(track.set_index("step"), step, column)


def constant_null_departure(tables: PublishedTables, name: str) -> int | None:
    """Step by which the median has left a constant null for good: two standard errors about its value at step 0.

    FP's figure draws one null for all steps. The standard error of a median of random heads is sqrt(pi / 2) sd /
    sqrt(heads), with the sd of D_head under GPT-2's null, which has the same d_k = 64; the tables hold no other.
    """
    track = tables.checkpoints[name]
    deviation = float(tables.heads["gpt2"]["D_head_null_std"].median())
    start, error = float(track["D_head_median"].iloc[0]), deviation * math.sqrt(math.pi / 2 / track["n_heads"].iloc[0])
    return median_leaves_null(track, low=start - 2 * error, high=start + 2 * error).step


def half_way(track: pd.DataFrame) -> int | None:
    """First step from which the median stays below the middle of its first and last value."""
    half = half_of_fall(track)
    return half.step if half.side == "below" else None
