"""The small Llama and its arms, Spectral Evolution, the experiments: what is learned, logged, compared, continued."""

import hashlib
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables import read_table
from tlspectral.training.run_folder import finish_runs, open_run_folder
from tlspectral.training.spectral import code_adaptation, experiments, language_runs
from tlspectral.training.spectral.code_text import code_rows, source_files
from tlspectral.training.spectral.depth_manifold import depth_manifold
from tlspectral.training.spectral.evolution import EvolutionSettings, evolve, parameter_groups, spectral_modules
from tlspectral.training.spectral.formal_languages import UNSCORED, BioRotation, Dyck3, Modulo7, answers_of
from tlspectral.training.spectral.language_runs import LanguageRun, answer_loss, chosen_rates, score_answers
from tlspectral.training.spectral.llama import (
    ARMS,
    PHASE_NOISE_ARMS,
    LlamaConfig,
    SpectralArm,
    SpectralLlama,
    parameter_counts,
)
from tlspectral.training.spectral.resonance import (
    phase_drift,
    resonance,
    resonance_gain,
    resonance_over_training,
)
from tlspectral.training.spectral.schedule import FULL, LanguagePlan, LanguageSchedule
from tlspectral.training.spectral.seed_intervals import paired_differences, t_interval
from tlspectral.training.spectral.structure_gap import differences_beyond
from tlspectral.training.spectral.table1 import compared, lock_in_step

LANGUAGE = Dyck3((2, 3))
SMALL = LlamaConfig(len(LANGUAGE.vocabulary), d_model=16, n_heads=4, d_mlp=24, n_ctx=64)
ALL_ARMS = {**ARMS, **PHASE_NOISE_ARMS}
PLAN = LanguagePlan(LANGUAGE, 4, 8, tuple(Dyck3((depth, depth)) for depth in (3, 5)), 4, 4)
MODULO_PLAN = LanguagePlan(Modulo7(), 4, 8, (), 0, 4)
TINY = LanguageSchedule((PLAN,), steps=3, rates=(1e-3, 1e-2), seeds=(0, 1), warmup_steps=1, log_every=2)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens(n=3, seed=0):
    return LANGUAGE.sample(n, generator(seed)).tokens


def model(arm="full", seed=0, config=SMALL):
    return SpectralLlama(config, ALL_ARMS[arm], seed=seed)


def backbone(built):
    return {name: value for name, value in built.named_parameters() if ".spectral." not in name}


def jitter_spectral(built, seed=5):
    stream = generator(seed)
    with torch.no_grad():
        for module in spectral_modules(built).values():
            for parameter in module.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=stream)
    return built


def trained(arm="full", steps=3, rate=1e-2, **changes):
    built, stream = model(arm), generator(1)
    settings = EvolutionSettings(steps=steps, learning_rate=rate, warmup_steps=1, log_every=2, **changes)
    return built, evolve(built, lambda _: answer_loss(built, LANGUAGE.sample(4, stream)), settings)


# --- the arms ---


@pytest.mark.parametrize("arm", [name for name in ALL_ARMS if name != "standard"])
def test_all_arms_of_a_seed_start_with_the_same_backbone(arm):
    standard, other = backbone(model("standard", seed=3)), backbone(model(arm, seed=3))
    assert list(standard) == list(other)
    assert all(torch.equal(value, other[name]) for name, value in standard.items())
    assert not torch.equal(standard["embed.weight"], backbone(model(arm, seed=4))["embed.weight"])


@pytest.mark.parametrize("arm", [name for name in ARMS if name != "standard"])
def test_every_arm_starts_as_the_standard_one_to_the_bit(arm):
    assert not spectral_modules(model("standard"))
    standard, other = model("standard"), model(arm)
    batch = LANGUAGE.sample(4, generator())
    assert torch.equal(standard(batch.tokens), other(batch.tokens))
    at = answers_of(batch).position
    assert torch.equal(standard(batch.tokens, at), other(batch.tokens, at))


def test_shared_phase_noise_cancels_and_query_noise_does_not():
    config = replace(SMALL, n_layers=1)
    standard = model("standard", config=config)(tokens()).double()
    shared, query = (
        (SpectralLlama(config, replace(PHASE_NOISE_ARMS[arm], phase_noise=1.0))(tokens()) - standard).abs().max()
        for arm in ("full_noise_shared", "full_noise")
    )
    # Measured: 1.5e-8 and 1.7e-4 on logits of 0.2; a phase on one side only gives the second.
    assert shared < 2e-7
    assert query > 5e-6


def test_parameter_counts_are_those_that_are_learned():
    counted = {arm: parameter_counts(LlamaConfig(9), ARMS[arm]) for arm in ARMS}
    assert {arm: count["spectral"] for arm, count in counted.items()} == {
        "standard": 0,
        "omega": 128,
        "full": 384,
        "bifocal": 192,
        "placebo": 256,
    }
    assert {count["backbone"] for count in counted.values()} == {398_208}
    assert [parameter_counts(LlamaConfig(size), ARMS["full"])["backbone"] for size in (7, 11)] == [397_696, 398_720]
    for arm in ("standard", "omega", "full", "placebo"):
        built = model(arm)
        learned = sum(value.numel() for value in built.parameters() if value.requires_grad)
        assert learned == sum(parameter_counts(SMALL, ARMS[arm]).values())


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="theta cannot be learned"):
        SpectralArm(("theta",))
    with pytest.raises(ValueError, match="no whole number of rotary pairs"):
        replace(SMALL, d_model=18)
    with pytest.raises(ValueError, match="65 tokens do not fit into a context of n_ctx=64"):
        model()(torch.zeros(1, 65, dtype=torch.int64))


