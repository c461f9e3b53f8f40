"""A sweep of several layers is one pass, whose rows join at their own layers; the numbers are those of each layer."""

import functools

import joblib
import pandas as pd
import pytest
import zoo
from pair_prompts import prompt_pairs
from zoo import shared

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.hooks import parts
from tlspectral.hooks.sweeps import sweep_jobs
from tlspectral.models.reading import attention_view

CLEAN, OTHER = prompt_pairs(4, 12, seed=3, at=4)
UNEQUAL = [row[:length] for row, length in zip(CLEAN.tolist(), (12, 9, 11, 12), strict=True)]
MODELS = [
    ("bridge", "gemma3"),
    pytest.param("hooked", "llama", marks=zoo.needs_hooked),
    *zoo.also_slow(("bridge", "gemma2"), ("bridge", "gptj"), ("bridge", "bloom"), ("bridge", "gemma3n")),
]
PARTS = {
    "output": {},
    "antisymmetric": {},
    "random": {"part": "symmetric", "control": "random", "draws": 3},
    "other heads": {"part": parts.LongRange(3), "control": "random"},
}


def task(prompts=CLEAN):
    return tls.logit_difference(prompts, 7, 10)


def layers_of(model):
    return attention_view(model).layers


def swept(model, part, **options):
    return tls.ablation_sweep(model, part, **{"task": task(), **options})


def layer_by_layer(model, part, **options):
    """The same with a pass, or several, for each layer."""
    tables = [swept(model, part, heads=f"L{layer}", **options) for layer in layers_of(model)]
    return pd.concat(tables, ignore_index=True)


def assert_equal_to_the_bit(found, expected):
    columns = [*found.select_dtypes("number")]
    pd.testing.assert_frame_equal(found[columns], expected[columns], check_exact=True)
    if "control_draws" in found:
        assert found["control_draws"].map(list).tolist() == expected["control_draws"].map(list).tolist()


