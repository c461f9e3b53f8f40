"""`check_hook`: hooks that are one head, and hooks that are something else."""

import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.errors import BadHead
from tlspectral.models.reading import attention_view

MODELS = ("gpt2", "llama", "gemma3", "gptj", "opt")


def zeroed(head, size):
    """Zero one head of z, head by head or side by side."""

    def hook(z, hook):
        z = z.clone()
        z.view(*z.shape[:2], -1, size)[:, :, head] = 0
        return z

    return hook


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
@pytest.mark.parametrize("name", MODELS)
def test_zeros_in_z_are_one_head(backend, name):
    if backend == "hooked" and name not in zoo.HOOKED_ARCHITECTURES:
        pytest.skip("not built as a HookedTransformer")
    model = zoo.shared(backend, name)
    found = tls.hooks.check_hook(model, [("blocks.0.attn.hook_z", zeroed(1, model.cfg.d_head))], "L0H1")
    assert found.exact
    assert found.found == ["it removes all of what L0H1 writes, and nothing else"]
    # Exact zeros: rounding in float64 of sums of some hundred products.
    assert found.heads.to_dict("records") == [
        {"layer": 0, "head": 1, "name": "L0H1", "removed": pytest.approx(1, abs=1e-9), "changed": pytest.approx(1)}
    ]
    with tls.ablate(model, "L0H1", "output"):
        assert tls.hooks.check_hook(model, None, "L0H1").exact


def test_columns_of_the_attention_output_are_no_head():
    model = zoo.shared("bridge", "llama")

    def slices(out, hook):
        out = out.clone()
        out[..., : model.cfg.d_head] = 0
        return out

    found = tls.hooks.check_hook(model, [("blocks.1.hook_attn_out", slices)], "L1H0")
    assert not found.exact
    assert found.heads.empty
    assert found.found[0] == "it changes nothing that L1H0 writes"
    assert "layer 1: it changes the output of the attention in a way that is no head" in found.found[1]


def test_hooks_of_pytorch_are_seen_and_stay():
    model = zoo.shared("bridge", "llama")
    projection = next(m for n, m in model.original_model.named_modules() if n.endswith("o_proj"))
    handle = projection.register_forward_hook(lambda module, inputs, output: 0.5 * output)
    try:
        found = tls.hooks.check_hook(model, None, "L0H1")
        assert "no head" in found.found[1]
        assert handle.id in projection._forward_hooks
    finally:
        handle.remove()
    assert tls.hooks.check_hook(model, None, "L0H1").found == ["it changes nothing that L0H1 writes"]


def test_how_much_of_which_heads_is_said_by_definition():
    model = zoo.shared("bridge", "llama")
    tokens = torch.arange(8)[None] + 20
    half = [("blocks.0.attn.hook_z", lambda z, hook: z * torch.tensor([1.0, 0.5, 1.0, 1.25])[:, None])]
    found = tls.hooks.check_hook(model, half, "L0H1", prompts=tokens)
    assert found.heads["removed"].tolist() == pytest.approx([0.5, -0.25], abs=1e-6)  # float32 products
    assert found.heads["changed"].tolist() == pytest.approx([0.5, 0.25], abs=1e-6)
    assert found.found == ["it removes 0.50 of what L0H1 writes", "it changes L0H3"]


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("blocks.0.hook_mlp_out", "layer 0: it changes the MLP"),
        ("blocks.1.hook_resid_pre", "layer 0: it changes the residual stream itself"),
        ("blocks.1.hook_resid_post", "layer 1: it changes the residual stream itself"),
        ("ln_final.hook_in", "it changes what follows the last layer"),
    ],
)
def test_other_places_are_named(point, words):
    model = zoo.shared("bridge", "llama")
    found = tls.hooks.check_hook(model, [(point, lambda x, hook: 1.5 * x + 0.1)], "L0H1")
    assert found.found == ["it changes nothing that L0H1 writes", words]


def second_hooks(view):
    """Yield each hook point with a hook that changes it by a tenth where it is of floating point."""

    def scaled(activation, hook):
        return 1.1 * activation if torch.is_floating_point(activation) else None

    for name in view.hook_points:
        yield name, scaled


@pytest.mark.tl4
@pytest.mark.filterwarnings("ignore:A forward hook edited hook_scale", "ignore:A hook on .* returned a modified tensor")
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("bridge", "llama"),
        *zoo.also_slow(("bridge", "gpt2"), ("bridge", "gptj"), ("bridge", "opt")),
        pytest.param("bridge", "gemma3", marks=[pytest.mark.slow, pytest.mark.full]),
        *(pytest.param("hooked", one, marks=[pytest.mark.slow, zoo.needs_hooked]) for one in ("gpt2", "qwen2")),
    ],
)
def test_a_second_hook_is_seen_at_every_hook_point(backend, name):
    model = zoo.shared(backend, name)
    view, tokens, blind, changing = attention_view(model), zoo.prompt(1, 8), [], 0
    head = ("blocks.0.attn.hook_z", zeroed(1, model.cfg.d_head))
    with view.hooks_on([head]):
        alone = view.logits(tokens)
    for second in second_hooks(view):
        try:
            with view.hooks_on([head, second]):
                both = view.logits(tokens)
        except RuntimeError:  # the model cannot run so (a mask that is scaled)
            continue
        # Rounding is 0 here. The smallest change is 1.3e-5, through the epsilon of a norm whose input is scaled.
        if (both - alone).abs().max() > 5e-6 * alone.abs().max():
            changing += 1
            if tls.hooks.check_hook(model, [head, second], "L0H1", prompts=tokens).exact:
                blind.append(second[0])
    assert changing > 20
    assert blind == []


def test_hooks_in_front_of_the_first_layer_are_named():
    model = zoo.shared("bridge", "gpt2")
    head = ("blocks.0.attn.hook_z", zeroed(1, model.cfg.d_head))
    for name in ("hook_embed", "hook_pos_embed", "blocks.0.hook_resid_pre"):
        found = tls.hooks.check_hook(model, [head, (name, lambda x, hook: 1.1 * x)], "L0H1")
        assert found.found == [
            "it removes all of what L0H1 writes",
            "it changes what the first layer reads: the embedding, or what is added to it",
        ]


def test_a_change_that_no_layer_shows_is_seen_in_the_logits():
    model = zoo.shared("bridge", "llama")
    head = ("blocks.0.attn.hook_z", zeroed(1, model.cfg.d_head))
    found = tls.hooks.check_hook(model, [head, ("blocks.1.ln1.hook_in", lambda x, hook: 1.1 * x)], "L0H1")
    assert found.found == [
        "it removes all of what L0H1 writes",
        "it changes something else, the first time in front of blocks.1.attn.hook_z",
    ]


@pytest.mark.slow
def test_zeros_in_z_are_one_head_in_16_bits():
    model = zoo.converted(zoo.bridge("llama"), torch.bfloat16)
    head = ("blocks.0.attn.hook_z", zeroed(1, model.cfg.d_head))
    assert tls.hooks.check_hook(model, [head], "L0H1").exact


def test_a_head_that_does_not_exist_is_refused():
    with pytest.raises(BadHead, match="L0H9 does not exist"):
        tls.hooks.check_hook(zoo.shared("bridge", "llama"), None, "L0H9")
