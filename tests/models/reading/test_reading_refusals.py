"""What the view refuses: architectures without the operator, unknown norms, broken and quantised weights."""

import operator

import pytest
import torch
import zoo
from attention_models import fresh, poke
from torch import nn
from zoo import shared

from tlspectral.errors import BadHead, BadWeights, UnsupportedArchitecture
from tlspectral.heads.operators.factored import QKOperators, qk_operators
from tlspectral.heads.operators.verification import verify_scores
from tlspectral.models.reading import attention_view

hooked = zoo.needs_hooked


def wrapped(model, path):
    return model.blocks[1].get_submodule(path).original_component


def view_of(name, changes=None, backend="bridge"):
    """The view of a model of one's own, with other values by their paths."""
    model = fresh(backend, name)
    for path, value in (changes or {}).items():
        owner, _, attribute = path.rpartition(".")
        setattr(operator.attrgetter(owner)(model), attribute, value)
    return attention_view(model)


class Doubling(nn.LayerNorm):
    """No LayerNorm of a plain gain."""

    def forward(self, x):
        return 2 * super().forward(x)


DOUBLING = {"blocks.1.ln1.original_component.__class__": Doubling}
BIDIRECTIONAL = {"cfg.attention_dir": "bidirectional"}


MAMBA = r"layer 0: a MambaMixer layer; it has no query-key operator"
CLIPPED = r"queries and keys are clipped at 100\.0 \(clip_qkv\)"


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda: attention_view(shared("bridge", "mamba")).layer(0), MAMBA),
        (lambda: qk_operators(shared("bridge", "mamba")), MAMBA),
        (lambda: verify_scores(shared("bridge", "mamba")), MAMBA),
        (lambda: view_of("gpt2", DOUBLING).layer(1), "layer 1, input norm: Doubling acts neither"),
        # A check prompt on which nothing reaches the limit would not show it.
        (lambda: view_of("llama", {"original_model.config.clip_qkv": 100.0}).raw(0), f"layer 0: {CLIPPED}"),
        (lambda: view_of("mpt_clipped").raw(1), f"layer 1: {CLIPPED}"),
        (lambda: view_of("falcon_alibi").raw(0), "layer 0: Falcon with ALiBi; under eager attention"),
        (lambda: view_of("gemma3_with_softcap").raw(0), r"layer 0: Gemma 3 with attn_logit_softcapping=6\.0, which"),
        (
            lambda: view_of("gpt2", BIDIRECTIONAL).layer(0),
            "layer 0: .* not causal; of encoders only BERT and RoBERTa are read",
        ),
        pytest.param(
            lambda: view_of("gpt2", BIDIRECTIONAL, "hooked").layer(0), "layer 0: the attention is bid", marks=hooked
        ),
        pytest.param(
            lambda: view_of("gpt2", {"blocks.1.ln1": nn.BatchNorm1d(48)}, "hooked").layer(1),
            "layer 1: BatchNorm1d is not a",
            marks=hooked,
        ),
        pytest.param(
            lambda: view_of("llama", {"cfg.clip_qkv": 100.0}, "hooked").raw(1), f"layer 1: {CLIPPED}", marks=hooked
        ),
    ],
)
def test_attention_that_is_no_bilinear_form_behind_a_known_norm(read, words):
    with pytest.raises(UnsupportedArchitecture, match=words):
        read()


def test_what_is_allowed_beside_them():
    assert view_of("gpt2", DOUBLING).layer(0).norm.kind == "LN"
    assert view_of("mpt").raw(1).alibi is not None


@pytest.mark.parametrize("index", [-1, 2])
def test_a_layer_that_does_not_exist(index):
    view = attention_view(shared("bridge", "gpt2"))
    for read in (view.layer, view.output, view.n_heads):
        with pytest.raises(BadHead, match=f"layer {index} does not exist: the model has layers 0 to 1"):
            read(index)


BROKEN = {
    # role: (architecture, where a bridge keeps it, where a HookedTransformer keeps it, side that reads it)
    "W_Q": ("llama", lambda m: wrapped(m, "attn").q_proj.weight, "attn.W_Q", "layer"),
    "W_K": ("llama", lambda m: wrapped(m, "attn").k_proj.weight, "attn._W_K", "layer"),
    "b_Q": ("qwen2", lambda m: wrapped(m, "attn").q_proj.bias, "attn.b_Q", "layer"),
    "b_K": ("qwen2", lambda m: wrapped(m, "attn").k_proj.bias, "attn._b_K", "layer"),
    "input norm gain": ("gpt2", lambda m: wrapped(m, "ln1").weight, "ln1.w", "layer"),
    "input norm bias": ("gpt2", lambda m: wrapped(m, "ln1").bias, "ln1.b", "layer"),
    "query norm gain": ("qwen3", lambda m: wrapped(m, "attn").q_norm.weight, "attn.q_norm.w", "layer"),
    "key norm gain": ("qwen3", lambda m: wrapped(m, "attn").k_norm.weight, "attn.k_norm.w", "layer"),
    "W_V": ("llama", lambda m: wrapped(m, "attn").v_proj.weight, "attn._W_V", "output"),
    "W_O": ("llama", lambda m: wrapped(m, "attn").o_proj.weight, "attn.W_O", "output"),
}


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
@pytest.mark.parametrize("role", BROKEN)
def test_broken_weights_are_named_by_layer_and_role(role, backend):
    name, on_bridge, on_hooked, side = BROKEN[role]
    role_there = role.replace("query norm", "q_norm").replace("key norm", "k_norm")  # as the bridge names them
    model = fresh("bridge", name) if backend == "bridge" else fresh("hooked", name, fold_ln=False)
    parameter = on_bridge(model) if backend == "bridge" else model.blocks[1].get_parameter(on_hooked)
    view = attention_view(model)
    for value in (float("nan"), -float("inf")):
        poke(parameter, value)
        getattr(view, side)(0)
        with pytest.raises(BadWeights, match=rf"layer 1, ({role}|{role_there}): 1 of \d+ values are NaN or infinite"):
            getattr(view, side)(1)
    if role == "W_K":
        operators = QKOperators(view)
        assert operators[0, 0].layer == 0
        for read in (lambda: operators[1, 0], lambda: verify_scores(model)):
            with pytest.raises(BadWeights, match="layer 1, W_K"):
                read()


@pytest.mark.parametrize(
    ("backend", "name"),
    [("bridge", "gpt2"), ("bridge", "llama"), ("bridge", "gptj"), pytest.param("hooked", "llama", marks=hooked)],
)
def test_the_meta_device_is_refused(backend, name):
    model = fresh(backend, name)
    getattr(model, "original_model", model).to("meta")
    for read in (lambda m: attention_view(m).layer(0), lambda m: QKOperators(attention_view(m))[0, 0], verify_scores):
        with pytest.raises(BadWeights, match=r"layer 0, .*meta device"):
            read(model)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_quantised_weights_are_refused(backend, dtype):
    model = fresh(backend, "llama")
    owner, name = (wrapped(model, "attn").q_proj, "weight") if backend == "bridge" else (model.blocks[1].attn, "_W_K")
    setattr(owner, name, nn.Parameter(getattr(owner, name).detach().to(dtype), requires_grad=False))
    view = attention_view(model)
    view.layer(0)
    role = "layer 1, W_Q.*quanti" if backend == "bridge" else f"layer 1, W_K: stored as {dtype}, a quantised format"
    with pytest.raises(BadWeights, match=role):
        view.layer(1)