# --- the model ---


def test_the_model_by_a_second_hand():
    """Complex numbers in float64, one head at a time, with spectral parameters off their start."""
    built = jitter_spectral(model("full"))
    ids, state = tokens(), {name: value.detach().double() for name, value in built.state_dict().items()}

    def norm(x, gain):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    x = state["embed.weight"][ids]
    position = torch.arange(ids.shape[1], dtype=torch.float64)[:, None]
    for layer in range(2):
        at = {name.split(".", 2)[2]: value for name, value in state.items() if name.startswith(f"blocks.{layer}.")}
        n = norm(x, at["attention_norm.weight"])
        heads = []
        for head in range(4):
            q, k, v = (n @ at[f"attention.{role}_proj.weight"][4 * head : 4 * head + 4].T for role in "qkv")
            omega, gain, phase = (at[f"attention.spectral.{name}"][head] for name in ("omega", "gain", "phase"))
            pairs = [torch.complex(part[..., :2], part[..., 2:]) for part in (q, k)]
            turned_q = pairs[0] * gain * torch.polar(torch.ones_like(phase), position * omega + phase)
            turned_k = pairs[1] * torch.polar(torch.ones_like(phase), position * omega)
            scores = (turned_q @ turned_k.conj().mT).real / 2
            future = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
            heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ at["attention.o_proj.weight"].T
        n = norm(x, at["mlp_norm.weight"])
        gate, up = (n @ at[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ at["mlp.down_proj.weight"].T
    expected = norm(x, state["norm.weight"]) @ state["unembed.weight"].T
    found = built(ids)
    # Measured: 3e-8 on logits of 0.2. A gain, phase or frequency that is off by 0.3: 7e-5 and more, as below.
    torch.testing.assert_close(found.double(), expected, atol=5e-7, rtol=0)
    for off in ("gain", "phase", "omega"):
        other = jitter_spectral(model("full"))
        with torch.no_grad():
            for module in spectral_modules(other).values():
                getattr(module, off).add_(0.3)
        assert (other(ids) - found).abs().max() > 2e-5


def test_logits_at_chosen_positions_are_those_of_the_whole():
    built = jitter_spectral(model("full"))
    batch = LANGUAGE.sample(5, generator(2))
    at = answers_of(batch).position
    whole = built(batch.tokens).gather(1, at[:, :, None].expand(-1, -1, SMALL.d_vocab))
    # Measured: equal; another kernel may round. A neighbour's logits are off by 0.3.
    torch.testing.assert_close(built(batch.tokens, at), whole, atol=1e-6, rtol=0)


def test_the_future_is_not_seen():
    built, ids = jitter_spectral(model("full")), tokens()
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % SMALL.d_vocab
    before, after = built(ids), built(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], atol=1e-7, rtol=0)
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


def test_placebo_is_gauge():
    """Gain and phase of the placebo can be taken into W_Q: what it learns the standard model can be."""
    placebo, standard = jitter_spectral(model("placebo")), model("standard")
    for module in spectral_modules(placebo).values():
        with torch.no_grad():
            module.omega.copy_(module.theta)  # the placebo does not learn it
    ids = tokens()
    assert (placebo(ids) - standard(ids)).abs().max() > 2e-6
    with torch.no_grad():
        for theirs, attention in zip(placebo.attentions(), standard.attentions(), strict=True):
            assert theirs.spectral is not None
            factor = torch.polar(theirs.spectral.gain, theirs.spectral.phase)[:, :, None]  # heads pairs 1
            rows = attention.q_proj.weight.unflatten(0, (4, 4))
            turned = torch.complex(rows[:, :2], rows[:, 2:]) * factor
            attention.q_proj.weight.copy_(torch.cat([turned.real, turned.imag], 1).flatten(0, 1))
    # Measured: 3e-8.
    torch.testing.assert_close(placebo(ids), standard(ids), atol=2e-7, rtol=0)


# --- Spectral Evolution ---


@pytest.mark.parametrize(
    ("arm", "moved", "still"),
    [
        ("omega", {"omega"}, {"gain", "phase"}),
        ("full", {"omega", "gain", "phase"}, set()),
        ("placebo", {"gain", "phase"}, {"omega"}),
        ("bifocal", {"omega", "gain", "phase"}, set()),
    ],
)
def test_an_arm_learns_what_it_says_and_nothing_else(arm, moved, still):
    _, evolution = trained(arm)
    table = evolution.trajectory
    first, last = (table[table["step"] == step].reset_index(drop=True) for step in (0, 3))
    spectral = first["head"] < (2 if arm == "bifocal" else 4)
    for name in moved:
        assert (last[name] != first[name])[spectral].all()
        assert (last[name] == first[name])[~spectral].all()
    for name in still:
        assert last[name].equals(first[name])


def test_the_log_is_the_parameters():
    built, evolution = trained("full", steps=5)
    table = evolution.trajectory
    assert table.columns.tolist() == ["step", "layer", "head", "frequency", "omega", "gain", "phase"]
    assert table["step"].unique().tolist() == [0, 2, 4, 5]
    assert len(table) == 4 * 2 * 4 * 2
    for layer, attention in enumerate(built.attentions()):
        for name in ("omega", "gain", "phase"):
            last = table[(table["step"] == 5) & (table["layer"] == layer)]
            logged = last.pivot_table(index="head", columns="frequency", values=name).to_numpy()
            # Measured: equal; omega is theta + (omega - theta) in float32, which may be off by a rounding of theta.
            np.testing.assert_allclose(logged, getattr(attention.spectral, name).detach(), rtol=0, atol=2e-7)
    theta = [1.0, 0.01]
    start = table[table["step"] == 0]
    np.testing.assert_allclose(start["omega"], theta * 8, rtol=1e-7)
    assert set(start["gain"]) == {1.0}
    assert not start["phase"].any()
    assert evolution.losses["step"].tolist() == [1, 2, 3, 4, 5]


def test_a_shared_phase_is_logged_as_it_stands():
    built = model("full_noise_shared")
    stream = generator(1)
    evolution = evolve(built, lambda _: answer_loss(built, LANGUAGE.sample(4, stream)), EvolutionSettings(steps=1))
    start = evolution.trajectory[evolution.trajectory["step"] == 0]
    noise = np.concatenate([a.spectral.phase.detach().flatten() for a in model("full_noise_shared").attentions()])
    np.testing.assert_array_equal(start["phase"], noise)
    assert 3e-4 < np.abs(noise).mean() < 2e-3


def test_the_standard_arm_has_an_empty_log():
    _, evolution = trained("standard")
    assert evolution.trajectory.empty
    assert len(evolution.losses) == 3


def test_groups_have_their_rates_and_decay():
    built = model("full")
    settings = EvolutionSettings(learning_rate=0.02, omega_share=0.1, weight_decay=0.3)
    groups = {group["name"]: group for group in parameter_groups(built, settings)}
    assert {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()} == {
        "weights": (0.02, 0.3),
        "gain_phase": (0.02, 0.0),
        "omega": (pytest.approx(0.002), 0.0),
    }
    held = {name: {id(value) for value in group["params"]} for name, group in groups.items()}
    modules = spectral_modules(built).values()
    assert held["omega"] == {id(module.omega) for module in modules}
    assert held["gain_phase"] == {id(value) for module in modules for value in (module.gain, module.phase)}
    assert held["weights"] == {id(value) for value in backbone(built).values()}
    names = [[group["name"] for group in parameter_groups(model(arm), settings)] for arm in ("standard", "placebo")]
    assert names == [["weights"], ["weights", "gain_phase"]]
    frozen = parameter_groups(built, settings, frozen_backbone=True)
    assert [group["name"] for group in frozen] == ["gain_phase", "omega"]
    with pytest.raises(ValueError, match="no parameter asks for a gradient"):
        parameter_groups(model("standard"), settings, frozen_backbone=True)


def test_a_step_is_adamw_with_both_clips():
    """Two steps by hand: warm-up to the full rate in the second, each part clipped by itself."""
    settings = EvolutionSettings(
        steps=2, learning_rate=0.01, omega_share=0.1, weight_decay=0.1, warmup_steps=2, clip=1e-3, log_every=1
    )
    one, other = model("full"), model("full")
    batches = [LANGUAGE.sample(4, generator(step)) for step in range(2)]
    found = evolve(one, lambda step: answer_loss(one, batches[step]), settings)
    spectral = [value for name, value in other.named_parameters() if ".spectral." in name]
    omegas = {id(module.omega) for module in spectral_modules(other).values()}
    optimizer = torch.optim.AdamW(
        [
            {"params": list(backbone(other).values()), "weight_decay": 0.1, "rate": 0.01},
            {"params": [p for p in spectral if id(p) not in omegas], "weight_decay": 0.0, "rate": 0.01},
            {"params": [p for p in spectral if id(p) in omegas], "weight_decay": 0.0, "rate": 0.001},
        ]
    )
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * (step + 1) / 2
        logits, answers = other(batch.tokens), answers_of(batch)
        picked = logits.gather(1, answers.position[:, :, None].expand(-1, -1, SMALL.d_vocab))
        loss = F.cross_entropy(picked.flatten(0, 1), answers.token.flatten(), ignore_index=UNSCORED)
        assert found.losses["loss"][step] == pytest.approx(loss.item(), abs=1e-6)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(list(backbone(other).values()), 1e-3)
        nn.utils.clip_grad_norm_(spectral, 1e-3)
        optimizer.step()
    for (name, value), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        # Measured: equal. Steps are of size 1e-2, and 1e-3 for omega.
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=0, msg=lambda said, name=name: f"{name}: {said}")


