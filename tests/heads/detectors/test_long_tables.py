"""Tables of long prompts, whose attention passes strip by strip, equal tables of whole matrices."""

import pandas as pd
import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.heads import attention_sinks
from tlspectral.models.running.long_prompts import strips_of

CAUSAL = pytest.mark.parametrize("name", ["llama", *zoo.also_slow("gemma2", "gptj", "bloom")])


def prompts():
    return [zoo.prompt(1, length, seed=place)[0].tolist() for place, length in enumerate((47, 61, 60, 33))]


def nearest(tokens):
    """A user's weights of the two keys before each query."""
    place = torch.arange(len(tokens))
    behind = place[:, None] - place
    return ((behind > 0) & (behind < 3)) / (1.0 + behind.abs())


def nearest_of(tokens, queries):
    assert queries.stop - queries.start <= 7
    return nearest(tokens)[queries]


def assert_equal_tables(long, whole):
    assert long.attrs.pop("strip") == 7
    assert "strip" not in whole.attrs
    # Measured: 6e-8 on attention, 4e-6 on distances of 20, smaller float32 products; a query that is left out moves a
    # mean by 1e-3.
    pd.testing.assert_frame_equal(long, whole, rtol=1e-5, atol=1e-6)
    chance = [pd.Series(table.attrs.get("chance", {}), dtype=object).explode().map(str) for table in (long, whole)]
    assert list(chance[0].index) == list(chance[1].index)


def flat(level):
    """A chance level as a dict of numbers by layer, NaN in the place of None."""
    by_layer = level if isinstance(level, dict) else {"": level}
    return {layer: float("nan") if value is None else value for layer, value in by_layer.items()}


def compare(measure):
    whole = measure()
    with strips_of(7):
        long = measure()
    assert_equal_tables(long, whole)
    return long, whole


@CAUSAL
@pytest.mark.parametrize("pattern", ["induction", nearest_of])
def test_detectors(name, pattern):
    model = zoo.shared("bridge", name)
    asked = nearest if callable(pattern) else pattern
    whole = tls.detect_heads(model, prompts=prompts(), pattern=asked, sinks="found")
    with strips_of(7):
        long = tls.detect_heads(model, prompts=prompts(), pattern=pattern, sinks="found")
        again = tls.detect_heads(model, prompts=prompts(), pattern=asked, sinks="found")
    assert_equal_tables(long, whole)
    assert_equal_tables(again, whole)
    for level, expected in whole.attrs["chance"].items():
        assert flat(long.attrs["chance"][level]) == pytest.approx(flat(expected), rel=1e-6, nan_ok=True), level
    assert long.attrs["n_counted"] == whole.attrs["n_counted"]


def test_repeated_segments():
    model = zoo.shared("bridge", "mistral")
    long, whole = compare(lambda: tls.detect_heads(model, n_sequences=5, segment_length=13))
    assert long.attrs["chance"] == whole.attrs["chance"]


@CAUSAL
@pytest.mark.parametrize("sinks", [None, "found"])
def test_top_pairs(name, sinks):
    model = zoo.shared("bridge", name)
    compare(lambda: tls.top_pairs(model, "L1", prompts(), n=3, sinks=sinks))


def test_attention_sinks():
    model = zoo.shared("bridge", "llama")
    compare(lambda: attention_sinks(model, prompts()))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_kernels(name):
    model = zoo.shared("bridge", name)
    compare(lambda: tls.relative_position_kernel(model, "L1", prompts(), offsets=[0, -1, -9, -30]))


def test_weights_of_the_wrong_shape_or_on_later_keys_are_refused():
    model = zoo.shared("bridge", "llama")
    with strips_of(7):
        with pytest.raises(ValueError, match=r"needs weights of shape \(7, 47\); found \(47, 47\)"):
            tls.detect_heads(model, prompts=prompts()[:1], pattern=lambda tokens, queries: nearest(tokens))
        later = torch.zeros(47, 47)
        later[8, 9] = 1.0
        with pytest.raises(ValueError, match="query 8 has a weight on key 9, which comes after it"):
            tls.detect_heads(model, prompts=prompts()[:1], pattern=lambda tokens, queries: later[queries])


def test_a_null_needs_whole_matrices():
    with strips_of(7), pytest.raises(ValueError, match=r"null_draws=3 compares whole matrices.*leave null_draws out"):
        tls.detect_heads(zoo.shared("bridge", "llama"), prompts=prompts(), null_draws=3)
