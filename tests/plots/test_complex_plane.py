"""Eigenvalues in the complex plane are those of the operator, over those of its null."""

import numpy as np
import pytest
from figure_parts import part
from zoo import shared

import tlspectral as tls
from tlspectral import plots
from tlspectral.heads.operators.null_eigenvalues import null_eigenvalues
from tlspectral.models.reading import attention_view
from tlspectral.plots import complex_plane


def test_panels_hold_the_eigenvalues_of_each_head_and_of_its_null():
    model = shared("bridge", "llama")
    figure = plots.eigenvalues(model, ["L0H1", "L1H0"], seed=3)
    table = tls.analyze_heads(model, heads=["L0H1", "L1H0"], detectors=False, null_draws=30, seed=3)
    for number, (row, pair) in enumerate(zip(table.itertuples(), [(0, 1), (1, 0)], strict=True)):
        spectrum = tls.qk_operators(model)[pair].spectrum()
        values = spectrum.eigenvalues.numpy()
        own = part(figure, "eigenvalues")[number]
        np.testing.assert_array_equal(own.get_xydata(), np.stack([values.real, values.imag], 1))
        cloud = null_eigenvalues(attention_view(model).layer(pair[0]), spectrum.singular_values, 30, 3).numpy().ravel()
        drawn = part(figure, "null")[number].get_xydata()
        np.testing.assert_array_equal(drawn, np.stack([cloud.real, cloud.imag], 1))
        radius = np.linalg.norm(part(figure, "circle")[number].get_xydata(), axis=1)
        # Rounding of sines and cosines.
        np.testing.assert_allclose(radius, np.sqrt((np.abs(cloud) ** 2).mean()), rtol=1e-12)
        title = own.axes.get_title(loc="left")
        # The mean of the draws; that of the table is corrected by a control variate.
        of_draws = (np.abs(cloud.imag).reshape(30, -1).sum(1) / np.abs(cloud).reshape(30, -1).sum(1)).mean()
        assert title == f"L{pair[0]}H{pair[1]}: D_head {row.D_head:.2f}, null {of_draws:.2f}"


def test_too_many_heads_are_refused(monkeypatch):
    monkeypatch.setattr(complex_plane, "_MOST_HEADS", 7)
    with pytest.raises(ValueError, match="8 heads given: give 1 to 7 heads"):
        plots.eigenvalues(shared("bridge", "llama"), ["L0", "L1"])
