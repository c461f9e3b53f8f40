"""What the file of a dictionary says of its model, compared with the given model: both ways, on each backend."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch
import zoo
from attention_models import fresh
from safetensors.torch import save_file
from score_terms import KEY, PROMPT, QUERY
from zoo import shared

import tlspectral as tls
from tlspectral.models.loading.finding import same_model
from tlspectral.models.reading import attention_view

FEATURES = 40
CENTRED = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
RAW = {"model_from_pretrained_kwargs": {"center_writing_weights": False}}


@pytest.fixture
def saved(tmp_path):
    """A dictionary of SAELens' layout, whose features are random directions with a threshold, and its settings."""

    def save(width=zoo.WIDTH, **settings):
        generator = torch.Generator().manual_seed(0)
        decoder = torch.nn.functional.normalize(torch.randn(FEATURES, width, generator=generator), dim=1)
        # Nearly half of the features read the mean of the stream above all.
        decoder[::2] = torch.nn.functional.normalize(decoder[::2] + 1.0 / width**0.5, dim=1)
        tensors = {
            "W_enc": decoder.T.contiguous(),
            "b_enc": torch.full((FEATURES,), -0.01),
            "W_dec": decoder.contiguous(),
            "b_dec": torch.zeros(width),
        }
        save_file(tensors, tmp_path / "sae_weights.safetensors")
        (tmp_path / "cfg.json").write_text(json.dumps({"d_in": width, "d_sae": FEATURES} | settings))
        return tls.Dictionary.load(tmp_path)

    return save


def processed(backend, name):
    """The model with TransformerLens' processing."""
    if backend == "hooked":
        return shared("hooked", name)
    model = fresh("bridge", name)
    with contextlib.redirect_stdout(io.StringIO()):
        model.enable_compatibility_mode(disable_warnings=True)
    return model


def streams_of(model, layer=1):
    view, found = attention_view(model), {}
    name = view.hook_names(layer)["residual"]
    with torch.no_grad(), view.hooks_on([(name, lambda value, hook: found.update(stream=value[0].detach().double()))]):
        model(PROMPT)
    return found["stream"]


def rows(model, dictionary):
    table = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, dictionary=dictionary)
    features = table[table["query_term"].str.startswith("feature") & table["key_term"].str.startswith("feature")]
    return features.set_index(["query_term", "key_term"]).sort_index()["total"]


# --- centred and raw streams ---

PROCESSED = [
    pytest.param("bridge", "gpt2"),
    pytest.param("hooked", "gpt2", marks=zoo.needs_hooked),
    *zoo.also_slow(("bridge", "neox"), ("bridge", "gptj"), ("bridge", "olmo")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), PROCESSED)
def test_a_centred_dictionary_has_the_features_of_the_processed_model_on_the_raw_one(saved, backend, name):
    dictionary, raw, whole = saved(**CENTRED), shared("bridge", name), processed(backend, name)
    view = attention_view(raw)
    expected = dictionary.activations(streams_of(whole))
    found = dictionary.fitted(view, [1]).activations(streams_of(raw))
    # float32: measured 4e-7. Of the raw streams as they are, some features are on or off otherwise.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    as_it_is = dictionary.activations(streams_of(raw))
    assert ((as_it_is > 0) != (expected > 0)).any()
    # LayerNorm reads nothing of the mean, so that all rows are equal; it is in the error, with 0.
    given, of_processed = rows(raw, dictionary), rows(whole, dictionary)
    assert list(given.index) == list(of_processed.index)
    np.testing.assert_allclose(given, of_processed, rtol=0, atol=1e-4 * of_processed.abs().max())
    write, of_whole = (
        tls.ov_attribution(model, PROMPT, "L1H1", QUERY, by="source", dictionary=dictionary)
        .query("source.str.startswith('feature')")
        .sort_values(["position", "source"])
        for model in (raw, whole)
    )
    assert write[["position", "source"]].values.tolist() == of_whole[["position", "source"]].values.tolist()


