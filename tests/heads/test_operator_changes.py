"""How far operators of two models differ: exact zeros, dense formulas, bases that do not count, what lies outside."""

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import zoo
from families import save

import tlspectral as tls
from tlspectral.heads.operator_changes import _settings_that_differ, operator_changes
from tlspectral.heads.operators.factored import ov_operators
from tlspectral.models.opening import open_layers
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.alibi import Alibi


def changes(a, b):
    with open_layers(a) as layers_of_a, open_layers(b) as layers_of_b:
        return operator_changes(layers_of_a, layers_of_b)


def named(found):
    return found.table.set_index(["layer", "head"])


def attention(model, layer=1):
    """The attention of a layer of a model of transformers."""
    return model.model.layers[layer].self_attn


def head_rows(head, d_head=None):
    d_head = d_head or zoo.WIDTH // zoo.HEADS
    return slice(head * d_head, (head + 1) * d_head)


def edited(name, edit, *, dtype=torch.float32):
    """The bridge of a model of the zoo, and that of a copy that `edit` has changed."""
    made = [zoo.converted(zoo.hf_model(name), dtype) for _ in range(2)]
    with torch.no_grad():
        edit(made[1])
    return [zoo.wrapped(model) for model in made]


KINDS = ["gpt2", "llama", "neox", *zoo.also_slow("qwen3", "deepseek_v3", "bloom", "gptj", "olmo2", "gemma2")]


@pytest.mark.parametrize("name", KINDS)
def test_a_model_differs_from_itself_by_exactly_zero(name):
    model = zoo.shared("bridge", name)
    found = changes(model, model)
    assert (found.table[["qk_change", "ov_change"]] == 0).all(axis=None)
    assert found.outside == {}
    assert found.likeness == pytest.approx(dict.fromkeys(found.likeness, 1.0), abs=1e-9)


def dense_operators(model, layer, head):
    """Every M_t and M_rest of a head as complex matrices, and its OV, from the factors that the package hands out."""
    operator = tls.qk_operators(model)[layer, head]
    pairs = 0 if operator.rotary is None else operator.rotary.n_pairs
    phases = [operator.phase(t) for t in range(pairs)]
    by_pair = [torch.complex(one.re.dense(), one.im.dense()) for one in phases]
    rest = operator.dense() - sum((one.real for one in by_pair), torch.zeros_like(operator.dense()))
    return [*by_pair, rest], ov_operators(model, layer)[head].dense()


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", KINDS)
def test_changes_are_those_of_dense_matrices(name):
    """Of two models that share an embedding, and no other weight."""
    a, b = zoo.hf_model(name), zoo.hf_model(name, seed=1)
    with torch.no_grad():
        b.get_input_embeddings().weight.copy_(a.get_input_embeddings().weight)
    a, b = zoo.wrapped(a), zoo.wrapped(b)
    found = named(changes(a, b))
    for layer, head in (found.index.tolist()[0], found.index.tolist()[-1]):
        (qk_a, ov_a), (qk_b, ov_b) = (dense_operators(model, layer, head) for model in (a, b))
        difference = sum(float((of_b - of_a).abs().square().sum()) for of_a, of_b in zip(qk_a, qk_b, strict=True))
        expected = (difference / sum(float(one.abs().square().sum()) for one in qk_a)) ** 0.5
        # Rounding of float64: measured 4e-15. Without the part that does not rotate NeoX is off by .1.
        assert found.loc[(layer, head), "qk_change"] == pytest.approx(expected, rel=1e-12)
        expected = float((ov_b - ov_a).norm() / ov_a.norm())
        assert found.loc[(layer, head), "ov_change"] == pytest.approx(expected, rel=1e-12)


def test_one_redrawn_head_alone_has_changed():
    def redraw(model):
        attention(model).q_proj.weight[head_rows(2)].normal_(generator=zoo.generator(3))

    found = changes(*edited("llama", redraw))
    table = named(found)
    assert table.index[table["qk_change"] > 0].tolist() == [(1, 2)]
    assert table.loc[(1, 2), "qk_change"] > 1
    assert (table["ov_change"] == 0).all()
    assert found.outside == {}


