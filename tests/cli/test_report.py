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
FIRST_WALL = "wall_8ee9c8023913"  # of the ids that tiny-rope gets without a sentence
COST = "what the answer loses without each head: under 1 CPU s, 1 sentence"


run, made, refused = (partial(way, "report") for way in (command_line.run, command_line.succeed, command_line.refusal))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described") / "tiny"
    done = made("tiny-rope", "-o", folder)
    wanted = f"to measure: heads, kernels, kernel_prediction, directions, {FIRST_WALL}"
    assert done.stdout.splitlines()[:2] == [wanted, COST]
    return folder


@pytest.mark.slow
def test_a_folder_has_every_table_and_a_page(folder):
    assert sorted(path.stem for path in folder.glob("*.parquet")) == [*TABLES, FIRST_WALL]
    tables = {name: read_table(folder / f"{name}.parquet") for name in [*TABLES, FIRST_WALL]}
    for name, table in tables.items():
        if name != "heads":  # it lacks the extra columns
            assert_described(table)
    # Measured in the same way: to the bit.
    pd.testing.assert_frame_equal(tables["kernels"], tls.relative_position_kernel(tls.load_model("tiny-rope")))
    heads = tables["heads"]
    wall = tls.hooks.wall(tls.load_model("tiny-rope"))
    assert tables[FIRST_WALL]["pattern"].tolist() == [wall.pattern_text(head) for head in range(8)]
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
        (["heads.parquet", "-o", "page.html", "--seed", "1"], "--seed works for a model, but heads.parquet is a table"),
        (["heads.parquet", "-o", "page.html", "--device", "cpu"], "--device works for a model"),
        (["heads.parquet", "-o", "page.html", "--prompt", "a b"], "--prompt works for a model"),
        (["heads.parquet", "-o", "page.html", "--no-removal"], "--no-removal works for a model"),
        (["tiny-rope", "-o", "FOLDER", "--control", "--wall", "x.parquet"], "--wall gives a measured one"),
        (["tiny-rope", "-o", "FOLDER", "--prompt", "a b"], "this model has no tokenizer"),
        (["tiny-rope", "-o", "FOLDER", "--task", "none.csv"], "none.csv does not exist"),
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


@pytest.fixture(scope="module")
def with_words(tmp_path_factory):
    """A model that reads words, and the tables of its report but for walls."""
    place = tmp_path_factory.mktemp("words")
    model = zoo.save_folder("llama", place / "model", tokenizer=True)
    heads = tls.analyze_heads(tls.load_model(model), null_draws=2, detectors=False)
    write_table(heads, place / "heads.parquet")
    return model, place


def report_of_walls(with_words, folder, monkeypatch, *options):
    """The command with all other tables left out, and the walls that it wrote."""
    model, place = with_words
    monkeypatch.setattr(
        "tlspectral.cli.report._makers", lambda *_: {"heads": lambda: read_table(place / "heads.parquet")}
    )
    monkeypatch.setattr("tlspectral.cli.report._directions", lambda loaded, *_: tls.head_directions(loaded, "L0H0"))
    done = run(model, "-o", folder, *options)
    walls = {path.stem: read_table(path) for path in folder.glob("wall_*.parquet")}
    return done, walls


def test_each_sentence_and_a_task_have_a_wall_that_is_kept(with_words, tmp_path, monkeypatch):
    rows = "".join(f"w{3 + row} w9 w{5 + row},w20,w30\n" for row in range(8))
    (tmp_path / "task.csv").write_text("prompt,correct,wrong\n" + rows)
    folder = tmp_path / "out"
    asked = ["--prompt", "w3 w4 w5 w3", "--prompt", "w7 <b>", "--task", tmp_path / "task.csv"]
    with pytest.warns(UserWarning, match="tokenizer does not know"):  # <b>
        done, walls = report_of_walls(with_words, folder, monkeypatch, *asked)
    assert done.exit_code == 0, done.output
    assert "under 1, under 1, under 1 CPU s, 3 sentences" in done.stdout
    assert len(walls) == 3
    by_tokens = {" ".join(table.attrs["tokens"]): table for table in walls.values()}
    assert {table.attrs["removal"]["n_prompts"] for table in walls.values()} == {1, 8}
    of_task = next(table for table in walls.values() if table.attrs["removal"]["of_task"])
    assert of_task["delta_se"].notna().all()
    assert len(by_tokens) == 3
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert [f'id="wall{number}"' in page for number in range(4)] == [True, True, True, False]
    # The same sentence is not measured again; another way to measure it is.
    (folder / "layers").mkdir(exist_ok=True)  # of the user
    again, _ = report_of_walls(with_words, folder, monkeypatch, *asked)
    assert again.stdout.splitlines()[0] == "all tables are there"
    assert (folder / "layers").exists()
    for option in ("--no-removal", "--control"):
        done, walls = report_of_walls(with_words, folder, monkeypatch, *asked[:2], option)
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("to measure: wall_")
        assert ("CPU s" in done.stdout) is (option == "--control")
    assert len(walls) == 5
    assert sum("delta" not in table for table in walls.values()) == 1