@pytest.mark.fast(1)
@pytest.mark.parametrize(("backend", "name"), PROCESSED)
def test_a_raw_dictionary_is_refused_by_a_centred_model(saved, backend, name):
    dictionary, whole = saved(**RAW), processed(backend, name)
    with pytest.raises(ValueError, match=r"cfg\.json: .*center_writing_weights is false.*mean over d_model is lost"):
        rows(whole, dictionary)
    with pytest.raises(ValueError, match="mean over d_model is lost"):
        tls.ov_attribution(whole, PROMPT, "L1H1", QUERY, by="source", dictionary=dictionary)
    raw = shared("bridge", name)
    assert rows(raw, dictionary).equals(rows(raw, saved()))


def test_that_a_stream_is_centred_is_measured_in_the_run(saved):
    """The heads of layer 1 write a mean, which the stream in front of them does not have yet."""
    model = processed("bridge", "gpt2")
    with torch.no_grad():
        attention_view(model).raw(1).w_o.add_(0.1)
    assert attention_view(model).raw(1).w_o.mean(-1).abs().min() > 0.05
    with pytest.raises(ValueError, match="mean over d_model is lost"):
        rows(model, saved(**RAW))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [CENTRED, RAW, {}])
def test_rms_norm_is_not_centred_and_changes_nothing(saved, settings):
    model = shared("bridge", "llama")
    plain = saved()
    by_hand = tls.Dictionary(plain.decoder, plain.bias, plain.encode)
    assert rows(model, saved(**settings)).equals(rows(model, by_hand))
    assert rows(processed("bridge", "llama"), saved(**settings)).index.equals(rows(model, by_hand).index)


@pytest.mark.parametrize("name", ["gpt2", *zoo.also_slow("neox")])
def test_a_dictionary_by_hand_is_compared_with_nothing(saved, name):
    plain = saved(**CENTRED, model_name="gpt2-small")
    by_hand = tls.Dictionary(plain.decoder, plain.bias, plain.encode)
    raw, whole = shared("bridge", name), processed("bridge", name)
    assert by_hand.fitted(attention_view(raw), [1]) is by_hand
    assert not rows(raw, by_hand).index.equals(rows(whole, by_hand).index)
    assert "dictionary_origin" not in tls.qk_attribution(raw, PROMPT, "L1H1", QUERY, KEY, dictionary=by_hand).attrs


def test_a_norm_behind_the_embedding_keeps_a_mean_in_the_processed_stream(saved):
    raw, whole, centred = shared("bridge", "bloom"), processed("bridge", "bloom"), saved(**CENTRED)
    assert streams_of(whole).mean(-1).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"has a norm behind its embedding, so its raw streams cannot be centred"):
        rows(raw, centred)
    assert len(rows(whole, centred))
    with pytest.raises(ValueError, match="mean over d_model is lost"):
        rows(whole, saved(**RAW))


@pytest.mark.parametrize(
    ("settings", "raw"),
    [
        ({"sae_lens_training_version": "3.19.2"}, True),
        ({"metadata": {"sae_lens_version": "6.12.1", "model_from_pretrained_kwargs": {}}}, True),
        ({"metadata": {"sae_lens_training_version": "6.0.0-rc.0", **CENTRED}}, False),
        ({"sae_lens_version": "6.12.1", "sae_lens_training_version": None}, None),
        ({"sae_lens_version": "3.19.1", **RAW}, True),
        ({}, None),
    ],
)
def test_forms_in_which_files_say_it(saved, settings, raw):
    """SAELens trained on unprocessed models from 3.19.2 on, but for the settings in `model_from_pretrained_kwargs`."""
    centred = {True: False, False: True, None: None}[raw]
    origin = saved(**settings).origin
    assert (origin.centred, origin.processed_by_default) == (centred, False)


# As SAELens wrote it beside the weights up to version 3, with all of its configuration.
OLD = {
    "model_name": "gpt2-small",
    "hook_point": "blocks.1.hook_resid_pre",
    "hook_point_layer": 1,
    "hook_point_head_index": None,
    "use_cached_activations": False,
    "b_dec_init_method": "geometric_median",
    "total_training_tokens": 300000000,
    "wandb_entity": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [OLD | {"model_name": None}, {"sae_lens_version": "1.8.0"}])
