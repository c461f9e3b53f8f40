"""Figures of ablations: every head and offset is drawn where the table says."""

import numpy as np
import pytest
from plotted_tables import HEADS, KERNELS, SWEEP

from tlspectral.plots import ablation_effects, kernel

pytestmark = pytest.mark.lowest


def test_effects_are_sorted_beside_their_control_and_unmeasured_heads_left_out():
    (axes,) = ablation_effects(SWEEP, HEADS).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["L0H1  (prev 0.10)", "L0H0  (prev 0.90)"]
    assert axes.containers[0][0].get_xdata().tolist() == [-0.1, 0.5]
    assert axes.get_xlabel() == "change of the loss (nats), bars: one standard error over sequences"
    (axes,) = ablation_effects(SWEEP.assign(delta_se=np.nan), HEADS).axes  # of one prompt
    assert axes.get_xlabel() == "change of the loss (nats)"
    controlled = SWEEP.assign(control_delta=[0.2, 0.0, np.nan], control_delta_se=[0.1, 0.1, np.nan])
    for part, said in (("rope_phase", "random part of equal size removed"), ("output", "the same of other heads")):
        (axes,) = ablation_effects(controlled.assign(part=part), HEADS).axes
        _, control = axes.containers
        assert control[0].get_xdata().tolist() == [0.0, 0.2]
        assert said in control.get_label()


@pytest.mark.parametrize("with_ablated", [False, True])
def test_one_panel_per_head_and_one_line_per_state(with_ablated):
    panels = kernel(KERNELS, KERNELS.assign(score=-KERNELS["score"]) if with_ablated else None).axes
    assert [axes.get_title() for axes in panels] == ["L2H1", "L2H5"]
    for start, axes in zip((0, 4), panels, strict=True):
        scores = list(range(start, start + 4))
        expected = [scores, [-score for score in scores]][: 1 + with_ablated]
        assert [line.get_ydata().tolist() for line in axes.lines] == expected
