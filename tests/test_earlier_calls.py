"""Calls written for an earlier release give the same result, and a warning at the caller's line."""

import inspect
import warnings

import pandas as pd
import pytest
import zoo
from pandas.testing import assert_frame_equal

import tlspectral as tls
from tlspectral.errors import earlier_calls
from tlspectral.heads import kernel_prediction
from tlspectral.models.reading import attention_view
from tlspectral.tasks import repeated_sequences

HEADS = pd.DataFrame({"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1], "prev": [0.1, 0.4, 0.3, 0.2]}).assign(
    dir_frac=0.5, D_head=[0.2, 0.9, 0.4, 0.1], name=["L0H0", "L0H1", "L1H0", "L1H1"]
)


@earlier_calls("size", "seed", heads="table")
def measured(table, names=(), *, size=1, seed=0):
    return table, names, size, seed


@earlier_calls(heads="table")
def joined(table, /, *tables, **more):
    return table, tables, more


@pytest.mark.parametrize(
    ("call", "now", "words"),
    [
        (lambda: measured("t", "n", 2), lambda: measured("t", "n", size=2), ["measured: write size="]),
        (lambda: measured("t", "n", 2, 3), lambda: measured("t", "n", size=2, seed=3), ["size=", "seed="]),
        (lambda: measured(heads="t"), lambda: measured("t"), ["measured: heads= is now called table="]),
        (lambda: joined(heads="t", text="m"), lambda: joined("t", text="m"), ["heads= is now called table="]),
    ],
)
def test_an_earlier_call_is_the_call_of_now_with_a_warning(call, now, words):
    with pytest.warns(DeprecationWarning, match=words[0]) as caught:
        assert call() == now()
    assert [(warning.filename, warning.lineno) for warning in caught] == [
        (__file__, call.__code__.co_firstlineno) for _ in words
    ]
    for warning, text in zip(caught, words, strict=True):
        assert text in str(warning.message)


def test_other_calls_are_left_alone_and_wrong_ones_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured("t", size=2) == ("t", (), 2, 0)
        assert joined("t", "u", heads="h") == ("t", ("u",), {"heads": "h"})  # a further table of this name
    assert list(inspect.signature(measured).parameters) == ["table", "names", "size", "seed"]
    for wrong in (
        lambda: measured("t", "n", 2, 3, 4),
        lambda: measured("t", "n", 2, size=2),
        lambda: measured("t", heads="t"),
    ):
        with pytest.raises(TypeError):
            wrong()


def test_tables_of_heads_are_still_taken_as_heads():
    joined = tls.tables.join(HEADS)
    with pytest.warns(DeprecationWarning, match="top_head_percentile: heads= is now called table="):
        found = tls.stats.top_head_percentile(heads=HEADS, k=2)
    assert found == tls.stats.top_head_percentile(HEADS, k=2)
    with pytest.warns(DeprecationWarning, match="join: heads="):
        assert_frame_equal(tls.tables.join(heads=HEADS), joined)


def test_options_of_functions_may_still_be_positional():
    model, prompts = zoo.shared("bridge", "llama"), zoo.prompt(2, 12)
    for function in (tls.relative_position_kernel, kernel_prediction):
        with pytest.warns(DeprecationWarning, match=f"{function.__name__}: write offsets="):
            earlier = function(model, "L0H1", prompts, [-2, -1])
        assert_frame_equal(earlier, function(model, "L0H1", prompts, offsets=[-2, -1]))
    view = attention_view(model)
    with pytest.warns(DeprecationWarning, match="write n_sequences="):
        earlier = repeated_sequences(view, 2, 8)
    assert earlier.equal(repeated_sequences(view, n_sequences=2, segment_length=8))
