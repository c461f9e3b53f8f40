"""`Dictionary`: terms of a score by feature, the error beside them, files in SAELens' layout, and what is refused."""

import json

import numpy as np
import pytest
import torch
from attention_models import fresh
from safetensors.torch import save_file
from score_terms import KEY, PARTS, PROMPT, QUERY, captured_of, sources_of
from zoo import shared

import tlspectral as tls
from tlspectral.models.reading import attention_view


def orthonormal(width, seed=0):
    matrix = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(matrix).Q


def sparse(width, features=64, seed=0):
    """A dictionary of which some ten features are active at each token: those with a cosine above .14."""
    generator = torch.Generator().manual_seed(seed)
    decoder = torch.nn.functional.normalize(torch.randn(features, width, generator=generator), dim=1)

    def encode(x):
        found = x @ decoder.T
        return found * (found > 0.14 * x.norm(dim=1, keepdim=True))

    return tls.Dictionary(decoder, torch.zeros(width), encode)


# --- terms ---


def test_the_sources_as_a_dictionary_give_the_table_of_sources():
    # Feature 2s is what source s wrote at the query, 2s + 1 what it wrote at the key.
    model = shared("bridge", "gemma2")
    view = attention_view(model)
    written = sources_of(view, 1, captured_of(view, 1))
    rows = torch.stack([value[place] for value in written.values() for place in (QUERY, KEY)])

    streams = sum(written.values())

    def encode(given):
        nearer = torch.cdist(given.double(), streams[[QUERY, KEY]]).argmin(1)
        return torch.stack([(torch.arange(len(rows)) % 2 == at).double() for at in nearer.tolist()])

    dictionary = tls.Dictionary(rows, torch.zeros(view.d_model), encode)
    table = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, dictionary=dictionary)
    plain = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY).set_index(["query_term", "key_term"])
    names = list(written)
    by_feature = table.set_index(["query_term", "key_term"])
    compared = 0
    for a, at_query in enumerate(names):
        for b, at_key in enumerate(names):
            if (at_query, at_key) in plain.index:
                found = by_feature.loc[(f"feature {2 * a}", f"feature {2 * b + 1}"), PARTS]
                # float64 on both sides; measured 2e-15.
                np.testing.assert_allclose(
                    found.astype(float), plain.loc[(at_query, at_key), PARTS].astype(float), rtol=0, atol=1e-10
                )
                compared += 1
    assert compared >= 30


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "bloom"])
def test_features_and_error_sum_to_the_score_and_removal_is_measured(name):
    model = shared("bridge", name)
    dictionary = sparse(attention_view(model).d_model)
    table = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, dictionary=dictionary, remove=3)
    assert abs(table.attrs["remainder"]) <= table.attrs["tolerance"]
    assert {"error", "dictionary bias"} <= set(table["query_term"])
    assert table["query_term"].str.startswith("feature").mean() > 0.5
    assert table.attrs["by"] == "feature"
    of_error = table.loc[(table["query_term"] == "error") | (table["key_term"] == "error"), "total"].sum()
    assert table.attrs["error_score"] == pytest.approx(of_error, abs=1e-10)
    assert table.attrs["error_share"] == pytest.approx(of_error / table.attrs["score"], abs=1e-10)
    assert table["measured"].notna().sum() == 3


def test_a_dictionary_that_explains_everything_has_no_error():
    model = shared("bridge", "llama")
    basis = orthonormal(attention_view(model).d_model)
    complete = tls.Dictionary(basis, torch.zeros(len(basis)), lambda x: x.double() @ basis.T)
    attrs = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, dictionary=complete).attrs
    assert abs(attrs["error_share"]) < 1e-6  # streams reach `encode` in the decoder's type, float64 here
    # The same activations of turned features explain nothing of the stream.
    assert abs(attrs["error_share_turned"]) > 0.3


APART = 2 + torch.arange(24)[None]


