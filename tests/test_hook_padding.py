"""Left padding under an ablation: followed, or refused where it cannot be seen."""

import pytest
import torch
import zoo
from ablation_runs import DELEGATED, a_part, delegated, every_model, in_dtype, logits, rotary_layers
from zoo import shared

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate
from tlspectral.models.attention import attention_view


@every_model
def test_left_padding(backend, name):
    model = shared(backend, name)
    pad, tokens = 5, zoo.prompt(length=19)
    padded = torch.cat([torch.zeros(2, pad, dtype=torch.long), tokens], 1)
    mask = torch.ones_like(padded)
    mask[:, :pad] = 0
    part = a_part(name)
    heads = [(rotary_layers(attention_view(model))[-1] if part == "rope_phase" else 1, 1), (0, 2)]
    if delegated(backend, name):
        with (
            pytest.raises(EditNotHonored, match=r"layer 0: .*padding.*ablate on another backend"),
            ablate(model, heads, part),
        ):
            logits(model, padded, attention_mask=mask)
        return
    with ablate(model, heads, part):
        expected, found = logits(model, tokens), logits(model, padded, attention_mask=mask)[:, pad:]
    # Positions shift and with them the rounding of rotations: measured 2e-6 on logits of size 2. Pads that were
    # attended, or an ablation by other offsets, move them by tenths.
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("name", DELEGATED)
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


@pytest.mark.parametrize("name", DELEGATED)
def test_left_padding_leaves_output_alone(name):
    model = shared("bridge", name)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), zoo.prompt(length=19)], 1)
    mask = torch.ones_like(padded)
    mask[:, :5] = 0
    with ablate(model, [(0, 2)], "output"):
        assert (
            float(
                (logits(model, padded, attention_mask=mask)[:, 5:] - logits(model, zoo.prompt(length=19))).abs().max()
            )
            < 1e-5
        )
