"""What gets no head table: broken weights, scores that are not reproduced, unknown layers, names and models."""

import pytest
import torch
from head_tables import analyze, built
from reference_circuits import edited

from tlspectral.errors import BadWeights, ScoreMismatch
from tlspectral.models.attention import bridge as bridge_reader


@pytest.mark.parametrize(("module", "role"), [("q_proj", "W_Q"), ("o_proj", "W_O")])
def test_weights_that_are_no_numbers_are_refused_by_layer_and_role(module, role):
    def spoil(model):
        model.model.layers[1].self_attn.get_submodule(module).weight.view(-1)[5] = float("nan")

    with pytest.raises(BadWeights, match=rf"layer 1, {role}: 1 of \d+ values are NaN or infinite"):
        analyze(edited("llama", spoil))


def test_a_model_whose_scores_are_not_reproduced_gets_no_table(monkeypatch):
    real = bridge_reader._score_scale
    monkeypatch.setattr(bridge_reader, "_score_scale", lambda *arguments: 1.001 * real(*arguments))
    with pytest.raises(ScoreMismatch, match="layer 0: the scores rebuilt from the folded weights differ from"):
        analyze(built("bridge", "llama"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"extras": ["score_asym", "nonsense"]}, "unknown extras"),
        ({"extras": "score_asym"}, "unknown extras"),
        ({"null_draws": 1}, "at least two draws, found null_draws=1"),
        ({"null_blocks": "own"}, "null_blocks"),
        ({"null_dtype": "float16"}, "null_dtype"),
    ],
)
def test_unknown_wishes_are_refused_before_any_work(monkeypatch, arguments, said):
    monkeypatch.setattr(torch.linalg, "qr", lambda *_, **__: pytest.fail("work began"))
    # An unknown literal is stopped by jaxtyping's hook in tests, by the function itself elsewhere.
    with pytest.raises((ValueError, TypeError), match=said):
        analyze(built("bridge", "llama"), **arguments)


@pytest.mark.parametrize("null_blocks", ["shared", "fresh"])
def test_draws_that_no_memory_holds_are_refused_with_what_they_would_take(null_blocks):
    """12 x 12 numbers of 8 bytes a draw: 1,073 GiB for 10^9 draws, and 7,456,540 draws in 8 GiB."""
    with pytest.raises(ValueError, match=r"12 x 12 .* 1,072\.9 GiB of memory: give null_draws of 7,456,540 at most"):
        analyze(built("bridge", "llama"), null_draws=10**9, null_blocks=null_blocks)
