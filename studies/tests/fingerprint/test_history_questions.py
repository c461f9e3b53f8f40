"""The three questions, on series made by hand and on the published histories of two Pythia models, and their figure."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tlspectral_studies.fingerprint.figures.checkpoints import checkpoint_acts
from tlspectral_studies.fingerprint.history_questions import (
    eventual_head_rank,
    formation_crossing,
    half_of_fall,
    median_leaves_null,
)
from tlspectral_studies.fingerprint.published import published_checkpoints, published_heads

from tlspectral.history.sources import PYTHIA_STEPS

pytestmark = pytest.mark.lowest

few = settings(max_examples=30, derandomize=True)


def track(prev, phase=None, **columns):
    steps = [10 * place for place in range(len(prev))]
    return pd.DataFrame(
        {"step": steps, "prev": prev, "rope_imag_frac_pct": prev if phase is None else phase, **columns}
    )


# --- Q1 ---


@few
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
        ([0.0, 0.2, 0.6, 0.9], [0.95, 0.4, 0.3, 0.3], "phase", (-math.inf, -10)),
        ([0.6, 0.2, 0.6, 0.9], [0.3, 0.95, 0.3, 0.3], "behaviour", (0, math.inf)),
        ([0.0, 0.2, 0.3, 0.3], [0.5, 0.95, 0.9, 0.9], "phase", None),
        ([0.0, 0.2, 0.6, 0.9], [0.5, 0.4, 0.3, 0.3], "behaviour", None),
        ([0.0, 0.2, 0.3, 0.3], [0.5, 0.4, 0.3, 0.3], None, None),
    ],
)
def test_the_order_is_as_fine_as_the_grid(prev, phase, first, lag):
    found = formation_crossing(track(prev, phase))
    assert found.first == first
    assert found.lag == lag if lag is not None else np.isnan(found.lag).all()


# --- Q2 ---


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
    # A null that moves is followed.
    if step == 20:
        assert median_leaves_null(table.assign(D_head_null_low=0.1, D_head_null_high=[0.1] * 3 + [0.9])).step is None


def test_the_median_of_a_layer_and_half_of_its_fall():
    layers = [[0.61, 0.61], [0.60, 0.44], [0.50, 0.40], [0.40, 0.50]]
    table = track([0.0] * 4, D_head_median=[0.61, 0.52, 0.45, 0.45], D_head_median_by_layer=layers)
    bounds = {"D_head_null_low_by_layer": [[0.59, 0.45]] * 4, "D_head_null_high_by_layer": [[0.63, 0.63]] * 4}
    table = table.assign(**bounds)
    assert (half_of_fall(table).step, half_of_fall(table).side) == (10, "below")  # the middle is .53
    assert (half_of_fall(table, layer=0).step, half_of_fall(table, layer=1).step) == (20, 10)  # .505 and .555
    assert (median_leaves_null(table, layer=0).step, median_leaves_null(table, layer=1).step) == (20, None)
    assert half_of_fall(track([0.0] * 3, D_head_median=[0.4, 0.5, 0.6])).side == "above"
    assert half_of_fall(track([0.0] * 2, D_head_median=[0.4, 0.4])).step is None
    with pytest.raises(ValueError, match=r"layer=2: the history has layers 0 to 1"):
        half_of_fall(table, layer=2)
    with pytest.raises(ValueError, match=r"no column D_head_median_by_layer"):
        half_of_fall(table.drop(columns="D_head_median_by_layer"), layer=0)


# --- Q3 ---


@few
@given(st.lists(st.integers(0, 6), min_size=2, max_size=20))
def test_a_rank_is_the_number_of_larger_heads_and_one(values):
    percentile = pd.Series(values, dtype=float).rank(pct=True)
    table = track(np.zeros(len(values)), pct=percentile, n_heads=len(values))
    found = eventual_head_rank(table, percentiles=["pct"])
    larger = [sum(other > value for other in values) for value in values]
    # Ties have their mean rank.
    expected = [more + (values.count(value) + 1) / 2 for more, value in zip(larger, values, strict=True)]
    assert found["rank"].tolist() == expected
    assert found["top_share"].tolist() == [rank / len(values) for rank in expected]
    assert (found["chance"] == 1 / len(values)).all()


# --- the published histories ---


@pytest.mark.parametrize(
    ("name", "behaviour", "phase", "lowest", "last", "left"),
    [("pythia-410m", 0.9573, 0.9896, 0.8516, 0.3954, 1000), ("pythia-160m", 0.9435, 0.9306, 0.597, 0.4528, 512)],
)
def test_the_published_histories(name, behaviour, phase, lowest, last, left):
    table = published_checkpoints(name)
    assert tuple(table["step"]) == PYTHIA_STEPS
    found = formation_crossing(table)
    assert (found.behaviour.after, found.behaviour.step) == (found.phase.after, found.phase.step) == (512, 1000)
    assert (found.first, found.lag) == ("neither", (-488, 488))
    # Known to four digits, as they are written here.
    assert (found.behaviour.value, found.phase.value) == pytest.approx((behaviour, phase), abs=5e-5)
    assert found.phase.lowest_later == pytest.approx(lowest, abs=5e-4)
    # Against an interval that is generous: the medians of the first eight checkpoints move by .0005.
    departed = median_leaves_null(table, low=0.60, high=0.62)
    assert (departed.side, departed.step) == ("below", left)
    assert table["D_head_median"].iloc[-1] == pytest.approx(last, abs=5e-5)


def test_the_published_head_stood_low_before_it_formed_and_is_that_of_the_head_table():
    heads, history = published_heads("pythia-410m"), published_checkpoints("pythia-410m")
    found = eventual_head_rank(history, percentiles=["rope_imag_frac_pct", "D_head_pct"])
    rank = found[found["column"] == "rope_imag_frac_pct"].set_index("step")["rank"]
    assert (rank[0], rank[512], rank[1000]) == (194, 374, 5)
    last, own = history.iloc[-1], (heads["layer"] == 5) & (heads["head"] == 2)
    assert heads.loc[heads["prev"].idxmax(), ["layer", "head"]].tolist() == [5, 2]
    for column in ("rope_imag_frac", "D_head"):
        assert heads[column].rank(pct=True)[own].item() == last[f"{column}_pct"]
        assert heads[column].median() == pytest.approx(last[f"{column}_median"], abs=1e-12)


# --- the figure ---


def drawn(axes):
    """What a panel shows, by label of a line or id of a part, as x and y."""
    lines = {line.get_gid() or line.get_label(): line.get_xydata().T.tolist() for line in axes.lines}
    for part in axes.get_children():
        if part.get_gid() in ("window", "null range"):
            path = part.get_paths()[0] if part.get_gid() == "null range" else part.get_path()
            box = path.get_extents(None if part.get_gid() == "null range" else part.get_patch_transform())
            lines[part.get_gid()] = [box.x0, box.x1, box.y0, box.y1]
    return lines


@pytest.mark.slow
def test_the_figure_shows_histories_with_their_null_and_the_window_of_all():
    table = track([0.0, 0.1, 0.8, 0.9], [0.4, 0.3, 0.95, 1.0], D_head_median=[0.6, 0.6, 0.5, 0.4])
    low, high = [0.55, 0.56, 0.57, 0.58], [0.65, 0.66, 0.67, 0.68]
    table = table.assign(D_head_null_median=[0.6, 0.61, 0.6, 0.59], D_head_null_low=low, D_head_null_high=high)
    late = table.assign(prev=[0.0, 0.1, 0.2, 0.9])
    for figure, tables in (
        (checkpoint_acts(table), {"": table}),
        (checkpoint_acts({"early": table, "late": late}, null=0.61), {"early": table, "late": late}),
    ):
        for axes, column in zip(figure.axes, ("prev", "rope_imag_frac_pct", "D_head_median"), strict=True):
            for name, rows in tables.items():
                assert drawn(axes)[name or column] == [rows["step"].tolist(), rows[column].tolist()]
            assert drawn(axes)["window"][:2] == pytest.approx([10, 30 if "late" in tables else 20])
    assert set(drawn(figure.axes[2])["null"][1]) == {0.61}
    one = drawn(checkpoint_acts(table).axes[2])
    assert one["null"][1] == table["D_head_null_median"].tolist()
    assert one["null range"] == pytest.approx([0, 30, 0.55, 0.68])
    without_range = drawn(checkpoint_acts(table.drop(columns="D_head_null_low")).axes[2])
    assert "null" in without_range
    assert "null range" not in without_range
    assert "window" not in drawn(checkpoint_acts(table.assign(prev=0.1)).axes[0])
