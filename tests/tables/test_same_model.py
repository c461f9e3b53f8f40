"""Tables over the heads of a model carry hashes of its weights, and go with that model and its tables alone."""

import functools

import pandas as pd
import pytest
import torch
import zoo
from positional_measurements import block_prompt
from reference_circuits import edited
from tlspectral_studies.fingerprint.statistics import (
    permuted_pairing,
    pseudo_rope,
    weight_noise_band,
    weight_noise_draws,
)
from tlspectral_studies.fingerprint.statistics.model_row import another_model
from tlspectral_studies.fingerprint.statistics.placebos import placebo_attenuation
from tlspectral_studies.positional_symbolic.agreement import frequency_agreement, score_agreement
from tlspectral_studies.positional_symbolic.traces import attention_traces, frequency_norms
from typer.testing import CliRunner

import tlspectral as tls
from tlspectral.cli import app
from tlspectral.heads import kernel_prediction
from tlspectral.heads.analysis import require_table_of
from tlspectral.hooks import summarize_sweep
from tlspectral.models.reading import attention_view
from tlspectral.positional import logit_shares
from tlspectral.report import report
from tlspectral.tables import join
from tlspectral.tables.every_table import every_schema
from tlspectral.tables.same_model import layers_apart, require_same_model
from tlspectral.tasks import induction

TABLES = every_schema()

PROMPT, TASK = zoo.prompt(3, 8), induction(n_sequences=3, segment_length=8)
NO_HEAD = [("blocks.0.attn.hook_z", lambda z, hook: 0.5 * z)]
OTHER = "made from other weights than the rows of the table one"
UNKNOWN = "and the table of heads are of one model"


analyze = functools.partial(tls.analyze_heads, null_draws=2, detectors=False)


@functools.cache
def retrained():
    return zoo.bridge("llama", seed=1)


def llama():
    return zoo.shared("bridge", "llama")


@functools.cache
def heads_of_llama():
    return analyze(llama())


def sweep(model, heads=("L0H2", "L1H1")):
    return tls.ablation_sweep(model, "output", heads=list(heads), task=TASK)


def scores(model, **options):
    return tls.positional_symbolic(model, block_prompt(), swaps="all", **options)


def agreement(model):
    return frequency_agreement(scores(model, per_frequency=True), tls.frequency_table(model), draws=2)


def written(model):
    return tls.ov_attribution(model, PROMPT[0], None, query=-1, direction=(5, 7), by="head")


def sufficient(model):
    tokens, pairs = zoo.prompt(4, 8), zoo.prompt(4, 8, seed=1)
    difference = (model(tokens) - model(pairs))[:, -1]
    answers = difference.argmax(-1).tolist(), difference.argmin(-1).tolist()
    task = tls.Task(tokens, tls.logit_difference(tokens, *answers).metric, counterfactual=pairs)
    return tls.sufficient_heads(model, task, n=1, penalties=(0.03,), starts=1, draws=1)


def traced(model, measure, **options):
    return measure(model, block_prompt(), [(0, 1), (1, 2)], **options)


