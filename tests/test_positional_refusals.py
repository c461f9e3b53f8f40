"""What `positional_symbolic` refuses: layers that are not reproduced, settings and prompts without a meaning."""

import math
from contextlib import contextmanager

import pytest
import zoo
from positional_measurements import WITHOUT_ROPE, block_prompt, measured, modes
from zoo import shared

from tlspectral.errors import ScoreMismatch, UnsupportedArchitecture
from tlspectral.models.attention import AttentionView, attention_view


@contextmanager
def hooked_with(model, name, change):
    with model.hooks(fwd_hooks=[(name, change)]):
        yield


@modes
def test_a_layer_that_is_not_reproduced_gives_no_table(mode):
    model = shared("bridge", "llama")
    name = attention_view(model).hook_names(1)["scores"]
    with (
        pytest.raises(ScoreMismatch, match="layer 1: the attention of the last query rebuilt"),
        hooked_with(model, name, lambda scores, hook: 1.01 * scores),
    ):
        measured(model, mode=mode)


def test_a_layer_read_with_another_scale_gives_no_table(monkeypatch):
    read = AttentionView.raw

    def wrong(self, index):
        found = read(self, index)
        object.__setattr__(found, "score_scale", 1.01 * found.score_scale)
        return found

    monkeypatch.setattr(AttentionView, "raw", wrong)
    with pytest.raises(ScoreMismatch, match="layer 0"):
        measured(shared("bridge", "gptj"), mode="key")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "keys"}, "mode must be one of 'prompt', 'key'; not 'keys'"),
        ({"tau": 0.0}, "tau must be positive"),
        ({"tau": -1.0}, "tau must be positive"),
        ({"tau": math.nan}, "tau must be positive"),
        ({"logit_scale": 0.0}, "logit_scale must be positive"),
        ({"swaps": [(1, 7)]}, "blocks are 0 to 4"),
        ({"swaps": [(0, 1)], "exclude_first_block": True}, "no swap is left"),
    ],
)
def test_settings_without_a_meaning_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message if "mode" not in options else "mode"):
        measured(shared("bridge", "llama"), **options)


def test_prompts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="context is 128"):
        measured(shared("bridge", "llama"), block_prompt((40, 40, 50)))
    with pytest.raises(ValueError, match=r"rotary frequencies or score scale change beyond 32"):
        measured(zoo.bridge("phi3_longrope"), block_prompt((10, 10, 10)))


@pytest.mark.parametrize("name", WITHOUT_ROPE)
def test_without_rotary_positions_there_are_no_frequencies(name):
    with pytest.raises(UnsupportedArchitecture, match="no layer of this model has rotary positions"):
        measured(shared("bridge", name), per_frequency=True)


@modes
def test_a_model_that_shows_no_pattern_is_refused(mode):
    model = zoo.bridge("opt")
    model.original_model.set_attn_implementation("sdpa")  # transformers computes no pattern then
    with pytest.raises(UnsupportedArchitecture, match=r'layer 0: .*attn_implementation="eager"'):
        measured(model, mode=mode)
