"""The dataset of many models: one schema, what fails, what is continued, and who reads it."""

import os
import shutil

import joblib
import numpy as np
import pandas as pd
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import zoo

import tlspectral as tls
from tlspectral.heads import analyze_models, many_models, streamed
from tlspectral.heads.many_models import is_model_list, listed_models
from tlspectral.tables import read_table
from tlspectral.tables.head_columns import LATENT_COLUMNS

SETTINGS = {"null_draws": 5, "detectors": False}
LOADED = "tiny-rope"


def analyze(models, folder, **settings):
    return analyze_models(models, folder, **SETTINGS | settings)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two folders, with and without rotary positions, which are read from files, and a model that is loaded."""
    saved = tmp_path_factory.mktemp("saved")
    return [zoo.save_folder("llama", saved / "llama"), zoo.save_folder("gpt2", saved / "gpt2"), LOADED]


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    """The folder of all three. Not to be changed."""
    folder = tmp_path_factory.mktemp("dataset") / "many"
    failures = analyze(models, folder)
    assert failures.empty
    assert failures.attrs["models"] == [str(model) for model in models]
    return folder


def parts(folder):
    """The files of the dataset with their bytes."""
    return {file.name: file.read_bytes() for file in sorted((folder / "heads").iterdir())}


def part_of(folder, model):
    (file,) = [file for file in (folder / "heads").iterdir() if file.name.startswith(os.path.basename(model))]
    return file


@pytest.mark.slow
def test_every_model_has_the_same_schema_and_its_own_table(models, finished):
    files = [part_of(finished, model) for model in models]
    schema = pq.read_schema(files[0]).remove_metadata()
    assert all(pq.read_schema(file).remove_metadata() == schema for file in files)
    for model, file in zip(models, files, strict=True):
        table, alone = read_table(file), tls.analyze_heads(model, **SETTINGS)
        assert set(table.pop("model")) == {str(model)}
        assert table.pop("commit").isna().all()
        assert set(table.pop("revision").dropna()) == ({alone.attrs["revision"]} - {None})
        pd.testing.assert_frame_equal(table, alone, check_exact=True)
        differing = {name for name in alone.attrs if table.attrs[name] != alone.attrs[name]}
        assert differing == {"columns", "table"}  # these have the three columns more
        described = table.attrs["columns"].keys() - {column.name for column in LATENT_COLUMNS}
        assert described == {"model", "revision", "commit", *alone}
    assert sorted(file.name for file in finished.iterdir()) == ["failures", "heads", "layers", "settings.json"]
    assert not list((finished / "layers").iterdir())
    assert not list((finished / "failures").iterdir())


@pytest.mark.slow
def test_pandas_pyarrow_duckdb_and_polars_read_the_folder(models, finished):
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    frame = pd.read_parquet(finished / "heads")
    by_model = frame.groupby("model")["D_head"]
    assert by_model.count().to_dict() == {str(model): len(read_table(part_of(finished, model))) for model in models}
    assert frame.attrs == {}  # not those of one of the models
    assert np.isnan(frame.loc[frame["model"] == str(models[1]), "freq_centroid"]).all()
    dataset = pyarrow.dataset.dataset(finished / "heads")
    assert dataset.to_table().to_pandas()["D_head"].tolist() == frame["D_head"].tolist()
    heads = f"'{finished / 'heads'}/*.parquet'"
    rows = duckdb.sql(f"select model, avg(D_head) as mean from {heads} group by model").fetchall()
    # A sum in another order is off by some eps; the means differ from model to model by more than .01.
    assert dict(rows) == pytest.approx(by_model.mean().to_dict(), rel=1e-12)
    means = polars.scan_parquet(finished / "heads").group_by("model").agg(polars.col("D_head").mean())
    assert dict(means.collect().rows()) == pytest.approx(by_model.mean().to_dict(), rel=1e-12)


# --- what fails ---


@pytest.fixture
def analyzed(spied):
    """Models that are analysed, in order."""
    return spied(many_models, "analyze_heads")


@pytest.mark.slow
def test_a_model_that_fails_is_a_row_and_is_tried_again(models, finished, tmp_path, analyzed):
    late, cut_off = tmp_path / "late", shutil.copytree(models[0], tmp_path / "cut_off")
    (cut_off / "model.safetensors").write_bytes((cut_off / "model.safetensors").read_bytes()[:-100])
    folder = tmp_path / "many"
    failures = analyze([late, models[0], cut_off, LOADED], folder)
    assert failures["model"].tolist() == [str(late), str(cut_off)]
    assert failures["error"].tolist() == ["FileNotFoundError", "BadWeights"]
    assert failures["message"][0] == (
        f"There is no folder or file {late}: give an existing path, or a hub id 'owner/model'."
    )
    assert "finding.py" in failures["raised_in"][0]
    written = [read_table(file) for file in (folder / "failures").iterdir()]
    written = pd.concat(written).set_index("model").loc[failures["model"]].reset_index()
    pd.testing.assert_frame_equal(written, failures)
    assert len(pd.read_parquet(folder / "failures")) == 2
    done = parts(folder)
    assert done == {name: content for name, content in parts(finished).items() if not name.startswith("gpt2")}

    shutil.copytree(models[1], late)
    shutil.copy(models[0] / "model.safetensors", cut_off)
    analyzed.clear()
    assert analyze([late, models[0], cut_off, LOADED], folder).empty
    assert analyzed == [str(late), str(cut_off)]
    assert not list((folder / "failures").iterdir())
    after = parts(folder)
    assert len(after) == 4
    assert {name: after[name] for name in done} == done


def test_a_model_whose_files_changed_is_not_passed_off_as_the_old_one(models, tmp_path, analyzed):
    own, folder = shutil.copytree(models[0], tmp_path / "own"), tmp_path / "many"
    analyze([own], folder)
    before = parts(folder)
    os.utime(own / "model.safetensors", (1, 1))
    failures = analyze([own], folder)
    assert failures["error"].tolist() == ["IncompatibleCheckpoint"]
    assert "was made before the files of" in failures["message"][0]
    assert analyzed == [str(own)]
    assert parts(folder) == before
    part_of(folder, own).unlink()
    assert analyze([own], folder).empty


def test_what_no_model_can_have_is_refused_before_a_folder_is_made(models, tmp_path):
    with pytest.raises(ValueError, match="null_draws is how many draws"):
        analyze(models, tmp_path / "new", null_draws=1)
    for name in ("heads.parquet", "heads.csv", "heads.CSV"):
        with pytest.raises(ValueError, match="is the name of a file, but several models"):
            analyze(models, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


# --- what is listed ---


@pytest.mark.slow
def test_a_model_that_is_named_twice_is_one(models, tmp_path, analyzed, monkeypatch):
    (tmp_path / "link").symlink_to(models[0])
    monkeypatch.chdir(models[0].parent)
    failures = analyze(["llama", models[0], "./llama/", tmp_path / "link", LOADED, LOADED.upper()], tmp_path / "many")
    assert failures.attrs["models"] == analyzed == [str(models[0]), LOADED]
    assert set(pd.read_parquet(tmp_path / "many" / "heads")["model"]) == {str(models[0]), LOADED}


def test_a_list_is_read_in_its_place(tmp_path):
    file = tmp_path / "models.txt"
    file.write_text("# all of them\n\n gpt2 # small\nowner/a#b\n", encoding="utf-8-sig")
    assert listed_models(["first", file, "last"]) == ["first", "gpt2", "owner/a#b", "last"]
    assert listed_models("gpt2") == ["gpt2"]
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"neither a \.gguf file nor a text file that lists models"):
        listed_models([file])
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="lists no models"):
        listed_models([file])
    with pytest.raises(ValueError, match="models= has an object of type int"):
        listed_models([3])
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert not any(map(is_model_list, [tmp_path, tmp_path / "m.gguf", "gpt2"]))


# --- stopped and shared out ---


@pytest.mark.slow
@pytest.mark.parametrize("shared_out", [True, False])
def test_configured_workers_take_models_that_are_loaded_and_layers_of_those_that_are_read(
    models, finished, tmp_path, monkeypatch, shared_out
):
    settings, n_jobs = {"detectors": shared_out}, []
    chosen = [LOADED, "tiny-ape"] if shared_out else models[:2]
    real = many_models.analyze_heads
    monkeypatch.setattr(many_models, "analyze_heads", lambda *a, **k: n_jobs.append(k["n_jobs"]) or real(*a, **k))
    with joblib.parallel_config(backend="threading"):  # the code path of Dask, which the slow test takes
        failures = analyze([*chosen, "no/such/model"], tmp_path, n_jobs=2, **settings)
    assert failures["model"].tolist() == ["no/such/model"]
    assert n_jobs[:2] == ([1, 1] if shared_out else [2, 2])
    for model in chosen:
        table = read_table(part_of(tmp_path, model))
        if shared_out:
            alone = tls.analyze_heads(model, **SETTINGS | settings)
            pd.testing.assert_frame_equal(table[list(alone)], alone, check_exact=True)
        else:
            pd.testing.assert_frame_equal(table, read_table(part_of(finished, model)), check_exact=True)


# --- several jobs on one folder ---


@pytest.mark.slow
def test_a_model_that_another_job_finishes_is_taken(models, finished, tmp_path, monkeypatch):
    """The other job finishes all models, and removes the layers, while the first is in the middle of a model."""
    real, folder, others = streamed._measured, tmp_path / "many", []

    def measured(checkpoint, null, directions, index, heads):
        if index == 1 and not others:
            others.append("begun")
            assert analyze(models, folder).empty
        return real(checkpoint, null, directions, index, heads)

    monkeypatch.setattr(streamed, "_measured", measured)
    assert analyze(models, folder).empty
    assert others
    assert parts(folder) == parts(finished)
    assert not list((folder / "layers").iterdir())


@pytest.mark.slow
def test_a_failure_is_kept_until_its_own_model_succeeds(models, tmp_path, monkeypatch):
    """Also where the model was given by a path at which there was nothing yet."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "many"
    assert len(analyze(["late"], folder)) == 1
    assert analyze([LOADED], folder).empty
    (file,) = (folder / "failures").iterdir()
    assert read_table(file)["model"].tolist() == ["late"]
    shutil.copytree(models[1], tmp_path / "late")
    assert analyze(["late"], folder).empty
    assert not list((folder / "failures").iterdir())


