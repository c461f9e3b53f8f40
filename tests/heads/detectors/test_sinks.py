"""Attention sinks: against loops over kept patterns, and planted ones left out by all that leaves them out."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from ablation_runs import allowed_keys
from figure_parts import part
from plain_detectors import kept_patterns
from zoo import shared

import tlspectral as tls
from tlspectral import plots
from tlspectral.heads.detectors import heads as room
from tlspectral.heads.detectors.sinks import asked_for_sinks, found_sinks
from tlspectral.heads.detectors.spread import KEPT, MEASURES, WITHOUT_SINKS
from tlspectral.models.reading import attention_view
from tlspectral.models.running.prompts import packed_prompts

# TransformerLens 4 says of layers that delegate their attention that the output does not follow a changed pattern.
pytestmark = pytest.mark.filterwarnings("ignore:A hook on .* returned a modified tensor")

LENGTHS = (30, 9, 41, 24)


def rows_of_ids(lengths=LENGTHS):
    return [torch.randint(3, 30, (length,), generator=zoo.generator(seed)) for seed, length in enumerate(lengths)]


def judged(pattern, seen, encoder):
    """Share, number of queries and mean number of keys seen, for each key of a pattern [heads, query, key]."""
    found = []
    for key in range(pattern.shape[-1]):
        away = [abs(query - key) if encoder else query - key for query in range(pattern.shape[-1])]
        queries = [query for query, distance in enumerate(away) if distance >= 8 and seen[query, key]]
        shares = [pattern[head, query, key] for head in range(len(pattern)) for query in queries]
        n_seen = np.mean([seen[query].sum() for query in queries]) if queries else 0.0
        found.append((np.mean(shares) if shares else 0.0, len(queries), n_seen))
    return np.array(found).T


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["llama", "gemma3", "bert", *zoo.also_slow("gptneo", "llama4", "mistral")])
@pytest.mark.parametrize("least", [0.05, 0.3])
def test_sinks_are_those_of_a_loop_over_queries(name, least):
    """Grouped heads, a window of 8 on a layer, in which no key is decided, an encoder; prompts of unequal length."""
    with more_on_two_keys(shared("bridge", name)):
        assert_sinks_are_those_of_a_loop(name, least)


def more_on_two_keys(model):
    """Hooks that give keys 0 and 5 more attention, where they are seen, and the others less."""

    def patch(pattern, hook):
        seen = pattern > 0
        weights = torch.ones(pattern.shape[-1])
        weights[0], weights[5] = 12.0, 20.0
        made = pattern.sqrt() * weights.where(seen, 0.0)
        return made / made.sum(-1, keepdim=True)

    view = attention_view(model)
    return model.hooks(fwd_hooks=[(view.hook_names(layer)["pattern"], patch) for layer in view.layers])


def assert_sinks_are_those_of_a_loop(name, least):
    model, encoder = shared("bridge", name), name in zoo.ENCODERS
    rows = rows_of_ids((30, 30) if encoder else LENGTHS)
    view = attention_view(model)
    sinks = replace(found_sinks(view, packed_prompts(view, rows), view.layers, 2), least=least)
    n_found = n_decided = 0
    for prompt, row in enumerate(rows):
        for layer, patterns in enumerate(kept_patterns(model, row[None])):
            seen = allowed_keys(name, layer, len(row)).numpy()
            share, n_queries, n_seen = judged(patterns[0], seen, encoder)
            # Measured: 3e-8, float32 means over heads and other batch shapes; a query more or less moves it by 1e-3.
            np.testing.assert_allclose(sinks.share[layer][prompt, : len(row)], share, rtol=0, atol=1e-6)
            decided = n_queries >= 16
            bound = np.maximum(least, 4 / np.maximum(n_seen, 1))
            assert (np.abs(share - bound)[decided] > 1e-6).all()
            for given, expected in ((sinks.decided, decided), (sinks.found, decided & (share > bound))):
                assert given[layer][prompt, : len(row)].tolist() == expected.tolist()
                assert not given[layer][prompt, len(row) :].any()
            n_found, n_decided = n_found + sinks.found[layer][prompt].sum(), n_decided + decided.sum()
    assert sinks.n_keys == sum(map(len, rows))
    if name == "llama" or (name == "bert" and least < 0.1):
        assert 0 < n_found < n_decided  # else it says nothing which keys are found


def planted(weights):
    """A hook that gives queries these weights of keys by position, where they see them, and the rest to their own."""

    def patch(pattern, hook):
        made, position = torch.zeros_like(pattern), torch.arange(pattern.shape[-1])
        for key, weight in weights.items():
            made[..., position > key, key] = weight
        made[..., position, position] += 1 - made.sum(-1)
        return made

    return patch


def hooks_of(model, *weights):
    """Hooks that plant attention in layer 0, 1, ..."""
    view = attention_view(model)
    return model.hooks(
        fwd_hooks=[(view.hook_names(layer)["pattern"], planted(each)) for layer, each in enumerate(weights)]
    )


TWO = ({0: 0.3, 5: 0.4}, {3: 0.5})  # two sinks in layer 0; in layer 1 one, which is not the first token


def test_planted_sinks_are_listed_with_their_tokens_and_shares():
    model, rows = shared("bridge", "llama"), rows_of_ids()
    with hooks_of(model, *TWO):
        table = tls.heads.attention_sinks(model, rows)
    decided = [0, 2, 3]  # 9 tokens decide nothing, and 24 the first key alone
    expected = [(0, prompt, key) for prompt in decided for key in (0, 5) if prompt != 3 or key == 0]
    expected += [(1, prompt, 3) for prompt in (0, 2)]
    assert list(table[["layer", "prompt", "key"]].itertuples(index=False, name=None)) == expected
    assert table["token"].tolist() == [str(int(rows[prompt][key])) for _, prompt, key in expected]
    shares = {(0, 0): 0.3, (0, 5): 0.4, (1, 3): 0.5}
    assert table["share"].tolist() == pytest.approx([shares[layer, key] for layer, _, key in expected])
    undecided = sum(min(length, 23) for length in LENGTHS)
    assert table.attrs["sinks"] == {
        "least": 0.15, "n_keys": sum(LENGTHS), "n_undecided": undecided, "n_found": {"L0": 5, "L1": 2}
    }  # fmt: skip
    assert table.attrs["table"] == "attention_sinks"
    empty = tls.heads.attention_sinks(model, rows[1:2])
    assert (len(empty), empty.attrs["sinks"]["n_undecided"], empty["layer"].dtype) == (0, 9, "int64")


@pytest.mark.parametrize(("share", "n_found"), [(0.149, 0), (0.151, 1)])
def test_a_share_above_the_bound_is_a_sink(share, n_found):
    model = shared("bridge", "llama")
    with hooks_of(model, {0: share}, {0: share}):
        assert tls.heads.attention_sinks(model, zoo.prompt(1, 80)).attrs["sinks"]["n_found"] == n_found
        # The queries 8 to 23 of 24 tokens see 16.5 keys on average, and 4 / 16.5 is .242.
        assert tls.heads.attention_sinks(model, zoo.prompt(1, 24)).attrs["sinks"]["n_found"] == 0
    with hooks_of(model, {0: 0.241}, {0: 0.244}):
        assert tls.heads.attention_sinks(model, zoo.prompt(1, 24))["layer"].tolist() == [1]


def test_a_window_leaves_keys_undecided():
    """A window of 8 lets no query see a key 8 tokens back."""
    table = tls.heads.attention_sinks(shared("bridge", "gemma3"), zoo.prompt(2, 40))
    assert table.attrs["sinks"]["n_undecided"] == {"L0": 80, "L1": 46, "L2": 80, "L3": 46}


def entropy(weights):
    return -sum(weight * np.log(weight) for weight in weights if weight > 0)


def without(pattern, sinks):
    """N and D of each measure for the pattern [query, key] of one head on one prompt."""
    rows = [(query, row) for query, row in enumerate(pattern) if query >= 2]
    others = [key for key in range(len(pattern)) if key not in sinks]
    kept = [row[others] / row[others].sum() for _, row in rows if row[others].sum() >= KEPT]
    far = sum(row[key] * abs(query - key) for query, row in rows for key in others)
    return {
        "sink_share": (np.mean([row[list(sinks)].sum() for _, row in rows]), 1),
        "entropy_no_sinks": (sum(map(entropy, kept)), len(kept)),
        "distance_no_sinks": (far, sum(row[others].sum() for _, row in rows)),
        "no_sinks_rows": (len(kept) / len(rows), 1),
    }


def test_columns_without_sinks_are_those_of_kept_patterns(monkeypatch):
    monkeypatch.setattr(room, "BATCH", 2)
    model, rows = shared("bridge", "llama"), rows_of_ids()
    view, plain = attention_view(model), tls.detect_heads(model, prompts=rows)
    given = {0: {0: 0.2, 5: 0.3}}  # layer 1 keeps its own attention
    hook = (view.hook_names(0)["pattern"], lambda pattern, hook: 0.5 * pattern + 0.5 * planted(given[0])(pattern, hook))
    with model.hooks(fwd_hooks=[hook]):
        monkeypatch.setattr(room, "found_sinks", lambda *given: replace(found_sinks(*given), least=0.1))
        table = tls.detect_heads(model, prompts=rows, sinks="found")
        patterns = [kept_patterns(model, row[None]) for row in rows]
        sinks = replace(found_sinks(view, packed_prompts(view, rows), view.layers, 2), least=0.1)
        others = tls.detect_heads(model, prompts=rows)
    assert (sinks.found[0].sum(), sinks.found[0][:, 5].sum()) != (0, 0)
    pd.testing.assert_frame_equal(table[list(plain)], others, check_exact=True)  # what was there keeps its meaning
    counting = [prompt for prompt, length in enumerate(LENGTHS) if length >= 24]
    for place, (layer, head) in enumerate(table[["layer", "head"]].to_numpy()):
        parts = [
            without(patterns[prompt][layer][0, head], set(sinks.found[layer][prompt].nonzero().flatten().tolist()))
            for prompt in counting
        ]
        for name in WITHOUT_SINKS:
            above, below = np.array([one[name] for one in parts]).T
            value, n = above.sum() / below.sum(), len(parts)
            error = np.sqrt(n / (n - 1) * np.square(above - value * below).sum()) / below.sum()
            # Measured: 3e-6 on a distance of 8, float32 rows; a key more or less moves it by .1.
            assert table.loc[place, name] == pytest.approx(value, rel=1e-5, abs=1e-5)
            assert table.loc[place, f"{name}_se"] == pytest.approx(error, rel=1e-4, abs=1e-5)
    assert table.attrs["sinks"] == {**sinks.noted["sinks"]}
    assert "sinks" not in plain.attrs


def test_with_the_first_key_as_the_only_sink_both_kinds_of_columns_agree():
    model = shared("bridge", "llama")
    with hooks_of(model, {0: 0.6}, {0: 0.3}):
        table = tls.detect_heads(model, prompts=zoo.prompt(3, 30), sinks="found")
    pairs = dict(zip(WITHOUT_SINKS, ("start_share", *MEASURES[3:]), strict=True))
    for name, first in pairs.items():
        for end in ("", "_se"):
            # Measured: 3e-8, sums with a 0 in front.
            np.testing.assert_allclose(table[f"{name}{end}"], table[f"{first}{end}"], rtol=0, atol=1e-6)
        assert table.attrs["chance"][name] == pytest.approx(table.attrs["chance"][first], rel=1e-6)


def test_layers_that_decide_nothing_have_no_columns_without_sinks():
    table = tls.detect_heads(shared("bridge", "gemma3"), prompts=zoo.prompt(2, 40), sinks="found")
    of_window = table["layer"] % 2 == 0
    assert table.loc[of_window, list(WITHOUT_SINKS)].isna().all(axis=None)
    assert table.loc[~of_window, list(WITHOUT_SINKS)].notna().all(axis=None)
    assert table.attrs["chance"]["sink_share"]["L0"] is None


def test_top_pairs_leave_out_the_keys_that_are_sinks():
    model, rows = shared("bridge", "llama"), rows_of_ids()
    with hooks_of(model, *TWO):
        table = tls.top_pairs(model, None, rows, n=60, sinks="found")
        kept = tls.top_pairs(model, None, rows, n=60)
    assert (kept["key"] == 5).any()
    for layer, keys in ((0, {0, 5}), (1, {3})):
        own = table[table["layer"] == layer]
        assert set(own["prompt"]) == {0, 2, 3}  # nothing is decided in a prompt of 9 tokens
        left_out = own[own["key"].isin(keys)]
        assert set(zip(left_out["prompt"], left_out["key"], strict=True)) <= {(3, 5), (3, 3)}  # undecided there
        assert (own["prompt"] == 0).any()
    assert (table.loc[table["layer"] == 1, "offset"] == 0).any()
    assert table.attrs["sinks"]["n_found"] == {"L0": 5, "L1": 2}
    assert "sink" not in table.attrs
    first_kept = tls.top_pairs(model, None, rows, n=200, sinks="found")
    assert (first_kept["key"] == 0).any()  # the first token is no sink of the model as it is


def test_a_picture_leaves_out_the_keys_that_are_sinks():
    model, prompt = shared("bridge", "llama"), zoo.prompt(1, 30)[0]
    with hooks_of(model, *TWO):
        figure = plots.patterns(model, prompt, ["L0H0", "L1H1"], sinks="found")
        _, cache = model.run_with_cache(prompt[None])
    for layer, head, keys in ((0, 0, [0, 5]), (1, 1, [3])):
        (image,) = part(figure, f"L{layer}H{head}")
        drawn = np.ma.filled(image.get_array(), np.nan)
        expected = cache[f"blocks.{layer}.attn.hook_pattern"][0, head].numpy().copy()
        expected[:, keys] = np.nan
        np.testing.assert_array_equal(drawn, expected)
    assert figure.get_supxlabel() == "key, sinks of the layer in grey"


SHORT = [list(range(3, 26))]  # 23 tokens


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: tls.detect_heads(model, sinks="found"), "needs prompts of your own"),
        (lambda model: tls.detect_heads(model, prompts=[[1, 5, 6, 5, 6]], sinks="found"), "needs prompts of your own"),
        (lambda model: tls.detect_heads(model, prompts=SHORT, sinks="found"), "Give prompts of 24 tokens or more"),
        (lambda model: tls.top_pairs(model, None, SHORT, sinks="found"), "Give prompts of 24 tokens or more"),
        (lambda model: plots.patterns(model, SHORT, "L0H0", sinks="found"), "Give prompts of 24 tokens or more"),
        (lambda model: tls.top_pairs(model, None, SHORT, sink=True, sinks="found"), "give one of the two"),
        (lambda model: plots.patterns(model, SHORT, "L0H0", sink=True, sinks="found"), "give one of the two"),
        (
            lambda model: tls.detect_heads(model, prompts=SHORT, sinks="first"),
            "sinks='first' is unknown: give sinks=.found",
        ),
        (lambda model: tls.top_pairs(model, None, SHORT, sinks="first"), "sinks='first' is unknown"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(shared("bridge", "llama"))


def test_asking_for_sinks():
    assert (asked_for_sinks(None), asked_for_sinks(None, sink=True), asked_for_sinks("found")) == (False, False, True)
