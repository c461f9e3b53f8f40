"""Likeness of heads: bases that do not count, dense formulas, an exact null beside random turns, heads found again."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.heads.likeness import HEAD_LIKENESS, likeness_of
from tlspectral.heads.operators.factored import ov_operators
from tlspectral.models.opening import open_layers

KINDS = ["llama", "gpt2", "neox", *zoo.also_slow("qwen3", "deepseek_v3", "bloom", "gptj", "gemma2", "olmo2", "bert")]
D_HEAD = zoo.WIDTH // zoo.HEADS


def likeness(a, b=None):
    with open_layers(a) as of_a:
        if b is None:
            return likeness_of(of_a)
        with open_layers(b) as of_b:
            return likeness_of(of_a, of_b)


def dense(model):
    """M_t of all pairs and M_rest, and W_V W_O, of every head, as full matrices."""
    heads = {}
    for operator in tls.qk_operators(model):
        pairs = 0 if operator.rotary is None else operator.rotary.n_pairs
        phases = [operator.phase(t) for t in range(pairs)]
        by_pair = [torch.complex(one.re.dense(), one.im.dense()) for one in phases]
        rest = operator.dense() - sum((one.real for one in by_pair), torch.zeros_like(operator.dense()))
        output = ov_operators(model, operator.layer)[operator.head].dense()
        heads[f"L{operator.layer}H{operator.head}"] = torch.stack([*by_pair, rest.to(torch.complex128)]), output
    return heads


def cosine(x, y):
    """Re <x, y> over both norms, of stacks of matrices."""
    return float((x.conj() * y).sum().real / (x.abs().square().sum() * y.abs().square().sum()).sqrt())


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", KINDS)
def test_likeness_is_that_of_dense_matrices(name):
    model, other = zoo.shared("bridge", name), zoo.bridge(name, seed=1)
    of_a, of_b = dense(model), dense(other)
    within, between = tls.head_likeness(model), tls.head_likeness(model, other)
    assert len(within) == len(of_a) * (len(of_a) - 1) / 2
    assert len(between) == len(of_a) * len(of_b)
    for table, second in ((within, of_a), (between, of_b)):
        assert list(table) == [column.name for column in HEAD_LIKENESS.columns]
        for row in table.iloc[:: max(1, len(table) // 12)].itertuples():
            # Rounding of float64: measured 5e-16. Without the columns that do not rotate NeoX is off by .02.
            if not np.isnan(row.qk):
                assert row.qk == pytest.approx(cosine(of_a[row.a][0], second[row.b][0]), abs=1e-12)
            assert row.ov == pytest.approx(cosine(of_a[row.a][1], second[row.b][1]), abs=1e-12)


def turned(matrices, turn):
    """O M O^T of each matrix."""
    turn = turn.to(matrices.dtype)
    return turn @ matrices @ turn.T


def turns(n, draws, centred):
    """Random orthogonal matrices; under LayerNorm they leave the mean direction alone."""
    generator = zoo.generator(3)
    size = n - centred
    q, r = torch.linalg.qr(torch.randn(draws, size, size, dtype=torch.float64, generator=generator))
    q = q * r.diagonal(dim1=1, dim2=2).sign()[:, None]
    if not centred:
        return q
    basis = torch.linalg.qr(torch.cat([torch.ones(n, 1), torch.eye(n)[:, : n - 1]], dim=1).double()).Q[:, 1:]
    return basis @ q @ basis.T


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["neox", "gpt2", "llama"])
def test_the_null_is_that_of_random_turns_of_one_stream(name):
    """Partial rotation under LayerNorm, no rotation, grouped keys."""
    model = zoo.shared("bridge", name)
    heads, found = dense(model), likeness(model)
    names = list(heads)
    draws = 400
    drawn = turns(zoo.WIDTH, draws, centred=name != "llama")
    for i, j in ((0, 1), (0, len(names) - 1), (2, 4)):
        if found.shared_keys[i, j]:
            continue
        for place, what in ((0, "qk"), (1, "ov")):
            first, second = heads[names[i]][place], heads[names[j]][place]
            values = np.array([cosine(first, turned(second, turn)) for turn in drawn])
            sd = getattr(found, f"{what}_null_sd")[i, j]
            # Standard error of a standard deviation: .035 of it, for these tails some .05. A mean that is not taken
            # off, or pairings left out of the second moment, change it by a third and more.
            assert values.std() == pytest.approx(sd, rel=0.2)
            assert values.mean() == pytest.approx(getattr(found, f"{what}_mean")[i, j], abs=4 * sd / draws**0.5)


def test_heads_that_read_the_same_keys_are_turned_by_their_queries_alone():
    model = zoo.shared("bridge", "llama")
    found = likeness(model)
    assert found.shared_keys.sum() == 8  # two groups of two in each of two layers, either way round
    operators = tls.qk_operators(model)
    one, other = operators["L0H0"], operators["L0H1"]
    assert torch.equal(one.w_k, other.w_k)
    pairs = one.rotary.n_pairs
    outputs = ov_operators(model, 0)
    drawn = turns(zoo.WIDTH, 400, centred=False)
    values = {"qk": [], "ov": []}
    whole = dense(model)
    norms = [float((whole["L0H0"][k].norm() * whole["L0H1"][k].norm()).real) for k in (0, 1)]
    real, imag = one.rotary.real_index, one.rotary.imag_index
    q, other_q, k = (torch.complex(w[:, real], w[:, imag]) for w in (one.w_q, other.w_q, one.w_k))
    assert pairs == len(real)
    for turn in drawn:
        product = (q.conj() * (turn.to(q.dtype) @ other_q)).sum(0) * k.abs().square().sum(0)
        values["qk"].append(float(product.sum().real) / norms[0])
        values["ov"].append(float((outputs[0].dense() * (outputs[1].dense() @ turn)).sum()) / norms[1])
    for what, of_what in values.items():
        # As above. With both sides turned the standard deviation is a fifth.
        assert np.std(of_what) == pytest.approx(getattr(found, f"{what}_null_sd")[0, 1], rel=0.2)


def test_turns_of_many_pairs_agree_with_the_exact_spread():
    null = tls.head_likeness(zoo.shared("bridge", "gpt2"), draws=200, seed=1).attrs["null"]
    assert (null["draws"], null["pairs"]) == (200, 64)
    # Measured over eight seeds: .98 to 1.01. Heads paired with themselves by the null of shared keys gave .945.
    assert null["rms"] == pytest.approx(1, abs=0.04)
    assert 3 < null["largest"] < 8
    assert tls.head_likeness(zoo.shared("bridge", "gpt2"), draws=0).attrs["null"] is None


def attention(model, layer):
    return model.model.layers[layer].self_attn


def rows(head):
    return slice(head * D_HEAD, (head + 1) * D_HEAD)


def changed(edit):
    """The bridge of the small Llama in float64, and that of a copy that `edit` has changed."""
    models = [zoo.converted(zoo.hf_model("llama"), torch.float64) for _ in range(2)]
    with torch.no_grad():
        edit(models[1])
    return [zoo.wrapped(model) for model in models]


def other_basis(model):
    """Multiply each rotary pair by a complex factor, values and outputs by a matrix; operators stay the same."""
    generator = zoo.generator(5)
    for layer in range(2):
        of_layer = attention(model, layer)
        groups = len(of_layer.q_proj.weight) // len(of_layer.k_proj.weight)
        for key in range(len(of_layer.k_proj.weight) // D_HEAD):
            drawn = torch.randn(D_HEAD // 2, 2, dtype=torch.float64, generator=generator)
            factor = torch.view_as_complex(drawn)[:, None]
            basis = torch.randn(D_HEAD, D_HEAD, dtype=torch.float64, generator=generator)
            turn_pairs(of_layer.k_proj, 1 / factor.conj(), rows(key))
            of_layer.v_proj.weight[rows(key)] = basis.T @ of_layer.v_proj.weight[rows(key)]
            for query in range(key * groups, (key + 1) * groups):
                turn_pairs(of_layer.q_proj, factor, rows(query))
                outputs = of_layer.o_proj.weight[:, rows(query)]
                of_layer.o_proj.weight[:, rows(query)] = outputs @ torch.linalg.inv(basis).T


def turn_pairs(projection, factor, of_head):
    real, imag = projection.weight[of_head].clone().chunk(2)
    product = torch.complex(real, imag) * factor
    projection.weight[of_head] = torch.cat([product.real, product.imag])


def exchange_layers(model):
    """Heads of layer 0 in layer 1 and the other way round, and the heads of a group exchanged; norms are folded."""
    first, second = attention(model, 0), attention(model, 1)
    gains = [model.model.layers[layer].input_layernorm.weight.clone() for layer in range(2)]
    for one, other in ((first.q_proj, second.q_proj), (first.k_proj, second.k_proj), (first.v_proj, second.v_proj)):
        for side, target, read in ((one.weight.clone(), other, (0, 1)), (other.weight.clone(), one, (1, 0))):
            target.weight.copy_(side * gains[read[0]] / gains[read[1]])
    kept = first.o_proj.weight.clone()
    first.o_proj.weight.copy_(second.o_proj.weight)
    second.o_proj.weight.copy_(kept)
    swapped = first.q_proj.weight.clone()
    swapped[rows(0)], swapped[rows(1)] = first.q_proj.weight[rows(1)], first.q_proj.weight[rows(0)]
    first.q_proj.weight.copy_(swapped)


def test_the_basis_inside_the_weights_does_not_count():
    a, b = changed(other_basis)
    plain, found = likeness(a), likeness(a, b)
    assert np.diag(found.qk) == pytest.approx(1, abs=1e-12)
    # Rounding times the condition of the bases, some 50: measured 2e-15. Without conj() it is 1.3.
    np.testing.assert_allclose(found.qk, plain.qk, atol=1e-12)
    np.testing.assert_allclose(found.ov, plain.ov, atol=1e-12)


def test_heads_that_moved_are_found_again():
    a, b = changed(lambda model: (other_basis(model), exchange_layers(model)))
    table = tls.head_likeness(a, b, nearest=1).set_index("a")
    moved = {f"L{layer}H{head}": f"L{1 - layer}H{head}" for layer in range(2) for head in range(zoo.HEADS)}
    moved |= {"L1H0": "L0H1", "L1H1": "L0H0"}
    assert table["b"].to_dict() == moved
    assert table["qk"].to_numpy() == pytest.approx(1, abs=1e-12)


def test_pairs_are_matched_by_frequency():
    """The pairs of one model in another order, with their frequencies: the same function."""
    a, b = changed(reverse_pairs)
    assert (zoo.logits(a) - zoo.logits(b)).abs().max() < 1e-4  # tables of cos and sin are float32
    assert np.diag(likeness(a, b).qk) == pytest.approx(1, abs=1e-6)  # frequencies are float32


def reverse_pairs(model):
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.copy_(frequencies.flip(0))
    for layer in range(2):
        for projection in (attention(model, layer).q_proj, attention(model, layer).k_proj):
            for head in range(len(projection.weight) // D_HEAD):
                halves = projection.weight[rows(head)].clone().chunk(2)
                projection.weight[rows(head)] = torch.cat([half.flip(0) for half in halves])


def test_heads_of_other_frequencies_have_only_an_output_in_common():
    model = zoo.shared("bridge", "gemma3")  # local and global layers
    table = tls.head_likeness(model)
    operators = tls.qk_operators(model)
    for row in table.itertuples():
        one, other = operators[row.a].rotary, operators[row.b].rotary
        assert np.isnan(row.qk) == (not torch.allclose(one.theta, other.theta))
        assert np.isfinite(row.ov)
    assert 0 < table["qk"].isna().sum() < len(table)
    assert (table["rank"].isna() == table["qk"].isna()).all()
    assert (table["bilinear"] == "up_to_token_scale").all()


@pytest.mark.slow
def test_learned_frequencies_are_compared_head_by_head():
    base = zoo.bridge("llama")
    spectral = tls.to_spectral(base)
    assert np.diag(likeness(base, spectral).qk) == pytest.approx(1, abs=1e-6)
    dict(spectral.named_parameters())["spectral.1.log_omega_shift"].data[0] += 0.1
    found = np.diag(likeness(base, spectral).qk)
    assert np.isnan(found).any()
    assert found[: zoo.HEADS] == pytest.approx(1, abs=1e-6)


def test_the_nearest_heads_of_each_head():
    model = zoo.shared("bridge", "gpt2")
    table, nearest = tls.head_likeness(model), tls.head_likeness(model, nearest=np.int64(2))
    assert table["qk"].is_monotonic_decreasing
    assert table["rank"].tolist() == list(range(1, len(table) + 1))
    assert isinstance(table.index, pd.RangeIndex)
    assert nearest.groupby("a").size().eq(2).all()
    for head, rows_of_head in nearest.groupby("a"):
        of_head = table[(table["a"] == head) | (table["b"] == head)].head(2)
        assert rows_of_head["rank"].tolist() == of_head["rank"].tolist()
        assert rows_of_head["qk"].tolist() == of_head["qk"].tolist()


def test_a_head_without_weights_has_no_likeness():
    def silence(model):
        attention(model, 1).q_proj.weight[rows(0)] = 0

    _, b = changed(silence)
    table = tls.head_likeness(b)
    of_head = table.loc[(table["a"] == "L1H0") | (table["b"] == "L1H0")]
    assert of_head["qk"].isna().all()
    assert of_head["ov"].notna().all()


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"\(a\) has d_model 64 and .* \(b\) 48: heads can be compared only if"):
        tls.head_likeness(tls.load_model("tiny-rope"), zoo.shared("bridge", "llama"))
    for settings, words in (({"draws": -1}, "draws is how many"), ({"nearest": 0}, "nearest is how many")):
        with pytest.raises(ValueError, match=words):
            tls.head_likeness(zoo.shared("bridge", "llama"), **settings)


@pytest.mark.slow
def test_weight_files_are_read_without_loading(tmp_path):
    folder = zoo.save_folder("llama", tmp_path / "llama")
    table = tls.head_likeness(folder)
    expected = tls.head_likeness(zoo.shared("bridge", "llama"))
    pd.testing.assert_frame_equal(table, expected)
