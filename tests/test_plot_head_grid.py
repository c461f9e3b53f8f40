"""The grid shows every head's number where the head stands, and the null where the table has one."""

import numpy as np
import pandas as pd
import pytest
from figure_parts import part

from tlspectral.plots import head_grid


def table() -> pd.DataFrame:
    generator = np.random.default_rng(0)
    frame = pd.DataFrame({"layer": np.repeat(np.arange(3), 4), "head": np.tile(np.arange(4), 3)})
    frame["D_head"] = generator.uniform(0.2, 0.8, 12)
    frame["D_head_null_mean"], frame["D_head_null_std"] = generator.uniform(0.5, 0.6, 12), 0.02
    frame["D_head_z"] = (frame["D_head"] - frame["D_head_null_mean"]) / frame["D_head_null_std"]
    frame["note"] = "text"
    return frame.sample(frac=1.0, random_state=1)


def drawn(figure):
    (mesh,) = part(figure, "heads")
    return np.ma.filled(mesh.get_array().astype(float), np.nan)


def test_every_head_has_its_number_in_its_place():
    heads = table()
    values = drawn(head_grid(heads))
    assert values.shape == (4, 3)
    for _, row in heads.iterrows():
        assert values[row["head"], row["layer"]] == row["D_head"]


def test_the_null_stands_on_the_colour_bar_and_in_words():
    heads = table()
    figure = head_grid(heads)
    (line,) = part(figure, "null mean")
    centre = heads["D_head_null_mean"].median()
    assert line.get_ydata() == pytest.approx([centre] * 2)
    (band,) = part(figure, "null band")
    assert (band.get_y(), band.get_height()) == pytest.approx((centre - 0.04, 0.08))
    assert f"{centre:.3g} ± 0.04" in figure.legends[0].get_title().get_text()
    (zero,) = part(head_grid(heads, "D_head_z"), "null mean")
    assert list(zero.get_ydata()) == [0, 0]


def test_without_a_null_there_is_no_mark():
    figure = head_grid(table().drop(columns="D_head_null_std"))
    assert part(figure, "null mean") == []
    assert figure.legends == []


def test_a_column_around_zero_has_zero_in_the_middle_of_its_colours():
    (mesh,) = part(head_grid(table(), "D_head_z"), "heads")
    assert mesh.norm.vmin == -mesh.norm.vmax
    (mesh,) = part(head_grid(table(), "D_head"), "heads")
    assert mesh.norm.vmin > 0


def test_what_is_not_computed_is_hatched_and_counted_and_what_is_missing_stays_white():
    heads = table().sort_values(["layer", "head"], ignore_index=True)
    heads.loc[5, "D_head"] = np.nan
    figure = head_grid(heads.drop(index=7))
    (hatched,) = part(figure, "not computed")
    assert hatched.get_xy() == (0.5, 0.5)
    assert figure.legends[0].get_texts()[0].get_text() == "not computed: 1"
    assert np.isnan(drawn(figure)[[1, 3], 1]).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda heads: heads.drop(columns="D_head"), "no column D_head"),
        (lambda heads: heads.iloc[:0], "no rows"),
        (lambda heads: pd.concat([heads, heads.iloc[:1]]), "two rows for L"),
        (lambda heads: heads.assign(D_head="x"), "not numeric"),
    ],
)
def test_other_tables_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        head_grid(change(table()))
