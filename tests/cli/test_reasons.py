"""`tlspectral edges`, `pairs` and `attribution`: from a CSV file or a prompt to a table and a picture, as in Python."""

import pandas as pd
import pytest
import torch
import zoo
from command_line import refusal, succeed

import tlspectral as tls
from tlspectral.tables import read_table

PNG = b"\x89PNG"
PROMPTS, PAIRS = ["w5 w6 w7 w8", "w9 w10 w11 w12"], ["w5 w16 w7 w8", "w9 w17 w11 w12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return zoo.save_folder("llama", tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture
def file(tmp_path):
    columns = {"prompt": PROMPTS, "correct": "w20", "wrong": "w30", "counterfactual": PAIRS}
    pd.DataFrame(columns).to_csv(tmp_path / "pairs.csv", index=False)
    return tmp_path / "pairs.csv"


def outputs(tmp_path):
    return ["-o", tmp_path / "table.parquet", "--picture", tmp_path / "drawn.png"]


def assert_written(tmp_path, done, expected):
    pd.testing.assert_frame_equal(read_table(tmp_path / "table.parquet"), expected)
    assert (tmp_path / "drawn.png").read_bytes().startswith(PNG)
    assert done.stdout.splitlines()[-2:] == [str(tmp_path / "table.parquet"), str(tmp_path / "drawn.png")]
    return done.stdout.splitlines()


def test_edges_into_one_head_are_measured_as_in_python(tmp_path):
    options = ["--control", "random", "--draws", 3, "--senders", "L0H3,L0H1"]
    done = succeed("edges", "tiny-rope", "L1H0.k", *options, *outputs(tmp_path))
    model = tls.load_model("tiny-rope")
    expected = tls.edge_effects(model, ["L1H0.k"], senders=["L0H3", "L0H1"], control=3)
    lines = assert_written(tmp_path, done, expected)
    assert lines[0] == "the 2 largest changes of 2 measured edges (2 in all):"
    assert lines[1].split()[:4] == ["sender", "receiver", "attention", "delta"]
    assert lines[2].split()[:2] == ["L0H3", "L1H0.k"]


@pytest.mark.filterwarnings("ignore:2 distinct pairs")
def test_edges_of_a_csv_with_counterfactuals_are_screened(folder, tmp_path, file):
    done = succeed("edges", folder, "--prompts", file, "--screen", 3, *outputs(tmp_path))
    task = tls.logit_difference(PROMPTS, "w20", "w30", counterfactual=PAIRS)
    expected = tls.edge_effects(tls.load_model(folder), task=task, screen=3)
    lines = assert_written(tmp_path, done, expected)
    measured = expected.dropna(subset=["delta"])
    assert (
        lines[0] == f"the {len(measured)} largest changes of {len(measured)} measured edges ({len(expected)} in all):"
    )
    largest = measured.loc[measured["delta"].abs().idxmax()]
    assert lines[2].split()[:2] == [largest["sender"], largest["receiver"]]


def test_pairs_are_printed_in_their_text(folder, tmp_path, file):
    done = succeed("pairs", folder, "L0H1,L1H0", "--prompts", file, "--top", 2, *outputs(tmp_path))
    expected = tls.top_pairs(tls.load_model(folder), ["L0H1", "L1H0"], PROMPTS, n=2)
    lines = assert_written(tmp_path, done, expected)
    largest = expected.iloc[0]
    assert lines[0] == "4 of the 4 largest pairs; the key in [ ], the query in < >"
    assert lines[1] == f"L0H1  {largest['attention']:.3f}  {largest['kind']}, {largest['offset']} tokens"
    assert lines[2].strip() == largest["context"].strip()
    assert "<" in lines[2]
    assert max(map(len, lines[:-2])) <= 80


@pytest.mark.parametrize("by", ["source", "mode", "frequency"])
def test_a_score_is_divided_as_in_python(folder, tmp_path, by):
    options = ["--prompt", PROMPTS[0], "--by", by, "--top", 3, *(["--remove", 1] if by == "source" else [])]
    model, remove = tls.load_model(folder), 1 if by == "source" else None
    done = succeed("attribution", folder, "L1H0", *options, "--query", -1, "--key", "w5", *outputs(tmp_path))
    expected = tls.qk_attribution(model, PROMPTS[0], "L1H0", -1, 1, by=by, top=3, remove=remove)
    lines = assert_written(tmp_path, done, expected)
    assert f"score {expected.attrs['score']:.3f}, attention {expected.attrs['attention']:.3f}" in lines[0]
    assert lines[2].split()[-2 if remove is None else -3] != "-"


def test_without_positions_the_largest_attention_is_divided(tmp_path):
    # Token ids, because the model has no tokenizer: 7 follows the first 6, and an induction head looks there.
    done = succeed("attribution", "tiny-rope", "L1H0", "--prompt", "5,6,7,5,6", *outputs(tmp_path))
    model, tokens = tls.load_model("tiny-rope"), torch.tensor([5, 6, 7, 5, 6])
    assert_written(tmp_path, done, tls.qk_attribution(model, tokens, "L1H0", 4, 2, top=12))
    assert done.stdout.startswith("L1H0, 6 (position 4) to 7 (2): score ")


def test_what_a_head_writes_is_divided_by_token(folder, tmp_path):
    done = succeed("attribution", folder, "L1H0", "--prompt", PROMPTS[0], "--writes", "-o", tmp_path / "table.parquet")
    expected = tls.ov_attribution(tls.load_model(folder), PROMPTS[0], "L1H0", -1)
    pd.testing.assert_frame_equal(read_table(tmp_path / "table.parquet"), expected)
    assert done.stdout.startswith("what L1H0 writes at position -1, by the token it reads\n")
    assert done.stdout.splitlines()[2].split()[:2] == [
        str(expected.loc[0, "position"]),
        expected.loc[0, "token"].strip(),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("edges", "tiny"), "no receiver is given"),
        (("edges", "tiny", "logits", "--prompts", "none.csv"), "none.csv does not exist"),
        (("edges", "tiny", "logits", "--prompts", "none.csv", "--task", "language"), "--prompts is a task of its own"),
        (("edges", "tiny", "logits", "--draws", "3"), "--draws: needs --control random"),
        (("edges", "tiny", "logits", "-o", "edges.tsv"), "edges.tsv: tables are .parquet or .csv files"),
        (("pairs", "tiny", "first"), "'first' names no head"),
        (("pairs", "tiny", "--picture", "drawn.png"), "needs HEADS and --prompts"),
        (("attribution", "tiny", "L0H0", "--prompt", "a", "--query", "3"), "give both --query and --key, or neither"),
        (("attribution", "tiny", "L0H0", "--prompt", "a", "--by", "sources"), "did you mean 'source'?"),
        (("attribution", "tiny", "L0H0", "--prompt", "a", "--writes", "--key", "3"), "leave out --key"),
    ],
)
def test_arguments_are_checked_before_the_model_is_loaded(tmp_path, monkeypatch, arguments, said):
    monkeypatch.setattr(tls, "load_model", lambda *args, **options: pytest.fail("was loaded"), raising=False)
    monkeypatch.chdir(tmp_path)
    assert said in refusal(*arguments)


