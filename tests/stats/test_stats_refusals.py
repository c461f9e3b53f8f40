"""What statistics of tables refuse, in words that name the column or the argument."""

from inspect import unwrap

import numpy as np
import pandas as pd
import pytest

from tlspectral.stats import (
    attenuation,
    benjamini_hochberg,
    layer_bootstrap,
    model_permutation_test,
    partial_spearman,
    top_head_percentile,
)

pytestmark = pytest.mark.lowest

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((2, 20))
C = RNG.standard_normal((20, 2))
LAYER = np.repeat(np.arange(5), 4)
HEADS = pd.DataFrame({"layer": LAYER, "head": np.tile(np.arange(4), 5), "kv_head": 0, "dir_frac": C[:, 0],
                      "rope_imag_frac": C[:, 1], "freq_centroid": X * Y, "D_head": X, "prev": Y})  # fmt: skip
INFINITE = np.where(np.arange(20) == 3, np.inf, X)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: partial_spearman(X, Y[1:], C), r"equally many rows, found \[20, 19, 20\]"),
        # Past the check of annotations.
        (lambda: unwrap(partial_spearman)(X, Y, C, method="pearson"), "method must be"),
        (lambda: partial_spearman(C, Y, C), "x must be one-dimensional"),
        (lambda: partial_spearman(X, Y, C[None]), "controls must be \[rows\] or"),
        (lambda: partial_spearman(X, ["a"] * 20, C), "y must hold numbers"),
        (lambda: partial_spearman(INFINITE, Y, C), "1 rows have an infinite value"),
        (lambda: partial_spearman(pd.Series(X), pd.Series(Y)[::-1], C), "x and y have the same index in different"),
        (lambda: partial_spearman(X, Y, C, layers=[0, 1, 2]), "layers has 3 entries and x has 20 rows"),
        (lambda: partial_spearman(HEADS["D_head"], Y, C, layers=HEADS["layer"][::-1]), "layers have the same index"),
        (lambda: benjamini_hochberg([0.1, 1.5]), r"between 0 and 1, found 1\.5"),
        (lambda: benjamini_hochberg([0.1, -0.5]), r"between 0 and 1, found -0\.5"),
        (lambda: layer_bootstrap(HEADS.drop(columns="layer")), "no column .'layer'"),
        (lambda: layer_bootstrap(pd.concat([HEADS, HEADS["prev"]], axis=1)), "more than one column called .'prev'"),
        *(
            (lambda call=call, method=method: unwrap(call)(HEADS, method=method), f"method must be .* not '{method}'")
            for call in (layer_bootstrap, attenuation)
            for method in ("Rank", "HYBRID", "pearson")
        ),
        (lambda: unwrap(model_permutation_test)([1.0], [2.0], alternative="Less"), "alternative must be .* not 'Less'"),
        (lambda: layer_bootstrap(HEADS, draws=1), "two draws"),
        (lambda: layer_bootstrap(HEADS, level=95.0), "level"),
        (lambda: layer_bootstrap(HEADS, level=0.0), "level"),
        (lambda: attenuation(HEADS, []), "at least one control"),
        (lambda: attenuation(HEADS, draws=1), "two draws"),
        (lambda: top_head_percentile(HEADS, k=21), "k=21, but only 20 heads have both D_head and prev"),
        (lambda: top_head_percentile(HEADS, k=0), "at least 1"),
        (lambda: top_head_percentile(HEADS.drop(columns="layer")), r"no column \['layer'\]"),
        (lambda: top_head_percentile(HEADS, column="dhead"), r"no column 'dhead': did you mean 'D_head'\?"),
        (lambda: top_head_percentile(HEADS, by="ind"), r"no column \['ind'\]"),
        (lambda: model_permutation_test([1.0], []), "group y is empty"),
        (lambda: model_permutation_test([1.0, np.nan], [2.0]), "group x has a value that is not finite"),
        (lambda: model_permutation_test(np.arange(12.0), np.arange(12.0)), "more than 200000"),
    ],
)
def test_what_has_no_statistic_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("call", [layer_bootstrap, attenuation, top_head_percentile])
@pytest.mark.parametrize(
    ("several", "words"),
    [
        (pd.concat([HEADS, HEADS]), "several rows for layer 0, head 0: .*several models or steps"),
        (pd.concat([HEADS.assign(model="a"), HEADS.assign(model="b")]), "2 values of model, such as 'a' and 'b'"),
        (pd.concat([HEADS.assign(step=1), HEADS[:3].assign(step=2, layer=7)]), "2 values of step, such as 1 and 2"),
    ],
)
def test_heads_of_two_models_or_steps_are_no_one_population(call, several, words):
    with pytest.raises(ValueError, match=words):
        call(several)


def test_one_model_with_its_name_is_one_population():
    expected = layer_bootstrap(HEADS, draws=20)
    assert layer_bootstrap(HEADS.assign(model="a", step=3), draws=20) == expected
    by_frequency = pd.concat([HEADS.assign(frequency=number) for number in range(2)])
    assert layer_bootstrap(by_frequency, draws=20).n == 2 * len(HEADS)


def test_one_control_is_a_name():
    assert layer_bootstrap(HEADS, controls="dir_frac", draws=20) == layer_bootstrap(HEADS, draws=20)
    assert attenuation(HEADS, "freq_centroid", base="dir_frac") == attenuation(HEADS, ["freq_centroid"])


def test_masked_values_are_missing():
    mask = np.arange(20) % 7 == 3
    missing = np.where(mask, np.nan, X)
    layers = np.ma.MaskedArray(LAYER, mask)
    for masked in (np.ma.MaskedArray(np.where(mask, 1e9, X), mask), np.ma.masked_invalid(missing)):
        assert partial_spearman(masked, Y, C) == partial_spearman(missing, Y, C)
        assert partial_spearman(X, Y, masked) == partial_spearman(X, Y, missing)
    counts = np.ma.MaskedArray(np.arange(20), mask)
    assert partial_spearman(counts, Y, C) == partial_spearman(np.where(mask, np.nan, np.arange(20)), Y, C)
    without = partial_spearman(X[~mask], Y[~mask], C[~mask], layers=LAYER[~mask])
    found = partial_spearman(X, Y, C, layers=layers)
    assert (found.statistic, found.pvalue, found.n) == (without.statistic, without.pvalue, without.n)
    assert found.n_dropped == mask.sum()


def test_pairs_by_position_are_taken_from_arrays():
    turned = pd.Series(Y)[::-1]
    assert partial_spearman(pd.Series(X), turned.to_numpy(), C).n == 20
