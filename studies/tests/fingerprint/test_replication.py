"""Published numbers and sentences: the stored table, and that every verdict hangs on its tables."""

import importlib
import math
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from changed_tables import CHANGES, changed, claimed_tables
from tlspectral_studies.fingerprint.replication import (
    SENTENCE_VERDICTS,
    PublishedTables,
    counted,
    exact_heads,
    ioi_classes,
    positional_schemes,
    readable,
    replicate,
)
from tlspectral_studies.fingerprint.replication.claims import VERDICTS, Claim
from tlspectral_studies.fingerprint.replication.sentences import (
    bifocal,
    constrained,
    formation_order,
    positional_symbolic,
)
from tlspectral_studies.fingerprint.replication.sentences.power import (
    apart_power,
    correlation_power,
    correlations_power,
    detectable_correlation,
    detectable_share,
    detectable_shift,
    holm,
    no_sample,
    shift_power,
    shifts_power,
    significant,
    signs_power,
)
from tlspectral_studies.fingerprint.replication.sentences.sentence import (
    LEVEL,
    ROUNDING,
    Choice,
    Population,
    Power,
    Reading,
    Sentence,
)
from tlspectral_studies.fingerprint.statistics import mann_whitney

from tlspectral.tables import read_table

pytestmark = [pytest.mark.long, pytest.mark.lowest]

STORED = Path(__file__).parents[3] / "docs" / "results" / "replication.parquet"
HOLDS, ROUNDED, WEAKENED, DEPENDS, OPEN, POWERLESS, ELSEWHERE, CONTRADICTED, UNDECIDED = SENTENCE_VERDICTS
# Rows of no table but of the papers' mathematics, flipped by themselves below.
FLIPPED = ("ps_angle", "ps_constructions", "ps_lemma", "ba_symmetry", "ba_identity", "ba_bridge", "ba_phases")
OF_NO_TABLE = ("ps/", *(f"sentence/{name}" for name in FLIPPED))


