"""What reads patterns inside a block, where the bridge leaves attention to the wrapped module: the edited ones.

Left padding, which such a layer does not show, is refused.
"""

import pytest
import torch
import zoo
from ablation_runs import (
    DELEGATED,
    a_part,
    block_parts,
    in_dtype,
    intact,
    logits,
    one_of_each,
    recorded,
    recording,
    rotary_parts,
)
from positional_measurements import cut_prompt
from zoo import shared

import tlspectral as tls
from tlspectral.errors import EditNotHonored, ScoreMismatch
from tlspectral.hooks import ablate
from tlspectral.models.reading import attention_view

ROTATES = ("gptj", "nanochat")
every_delegated = pytest.mark.parametrize("name", DELEGATED)
HEADS = [(0, 1), (0, 2), (1, 3)]
PARTS = one_of_each([cut_prompt(row, (3, 3, 3, 3, 12)) for row in zoo.prompt()])


@pytest.mark.slow
@every_delegated
@pytest.mark.parametrize("part", PARTS)
def test_z_is_the_pattern_times_the_values(name, part):
    if part in rotary_parts and name not in ROTATES:
        pytest.skip("no RoPE")
    model = shared("bridge", name)
    # In GPT-Neo's second layer a window hides the blocks.
    heads = HEADS[:2] if part in block_parts else HEADS
    before = recorded(model, ("pattern",))
    with ablate(model, heads, PARTS[part]):
        seen = recorded(model, ("pattern", "value", "z"))
    for layer in range(2):
        chosen = [head for index, head in heads if index == layer]
        others = [head for head in range(4) if head not in chosen]
        pattern, z = seen[layer, "pattern"], seen[layer, "z"].transpose(1, 2)
        value = seen[layer, "value"].transpose(1, 2)
        expected = pattern @ value.repeat_interleave(4 // value.shape[1], 1)
        silent = chosen if part == "output" else []
        kept = [head for head in range(4) if head not in silent]
        # float32, z of size 1: measured 4e-7; with the intact pattern it is off by tenths.
        torch.testing.assert_close(z[:, kept], expected[:, kept], rtol=0, atol=1e-5)
        assert not z[:, silent].any()
        if layer == 0:
            assert torch.equal(pattern[:, others], before[0, "pattern"][:, others])
            # Without rotary positions nothing depends on the place; output leaves the pattern.
            idle = part == "output" or (part in ("position", "interaction") and name not in ROTATES)
            moved = float((pattern[:, chosen] - before[0, "pattern"][:, chosen]).abs().max())
            assert moved == 0 if idle else moved > 1e-3


@pytest.mark.slow
@every_delegated
def test_hooks_that_were_there_before_and_caches_see_it(name):
    model, part = shared("bridge", name), a_part(name)
    point = attention_view(model).hook_names(0)["pattern"]
    with recording(model, [point]) as seen, ablate(model, [(0, 1)], part):
        expected = logits(model)
        early = seen[point]
        with torch.no_grad():
            cached, cache = model.run_with_cache(zoo.prompt())
    assert torch.equal(cached, expected)
    assert torch.equal(cache[point], early)
    assert torch.equal(cache["blocks.0.attn.hook_attn_scores"], early)  # after the softmax here
    assert not torch.equal(early, recorded(model, ("pattern",))[0, "pattern"])
    assert torch.equal(logits(model), intact("bridge", name))


@pytest.mark.fast(1)
@every_delegated
def test_numbers_of_the_intact_head_are_refused(name):
    """Its queries and keys are those of the intact head, and what it attends to is not."""
    model, ids = shared("bridge", name), zoo.prompt(batch=1)
    with ablate(model, "L1H1", "symmetric"):
        with pytest.raises(ScoreMismatch, match="L1H1"):
            tls.edge_effects(model, "L1H1.k")
        with pytest.raises(ScoreMismatch, match="the attention of the run differs"):
            tls.qk_attribution(model, ids, "L1H1", query=9, key=8)
        tls.edge_effects(model, "L1H0.k")


@pytest.mark.slow
@every_delegated
def test_with_gradients_and_as_a_list(name):
    model = zoo.bridge(name)
    with ablate(model, "L0H1", "symmetric"):
        expected = recorded(model, ("pattern",))[0, "pattern"]
        with recording(model, ["blocks.0.attn.hook_pattern"]) as seen:
            loss = model(zoo.prompt(), return_type="loss")
    # With gradients the biases are folded in float32: measured 2e-7.
    torch.testing.assert_close(seen["blocks.0.attn.hook_pattern"], expected, rtol=0, atol=1e-5)
    weight = model.blocks[0].attn.v.original_component.weight
    (found,) = torch.autograd.grad(loss, [weight])
    with torch.no_grad(), ablate(model, "L0H1", "symmetric"):  # a finite difference
        step = 1e-2 * found / found.norm()
        weight += step
        upper = model(zoo.prompt(), return_type="loss")
        weight -= 2 * step
        lower = model(zoo.prompt(), return_type="loss")
        weight += step
    # float32: measured off by 0.002 of it.
    assert float(upper - lower) == pytest.approx(2e-2 * float(found.norm()), rel=0.02)
    hooks = [*tls.ablation_hooks(model, "L0H1", "symmetric")]
    listed = {}
    hooks.append(("blocks.0.attn.hook_pattern", lambda pattern, hook: listed.update(pattern=pattern.clone())))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            model.run_with_hooks(zoo.prompt(), fwd_hooks=hooks)
        torch.testing.assert_close(listed["pattern"], expected, rtol=0, atol=1e-5)
    assert not any("_fire_post_hoc_hook" in block.attn.__dict__ for block in model.blocks)


@pytest.mark.slow
@every_delegated
def test_two_blocks_on_one_head_are_refused(name):
    model = zoo.bridge(name)
    second = ablate(model, ["L0H1", "L0H2"], "antisymmetric")
    with (
        ablate(model, "L0H1", "symmetric"),
        pytest.raises(EditNotHonored, match=r"L0H1: an `ablate` context on L0H1 \(symmetric\) is open"),
        second,
    ):
        pass
    with ablate(model, "L0H1", "symmetric"), ablate(model, "L0H2", "antisymmetric"):
        nested = recorded(model, ("pattern",))[0, "pattern"]
    for head, part in (("L0H1", "symmetric"), ("L0H2", "antisymmetric")):
        with ablate(model, head, part):
            alone = recorded(model, ("pattern",))[0, "pattern"]
        assert torch.equal(alone[:, int(head[-1])], nested[:, int(head[-1])])


@pytest.mark.slow
@every_delegated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_padded_token_in_a_batch_is_not_overlooked(name, dtype):
    model = in_dtype("bridge", name, dtype)
    tokens = zoo.prompt(batch=16, length=48)
    mask = torch.ones_like(tokens)
    with ablate(model, [(0, 1)], "symmetric"):
        logits(model, tokens, attention_mask=mask)
        mask[5, 0] = 0
        with pytest.raises(EditNotHonored, match="padding"):
            logits(model, tokens, attention_mask=mask)
