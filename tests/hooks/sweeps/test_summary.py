"""`summarize_sweep`: each statement against numbers that are known, and what it does with tables that do not fit."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from tlspectral.hooks import summarize_sweep

pytestmark = pytest.mark.lowest

LAYERS, HEADS, SEQUENCES = 6, 5, 8


def made(part="symmetric", seed=0, control=False):
    """A sweep of 30 heads with known effects, and the head table that goes with it."""
    rng = np.random.default_rng(seed)
    n = LAYERS * HEADS
    common = rng.normal(0, 0.02, SEQUENCES)  # what all heads share: the same sequences serve them all
    deltas = rng.normal(0, 0.01, (n, 1)) + common + rng.normal(0, 0.001, (n, SEQUENCES))
    deltas[17] += 1.0
    sizes = rng.uniform(0.5, 2, n)
    place = np.arange(n)
    mean, error = deltas.mean(1), deltas.std(axis=1, ddof=1) / SEQUENCES**0.5
    sweep = pd.DataFrame({"layer": place // HEADS, "head": place % HEADS, "part": part, "value": 4 + mean,
                          "delta": mean, "delta_se": error, "delta_p": 0.5, "score_rms": sizes})  # fmt: skip
    sums = {"delta": deltas.sum(0).tolist(), "delta_per_rms": (deltas / sizes[:, None]).sum(0).tolist()}
    if control:
        sweep["control_delta"], sweep["control_delta_se"] = 0.25, 0.001
        sums["delta_above_control"] = (deltas - 0.25).sum(0).tolist()
    sweep.attrs = {"sums_per_sequence": sums, "task": "induction", "higher_is_better": False}
    heads = sweep[["layer", "head"]].assign(
        dir_frac=rng.uniform(0.5, 0.8, n),
        D_head=sweep["delta"] ** 3,
        status="ok",
        imag_mass=np.nan,
        prev=-np.abs(place - 19.0),  # heads 18, 19 and 20 are above head 17
        dup=place == 17,
        ind=rng.uniform(0, 1, n),
    )
    return sweep, heads.astype({"dup": float}), deltas


def statement(summary, name, control="none", **also):
    found = summary[(summary["statement"] == name) & (summary["size_control"] == control)]
    for key, value in also.items():
        found = found[found[key] == value]
    assert len(found) == 1
    return found.iloc[0]


def test_a_sum_has_the_interval_of_its_sequences():
    sweep, heads, deltas = made()
    found = statement(summarize_sweep(sweep, heads), "sum")
    sums = deltas.sum(0)
    expected = scipy.stats.t.interval(0.95, SEQUENCES - 1, sums.mean(), scipy.stats.sem(sums))
    assert found["value"] == pytest.approx(sums.mean())
    assert (found["low"], found["high"]) == pytest.approx(expected)
    assert found["n"] == 30
    # As if heads were independent it would be several times narrower.
    assert found["high"] - found["value"] > 3 * 1.96 * np.sqrt((sweep["delta_se"] ** 2).sum())


def test_twins_of_heads_with_a_small_effect_are_named():
    sweep, heads, _ = made()
    sweep["delta"] = 0.1
    sweep.loc[[3, 7], "delta"] = [0.001, -0.005]  # L0H3, L1H2
    pairs = pd.DataFrame(
        [("L1H4", "L0H3", 0.8), ("L1H2", "L1H3", 0.6), ("L0H3", "L2H0", 0.4), ("L2H1", "L2H2", 0.9)],
        columns=["a", "b", "qk"],
    )
    summary = summarize_sweep(sweep, heads, likeness=pairs)
    found = summary[summary["statement"] == "twin"]
    assert found[["value", "note", "n"]].values.tolist() == [[0.8, "L0H3, twin L1H4", 2], [0.6, "L1H2, twin L1H3", 2]]
    assert not (summarize_sweep(sweep, heads)["statement"] == "twin").any()
    with pytest.raises(ValueError, match="likeness"):
        summarize_sweep(sweep, heads, likeness=heads)


def test_a_cut_table_gets_the_widest_interval():
    sweep, heads, _ = made()
    cut = sweep[sweep["layer"] > 1]
    found = statement(summarize_sweep(cut, heads), "sum")
    assert found["value"] == pytest.approx(cut["delta"].sum())
    assert found["high"] - found["value"] == pytest.approx(1.959964 * cut["delta_se"].sum(), rel=1e-6)
    assert found["note"] == "errors of all heads added"


def test_the_share_of_small_effects_knows_the_errors():
    sweep, heads, _ = made()
    found = statement(summarize_sweep(sweep, heads), "share_small")
    assert found["value"] == (sweep["delta"].abs() < 0.01).mean()
    assert found["low"] <= found["value"] <= found["high"]
    assert found["high"] < 1  # head 17 is never small
    sweep["delta_se"] = 0.0
    exact = statement(summarize_sweep(sweep, heads), "share_small")
    assert exact["low"] == exact["value"] == exact["high"]


def test_effects_and_detectors_are_ranked_among_all_heads():
    sweep, heads, _ = made()
    summary = summarize_sweep(sweep, heads)
    for name, rank in (("prev", 4), ("dup", 1)):  # of the head with the largest effect, by the detector
        found = statement(summary, "detector_rank", column=name)
        assert (found["value"], found["pvalue"], found["n"], found["note"]) == (rank, rank / 30, 30, "L3H2")
    for name, head, note in (("prev", 19, "L3H4"), ("dup", 17, "L3H2")):  # of the strongest head, by harm
        found = statement(summary, "effect_rank", column=name)
        rank = 1 + (sweep["delta"] > sweep["delta"][head]).sum()
        assert (found["value"], found["pvalue"], found["n"], found["note"]) == (rank, rank / 30, 30, note)
    ranked = summary["statement"].isin(["detector_rank", "effect_rank"])
    assert (summary.loc[ranked, "pvalue_floor"] == 1 / 30).all()
    assert summary.loc[~ranked, "pvalue_floor"].isna().all()
    better = sweep.assign(delta=-sweep["delta"])
    better.attrs = {**sweep.attrs, "higher_is_better": True}
    assert statement(summarize_sweep(better, heads, small=0.1), "effect_rank", column="dup")["value"] == 1


def test_correlations_are_with_four_columns():
    sweep, heads, _ = made()
    summary = summarize_sweep(sweep, heads.assign(rope_imag_frac=np.nan, imag_mass=heads["ind"]))
    named = summary[(summary["statement"] == "rank_correlation") & (summary["size_control"] == "none")]["column"]
    assert named.tolist() == ["dir_frac", "D_head", "prev"]  # there is no rope_imag_frac of any head
    found = statement(summary, "rank_correlation", column="dir_frac")
    expected = scipy.stats.spearmanr(heads["dir_frac"], sweep["delta"])
    assert found["value"] == pytest.approx(expected.statistic)
    assert found["n"] == LAYERS * HEADS
    assert found["low"] < found["value"] < found["high"]
    assert (found["pvalue"] < 0.05) == (found["low"] > 0 or found["high"] < 0)
    certain = statement(summary, "rank_correlation", column="D_head")  # a monotone function of the effect
    assert (certain["value"], certain["low"], certain["high"]) == pytest.approx((1, 1, 1))


def test_q_corrects_for_all_correlations_of_the_table():
    (one, heads, _), (two, _, _) = made(control=True), made("antisymmetric", seed=1)
    summary = summarize_sweep([one, two], heads.assign(rope_imag_frac=heads["ind"]))
    of_correlations = summary["statement"] == "rank_correlation"
    tested = summary.loc[of_correlations].sort_values("pvalue", ascending=False)
    assert len(tested) == 4 * (3 + 2)  # columns; size controls of each sweep
    shares = tested["pvalue"] * len(tested) / np.arange(len(tested), 0, -1)
    assert tested["qvalue"].tolist() == pytest.approx(shares.cummin().clip(upper=1).tolist())
    assert summary.loc[~of_correlations, "qvalue"].isna().all()


@pytest.mark.parametrize(("measured", "correlations"), [(20, 3), (19, 0)])
def test_heads_that_were_not_measured_do_not_count_and_20_are_needed_for_a_correlation(measured, correlations):
    sweep, heads, _ = made("output")
    sweep.loc[measured:, ["value", "delta", "delta_se"]] = np.nan
    sweep["score_rms"] = np.nan  # a part without scores has no size
    summary = summarize_sweep(sweep, heads)
    assert set(summary["size_control"]) == {"none"}
    assert statement(summary, "sum")["n"] == measured
    found = summary[summary["statement"] == "rank_correlation"]
    assert len(found) == correlations
    assert (found["n"] == measured).all()


def test_interval_and_p_take_layers_as_units():
    """Heads of a layer that are copies of each other count once: the interval is as wide as that of the layers."""
    rng = np.random.default_rng(3)
    sweep, heads, _ = made()
    of_layer = rng.normal(size=(2, LAYERS))
    sweep["delta"], heads["dir_frac"] = (np.repeat(one, HEADS) for one in of_layer)
    found = statement(summarize_sweep(sweep, heads), "rank_correlation", column="dir_frac")
    ranks = [scipy.stats.rankdata(one) for one in of_layer]
    places = np.arange(LAYERS)
    rest = [np.corrcoef(ranks[0][places != left], ranks[1][places != left])[0, 1] for left in places]
    law = scipy.stats.t(LAYERS - 1, found["value"], np.std(rest) * np.sqrt(LAYERS - 1))
    assert (found["low"], found["high"]) == pytest.approx(tuple(np.clip(law.ppf([0.025, 0.975]), -1, 1)))
    assert found["pvalue"] == pytest.approx(2 * min(law.cdf(0), law.sf(0)))
    wide = {"layer": 0, "head": np.arange(LAYERS * HEADS)}
    sweep["delta"] = rng.normal(size=len(sweep))
    alone = heads.assign(dir_frac=rng.normal(size=len(heads)), **wide)
    single = statement(summarize_sweep(sweep.assign(**wide), alone), "rank_correlation", column="dir_frac")
    assert np.isfinite(single["value"])
    assert np.isnan([single["low"], single["pvalue"]]).all()


def test_size_controls():
    sweep, heads, deltas = made(control=True)
    summary = summarize_sweep(sweep, heads)
    assert set(summary["size_control"]) == {"none", "score_rms", "random"}
    per_rms = deltas / sweep["score_rms"].to_numpy()[:, None]
    assert statement(summary, "sum", "score_rms")["value"] == pytest.approx(per_rms.mean(1).sum())
    assert statement(summary, "sum", "score_rms")["note"] == "over 8 sequences"
    assert statement(summary, "sum", "random")["value"] == pytest.approx((sweep["delta"] - 0.25).sum())
    assert statement(summary, "share_small", "random")["value"] == ((sweep["delta"] - 0.25).abs() < 0.01).mean()
    assert not ((summary["statement"] == "share_small") & (summary["size_control"] == "score_rms")).any()


def test_several_parts_are_summarised_one_by_one():
    (one, heads, _), (two, _, _) = made(), made("antisymmetric", seed=1)
    apart = summarize_sweep([one, two], heads)
    assert apart["part"].unique().tolist() == ["symmetric", "antisymmetric"]
    assert (apart.loc[apart["statement"] == "sum", "note"] == "over 8 sequences").all()
    both = pd.concat([one, two], ignore_index=True)
    with pytest.raises(ValueError, match="give the sweeps as a list"):
        summarize_sweep(both, heads)
    both.attrs = {"task": "induction", "higher_is_better": False}
    joined = summarize_sweep(both, heads)
    assert (joined.loc[joined["statement"] == "sum", "note"] == "errors of all heads added").all()
    keep = ["part", "size_control", "statement", "column", "value", "pvalue", "n"]
    pd.testing.assert_frame_equal(joined[keep], apart[keep])


def test_sets_are_ranked_by_the_best_of_their_heads():
    _, heads, _ = made()
    sweep = pd.DataFrame({"layer": -1, "head": -1, "name": ["harmful", "twenty", "rest"], "part": "symmetric",
                          "delta": [2.0, 0.5, -0.001], "delta_se": 0.001, "score_rms": np.nan})  # fmt: skip
    sets = {"harmful": ["L3H2", "L0H0"], "twenty": ["L3H4", "L0H1"], "rest": ["L1H0"]}  # L3H4 has the largest prev
    sweep.attrs = {"task": "induction", "higher_is_better": False, "sets": sets}
    summary = summarize_sweep(sweep, heads.sample(frac=1, random_state=0))
    assert set(summary["statement"]) == {"sum", "share_small", "detector_rank", "effect_rank"}
    assert statement(summary, "sum")["value"] == pytest.approx(2.499)
    worst, nearest = (statement(summary, name, column="prev") for name in ("detector_rank", "effect_rank"))
    assert (worst["value"], worst["note"], worst["pvalue"], worst["n"]) == (2, "harmful", pytest.approx(2 / 3), 3)
    assert (nearest["value"], nearest["note"]) == (2, "twenty")
    assert statement(summary, "detector_rank", column="dup")["value"] == 1  # L3H2, head 17
    with pytest.raises(ValueError, match="a set is in the sweep twice"):
        summarize_sweep(pd.concat([sweep, sweep]), heads)
    with pytest.raises(ValueError, match="the head table lacks L3H4 of the sweep"):
        summarize_sweep(sweep, heads.drop(index=19))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda sweep, heads: (sweep, heads.iloc[:-1]), "the head table lacks L5H4 of the sweep"),
        (lambda sweep, heads: (pd.concat([sweep, sweep]), heads), "a head is in the sweep twice"),
        (lambda sweep, heads: (sweep.iloc[:0], heads), "no measured effect"),
    ],
)
def test_tables_that_do_not_fit_are_refused(change, words):
    sweep, heads, _ = made()
    with pytest.raises(ValueError, match=words):
        summarize_sweep(*change(sweep, heads))
