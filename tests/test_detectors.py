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
from described import assert_described
from model_state import assert_unchanged, state_of, warm
from zoo import shared

import tlspectral as tls
from tlspectral import detectors
from tlspectral.detectors import repeated_sequences
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.attention import attention_view

BACKENDS = ("bridge", "hooked") if zoo.HAS_HOOKED else ("bridge",)
# GPT-2: learned positions; qwen3: grouped keys, query/key norm; mistral: a window; opt: attention left to transformers.
MODELS = [("bridge", name) for name in ("gpt2", "qwen3", "mistral", "opt")]
MODELS += [("hooked", "gpt2"), ("hooked", "llama")] if zoo.HAS_HOOKED else []
SMALL = {"n_sequences": 7, "segment_length": 10}
SCORES = ["prev", "dup", "ind"]
ERRORS = ["prev_se", "dup_se", "ind_se"]


def pattern_name(layer):
    return f"blocks.{layer}.attn.hook_pattern"


def kept_patterns(model, tokens):
    """Patterns of all layers, [sequence, head, query, key], from one run that keeps everything."""
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    return [cache[pattern_name(layer)].double().numpy() for layer in range(model.cfg.n_layers)]


def plain_scores(patterns, length):
    """The scores, one loop per sequence, head and query, as the specification reads."""
    rows = []
    copy, segment = range(length + 1, 2 * length + 1), range(2, length + 1)
    wanted = {"prev": (copy, 1), "dup": (copy, length), "ind": (copy, length - 1), "prev_first": (segment, 1)}
    for layer, pattern in enumerate(patterns):
        for head in range(pattern.shape[1]):
            row = {"layer": layer, "head": head}
            for name, (queries, back) in wanted.items():
                per_sequence = np.array([np.mean([one[head, p, p - back] for p in queries]) for one in pattern])
                row[name] = per_sequence.mean()
                row[f"{name}_se"] = per_sequence.std(ddof=1) / np.sqrt(len(per_sequence))
            rows.append(row)
    return pd.DataFrame(rows)


# --- the sequences ---


def drawn(view=None, **arguments):
    view = view or attention_view(shared("bridge", "llama"))
    return repeated_sequences(view, **{**SMALL, **arguments})


def with_tokenizer(view, **ids):
    """The view of a model that has a tokenizer of these ids and nothing else."""
    return replace(view, model=SimpleNamespace(tokenizer=SimpleNamespace(**ids)))


def test_a_sequence_is_an_opening_token_a_segment_and_its_copy():
    tokens = drawn()
    assert tokens.shape == (7, 21)
    assert tokens.dtype == torch.int64
    assert (tokens[:, 0] == 0).all()
    assert torch.equal(tokens[:, 1:11], tokens[:, 11:])


@pytest.mark.parametrize("seed", [0, 5])
def test_the_draw_is_the_documented_one(seed):
    expected = torch.randint(0, zoo.VOCABULARY, (7, 10), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(drawn(seed=seed)[:, 1:11], expected)


def test_the_draw_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    drawn()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("asked", "context", "expected"), [(64, 128, 63), (64, 129, 64), (64, 500, 64), (64, 10, 4), (2, 128, 2)]
)
def test_a_segment_is_as_long_as_asked_or_as_fits(asked, context, expected):
    view = replace(attention_view(shared("bridge", "llama")), n_ctx=context)
    tokens = drawn(view, segment_length=asked)
    assert tokens.shape[1] == 1 + 2 * expected <= context


@pytest.mark.parametrize(
    ("ids", "opening"),
    [
        ({"bos_token_id": 5, "eos_token_id": 6}, 5),
        ({"bos_token_id": 0, "eos_token_id": 6}, 0),
        ({"bos_token_id": None, "eos_token_id": 6}, 6),
        ({"bos_token_id": None, "eos_token_id": None}, 0),
        ({}, 0),
    ],
)
def test_the_opening_token_is_bos_else_eos_else_0(ids, opening):
    tokens = drawn(with_tokenizer(attention_view(shared("bridge", "llama")), **ids))
    assert (tokens[:, 0] == opening).all()


