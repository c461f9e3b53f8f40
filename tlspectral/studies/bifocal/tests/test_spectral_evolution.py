"""Spectral Evolution: what is learned, logged, clipped and scored."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from spectral_arms import LANGUAGE, SMALL, backbone, jitter_spectral, model
from torch import nn
from zoo import generator

from tlspectral.studies.bifocal.evolution import EvolutionSettings, evolve, parameter_groups, spectral_modules
from tlspectral.studies.bifocal.formal_languages import UNSCORED, answers_of
from tlspectral.studies.bifocal.language_runs import answer_loss, score_answers


def trained(arm="full", steps=3, rate=1e-2, **changes):
    built, stream = model(arm), generator(1)
    settings = EvolutionSettings(steps=steps, learning_rate=rate, warmup_steps=1, log_every=2, **changes)
    return built, evolve(built, lambda _: answer_loss(built, LANGUAGE.sample(4, stream)), settings)


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
    assert trained("standard")[1].trajectory.empty
    assert table["step"].unique().tolist() == [0, 2, 4, 5]
    assert evolution.losses["step"].tolist() == [1, 2, 3, 4, 5]
    for layer, attention in enumerate(built.attentions()):
        for name in ("omega", "gain", "phase"):
            last = table[(table["step"] == 5) & (table["layer"] == layer)]
            logged = last.pivot_table(index="head", columns="frequency", values=name).to_numpy()
            # Measured: equal; omega is theta + (omega - theta) in float32, which may be off by a rounding of theta.
            np.testing.assert_allclose(logged, getattr(attention.spectral, name).detach(), rtol=0, atol=2e-7)


def test_a_shared_phase_is_logged_as_it_stands():
    built = model("full_noise_shared")
    stream = generator(1)
    evolution = evolve(built, lambda _: answer_loss(built, LANGUAGE.sample(4, stream)), EvolutionSettings(steps=1))
    start = evolution.trajectory[evolution.trajectory["step"] == 0]
    noise = np.concatenate([a.spectral.phase.detach().flatten() for a in model("full_noise_shared").attentions()])
    np.testing.assert_array_equal(start["phase"], noise)
    assert 3e-4 < np.abs(noise).mean() < 2e-3


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
