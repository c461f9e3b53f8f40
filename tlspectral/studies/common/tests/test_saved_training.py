"""A training that is saved: what goes on from it, the files, and what is refused."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tlspectral.errors import BadWeights, IncompatibleCheckpoint
from tlspectral.studies.common import RandomMapTask, TrainingSettings, TransformerConfig
from tlspectral.studies.common.saved_training import SavedTraining, saved_model, saved_steps
from tlspectral.studies.common.trainer import begin_training, training_steps

SMALL = TransformerConfig(d_model=16, n_heads=2, d_head=8, d_vocab=8, n_ctx=16)
TASK = RandomMapTask(vocabulary=8, length=16)
SHORT = TrainingSettings(steps=8, batch_size=4, warmup_steps=2, evaluation_sequences=4)


def trained(training, until, done=0):
    for step in training_steps(training, TASK, SHORT, done=done):
        if step == until:
            return training
    raise AssertionError


def same(one, other):
    assert set(one) == set(other)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(("positions", "stop"), [("rotary", 0), ("standard", 3)])
def test_a_training_goes_on_to_the_same_bits(tmp_path, positions, stop):
    config = replace(SMALL, positional_embedding_type=positions)
    whole = trained(begin_training(config, SHORT), 8)
    saved = SavedTraining(tmp_path / "run", {"seed": 0})
    assert saved.resume(begin_training(config, SHORT)) is None
    saved.save(trained(begin_training(config, SHORT), stop), stop, {"loss": [0.1, float("inf")]})
    resumed = begin_training(config, SHORT)
    assert saved.resume(resumed) == (stop, {"loss": [0.1, float("inf")]})
    trained(resumed, 8, done=stop)
    same(resumed.model.state_dict(), whole.model.state_dict())
    moments = [training.optimizer.state_dict()["state"] for training in (resumed, whole)]
    for index, values in moments[1].items():
        same(moments[0][index], values)
    assert torch.equal(resumed.stream.get_state(), whole.stream.get_state())


def test_the_files_of_a_saved_training(tmp_path):
    saved = SavedTraining(tmp_path, {"seed": 0})
    training = begin_training(SMALL, SHORT)
    saved.save(training, 0, {})
    saved.save(trained(training, 2), 2, {})
    assert list(saved_steps(tmp_path)) == [0, 2]
    assert saved_steps(tmp_path / "nothing") == {}
    file = tmp_path / "step2.safetensors"
    for weights in (load_file(file), saved_model(file).state_dict()):
        same(weights, training.model.state_dict())


def test_the_state_of_another_training_is_refused(tmp_path):
    SavedTraining(tmp_path, {"seed": 0}).save(begin_training(SMALL, SHORT), 0, {})
    with pytest.raises(IncompatibleCheckpoint, match="is the state of another training"):
        SavedTraining(tmp_path, {"seed": 1}).resume(begin_training(SMALL, SHORT))
    with pytest.raises(IncompatibleCheckpoint, match="is the state of another training"):
        SavedTraining(tmp_path, {"seed": 0}).resume(begin_training(replace(SMALL, rotary_base=100), SHORT))


@pytest.mark.parametrize("name", ["state", "step0"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_a_damaged_file_is_refused(tmp_path, name, damage):
    saved = SavedTraining(tmp_path, {})
    saved.save(begin_training(SMALL, SHORT), 0, {})
    file = tmp_path / f"{name}.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[-5] ^= 1
    file.write_bytes({"cut": data[:-5], "flipped": data, "foreign": b"weights"}[damage])
    if name == "state":
        with pytest.raises(IncompatibleCheckpoint, match=f"remove {tmp_path}, and the training starts"):
            saved.resume(begin_training(SMALL, SHORT))
    else:
        with pytest.raises(BadWeights, match=r"step0\.safetensors"):
            saved_model(file)
