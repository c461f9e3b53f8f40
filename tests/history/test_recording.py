"""Head histories: each step is the step's own head table, one model at a time, continued where it stopped."""

import dataclasses
import gc
import json
import math
import weakref

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from model_state import assert_unchanged, state_of, warm
from tlspectral_studies.common import (
    AttentionOnlyTransformer,
    RandomMapTask,
    TrainingSettings,
    TransformerConfig,
    train,
)
from tlspectral_studies.common.checkpoints import training_checkpoints

from tlspectral import analyze_heads, k_composition, load_model, read_table, write_table
from tlspectral.algebra.nulls import block_generator, haar_blocks, null_draws
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.history import head_history, recording
from tlspectral.history.checkpoint_tables import copy_losses, medians_by_layer, population_medians
from tlspectral.models.loading.packaged import bridge_from_weights
from tlspectral.models.reading import attention_view
from tlspectral.positional import positional_symbolic
from tlspectral.tasks import induction
from tlspectral.tasks.block_prompt import BlockPrompt
from tlspectral.tasks.repeated import repeated_sequences

# Models of several seeds stand in for checkpoints.
pytestmark = pytest.mark.filterwarnings("ignore:.* share no common basis")

CONFIG = TransformerConfig(d_model=24, n_heads=3, d_head=8, d_vocab=20, n_ctx=40)
STEPS = (0, 3, 10)
PAIRS = [((0, 1), (1, 2)), ((0, 0), (1, 2)), ((0, 2), (1, 0))]
QUICK = {"null_draws": 8}


@pytest.fixture(scope="module")
def run():
    task = RandomMapTask(vocabulary=20, length=40)
    return train(
        CONFIG,
        task,
        TrainingSettings(steps=10, batch_size=4, evaluation_sequences=4, warmup_steps=2),
        keep_steps=STEPS[::-1],
    )


@pytest.fixture(scope="module")
def history(run):
    return head_history(training_checkpoints(run), pairs=PAIRS, **QUICK)


