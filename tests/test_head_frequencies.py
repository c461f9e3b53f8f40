"""The frequency table: frequencies of dense pairs, the phase columns of the head table, layers without RoPE."""

import numpy as np
import pandas as pd
import pytest
import zoo
from head_tables import built, dense_phase, table_of
from reference_circuits import reference

import tlspectral as tls
from tlspectral.errors import UnsupportedArchitecture


@pytest.mark.parametrize("name", ["neox", "llama", "qwen3"])
def test_frequencies_are_those_of_dense_pairs(name):
    table = tls.frequency_table(built("bridge", name))
    assert isinstance(table.index, pd.RangeIndex)
    places = list(zip(table["layer"], table["head"], table["frequency"], strict=True))
    assert places == sorted(places)
    for index, layer in enumerate(reference(name).layers):
        theta, re, im = dense_phase(name, layer)
        rows = table[table["layer"] == index]
        assert len(rows) == re.size
        # Measured: 1e-15, angles 4e-8 (the model keeps them in float32); another base or pairing: 1e-2 and more.
        np.testing.assert_allclose(rows["theta"], np.tile(theta, len(re)), rtol=1e-6)
        np.testing.assert_allclose(rows["wavelength"], 2 * np.pi / np.tile(theta, len(re)), rtol=1e-6)
        np.testing.assert_allclose(rows["re_norm"], re.flatten(), rtol=1e-10)
        np.testing.assert_allclose(rows["im_norm"], im.flatten(), rtol=1e-10)
        np.testing.assert_allclose(rows["im_share"], (im / (re + im)).flatten(), rtol=1e-10)


def test_the_frequency_table_carries_the_phase_columns():
    """The three columns of the head table are sums over a head's frequencies."""
    for name in ("neox", "phi", "gemma3", "smollm3"):
        heads = table_of(name)
        table = tls.frequency_table(built("bridge", name))
        table["turn"] = table["theta"] * table["im_norm"]
        sums = table.groupby(["layer", "head"])[["re_norm", "im_norm", "turn"]].sum().reset_index()
        heads = heads.merge(sums, on=["layer", "head"])
        share = heads["im_norm"] / (heads["im_norm"] + heads["re_norm"])
        np.testing.assert_allclose(heads["rope_imag_frac"], share, rtol=1e-12)  # sums in another order: 1e-15
        np.testing.assert_allclose(heads["freq_centroid"], heads["turn"] / heads["im_norm"], rtol=1e-12)
        # The first half rounded down: phi has three pairs.
        first = table[table["frequency"] < (table["frequency"].max() + 1) // 2]
        high = first.groupby(["layer", "head"])["im_norm"].sum().reset_index(drop=True)
        np.testing.assert_allclose(heads["hi_freq_dir"], high / heads["im_norm"], rtol=1e-12)
        assert (heads["rotary_fraction"] == {"neox": 0.25, "phi": 0.5}.get(name, 1.0)).all()


def test_layers_without_rotary_positions_have_no_rows():
    assert set(tls.frequency_table(built("bridge", "smollm3"))["layer"]) == {0, 2}
    assert tls.frequency_table(zoo.bridge("dynamic")).attrs["rotary_valid_up_to"] == 32
    with pytest.raises(UnsupportedArchitecture, match="none of the 2 layers has rotary positions"):
        tls.frequency_table(built("bridge", "bloom"))
