"""Contrasts of formation times between arms: the paper's table 4, and verdicts."""

import numpy as np
import pandas as pd
import pytest

from tlspectral.studies.fingerprint.constrained import formation_tests

# "Fingerprint, Not Blueprint", section 10: first evaluation with `ce_pred` below 2.154 of the released runs.
PUBLISHED = {
    "ape_free": [600, 600, 600, 600, 600],
    "ape_sym": [1400, 1600, 1800, 1900, 2000],
    "rope_free": [1000, 900, 1000, 900, 900],
    "rope_sym": [1400, 1400, 1800, 1600, 1600],
    "rope_imag": [1300, 1400, 1300, 1000, 1400],
}


def formed(steps, last_step=6000):
    rows = [
        {"arm": arm, "seed": seed, "formed_loss": step, "formed_both": step, "last_step": last_step}
        for arm, found in steps.items()
        for seed, step in enumerate(found)
    ]
    return pd.DataFrame(rows)


def test_the_papers_table_4():
    table = formation_tests(formed(PUBLISHED))
    assert table["criterion"].tolist() == ["both"] * 4 + ["loss"] * 4
    table = table[table["criterion"] == "loss"].set_index("prediction")
    assert list(table.index) == ["P1", "P3", "P4", "P2"]
    assert table["hodges_lehmann"].tolist() == [300, 1200, 600, 400]
    assert table["rank_biserial"].tolist() == pytest.approx([1, 1, 1, 0.92])
    assert table["ratio"].round(2).tolist() == [1.57, 2.90, 1.66, 1.36]
    assert table["mean_slower"].tolist() == [940, 1740, 1560, 1280]
    assert table["sd_slower"].round().tolist() == [55, 241, 167, 164]
    # As published: exact without regard to ties, no cumulative minimum.
    assert table["pvalue_paper"].round(4).tolist() == [0.0040, 0.0040, 0.0040, 0.0079]
    assert table["q_paper"].round(3).tolist() == [0.016, 0.008, 0.005, 0.008]
    # With ties counted and the adjustment done to the end.
    assert table["pvalue"].tolist() == pytest.approx([1 / 252] * 3 + [3 / 252])
    assert table["q"].tolist() == pytest.approx([4 / 3 / 252] * 3 + [3 / 252])
    assert table["verdict"].tolist() == ["holds", "falsified", "falsified", "falsified"]


def test_verdicts_follow_the_numbers():
    same = {arm: [600, 700, 800, 900, 1000] for arm in PUBLISHED}
    verdicts = formation_tests(formed(same)).set_index("prediction")["verdict"]
    assert verdicts["P1"].tolist() == ["not shown"] * 2
    assert verdicts["P3"].tolist() == verdicts["P4"].tolist() == ["not falsified"] * 2
    faster = formation_tests(formed({**PUBLISHED, "ape_sym": [100, 200, 300, 400, 500]})).set_index("prediction")
    assert (faster.loc["P3", "verdict"] == "not falsified").all()
    assert (faster.loc["P3", "rank_biserial"] == -1).all()
    for never, verdict in ((5, "holds"), (2, "some formed")):
        runs = {**PUBLISHED, "rope_imag": [np.nan] * never + [1300] * (5 - never)}
        row = formation_tests(formed(runs)).set_index("prediction").loc["P2"].iloc[0]
        assert (row["verdict"], row["not_formed_slower"], row["n_slower"]) == (verdict, never, 5)
        assert row["mean_slower"] == np.mean([6000] * never + [1300] * (5 - never))
        assert row["pvalue"] == pytest.approx(1 / 252)


def test_each_criterion_is_tested_on_its_own():
    runs = formed(PUBLISHED)
    runs.loc[runs["arm"] == "rope_imag", "formed_both"] = np.nan
    table = formation_tests(runs).set_index(["criterion", "prediction"])
    assert table.loc[("both", "P2"), "verdict"] == "holds"
    assert table.loc[("loss", "P2"), "verdict"] == "falsified"
    assert table.loc[("both", "P2"), "not_formed_slower"] == 5


def test_contrasts_of_the_arms_that_are_there():
    some = formation_tests(formed({name: PUBLISHED[name] for name in ("rope_free", "rope_sym", "ape_free")}))
    assert some["prediction"].tolist() == ["P1", "P4"] * 2
    none = formation_tests(formed({"ape_free": [1, 2], "mine": [3, 4]}))
    assert none.empty
    assert list(none) == list(some)


def test_one_seed_is_not_tested_and_leaves_the_others_as_they_are():
    steps = {"ape_free": [600, 600], "ape_sym": [1400], "rope_free": [900, 1000]}
    table = formation_tests(formed(steps)).set_index(["criterion", "prediction"])
    single = table.loc[("loss", "P3")]
    assert single["verdict"] == "one seed"
    assert (single["n_slower"], single["n_faster"], single["mean_slower"]) == (1, 2, 1400)
    assert single["ratio"] == pytest.approx(1400 / 600)
    assert single[["sd_slower", "statistic", "pvalue", "q", "pvalue_paper", "q_paper", "hodges_lehmann"]].isna().all()
    tested = table.loc[("loss", "P1")]
    assert tested["pvalue"] == tested["q"] == pytest.approx(1 / 6)  # the only test of its family
    assert tested["verdict"] == "not shown"


def test_contrasts_of_runs_that_go_on_are_open():
    runs = formed({**PUBLISHED, "rope_imag": [np.nan] * 5}, last_step=2100)
    verdicts = formation_tests(runs, finished=runs["arm"] != "rope_imag").set_index("prediction")["verdict"]
    assert (verdicts["P2"] == "open").all()  # and not that the prediction of no formation holds
    assert (verdicts[["P1", "P3", "P4"]] != "open").all()
    assert (formation_tests(runs).set_index("prediction").loc["P2", "verdict"] == "holds").all()


def test_a_table_without_steps_of_formation_is_refused():
    with pytest.raises(ValueError, match="formation has no column formed_loss"):
        formation_tests(formed(PUBLISHED).drop(columns="formed_loss"))