def test_token_ids_stand_for_text_where_there_is_no_tokenizer(tmp_path):
    columns = {"prompt": ["5,6,7,5", "7,9,3,7"], "correct": ["6", "9"], "wrong": ["9", "6"]}
    pd.DataFrame(columns).to_csv(tmp_path / "ids.csv", index=False)
    options = ["--heads", "L1H0", "--prompts", tmp_path / "ids.csv", "-o", tmp_path / "sweep.parquet"]
    succeed("ablate", "tiny-rope", *options)
    task = tls.logit_difference([[5, 6, 7, 5], [7, 9, 3, 7]], [6, 9], [9, 6])
    expected = tls.ablation_sweep(tls.load_model("tiny-rope"), "rope_phase", heads="L1H0", task=task)
    pd.testing.assert_frame_equal(read_table(tmp_path / "sweep.parquet"), expected)
    succeed("pairs", "tiny-rope", "L1H0", "--prompts", tmp_path / "ids.csv", "--picture", tmp_path / "drawn.png")
    for command in (["patterns", "tiny-rope", "5,6,7", "L1H0"], ["wall", "tiny-rope", "--prompt", "5,6,7"]):
        succeed(*command, "-o", tmp_path / "drawn.png")
    said = "this model has no tokenizer, so it cannot read the text '5 6 7': give token ids, such as 5,6,7"
    assert said in refusal("patterns", "tiny-rope", "5 6 7", "L1H0", "-o", tmp_path / "drawn.png")


def test_digits_stay_text_where_there_is_a_tokenizer(folder, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(tls.plots, "patterns", lambda model, prompt, heads, **_: seen.append(prompt))
    monkeypatch.setattr("tlspectral.cli.pictures.write_figure", lambda figure, path: None)
    succeed("patterns", folder, "5,6,7", "L0H1", "-o", tmp_path / "drawn.png")
    assert seen == ["5,6,7"]
