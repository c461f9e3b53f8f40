"""A streamed table that is stopped continues, and is the same however it was shared out."""

import functools
import shutil

import joblib
import pandas as pd
import pytest
import zoo
from typer.testing import CliRunner

import tlspectral as tls
from tlspectral.cli import app
from tlspectral.heads import streamed
from tlspectral.tables import read_table


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Four layers, the second and fourth without rotary positions. Not to be changed."""
    return zoo.save_folder("smollm3", tmp_path_factory.mktemp("saved") / "smollm3")


analyze = functools.partial(tls.analyze_heads, null_draws=5, detectors=False, show_progress=False)


@pytest.fixture(scope="module")
def table(path):
    return analyze(path)


def assert_same(found, expected):
    pd.testing.assert_frame_equal(found, expected, check_exact=True)
    assert found.attrs == expected.attrs


@pytest.fixture
def measured(monkeypatch):
    """Layers that are measured; before layer `measured.stop_at` the work is stopped."""

    class Measured(list):
        stop_at = None

    seen, real = Measured(), streamed._layer_table

    def spy(plan, view, index):
        if index == seen.stop_at:
            raise KeyboardInterrupt
        seen.append(index)
        return real(plan, view, index)

    monkeypatch.setattr(streamed, "_layer_table", spy)
    return seen


def test_a_moved_checkpoint_continues(path, table, tmp_path, measured):
    analyze(path, layers=[0], checkpoint_dir=tmp_path / "parts")
    moved = shutil.copytree(path, tmp_path / "moved")
    measured.clear()
    found = analyze(moved, checkpoint_dir=tmp_path / "parts")
    assert measured == [1, 2, 3]
    pd.testing.assert_frame_equal(found, table, check_exact=True)


@pytest.mark.parametrize("detectors", [True, False])
def test_a_loaded_model_has_no_checkpoints(path, tmp_path, detectors):
    model = path if detectors else tls.load_model(path)
    with pytest.raises(ValueError, match="checkpoint_dir is for a folder or hub name"):
        analyze(model, detectors=detectors, checkpoint_dir=tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


def run(*arguments):
    return CliRunner().invoke(app, ["analyze", *(str(argument) for argument in arguments)])


def test_the_command_continues_too(path, table, tmp_path, measured):
    options = (path, "--no-detectors", "--null-draws", 5, "--checkpoint-dir", tmp_path / "parts")
    for layers in ([0, 1, 2, 3], []):
        measured.clear()
        done = run(*options, "-o", tmp_path / "heads.parquet")
        assert done.exit_code == 0, done.output
        assert measured == layers
        pd.testing.assert_frame_equal(read_table(tmp_path / "heads.parquet"), table, check_exact=True)


@pytest.mark.parametrize("options", [(), ("--no-detectors", "--backend", "bridge")])
def test_the_command_keeps_layers_of_streamed_tables_only(path, tmp_path, options):
    done = run(path, "--checkpoint-dir", tmp_path / "parts", *options)
    assert done.exit_code == 2
    assert "goes with --no-detectors" in done.stderr


@pytest.mark.slow
def test_processes_give_the_same_table(path, table, tmp_path):
    assert_same(analyze(path, n_jobs=2, checkpoint_dir=tmp_path), table)
    assert len(list(tmp_path.glob("L*.parquet"))) == 4


def test_layers_read_by_threads_leave_weight_tying_as_it_was(tmp_path):
    """transformers switches it off in the whole process while a model loads; threads could leave it off for good."""
    from transformers import PreTrainedModel

    own = PreTrainedModel.tie_weights
    path = zoo.save_folder("llama", tmp_path / "model")
    with joblib.parallel_config(backend="threading"):
        for _ in range(2):
            tls.analyze_heads(path, detectors=False, null_draws=2, n_jobs=4, show_progress=False)
    assert PreTrainedModel.tie_weights is own
