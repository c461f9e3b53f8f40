"""Edges on a device: measured in its float32 with sums in float64, beside the float64 of the CPU."""

import numpy as np
import pytest
import zoo
from stand_in_device import OF_GAINS, Float64Numbers

import tlspectral as tls
from tlspectral.models.reading import attention_view
from tlspectral.tasks.repeated import repeated_sequences

SMALL = {"sum", "div", "sub", "mean", "select"}  # sums over tokens, and what is made of them


@pytest.mark.slow
@pytest.mark.parametrize("end", ["L1H1.k", *zoo.also_slow("L1H1.q")])
@pytest.mark.parametrize("name", ["llama", *zoo.also_slow("gpt2", "gemma3", "deepseek_v3", "olmo2", "smollm3")])
@pytest.mark.filterwarnings("ignore:the .* cannot be edited alone")
def test_on_a_device_attention_is_measured_in_float32_and_is_that_of_the_cpu(device, name, end):
    on_cpu, placed = zoo.shared("bridge", name), zoo.bridge(name).to(device)
    task = tls.tasks.induction(repeated_sequences(attention_view(on_cpu), n_sequences=4, segment_length=8))
    options = {"senders": ["heads", "mlps", "embedding"], "task": task, "measure": "ind", "control": 2}
    expected = tls.edge_effects(on_cpu, end, **options)
    with Float64Numbers() as computed:
        found = tls.edge_effects(placed, end, **options)
    assert set(computed.of) <= SMALL | OF_GAINS
    assert found["sender"].tolist() == expected["sender"].tolist()
    assert not found["delta"].equals(expected["delta"])  # rounded otherwise, so computed otherwise
    for column in ("attention", "delta", "delta_se", "control_delta", "k_composition"):
        # Measured: 4e-8, where the largest effects are .002 to .05. An edge taken for another is off by 1e-3.
        np.testing.assert_allclose(found[column], expected[column], rtol=0, atol=2e-7, err_msg=column)