def native(seed=0, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    weights = AttentionOnlyTransformer(config, seed=seed).state_dict()
    return bridge_from_weights(
        {**dataclasses.asdict(config), "model_name": "test"}, weights, torch.device("cpu"), torch.float32
    )


# Medians


def null_heads(mean, std, n=400):
    columns = {"D_head": 0.4, "dir_frac": 0.7, "rope_imag_frac": 0.5, "D_head_null_mean": mean, "D_head_null_std": std}
    return pd.DataFrame({**columns, "dir_frac_null_mean": 0.7, "dir_frac_null_std": 1e-3}, index=range(n))


def test_the_null_of_a_median_has_the_spread_of_a_median():
    found = population_medians(null_heads(0.6, 0.02))
    half = 1.96 * 1.2533 * 0.02 / 400**0.5  # the standard error of a median of normals is sqrt(pi / 2) that of a mean
    # Measured over ten seeds: the ends move by at most 4 % of the half width; the spread of a mean is 20 % narrower.
    assert found["D_head_null_median"] == pytest.approx(0.6, abs=0.08 * half)
    assert found["D_head_null_low"] == pytest.approx(0.6 - half, abs=0.08 * half)
    assert found["D_head_null_high"] == pytest.approx(0.6 + half, abs=0.08 * half)
    assert found["D_head_median"] == 0.4
    # Layer 1 has no heads, layer 2 another median; the null of a layer is that of its own heads.
    layers = pd.concat([null_heads(0.6, 0.02).assign(layer=0), null_heads(0.5, 0.02, 4).assign(D_head=0.3, layer=2)])
    by_layer = medians_by_layer(layers)
    assert by_layer["D_head_median_by_layer"] == pytest.approx([0.4, math.nan, 0.3], nan_ok=True)
    assert by_layer["D_head_null_low_by_layer"][0] == found["D_head_null_low"]
    assert by_layer["D_head_null_high_by_layer"][2] == population_medians(layers[400:])["D_head_null_high"]
    assert found["dir_frac_null_high"] < 0.7004
    assert found["rope_imag_frac_null_median"] == 0.5


@pytest.mark.slow
def test_the_simulated_null_is_that_of_real_random_heads():
    """Medians over eight heads of k = 16 under the matched null, drawn as matrices and drawn as normals."""
    n, k, heads, draws = 63, 16, 8, 1500
    generator = np.random.default_rng(3)
    values = np.sort(generator.uniform(0.2, 1.0, (heads, k)), axis=1)[:, ::-1] ** 2
    drawn = np.stack(
        [
            null_draws(values[head], haar_blocks(n, k, draws, block_generator(1, n, k, 0, head)))[0]["D_head"]
            for head in range(heads)
        ]
    )
    table = null_heads(drawn.mean(1), drawn.std(1), heads)
    found = population_medians(table)
    real = np.quantile(np.median(drawn, axis=0), [0.025, 0.5, 0.975])
    spread = real[2] - real[0]
    simulated = [found["D_head_null_low"], found["D_head_null_median"], found["D_head_null_high"]]
    # Measured: at most 3 % of the width over twelve seeds (D_head is not quite normal); the spread of one head is 2.4
    # times as wide as that of the median of eight.
    assert np.abs(real - simulated).max() < 0.1 * spread


# The in-context score


@pytest.mark.parametrize("length", [12, 64])
def test_losses_of_the_copies_are_those_of_a_whole_pass(length):
    """Against a whole forward pass and FP's slices: nll[65:128) minus nll[1:64) for a segment of 64."""
    model = native(d_vocab=70, n_ctx=129)
    tokens = repeated_sequences(attention_view(model), n_sequences=6, segment_length=length, seed=1)
    with torch.no_grad():
        logits = model(tokens, return_type="logits").double()
    nll = -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1).numpy()
    first, second = nll[:, 1:length].mean(1), nll[:, length + 1 : 2 * length].mean(1)
    found_first, found_second = copy_losses(model, induction(tokens))
    # Float32 sums in another order: measured 2e-7; leaving out or adding one position moves a mean by 1e-3 or more.
    assert found_first.per_sequence == pytest.approx(first, abs=1e-5)
    assert found_second.per_sequence == pytest.approx(second, abs=1e-5)


def test_only_the_copy_can_be_easy_for_a_model_that_copies():
    first, second = copy_losses(load_model("tiny-rope"), induction(n_sequences=20))
    assert second.value < 0.3
    assert first.value > np.log(32)  # worse than knowing nothing: the warning of the docstring


# A history is the tables of its steps


def test_the_steps_of_a_run_are_its_models(run):
    found = training_checkpoints(run)
    assert [step for step, _ in found] == list(STEPS)
    tokens, last = torch.arange(40)[None] % 20, found[-1][1]()
    with torch.no_grad():
        # Float32 sums in another order: measured 1e-6; weights some steps apart differ by more than 1e-2.
        assert last(tokens) == pytest.approx(run.model(tokens), abs=1e-4)
        assert (found[0][1]()(tokens) - run.model(tokens)).abs().max() > 1e-3
    assert last.tlspectral_source["revision"] == "step10"


