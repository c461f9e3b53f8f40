"""`qk_attribution`: one score as a sum over pairs of sources, known answers, removal, forms and refusals.

`conformance` compares every term, part and removed pair with plain recomputations, in every architecture.
"""

import numpy as np
import pytest
import spectral_zoo
import torch
import zoo
from attention_models import fresh
from score_terms import KEY, PARTS, PROMPT, QUERY, captured_of, plain_terms
from zoo import shared

import tlspectral as tls
from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import BadHead, ScoreMismatch, UnsupportedArchitecture
from tlspectral.models.reading import attention_view


@pytest.mark.slow
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


def test_the_table_is_kept_in_a_file(tmp_path):
    table = tls.qk_attribution(shared("bridge", "bloom"), PROMPT, "L1H1", QUERY, KEY, remove=2, top=5)
    tls.write_table(table, tmp_path / "score.parquet")
    read = tls.read_table(tmp_path / "score.parquet")
    assert read.equals(table)
    assert read.attrs == table.attrs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "bloom"])
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


def test_forms_of_head_prompt_and_position_say_the_same():
    model = shared("bridge", "qwen2")
    table = tls.qk_attribution(model, PROMPT, (1, 2), QUERY, KEY, top=4)
    assert table.attrs["head"] == "L1H2"
    assert (table.attrs["query_token"], table.attrs["key_token"]) == (int(PROMPT[0, QUERY]), int(PROMPT[0, KEY]))
    batch = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    for prompt, head in ((PROMPT[0], "L1H2"), ([PROMPT[0].tolist()], "-1.2"), (batch, (-1, np.int64(-2)))):
        same = tls.qk_attribution(model, prompt, head, QUERY - 24, KEY - 24, top=4)
        assert same.equals(table)
        assert same.attrs == table.attrs


def test_tokens_are_named_by_the_tokenizer(tmp_path):
    model = tls.load_model(zoo.save_folder("llama", tmp_path / "model", tokenizer=True))
    table = tls.qk_attribution(model, "w5 w6 w7 w8", "L1H0", query=-1, key=-3)
    assert (table.attrs["query_token"], table.attrs["key_token"]) == ("w8", "w6")


def test_the_first_layer_reads_the_embedding_alone():
    table = tls.qk_attribution(shared("bridge", "llama"), PROMPT, "L0H1", QUERY, QUERY)
    assert table[["query_source", "key_source"]].to_numpy().tolist() == [["embedding", "embedding"]]
    assert table.loc[0, "phase"] == pytest.approx(0, abs=1e-6)  # a token with itself: float32 tables
    assert tls.qk_attribution(shared("bridge", "llama"), PROMPT[:, :1], "L0H1", 0, 0, remove=1).loc[
        0, "attention_measured"
    ] == pytest.approx(1.0)


@pytest.mark.slow
def test_sixteen_bits_have_a_tolerance_of_their_own():
    for dtype, name in ((torch.bfloat16, "gemma2"), (torch.float16, "qwen3"), (torch.bfloat16, "opt")):
        table = tls.qk_attribution(fresh("bridge", name).to(dtype), PROMPT, "L1H2", QUERY, KEY)
        attrs = table.attrs
        # Measured: at most 0.4 of it over six architectures. In float32's, 16-bit scores would not fit.
        assert 1e-4 + 1e-5 * abs(attrs["score"]) < attrs["tolerance"]
        assert abs(attrs["remainder"]) <= attrs["tolerance"] <= 4 * torch.finfo(dtype).eps * 40


# --- what a score loses ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "bloom", "gptneo"])
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
    whole = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, remove=len(rows))
    table = whole.set_index(["query_source", "key_source"])
    # No norm stands between a bias and the score, so nothing but the pair of biases changes.
    for pair in (("bias", "bias"), ("alibi", "alibi")):
        assert table.loc[pair, "measured"] == pytest.approx(table.loc[pair, "total"], abs=1e-10)
    assert abs(table.loc[("bias", "embedding"), "measured"] - table.loc[("bias", "embedding"), "total"]) > 1e-3
    # All of the key is gone: what is left of the score is nothing.
    for kind in ("measured", "predicted"):
        assert whole.attrs[f"joint_score_{kind}"] == pytest.approx(whole.attrs["score"], abs=1e-4)


# --- wrong ways are seen ---


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_an_edited_stream_is_no_sum_of_writes(name):
    model = shared("bridge", name)
    edited = {1: "layer 1: its input is not the sum of the writes of earlier layers"}
    if name == "gpt2":
        edited[0] = "layer 0: its input is not the sum of the embedding and the learned positions"
    for layer, said in edited.items():
        hook = (f"blocks.{layer}.hook_resid_pre", lambda value, hook: value * 1.01)
        with model.hooks(fwd_hooks=[hook]), pytest.raises(UnsupportedArchitecture, match=said):
            tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_edited_scores_are_a_mismatch(name):
    model = shared("bridge", name)
    point = "blocks.1.attn.hook_q"
    with model.hooks(fwd_hooks=[(point, lambda value, hook: value * 1.01)]), pytest.raises(ScoreMismatch):
        tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY)
    if name == "llama":
        with tls.ablate(model, "L1H1", "rope_phase"), pytest.raises(ScoreMismatch, match="the terms sum to"):
            tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY)
        tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY)


# --- arguments ---


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [
        ("llama", {"query": 5, "key": 9}, ValueError, "key 9 is behind query 5"),
        ("llama", {"query": 24}, ValueError, "query 24 is not in the prompt, which has tokens 0 to 23"),
        ("llama", {"key": -25}, ValueError, "key -25 is not in the prompt"),
        ("llama", {"query": True}, TypeError, "query= must be the position of a token, a whole number; found True"),
        ("llama", {"prompt": zoo.prompt(2), "key": 22}, ValueError, "key 22 is behind query 21 in prompt 0"),
        ("llama", {"query": None}, TypeError, "only one of query= and key= is given"),
        ("llama", {"key": None}, TypeError, "One score has one key; tls.scores"),
        ("llama", {"query": "w5"}, ValueError, "query='w5': this model has no tokenizer: give the position"),
        ("llama", {"top": 0}, ValueError, "top= must be a number of pairs of terms, 1 or more; found 0"),
        ("llama", {"remove": -1}, ValueError, "remove= must be a number of pairs"),
        ("llama", {"remove": 4, "top": 3}, ValueError, "give remove= at most top="),
        ("llama", {"head": "L9H0"}, BadHead, "does not exist"),
        # A key outside the window.
        ("mistral", {"key": 3}, ValueError, "layer 1 masks key 3 for query 21: the query sees keys 14 to 21"),
        ("gptneo", {"key": 3}, ValueError, "layer 1 masks key 3 for query 21: the query sees keys 14 to 21"),
        ("gemma2", {"key": 3, "head": "L0H1"}, ValueError, "layer 0 masks key 3 for query 21"),
    ],
)
def test_what_makes_no_sense_is_refused(name, options, error, said):
    arguments = {"prompt": PROMPT, "head": "L1H1", "query": QUERY, "key": KEY, **options}
    with pytest.raises(error, match=said):
        tls.qk_attribution(shared("bridge", name), **arguments)
