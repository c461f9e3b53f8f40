"""`detect_heads` on prompts and with patterns of one's own, against loops over kept patterns."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from conformance.scoring import padded
from plain_detectors import kept_patterns, largest_on, marked_keys, scores_of
from zoo import shared

import tlspectral as tls
from tlspectral.heads import detectors
from tlspectral.heads.detectors.patterns import PATTERNS, WINDOW
from tlspectral.heads.detectors.spread import MEASURES
from tlspectral.models.hooking.strips import Strip

LENGTHS = (9, 14, 3, 14, 2)


def rows_of_ids():
    """Prompts of unequal length with few ids, so that tokens recur; the last is too short to count."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 8, (length,), generator=generator) for length in LENGTHS]


def test_scores_on_prompts_are_those_of_kept_patterns(monkeypatch):
    monkeypatch.setattr(detectors.heads, "BATCH", 2)
    model, rows = shared("bridge", "qwen3"), rows_of_ids()
    marked = [marked_keys(row.tolist(), prompts=True) for row in rows]
    patterns = [np.concatenate(kept_patterns(model, row[None])) for row in rows]
    uniform = [np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None] for n in LENGTHS]
    plain, chance = ([scores_of(*pair) for pair in zip(given, marked, strict=True)] for given in (patterns, uniform))
    table = tls.detect_heads(model, prompts=rows)
    names = ["prev", "dup", "ind", "self", *MEASURES]
    assert {"name", *names, *(f"{name}_se" for name in names)} == set(table) - {"layer", "head"}
    for name in ("prev", "dup", "ind", "self"):
        by_prompt = np.array([scores[name] for scores in plain]).reshape(len(rows), -1)
        by_prompt = by_prompt[~np.isnan(by_prompt[:, 0])]
        n = len(by_prompt)
        assert 2 <= n < len(rows)
        assert table.attrs["n_counted"][name] == n
        # Measured: 7e-8, float32 runs of other batch shapes; padding that counts moves a score by 1e-2.
        np.testing.assert_allclose(table[name], by_prompt.mean(0), rtol=0, atol=1e-6)
        np.testing.assert_allclose(table[f"{name}_se"], by_prompt.std(0, ddof=1) / np.sqrt(n), rtol=0, atol=1e-6)
        assert table.attrs["chance"][name] == pytest.approx(np.nanmean([one[name] for one in chance]))
    assert table.attrs["n_sequences"] == len(rows)


def test_the_share_of_largest_attention_is_that_of_a_loop():
    model, rows = shared("bridge", "qwen3"), rows_of_ids()[:4]
    table = tls.detect_heads(model, prompts=rows, pattern="duplicate", null_draws=3)
    marked = [marked_keys(row.tolist(), prompts=True)["dup"] for row in rows]
    counting = [number for number, keys_of in enumerate(marked) if any(keys_of.values())]
    patterns = [np.concatenate(kept_patterns(model, rows[number][None]), axis=1)[0] for number in counting]
    plain = np.stack([largest_on(one, marked[number]) for one, number in zip(patterns, counting, strict=True)])
    assert 0 < plain.mean() < 1
    # Shares of whole queries: exact but for the order of the sum.
    np.testing.assert_allclose(table["pattern_largest"], plain.mean(0), rtol=0, atol=1e-12)
    error = plain.std(0, ddof=1) / np.sqrt(len(plain))
    np.testing.assert_allclose(table["pattern_largest_se"], error, rtol=0, atol=1e-8)
    assert table["pattern_largest_p"].isin([0.25, 0.5, 0.75, 1]).all()
    described = tls.tables.describe_table("detect_heads.prompts").set_index("name")
    assert "Wu et al. (2404.15574)" in described.loc["pattern_largest", "meaning"]