def planted():
    """A model whose L1H1 reads one direction at the key and one at the query, and a basis that has both."""
    model = fresh("bridge", "llama")
    view = attention_view(model)
    with torch.no_grad():
        key = view.embedding()[APART[0, KEY]]
        random = orthonormal(view.d_model, seed=3)
        key += (10 * random[5]).to(key)  # of this token alone
        token = captured_of(view, 1, APART)[view.hook_names(1)["residual"]][0, QUERY].double()
        basis = torch.linalg.qr(torch.cat([token[None], random[5:6], random[:5], random[6:-1]]).T).Q.T
        basis *= torch.sign(torch.stack([basis[0] @ token, basis[1] @ random[5], *torch.ones(len(basis) - 2)]))[:, None]
        late = view.raw(1)
        slow = int(late.rotary.real_index[-1])  # a pair that hardly turns
        late.w_q[1], late.w_k[0] = 0.0, 0.0
        late.w_q[1, :, slow] = (10 * basis[0] / late.norm.gain.double()).to(late.w_q)
        late.w_k[0, :, slow] = (basis[1] / late.norm.gain.double()).to(late.w_k)
    return model, tls.Dictionary(basis, torch.zeros(len(basis)), lambda x: x.double() @ basis.T)


def test_a_planted_feature_comes_first_and_no_other_token_has_it():
    model, dictionary = planted()
    table = tls.qk_attribution(model, APART, "L1H1", QUERY, KEY, dictionary=dictionary)
    assert table.loc[0, ["query_term", "key_term"]].tolist() == ["feature 0", "feature 1"]
    assert table.loc[0, "total"] > 5 * table["total"].abs()[1:].max()
    # No other two of the 24 tokens have it: p is at its floor.
    assert table.attrs["max_p"] == table.attrs["max_p_floor"] == 1 / (24 * 23)
    # Between two tokens that have nothing of the kind the largest pair is one of many.
    other = tls.qk_attribution(model, APART, "L1H1", 9, 5, dictionary=dictionary).attrs
    assert other["max_p"] > 0.05
    assert other["max_p_floor"] == 1 / (24 * 23)


@pytest.mark.slow
def test_max_p_does_not_hang_on_the_lengths_of_other_streams():
    model = fresh("bridge", "llama")
    basis = orthonormal(attention_view(model).d_model)
    homogeneous = tls.Dictionary(basis, torch.zeros(len(basis)), lambda x: (x.double() @ basis.T).clamp(min=0))

    def found():
        return tls.qk_attribution(model, APART, "L0H1", QUERY, KEY, dictionary=homogeneous).attrs["max_p"]

    before = found()
    with torch.no_grad():
        others = [int(token) for place, token in enumerate(APART[0]) if place not in (QUERY, KEY)]
        attention_view(model).embedding()[others[::2]] *= 30.0
    # The norm takes the length away. Without it a third of all pairs would be 30 times larger.
    assert 0.02 < before == found() < 0.98


@pytest.mark.slow
def test_max_p_keeps_its_level_between_tokens_like_the_others():
    model = shared("bridge", "llama")
    dictionary = sparse(attention_view(model).d_model)
    generator = torch.Generator().manual_seed(11)
    found = []
    for seed in range(60):
        prompt = 2 + torch.randperm(90, generator=generator)[None, :16]  # all tokens differ
        key, query = sorted(torch.randperm(16, generator=generator)[:2].tolist())
        found.append(
            tls.qk_attribution(model, prompt, f"L1H{seed % 4}", query, key, dictionary=dictionary).attrs["max_p"]
        )
    # Of 60 uniform p 6 are at most .1 on the mean and 13 or more once in 300 tries; measured 7. A row's own p, without
    # the correction for the number of pairs, would be at its floor in most.
    assert np.sum(np.array(found) <= 0.1) <= 12
    assert np.mean(found) == pytest.approx(0.5, abs=0.15)  # four standard errors of 60 uniform numbers


