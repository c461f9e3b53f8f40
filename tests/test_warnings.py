"""Warnings name the line of the caller, however deep in the package they are given."""

import contextlib
import inspect
import warnings

import pytest
import zoo

import tlspectral as tls
from tlspectral.errors import warn_caller

EDGE = {"heads": "L0H0", "part": "output", "into": "L1H0.k"}  # one key of a group, so that other heads are named


def test_it_is_the_line_that_calls():
    here = inspect.currentframe().f_lineno
    with pytest.warns(UserWarning, match="^said$") as caught:
        warn_caller("said")
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, here + 2)]


def test_heads_that_are_reached_besides_are_named_at_the_callers_line():
    model = zoo.shared("bridge", "llama")
    with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as blocks:
        warnings.simplefilter("always")
        first = inspect.currentframe().f_lineno + 1
        tls.ablation_hooks(model, **EDGE)
        with tls.ablate(model, **EDGE):
            pass
        blocks.enter_context(tls.ablate(model, **EDGE))
    assert all("cannot be edited alone" in str(warning.message) for warning in caught)
    assert [(warning.filename, warning.lineno - first) for warning in caught] == [
        (__file__, 0),
        (__file__, 1),
        (__file__, 3),
    ]
