"""What an MLP reads, at the hook point of every kind of norm, beside the model's own modules."""

import pytest
import torch
import zoo
from same_function import built, drawn

import tlspectral as tls
from tlspectral.algebra.rotary import widened
from tlspectral.errors import EditNotHonored, UnsupportedArchitecture
from tlspectral.hooks.edges.cut import Cut, receiver_inputs
from tlspectral.models.reading import attention_view
from tlspectral.models.stream.mlp import mlp_reads

pytestmark = zoo.needs_hooked

TOKENS = zoo.prompt(3, 12)
OLMO2 = {"normalization_type": "RMS", "original_architecture": "Olmo2ForCausalLM"}
BEHIND = {"normalization_type": "RMS", "use_normalization_before_and_after": True}
IN_FRONT = {
    "LN": {"normalization_type": "LN"},
    "LNPre": {"normalization_type": "LNPre"},
    "RMS": {"normalization_type": "RMS"},
    "RMSPre": {"normalization_type": "RMSPre"},
    "LN, parallel": {"normalization_type": "LN", "parallel_attn_mlp": True},
    "RMS, gated": {"normalization_type": "RMS", "gated_mlp": True},
    "LN, SoLU": {"normalization_type": "LN", "act_fn": "solu_ln"},
    "RMS, experts": {"normalization_type": "RMS", "gated_mlp": True, "num_experts": 4, "experts_per_token": 2},
    "RMS, before and behind": BEHIND,
}
NONE = {
    "no norm": {"normalization_type": None},
    "no norm, parallel": {"normalization_type": None, "parallel_attn_mlp": True},
    "OLMo 2": OLMO2,
}
CASES = {**IN_FRONT, **{name: {**changes, "use_hook_mlp_in": True} for name, changes in NONE.items()}}


def model_of(**changes):
    return drawn(built(**changes)).eval()


def run(model, hooks):
    """Logits, and what passes the points of layer 1."""
    seen = {}
    names = [name for name in model.hook_dict if name.startswith("blocks.1.")]
    keep = [(name, lambda x, hook, name=name: seen.update({name.removeprefix("blocks.1."): x})) for name in names]
    with torch.no_grad():
        return model.run_with_hooks(TOKENS, fwd_hooks=[*hooks, *keep]), seen


@pytest.mark.parametrize("kind", CASES)
def test_an_mlp_reads_a_stream_without_what_is_removed(kind):
    model = model_of(**CASES[kind])
    view, block = attention_view(model), model.blocks[1]
    plain, seen = run(model, [])
    x = seen["hook_resid_pre"] if model.cfg.parallel_attn_mlp else seen["hook_resid_mid"]
    removed = torch.randn(x.shape, generator=zoo.generator()) * x.std()
    (mlp_input,) = receiver_inputs(view, 1, "mlp")
    with view.hooks_on(mlp_input.hooks(lambda: [Cut([0], slice(None), removed[None])])):
        cut, _ = run(model, [])
    with torch.no_grad():
        if "original_architecture" in CASES[kind]:
            written = block.ln2(block.mlp(x - removed))
        else:
            written = block.mlp(block.ln2(x - removed))
            written = block.ln2_post(written) if model.cfg.use_normalization_before_and_after else written
    expected, _ = run(model, [("blocks.1.hook_mlp_out", lambda z, hook: written)])
    # float32, logits of about 20: measured 2e-5. A gain that acts twice moves them by more than .1.
    torch.testing.assert_close(cut, expected, rtol=0, atol=2e-4)
    assert float((cut - plain).abs().max()) > 0.1


@pytest.mark.parametrize("kind", IN_FRONT)
def test_a_gradient_goes_back_to_the_stream_as_by_autograd(kind):
    model = model_of(**IN_FRONT[kind], dtype=torch.float64).double()
    reads, block = mlp_reads(attention_view(model), 1), model.blocks[1]
    x = torch.randn(2, 5, 32, generator=zoo.generator(), dtype=torch.float64, requires_grad=True)
    seen = {}
    assert reads.point == "blocks.1.ln2.hook_normalized"
    block.ln2.hook_normalized.add_hook(lambda read, hook: seen.update(read=read))
    out = block.mlp(block.ln2(x))
    direction = torch.randn(out.shape, generator=zoo.generator(1), dtype=torch.float64)
    of_read, of_x = torch.autograd.grad(out, [seen["read"], x], direction)
    torch.testing.assert_close(reads.gradient(of_read, x.detach()), of_x)  # float64


@pytest.mark.parametrize("kind", NONE)
def test_without_a_norm_in_front_the_hook_point_has_to_be_switched_on(kind):
    model = model_of(**NONE[kind])
    assert len(tls.edge_effects(model, ["L1H1.q"], task=tls.logit_difference(TOKENS, 7, 11))) == 4  # no MLP reads
    task = tls.logit_difference(TOKENS, 7, 11, counterfactual=TOKENS.roll(1, 1))
    with pytest.raises(UnsupportedArchitecture, match=r"layer 0: the MLP .* model\.set_use_hook_mlp_in\(True\)"):
        tls.edge_effects(model, ["L1MLP"], task=task)
    model.set_use_hook_mlp_in(True)
    assert tls.edge_effects(model, ["L1MLP"], task=task)["delta"].abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:.*hooks of yours are on the model")
@pytest.mark.parametrize("point", ["ln2.hook_scale", "hook_mlp_in"])
def test_a_hook_in_front_of_what_the_mlp_reads_is_refused(point):
    """A frozen scale, for one: the norm of a changed stream is not what the MLP would read."""
    model = model_of(normalization_type="LN", use_hook_mlp_in=True)
    task = tls.logit_difference(TOKENS, 7, 11, counterfactual=TOKENS.roll(1, 1))
    with (
        model.hooks(fwd_hooks=[(f"blocks.1.{point}", lambda x, hook: x * torch.linspace(1.1, 1.2, x.shape[-1]))]),
        pytest.raises(EditNotHonored, match=r"layer 1, MLP: what passes blocks\.1\.ln2\.hook_normalized"),
    ):
        tls.edge_effects(model, ["L1MLP"], task=task)


@pytest.mark.parametrize("norm", ["LN", "RMS"])
def test_16_bits_round_the_stream_and_not_what_the_norm_hands_on(norm):
    """The norm of a HookedTransformer computes in float32, so its hook point is finer than the stream."""
    edges = []
    for dtype in (torch.float32, torch.bfloat16):
        model = drawn(built(normalization_type=norm, dtype=dtype)).eval()
        task = tls.logit_difference(TOKENS, 7, 11, counterfactual=TOKENS.roll(1, 1))
        edges.append(tls.edge_effects(model, ["L1MLP"], task=task)["delta"])
    # Deltas of .05 and .13, the median; measured: off by .018 and .034, since 16 bits round logits of 20 by hundredths.
    assert float((edges[0] - edges[1]).abs().median()) < 0.07


def test_a_bridge_shows_it_behind_the_gain():
    """The same weights on the other backend, whose point stands behind the gain."""
    (one, other) = (mlp_reads(attention_view(zoo.shared(kind, "llama")), 1) for kind in ("bridge", "unfolded"))
    assert one.norm.gain is not None
    assert other.norm.gain is None
    x = widened(torch.randn(1, 4, zoo.WIDTH, generator=zoo.generator()))
    change = [reads.changed(torch.zeros_like(x), x, 0.5 * x.roll(1)) for reads in (one, other)]
    gain = zoo.shared("unfolded", "llama").blocks[1].ln2.w.detach()
    torch.testing.assert_close(change[0].detach(), change[1].detach() * gain)