@pytest.mark.slow
def test_several_scores_share_features():
    model = shared("bridge", "llama")
    dictionary = sparse(attention_view(model).d_model)
    places = [(PROMPT, QUERY, KEY), (PROMPT, 15, 9)]
    table = tls.qk_attribution(model, places, "L1H1", dictionary=dictionary)
    singles = [tls.qk_attribution(model, prompt, "L1H1", *at, dictionary=dictionary) for prompt, *at in places]
    pair = ("error", "error")
    totals = [single.set_index(["query_term", "key_term"]).loc[pair, "total"] for single in singles]
    assert table.set_index(["query_term", "key_term"]).loc[pair, "total"] == pytest.approx(np.mean(totals), abs=1e-12)
    shares = [single.attrs["error_score"] for single in singles]
    assert table.attrs["error_share"] == pytest.approx(np.mean(shares) / table.attrs["score"], abs=1e-10)
    assert 1 / 1000 <= table.attrs["max_p_floor"] <= table.attrs["max_p"] <= 1


def test_the_floor_of_max_p_counts_draws_of_the_same_tokens():
    """Two prompts of three tokens have six choices of query and key each, so that 999 draws repeat the largest pair."""
    model = shared("bridge", "llama")
    places = [(PROMPT[:, :3], 2, 1), (PROMPT[:, 3:6], 2, 0)]
    attrs = tls.qk_attribution(model, places, "L1H1", dictionary=sparse(attention_view(model).d_model)).attrs
    assert attrs["max_p_draws"] == 999
    # The largest pair is of one prompt alone: 1 in 6 of 1,000, with a standard deviation of .012. Without ties .001.
    assert attrs["max_p_floor"] == pytest.approx(1 / 6, abs=0.05)
    assert attrs["max_p_floor"] <= attrs["max_p"]


# --- where it fits ---


@pytest.mark.slow
def test_another_width_or_hook_is_refused():
    model = shared("bridge", "llama")
    view, zeros = attention_view(model), lambda x: x.new_zeros(len(x), 3)
    narrow = tls.Dictionary(torch.ones(3, 4), torch.zeros(4), zeros)
    with pytest.raises(ValueError, match=f"features are 4 wide, and the model's stream is {view.d_model}"):
        tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, dictionary=narrow)
    of_hook = lambda hook: tls.Dictionary(torch.ones(3, view.d_model), torch.zeros(view.d_model), zeros, hook=hook)  # noqa: E731
    for hook in ("blocks.1.hook_resid_pre", "blocks.0.hook_resid_post"):
        tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, dictionary=of_hook(hook))
    for hook in ("blocks.0.hook_resid_pre", "blocks.1.hook_resid_post", "blocks.1.hook_mlp_out"):
        with pytest.raises(ValueError, match=f"the dictionary is of {hook}, and a head of layer 1 reads"):
            tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, dictionary=of_hook(hook))
    with pytest.raises(ValueError, match="by='mode'"):
        tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, by="mode", dictionary=of_hook(None))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("decoder", "bias", "encode", "error", "said"),
    [
        ([[1.0]], torch.zeros(1), abs, TypeError, "decoder= must be a floating-point tensor; found list"),
        (torch.ones(2, 3).long(), torch.zeros(3), abs, TypeError, "decoder= must be a floating-point tensor"),
        (torch.ones(3), torch.zeros(3), abs, ValueError, "decoder= must have 2 axes"),
        (torch.ones(2, 3), torch.zeros(2), abs, ValueError, "decoder has width 3 and bias 2"),
        (torch.ones(2, 3), torch.zeros(3), 3, TypeError, "encode must be a function from streams .*; found int"),
        (
            torch.ones(2, 3),
            torch.zeros(3),
            lambda: 3,
            TypeError,
            r"encode is a function of streams; found <lambda>\(\)",
        ),
    ],
)
def test_what_is_no_dictionary_is_refused(decoder, bias, encode, error, said):
    with pytest.raises(error, match=said):
        tls.Dictionary(decoder, bias, encode)


