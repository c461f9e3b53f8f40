"""Provenance of a head table: its attributes, the hash of the weights, and what survives a file."""

import json

import pytest
import torch
import zoo
from head_tables import analyze, assert_same, built, table_of

import tlspectral as tls


def test_attrs_say_all_and_are_json():
    model = built("bridge", "gpt2")
    table = analyze(model, detectors=True, seed=4, null_blocks="fresh", extras=["score_asym"])
    attrs = json.loads(json.dumps(table.attrs, allow_nan=False))
    assert attrs == table.attrs
    assert attrs["backend"] == "bridge"
    assert {"model", "revision"} <= attrs.keys()
    settings = [attrs[name] for name in ("seed", "null_draws", "null_blocks", "null_dtype")]
    assert settings == [4, 20, "fresh", "float32"]
    assert {"tlspectral", "transformer-lens", "transformers", "torch", "numpy", "scipy"} <= attrs["versions"].keys()
    assert attrs["versions"]["torch"] == torch.__version__
    assert attrs["versions"]["tlspectral"] == tls.__version__
    check = attrs["score_check"]
    assert check["compared"] == "scores"
    assert check["layer"] in (0, 1)
    assert check["worst_error"] == tls.verify_scores(model)[check["layer"]]
    assert 0 < check["worst_error"] <= check["tolerance"] < 1e-3
    assert attrs["detectors"].items() <= tls.detect_heads(model, seed=4).attrs.items()
    assert {"seed", "n_sequences", "segment_length", "chance"} <= attrs["detectors"].keys()
    assert attrs["rotary_valid_up_to"] is None
    assert list(attrs["columns"]) == list(table)
    assert all(attrs["columns"].values())
    assert analyze(model).attrs["detectors"] is None


def test_the_users_prompts_reach_the_check():
    model = built("bridge", "qwen2")
    tokens = zoo.prompt(batch=1, length=40, seed=5)
    table = analyze(model, prompts=tokens)
    worst = table.attrs["score_check"]
    assert worst["worst_error"] == tls.verify_scores(model, tokens)[worst["layer"]]
    assert (table["outside_m"] != table_of("qwen2")["outside_m"]).all()


def test_the_hash_of_the_weights_is_that_of_the_weights_alone():
    model = built("bridge", "llama")
    plain, *alike = (
        analyze(model, null_draws=2, **given).attrs["weights_sha256"]
        for given in ({}, {"seed": 1}, {"null_blocks": "fresh"}, {"heads": ["L1", "L0"]})
    )
    assert len(plain) == 64
    assert alike == [plain] * 3
    assert plain != analyze(model, null_draws=2, heads="L0").attrs["weights_sha256"]


@pytest.mark.parametrize("name", zoo.LENGTH_DEPENDENT[:1])
def test_frequencies_that_change_with_the_length_are_given_their_range(name):
    model = zoo.bridge(name)
    table = analyze(model)
    assert table.attrs["rotary_valid_up_to"] == 32
    with torch.no_grad():
        model(zoo.prompt(length=60))  # transformers overwrites the frequencies in use
    assert_same(analyze(model), table)
