"""The presets and arms of constrained training."""

import json

import pytest

from tlspectral.studies.fingerprint.constrained import ARMS, PRESETS, Arm, symmetric_penalty
from tlspectral.studies.fingerprint.constrained.presets import loss_threshold


def test_the_presets_are_what_they_say():
    paper, quick = PRESETS["paper"], PRESETS["quick"]
    assert loss_threshold(64) == pytest.approx(2.15444, abs=1e-5)  # FP's
    assert paper.loss_threshold == loss_threshold(64)
    assert quick.loss_threshold == loss_threshold(32)
    sizes = ("d_model", "n_heads", "d_head", "d_vocab", "n_ctx", "rotary_adjacent_pairs", "unembed_bias")
    assert [getattr(paper.config, name) for name in sizes] == [128, 4, 32, 64, 256, False, True]
    assert paper.training.learning_rate_at(5999) == 1e-3  # no decay
    assert paper.training.learning_rate_at(50) == pytest.approx(2.5e-4)
    schedule = ("steps", "batch_size", "evaluate_every", "evaluation_sequences", "weight_decay", "clip")
    assert [getattr(paper.training, name) for name in schedule] == [6000, 64, 100, 64, 0.01, 1.0]
    assert [getattr(quick.training, name) for name in schedule] == [4000, 32, 25, 64, 0.01, 1.0]
    assert (paper.stop_after, quick.stop_after) == (None, 200)
    assert {name: arm.penalty_weight for name, arm in ARMS.items()} == {
        "ape_free": 0.0,
        "ape_sym": 10.0,
        "rope_free": 0.0,
        "rope_sym": 10.0,
        "rope_imag": 10.0,
    }
    for preset in PRESETS.values():
        json.dumps(preset.settings())
        assert preset.config_of(ARMS["ape_free"]).positional_embedding_type == "standard"
        assert preset.training_of(3).seed == 3


@pytest.mark.parametrize("given", [{"penalty": symmetric_penalty}, {"penalty_weight": 1.0}])
def test_half_a_constraint_is_refused(given):
    with pytest.raises(ValueError, match="give both, or neither"):
        Arm("mine", "rotary", **given)