@pytest.mark.slow
def test_every_step_is_the_head_table_of_its_model(history, run):
    assert history.steps == list(STEPS)
    for step, load in training_checkpoints(run):
        model = load()
        expected = analyze_heads(model, null_draws=8, null_blocks="fresh")
        own = history.heads[history.heads["step"] == step].reset_index(drop=True)
        pd.testing.assert_frame_equal(own[expected.columns], expected, check_exact=True)
        for column in ("prev", "rope_imag_frac", "dir_frac", "D_head"):
            assert own[f"{column}_pct"].tolist() == (expected[column].rank() / 6).tolist()
        for pair in PAIRS:
            (layer, head), receiver = pair
            table = k_composition(model, receiver)
            [(score, chance, rank)] = table[(table["layer"] == layer) & (table["head"] == head)][
                ["score", "chance", "rank"]
            ].to_numpy()
            at = history.composition[history.composition["step"] == step]
            at = at[(at["sender_layer"] == layer) & (at["sender_head"] == head)]
            row = at[(at["receiver_layer"] == receiver[0]) & (at["receiver_head"] == receiver[1])]
            assert row[["score", "chance", "rank"]].to_numpy().tolist() == [[score, chance, rank]]
        first, second = copy_losses(model, induction())
        difference = second.per_sequence - first.per_sequence
        row = history.summary[history.summary["step"] == step].iloc[0]
        assert row["icl_score"] == difference.mean()
        assert row["icl_score_se"] == pytest.approx(difference.std(ddof=1) / len(difference) ** 0.5, rel=1e-12)
        assert (row["first_copy_loss"], row["second_copy_loss"]) == (first.value, second.value)
        assert row["D_head_median"] == expected["D_head"].median()
        assert row["n_heads"] == 6
        for column in ("D_head", "dir_frac", "rope_imag_frac"):
            medians = expected.groupby("layer")[column].median().tolist()
            assert row[f"{column}_median_by_layer"] == pytest.approx(medians, nan_ok=True)
    assert len(history.heads) == 6 * len(STEPS)
    assert len(history.composition) == 3 * len(STEPS)


def test_the_track_is_one_head_beside_the_summary(history):
    last = history.heads[history.heads["step"] == 10]
    best = last.loc[last["prev"].idxmax()]
    assert history.previous_token_head == (best["layer"], best["head"])
    late = history.heads["layer"] * (history.heads["head"] == 2) * (history.heads["step"] == 10)
    assert dataclasses.replace(history, heads=history.heads.assign(prev=late)).previous_token_head == (1, 2)
    track = history.track()
    assert track["step"].tolist() == list(STEPS)
    assert track["prev"].iloc[-1] == last["prev"].max()
    assert track["icl_score"].tolist() == history.summary["icl_score"].tolist()
    other = history.track((1, 2))
    assert set(zip(other["layer"], other["head"], strict=True)) == {(1, 2)}


def test_what_was_measured_travels_with_the_tables(history, tmp_path):
    assert history.positional is None
    assert history.frequencies is None
    json.dumps(history.heads.attrs, allow_nan=False)
    assert [at["step"] for at in history.heads.attrs["checkpoints"]] == list(STEPS)
    assert len({at["weights_sha256"] for at in history.heads.attrs["checkpoints"]}) == 3
    write_table(history.heads, tmp_path / "heads.parquet")
    pd.testing.assert_frame_equal(read_table(tmp_path / "heads.parquet"), history.heads)
    for text in (repr(history), history._repr_html_()):
        assert "3, from 0 to 10; heads: 6" in text
        assert f"{history.summary['icl_score'].iloc[-1]:.2f} last" in text


@pytest.mark.slow
def test_positional_scores_are_those_of_each_checkpoint(run):
    tokens = torch.arange(14) % 20
    prompt = BlockPrompt(tokens[:2], list(tokens[2:11].split(3)), tokens[11:])
    checkpoints = training_checkpoints(run)
    options = {**QUICK, "detectors": False, "null_draws": 2, "blocks": prompt}
    found = head_history(checkpoints, **options)
    for step, checkpoint in checkpoints:
        for name, per_frequency in (("positional", False), ("frequencies", True)):
            table = positional_symbolic(checkpoint(), prompt, mode="key", per_frequency=per_frequency)
            rows = getattr(found, name)
            rows = rows[rows["step"] == step].drop(columns="step").reset_index(drop=True)
            pd.testing.assert_frame_equal(rows[list(table)], table)
    assert found.positional.groupby("step")["exclusion_index"].mean().nunique() == len(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "detectors"), [("neox", True), ("gpt2", False)])
