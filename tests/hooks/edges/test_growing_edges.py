"""Edges into receivers of several layers are one pass: the numbers are those of each kind of receiver alone."""

import joblib
import pandas as pd
import pytest
import torch
import zoo
from pair_prompts import prompt_pairs
from zoo import shared

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.hooks import path_patching
from tlspectral.hooks.edges import measuring
from tlspectral.models.reading import attention_view
from tlspectral.models.running.batches import filled
from tlspectral.tables import resume_folder

CLEAN, OTHER = prompt_pairs(4, 12, seed=3, at=4)
LENGTHS = (12, 9, 11, 12)
HOOKED = pytest.param("hooked", "llama", marks=zoo.needs_hooked)
MODELS = [
    ("bridge", "gemma2"),
    HOOKED,
    # Parallel blocks, latent attention, experts and a gate of the heads, layers that need all before them.
    *zoo.also_slow(
        *[("bridge", name) for name in ("gptj", "bloom", "smollm3", "deepseek_v3", "olmoe", "youtu", "glm5")]
    ),
]


def pairs(lengths=None):
    clean, other = CLEAN, OTHER
    if lengths is not None:
        clean, other = ([row[:n] for row, n in zip(x.tolist(), lengths, strict=True)] for x in (CLEAN, OTHER))
    return tls.logit_difference(clean, 7, 10, counterfactual=other)


def receivers_of(model):
    """Queries, keys and values of every layer but the first, every MLP and the logits."""
    view = attention_view(model)
    heads = [f"L{layer}H{head}.{what}" for layer in view.layers[1:] for what, head in (("q", 2), ("k", 1), ("v", 0))]
    return [*heads, *(f"L{layer}MLP" for layer in view.layers), "logits"]


def measured(model, receivers=None, **options):
    given = {"task": pairs(), "senders": ["embedding", "L0H1"], "measure": "task", **options}
    return tls.edge_effects(model, receivers_of(model) if receivers is None else receivers, **given)


