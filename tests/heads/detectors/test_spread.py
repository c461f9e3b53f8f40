"""How widely a head attends: against loops over the rows of kept patterns, prompt by prompt."""

import numpy as np
import pytest
import torch
import zoo
from ablation_runs import allowed_keys
from plain_detectors import kept_patterns
from zoo import shared

import tlspectral as tls
from tlspectral.heads.detectors import heads as room
from tlspectral.heads.detectors.spread import KEPT, MEASURES
from tlspectral.models.reading import attention_view

LENGTHS = (9, 14, 2, 20, 3)  # the third is too short to count


def rows_of_ids():
    return [torch.randint(3, 20, (length,), generator=zoo.generator(seed)) for seed, length in enumerate(LENGTHS)]


def entropy(weights):
    return -sum(weight * np.log(weight) for weight in weights if weight > 0)


def of_prompt(pattern):
    """Numerator and denominator of each measure for the pattern [query, key] of one head on one prompt."""
    rows = [(query, row) for query, row in enumerate(pattern) if query >= 2]
    kept = [row[1:] / row[1:].sum() for _, row in rows if row[1:].sum() >= KEPT]
    far = [sum(weight * abs(query - key) for key, weight in enumerate(row)) for query, row in rows]
    far_sinkless = sum(weight * abs(query - key) for query, row in rows for key, weight in enumerate(row) if key > 0)
    return {
        "entropy": (np.mean([entropy(row) for _, row in rows]), 1),
        "distance": (np.mean(far), 1),
        "start_share": (np.mean([row[0] for _, row in rows]), 1),
        "entropy_sinkless": (sum(map(entropy, kept)), len(kept)),
        "distance_sinkless": (far_sinkless, sum(row[1:].sum() for _, row in rows)),
        "sinkless_rows": (len(kept) / len(rows), 1),
    }


def ratios(parts):
    """Each measure and its standard error, by leaving nothing out: the error of a ratio of sums."""
    found = {}
    for name in MEASURES:
        above, below = np.array([one[name] for one in parts]).T
        value, n = above.sum() / below.sum(), len(parts)
        found[name] = value, np.sqrt(n / (n - 1) * np.square(above - value * below).sum()) / below.sum()
    return found


def plain(patterns):
    """Measures of all heads, of the patterns [head, query, key] of prompts that are long enough."""
    return [ratios([of_prompt(pattern[head]) for pattern in patterns]) for head in range(len(patterns[0]))]


ROWS = ["llama", "mistral", "gemma3", "bert"]


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", [*ROWS, *zoo.also_slow("gpt2")])
def test_measures_are_those_of_the_rows_of_kept_patterns(monkeypatch, name):
    """Grouped heads, windows, an encoder, padded prompts."""
    monkeypatch.setattr(room, "BATCH", 2)
    model = shared("bridge", name)
    encoder = name in zoo.ENCODERS
    rows = list(torch.randint(3, 20, (4, 12), generator=zoo.generator())) if encoder else rows_of_ids()
    long = [np.concatenate([one[0] for one in kept_patterns(model, row[None])]) for row in rows if len(row) > 2]
    table = tls.detect_heads(model, prompts=rows)
    for measure in MEASURES:
        value, error = np.array([head[measure] for head in plain(long)]).T
        # Measured: 4e-6 on a distance of 8, float32 rows of other batch shapes. A prompt more or less moves it by .1.
        np.testing.assert_allclose(table[measure], value, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(table[f"{measure}_se"], error, rtol=1e-4, atol=1e-5)
    if name in ("llama", "mistral"):
        assert (table["sinkless_rows"] < 1).any()  # else it says nothing which rows are kept
    assert (table["distance"] < table["distance_sinkless"] + 20).all()
    first = tls.detect_heads(model, prompts=rows, pattern="first_token")["pattern"]
    np.testing.assert_allclose(table["start_share"], first, rtol=0, atol=1e-12)  # the same numbers, measured 2e-16
    chance = table.attrs["chance"]
    for layer in attention_view(model).layers:
        flat = [allowed_keys(name, layer, len(row)).double().numpy() for row in rows if len(row) > 2]
        uniform = plain([(one / one.sum(1, keepdims=True))[None] for one in flat])[0]
        for measure in MEASURES:
            level = chance[measure][f"L{layer}"] if isinstance(chance[measure], dict) else chance[measure]
            # Measured: 6e-8, a uniform row in float32.
            assert level == pytest.approx(uniform[measure][0], rel=1e-6)
    assert table["ind"].isna().all() == encoder
    assert (table.attrs["chance"]["ind"] is None) == encoder


def test_equal_prompts_are_one_observation():
    model, ids = shared("bridge", "llama"), zoo.prompt(4, 12)
    patterns = [np.concatenate([one[0] for one in kept_patterns(model, row[None])]) for row in ids]
    with pytest.warns(UserWarning, match="of 6 prompts 4 are distinct"):
        table = tls.detect_heads(model, prompts=torch.cat([ids, ids[:1], ids[:1]]))
    for place in range(len(table)):
        parts = [of_prompt(pattern[place]) for pattern in patterns]
        weighted = [{name: tuple(3 * np.array(one)) for name, one in parts[0].items()}, *parts[1:]]
        for measure, (value, error) in ratios(weighted).items():
            # Measured: 2e-6, as above; an error as if all six were distinct is off by 10 % and more.
            assert table[measure][place] == pytest.approx(value, rel=1e-5, abs=1e-5)
            assert table[f"{measure}_se"][place] == pytest.approx(error, rel=1e-4, abs=1e-5)


def made_of(weights):
    """A hook that gives every query the same weights for key 0, its own key and the key before."""

    def patch(pattern, hook):
        made = torch.zeros_like(pattern)
        position = torch.arange(pattern.shape[-1])
        for weight, key in zip(weights, (0 * position, position, position - 1), strict=True):
            made[..., position, key.clamp_min(0)] += weight
        return made

    return patch


@pytest.mark.parametrize(("weights", "kept"), [((0.5, 0.3, 0.2), True), ((0.96, 0.03, 0.01), False)])
def test_a_head_of_known_rows_has_its_known_numbers(weights, kept):
    model, n = shared("bridge", "llama"), 10
    name = attention_view(model).hook_names(1)["pattern"]
    with model.hooks(fwd_hooks=[(name, made_of(weights))]):
        table = tls.detect_heads(model, prompts=zoo.prompt(3, n)).query("layer == 1")
    first, own, before = weights
    queries = np.arange(2, n)
    expected = {
        "entropy": entropy(weights),
        "distance": np.mean(first * queries + before),
        "start_share": first,
        "entropy_sinkless": entropy(np.array([own, before]) / (own + before)) if kept else np.nan,
        "distance_sinkless": before / (own + before),
        "sinkless_rows": float(kept),
    }
    for measure, value in expected.items():
        # Weights in float32: measured 3e-7. All rows are equal, so errors are 0 up to that.
        np.testing.assert_allclose(table[measure], value, rtol=0, atol=2e-6)
        error = table[f"{measure}_se"]
        assert error.isna().all() if np.isnan(value) else (error < 1e-6).all()


def test_repeated_segments_have_no_such_columns():
    tokens = torch.tensor([[1, 5, 6, 7, 5, 6, 7], [1, 8, 9, 7, 8, 9, 7]])
    model = shared("bridge", "llama")
    assert not set(MEASURES) & set(tls.detect_heads(model, prompts=tokens))