@pytest.mark.slow
def test_a_model_that_fails_as_another_job_finishes_it_has_not_failed(models, finished, tmp_path, monkeypatch):
    folder, write = tmp_path / "many", many_models.write_table

    def finish_first(table, path, **options):
        write(table, path, **options)
        monkeypatch.undo()
        assert analyze(models[:1], folder).empty
        write(table, path, **options)  # and this job's failure comes last

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(many_models, "write_table", finish_first)
    monkeypatch.setattr(many_models, "analyze_heads", fail)
    assert analyze(models[:1], folder).empty
    assert not list((folder / "failures").iterdir())
    assert part_of(folder, models[0]).read_bytes() == part_of(finished, models[0]).read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("module", "function"),
    [pytest.param(many_models, "analyze_heads", marks=pytest.mark.full), (streamed, "measure_heads")],
)
def test_a_dask_cluster_gives_the_same_dataset(models, tmp_path, request, monkeypatch, module, function):
    settings = {"detectors": module is many_models}
    assert analyze(models, tmp_path / "alone", **settings).empty
    request.getfixturevalue("dask_cluster")
    monkeypatch.setattr(module, function, None)  # in this process alone: the workers have to do it
    failures = analyze([*models, "no/such/model"], tmp_path / "cluster", n_jobs=-1, **settings)
    assert failures["model"].tolist() == ["no/such/model"]
    assert parts(tmp_path / "cluster") == parts(tmp_path / "alone")