@pytest.fixture(scope="module", autouse=True)
def few_draws():
    """Intervals from 30 draws: what they are is for the slow test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positional_schemes, "BOOTSTRAP_DRAWS", 30)
        yield


@pytest.fixture(scope="module")
def table(few_draws):
    return replicate()


@pytest.fixture(scope="module")
def stored():
    return read_table(STORED)


# --- the table ---


@pytest.mark.slow
def test_the_stored_table_is_what_the_command_writes(table, stored):
    """All rows but those of intervals, of which the draws are too few here."""
    drawn = table["seed"].notna()
    # Equal to the bit in both environments here; another BLAS may round otherwise. Numbers are read to four digits.
    pd.testing.assert_frame_equal(table[~drawn], stored[~drawn], rtol=1e-6, atol=1e-12)
    said = ["id", "where", "what", "published", "function", "seed"]
    pd.testing.assert_frame_equal(table.loc[drawn, said], stored.loc[drawn, said])
    assert stored.attrs | {"verdicts": None} == table.attrs | {"verdicts": None}
    for one in (table, stored):
        counts = one.attrs["verdicts"] | one.attrs["sentences"]
        assert {verdict: n for verdict, n in counts.items() if n} == one["verdict"].value_counts().to_dict()


@pytest.mark.slow  # 4000 draws; of the last models they take a minute
def test_intervals_of_the_first_models_are_the_stored_ones(stored, monkeypatch):
    monkeypatch.setattr(positional_schemes, "BOOTSTRAP_DRAWS", 4000)
    claims = list(islice(positional_schemes.intervals(PublishedTables()), 4))
    expected = stored[stored["seed"].notna()]
    assert (len(expected), set(expected["verdict"])) == (16, {"reproduced"})
    assert [claim.id for claim in claims] == expected["id"][:4].tolist()
    assert [claim.ours for claim in claims] == pytest.approx(expected["ours"][:4].tolist(), rel=1e-6)
    assert [claim.why for claim in claims] == expected["why"][:4].tolist()


def test_every_row_has_its_verdict_and_says_why(stored):
    numbers, sentences = (stored[stored["kind"] == kind] for kind in ("number", "sentence"))
    assert stored["id"].is_unique
    assert set(numbers["verdict"]) == set(VERDICTS)
    assert (numbers.loc[numbers["verdict"] != "reproduced", "why"].str.len() > 0).all()
    assert (numbers["ours"].isna() == (numbers["verdict"] == VERDICTS[2])).all()
    assert (sentences[["why", "power", "what"]] != "").all(axis=None)
    undecided = sentences.loc[sentences["verdict"] == UNDECIDED].set_index("id")["why"]
    assert undecided.str.contains("needs the weights of").all()
    assert (sentences.loc[sentences["verdict"] == DEPENDS, "turned"] != "").all()
    assert set(sentences.loc[sentences["least_p"] > LEVEL, "verdict"]) == {POWERLESS, ELSEWHERE}
    assert ((sentences["gives_up"] != "") == (sentences["weaker"] != "")).all()
    remarks = sentences.set_index("id")["why"]
    for name, figure in (
        ("separates", "opt-1.3b dup +0.022 (p = 0.5)"),
        ("eliminates", "pythia-410m loses 1.72 of 10.3 (17%)"),
        ("slow", "pythia-410m 45% at step 2000, 83% at step 4000, 102% at step 8000"),
        ("post_formation", "formed by step 1000, leaves the band by 512"),
    ):
        assert figure in remarks[f"sentence/{name}"]
    for name in stored["function"].unique():
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function)), name
    written = readable(stored)
    assert (STORED.parent / "replication.csv").read_text(encoding="utf-8") == written.to_csv(
        index=False, lineterminator="\n"
    )
    assert written["verdict"].value_counts().to_dict() == stored["verdict"].value_counts().to_dict()
    assert (written["decided_by"] != "").all()


# Found with other code, where the printed number says less: it differs, is a bound, or has one digit.
KNOWN = {
    "null/dir_frac": 0.70664,
    "null/D_head": 0.60785,
    "null/partial": -0.2036,
    "section5/overlap/p": 0.01376,
    "section5/nested/base": 0.0013,
    "section5/nested/both": 0.0282,
    "table2/llama-3-8b/rho_dir": 0.3149,
    "section6/permutation": 1 / 35,
    "section6/4.11": 0.083,
    "section7/llama-3-8b/freq_centroid": -0.0006,
    "section8/joint": 1.3e-8,
    "section9/pythia-410m/prev512": 0.3655,
    "table4/P1/p": 1 / 252,
    "table4/P2/p": 3 / 252,
    "table4/P1/q": 0.0053,
}


@pytest.mark.slow
def test_known_answers(table):
    ours = table.set_index("id")["ours"]
    for name, known in KNOWN.items():
        # Known to two to four digits, as they are written here.
        share = 2e-2 if "/base" in name or "joint" in name else 5e-3
        assert ours[name] == pytest.approx(known, rel=share, abs=6e-5), name


@pytest.mark.slow
def test_orders_of_the_published_runs_by_a_plain_loop():
    runs = PublishedTables().constrained
    order = {"prev": 0, "ind": 0, "both": 0}
    for _, run in runs.evaluations.groupby(["arm", "seed"]):
        rows = list(zip(run["step"], run["prev_best"], run["ind_best"], strict=True))
        prev, ind = (next(row[0] for row in sorted(rows) if row[column] > 0.5) for column in (1, 2))
        order["both" if prev == ind else "prev" if prev < ind else "ind"] += 1
    assert order == {"prev": 0, "ind": 16, "both": 9}
    falls = []
    for (arm, seed), heads in runs.heads.groupby(["arm", "seed"]):
        if arm.endswith("free"):
            at = {step: np.median(rows["D_head_raw"]) for step, rows in heads.groupby("step")}
            own = (runs.evaluations["arm"] == arm) & (runs.evaluations["seed"] == seed)
            losses = runs.evaluations[own].set_index("step")["ce_pred"]
            formed = min(step for step in losses.index if losses[step] < 0.5 * (math.log(64) + 0.15))
            falls.append((at[0] - at[formed - 100]) / (at[0] - at[6000]))
    assert len(falls) == 10
    assert (min(falls), max(falls)) == pytest.approx((0.554, 1.12), abs=5e-3)  # written with three digits


@pytest.mark.slow
def test_the_page_quotes_the_stored_table(stored):
    """Counts of verdicts, what some depend on, and some of the contradicted ones."""
    page = STORED.with_suffix(".md").read_text(encoding="utf-8")
    for kind, counts in (("sentence", stored.attrs["sentences"]), ("number", stored.attrs["verdicts"])):
        assert f"{sum(counts.values())} {kind}s: {counted(counts)}" in page
    assert f"\n{stored.attrs['sentences'][DEPENDS]}, among them:" in page
    turned = stored.set_index("id")["choices"]
    for name, figure, quoted in (
        ("high_frequencies", "faster half of the pairs; heads: 2, not so", "in 2 of\n  15"),
        ("separates", "on every model; models: 6, not so", "7 of 7, within layers 6"),
        ("post_formation", "after formation in both; the smaller lag: -488, not so", "its onset before"),
        ("triage", "(Holm over 6); models: 3, so", "above 1/2 on all three models"),
    ):
        assert figure in turned[f"sentence/{name}"]
        assert " ".join(quoted.split()) in " ".join(page.split())
    listed = re.findall(r"^\* (.*)$", page.split("\n## Contradicted\n")[1].split("\n## ")[0], flags=re.M)
    contradicted = stored[stored["verdict"] == "contradicted"]
    assert set(listed) < {f'{row.where}: "{row.published}"' for row in contradicted.itertuples()}


# --- the rule ---


@pytest.mark.parametrize(
    ("published", "ours", "verdict"),
    [
        ("+0.47", 0.4749, "reproduced"),
        ("+0.47", 0.4751, "differs"),
        ("-0.21", -0.2055, "reproduced"),
        ("2.5e-5", 2.56e-5, "differs"),
        ("~0.61", 0.602, "reproduced"),
        ("~0.61", 0.599, "differs"),
        ("<= 0.02", 0.0205, "reproduced"),
        ("<= 0.02", 0.026, "differs"),
        (">= 0.9", 0.84, "differs"),
        ("< 0.05", 0.05, "differs"),
        ("> 0.05", 0.2, "reproduced"),
        ("0.5", float("nan"), "differs"),
        ("0.5", None, "cannot be checked without weights"),
    ],
)
def test_the_rule_of_agreement(published, ours, verdict):
    claim = Claim("id", "where", "what", published, ours)
    assert claim.verdict == verdict
    assert ("not known" in claim.why) == (verdict == "differs")


def test_tolerances_reasons_and_by_how_much_a_lenient_row_misses():
    drawn = Claim("id", "where", "what", "+0.45", 0.441, seed=0)
    assert drawn.verdict == "reproduced"
    assert "Monte-Carlo" in drawn.why
    assert replace(drawn, ours=0.439).verdict == "differs"
    claim = Claim("id", "where", "what", "0.5", 0.5, if_differs="a slip", remark="on ranks")
    assert (claim.why, claim.difference) == ("on ranks", 0)
    assert replace(claim, ours=0.6).why == "a slip; on ranks"
    assert np.isnan(replace(claim, published="<= 0.5").difference)
    for published, ours, said in (
        ("<= 0.1", 0.141, "literally not: 0.041 above the bound, within the rounding of its digits"),
        (">= 0.9", 0.88, "literally not: 0.02 below the bound, within the rounding of its digits"),
        ("~0.61", 0.602, "literally not: -0.008 from the printed number, within one unit of an approximate number"),
        ("<= 0.1", 0.1, ""),
    ):
        assert Claim("id", "w", "w", published, ours).why == said


# --- verdicts hang on the tables ---


@pytest.mark.slow  # numbers and sentences on five more sets of tables
def test_no_number_is_constant_and_every_sentence_can_hold_and_fail(table):
    """Whatever is reproduced no longer is after some change of all tables, and whatever differs moves."""
    before = table[~table["id"].str.startswith(OF_NO_TABLE)].set_index("id")
    with np.errstate(all="ignore"):
        after = [replicate(changed(change)).set_index("id") for change in CHANGES]
        claimed = replicate(claimed_tables()).set_index("id")
    reproduced, differs = (before.index[before["verdict"] == verdict] for verdict in ("reproduced", "differs"))
    assert [name for name in reproduced if all(one.loc[name, "verdict"] == "reproduced" for one in after)] == []
    assert [name for name in differs if all(one.loc[name, "ours"] == before.loc[name, "ours"] for one in after)] == []
    literal, weaker = (claimed.loc[before.index, f"{name}_holds"].dropna() for name in ("literal", "weaker"))
    assert literal.all()
    # Where the words as they stand hold the weaker claim does.
    assert weaker[weaker.index.isin(literal.index)].all()
    for reading in (literal, weaker):
        holds = [one.loc[reading.index, reading.name] for one in (before, *after, claimed)]
        assert reading.index[np.all(holds, axis=0)].tolist() == []
    assert claimed.loc["sentence/head_dimension", "verdict"] == POWERLESS  # whatever the tables
    assert claimed.loc["sentence/every_head_null", "weaker_holds"]


@pytest.mark.slow
def test_the_exact_heads_are_run_not_quoted(monkeypatch):
    tables = PublishedTables()
    assert {claim.verdict for claim in exact_heads.existence(tables)} == {"reproduced"}
    for name in ("positional_head", "symbolic_head", "mixed_head"):
        build = getattr(exact_heads, name)
        monkeypatch.setattr(
            exact_heads, name, lambda task, build=build, **options: replace(build(task, **options), logit_scale=-1.0)
        )
    assert {claim.verdict for claim in exact_heads.existence(tables)} == {"differs"}
    monkeypatch.setattr(
        exact_heads, "positional_peak_weight", lambda n, theta: -(exact_heads.symbolic_peak_weight(n) ** 0)
    )
    assert next(exact_heads.peak_weights(tables)).verdict == "reproduced"  # flat is no counterexample
    monkeypatch.setattr(exact_heads, "positional_peak_weight", lambda n, theta: exact_heads.symbolic_peak_weight(n))
    assert next(exact_heads.peak_weights(tables)).verdict == "differs"


@pytest.mark.slow
def test_ioi_classes_are_percentiles_of_the_circuit():
    classes = ioi_classes()
    classes = classes.set_index("heads_class")
    assert dict(zip(classes.index.str.split().str[0], classes["n"], strict=True)) == {
        "name": 3, "backup": 8, "negative": 2, "S-inhibition": 4, "induction": 4, "duplicate": 3, "previous": 2,
    }  # fmt: skip
    assert classes.loc["previous token", "prev_pct"] > 95
    assert classes.loc["induction", "ind_pct"] > 80
    assert classes.loc["duplicate token", "dup_pct"] > 90
    # 4.11 has the 12th lowest D_head of 144; the class's median is between the two heads.
    heads = PublishedTables().heads["gpt2"].set_index(["layer", "head"])
    ranks = 100 * heads["D_head"].rank() / 144
    assert classes.loc["previous token", "D_head_pct"] == pytest.approx((ranks[4, 11] + ranks[2, 2]) / 2)
    assert ranks[4, 11] == pytest.approx(100 * 12 / 144)


def test_the_share_of_antisymmetry_is_above_that_under_rope_or_not():
    tables = PublishedTables()
    said = next(constrained.ape_is_antisymmetric(tables))
    assert (said.verdict, round(said.weaker.value, 4)) == (WEAKENED, round(1 / 252, 4))
    assert "40% to 46% of the squared norm" in said.remark
    heads = tables.constrained.heads
    heads["arm"] = heads["arm"].map({"ape_free": "rope_free", "rope_free": "ape_free"}).fillna(heads["arm"])
    assert next(constrained.ape_is_antisymmetric(tables)).verdict == CONTRADICTED


@pytest.mark.slow
def test_what_is_said_of_the_quick_runs_is_what_their_table_says(import_benchmark):
    penalty_doses = import_benchmark("penalty_doses")
    runs = pd.read_csv(STORED.parent / "constrained" / "doses_quick.csv")
    found = penalty_doses.costliest(runs).set_index(["arm", "weight"])
    later = found.loc["rope_sym", "p"]
    assert (later * 252).round(6).tolist() == [4, 1, 80]  # labelings of five against five
    remark = next(formation_order.symmetry_costs_absolute_models_most(PublishedTables())).remark
    for weight, p in zip(("at weight 0.1", "and 1", "at 10 that is not seen"), later, strict=True):
        assert f"{weight} (p = {p:.{2 if weight.startswith('at 10') else 3}f})" in remark
    page = (STORED.parent / "constrained.md").read_text(encoding="utf-8").replace("\n", " ")
    assert "(p = .016) and 1 (p = .004), but not at 10 (p = .32;" in page
    for weight, delay in zip((0.1, 1.0, 10.0), (735, 2015, 1215), strict=True):
        assert found.loc[("rope_imag", weight), "delay"] == delay
    trends = [penalty_doses.trend(runs, arm) for arm in penalty_doses.CONSTRAINED]
    assert trends == pytest.approx([0.00013, 0.0066, 0.141], rel=0.02)
    # No penalty is no dose: another free arm moves no trend.
    runs.loc[runs["weight"] == 0, "steps"] = 9000
    assert [penalty_doses.trend(runs, arm) for arm in penalty_doses.CONSTRAINED] == trends


# --- sentences of the other papers ---


def test_constructions_and_angles_are_tried(monkeypatch):
    tables = PublishedTables()
    angles = positional_symbolic.angles_above_the_limit
    # cos(4 pi / 32 times 16) is 1: a second key has the largest weight. At 6 pi / 32 the nearest to a lap is 11 tokens,
    # 11 * 6 / 32 = 2.06 laps of pi.
    assert exact_heads.second_weight(4 * math.pi / 32) == 1
    assert exact_heads.second_weight(6 * math.pi / 32) == pytest.approx(math.exp(math.cos(math.pi * 66 / 32) - 1))
    monkeypatch.setattr(exact_heads, "second_weight", lambda theta: 0.94)
    for answer, verdict in ((False, HOLDS), (True, CONTRADICTED)):
        monkeypatch.setattr(exact_heads, "one_maximum", lambda theta, answer=answer: answer)
        assert next(angles(tables)).verdict == verdict
    for weight, verdict in ((0.96, DEPENDS), (0.98, WEAKENED)):  # the other level is .975
        monkeypatch.setattr(exact_heads, "second_weight", lambda theta, weight=weight: weight)
        assert next(angles(tables)).verdict == verdict
    for answer, verdict in ((1.0, HOLDS), (0.9, CONTRADICTED)):
        monkeypatch.setattr(exact_heads, "solved", lambda *_, answer=answer, **__: answer)
        assert next(positional_symbolic.constructions_solve_their_tasks(tables)).verdict == verdict
        lemmas = {row.id: row for row in positional_symbolic.printed_heads_solve_their_tasks(tables)}
        assert list(lemmas) == ["sentence/ps_lemma3", "sentence/ps_lemma4", "sentence/ps_lemma6"]
        assert {(row.verdict, row.literal.value) for row in lemmas.values()} == {(verdict, answer)}


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
    between = math.acos(0.992)  # above a level of .99, below one of .995
    monkeypatch.setattr(bifocal, "frequencies", lambda: np.full(bifocal.PAIRS, (2 * math.pi - between) / 60))
    bridge = next(bifocal.a_bridge_must_be_learned(tables))
    assert (bridge.verdict, [choice.of for choice in bridge.turned]) == (DEPENDS, ["level"])
    assert next(bifocal.phases_were_learned(tables)).verdict == DEPENDS  # by moduli p is .8
    monkeypatch.setattr(bifocal, "SHIFT", 5e-3)
    assert next(bifocal.phases_were_learned(tables)).verdict == HOLDS


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


def test_the_least_p_and_the_smallest_effect_of_a_rule():
    assert signs_power(5).least_p == 2 / 32
    assert (signs_power(5).smallest, signs_power(6).least_p) == (math.inf, 2 / 64)
    # Six of six is significant, five are not: the share with which six of six have probability .8.
    assert detectable_share(6) == pytest.approx(0.8 ** (1 / 6))
    # By counting: at the share that is given, significant counts of 25 have probability .8.
    share, counts = detectable_share(25), np.arange(26)
    found = [scipy.stats.binomtest(int(k), 25).pvalue <= 0.05 and k > 12 for k in counts]
    assert scipy.stats.binom.pmf(counts, 25, share)[found].sum() == pytest.approx(0.8, abs=1e-9)
    assert (shifts_power(5, 5, 12).least_p, shifts_power(1, 5).least_p) == (pytest.approx(12 / 252), 1 / 6)
    assert (detectable_shift(1, 5), apart_power(1, 2).least_p, apart_power(1, 2).smallest) == (
        math.inf,
        1 / 3,
        math.inf,
    )
    # To the step of .01 and the error of 4000 draws, .006, the power at the shift that is given is .8.
    assert shift_power(5, 5, detectable_shift(5, 5)) == pytest.approx(0.8, abs=0.02)
    assert shift_power(5, 5, detectable_shift(5, 5) - 0.02) < 0.8
    assert correlations_power({"a": 18, "b": 100}, 3).smallest == detectable_correlation(18, 3)
    assert correlations_power({"a": 3}).least_p == pytest.approx(1 / 3)  # one of 3! orders, and its reverse
    assert math.isnan(no_sample(7, "models").least_p)


def sentence(**changes):
    told = {"power": Power("", 0.01), "literal": Reading("a", 1.0, True), "weaker": None, "remark": ""}
    return Sentence("id", "where", "says", "tested", 5, **(told | changes))


def test_a_verdict_follows_from_readings_choices_power_and_population():
    yes, no = (Reading("b", 0.0, holds) for holds in (True, False))
    less = replace(yes, gives_up="scope")

    def turns(other):
        return (Choice("level", ".5", other),)

    for changes, verdict in (
        ({}, HOLDS),
        ({"choices": turns(yes)}, HOLDS),
        ({"choices": turns(no)}, DEPENDS),
        ({"literal": no}, CONTRADICTED),
        ({"literal": no, "choices": turns(no)}, CONTRADICTED),
        ({"literal": no, "choices": turns(yes)}, DEPENDS),
        ({"literal": no, "weaker": less}, WEAKENED),
        ({"literal": no, "weaker": less, "choices": turns(no)}, DEPENDS),
        ({"literal": no, "weaker": replace(yes, gives_up=ROUNDING)}, ROUNDED),
        ({"within": True}, HOLDS),
        ({"within": False}, OPEN),
        ({"literal": no, "weaker": less, "within": False}, OPEN),
        ({"literal": no, "within": False}, CONTRADICTED),
        ({"within": False, "choices": turns(no)}, DEPENDS),
        ({"power": Power("", 0.0625), "choices": turns(no)}, POWERLESS),
        ({"power": Power("", 0.05)}, HOLDS),
        ({"literal": None, "weaker": less, "power": Power("", 1.0)}, UNDECIDED),
        ({"population": Population.of(["a"], ["a", "b"])}, HOLDS),
        ({"population": Population.of(["a"], ["b"]), "literal": None, "power": Power("", 1.0)}, ELSEWHERE),
    ):
        assert sentence(**changes).verdict == verdict, changes


def test_other_tables_give_other_verdicts_of_the_new_kinds(monkeypatch):
    """The population by the names in the tables, the power by the number of runs, a choice by the other reading."""
    tables = PublishedTables()
    order = next(formation_order.suppression_follows_formation(tables))
    assert (order.verdict, order.power.least_p) == (ELSEWHERE, 2 / 32)
    assert [choice.other.value for choice in order.choices] == [10, 0, 0]
    same = replace(tables, checkpoints={"ape_free": next(iter(tables.checkpoints.values()))})
    assert next(formation_order.suppression_follows_formation(same)).verdict == POWERLESS
    assert next(formation_order.a_tenth_of_the_penalty_delays(tables)).verdict == POWERLESS
    strong = replace(tables, weak=tables.constrained)
    assert next(formation_order.a_tenth_of_the_penalty_delays(strong)).verdict == HOLDS
    assert next(constrained.kernel_is_indistinguishable(tables)).verdict == OPEN
    monkeypatch.setattr(constrained, "t_interval", lambda values: {"low": 0.8, "high": 1.0})
    assert next(constrained.kernel_is_indistinguishable(tables)).verdict == WEAKENED


def test_holm():
    assert holm(np.array([0.01, 0.04, 0.03, math.nan])).tolist() == pytest.approx([0.04, 0.09, 0.09, 1])
    assert significant(np.array([0.01, 0.04])).tolist() == [True, True]
    assert significant(np.array([0.03, 0.04])).tolist() == [False, False]