def test_losses_fall_on_a_language():
    config = LlamaConfig(len(LANGUAGE.vocabulary), d_model=32, n_heads=4, d_mlp=64, n_ctx=16)
    built, stream = model("full", config=config), generator(1)
    settings = EvolutionSettings(steps=60, learning_rate=1e-2, warmup_steps=5)
    losses = evolve(built, lambda _: answer_loss(built, LANGUAGE.sample(16, stream)), settings).losses["loss"]
    # Measured: 2.22 to 0.16; chance is 1.38.
    assert losses.tail(10).mean() < 0.8


def test_scores_by_a_loop():
    built, batch = jitter_spectral(model()), LANGUAGE.sample(70, generator(4))  # more rows than go at once
    found = score_answers(built, batch)
    logits = built(batch.tokens).double().log_softmax(-1)
    losses, right = [], []
    for row, t in batch.scored.nonzero().tolist():
        target = int(batch.tokens[row, t + 1])
        losses.append(-logits[row, t, target].item())
        right.append(int(logits[row, t].argmax()) == target)
    assert found["tokens"] == len(losses)
    assert found["loss"] == pytest.approx(np.mean(losses), abs=1e-6)
    assert found["accuracy"] == pytest.approx(np.mean(right))


# --- statistics ---


def test_t_interval_by_hand():
    found = t_interval(pd.Series([1.0, 2.0, 3.0, 4.0, 5.0]))
    reach = 2.7764451 * math.sqrt(2.5) / math.sqrt(5)  # t table, 4 degrees of freedom
    assert found == pytest.approx({"mean": 3.0, "low": 3 - reach, "high": 3 + reach, "n": 5})
    assert math.isnan(t_interval(pd.Series([1.0]))["low"])


