"""Head tables of loaded models: all threads, one of BLAS in each, and jobs that a folder keeps."""

import itertools
import re
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import joblib
import numpy as np
import pytest
import torch
import zoo
from head_tables import NULLS, analyze, assert_same, built, table_of
from model_state import assert_unchanged, state_of, warm

import tlspectral as tls
from tlspectral.algebra import nulls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.heads import copying, loaded, weight_columns
from tlspectral.heads.threads import in_threads, thread_count
from tlspectral.models.reading import attention_view, digests

QUICK: dict[str, Any] = {"null_draws": 3, "n_sequences": 4}


@pytest.fixture
def cores(monkeypatch):
    """A machine of three cores, all of which torch uses."""
    before = torch.get_num_threads()
    monkeypatch.setattr(joblib, "cpu_count", lambda: 3)
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@pytest.fixture
def seen(monkeypatch):
    """Thread and torch's number of threads at every call of `eigvals`, the first of which wait for each other."""
    real, calls = torch.linalg.eigvals, []
    together = threading.Barrier(2)

    def noted(*arguments):
        calls.append((threading.get_ident(), torch.get_num_threads()))
        if len(calls) <= 2:
            with suppress(threading.BrokenBarrierError):
                together.wait(2)
        return real(*arguments)

    monkeypatch.setattr(torch.linalg, "eigvals", noted)
    return calls


def threads_of(calls):
    return {thread for thread, _ in calls}


# --- threads ---


def test_a_table_takes_all_cores_by_default_with_one_thread_of_blas_in_each(cores, seen):
    table = analyze(built("bridge", "llama"))
    assert 2 <= len(threads_of(seen)) <= 2 * 2 * cores  # a pool for spectra and one for the null, in two layers
    assert {number for _, number in seen} == {1}
    assert torch.get_num_threads() == cores
    assert_same(table, table_of("llama"))


@pytest.mark.slow
def test_one_thread_has_one_thread_of_blas_too(monkeypatch, cores, seen):
    """Otherwise eigenvalues of 128 and more would have other bits on a machine of one core."""
    monkeypatch.setattr(joblib, "cpu_count", lambda: 1)
    analyze(built("bridge", "llama"))
    assert set(seen) == {(threading.get_ident(), 1)}
    assert torch.get_num_threads() == cores


@pytest.mark.slow
def test_one_core_needs_no_other_thread(seen):
    analyze(built("bridge", "llama"))
    assert threads_of(seen) == {threading.get_ident()}


@pytest.mark.parametrize(
    ("cpus", "torch_threads", "n_jobs", "expected"),
    [(8, 4, 1, 4), (2, 4, 1, 2), (8, 1, 1, 1), (8, 4, None, 4), (8, 1, 5, 5)],
)
def test_cores_are_those_of_the_process(monkeypatch, cpus, torch_threads, n_jobs, expected):
    before = torch.get_num_threads()
    monkeypatch.setattr(joblib, "cpu_count", lambda: cpus)
    try:
        torch.set_num_threads(torch_threads)
        assert thread_count(n_jobs) == expected
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="n_jobs == 0"):
        thread_count(0)


def test_a_configured_backend_is_given_the_null(monkeypatch):
    """The caller's choice holds where `n_jobs` asks for workers; the spectra stay here."""
    asked, real = [], joblib.Parallel
    monkeypatch.setattr(joblib, "Parallel", lambda n_jobs: asked.append(n_jobs) or real(n_jobs))
    with joblib.parallel_config(backend="threading"):
        assert_same(analyze(built("bridge", "llama"), n_jobs=2), table_of("llama"))
        assert asked == [2, 2]
        analyze(built("bridge", "llama"))
    assert asked == [2, 2]
    analyze(built("bridge", "llama"), n_jobs=2)
    assert asked == [2, 2]


def test_fresh_blocks_of_all_threads_keep_the_bound_on_memory(monkeypatch, cores):
    counts, real = [], loaded.in_threads
    monkeypatch.setattr(
        loaded, "in_threads", lambda function, items, threads: counts.append(threads) or real(function, items, threads)
    )
    model = built("bridge", "llama")
    monkeypatch.setattr(weight_columns, "MOST_BYTES", 2 * 8 * model.cfg.d_head**2 * 20)
    analyze(model, null_blocks="fresh")
    assert counts == [3, 2] * 2  # spectra, null


