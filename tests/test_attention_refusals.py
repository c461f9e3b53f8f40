"""What the view refuses: architectures without the operator, unknown norms, broken and quantised weights."""

import pytest
import torch
import zoo
from attention_models import fresh, poke
from torch import nn
from zoo import shared

from tlspectral.errors import BadHead, BadWeights, UnsupportedArchitecture
from tlspectral.models.attention import attention_view
from tlspectral.operators import QKOperators, qk_operators, verify_scores

REFUSALS = {
    "deepseek_v3": r"layer 0: multi-head latent attention \(DeepseekV3Attention\)",
    "mamba": r"layer 0: a 'mixer' block; it has no query-key operator",
    "qwen3_next": r"layer 0: a 'linear_attn' block; it has no query-key operator",
    "bert": r"layer 0: the attention of BertAttention is not causal \(encoder\)",
}


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_what_has_no_operator_is_refused_by_layer_and_reason(name):
    model = shared("bridge", name)
    for read in (lambda: attention_view(model).layer(0), lambda: qk_operators(model), lambda: verify_scores(model)):
        with pytest.raises(UnsupportedArchitecture, match=REFUSALS[name]):
            read()


@zoo.needs_hooked
def test_hooked_encoder_and_unknown_norm_are_refused():
    model = fresh("hooked", "gpt2")
    model.cfg.attention_dir = "bidirectional"
    with pytest.raises(UnsupportedArchitecture, match="layer 0: the attention is bidirectional"):
        attention_view(model).layer(0)
    model.cfg.attention_dir = "causal"
    model.blocks[1].ln1 = nn.BatchNorm1d(48)
    with pytest.raises(UnsupportedArchitecture, match="layer 1: BatchNorm1d is not a norm"):
        attention_view(model).layer(1)


def test_a_norm_of_another_form_is_refused():
    class Doubling(nn.LayerNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    model = fresh("bridge", "gpt2")
    norm = model.blocks[1].ln1.original_component
    norm.__class__ = Doubling
    assert attention_view(model).layer(0).norm.kind == "LN"
    with pytest.raises(UnsupportedArchitecture, match="layer 1, input norm: Doubling is neither"):
        attention_view(model).layer(1)


def test_clipped_queries_and_keys_are_refused():
    """A check prompt on which nothing reaches the limit would not show it."""
    model = zoo.bridge("llama")
    model.original_model.config.clip_qkv = 100.0
    with pytest.raises(UnsupportedArchitecture, match=r"layer 0: queries and keys are clipped at 100\.0 \(clip_qkv\)"):
        attention_view(model).raw(0)


def test_a_limit_that_is_nested_in_the_config_is_seen_too():
    with pytest.raises(UnsupportedArchitecture, match=r"layer 1: queries and keys are clipped at 100\.0 \(clip_qkv\)"):
        attention_view(zoo.bridge("mpt_clipped")).raw(1)
    assert attention_view(zoo.bridge("mpt")).raw(1).alibi is not None


def test_a_softcap_that_only_the_bridge_applies_is_refused():
    with pytest.raises(UnsupportedArchitecture, match=r"layer 0: Gemma 3 with attn_logit_softcapping=6\.0, which"):
        attention_view(zoo.bridge("gemma3_with_softcap")).raw(0)


@zoo.needs_hooked
def test_clipped_queries_and_keys_of_a_hooked_transformer_are_refused():
    model = zoo.hooked("llama")
    model.cfg.clip_qkv = 100.0
    with pytest.raises(UnsupportedArchitecture, match="layer 1: queries and keys are clipped"):
        attention_view(model).raw(1)


@pytest.mark.parametrize("index", [-1, 2, 99])
def test_a_layer_that_does_not_exist(index):
    view = attention_view(shared("bridge", "gpt2"))
    for read in (view.layer, view.output, view.n_heads):
        with pytest.raises(BadHead, match=f"layer {index} does not exist: the model has layers 0 to 1"):
            read(index)


@pytest.mark.parametrize("thing", ["gpt2", None, nn.Linear(2, 2), {"blocks": []}])
def test_other_objects_are_a_type_error_that_names_the_way_in(thing):
    for read in (attention_view, qk_operators, verify_scores):
        with pytest.raises(TypeError, match=rf"{type(thing).__name__} is neither .* tlspectral\.load_model"):
            read(thing)


def test_a_hugging_face_model_is_a_type_error():
    with pytest.raises(TypeError, match="GPT2LMHeadModel is neither"):
        attention_view(zoo.hf_model("gpt2"))


def wrapped(model, path):
    return model.blocks[1].get_submodule(path).original_component


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
@pytest.mark.parametrize("role", BROKEN)
def test_broken_weights_are_named_by_layer_and_role(role, backend, value):
    name, on_bridge, on_hooked, side = BROKEN[role]
    role_there = role.replace("query norm", "q_norm").replace("key norm", "k_norm")  # as the bridge names them
    model = fresh("bridge", name) if backend == "bridge" else fresh("hooked", name, fold_ln=False)
    parameter = on_bridge(model) if backend == "bridge" else model.blocks[1].get_parameter(on_hooked)
    poke(parameter, value)
    view = attention_view(model)
    getattr(view, side)(0)
    with pytest.raises(BadWeights, match=rf"layer 1, ({role}|{role_there}): 1 of \d+ values are NaN or infinite"):
        getattr(view, side)(1)


def test_verification_and_operators_refuse_broken_weights_too():
    model = fresh("bridge", "llama")
    poke(wrapped(model, "attn").k_proj.weight, float("nan"))
    with pytest.raises(BadWeights, match="layer 1, W_K"):
        verify_scores(model)
    operators = QKOperators(attention_view(model))
    assert operators[0, 0].layer == 0
    with pytest.raises(BadWeights, match="layer 1, W_K"):
        operators[1, 0]


def first_operator(model):
    return QKOperators(attention_view(model))[0, 0]


@pytest.mark.parametrize("read", [lambda m: attention_view(m).layer(0), first_operator, verify_scores])
@pytest.mark.parametrize(
    ("backend", "name"),
    [("bridge", name) for name in ("gpt2", "llama", "gptj", "bloom")]
    + [pytest.param("hooked", name, marks=zoo.needs_hooked) for name in ("gpt2", "llama")],
)
def test_the_meta_device_is_refused(backend, name, read):
    model = fresh(backend, name)
    getattr(model, "original_model", model).to("meta")
    with pytest.raises(BadWeights, match=r"layer 0, .*meta device"):
        read(model)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_of_a_bridge_are_refused(dtype):
    model = fresh("bridge", "llama")
    projection = wrapped(model, "attn").q_proj
    projection.weight = nn.Parameter(projection.weight.detach().to(dtype), requires_grad=False)
    view = attention_view(model)
    view.layer(0)
    with pytest.raises(BadWeights, match=r"layer 1, W_Q.*quanti"):
        view.layer(1)


@zoo.needs_hooked
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_of_a_hooked_transformer_are_refused(dtype):
    model = fresh("hooked", "llama")
    attention = model.blocks[1].attn
    attention._W_K = nn.Parameter(attention._W_K.detach().to(dtype), requires_grad=False)
    with pytest.raises(BadWeights, match=f"layer 1, W_K: stored as {dtype}, a quantised format"):
        attention_view(model).layer(1)