def test_the_whole_vocabulary_is_drawn_unless_special_ids_are_left_out():
    view = with_tokenizer(attention_view(shared("bridge", "llama")), bos_token_id=1, all_special_ids=[0, 1, 2, 50, 500])
    everything = drawn(view, n_sequences=400)[:, 1:]
    assert set(everything.flatten().tolist()) == set(range(zoo.VOCABULARY))
    kept = drawn(view, n_sequences=400, exclude_special=True)
    assert set(kept[:, 1:].flatten().tolist()) == set(range(zoo.VOCABULARY)) - {0, 1, 2, 50}
    assert (kept[:, 0] == 1).all()


@pytest.mark.parametrize("vocabulary", [10, 63])
def test_a_small_vocabulary_is_permuted(vocabulary):
    view = replace(with_tokenizer(attention_view(shared("bridge", "llama")), bos_token_id=3), d_vocab=vocabulary)
    tokens = drawn(view, n_sequences=200, segment_length=63)
    length = min(63, vocabulary - 1)
    assert tokens.shape == (200, 1 + 2 * length)
    assert torch.equal(tokens[:, 1 : 1 + length], tokens[:, 1 + length :])
    for segment in tokens[:, 1 : 1 + length].tolist():
        assert len(set(segment)) == length  # no token twice
        assert set(segment) <= set(range(vocabulary)) - {3}
    assert len({tuple(segment) for segment in tokens[:, 1 : 1 + length].tolist()}) == 200
    assert torch.equal(tokens, drawn(view, n_sequences=200, segment_length=63))
    assert not torch.equal(tokens, drawn(view, n_sequences=200, segment_length=63, seed=1))


def test_from_64_tokens_on_a_segment_may_repeat_a_token():
    view = replace(attention_view(shared("bridge", "llama")), d_vocab=64)
    expected = torch.randint(0, 64, (50, 10), generator=torch.Generator().manual_seed(0))
    tokens = drawn(view, n_sequences=50)
    assert torch.equal(tokens[:, 1:11], expected)
    assert any(len(set(segment)) < 10 for segment in expected.tolist())


def test_detect_heads_runs_on_these_sequences():
    model = shared("bridge", "llama")
    found = tls.detect_heads(model, **SMALL, seed=3)
    given = tls.detect_heads(model, tokens=drawn(seed=3))
    pd.testing.assert_frame_equal(found, given, check_exact=True)
    other = tls.detect_heads(model, **SMALL, seed=4)
    assert (found[SCORES] != other[SCORES]).all(axis=None)


def test_the_table_says_how_it_was_made():
    table = tls.detect_heads(shared("bridge", "llama"), **SMALL, seed=3)
    assert_described(table, tls.detect_heads(shared("bridge", "llama"), **SMALL, pattern=torch.eye(21), null_draws=1))
    assert table["layer"].tolist() == [0] * 4 + [1] * 4
    assert table["head"].tolist() == [0, 1, 2, 3] * 2
    assert table.attrs == {
        **attention_view(shared("bridge", "llama")).origin(),
        "n_sequences": 7,
        "segment_length": 10,
        "bos": 0,
        "seed": 3,
        "chance": np.mean([1 / (p + 1) for p in range(11, 21)]),
        "reliability": table.attrs["reliability"],
        "table": "detect_heads",
    }


# --- the scores ---


@pytest.mark.parametrize(("backend", "name"), MODELS)
def test_scores_and_errors_are_those_of_the_kept_patterns(backend, name):
    model, tokens = shared(backend, name), drawn()
    found = tls.detect_heads(model, tokens=tokens)
    expected = plain_scores(kept_patterns(model, tokens), 10)
    # Measured: 4e-17 on scores of 0.05 (the patterns are the same bits); one query more or less moves them by 1e-3.
    scores, errors = [*SCORES, "prev_first"], [*ERRORS, "prev_first_se"]
    np.testing.assert_allclose(found[scores], expected[scores], rtol=0, atol=1e-14)
    # Measured: 3e-17 on errors of 0.005, from the difference of squares; ddof 0 would move them by 7 %.
    np.testing.assert_allclose(found[errors], expected[errors], rtol=0, atol=1e-10)
    assert (found["prev_se"] > 0).all()
    if name == "mistral":  # a window of 8 reaches neither the token 10 nor the one 9 before
        assert (found[["dup", "ind"]] == 0).all(axis=None)


