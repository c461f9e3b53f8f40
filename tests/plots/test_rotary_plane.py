"""Points of queries and keys in a rotary plane: their products make the score, and rotation turns one panel into the
other.
"""

import numpy as np
import pytest
import torch
from figure_parts import offsets, part, said
from score_terms import PROMPT, captured_of
from spectral_zoo import moved
from zoo import also_slow, bridge, needs_hooked, shared

import tlspectral as tls
from tlspectral import plots
from tlspectral.errors import BadHead, UnsupportedArchitecture
from tlspectral.models.reading import attention_view

LAYER, HEAD = 1, 2
ROTARY_COLUMNS = {"neox": 4, "gptj": 8, "phi": 6}
"""Columns that rotate, the first of a head, in models where the others stay."""


def plane(model, frequency, **options):
    return plots.rotary_plane(model, f"L{LAYER}H{HEAD}", frequency, PROMPT, **options)


def points(figure):
    """Points [pos, 2] of both panels, by what they are."""
    return {
        state: {name: offsets(axes, name) for name in ("queries", "keys")}
        for state, axes in zip(("before", "after"), figure.axes[:2], strict=True)
    }


def sides_of(model):
    """Queries and keys [pos, d_head] of the head, as a run of the model shows them, and the layer's score scale."""
    view = attention_view(model)
    captured, names, raw = captured_of(view, LAYER), view.hook_names(LAYER), view.raw(LAYER)
    query, key = (captured[names[what]][0].double() for what in ("query", "key"))
    group = raw.w_q.shape[0] // raw.w_k.shape[0]
    query, key = (x.reshape(len(x), heads, -1) for x, heads in ((query, len(raw.w_q)), (key, len(raw.w_k))))
    return query[:, HEAD].numpy(), key[:, HEAD // group].numpy(), raw.score_scale


@pytest.mark.parametrize(
    ("backend", "name"),
    # Grouped keys and half-split pairs; neighbouring columns, of which some stay; the other backend.
    [
        ("bridge", "llama"),
        ("bridge", "gptj"),
        *also_slow(
            ("bridge", "neox"), ("bridge", "phi"), ("bridge", "qwen3"), ("bridge", "gemma3"), ("bridge", "yarn")
        ),
        *(pytest.param("hooked", name, marks=[needs_hooked, pytest.mark.slow]) for name in ("llama", "gptj", "qwen2")),
        *also_slow(("spectral", "llama")),
    ],
)
def test_products_of_all_pairs_add_up_to_the_score(backend, name):
    model = moved("bridge", name) if backend == "spectral" else shared(backend, name)
    total = np.zeros(2 * [PROMPT.shape[1]])
    for frequency in range(attention_view(model).rotary(LAYER).n_pairs):
        after = points(plane(model, frequency))["after"]
        total += after["queries"] @ after["keys"].T
    if name in ROTARY_COLUMNS:
        query, key, scale = sides_of(model)
        still = slice(ROTARY_COLUMNS[name], None)
        # float32 of the run, measured 2e-6: a pair that is left out or taken twice is off by tenths.
        total, tolerance = total + scale * query[:, still] @ key[:, still].T, 1e-5
    else:
        tolerance = 1e-12  # measured 1e-14, sums in another order
    scores = tls.scores(model, PROMPT, (LAYER, HEAD)).to_numpy()
    assert np.abs(scores).max() > 1
    np.testing.assert_allclose(total, scores, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("name", "columns"), [("llama", (1, 7)), *also_slow(("gptj", (2, 3)))])
def test_the_left_panel_has_the_models_own_queries_and_keys_and_the_right_one_turns_them(name, columns):
    model = shared("bridge", name)
    figure = points(plane(model, 1))
    query, key, scale = sides_of(model)
    theta = attention_view(model).rotary(LAYER).theta[1].item()
    angle = theta * np.arange(PROMPT.shape[1])
    for what, vectors in (("queries", query), ("keys", key)):
        before, after = figure["before"][what], figure["after"][what]
        # float32 of the run and of the model's cos and sin, measured 3e-7; other columns are off by tenths.
        np.testing.assert_allclose(before, scale**0.5 * vectors[:, columns], rtol=0, atol=1e-5)
        turned = (before[:, 0] + 1j * before[:, 1]) * np.exp(1j * angle)
        np.testing.assert_allclose(after, np.stack([turned.real, turned.imag], axis=1), rtol=0, atol=1e-5)


def test_the_named_query_and_key_are_marked_and_the_note_has_their_part_of_the_score():
    model = shared("bridge", "llama")
    figure = plane(model, np.int64(0), query=-2, key=5)
    after = points(figure)["after"]
    last = PROMPT.shape[1] - 2
    for name, position in (("queries", last), ("keys", 5)):
        (drawn,) = part(figure.axes[1], f"named {name}")
        np.testing.assert_array_equal(drawn.get_xydata()[0], after[name][position])
    added = after["queries"][last] @ after["keys"][5]
    whole = tls.scores(model, PROMPT, (LAYER, HEAD)).iloc[last, 5]
    text = said(figure).replace("\N{MINUS SIGN}", "-")
    assert f"adds {added:.2f} to the score {whole:.2f} of query {last} and key 5 ({int(PROMPT[0, 5])})" in text
    assert part(plane(model, 0), "named keys") == []


def test_later_points_are_darker_and_the_model_stays_as_it_was():
    model = bridge("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    figure = plane(model, 0)
    for name in ("queries", "keys"):
        (drawn,) = part(figure.axes[0], name)
        light = drawn.get_facecolors()[:, :3] @ [0.2126, 0.7152, 0.0722]
        assert (np.diff(light) < 0).all()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "options", "error", "text"),
    [
        ("gpt2", {}, UnsupportedArchitecture, "layer 1 has no rotary positions"),
        ("llama", {"frequency": 6}, ValueError, "frequency=6 does not exist: layer 1 has the pairs 0 to 5"),
        ("llama", {"frequency": -1}, ValueError, "frequency=-1 does not exist"),
        ("llama", {"prompt": PROMPT.repeat(2, 1)}, ValueError, "the figure is of one prompt; found 2 prompts"),
        ("llama", {"query": 3, "key": 4}, ValueError, "key 4 is behind query 3"),
        ("llama", {"query": 99}, ValueError, "query 99 is not in the prompt"),
        ("llama", {"head": "L1"}, BadHead, "whole layer"),
    ],
)
def test_what_cannot_be_drawn_is_refused(name, options, error, text):
    given = {"head": "L1H2", "frequency": 0, "prompt": PROMPT, **options}
    with pytest.raises(error, match=text):
        plots.rotary_plane(shared("bridge", name), **given)
