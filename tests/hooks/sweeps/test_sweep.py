"""The sweep: equal to whole forwards under hooks, whatever is stacked, sent to workers or screened."""

from typing import Any

import joblib
import pandas as pd
import pytest
import torch
import zoo
from ablation_runs import repetitions as drawn
from ablation_runs import rows_are_ablated_runs
from zoo import shared

import tlspectral.hooks.sweeps.sweep as sweep_module
from tlspectral.algebra.nulls import haar_frame
from tlspectral.hooks import ablate
from tlspectral.hooks import ablation_sweep as sweep
from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.hooks.parts import Antisymmetric, LongRange, Mode, Output, QueryKeyPart, Symmetric
from tlspectral.hooks.parts.removal import root_mean_square
from tlspectral.hooks.sweeps import sweep_jobs
from tlspectral.models.reading import attention_view
from tlspectral.models.running.partial_runs import intact_run, logits_at
from tlspectral.tasks import evaluate, induction, induction_loss
from tlspectral.tasks.repeated import repeated_sequences

ROTARY = {"llama", "gemma2", "qwen3", "gptj", "mistral"}
HOOKED = [pytest.param("hooked", name, marks=zoo.needs_hooked) for name in ("qwen3", "mistral")]
# Learned positions, a softcap with a window, a delegating bridge; a query/key norm, a window.
MODELS = [("bridge", "gpt2"), ("bridge", "gemma2"), ("bridge", "gptj"), *HOOKED]
COLUMNS = ["layer", "head", "name", "part", "value", "delta", "delta_se", "delta_p", "delta_p_floor", "score_rms"]
CONTROL = [*(f"control_{name}" for name in ("delta", "delta_se", "excess", "p", "p_floor", "draws")), "excess_z"]


def parts_of(name):
    return ("symmetric", "antisymmetric", "output", *(["rope_phase"] if name in ROTARY else []))


# --- equal to whole forward passes ---


@pytest.mark.fast(1)
@pytest.mark.parametrize(("backend", "name"), [MODELS[0], *HOOKED, *zoo.also_slow(*MODELS[1:3])])
def test_a_sweep_is_one_ablated_forward_per_head(backend, name, batch_size):
    """Two heads share a run (42 tokens at a time hold two sequences, and the last sequence is alone).

    Each part is compared at one head of every layer, another head for each part.
    """
    batch_size(tokens=2 * 21)
    model, tokens = shared(backend, name), drawn(count=3)
    n_heads, n_layers = attention_view(model).n_heads(0), attention_view(model).n_layers
    for number, part in enumerate(parts_of(name)):
        pair = (number % n_heads, (number + 1) % n_heads)
        heads = None if part == "symmetric" else [(layer, head) for layer in range(n_layers) for head in pair]
        table = sweep(model, part, heads=heads, task=induction(tokens))
        assert list(table) == COLUMNS
        assert len(table) == n_layers * (n_heads if heads is None else 2)
        rows_are_ablated_runs(model, table[table["head"] == number % n_heads], part, induction(tokens))
        assert table["delta"].abs().max() > 5e-4  # fifty of these tolerances


