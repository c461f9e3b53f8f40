"""`qk_attribution`: one score as a sum over pairs of sources, beside plainer routes to the same numbers."""

import numpy as np
import pytest
import spectral_zoo
import torch
from attention_models import fresh
from described import assert_described
from score_terms import KEY, PARTS, PROMPT, QUERY, captured_of, plain_terms
from zoo import shared

import tlspectral as tls
from tlspectral.models.attention import attention_view


@pytest.mark.parametrize("part", ["symmetric", "antisymmetric", "phase"])
def test_parts_sum_to_what_the_scores_lose_inside_ablate(part):
    model = shared("bridge", "qwen3")
    table = tls.qk_attribution(model, PROMPT, "L1H2", QUERY, KEY)
    point = attention_view(model).hook_names(1)["scores"]
    with tls.ablate(model, "L1H2", "rope_phase" if part == "phase" else part):
        ablated = captured_of(attention_view(model), 1)[point]
    lost = table.attrs["score"] - float(ablated[0, 2, QUERY, KEY])
    assert table[part].sum() == pytest.approx(lost, abs=5e-6)  # float32 scores: measured 4e-7


@pytest.mark.parametrize(("backend", "name"), spectral_zoo.SOME)
def test_a_spectral_model_has_the_terms_of_its_own_rotation(backend, name):
    spectral = spectral_zoo.moved(backend, name)
    view = attention_view(spectral)
    table = tls.qk_attribution(spectral, PROMPT, "L1H1", QUERY, KEY)
    terms = plain_terms(view, 1, 1, captured_of(view, 1))
    for row in table.itertuples():
        expected = terms[row.query_source, row.key_source]
        np.testing.assert_allclose([getattr(row, part) for part in PARTS], expected, rtol=0, atol=1e-5)
    base = tls.qk_attribution(spectral_zoo.base(backend, name), PROMPT, "L1H1", QUERY, KEY)
    assert abs(table["phase"].sum() - base["phase"].sum()) > 1e-2


# --- known answers ---


def test_the_circuit_of_the_packaged_model_comes_first():
    # tiny-rope: L0H3 attends to the token before, and the keys of the induction head L1H0 read it.
    tokens = torch.arange(3, 20).repeat(2)
    table = tls.qk_attribution(tls.load_model("tiny-rope"), tokens, "L1H0", query=-1, key=17, remove=1)
    assert table.attrs["attention"] > 0.95
    first = table.iloc[0]
    assert (first["query_source"], first["key_source"]) == ("embedding", "L0H3")
    assert first["total"] > 5 * table["total"].abs()[1:].max()
    assert first["attention_predicted"] < 0.01
    assert first["attention_measured"] < 0.01
    assert table.attrs["removed_key_sources"] == ["L0H3"]


def test_a_planted_writer_comes_first():
    model = fresh("bridge", "llama")
    view = attention_view(model)
    generator = torch.Generator().manual_seed(3)
    found = captured_of(view, 1)
    token = found[view.hook_names(0)["residual"]][0, QUERY]
    token = token / token.norm()
    direction = torch.randn(view.d_model, generator=generator)
    direction = torch.nn.functional.normalize(direction - (direction @ token) * token, dim=0)
    early, late = view.raw(0), view.raw(1)
    slow = int(late.rotary.real_index[-1])  # a pair that hardly turns
    with torch.no_grad():
        z = found[view.hook_names(0)["z"]][0, KEY, 2]
        early.w_o[2] = 2.0 * torch.outer(z / z.square().sum(), direction)  # at the key, L0H2 writes 2 * direction
        late.w_q[1], late.w_k[0] = 0.0, 0.0
        late.w_q[1, :, slow] = 10 * token / late.norm.gain
        late.w_k[0, :, slow] = direction / late.norm.gain
    table = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, remove=2)
    assert table.loc[0, ["query_source", "key_source"]].tolist() == ["embedding", "L0H2"]
    assert table.loc[0, "total"] > 3 * table["total"].abs()[1:].max()
    # The head next to it reads the same key/value head, and other queries.
    assert tls.qk_attribution(model, PROMPT, "L1H0", QUERY, KEY).loc[0, "key_source"] == "L0H2"


# --- the table ---


def test_every_column_is_described():
    model = shared("bridge", "llama")
    more = ({}, {"by_frequency": True, "top": 2}, {"remove": 2, "top": 4})
    assert_described(*(tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, **options) for options in more))


def test_a_file_keeps_the_table(tmp_path):
    table = tls.qk_attribution(shared("bridge", "bloom"), PROMPT, "L1H1", QUERY, KEY, top=5, remove=2)
    tls.write_table(table, tmp_path / "score.parquet")
    read = tls.read_table(tmp_path / "score.parquet")
    assert read.equals(table)
    assert read.attrs == table.attrs


@pytest.mark.parametrize("name", ["neox", "gemma2", "bloom", "gptj"])
def test_top_keeps_the_sum(name):
    model = shared("bridge", name)
    whole = tls.qk_attribution(model, PROMPT, "L1H0", QUERY, KEY)
    for top in (1, 5, len(whole) - 1):
        table = tls.qk_attribution(model, PROMPT, "L1H0", QUERY, KEY, top=top)
        assert len(table) == top + 1
        assert table.loc[top, ["query_source", "key_source"]].tolist() == ["rest", "rest"]
        assert table[:top].equals(whole[:top])
        np.testing.assert_allclose(table[PARTS].sum(), whole[PARTS].sum(), rtol=0, atol=1e-12)  # float64 rounding
    for top in (len(whole), 10_000):
        assert tls.qk_attribution(model, PROMPT, "L1H0", QUERY, KEY, top=top).equals(whole)
