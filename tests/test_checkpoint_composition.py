"""Composition scores read from a checkpoint layer by layer are those of the loaded model."""

import pandas as pd
import pytest

import tlspectral as tls
from tlspectral.errors import BadHead
from tlspectral.models import checkpoints


@pytest.mark.parametrize("kind", ["k", "q", "v"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "neox", "phi3", "gptneo"])
def test_composition_from_files(folder, sizes, name, kind):
    path, target = folder(name), (1, 2)
    sizes.clear()
    streamed = tls.k_composition(str(path), target, kind=kind)
    assert set(sizes) == {1}
    loaded = tls.k_composition(tls.load_model(path), target, kind=kind)
    pd.testing.assert_frame_equal(streamed, loaded, rtol=1e-12, atol=0)


def test_composition_reads_values_and_outputs_of_earlier_layers_only(folder, monkeypatch):
    read = []
    real = checkpoints.CheckpointLayers.layer
    monkeypatch.setattr(
        checkpoints.CheckpointLayers,
        "layer",
        lambda self, index, side: (read.append((index, side)), real(self, index, side))[1],
    )
    assert len(tls.k_composition(folder("gemma2"), (2, 0))) == 8
    assert read == [(2, "query-key"), (0, "output"), (1, "output")]


@pytest.mark.parametrize("target", [(2, 0), (1, 4), (-3, 0), (1, -1)])
def test_composition_of_heads_that_are_not_there(folder, target):
    with pytest.raises(BadHead, match=r"does not exist: (the model has layers 0 to 1|layer . has heads 0 to 3)"):
        tls.k_composition(folder("llama"), target)