# Name of the table and how it is made; the layers whose weights it was measured on, where they are not all; why it is
# not joined to a table of the same model, where it is not.
ROWS = [
    ("analyze_heads", analyze, None, None),
    ("frequency_table", tls.frequency_table, None, None),
    ("weight_noise_band", lambda model: weight_noise_band(model, draws=2), None, None),
    ("weight_noise_draws", lambda model: weight_noise_draws(model, draws=2), None, "several rows for layer 0, head 0"),
    ("permuted_pairing", lambda model: permuted_pairing(model, draws=1), None, None),
    ("head_directions", lambda model: tls.head_directions(model, "L1H1", draws=5), [1], "layer 1, head 1, kind qk"),
    ("logit_shares", lambda model: logit_shares(model, block_prompt((2, 2, 2))), None, None),
    ("positional_symbolic", scores, None, None),
    ("positional_symbolic", lambda model: scores(model, by="query"), None, "several rows for layer 0, head 0"),
    ("positional_symbolic", lambda model: scores(model, per_frequency=True), None, None),
    ("frequency_agreement", agreement, None, None),
    ("attention_traces", lambda model: traced(model, attention_traces, swaps=[(0, 1)]), None, "without frequency"),
    ("frequency_norms", lambda model: traced(model, frequency_norms), None, None),
    ("detect_heads", lambda model: tls.detect_heads(model, n_sequences=2), None, None),
    ("detect_heads.prompts", lambda model: tls.detect_heads(model, prompts=PROMPT), None, None),
    ("relative_position_kernel", lambda model: tls.relative_position_kernel(model, "L1H1", PROMPT), None, None),
    ("top_pairs", lambda model: tls.top_pairs(model, "L1H1", PROMPT), None, "several rows for layer 1, head 1"),
    ("kernel_prediction", lambda model: kernel_prediction(model, "L1H1", PROMPT), None, None),
    ("ov_attribution", written, None, None),
    ("k_composition", lambda model: tls.k_composition(model, "L1H1"), [0, 1], None),
    ("k_composition", tls.k_composition, None, "has a row per edge"),
    ("copying_scores", tls.heads.copying_scores, None, None),
    ("ablation_sweep", sweep, None, None),
    ("band_effects", lambda model: tls.hooks.band_effects(model, "L1H1", task=TASK, draws=1), None, None),
    ("edge_effects", lambda model: tls.edge_effects(model, "L1H1.k", task=TASK), None, "has a row per edge"),
    ("wall", lambda model: tls.hooks.wall(model, PROMPT[0]).table(), None, None),
    ("sufficient_heads", sufficient, None, None),
    ("check_hook.heads", lambda model: tls.hooks.check_hook(model, NO_HEAD, "L0H1").heads, None, None),
]
# Tables of several models, of none that is loaded, and those of studies.
WITHOUT = ("compare_heads", "analyze_models.", "head_history.", "published_", "scheme_contrast.", "beside_published.",
           "constrained_grid.", "evolve.", "experiments.")  # fmt: skip


def test_every_table_over_heads_is_in_the_list():
    over_heads = {
        name for name, table in TABLES.items() if {"layer", "head"} <= {column.name for column in table.columns}
    }
    assert {name for name in over_heads if not name.startswith(WITHOUT)} == {name for name, *_ in ROWS}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "measure", "layers", "refused"), ROWS, ids=[row[0] for row in ROWS])
def test_a_table_over_heads_has_the_hashes_of_its_model_and_is_joined_to_its_tables(name, measure, layers, refused):
    heads, table = heads_of_llama(), measure(llama())
    assert table.attrs["table"] == name
    assert table.attrs["n_layers"] == 2
    expected = {str(layer): heads.attrs["weights_by_layer"][str(layer)] for layer in layers or (0, 1)}
    assert table.attrs["weights_by_layer"] == expected
    if refused is None:
        assert len(join(heads, one=table)) == len(heads)
    else:
        with pytest.raises(ValueError, match=refused):
            join(heads, one=table)


def test_a_placebo_of_a_model_without_rotary_positions_carries_its_origin():
    model = zoo.shared("bridge", "gpt2")
    assert len(join(analyze(model), one=pseudo_rope(model))) == 8


# --- hashes of layers ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameter", "changed"),
    [("model.layers.1.self_attn.q_proj", {"1"}), ("model.layers.1.self_attn.k_proj", {"1"}),
     ("model.layers.0.self_attn.v_proj", {"0"}), ("model.layers.0.self_attn.o_proj", {"0"}),
     ("model.layers.1.input_layernorm", {"1"}), ("model.embed_tokens", {"0", "1"}), ("lm_head", {"0", "1"}),
     ("model.norm", {"0", "1"}), ("model.layers.0.mlp.up_proj", set())],
)  # fmt: skip
def test_a_changed_weight_changes_the_hash_of_its_layer(parameter, changed):
    def change(model):
        model.get_submodule(parameter).weight.view(-1)[7] += 1e-3

    before, after = (attention_view(model).origin()["weights_by_layer"] for model in (llama(), edited("llama", change)))
    assert {layer for layer in before if before[layer] != after[layer]} == changed


@pytest.mark.slow
def test_a_weight_that_is_changed_in_place_is_seen_by_the_next_table():
    model = zoo.bridge("llama")
    assert len(join(analyze(model), one=tls.heads.copying_scores(model))) == 8
    heads = analyze(model)
    model.blocks[1].attn.q.weight.data.mul_(1.01)  # .data: no version counter moves
    with pytest.raises(ValueError, match=f"{OTHER}: the hash of layer 1"):
        join(heads, one=tls.heads.copying_scores(model))