def test_a_wall_that_was_not_asked_for_stops_nothing(with_words, tmp_path, monkeypatch):
    def none(*_, **__):
        raise tls.errors.UnsupportedArchitecture("layer 0 returns no pattern")

    monkeypatch.setattr("tlspectral.hooks.head_wall.patterns_of", none)
    silent = zoo.save_folder("llama", tmp_path / "silent"), with_words[1]  # without a tokenizer
    done, walls = report_of_walls(silent, tmp_path / "out", monkeypatch)
    assert done.exit_code == 1, done.output
    assert "UnsupportedArchitecture: layer 0 returns no pattern" in done.stderr
    assert walls == {}
    assert 'id="wall"' not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    done, _ = report_of_walls(with_words, tmp_path / "out", monkeypatch, "--prompt", "w3 w4")
    assert done.exit_code == 2  # one that was asked for is refused


def test_a_sentence_without_room_on_the_page_is_refused_before_anything_is_measured(with_words, tmp_path, monkeypatch):
    monkeypatch.setattr("tlspectral.report.wall_section.MOST_BYTES", 1000)
    done, _ = report_of_walls(with_words, tmp_path / "out", monkeypatch, "--prompt", " ".join(["w3"] * 40))
    assert done.exit_code == 2
    assert "give a shorter sentence" in done.stderr
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_walls_of_a_file_are_shown_beside_a_table(with_words, tmp_path):
    model, place = with_words
    wall = tls.hooks.wall(tls.load_model(model), "w3 w4 w5")
    write_table(wall.table(), tmp_path / "wall.parquet")
    made(place / "heads.parquet", "-o", tmp_path / "page.html", "--wall", tmp_path / "wall.parquet")
    assert 'id="wall0"' in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_model_with_a_tokenizer_gets_pairs_and_positional_scores(tmp_path):
    model = tls.load_model(zoo.save_folder("llama", tmp_path, tokenizer=True))
    table = _makers(model, 0, tmp_path / "layers")["positional"]()
    assert table.attrs["table"] == "positional_symbolic"
    assert list(table["layer"].unique()) == list(range(model.cfg.n_layers))
    with pytest.warns(UserWarning, match="of 64 prompts 1 are distinct"):  # this tokenizer knows few words of the text
        assert _makers(model, 0, tmp_path / "layers")["pairs"]().attrs["table"] == "top_pairs"
    assert not {"pairs", "positional"} & set(_makers(tls.load_model("tiny-rope"), 0, tmp_path))


def test_the_page_of_a_table_stands_beside_it_by_default(tmp_path):
    write_table(command_line.heads(), tmp_path / "many.heads.parquet")
    done = made(tmp_path / "many.heads.parquet")
    assert done.stdout == f"{tmp_path}/many.heads.html\n"
    assert "L1H2" in (tmp_path / "many.heads.html").read_text(encoding="utf-8")


def test_progress_is_one_sequence_of_numbers(tmp_path, monkeypatch):
    shown = []

    class Bar:
        def __init__(self, total, description, unit, *, initial=0):
            self.total, self.n, self.said = total, initial, description
            self.note()

        def note(self):
            shown.append((self.said, self.n, self.total))

        def update(self, n=1):
            self.n += n
            self.note()

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *raised: None  # noqa: E731

    monkeypatch.setattr("tlspectral.tables.measurement.bar", Bar)
    made("tiny-rope", "-o", tmp_path / "tiny", "--no-removal")
    counts = [(n, total) for said, n, total in shown if said == "report"]
    assert list(dict.fromkeys(counts)) == [(n, 5) for n in range(6)]
