"""Replays from a position on are whole replays: which models go on so, and which run all of each sequence as before."""

import pandas as pd
import pytest
import torch
import zoo
from pair_prompts import prompt_pairs
from transformers import DynamicCache

import tlspectral as tls
from tlspectral.hooks.sweeps import sweep_jobs
from tlspectral.models.reading import attention_view
from tlspectral.models.running import continued_runs
from tlspectral.models.running.continued_runs import continued_run, rows_at_once
from tlspectral.models.running.key_value_cache import prefill
from tlspectral.models.running.partial_runs import intact_run

CLEAN, OTHER = prompt_pairs(5, 9, seed=3)
TASK = tls.logit_difference(CLEAN, 7, 10)


def run_of(model, tokens=CLEAN, predicted=slice(-1, None)):
    return intact_run(attention_view(model), tokens, predicted, (0, 1), batch=4, reduce=lambda now, logits: None)


def sweep(model, part="output", task=TASK, at=-1, **options):
    return tls.ablation_sweep(model, part, task=task, at=at, **options)


def whole(monkeypatch, *given, **named):
    """The same with all of each sequence run."""
    with monkeypatch.context() as patched:
        patched.setattr(sweep_jobs, "continued_run", lambda intact, first: None)
        return sweep(*given, **named)


OF_EACH = torch.tensor([[1, 7], [8, 4], [3, 2], [5, 6], [0, 8]])


@pytest.mark.parametrize("scored", [slice(-1, None), slice(2, -1), OF_EACH], ids=["end", "all", "each"])
def test_a_replay_from_a_position_is_that_of_the_whole_sequence(scored):
    """Under an edit at the position, of logits in front of it and behind it."""
    model = zoo.shared("bridge", "llama")
    intact = run_of(model, predicted=scored)
    run = continued_run(intact, 5)
    assert run.n_tokens == 4
    assert run.bytes_kept == 2 * 2 * 2 * 5 * 12 * 4  # keys and values, layers, groups, positions, columns
    for layer in (0, 1):
        point = f"blocks.{layer}.attn.hook_z"
        replays = []
        for one, place in ((intact, 5), (run, 0)):

            def edit(z, hook, place=place):
                z = z.clone()
                z[:, place, 1] = 0.3
                return z

            with torch.no_grad(), model.hooks(fwd_hooks=[(point, edit)]):
                replays.append(one.replay([layer] * 2, slice(1, 4)))
        torch.testing.assert_close(*replays, rtol=0, atol=1e-6)  # float32: 1e-7 measured
        with torch.no_grad():
            unedited = intact.replay([layer] * 2, slice(1, 4))
        # In the last layer a position is read by itself alone.
        assert ((replays[1] - unedited).abs().max() > 1e-3) == (layer == 0 or scored is OF_EACH or scored.start == 2)


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("part", ["output", "antisymmetric", tls.parts.LongRange(2), tls.parts.Output("mean")], ids=str)
def test_a_sweep_goes_on_from_the_position_and_computes_no_query_before_it(part, monkeypatch):
    model, seen = zoo.shared("bridge", "llama"), []
    monkeypatch.setattr(continued_runs, "user_hooks", lambda model: {})  # of the counter
    options = {"control": "random", "draws": 2} if part == "antisymmetric" else {}
    expected = whole(monkeypatch, model, part, **options)
    count = ("blocks.1.attn.hook_z", lambda z, hook: seen.append(tuple(z.shape[:2])))
    with model.hooks(fwd_hooks=[count]):
        found = sweep(model, part, **options)
    # Rounding of float32: 1e-7 measured, effects of 1e-2.
    numbers = [table.select_dtypes("number") for table in (found, expected)]
    pd.testing.assert_frame_equal(*numbers, rtol=0, atol=1e-6)
    assert found["delta"].abs().max() > 1e-3
    # One token of each prompt for all heads of both layers, and once under no hook.
    assert sorted(rows for rows, length in seen if length == 1) == [5, 120 if options else 40]
    # Else the prompts alone: the run without ablation, its reference, their keys, and layer 1 once for each draw.
    assert all(rows <= 5 for rows, length in seen if length > 1)