@pytest.mark.slow
def test_tables_of_some_layers_are_compared_on_those_that_both_have():
    some = analyze(llama(), heads="L1")
    composed = tls.k_composition(llama(), "L1H1")
    assert len(join(heads_of_llama(), one=some)) == 8
    assert composed.attrs["weights_by_layer"].keys() == {"0", "1"}
    with pytest.raises(ValueError, match=f"{OTHER}: the hash of layer 1"):
        join(some, one=sweep(retrained()))
    with pytest.raises(ValueError, match=f"{UNKNOWN}: they have no layer in common"):
        join(some, one=analyze(llama(), heads="L0"))


# --- what cannot be compared ---


def without_hashes():
    table = sweep(llama())
    table.attrs = {key: value for key, value in table.attrs.items() if not key.startswith("weights_")}
    return table


@pytest.mark.slow
@pytest.mark.parametrize("table", [without_hashes, lambda: pd.concat([sweep(llama()), without_hashes()])])
def test_a_table_that_does_not_name_its_weights_is_refused(table):
    with pytest.raises(ValueError, match=f"{UNKNOWN}: no hash of the weights is known for the rows of .* Make both"):
        join(heads_of_llama(), one=table().query("part == 'output'"))


def test_an_older_table_has_the_hash_of_all_its_layers():
    heads, older = heads_of_llama(), sweep(llama())
    del older.attrs["weights_by_layer"], older.attrs["n_layers"]
    assert len(join(heads, one=older)) == 8
    older.attrs["weights_sha256"] = "0" * 64
    with pytest.raises(ValueError, match=r"other weights or other layers than .* make both again on one model"):
        join(heads, one=older)


@pytest.mark.slow
def test_tables_of_a_folder_and_of_the_model_loaded_from_it_are_compared_by_name(folder):
    streamed, loaded = analyze(folder("llama")), tls.load_model(folder("llama"))
    assert streamed.attrs["backend"] != "bridge"
    assert streamed.attrs["weights_by_layer"].keys() == {"0", "1"}
    assert len(join(streamed, one=tls.detect_heads(loaded, n_sequences=2))) == 8
    with pytest.raises(ValueError, match=r"made with model .*llama, the rows of the table one with model"):
        join(streamed, one=tls.detect_heads(tls.load_model("tiny-rope"), n_sequences=2))
    unnamed = tls.detect_heads(llama(), n_sequences=2)
    unnamed.attrs["model"] = None
    with pytest.raises(ValueError, match=f"{UNKNOWN}: their backends differ .*, and one of them does not name"):
        join(streamed, one=unnamed)


@pytest.mark.slow
def test_composition_of_a_folder_has_the_hashes_of_its_head_table(folder, tmp_path):
    streamed, composed = analyze(folder("llama")), tls.k_composition(folder("llama"), "L1H1")
    assert composed.attrs["weights_by_layer"] == streamed.attrs["weights_by_layer"]
    other = zoo.save_folder("llama", tmp_path, seed=1)
    with pytest.raises(ValueError, match=f"{OTHER}: the hash of layer 0"):
        join(streamed, one=tls.k_composition(other, "L1H1"))


def test_a_model_whose_weights_are_elsewhere_is_measured_without_hashes():
    """As accelerate leaves layers that it loads when they are used: their parameters are on the meta device."""
    view = attention_view(zoo.bridge("llama"))
    inner = view.model.blocks[1].attn.original_component.q_proj
    inner.weight = torch.nn.Parameter(inner.weight.to("meta"))
    assert "weights_by_layer" not in view.origin()
    assert view.origin()["n_layers"] == 2


def test_layers_apart_are_told_by_their_hashes():
    one = {"backend": "bridge", "weights_by_layer": {"0": "a", "2": "b", "10": "c"}}
    other = {"backend": "bridge", "weights_by_layer": {"10": "d", "2": "b", "11": "e"}}
    assert layers_apart(one, other) == {"differ": [10], "equal": [2]}
    assert "backends 'bridge' and 'hooked'" in layers_apart(one, other | {"backend": "hooked"})["unknown"]
    assert "no hash of a layer" in layers_apart(one, {"backend": "bridge"})["unknown"]
    assert "backends None and None" in layers_apart({}, {})["unknown"]


# --- a table and a model ---


def detected(table):
    """The table with detector scores, and with nothing that says how they were made."""
    found = table.assign(prev=table.index / len(table))
    found.attrs = {**table.attrs, "detectors": None}
    return found


