"""Detector scores: the sequences as specified, the scores against kept patterns, and nothing left behind."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
import zoo
from conformance.scoring import SCORES, SMALL, pattern_name
from stand_in_device import OF_GAINS, Float64Numbers
from zoo import shared

import tlspectral as tls
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.heads import detectors
from tlspectral.models.reading import attention_view
from tlspectral.tasks.repeated import repeated_sequences

# --- the sequences ---


def view_of(**changes):
    """That of a small Llama, of which some facts are others."""
    return replace(attention_view(shared("bridge", "llama")), **changes)


def drawn(view=None, **arguments):
    return repeated_sequences(view or view_of(), **{**SMALL, **arguments})


def with_tokenizer(**ids):
    """A model that has a tokenizer of these ids and nothing else."""
    return SimpleNamespace(tokenizer=SimpleNamespace(**ids), blocks=shared("bridge", "llama").blocks)


@pytest.mark.parametrize(("seed", "vocabulary"), [(0, zoo.VOCABULARY), (5, zoo.VOCABULARY), (0, 64)])
def test_a_sequence_is_an_opening_token_a_segment_and_its_copy(seed, vocabulary):
    """From 64 tokens on a segment may repeat a token."""
    before = torch.random.get_rng_state()
    tokens = drawn(view_of(d_vocab=vocabulary), seed=seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert tokens.dtype == torch.int64
    assert (tokens[:, 0] == 0).all()
    expected = torch.randint(0, vocabulary, (7, 10), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(tokens[:, 1:], expected.repeat(1, 2))


@pytest.mark.parametrize(
    ("asked", "context", "expected"), [(64, 128, 63), (64, 129, 64), (64, 500, 64), (64, 10, 4), (2, 128, 2)]
)
def test_a_segment_is_as_long_as_asked_or_as_fits(asked, context, expected):
    assert drawn(view_of(n_ctx=context), segment_length=asked).shape[1] == 1 + 2 * expected <= context


def test_the_whole_vocabulary_is_drawn():
    view = view_of(model=with_tokenizer(bos_token_id=1, all_special_ids=[0, 1, 2, 50, 500]))
    everything = drawn(view, n_sequences=400)[:, 1:]
    assert set(everything.flatten().tolist()) == set(range(zoo.VOCABULARY))


@pytest.mark.parametrize("vocabulary", [10, 63])
def test_a_small_vocabulary_is_permuted(vocabulary):
    view = view_of(model=with_tokenizer(bos_token_id=3), d_vocab=vocabulary)
    tokens = drawn(view, n_sequences=200, segment_length=63)
    length = min(63, vocabulary - 1)
    assert tokens.shape == (200, 1 + 2 * length)
    segments = tokens[:, 1 : 1 + length]
    assert torch.equal(segments, tokens[:, 1 + length :])
    for segment in segments.tolist():
        assert len(set(segment)) == length  # no token twice
        assert set(segment) <= set(range(vocabulary)) - {3}
    assert len({tuple(segment) for segment in segments.tolist()}) == 200
    assert torch.equal(tokens, drawn(view, n_sequences=200, segment_length=63))
    assert not torch.equal(tokens, drawn(view, n_sequences=200, segment_length=63, seed=1))


def test_detect_heads_runs_on_these_sequences_and_says_so():
    model, tokens = shared("bridge", "llama"), drawn(seed=3)
    found, given = tls.detect_heads(model, **SMALL, seed=3), tls.detect_heads(model, prompts=tokens)
    pd.testing.assert_frame_equal(found, given, check_exact=True)
    assert tls.detect_heads(model, prompts=tokens.tolist()).equals(given)
    assert (found[SCORES] != tls.detect_heads(model, **SMALL, seed=4)[SCORES]).all(axis=None)
    assert list(zip(found["layer"], found["head"], strict=True)) == [(i, j) for i in range(2) for j in range(4)]
    chance = np.mean([1 / (p + 1) for p in range(11, 21)])
    said = {"n_sequences": 7, "segment_length": 10, "bos": 0, "seed": 3, "chance": chance, "table": "detect_heads"}
    said |= {"max_se": 0.02, "batch": 25}
    assert found.attrs == {**view_of().origin(), **said, "reliability": found.attrs["reliability"]}
    assert given.attrs["max_se"] is None  # all of the caller's prompts are run
    alone = tls.detect_heads(model, prompts=tokens[:1])
    assert (list(alone), alone[["prev_se", "ind_se"]].isna().all(axis=None)) == (list(found), True)
    assert alone["prev"].notna().all()
    assert alone.attrs["reliability"]["prev"] is None


# --- where the draws end ---

LARGEST = ["prev_se", "dup_se", "ind_se"]


def detected(model=None, **arguments):
    """Scores of a small Llama on sequences of 21 tokens."""
    return tls.detect_heads(model or shared("bridge", "llama"), segment_length=10, **arguments)


@pytest.mark.fast(1)
@pytest.mark.parametrize("batch", [25, 7])
@pytest.mark.parametrize("stop", [25, 50, 100, 130])
def test_detectors_stop_at_the_first_look_at_which_every_head_is_known(monkeypatch, stop, batch):
    """The table is then that of so many sequences, to the bit, whatever the batch."""
    tables = {n: detected(n_sequences=n, max_se=None) for n in (25, 50, 100, 130)}
    worst = {n: float(table[LARGEST].to_numpy().max()) for n, table in tables.items()}
    monkeypatch.setattr(detectors.heads, "BATCH", batch)
    assert list(worst.values()) == sorted(worst.values(), reverse=True)
    found = detected(n_sequences=130, max_se=worst[stop] * (1 + 1e-6))
    assert found.attrs["n_sequences"] == stop
    assert detected(n_sequences=130, max_se=worst[stop] * (1 - 1e-6)).attrs["n_sequences"] == min(2 * stop, 130)
    if batch == 25:
        pd.testing.assert_frame_equal(found, tables[stop], check_exact=True)
    # Measured: 1e-8, the float32 sums of other batches; a sequence more moves a score by 1e-4.
    pd.testing.assert_frame_equal(found, tables[stop], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_head_that_is_not_chosen_and_a_pattern_keep_detectors_running():
    model = shared("bridge", "llama")
    known = tls.detect_heads(model, n_sequences=25, max_se=None)
    errors = known[LARGEST].max(axis=1)
    limit = float(np.sort(errors)[-2:].mean())  # one head alone is above it
    quiet = known.loc[errors.idxmin(), "name"]
    assert tls.detect_heads(model, n_sequences=60, max_se=limit).attrs["n_sequences"] > 25
    table = tls.analyze_heads(model, heads=quiet, null_draws=2, n_sequences=60, max_se=limit)
    assert table.attrs["detectors"]["n_sequences"] > 25
    late = torch.zeros(60, 21, 21)
    late[40:, 20, 3] = 1.0  # no sequence of the first look has a query of it
    above = 2 * float(detected(n_sequences=25, max_se=None)[LARGEST].max(axis=None))
    found = detected(n_sequences=60, max_se=above, pattern=late)
    assert (found.attrs["n_sequences"], found.attrs["n_counted"]["pattern"]) == (60, 20)
    assert detected(n_sequences=60, max_se=above).attrs["n_sequences"] == 25


def test_detectors_of_an_encoder_stop_though_it_has_no_induction():
    found = detected(shared("bridge", "bert"), max_se=1.0)
    assert found["ind"].isna().all()
    assert found.attrs["n_sequences"] == 25


@pytest.mark.parametrize("call", ["detect_heads", "analyze_heads"])
@pytest.mark.parametrize("max_se", [0.0, -0.1, np.nan])
def test_a_standard_error_that_no_draw_reaches_is_refused(call, max_se):
    with pytest.raises(ValueError, match=r"give a standard error above 0, .*or None"):
        getattr(tls, call)(shared("bridge", "llama"), max_se=max_se)


def test_too_few_sequences_are_refused_before_anything_is_measured(monkeypatch):
    def measured(*given, **named):
        raise AssertionError("the heads were measured first")

    monkeypatch.setattr("tlspectral.heads.analysis.LoadedLayers", measured)
    with pytest.raises(ValueError, match=r"n_sequences is .*; found 1"):
        tls.analyze_heads(shared("bridge", "llama"), n_sequences=1)


# --- the scores ---


@pytest.mark.slow
@pytest.mark.parametrize("batch", [3, 4])
def test_neither_scores_nor_reliability_hang_on_the_size_of_batches(monkeypatch, batch):
    """Reliability is the correlation of two halves, by the parity of sequences across batches."""
    model, tokens = shared("bridge", "llama"), drawn()
    whole = tls.detect_heads(model, prompts=tokens)
    monkeypatch.setattr(detectors.heads, "BATCH", batch)
    table = tls.detect_heads(model, prompts=tokens)
    # Measured: 3e-17, the order of a sum of 7; a lost or doubled last batch moves scores by 1e-3.
    pd.testing.assert_frame_equal(table, whole, rtol=0, atol=1e-12)
    for name in SCORES:
        halves = [tls.detect_heads(model, prompts=tokens[start::2])[name] for start in (0, 1)]
        known = scipy.stats.spearmanr(*halves).statistic
        assert table.attrs["reliability"][name] == pytest.approx(known, abs=1e-12)


@pytest.mark.parametrize("length", [2, 10, 63])
def test_chance_is_what_uniform_attention_scores(length):
    def uniform(pattern, hook):
        made = torch.ones_like(pattern).tril()
        return made / made.sum(-1, keepdim=True)

    model = shared("bridge", "llama")
    with model.hooks(fwd_hooks=[(pattern_name(0), uniform)]):
        table = tls.detect_heads(model, n_sequences=2, segment_length=length)
    # Measured: 1e-9, 1/p in float32; a query more or less moves the mean by 1 % of it.
    np.testing.assert_allclose(table.loc[table["layer"] == 0, SCORES], table.attrs["chance"], rtol=1e-6)


# --- what a run costs ---


def test_patterns_are_let_go_as_they_pass(monkeypatch):
    """At any pattern, no pattern of another layer or batch is alive, whatever the number of sequences."""
    monkeypatch.setattr(detectors.heads, "BATCH", 3)
    model, held = shared("bridge", "gpt2"), []

    def count(pattern, hook):
        size = pattern.untyped_storage().nbytes()
        # type() and not isinstance(), which would wake the lazy objects of other packages.
        alive = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        storages = {one.untyped_storage().data_ptr() for one in alive if one.untyped_storage().nbytes() == size}
        held.append(len(storages))

    hooks = [(pattern_name(layer), count) for layer in range(model.cfg.n_layers)]

    def most_alive(n_sequences):
        held.clear()
        with model.hooks(fwd_hooks=hooks):
            tls.detect_heads(model, n_sequences=n_sequences, segment_length=21)
        return max(held)

    few = most_alive(3)
    # Inside one layer the scores, the mask and the pattern have one size; a kept pattern adds one per layer and batch.
    assert few <= 5
    assert most_alive(15) == few


# --- refusals ---


def one_segment(*segment):
    other = [token + 9 for token in segment]
    return torch.tensor([[0, *segment, *segment], [0, *other, *other]])


@pytest.mark.parametrize(
    "tokens",
    [
        one_segment(5),
        one_segment(5, 6, 7)[:, 1:],
        one_segment(5, 6, 7)[:, :-1],
        torch.tensor([[0, 5, 6, 7, 5, 6, 8], [0, 5, 6, 7, 5, 6, 9]]),
    ],
    ids=["one token", "no opening token", "cut copy", "other copy"],
)
def test_ids_that_do_not_repeat_are_prompts(tokens):
    assert "self" in tls.detect_heads(shared("bridge", "llama"), prompts=tokens)


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        (
            {},
            {"n_sequences": 1},
            "n_sequences is the number of repeated sequences, .* from 2 up; found 1",
        ),
        ({}, {"segment_length": 1}, "segment_length is the number of tokens that are repeated, .* from 2 up; found 1"),
        ({"n_ctx": 4}, {}, r"segments of two tokens or more, and this model has room for 1 \(context 4"),
        ({"d_vocab": 2}, {}, r"has room for 1 \(context 128, 1 usable ids\)"),
    ],
)
def test_draws_without_room_are_refused(changes, arguments, said):
    with pytest.raises(ValueError, match=said):
        drawn(view_of(**changes), **arguments)


def test_a_model_that_returns_no_pattern_is_refused():
    model = zoo.hf_model("opt")
    model.config._attn_implementation = "sdpa"  # transformers computes no pattern then
    bridge = zoo.wrapped(model)
    bridge.original_model.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedArchitecture, match=r'never fired.*attn_implementation="eager"'):
        tls.detect_heads(bridge, **SMALL)


@pytest.mark.slow
def test_on_a_device_scores_are_those_of_the_cpu_and_none_is_computed_in_float64(device):
    on_cpu, placed = shared("bridge", "llama"), zoo.bridge("llama").to(device)
    marks = torch.eye(17).roll(2, 0).tril() / 3
    for options in ({"pattern": marks}, {"prompts": zoo.prompt(3), "pattern": "local"}):
        options |= {} if "prompts" in options else {"n_sequences": 3, "segment_length": 8}
        with Float64Numbers() as computed:
            found = tls.detect_heads(placed, **options)
        # Attention of the stand-in is that of the CPU to the bit, and so are sums of it.
        pd.testing.assert_frame_equal(found, tls.detect_heads(on_cpu, **options), check_exact=True)
        assert set(computed.of) <= OF_GAINS