def test_several_batches_of_prompts_share_one_cache(batch_size, monkeypatch):
    model, task = zoo.shared("bridge", "llama"), tls.Task(CLEAN, TASK.metric, predict=slice(None))
    every = lambda logits, tokens, mask: logits.double().log_softmax(-1)[..., 7].mean(1)  # noqa: E731
    task = tls.Task(CLEAN, every, predict=[2, 6, -1])
    expected = whole(monkeypatch, model, task=task, at=[4, [5, 6, 4, 3, 7]])
    batch_size(tokens=9)
    found = sweep(model, task=task, at=[4, [5, 6, 4, 3, 7]])
    assert len(continued_run(run_of(model), 4).read.tokens) == 5
    pd.testing.assert_series_equal(found["value"], expected["value"], rtol=0, atol=1e-6)
    assert found["delta"].abs().max() > 1e-3
    run = continued_run(run_of(model), 8)
    assert rows_at_once(run) == 9
    batch_size(held=3 * run.bytes_kept)
    assert rows_at_once(run) == 3


# --- where all of each sequence is run ---


def test_at_the_first_position_and_under_hooks_of_the_user_all_is_run():
    model = zoo.shared("bridge", "llama")
    assert continued_run(run_of(model), 0) is None
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: x * torch.arange(9)[:, None])]):
        intact = run_of(model)
        assert continued_run(intact, 8) is None
        hooked = sweep(model)
        by_hand = tls.ablate(model, "L1H2", tls.parts.Output(at=8))
        with by_hand:
            value = float(tls.evaluate(model, TASK))
    assert hooked.set_index("name").loc["L1H2", "value"] == pytest.approx(value, abs=1e-6)  # float32, other batches
    with tls.ablate(model, "L0H0", "output"):  # a block of the user is one
        assert continued_run(run_of(model), 8) is None


@pytest.mark.parametrize("name", ["gemma3n", "glm5_selecting"])
def test_models_whose_later_blocks_need_more_than_a_stream_run_all(name):
    assert continued_run(run_of(zoo.shared("bridge", name)), 5) is None


def test_a_model_that_loses_its_cache_runs_all(monkeypatch):
    model = zoo.bridge("llama")
    expected = sweep(model)
    update = DynamicCache.update
    lose = lambda self, *given, **named: (update(self, *given, **named), given[:2])[1]  # noqa: E731
    monkeypatch.setattr(DynamicCache, "update", lose)
    other = zoo.bridge("llama")
    assert prefill(attention_view(other), CLEAN) is None
    assert continued_run(run_of(other), 5) is None
    pd.testing.assert_frame_equal(sweep(other)[["value", "delta"]], expected[["value", "delta"]], rtol=0, atol=1e-6)


def test_a_window_that_is_lost_behind_the_probed_tokens_is_found_at_the_length_of_the_prompts(monkeypatch):
    """One step behind 23 tokens is right, and steps behind more are not."""
    model = zoo.bridge("llama")
    update = DynamicCache.update

    def forgetting(self, keys, values, *given, **named):
        keys, values = update(self, keys, values, *given, **named)
        dropped = (torch.arange(keys.shape[2]) < keys.shape[2] - 25)[:, None]
        return keys, values.masked_fill(dropped, 0.0)

    long = zoo.prompt(batch=2, length=40)
    runs = {length: run_of(model, long[:, :length]) for length in (24, 40)}  # without a cache, and right
    assert all(continued_run(intact, length - 2) is not None for length, intact in runs.items())
    for intact in runs.values():
        intact.continued.clear()
    monkeypatch.setattr(DynamicCache, "update", forgetting)
    assert prefill(attention_view(model), long[:, :5]) is not None
    assert continued_run(runs[24], 22) is not None
    assert continued_run(runs[40], 38) is None
