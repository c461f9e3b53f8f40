"""Frequencies are those by which the model rotates now: after edits of frequencies, tables and rotary modules."""

import numpy as np
import pytest
import torch
import zoo
from conformance.scoring import assert_exact, one_token
from torch import nn

import tlspectral as tls
from tlspectral.errors import ScoreMismatch
from tlspectral.heads import kernel_prediction, relative_position_kernel
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.rotation import compared_positions, frequencies_of_tables

NO_FREQUENCIES = "its cos and sin do not turn pair [0-9]+ by one angle per token"


def theta_of(model, layer=0):
    return attention_view(model).rotary(layer).theta


def rotary_module(model):
    return model.rotary_emb.original_component


def assert_right(model):
    """What is said of the frequencies is so of the model's own scores."""
    assert float(tls.verify_scores(model).max()) < 5e-5  # measured: 1.3e-5, at scores of 40
    # All tokens equal: the mean score at each distance is the mean query with the mean key, exactly.
    assert_exact(relative_position_kernel(model, None, one_token(), reference=one_token()))
    table = tls.frequency_table(model).query("head == 0")
    for layer, rows in table.groupby("layer"):
        np.testing.assert_array_equal(rows["theta"], theta_of(model, layer))


@pytest.mark.tl4
@pytest.mark.parametrize("name", ["llama", *zoo.also_slow("neox", "yarn", "deepseek_v3", "olmo2")])
def test_edited_frequencies(name):
    model = zoo.bridge(name)
    before = theta_of(model)
    rotary_module(model).inv_freq.mul_(0.5)
    assert torch.equal(theta_of(model), before / 2)
    rotary_module(model).inv_freq.data[0] *= 0.75  # torch does not count such an edit
    assert torch.equal(theta_of(model)[1:], before[1:] / 2)
    assert theta_of(model)[0] == before[0] * 0.375
    assert_right(model)


@pytest.mark.tl4
def test_edited_frequencies_of_one_type_of_layers():
    model = zoo.bridge("gemma3")
    before = [theta_of(model, layer) for layer in range(2)]
    types = model.original_model.config.layer_types
    getattr(rotary_module(model), f"{types[1]}_inv_freq").mul_(0.5)
    assert torch.equal(theta_of(model, 0), before[0])
    assert torch.equal(theta_of(model, 1), before[1] / 2)
    assert_right(model)


@pytest.mark.tl4
def test_the_start_of_learned_frequencies_and_names_of_bands():
    model = zoo.bridge("llama")
    slowest = theta_of(model)[-1]
    rotary_module(model).inv_freq[-1] = 1.5  # the last pair is now the fastest
    spectral = tls.to_spectral(model)
    for module in spectral.spectral.values():
        assert module.theta.argmax() == len(module.theta) - 1
    assert torch.equal(zoo.logits(spectral), zoo.logits(model))
    band = tls.parts.Band("high").pairs_of(attention_view(model).rotary(0), [0])
    assert bool(band[..., -1].all())
    assert slowest < 0.01


@pytest.mark.parametrize(("name", "long"), [("dynamic", False), ("dynamic", True), ("phi3_longrope", True)])
def test_a_module_that_overwrites_its_frequencies(name, long):
    """Short prompts take `original_inv_freq`, with LongRoPE always, with dynamic NTK once a longer one was met."""
    model = zoo.bridge(name)
    if long:
        zoo.logits(model, zoo.prompt(length=64))
    module = rotary_module(model)
    before = module.original_inv_freq.double()
    module.inv_freq.mul_(0.5)
    state = {key: value.clone() for key, value in module.named_buffers()}, module.max_seq_len_cached
    found = theta_of(model)
    # Reading runs the module, which overwrites its frequencies, and leaves the model's own as they are.
    assert all(torch.equal(value, state[0][key]) for key, value in module.named_buffers())
    assert module.max_seq_len_cached == state[1]
    assert torch.equal(found, before if long else before / 2)
    assert float(tls.verify_scores(model).max()) < 1e-5
    assert torch.equal(theta_of(model), found)


