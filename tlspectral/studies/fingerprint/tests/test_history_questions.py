"""The three questions, on series made by hand and on the published histories of two Pythia models."""

import math
from importlib.resources import as_file, files

import numpy as np
import pandas as pd
import pytest
from described import assert_described
from hypothesis import given
from hypothesis import strategies as st

from tlspectral.history import PYTHIA_STEPS, within_model_percentile
from tlspectral.studies.fingerprint.history_questions import (
    eventual_head_rank,
    formation_crossing,
    median_leaves_null,
)

PUBLISHED = files("tlspectral") / "data" / "published"
NAMES_410M = {"behaviour": "prev_beh", "phase": "rif_pct_52"}
NAMES_160M = {"behaviour": "prev_beh", "phase": "rif_pct"}


def published(name):
    with as_file(PUBLISHED / f"{name}.parquet") as path:
        return pd.read_parquet(path)


def track(prev, phase=None, **columns):
    steps = [10 * place for place in range(len(prev))]
    return pd.DataFrame(
        {"step": steps, "prev": prev, "rope_imag_frac_pct": prev if phase is None else phase, **columns}
    )


# Q1


@given(st.lists(st.integers(0, 10), min_size=1, max_size=8), st.integers(1, 10))
def test_a_crossing_is_the_first_step_at_the_level(values, level):
    found = formation_crossing(track([value / 10 for value in values]), behaviour_level=level / 10).behaviour
    first = next((place for place, value in enumerate(values) if value >= level), None)
    if first is None:
        assert found.step is found.after is found.value is found.lowest_later is None
    else:
        assert found.step == 10 * first
        assert found.after == (10 * (first - 1) if first else None)
        assert found.value == values[first] / 10
        assert found.lowest_later == min(values[first:]) / 10


@pytest.mark.parametrize(
    ("prev", "phase", "first", "lag"),
    [
        ([0.0, 0.2, 0.6, 0.9], [0.5, 0.4, 0.95, 0.95], "neither", (-10, 10)),
        ([0.0, 0.2, 0.6, 0.9], [0.5, 0.95, 0.95, 0.95], "phase", (-20, 0)),
        ([0.0, 0.2, 0.6, 0.9], [0.5, 0.4, 0.3, 0.95], "behaviour", (0, 20)),
        ([0.0, 0.6, 0.6, 0.9], [0.5, 0.4, 0.3, 0.95], "behaviour", (10, 30)),
        ([0.0, 0.2, 0.6, 0.9], [0.95, 0.4, 0.3, 0.3], "phase", (-math.inf, -10)),
        ([0.6, 0.2, 0.6, 0.9], [0.3, 0.95, 0.3, 0.3], "behaviour", (0, math.inf)),
        ([0.6, 0.2, 0.6, 0.9], [0.95, 0.9, 0.9, 0.9], "neither", (-math.inf, math.inf)),
        ([0.0, 0.2, 0.3, 0.3], [0.5, 0.95, 0.9, 0.9], "phase", None),
        ([0.0, 0.2, 0.6, 0.9], [0.5, 0.4, 0.3, 0.3], "behaviour", None),
        ([0.0, 0.2, 0.3, 0.3], [0.5, 0.4, 0.3, 0.3], None, None),
    ],
)
def test_the_order_is_as_fine_as_the_grid(prev, phase, first, lag):
    found = formation_crossing(track(prev, phase))
    assert found.first == first
    assert found.lag == lag if lag is not None else np.isnan(found.lag).all()


@given(st.integers(0, 1000), st.integers(0, 1000), st.lists(st.integers(1, 1100), min_size=1, unique=True))
def test_the_true_lag_lies_in_the_bounds(behaviour_at, phase_at, steps):
    """A head that forms at some step, whatever the grid."""
    grid = np.array([*sorted(steps), 2000])
    table = pd.DataFrame({"step": grid, "prev": grid >= behaviour_at, "rope_imag_frac_pct": grid >= phase_at})
    low, high = formation_crossing(table).lag
    assert low <= phase_at - behaviour_at <= high


def test_published_pythia_410m_crosses_together():
    found = formation_crossing(published("pythia-410m_ckpt_analysis"), **NAMES_410M)
    assert (found.behaviour.after, found.behaviour.step) == (512, 1000)
    assert (found.phase.after, found.phase.step) == (512, 1000)
    assert (found.first, found.lag) == ("neither", (-488, 488))
    assert found.behaviour.value == pytest.approx(0.9573, abs=5e-5)
    assert found.phase.value == pytest.approx(0.9896, abs=5e-5)


def test_published_pythia_160m_crosses_together_and_falls_back():
    table = published("pythia-160m_ckpt_analysis")
    found = formation_crossing(table, **NAMES_160M)
    assert (found.first, found.lag) == ("neither", (-488, 488))
    assert found.behaviour.value == pytest.approx(0.9435, abs=5e-5)
    assert found.phase.value == pytest.approx(0.9306, abs=5e-5)
    assert found.phase.lowest_later == pytest.approx(0.597, abs=5e-4)  # FP does not say so
    before = table.set_index("step").loc[512]
    assert before["prev_beh"] == pytest.approx(0.3738, abs=5e-5)
    assert before["rif_pct"] == pytest.approx(0.0417, abs=5e-5)


# Q2


