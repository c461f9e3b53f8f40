"""Eigenvalues of the null are those behind the percentiles of a table."""

import numpy as np
import pytest
import zoo

import tlspectral as tls
from tlspectral.heads.operators.null_eigenvalues import null_eigenvalues
from tlspectral.models.reading import attention_view


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_draws_are_those_of_the_table(name):
    """Also under LayerNorm, where frames have a dimension less: the table's percentile comes out."""
    bridge = zoo.shared("bridge", name)
    table = tls.analyze_heads(bridge, null_draws=30, detectors=False, seed=5)
    ops = tls.qk_operators(bridge)
    for row in table.itertuples():
        singular = ops[row.layer, row.head].spectrum().singular_values
        cloud = null_eigenvalues(attention_view(bridge).layer(row.layer), singular, 30, 5).numpy()
        drawn = np.abs(cloud.imag).sum(1) / np.abs(cloud).sum(1)
        assert (drawn <= row.D_head).mean() == row.D_head_null_pct