def rows_of_blocks(model, work):
    """Each block that runs, and with how many rows, in the order of the runs; without proofs of edits."""
    seen = []
    count = lambda x, hook: seen.append((int(hook.name.split(".")[1]), len(x)))  # noqa: E731
    with model.hooks(fwd_hooks=[(f"blocks.{layer}.hook_resid_pre", count) for layer in layers_of(model)]):
        work()
    return seen


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize(("backend", "name"), MODELS)
def test_numbers_are_those_of_each_layer_alone(backend, name, kind):
    if name == "bloom" and kind == "random":
        pytest.skip("no control of a part of rotary pairs")
    model, options = shared(backend, name), {"part": kind, **PARTS[kind]}
    found = swept(model, **options)
    assert_equal_to_the_bit(found, layer_by_layer(model, **options))
    assert found["delta"].abs().max() > 1e-4
    for row in found.iloc[:: len(found) // 3].itertuples():
        with tls.ablate(model, row.name, options["part"], task=task()):
            expected = tls.evaluate(model, task())
        # Whole passes of 4 rows: equal to the bit here, as a product of few rows need not be; effects are 1e-2.
        assert row.value == pytest.approx(float(expected), abs=2e-6)


@pytest.mark.slow
@pytest.mark.tl4
def test_prompts_of_unequal_length():
    model = shared("bridge", "gemma3")
    for part in ("output", "antisymmetric"):
        options = {"part": part, "task": task(UNEQUAL)}
        assert_equal_to_the_bit(swept(model, **options), layer_by_layer(model, **options))


def test_a_hook_of_the_user_acts_on_all_rows():
    model = shared("bridge", "gemma3")
    plain = swept(model, "output")
    hooks = [(f"blocks.{layer}.hook_resid_pre", lambda x, hook: x * 1.1) for layer in (0, 2)]
    with model.hooks(fwd_hooks=hooks):
        found = swept(model, "output")
        assert_equal_to_the_bit(found, layer_by_layer(model, "output"))
    assert (found["value"] - plain["value"]).abs().min() > 1e-4


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.parametrize("at", [None, -1])
def test_one_row_of_each_layer(at):
    model = shared("bridge", "gemma2")
    options = {"task": task(CLEAN[:1]), "at": at}
    heads = [f"L{layer}H1" for layer in layers_of(model)]
    found = swept(model, "output", heads=heads, **options)
    alone = pd.concat([swept(model, "output", heads=head, **options) for head in heads], ignore_index=True)
    # A product of one or two rows is summed in another order: 4e-7 at most, over six models and two parts.
    pd.testing.assert_series_equal(found["delta"], alone["delta"], rtol=0, atol=2e-6)
    assert found["delta"].abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.tl4
def test_bands_and_their_random_sets():
    model = shared("bridge", "gemma3")
    heads = [(layer, head) for layer in layers_of(model) for head in (0, 1)]
    bands = functools.partial(tls.hooks.band_effects, model, task=task(), draws=2)
    found = bands(heads)
    alone = [bands([pair for pair in heads if pair[0] == layer]) for layer in layers_of(model)]
    assert_equal_to_the_bit(found, pd.concat(alone, ignore_index=True))


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("part", ["output", "antisymmetric"])
@pytest.mark.parametrize(("backend", "name"), [("bridge", "gemma3"), MODELS[1]])
def test_at_a_position_behind_the_cache(backend, name, part):
    model = shared(backend, name)
    options = {"part": part, "at": [[7, 9, 8, 7], -1], "control": "random", "draws": 2}
    found = swept(model, **options)
    expected = layer_by_layer(model, **options).sort_values(["layer", "head"], kind="stable", ignore_index=True)
    assert_equal_to_the_bit(found, expected)
    assert found["delta"].abs().max() > 1e-3


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("part", ["output", "antisymmetric", parts.LongRange(3)], ids=str)
@pytest.mark.parametrize(("backend", "name"), [*MODELS[:2], ("bridge", "gptj")])
def test_sets_and_random_sets_are_one_pass(backend, name, part):
    model = shared(backend, name)
    last = layers_of(model)[-1]
    sets = {"late": [f"L{last}H1"], "both": ["L0H1", f"L{last}H2"], "first": ["L0H0", "L0H3"]}
    options = {"part": part, "control": "random", "draws": 3}
    found = swept(model, heads=sets, **options)
    expected = pd.concat([swept(model, heads={one: sets[one]}, **options) for one in sets], ignore_index=True)
    assert_equal_to_the_bit(found, expected)
    for row in found.itertuples():
        with tls.ablate(model, sets[row.name], part, task=task()):
            value = tls.evaluate(model, task())
        assert row.value == pytest.approx(float(value), abs=2e-6)  # as above


# --- passes and jobs ---


def test_a_sweep_is_a_block_call_a_layer():
    model = shared("bridge", "gemma2")
    n, heads = len(CLEAN), model.cfg.n_heads
    seen = rows_of_blocks(model, lambda: swept(model, "output"))
    intact, sweep = seen[:4], seen[4:]
    assert intact == [(layer, n) for layer in range(4)]
    assert sweep == [(layer, n * heads * (layer + 1)) for layer in range(4)]
    sets = {"a": ["L1H0"], "b": ["L3H1", "L3H2"]}  # of two groups, so the control is heads
    seen = rows_of_blocks(model, lambda: swept(model, "output", heads=sets, control="random", draws=2))
    assert seen[4:] == [(1, 3 * n), (2, 3 * n), (3, 6 * n)]


def test_a_full_batch_ends_a_pass(batch_size):
    """In the middle of a layer: the numbers stay."""
    model = shared("bridge", "gemma2")
    whole = swept(model, "antisymmetric", control="random", draws=2)
    batch_size(tokens=7 * CLEAN.numel())  # 48 replays are seven passes
    seen = rows_of_blocks(model, lambda: swept(model, "antisymmetric", control="random", draws=2))
    assert max(rows for _, rows in seen) == 7 * len(CLEAN)
    assert_equal_to_the_bit(swept(model, "antisymmetric", control="random", draws=2), whole)


def jobs_in(folder):
    return sorted(file.stem for file in folder.glob("*.parquet"))


@pytest.fixture
def jobs_of_two_layers(monkeypatch):
    monkeypatch.setattr(sweep_jobs, "TOKENS_OF_JOB", 2 * 4 * CLEAN.numel())


@pytest.mark.usefixtures("jobs_of_two_layers")
def test_a_stopped_sweep_goes_on_behind_its_last_job(tmp_path, monkeypatch):
    model, folder = shared("bridge", "gemma2"), tmp_path / "work"
    whole = swept(model, "output", folder=tmp_path / "whole")
    assert jobs_in(tmp_path / "whole") == ["output_L000-001", "output_L002-003"]
    real = sweep_jobs._table

    def stopped(part, sequences, draws, seed, by_layer, prepared):
        if min(by_layer) == 2:
            raise KeyboardInterrupt
        return real(part, sequences, draws, seed, by_layer, prepared)

    with monkeypatch.context() as patched:
        patched.setattr(sweep_jobs, "_table", stopped)
        with pytest.raises(KeyboardInterrupt, match="8 of 16 heads are in"):
            swept(model, "output", folder=folder)
    assert jobs_in(folder) == ["output_L000-001"]
    made = []
    monkeypatch.setattr(sweep_jobs, "_table", lambda *given: made.append([*given[4]]) or real(*given))
    pd.testing.assert_frame_equal(swept(model, "output", folder=folder), whole, check_exact=True)
    assert made == [[2, 3]]


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.usefixtures("jobs_of_two_layers")
def test_two_workers_share_the_passes(tmp_path):
    model = shared("bridge", "gemma2")
    options = {"heads": None, "at": [-1, 5]}
    whole = swept(model, "output", folder=tmp_path / "whole", **options)
    with joblib.parallel_config(backend="threading"):
        found = swept(model, "output", folder=tmp_path / "shared", n_jobs=2, **options)
    pd.testing.assert_frame_equal(found, whole, check_exact=True)
    assert jobs_in(tmp_path / "shared") == jobs_in(tmp_path / "whole")
    assert len(jobs_in(tmp_path / "whole")) > 2


def test_jobs_are_the_same_whatever_a_batch_holds(batch_size, tmp_path):
    model = shared("bridge", "gemma2")
    swept(model, "output", folder=tmp_path / "one")
    batch_size(tokens=CLEAN.numel())
    swept(model, "output", folder=tmp_path / "two")
    assert jobs_in(tmp_path / "one") == jobs_in(tmp_path / "two") == ["output_L000-003"]


@pytest.mark.parametrize("measure", ["sweep", "bands"])
def test_a_folder_with_a_job_for_each_layer_is_refused(measure, tmp_path, monkeypatch):
    """As earlier versions made them: their manifests say nothing of how large a job is."""
    model = shared("bridge", "gemma2")
    bands = functools.partial(tls.hooks.band_effects, model, "L0H1", task=task(), draws=0)
    work = {"sweep": functools.partial(swept, model, "output"), "bands": bands}[measure]
    of_module = "tlspectral.tables.resume_folder.open_resume_folder"
    real = tls.tables.resume_folder.open_resume_folder

    def earlier(path, settings, **how):
        return real(path, {name: value for name, value in settings.items() if name != "tokens_of_job"}, **how)

    with monkeypatch.context() as patched:
        patched.setattr(of_module, earlier)
        work(folder=tmp_path)
    with pytest.raises(IncompatibleCheckpoint, match=r"other tokens_of_job .* choose another folder"):
        work(folder=tmp_path)


@pytest.mark.slow
@pytest.mark.tl4
def test_a_large_layer_is_a_job_by_itself(tmp_path):
    model = shared("bridge", "gemma2")
    swept(model, "output", heads=["L1", "L3H0", "L3H1"], task=task(prompt_pairs(32, 12, seed=1)[0]), folder=tmp_path)
    assert jobs_in(tmp_path) == ["output_L001", "output_L003"]
    sets = {str(number): [f"L{number}H0"] for number in range(4)}
    swept(model, "output", heads=sets, task=task(prompt_pairs(56, 12, seed=1)[0]), folder=tmp_path / "sets")
    assert jobs_in(tmp_path / "sets") == ["output_set000-002", "output_set003"]