@pytest.mark.slow
def test_an_encoder_that_writes_into_its_streams_changes_no_number():
    model = shared("bridge", "llama")
    basis = orthonormal(attention_view(model).d_model)
    zeros = torch.zeros(len(basis))
    plain = tls.Dictionary(basis, zeros, lambda x: x @ basis.T)
    writing = tls.Dictionary(basis, zeros, lambda x: (x @ basis.T, x.zero_())[0])
    right, found = (tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY, dictionary=one) for one in (plain, writing))
    assert right.equals(found)


def test_activations_share_no_memory_with_what_an_encoder_keeps():
    width = attention_view(shared("bridge", "llama")).d_model
    kept = torch.ones(2, 3, dtype=torch.float64)
    dictionary = tls.Dictionary(torch.ones(3, width), torch.zeros(width), lambda x: kept)
    dictionary.activations(torch.zeros(2, width, dtype=torch.float64)).zero_()
    assert bool((kept == 1).all())


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda x: x.new_zeros(len(x), 2), "encode must return activations"),
        (lambda x: None, "found NoneType"),
        (lambda x: x.new_zeros(3, len(x)), r"found shape \(3, "),
        (lambda x: x.new_zeros(1, 3), r"found shape \(1, 3\)"),
        (lambda x: x.new_zeros(len(x), 3).numpy(), "of ndarray"),
        (lambda x: x.new_zeros(len(x), 3) + 0j, "of torch.complex64"),
        (lambda x: x.new_full((len(x), 3), torch.inf), "found inf for feature 0 of token 0"),
        (lambda x: x.new_full((len(x), 3), torch.nan), "all finite; found nan for feature 0 of token 0"),
    ],
)
def test_an_encoder_that_returns_something_else_is_refused(returned, said):
    model = shared("bridge", "llama")
    width = attention_view(model).d_model
    with pytest.raises(ValueError, match=said):
        tls.qk_attribution(
            model,
            PROMPT,
            "L1H1",
            QUERY,
            KEY,
            dictionary=tls.Dictionary(torch.ones(3, width), torch.zeros(width), returned),
        )


# --- files ---

WIDTH, FEATURES = 6, 10


def folder(tmp_path, settings, **changed):
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "W_enc": torch.randn(WIDTH, FEATURES, generator=generator),
        "b_enc": torch.randn(FEATURES, generator=generator),
        "W_dec": torch.randn(FEATURES, WIDTH, generator=generator),
        "b_dec": torch.randn(WIDTH, generator=generator),
    } | changed
    at = tmp_path / "sae"
    at.mkdir(exist_ok=True)
    save_file({name: value for name, value in tensors.items() if value is not None}, at / "sae_weights.safetensors")
    (at / "cfg.json").write_text(json.dumps({"d_in": WIDTH, "d_sae": FEATURES} | settings))
    return at, tensors


