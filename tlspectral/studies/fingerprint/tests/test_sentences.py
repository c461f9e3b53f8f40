"""Sentences: the stored outcome, that every one can hold and fail, and the power of their tests."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from changed_tables import aligned, changed, claimed_tables, shuffled, stretched

from tlspectral.studies.fingerprint.replication import (
    SENTENCE_VERDICTS,
    PublishedTables,
    exact_heads,
    markdown,
    replicate,
    table,
)
from tlspectral.studies.fingerprint.replication.sentences import bifocal, positional_symbolic
from tlspectral.studies.fingerprint.replication.sentences.power import (
    correlation_power,
    detectable_correlation,
    holm,
    shift_power,
    significant,
)
from tlspectral.studies.fingerprint.statistics import mann_whitney
from tlspectral.tables import read_table

HOLDS, _, _, CONTRADICTED, UNDECIDED = SENTENCE_VERDICTS
STORED = Path(__file__).parents[4] / "docs" / "results" / "replication.parquet"
# Of the paper's mathematics, not of tables: flipped by themselves below.
OF_NO_TABLE = {"ps_angle", "ps_constructions", "ba_symmetry", "ba_identity", "ba_bridge", "ba_phases"}


def decided(tables=None):
    """Rows of the sentences alone, for the published tables or others."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(table, "RECOMPUTED", ())
        return replicate(tables)


@pytest.fixture(scope="module")
def published():
    return decided()


def test_the_stored_outcome(published):
    stored = read_table(STORED)
    stored = stored[stored["kind"] == "sentence"].reset_index(drop=True)
    # Numbers are read to three digits; the exact zeros of equation 2 round at 1e-13.
    pd.testing.assert_frame_equal(published, stored, rtol=1e-6, atol=1e-9)


def test_every_sentence_says_the_figures_behind_it_what_it_needs_and_what_it_gives_up(published):
    remarks = published.set_index("id")["why"]
    for name, figure in (
        ("separates", "opt-1.3b dup +0.022 (p = 0.5)"),
        ("eliminates", "pythia-410m loses 1.72 of 10.3 (17%)"),
        ("slow", "pythia-410m 45% at step 2000, 83% at step 4000, 102% at step 8000"),
        ("post_formation", "formed by step 1000, leaves the band by 512"),
    ):
        assert figure in remarks[f"sentence/{name}"]
    assert (published[["why", "power", "what"]] != "").all(axis=None)
    assert published.loc[published["verdict"] == UNDECIDED, "why"].str.contains("needs the weights of").all()
    assert ((published["gives_up"] != "") == (published["weaker"] != "")).all()
    written = markdown(published)
    assert written.count("| FP, section 9") == sum(published["where"].str.startswith("FP, section 9"))
    assert "| contradicted |" in written


@pytest.mark.slow  # all sentences on four more sets of tables; the published outcome runs the same code
def test_every_sentence_can_hold_and_every_one_can_fail(published):
    claimed = decided(claimed_tables()).set_index("id")
    others = [decided(changed(change)).set_index("id") for change in (shuffled, aligned, stretched)]
    of_tables = claimed.index.difference([f"sentence/{name}" for name in OF_NO_TABLE])
    holds = {name: claimed.loc[of_tables, f"{name}_holds"].dropna() for name in ("literal", "weaker")}
    assert holds["literal"].all()
    # Where the words as they stand hold the weaker claim does.
    assert holds["weaker"][holds["weaker"].index.isin(holds["literal"].index)].all()
    for name, found in holds.items():
        tables = (claimed, published.set_index("id"), *others)
        everywhere = np.all([one.loc[found.index, f"{name}_holds"] for one in tables], axis=0)
        assert found.index[everywhere].tolist() == []
    assert claimed.loc["sentence/head_dimension", "verdict"] == UNDECIDED  # whatever the tables
    assert claimed.loc["sentence/every_head_null", "weaker_holds"]


# --- sentences of the other papers ---


