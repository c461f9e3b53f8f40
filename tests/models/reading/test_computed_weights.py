"""Weights of quantised layers, read from what the layers compute: exact W, refused layers, and hashes."""

import copy

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from page_code import ROOT
from quantised_models import (
    ACTIVATIONS,
    CALLS,
    PROMPT,
    WEIGHTS,
    StandIn,
    dequantised,
    largest_difference,
    nf4_layer,
    outcome,
    qwen2,
    table,
)
from torch import nn

import tlspectral as tls
from tlspectral.errors import BadWeights
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.computed_weights import require_linear, with_plain_weights
from tlspectral.models.reading.packed import LoraLayer, packed_layers, stored_in


def of_kind(kinds, name):
    """A way to quantise; the test is skipped where its library is not installed."""
    if name == "stand-in":
        return kinds[name]
    pytest.importorskip(kinds[name].package)
    return kinds[name]


def pair(name, dtype=torch.float32):
    """The loaded model with quantised weights, and the one with its library's own de-quantised weights."""
    quantised = of_kind(WEIGHTS, name).quantised(qwen2(dtype))
    return tls.load_model(quantised), tls.load_model(dequantised(quantised))


class Around(nn.Module):
    """The least that `require_linear` asks of a bridge: a layer in the attention, and a pass."""

    def __init__(self, layer, x):
        super().__init__()
        self.attn, self.x = nn.ModuleDict({"q": layer}), nn.Parameter(x, requires_grad=False)
        self.cfg = type("Config", (), {"n_ctx": 16, "d_vocab": 7, "model_name": "one layer"})
        self.blocks = [self]
        self.original_model = self.attn

    def forward(self, tokens):
        return self.attn["q"](self.x)


def read(layer, x):
    """(W, bias) that are read from a layer which gets the input x in a run."""
    plain = with_plain_weights(Around(layer, x).attn, Around(layer, x))["q"]
    return plain.weight, plain.bias


def inputs(width, dtype=torch.float32):
    return torch.randn(1, 16, width, generator=zoo.generator(1)).to(dtype)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 4),
    bias=st.sampled_from([None, 0.0, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_the_weight_is_exact_whatever_the_bias(rows, blocks, bias, dtype, seed):
    torch.manual_seed(seed)
    linear = nn.Linear(16 * blocks, rows, bias=bias is not None)
    if bias is not None:
        nn.init.normal_(linear.bias, std=bias)
    layer = StandIn(linear.to(dtype))
    weight, own = read(layer, inputs(16 * blocks, dtype))
    assert weight.dtype == dtype
    assert torch.equal(weight, layer.dequantised())  # in 16 bits a bias of sd 30 would leave an error of .69 of W
    assert own is layer.bias


class HiddenBias(StandIn):
    """A layer whose bias cannot be taken off."""

    def __init__(self, linear):
        super().__init__(linear)
        self.bias, self.added = None, linear.bias.detach()

    def forward(self, x):
        return super().forward(x) + self.added


def test_a_bias_that_cannot_be_taken_off():
    linear = nn.Linear(32, 8)
    layer = HiddenBias(linear)
    weight, bias = read(layer, inputs(32))
    # Rounding of W + b in float32: measured 2e-8; without the subtraction W is off by b, some .1.
    torch.testing.assert_close(weight, layer.dequantised(), atol=1e-6, rtol=0)
    assert torch.equal(bias, layer.added)
    half = HiddenBias(linear.to(torch.bfloat16))
    with pytest.raises(BadWeights, match=r"bias that cannot be taken off, .*bfloat16 loses .*dtype='float32'"):
        read(half, inputs(32, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rounded_input_is_refused_with_its_number(dtype):
    linear = nn.Linear(64, 24).to(dtype)
    read(StandIn(linear), inputs(64, dtype))
    with pytest.raises(BadWeights, match=r"q, a StandIn, is not linear: .* is 0\.0\d+ of its output"):
        read(StandIn(linear, activations=True), inputs(64, dtype))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_real_layers_with_rounded_inputs_are_refused(name):
    given = of_kind(ACTIVATIONS, name).quantised(qwen2())
    with pytest.raises(
        BadWeights, match=r"layers\.0\.self_attn\.q_proj, a .* is not linear: .* is 0\.0\d+ of its output"
    ):
        tls.load_model(given)


def test_lora_adds_its_own_factors():
    base = StandIn(nn.Linear(32, 24).to(torch.bfloat16))
    a, b = torch.randn(4, 32), 1e-4 * torch.randn(24, 4)
    weight, bias = read(LoraLayer(base, [(a, b), (a, b)]), inputs(32, torch.bfloat16))
    assert weight.dtype == torch.float32
    assert bias is base.bias
    # float32 rounds W of .2 to 1e-8; in bfloat16 it would be 5e-4, the size of the delta itself.
    delta = weight.double() - base.dequantised().double()
    torch.testing.assert_close(delta, 2 * b.double() @ a.double(), atol=5e-8, rtol=0)
    assert float(delta.abs().max()) > 1e-4


NAMES = [(name, row) for name in WEIGHTS for row in CALLS]
FAST = ("head table", "attribution")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(name, row, marks=[] if row in FAST and name in ("stand-in", "nf4", "int8") else pytest.mark.slow)
        for name, row in NAMES
    ],
)
def test_every_function_says_what_it_says_of_plain_weights(name, row):
    refused = row.startswith(("gradients of W", "merged", "pruned"))
    model, plain = pair(name)
    for call, run in CALLS[row].items():
        assert outcome(run, model, plain) == ("no" if refused else "yes"), call


@pytest.mark.parametrize("name", ["stand-in", pytest.param("nf4", marks=pytest.mark.slow)])
def test_in_bfloat16(name):
    model, plain = pair(name, torch.bfloat16)
    assert tls.verify_scores(model).tolist() == tls.verify_scores(plain).tolist()
    assert attention_view(model).layer(0).storage_dtype == torch.bfloat16
    assert largest_difference(tls.frequency_table(model), tls.frequency_table(plain)) == 0


@pytest.mark.parametrize("name", ["stand-in", "nf4", "int8"])
def test_the_callers_model_stays_as_it_is(name):
    quantised = of_kind(WEIGHTS, name).quantised(qwen2())
    held = [(id(value), value.clone()) for value in quantised.state_dict().values() if type(value) is torch.Tensor]
    before = [value.clone() for value in stored_in(quantised)]
    model = tls.load_model(quantised)
    model(PROMPT[None])
    tls.verify_scores(model)
    after = stored_in(quantised)
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))
    assert len(held) == len([value for value in quantised.state_dict().values() if type(value) is torch.Tensor])
    shared = {value.data_ptr() for layer in packed_layers(quantised).values() for value in stored_in(layer)}
    assert not shared & {value.data_ptr() for value in stored_in(model) if value.dtype in (torch.uint8, torch.int8)}


