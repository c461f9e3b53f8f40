"""`parts.Mode`: equal to an edit of W_Q, sums over all modes, the control's size, refusals."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from attention_models import fresh
from zoo import prompt, shared

import tlspectral as tls
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.hooks.parts import Mode
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.reading import attention_view

PROMPT = prompt(2)


def edited(model, layer, head, chosen, *, all_but=False):
    """A copy whose W_Q lacks the left singular vectors of the dense d_model x d_model matrix."""
    view = attention_view(model)
    folded = view.layer(layer)
    w_q, w_k = (factors[head] for factors in folded.operator_factors())
    u = torch.linalg.svd(w_q @ w_k.T).U[:, list(chosen)]
    projector = torch.eye(len(u), dtype=torch.float64) - u @ u.T if all_but else u @ u.T
    made = copy.deepcopy(model)
    raw = attention_view(made).raw(layer)
    gain = torch.ones(len(u), dtype=torch.float64) if raw.norm.gain is None else raw.norm.gain.double()
    with torch.no_grad():
        lost = projector @ (gain[:, None] * raw.w_q[head].double()) / gain[:, None]
        raw.w_q[head] -= lost.to(raw.w_q)
    return made


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["llama", "mistral", "yarn"])
@pytest.mark.parametrize(("chosen", "all_but"), [([0], False), ([1, 3], False), ([0, 2], True)])
def test_it_is_the_model_without_these_directions_in_w_q(name, chosen, all_but):
    model = fresh("bridge", name)
    intact = model(PROMPT)
    with tls.ablate(model, "L1H1", Mode(chosen, all_but)):
        ablated = model(PROMPT)
    by_hand = edited(model, 1, 1, chosen, all_but=all_but)(PROMPT)
    # float32 of two routes: measured 3e-6. Another mode, or one that stays at some offset, is off by hundredths.
    assert (ablated - by_hand).abs().max() < 3e-5
    assert (ablated - intact).abs().max() > 1e-3


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma2"])
def test_the_modes_sum_to_all_that_queries_read_and_both_choices_are_one_sum(name):
    model = shared("bridge", name)
    n_modes = attention_view(model).layer(1).d_head
    score = lambda part: tls.scores(model, PROMPT[:1], "L1H1", part).to_numpy()  # noqa: E731
    each = [score(Mode(number)) for number in range(n_modes)]
    # float64 on both sides. A rank below that of W_Q would leave some.
    np.testing.assert_allclose(sum(each), score(Mode(range(n_modes))), rtol=0, atol=1e-10)
    np.testing.assert_allclose(score(Mode(0)) + score(Mode(0, all_but=True)), sum(each), rtol=0, atol=1e-10)
    assert np.abs(each[0]).max() > np.abs(each[-1]).max()


def test_without_rotation_a_mode_is_its_term_of_m():
    model = shared("bridge", "bloom")
    view = attention_view(model)
    rows = tls.qk_attribution(model, PROMPT[:1], "L1H1", 12, 7, by="mode").set_index(["query_term", "key_term"])
    found = tls.scores(model, PROMPT[:1], "L1H1", Mode(2)).iloc[12, 7]
    expected = rows.loc[("mode 2", "mode 2"), "total"] + rows.loc[("mode 2", "bias"), "total"]
    assert found == pytest.approx(expected, abs=1e-10)
    assert view.rotary(1) is None


def test_a_sweep_compares_it_with_random_directions_of_equal_rms():
    model = shared("bridge", "llama")
    task = tls.Task(PROMPT, lambda logits, tokens, mask: logits[:, -1, 3], predict=-1)
    table = tls.ablation_sweep(model, Mode(0), heads=["L0H1", "L1H1"], task=task, control="random")
    assert table["part"].unique().tolist() == ["mode"]
    assert table.attrs["modes"] == [0]
    assert table["control_delta"].notna().all()
    assert (table["score_rms"] > 0.1).all()
    with tls.ablate(model, "L1H1", Mode(0)):
        ablated = tls.evaluate(model, task)
    assert table.loc[1, "value"] == pytest.approx(float(ablated), abs=1e-5)


def test_a_control_of_all_directions_removes_what_all_modes_are():
    # Whatever the frame, all directions of W_Q are all that queries read: with another sign scores would double.
    model = shared("bridge", "llama")
    task = tls.Task(PROMPT, lambda logits, tokens, mask: logits[:, -1, 3], predict=-1)
    n_modes = attention_view(model).layer(1).d_head
    table = tls.ablation_sweep(model, Mode(range(n_modes)), heads=["L1H1"], task=task, control="random")
    assert abs(table.loc[0, "delta"]) > 1e-3
    assert table.loc[0, "control_delta"] == pytest.approx(table.loc[0, "delta"], rel=1e-3, abs=1e-5)


def test_random_directions_lie_in_the_columns_of_w_q():
    # All of them together are all that queries read: whatever the frame, what is removed is everything.
    model = shared("bridge", "llama")
    view = attention_view(model)
    layer = view.layer(1)
    frame = torch.linalg.qr(torch.randn(layer.d_head, layer.d_head, dtype=torch.float64)).Q[None]
    residual = torch.randn(1, 9, view.d_model, dtype=torch.float64)
    scores = HeadScores.of_stream(layer, residual, layer.rotary.position_tables(9)).of_head(1)
    every = Mode(range(layer.d_head)).on(view, {1: [1]})[1]
    np.testing.assert_allclose(-every.drawn(scores, [0], frame), every.of(scores, None), rtol=0, atol=1e-9)
    one = Mode(0).on(view, {1: [1]})[1]
    w_q = layer.operator_factors()[0][1]
    direction = torch.linalg.qr(w_q).Q @ frame[0, :, 0]
    normed = layer.norm.normalized(residual)[0]
    expected = scores.between((normed @ direction)[None, None, :, None] * (direction @ w_q), scores.key.whole)
    np.testing.assert_allclose(-one.drawn(scores, [0], frame), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "given", [torch.tensor(2), np.int64(2), pd.Series([2], index=[7]), torch.tensor([2, 2]), range(2, 3)]
)
def test_an_index_is_read_by_place_in_any_form(given):
    assert Mode(given).modes == (2,)


@pytest.mark.parametrize("given", [-1, "all but", [], [0.5], None, True])
def test_what_is_no_mode_is_refused(given):
    with pytest.raises(ValueError, match="modes= must be a whole number from 0 on"):
        Mode(given)


def test_a_mode_that_a_head_lacks_and_latents_are_refused():
    model = shared("bridge", "llama")
    with (
        pytest.raises(ValueError, match="layer 1, head 2 has modes 0 to 11; found mode 12"),
        tls.ablate(model, "L1H2", Mode([0, 12])),
    ):
        pass
    with (
        pytest.raises(UnsupportedArchitecture, match="latent attention"),
        tls.ablate(shared("bridge", "deepseek_v3"), "L1H1", Mode(0)),
    ):
        pass
    with pytest.raises(ValueError, match=r"Mode has settings: give tls\.parts\.Mode\(modes\)"):
        tls.parts.part_of("mode")
