"""Composition scores against dense d x d products; their order, their level by chance, and heads that have none."""

import numpy as np
import pandas as pd
import pytest
import zoo
from reference_circuits import NAMES, bridge, edited, reference

import tlspectral as tls
from tlspectral.errors import BadHead
from tlspectral.heads.composition import K_COMPOSITION
from tlspectral.models.reading import attention_view
from tlspectral.selection.node_names import Receiver


def dense_scores(dense, layer, head, kind):
    target = dense.layers[layer]
    qk, ov = target.qk[head], target.ov[head]
    scores = {}
    for earlier in range(layer):
        for at, source in enumerate(dense.layers[earlier].ov):
            operator = {"k": qk, "q": qk.T, "v": ov}[kind]
            product = source @ operator if kind == "v" else operator @ source.T
            scores[earlier, at] = np.linalg.norm(product) / (np.linalg.norm(operator) * np.linalg.norm(source))
    return scores


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", ["k", "q", "v"])
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_the_dense_operators(name, kind):
    dense, last = reference(name), len(reference(name).layers) - 1
    for head in range(len(dense.layers[last].qk)):
        table = tls.k_composition(bridge(name), f"L{last}H{head}.{kind}")
        expected = dense_scores(dense, last, head, kind)
        found = table.set_index(["layer", "head"])["score"]
        assert set(found.index) == set(expected)
        for at, score in expected.items():
            # Measured: 1e-15 relative. A gain or a centring left out moves scores by 1e-3 and more.
            assert found[at] == pytest.approx(score, rel=1e-10)


@pytest.mark.fast(1)
@pytest.mark.parametrize("head", [(1, 2), (3, 0)])
def test_the_table_ranks_all_heads_of_all_earlier_layers(head):
    table = tls.k_composition(bridge("gemma3"), head)
    for keys in (f"l{head[0]}h{head[1]}.k", Receiver(*head, "k"), (head[0] - 4, head[1]), f"{head[0]}.{head[1]}"):
        pd.testing.assert_frame_equal(table, tls.k_composition(bridge("gemma3"), keys))
    assert isinstance(table.index, pd.RangeIndex)
    pairs = list(zip(table["layer"], table["head"], strict=True))
    assert sorted(pairs) == [(layer, head) for layer in range(head[0]) for head in range(zoo.HEADS)]
    assert table["score"].is_monotonic_decreasing
    assert table["rank"].tolist() == list(range(1, 1 + len(pairs)))
    assert (table["chance"] == zoo.WIDTH**-0.5).all()
    assert table["score"].between(0, 1).all()


# LayerNorm; grouped keys; local and global layers with a query/key norm; one head of keys for all; latents. Slow:
# parallel blocks, ALiBi, layers without rotary positions, a norm behind the attention, keys as values, an encoder.
@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "llama", "gemma3", "falcon", "deepseek_v3"),
        *zoo.also_slow("neox", "bloom", "smollm3", "olmo2", "gemma4", "glm4_lite", "bert"),
    ],
)
def test_all_pairs_have_the_numbers_of_a_call_for_each_receiver(name):
    model = zoo.shared("bridge", name)
    pairs, view = tls.k_composition(model), attention_view(model)
    single = [
        tls.k_composition(model, (layer, head)).assign(
            receiver=f"L{layer}H{head}.k", receiver_layer=layer, receiver_head=head
        )
        for layer in view.layers
        for head in range(view.n_heads(layer))
    ]
    assert len(pairs) == model.cfg.n_heads**2 * sum(range(len(view.layers)))
    columns = [column.name for column in K_COMPOSITION.columns]
    expected = pd.concat([one for one in single if len(one)], ignore_index=True)[columns]
    # Measured: 8e-16 relative. A head taken for another, or a gain left out, moves scores by 1e-3 and more.
    pd.testing.assert_frame_equal(pairs, expected, rtol=1e-12, atol=0)
    assert pairs.attrs == single[-1].attrs


