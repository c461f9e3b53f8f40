"""`qk_attribution(remove=...)`: what a score loses, beside runs of the model with edited streams."""

import pytest
import torch
import zoo
from attention_models import every_model
from score_terms import KEY, PROMPT, QUERY, captured_of, own_score, sources_of
from zoo import shared

import tlspectral as tls
from tlspectral.models.attention import attention_view
from tlspectral.rotary import in_float64


@every_model
def test_measured_is_what_a_run_with_edited_streams_says(backend, name):
    if name in zoo.READ_WRONG and backend == "bridge":
        pytest.skip("refused")
    view = attention_view(shared(backend, name))
    layer, head, count = view.n_layers - 1, 1, 6
    table = tls.qk_attribution(view.model, PROMPT, (layer, head), QUERY, KEY, remove=count)
    found = captured_of(view, layer)
    written, point = sources_of(view, layer, found), view.hook_names(layer)["residual"]

    def score(at_query, at_key):
        """The score of a run in which the head's layer reads streams without these writes."""

        def edit(residual, hook):
            edited = in_float64(residual).clone()
            edited[0, QUERY] -= at_query
            edited[0, KEY] -= at_key
            return edited.to(residual)

        return own_score(view, layer, head, captured_of(view, layer, edits=[(point, edit)]))

    intact, compared = score(0, 0), 0
    for row in table[:count].itertuples():
        if {row.query_source, row.key_source} & {"bias", "alibi"}:
            continue
        a, b = written[row.query_source][QUERY], written[row.key_source][KEY]
        expected = intact - score(a, 0) - score(0, b) + score(a, b)
        # Measured: 1.5e-6, by float32 in the four runs. With frozen norms it would be `total`, off by 0.09 and more.
        assert row.measured == pytest.approx(expected, abs=1e-5)
        compared += 1
    assert compared > 0
    assert table["measured"][count:].isna().all()
    no_norm = view.raw(layer).norm.kind == "none" and view.raw(layer).q_norm is None
    if not no_norm:
        assert (table["measured"] - table["total"])[:count].abs().max() > 1e-2, "frozen norms would not be seen"
    gone = table.attrs["removed_key_sources"]
    of_gone = table["key_source"].isin(gone)
    assert table.attrs["joint_score_predicted"] == pytest.approx(table.loc[of_gone, "total"].sum(), abs=1e-10)
    if not {"bias", "alibi"} & set(gone):
        expected = intact - score(0, sum(written[source][KEY] for source in gone))
        assert table.attrs["joint_score_measured"] == pytest.approx(expected, abs=1e-5)


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
