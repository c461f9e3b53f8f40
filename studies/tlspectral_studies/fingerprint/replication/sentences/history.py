"""FP section 9: what comes when, over 22 checkpoints of two models, one head each."""

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from tlspectral_studies.fingerprint.history_questions import formation_crossing
from tlspectral_studies.fingerprint.replication.claims import PublishedTables
from tlspectral_studies.fingerprint.replication.sentences.power import POWER, no_sample
from tlspectral_studies.fingerprint.replication.sentences.sentence import Choice, Power, Reading, Sentence
from tlspectral_studies.fingerprint.replication.training_history import constant_null_departure, half_way

_WHERE = "FP, section 9"
_WINDOW_END = 2000  # step, of 4 thousand million tokens
_TENTH_OF_TRAINING = 14300  # step: the "next 100x" has 1.6 of its 2 decades before it
_BEFORE = 256  # last step at which prev is below 0.2 in both models
_MOST, _HALF = 0.9, 0.5
_TOP_DECILE = 0.9
_GINIBRE, _NEAR = 0.61, 0.005


def every_head_at_the_null(tables: PublishedTables) -> Iterator[Sentence]:
    """Every head originates at the null: the tables hold the median and one head."""
    start = {name: float(track["D_head_median"].iloc[0]) for name, track in tables.checkpoints.items()}
    worst = max(abs(value - _GINIBRE) for value in start.values())
    yield Sentence(
        "sentence/every_head_null",
        "FP, abstract and section 9",
        "every head originates at the random-matrix (Ginibre) null",
        "median D_head at step 0 against 0.61",
        len(start),
        no_sample(len(start), "medians", ": a median stays where it is while up to half of the heads leave"),
        None,
        Reading(
            f"both medians are within {_NEAR} of {_GINIBRE}; largest distance",
            worst,
            worst <= _NEAR,
            "every head: the median",
        ),
        "needs the weights of step 0: the tables hold the median of all heads and one head per model",
    )


def following_within_the_window(tables: PublishedTables) -> Iterator[Sentence]:
    """In-context score, induction and K-composition follow the behaviour within the window."""
    arrived, half, total = 0, 0, 0
    late, first = [], []
    for name, track in tables.checkpoints.items():
        behaviour = _reaches(track, "prev", _MOST)
        first.append(f"{name} {behaviour:.0f}")
        others = [column for column in track if column == "icl_score" or column.startswith(("ind_of_", "kcomp_"))]
        for column in others:
            most = _reaches(track, column, _MOST)
            total += 1
            arrived += behaviour < most <= _WINDOW_END
            half += _reaches(track, "prev", _HALF) <= _reaches(track, column, _HALF) <= _WINDOW_END
            if not behaviour < most <= _WINDOW_END:
                late.append(f"{name} {column} at step {most:.0f}")
    yield Sentence(
        "sentence/following",
        _WHERE,
        "with induction behavior, the ICL proxy, and the K-composition wiring following within the same window",
        f"first step at which each series has made {_MOST} or {_HALF} of its way from step 0 to the "
        f"last step, against the window's end at step {_WINDOW_END} and {_MOST} of prev's way",
        total,
        no_sample(total, "series", "; steps double, so an order within a factor of 2 cannot be seen"),
        Reading(
            f"every series gets there after prev and by step {_WINDOW_END}; how many", float(arrived), arrived == total
        ),
        None,
        f"prev has made {_MOST} of its way by step {', '.join(first)}; not so: {', '.join(late) or 'none'}",
        choices=(
            Choice(
                "level",
                f"{_MOST} of the way",
                Reading(
                    f"every series is half way by step {_WINDOW_END}, and not before prev; how many",
                    float(half),
                    half == total,
                ),
            ),
        ),
    )


