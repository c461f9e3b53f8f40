"""The p of `detect_heads`: planted heads have the least, and W_K is really rotated."""

import gc

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import zoo
from plain_detectors import marked_keys, scores_of
from zoo import shared

import tlspectral as tls
from tlspectral.algebra.nulls import haar_frame
from tlspectral.heads.detectors import heads as detectors_heads
from tlspectral.heads.detectors import rotated_keys
from tlspectral.heads.detectors.spread import MEASURES
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import capture_until

SMALL = {"n_sequences": 20, "segment_length": 7}
FOUR = ["prev", "dup", "ind", "prev_first"]
TOKENS, POSITIONS, D_HEAD = 60, 80, 80
WIDTH = 3 * D_HEAD  # a one-hot block for the token, one for the position, one for the token before
TOKEN, POSITION, BEFORE = 0, D_HEAD, 2 * D_HEAD


# --- planted heads ---


def planted_bridge():
    """A GPT-2 with an exact previous-token head L0H0 and an exact induction head L1H1; L1H2 has no keys."""
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_embd=WIDTH, n_inner=8, n_layer=2, n_head=3, n_positions=POSITIONS,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        config._attn_implementation = "eager"
        model = transformers.GPT2LMHeadModel(config).float()
        tokens, positions = torch.arange(TOKENS), torch.arange(POSITIONS)
        model.transformer.wte.weight.zero_()[tokens, TOKEN + tokens] = 1
        model.transformer.wpe.weight.zero_()[positions, POSITION + positions] = 1
        for block in model.transformer.h:
            block.mlp.c_proj.weight.zero_()
            block.attn.c_attn.weight.normal_(0, 0.1)
            block.attn.c_proj.weight.zero_()
        parts = [block.attn.c_attn.weight.view(WIDTH, 3, 3, D_HEAD) for block in model.transformer.h]

        def match(layer, head, of_query, of_key, rows, query_rows):
            parts[layer][:, :2, head] = 0
            parts[layer][of_query : of_query + len(rows), 0, head] = 2 * query_rows
            parts[layer][of_key : of_key + len(rows), 1, head] = 2 * rows

        places = torch.nn.functional.normalize(torch.randn(POSITIONS, D_HEAD), dim=1)
        match(0, 0, POSITION, POSITION, places, places.roll(1, 0))
        identity = torch.eye(TOKENS, D_HEAD)
        parts[0][:, 2, 0] = 0
        parts[0][TOKEN : TOKEN + TOKENS, 2, 0] = identity
        # 0.1 times what layer norm makes of 1 is about 1 again.
        model.transformer.h[0].attn.c_proj.weight[tokens, BEFORE + tokens] = 0.1
        match(1, 1, TOKEN, BEFORE, identity, identity)
        parts[1][:, 1, 2] = 0
    return zoo.wrapped(model.eval())


@pytest.mark.slow
def test_planted_heads_have_the_least_p_and_a_head_without_keys_the_largest():
    table = tls.detect_heads(planted_bridge(), n_sequences=20, segment_length=32, null_draws=199)
    rows = table.set_index(["layer", "head"])
    for pair, score in (((0, 0), "prev"), ((0, 0), "prev_first"), ((1, 1), "ind")):
        assert rows.loc[pair, score] > 0.95
        assert rows.loc[pair, f"{score}_p"] == table.attrs["p_floor"] == 1 / 200
    assert (rows.loc[(1, 2), [f"{score}_p" for score in FOUR]] == 1).all()
    # 3 of 24 scores are planted; of the others some 1 in 200 has the least p by chance.
    assert (table[[f"{score}_p" for score in FOUR]] == 1 / 200).to_numpy().sum() <= 5


# --- the same rotations in copies of the model ---


def without_mean(width):
    """An orthonormal basis of the vectors without mean, [width, width - 1]: the axes but the first, reflected."""
    to_first = np.full(width, width**-0.5) - np.eye(width)[0]
    basis = (np.eye(width) - 2 * np.outer(to_first, to_first) / (to_first @ to_first))[:, 1:]
    np.testing.assert_allclose(basis.sum(0), 0, atol=1e-12)
    return basis


def rotation(weight, frame):
    """An orthogonal matrix that takes Q of `weight` = Q R, R's diagonal positive, to the frame."""
    whole, factor = np.linalg.qr(weight, mode="complete")
    whole[:, : frame.shape[1]] *= np.sign(factor.diagonal()[: frame.shape[1]])
    target = np.linalg.qr(frame, mode="complete")[0]
    target[:, : frame.shape[1]] = frame
    made = target @ whole.T
    np.testing.assert_allclose(made @ made.T, np.eye(len(made)), atol=1e-12)
    return made


