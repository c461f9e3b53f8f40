"""`check_hook`: hooks that are one head, and hooks that are something else."""

import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.errors import BadHead
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.blocks import output_map
from tlspectral.models.running.passes import whole_logits

Z = "blocks.0.attn.hook_z"
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
    assert "layer 1: it changes the output of the attention, where heads are already mixed by W_O" in found.found[1]


def test_hooks_of_pytorch_are_seen_and_stay():
    model = zoo.shared("bridge", "llama")
    projection = next(m for n, m in model.original_model.named_modules() if n.endswith("o_proj"))
    handle = projection.register_forward_hook(lambda module, inputs, output: 0.5 * output)
    try:
        found = tls.hooks.check_hook(model, None, "L0H1")
        assert "already mixed" in found.found[1]
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
        ("ln_final.hook_in", "it changes something after the last layer"),
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


@pytest.mark.slow
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
        alone = whole_logits(view, tokens)
    for second in second_hooks(view):
        try:
            with view.hooks_on([head, second]):
                both = whole_logits(view, tokens)
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
        "it changes something else, the first time before blocks.1.attn.hook_z",
    ]


@pytest.mark.slow
def test_zeros_in_z_are_one_head_in_16_bits():
    model = zoo.converted(zoo.bridge("llama"), torch.bfloat16)
    head = ("blocks.0.attn.hook_z", zeroed(1, model.cfg.d_head))
    assert tls.hooks.check_hook(model, [head], "L0H1").exact


def test_a_head_that_does_not_exist_is_refused():
    with pytest.raises(BadHead, match="L0H9 does not exist"):
        tls.hooks.check_hook(zoo.shared("bridge", "llama"), None, "L0H9")


def part_of_a_head(where):
    """Zero head 1 of z in the part that `where` picks."""

    def hook(z, hook):
        z = z.clone()
        where(z.view(*z.shape[:2], zoo.HEADS, -1))[:, :, 1] = 0
        return z

    return hook


def head_where(holds):
    """Zero head 1 of z in passes of which something holds."""
    whole = part_of_a_head(lambda z: z)
    return lambda z, hook: whole(z, hook) if holds(z) else z


PARTS = {
    "the first row": lambda z: z[:1],
    "even rows": lambda z: z[::2],
    "the first eight": lambda z: z[:, :8],
    "the first 32": lambda z: z[:, :32],
    "past the eighth": lambda z: z[:, 8:],
    "all but the last": lambda z: z[:, :-1],
    "all but the first": lambda z: z[:, 1:],
    "the last": lambda z: z[:, -1:],
}
SHAPES = {
    "one row": lambda z: len(z) == 1,
    "some rows": lambda z: len(z) > 1,
    "longer than eight": lambda z: z.shape[1] > 8,
    "shorter than thirty": lambda z: z.shape[1] < 30,
    "of even length": lambda z: z.shape[1] % 2 == 0,
}


@pytest.mark.parametrize("where", PARTS.values(), ids=PARTS)
def test_a_head_that_is_removed_in_a_part_of_the_run_is_said(where):
    found = tls.hooks.check_hook(zoo.shared("bridge", "llama"), [(Z, part_of_a_head(where))], "L0H1")
    assert not found.exact
    assert found.heads["name"].tolist() == ["L0H1"]
    assert 0 < found.heads["removed"].item() < 1


def test_a_little_of_one_token_that_is_left_is_said():
    model = zoo.shared("bridge", "llama")

    def hook(z, hook):
        edited = zeroed(1, model.cfg.d_head)(z, hook)
        edited[0, 3] = 0.98 * edited[0, 3] + 0.02 * z[0, 3]
        return edited

    found = tls.hooks.check_hook(model, [(Z, hook)], "L0H1")
    assert found.heads["removed"].item() == pytest.approx(1.0, abs=1e-3)  # of all tokens together .9997
    assert found.found == ["it removes nearly all of what L0H1 writes, and nothing else"]


@pytest.mark.parametrize("holds", SHAPES.values(), ids=SHAPES)
def test_a_hook_that_acts_by_the_shape_of_the_prompts_is_said(holds):
    assert not tls.hooks.check_hook(zoo.shared("bridge", "llama"), [(Z, head_where(holds))], "L0H1").exact


@pytest.mark.fast(2)
@pytest.mark.tl4
@pytest.mark.parametrize("prompts", [None, "given"])
@pytest.mark.parametrize("acting", [{1}, {1, 2}, {2, 3}, {1, 3}])
def test_a_hook_that_does_not_act_in_every_run_is_said(acting, prompts):
    tokens, runs = None if prompts is None else zoo.prompt(2, 8), []

    def holds(z):
        runs.append(z.shape)
        return len(runs) in acting

    found = tls.hooks.check_hook(zoo.shared("bridge", "llama"), [(Z, head_where(holds))], "L0H1", prompts=tokens)
    assert not found.exact
    if acting == {1, 2}:
        shapes = ("[3, 11]", "[1, 6]") if prompts is None else ("[2, 8]", "[2, 8]")
        assert found.found == [
            f"in run 3, of prompts of shape {shapes[0]}, it changes nothing that L0H1 writes",
            f"it is exact in the run before, of prompts of shape {shapes[1]}",
        ]