def locks_in(tables: PublishedTables) -> Iterator[Sentence]:
    """The phase percentile locks in with the behaviour."""
    crossings = {name: formation_crossing(track) for name, track in tables.checkpoints.items()}
    lower = [
        formation_crossing(track, behaviour_level=_HALF / 2).first == "neither" for track in tables.checkpoints.values()
    ]
    together = [crossing.first == "neither" for crossing in crossings.values()]
    later = {
        name: math.nan if crossing.phase.lowest_later is None else crossing.phase.lowest_later
        for name, crossing in crossings.items()
    }
    lowest = min(later.values())
    listed = ", ".join(f"{name} falls back to {value:.2f}" for name, value in later.items())
    yield Sentence(
        "sentence/locks_in",
        _WHERE,
        "the signature locks in with the behavior - at our half-doubling resolution, neither leads",
        "checkpoints between which prev passes 0.5 and the phase percentile 0.9",
        len(crossings),
        no_sample(len(crossings), "histories", "; levels of 0.5 and 0.9 are ours"),
        Reading(
            "both pass between the same checkpoints in both models, and the percentile stays in the top decile; its "
            "lowest later value",
            lowest,
            all(together) and lowest >= _TOP_DECILE,
        ),
        Reading(
            "both pass between the same checkpoints; models",
            float(sum(together)),
            all(together),
            "that it stays there",
        ),
        listed,
        choices=(
            Choice(
                "level",
                f"prev of {_HALF}",
                Reading(
                    f"with prev of {_HALF / 2} both pass between the same checkpoints; models",
                    float(sum(lower)),
                    all(lower),
                ),
            ),
        ),
    )


def slow_over_the_next_hundredfold(tables: PublishedTables) -> Iterator[Sentence]:
    """Act III: the median is suppressed slowly, over the next 100x of training."""
    way = {name: _way(track, "D_head_median") for name, track in tables.checkpoints.items()}
    early = {name: float(share[share.index <= _TENTH_OF_TRAINING].max()) for name, share in way.items()}
    sooner = {name: float(share[share.index <= _TENTH_OF_TRAINING / 2].max()) for name, share in way.items()}
    listed = "; ".join(
        f"{name} " + ", ".join(f"{_at(share, step):.0%} at step {step}" for step in (2000, 4000, 8000))
        for name, share in way.items()
    )
    yield Sentence(
        "sentence/slow",
        _WHERE,
        "slow differential sculpting: the population median D_head is suppressed [...] over the next 100x of training",
        "share of the fall of the median from step 0 to the last step",
        len(way),
        no_sample(len(way), "histories"),
        Reading(
            f"in both models less than {_MOST} of the fall is done by step {_TENTH_OF_TRAINING}, a tenth of training; "
            "the smaller share",
            min(early.values()),
            max(early.values()) < _MOST,
        ),
        None,
        f"{listed}; above 100 % the median is below its last value",
        choices=(
            Choice(
                "window",
                f"step {_TENTH_OF_TRAINING}",
                Reading(
                    f"in both models less than {_MOST} of the fall is done by half of that step; the smaller share",
                    min(sooner.values()),
                    max(sooner.values()) < _MOST,
                ),
            ),
        ),
    )


def heads_retain_it(tables: PublishedTables) -> Iterator[Sentence]:
    """While previous-token heads retain their D_head: one head per model."""
    two_sd = 2 * float(tables.heads["gpt2"]["D_head_null_std"].median())
    moved, at_last = {}, {}
    for name, track in tables.checkpoints.items():
        distance = (track["D_head"] - track["D_head"].iloc[0]).abs()
        moved[name] = float(distance[track["step"] >= 1000].max())
        at_last[name] = float(distance.iloc[-1])
    listed = ", ".join(f"{name} {moved[name]:.3f}, {at_last[name]:.3f} at the last step" for name in moved)
    yield Sentence(
        "sentence/retain",
        _WHERE,
        "while the previous-token heads retain it",
        "distance of the eventual head's D_head from its value at step 0, against two sd of a head's null (GPT-2's, "
        "which has the same d_k)",
        len(moved),
        no_sample(len(moved), "histories", "; one head per model is in the tables"),
        Reading(
            f"within {two_sd:.3f} at every checkpoint from step 1000 on in both; the largest distance",
            max(moved.values()),
            max(moved.values()) <= two_sd,
        ),
        Reading(
            f"within {two_sd:.3f} at the last step in both; the larger distance",
            max(at_last.values()),
            max(at_last.values()) <= two_sd,
            "every step but the last",
        ),
        f"largest distance: {listed}",
        choices=(
            Choice(
                "level",
                "two sd",
                Reading(
                    f"within {two_sd / 2:.3f} at the last step in both, one sd; the larger distance",
                    max(at_last.values()),
                    max(at_last.values()) <= two_sd / 2,
                ),
            ),
        ),
    )


