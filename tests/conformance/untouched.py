"""Nothing that was asked of a row has changed its model. Asked last."""

import contextlib

import torch
import zoo
from ablation_runs import logits
from model_state import assert_unchanged

from tlspectral.errors import ScoreMismatch
from tlspectral.heads.operators.verification import verify_scores
from tlspectral.models.running.passes import run_until

from .rows import asked


@asked(encoders=True)
def nothing_has_changed(row):
    """Tensors to the bit and where they lie, modules, flags, hooks and logits are those of before the first property.

    Reads and runs the model itself too, so that the property means something when it is asked alone.
    """
    model, view, seen = row.model, row.view, []
    names = view.hook_names(view.n_layers - 1)
    for index in row.layers:
        view.layer(index), view.output(index), view.n_heads(index), view.hook_names(index)
    view.embedding(), view.causal and view.unembedding(), view.position_embedding()
    run_until(view, zoo.prompt(), [(names["residual"], lambda x, hook: seen.append(x.shape))], last=names["pattern"])
    with contextlib.suppress(ScoreMismatch):  # Cohere on TransformerLens 3.9
        verify_scores(model)
    assert seen == [(2, zoo.PROMPT_LENGTH, zoo.WIDTH)]
    assert_unchanged(model, row.state)
    assert torch.equal(logits(model), row.logits)
