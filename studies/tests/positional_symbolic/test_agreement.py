"""Agreement of scores with weights: against scipy, and against tables made so that the answer is known."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from tlspectral_studies.positional_symbolic.agreement import frequency_agreement, score_agreement

LAYERS, HEADS, PAIRS = 6, 5, 12


def heads_table(rng, **columns):
    index = pd.MultiIndex.from_product([range(LAYERS), range(HEADS)], names=["layer", "head"])
    table = pd.DataFrame(index=index).reset_index()
    for name in ("rope_imag_frac", "D_head", "prev"):
        table[name] = columns.get(name, rng.normal(size=len(table)))
    return table


def scores_table(rng, table, s_pos):
    return table[["layer", "head"]].assign(s_pos=s_pos, s_sym=rng.uniform(size=len(table))).sample(frac=1.0)


def frequency_tables(rng, shares, positional):
    index = pd.MultiIndex.from_product(
        [range(LAYERS), range(HEADS), range(PAIRS)], names=["layer", "head", "frequency"]
    )
    table = pd.DataFrame(index=index).reset_index()
    return table.assign(s_pos=positional.ravel()), table.assign(im_share=shares.ravel()).sample(frac=1.0)


def test_score_agreement_is_spearman_over_the_heads_of_both_tables():
    rng = np.random.default_rng(0)
    table = heads_table(rng, D_head=np.tile([0.0, 0.0, 1.0, 1.0, 2.0], LAYERS))  # ties share their rank
    scores = scores_table(rng, table, table["prev"] + rng.normal(size=len(table)))
    scores.loc[scores.index[:4], "s_sym"] = np.nan
    found = score_agreement(scores, table.iloc[2:], draws=50, seed=5)
    pd.testing.assert_frame_equal(found, score_agreement(scores, table.iloc[2:], draws=50, seed=5))
    assert found.attrs == {"draws": 50, "seed": 5, "table": "score_agreement"}
    found = found.set_index(["score", "column"])
    joined = scores.merge(table.iloc[2:], on=["layer", "head"])
    for score, column in found.index:
        kept = joined[[score, column]].dropna()
        expected = scipy.stats.spearmanr(kept[score], kept[column]).statistic
        # Noise 1e-16; Pearson in place of Spearman, or rows joined by position, is off by 0.01 and more.
        assert found.loc[(score, column), "spearman"] == pytest.approx(expected, abs=1e-12)
        assert found.loc[(score, column), "n"] == len(kept)


def test_a_trend_over_layers_alone_is_found_by_the_first_null_and_not_by_the_second():
    rng = np.random.default_rng(2)
    depth = np.repeat(np.arange(LAYERS), HEADS)
    table = heads_table(rng, prev=depth + 0.1 * rng.normal(size=LAYERS * HEADS))
    scores = scores_table(rng, table, depth + 0.1 * rng.normal(size=LAYERS * HEADS))
    found = score_agreement(scores, table, columns=("prev",), draws=400).query("score == 's_pos'").iloc[0]
    assert found["null_share"] == 1.0
    assert found["null_high"] < found["spearman"]
    assert found["layer_null_low"] < found["spearman"] < found["layer_null_high"]
    assert 0.01 < found["layer_null_share"] < 0.99


def test_the_null_of_unrelated_numbers_is_centred_and_as_wide_as_theory_says():
    rng = np.random.default_rng(3)
    table = heads_table(rng)
    found = score_agreement(scores_table(rng, table, rng.normal(size=len(table))), table, draws=4000)
    # sd 1/sqrt(n-1) = 0.186, so 95 % within 0.36; 4000 draws leave 0.015.
    assert found["null_high"].to_numpy() == pytest.approx(0.36, abs=0.03)
    assert found["null_low"].to_numpy() == pytest.approx(-0.36, abs=0.03)


def test_frequency_agreement_finds_a_profile_and_says_when_all_heads_share_it():
    rng = np.random.default_rng(4)
    own = rng.normal(size=(LAYERS, HEADS, PAIRS))
    found = frequency_agreement(*frequency_tables(rng, own, 2 * own + 1), draws=300)
    assert found["spearman"].to_numpy() == pytest.approx(1.0, abs=1e-12)  # the same order, to rounding
    assert (found["null_share"] == 1.0).all()
    assert (found["turned_share"] < 1.0 + 1e-9).all()
    assert found["others"].abs().max() < 0.35  # noise 1/sqrt(11 * 29) = 0.056; a shared profile gives 1
    shared = np.broadcast_to(np.linspace(0, 1, PAIRS), own.shape)
    found = frequency_agreement(*frequency_tables(rng, shared, shared + 1e-3 * own), draws=20)
    assert found["others"].min() > 0.99


def test_frequency_agreement_sees_a_neighbourly_profile_turned():
    rng = np.random.default_rng(5)
    wave = np.sin(2 * np.pi * np.arange(PAIRS) / PAIRS + rng.uniform(0, 7, size=(LAYERS, HEADS, 1)))
    shares, positional = wave, np.roll(wave, 3, axis=2)
    found = frequency_agreement(*frequency_tables(rng, shares, positional), draws=300)
    # A quarter turn of a sine: correlation near 0, with as many shifts above as below.
    assert found["spearman"].abs().max() < 0.2
    assert found["turned_share"].between(0.3, 0.7).all()


def test_what_has_no_rank_is_nan_and_not_a_number():
    rng = np.random.default_rng(6)
    own = rng.normal(size=(LAYERS, HEADS, PAIRS))
    own[0, 0] = 0.5
    own[0, 1, 3] = np.nan
    found = frequency_agreement(*frequency_tables(rng, own, rng.normal(size=own.shape)), draws=20)
    found = found.set_index(["layer", "head"])
    for head in ((0, 0), (0, 1)):
        assert found.loc[head, ["spearman", "null_low", "null_share", "turned_share", "others"]].isna().all()
    assert found.drop([(0, 0), (0, 1)]).notna().all(axis=None)
    nothing = np.full(LAYERS * HEADS, np.nan)
    table = heads_table(rng, D_head=np.ones(LAYERS * HEADS), rope_imag_frac=nothing)
    scores = score_agreement(scores_table(rng, table, rng.normal(size=len(table))), table, draws=20)
    scores = scores[scores["column"] != "prev"]
    assert (scores["n"] == np.where(scores["column"] == "D_head", LAYERS * HEADS, 0)).all()
    assert scores[["spearman", "null_low", "null_share", "layer_null_share"]].isna().all(axis=None)
