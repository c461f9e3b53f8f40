"""Tables of long prompts, whose attention passes strip by strip, equal tables of whole matrices."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from squares import Squares

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


@pytest.mark.parametrize("name", ["llama", "gptj", *zoo.also_slow("gemma2", "opt", "gptneo", "llama4", "gemma3n")])
def test_kernels(name):
    """GPT-J and others show no scores: these are computed from the stream."""
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


def test_a_kernel_of_attention_that_shows_no_scores_makes_no_whole_matrix():
    model = zoo.bridge("gptj", positions=512)

    def measure(length):
        tls.relative_position_kernel(model, "L1", zoo.prompt(3, length), offsets=[0, -9])

    measure(23)
    with strips_of(32), Squares(203) as squares:
        measure(203)
    assert squares.found == []


@pytest.mark.parametrize("point", ["pattern", "scores"])
def test_a_users_hook_is_never_skipped(point):
    """A hook that takes whole matrices runs in the model's own attention, and attrs have no `strip`."""
    model, whole = zoo.bridge("llama"), []
    task = tls.tasks.language(torch.tensor(prompts()[:1]))
    name = f"blocks.0.attn.hook_{'attn_scores' if point == 'scores' else 'pattern'}"

    def flat(x, hook):
        """Every query attends to all keys alike, as far as it sees them."""
        whole.append(x.shape[-2:])
        equal = torch.ones_like(x).tril()
        return equal / equal.sum(-1, keepdim=True) if point == "pattern" else x.masked_fill(equal > 0, 0.0)

    with model.hooks(fwd_hooks=[(name, flat)]):
        tables = [tls.detect_heads(model, prompts=prompts()[:1])]
        with strips_of(7):
            tables.append(tls.detect_heads(model, prompts=prompts()[:1]))
            drawn = tls.plots.patterns(model, torch.tensor(prompts()[0]), "L0H0", queries=slice(40, 47), sink=True)
            value = tls.evaluate(model, task).value
        value -= tls.evaluate(model, task).value
    assert set(whole) == {(47, 47)}
    pd.testing.assert_frame_equal(*tables, rtol=0, atol=0)
    assert not any("strip" in table.attrs for table in tables)
    for row, pattern in zip(range(40, 47), drawn.axes[0].images[0].get_array(), strict=True):
        np.testing.assert_allclose(pattern[: row + 1], 1 / (row + 1), rtol=1e-6)
    assert value == 0
    with strips_of(7):
        assert tls.detect_heads(model, prompts=prompts()[:1]).attrs["strip"] == 7


def test_hooks_of_pytorch_are_never_skipped():
    model, seen = zoo.bridge("llama"), []

    def count(module, *given):
        seen.append(given[-1].shape if isinstance(given[-1], torch.Tensor) else None)

    def table():
        with strips_of(7):
            return tls.detect_heads(model, prompts=prompts()[:1]).attrs.get("strip")

    assert table() == 7
    point = model.hook_dict["blocks.1.attn.hook_pattern"]
    inside = model.original_model.model.layers[0].self_attn
    for place in (point.register_forward_hook, point.register_forward_pre_hook, inside.register_forward_hook):
        handle = place(count)
        with pytest.warns(UserWarning, match="hooks of yours are on the model"):
            assert table() is None
        assert seen
        handle.remove()
        seen.clear()


def test_products_of_a_users_hook_at_queries_are_its_own():
    """A hook inside attention that multiplies its activation gets ordinary tensors."""
    model, found = zoo.bridge("llama"), []

    def product(queries, hook):
        by_head = queries.transpose(1, 2)
        found.append((by_head @ by_head.mT).square().sum())

    def run():
        with model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", product)]):
            return tls.detect_heads(model, prompts=prompts()[:1])

    run()
    with strips_of(7):
        assert run().attrs["strip"] == 7
    assert torch.equal(*found[-2:])


def test_a_cache_of_a_run_inside_an_ablation_has_whole_patterns():
    model, tokens = zoo.shared("bridge", "llama"), torch.tensor(prompts()[:1])
    part = tls.parts.LongRange(4)
    with tls.ablate(model, "L0H1", part):
        expected = model.run_with_cache(tokens)[1]["blocks.0.attn.hook_pattern"]
        with strips_of(7):
            pattern = model.run_with_cache(tokens)[1]["blocks.0.attn.hook_pattern"]
    assert pattern.shape == (1, zoo.HEADS, 47, 47)
    assert torch.equal(pattern, expected)
    assert not pattern[0, 1].tril(-4).any()