def after_formation(tables: PublishedTables) -> Iterator[Sentence]:
    """Q2: suppression follows formation, by when it begins and by when it is half way."""
    begins, halves, listed = [], [], []
    for name, track in tables.checkpoints.items():
        formed = formation_crossing(track).behaviour.step
        departs, half = constant_null_departure(tables, name), half_way(track)
        begins.append(math.nan if departs is None or formed is None else float(departs - formed))
        halves.append(math.nan if half is None or formed is None else float(half - formed))
        listed.append(f"{name}: formed by step {formed}, leaves the band by {departs}, half way by {half}")
    first, least = float(np.min(begins)), float(np.min(halves))
    yield Sentence(
        "sentence/post_formation",
        "FP, section 9, Q2",
        "population suppression is a post-formation process",
        "steps from formation until the median leaves a band of two standard errors about its value at step 0, and "
        "until it is half way down",
        len(begins),
        no_sample(len(begins), "histories", "; a start between two checkpoints cannot be dated better"),
        Reading("the median is half way down after formation in both; the smaller lag", least, least > 0),
        None,
        f"{'; '.join(listed)}. The null matched to the weights of each step is not published: the constant band is "
        "no proof",
        choices=(
            Choice(
                "criterion",
                "half of the fall",
                Reading("its onset: it leaves the band after formation in both; the smaller lag", first, first > 0),
            ),
        ),
    )


def not_identifiable(tables: PublishedTables) -> Iterator[Sentence]:
    """Q3: the eventual head is not identifiable before formation."""
    early = {name: track.loc[track["step"] <= _BEFORE] for name, track in tables.checkpoints.items()}
    columns = ("rope_imag_frac_pct", "D_head_pct")
    highest = {(name, column): float(track[column].max()) for name, track in early.items() for column in columns}
    both = {column: min(highest[name, column] for name in early) for column in columns}
    listed = ", ".join(f"{name} {column} {value:.2f}" for (name, column), value in highest.items())
    yield Sentence(
        "sentence/not_identifiable",
        "FP, section 9, Q3",
        "before formation the eventual prev head is not reliably identifiable from its spectrum",
        f"highest percentile of the eventual head by phase or D_head up to step {_BEFORE}",
        len(early),
        Power(
            "two heads: a random head is in a top decile with p = 0.1, two of two with p = 0.01 for one column",
            len(columns) * (1 - _TOP_DECILE) ** len(early),
            POWER ** (1 / len(early)),
            "probability that such a head is in the top decile",
        ),
        Reading(
            "by no column is it in the top decile in both models; the highest of the lower ones",
            max(both.values()),
            max(both.values()) < _TOP_DECILE,
        ),
        None,
        listed,
    )


def _way(track: pd.DataFrame, column: str) -> pd.Series:
    """Share of the way from the first to the last value, by step."""
    values = track[column].to_numpy(dtype=np.float64)
    return pd.Series(np.divide(values - values[0], values[-1] - values[0]), index=track["step"].to_numpy())


def _reaches(track: pd.DataFrame, column: str, share: float) -> float:
    """First step at which a series has made that share of its way; infinite if it never does."""
    way = _way(track, column)
    there = np.flatnonzero(way.to_numpy() >= share)
    return float(track["step"].iloc[there[0]]) if len(there) else math.inf


def _at(series: pd.Series, step: int) -> float:
    """Value at a step, or at the last one before it."""
    return float(series.to_numpy()[np.flatnonzero(series.index <= step)[-1]])
