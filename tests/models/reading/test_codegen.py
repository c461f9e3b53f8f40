"""CodeGen divides its scores after the mask: which keys are masked, explicit masks, and 16 bits."""

import pytest
import torch
import zoo
from ablation_runs import in_dtype, logits, recorded, recording
from score_terms import KEY, PROMPT, QUERY
from zoo import shared

import tlspectral as tls
from tlspectral.errors import ScoreMismatch
from tlspectral.hooks import ablate
from tlspectral.models.reading import attention_view

CODEGEN = ("bridge", "codegen")


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_masked_that_the_query_does_not_attend_to(dtype):
    model = in_dtype(*CODEGEN, dtype)
    view, tokens = attention_view(model), zoo.prompt()
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    names = [view.hook_names(1)[point] for point in ("scores", "pattern")]
    with recording(model, names) as seen:
        logits(model, tokens, attention_mask=mask)
    scores, pattern = (seen[name] for name in names)
    expected = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
    expected[0, :, :, :5] = False
    expected = expected.expand(scores.shape)
    # The masked scores of this model lie above half of the lowest number of their type.
    assert scores.dtype == torch.float32
    assert float(scores.min()) > torch.finfo(torch.float32).min / 2
    found = view.reader.unmasked(view.model, 1, scores)
    assert torch.equal(found[:, :, 5:], expected[:, :, 5:])  # queries of padding attend to anything
    assert not pattern[~found & expected.any(-1, keepdim=True)].any()


def test_a_window_is_an_explicit_mask():
    model = shared(*CODEGEN)
    before = recorded(model, ("pattern",))[0, "pattern"]
    with ablate(model, "L0H2", tls.parts.LongRange(3, sinks=1)):
        during = recorded(model, ("pattern",))[0, "pattern"]
    query, key = torch.arange(24)[:, None], torch.arange(24)
    expected = before[:, 2] * ((query - key < 3) | (key < 1))
    # float32: measured 1e-7; one key too many moves it by tenths.
    torch.testing.assert_close(during[:, 2], expected / expected.sum(-1, keepdim=True), rtol=0, atol=1e-6)
    assert torch.equal(during[:, [0, 1, 3]], before[:, [0, 1, 3]])


def test_an_edited_pattern_is_refused_in_16_bits_too():
    model = in_dtype(*CODEGEN, torch.bfloat16)
    # 4 eps of the largest score, of 9; it was 4 eps of a masked one.
    assert tls.qk_attribution(model, PROMPT, "L1H2", QUERY, KEY).attrs["tolerance"] < 1
    with (
        model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", lambda pattern, hook: pattern.roll(1, -1))]),
        pytest.raises(ScoreMismatch, match="the attention of the run differs"),
    ):
        tls.qk_attribution(model, PROMPT, "L1H2", QUERY, KEY)


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_a_table_in_the_models_rotary_module_gives_the_same_frequencies(name):
    """From transformers 5.24 on GPT-J's table of sin and cos stands in one module of the model, not in each layer."""
    model = zoo.bridge(name)
    expected = attention_view(model).rotary(0)
    attentions = [block.attn.original_component for block in model.blocks]
    if not hasattr(attentions[0], "embed_positions"):
        pytest.skip("this version of transformers has the table in one module")
    held = torch.nn.Module()
    held.embed_positions = attentions[0].embed_positions
    model.original_model.rotary_emb = held
    for attention in attentions:
        attention.embed_positions = None
    found = attention_view(model).rotary(0)
    for field in ("theta", "real_index", "imag_index"):
        assert torch.equal(getattr(found, field), getattr(expected, field))