# --- rotary modules of the user ---


class OwnRotary(nn.Module):
    """The frequencies of another module, at positions of its own making."""

    def __init__(self, inner, positions):
        super().__init__()
        self.inner, self.positions, self.calls = inner, positions, []
        self.register_buffer("inv_freq", inner.inv_freq)

    def forward(self, x, position_ids):
        self.calls.append(position_ids.shape[1])
        return self.inner(x, self.positions(position_ids))


def halved(position_ids):
    return position_ids / 2


def frozen(position_ids):
    return position_ids.clamp_max(28)


def with_own_rotary(positions, *, behind_the_bridge=False):
    model = zoo.bridge("llama")
    own = OwnRotary(rotary_module(model), positions)
    if behind_the_bridge:
        model.original_model.model.rotary_emb = own
    else:
        model.rotary_emb.set_original_component(own)
    return model, own


@pytest.mark.tl4
@pytest.mark.parametrize("behind_the_bridge", [False, True])
@pytest.mark.filterwarnings("ignore:.*hooks of yours are on the model:UserWarning")  # the module is the user's
def test_a_module_of_the_user_has_the_frequencies_that_its_forward_gives(behind_the_bridge):
    before = theta_of(zoo.shared("bridge", "llama"))
    model, own = with_own_rotary(halved, behind_the_bridge=behind_the_bridge)
    # Read off float32 cos and sin, which round to 6e-8.
    torch.testing.assert_close(theta_of(model), before / 2, rtol=1e-6, atol=0)
    asked = len(own.calls)
    assert asked == 1
    theta_of(model, 1)
    assert len(own.calls) == asked  # once for all layers
    assert_right(model)


@pytest.mark.tl4
@pytest.mark.filterwarnings("ignore:.*hooks of yours are on the model:UserWarning")  # the module is the user's
def test_a_replaced_forward():
    model = zoo.bridge("llama")
    module, before = rotary_module(model), theta_of(model)
    plain = module.forward
    module.forward = lambda x, position_ids: plain(x, position_ids / 2)
    torch.testing.assert_close(theta_of(model), before / 2, rtol=1e-6, atol=0)  # float32 cos and sin
    assert_right(model)


@pytest.mark.tl4
@pytest.mark.filterwarnings("ignore:.*hooks of yours are on the model:UserWarning")  # the module is the user's
def test_what_is_no_rotation_by_one_angle_per_token_is_refused_where_frequencies_are_needed():
    model, _ = with_own_rotary(frozen)
    for needs in (
        tls.frequency_table, relative_position_kernel, kernel_prediction, tls.to_spectral,
        lambda model: tls.analyze_heads(model, null_draws=2),
        lambda model: tls.ablation_sweep(model, "rope_phase", heads="L0H0"),
    ):  # fmt: skip
        with pytest.raises(ScoreMismatch, match=NO_FREQUENCIES):
            needs(model)
    tokens = zoo.prompt()
    assert len(tls.top_pairs(model, "L0H0", tokens, n=2))
    assert tls.detect_heads(model, prompts=tokens)["prev"].notna().all()
    with tls.ablate(model, "L0H0", "output"):
        assert zoo.logits(model).isfinite().all()


@pytest.mark.tl4
def test_a_hook_on_cos_and_sin_is_no_edit_of_the_model_and_ends_the_prediction():
    model, tokens = zoo.shared("bridge", "llama"), zoo.prompt(4)
    slower = [("blocks.1.attn.hook_cos", lambda cos, hook: cos[:, :1].expand_as(cos))]
    with model.hooks(fwd_hooks=slower):
        assert relative_position_kernel(model, "L0H1", tokens)["predicted"].notna().all()
        with pytest.raises(ScoreMismatch, match="layer 1: the model rotates its pairs by other angles"):
            relative_position_kernel(model, "L1H1", tokens)


# --- stored tables ---


