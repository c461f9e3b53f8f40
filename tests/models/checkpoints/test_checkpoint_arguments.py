"""Arguments of tables made layer by layer: layers, extras, detectors, folders with parts, the bar, composition.

How a table that is stopped continues is asked of every function in `test_resumable_functions.py`.
"""

import shutil
from functools import partial

import command_line
import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from streamed_checkpoints import analyze

import tlspectral as tls
from tlspectral.errors import BadHead
from tlspectral.models.checkpoints import layers as checkpoints
from tlspectral.tables import read_table


@pytest.fixture
def read(monkeypatch):
    """Layers that are read, with the side of each."""
    seen, real = [], checkpoints.WeightFiles.layer

    def layer(self, index, side="query-key"):
        seen.append((index, side))
        return real(self, index, side)

    monkeypatch.setattr(checkpoints.WeightFiles, "layer", layer)
    return seen


@pytest.mark.slow
def test_some_layers_only_and_those_in_a_folder_are_taken_over(folder, read, tmp_path):
    whole = analyze(folder("gemma2"))
    expected = whole[whole["layer"].isin([0, 3])].reset_index(drop=True)
    read.clear()
    part = analyze(folder("gemma2"), heads=["L3", "L0"], folder=tmp_path / "parts")
    assert [index for index, _ in read] == [0, 3]
    pd.testing.assert_frame_equal(
        part.drop(columns="D_head_pct"), expected.drop(columns="D_head_pct"), check_exact=True
    )
    read.clear()
    moved = shutil.copytree(folder("gemma2"), tmp_path / "moved")
    pd.testing.assert_frame_equal(analyze(moved, folder=tmp_path / "parts"), whole, check_exact=True)
    assert [index for index, _ in read] == [1, 2]


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_position_share_needs_no_run(folder, name):
    extras = {"extras": ["position_share"]}
    streamed, loaded = analyze(folder(name), **extras), analyze(tls.load_model(folder(name)), **extras)
    assert streamed["position_share"].notna().all() == (name != "llama")
    np.testing.assert_allclose(streamed["position_share"], loaded["position_share"], rtol=1e-12)


@pytest.mark.slow
def test_with_detectors_the_model_is_loaded(folder, sizes, capfd):
    path = folder("llama")
    sizes.clear()
    capfd.readouterr()
    table = analyze(str(path), detectors=True)
    assert set(sizes) == {2}
    assert table.attrs["backend"] == "bridge"
    assert table[["prev", "outside_m"]].notna().all(axis=None)
    assert capfd.readouterr() == ("", "")  # the bars are off


NO_ACTIVATIONS = "needs the model's activations"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda path, parts: analyze(path, heads="L2"), BadHead, "the model has layers 0 to 1"),
        (lambda path, parts: analyze(path, extras=["score_asym"]), ValueError, NO_ACTIVATIONS),
        (lambda path, parts: analyze(path, prompts=torch.arange(3, 20)), ValueError, NO_ACTIVATIONS),
        (lambda path, parts: tls.k_composition(path, (2, 0)), BadHead, "does not exist: the model has layers 0 to 1"),
        (lambda path, parts: tls.k_composition(path, (1, 4)), BadHead, "does not exist: layer 1 has heads 0 to 3"),
        (lambda path, parts: tls.k_composition(path, (-3, 0)), BadHead, "does not exist"),
        (lambda path, parts: tls.k_composition(path, (1, -5)), BadHead, "does not exist"),
    ],
)
def test_refusals_before_any_work(folder, sizes, tmp_path, call, error, words):
    path = folder("llama")
    sizes.clear()
    with pytest.raises(error, match=words):
        call(path, tmp_path / "parts")
    assert 1 not in sizes  # no layer was read
    assert not (tmp_path / "parts").exists()