def test_all_pairs_of_one_layer_are_none():
    def first_layer(model):
        del model.model.layers[1:]

    pairs = tls.k_composition(edited("llama", first_layer))
    assert pairs.empty
    assert list(pairs)[3:6] == ["receiver", "receiver_layer", "receiver_head"]


def test_ties_stand_in_the_order_of_layers_and_heads():
    def same_outputs(model):
        """Value and output weights of layers 0 and 1 are alike, and within them those of all heads."""
        first = model.model.layers[0]
        for layer in model.model.layers[:2]:
            layer.input_layernorm.weight.fill_(1.0)
            for name in ("v_proj", "o_proj"):
                getattr(layer.self_attn, name).weight.copy_(getattr(first.self_attn, name).weight)
            values, outputs = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
            k = len(values) // model.config.num_key_value_heads
            values.copy_(values[:k].repeat(len(values) // k, 1))
            outputs.copy_(outputs[:, :k].repeat(1, outputs.shape[1] // k))

    model = edited("smollm3", same_outputs)
    table = tls.k_composition(model, (2, 1))
    pairs = tls.k_composition(model).query("receiver == 'L2H1.k'").reset_index(drop=True)
    pd.testing.assert_frame_equal(pairs[[*table]], table)
    assert table["score"].nunique() == pairs["score"].nunique() == 1
    assert list(zip(table["layer"], table["head"], strict=True)) == [(i, j) for i in range(2) for j in range(4)]
    assert table["rank"].tolist() == list(range(1, 9))


def test_a_planted_pair_scores_far_above_chance():
    """A head that writes into the directions its successor's keys read."""

    def plant(model):
        first, second = model.model.layers
        second.input_layernorm.weight.fill_(1.0)
        k = second.self_attn.k_proj.weight.shape[0] // 2
        # Head 2 of layer 0 writes what key head 1 (read by heads 2 and 3) reads.
        first.self_attn.o_proj.weight[:, 2 * k : 3 * k] = second.self_attn.k_proj.weight[k:].T

    model = edited("llama", plant)
    for head in (2, 3):
        table = tls.k_composition(model, (1, head))
        assert (table.loc[0, "layer"], table.loc[0, "head"]) == (0, 2)
        # k = 12 shared directions of unlike sizes: 1/sqrt(12) and more, against a chance of 0.144.
        assert table.loc[0, "score"] > 1 / np.sqrt(12)
        assert table.loc[1, "score"] < 0.25
    assert (tls.k_composition(model, (1, 0))["score"] < 0.25).all()


def test_a_head_that_writes_nothing_comes_last_and_one_that_reads_nothing_or_is_in_layer_0_has_no_scores():
    def silence(model):
        model.model.layers[0].self_attn.o_proj.weight[:, 12:24] = 0  # head 1
        model.model.layers[1].self_attn.q_proj.weight[:12] = 0  # head 0

    model = edited("llama", silence)
    table = tls.k_composition(model, (1, 1))
    assert table["head"].tolist()[-1] == 1
    assert table["score"].isna().tolist() == [False, False, False, True]
    assert tls.k_composition(model, (1, 0))["score"].isna().all()
    first = tls.k_composition(model, (0, 1))
    assert list(first) == ["layer", "head", "name", "score", "chance", "rank"]
    assert first.empty


MISSING = r"does not exist: (the model has layers 0 to 1|layer . has heads 0 to 3)"


@pytest.mark.parametrize(
    ("receiver", "words"),
    [
        *((receiver, MISSING) for receiver in ("L2H0", "L-3H0.v", (1, 4), Receiver(1, 4, "v"), (1, -5))),
        ("L1KV0.k", "L1KV0 is a key/value group of 2 heads, and here one head is needed: name one of L1H0, L1H1"),
        ("L1H0.o", "'L1H0.o' names no head"),
        ("L1.k", "'L1.k' names no receiver"),
        ("L1", "'L1' is a whole layer"),
    ],
)
def test_what_is_no_receiver_is_refused(receiver, words):
    with pytest.raises(BadHead, match=words):
        tls.k_composition(bridge("llama"), receiver)
