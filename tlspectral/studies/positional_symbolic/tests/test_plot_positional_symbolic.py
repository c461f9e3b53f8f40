"""Figures of the canonical sweep: what is drawn is what the tables say, and no panel is empty."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from tlspectral.studies.positional_symbolic import figures

ANGLES = (0.0, 0.01, 0.5)
ARMS = [("index", 1), ("retrieval", 1), ("partial_induction", 1), ("partial_induction", 2)]


def tables(arms=ARMS, seed=0):
    """Both tables of a sweep with random counts over eight positions; no answer of partial induction stands at 0."""
    generator = np.random.default_rng(seed)
    rows = []
    for (task, count), angle, run, position in product(arms, ANGLES, range(2), range(8)):
        n = 0 if task == "partial_induction" and position < 2 else 30 + 10 * position
        rows.append((task, count, angle, run, position, n, int(generator.integers(0, n + 1))))
    heads = ["task", "n_frequencies", "angle", "seed"]
    by_position = pd.DataFrame(rows, columns=[*heads, "position", "n", "correct"]).sample(frac=1, random_state=seed)
    accuracy = by_position.groupby(heads, as_index=False, sort=False).agg({"n": "sum", "correct": "sum"})
    accuracy["accuracy"] = accuracy["correct"] / accuracy["n"]
    accuracy["most_frequent"] = np.where(accuracy["task"] == "index", 0.151, 0.110)
    return accuracy, by_position


def of_arm(table, arm):
    return table[(table["task"] == arm[0]) & (table["n_frequencies"] == arm[1])]


def paths(angles=(0.5, 2.0), steps=(0, 50, 100)):
    rows = []
    for angle, step, (kind, first, count) in product(angles, steps, (("query", 512, 5), ("key", 0, 7))):
        rows += [(angle, 0, step, kind, first + label, label) for label in range(count)]
    table = pd.DataFrame(rows, columns=["angle", "seed", "step", "kind", "token", "label"])
    table[["x", "y"]] = np.random.default_rng(0).standard_normal((len(table), 2))
    return table.sample(frac=1, random_state=1)


def drawn(axes):
    return {line.get_gid(): line for line in axes.lines if line.get_gid()}


def test_means_seeds_and_guessing_of_every_arm():
    accuracy, _ = tables()
    figure = figures.accuracy_against_angle(accuracy)
    for axes, arms in zip(figure.axes, (ARMS[:2], ARMS[2:]), strict=True):
        lines = drawn(axes)
        for arm in arms:
            rows = of_arm(accuracy, arm)
            assert lines[f"mean {arm}"].get_xdata().tolist() == list(ANGLES)
            assert lines[f"mean {arm}"].get_ydata() == pytest.approx(rows.groupby("angle")["accuracy"].mean())
            dots = sorted(zip(*(one.tolist() for one in lines[f"seeds {arm}"].get_data()), strict=True))
            assert dots == sorted(zip(rows["angle"], rows["accuracy"], strict=True))
            assert lines[f"most frequent {arm}"].get_ydata()[0] == (0.151 if arm[0] == "index" else 0.110)


@pytest.mark.parametrize(("along", "bin_width"), [("position", 1), ("position", 4), ("step", 1)])
def test_accuracies_are_pooled_by_counts_along_positions_or_steps(along, bin_width):
    table = pd.concat([tables(seed=step)[1].assign(step=step) for step in (0, 50, 100)])
    if along == "position":
        table = table[table["step"] == 0]
        figure = figures.accuracy_against_position(table, bin_width=bin_width)
        places = table["position"] // bin_width * bin_width + (bin_width - 1) / 2
    else:
        figure, places = figures.accuracy_while_learning(table), table["step"]
    for axes, arm in zip(figure.axes, ARMS, strict=True):
        rows = of_arm(table.assign(place=places), arm)
        sums = rows.groupby(["angle", "place", "seed"])[["correct", "n"]].sum().query("n > 0")
        shares = (sums["correct"] / sums["n"]).groupby(["angle", "place"]).agg(["mean", "min", "max"])
        for number, angle in enumerate(ANGLES):
            expected, line = shares.loc[angle], drawn(axes)[f"angle {angle:g}"]
            assert line.get_xdata().tolist() == expected.index.tolist()
            assert line.get_ydata() == pytest.approx(expected["mean"])
            if along == "position":
                corners = {(x, round(y, 9)) for x, y in axes.collections[number].get_paths()[0].vertices.tolist()}
                assert {(x, round(y, 9)) for end in ("min", "max") for x, y in expected[end].items()} <= corners


@pytest.mark.parametrize("arms", [ARMS[:1], ARMS[2:]])
def test_an_arm_that_was_not_swept_leaves_no_panel(arms):
    accuracy, by_position = tables(arms)
    (axes,) = figures.accuracy_against_angle(accuracy).axes
    assert len(drawn(axes)) == 3 * len(arms)
    assert len(figures.accuracy_against_position(by_position).axes) == len(arms)


def test_paths_lead_to_the_last_step():
    table = paths()
    figure = figures.query_key_paths(table)
    for axes, angle in zip(figure.axes[:2], (0.5, 2.0), strict=True):
        found = {artist.get_gid(): artist for artist in axes.collections}
        for kind in ("query", "key"):
            rows = table[(table["angle"] == angle) & (table["kind"] == kind)].sort_values(["token", "step"])
            expected = rows[["x", "y"]].to_numpy().reshape(-1, 3, 2)
            assert np.array(found[f"{kind} paths"].get_segments()) == pytest.approx(expected)
            assert np.asarray(found[f"{kind} ends"].get_offsets()) == pytest.approx(expected[:, -1])
