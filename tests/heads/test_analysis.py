"""Runs of `analyze_heads`: an unchanged model, also when interrupted, provenance, and what must not change a table."""

import gc
import itertools
import json

import joblib
import numpy as np
import pytest
import torch
import zoo
from head_tables import ALL, COUNTS, NULLS, SCALE_FREE, TEXTS, analyze, assert_same, built, table_of
from model_state import assert_unchanged, state_of, warm

import tlspectral as tls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name", "training"),
    [("bridge", "gpt2", True), ("bridge", "opt", False)] + [("hooked", "gpt2", True)] * zoo.HAS_HOOKED,
)
def test_the_model_is_left_as_it_was_and_read_as_in_evaluation(backend, name, training):
    settings = {"extras": ["score_asym", "position_share"], "detectors": name == "gpt2"}
    expected = analyze(built(backend, name), **settings)
    model = warm(getattr(zoo, backend)(name))
    model.train(training)
    seen = []
    model.add_hook("blocks.0.attn.hook_pattern", lambda pattern, hook: seen.append(len(pattern)), is_permanent=True)
    before = state_of(model)
    with pytest.warns(UserWarning, match=r"hooks of yours are on the model, at blocks\.0\.attn\.hook_pattern"):
        found = analyze(model, **settings)
    assert_same(found, expected, rtol=1e-9)  # LAPACK's rounding by the alignment of memory
    assert_unchanged(model, before)
    # The user's own hook stays in force: on the prompts of the check, and on all sequences of the detectors.
    assert sum(seen) > (expected.attrs["detectors"] or {"n_sequences": 0})["n_sequences"]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["svdvals", "eigvals"])
def test_an_interrupt_leaves_the_model_usable(monkeypatch, step):
    """In the spectra (svdvals) and in the null (eigvals): Ctrl-C between two layers."""
    model = warm(zoo.bridge("llama"))
    before, threads = state_of(model), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    real, calls, number = getattr(torch.linalg, step), [], itertools.count(1)

    def interrupted(*arguments, **options):
        calls.append(step)
        if next(number) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, step, interrupted)
            with pytest.raises(KeyboardInterrupt):
                analyze(model)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert len(calls) >= 3  # heads that other threads had begun are finished
    assert_unchanged(model, before)
    assert_same(analyze(model), table_of("llama"))


def test_layers_are_let_go_one_by_one(monkeypatch):
    """While the last layer's spectra are taken, not more float64 is alive than at the first."""
    model = built("bridge", "gemma3")
    real, alive = torch.linalg.eig, []

    def weighed(*arguments):
        # type() and not isinstance(), which would wake the lazy objects of other packages.
        wide = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype == torch.float64]
        alive.append(sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in wide}.values()))
        return real(*arguments)

    monkeypatch.setattr(torch.linalg, "eig", weighed)
    gc.collect()  # what other tests left
    analyze(model, extras=["position_share"], null_draws=2)  # its blocks stay, and are small
    assert len(alive) == 8  # two groups of keys in each of four layers
    layer = 2 * 4 * 48 * 16 * 8  # bytes of W_Q and W_K, keys repeated, in float64
    # A kept layer adds at least its own factors with every step; measured: the same to the byte from the second on.
    assert max(alive) < alive[0] + layer / 2


# --- provenance ---


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_users_prompts_reach_the_check():
    model = built("bridge", "qwen2")
    tokens = zoo.prompt(batch=1, length=40, seed=5)
    table = analyze(model, prompts=tokens)
    worst = table.attrs["score_check"]
    assert worst["worst_error"] == tls.verify_scores(model, tokens)[worst["layer"]]
    assert (table["outside_m"] != table_of("qwen2")["outside_m"]).all()