def test_first_copy_and_halves_are_those_of_the_kept_patterns(monkeypatch):
    monkeypatch.setattr(detectors.heads, "BATCH", 3)  # so that parity has to be counted across batches
    model, tokens = shared("bridge", "llama"), drawn()
    table = tls.detect_heads(model, tokens=tokens)
    patterns = kept_patterns(model, tokens)
    first = np.stack([p[:, :, np.arange(2, 11), np.arange(1, 10)].mean(-1) for p in patterns])
    expected = first.mean(1).reshape(-1)
    # Measured: 1e-9, the sums of float32 patterns in another order; one query more moves it by 1e-3.
    np.testing.assert_allclose(table["prev_first"], expected, rtol=0, atol=1e-7)
    for name in ("prev", "dup", "ind"):
        halves = [tls.detect_heads(model, tokens=tokens[start::2])[name] for start in (0, 1)]
        known = scipy.stats.spearmanr(*halves).statistic
        assert table.attrs["reliability"][name] == pytest.approx(known, abs=1e-12)


def test_equal_scores_have_no_reliability():
    flat = np.zeros((2, 4, 5))
    assert detectors.split_half_reliability(flat) == {"prev": None, "dup": None, "ind": None}


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_the_size_of_batches_does_not_matter(monkeypatch, batch):
    model = shared("bridge", "gpt2")
    monkeypatch.setattr(detectors.heads, "BATCH", 4)
    expected = tls.detect_heads(model, **SMALL)
    monkeypatch.setattr(detectors.heads, "BATCH", batch)
    # Measured: 3e-17, the order of a sum of 7; a lost or doubled last batch moves scores by 1e-3.
    pd.testing.assert_frame_equal(tls.detect_heads(model, **SMALL), expected, rtol=0, atol=1e-12)