def plain_activations(tensors, stream, *, subtract, kind, k=None):
    """One number at a time."""
    found = []
    for x in stream.tolist():
        row = []
        for feature in range(FEATURES):
            before = float(tensors["b_enc"][feature])
            for column, value in enumerate(x):
                less = float(tensors["b_dec"][column]) if subtract else 0.0
                before += (value - less) * float(tensors["W_enc"][column, feature])
            row.append(before)
        kept = set(np.argsort(row)[-k:]) if kind == "topk" else range(FEATURES)
        above = [float(value) for value in tensors["threshold"]] if kind == "jumprelu" else [0.0] * FEATURES
        found.append(
            [max(value, 0.0) if place in kept and value > above[place] else 0.0 for place, value in enumerate(row)]
        )
    return np.array(found)


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        ({}, {"subtract": True, "kind": "standard"}),
        (
            {
                "architecture": "standard",
                "activation_fn_str": "relu",
                "hook_point": "blocks.1.hook_resid_pre",
                "normalize_activations": False,
                "apply_b_dec_to_input": False,
            },
            {"subtract": False, "kind": "standard"},
        ),
        (
            {
                "architecture": "jumprelu",
                "normalize_activations": "none",
                "metadata": {"hook_name": "blocks.1.hook_resid_pre"},
            },
            {"subtract": True, "kind": "jumprelu"},
        ),
        ({"architecture": "topk", "k": 3, "apply_b_dec_to_input": False}, {"subtract": False, "kind": "topk", "k": 3}),
        ({"activation_fn": "topk", "activation_fn_kwargs": {"k": 2}}, {"subtract": True, "kind": "topk", "k": 2}),
    ],
)
def test_a_folder_gives_the_features_of_its_settings(tmp_path, settings, how):
    more = {"threshold": torch.rand(FEATURES)} if how["kind"] == "jumprelu" else {}
    at, tensors = folder(tmp_path, settings, **more)
    dictionary = tls.Dictionary.load(at)
    stream = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2))
    found = dictionary.activations(stream.double())
    # float32: measured 5e-7. A threshold or a bias that is not read is off by tenths.
    np.testing.assert_allclose(found, plain_activations(tensors, stream, **how), rtol=0, atol=1e-5)
    assert torch.equal(dictionary.decoder, tensors["W_dec"])
    assert torch.equal(dictionary.bias, tensors["b_dec"])
    named = "hook_point" in settings or "metadata" in settings
    assert dictionary.hook == ("blocks.1.hook_resid_pre" if named else None)


@pytest.mark.parametrize(
    ("settings", "changed", "said"),
    [
        ({"architecture": "gated"}, {}, "architecture='gated' is not supported"),
        ({"architecture": "standard", "activation_fn": "tanh-relu"}, {}, "activation_fn='tanh-relu' is not supported"),
        ({"normalize_activations": "expected_average_only_in"}, {}, "normalize_activations='expected_average_only_in'"),
        ({"normalize_activations": "layer_norm"}, {}, "normalize_activations='layer_norm' is not supported"),
        ({"reshape_activations": "hook_z"}, {}, "reshape_activations='hook_z'"),
        ({"finetuning_scaling_factor": True}, {}, "finetuning_scaling_factor=True"),
        (
            {"architecture": "topk", "k": 3, "rescale_acts_by_decoder_norm": True},
            {},
            "rescale_acts_by_decoder_norm=True",
        ),
        ({"hook_point_head_index": 3}, {}, "hook_head_index=3"),
        ({"metadata": {"hook_head_index": 3}}, {}, "hook_head_index=3"),
        ({"group_sizes": [4, 6]}, {}, r"the setting group_sizes=\[4, 6\] is unknown"),
        ({"architecture": "topk"}, {}, "k=None"),
        ({"architecture": "topk", "k": 11}, {}, "k=11 is more than the 10 features"),
        ({"d_sae": 12}, {}, "d_sae=12 does not fit W_dec"),
        ({}, {"b_dec": None}, r"tensors \['b_dec'\] are missing"),
        ({}, {"r_mag": torch.ones(FEATURES)}, r"\['r_mag'\] are unknown"),
        ({"architecture": "jumprelu"}, {}, r"tensors \['threshold'\] are missing"),
        ({}, {"b_enc": torch.ones(3)}, r"b_enc has shape \(3,\)"),
    ],
)
def test_a_setting_that_is_not_read_is_refused_by_name(tmp_path, settings, changed, said):
    at, _ = folder(tmp_path, settings, **changed)
    with pytest.raises(ValueError, match=said):
        tls.Dictionary.load(at)


def test_a_folder_without_its_files_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no cfg\.json"):
        tls.Dictionary.load(tmp_path)
    at, _ = folder(tmp_path, {})
    (at / "sae_weights.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        tls.Dictionary.load(at)
    folder(tmp_path, {})
    (at / "cfg.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object of settings"):
        tls.Dictionary.load(at)