@torch.no_grad()
def with_rotated_keys(name, layer, draw, seed):
    """A bridge of a copy of a model of the zoo, W_K of one layer rotated behind the gain of the norm before it."""
    model = zoo.hf_model(name)
    if name == "gpt2":
        block = model.transformer.h[layer]
        gain, shift = (getattr(block.ln_1, one).double().numpy() for one in ("weight", "bias"))
        width = len(gain)
        stored = block.attn.c_attn.weight[:, width : 2 * width]
        basis = without_mean(width)
    else:
        block = model.model.layers[layer]
        stored = block.self_attn.k_proj.weight.T
        width = len(stored)
        gain = block.input_layernorm.weight.double().numpy() if hasattr(block, "input_layernorm") else np.ones(width)
        basis = np.eye(width)
    before = stored.double().numpy().copy()
    folded = basis @ basis.T @ (gain[:, None] * before)
    # OLMo 2 divides the keys of all heads by one norm, so that one rotation moves them all.
    d_head = folded.shape[1] if name == "olmo2" else zoo.bridge(name).cfg.d_head
    for start in range(0, folded.shape[1], d_head):
        one = folded[:, start : start + d_head]
        frame = basis @ haar_frame(basis.shape[1], d_head, [seed, layer, draw]).numpy()
        folded[:, start : start + d_head] = rotation(one, frame) @ one
    stored.copy_(torch.from_numpy(folded / gain[:, None]))
    if name == "gpt2":  # what the norm's bias adds to the keys stays
        block.attn.c_attn.bias[width : 2 * width] += torch.from_numpy(shift @ (before - folded / gain[:, None])).float()
    return zoo.wrapped(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prompts"), [("gpt2", True), ("olmo2", False), *zoo.also_slow(("llama", False), ("qwen3", True))]
)
def test_p_counts_copies_of_the_model_whose_keys_are_rotated(name, prompts):
    draws, seed = 4, 3
    model = zoo.bridge(name)
    rng = torch.Generator().manual_seed(0)
    if prompts:  # of unequal length, few ids; two more than are compared
        rows = [torch.randint(3, 8, (6 + index % 5,), generator=rng) for index in range(18)]
        given = {"prompts": rows}
    else:
        segments = torch.randint(3, 90, (18, 7), generator=rng)
        rows = list(torch.cat([torch.zeros(18, 1, dtype=torch.long), segments, segments], dim=1))
        given = {"prompts": torch.stack(rows)}
    two_back = lambda row: torch.eye(len(row)).roll(2, 0).tril(-1)  # noqa: E731
    table = tls.detect_heads(model, **given, pattern=two_back, null_draws=draws, seed=seed)
    rows = rows[:16]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    all_marked = [marked_keys(row.tolist(), prompts=prompts) for row in rows]
    for marked, row in zip(all_marked, rows, strict=True):
        marked["pattern"] = {query: [query - 2] for query in range(2, len(row))}

    def of_layer(bridge, layer):
        with torch.no_grad():
            _, cache = bridge.run_with_cache(padded)
        patterns = cache[f"blocks.{layer}.attn.hook_pattern"].double().numpy()
        found = [scores_of(pattern, marked) for pattern, marked in zip(patterns, all_marked, strict=True)]
        return {score: np.nanmean([one[score] for one in found], axis=0) for score in found[0]}

    differ = 0
    for layer in range(model.cfg.n_layers):
        observed = of_layer(model, layer)
        copies = [of_layer(with_rotated_keys(name, layer, draw, seed), layer) for draw in range(draws)]
        for score, values in observed.items():
            expected = (1 + sum(one[score] >= values for one in copies)) / (1 + draws)
            np.testing.assert_array_equal(table.loc[table["layer"] == layer, f"{score}_p"], expected)
            differ += len(set(expected))
    assert differ > 10
    assert table.attrs["null_sequences"] == 16
    assert table.attrs["null_draws"] == draws


@pytest.mark.parametrize("name", ["bloom", "gemma2", "neox", "opt", "mistral"])
def test_a_head_read_through_its_own_frame_has_the_models_pattern(name):
    """ALiBi, softcap, partial rotation, windows: with Q of W_K = Q R in place of a frame, a draw is the head itself."""
    view, tokens = attention_view(shared("bridge", name)), zoo.prompt(2, 20)
    for index in range(view.n_layers):
        names = view.hook_names(index)
        captured = capture_until(view, tokens, names.values(), last=names["pattern"])
        pattern = captured.pop(names["pattern"])
        fixed, observed = rotated_keys._fixed_queries(view, index, captured, pattern)
        # Measured: 8e-7, float32 against float64; a masked key or another head's frame moves an entry by .1.
        torch.testing.assert_close(observed.float(), pattern, atol=1e-5, rtol=0)
        folded, dimension = fixed.layer.w_k, fixed.n.shape[-1]
        folded = folded if dimension == view.d_model else torch.from_numpy(without_mean(view.d_model).T) @ folded
        groups = fixed.layer.n_heads // fixed.layer.n_kv_heads
        for key_head, core in enumerate(fixed.core):
            own = (folded[key_head] @ torch.linalg.inv(core.double())).float()
            torch.testing.assert_close(own.T @ own, torch.eye(len(core)), atol=1e-5, rtol=0)  # measured: 4e-7
            heads = slice(key_head * groups, (key_head + 1) * groups)
            torch.testing.assert_close(fixed.pattern(own)[:, heads], pattern[:, heads], atol=1e-5, rtol=0)