def test_a_change_of_phase_is_seen_that_leaves_m_as_it_was():
    def conjugate(model):
        for projection in (attention(model).q_proj, attention(model).k_proj):
            for head in range(len(projection.weight) // d_head):
                projection.weight[head_rows(head)][d_head // 2 :].neg_()

    d_head = zoo.WIDTH // zoo.HEADS
    a, b = edited("llama", conjugate)
    ops = [tls.qk_operators(model) for model in (a, b)]
    table = named(changes(a, b))
    for head in range(zoo.HEADS):
        assert torch.equal(ops[0][1, head].dense(), ops[1][1, head].dense())
        # M_t becomes its conjugate, so that the difference is 2 Im M_t.
        phases = [ops[0][1, head].phase(t) for t in range(d_head // 2)]
        imaginary, real = (sum(getattr(one, part).norm() ** 2 for one in phases) for part in ("im", "re"))
        expected = 2 * (imaginary / (imaginary + real)) ** 0.5
        assert table.loc[(1, head), "qk_change"] == pytest.approx(expected, rel=1e-12)
        assert expected > 0.5
    assert (table.loc[0, ["qk_change", "ov_change"]] == 0).all(axis=None)
    assert (zoo.logits(a) - zoo.logits(b)).abs().max() > 0.01


def rotated_pairs(projection, factor, rows):
    """Multiply the complex pairs of some rows of a projection, (t, t + d_head / 2), by a complex factor each."""
    real, imag = projection.weight[rows].clone().chunk(2)
    turned = torch.complex(real, imag) * factor[:, None]
    projection.weight[rows] = torch.cat([turned.real, turned.imag])


def test_another_basis_of_the_same_operators_is_no_change():
    """Complex factors per pair commute with rotation; of values and outputs any invertible matrix will do."""
    d_head = zoo.WIDTH // zoo.HEADS
    drawn = torch.randn(d_head // 2, 2, dtype=torch.float64, generator=zoo.generator(5))
    factor = torch.view_as_complex(drawn)
    basis = torch.randn(d_head, d_head, dtype=torch.float64, generator=zoo.generator(6))

    def turn(model):
        layer = attention(model)
        groups = len(layer.q_proj.weight) // len(layer.k_proj.weight)
        for head in range(len(layer.k_proj.weight) // d_head):
            rotated_pairs(layer.k_proj, 1 / factor.conj(), head_rows(head))
            layer.v_proj.weight[head_rows(head)] = basis.T @ layer.v_proj.weight[head_rows(head)]
            for query in range(head * groups, (head + 1) * groups):
                rotated_pairs(layer.q_proj, factor, head_rows(query))
                columns = layer.o_proj.weight[:, head_rows(query)]
                layer.o_proj.weight[:, head_rows(query)] = columns @ torch.linalg.inv(basis).T

    a, b = edited("llama", turn, dtype=torch.float64)
    assert (attention_weights(a) - attention_weights(b)).abs().max() > 0.1
    # Rounding of float64 times the condition of the basis, some 50: measured 2e-15. Without conj() it is 1.3.
    assert changes(a, b).table[["qk_change", "ov_change"]].max(axis=None) < 1e-12


def attention_weights(model):
    return model.blocks[1].attn.q.original_component.weight


@zoo.needs_hooked
@pytest.mark.parametrize("name", ["gpt2", *zoo.also_slow("llama", "neox")])
def test_how_a_model_was_loaded_is_no_change(name):
    """A HookedTransformer with folded norms and centred weights, beside the bridge of the raw model."""
    found = changes(zoo.shared("bridge", name), zoo.hooked(name))
    # TransformerLens folds in float32: measured 2e-7. A gain that is left out gives .2.
    assert found.table[["qk_change", "ov_change"]].max(axis=None) < 2e-6
    assert found.outside == {}


@pytest.mark.slow
def test_files_are_compared_without_loading_them(tmp_path):
    base = zoo.save_folder("llama", tmp_path / "base")
    model = zoo.hf_model("llama")
    with torch.no_grad():
        attention(model).o_proj.weight[:, head_rows(3)] *= 1.25
    model.save_pretrained(tmp_path / "tuned")
    files = [tls.load_model(folder, weights="files") for folder in (base, tmp_path / "tuned")]
    table = named(operator_changes(*files))
    assert table.loc[(1, 3), "ov_change"] == pytest.approx(0.25, rel=1e-6)  # float32: measured 1e-8
    assert table["ov_change"].drop((1, 3)).max() == 0
    assert (table["qk_change"] == 0).all()
    mixed = operator_changes(files[0], attention_view(zoo.shared("bridge", "llama")))
    assert (mixed.table[["qk_change", "ov_change"]] == 0).all(axis=None)
    assert set(mixed.likeness) == {"qk", "ov"}


def test_rounding_to_16_bits_is_a_small_change_and_reported():
    table = changes(*edited("llama", lambda model: None)).table
    assert (table["qk_change"] == 0).all()
    rounded = zoo.wrapped(zoo.converted(zoo.hf_model("llama"), torch.bfloat16))
    table = changes(zoo.shared("bridge", "llama"), rounded).table
    # Steps of bfloat16 are 2^-8 of a number, so a factor moves by some .0017 (RMS) and a product by .0024.
    assert table[["qk_change", "ov_change"]].min(axis=None) > 0.0005
    assert table[["qk_change", "ov_change"]].max(axis=None) < 0.01


def test_a_head_without_weights():
    def silence(model):
        attention(model).q_proj.weight[head_rows(0)] = 0

    a, b = edited("llama", silence)
    assert named(changes(a, b)).loc[(1, 0), "qk_change"] == 1
    assert named(changes(b, a)).loc[(1, 0), "qk_change"] == np.inf
    assert np.isnan(named(changes(b, b)).loc[(1, 0), "qk_change"])


# --- what no operator holds ---


def with_config(name, **settings):
    model = zoo.hf_model(name)
    made = type(model)(copy.deepcopy(model.config))
    for key, value in settings.items():
        setattr(made.config, key, value)
    made = type(model)(made.config).eval()
    made.load_state_dict(model.state_dict())
    made.config._attn_implementation = "eager"
    return zoo.wrapped(made)


def biased(model, key=False):
    bias = attention(model, 0).k_proj.bias if key else attention(model, 0).q_proj.bias
    bias[head_rows(0)] += 1


def test_a_changed_rotary_base_is_said_though_no_operator_changed():
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    found = changes(zoo.shared("bridge", "llama"), with_config("llama", **theta))
    assert (found.table["qk_change"] == 0).all()
    assert found.outside == {"rotary frequencies": [0, 1]}


@pytest.mark.fast(1)
@pytest.mark.parametrize("key", [False, True])
def test_biases_of_queries_and_keys_lie_outside_of_operators(key):
    found = changes(*edited("qwen2", functools.partial(biased, key=key)))
    assert (found.table["qk_change"] == 0).all()
    assert found.outside == {"biases of queries and keys": [0]}


def test_slopes_of_alibi_a_softcap_and_the_scale_of_scores_are_said():
    raw = attention_view(zoo.shared("bridge", "bloom")).raw(0)
    steeper = Alibi(tuple(2 * slope for slope in raw.alibi.slopes))
    for changed, said in (
        ({}, []),
        ({"alibi": steeper}, ["slopes of ALiBi"]),
        ({"softcap": 5.0}, ["softcap of scores"]),
        ({"score_scale": 2 * raw.score_scale}, ["scale of scores"]),
    ):
        assert _settings_that_differ(raw, replace(raw, **changed)) == said


@pytest.mark.slow
def test_a_changed_gate_is_said(tmp_path):
    save("afmoe", {}, str(tmp_path / "afmoe"))
    base, tuned = (tls.load_model(tmp_path / "afmoe") for _ in range(2))
    gates = [
        weight
        for name, weight in tuned.named_parameters()
        if "layers.0." in name and "self_attn" in name and "gate_proj" in name
    ]
    assert len(gates) == 1
    gates[0].data *= 0.5
    found = changes(base, tuned)
    assert (found.table[["qk_change", "ov_change"]] == 0).all(axis=None)
    assert found.outside == {"gate of the output": [0]}


@pytest.mark.slow
def test_gain_and_phase_of_a_spectral_layer_are_in_the_operators_and_its_frequencies_are_not():
    base, tuned = (tls.to_spectral(zoo.bridge("llama"), heads="L1") for _ in range(2))
    parameters = dict(tuned.named_parameters())
    torch.nn.init.constant_(parameters["spectral.1.phase"], torch.pi)
    found = changes(base, tuned)
    # A phase of pi negates each M_t; in float32.
    assert named(found).loc[1, "qk_change"].to_numpy() == pytest.approx(2, rel=1e-6)
    assert (named(found).loc[0, "qk_change"] == 0).all()
    assert found.outside == {}
    parameters["spectral.1.log_omega_shift"].data += 0.1
    assert changes(base, tuned).outside == {"rotary frequencies": [1]}


def test_heads_that_stand_at_another_index_are_named():
    def exchange(model):
        queries, outputs = attention(model).q_proj.weight, attention(model).o_proj.weight
        for one, other in ((0, 1), (2, 3)):  # heads of one group, which share keys
            for weight, at in ((queries, lambda head: head_rows(head)), (outputs.T, lambda head: head_rows(head))):
                kept = weight[at(one)].clone()
                weight[at(one)] = weight[at(other)]
                weight[at(other)] = kept

    found = changes(*edited("llama", exchange))
    assert found.moved == {"L1H0": "L1H1", "L1H1": "L1H0", "L1H2": "L1H3", "L1H3": "L1H2"}
    table = named(found)
    assert table.loc[(1, 0), "counterpart"] == "L1H1"
    assert table["counterpart_likeness"].to_numpy() == pytest.approx(1, abs=1e-9)
    assert (table.loc[1, "qk_change"] > 0.5).all()
    same = zoo.shared("bridge", "llama")
    assert changes(same, same).moved == {}


# --- what is refused ---


def test_two_trainings_share_no_basis():
    with pytest.raises(ValueError, match=r"share no common basis: .*embedding -?0\.0\d, qk .*side_by_side"):
        changes(zoo.shared("bridge", "llama"), zoo.bridge("llama", seed=1))
    packaged = {name: tls.load_model(name) for name in ("tiny-rope", "tiny-rope-sym", "tiny-rope-imag")}
    with pytest.raises(ValueError, match=r"tiny-rope \(a\) and tiny-rope-sym \(b\) share no common basis"):
        changes(packaged["tiny-rope"], packaged["tiny-rope-sym"])
    # Trained apart from one initialisation.
    assert changes(packaged["tiny-rope"], packaged["tiny-rope-imag"]).likeness["embedding"] > 0.7


@pytest.mark.parametrize("kept", ["embedding", "attention"])
def test_what_embedding_or_attention_has_in_common_is_a_basis(kept):
    a, b = zoo.hf_model("llama"), zoo.hf_model("llama", seed=1)
    with torch.no_grad():
        of_a, of_b = (dict(model.named_parameters()) for model in (a, b))
        for name, weight in of_b.items():
            if ("embed" in name) == (kept == "embedding"):
                weight.copy_(of_a[name])
    found = changes(zoo.wrapped(a), zoo.wrapped(b))
    assert (found.table["qk_change"] > 1).all() == (kept == "embedding")


def test_models_of_other_sizes_are_refused_in_words():
    with pytest.raises(ValueError, match=r"differ in architecture: layer 0 has 4 heads, .* in a, .* in b; give a"):
        changes(zoo.shared("bridge", "llama"), zoo.shared("bridge", "gpt2"))