def test_threads_have_the_gradient_mode_of_the_caller():
    for mode in (False, True):
        with torch.set_grad_enabled(mode):
            assert in_threads(lambda item: torch.is_grad_enabled(), range(2), 2) == [mode] * 2


def test_the_first_error_in_order_is_raised_and_the_rest_is_left_out():
    begun = []

    def call(item):
        begun.append(item)
        time.sleep(0.001)
        if item in (3, 5):
            raise ValueError(f"item {item}")
        return item

    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="item 3"):
        in_threads(call, range(1000), 2)
    assert len(begun) < 1000
    assert torch.get_num_threads() == before


def test_ctrl_c_in_threads_keeps_finished_layers_and_leaves_the_model_usable(monkeypatch, tmp_path, cores):
    model = warm(zoo.bridge("llama"))
    before, real, calls, number = state_of(model), nulls.metrics_of_draws, [], itertools.count(1)

    def interrupted(*given):
        calls.append(threading.current_thread() is threading.main_thread())
        if next(number) == 6:  # the second of four heads of the second layer; one thread alone gets the number
            signal.raise_signal(signal.SIGINT)
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(nulls, "metrics_of_draws", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"stopped: 1 of 2 layers are in .*new; the same call goes on"):
            analyze(model, folder=tmp_path / "new")
    assert not any(calls)
    # An interrupt between the start of a thread and its note in the pool leaves it to end by itself, at once.
    ending = [thread for thread in threading.enumerate() if "ThreadPoolExecutor" in thread.name]
    for thread in ending:
        thread.join(10)
    assert not any(thread.is_alive() for thread in ending)
    assert torch.get_num_threads() == cores
    assert_unchanged(model, before)
    assert sorted(path.name for path in (tmp_path / "new").glob("*.parquet")) == ["L000.parquet"]
    assert_same(analyze(model, folder=tmp_path / "new"), table_of("llama"))


# --- products and hashes ---


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_self_match_multiplies_each_key_once(monkeypatch, name):
    model = built("bridge", name)
    factors = attention_view(model).layer(1).operator_factors()
    moments, keys = copying.EmbeddingMoments(attention_view(model)), []
    real = copying.EmbeddingMoments.self_match
    monkeypatch.setattr(
        copying.EmbeddingMoments,
        "self_match",
        lambda self, w_q, w_k: keys.append(len(w_k)) or real(self, w_q, w_k),
    )
    table = analyze(model)
    view = attention_view(model)
    assert keys == [1] * sum(len(view.raw(index).w_k) for index in view.layers)
    # With keys repeated, all heads at once. Measured: the same to the bit without centring, 8e-16 with it, where sums
    # over a permuted layout have another order; another head's keys move it by 1e-2.
    found = table.loc[table["layer"] == 1, "self_match"]
    np.testing.assert_allclose(found, real(moments, *factors), rtol=0 if name != "gpt2" else 1e-13)


def test_each_weight_is_hashed_once_in_a_call(monkeypatch):
    hashed, real = [], digests.stored_bytes
    monkeypatch.setattr(digests, "stored_bytes", lambda value: hashed.append(value.numpy().tobytes()) or real(value))
    model = zoo.bridge("llama")
    analyze(model)
    assert len(hashed) == len(set(hashed)) > 10
    hashed.clear()
    analyze(model)
    assert hashed == []


# --- a folder ---


def layer_and_pass(monkeypatch):
    """Note what is measured, and how many patterns pass layer 1."""
    made = []
    for owner, name in [
        (loaded, "check_scores"), (loaded, "measure_heads"), (loaded, "measured_detectors"),
        (weight_columns, "null_statistics"), (loaded, "EmbeddingMoments"), (loaded, "unembedding_times_embedding"),
    ]:  # fmt: skip
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, real=real, name=name, **named: made.append(name) or real(*given, **named)
        )
    return made


def counted_passes(model):
    passes = []
    model.add_hook("blocks.1.attn.hook_pattern", lambda pattern, hook: passes.append(len(pattern)), is_permanent=True)
    return passes