@pytest.mark.parametrize(
    ("medians", "step", "side"),
    [
        ([0.61, 0.60, 0.50, 0.40], 20, "below"),
        ([0.61, 0.50, 0.60, 0.40], 30, "below"),
        ([0.61, 0.50, 0.70, 0.70], 20, "above"),
        ([0.50, 0.50, 0.40, 0.40], 0, "below"),
        ([0.61, 0.50, 0.40, 0.60], None, None),
        ([0.61, 0.59, 0.59, 0.59], None, None),  # on the edge is inside
    ],
)
def test_a_median_has_left_when_it_stays_outside(medians, step, side):
    table = track([0.0] * 4, D_head_median=medians, D_head_null_low=0.59, D_head_null_high=0.63)
    found = median_leaves_null(table)
    assert (found.step, found.side) == (step, side)
    if step is not None:
        assert found.after == (step - 10 if step else None)
        assert found.value == medians[step // 10]
        assert found.null == (0.59 if side == "below" else 0.63)
    assert found == median_leaves_null(table.drop(columns=["D_head_null_low", "D_head_null_high"]), low=0.59, high=0.63)


def test_a_null_that_moves_is_followed():
    table = track([0.0] * 3, D_head_median=[0.5] * 3, D_head_null_low=[0.6, 0.4, 0.6], D_head_null_high=[0.7] * 3)
    assert median_leaves_null(table).step == 20
    assert median_leaves_null(table.assign(D_head_null_low=[0.6, 0.6, 0.4])).step is None


@pytest.mark.parametrize(("name", "last"), [("pythia-410m", 0.3954), ("pythia-160m", 0.4528)])
def test_published_medians_leave_the_null_for_good(name, last):
    """Against an interval that is generous: the medians of the first eight checkpoints move by .0005."""
    table = published(f"{name}_ckpt_analysis")
    assert table["pop_med_D"].iloc[-1] == pytest.approx(last, abs=5e-5)
    found = median_leaves_null(table, median="pop_med_D", low=0.60, high=0.62)
    assert found.side == "below"
    assert found.step == {"pythia-410m": 1000, "pythia-160m": 512}[name]


# Q3


def test_ranks_are_counted_from_the_top():
    table = track([0.1, 0.9], prev_pct=[0.25, 1.0], D_head_pct=[0.5, 0.625], n_heads=4)
    found = eventual_head_rank(table, percentiles=["prev_pct", "D_head_pct"])
    assert_described(found)
    assert found["rank"].tolist() == [4.0, 1.0, 3.0, 2.5]  # 2.5: a tie of the second and third
    assert found["top_share"].tolist() == [1.0, 0.25, 0.75, 0.625]
    assert (found["chance"] == 0.25).all()
    assert found["column"].tolist() == ["prev_pct"] * 2 + ["D_head_pct"] * 2
    pd.testing.assert_frame_equal(found, eventual_head_rank(table, percentiles=["prev_pct", "D_head_pct"], n_heads=4))


@given(st.lists(st.integers(0, 6), min_size=2, max_size=20))
def test_a_rank_is_the_number_of_larger_heads_and_one(values):
    percentile = within_model_percentile(pd.Series(values, dtype=float))
    for value, own in zip(values, percentile, strict=True):
        found = eventual_head_rank(track([0.0], pct=own), percentiles=["pct"], n_heads=len(values))["rank"].item()
        larger, equal = sum(other > value for other in values), values.count(value)
        assert found == larger + (equal + 1) / 2


def test_the_published_head_stood_low_before_it_formed():
    found = eventual_head_rank(published("pythia-410m_ckpt_analysis"), percentiles=["rif_pct_52"], n_heads=384)
    rank = found.set_index("step")["rank"]
    assert (rank[0], rank[512], rank[1000]) == (194, 374, 5)
    assert found.set_index("step")["percentile"][512] == pytest.approx(0.0286, abs=5e-5)


# Percentiles of the published table


def test_published_percentiles_come_out_of_the_published_heads():
    heads, history = published("pythia-410m_head_full"), published("pythia-410m_ckpt_analysis")
    assert tuple(history["step"]) == PYTHIA_STEPS
    last, own = history.iloc[-1], (heads["layer"] == 5) & (heads["head"] == 2)
    assert heads.loc[heads["prev"].idxmax(), ["layer", "head"]].tolist() == [5, 2]
    for column, percentile, median in (
        ("rope_imag_frac", "rif_pct_52", "pop_med_rif"),
        ("D_head", "D_pct_52", "pop_med_D"),
    ):
        assert within_model_percentile(heads[column])[own].item() == last[percentile]
        assert heads[column].median() == pytest.approx(last[median], abs=1e-12)


# Bad tables


def test_bad_tables_are_refused():
    good = track([0.1, 0.9], n_heads=4)
    with pytest.raises(ValueError, match=r"no column prev: give a table of HeadHistory\.track"):
        formation_crossing(good.drop(columns="prev"))
    with pytest.raises(ValueError, match="column 'step' holds names such as 'base', which have no order"):
        formation_crossing(good.assign(step=["base", "tuned"]))
    with pytest.raises(ValueError, match="several rows of step 0"):
        formation_crossing(pd.concat([good, good]).sort_values("step"))
    with pytest.raises(ValueError, match="step 0 follows step 10"):
        formation_crossing(good[::-1])
    with pytest.raises(ValueError, match="'rope_imag_frac_pct' is NaN in row 1"):
        formation_crossing(good.assign(rope_imag_frac_pct=[0.1, np.nan]))
    with pytest.raises(ValueError, match="no rows"):
        formation_crossing(good[:0])
    with pytest.raises(ValueError, match="no column D_head_median"):
        median_leaves_null(good)
    with pytest.raises(ValueError, match="no column prev_pct"):
        eventual_head_rank(good)
