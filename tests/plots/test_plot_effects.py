"""Figures of ablations: every head and offset is drawn where the table says."""

import numpy as np
import pandas as pd
import pytest
from figure_parts import part, said
from plotted_tables import HEADS, KERNELS, SWEEP

from tlspectral.errors import BadHead
from tlspectral.plots import ablation_effects, kernel

pytestmark = pytest.mark.lowest


def test_effects_are_sorted_and_unmeasured_heads_left_out():
    sweep = SWEEP.assign()
    sweep.attrs = {"model": "tiny", "task": "logit difference", "intact_value": -1.25}
    (axes,) = ablation_effects(sweep, detectors=HEADS).axes
    # The least stands on top.
    assert [label.get_text() for label in axes.get_yticklabels()] == ["L0H0  (prev 0.90)", "L0H1  (prev 0.10)"]
    assert axes.containers[0][0].get_xdata().tolist() == [0.5, -0.1]
    assert axes.get_xlabel() == "change of the logit difference; error: of the mean over sequences"
    assert axes.get_title(loc="left") == "tiny, logit difference, intact \N{MINUS SIGN}1.25"
    (axes,) = ablation_effects(SWEEP.assign(delta_se=np.nan), detectors=HEADS).axes  # of one prompt
    assert axes.get_xlabel() == "change of the loss (nats)"
    with pytest.raises(ValueError, match="no head to draw has a measured effect"):
        ablation_effects(SWEEP.assign(delta=np.nan), detectors=HEADS)
    with pytest.raises(ValueError, match="no column delta_se: give a table of ablation_sweep"):
        ablation_effects(SWEEP.drop(columns="delta_se"), detectors=HEADS)


def labels(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_named_heads_are_drawn_and_without_detectors_no_score_stands_behind_a_name():
    assert labels(ablation_effects(SWEEP)) == ["L0H0", "L0H1"]
    for heads in ("L0H1", (0, 1), ["0.1"], pd.DataFrame({"layer": [0], "head": [1]})):
        assert labels(ablation_effects(SWEEP, heads)) == ["L0H1"]
        assert labels(ablation_effects(SWEEP, heads, detectors=HEADS)) == ["L0H1  (prev 0.10)"]
    assert labels(ablation_effects(SWEEP, "L0")) == ["L0H0", "L0H1"]
    # A head that the detectors lack is drawn without a score.
    assert labels(ablation_effects(SWEEP, detectors=HEADS.iloc[1:])) == ["L0H0", "L0H1  (prev 0.10)"]
    with pytest.raises(BadHead, match="L7H0 is not in the sweep"):
        ablation_effects(SWEEP, "L7H0")
    with pytest.raises(BadHead, match="L7 is not in the sweep"):
        ablation_effects(SWEEP, "L7")


def test_a_table_of_detectors_in_the_place_of_heads_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match="detectors=") as caught:
        figure = ablation_effects(SWEEP, HEADS.iloc[1:])
    assert caught[0].filename == __file__
    assert labels(figure) == ["L0H1  (prev 0.10)"]