def test_a_hook_that_acts_at_some_tokens_is_said():
    model, seen = zoo.bridge("llama"), []
    model.add_hook("embed.hook_in", lambda ids, hook: seen.append(ids))

    def low(z, hook):
        chosen = (seen[-1] < zoo.VOCABULARY // 2)[:, :, None]
        return torch.where(chosen.view(*chosen.shape[:2], *[1] * (z.ndim - 2)), zeroed(1, model.cfg.d_head)(z, hook), z)

    with pytest.warns(UserWarning, match="hooks of yours"):
        assert not tls.hooks.check_hook(model, [(Z, low)], "L0H1").exact


def columns_zeroed(module, given):
    """As a hook of PyTorch on `o_proj`: zero what it reads of head 1."""
    z = given[0].clone()
    z.view(*z.shape[:-1], zoo.HEADS, -1)[..., 1, :] = 0
    return z, *given[1:]


def before_output(model):
    return output_map(attention_view(model).blocks[0].module).register_forward_pre_hook(columns_zeroed)


def before_bridge(model):
    return model.blocks[0].attn.o.register_forward_pre_hook(columns_zeroed)


def before_point(model):
    return model.hook_dict[Z].register_forward_pre_hook(columns_zeroed)


def before_all(model):
    module = output_map(attention_view(model).blocks[0].module)
    return torch.nn.modules.module.register_module_forward_pre_hook(
        lambda each, given: columns_zeroed(each, given) if each is module else None
    )


def behind_output(model):
    """Put what `o_proj` returns without head 1 in the place of what it returned."""
    module, inside = output_map(attention_view(model).blocks[0].module), []

    def hook(module, given, output):
        if inside:
            return None
        inside.append(True)
        try:
            return module(columns_zeroed(module, given)[0])
        finally:
            inside.clear()

    return module.register_forward_hook(hook)


class Replaced:
    """A forward of `o_proj` that does without head 1, with the handle of a hook."""

    def __init__(self, model):
        self.module = output_map(attention_view(model).blocks[0].module)
        forward = self.module.forward
        self.module.forward = lambda z: forward(columns_zeroed(None, (z,))[0])

    def remove(self):
        vars(self.module).pop("forward", None)


WAYS = [before_output, before_bridge, before_point, before_all, behind_output, Replaced]
FUSED = ("gpt2", "gptj", "gemma3", "bloom", "deepseek_v3")


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.parametrize(
    ("way", "name"),
    [
        *((way, "llama") for way in WAYS),
        (before_output, "gpt2"),
        *zoo.also_slow(*((before_output, one) for one in FUSED[1:])),
    ],
)
def test_z_is_read_where_the_output_weights_read_it(way, name):
    model, tokens = zoo.bridge(name), zoo.prompt()
    with tls.ablate(model, "L0H1", "output"):
        expected = zoo.logits(model, tokens)
    handle = way(model)
    assert torch.equal(zoo.logits(model, tokens), expected)
    found = tls.hooks.check_hook(model, None, "L0H1")
    assert found.found == ["it removes all of what L0H1 writes, and nothing else"]
    assert tls.hooks.check_hook(model, None, "L0H2").found[:1] == ["it changes nothing that L0H2 writes"]
    assert torch.equal(zoo.logits(model, tokens), expected)  # it is on the model as before
    handle.remove()
    assert tls.hooks.check_hook(model, None, "L0H1").found == ["it changes nothing that L0H1 writes"]


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_a_head_taken_off_behind_the_output_weights_is_the_head(backend):
    model = getattr(zoo, backend)("llama")
    model.cfg.use_attn_result = True

    def without(factor):
        def hook(result, hook):
            result = result.clone()
            result[:, :, 1] *= factor
            return result

        return [("blocks.0.attn.hook_result", hook)]

    assert tls.hooks.check_hook(model, without(0.0), "L0H1").exact
    assert not tls.hooks.check_hook(model, without(0.5), "L0H1").exact
    assert not tls.hooks.check_hook(model, without(0.0), "L0H2").exact


def test_what_cannot_be_taken_off_is_said(monkeypatch):
    model = zoo.bridge("llama")
    kind = type(model.blocks[0].mlp.original_component)
    monkeypatch.setattr(kind, "forward", lambda self, x: 0 * x)
    [first, second] = tls.hooks.check_hook(model, None, "L0H1").found
    assert first == "it changes nothing that L0H1 writes"
    assert second.startswith(f"{kind.__name__}.forward of {kind.__module__} cannot be taken off for the check")


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("replaced", [False, True])
def test_a_hook_on_the_model_that_was_copied_is_said_with_its_place_in_the_copy(replaced, monkeypatch):
    given = zoo.hf_model("llama")
    model = tls.load_model(given)
    projection = given.model.layers[0].self_attn.o_proj
    if replaced:
        monkeypatch.setitem(vars(projection), "forward", lambda z: 0 * z)
    else:
        projection.register_forward_pre_hook(columns_zeroed)
    first, second = tls.hooks.check_hook(model, None, "L0H1").found
    assert first == "it changes nothing that L0H1 writes"
    name = "model.layers.0.self_attn.o_proj" + ".forward" * replaced
    assert second.startswith(
        f"hooks are on the LlamaForCausalLM that load_model copied, at {name}: they do not act in "
    )
    place = eval(second.rpartition("put them on ")[2], {"model": model})
    assert getattr(place, "original_component", place) is output_map(attention_view(model).blocks[0].module)
    handle = place.register_forward_pre_hook(columns_zeroed)
    assert tls.hooks.check_hook(model, None, "L0H1").exact
    handle.remove()
    projection._forward_pre_hooks.clear()
    monkeypatch.undo()
    assert tls.hooks.check_hook(model, None, "L0H1").found == ["it changes nothing that L0H1 writes"]