def test_an_old_file_that_does_not_say_it_warns_where_it_matters(saved, settings):
    dictionary = saved(**settings)
    with pytest.warns(UserWarning, match=r"SAELens before 3\.19\.2 centred them by default.*center_writing_weights"):
        rows(shared("bridge", "gpt2"), dictionary)
    for model in (processed("bridge", "gpt2"), shared("bridge", "llama")):  # no warning: warnings are errors
        rows(model, dictionary)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_from_pretrained_kwargs": [1]}, r"model_from_pretrained_kwargs=\[1\] should be an object"),
        ({"model_from_pretrained_kwargs": {"center_writing_weights": "no"}}, "center_writing_weights='no' should be"),
        ({"hook_name": "blocks.1.hook_resid_pre", "hook_layer": 2}, "hook_layer=2 contradicts hook_name='blocks.1"),
        ({"hook_point": "blocks.1.hook_resid_pre", "hook_point_layer": 0}, "hook_layer=0 contradicts"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(saved, settings, said):
    with pytest.raises(ValueError, match=said):
        saved(**settings)


# --- the name of the model ---


@pytest.mark.parametrize(
    ("name", "other", "same"),
    [
        ("gpt2-small", "gpt2", True),
        ("gpt2-small", "openai-community/gpt2", True),
        ("gpt2-small", "/models/gpt2/", True),
        ("gpt2-small", "~/.cache/hub/models--openai-community--gpt2/snapshots/" + 40 * "a", True),
        ("pythia-70m-deduped", "EleutherAI/pythia-70m-deduped", True),
        ("gemma-2-2b", "google/gemma-2-2b", True),
        ("gpt2-small", "gpt2-medium", False),
        ("gemma-2-2b", "google/gemma-2-2b-it", False),
        ("gpt2-small", "tiny-ape", False),
    ],
)
def test_names_of_one_model(name, other, same):
    assert same_model(name, other) is same is same_model(other, name)


@pytest.mark.slow
def test_another_model_warns_and_the_same_does_not(saved, folder):
    path = folder("llama")
    model = tls.load_model(path)
    for name in (str(path), "llama", "maker/Llama"):
        rows(model, saved(model_name=name))  # no warning: warnings are errors
    for settings in ({"model_name": "gpt2-small"}, {"metadata": {"model_name": "gpt2-small"}}):
        dictionary = saved(**settings)
        with pytest.warns(UserWarning, match=r"cfg\.json says .* made on gpt2-small, and this model is .*llama"):
            rows(model, dictionary)
        with pytest.warns(UserWarning, match="made on gpt2-small"):
            tls.ov_attribution(model, PROMPT, "L1H1", QUERY, by="source", dictionary=dictionary)
    # A bridge that was built by hand has no name.
    rows(shared("bridge", "llama"), dictionary)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("options", "revision", "said"),
    [
        ({}, "step3000", "at the last training step, and this model is at training step 3000"),
        ({"checkpoint_value": 1000}, "step3000", "at training step 1000, and"),
        ({"revision": "step1000"}, None, "at training step 1000, and this model is at the last"),
        ({"checkpoint_index": 4}, None, "at training step number 4, and this model is at the last"),
        ({"checkpoint_value": 3000}, "checkpoint-3000", None),
        ({"checkpoint_index": 4}, "step3000", None),
        ({"revision": "main"}, None, None),
        ({}, 40 * "a", None),
    ],
)
def test_another_training_step_warns(saved, options, revision, said):
    dictionary, model = saved(model_name="pythia-70m", model_from_pretrained_kwargs=options), fresh("bridge", "llama")
    model.tlspectral_source = {"model": "EleutherAI/pythia-70m", "revision": revision}
    if said is None:
        rows(model, dictionary)
    else:
        with pytest.warns(UserWarning, match=said):
            rows(model, dictionary)


def test_tables_hold_what_the_file_says(saved, tmp_path):
    said = {"model_name": "m", "hook_name": "blocks.1.hook_resid_pre", "prepend_bos": True, **CENTRED}
    table = tls.qk_attribution(
        shared("bridge", "gpt2"), PROMPT, "L1H1", QUERY, KEY, dictionary=saved(metadata=said, context_size=128)
    )
    assert table.attrs["dictionary_origin"] == said | {"context_size": 128}
    tls.write_table(table, tmp_path / "t.parquet")
    assert tls.read_table(tmp_path / "t.parquet").attrs["dictionary_origin"] == said | {"context_size": 128}