def test_public_architectures(name, detectors):
    models = [warm(zoo.bridge(name, seed=seed)).train() for seed in range(2)]
    before = [state_of(model) for model in models]
    found = head_history(enumerate(models), detectors=detectors, seed=3, **QUICK)
    for model, state in zip(models, before, strict=True):
        assert_unchanged(model, state)
    if detectors:
        losses = [loss.value for loss in copy_losses(models[1], induction(seed=3))]
        assert found.summary[["first_copy_loss", "second_copy_loss"]].iloc[1].tolist() == losses
    else:  # weights alone are read
        assert found.summary["icl_score"].isna().all()
        assert found.heads["prev_pct"].isna().all()
        assert found.heads["D_head_pct"].notna().all()
        assert found.composition.empty
        assert list(found.composition.columns)[:3] == ["step", "sender_layer", "sender_head"]
        assert len(found.track((0, 0))) == 2
        assert "previous-token" not in repr(found)
    rotary = name == "neox"
    assert found.heads["rope_imag_frac_pct"].notna().all() == rotary
    assert found.summary["rope_imag_frac_null_median"].notna().all() == rotary
    assert found.summary["D_head_null_low"].le(found.summary["D_head_null_high"]).all()
    assert found.heads["D_head"].nunique() == len(found.heads)


# One model in memory


@pytest.fixture
def no_automatic_collection():
    """Models hold circles of references, which Python takes away some time or other; here only when it is asked to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def watched(alive, seed):
    """A loader that fails if a model it made before is still there."""

    def load():
        assert not [one for one in alive if one() is not None], "the model of an earlier step is still in memory"
        model = native(seed)
        alive.append(weakref.ref(model.original_model))
        return model

    return load


@pytest.mark.slow
@pytest.mark.usefixtures("no_automatic_collection")
def test_functions_are_called_one_by_one_and_a_generator_is_not_run_ahead(tmp_path):
    called, yielded = [], []
    head_history([(step, watched(called, step)) for step in range(3)], folder=tmp_path / "new", **QUICK)
    models = ((step, watched(yielded, step)()) for step in range(3))
    assert head_history(models, detectors=False, **QUICK).steps == [0, 1, 2]
    assert len(called) == len(yielded) == 3


# Continuing


@pytest.mark.slow
def test_a_run_goes_on_from_its_stored_steps_of_the_same_weights(run, tmp_path, spied):
    """Given as models or as functions."""
    checkpoints, options = training_checkpoints(run), {**QUICK, "detectors": False, "folder": tmp_path}
    models = [(step, load()) for step, load in checkpoints]
    first = head_history([models[0], checkpoints[1]], **options)
    measured = spied(recording, "measure_step")
    whole = head_history([checkpoints[0], models[1], checkpoints[2]], **options)
    assert [view.model.tlspectral_source["revision"] for view in measured] == ["step10"]
    pd.testing.assert_frame_equal(whole.heads[whole.heads["step"] < 10], first.heads)
    for other in (models[2][1], checkpoints[2][1]):
        with pytest.raises(IncompatibleCheckpoint, match="step 3 of another model"):
            head_history([checkpoints[0], (3, other)], **options)


# One basis or none


def test_checkpoints_without_a_common_basis_are_named():
    with pytest.warns(UserWarning, match="'tiny-rope' and 'tiny-rope-sym' share no common basis") as said:
        history = head_history(["tiny-rope", "tiny-rope-sym"], null_draws=2, detectors=False)
    assert [warning.filename for warning in said] == [__file__]
    assert history.heads.attrs["basis"] == [{"from": "tiny-rope", "to": "tiny-rope-sym", "shared": False, "moved": {}}]


def test_heads_that_moved_between_checkpoints_are_named():
    first, second = (load_model("tiny-rope") for _ in range(2))
    attention = second.blocks[1].attn
    with torch.no_grad():  # the head of rows 0 to 15 becomes that of rows 16 to 31, and the other way round
        for name in "qkvo":
            weight = getattr(attention, name).original_component.weight
            weight = weight.T if name == "o" else weight
            weight.copy_(torch.cat([weight[16:32], weight[:16], weight[32:]]))
    with pytest.warns(UserWarning, match="2 heads stand at another index .*L1H0 of step 0 is L1H1 of step 1"):
        history = head_history([(0, first), (1, second)], null_draws=2, detectors=False)
    assert history.heads.attrs["basis"] == [
        {"from": 0, "to": 1, "shared": True, "moved": {"L1H0": "L1H1", "L1H1": "L1H0"}}
    ]