@pytest.mark.slow
def test_the_hash_of_the_weights_is_that_of_the_weights_alone():
    model = built("bridge", "llama")
    plain, *alike = (
        analyze(model, null_draws=2, **given).attrs["weights_sha256"]
        for given in ({}, {"seed": 1}, {"null_blocks": "fresh"}, {"heads": ["L1", "L0"]})
    )
    assert len(plain) == 64
    assert alike == [plain] * 3
    assert plain != analyze(model, null_draws=2, heads="L0").attrs["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.LENGTH_DEPENDENT[:1])
def test_frequencies_that_change_with_the_length_are_given_their_range(name):
    model = zoo.bridge(name)
    table = analyze(model)
    assert table.attrs["rotary_valid_up_to"] == 32
    with torch.no_grad():
        model(zoo.prompt(length=60))  # transformers overwrites the frequencies in use
    assert_same(analyze(model), table)


# --- both backends ---


FOLDED = [(name, True) for name in ("gpt2", "neox", "llama", "qwen3")] + [("gpt2", False), ("llama", False)]


@pytest.mark.slow
@zoo.needs_hooked
@pytest.mark.parametrize(("name", "fold_ln"), FOLDED)
def test_a_users_hooked_transformer_gives_the_table_of_the_bridge(name, fold_ln):
    """TransformerLens's default processing: norms folded or not, writing weights, values and unembedding centred.

    That operators, biases and rotations are those of the bridge in every other architecture says `conformance.reading`.
    """
    bridge = table_of(name)
    hooked = table_of(name, "hooked") if fold_ln else analyze(zoo.hooked(name, fold_ln=False))
    assert_same(hooked[TEXTS + COUNTS], bridge[TEXTS + COUNTS])
    # Measured: at most 9e-8, norms folded in float32; a norm folded twice or not at all moves them by 1e-2.
    shares = [*SCALE_FREE, "rope_imag_frac", "hi_freq_dir", "rotary_fraction", "outside_m"]
    np.testing.assert_allclose(hooked[shares], bridge[shares], rtol=0, atol=1e-6)
    relative = ["spectral_radius", "freq_centroid"]
    np.testing.assert_allclose(hooked[relative], bridge[relative], rtol=1e-5)
    # Measured: 1e-7, 5e-8 and 1e-6 (a small self_match; 3e-8 of the spread of scores, its unit).
    np.testing.assert_allclose(hooked["self_match"], bridge["self_match"], rtol=1e-5, atol=1e-6)
    # Measured: 1e-6 degrees; 3e-5 of a condition number, which itself says how much rounding it multiplies.
    np.testing.assert_allclose(
        hooked[["prin_angle_mean", "prin_angle_max"]], bridge[["prin_angle_mean", "prin_angle_max"]], atol=1e-4
    )
    np.testing.assert_allclose(hooked["cond_eig"], bridge["cond_eig"], rtol=1e-3)
    # The same draws for nearly the same singular values. Measured: 6e-9; z, which divides by a spread of 1e-2, 8e-7.
    means = [column for column in NULLS if column.endswith(("null_mean", "null_std"))]
    np.testing.assert_allclose(hooked[means], bridge[means], rtol=0, atol=1e-6)
    z = [column for column in NULLS if column.endswith("_z")]
    np.testing.assert_allclose(hooked[z], bridge[z], rtol=0, atol=1e-5)
    # W_U is centred over the vocabulary whether or not the model did so.
    np.testing.assert_array_equal(hooked["copying"], bridge["copying"])
    np.testing.assert_allclose(hooked["positivity"], bridge["positivity"], rtol=0, atol=1e-6)


# --- what must not matter ---


@pytest.mark.fast(1)
@pytest.mark.parametrize("n_jobs", [2, 3, -1])
@pytest.mark.parametrize("null_blocks", ["shared", "fresh"])
def test_threads_do_not_change_a_bit(n_jobs, null_blocks):
    settings = {"null_blocks": null_blocks, "extras": ["score_asym", "position_share", "content_scale"]}
    for name in ("gemma2", "deepseek_v2"):
        model = built("bridge", name)
        one, several = (analyze(model, n_jobs=jobs, **settings) for jobs in (1, n_jobs))
        assert_same(several, one)
        assert several.attrs == one.attrs


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_neither_workers_nor_the_order_of_layers_change_a_bit(backend):
    model = built("bridge", "gemma2")
    assert_same(analyze(model, heads=["L3", "L1", "L0", "L2"]), table_of("gemma2"))
    fresh = analyze(model, null_blocks="fresh")
    with joblib.parallel_config(backend):
        assert_same(analyze(model, n_jobs=2, null_blocks="fresh", heads=("L3", "L-2", "L1", "L0")), fresh)


@pytest.mark.slow
def test_seeds_and_kinds_of_blocks_give_their_own_null():
    draws = [column for column in NULLS if not column.startswith("dir_frac") and column.endswith("null_mean")]
    closed = ["dir_frac_null_mean", "dir_frac_null_std", "dir_frac_z"]  # without draws
    rest = [column for column in ALL if column not in NULLS] + closed
    settings = [(blocks, seed) for blocks in ("shared", "fresh") for seed in (0, 1)]
    tables = [analyze(built("bridge", "llama"), null_blocks=blocks, seed=seed) for blocks, seed in settings]
    assert_same(tables[0], table_of("llama"))
    assert_same(tables[3], analyze(built("bridge", "llama"), null_blocks="fresh", seed=1))
    for one, other in itertools.combinations(tables, 2):
        assert (one[draws] != other[draws]).all(axis=None)
        assert_same(one[rest], other[rest])
