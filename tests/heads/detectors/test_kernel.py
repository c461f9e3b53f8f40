"""`relative_position_kernel`: scores by offset against kept scores, under masks and ablations."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from conformance.sweeps import plain_kernel
from stand_in_device import OF_GAINS, Float64Numbers
from zoo import shared

from tlspectral.errors import BadHead, EditNotHonored, ScoreMismatch
from tlspectral.heads import kernel_prediction, relative_position_kernel
from tlspectral.hooks import ablate
from tlspectral.models.reading import attention_view

BACKENDS = ("bridge", "hooked") if zoo.HAS_HOOKED else ("bridge",)


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


def test_tokens_are_drawn_with_a_seed_and_short_prompts_reach_less_far():
    model, head = shared("bridge", "llama"), pd.DataFrame({"layer": [1], "head": [3]})
    drawn = torch.randint(0, 97, (48, 96), generator=torch.Generator().manual_seed(0))
    drawn[:, 0] = attention_view(model).start_token
    one, again = (relative_position_kernel(model, head, *given) for given in ([], [drawn]))
    pd.testing.assert_frame_equal(one, again, check_exact=True)
    assert len(one) == 21
    found = relative_position_kernel(model, [(0, 0)], zoo.prompt(2, 5))
    assert found["offset"].tolist() == [-4, -3, -2, -1, 0]
    for measure in (relative_position_kernel, kernel_prediction):
        assert measure(model, []).empty
    with pytest.raises(BadHead, match="L7H0 does not exist"):
        relative_position_kernel(model, [(7, 0)])


@pytest.mark.slow
@zoo.needs_hooked
@pytest.mark.parametrize("name", ["gptj", "opt", "gptneo"])
def test_rebuilt_scores_are_those_that_the_other_backend_exposes(name):
    tokens = zoo.prompt(3, 24)
    rebuilt, exposed = (
        relative_position_kernel(shared(backend, name), [(0, 1), (1, 2)], tokens)["score"]
        for backend in ("bridge", "hooked")
    )
    # Measured: 5e-7, float32 scores; the mean of another offset differs by 0.2.
    np.testing.assert_allclose(rebuilt, exposed, rtol=0, atol=1e-5)


def test_a_layer_whose_scores_are_rebuilt_is_refused_under_an_ablation_there():
    model, tokens = shared("bridge", "gptj"), zoo.prompt(3, 24)
    intact = relative_position_kernel(model, [(1, 0)], tokens)["score"]
    with ablate(model, [(0, 1)], "rope_phase"):
        with pytest.raises(EditNotHonored, match=r"layer 0: this bridge computes attention itself.*hook_z"):
            relative_position_kernel(model, [(0, 0)], tokens)
        later = relative_position_kernel(model, [(1, 0)], tokens)["score"]
    assert (later - intact).abs().max() > 1e-4  # the residual stream that enters layer 1 is the ablated one


def test_rebuilt_scores_that_are_not_the_models_own_are_refused():
    model = shared("bridge", "opt")
    double = [("blocks.0.attn.hook_q", lambda query, hook: 2 * query)]
    with pytest.raises(ScoreMismatch, match="layer 0: the attention of the run differs"), model.hooks(fwd_hooks=double):
        relative_position_kernel(model, [(0, 0)], zoo.prompt(3, 24))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_padding_is_not_counted(name):
    model, tokens = shared("bridge", name), zoo.prompt(2, 24)
    mask = torch.ones_like(tokens)
    mask[0, :10] = 0  # padded on the left
    padded = relative_position_kernel(model, [(0, 1)], {"input_ids": tokens, "attention_mask": mask})
    alone = [relative_position_kernel(model, [(0, 1)], row)["score"] for row in (tokens[:1, 10:], tokens[1:])]
    for back in range(14):
        short, long = (float(score.iloc[-1 - back]) for score in alone)
        counts = 14 - back, 24 - back
        expected = (counts[0] * short + counts[1] * long) / sum(counts)
        # Measured: 2e-16 (other batch shapes may round float32 otherwise); counting the filling moves the mean by 0.1.
        assert padded["score"].iloc[-1 - back] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_on_a_device_only_sums_are_in_float64(device):
    on_cpu, placed = shared("bridge", "llama"), zoo.bridge("llama").to(device)
    with Float64Numbers() as computed:
        found = relative_position_kernel(placed, [(0, 1), (1, 0)], zoo.prompt(3))
    assert set(computed.of) <= {"sum"} | OF_GAINS
    # Scores of the stand-in are those of the CPU to the bit, and so are sums of them.
    pd.testing.assert_frame_equal(
        found, relative_position_kernel(on_cpu, [(0, 1), (1, 0)], zoo.prompt(3)), check_exact=True
    )
