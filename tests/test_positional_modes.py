"""The two modes of `positional_symbolic`: where they agree, and where they must not."""

import pytest
from positional_measurements import LEARNED_POSITIONS, block_prompt, differ, every_model, measured
from zoo import shared


@every_model
def test_in_the_first_layer_words_that_swap_are_keys_that_swap(backend, name):
    if name in LEARNED_POSITIONS:
        pytest.skip("a learned position is in the key vector")
    model, prompt = shared(backend, name), block_prompt()
    words, keys = (measured(model, prompt, mode=mode) for mode in ("prompt", "key"))
    first = words["layer"] == 0
    # The model computes keys in float32, alike in any order: measured 2e-7.
    assert differ(words[first], keys[first]) < 1e-5
    # Deeper the keys themselves differ, and the table would show it if one mode were the other.
    if name != "neox" and backend == "bridge":
        assert differ(words[~first], keys[~first]) > 1e-2


@pytest.mark.parametrize("name", ["llama", "neox", "gptj", "gemma2", "smollm3"])
def test_frequencies_too_agree_in_the_first_layer(name):
    words, keys = (measured(shared("bridge", name), mode=mode, per_frequency=True) for mode in ("prompt", "key"))
    first = words["layer"] == 0
    assert differ(words[first], keys[first]) < 1e-5
    assert differ(words[~first], keys[~first]) > 1e-2


@pytest.mark.parametrize("name", LEARNED_POSITIONS)
def test_without_rotary_positions_permuted_keys_take_their_logits_along(name):
    table = measured(shared("bridge", name), block_prompt((3, 3, 3, 3)), mode="key")
    whole = table if name != "gptneo" else table[table["layer"] == 0]  # its second layer has a window
    # Exactly: the logit does not know its position. Scores are cosines of equal vectors, up to rounding.
    assert (table["exclusion_index"] == 0).all()
    assert (whole["s_sym"] - 1).abs().max() < 1e-12
    assert whole["s_pos"].max() < 0.999
    assert (table["logit_std"] > 0.1).all()
    # Words that swap get other learned positions, which prompt mode shows.
    words = measured(shared("bridge", name), block_prompt((3, 3, 3, 3)))
    assert words["s_sym"].min() < 0.9
    assert (words["exclusion_index"] == 0).all()