@pytest.mark.slow
def test_a_static_part_has_rows_and_files_of_its_own(tmp_path):
    model, task = shared("bridge", "llama"), induction(drawn(count=3))
    given = {"task": task, "heads": [(0, 1), (1, 2)], "folder": tmp_path}
    tables = {part: sweep(model, part, **given) for part in ("symmetric", "symmetric_static")}
    for part, table in tables.items():
        assert set(table["part"]) == {part}
        rows_are_ablated_runs(model, table, Symmetric(static=part.endswith("static")), task)
    # The keys rotate, so that the parts differ by far more than rounding.
    assert (tables["symmetric"]["delta"] - tables["symmetric_static"]["delta"]).abs().max() > 1e-3
    names = sorted(file.stem for file in tmp_path.glob("*.parquet"))
    assert names == [f"{part}_L000-001" for part in tables]
    pd.testing.assert_frame_equal(sweep(model, Symmetric(static=True), **given), tables["symmetric_static"])
    control = sweep(model, "symmetric_static", task=task, heads=[(1, 2)], control="random", draws=2)
    pd.testing.assert_frame_equal(control[COLUMNS], tables["symmetric_static"][1:].reset_index(drop=True))
    screened = sweep(model, "symmetric_static", task=task, heads=[(0, 1), (1, 2)], screen="gradient")
    # The same head by another route: float32, 1e-6 measured.
    assert screened["delta"].to_numpy() == pytest.approx(tables["symmetric_static"]["delta"].to_numpy(), abs=1e-5)
    assert screened["estimate"].notna().all()
    with ablate(model, [(1, 2)], Symmetric(static=True, at=12)):
        expected = evaluate(model, task).value
    placed = sweep(model, "symmetric_static", task=task, heads=[(1, 2)], at=[12])
    assert placed["value"].item() == pytest.approx(expected, abs=1e-5)


def test_only_the_blocks_that_follow_run():
    model, calls = zoo.bridge("gemma2"), []
    for index, block in enumerate(model.blocks):
        block.attn.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    view = attention_view(model)
    intact = intact_run(view, drawn(), slice(11, 20), [2], batch=5, reduce=lambda now, logits: None)
    assert set(intact.entering) == {2}
    calls.clear()
    with torch.no_grad():
        assert intact.replay([2], slice(0, 5)).shape[1] == 9
    assert calls == [2, 3]


def test_an_interrupt_leaves_the_blocks_as_they_were():
    model = zoo.bridge("llama")
    view, expected = attention_view(model), logits_at(attention_view(model), drawn(), slice(3, 9))
    intact = intact_run(view, drawn(), slice(3, 9), [1], batch=5, reduce=lambda now, logits: None)

    def interrupt(activation, hook):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), model.hooks(fwd_hooks=[("blocks.1.attn.hook_q", interrupt)]):
        intact.replay([1], slice(0, 5))
    torch.testing.assert_close(logits_at(view, drawn(), slice(3, 9)), expected, rtol=0, atol=0)


def test_a_sweep_inside_an_ablation_adds_to_it():
    model, tokens = shared("bridge", "llama"), drawn()
    with ablate(model, [(0, 1), (1, 3)], "output"):
        both = sweep(model, "symmetric", task=induction(tokens), heads="L1H0")["value"].item()
    with ablate(model, [(0, 1), (1, 3)], "output"), ablate(model, [(1, 0)], "symmetric"):
        assert both == pytest.approx(induction_loss(model, tokens).value, abs=1e-5)


# --- the yardsticks ---


@pytest.mark.parametrize(("backend", "name"), [MODELS[0], HOOKED[1]])
def test_score_rms_is_of_unmasked_pairs(backend, name):
    """Against the model's own scores with and without the part."""
    model, tokens, seen = shared(backend, name), drawn(), []
    table = sweep(model, "antisymmetric", task=induction(tokens), heads=[(0, 1)])
    keep = ("blocks.0.attn.hook_attn_scores", lambda x, hook: seen.append(x[:, 1].double()))
    for heads in ([], [(0, 1)]):
        with torch.no_grad(), ablate(model, heads, "antisymmetric"), model.hooks(fwd_hooks=[keep]):
            model(tokens)
    allowed = seen[0] > -1e30
    expected = (seen[0] - seen[1])[allowed].square().mean().sqrt().item()
    assert table["score_rms"].item() == pytest.approx(expected, rel=1e-4)