def test_differences_are_paired_over_seeds():
    table = pd.DataFrame(
        {
            "language": "a",
            "arm": ["standard"] * 3 + ["full"] * 3,
            "seed": [0, 1, 2, 2, 0, 1],
            "loss": [1.0, 5.0, 9.0, 9.5, 1.1, 5.3],
        }
    )
    (row,) = paired_differences(table, ["language"], "loss", reference="standard").to_dict("records")
    reach = 4.3026527 * np.std([0.1, 0.3, 0.5], ddof=1) / math.sqrt(3)
    assert (row["language"], row["arm"], row["n"]) == ("a", "full", 3)
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((0.3, 0.3 - reach, 0.3 + reach))


def test_differences_beyond_leave_trained_sizes_out():
    table = pd.DataFrame(
        itertools.product(["dyck3"], ["standard", "full"], [0, 1], [4, 9, 10]),
        columns=["language", "arm", "seed", "size"],
    ).assign(accuracy=[1.0, 0.5, 0.3, 1.0, 0.5, 0.5, 0.1, 0.7, 0.5, 0.1, 0.8, 0.4])
    table["trained"] = table["size"] <= 8
    (row,) = differences_beyond(table).to_dict("records")
    assert (row["arm"], row["n"]) == ("full", 2)
    assert row["mean"] == pytest.approx((0.2 + 0.1) / 2)


def losses_of(values):
    return pd.DataFrame({"step": range(1, len(values) + 1), "loss": values})


def test_lock_in_is_the_first_halving_within_twenty_steps():
    jump = [1.0] * 100 + [0.3] * 50  # the mean of ten is 0.44 once eight of them have fallen
    assert lock_in_step(losses_of(jump), 0.0) == 108
    assert lock_in_step(losses_of([x + 0.2 for x in jump]), 0.2) == 108
    assert lock_in_step(losses_of([x + 0.2 for x in jump]), 0.0) == 109  # a floor that is wrong: 0.57 < 0.6 takes 9
    assert lock_in_step(losses_of([1.0] * 100 + [0.51] * 50), 0.0) is None
    slow = [2 ** (-step / 25) for step in range(200)]
    assert lock_in_step(losses_of(slow), 0.0) is None
    fast = [2 ** (-step / 15) for step in range(200)]
    assert lock_in_step(losses_of(fast), 0.0) == 30  # the first step with two windows
    assert lock_in_step(losses_of([1.0, 0.1] * 10), 0.0) is None  # too short for two windows


def test_the_lowest_loss_chooses_the_rate():
    def run(arm, rate, loss):
        return LanguageRun("a", arm, rate, 9), {"held_out": pd.DataFrame({"loss": [loss]})}

    runs = dict(
        [run("x", 1e-3, 0.5), run("x", 3e-3, 0.4), run("x", 1e-2, math.nan), run("y", 1e-3, 0.7), run("y", 3e-3, 0.7)]
    )
    table = chosen_rates(runs)
    assert table["chosen"].tolist() == [False, True, False, True, False]


def test_the_summary_is_that_of_the_rows():
    rows = [
        {"language": "dyck3", "arm": arm, "learning_rate": 1e-3, "seed": seed, "loss": loss, "accuracy": 1 - loss,
         "lock_in": math.nan if seed else 50.0}
        for arm, losses in {"standard": (0.5, 0.3), "full": (0.4, 0.1)}.items()
        for seed, loss in enumerate(losses)
    ]  # fmt: skip
    table = compared(pd.DataFrame(rows), FULL).set_index("arm")
    assert table["loss"].tolist() == pytest.approx([0.4, 0.25])
    assert math.isnan(table["loss_difference"]["standard"])
    assert table["loss_difference"]["full"] == pytest.approx(-0.15)
    assert table["accuracy_difference"]["full"] == pytest.approx(0.15)
    reach = 12.7062047 * 0.05 * math.sqrt(2) / math.sqrt(2)
    assert table["loss_difference_high"]["full"] == pytest.approx(-0.15 + reach)
    assert table["lock_ins"].tolist() == [1, 1]
    assert table["spectral_parameters"].tolist() == [0, 384]
    assert table["chance_loss"].iloc[0] == pytest.approx(Dyck3((4, 8)).chance_loss)