@pytest.mark.parametrize(
    ("part_name", "sizes", "said_of"),
    [
        ("M_A", {}, "19 random parts"),
        ("output", {}, "19 other heads"),
        ("my_scores", {"score_rms": 0.5}, "19 random parts"),
        ("my_z", {"score_rms": np.nan}, "19 other heads"),
    ],
)
def test_every_draw_of_the_control_is_seen_beside_its_head(part_name, sizes, said_of):
    draws = np.random.default_rng(0).normal(size=(2, 19)).tolist()
    controlled = SWEEP.assign(part=part_name, control_p=[0.05, 0.2, np.nan], control_draws=[*draws, None], **sizes)
    figure = ablation_effects(controlled, detectors=HEADS)
    # Rows from below: L0H0 (.5), L0H1 (-.1).
    for height, drawn in enumerate(draws):
        ticks, bar = part(figure, "control")[height], part(figure, "range of the control")[height]
        assert ticks.get_xdata().tolist() == drawn
        assert set(ticks.get_ydata()) == set(bar.get_ydata()) == {height}
        assert bar.get_xdata().tolist() == [min(drawn), max(drawn)]
    texts = {text.get_text(): text.get_position()[1] for text in part(figure, "control_p")}
    assert texts.pop("control_p") > 1
    assert texts == {"\N{LESS-THAN OR EQUAL TO} 1/20": 0, "0.20": 1}
    assert said_of in said(figure)
    assert "no control_p is below 1/20" in said(figure)
    # A head with fewer draws has a bound of its own.
    fewer = controlled.assign(control_p=[0.25, 0.2, np.nan], control_draws=[draws[0][:3], draws[1], None])
    shown = [text.get_text() for text in part(ablation_effects(fewer, detectors=HEADS), "control_p")]
    assert sorted(shown) == ["0.20", "control_p", "\N{LESS-THAN OR EQUAL TO} 1/4"]


def test_sets_stand_by_their_names_beside_random_sets():
    sets = pd.DataFrame({"layer": -1, "head": -1, "name": ["ind", "prev"], "part": "output", "delta": [-2.0, 0.1]})
    sets = sets.assign(delta_se=0.1, control_p=[0.25, 0.5], control_draws=[[0.1, 0.2, 0.3]] * 2)
    figure = ablation_effects(sets, detectors=HEADS)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["prev", "ind"]
    assert "3 random sets of the same layers" in said(figure)
    assert labels(ablation_effects(sets, "ind")) == labels(ablation_effects(sets, ["ind"])) == ["ind"]
    with pytest.raises(BadHead, match="'dup' is not a set of the sweep: it has 'ind', 'prev'"):
        ablation_effects(sets, "dup")


@pytest.mark.parametrize("with_ablated", [False, True])
def test_one_panel_per_head_and_one_line_per_state(with_ablated):
    panels = kernel(KERNELS, KERNELS.assign(score=-KERNELS["score"]) if with_ablated else None).axes
    assert [axes.get_title(loc="left") for axes in panels] == ["L2H1", "L2H5"]
    for start, axes in zip((0, 4), panels, strict=True):
        scores = list(range(start, start + 4))
        expected = [scores, [-score for score in scores]][: 1 + with_ablated]
        assert [line.get_ydata().tolist() for line in axes.lines] == expected


def test_the_band_of_a_kernel_is_that_of_the_other_heads_at_its_mean():
    scores = np.random.default_rng(0).normal(size=(6, 4))
    all_heads = pd.DataFrame({"layer": np.repeat([0, 1, 2], 8), "head": np.tile(np.repeat([0, 1], 4), 3),
        "offset": np.tile(np.arange(-3, 1), 6), "score": scores.ravel()})  # fmt: skip
    drawn = all_heads.iloc[4:8]  # L0H1
    figure = kernel(drawn, others=all_heads)
    (band,) = part(figure, "other heads")
    others = np.delete(scores, 1, axis=0)
    moved = others - others.mean(1, keepdims=True) + scores[1].mean()
    low, high = np.quantile(moved, [0.05, 0.95], axis=0)
    corners = band.get_paths()[0].vertices
    for edge in (low, high):
        for offset, value in zip(range(-3, 1), edge, strict=True):
            assert np.isclose(corners, (offset, value)).all(1).any()
    assert "5 to 95 % of 5 other heads" in said(figure)
    assert not figure.axes[0].get_legend()
    with pytest.raises(ValueError, match="others= has no other head than L0H1 with a score"):
        kernel(drawn, others=drawn)
    with pytest.raises(ValueError, match="column"):
        kernel(drawn, others=all_heads.drop(columns="score"))


def test_the_legend_of_a_kernel_is_below_the_curve():
    figure = kernel(KERNELS, KERNELS.assign(score=1.0))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert all(not legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert [text.get_text() for text in legend.get_texts()] == ["intact", "ablated"]