@zoo.needs_hooked
def test_score_rms_of_a_delegating_bridge_is_that_of_the_other_backend():
    found, expected = (
        sweep(shared(backend, "opt"), "antisymmetric", task=induction(drawn()), heads=[(0, 1)])["score_rms"].item()
        for backend in ("bridge", "hooked")
    )
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("name", "part"), [("llama", Symmetric()), ("gptj", Symmetric()), ("llama", Mode([0, 3]))])
def test_a_random_part_is_as_large_as_the_one_removed(name, part):
    model, seen = shared("bridge", name), []
    view = attention_view(model)
    bound = part.on(view, {1: [2]})[1]

    def alter(removal):
        size, seeds = removal.scores.query.content.shape[-1], [[0, 1, 2, draw] for draw in (0, 1)]
        frames = torch.stack([haar_frame(size, size, one) for one in seeds])
        eye = torch.eye(size, dtype=frames.dtype)
        torch.testing.assert_close(frames @ frames.mT, eye.expand_as(frames), rtol=0, atol=1e-12)
        found = bound.control(removal, [0, 0], seeds)
        allowed = removal.allowed if removal.allowed.ndim == 2 else removal.allowed[:, :1]
        sizes = [root_mean_square(scores, allowed) for scores in (removal.difference, found)]
        torch.testing.assert_close(sizes[1], sizes[0].expand_as(sizes[1]), rtol=1e-5, atol=0)
        assert float((found[:, 0] - found[:, 1]).abs().max()) > 0.1
        seen.append(found.shape)
        return removal.difference

    with (
        torch.no_grad(),
        model.hooks(fwd_hooks=LayerAblation(view, view.layer(1), [2], bound, alter=alter).hooks()),
    ):
        model(drawn())
    assert seen == [(5, 2, 21, 21)]


@pytest.mark.slow
def test_a_control_is_seeded_and_leaves_the_effects_alone(batch_size):
    model, tokens = shared("bridge", "llama"), drawn()
    plain = sweep(model, "rope_phase", task=induction(tokens))
    table = sweep(model, "rope_phase", task=induction(tokens), control="random")
    assert list(table) == [*COLUMNS, *CONTROL]
    pd.testing.assert_frame_equal(table[COLUMNS], plain, rtol=0, atol=1e-6)
    batch_size(tokens=3 * 21 * 5)
    stacked = sweep(model, "rope_phase", task=induction(tokens), control="random")
    pd.testing.assert_frame_equal(stacked, table, rtol=0, atol=1e-5)
    other = sweep(model, "rope_phase", task=induction(tokens), control="random", seed=1)
    assert (other["control_delta"] - table["control_delta"]).abs().min() > 1e-6
    some = sweep(model, "rope_phase", task=induction(tokens), control="random", heads=[(1, 2)])
    kept = table[(table["layer"] == 1) & (table["head"] == 2)].reset_index(drop=True)
    pd.testing.assert_frame_equal(some, kept, rtol=0, atol=1e-5)
    assert (table["control_delta_se"] > 0).all()


# --- the screen ---


