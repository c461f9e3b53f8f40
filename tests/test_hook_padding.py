"""Left padding under an ablation: followed, or refused where it cannot be seen."""

import pytest
import torch
import zoo
from ablation_runs import DELEGATED, in_dtype, logits

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate


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
