"""`tlspectral report MODEL`: all tables of a model in one folder, made once, and one page."""

import shutil
from functools import partial

import command_line
import pandas as pd
import pytest
import zoo
from described import assert_described

import tlspectral as tls
from tlspectral.cli.report import _makers
from tlspectral.tables import read_table, write_table

TABLES = ["directions", "heads", "kernel_prediction", "kernels"]


run, made, refused = (partial(way, "report") for way in (command_line.run, command_line.succeed, command_line.refusal))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described") / "tiny"
    done = made("tiny-rope", "-o", folder)
    assert done.stdout.splitlines()[0] == "to measure: heads, kernels, kernel_prediction, directions"
    return folder


@pytest.mark.slow
def test_a_folder_has_every_table_and_a_page(folder):
    assert sorted(path.stem for path in folder.glob("*.parquet")) == TABLES
    tables = {name: read_table(folder / f"{name}.parquet") for name in TABLES}
    for name, table in tables.items():
        if name != "heads":  # it lacks the extra columns
            assert_described(table)
    # Measured in the same way: to the bit.
    pd.testing.assert_frame_equal(tables["kernels"], tls.relative_position_kernel(tls.load_model("tiny-rope")))
    heads = tables["heads"]
    assert len({table.attrs["weights_sha256"] for table in tables.values()}) == 1
    strongest = {name for detector in ("prev", "dup", "ind") for name in heads.nlargest(2, detector)["name"]}
    read = tables["directions"][["layer", "head"]].drop_duplicates()
    assert {f"L{layer}H{head}" for layer, head in read.itertuples(index=False)} == strongest
    assert set(tables["directions"]["kind"]) == {"qk", "ov"}
    assert "L0H3" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_same_command_makes_what_is_missing_alone(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.parquet")}
    (folder / "kernels.parquet").unlink()
    (folder / "report.html").unlink()
    done = made("tiny-rope", "-o", folder)
    assert done.stdout.splitlines()[0] == "to measure: kernels"
    assert {path.name for path in folder.iterdir()} == set(before)
    assert (folder / "report.html").read_bytes() == before["report.html"]
    for path in folder.glob("*.parquet"):
        assert (path.stat().st_mtime_ns == times[path.name]) is (path.name != "kernels.parquet")
    again = made("tiny-rope", "-o", folder)
    assert again.stdout.splitlines()[0] == "all tables are there"


@pytest.mark.slow
def test_a_table_that_is_given_is_shown_and_not_measured(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "kernels.parquet").rename(tmp_path / "kernels.parquet")
    sweep = tls.ablation_sweep(tls.load_model("tiny-rope"), "rope_phase", heads="L0H3")
    write_table(sweep, tmp_path / "sweep.parquet")
    given = ["--kernels", tmp_path / "kernels.parquet", "--sweep", tmp_path / "sweep.parquet"]
    done = made("tiny-rope", "-o", tmp_path / "copy", *given)
    assert done.stdout.splitlines()[0] == "all tables are there"
    assert not (tmp_path / "copy" / "kernels.parquet").exists()
    page, before = ((path / "report.html").read_text(encoding="utf-8") for path in (tmp_path / "copy", folder))
    assert (page.count("Ablation"), before.count("Ablation")) == (1, 0)  # the section of one head's card
    assert page.count("By distance") == before.count("By distance") > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["heads.parquet", "-o", "page.html", "--seed", "1"], "--seed is for a model, and heads.parquet is a table"),
        (["heads.parquet", "-o", "page.html", "--device", "cpu"], "--device is for a model"),
        (["tiny-rope", "-o", "page.html"], "give -o a folder's name"),
        (["tiny-ape", "-o", "FOLDER"], "was made with other "),
        (["tiny-rope", "--seed", "1", "-o", "FOLDER"], "was made with other "),
    ],
)
def test_what_does_not_go_together_is_refused_first(arguments, said, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refused(*(folder if argument == "FOLDER" else argument for argument in arguments))
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_cannot_be_made_stops_no_other(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "kernels.parquet").write_text("damaged")
    (tmp_path / "copy" / "report.html").unlink()
    done = run("tiny-rope", "-q", "-o", tmp_path / "copy")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("no kernels: IncompatibleCheckpoint: ")
    assert (tmp_path / "copy" / "report.html").exists()


@pytest.mark.slow
def test_a_model_with_a_tokenizer_gets_pairs_and_positional_scores(tmp_path):
    model = tls.load_model(zoo.save_folder("llama", tmp_path, tokenizer=True))
    table = _makers(model, 0)["positional"]()
    assert table.attrs["table"] == "positional_symbolic"
    assert list(table["layer"].unique()) == list(range(model.cfg.n_layers))
    with pytest.warns(UserWarning, match="of 64 prompts 1 are distinct"):  # this tokenizer knows few words of the text
        assert _makers(model, 0)["pairs"]().attrs["table"] == "top_pairs"
    assert not {"pairs", "positional"} & set(_makers(tls.load_model("tiny-rope"), 0))