# --- the table ---


@pytest.mark.slow
def test_the_scores_are_those_without_a_null_and_every_score_has_a_p():
    model = shared("bridge", "llama")
    eye = torch.eye(15)
    for given in (SMALL | {"pattern": eye}, {"prompts": zoo.prompt(5, 15), "pattern": eye}):
        plain, table = (tls.detect_heads(model, **given, null_draws=draws) for draws in (0, 3))
        pvalues = [column for column in table if column.endswith("_p")]
        scored = [column.removesuffix("_se") for column in plain if column.endswith("_se")]
        assert [column.removesuffix("_p") for column in pvalues] == [name for name in scored if name not in MEASURES]
        pd.testing.assert_frame_equal(table.drop(columns=pvalues), plain, check_exact=True)
        assert plain.attrs.items() <= table.attrs.items()
        assert table[pvalues].isin([0.25, 0.5, 0.75, 1.0]).all(axis=None)
        again = tls.detect_heads(model, **given, null_draws=3)
        pd.testing.assert_frame_equal(table, again, check_exact=True)


def test_a_score_without_a_compared_sequence_has_no_p_and_one_that_cannot_vary_has_one():
    model = shared("bridge", "gpt2")
    rows = [torch.arange(3, 13) + first for first in range(16)]
    rows += [torch.tensor([first, 6, first, 6]) for first in (4, 5)]
    every_key = lambda row: torch.ones(len(row), len(row)).tril()  # noqa: E731
    table = tls.detect_heads(model, prompts=rows, pattern=every_key, null_draws=9)
    assert table["dup"].notna().all()
    assert table["dup_p"].isna().all()
    # All keys together get 1 up to rounding, in the model as in the draws.
    assert (table["pattern_p"] == 1).all()


@pytest.mark.slow
@zoo.needs_hooked
def test_both_backends_have_the_same_p_and_long_prompts_are_compared_as_far_as_they_fit(monkeypatch):
    monkeypatch.setattr(detectors_heads, "_NULL_TOKENS", 50)
    bridge, hooked = (tls.detect_heads(shared(one, "gpt2"), **SMALL, null_draws=19) for one in ("bridge", "hooked"))
    for score in FOUR:
        assert bridge[f"{score}_p"].equals(hooked[f"{score}_p"])
    assert bridge.attrs["null_sequences"] == 3  # of 15 tokens


def test_memory_grows_neither_with_draws_nor_with_layers(monkeypatch):
    """At a draw the tensors of one layer are alive, whichever draw and layer it is."""
    model, alive = shared("bridge", "llama"), []

    def counted(*arguments):
        # type() and not isinstance(), which would wake the lazy objects of other packages.
        tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        attention = sum(one.shape[-2:] == (15, 15) for one in tensors)
        alive.append((sum(one.untyped_storage().nbytes() for one in tensors), attention))
        return haar_frame(*arguments)

    monkeypatch.setattr(rotated_keys, "haar_frame", counted)
    tls.detect_heads(model, **SMALL, null_draws=20)
    held, attention = np.array(alive).reshape(2, 20, 2)[:, 1:].transpose(2, 0, 1)
    assert (held == held[:, :1]).all()
    assert (attention == attention[0, 0]).all()


# --- refusals ---


def test_attention_that_is_not_that_of_the_weights_has_no_null():
    model = shared("bridge", "llama")
    with tls.ablate(model, "L1H1", "antisymmetric"):
        assert tls.detect_heads(model, **SMALL)["prev"].notna().all()
        with pytest.raises(tls.errors.ScoreMismatch, match=r"layer 1: .*ablate.*null_draws=0"):
            tls.detect_heads(model, **SMALL, null_draws=2)
    assert tls.detect_heads(model, **SMALL, null_draws=2)["prev_p"].notna().all()
    with pytest.raises(ValueError, match=r"null_draws is how many draws the null has, 0 for no null, .*; found -1"):
        tls.detect_heads(model, **SMALL, null_draws=-1)
