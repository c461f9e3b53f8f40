"""`head_types`: planted heads are found, fresh models give uniform p, and scores are those of plainer routes."""

import functools

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
import transformers
import zoo
from described import assert_described
from planted_types import PLANTED, planted_bridge
from zoo import shared

import tlspectral as tls
from tlspectral.heads.types.attention import _fixed_queries, attention_scores, rotated_key_scores
from tlspectral.heads.types.kinds import CANDIDATES, TYPES
from tlspectral.heads.types.retrieval import FACTS, planted_facts, retrieved
from tlspectral.heads.types.sequences import scored_keys, two_texts
from tlspectral.heads.types.suppression import TOP, suppression_scores
from tlspectral.heads.types.table import claimed, measured_types
from tlspectral.models.attention import attention_view

QUICK = {"null_draws": 20, "show_progress": False}
ATTENTION_TYPES = [kind for kind in CANDIDATES if kind.queries is not None]


@functools.cache
def planted_table():
    # 128 rows and ten claims: p of one in 401 is enough, of one in 201 is not.
    return measured_types(planted_bridge(), CANDIDATES, null_draws=400, show_progress=False)


def test_planted_heads_are_found_and_nothing_else_is():
    table = planted_table()
    assert_described(table)
    claimed = table[table["claimed"]].groupby(["layer", "head"])["type"].agg(set).to_dict()
    assert claimed == PLANTED
    assert {kind for found in PLANTED.values() for kind in found} == {kind.name for kind in CANDIDATES}
    # Measured: .97 for retrieval, where heads that write no fact rank by what they attend to, .99 for the others.
    assert min(table.attrs["reliability"].values()) > 0.95
    assert not table["pvalue"].isna().any()


def test_types_whose_causal_check_failed_are_not_in_the_table():
    table = tls.head_types(shared("bridge", "llama"), **QUICK)
    assert_described(table)
    assert table.groupby(["layer", "head"])["type"].agg(list).iloc[0] == [kind.name for kind in TYPES]
    assert table.attrs["causal_check"] == {kind.name: kind.check for kind in TYPES}
    assert set(table.attrs["causal_check"].values()) <= {"passed", "unchecked"}
    assert table.attrs["causal_check"]["induction"] == "passed"


def test_a_claim_needs_q_an_effect_and_a_reliable_type():
    table = planted_table()
    reliability = table.attrs["reliability"]
    assert claimed(table, reliability).equals(table["claimed"])
    unsure = claimed(table, {**reliability, "self": 0.9, "induction": None})
    dropped = table["claimed"] & table["type"].isin(["self", "induction"])
    assert dropped.sum() == 4
    assert unsure.equals(table["claimed"] & ~dropped)
    assert not claimed(table.assign(qvalue=0.05), reliability).any()
    weak = table.assign(score=table["chance"] + 0.99 * table["type"].map(table.attrs["floors"]))
    assert not claimed(weak, reliability).any()


# --- calibration ---


