"""Arguments of a table made layer by layer: some layers, extras, detectors, the bar."""

import numpy as np
import pandas as pd
import pytest
import torch
from streamed_checkpoints import analyze

import tlspectral as tls
from tlspectral.errors import BadHead
from tlspectral.models import checkpoints


@pytest.mark.parametrize("layers", [[1], [3, 0]])
def test_some_layers_only(folder, monkeypatch, layers):
    read = []
    real = checkpoints.CheckpointLayers.layer
    monkeypatch.setattr(
        checkpoints.CheckpointLayers, "layer", lambda self, index: (read.append(index), real(self, index))[1]
    )
    part = analyze(folder("gemma2"), layers=layers)
    assert read == sorted(layers)
    whole = analyze(folder("gemma2"))
    expected = whole[whole["layer"].isin(layers)].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        part.drop(columns="D_head_pct"), expected.drop(columns="D_head_pct"), check_exact=True
    )


def test_layers_that_do_not_exist_are_refused(folder):
    with pytest.raises(BadHead, match="the model has layers 0 to 1"):
        analyze(folder("llama"), layers=[2])


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_position_share_needs_no_run(folder, name):
    extras = {"extras": ["position_share"]}
    streamed, loaded = analyze(folder(name), **extras), analyze(tls.load_model(folder(name)), **extras)
    assert streamed["position_share"].notna().all() == (name != "llama")
    np.testing.assert_allclose(streamed["position_share"], loaded["position_share"], rtol=1e-12)


@pytest.mark.parametrize("arguments", [{"extras": ["score_asym"]}, {"tokens": torch.arange(3, 20)}])
def test_activations_need_the_model(folder, sizes, arguments):
    path = folder("llama")
    sizes.clear()
    with pytest.raises(ValueError, match="needs the model's activations"):
        analyze(path, **arguments)
    assert not sizes  # said before any work


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_with_detectors_the_model_is_loaded(folder, sizes, kind):
    path = kind(folder("llama"))
    sizes.clear()
    table = analyze(path, detectors=True)
    assert set(sizes) == {2}
    assert table.attrs["backend"] == "bridge"
    assert table[["prev", "outside_m"]].notna().all(axis=None)


def test_the_bar_is_silent_when_off(folder, capfd):
    capfd.readouterr()
    analyze(folder("llama"))
    assert capfd.readouterr() == ("", "")