@functools.cache
def packaged(name):
    return analyze(tls.load_model(name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads"), [("llama", "L1"), ("gpt2", None), ("gptj", ["L0", "L1"])])
def test_a_model_knows_the_hash_of_its_own_table(name, heads):
    model = zoo.shared("bridge", name)
    table = analyze(model, heads=heads)
    origin = attention_view(model).origin(None if heads is None else table["layer"].unique().tolist())
    for key in ("weights_sha256", "weights_by_layer", "n_layers"):
        assert origin[key] == table.attrs[key]
    assert list(origin["weights_by_layer"]) == [str(layer) for layer in table["layer"].unique()]
    table.attrs["model"] = "a folder of mine"  # a name is not asked where there is a hash
    require_table_of(attention_view(model), table)


@pytest.mark.parametrize("chosen", [None, "L1"])
def test_a_table_of_other_weights_is_refused(chosen):
    table = analyze(llama(), heads=chosen)
    with pytest.raises(ValueError, match=r"head table was made .* the loaded weights: the hash of layer [01] is "):
        require_table_of(attention_view(retrained()), table)
    # Names are asked where hashes cannot be compared.
    table.attrs["backend"] = "hooked"
    require_table_of(attention_view(retrained()), table)
    table.attrs["revision"] = "abc"
    model = zoo.bridge("llama")
    model.tlspectral_source = {"model": table.attrs["model"], "revision": "def"}
    with pytest.raises(ValueError, match="head table was made with revision abc, the loaded weights with revision def"):
        require_table_of(attention_view(model), table)
    table.attrs = {}
    table["layer"] += 1
    with pytest.raises(ValueError, match="has layer 2, but the model has layers 0 to 1"):
        require_table_of(attention_view(model), table)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("ablate", "tiny-rope", "TABLE", "--part", "output"),
        ("study", "statistics", "TABLE", "--model", "tiny-rope"),
    ],
)
def test_commands_refuse_another_models_table(tmp_path, arguments):
    other = tmp_path / "tiny-rope-imag.parquet"
    tls.write_table(detected(packaged("tiny-rope-imag")), other)
    done = CliRunner().invoke(app, [str(other) if word == "TABLE" else word for word in arguments])
    assert done.exit_code == 2, done.output
    assert "made from other weights than the loaded weights" in done.stderr
    assert "(tiny-rope-imag, revision" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_ablate_takes_the_models_own_table_with_detectors(tmp_path):
    path, table, options = tmp_path / "heads.parquet", packaged("tiny-rope"), ("--part", "output")
    for given, code in ((detected(table), 0), (table, 2)):
        tls.write_table(given, path)
        done = CliRunner().invoke(app, ["ablate", "tiny-rope", str(path), *options])
        assert done.exit_code == code, done.output
    assert "no detector scores (prev), which choose the heads" in done.stderr


# --- functions of several tables ---


def heads():
    return detected(heads_of_llama())


def of_scores(model):
    given = heads()[["layer", "head"]].assign(s_pos=heads()["prev"])
    given.attrs = attention_view(model).origin()
    score_agreement(given, heads(), draws=2)


def of_a_row_of_the_papers(model):
    if model is not llama():  # of the table's own model it runs for seconds
        another_model(heads(), model=model, k=3)


JOINED = {
    "a sweep": lambda model: summarize_sweep(sweep(model, ["L1H0", "L1H1", "L0H2"]), heads()),
    "kernels": lambda model: report(heads(), kernels=tls.relative_position_kernel(model, [(1, 0)], PROMPT)),
    "a placebo": lambda model: placebo_attenuation(
        heads(), permuted_pairing(model, draws=1), lambda table: pd.Series({"statistic": 0.5})
    ),
    "frequencies": lambda model: frequency_agreement(
        scores(llama(), per_frequency=True), tls.frequency_table(model), draws=2
    ),
    "scores": of_scores,
    "a row of the papers": of_a_row_of_the_papers,
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("joined", JOINED.values(), ids=JOINED)
def test_functions_refuse_tables_of_other_weights(joined):
    joined(llama())
    with pytest.raises(ValueError, match="made from other weights than"):
        joined(retrained())


def test_names_are_compared_where_a_table_has_no_hash():
    table, origin = heads_of_llama().copy(), attention_view(retrained()).source
    assert "no hash of the weights is known for the draws" in require_same_model(table, origin, "the draws")
    table.attrs["model"] = "one"
    with pytest.raises(ValueError, match="made with model one, the draws with model other: use one model"):
        require_same_model(table, origin | {"model": "other"}, "the draws")
