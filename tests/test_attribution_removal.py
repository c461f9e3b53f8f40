"""`qk_attribution(remove=...)`: what a score loses, beside runs of the model with edited streams."""

import pytest
import torch
from score_terms import KEY, PROMPT, QUERY, captured_of
from zoo import shared

import tlspectral as tls
from tlspectral.models.attention import attention_view
from tlspectral.rotary import in_float64


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "mistral", "gptneo"])
def test_attention_is_the_softmax_of_the_row_with_the_changed_score(name):
    view = attention_view(shared("bridge", name))
    table = tls.qk_attribution(view.model, PROMPT, "L1H2", QUERY, KEY, remove=4)
    found, names = captured_of(view, 1), view.hook_names(1)
    pattern = in_float64(found[names["pattern"]])[0, 2, QUERY]
    cap, score = table.attrs["softcap"], torch.tensor(table.attrs["score"], dtype=torch.float64)
    capped = (lambda value: value) if cap is None else (lambda value: cap * torch.tanh(value / cap))

    def attention(change):
        # From the intact pattern: the weight of the key is multiplied, and the row is normalised again.
        weight = pattern[KEY] * torch.exp(capped(score - change) - capped(score))
        return float(weight / (weight + 1 - pattern[KEY]))

    for row in table[:4].itertuples():
        assert row.attention_predicted == pytest.approx(attention(row.total), abs=1e-5)  # measured 4e-7, float32
        assert row.attention_measured == pytest.approx(attention(row.measured), abs=1e-5)
    for kind in ("predicted", "measured"):
        expected = attention(table.attrs[f"joint_score_{kind}"])
        assert table.attrs[f"joint_attention_{kind}"] == pytest.approx(expected, abs=1e-5)


def test_a_bias_is_removed_from_its_projection_and_alibi_from_the_score():
    model = shared("bridge", "bloom")
    rows = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY)
    table = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, remove=len(rows)).set_index(
        ["query_source", "key_source"]
    )
    # No norm stands between a bias and the score, so nothing but the pair of biases changes.
    for pair in (("bias", "bias"), ("alibi", "alibi")):
        assert table.loc[pair, "measured"] == pytest.approx(table.loc[pair, "total"], abs=1e-10)
    assert abs(table.loc[("bias", "embedding"), "measured"] - table.loc[("bias", "embedding"), "total"]) > 1e-3
    # All of the key is gone: what is left of the score is nothing.
    attrs = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, remove=len(rows)).attrs
    assert attrs["joint_score_measured"] == pytest.approx(attrs["score"], abs=1e-4)
    assert attrs["joint_score_predicted"] == pytest.approx(attrs["score"], abs=1e-4)
