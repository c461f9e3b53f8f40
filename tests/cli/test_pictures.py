"""The commands that draw: each writes its figure, and nothing where it refuses."""

import pandas as pd
import pytest
import zoo
from command_line import heads, refusal, succeed

import tlspectral as tls
from tlspectral.tables import write_table

PNG = b"\x89PNG"


@pytest.fixture
def folder(tmp_path):
    write_table(heads(), tmp_path / "heads.parquet")
    sweep = heads()[["layer", "head", "name"]].head(3).assign(part="M_A", delta=[0.1, -0.2, 0.3], delta_se=0.1)
    draws = [[0.1, -0.3, 0.0]] * 3
    write_table(sweep.assign(control_p=[0.5, 0.25, 0.25], control_draws=draws), tmp_path / "sweep.parquet")
    edges = {"sender": ["embedding", "L0H1"], "receiver": ["L0H1.q", "logits"], "delta": [1.0, -2.0]}
    write_table(pd.DataFrame(edges), tmp_path / "edges.parquet")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "tables", "options"),
    [
        ("plane", ["heads"], ["--highlight", 2]),
        ("map", ["heads"], ["D_head"]),
        ("effects", ["sweep", "heads"], []),
        ("circuit", ["edges"], ["--most", 1]),
    ],
)
def test_pictures_of_tables(folder, command, tables, options):
    files = [folder / f"{name}.parquet" for name in tables]
    done = succeed(command, *files, *options, "-o", folder / "drawn.png")
    assert done.output.strip() == str(folder / "drawn.png")
    assert (folder / "drawn.png").read_bytes().startswith(PNG)
    before = sorted(folder.iterdir())
    assert "xyz" in refusal(command, *files, *options, "-o", folder / "drawn.xyz")
    assert "is a folder" in refusal(command, *files, *options, "-o", folder)
    assert sorted(folder.iterdir()) == before


def test_a_misspelt_column_is_answered_with_its_neighbour(folder):
    said = "the table has no column 'dhead': did you mean 'D_head'?"
    assert said in refusal("map", folder / "heads.parquet", "dhead", "-o", folder / "drawn.png")
    said = "has no column nothing: give a table of analyze_heads"
    assert said in refusal("map", folder / "heads.parquet", "nothing", "-o", folder / "drawn.png")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("patterns", ["w3 w9 w4", "L0H1,L1H0", "--sink"]),
        ("patterns", [" ".join(f"w{word}" for word in range(3, 33)), "L0H1,L1H0", "--sinks", "found"]),
        ("eigenvalues", ["L0H1"]),
        ("kernel", ["L0H1,L1H0"]),
    ],
)
def test_pictures_of_heads_of_a_model(tmp_path, command, arguments):
    model = zoo.save_folder("llama", tmp_path / "model", tokenizer=True)
    succeed(command, model, *arguments, "-o", tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("command", ["patterns", "eigenvalues", "kernel"])
def test_heads_are_read_before_the_model(command, tmp_path, monkeypatch):
    monkeypatch.setattr(tls, "load_model", lambda *args, **options: pytest.fail("was loaded"), raising=False)
    prompt = ["text"] if command == "patterns" else []
    assert "names no head" in refusal(command, "tiny", *prompt, "first", "-o", tmp_path / "drawn.png")
    if command == "patterns":
        given = ["tiny", "text", "L0H0", "-o", tmp_path / "drawn.png", "--sinks"]
        assert "sinks='first' is unknown" in refusal(command, *given, "first")
        assert "give one of the two" in refusal(command, *given, "found", "--sink")