# --- resonance and phases ---


def trajectory(omegas, phases=None):
    """One head: rows are steps 0, 10, ..., columns are pairs."""
    steps, pairs = np.shape(omegas)
    table = pd.DataFrame(
        itertools.product(range(0, 10 * steps, 10), [0], [0], range(pairs)),
        columns=["step", "layer", "head", "frequency"],
    )
    return table.assign(omega=np.ravel(omegas), gain=1.0, phase=0.0 if phases is None else np.ravel(phases))


def test_resonance_is_the_mean_of_the_best_cosines():
    omega = np.array([[math.pi / 2, math.pi / 3]])
    assert resonance(omega, np.array([4.0, 6.0, 2.0])) == pytest.approx([(1 + 1 + -0.5) / 3])


def test_a_frequency_that_moves_to_a_lap_resonates():
    lap = 2 * math.pi / 10
    moved = trajectory([[0.45, 1e-4], [0.55, 1e-4], [lap, 1e-4]])
    found = resonance_over_training(moved, [0, 10, 20])
    turning = found[found["pairs"] == "turning"].set_index("step")["resonance"]
    assert turning[0] == pytest.approx((math.cos(4.5) + math.cos(9.0)) / 2)
    assert turning[20] == pytest.approx(1.0)
    everything = found[found["pairs"] == "all"]["resonance"]
    assert everything.min() > 0.999  # the slow pair does it from the start
    gain = resonance_gain(moved, [10, 20], draws=400).set_index("pairs")
    down = 0.45 - (lap - 0.45)
    other = (math.cos(10 * down) + math.cos(20 * down)) / 2 - turning[0]
    up = 1.0 - turning[0]
    assert gain["gain"]["turning"] == pytest.approx(up)
    # 400 fair coins between two values: within four standard errors of their mean.
    assert gain["random_mean"]["turning"] == pytest.approx((up + other) / 2, abs=4 * abs(up - other) / 2 / 20)
    assert gain["excess"]["turning"] == pytest.approx(up - gain["random_mean"]["turning"])
    assert gain["percentile"]["turning"] == 1.0
    assert gain["gain"]["all"] < 0.001


def test_what_does_not_move_gains_nothing():
    found = resonance_gain(trajectory([[0.5, 0.1]] * 2), [10])
    assert not found[["gain", "random_mean", "random_sd", "excess"]].to_numpy().any()
    assert found["percentile"].isna().all()
    with pytest.raises(ValueError, match="at least one above 0"):
        resonance_gain(trajectory([[0.5]] * 2), [0])


def test_phase_drift_by_hand():
    table = phase_drift(trajectory([[0.1] * 4] * 2, [[1.0, -1.0, 1.0, -1.0], [1.0, 2.0, 3.0, 2.0]]))
    first, last = table.to_dict("records")
    assert (first["mean_abs"], first["start_abs"], first["drift"], first["zigzag"]) == (1.0, 1.0, 0.0, 1.0)
    assert (last["mean_abs"], last["start_abs"], last["drift"], last["zigzag"]) == (2.0, 1.0, 2.0, 0.5)
    level = phase_drift(trajectory([[0.1] * 4], [[1.0, 1.0, 2.0, 1.0]]))
    assert level["zigzag"].tolist() == [0.5]  # no increment, no turn
    assert math.isnan(phase_drift(trajectory([[0.1] * 3]))["zigzag"].iloc[0])
    noise = np.random.default_rng(0).normal(size=(1, 20_000))
    # 2/3 for independent noise; 20,000 neighbouring triples have a standard error below 0.004.
    assert phase_drift(trajectory(np.ones_like(noise), noise))["zigzag"].iloc[0] == pytest.approx(2 / 3, abs=0.015)


def test_depth_manifold_by_covariance():
    built = model("full", config=replace(SMALL, n_ctx=32))
    table = depth_manifold(built, depth=5, n_words=6, seed=2)
    assert len(table) == 2 * 4 * 30
    words = Dyck3((5, 5)).sample(6, generator(2)).tokens
    with torch.no_grad():
        z = built.head_outputs(words)[1][:, 2, 1:6].double().numpy()  # words depth d_head
    here = table[(table["layer"] == 1) & (table["head"] == 2)]
    flat = z.reshape(30, -1)
    values, vectors = np.linalg.eigh(np.cov(flat.T, ddof=0))
    assert here["explained"].iloc[0] == pytest.approx(values[-2:].sum() / values.sum())
    for place, name in ((-1, "pc1"), (-2, "pc2")):
        expected = (flat - flat.mean(0)) @ vectors[:, place]
        agreement = np.corrcoef(here[name], expected)[0, 1]
        assert abs(agreement) == pytest.approx(1.0, abs=1e-6)
        assert here[name].std(ddof=0) == pytest.approx(math.sqrt(values[place]), rel=1e-6)
    by_depth = [here[here["depth"] == depth].index for depth in range(1, 6)]
    assert [len(index) for index in by_depth] == [6] * 5
    within = sum(((z[:, depth] - z[:, depth].mean(0)) ** 2).sum() for depth in range(5))
    total = ((flat - flat.mean(0)) ** 2).sum()
    assert here["between"].iloc[0] == pytest.approx(1 - within / total)
    np.testing.assert_array_equal(here["depth"], list(range(1, 6)) * 6)