@pytest.mark.fast(1)
@pytest.mark.parametrize(("backend", "name"), [*MODELS[1:3], HOOKED[0]])
@pytest.mark.parametrize("part", [Antisymmetric(), Output(), LongRange(3, sinks=1)], ids=str)
def test_an_estimate_is_the_slope_of_the_loss(backend, name, part):
    """Against a small step: the loss with a hundredth of the part removed, or of what losing far keys does to z."""
    model, tokens = shared(backend, name), drawn()
    view, step = attention_view(model), 1e-2
    table = sweep(model, part, task=induction(tokens), screen="gradient", heads=[(0, 1), (1, 0)])
    assert table["score_rms"].isna().all() == (part.name != "antisymmetric")

    def stepped(layer, head, size):
        if part.acts_on != "mask":
            alter = lambda removal: size * removal.difference  # noqa: E731
            bound = part.on(view, {layer: [head]})[layer]
            return LayerAblation(view, view.layer(layer), [head], bound, alter=alter).hooks()
        point = view.hook_names(layer)["z"]
        kept = []
        for heads in ([], [(layer, head)]):
            with ablate(model, heads, part):
                kept.append(model.run_with_cache(tokens)[1][point])
        change = kept[1] - kept[0]
        assert change.abs().max() > 1e-2
        return [(point, lambda z, hook: z + size * change)]

    for layer, head in [(0, 1), (1, 0)]:
        losses = []
        for size in (step, -step):
            with model.hooks(fwd_hooks=stepped(layer, head, size)):
                losses.append(induction_loss(model, tokens).value)
        slope = (losses[0] - losses[1]) / (2 * step)
        found = table.loc[(table["layer"] == layer) & (table["head"] == head), "estimate"].item()
        # Measured: 3e-5 on slopes of 1e-3, from float32 losses over a step of 1e-2.
        assert found == pytest.approx(slope, abs=1e-4, rel=2e-2)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_a_screen_measures_the_largest_and_a_random_set(monkeypatch):
    monkeypatch.setattr(sweep_module, "SCREENED", 3)
    model, tokens = shared("bridge", "gemma2"), drawn()
    table = sweep(model, "symmetric", task=induction(tokens), screen="gradient")
    assert list(table) == [*COLUMNS, "estimate", "measured"]
    assert len(table) == 16
    sizes = table["estimate"].abs()
    assert set(table[table["measured"] == "top"].index) == set(sizes.nlargest(3).index)
    assert (table["measured"] == "control").sum() == 3
    assert table.loc[table["measured"] == "", "delta"].isna().all()
    assert table["score_rms"].notna().all()
    exact = sweep(model, "symmetric", task=induction(tokens))
    measured = table["measured"] != ""
    pd.testing.assert_frame_equal(table.loc[measured, COLUMNS], exact.loc[measured, COLUMNS], rtol=0, atol=1e-5)
    assert table.attrs["screen"]["top"] == table.attrs["screen"]["control"] == 3
    assert -1 <= table.attrs["screen"]["rank_correlation"] <= 1


# --- parts of one's own in one folder ---


class Scaled(QueryKeyPart):
    """A share of the scores, kept in a field that `settings` does not name."""

    name = "scaled"

    def __init__(self, share):
        self.share = share

    def of(self, scores, pairs):
        return self.share * scores.whole()


class Halved(QueryKeyPart):
    """Another part of the same name."""

    name = "scaled"

    def of(self, scores, pairs):
        return scores.whole() / 2


@pytest.mark.slow
def test_parts_of_one_name_do_not_read_each_others_rows(tmp_path):
    model = zoo.shared("bridge", "llama")
    given = {
        "task": induction(repeated_sequences(attention_view(model), n_sequences=2, segment_length=12)),
        "heads": [(0, 1)],
    }

    def delta(part, **folder):
        [value] = sweep(model, part, **given, **folder)["delta"]
        return value

    for part in (Scaled(1.0), Scaled(0.25), Halved(), Scaled(1.0)):
        assert delta(part, folder=tmp_path) == delta(part)
    assert delta(Scaled(1.0)) != delta(Scaled(0.25))
    assert len(list(tmp_path.glob("scaled-*.parquet"))) == 3  # the last one was read again


# --- sent to workers (stopped, continued and shared out by threads: test_resumable_functions) ---


def test_a_model_is_sent_to_a_worker_after_a_cached_run():
    # transformers leaves hooks on the model that refer to a context variable, which cannot be pickled.
    model = zoo.bridge("gemma2")
    expected = model.run_with_cache(zoo.prompt())[0]
    packed: Any = joblib.wrap_non_picklable_objects(attention_view(model), keep_wrapper=False)
    make, arguments = packed.__reduce__()
    sent = make(*arguments)
    torch.testing.assert_close(sent.model(zoo.prompt(), return_type="logits"), expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=[zoo.needs_hooked, pytest.mark.full])])
def test_workers_give_the_same_table(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_jobs, "TOKENS_OF_JOB", 1)  # a job of each layer
    model, tokens = shared(backend, "llama"), drawn()
    with ablate(model, [(0, 1)], "output"):  # the model travels with the hooks that are on it
        expected = sweep(model, "symmetric", task=induction(tokens))
        found = sweep(model, "symmetric", task=induction(tokens), n_jobs=2, folder=tmp_path)
    pd.testing.assert_frame_equal(found, expected, rtol=0, atol=1e-6)
    assert len(list(tmp_path.glob("symmetric_L*"))) == 2
