"""Figures of the canonical sweep: what is drawn is what the tables say, and no panel is empty."""

import io
from itertools import product

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from tlspectral.studies.positional_symbolic.figures import (
    accuracy_against_angle,
    accuracy_against_position,
    accuracy_while_learning,
    query_key_paths,
)

ANGLES = (0.0, 0.01, 0.5, 2.0)
ARMS = [("index", 1), ("retrieval", 1), ("partial_induction", 1), ("partial_induction", 2)]


def tables(arms=ARMS, seed=0):
    """Both tables of a sweep with random counts over eight positions; no answer of partial induction stands at 0."""
    generator = np.random.default_rng(seed)
    rows = []
    for (task, count), angle, run, position in product(arms, ANGLES, range(3), range(8)):
        n = 0 if task == "partial_induction" and position < 2 else 30 + 10 * position
        correct = int(generator.integers(0, n + 1))
        rows.append((task, count, angle, run, position, n, correct))
    by_position = pd.DataFrame(
        rows, columns=["task", "n_frequencies", "angle", "seed", "position", "n", "correct"]
    ).sample(frac=1, random_state=seed, ignore_index=True)
    heads = ["task", "n_frequencies", "angle", "seed"]
    accuracy = by_position.groupby(heads, as_index=False, sort=False).agg({"n": "sum", "correct": "sum"})
    accuracy["accuracy"] = accuracy["correct"] / accuracy["n"]
    accuracy["most_frequent"] = np.where(accuracy["task"] == "index", 0.151, 0.110)
    return accuracy, by_position


def paths(angles=(0.5, 2.0), steps=(0, 50, 100)):
    generator = np.random.default_rng(0)
    rows = []
    for angle, step in product(angles, steps):
        for kind, first, count in (("query", 512, 5), ("key", 0, 7)):
            for label in range(count):
                rows.append((angle, 0, step, kind, first + label, label, *generator.standard_normal(2)))
    columns = ["angle", "seed", "step", "kind", "token", "label", "x", "y"]
    return pd.DataFrame(rows, columns=columns).sample(frac=1, random_state=1, ignore_index=True)


def drawn(axes):
    return {line.get_gid(): line for line in axes.lines if line.get_gid()}


def rendered(figure):
    """Draw for good: what does not fit its layout warns, and warnings are errors."""
    figure.savefig(io.BytesIO(), format="pdf")


# --- accuracy against angle ---


def test_means_seeds_and_guessing_of_every_arm():
    accuracy, _ = tables()
    figure = accuracy_against_angle(accuracy)
    rendered(figure)
    assert len(figure.axes) == 2
    for axes, arms in zip(figure.axes, (ARMS[:2], ARMS[2:]), strict=True):
        lines = drawn(axes)
        assert len(lines) == 6
        for arm in arms:
            rows = accuracy[(accuracy["task"] == arm[0]) & (accuracy["n_frequencies"] == arm[1])]
            means = [rows.loc[rows["angle"] == angle, "accuracy"].mean() for angle in ANGLES]
            assert lines[f"mean {arm}"].get_xdata().tolist() == list(ANGLES)
            assert lines[f"mean {arm}"].get_ydata().tolist() == pytest.approx(means)
            dots = sorted(zip(*(one.tolist() for one in lines[f"seeds {arm}"].get_data()), strict=True))
            assert dots == sorted(zip(rows["angle"], rows["accuracy"], strict=True))
            assert lines[f"most frequent {arm}"].get_ydata()[0] == (0.151 if arm[0] == "index" else 0.110)
        # Two arms of a panel differ by more than their colour.
        one, two = (lines[f"mean {arm}"] for arm in arms)
        assert one.get_color() != two.get_color()
        assert one.get_marker() != two.get_marker()
        assert one.get_linestyle() != two.get_linestyle()
        assert [text.get_text() for text in axes.get_legend().get_texts()][
            -1
        ] == "the most frequent answer of the context"


@pytest.mark.parametrize("arms", [ARMS[:1], ARMS[2:], ARMS[3:]])
def test_an_arm_that_was_not_swept_leaves_no_panel(arms):
    accuracy, by_position = tables(arms)
    figure = accuracy_against_angle(accuracy)
    assert len(figure.axes) == 1
    assert len(drawn(figure.axes[0])) == 3 * len(arms)
    assert len(accuracy_against_position(by_position).axes) == len(arms)


# --- accuracy against position ---


