"""Layers of a checkpoint that are read one by one keep their kind: windows, rotary positions, lists per layer."""

import numpy as np
import pytest
import zoo
from streamed_checkpoints import analyze, assert_streamed_equals_loaded, opened

import tlspectral as tls


def theta_of(layers, index):
    with layers.layer(index) as view:
        rotary = view.rotary(0)
        return None if rotary is None else rotary.theta


def window_of(layers, index):
    """How many keys the last of 24 queries attends to."""
    seen = []
    with layers.layer(index) as view:
        name = view.hook_names(0)["pattern"]
        view.run(
            zoo.prompt(batch=1), [(name, lambda pattern, hook: seen.append((pattern[0, 0, -1] > 0).sum()))], last=name
        )
    return int(seen[0])


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("gptneo", [24, zoo.WINDOW]),
        ("gemma2", [zoo.WINDOW, 24] * 2),
        ("gemma3", [zoo.WINDOW, 24] * 2),
        ("mistral", [zoo.WINDOW] * 2),
        ("llama", [24, 24]),
    ],
)
def test_local_layers_stay_local(folder, name, windows):
    layers = opened(folder(name))
    assert [window_of(layers, index) for index in range(layers.n_layers)] == windows


def test_layers_without_rotary_positions_stay_so(folder):
    layers = opened(folder("smollm3"))
    assert [theta_of(layers, index) is None for index in range(4)] == [False, True, False, True]
    table = analyze(folder("smollm3"))
    assert table["rope_imag_frac"].isna().tolist() == ([False] * 4 + [True] * 4) * 2


def test_layers_keep_their_own_base(folder):
    layers, pairs = opened(folder("gemma3")), np.arange(8)
    for index in range(4):
        expected = 10000.0 ** (-pairs / 8) / 2 if index % 2 else 100.0 ** (-pairs / 8)
        np.testing.assert_allclose(theta_of(layers, index), expected, rtol=1e-6)  # float32 angles: 4e-8


def test_a_list_of_another_meaning_is_not_taken_for_one_per_layer(tmp_path):
    """Two end-of-text ids in a model of two layers."""
    model = zoo.hf_model("llama")
    model.config.eos_token_id = [2, 3]
    model.save_pretrained(tmp_path)
    assert_streamed_equals_loaded(analyze(tmp_path), analyze(tls.load_model(tmp_path)))
