"""A table of heads beside a model, or beside another table: both have to be of the same weights."""

import functools

import pandas as pd
import pytest
import zoo
from typer.testing import CliRunner
from zoo import shared

import tlspectral as tls
from tlspectral.cli import app
from tlspectral.heads.detectors import repeated_sequences
from tlspectral.heads.same_model import require_table_of
from tlspectral.hooks import ablation_sweep, summarize_sweep
from tlspectral.models.attention import attention_view
from tlspectral.report import report
from tlspectral.studies.fingerprint.statistics.model_row import another_model
from tlspectral.studies.fingerprint.statistics.placebos import permuted_pairing, placebo_attenuation
from tlspectral.studies.positional_symbolic.agreement import score_agreement
from tlspectral.tables.same_model import require_same_model

OTHER = "made from other weights than"


def analyzed(model, **options):
    return tls.analyze_heads(model, null_draws=2, detectors=False, **options)


@functools.cache
def table_of(name):
    heads = analyzed(tls.load_model(name) if name.startswith("tiny") else shared("bridge", name))
    heads["prev"] = heads.index / len(heads)
    return heads


@functools.cache
def retrained():
    """A model with the name, shape and class of the shared Llama, and other weights."""
    return zoo.bridge("llama", seed=1)


def heads():
    return table_of("llama").copy()


# --- a table and a model ---


@pytest.mark.parametrize(("name", "heads"), [("llama", "L1"), ("gpt2", None), ("gptj", ["L0", "L1"])])
def test_a_model_knows_the_hash_of_its_own_table(name, heads):
    model = shared("bridge", name)
    table = analyzed(model, heads=heads)
    origin = attention_view(model).origin(None if heads is None else table["layer"].unique().tolist())
    for key in ("weights_sha256", "weights_by_layer", "n_layers"):
        assert origin[key] == table.attrs[key]
    assert list(origin["weights_by_layer"]) == [str(layer) for layer in table["layer"].unique()]
    table.attrs["model"] = "a folder of mine"  # a name is not asked where there is a hash
    require_table_of(model, table)


@pytest.mark.parametrize("chosen", [None, "L1"])
def test_a_table_of_other_weights_is_refused(chosen):
    table = analyzed(shared("bridge", "llama"), heads=chosen)
    with pytest.raises(ValueError, match=f"head table was {OTHER} the loaded weights: the hash of layer [01] is "):
        require_table_of(retrained(), table)
    # Names are asked where hashes cannot be compared.
    table.attrs["backend"] = "hooked"
    require_table_of(retrained(), table)
    table.attrs["revision"] = "abc"
    model = zoo.bridge("llama")
    model.tlspectral_source = {"model": table.attrs["model"], "revision": "def"}
    with pytest.raises(ValueError, match="head table is of revision abc, the loaded weights are of revision def"):
        require_table_of(model, table)
    table.attrs = {}
    table["layer"] += 1
    with pytest.raises(ValueError, match="has a layer 2 and the model has layers 0 to 1"):
        require_table_of(model, table)


# --- the commands ---


@pytest.mark.parametrize(
    "arguments",
    [
        ("ablate", "tiny-rope", "TABLE", "--part", "output", "--top", "1"),
        ("study", "statistics", "TABLE", "--model", "tiny-rope"),
    ],
)
def test_commands_refuse_another_models_table(tmp_path, arguments):
    other = tmp_path / "tiny-rope-imag.parquet"
    tls.write_table(table_of("tiny-rope-imag"), other)
    done = CliRunner().invoke(app, [str(other) if word == "TABLE" else word for word in arguments])
    assert done.exit_code == 2, done.output
    assert f"{OTHER} the loaded weights" in done.stderr
    assert "(tiny-rope-imag, revision" in done.stderr
    assert done.stdout == ""


def test_ablate_takes_the_models_own_table_with_detectors(tmp_path):
    path, options = tmp_path / "heads.parquet", ("--part", "output", "--top", "1")
    for table, code in ((table_of("tiny-rope"), 0), (analyzed(tls.load_model("tiny-rope")), 2)):
        tls.write_table(table, path)
        done = CliRunner().invoke(app, ["ablate", "tiny-rope", str(path), *options])
        assert done.exit_code == code, done.output
    assert "no detector scores (prev): make it again without --no-detectors" in done.stderr


# --- a table and a table ---


def of_sweep(model):
    tokens = repeated_sequences(attention_view(model), 3, 8, seed=0)
    chosen = [(1, 0), (1, 1), (0, 2)]
    summarize_sweep(ablation_sweep(model, "symmetric", heads=chosen, task=tls.tasks.induction(tokens)), heads())


def of_kernels(model):
    table = heads()
    report(table, kernels=tls.relative_position_kernel(model, [(1, 0)], zoo.prompt(3, 8)))


def of_placebo(model):
    placebo_attenuation(heads(), permuted_pairing(model, draws=1), lambda table: pd.Series({"statistic": 0.5}))


def of_scores(model):
    table = heads()
    scores = table[["layer", "head"]].assign(s_pos=table["prev"])
    scores.attrs = attention_view(model).origin()
    score_agreement(scores, table, draws=2)


def of_a_row_of_the_papers(model):
    if model is not shared("bridge", "llama"):  # of the table's own model it runs for seconds
        another_model(heads(), model=model, k=3)


@pytest.mark.parametrize("joined", [of_sweep, of_kernels, of_placebo, of_scores, of_a_row_of_the_papers])
def test_tables_of_other_weights_are_refused(joined):
    joined(shared("bridge", "llama"))
    with pytest.raises(ValueError, match=OTHER):
        joined(retrained())


def test_names_are_compared_where_a_table_has_no_hash():
    table, origin = heads(), attention_view(retrained()).source
    assert "no hash of the weights is known for the draws" in require_same_model(table, origin, "the draws")
    table.attrs["model"] = "one"
    with pytest.raises(ValueError, match="is of model one, the draws are of model other: use one model"):
        require_same_model(table, origin | {"model": "other"}, "the draws")