@pytest.mark.parametrize("name", ["stand-in", "nf4", "int8"])
def test_hashes_are_of_the_packed_numbers(name):
    quantised = of_kind(WEIGHTS, name).quantised(qwen2())
    model, again = tls.load_model(quantised), tls.load_model(copy.deepcopy(quantised))
    first, view = attention_view(again), attention_view(model)
    assert view.origin()["weights_sha256"] == first.origin()["weights_sha256"]
    assert view.weights_digest() == first.weights_digest()
    plain = attention_view(tls.load_model(dequantised(quantised)))
    assert view.origin()["weights_sha256"] != plain.origin()["weights_sha256"]
    before, state = view.origin()["weights_by_layer"], view.state()
    weight = view.raw(1).w_q.clone()
    numbers = [value for value in stored_in(model.blocks[1].attn.q) if value.dtype in (torch.uint8, torch.int8)]
    numbers[0].flatten()[3] ^= 1
    after = view.origin()["weights_by_layer"]
    assert (before["0"], before["1"] != after["1"]) == (after["0"], True)
    assert view.state() != state or name == "stand-in"
    assert not torch.equal(view.raw(1).w_q, weight)  # what was remembered is not used


def test_what_is_compared_and_followed():
    model, _ = pair("stand-in")
    whole = tls.load_model(qwen2())
    changed = tls.compare_heads(whole, model)
    assert len(changed) == 8
    assert 0 < changed["qk_change"].min() < changed["qk_change"].max() < 0.02  # 8 bits in blocks of 16: .009


@pytest.mark.slow
def test_a_history_of_quantised_models():
    model, _ = pair("stand-in")
    history = tls.head_history({0: tls.load_model(qwen2()), 1: model})
    assert history.heads.groupby("step").size().tolist() == [8, 8]


def test_a_bridge_of_the_users_own():
    quantised = WEIGHTS["stand-in"].quantised(qwen2())
    plain = tls.load_model(dequantised(quantised))
    bridge = zoo.wrapped(quantised)
    assert largest_difference(tls.analyze_heads(bridge, null_draws=5), tls.analyze_heads(plain, null_draws=5)) < 1e-6
    rounded = zoo.wrapped(ACTIVATIONS["stand-in"].quantised(qwen2()))
    for call in (tls.verify_scores, tls.analyze_heads):
        with pytest.raises(BadWeights, match="is not linear"):
            call(rounded)


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_a_quantised_unembedding(name):
    kind = of_kind(WEIGHTS, name)
    quantised = qwen2()
    if name == "nf4":
        quantised.lm_head = nf4_layer(quantised.lm_head).eval()
    kind.quantised(quantised)
    model, plain = tls.load_model(quantised), tls.load_model(dequantised(quantised))
    # Rounding of the weight in torchao's int8: 3e-8 of the largest.
    torch.testing.assert_close(attention_view(model).unembedding()[0], attention_view(plain).unembedding()[0])
    require_linear(model)
    assert not model.unembed.b_U.any()


@pytest.mark.slow
def test_the_table_of_the_page_is_what_real_layers_give():
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("torchao")
    assert table() in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