def fresh(architecture, seed):
    """A freshly initialised bridge of 16 heads, as Hugging Face initialises it."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    if architecture == "LlamaForCausalLM":
        config = transformers.LlamaConfig(
            vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=8, max_position_embeddings=128, tie_word_embeddings=False, initializer_range=0.1,
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=8, n_positions=128)
    config._attn_implementation = "eager"
    config.architectures = [architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config).float().eval()
    return build_bridge_from_module(model, architecture, hf_config=config, tokenizer=None)


@pytest.mark.slow
def test_every_null_is_calibrated_on_freshly_initialised_models():
    """P-values of all heads of 20 models, against the uniform distribution.

    Measured distances: .031 to .074 over 320 heads a type, of which 5 % are above .076 where heads are independent;
    those of a model share draws and prompts. The same heads beside uniform attention, by a normal test over sequences:
    .56 for previous_token, because a random head is not indifferent to where a key stands.
    """
    tables, by_uniform = [], []
    for architecture in ("LlamaForCausalLM", "GPT2LMHeadModel"):
        for seed in range(10):
            model = fresh(architecture, seed)
            table = measured_types(model, CANDIDATES, null_draws=99, seed=seed, show_progress=False)
            assert not table["claimed"].any()
            tables.append(table)
            view = attention_view(model)
            sequences = two_texts(view, None, seed)
            keys = scored_keys(sequences.tokens, sequences.length, ATTENTION_TYPES[:1])
            uniform = 1 / torch.arange(3, 66)
            scores = attention_scores(view, sequences.tokens, keys)[0]
            z = (scores.mean(0) - float(uniform.mean())) / (scores.std(0, ddof=1) / np.sqrt(len(scores)))
            by_uniform += scipy.stats.norm.sf(z).tolist()
    heads = pd.concat(tables)
    spread = np.random.default_rng(0).random(len(heads)) / 100  # p are multiples of 1 / 100
    heads["pvalue"] -= spread
    for name, found in heads.groupby("type"):
        assert scipy.stats.kstest(found["pvalue"], "uniform").statistic < 0.12, name
        assert (found["pvalue"] <= 0.05).mean() < 0.10, name  # 5 %, standard error 1.2 % for independent heads
    assert scipy.stats.kstest(by_uniform, "uniform").statistic > 0.3


# --- the nulls ---


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma2", "bloom", "neox", "opt", "gptj"])
def test_a_head_read_through_its_own_frame_has_the_models_pattern(name):
    """W_K = F C: with its own F in place of a random frame, a null draw is the head itself."""
    view = attention_view(shared("bridge", name))
    tokens = zoo.prompt(2, 20)
    fixed = _fixed_queries(view, tokens)
    for index, layer in enumerate(fixed):
        names = view.hook_names(index)
        pattern = view.capture(tokens, [names["pattern"]], last=names["pattern"])[names["pattern"]]
        groups = layer.layer.n_heads // layer.layer.n_kv_heads
        for key_head, core in enumerate(layer.core):
            own = (layer.layer.w_k[key_head] @ torch.linalg.pinv(core.double())).float()
            # Orthonormal, as random frames are. Measured: 1e-4 in float32; a core of another head is off by 1.
            assert (own.T @ own - torch.eye(own.shape[1])).abs().max() < 1e-2
            heads = slice(key_head * groups, (key_head + 1) * groups)
            # Measured: 3e-6; another head's frame moves an entry by .1.
            torch.testing.assert_close(layer.pattern(own)[:, heads], pattern[:, heads], atol=5e-5, rtol=0)


def test_null_draws_depend_on_the_seed_alone_and_differ():
    view = attention_view(shared("bridge", "llama"))
    sequences = two_texts(view, None, 0)
    rows = sequences.first_rows(1)
    keys = scored_keys(sequences.tokens, sequences.length, ATTENTION_TYPES)[:, rows]
    first, again, other = (
        rotated_key_scores(view, sequences.tokens[rows], keys, draws=3, seed=seed, advance=lambda: None)
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3
    assert np.abs(first[0] - first[1]).max() > 1e-3


def test_an_ablated_model_is_refused():
    model = shared("bridge", "llama")
    with (
        tls.ablate(model, "L0H1", "antisymmetric"),
        pytest.raises(tls.errors.ScoreMismatch, match=r"layer 0: .*ablate"),
    ):
        tls.head_types(model, **QUICK)


# --- scores against plainer routes ---


def test_scores_of_attention_are_those_of_detect_heads():
    model = shared("bridge", "qwen2")
    view = attention_view(model)
    sequences = two_texts(view, None, 5)
    table = measured_types(model, CANDIDATES, seed=5, **QUICK)
    keys = scored_keys(sequences.tokens, sequences.length, ATTENTION_TYPES)
    for index, kind in enumerate(ATTENTION_TYPES):
        given = tls.detect_heads(model, prompts=sequences.tokens, pattern=keys[index].double())
        rows = table[table["type"] == kind.name]
        # Measured: 1e-8, batches of another size.
        np.testing.assert_allclose(rows["score"], given["pattern"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(rows["stderr"], given["pattern_se"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_copy_suppression_is_what_a_loop_over_queries_finds(name):
    model = shared("bridge", name)
    view = attention_view(model)
    tokens = zoo.prompt(3, 18, seed=4) % 20 + 3  # few ids, so that predicted tokens stand at several places
    found = suppression_scores(view, tokens, draws=2, seed=0)
    assert found is not None
    w_u, norm = view.unembedding()
    assert norm.gain is not None
    gain = norm.gain.detach().double()[:, None] * w_u.detach().double()
    gain = gain - gain.mean(0) if norm.kind == "LN" else gain
    centred = gain - gain.mean(1, keepdim=True)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    final = cache[f"blocks.{view.n_layers - 1}.hook_resid_post"].double()
    final = final - final.mean(-1, keepdim=True) if norm.kind == "LN" else final
    scale = (final.square().mean(-1) + norm.eps).sqrt()
    column = 0
    for layer in range(view.n_layers):
        residual, output = cache[f"blocks.{layer}.hook_resid_pre"].double(), view.output(layer)
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"].double()
        inputs = view.raw(layer).norm.normalized(residual)
        for head in range(view.n_heads(layer)):
            kv = head // (view.n_heads(layer) // len(output.w_v))
            for row in range(len(tokens)):
                ids, lost = tokens[row].tolist(), []
                for query in range(2, len(ids)):
                    logits = norm.normalized(residual[row, query]) @ gain
                    earlier = [token for token in ids[:query] if token != ids[query]]
                    best = max(earlier, key=lambda token: float(logits[token]))
                    if (logits > logits[best]).sum() >= TOP:
                        continue
                    written = torch.zeros(view.d_model, dtype=torch.float64)
                    for key in range(query):
                        if ids[key] == best:
                            read = inputs[row, key] @ output.w_v[kv] @ output.w_o[head]
                            written = written + pattern[row, head, query, key] * read
                    lost.append(-float(written @ centred[:, best] / scale[row, query]))
                assert lost
                # Measured: 1e-7 of scores of 1e-2, float32 against float64.
                assert found[0][row, column] == pytest.approx(np.mean(lost), abs=1e-5)
            column += 1


def test_retrieval_is_what_a_loop_over_prompts_finds():
    model = shared("bridge", "llama")
    view = attention_view(model)
    facts = planted_facts(view, None, 5, seed=1)
    assert facts is not None
    assert not facts.words
    scores = retrieved(view, facts)
    w_u, norm = view.unembedding()
    assert norm.gain is not None
    with torch.no_grad():
        _, cache = model.run_with_cache(facts.tokens)
    for row in range(5):
        for layer in range(view.n_layers):
            z = cache[f"blocks.{layer}.attn.hook_z"][row, -1].double().view(zoo.HEADS, -1)
            for head in range(zoo.HEADS):
                written = (z[head] @ view.output(layer).w_o[head] * norm.gain.detach().double()) @ w_u.detach().double()
                chosen = int(written[facts.says[row]].argmax())
                attention = cache[f"blocks.{layer}.attn.hook_pattern"][row, head, -1, facts.at[row, chosen]]
                expected = np.zeros(FACTS)
                expected[chosen] = float(attention)
                # Measured: 1e-8.
                np.testing.assert_allclose(scores[row, :, layer * zoo.HEADS + head], expected, rtol=0, atol=1e-6)


def test_planted_facts_ask_for_a_fact_that_stands_far_back():
    facts = planted_facts(attention_view(shared("bridge", "llama")), None, 40, seed=0)
    assert facts is not None
    for row, at, says, asked in zip(facts.tokens, facts.at, facts.says, facts.asked, strict=True):
        assert torch.equal(row[at], says)
        assert row[at[asked] - 2] == row[-2]
        assert (row[at - 1] == row[-1]).all()
        assert (row[at - 2] == row[-2]).sum() == 1
        assert len(row) - int(at[asked]) > 24
    assert torch.equal(facts.answer, facts.says[torch.arange(40), facts.asked])
    assert len(set(facts.asked.tolist())) == FACTS


# --- texts and refusals ---


def test_texts_of_a_model_with_a_tokenizer(tmp_path):
    model = tls.load_model(zoo.save_folder("llama", tmp_path, tokenizer=True))
    rng = np.random.default_rng(0)
    first, second = (" ".join(f"w{index}" for index in rng.integers(3, 97, 1100)) for _ in range(2))
    table = tls.head_types(model, texts=(first, second), **QUICK)
    assert table.attrs["texts"] == "given"
    swapped = tls.head_types(model, texts=(second, first), **QUICK)
    patterns = table["type"].isin([kind.name for kind in ATTENTION_TYPES])
    # Measured: 1e-9.
    np.testing.assert_allclose(table.loc[patterns, "score"], swapped.loc[patterns, "score"], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="texts are two documents"):
        tls.head_types(model, texts=first, **QUICK)
    with pytest.raises(ValueError, match="text 1 is too short: 16 segments of 63 tokens"):
        tls.head_types(model, texts=(first, "w3 w4 w5 w6 w7"), **QUICK)


def test_a_model_without_a_tokenizer_takes_random_ids_and_refuses_texts():
    model = shared("bridge", "llama")
    assert tls.head_types(model, **QUICK).attrs["texts"] == "random ids"
    with pytest.raises(ValueError, match="no tokenizer"):
        tls.head_types(model, texts=("one text", "another"), **QUICK)
    with pytest.raises(ValueError, match="null_draws is the number of draws"):
        tls.head_types(model, null_draws=0, show_progress=False)