def test_a_second_call_measures_nothing_and_runs_two_rows(monkeypatch, tmp_path):
    model = warm(zoo.bridge("llama"))
    passes = counted_passes(model)
    kept = {"folder": tmp_path, "extras": ["score_asym", "position_share", "content_scale"], **QUICK}
    with pytest.warns(UserWarning, match="hooks of yours"):
        first = tls.analyze_heads(model, **kept)
    made = layer_and_pass(monkeypatch)
    passes.clear()
    with pytest.warns(UserWarning, match="hooks of yours"):
        second = tls.analyze_heads(model, **kept)
    assert made == []
    assert passes == [1, 1]  # what hooks would change is read from the random prompt and from one sequence
    assert_same(second, first)
    assert second.attrs == first.attrs
    with pytest.warns(UserWarning, match="hooks of yours"):
        whole = tls.analyze_heads(model, **kept | {"folder": None})
    assert_same(first, whole)
    assert first.attrs == whole.attrs


def test_only_the_detectors_are_made_where_only_they_are_missing(monkeypatch, tmp_path):
    model = built("bridge", "llama")
    first = tls.analyze_heads(model, folder=tmp_path, **QUICK)
    (tmp_path / "detectors.parquet").unlink()
    made = layer_and_pass(monkeypatch)
    assert_same(tls.analyze_heads(model, folder=tmp_path, **QUICK), first)
    assert made == ["measured_detectors"]


def scaled(tensor, hook):
    return 1.01 * tensor


def one_head(tensor, hook):
    """Another pattern of one head of the last layer, of which no logit but only detectors speak."""
    tensor = tensor.clone()
    tensor[:, 2, -1] = tensor[:, 2, -1].flip(-1)
    return tensor


@pytest.mark.parametrize("detectors", [True, False])
@pytest.mark.parametrize(
    ("point", "hook"), [("blocks.0.attn.hook_z", scaled), ("blocks.1.attn.hook_pattern", one_head)]
)
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_a_folder_of_other_hooks_is_refused(tmp_path, backend, point, hook, detectors):
    model = built(backend, "llama")
    kept = {"folder": tmp_path, "detectors": detectors, **QUICK}
    without = tls.analyze_heads(model, **kept)
    again = pytest.raises(IncompatibleCheckpoint, match=r"had score [.\d]+ on L\dH\d .*Other hooks on the model may be")
    with model.hooks(fwd_hooks=[(point, hook)]), again:
        tls.analyze_heads(model, **kept)
    with model.hooks(fwd_hooks=[(point, lambda tensor, hook: None)]):
        assert_same(tls.analyze_heads(model, **kept), without)  # a hook that changes nothing


@pytest.mark.slow
def test_a_hook_that_acts_on_long_sequences_alone_is_seen(tmp_path):
    model = built("bridge", "llama")
    tls.analyze_heads(model, folder=tmp_path, **QUICK)
    far = tls.ablate(model, ["L1H0"], tls.parts.LongRange(30))
    with far, pytest.raises(IncompatibleCheckpoint, match=r"without ablation had score .* on L1H0 on a sequence"):
        tls.analyze_heads(model, folder=tmp_path, **QUICK)


@pytest.mark.slow
def test_a_folder_of_other_weights_between_two_calls_is_refused(tmp_path):
    """Also a weight of an MLP, which no number of the layers' spectra depends on."""
    model = zoo.bridge("llama")
    tls.analyze_heads(model, folder=tmp_path, **QUICK)
    with torch.no_grad():
        next(value for name, value in model.named_parameters() if re.search("mlp.*weight", name))[0, 0] += 1
    with pytest.raises(IncompatibleCheckpoint, match="made with other weights"):
        tls.analyze_heads(model, folder=tmp_path, **QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "deepseek_v2", "gemma3", "bloom"])
def test_families_resume(tmp_path, name):
    model = built("bridge", name)
    prompts = [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12] if name == "bert" else [8, 9, 10]]  # an encoder takes no filling
    kept = {"extras": ["position_share", "content_scale"], "prompts": prompts, **QUICK}
    found = [tls.analyze_heads(model, folder=folder, **kept) for folder in (None, tmp_path, tmp_path)]
    for table in found[1:]:
        assert_same(table, found[0])
        assert table.attrs == found[0].attrs
    assert bool(found[0][NULLS].notna().to_numpy().any())