# --- folders and experiments ---


def test_a_folder_gives_back_what_was_written(tmp_path):
    folder = open_run_folder(tmp_path / "runs", {"a": [1, 2]}, command="x")
    tables = {
        "empty": pd.DataFrame(columns=["step", "omega"]).astype({"step": "int64", "omega": "float64"}),
        "full": pd.DataFrame({"step": [1, 2], "loss": [0.5, math.nan], "name": ["a", "b"]}),
        "other": pd.DataFrame({"step": [7], "layer": [3]}),
    }
    folder.write("one", tables, seed=4)
    found = folder.read("one")
    assert found is not None
    assert list(found) == list(tables)
    for name, table in tables.items():
        pd.testing.assert_frame_equal(found[name], table)
    attrs = read_table(folder.pieces.path / "one.parquet").attrs
    assert (attrs["command"], attrs["seed"], attrs["run"]) == ("x", 4, "one")
    assert set(attrs["versions"]) == {"tlspectral", "python", "torch"}
    assert folder.read("two") is None


def test_a_folder_of_other_settings_is_refused(tmp_path):
    folder = open_run_folder(tmp_path / "runs", {"a": 1}, command="")
    with pytest.raises(IncompatibleCheckpoint, match="made with other settings"):
        open_run_folder(folder.pieces.path, {"a": 2}, command="")
    replace(folder, pieces=replace(folder.pieces, key="other")).write("one", {"t": pd.DataFrame({"x": [1]})}, seed=0)
    with pytest.raises(IncompatibleCheckpoint, match="made with other settings"):
        folder.read("one")
    (folder.pieces.path / "two.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(IncompatibleCheckpoint, match="not a finished piece"):
        folder.read("two")
    with pytest.raises(IncompatibleCheckpoint, match=r"holds files but no settings\.json"):
        open_run_folder(tmp_path, {"a": 1}, command="")
    manifest = folder.pieces.path / "settings.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "versions": {"torch": "0.1"}}))
    with pytest.raises(IncompatibleCheckpoint, match="other versions"):
        open_run_folder(folder.pieces.path, {"a": 1}, command="")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("finished")
    experiments.run_experiment("table1", output, languages=TINY, command="once")
    return output


def test_an_interrupted_experiment_ends_with_the_same_files(tmp_path, monkeypatch):
    real, calls = language_runs.train_on_language, itertools.count()
    schedule = replace(TINY, plans=(MODULO_PLAN,), seeds=(0,))
    finished, tmp_path = tmp_path / "at_once", tmp_path / "continued"
    experiments.run_experiment("table1", finished, languages=schedule, command="once")

    def interrupted(run, schedule):
        if next(calls) == 12:  # of 10 tuning runs and 5 that are reported
            raise KeyboardInterrupt
        return real(run, schedule)

    monkeypatch.setattr(language_runs, "train_on_language", interrupted)
    with pytest.raises(KeyboardInterrupt):
        experiments.run_experiment("table1", tmp_path, languages=schedule, command="once")
    assert len(list((tmp_path / "language_runs").glob("*.parquet"))) == 12
    monkeypatch.setattr(language_runs, "train_on_language", real)
    experiments.run_experiment("table1", tmp_path, languages=schedule, command="once")
    names = sorted(path.relative_to(finished) for path in finished.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(names) == 1 + 15 + 4
    for name in names:
        assert (finished / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_table1_compares_all_arms_on_the_same_data(finished):
    runs, table, rates, losses = (
        read_table(finished / f"{name}.parquet") for name in ("table1_runs", "table1", "learning_rates", "losses")
    )
    assert table["arm"].tolist() == list(ARMS)
    assert set(table["language"]) == {"dyck3"}
    assert len(runs) == 10
    assert set(rates["seed"]) == {100}
    assert rates.groupby(["language", "arm"])["chosen"].sum().tolist() == [1] * 5
    assert rates.groupby(["language", "arm"]).size().tolist() == [2] * 5
    # The same weights and the same first batch: the first loss is that of the standard arm, to the bit.
    first = losses[losses["step"] == 1].groupby(["language", "seed"])["loss"]
    assert (first.nunique() == 1).all()
    assert first.first().nunique() == 2
    assert table.attrs["command"] == "once"
    assert table.attrs["seeds"] == [0, 1]


def test_other_experiments_read_the_runs_of_table1(finished, monkeypatch):
    """They train what is new, the noisy arms and the control, and nothing again."""
    trained_names = []
    real = language_runs.train_on_language

    def recorded(run, schedule):
        trained_names.append(run.name)
        return real(run, schedule)

    monkeypatch.setattr(language_runs, "train_on_language", recorded)
    experiments.run_experiment("structure-gap", finished, languages=TINY)
    assert not trained_names
    gap = read_table(finished / "structure_gap.parquet")
    assert gap["size"].tolist() == [3, 5] * 5
    assert gap["trained"].tolist() == [True, False] * 5
    beyond = read_table(finished / "structure_gap_beyond.parquet")
    assert beyond["arm"].tolist() == [arm for arm in ARMS if arm != "standard"]

    experiments.run_experiment("resonance", finished, languages=TINY)
    assert len(trained_names) == 2 * 2
    assert all("full_noise" in name for name in trained_names)
    gains = read_table(finished / "resonance_runs.parquet")
    assert not gains.loc[gains["arm"] == "placebo", "gain"].any()
    assert (gains.loc[(gains["arm"] == "omega") & (gains["pairs"] == "turning"), "gain"] != 0).any()
    assert set(gains.loc[gains["arm"] == "bifocal", "head"]) == {0, 1}
    drift = read_table(finished / "phase_drift_runs.parquet")
    assert "omega" not in set(drift["arm"])
    assert (drift.loc[drift["arm"] == "full", "start_abs"] == 0).all()
    shared = drift[drift["arm"] == "full_noise_shared"]
    # Near a thousandth: 8e-4 is the mean of |N(0, 1e-3)|; without noise it is 0.
    assert 3e-4 < shared["start_abs"].mean() < 1.5e-3
    # The tables over training end where those of the last step stand.
    for steps, last, by, column in (
        ("phase_steps", drift, ["arm"], "mean_abs"),
        ("resonance_steps", gains.rename(columns={"end": "resonance"}), ["arm", "pairs"], "resonance"),
    ):
        table = read_table(finished / f"{steps}.parquet")
        found = table[table["step"] == table["step"].max()].set_index(by)[column].sort_index()
        pd.testing.assert_series_equal(found, last.groupby(by)[column].mean().sort_index())

    experiments.run_experiment("manifold", finished, languages=TINY)
    manifold = read_table(finished / "manifold.parquet")
    assert manifold["arm"].unique().tolist() == list(ARMS)
    # Trained again from its run: the models of a seed differ, so their arms do.
    assert manifold.groupby("arm")["between"].first().nunique() == 5

    trained_names.clear()
    experiments.run_experiment("memorisation", finished, languages=TINY)
    assert len(trained_names) == 5
    assert all(name.startswith("memorise-") for name in trained_names)


def test_memorisation_sees_the_same_sequences_again():
    frozen = replace(TINY, rates=(0.0,), steps=3)
    fixed, fresh = (
        language_runs.train_on_language(LanguageRun("dyck3", "standard", 0.0, 0, memorise=memorise), frozen)
        for memorise in (True, False)
    )
    assert fixed["losses"]["loss"].nunique() == 1
    assert fresh["losses"]["loss"].nunique() == 3


def test_held_out_sequences_are_fresh():
    """Training, held-out and tuning data of a bio language, where two equal draws are impossible, share no row."""
    plan = LanguagePlan(BioRotation((20, 30)), 8, 8, (), 0, 4)
    seen = []
    sample = BioRotation.sample

    def recorded(self, n_sequences, stream):
        batch = sample(self, n_sequences, stream)
        seen.extend(map(tuple, batch.tokens.tolist()))
        return batch

    patch = pytest.MonkeyPatch()
    patch.setattr(BioRotation, "sample", recorded)
    with patch.context():
        for seed in (0, 1, 100):
            schedule = LanguageSchedule((plan,), steps=2)
            language_runs.train_on_language(LanguageRun("bio_rotation", "standard", 1e-3, seed), schedule)
    patch.undo()
    assert len(seen) == 3 * (2 * 8 + 8)
    assert len(set(seen)) == len(seen)


def test_the_full_schedule_is_as_documented():
    assert (FULL.steps, len(FULL.seeds), len(FULL.rates)) == (400, 5, 3)
    assert FULL.tuning_seed not in FULL.seeds
    assert FULL.plan("dyck3").language == Dyck3((4, 8))
    assert {one.sizes for one in FULL.plan("dyck3").by_size} == {(depth, depth) for depth in range(4, 25)}
    lengths = [one.sizes[0] for one in FULL.plan("bio_rotation").by_size]
    assert (min(lengths), max(lengths)) == (100, 400)
    longest = max(int(one.sample(1, generator()).tokens.shape[1]) for one in FULL.plan("bio_rotation").by_size)
    assert longest <= LlamaConfig(7).n_ctx


def test_the_command(tmp_path, monkeypatch):
    import typer

    app = typer.Typer()
    app.command()(experiments.main)
    monkeypatch.setattr(experiments, "QUICK", replace(TINY, plans=(MODULO_PLAN,), rates=(1e-3,), seeds=(0,)))
    done = CliRunner().invoke(app, ["memorisation", "--quick", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    table = read_table(tmp_path / "memorisation.parquet")
    assert table["arm"].tolist() == list(ARMS)
    assert table.attrs["command"] == "python -m tlspectral.training.spectral.experiments memorisation --quick"
    refused = CliRunner().invoke(app, ["figure9", "-o", str(tmp_path)])
    assert refused.exit_code == 2
    assert "is no experiment" in " ".join(refused.output.replace("│", " ").split())


@pytest.mark.slow
def test_processes_change_nothing(finished, tmp_path):
    experiments.run_experiment("table1", tmp_path, languages=TINY, command="once", n_jobs=2)
    for path in tmp_path.glob("language_runs/*"):
        assert path.read_bytes() == (finished / "language_runs" / path.name).read_bytes()


# --- code ---


class Letters:
    """A tokenizer of 32 tokens."""

    bos_token_id = 1

    def __call__(self, text, **_):
        return type("Encoding", (), {"input_ids": [ord(letter) % 32 for letter in text]})()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of 60 files, some too short."""
    folder = tmp_path / "toy_source_package"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    for number in range(60):
        place = folder / "inner" if number % 2 else folder
        place.joinpath(f"module{number}.py").write_text(f"value{number} = {number}\n" * (1 if number % 7 == 0 else 20))
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder.name


def test_files_are_split_by_their_path(package, tmp_path):
    split = source_files(package)
    train, held_out = ([path.relative_to(tmp_path).as_posix() for path in split[name]] for name in split)
    assert len(train) + len(held_out) == 61
    assert not set(train) & set(held_out)
    assert 1 <= len(held_out) <= 15
    assert source_files(package) == split
    for path in [*train, *held_out]:
        inside = path.removeprefix(f"{package}/")
        assert (int(hashlib.sha256(inside.encode()).hexdigest(), 16) % 10 == 0) == (path in held_out)
    (tmp_path / package / "another.py").write_text("")
    again = source_files(package)
    assert set(split["train"]) <= set(again["train"])
    assert set(split["held_out"]) <= set(again["held_out"])
    with pytest.raises(ValueError, match="not installed as a package of files"):
        source_files("no_such_package_at_all")


def test_rows_are_pieces_of_their_files(package):
    files = source_files(package)["train"]
    rows = code_rows(Letters(), files, 20, length=40, start_token=1, seed=3)
    assert rows.shape == (20, 40)
    assert set(rows[:, 0].tolist()) == {1}
    long_enough = [path for path in files if len(path.read_text()) >= 39]
    starts = set()
    for row, path in zip(rows, long_enough, strict=False):
        ids = Letters()(path.read_text()).input_ids
        found = [start for start in range(len(ids) - 38) if ids[start : start + 39] == row[1:].tolist()]
        assert found
        starts.add(found[0])
    assert len(starts) > 3
    with pytest.raises(ValueError, match="ask for fewer or shorter rows"):
        code_rows(Letters(), files, 1000, length=40, start_token=1)


def test_a_frozen_model_adapts_and_is_left_as_it_was(package, tmp_path):
    model = tls.load_model("tiny-rope")
    model.tokenizer = Letters()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    flags = {name: value.requires_grad for name, value in model.named_parameters()}
    schedule = code_adaptation.CodeSchedule(
        package=package, steps=4, batch_size=4, length=24, train_files=16, held_out=3, evaluate_every=2,
        learning_rate=0.03, warmup_steps=1, log_every=3,
    )  # fmt: skip
    folder = open_run_folder(tmp_path / "runs", schedule.settings(), command="")
    found = code_adaptation.code_experiment(folder, schedule, load=lambda _: model)
    assert {path.stem for path in folder.pieces.path.glob("*.parquet")} == set(code_adaptation.CODE_ARMS)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])
        assert value.requires_grad == flags[name]
        assert value.grad is None
    losses = found["code_losses"]
    assert losses["step"].tolist() == [0, 2, 4] * 3
    start = losses[losses["step"] == 0]
    assert start["loss"].nunique() == 1
    rows = code_rows(Letters(), source_files(package)["held_out"], 3, length=24, start_token=1, seed=0)
    intact = tls.language_loss(model, rows)
    # Measured: 1e-8, the same losses by another route in float32.
    assert start["loss"].iloc[0] == pytest.approx(intact.value, abs=1e-5)
    movement = found["code_movement"].groupby("arm")[["log_ratio", "gain", "phase"]].agg(lambda x: x.abs().max())
    assert movement["log_ratio"]["placebo"] == 0.0
    assert movement["log_ratio"]["omega"] > 0.001
    assert (movement["gain"]["omega"], movement["phase"]["omega"]) == (1.0, 0.0)
    assert movement["phase"]["full"] > 0.01
    effects = found["code_effects"].set_index(["arm", "reference"])["value"]
    ends = losses[losses["step"] == 4].set_index("arm")["loss"]
    assert effects["full", "intact"] == pytest.approx(ends["full"] - start["loss"].iloc[0], abs=1e-12)
    assert effects["full", "placebo"] == pytest.approx(ends["full"] - ends["placebo"], abs=1e-12)
    # Four steps on the same kind of text: measured -0.037; a step in the wrong direction raises the loss.
    assert effects["full", "intact"] < -0.01
    by = found["code_by_frequency"]
    full = found["code_movement"].query("arm == 'full' and frequency == 3")
    row = by.query("arm == 'full' and frequency == 3").iloc[0]
    assert row["log_ratio_abs"] == pytest.approx(full["log_ratio"].abs().mean())
    assert row["log_gain_abs"] == pytest.approx(np.log(full["gain"]).abs().mean())
    assert row["wavelength"] == pytest.approx(2 * math.pi / full["omega_start"].iloc[0])
    np.testing.assert_allclose(full["log_ratio"], np.log(full["omega"] / full["omega_start"]))


def test_runs_that_are_there_are_not_made_again(tmp_path):
    folder = open_run_folder(tmp_path / "runs", {}, command="")
    made = []

    def make():
        made.append(1)
        assert torch.get_num_threads() == 1
        return {"t": pd.DataFrame({"x": [len(made)]})}

    first = finish_runs(folder, {"one": (0, make)})
    again = finish_runs(folder, {"one": (0, make), "two": (0, make)})
    assert len(made) == 2
    assert [tables["t"]["x"].item() for tables in again.values()] == [1, 2]
    assert first["one"]["t"].equals(again["one"]["t"])
