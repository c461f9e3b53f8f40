"""`top_pairs`: the largest pairs and the draws below them, against loops over kept patterns."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from ablation_runs import recorded
from described import assert_described
from tokenizer_kinds import save_tokenized
from zoo import shared

import tlspectral as tls
from tlspectral.heads.detectors import heads as room
from tlspectral.heads.detectors.patterns import PATTERNS
from tlspectral.heads.detectors.top_pairs import DRAWN, KINDS, LENGTH, LOWER, SEQUENCES
from tlspectral.models.reading import attention_view
from tlspectral.models.running.text import text_tokens

PLACE = ["name", "interval", "prompt", "query", "key"]


def even_ids():
    return torch.randint(3, 20, (5, 16), generator=zoo.generator(1))


def ids_of_unequal_length():
    lengths = (20, 9, 15, 2, 20, 13)
    return [torch.randint(3, 20, (length,), generator=zoo.generator(seed)) for seed, length in enumerate(lengths)]


def all_pairs(model, rows, sink):
    """Every pair that counts, from the patterns of each prompt run alone: a row each."""
    view, found = attention_view(model), []
    for prompt, ids in enumerate(rows):
        for (layer, _), pattern in recorded(model, ("pattern",), ids[None]).items():
            weights = pattern[0].float().numpy()
            counted = (weights > 0) & (view.reader.seen_keys(view.model, layer, len(ids)).sum(1) > 1).numpy()[:, None]
            counted[..., 0] &= sink
            head, query, key = np.nonzero(counted)
            columns = {"name": [f"L{layer}H{one}" for one in head], "prompt": prompt, "query": query, "key": key}
            found.append(pd.DataFrame({**columns, "attention": weights[counted]}))
    return pd.concat(found, ignore_index=True)


def assert_equal_to(expected, table, n, least_drawn=3):
    """Compare a table with the largest pairs, at most two of a query, and its draws with what they are drawn from."""
    by_attention = expected.sort_values("attention", ascending=False, kind="stable")
    two = by_attention.groupby(["name", "prompt", "query"]).head(2)
    of_query = by_attention.groupby(["name", "prompt", "query"]).head(1)
    n_drawn = 0
    for name, own in table.groupby("name"):
        best = two[two["name"] == name].head(n)
        top = own[own["interval"] == "top"]
        assert top["rank"].tolist() == list(range(1, len(best) + 1))
        # Measured: 1.1e-6 (gemma3), float32 runs of other batch shapes. Neighbours in rank differ by 1e-3 and more.
        np.testing.assert_allclose(top["attention"], best["attention"], rtol=0, atol=1e-5)
        least = best["attention"].iloc[-1]
        own_largest = of_query[of_query["name"] == name]
        for interval, high, low in zip(
            LOWER, (least, 2 * least / 3, least / 3), (2 * least / 3, least / 3, 0), strict=True
        ):
            drawn = own[own["interval"] == interval]
            assert drawn["rank"].isna().all()
            # A query on a bound lies on either side of it, by rounding; of saturated heads many lie on the upper one.
            within = own_largest[own_largest["attention"].between(low - 1e-5, high + 1e-5)]
            inside = own_largest["attention"].between(low + 1e-5, high - 1e-5).sum()
            assert min(DRAWN, inside) <= len(drawn) <= min(DRAWN, len(within))
            same = drawn.merge(within, on=["prompt", "query", "key"], suffixes=("", "_kept"))
            assert len(same) == len(drawn)
            np.testing.assert_allclose(same["attention"], same["attention_kept"], rtol=0, atol=1e-5)
            assert drawn["attention"].is_monotonic_decreasing
            n_drawn += len(drawn)
    assert n_drawn >= least_drawn * table["name"].nunique()


ROWS = [("bridge", "llama"), ("bridge", "mistral"), ("bridge", "gemma3"), ("bridge", "bert")]


@pytest.mark.slow
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(("backend", "name"), [*ROWS, *zoo.also_slow(("bridge", "gptneo"), ("bridge", "qwen3"))])
def test_pairs_are_those_of_a_full_cache_in_any_batch(monkeypatch, backend, name, sink):
    """Grouped heads, windows on all layers and on some, an encoder."""
    model = shared(backend, name)
    rows = even_ids() if name in zoo.ENCODERS else ids_of_unequal_length()
    expected, tables = all_pairs(model, rows, sink), []
    for batch in (1, 2, 25):
        monkeypatch.setattr(room, "BATCH", batch)
        tables.append(tls.top_pairs(model, None, rows, n=4, sink=sink))
        assert_described(tables[-1])
        assert_equal_to(expected, tables[-1], 4)
        assert tables[-1].attrs["batch"] == batch
    for table in tables[:2]:
        assert table[PLACE].equals(tables[2][PLACE])
        # Measured: 1.1e-6, as above.
        np.testing.assert_allclose(table["attention"], tables[2]["attention"], rtol=0, atol=1e-5)
    table = tables[2]
    assert (table["offset"] == table["key"] - table["query"]).all()
    assert (table["key"] > 0).all() != sink
    assert (table["offset"] > 0).any() == (name in zoo.ENCODERS)
    many = tls.top_pairs(model, "L1", rows, n=60, sink=sink)
    assert_equal_to(expected, many, 60, least_drawn=0)
    assert many.groupby(["name", "prompt", "query"]).size().max() == 2
    if name == "mistral":
        assert (table["offset"] > -zoo.WINDOW).all()


def test_some_heads_give_the_rows_of_all():
    model, rows = shared("bridge", "llama"), ids_of_unequal_length()
    every = tls.top_pairs(model, None, rows, n=3)
    some = tls.top_pairs(model, ["L1H2", "L0H1"], rows, n=3)
    pd.testing.assert_frame_equal(
        some, every.loc[every["name"].isin(["L0H1", "L1H2"])].reset_index(drop=True), check_exact=True
    )
    assert tls.top_pairs(model, [], rows).empty
    assert tls.top_pairs(model, None, [torch.tensor([5])]).empty  # the first query has no other key


def assert_same(found, expected):
    pd.testing.assert_frame_equal(found[[*PLACE, "kind"]], expected[[*PLACE, "kind"]])
    # Measured: 0; float32 runs of other batch shapes may round otherwise.
    np.testing.assert_allclose(found["attention"], expected["attention"], rtol=0, atol=1e-5)


def ranked(table):
    return table[table["interval"] == "top"]


@pytest.mark.parametrize("name", ["llama", *zoo.also_slow("gemma3", "bert")])
def test_equal_prompts_have_one_rank_a_pair(name):
    model, rows = shared("bridge", name), even_ids()
    once = tls.top_pairs(model, None, rows, n=4)
    assert (once.attrs["n_sequences"], once.attrs["n_distinct"]) == (5, 5)
    with pytest.warns(
        UserWarning, match=r"of 15 prompts 5 are distinct \(prompt 5 is prompt 0 again\): pairs of equal"
    ):
        thrice = tls.top_pairs(model, None, rows.repeat(3, 1), n=4)
    assert_same(ranked(thrice), ranked(once))
    drawn = thrice[thrice["interval"] != "top"]
    assert (drawn["prompt"] < 5).all()
    assert not drawn.duplicated(PLACE).any()
    assert (thrice.attrs["n_sequences"], thrice.attrs["n_distinct"]) == (15, 5)
    assert thrice.attrs["prompt_notes"] == {"distinct_rows": 5}


def test_equal_prompts_may_be_padded_otherwise():
    model, rows = shared("bridge", "llama"), even_ids()
    ids, mask = torch.full((10, 20), 9), torch.zeros(10, 20, dtype=torch.long)
    for row in range(5):
        ids[row, 4:] = ids[5 + row, :16] = rows[row]
        mask[row, 4:] = mask[5 + row, :16] = 1
    with pytest.warns(UserWarning, match="of 10 prompts 5 are distinct"):
        twice = tls.top_pairs(model, None, {"input_ids": ids, "attention_mask": mask}, n=4)
    assert_same(ranked(twice), ranked(tls.top_pairs(model, None, rows, n=4)))


@pytest.mark.slow
@pytest.mark.parametrize("sink", [False, True])
def test_a_shared_beginning_counts_once(sink):
    """Queries with the same tokens up to them attend alike: only those of the first prompt are there."""
    model, ends = shared("bridge", "llama"), torch.randint(3, 20, (4, 6), generator=zoo.generator(2))
    ends[:, 0] = torch.arange(3, 7)
    begin = torch.randint(20, 40, (12,), generator=zoo.generator(3))
    rows = [torch.cat([begin, end]) for end in ends]
    expected = all_pairs(model, rows, sink)
    expected = expected[(expected["prompt"] == 0) | (expected["query"] >= 12)]
    shorter = [*rows, begin[:9]]  # a prompt that is the beginning of others adds nothing
    for given in (rows, shorter):
        assert_equal_to(expected, tls.top_pairs(model, None, given, n=8, sink=sink), 8, least_drawn=0)
    distinct = tls.top_pairs(model, None, shorter, n=8, sink=sink)
    assert distinct.attrs["n_distinct"] == 5
    assert ranked(distinct)["query"].lt(12).any()


def plain_kind(row, query, key, causal):
    if key == 0 and query > 0:
        return "start"
    if key in (query - 1, query):
        return "previous" if key == query - 1 else "self"
    if causal and key < query and row[key - 1] == row[query]:
        return "induction"
    if key < query and row[key] == row[query]:
        return "duplicate"
    return "next" if not causal and key == query + 1 else "other"


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_kinds_are_those_of_a_loop_over_tokens(name):
    model, rows = shared("bridge", name), torch.randint(3, 8, (6, 14), generator=zoo.generator())
    table = tls.top_pairs(model, None, rows, n=40, sink=True)
    expected = [plain_kind(rows[p].tolist(), q, k, name == "llama") for p, q, k in table[PLACE[2:]].to_numpy()]
    assert table["kind"].tolist() == expected
    assert set(expected) == {*KINDS, "other"} - ({"induction"} if name == "bert" else set()) | (
        {"next"} if name == "bert" else set()
    )
    assert set(KINDS.values()) <= set(PATTERNS)


def test_words_stand_in_their_text(tmp_path):
    model = tls.load_model(zoo.save_folder("llama", tmp_path, tokenizer=True))
    text = " ".join(f"w{index}" for index in range(3, 33))
    table = tls.top_pairs(model, "L0H0", [text], n=60, sink=True)
    words = [model.tokenizer.decode([token]) for token in model.to_tokens(text)[0].tolist()]
    for row in table[["query", "key", "query_token", "key_token", "context"]].itertuples():
        assert row.query_token.strip() == words[row.query]
        assert row.key_token.strip() == words[row.key]
        inner = f"<{row.query_token}>" if row.key == row.query else row.key_token
        assert f"[{inner}]" in row.context
        assert (" ... " in row.context) == (row.query - row.key > 13)
        plain = row.context
        for sign in "[]<>":
            plain = plain.replace(sign, "")
        shown = plain.replace(" ... ", " ").split()
        near = max(0, row.key - 6)
        assert shown[0] == words[near].strip("<>")  # <s>
        assert shown[-1] == words[min(row.query + 1, len(words) - 1)].strip("<>")
    assert (table["query"] - table["key"]).max() > 13  # else nothing was left out
    bare = tls.top_pairs(shared("bridge", "llama"), "L0H0", torch.tensor([[5, 6, 7, 8]]), n=1)
    row = bare.iloc[0]
    shown = [str(token) for token in (5, 6, 7, 8)]
    assert (row["query_token"], row["key_token"]) == (shown[row["query"]], shown[row["key"]])
    marked = [f"<{one}>" if place == row["query"] else one for place, one in enumerate(shown)]
    marked = [f"[{one}]" if place == row["key"] else one for place, one in enumerate(marked)]
    assert " ".join(marked).startswith(row["context"])


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["gpt2", "llama", "neox"])
def test_the_space_in_front_of_a_word_is_kept_and_line_ends_are_one_sign(tmp_path, name):
    model = tls.load_model(save_tokenized(name, tmp_path))
    table = tls.top_pairs(model, None, ["abba cab abba cab ab"], n=100)
    tokens = {*table["query_token"], *table["key_token"]}
    assert {" c", "ab"} <= tokens
    assert " abba" in {*tokens, " ab" + "ba" if " ab" in tokens else ""}
    assert not any("\n" in context for context in table["context"])


def test_the_text_around_a_pair_ends_with_whole_words(tmp_path):
    """Letters are tokens here, so that six tokens in front of a pair and one behind it cut words."""
    model = tls.load_model(save_tokenized("neox", tmp_path))
    text = "zebra quick fox jumps over lazy dogs twice"
    table = tls.top_pairs(model, None, [text], n=100)
    shown = table["context"].str.translate(str.maketrans("", "", "[]<>")).str.replace("|endoftext|", "")
    words = set(text.split())
    assert all(set(context.replace(" ... ", " ").split()) <= words for context in shown if " ... " not in context)
    assert (table["key"] - 6 > 0).any()
    table = tls.top_pairs(model, "L0H0", ["x" * 90], n=100)
    assert table["context"].str.count("x").max() < 60  # a word without an end is cut


@pytest.mark.slow
def test_the_packaged_text_is_the_default(tmp_path):
    model = tls.load_model(save_tokenized("gpt2", tmp_path))
    tokens = text_tokens(attention_view(model), None, n_sequences=SEQUENCES, sequence_length=LENGTH)
    found, given = tls.top_pairs(model, "L1H1", n=2), tls.top_pairs(model, "L1H1", tokens, n=2)
    pd.testing.assert_frame_equal(found, given, check_exact=True)
    assert found.attrs["n_sequences"] == SEQUENCES
    assert {name: found.attrs[name] for name in ("n", "sink", "seed")} == {"n": 2, "sink": False, "seed": 0}


def test_a_table_is_read_back_from_its_file(tmp_path):
    table = tls.top_pairs(shared("bridge", "llama"), "L1", even_ids(), n=2)
    tls.write_table(table, tmp_path / "pairs.parquet")
    again = tls.read_table(tmp_path / "pairs.parquet")
    pd.testing.assert_frame_equal(again, table, check_exact=True)
    assert again.attrs["table"] == "top_pairs"


def test_what_has_no_pairs_is_refused():
    model = shared("bridge", "llama")
    for n in (0, -1):
        with pytest.raises(ValueError, match=f"n is how many pairs get a rank, a whole number from 1 up; found {n}"):
            tls.top_pairs(model, None, even_ids(), n=n)
    with pytest.raises(ValueError, match="this model has no tokenizer"):
        tls.top_pairs(model)
    with pytest.raises(ValueError, match="no tokenizer, so text cannot be read"):
        tls.top_pairs(model, None, ["w3 w4"])
