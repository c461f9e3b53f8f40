"""Ministral 3 scales queries by their position from token 32 on: what is read says so, and stops there."""

import pytest
import torch
import zoo
from zoo import shared

import tlspectral as tls
from tlspectral.heads.operators.verification import verify_scores
from tlspectral.models.reading import attention_view
from tlspectral.positional.block_weights import require_valid_length

LIMIT = 32


def test_layers_and_tables_say_how_far_they_hold():
    model = shared("bridge", "ministral3")
    view = attention_view(model)
    assert view.raw(1).valid_up_to == view.layer(1).valid_up_to == LIMIT
    table = tls.analyze_heads(model, null_draws=3, detectors=False)
    assert table.attrs["rotary_valid_up_to"] == tls.frequency_table(model).attrs["rotary_valid_up_to"] == LIMIT
    verify_scores(model, zoo.prompt(length=LIMIT))
    with pytest.raises(ValueError, match="layer 0: the prompt has 33 tokens, and from token 32 on this model scales"):
        verify_scores(model, zoo.prompt(length=LIMIT + 1))
    with pytest.raises(ValueError, match="score scale change beyond 32"):
        require_valid_length([view.raw(0)], LIMIT + 1)
    model = zoo.bridge("ministral3")
    model.original_model.config.rope_parameters["llama_4_scaling_beta"] = None
    assert attention_view(model).raw(0).valid_up_to is None


@torch.no_grad()
def test_an_ablation_is_exact_up_to_the_limit_and_refused_beyond_it():
    model, seen = zoo.bridge("ministral3"), []
    hooks = [("blocks.0.attn.hook_attn_scores", lambda scores, hook: seen.append(scores[:, 1].tril()))]
    with (
        tls.ablate(model, [(0, 1)], "symmetric"),
        tls.ablate(model, [(0, 1)], "antisymmetric"),
        tls.ablate(model, [(0, 1)], "rope_phase"),
    ):
        model.run_with_hooks(zoo.prompt(length=LIMIT), fwd_hooks=hooks)
        with pytest.raises(ValueError, match=r"layer 0: the prompt has 60 tokens.*at most 32 tokens"):
            model(zoo.prompt(length=60))
    # The three parts make up the whole score. Rounding of scores of 7: 2e-6; past the limit 2.3 were left.
    assert float(seen[0].abs().max()) < 1e-4
