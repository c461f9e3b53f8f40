"""Histories of names, folders and models: where they are found, their labels, and what a stored step came from."""

import shutil
from functools import partial

import pandas as pd
import pytest
import torch
import zoo
from streamed_checkpoints import NOT_STREAMED

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.history import recording, sources, suite_checkpoints
from tlspectral.history.sources import PYTHIA_STEPS, labelled_checkpoints, loader_identity, source_of

# Models of several seeds stand in for checkpoints.
pytestmark = [pytest.mark.lowest, pytest.mark.filterwarnings("ignore:.* share no common basis")]

QUICK = {"null_draws": 4}
WEIGHTS = {**QUICK, "detectors": False}
PAIRS = [((0, 0), (1, 1)), ((0, 1), (1, 0))]


def refuse(*arguments, **options):
    raise AssertionError(f"called with {arguments}")


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Three steps of a training in a folder. Not to be changed."""
    folder = tmp_path_factory.mktemp("suite")
    for seed, name in enumerate(("step0", "step16", "checkpoint-100")):
        zoo.save_folder("llama", folder / name, seed=seed)
    for other in ("steps", "step007"):  # no steps, as the file is none
        (folder / other).mkdir()
    (folder / "step7").write_text("a file")
    return folder


@pytest.fixture
def nothing_loaded(monkeypatch):
    """No checkpoint is loaded."""
    monkeypatch.setattr(sources, "load_model", refuse)


@pytest.fixture
def calls(monkeypatch):
    """What is asked of `load_model`, in place of loading."""
    asked = []
    monkeypatch.setattr(sources, "load_model", lambda *names, **options: asked.append((names, options)) or "model")
    return asked


# --- where they are found ---


def test_the_papers_steps():
    assert len(PYTHIA_STEPS) == 22
    assert list(PYTHIA_STEPS) == sorted(set(PYTHIA_STEPS))
    assert PYTHIA_STEPS[:3] == (0, 1, 2)
    assert PYTHIA_STEPS[-1] == 143_000


@pytest.mark.parametrize(
    ("name", "steps", "place"),
    [
        ("EleutherAI/pythia-410m", None, 11),
        ("EleutherAI/pythia-160m", [1, 143_000], 0),
        ("stanford-crfm/alias-gpt2-small-x21", [300], 0),
    ],
)
def test_hub_checkpoints_are_loaded_by_step_when_called(calls, name, steps, place):
    found, expected = suite_checkpoints(name, steps), steps or list(PYTHIA_STEPS)
    assert [step for step, _ in found] == expected
    assert calls == []
    assert found[place][1]() == "model"
    assert calls == [((name,), {"checkpoint": expected[place]})]


@pytest.mark.slow
def test_folders_are_found_by_step(suite):
    found = suite_checkpoints(suite)
    assert [step for step, _ in found] == [0, 16, 100]
    for seed, (_, load) in enumerate(found):
        assert torch.equal(load().W_E, zoo.hf_model("llama", seed).get_input_embeddings().weight)
    assert [step for step, _ in suite_checkpoints(suite, [0, 16])] == [0, 16]


# --- labels ---


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_loaded")
def test_a_folder_and_a_list_of_its_folders_are_one_history(suite):
    history = tls.head_history(suite, **WEIGHTS)
    assert history.steps == [0, 16, 100]
    listed = tls.head_history([str(suite / "step0"), suite / "step16"], **WEIGHTS)
    pd.testing.assert_frame_equal(listed.heads, history.heads[history.heads["step"] <= 16])
    pd.testing.assert_frame_equal(listed.summary, history.summary[:2])
    last = tls.head_history(suite_checkpoints(str(suite), [100]), **WEIGHTS)
    paired = tls.head_history([(100, suite / "checkpoint-100")], **WEIGHTS)
    assert last.steps == [100]
    pd.testing.assert_frame_equal(paired.heads, last.heads)
    models = [str(suite / "step0"), str(suite / "step16")]
    assert [at["model"] for at in listed.heads.attrs["checkpoints"]] == models
    assert "model" not in listed.heads.attrs
    assert "several" in repr(listed)


@pytest.mark.slow
def test_names_are_labels_in_their_order(suite, tmp_path):
    named = {"tuned": suite / "step16", "base": suite / "step0"}
    history = tls.head_history(list(named.items()), pairs=PAIRS, folder=tmp_path / "parts", **WEIGHTS)
    assert history.steps == ["tuned", "base"]
    assert history.heads["step"].drop_duplicates().tolist() == ["tuned", "base"]
    assert history.track((1, 0))["step"].tolist() == ["tuned", "base"]
    assert "from tuned to base" in repr(history)
    measured = {name: table for name, table in vars(history).items() if table is not None}
    assert "positional" not in measured  # no blocks were given
    for name, table in measured.items():
        tls.write_table(table, tmp_path / f"{name}.parquet")
        pd.testing.assert_frame_equal(tls.read_table(tmp_path / f"{name}.parquet"), table)
    again = tls.head_history(list(named.items())[::-1], pairs=PAIRS, folder=tmp_path / "parts", **WEIGHTS)
    assert again.steps == ["base", "tuned"]


@pytest.mark.slow
def test_a_path_of_any_length_is_a_label(suite, tmp_path):
    names = [tmp_path / f"{'x' * 200}" / f"{'y' * 40}{end}" for end in "ab"]
    for name, step in zip(names, (suite / "step16", suite / "step0"), strict=True):
        shutil.copytree(step, name)
    found = tls.head_history(names, folder=tmp_path / "parts", **WEIGHTS)
    assert found.steps == [str(name) for name in names]
    assert len(list((tmp_path / "parts").glob("*.parquet"))) == 2


@pytest.mark.slow
def test_steps_of_a_glob_and_of_a_mapping_are_taken_by_number(tmp_path):
    names = [f"{kind}{step}" for kind in ("step-", "checkpoint_", "checkpoint-") for step in (9, 10, 100)]
    for name in names:
        (tmp_path / name).mkdir()
    for kind in ("step-", "checkpoint_", "checkpoint-"):
        found = labelled_checkpoints(sorted(tmp_path.glob(f"{kind}*")))
        assert [label for label, _ in found] == [9, 10, 100]
        assert [load.args[0] for _, load in found] == [str(tmp_path / f"{kind}{step}") for step in (9, 10, 100)]
    models = {8: "tiny-rope-imag", 9: tls.load_model("tiny-rope")}
    expected = tls.head_history(list(models.items()), **WEIGHTS)
    pd.testing.assert_frame_equal(tls.head_history(models, **WEIGHTS).heads, expected.heads)
    assert expected.steps == [8, 9]


def test_models_are_labelled_by_what_they_are():
    first, second = zoo.bridge("neox"), zoo.bridge("neox", seed=1)
    first.tlspectral_source = {"model": "maker/suite", "revision": "step8"}
    second.tlspectral_source = {"model": "maker/suite", "revision": "step9"}
    assert tls.head_history([first, second], **WEIGHTS).steps == [8, 9]
    first.tlspectral_source = {"model": "base", "revision": None}
    second.tlspectral_source = {"model": "base", "revision": "v2"}
    assert tls.head_history(iter([first, second]), **WEIGHTS).steps == ["base", "base at v2"]


# --- read from files ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", pytest.param("neox", marks=pytest.mark.slow)])
def test_without_detectors_the_steps_are_read_from_their_files(tmp_path, name, sizes, monkeypatch):
    for step in (0, 8):
        zoo.save_folder(name, tmp_path / f"step{step}", seed=step)
    loaded = tls.head_history(
        [(step, lambda load=load: load()) for step, load in suite_checkpoints(tmp_path)], pairs=PAIRS, **WEIGHTS
    )
    sizes.clear()
    monkeypatch.setattr(sources, "load_model", refuse)
    streamed = tls.head_history(tmp_path, pairs=PAIRS, **WEIGHTS)
    assert set(sizes) == {1}  # layers of every model that was built
    assert streamed.heads[NOT_STREAMED].isna().all(axis=None)
    assert loaded.heads[NOT_STREAMED].notna().all(axis=None)
    assert list(streamed.heads) == list(loaded.heads)
    shared = [column for column in loaded.heads if column not in NOT_STREAMED]
    # Measured: at most 3e-14 relative (sums in another order); cond_eig, a ratio, 1e-9. Weights of another step move
    # every column by 1e-3 and more.
    pd.testing.assert_frame_equal(streamed.heads[shared], loaded.heads[shared], rtol=1e-8, atol=1e-12)
    for table in ("summary", "composition"):
        pd.testing.assert_frame_equal(getattr(streamed, table), getattr(loaded, table), rtol=1e-12, atol=1e-12)
    assert streamed.heads.attrs["backend"] == "bridge, layer by layer"
    assert [at["revision"] for at in streamed.heads.attrs["checkpoints"]] == ["step0", "step8"]


# --- continuing ---


@pytest.mark.slow
@pytest.mark.parametrize("detectors", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stored_step_is_used_only_for_the_files_it_came_from(suite, tmp_path, monkeypatch, detectors):
    options = {**QUICK, "detectors": detectors, "folder": tmp_path / "parts"}
    steps = [shutil.copytree(suite / name, tmp_path / name) for name in ("step0", "step16")]
    first = tls.head_history(steps, **options)
    monkeypatch.setattr(recording, "measure_step", refuse)
    (steps[0] / "trainer_state.json").write_text("{}")
    again = tls.head_history(steps, **options)
    pd.testing.assert_frame_equal(again.heads, first.heads)
    assert again.heads.attrs == first.heads.attrs
    config = (steps[1] / "config.json").read_text()
    (steps[1] / "config.json").write_text(config.replace("10000", "20000"))
    assert (steps[1] / "config.json").read_text() != config
    with pytest.raises(IncompatibleCheckpoint, match=r"has step 16 of another model.*files with SHA-256.*there, fil"):
        tls.head_history(steps, **options)
    with pytest.raises(IncompatibleCheckpoint, match="has step 0 of another model"):
        tls.head_history([(0, suite / "step16")], **options)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "said"), [(1, r"SHA-256 \w+ there, a model in memory now"), (-1, "in memory there")])
def test_a_step_of_files_and_one_of_a_model_in_memory_are_not_taken_for_each_other(suite, tmp_path, order, said):
    first, other = (suite / "step0", zoo.bridge("llama"))[::order]
    tls.head_history([(0, first)], folder=tmp_path, **WEIGHTS)
    with pytest.raises(IncompatibleCheckpoint, match=said):
        tls.head_history([(0, other)], folder=tmp_path, **WEIGHTS)


def test_a_gguf_file_is_known_by_its_bytes(tmp_path):
    file = tmp_path / "step1.gguf"
    file.write_bytes(b"GGUF and weights")
    load = partial(tls.load_model, file)
    before = loader_identity(load)
    assert before == loader_identity(load)
    assert not source_of(load).streams
    file.write_bytes(b"GGUF and others")
    assert loader_identity(load) != before
    assert loader_identity(lambda: load()) is None
    assert loader_identity(partial(tls.load_model, file, dtype="float64")) is None


@pytest.mark.parametrize("kind", ["adapter", "spectral"])
def test_an_adapter_and_a_spectral_model_are_known_by_their_files(tmp_path, kind):
    (tmp_path / f"{kind}_config.json").write_text("{}")
    (tmp_path / f"{kind}_model.safetensors").write_bytes(b"weights")
    load = partial(tls.load_model, tmp_path)
    before = loader_identity(load)
    (tmp_path / "trainer_state.json").write_text("{}")
    assert loader_identity(load) == before
    (tmp_path / f"{kind}_model.safetensors").write_bytes(b"other weights")
    after = loader_identity(load)
    assert after != before
    (tmp_path / f"{kind}_config.json").write_text('{"rank": 2}')
    assert loader_identity(load) not in (before, after)


def test_a_revision_of_a_hub_model_is_read_from_its_files_and_known_by_its_commit(hub, suite, tmp_path):
    commit = hub.publish("maker/suite", suite / "step16", branch="stage1-step8-tokens1B")
    checkpoints = [(8, partial(tls.load_model, "maker/suite", revision="stage1-step8-tokens1B"))]
    options = {"folder": tmp_path / "parts", **WEIGHTS}
    history = tls.head_history(checkpoints, **options)
    assert history.heads.attrs["backend"] == "bridge, layer by layer"
    assert history.heads.attrs["checkpoints"][0]["commit"] == commit
    pd.testing.assert_frame_equal(history.heads, tls.head_history([(8, suite / "step16")], **WEIGHTS).heads)
    # The cache keeps the commit that it has.
    other = hub.publish("maker/suite", shutil.copytree(suite / "step0", tmp_path / "0"), branch="stage1-step8-tokens1B")
    pd.testing.assert_frame_equal(tls.head_history(checkpoints, **options).heads, history.heads)
    shutil.rmtree(hub.cache)
    expected = f"has step 8 of another model.*maker/suite at commit {commit} there, .* commit {other} now"
    with pytest.raises(IncompatibleCheckpoint, match=expected):
        tls.head_history(checkpoints, **options)


@pytest.mark.slow
def test_facts_of_single_steps_are_not_facts_of_the_history():
    """Files of GGUF differ from step to step."""
    models = [zoo.bridge("neox"), zoo.bridge("neox", seed=1)]
    for step, model in enumerate(models):
        model.tlspectral_source = {"model": "m", "revision": None, "file": f"{step}.gguf", "sha256": f"{step:064d}"}
    attrs = tls.head_history(list(enumerate(models)), **QUICK).summary.attrs
    assert attrs["model"] == "m"
    assert attrs["seed"] == 0
    assert {"sha256", "file", "revision", "weights_sha256", "detectors"}.isdisjoint(attrs)
    assert [(at["file"], at["sha256"]) for at in attrs["checkpoints"]] == [
        (f"{step}.gguf", f"{step:064d}") for step in range(2)
    ]
    assert len({str(at["detectors"]["reliability"]) for at in attrs["checkpoints"]}) == 2


@pytest.mark.slow
def test_packaged_models_are_loaded_and_a_task_scores_every_checkpoint():
    models, task = ["tiny-rope-imag", "tiny-rope"], tls.logit_difference([[1, 2, 3, 1], [4, 5, 4]], [2, 5], 7)
    history = tls.head_history(models, task=task, **QUICK)
    assert history.steps == models
    assert history.heads["copying"].notna().all()
    assert history.summary["icl_score"].notna().all()
    assert history.previous_token_head[0] == 0
    for name, row in zip(models, history.summary.itertuples(), strict=True):
        expected = tls.evaluate(tls.load_model(name), task)
        assert (row.value, row.value_se) == (expected.value, expected.se)
