"""`relative_position_kernel`: scores by offset against kept scores, under masks and ablations."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from described import assert_described
from zoo import shared

from tlspectral.detectors import relative_position_kernel
from tlspectral.errors import BadHead, UnsupportedArchitecture
from tlspectral.hooks import ablate
from tlspectral.models.attention import attention_view

BACKENDS = ("bridge", "hooked") if zoo.HAS_HOOKED else ("bridge",)
MODELS = [
    (backend, name)
    for name in ("gpt2", "llama", "mistral", "gemma2")
    for backend in BACKENDS
    if backend == "bridge" or name in zoo.HOOKED_ARCHITECTURES
]


def plain_kernel(model, layer, head, tokens, farthest=20):
    seen = []
    name = f"blocks.{layer}.attn.hook_attn_scores"
    with torch.no_grad(), model.hooks(fwd_hooks=[(name, lambda scores, hook: seen.append(scores[:, head].double()))]):
        model(tokens)
    n, means = tokens.shape[1], []
    for back in range(min(farthest, n - 1), -1, -1):
        values = [float(seen[0][row, i, i - back]) for row in range(len(tokens)) for i in range(back, n)]
        kept = [value for value in values if value > -1e30]
        means.append(np.mean(kept) if kept else np.nan)
    return means


@pytest.mark.parametrize(("backend", "name"), MODELS)
def test_it_is_the_mean_of_the_kept_scores(backend, name):
    model, tokens = shared(backend, name), zoo.prompt(3, 24)
    found = relative_position_kernel(model, [(1, 2), (0, 1)], tokens)
    assert_described(found)
    assert list(found) == ["layer", "head", "offset", "score"]
    assert found["offset"].tolist() == 2 * list(range(-20, 1))
    for (layer, head), one in found.groupby(["layer", "head"]):
        # Measured: 1e-15; the mean of another offset differs by 0.1.
        np.testing.assert_allclose(one["score"], plain_kernel(model, layer, head, tokens), rtol=0, atol=1e-9)
    if name == "mistral":  # a window of 8: nothing farther is ever seen
        assert (found["score"].isna() == (found["offset"] <= -zoo.WINDOW)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_active_ablation_shows(backend):
    model, tokens = shared(backend, "llama"), zoo.prompt(3, 24)
    intact = relative_position_kernel(model, [(0, 1), (0, 2)], tokens)
    with ablate(model, [(0, 1)], "rope_phase"):
        ablated = relative_position_kernel(model, [(0, 1), (0, 2)], tokens)
        expected = plain_kernel(model, 0, 1, tokens)
    change = (ablated["score"] - intact["score"]).abs()
    assert change[intact["head"] == 1].max() > 0.05
    assert change[intact["offset"] == 0].max() < 1e-6  # the phase is odd in the offset; measured: 7e-9
    assert (change[intact["head"] == 2] == 0).all()
    np.testing.assert_allclose(ablated.loc[ablated["head"] == 1, "score"], expected, rtol=0, atol=1e-9)


def test_tokens_are_drawn_with_a_seed():
    model = shared("bridge", "llama")
    one, again = (relative_position_kernel(model, pd.DataFrame({"layer": [1], "head": [3]})) for _ in range(2))
    pd.testing.assert_frame_equal(one, again, check_exact=True)
    assert len(one) == 21


def test_short_prompts_reach_less_far():
    found = relative_position_kernel(shared("bridge", "llama"), [(0, 0)], zoo.prompt(2, 5))
    assert found["offset"].tolist() == [-4, -3, -2, -1, 0]


def test_no_heads_is_an_empty_table():
    assert_described(relative_position_kernel(shared("bridge", "llama"), []))


@pytest.mark.parametrize("name", ["gptj", "opt"])
def test_a_bridge_without_scores_is_refused(name):
    assert attention_view(shared("bridge", name)).delegates_attention(0)
    with pytest.raises(UnsupportedArchitecture, match=r"layer 0: this bridge .* exposes no scores"):
        relative_position_kernel(shared("bridge", name), [(0, 0)])


def test_heads_that_do_not_exist_are_refused():
    with pytest.raises(BadHead, match="L7H0 does not exist"):
        relative_position_kernel(shared("bridge", "llama"), [(7, 0)])
