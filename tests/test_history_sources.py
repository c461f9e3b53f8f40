"""Where checkpoints come from: the hub by name and step, folders, training runs; each loaded when its turn comes."""

import pytest
import torch
import zoo

from tlspectral.history import (
    PYTHIA_STEPS,
    sources,
    suite_checkpoints,
)
from tlspectral.studies.common import RandomMapTask, TrainingSettings, TransformerConfig, train
from tlspectral.studies.common.checkpoints import training_checkpoints


@pytest.fixture
def calls(monkeypatch):
    """What is asked of `load_model`, in place of loading."""
    asked = []
    monkeypatch.setattr(sources, "load_model", lambda *names, **options: asked.append((names, options)) or "model")
    return asked


def test_the_papers_steps():
    assert len(PYTHIA_STEPS) == 22
    assert list(PYTHIA_STEPS) == sorted(set(PYTHIA_STEPS))
    assert PYTHIA_STEPS[:3] == (0, 1, 2)
    assert PYTHIA_STEPS[-1] == 143_000


def test_hub_checkpoints_are_loaded_by_step_when_called(calls):
    found = suite_checkpoints("EleutherAI/pythia-410m")
    assert [step for step, _ in found] == list(PYTHIA_STEPS)
    assert calls == []
    assert found[11][1]() == "model"
    assert calls == [(("EleutherAI/pythia-410m",), {"checkpoint": 1000})]
    others = suite_checkpoints("EleutherAI/pythia-160m", [1, 143_000])
    others[0][1]()
    assert calls[1] == (("EleutherAI/pythia-160m",), {"checkpoint": 1})


def test_other_suites_are_asked_when_loading(calls):
    [(step, load)] = suite_checkpoints("stanford-crfm/alias-gpt2-small-x21", [300])
    assert calls == []
    load()
    assert calls == [(("stanford-crfm/alias-gpt2-small-x21",), {"checkpoint": step})]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for seed, name in enumerate(("step0", "step16", "checkpoint-9")):
        zoo.save_folder("neox", folder / name, seed=seed)
    (folder / "steps").mkdir()
    (folder / "step7").write_text("a file")
    (folder / "step007").mkdir()
    return folder


def test_folders_are_found_by_step(saved):
    found = suite_checkpoints(saved)
    assert [step for step, _ in found] == [0, 9, 16]
    for seed, place in ((0, 0), (2, 1), (1, 2)):
        weight = zoo.hf_model("neox", seed).get_input_embeddings().weight
        assert torch.equal(found[place][1]().W_E, weight)
    assert [step for step, _ in suite_checkpoints(saved, [0, 16])] == [0, 16]


@pytest.fixture(scope="module")
def run():
    task = RandomMapTask(vocabulary=8, length=16)
    settings = TrainingSettings(steps=4, batch_size=2, evaluation_sequences=2, warmup_steps=1)
    return train(TransformerConfig(d_vocab=8, n_ctx=16), task, settings, keep_steps=(4, 0))


def test_the_steps_of_a_run_are_its_models(run):
    found = training_checkpoints(run)
    assert [step for step, _ in found] == [0, 4]
    tokens = torch.arange(16)[None] % 8
    with torch.no_grad():
        # Float32 sums in another order: measured 1e-6; weights four steps apart differ by more than 1e-2.
        assert found[1][1]()(tokens) == pytest.approx(run.model(tokens), abs=1e-4)
        assert (found[0][1]()(tokens) - run.model(tokens)).abs().max() > 1e-3
    assert found[1][1]().tlspectral_source["revision"] == "step4"
