"""Scores per frequency: pairs sum to the logits, a scale of one's own, frequencies of one's own."""

import pytest
import torch
import zoo
from ablation_runs import NO_ROPE
from positional_measurements import (
    agreement_of_shared_prefill,
    block_prompt,
    differ,
    measured,
)
from reference_keys import KeysInPlaces
from spectral_zoo import move
from zoo import shared

from tlspectral.models.reading import attention_view
from tlspectral.models.reading.layer import softcapped
from tlspectral.models.running.passes import capture_until
from tlspectral.positional.block_weights import QueryPasses
from tlspectral.spectral_rope import to_spectral


def test_layers_without_rotary_positions_have_no_frequencies():
    model = shared("bridge", "smollm3")
    table = measured(model, per_frequency=True)
    with_rope = [layer for layer in range(4) if attention_view(model).rotary(layer) is not None]
    assert with_rope
    assert len(with_rope) < 4
    assert sorted(set(table["layer"])) == with_rope
    keys = measured(model, mode="key")
    still = ~keys["layer"].isin(with_rope)
    assert (keys.loc[still, "exclusion_index"] == 0).all()
    assert (keys.loc[~still, "exclusion_index"] > 0).all()


# --- logits per frequency ---


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.RIGHT if name not in NO_ROPE])
def test_frequencies_and_still_columns_sum_to_the_scores(name):
    model, prompt = shared("bridge", name), block_prompt()
    view = attention_view(model)
    found = {}

    def keep(prompt, query, layer, seen, pattern):
        found[layer] = seen

    layers = {layer: view.raw(layer) for layer in view.layers}
    QueryPasses(view, layers, [prompt.suffix]).run(prompt.tokens()[None, : -len(prompt.suffix)], keep)
    for layer, seen in found.items():
        if seen.n_pairs == 0:
            continue
        keys = KeysInPlaces(view, layer, prompt.tokens())
        summed = seen.frequency_logits().sum(1) + keys.raw.score_scale * keys.still_logits()
        whole = softcapped(summed, seen.softcap)[:, seen.visible]
        # Logits of size 10 in float64: measured 4e-14.
        assert (whole - seen.head_logits()[:, seen.visible]).abs().max() < 1e-12
        assert torch.equal(seen.visible, keys.seen)
        names = view.hook_names(layer)
        if "scores" in names:
            theirs = capture_until(view, prompt.tokens()[None], [names["scores"]], last=names["pattern"])[
                names["scores"]
            ]
            # As verify_scores: float32 scores of size 10, measured 1e-5.
            assert (whole - theirs[0, :, -1, seen.visible]).abs().max() < 1e-4


@pytest.mark.slow
def test_a_logit_scale_takes_the_place_of_the_models_own():
    model = shared("bridge", "llama")
    scale = attention_view(model).raw(0).score_scale
    assert differ(measured(model, mode="key"), measured(model, mode="key", logit_scale=scale)) < 1e-12
    sharp = measured(model, mode="key", logit_scale=3 * scale)
    plain = measured(model, mode="key")
    assert (sharp["logit_std"] / plain["logit_std"]).to_numpy() == pytest.approx(3.0)
    assert differ(sharp, plain, ["exclusion_index"]) < 1e-12
    assert differ(sharp, plain, ["s_pos"]) > 1e-2
    pairs = measured(model, mode="key", per_frequency=True)
    assert differ(pairs, measured(model, mode="key", per_frequency=True, logit_scale=scale)) < 1e-12
    printed = measured(model, mode="key", per_frequency=True, logit_scale=1.0)  # the formula of PS to the letter
    assert (pairs["logit_std"] / printed["logit_std"]).to_numpy() == pytest.approx(scale)
    assert differ(pairs, printed, ["s_pos"]) > 1e-2


# --- frequencies of their own ---


@pytest.mark.slow
def test_heads_that_turn_at_frequencies_of_their_own_are_measured_with_them():
    base = shared("bridge", "qwen3")
    model, prompt = to_spectral(base, log_omega=False), block_prompt()
    assert differ(measured(model, prompt), measured(base, prompt)) < 1e-9
    start = measured(model, prompt, mode="key", per_frequency=True)
    move(model, only=("omega", "phase", "gain"))
    for per_frequency in (False, True):
        words, keys = (measured(model, prompt, mode=mode, per_frequency=per_frequency) for mode in ("prompt", "key"))
        first = words["layer"] == 0
        assert differ(words[first], keys[first]) < 1e-5
    # Gains of its own change the size of what a pair adds, and frequencies its index, in every head.
    changed = (keys[["logit_std", "exclusion_index"]] - start[["logit_std", "exclusion_index"]]).abs()
    assert (changed.groupby(keys["name"]).max() > 1e-3).all(axis=None)
    assert agreement_of_shared_prefill(model, "prompt", True) < 1e-3