def test_equally_large_keys_share_the_largest_attention():
    model = shared("bridge", "llama")
    hooks = [(f"blocks.{layer}.attn.hook_pattern", lambda value, hook: value.gt(0) / value.gt(0).sum(-1, keepdim=True))
             for layer in range(2)]  # fmt: skip
    with model.hooks(fwd_hooks=hooks):
        table = tls.detect_heads(model, prompts=zoo.prompt(2), pattern="local")
    # Every key that a query sees is equally large, which is the chance level.
    np.testing.assert_allclose(table["pattern_largest"], table.attrs["chance"]["pattern_largest"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(table["pattern_largest"], table["pattern"], rtol=0, atol=1e-6)  # float32 attention


def test_reliability_is_not_of_equal_prompts_in_both_halves():
    model, rows = shared("bridge", "llama"), rows_of_ids()[:4]
    once = tls.detect_heads(model, prompts=rows).attrs["reliability"]
    with pytest.warns(UserWarning, match="of 8 prompts 4 are distinct"):
        twice = tls.detect_heads(model, prompts=[row for row in rows for _ in range(2)]).attrs["reliability"]
    assert twice == once
    assert max(once.values()) < 0.99  # that of equal halves is 1
    with pytest.warns(UserWarning, match="of 4 prompts 1 are distinct"):
        assert set(tls.detect_heads(model, prompts=rows[:1] * 4).attrs["reliability"].values()) == {None}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_every_form_of_prompts_is_scored_alike(name):
    model, rows = shared("bridge", name), rows_of_ids()
    expected = tls.detect_heads(model, prompts=rows)
    batches = [padded([row[None] for row in rows], (side,)) for side in ("left", "right")]
    batches = [{"input_ids": ids, "attention_mask": mask} for ids, mask in batches]
    for given in (*batches, [row.tolist() for row in rows]):
        pd.testing.assert_frame_equal(tls.detect_heads(model, prompts=given), expected, check_exact=True)


@pytest.mark.slow
def test_strings_are_read_by_the_models_tokenizer(tmp_path):
    model = tls.load_model(zoo.save_folder("llama", tmp_path, tokenizer=True))
    texts = ["w3 w4 w3 w4 w5", "w6 w7 w6"]
    rows = [model.to_tokens(text)[0] for text in texts]
    assert len({len(row) for row in rows}) == 2
    expected = tls.detect_heads(model, prompts=rows)
    pd.testing.assert_frame_equal(tls.detect_heads(model, prompts=texts), expected, check_exact=True)
    assert tls.verify_scores(model, texts).equals(tls.verify_scores(model, rows))
    kernel = tls.relative_position_kernel(model, "L0H1", texts)
    pd.testing.assert_frame_equal(kernel, tls.relative_position_kernel(model, "L0H1", rows), check_exact=True)
    quick = {"null_draws": 2, "extras": ["score_asym"], "detectors": False}
    tables = [tls.analyze_heads(model, prompts=given, **quick) for given in (texts, rows)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


@pytest.mark.slow
def test_filling_counts_neither_in_the_self_check_nor_in_the_asymmetry():
    """Both are ratios of sums over prompts, so that those of two prompts lie between those of each."""
    model, rows = shared("bridge", "qwen2"), [zoo.prompt(1, 24)[0], zoo.prompt(1, 6, seed=1)[0]]
    filled = torch.stack([rows[0], torch.cat([rows[1], rows[1][-1:].expand(18)])])
    quick = {"null_draws": 2, "extras": ["score_asym"], "detectors": False}
    both, long, short, all_counted = (
        tls.analyze_heads(model, prompts=given, **quick) for given in (rows, rows[:1], rows[1:], filled)
    )
    for name in ("score_asym", "outside_m"):
        # Runs of other batch shapes differ by 1e-6; counting the filling moves the largest by 0.6 and 0.04.
        assert (both[name] >= np.minimum(long[name], short[name]) - 1e-5).all()
        assert (both[name] <= np.maximum(long[name], short[name]) + 1e-5).all()
        assert (both[name] - all_counted[name]).abs().max() > 1e-2


# --- patterns ---


def test_a_pattern_beside_the_default_leaves_its_numbers_alone():
    model = shared("bridge", "llama")
    small = {"n_sequences": 7, "segment_length": 10}
    plain = tls.detect_heads(model, **small)
    behind = torch.eye(21).roll(1, 0).tril()
    behind[:11] = 0  # the queries of the copy
    table = tls.detect_heads(model, **small, pattern=behind)
    pd.testing.assert_frame_equal(table[list(plain)], plain, check_exact=True)
    # Measured: 0; a query more or less moves a score by 1e-3.
    np.testing.assert_allclose(table["pattern"], plain["prev"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(table["pattern_se"], plain["prev_se"], rtol=0, atol=1e-10)
    assert table.attrs["chance"]["prev"] == plain.attrs["chance"]
    assert table.attrs["chance"]["pattern"] == pytest.approx(plain.attrs["chance"])
    again = tls.detect_heads(model, **small, pattern=lambda row: behind.numpy().astype(bool))
    pd.testing.assert_frame_equal(again, table, check_exact=True)


def test_named_patterns_mark_the_keys_of_a_loop_over_tokens():
    tokens = torch.tensor([[1, 5, 6, 5, 7, 5, 6, 6, 9, 8, 7, 5]])
    row = tokens[0].tolist()
    keys = {
        "previous_token": lambda q: {q - 1} - {-1},
        "duplicate": lambda q: {k for k in range(q) if row[k] == row[q]},
        "induction": lambda q: {k for k in range(1, q) if row[k - 1] == row[q]},
        "first_token": lambda q: {0} if q else set(),
        "local": lambda q: {k for k in range(q) if 2 <= q - k <= WINDOW},
        "self": lambda q: {q},
        "next_token": lambda q: {q + 1} & set(range(len(row))),
    }
    assert set(keys) == set(PATTERNS)
    for name, mark in PATTERNS.items():
        marked = mark(tokens, Strip(0, len(row), len(row)))[0]
        assert [set(marked[q].nonzero().flatten().tolist()) for q in range(len(row))] == [
            keys[name](q) for q in range(len(row))
        ], name


def duplicates(row):
    equal = (row[:, None] == row).tril(-1)
    equal[:2] = False
    return equal


NAMED = [("previous_token", "prev"), ("duplicate", "dup"), (duplicates, "dup"), ("induction", "ind")]


@pytest.mark.parametrize(("pattern", "column"), NAMED)
def test_a_named_pattern_or_a_function_of_the_tokens_is_the_column_that_measures_it(pattern, column):
    table = tls.detect_heads(shared("bridge", "llama"), prompts=rows_of_ids(), pattern=pattern)
    pd.testing.assert_series_equal(table["pattern"], table[column], check_names=False, check_exact=True)
    assert table.attrs["chance"]["pattern"] == table.attrs["chance"][column]


def test_matrices_are_weights():
    rows = rows_of_ids()
    matrices = torch.zeros(len(rows), max(LENGTHS), max(LENGTHS))
    for index, row in enumerate(rows):
        matrices[index, : len(row), : len(row)] = duplicates(row)
    table = tls.detect_heads(shared("bridge", "llama"), prompts=rows, pattern=2 * matrices)
    pd.testing.assert_series_equal(table["pattern"], 2 * table["dup"], check_names=False, check_exact=True)


def test_a_pattern_gets_copies_and_may_return_any_container_or_the_same_tensor_again():
    model, rows, stored = shared("bridge", "llama"), rows_of_ids(), {}

    def writing(row):
        found = duplicates(row)
        row.zero_()
        return found

    right = tls.detect_heads(model, prompts=rows, pattern=duplicates)
    for pattern in (
        writing,
        lambda row: duplicates(row).numpy(),
        lambda row: duplicates(row).tolist(),
        lambda row: duplicates(row).half(),
        lambda row: duplicates(row).float().requires_grad_(),
        lambda row: stored.setdefault(row, duplicates(row).double()),
    ):
        pd.testing.assert_frame_equal(tls.detect_heads(model, prompts=rows, pattern=pattern), right)
    assert all(torch.equal(kept, duplicates(row).double()) for row, kept in stored.items())


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"pattern": torch.ones(14, 14)}, ValueError, "prompt 0: query 0 has a weight on key 1, .*tril"),
        ({"pattern": torch.eye(13)}, ValueError, r"shape \(14, 14\) or \(5, 14, 14\); found \(13, 13\)"),
        ({"pattern": lambda row: torch.eye(14)}, ValueError, r"prompt 0 needs weights of shape \(9, 9\)"),
        ({"pattern": torch.eye(14).expand(5, 14, 14)}, ValueError, "prompt 0 has 9 tokens, but a query after"),
        ({"pattern": torch.zeros(14, 14)}, ValueError, "gives no key a weight in any sequence"),
        ({"pattern": torch.full((14, 14), torch.nan)}, TypeError, "matrix of weights"),
        ({"pattern": "prev"}, TypeError, "pattern= takes a matrix of weights .* found str 'prev'"),
        ({"pattern": lambda row: None}, TypeError, "found NoneType None for prompt 0"),
        ({"pattern": lambda row: duplicates(row)[None]}, ValueError, r"shape \(9, 9\); found \(1, 9, 9\)"),
        ({"pattern": lambda row: duplicates(row)[:, :1]}, ValueError, r"shape \(9, 9\); found \(9, 1\)"),
        ({"pattern": lambda row: duplicates(row) + 0j}, TypeError, "matrix of weights .*complex64 for prompt 0"),
        ({"pattern": lambda row: duplicates(row) / 0}, TypeError, r"weights .*found nan at \[0, 0\] for prompt 0"),
        ({"pattern": lambda row: duplicates(row).to("meta")}, TypeError, "matrix of weights"),
        ({"pattern": lambda row: duplicates(row).to_sparse()}, TypeError, "matrix of weights"),
        ({"pattern": lambda: 0}, TypeError, r"pattern is a function of the token ids of a prompt; found <lambda>\(\)"),
        ({"prompts": ["the red"]}, ValueError, "no tokenizer"),
    ],
)
def test_what_does_not_fit_is_refused(given, error, words):
    with pytest.raises(error, match=words):
        tls.detect_heads(shared("bridge", "llama"), **{"prompts": rows_of_ids(), **given})
