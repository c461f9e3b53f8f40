"""Penalties of constrained training: those of `tlspectral.heads.qk_penalty`, and published runs under them."""

import pytest
import zoo
from test_constrained_models import PAPER, hooked, model

import tlspectral as tls
from tlspectral.nulls import one_thread
from tlspectral.studies.common.trainer import begin_training, held_out_sequences, training_steps
from tlspectral.studies.fingerprint.constrained import ARMS, phase_penalty, symmetric_penalty
from tlspectral.studies.fingerprint.constrained.measures import measure
from tlspectral.studies.fingerprint.published import published_constrained


@zoo.needs_hooked
@pytest.mark.parametrize(("penalty", "part"), [(symmetric_penalty, "antisymmetric"), (phase_penalty, "rope_phase")])
def test_penalties_are_the_public_one_of_the_stored_weights(penalty, part):
    ours, theirs = model(), hooked("rotary")
    theirs.load_state_dict(ours.state_dict(), strict=False)
    public = tls.heads.qk_penalty(theirs, part, folded=False, detach_denominator=True)
    assert public.item() == pytest.approx(penalty(ours).item(), abs=1e-7)
    public.backward()
    penalty(ours).backward()
    for block, other in zip(ours.layers, theirs.blocks, strict=True):
        for name in ("W_Q", "W_K"):
            found, expected = getattr(other.attn, name).grad, getattr(block.attn, name).grad
            # Measured: 1e-7 of the largest entry. The denominator's own gradient would move it by tenths.
            assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["ape_sym", "rope_imag"])
def test_the_paper_preset_follows_a_published_run_under_a_penalty(arm):
    """100 steps: a minute of one core each."""
    runs = published_constrained().evaluations
    published = runs.query("arm == @arm and strength == 10 and seed == 0 and step == 100")
    settings, weight = PAPER.training_of(0), ARMS[arm].penalty_weight
    training = begin_training(PAPER.config_of(ARMS[arm]), settings)
    with one_thread():
        for done in training_steps(training, PAPER.task, settings, penalty=ARMS[arm].penalty, penalty_weight=weight):
            if done == 100:
                break
        found = measure(training.model, held_out_sequences(PAPER.task, PAPER.training), ARMS[arm].penalty).evaluation
    # Measured: 0, to the last digit that is published. Without the penalty ce_pred of ape_sym differs by 4e-2.
    for name in ("ce_pred", "ce_unpred", "penalty"):
        assert found[name] == pytest.approx(published[name].item(), abs=1e-5), name