def kind_by_kind(model, **options):
    """The same with a pass, or several, for each kind of receivers of a layer."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(path_patching, "filled", lambda sizes, most: [[kind] for kind in sizes])
        return measured(model, **options)


def assert_same(found, expected):
    """Numbers of a few rows and of many: 4e-8 measured in float32, where effects are 1e-3 to 1e-1."""
    pd.testing.assert_frame_equal(found, expected, rtol=0, atol=2e-7)
    assert found["delta"].abs().max() > 1e-3


def rows_of_blocks(model, work):
    """Each block that runs, and with how many rows, in the order of the runs."""
    seen = []
    count = lambda x, hook: seen.append((int(hook.name.split(".")[1]), len(x)))  # noqa: E731
    with model.hooks(fwd_hooks=[(f"blocks.{layer}.hook_resid_pre", count) for layer in range(len(model.blocks))]):
        work()
    return seen


OPTIONS = {
    "pairs": {},
    "control": {"task": tls.logit_difference(CLEAN, 7, 10), "control": 2},
    "positions": {"at": [4, -1]},
    "lengths": {"task": pairs(LENGTHS)},
}


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("backend", "name"), MODELS)
def test_numbers_are_those_of_each_kind_alone(backend, name, options):
    model = shared(backend, name)
    assert_same(measured(model, **OPTIONS[options]), kind_by_kind(model, **OPTIONS[options]))


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize(("backend", "name"), MODELS[:2])
def test_a_hook_of_the_user_acts_on_all_rows(backend, name):
    model, options = shared(backend, name), OPTIONS["control"]
    plain = measured(model, **options)
    points = [f"blocks.{layer}.attn.hook_z" for layer in (1, len(model.blocks) - 1)]
    with model.hooks(fwd_hooks=[(point, lambda z, hook: z * torch.linspace(0.1, 1, z.shape[-1])) for point in points]):
        found = measured(model, **options)
        assert_same(found, kind_by_kind(model, **options))
    assert (found["delta"] - plain["delta"]).abs().max() > 1e-3


def test_a_call_runs_each_block_once():
    """After the proofs and runs of the whole model: rows join at the layers of their receivers."""
    model, n = shared("bridge", "gemma2"), len(CLEAN)
    receivers = ["L1H0.q", "L1MLP", "L3H2.v", "L3KV1.k", "logits"]
    options = {"senders": ["L0H1", "L0H2"], "task": pairs()}
    seen = rows_of_blocks(model, lambda: measured(model, receivers, **options))
    assert seen[-3:] == [(1, 4 * n), (2, 4 * n), (3, 10 * n)]
    assert seen[-4] == (3, n)
    assert rows_of_blocks(model, lambda: measured(model, ["logits"], **options))[-1] == (3, 2 * n)


def test_a_screen_measures_its_edges_in_one_pass():
    model, n = shared("bridge", "gemma2"), len(CLEAN)
    options = {"screen": 5, "method": "EAP", "task": pairs()}
    made = []
    with pytest.warns(UserWarning, match="distinct pairs"):
        seen = rows_of_blocks(model, lambda: made.append(tls.edge_effects(model, **options)))
    (table,) = made
    cut = table.loc[table["measured"] != "", "receiver_layer"].clip(upper=3)
    first = cut.min()
    assert len(set(cut)) > 1
    assert seen[first - 4 :] == [(layer, n * int((cut <= layer).sum())) for layer in range(first, 4)]


@pytest.mark.slow
@pytest.mark.tl4
def test_a_full_batch_ends_a_pass(batch_size):
    model = shared("bridge", "gemma2")
    options = {"senders": ["embedding", "heads"]}
    whole = measured(model, **options)
    batch_size(tokens=3 * CLEAN.numel())  # in the middle of a kind
    seen = rows_of_blocks(model, lambda: measured(model, **options))
    assert max(rows for _, rows in seen) == 3 * len(CLEAN)
    assert_same(measured(model, **options), whole)


def test_what_is_cut_in_a_pass_keeps_no_writes_of_other_senders(monkeypatch):
    real, kept = measuring.Cut, []
    monkeypatch.setattr(measuring, "Cut", lambda *given: kept.append(given[-1]) or real(*given))
    model = shared("bridge", "gemma2")
    measured(model, senders=["heads"])
    assert len(kept) > 20
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in kept)


# --- jobs ---


def jobs_in(folder):
    return sorted(file.stem for file in folder.glob("*.parquet"))


def test_sizes_fill_groups_of_consecutive_ones():
    assert filled({"a": 3, "b": 4, "c": 1, "d": 9, "e": 1}, 8) == [["a", "b", "c"], ["d"], ["e"]]
    assert filled({}, 8) == []


@pytest.fixture
def small_jobs(monkeypatch):
    """A job of five edges, or of those of one kind."""
    monkeypatch.setattr(path_patching, "TOKENS_OF_JOB", 5 * CLEAN.numel())


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.usefixtures("small_jobs")
def test_stopped_edges_go_on_behind_their_last_job(tmp_path, monkeypatch):
    model = shared("bridge", "gemma2")
    whole = measured(model, folder=tmp_path / "whole")
    jobs = jobs_in(tmp_path / "whole")
    assert len(jobs) > 3
    assert any(job.count("_L") == 2 for job in jobs)  # of several kinds
    real, made = path_patching.edge_columns, []

    def noted(edges, *given):
        made.append(len(edges))
        if stop and len(made) == 3:
            raise KeyboardInterrupt
        return real(edges, *given)

    monkeypatch.setattr(path_patching, "edge_columns", noted)
    stop = True
    with pytest.raises(KeyboardInterrupt, match=f"of {len(whole)} edges are in"):
        measured(model, folder=tmp_path / "work")
    assert len(jobs_in(tmp_path / "work")) == 2
    stop = False
    made.clear()
    pd.testing.assert_frame_equal(measured(model, folder=tmp_path / "work"), whole, check_exact=True)
    assert len(made) == len(jobs) - 2
    assert jobs_in(tmp_path / "work") == jobs


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.usefixtures("small_jobs")
def test_two_workers_share_the_passes(tmp_path):
    model = shared("bridge", "gemma2")
    whole = measured(model, folder=tmp_path / "whole", at=[4, -1])
    with joblib.parallel_config(backend="threading", n_jobs=2):
        found = measured(model, folder=tmp_path / "shared", at=[4, -1])
    pd.testing.assert_frame_equal(found, whole, check_exact=True)
    assert jobs_in(tmp_path / "shared") == jobs_in(tmp_path / "whole")


def test_jobs_are_the_same_whatever_a_batch_holds(batch_size, tmp_path):
    model = shared("bridge", "gemma2")
    measured(model, folder=tmp_path / "one")
    batch_size(tokens=CLEAN.numel())
    measured(model, folder=tmp_path / "two")
    assert jobs_in(tmp_path / "one") == jobs_in(tmp_path / "two") == ["mlp_L000-logits_L004"]


def test_attention_is_measured_of_one_kind_a_job(tmp_path):
    task = tls.Task(CLEAN, tls.logit_difference(CLEAN, 7, 10).metric, attention=(-1, 4))
    options = {"task": task, "measure": "attention", "senders": ["L0H1"], "folder": tmp_path}
    measured(shared("bridge", "gemma2"), ["L1H1.k", "L2H1.k", "L2H3.k", "L2H1.q"], **options)
    assert jobs_in(tmp_path) == ["k_L001", "k_L002", "q_L002"]


def test_a_folder_with_a_job_for_each_kind_is_refused(tmp_path, monkeypatch):
    """As earlier versions made them: their manifests say nothing of how large a job is."""
    model, real = shared("bridge", "gemma2"), resume_folder.open_resume_folder

    def earlier(path, settings, **how):
        return real(path, {name: value for name, value in settings.items() if name != "tokens_of_job"}, **how)

    with monkeypatch.context() as patched:
        patched.setattr(resume_folder, "open_resume_folder", earlier)
        measured(model, folder=tmp_path)
    with pytest.raises(IncompatibleCheckpoint, match=r"other tokens_of_job .* choose another folder"):
        measured(model, folder=tmp_path)
