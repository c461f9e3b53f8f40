"""Histories of a hub model by a pattern of its revisions' names, on the hub of this machine."""

import shutil

import huggingface_hub
import pandas as pd
import pytest
import zoo

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.history import suite_checkpoints

NAME = "maker/suite"
WEIGHTS = {"null_draws": 4, "detectors": False}
OLMO = [
    "main", "step100-tokens1B", "step2000-tokens8B", "stage1-step100-tokens1B", "stage1-step2000-tokens8.5B",
    "stage2-ingredient1-step100-tokens1B", "step300", "step400-tokens2B-x", "1step500-tokens2B",
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoint folders by seed. Not to be changed."""
    made = tmp_path_factory.mktemp("saved")
    return [zoo.save_folder("neox", made / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture
def pythia(hub, saved):
    """The hub with a suite named as Pythia names its steps; commits by revision."""
    names = {"step16": 2, "main": 2, "step0": 0, "step8": 1}
    return {branch: hub.publish(NAME, saved[seed], branch=branch) for branch, seed in names.items()}


@pytest.fixture
def olmo(hub, saved):
    for branch in OLMO:
        hub.publish("maker/olmo", saved[0], branch=branch)


def revisions(name, pattern, steps=None):
    return {step: at.files().revision for step, at in suite_checkpoints(name, steps, pattern)}


def test_a_suite_by_pattern_is_the_history_of_its_revisions(hub, pythia, saved):
    history = tls.head_history(NAME, revisions="step{step}", **WEIGHTS)
    assert history.steps == [0, 8, 16]
    folder = tls.head_history([(8, saved[1])], **WEIGHTS)
    own = history.heads[history.heads["step"] == 8].reset_index(drop=True)
    pd.testing.assert_frame_equal(own, folder.heads)
    for at in history.heads.attrs["checkpoints"]:
        assert at["revision"] == f"step{at['step']}"
        assert at["commit"] == pythia[at["revision"]]
    assert history.heads.attrs["model"] == NAME
    assert hub.fetched.count("model.safetensors") == 3


def test_a_step_of_a_pattern_is_loaded_from_its_revision(hub, pythia):
    [(step, load)] = suite_checkpoints(NAME, [8], "step{step}")
    assert step == 8
    assert load().tlspectral_source == {"model": NAME, "revision": "step8", "commit": pythia["step8"]}


@pytest.mark.usefixtures("olmo")
@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("step{step}-tokens{tokens}B", {100: "step100-tokens1B", 2000: "step2000-tokens8B"}),
        ("stage1-step{step}-tokens{tokens}B", {100: "stage1-step100-tokens1B", 2000: "stage1-step2000-tokens8.5B"}),
        ("stage2-ingredient{n}-step{step}-tokens{tokens}B", {100: "stage2-ingredient1-step100-tokens1B"}),
        ("step{step}", {300: "step300"}),
    ],
)
def test_a_pattern_finds_steps_beside_other_numbers(pattern, found):
    assert revisions("maker/olmo", pattern) == found
    assert list(revisions("maker/olmo", pattern)) == sorted(found)
    last = max(found)
    assert revisions("maker/olmo", pattern, [last]) == {last: found[last]}


@pytest.mark.usefixtures("olmo")
@pytest.mark.parametrize(
    ("pattern", "steps", "said"),
    [
        ("checkpoint-{step}", None, r"maker/olmo has no revision that fits 'checkpoint-\{step\}';.* main, .* 1 other"),
        ("{any}{step}-tokens{tokens}B", None, "maker/olmo has no revision that fits"),
        ("step100-tokens1B", None, r"does not say once where the training step stands: write \{step\} there"),
        ("step{step}-tokens{step}B", None, "does not say once"),
        ("step{step}-tokens{tokens}B", [100, 300], r"that fits .* of steps \[300\]; it has steps 100, 2000"),
    ],
)  # fmt: skip
def test_a_pattern_that_does_not_fit_says_what_is_there(pattern, steps, said):
    with pytest.raises(ValueError, match=said):
        tls.head_history("maker/olmo", revisions=pattern, steps=steps, **WEIGHTS)


def test_two_revisions_of_one_step_are_refused(hub, saved):
    for stage in (1, 2):
        hub.publish("maker/stages", saved[0], branch=f"stage{stage}-step5")
    with pytest.raises(ValueError, match="step 5 twice, as stage1-step5 and stage2-step5: write out"):
        suite_checkpoints("maker/stages", revisions="stage{stage}-step{step}")


def test_a_moved_branch_does_not_continue_a_history(hub, pythia, saved, tmp_path):
    options = {"revisions": "step{step}", "steps": [8], "folder": tmp_path / "parts", **WEIGHTS}
    history = tls.head_history(NAME, **options)
    other = hub.publish(NAME, shutil.copytree(saved[0], tmp_path / "other"), branch="step8")
    # The cache keeps the commit that it has.
    pd.testing.assert_frame_equal(tls.head_history(NAME, **options).heads, history.heads)
    shutil.rmtree(hub.cache)
    expected = f"holds step 8 of another model.*maker/suite at commit {pythia['step8']} there, .* commit {other} now"
    with pytest.raises(IncompatibleCheckpoint, match=expected):
        tls.head_history(NAME, **options)


def test_without_a_hub_the_revisions_of_the_cache_are_used(hub, pythia, saved, monkeypatch):
    hub.put_in_cache(NAME, "config.json", "model.safetensors", branch="step8")
    (hub.cache / "models--maker--suite" / "refs" / "refs" / "pr").mkdir(parents=True)
    (hub.cache / "models--maker--suite" / "refs" / "refs" / "pr" / "1").write_text(pythia["step8"])
    hub.close()
    with pytest.warns(
        UserWarning, match="only the revisions of maker/suite in the hub's cache are used, since the hub"
    ):
        assert revisions(NAME, "step{step}") == {8: "step8"}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    assert tls.head_history(NAME, revisions="step{step}", **WEIGHTS).steps == [8]
    with pytest.raises(ValueError, match=r"no revision that fits 'step\{step\}' of steps \[16\]; it has steps 8"):
        suite_checkpoints(NAME, [16], "step{step}")
    with pytest.raises(ValueError, match=r"the revisions of maker/other are not known: .*HF_HUB_OFFLINE"):
        suite_checkpoints("maker/other", revisions="step{step}")


@pytest.mark.usefixtures("pythia")
def test_a_hub_that_refuses_says_why(hub):
    hub.put_in_cache(NAME, "config.json", branch="step8")
    hub.refused[NAME] = 403
    with pytest.raises(ValueError, match=r"the revisions of maker/suite are not known: .*"):
        suite_checkpoints(NAME, revisions="step{step}")
    with pytest.raises(ValueError, match=r"the revisions of nobody/nothing are not known: .*Repository Not Found"):
        suite_checkpoints("nobody/nothing", revisions="step{step}")
