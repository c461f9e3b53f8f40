"""`positional_symbolic` on models: against explicit permutations, between its modes, on heads whose kind is known."""

import functools
import json
import math
from contextlib import contextmanager
from itertools import pairwise

import pandas as pd
import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.attention import AttentionView, attention_view
from tlspectral.errors import ScoreMismatch, UnsupportedArchitecture
from tlspectral.hooks import ablate
from tlspectral.operators.verification import alibi_slopes
from tlspectral.positional import BlockPrompt, positional_symbolic
from tlspectral.positional.exclusion import exclusion_split
from tlspectral.positional.key_permutations import swapped_key_means
from tlspectral.positional.measure import measure_queries
from tlspectral.positional.passes import QueryPasses
from tlspectral.positional.scores import swap_scores
from tlspectral.rotary import per_pair
from tlspectral.spectral_rope import to_spectral
from tlspectral.training import RandomMapTask

needs_hooked = pytest.mark.skipif(not zoo.HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
# TransformerLens 3.9 pairs the wrong coordinates in Cohere's bridge, so its attention is not that of any reading.
BRIDGES = tuple(name for name in zoo.ARCHITECTURES if not (name == "cohere" and zoo.HAS_HOOKED))
LEARNED_POSITIONS = ("gpt2", "opt", "gptneo")
WITHOUT_ROPE = (*LEARNED_POSITIONS, "bloom")
# Grouped keys, YaRN, partial rotary, adjacent pairs, query/key norm, softcap and windows, rope in some layers, ALiBi.
PECULIAR = ("llama", "yarn", "neox", "gptj", "qwen3", "gemma2", "gemma3", "mistral", "smollm3", "bloom")
SCORES = ["s_pos", "s_sym", "exclusion_index", "logit_std", "tau", "alpha_ess"]


def model_cases():
    """Every model; those without a peculiarity of their own are left to the slow tests."""
    for backend, names in (("bridge", BRIDGES), ("hooked", zoo.HOOKED_ARCHITECTURES)):
        fast = (*PECULIAR, "gpt2") if backend == "bridge" else ("llama", "gpt2", "bloom")
        for name in names:
            marks = [needs_hooked] * (backend == "hooked") + [pytest.mark.slow] * (name not in fast)
            yield pytest.param(backend, name, marks=marks)


every_model = pytest.mark.parametrize(("backend", "name"), list(model_cases()))
modes = pytest.mark.parametrize("mode", ["prompt", "key"])


@functools.cache
def shared(backend, name):
    """A model that no test changes."""
    return getattr(zoo, backend)(name)


def block_prompt(lengths=(3, 4, 2, 3, 2), prefix=3, suffix=3, seed=1):
    """A prompt of blocks, unequal unless asked for; behind the window of 8 lie the last two of them in part."""
    tokens = zoo.prompt(1, prefix + sum(lengths) + suffix, seed)[0]
    pieces = tokens.split([prefix, *lengths, suffix])
    return BlockPrompt(pieces[0], pieces[1:-1], pieces[-1])


def measured(model, prompt=None, **options):
    options = {"show_progress": False, "exclude_first_block": False, **options}
    return positional_symbolic(model, block_prompt() if prompt is None else prompt, **options)


def differ(first, second, columns=SCORES):
    """Largest difference of two tables; NaN have to be in the same places."""
    assert first[columns].isna().equals(second[columns].isna())
    return float((first[columns] - second[columns]).abs().max().max())


class KeysInPlaces:
    """Logits of the last query for any order of the keys, written out: rotate every key, multiply, scale, cap, mask."""

    def __init__(self, view, layer, tokens):
        names = view.hook_names(layer)
        captured = view.capture(tokens[None], list(names.values()), last=names["pattern"])
        self.raw, self.n = view.raw(layer), len(tokens)
        q, k = captured[names["query"]][0, -1].double(), captured[names["key"]][0].double()
        self.q, self.k = self.normed(q, self.raw.q_norm), self.normed(k, self.raw.k_norm)
        self.k = self.k.repeat_interleave(len(self.q) // self.k.shape[1], dim=1)  # [pos, heads, d_head]
        self.pattern = captured[names["pattern"]][0, :, -1].double()
        self.seen = self.pattern.amax(0) > 0  # the scores of the zoo are small enough for nothing to underflow
        self.tables = None
        if self.raw.rotary is not None:
            found = view.rotary_tables(layer, self.n, captured)
            found = self.raw.rotary.position_tables(self.n) if found is None else found
            self.tables = [per_pair(t.reshape(-1, *t.shape[-2:])[0].double(), self.raw.rotary) for t in found]

    @staticmethod
    def normed(x, norm):
        if norm is None:
            return x
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.gain.detach().double()

    def turned(self, x, position):
        """[heads, d_head] at one position."""
        out = x.clone()
        for pair, (real, imag) in enumerate(zip(self.raw.rotary.real_index, self.raw.rotary.imag_index, strict=True)):
            turn = torch.complex(self.tables[0][position, pair], self.tables[1][position, pair])
            value = torch.complex(x[:, real], x[:, imag]) * turn
            out[:, real], out[:, imag] = value.real, value.imag
        return out

    def heads(self, order):
        """Softmax weights [heads, pos] with key `order[j]` at position j."""
        return self.logits(order).masked_fill(~self.seen, -torch.inf).softmax(-1)

    def logits(self, order):
        rows = []
        for position, key in enumerate(order):
            q, k = self.q, self.k[key]
            if self.tables is not None:
                q, k = self.turned(q, self.n - 1), self.turned(k, position)
            score = self.raw.score_scale * (q * k).sum(-1)
            rows.append(score + position * alibi_slopes(len(q)) if self.raw.alibi else score)
        scores = torch.stack(rows, dim=-1)
        return scores if self.raw.softcap is None else self.raw.softcap * torch.tanh(scores / self.raw.softcap)

    def pair_logits(self, order):
        """[heads, pairs, pos], without scale and softcap."""
        rows = []
        for position, key in enumerate(order):
            q, k = self.turned(self.q, self.n - 1), self.turned(self.k[key], position)
            product = q * k
            rows.append(product[:, self.raw.rotary.real_index] + product[:, self.raw.rotary.imag_index])
        return torch.stack(rows, dim=-1)

    def still_logits(self):
        """[heads, pos], what columns in no pair give."""
        still = torch.ones(self.q.shape[1], dtype=torch.bool)
        still[self.raw.rotary.real_index] = still[self.raw.rotary.imag_index] = False
        return torch.einsum("hd,phd->hp", self.q[:, still], self.k[:, :, still])

    def pairs(self, order):
        return self.pair_logits(order).masked_fill(~self.seen, -torch.inf).softmax(-1)

    def placed(self, logits_of):
        """A[.., k, j] over visible keys before the query: all keys at place j at once, one rotation of the order."""
        kept = [position for position in range(self.n - 1) if self.seen[position]]
        columns = {}
        for shift in range(len(kept)):
            order = list(range(self.n))
            for place, position in enumerate(kept):
                order[position] = kept[(place + shift) % len(kept)]
            found = logits_of(order)
            for place, position in enumerate(kept):
                columns[(place + shift) % len(kept), place] = found[..., position]
        size = range(len(kept))
        return torch.stack([torch.stack([columns[k, j] for j in size], dim=-1) for k in size], dim=-2)


def explicit_key_scores(keys, prompt, weights_of):
    """s_pos and the rest from keys permuted one swap at a time, with everything computed anew."""
    before, after = [], []
    intact = weights_of(range(keys.n))
    spans = prompt.spans()
    numbered = BlockPrompt(
        *(lambda pieces: (pieces[0], pieces[1:-1], pieces[-1]))(
            torch.arange(keys.n).split([len(piece) for piece in prompt.pieces])
        )
    )
    for i in range(len(spans)):
        for j in range(i + 1, len(spans)):
            swapped = numbered.swapped(i, j)
            moved = weights_of(swapped.tokens().tolist())
            before.append(torch.stack([intact[..., slice(*spans[b])].mean(-1) for b in (i, j)], dim=-1))
            after.append(torch.stack([moved[..., slice(*swapped.spans()[b])].mean(-1) for b in (i, j)], dim=-1))
    return swap_scores(torch.stack(before), torch.stack(after))


# --- key mode: the definition, computed the long way ---


@every_model
@pytest.mark.parametrize("lengths", [(3, 4, 2, 3, 2), (3, 3, 3, 3)], ids=["unequal", "equal"])
def test_swapped_keys_are_keys_permuted_and_turned_anew(backend, name, lengths):
    model, prompt = shared(backend, name), block_prompt(lengths)
    view = attention_view(model)
    table = measured(model, prompt, mode="key")
    layer = view.n_layers - 1
    keys = KeysInPlaces(view, layer, prompt.tokens())
    assert (keys.heads(range(keys.n)) - keys.pattern).abs().max() < 1e-5
    expected = explicit_key_scores(keys, prompt, keys.heads)
    found = table[table["layer"] == layer]
    for column in ("s_pos", "s_sym", "tau", "alpha_ess"):
        values = torch.tensor(found[column].to_numpy())
        # float64 on both sides: measured 2e-14 (alpha_ess, about 5). A key at the wrong place moves scores by tenths.
        assert torch.allclose(values, getattr(expected, column), rtol=1e-9, atol=1e-12, equal_nan=True), column


@every_model
def test_the_exclusion_index_is_theorem_1_over_all_keys_in_all_places(backend, name):
    model, prompt = shared(backend, name), block_prompt()
    view = attention_view(model)
    layer = view.n_layers - 1
    keys = KeysInPlaces(view, layer, prompt.tokens())
    split = exclusion_split(keys.placed(keys.logits))
    table = measured(model, prompt, mode="key")
    found = table[table["layer"] == layer]
    # Measured 3e-15 on numbers of size 1; the query's own key among them moves them by 1e-2 and more.
    assert torch.tensor(found["exclusion_index"].to_numpy()) == pytest.approx(split.index, abs=1e-12)
    assert torch.tensor(found["logit_std"].to_numpy()) == pytest.approx(split.variance.sqrt(), rel=1e-12)
    assert (split.variance <= split.pos + split.sym).all()


@pytest.mark.parametrize("name", ["llama", "yarn", "neox", "gptj", "qwen3", "gemma3"])
def test_rotary_pairs_are_scored_as_heads_of_two_columns(name):
    model, prompt = shared("bridge", name), block_prompt()
    view = attention_view(model)
    layer = view.n_layers - 1
    keys = KeysInPlaces(view, layer, prompt.tokens())
    table = measured(model, prompt, mode="key", per_frequency=True)
    assert list(table) == ["layer", "head", "frequency", *SCORES]
    found = table[table["layer"] == layer]
    n_pairs = view.rotary(layer).n_pairs
    assert found["frequency"].tolist() == list(range(n_pairs)) * view.n_heads(layer)
    expected = explicit_key_scores(keys, prompt, keys.pairs)
    split = exclusion_split(keys.placed(keys.pair_logits))
    columns = {column: getattr(expected, column) for column in ("s_pos", "s_sym", "tau", "alpha_ess")}
    columns |= {"exclusion_index": split.index, "logit_std": split.variance.sqrt()}
    for column, values in columns.items():
        # Measured 2e-14; a pair of the wrong columns, or a 1/sqrt(d), moves scores by tenths.
        assert torch.tensor(found[column].to_numpy()) == pytest.approx(values.flatten(), rel=1e-9, abs=1e-12), column


def moved_all_anew(logits_at, spans, i, j, n):
    """What `swapped_key_means` gives for one swap, from a softmax over all positions."""
    blocks = [list(range(*span)) for span in spans]
    order = list(blocks)
    order[i], order[j] = order[j], order[i]
    keys = [*range(spans[0][0]), *(key for block in order for key in block), *range(spans[-1][1], n)]
    weights = logits_at((torch.tensor(keys), torch.arange(n))).softmax(-1)
    ends = torch.tensor([spans[0][0], *(len(block) for block in order)]).cumsum(0).tolist()
    return torch.stack([weights[..., ends[b] : ends[b + 1]].mean(-1) for b in (i, j)], dim=-1)


@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])
@pytest.mark.parametrize("lengths", [(2, 2, 2, 2), (1, 4, 2, 3)])
@pytest.mark.parametrize("prefix", [0, 2])
def test_the_updated_softmax_is_the_softmax(size, lengths, prefix):
    n = prefix + sum(lengths) + 2
    bounds = torch.tensor([prefix, *lengths]).cumsum(0).tolist()
    spans = list(pairwise(bounds))
    swaps = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    for seed in range(20):
        table = size * torch.randn(3, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

        def logits_at(moved, table=table):
            return table[:, moved[0], moved[1]]

        found = swapped_key_means(logits_at, logits_at((torch.arange(n), torch.arange(n))), spans, swaps)
        expected = torch.stack([moved_all_anew(logits_at, spans, i, j, n) for i, j in swaps])
        # Relative to each weight, however small: a denominator by subtraction has lost all digits at size 30, and
        # exponentials with the old maximum overflow at 3000. Measured 5e-13, from logits of 1e4 rounded to 2e-12.
        assert torch.allclose(found, expected, rtol=1e-10, atol=0)


# --- the two modes ---


@every_model
def test_in_the_first_layer_words_that_swap_are_keys_that_swap(backend, name):
    if name in LEARNED_POSITIONS:
        pytest.skip("a learned position is in the key vector")
    model, prompt = shared(backend, name), block_prompt()
    words, keys = (measured(model, prompt, mode=mode) for mode in ("prompt", "key"))
    first = words["layer"] == 0
    # The model computes keys in float32, alike in any order: measured 2e-7.
    assert differ(words[first], keys[first]) < 1e-5
    # Deeper the keys themselves differ, and the table would show it if one mode were the other.
    if name != "neox" and backend == "bridge":
        assert differ(words[~first], keys[~first]) > 1e-2


@pytest.mark.parametrize("name", ["llama", "neox", "gptj", "gemma2", "smollm3"])
def test_frequencies_too_agree_in_the_first_layer(name):
    words, keys = (measured(shared("bridge", name), mode=mode, per_frequency=True) for mode in ("prompt", "key"))
    first = words["layer"] == 0
    assert differ(words[first], keys[first]) < 1e-5
    assert differ(words[~first], keys[~first]) > 1e-2


@pytest.mark.parametrize("name", LEARNED_POSITIONS)
def test_without_rotary_positions_permuted_keys_take_their_logits_along(name):
    table = measured(shared("bridge", name), block_prompt((3, 3, 3, 3)), mode="key")
    whole = table if name != "gptneo" else table[table["layer"] == 0]  # its second layer has a window
    # Exactly: the logit does not know its position. Scores are cosines of equal vectors, up to rounding.
    assert (table["exclusion_index"] == 0).all()
    assert (whole["s_sym"] - 1).abs().max() < 1e-12
    assert whole["s_pos"].max() < 0.999
    assert (table["logit_std"] > 0.1).all()
    # Words that swap get other learned positions, which prompt mode shows.
    words = measured(shared("bridge", name), block_prompt((3, 3, 3, 3)))
    assert words["s_sym"].min() < 0.9
    assert (words["exclusion_index"] == 0).all()


def test_layers_without_rotary_positions_have_no_frequencies():
    model = shared("bridge", "smollm3")
    table = measured(model, per_frequency=True)
    with_rope = [layer for layer in range(4) if attention_view(model).rotary(layer) is not None]
    assert with_rope
    assert len(with_rope) < 4
    assert sorted(set(table["layer"])) == with_rope
    keys = measured(model, mode="key")
    still = ~keys["layer"].isin(with_rope)
    assert (keys.loc[still, "exclusion_index"] == 0).all()
    assert (keys.loc[~still, "exclusion_index"] > 0).all()


# --- logits per frequency ---


@pytest.mark.parametrize("name", [name for name in BRIDGES if name not in WITHOUT_ROPE])
def test_frequencies_and_still_columns_sum_to_the_scores(name):
    model, prompt = shared("bridge", name), block_prompt()
    view = attention_view(model)
    found = {}

    def keep(prompt, query, layer, seen, pattern):
        found[layer] = seen

    layers = [view.raw(layer) for layer in range(view.n_layers)]
    QueryPasses(view, layers, [prompt.suffix]).run(prompt.tokens()[None, : -len(prompt.suffix)], keep)
    for layer, seen in found.items():
        if seen.n_pairs == 0:
            continue
        keys = KeysInPlaces(view, layer, prompt.tokens())
        summed = keys.raw.score_scale * (seen.frequency_logits().sum(1) + keys.still_logits())
        whole = seen.capped(summed)[:, seen.visible]
        # Logits of size 10 in float64: measured 4e-14.
        assert (whole - seen.head_logits()[:, seen.visible]).abs().max() < 1e-12
        assert torch.equal(seen.visible, keys.seen)
        names = view.hook_names(layer)
        if "scores" in names:
            theirs = view.capture(prompt.tokens()[None], [names["scores"]], last=names["pattern"])[names["scores"]]
            # As verify_scores: float32 scores of size 10, measured 1e-5.
            assert (whole - theirs[0, :, -1, seen.visible]).abs().max() < 1e-4


def test_a_logit_scale_takes_the_place_of_the_models_own():
    model = shared("bridge", "llama")
    scale = attention_view(model).raw(0).score_scale
    assert differ(measured(model, mode="key"), measured(model, mode="key", logit_scale=scale)) < 1e-12
    sharp = measured(model, mode="key", logit_scale=3 * scale)
    plain = measured(model, mode="key")
    assert (sharp["logit_std"] / plain["logit_std"]).to_numpy() == pytest.approx(3.0)
    assert differ(sharp, plain, ["exclusion_index"]) < 1e-12
    assert differ(sharp, plain, ["s_pos"]) > 1e-2
    pairs = measured(model, mode="key", per_frequency=True)
    assert differ(pairs, measured(model, mode="key", per_frequency=True, logit_scale=1.0)) == 0
    scaled = measured(model, mode="key", per_frequency=True, logit_scale=0.25)
    assert (scaled["logit_std"] / pairs["logit_std"]).to_numpy() == pytest.approx(0.25)


def test_scores_per_frequency_leave_the_scores_of_heads_as_they_are():
    view, prompt = attention_view(shared("bridge", "llama")), block_prompt()
    arguments = (view, prompt.prefix, prompt.blocks, [prompt.suffix])
    (alone,), (both,) = measure_queries(*arguments), measure_queries(*arguments, per_frequency=True)
    pd.testing.assert_frame_equal(alone.heads, both.heads)
    assert alone.frequencies is None
    assert alone.correlation == both.correlation


# --- several suffixes ---


def agreement_of_shared_prefill(model, mode, per_frequency):
    view = attention_view(model)
    pieces = [piece % view.d_vocab for piece in block_prompt().pieces]
    prompt = BlockPrompt(pieces[0], pieces[1:-1], pieces[-1])
    suffixes = [prompt.suffix, prompt.suffix.flip(0)[:2], prompt.suffix.flip(0), prompt.prefix[1:2]]
    options = {"mode": mode, "per_frequency": per_frequency, "exclude_first_block": False}
    options["swaps"] = [(0, 3), (1, 2), (2, 4)]
    together = measure_queries(view, prompt.prefix, prompt.blocks, suffixes, **options)
    assert len(together) == len(suffixes)
    worst = 0.0
    for suffix, found in zip(suffixes, together, strict=True):
        (alone,) = measure_queries(view, prompt.prefix, prompt.blocks, [suffix], **options)
        worst = max(worst, differ(found.heads, alone.heads))
        if per_frequency:
            worst = max(worst, differ(found.frequencies, alone.frequencies))
        worst = max(worst, float((found.last_logits - alone.last_logits).abs().max()))
        tokens = torch.cat([prompt.prefix, *prompt.blocks, suffix])
        logits = view.logits(tokens[None])[0, -1].detach().double()
        worst = max(worst, float((found.last_logits - logits).abs().max()))
    return worst


@every_model
def test_suffixes_that_share_a_prefill_are_measured_as_each_alone(backend, name):
    rotary = name not in WITHOUT_ROPE
    # float32 passes over parts of a prompt: measured 3e-5 (alpha_ess, of size 5). A shifted position, a wrong row of
    # the batch or a cache that grew under an earlier suffix moves scores by tenths.
    assert agreement_of_shared_prefill(shared(backend, name), "prompt", rotary) < 1e-3


@modes
def test_native_models_keep_no_cache_and_are_run_in_full(mode):
    assert agreement_of_shared_prefill(tiny("tiny-rope"), mode, True) < 1e-3


@pytest.mark.parametrize("name", ["gptj", "gemma3", "mistral", "bloom"])
def test_keys_of_a_shared_prefill_can_be_permuted(name):
    assert agreement_of_shared_prefill(shared("bridge", name), "key", name not in WITHOUT_ROPE) < 1e-3


def test_small_batches_give_what_large_ones_do(monkeypatch):
    view, prompt = attention_view(shared("bridge", "gemma2")), block_prompt()
    suffixes = [prompt.suffix, prompt.suffix.flip(0), zoo.prompt(1, 2)[0]]
    arguments = (view, prompt.prefix, prompt.blocks, suffixes)
    large = measure_queries(*arguments, per_frequency=True)
    sizes = []
    inner = QueryPasses.run

    def counted(self, contexts, reduce):
        sizes.append(len(contexts))
        return inner(self, contexts, reduce)

    monkeypatch.setattr(QueryPasses, "run", counted)
    measure_queries(*arguments, per_frequency=True)
    assert sizes == [1, 6]
    sizes.clear()
    monkeypatch.setattr("tlspectral.positional.passes._BYTES_AT_ONCE", 1)
    small = measure_queries(*arguments, per_frequency=True)
    assert sizes == [1] * 7
    for first, second in zip(large, small, strict=True):
        # float32 matrix products of other shapes: measured 2e-5.
        assert differ(first.heads, second.heads) < 1e-3
        assert differ(first.frequencies, second.frequencies) < 1e-3


@modes
def test_progress_counts_prompts(mode):
    view, prompt = attention_view(shared("bridge", "llama")), block_prompt()
    done = []
    suffixes = [prompt.suffix, prompt.suffix.flip(0)]
    measure_queries(
        view, prompt.prefix, prompt.blocks, suffixes, mode=mode, swaps=[(1, 2), (2, 3)], advance=done.append
    )
    assert sum(done) == 2 * 3


# --- windows ---


@modes
def test_heads_that_see_none_of_the_blocks_have_no_score(mode):
    # A window of 8: behind a suffix of 10 tokens no block is seen.
    table = measured(shared("bridge", "mistral"), block_prompt((3, 3, 3), suffix=10), mode=mode)
    assert table[["s_pos", "s_sym", "alpha_ess", "tau"]].isna().all().all()
    assert table["logit_std"].notna().all()
    assert table.attrs["correlation"]["pearson"] is None
    assert table.attrs["correlation"]["n_heads"] == 0
    json.dumps(table.attrs, allow_nan=False)
    alternating = measured(shared("bridge", "gemma2"), block_prompt((3, 3, 3), suffix=10), mode=mode)
    assert alternating.groupby("layer")["s_pos"].apply(lambda scores: scores.isna().all()).tolist() == [
        True, False, True, False,
    ]  # fmt: skip


# --- frequencies of their own ---


def test_heads_that_turn_at_frequencies_of_their_own_are_measured_with_them():
    base = shared("bridge", "qwen3")
    model, prompt = to_spectral(base), block_prompt()
    assert differ(measured(model, prompt), measured(base, prompt)) < 1e-9
    start = measured(model, prompt, mode="key", per_frequency=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1] in ("omega", "phase", "gain"):
                parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    for per_frequency in (False, True):
        words, keys = (measured(model, prompt, mode=mode, per_frequency=per_frequency) for mode in ("prompt", "key"))
        first = words["layer"] == 0
        assert differ(words[first], keys[first]) < 1e-5
    # Gains of its own change the size of what a pair adds, and frequencies its index, in every head.
    changed = (keys - start).abs().groupby(["layer", "head"])[["logit_std", "exclusion_index"]].max()
    assert (changed.loc[0] > 1e-3).all().all()
    assert agreement_of_shared_prefill(model, "prompt", True) < 1e-3


# --- heads whose kind is known ---


@functools.cache
def tiny(name):
    return tls.load_model(name, device="cpu")


def has_target(tokens):
    """Some blocks hold the query's token with what followed it, and others do not, so that there is what to follow."""
    found = (tokens[:120] == tokens[127]).reshape(15, 8)
    return 1 <= int(found.any(1).sum()) <= 7 and not bool(found[:, 7].any())


@functools.cache
def random_map_scores(name, mode="prompt", n_prompts=8):
    """Means over prompts of the task of the packaged models: 15 blocks of 8 tokens and 8 more, some of the swaps."""
    pairs = torch.combinations(torch.arange(15))
    drawn = RandomMapTask().sample(120, torch.Generator().manual_seed(0)).tokens
    kept = [tokens for tokens in drawn if has_target(tokens)]
    assert len(kept) >= n_prompts
    tables = []
    for number, tokens in enumerate(kept[:n_prompts]):
        swaps = pairs[torch.randperm(105, generator=torch.Generator().manual_seed(number))[:25]].tolist()
        prompt = BlockPrompt(tokens[:0], tokens[:120].split(8), tokens[120:])
        tables.append(measured(tiny(name), prompt, mode=mode, swaps=swaps))
    return pd.concat(tables).groupby(["layer", "head"]).mean()


@functools.cache
def previous_token_head(name):
    found = tls.detect_heads(tiny(name), n_sequences=50).set_index(["layer", "head"]).loc[0, "prev"]
    assert found.max() > 0.7
    return 0, int(found.idxmax())


@pytest.mark.parametrize("name", ["tiny-rope", "tiny-ape"])
def test_a_previous_token_head_stays_and_induction_heads_follow(name):
    scores = random_map_scores(name)
    below, above = scores.loc[previous_token_head(name)], scores.loc[1]
    # Three draws of 12 prompts: below 1.00 and .06 to .10; above .01 to .05 and .98 to 1.00 (rope), .07 to .17 and .91
    # to .98 (ape, whose keys change a little with their learned position).
    assert below["s_pos"] > 0.9 > 0.3 > below["s_sym"]
    assert (above["s_sym"] > (0.95 if name == "tiny-rope" else 0.8)).all()
    assert (above["s_pos"] < (0.1 if name == "tiny-rope" else 0.3)).all()


def test_permuted_keys_tell_the_same_of_a_rotary_model_and_nothing_of_learned_positions():
    rope, ape = random_map_scores("tiny-rope", "key"), random_map_scores("tiny-ape", "key")
    below = rope.loc[previous_token_head("tiny-rope")]
    assert below["s_pos"] > 0.9 > 0.3 > below["s_sym"]
    assert below["exclusion_index"] > 0.9
    assert (rope.loc[1, "s_sym"] > 0.9).all()
    assert (rope.loc[1, "exclusion_index"] < 0.05).all()
    # The previous-token head of the other model is positional too, but by positions that its keys carry.
    assert (ape["s_sym"] > 1 - 1e-12).all()
    assert (ape["exclusion_index"] == 0).all()


# --- the table ---


@modes
@pytest.mark.parametrize("per_frequency", [False, True])
def test_the_table_says_what_it_was_made_with(mode, per_frequency):
    model, prompt = shared("bridge", "llama"), block_prompt()
    table = positional_symbolic(
        model, prompt, mode=mode, per_frequency=per_frequency, tau=0.02, seed=3, show_progress=False
    )
    keys = ["layer", "head", "frequency"] if per_frequency else ["layer", "head"]
    assert list(table) == [*keys, *SCORES]
    assert table.index.equals(pd.RangeIndex(len(table)))
    assert table[keys].equals(table[keys].sort_values(keys))
    assert (table["tau"] == 0.02).all()
    assert table["alpha_ess"].between(1, 6).all()
    attrs = table.attrs
    json.dumps(attrs, allow_nan=False)
    expected = {"mode": mode, "tau": 0.02, "exclude_first_block": True, "logit_scale": None, "n_swaps": 6}
    expected |= {"n_blocks": 5, "n_tokens": 20, "seed": 3, "backend": "bridge", "per_frequency": per_frequency}
    assert {name: attrs[name] for name in expected} == expected
    # The correlation is over heads in both tables.
    assert attrs["correlation"]["n_heads"] == 8
    heads = positional_symbolic(model, prompt, mode=mode, tau=0.02, show_progress=False)
    assert attrs["correlation"]["pearson"] == pytest.approx(heads["s_pos"].corr(heads["s_sym"]), abs=1e-12)


def test_the_first_block_is_left_out_unless_asked_for():
    model, prompt = shared("bridge", "llama"), block_prompt()
    without = measured(model, prompt, exclude_first_block=True)
    chosen = measured(model, prompt, swaps=[(4, 1), (1, 2), (3, 1), (2, 3), (4, 2), (3, 4)])
    assert differ(without, chosen) == 0
    assert without.attrs["n_swaps"] == 6
    assert measured(model, prompt).attrs["n_swaps"] == 10
    assert differ(without, measured(model, prompt)) > 1e-2


def test_text_and_its_tokens_give_the_same(tmp_path):
    model = tls.load_model(str(zoo.save_folder("llama", tmp_path, tokenizer=True)))
    blocks = ["w10 w11 w12 ", "w13 w14 ", "w15 w16 ", "w17 w18 w19 "]
    text = BlockPrompt("<s> w4 w5 ", blocks, "w20 w21")
    assert measured(model, text).equals(measured(model, text.tokenized(model)))
    # Each piece is fine where it stands, but the last block has no space to end on when another follows it.
    uneven = BlockPrompt("<s> ", [*blocks[:3], "w17"], " w20 w21")
    with pytest.raises(ValueError, match=r"unequal token boundaries across a swap \(after blocks 0 and 3 swap\)"):
        measured(model, uneven)
    assert len(measured(model, uneven, mode="key")) == 8  # runs no swapped prompt


@pytest.mark.parametrize(
    ("backend", "name"), [("bridge", "gpt2"), ("bridge", "gptj"), pytest.param("hooked", "qwen2", marks=needs_hooked)]
)
def test_the_model_is_as_before(backend, name):
    model = getattr(zoo, backend)(name)
    view, prompt = attention_view(model), block_prompt()
    suffixes = [prompt.suffix, zoo.prompt()[0, :2]]  # together with a cache, which a bridge wires in its first pass
    evaluated = [
        [found.heads for found in measure_queries(view, prompt.prefix, prompt.blocks, suffixes, mode=mode)]
        for mode in ("prompt", "key")
    ]
    roots = (model, getattr(model, "original_model", model))
    for root in roots:
        root.train()
    training = [module.training for root in roots for module in root.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    names = list(model.hook_dict)
    forwards = [dict(module._forward_hooks) | dict(module._forward_pre_hooks) for module in model.modules()]
    for mode, expected in zip(("prompt", "key"), evaluated, strict=True):
        again = measure_queries(view, prompt.prefix, prompt.blocks, suffixes, mode=mode)
        # Dropout acts in training, in GPT-2 with 0.1.
        assert all(differ(first.heads, second) < 1e-9 for first, second in zip(again, expected, strict=True))
        assert differ(measured(model, prompt, mode=mode, exclude_first_block=True), expected[0]) < 1e-3
    assert [module.training for root in roots for module in root.modules()] == training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert list(model.hook_dict) == names
    assert all(not model.hook_dict[key].fwd_hooks for key in names)
    assert [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in model.modules()] == forwards
    assert all(parameter.grad is None for parameter in model.parameters())


@contextmanager
def hooked_with(model, name, change):
    with model.hooks(fwd_hooks=[(name, change)]):
        yield


def test_hooks_on_the_model_stay_in_force():
    model, prompt = shared("bridge", "llama"), block_prompt()
    intact = measured(model, prompt)
    with ablate(model, [(0, 1)], "output"):
        ablated = measured(model, prompt)
    below = intact["layer"] == 0
    assert differ(intact[below], ablated[below]) < 1e-5
    assert differ(intact[~below], ablated[~below]) > 1e-3


# --- refusals ---


@modes
def test_a_layer_that_is_not_reproduced_gives_no_table(mode):
    model = shared("bridge", "llama")
    name = attention_view(model).hook_names(1)["scores"]
    with (
        pytest.raises(ScoreMismatch, match="layer 1: the attention of the last query rebuilt"),
        hooked_with(model, name, lambda scores, hook: 1.01 * scores),
    ):
        measured(model, mode=mode)


def test_a_layer_read_with_another_scale_gives_no_table(monkeypatch):
    read = AttentionView.raw

    def wrong(self, index):
        found = read(self, index)
        object.__setattr__(found, "score_scale", 1.01 * found.score_scale)
        return found

    monkeypatch.setattr(AttentionView, "raw", wrong)
    with pytest.raises(ScoreMismatch, match="layer 0"):
        measured(shared("bridge", "gptj"), mode="key")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "keys"}, "mode must be one of 'prompt', 'key'; not 'keys'"),
        ({"tau": 0.0}, "tau must be positive"),
        ({"tau": -1.0}, "tau must be positive"),
        ({"tau": math.nan}, "tau must be positive"),
        ({"logit_scale": 0.0}, "logit_scale must be positive"),
        ({"swaps": [(1, 7)]}, "blocks are 0 to 4"),
        ({"swaps": [(0, 1)], "exclude_first_block": True}, "no swap is left"),
    ],
)
def test_settings_without_a_meaning_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message if "mode" not in options else "mode"):
        measured(shared("bridge", "llama"), **options)


def test_prompts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="context 128"):
        measured(shared("bridge", "llama"), block_prompt((40, 40, 50)))
    with pytest.raises(ValueError, match=r"rotary frequencies change beyond 32"):
        measured(zoo.bridge("phi3_longrope"), block_prompt((10, 10, 10)))
    with pytest.raises(ValueError, match="no suffix was given"):
        measure_queries(
            attention_view(shared("bridge", "llama")), *block_prompt().pieces[:1], block_prompt().blocks, []
        )


@pytest.mark.parametrize("name", WITHOUT_ROPE)
def test_without_rotary_positions_there_are_no_frequencies(name):
    with pytest.raises(UnsupportedArchitecture, match="no layer of this model has rotary positions"):
        measured(shared("bridge", name), per_frequency=True)


@modes
def test_a_model_that_shows_no_pattern_is_refused(mode):
    model = zoo.bridge("opt")
    model.original_model.set_attn_implementation("sdpa")  # transformers computes no pattern then
    with pytest.raises(UnsupportedArchitecture, match=r'layer 0: .*attn_implementation="eager"'):
        measured(model, mode=mode)