@pytest.mark.parametrize("bin_width", [1, 4])
def test_positions_are_pooled_by_counts(bin_width):
    _, by_position = tables()
    figure = accuracy_against_position(by_position, bin_width=bin_width)
    rendered(figure)
    assert len(figure.axes) == 4
    for axes, arm in zip(figure.axes, ARMS, strict=True):
        lines = drawn(axes)
        assert list(lines) == [f"angle {angle:g}" for angle in ANGLES]
        assert len({to_hex(line.get_color()) for line in lines.values()}) == 4
        rows = by_position[(by_position["task"] == arm[0]) & (by_position["n_frequencies"] == arm[1])]
        for angle, band in zip(ANGLES, axes.collections, strict=True):
            expected = {}
            for first in range(0, 8, bin_width):
                inside = rows[(rows["angle"] == angle) & rows["position"].between(first, first + bin_width - 1)]
                seeds = inside.groupby("seed")[["correct", "n"]].sum()
                if seeds["n"].sum():
                    expected[first + (bin_width - 1) / 2] = seeds["correct"] / seeds["n"]
            line = lines[f"angle {angle:g}"]
            assert line.get_xdata().tolist() == list(expected)
            assert line.get_ydata().tolist() == pytest.approx([seeds.mean() for seeds in expected.values()])
            corners = {(x, round(y, 9)) for x, y in band.get_paths()[0].vertices.tolist()}
            for x, seeds in expected.items():
                assert {(x, round(seeds.min(), 9)), (x, round(seeds.max(), 9))} <= corners
        # Each line's name stands beside it, in its colour, and on no other.
        assert {text.get_text() for text in axes.texts} == {f"{angle:g}" for angle in ANGLES}
        heights = sorted(text.xyann[1] for text in axes.texts)
        assert min(np.diff(heights)) > 0.045
        for text in axes.texts:
            assert to_hex(text.get_color()) == to_hex(lines[f"angle {text.get_text()}"].get_color())


# --- accuracy while learning ---


def test_lines_follow_the_pooled_accuracy_over_the_steps():
    progress = pd.concat([tables(seed=step)[1].assign(step=step) for step in (0, 50, 100)], ignore_index=True)
    figure = accuracy_while_learning(progress)
    rendered(figure)
    assert len(figure.axes) == 4
    for axes, arm in zip(figure.axes, ARMS, strict=True):
        rows = progress[(progress["task"] == arm[0]) & (progress["n_frequencies"] == arm[1])]
        for angle in ANGLES:
            sums = rows[rows["angle"] == angle].groupby(["step", "seed"])[["correct", "n"]].sum()
            expected = (sums["correct"] / sums["n"]).groupby("step").mean()
            line = drawn(axes)[f"angle {angle:g}"]
            assert line.get_xdata().tolist() == [0, 50, 100]
            assert line.get_ydata().tolist() == pytest.approx(expected.tolist())


# --- paths ---


def test_paths_lead_to_the_last_step():
    table = paths()
    figure = query_key_paths(table)
    rendered(figure)
    assert len(figure.axes) == 3  # and the colour bar
    for axes, angle in zip(figure.axes[:2], (0.5, 2.0), strict=True):
        found = {artist.get_gid(): artist for artist in axes.collections}
        for kind in ("query", "key"):
            rows = table[(table["angle"] == angle) & (table["kind"] == kind)].sort_values(["token", "step"])
            expected = rows[["x", "y"]].to_numpy().reshape(-1, 3, 2)
            segments = np.array(found[f"{kind} paths"].get_segments())
            assert segments == pytest.approx(expected)
            assert np.asarray(found[f"{kind} ends"].get_offsets()) == pytest.approx(expected[:, -1])
        colours = found["query ends"].get_facecolors()
        assert len({to_hex(colour) for colour in colours}) == 5
        # All of it lies inside the axes.
        x, y = (np.sort(limits) for limits in (axes.get_xlim(), axes.get_ylim()))
        inside = table[table["angle"] == angle]
        assert inside["x"].between(*x).all()
        assert inside["y"].between(*y).all()


def test_one_angle_alone_can_be_drawn():
    figure = query_key_paths(paths(angles=(1.0,)))
    rendered(figure)
    assert len(figure.axes) == 2


def test_seeds_are_not_mixed():
    table = pd.concat([paths(), paths().assign(seed=1)])
    with pytest.raises(ValueError, match="seeds 0, 1"):
        query_key_paths(table)


# --- what cannot be drawn ---


@pytest.mark.parametrize(
    ("figure", "table", "column"),
    [
        (accuracy_against_angle, tables()[0], "most_frequent"),
        (accuracy_against_position, tables()[1], "correct"),
        (query_key_paths, paths(), "label"),
        (accuracy_while_learning, tables()[1].assign(step=1), "step"),
    ],
)
def test_a_table_that_lacks_something_is_refused(figure, table, column):
    with pytest.raises(ValueError, match=f"no column {column}"):
        figure(table.drop(columns=column))
    with pytest.raises(ValueError, match="no rows"):
        figure(table.iloc[:0])


def test_an_unknown_arm_and_an_empty_bin_are_refused():
    accuracy, by_position = tables()
    with pytest.raises(ValueError, match="not among"):
        accuracy_against_angle(accuracy.assign(n_frequencies=3))
    with pytest.raises(ValueError, match="bin_width is 0"):
        accuracy_against_position(by_position, bin_width=0)
