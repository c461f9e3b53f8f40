"""`qk_attribution`: one score as a sum over pairs of sources, beside plainer routes to the same numbers."""

import numpy as np
import pytest
import spectral_zoo
import torch
import zoo
from attention_models import every_model, fresh
from described import assert_described
from score_terms import KEY, PARTS, PROMPT, QUERY, captured_of, plain_terms, projections
from zoo import shared

import tlspectral as tls
from tlspectral.errors import ScoreMismatch, UnsupportedArchitecture
from tlspectral.hooks.parts import removal
from tlspectral.models.attention import attention_view


@every_model
def test_rows_sum_to_the_score_and_each_is_that_of_a_plain_recomputation(backend, name):
    model = shared(backend, name)
    view = attention_view(model)
    layer, head = view.n_layers - 1, 3 if view.n_heads(0) > 3 else 2
    if name in zoo.READ_WRONG and backend == "bridge":
        with pytest.raises(ScoreMismatch, match="look for hooks"):
            tls.qk_attribution(model, PROMPT, (layer, head), QUERY, KEY)
        return
    table = tls.qk_attribution(model, PROMPT, (layer, head), QUERY, KEY)
    attrs, found = table.attrs, captured_of(view, layer)
    np.testing.assert_allclose(table[PARTS].sum(axis=1), table["total"], rtol=0, atol=1e-12)  # the same four numbers
    # Measured: at most 1.6e-2 of the tolerance of 1e-4 + 1e-5 |score|. A source that is left out is off by tenths.
    assert abs(attrs["remainder"]) <= 0.1 * attrs["tolerance"] <= 0.1 * (1e-4 + 1e-5 * abs(attrs["score"]))
    assert table["total"].sum() + attrs["remainder"] == pytest.approx(attrs["score"], abs=1e-12)
    scores = found.get(view.hook_names(layer).get("scores"))
    if scores is not None and attrs["softcap"] is None:
        assert attrs["score"] == float(scores[0, head, QUERY, KEY])
    assert attrs["attention"] == float(found[view.hook_names(layer)["pattern"]][0, head, QUERY, KEY])
    assert attrs["norm_behind_held"] == (name in ("gemma2", "gemma3", "olmo2"))
    sources = set(table["query_source"])
    assert ("positions" in sources) == (name in ("gpt2", "opt", "gptneo"))
    assert ("alibi" in sources) == (name == "bloom")
    assert sources - {"bias", "alibi"} == set(table["key_source"]) - {"bias", "alibi"}
    terms = plain_terms(view, layer, head, found)
    rows = {(row.query_source, row.key_source): [getattr(row, part) for part in PARTS] for row in table.itertuples()}
    alibi = rows.pop(("alibi", "alibi"), None)
    if alibi is not None:
        slope = view.raw(layer).alibi.slopes[head]
        # The bridge adds slope * position; a HookedTransformer counts positions from the query.
        place = KEY if backend == "bridge" else KEY - QUERY
        np.testing.assert_allclose(alibi, [0, 0, 0, slope * place], rtol=0, atol=1e-5)
    # Exact angles against the model's float32 tables: measured 1.5e-7 at terms of 4. A wrong factor is off by tenths.
    for pair, parts in rows.items():
        np.testing.assert_allclose(parts, terms.pop(pair), rtol=0, atol=2e-6, err_msg=str(pair))
    assert np.abs(list(terms.values()) or [0.0]).max() == 0.0, "only sources that write nothing have no row"
    assert list(table["total"].abs()) == sorted(table["total"].abs(), reverse=True)


@every_model
def test_parts_sum_to_what_ablate_removes_from_the_score(backend, name):
    if name in zoo.READ_WRONG and backend == "bridge":
        pytest.skip("refused")
    view = attention_view(shared(backend, name))
    layer = view.n_layers - 1
    for head in (0, view.n_heads(layer) - 1):
        table = tls.qk_attribution(view.model, PROMPT, (layer, head), QUERY, KEY)
        folded, query, key, rotation = projections(view, layer, head, captured_of(view, layer))
        for part, removed in (("symmetric",) * 2, ("antisymmetric",) * 2, ("phase", "rope_phase")):
            if rotation is None and part == "phase":
                assert not table["phase"].any()
                continue
            expected = -removal(removed, query, key, rotation, folded, pairs=None, include_bias=False)
            # Measured: 1.2e-6, by the float32 rounding of queries and keys. The plain transpose, without
            # the factors of a query/key norm, is off by tenths.
            assert table[part].sum() == pytest.approx(float(expected[0, 0, QUERY, KEY]), abs=1e-5), part


@pytest.mark.parametrize("part", ["symmetric", "antisymmetric", "phase"])
def test_parts_sum_to_what_the_scores_lose_inside_ablate(part):
    model = shared("bridge", "qwen3")
    table = tls.qk_attribution(model, PROMPT, "L1H2", QUERY, KEY)
    point = attention_view(model).hook_names(1)["scores"]
    with tls.ablate(model, "L1H2", "rope_phase" if part == "phase" else part):
        ablated = captured_of(attention_view(model), 1)[point]
    lost = table.attrs["score"] - float(ablated[0, 2, QUERY, KEY])
    assert table[part].sum() == pytest.approx(lost, abs=5e-6)  # float32 scores: measured 4e-7


@every_model
def test_frequencies_sum_to_their_row(backend, name):
    model = shared(backend, name)
    view = attention_view(model)
    layer = view.n_layers - 1
    if name in zoo.READ_WRONG and backend == "bridge":
        pytest.skip("refused")
    if view.rotary(layer) is None:
        with pytest.raises(UnsupportedArchitecture, match=f"layer {layer} has no rotary positions"):
            tls.qk_attribution(model, PROMPT, (layer, 1), QUERY, KEY, by_frequency=True)
        layer -= 1
        if view.rotary(layer) is None:
            return
    for top in (None, 3):
        rows = tls.qk_attribution(model, PROMPT, (layer, 1), QUERY, KEY, top=top)
        table = tls.qk_attribution(model, PROMPT, (layer, 1), QUERY, KEY, top=top, by_frequency=True)
        summed = table.groupby(["query_source", "key_source"], sort=False)[[*PARTS, "total"]].sum()
        np.testing.assert_allclose(summed, rows[[*PARTS, "total"]], rtol=0, atol=1e-10)  # float64 rounding
        assert summed.index.tolist() == list(zip(rows["query_source"], rows["key_source"], strict=True))
        partial = view.rotary(layer).rotary_fraction < 1
        frequencies = list(range(-1 if partial else 0, view.rotary(layer).n_pairs))
        assert table["frequency"].tolist() == frequencies * len(rows)
        assert not table.loc[table["frequency"] == -1, "phase"].any()
    pair = view.rotary(layer).n_pairs - 1
    band = tls.qk_attribution(model, PROMPT, (layer, 1), QUERY, KEY, by_frequency=True)
    folded, query, key, rotation = projections(view, layer, 1, captured_of(view, layer))
    chosen = torch.arange(pair + 1) == pair
    expected = -removal("rotary_band", query, key, rotation, folded, pairs=chosen, include_bias=True)[0, 0, QUERY, KEY]
    assert band.loc[band["frequency"] == pair, "total"].sum() == pytest.approx(float(expected), abs=1e-5)  # as above


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