# --- composition ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("gpt2", "k"), ("llama", "k"), ("neox", "q"), ("phi3", "v"), ("gptneo", "v"), ("llama", "q")]
)
def test_composition_from_files(folder, sizes, name, kind):
    path, receiver = folder(name), f"L1H2.{kind}"
    sizes.clear()
    streamed = tls.k_composition(str(path), receiver)
    assert set(sizes) == {1}
    loaded = tls.k_composition(tls.load_model(path), receiver)
    pd.testing.assert_frame_equal(streamed, loaded, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_composition_reads_values_and_outputs_of_earlier_layers_only(folder, read):
    assert len(tls.k_composition(folder("gemma2"), (2, 0))) == 8
    assert read == [(2, "query-key"), (1, "output"), (0, "output")]


@pytest.mark.slow
@pytest.mark.tl4
def test_all_pairs_of_composition_from_files(folder, read):
    path = folder("gemma2")
    streamed = tls.k_composition(path)
    outputs, queries = ([index for index, side in read if side == one] for one in ("output", "query-key"))
    assert outputs == [2, 1, 0]  # each layer once
    assert queries == [3, 2, 1, 0]
    loaded = tls.k_composition(tls.load_model(path))
    # Measured: 4e-16 relative. A gain left out moves scores by 1e-3 and more.
    pd.testing.assert_frame_equal(streamed, loaded, rtol=1e-12, atol=0)


# --- the command, and threads ---


run = partial(command_line.run, "analyze")


@pytest.mark.slow
def test_the_command_continues_too(folder, tmp_path, read):
    path = folder("llama")
    options = (path, "--no-detectors", "--null-draws", 5, "--folder", tmp_path / "parts")
    expected = analyze(path)
    for layers in ([0, 1], []):
        read.clear()
        done = run(*options, "-o", tmp_path / "heads.parquet")
        assert done.exit_code == 0, done.output
        assert [index for index, _ in read] == layers
        pd.testing.assert_frame_equal(read_table(tmp_path / "heads.parquet"), expected, check_exact=True)
    for more in ((), ("--no-detectors", "--device", "cpu")):  # the model is loaded: other jobs, and detectors
        done = run(path, "--folder", tmp_path / "parts", *more)
        assert done.exit_code == 2
        assert "was made with other" in done.stderr


@pytest.mark.slow
def test_layers_read_by_threads_leave_weight_tying_as_it_was(folder):
    """transformers switches it off in the whole process while a model loads; threads could leave it off for good."""
    from transformers import PreTrainedModel

    own = PreTrainedModel.tie_weights
    with joblib.parallel_config(backend="threading"):
        for _ in range(2):
            found = analyze(folder("llama"), null_blocks="fresh", n_jobs=4)
    assert PreTrainedModel.tie_weights is own
    pd.testing.assert_frame_equal(found, analyze(folder("llama"), null_blocks="fresh"), check_exact=True)


@pytest.mark.slow
@pytest.mark.tl4
def test_files_are_opened_by_load_model_and_measured_as_by_name(folder):
    files = tls.load_model(folder("llama"), weights="files")
    assert "WeightFiles" in repr(files)
    assert str(folder("llama")) in repr(files)
    by_name = tls.analyze_heads(folder("llama"), detectors=False, null_draws=2)
    for options in ({}, {"detectors": False}):  # nothing is run of files either way
        found = tls.analyze_heads(files, null_draws=2, **options)
        pd.testing.assert_frame_equal(found, by_name, check_exact=True)
        assert found["prev"].isna().all()
    senders = tls.k_composition(files, "L1H0.k")
    pd.testing.assert_frame_equal(senders, tls.k_composition(folder("llama"), "L1H0.k"), check_exact=True)


TASK = tls.logit_difference([[1, 2, 3]], 4, 5, counterfactual=[[1, 3, 3]])
BLOCKS = tls.positional.BlockPrompt(
    torch.tensor([1]), [torch.tensor([token]) for token in (2, 3, 4)], torch.tensor([5])
)
WITH_A_MODEL = {
    "detect_heads": lambda files: tls.detect_heads(files),
    "evaluate": lambda files: tls.evaluate(files, TASK),
    "ablate": lambda files: tls.ablate(files, "L0H0", "output").__enter__(),
    "ablation_sweep": lambda files: tls.ablation_sweep(files, "output"),
    "edge_effects": lambda files: tls.edge_effects(files, "logits", task=TASK),
    "run_circuit": lambda files: tls.run_circuit(files, [], TASK),
    "faithfulness": lambda files: tls.faithfulness(files, pd.DataFrame(), TASK),
    "sufficient_heads": lambda files: tls.sufficient_heads(files, TASK),
    "verify_scores": lambda files: tls.verify_scores(files),
    "qk_operators": lambda files: tls.qk_operators(files),
    "frequency_table": lambda files: tls.frequency_table(files),
    "relative_position_kernel": lambda files: tls.relative_position_kernel(files),
    "head_directions": lambda files: tls.head_directions(files, "L0H0"),
    "top_pairs": lambda files: tls.top_pairs(files, "L0H0"),
    "qk_attribution": lambda files: tls.qk_attribution(files, [1, 2, 3], "L0H0", 2, 1),
    "ov_attribution": lambda files: tls.ov_attribution(files, [1, 2, 3], "L0H0", 2),
    "positional_symbolic": lambda files: tls.positional_symbolic(files, BLOCKS),
    "to_spectral": lambda files: tls.to_spectral(files),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_A_MODEL)
def test_what_needs_a_model_refuses_files_by_name(folder, name):
    files = tls.load_model(folder("llama"), weights="files")
    with pytest.raises(TypeError, match=r"WeightFiles\(.*\) holds the files of weights .* load it with load_model"):
        WITH_A_MODEL[name](files)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "all"}, "weights='all' is not known: give 'model' or 'files'"),
        ({"weights": "files", "dtype": "float64"}, "reads weights as they are stored: leave dtype= out"),
        ({"weights": "files", "backend": "bridge"}, "leave backend= out"),
    ],
)
def test_arguments_that_files_do_not_take_are_refused(folder, options, words):
    with pytest.raises(ValueError, match=words):
        tls.load_model(folder("llama"), **options)


def test_what_is_loaded_whole_has_no_files_to_read(folder):
    with pytest.raises(ValueError, match="tiny-rope is a model of this package: leave weights='files' out"):
        tls.load_model("tiny-rope", weights="files")
    with pytest.raises(ValueError, match="takes a name or a path; this TransformerBridge is loaded already"):
        tls.load_model(tls.load_model("tiny-rope"), weights="files")