def test_constructions_and_angles_are_tried(monkeypatch):
    tables = PublishedTables()
    for name, decide, holds, fails in (
        ("solved", positional_symbolic.constructions_solve_their_tasks, 1.0, 0.9),
        ("one_maximum", positional_symbolic.angles_above_the_limit, False, True),
    ):
        for answer, verdict in ((holds, HOLDS), (fails, CONTRADICTED)):
            monkeypatch.setattr(exact_heads, name, lambda *_, answer=answer, **__: answer)
            assert next(decide(tables)).verdict == verdict


def test_equation_2_decides_symmetry_and_identity(monkeypatch):
    tables = PublishedTables()
    score = bifocal.spectral_score

    def absolute(query, key, positions, gain, phases):
        return score(query, key, positions, gain, phases) * (1 + positions[0])

    monkeypatch.setattr(bifocal, "spectral_score", absolute)
    assert next(bifocal.symmetry_is_broken(tables)).verdict == HOLDS
    monkeypatch.setattr(bifocal, "spectral_score", lambda q, k, p, g, phases: score(q, k, p, g, phases) + phases[0][0])
    assert next(bifocal.identity_at_the_start(tables)).verdict == CONTRADICTED
    none = (np.zeros(bifocal.PAIRS),) * 2
    monkeypatch.setattr(bifocal, "spectral_score", lambda q, k, p, g, phases: score(q, k, p, g, none))
    assert next(bifocal.identity_at_the_start(tables)).verdict == HOLDS


def test_frequencies_and_noise_decide_the_bridge_and_the_phases(monkeypatch):
    tables = PublishedTables()
    monkeypatch.setattr(bifocal, "frequencies", lambda: np.full(bifocal.PAIRS, math.pi / 60))
    assert next(bifocal.a_bridge_must_be_learned(tables)).verdict == HOLDS
    monkeypatch.setattr(bifocal, "frequencies", lambda: np.full(bifocal.PAIRS, 2 * math.pi / 60))
    assert next(bifocal.a_bridge_must_be_learned(tables)).verdict == CONTRADICTED
    monkeypatch.setattr(bifocal, "SHIFT", 5e-3)
    assert next(bifocal.phases_were_learned(tables)).weaker.holds


# --- power ---


def test_power_of_a_correlation():
    for n in (18, 144, 1024):
        assert correlation_power(detectable_correlation(n), n) == pytest.approx(0.8, abs=1e-3)  # other tail: 1e-6
    # 500 samples of 144: a share of 0.8 has a standard error of 0.018; at half the effect the power is 0.3.
    rng, rho, hits = np.random.default_rng(0), detectable_correlation(144), 0
    for _ in range(500):
        x, noise = rng.standard_normal((2, 144))
        hits += scipy.stats.pearsonr(x, rho * x + math.sqrt(1 - rho**2) * noise).pvalue <= 0.05
    assert hits / 500 == pytest.approx(0.8, abs=0.07)


def test_power_of_a_rank_test():
    assert shift_power(5, 5, 0.0) == pytest.approx(0.0476, abs=0.01)  # exact size; se of 4000 draws 0.0034
    assert shift_power(5, 5, 20.0) == 1
    assert shift_power(5, 5, 20.0, tests=20) == 0  # 1/252 is above 0.05 / 20
    # Of the same draws the first 200, tested one by one.
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((4000, 5)) + 1.5, rng.standard_normal((4000, 5))
    few = [mann_whitney(*pair, alternative="greater").pvalue <= 0.05 for pair in zip(x[:200], y[:200], strict=True)]
    assert shift_power(5, 5, 1.5) == pytest.approx(np.mean(few), abs=0.1)  # se of 200 draws 0.035; 1 sd has 0.40


def test_holm():
    assert holm(np.array([0.01, 0.04, 0.03, math.nan])).tolist() == pytest.approx([0.04, 0.09, 0.09, 1])
    assert significant(np.array([0.01, 0.04])).tolist() == [True, True]
    assert significant(np.array([0.03, 0.04])).tolist() == [False, False]