@zoo.needs_hooked
def test_edited_tables_of_one_layer_of_a_hooked_transformer():
    model = zoo.hooked("llama")
    before = theta_of(model)
    attention = model.blocks[1].attn
    angle = torch.arange(len(attention.rotary_cos))[:, None] * torch.cat([before, before]).float() / 4
    attention.rotary_cos.copy_(2 * angle.cos())
    attention.rotary_sin.copy_(2 * angle.sin())
    torch.testing.assert_close(theta_of(model, 1), before / 4, rtol=1e-6, atol=0)  # float32 cos and sin
    assert attention_view(model).rotary(1).attention_scaling == pytest.approx(2, rel=1e-6)
    assert torch.equal(theta_of(model, 0), before)
    assert_right(model)


def rolled(attention):
    for table in (attention.rotary_cos, attention.rotary_sin):
        table.copy_(table.roll(-1, 0))


def constant_from_20(attention):
    for table in (attention.rotary_cos, attention.rotary_sin):
        table[20:] = table[20]


def one_of_two_columns(attention):
    attention.rotary_cos[:, :2] = 1.0
    attention.rotary_sin[:, :2] = 0.0


@zoo.needs_hooked
@pytest.mark.parametrize("edit", [rolled, constant_from_20, one_of_two_columns])
def test_tables_without_frequencies_are_refused(edit):
    model = zoo.hooked("llama")
    edit(model.blocks[1].attn)
    assert theta_of(model).isfinite().all()
    with pytest.raises(ScoreMismatch, match=f"layer 1: {NO_FREQUENCIES}"):
        tls.frequency_table(model)


@pytest.mark.slow
@pytest.mark.tl4
def test_edited_tables_in_each_attention():
    model = zoo.bridge("gptj")
    wrapped = model.blocks[1].attn.original_component
    holder = wrapped if hasattr(wrapped, "embed_positions") else rotary_module(model)
    half = holder.embed_positions.clone()
    half[1::2] = 0.0
    before = theta_of(model, 1)
    holder.embed_positions.copy_(half)
    with pytest.raises(ScoreMismatch, match=NO_FREQUENCIES):
        theta_of(model, 1)
    angle = torch.arange(len(half))[:, None] * before.float() / 2
    holder.embed_positions.copy_(torch.cat([angle.sin(), angle.cos()], dim=1))
    torch.testing.assert_close(theta_of(model, 1), before / 2, rtol=1e-6, atol=0)


@zoo.needs_hooked
def test_a_long_prompt_does_not_move_the_frequencies_of_a_hooked_transformer():
    model = zoo.hooked("llama")
    before = theta_of(model)
    model.cfg.use_dynamic_ntk_rope, model.cfg.train_seq_length = True, 24
    kept = model.blocks[0].attn.rotary_cos.clone()
    zoo.logits(model, zoo.prompt(length=50))
    assert not torch.equal(model.blocks[0].attn.rotary_cos, kept)
    assert torch.equal(theta_of(model), before)


@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_frequencies_of_tables(dtype, stored):
    theta = 10.0 ** -torch.linspace(0, 4, 9, dtype=torch.float64)
    positions = torch.tensor(compared_positions(2000), dtype=torch.float64)
    angle = positions[:, None] * theta
    cos, sin = ((1.25 * table.to(dtype)).to(stored) for table in (angle.cos(), angle.sin()))
    for columns in (cos, sin), [torch.cat([one, one], 1) for one in (cos, sin)], [
        one.repeat_interleave(2, 1) for one in (cos, sin)
    ]:  # fmt: skip
        found = frequencies_of_tables(*columns, len(theta))
        assert found.mismatch is None
        # Row 1024 rounds by 0.004 in 16 bits; row 1 alone would be off by 2e-3 of theta.
        torch.testing.assert_close(found.theta, theta, rtol=1e-4, atol=4e-6 if dtype != torch.float32 else 0)
        assert found.scaling == pytest.approx(1.25, rel=8e-3)  # of row 1 alone
