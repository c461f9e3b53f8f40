"""`qk_attribution`: wrong ways are seen, wrong arguments refused, and all forms of right ones say the same."""

import dataclasses

import numpy as np
import pytest
import torch
import zoo
from attention_models import fresh
from model_state import assert_unchanged, state_of, warm
from score_terms import KEY, PROMPT, QUERY
from zoo import shared

import tlspectral as tls
from tlspectral.errors import BadHead, ScoreMismatch, UnsupportedArchitecture
from tlspectral.models.attention import Normalization
from tlspectral.wiring import attribution, score_form

# --- wrong ways are seen ---


def other_group(raw, head):
    groups = list(score_form.key_value_groups(raw))
    mine = next(place for place, (heads, _) in enumerate(groups) if head < heads.stop)
    heads, group = groups[mine]
    return dataclasses.replace(group, w_k=groups[mine - 1][1].w_k), heads.start


def test_another_key_value_head_is_a_mismatch(monkeypatch):
    monkeypatch.setattr(score_form, "_readable_group", other_group)
    with pytest.raises(ScoreMismatch, match="layer 1: the terms sum to"):
        tls.qk_attribution(shared("bridge", "llama"), PROMPT, "L1H1", QUERY, KEY)


def test_a_norm_that_is_left_out_is_a_mismatch(monkeypatch):
    monkeypatch.setattr(Normalization, "token_scale", lambda norm, x: x.new_ones(x.shape[:-1]))
    with pytest.raises(ScoreMismatch, match="layer 1: the terms sum to"):
        tls.qk_attribution(shared("bridge", "llama"), PROMPT, "L1H1", QUERY, KEY)


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_an_edited_stream_is_no_sum_of_writes(name):
    model = shared("bridge", name)
    edited = {1: "layer 1: what enters it is not the sum of what earlier layers wrote"}
    if name == "gpt2":
        edited[0] = "layer 0: what enters it is not the sum of the embedding and the learned positions"
    for layer, said in edited.items():
        hook = (f"blocks.{layer}.hook_resid_pre", lambda value, hook: value * 1.01)
        with model.hooks(fwd_hooks=[hook]), pytest.raises(UnsupportedArchitecture, match=said):
            tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY)


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
    ("options", "said"),
    [
        ({"query": 5, "key": 9}, "key 9 is behind query 5"),
        ({"query": 24}, "query 24 is not in the prompt, which has tokens 0 to 23"),
        ({"key": -25}, "key -25 is not in the prompt"),
        ({"prompt": zoo.prompt(2)}, "one score is of one prompt; found 2 prompts"),
        ({"top": 0}, "top is a number of pairs of sources, 1 or more; found 0"),
        ({"remove": -1}, "remove is a number of pairs"),
        ({"remove": 4, "top": 3}, "give remove at most top"),
        ({"remove": 4, "by_frequency": True}, "leave out by_frequency"),
    ],
)
def test_what_makes_no_sense_is_refused(options, said):
    arguments = {"prompt": PROMPT, "head": "L1H1", "query": QUERY, "key": KEY, **options}
    with pytest.raises(ValueError, match=said):
        tls.qk_attribution(shared("bridge", "llama"), **arguments)


def test_a_position_is_a_whole_number():
    with pytest.raises(TypeError, match="query is the position of a token, a whole number; found True"):
        tls.qk_attribution(shared("bridge", "llama"), PROMPT, "L1H1", True, 0)


@pytest.mark.parametrize("head", ["L9H0", (0, 9)])
def test_a_head_that_does_not_exist_is_refused(head):
    with pytest.raises(BadHead, match="does not exist"):
        tls.qk_attribution(shared("bridge", "llama"), PROMPT, head, QUERY, KEY)


@pytest.mark.parametrize(("name", "layer"), [("mistral", 1), ("gptneo", 1), ("gemma2", 0)])
def test_a_key_outside_the_window_is_refused(name, layer):
    with pytest.raises(ValueError, match=f"layer {layer} masks key 3 for query 21: the query sees keys 14 to 21"):
        tls.qk_attribution(shared("bridge", name), PROMPT, (layer, 1), QUERY, 3)


def test_a_table_that_would_be_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(attribution, "MOST_ROWS", 100)
    with pytest.raises(ValueError, match="rows: give top="):
        tls.qk_attribution(shared("bridge", "llama"), PROMPT, "L1H1", QUERY, KEY, by_frequency=True)
    tls.qk_attribution(shared("bridge", "llama"), PROMPT, "L1H1", QUERY, KEY, by_frequency=True, top=2)


def test_forms_of_head_prompt_and_position_say_the_same():
    model = shared("bridge", "qwen2")
    table = tls.qk_attribution(model, PROMPT, (1, 2), QUERY, KEY, top=4)
    assert table.attrs["head"] == "L1H2"
    assert (table.attrs["query_token"], table.attrs["key_token"]) == (int(PROMPT[0, QUERY]), int(PROMPT[0, KEY]))
    batch = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    for prompt, head in ((PROMPT[0], "L1H2"), ([PROMPT[0].tolist()], "-1.2"), (batch, np.array([1, 2]))):
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


def test_sixteen_bits_have_a_tolerance_of_their_own():
    for dtype, name in ((torch.bfloat16, "gemma2"), (torch.float16, "qwen3"), (torch.bfloat16, "opt")):
        table = tls.qk_attribution(fresh("bridge", name).to(dtype), PROMPT, "L1H2", QUERY, KEY)
        attrs = table.attrs
        # Measured: at most 0.4 of it over six architectures. In float32's, 16-bit scores would not fit.
        assert 1e-4 + 1e-5 * abs(attrs["score"]) < attrs["tolerance"]
        assert abs(attrs["remainder"]) <= attrs["tolerance"] <= 4 * torch.finfo(dtype).eps * 40


def test_the_model_is_as_before():
    model = fresh("bridge", "qwen2")
    before = state_of(warm(model))
    tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, remove=2)
    assert_unchanged(model, before)