@pytest.mark.skipif(not zoo.HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize("name", zoo.HOOKED_ARCHITECTURES)
def test_both_backends_agree(name):
    bridge, hooked = (tls.detect_heads(shared(backend, name), **SMALL) for backend in BACKENDS)
    # Measured: at most 3e-8 (mistral), float32 forwards of differently processed weights; a neighbouring key's mass
    # differs by 1e-3 and more.
    pd.testing.assert_frame_equal(bridge, hooked, rtol=0, atol=1e-6)


def attends_to(back):
    """A hook that replaces a pattern: each query attends to the key `back` before it, early ones to key 0."""

    def patch(pattern, hook):
        positions = torch.arange(pattern.shape[-1])
        made = torch.zeros_like(pattern)
        made[..., positions, (positions - back).clamp_min(0)] = 1.0
        return made

    return patch


@pytest.mark.parametrize(("score", "back"), [("prev", 1), ("dup", 10), ("ind", 9), (None, 2)])
@pytest.mark.parametrize(("backend", "name"), MODELS)
def test_a_head_made_by_a_users_hook_has_its_known_scores(backend, name, score, back):
    model = shared(backend, name)
    with model.hooks(fwd_hooks=[(pattern_name(1), attends_to(back))]):
        table = tls.detect_heads(model, **SMALL)
    made = table[table["layer"] == 1]
    for column in SCORES:
        assert (made[column] == float(column == score)).all()
    assert (made[ERRORS] == 0).all(axis=None)
    plain = tls.detect_heads(model, **SMALL)
    pd.testing.assert_frame_equal(table[table["layer"] == 0], plain[plain["layer"] == 0], check_exact=True)
    assert (plain.loc[plain["layer"] == 1, SCORES] < 0.9).all(axis=None)


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


# --- what a run costs and leaves ---


@pytest.mark.parametrize(("backend", "name"), MODELS)
def test_a_run_stops_before_the_last_mlp_and_the_unembedding(backend, name):
    model = getattr(zoo, backend)(name)
    # A bridge's MLP is called whole or, in OPT, by its parts.
    first, last = (getattr(block.mlp, "out", block.mlp) for block in (model.blocks[0], model.blocks[-1]))
    calls = []
    for module, label in [(first, "first mlp"), (last, "last mlp"), (model.unembed, "unembed")]:
        module.register_forward_pre_hook(lambda *_, label=label: calls.append(label))
    tls.detect_heads(model, **SMALL)
    assert calls == ["first mlp"]
    with torch.no_grad():
        model(drawn())
    assert sorted(calls[1:]) == ["first mlp", "last mlp", "unembed"]  # the probe sees a whole run


@pytest.mark.parametrize(("backend", "name"), [model for model in MODELS if model[1] in ("gpt2", "opt")])
def test_patterns_are_let_go_as_they_pass(monkeypatch, backend, name):
    """At any pattern, no pattern of another layer or batch is alive, whatever the number of sequences."""
    monkeypatch.setattr(detectors.heads, "BATCH", 3)
    model = shared(backend, name)
    held = []

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


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_model_is_left_as_it_was(backend, training):
    model = getattr(zoo, backend)("gpt2")
    model.train(training)
    warm(model)
    seen = []
    model.add_hook(pattern_name(0), lambda pattern, hook: seen.append(pattern.shape[0]), is_permanent=True)
    before = state_of(model)
    tls.detect_heads(model, **SMALL)
    assert_unchanged(model, before)
    assert sum(seen) == 7  # the user's own hook stayed in force


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_off(backend):
    """A model in training mode scores as in evaluation mode."""
    model = getattr(zoo, backend)("gpt2")
    expected = tls.detect_heads(model, **SMALL)
    model.train()
    pd.testing.assert_frame_equal(tls.detect_heads(model, **SMALL), expected, check_exact=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_leaves_no_hooks(backend):
    model = getattr(zoo, backend)("llama")
    warm(model)
    before = state_of(model)

    def interrupt(pattern, hook):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), model.hooks(fwd_hooks=[(pattern_name(1), interrupt)]):
        tls.detect_heads(model, **SMALL)
    assert_unchanged(model, before)
    assert tls.detect_heads(model, **SMALL)["prev"].notna().all()


def test_the_bar_is_silent_unless_asked_for(capfd):
    tls.detect_heads(shared("bridge", "llama"), **SMALL)
    assert capfd.readouterr() == ("", "")
    tls.detect_heads(shared("bridge", "llama"), **SMALL, show_progress=True)
    assert "detectors" in capfd.readouterr().err


# --- refusals ---


def one_segment(*segment):
    return torch.tensor([[0, *segment, *segment]] * 2)


@pytest.mark.parametrize(
    "tokens",
    [
        one_segment(5, 6, 7)[:1],
        one_segment(5),
        one_segment(5, 6, 7)[:, 1:],
        one_segment(5, 6, 7)[:, :-1],
        torch.tensor([[0, 5, 6, 7, 5, 6, 8]] * 2),
    ],
    ids=["one sequence", "one token", "no opening token", "cut copy", "other copy"],
)
def test_tokens_that_do_not_repeat_are_refused(tokens):
    with pytest.raises(ValueError, match=r"at least two sequences \[BOS, r, r\].*found shape"):
        tls.detect_heads(shared("bridge", "llama"), tokens=tokens)


def test_tokens_that_repeat_are_taken():
    table = tls.detect_heads(shared("bridge", "llama"), tokens=one_segment(5, 6, 7))
    assert table.attrs["segment_length"] == 3
    assert table.attrs["n_sequences"] == 2


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({}, {"n_sequences": 1}, "found 1 sequences"),
        ({}, {"segment_length": 1}, "L = 1"),
        ({"n_ctx": 4}, {}, r"L = 1 \(context 4"),
        ({"d_vocab": 2}, {}, "1 usable ids"),
    ],
)
def test_draws_without_room_are_refused(changes, arguments, said):
    view = replace(attention_view(shared("bridge", "llama")), **changes)
    with pytest.raises(ValueError, match=f"two sequences and segments of two tokens.*{said}"):
        drawn(view, **arguments)


def test_a_model_that_returns_no_pattern_is_refused():
    model = zoo.hf_model("opt")
    model.config._attn_implementation = "sdpa"  # transformers computes no pattern then
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)
    bridge.original_model.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedArchitecture, match=r'never fired.*attn_implementation="eager"'):
        tls.detect_heads(bridge, **SMALL)
