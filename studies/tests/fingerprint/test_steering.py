"""Steering: heads that begin symmetric or real, and the words of the schedule for runs that are made up."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from constrained_preset import TINY
from tlspectral_studies.common import AttentionOnlyTransformer
from tlspectral_studies.fingerprint.constrained import PRESETS, constrained_grid
from tlspectral_studies.fingerprint.constrained.measures import spectral_columns

STORED = Path(__file__).parents[3] / "docs/results/constrained"


@pytest.fixture
def steering(import_benchmark):
    return import_benchmark("steering")


@pytest.mark.parametrize("positions", ["ape", "rope"])
def test_one_head_begins_as_the_ban_would_leave_it(steering, positions):
    arm = steering.arms_of(positions)["one head"]
    config = PRESETS["quick"].config_of(arm)
    plain, changed = (AttentionOnlyTransformer(config, seed=1) for _ in range(2))
    with torch.no_grad():
        arm.initial_weights(changed)
    shares = spectral_columns(changed, folded=False)[steering.SHARE[positions]]
    before = spectral_columns(plain, folded=False)[steering.SHARE[positions]]
    assert before[0, 0] > 0.45  # a random head: .71 for dir_frac, .5 for rope_imag_frac
    assert shares[0, 0] < 1e-6  # measured: 1e-9 or 0
    shares[0, 0] = before[0, 0]
    np.testing.assert_array_equal(shares, before)  # no other head is changed
    for name, value in changed.state_dict().items():
        of_others = (plain.state_dict()[name] == value).reshape(-1) if name[-3:] not in ("W_Q", "W_K") else None
        assert of_others is None or of_others.all(), name


def made_up(steering, steps, shares):
    """Five runs of each arm around given steps and shares, by kind; L0H0 is the head of all one-head runs."""
    rows = []
    for positions in steering.SHARE:
        for kind in steering.KINDS:
            for seed in range(5):
                share = shares[kind] + 0.001 * seed
                row = {"positions": positions, "kind": kind, "arm": kind, "seed": seed, "last_step": 4000}
                row |= {"formed_loss": steps[kind] + 25 * seed, "formed_both": steps[kind] + 25 * seed}
                rows.append(row | {"share": share, "share_1300": share, "head": f"L0H{0 if kind == 'one head' else 1}"})
    return pd.DataFrame(rows)


STEPS = {"free": 400, "banned": 1100, "assisted": 600, "one head": 200}
SHARES = {"free": 0.7, "banned": 0.02, "assisted": 0.1, "one head": 0.1}


@pytest.mark.slow
def test_the_words_of_the_schedule_follow_the_numbers(steering):
    def said(runs):
        return steering.verdicts(runs, steering.tests_of(runs))[0]

    runs = made_up(steering, STEPS, SHARES)
    tests = steering.tests_of(runs)
    # Ten separations of five against five, and five of five at one in four; Holm by hand.
    assert tests["p"].tolist() == pytest.approx([*[1 / 252] * 5, 0.25**5] * 2)
    assert tests["holm"].tolist() == pytest.approx([*[10 / 252] * 5, 12 * 0.25**5] * 2)
    assert "steering is cheaper; it stays (5 of 5 below 0.362" in said(runs)
    assert "FP's sentence is of another treatment; one head: accelerates" in said(runs)
    forgotten = said(made_up(steering, STEPS, {**SHARES, "assisted": 0.69}))
    assert "steering is cheaper; it does not stay (0 of 5" in forgotten
    assert "steering is as dear" in said(made_up(steering, {**STEPS, "assisted": 1100}, SHARES))
    between = made_up(steering, {**STEPS, "assisted": 900, "banned": 910, "one head": 401}, SHARES)
    between.loc[between["kind"] == "assisted", "formed_both"] = [400, 425, 1000, 1000, 1000] * 2
    assert "steering is not decided" in said(between)
    assert "acceleration not shown" in said(between)
    # A run that did not form counts as late, and has no head.
    never = runs.copy()
    never.loc[(never["kind"] == "assisted") & (never["seed"] == 0), ["formed_both", "share"]] = [np.nan, 0.9]
    assert steering.values(never, "ape", "assisted", "formed_both")[0] == 4000
    assert len(steering.values(never, "ape", "assisted", "share")) == 4


def test_the_page_has_the_rows_of_the_stored_runs(steering):
    page = (STORED.parent / "constrained.md").read_text(encoding="utf-8")
    rows = steering.page_rows(pd.read_csv(STORED / "steering.csv"))
    assert len(rows) == 8
    assert [row for row in rows if row not in page] == []
    said, text = steering.paired(pd.read_csv(STORED / "steering.csv")), " ".join(page.split())
    for line, quoted in (
        (
            "rope, formed_loss: assisted less banned -140 (-204 to -76), earlier in 5 of 5",
            "140 steps (76 to 204), in 5 of 5",
        ),
        ("rope, formed_both: assisted less banned 455 (-1141 to 2051), earlier in 3 of 5", "455 later (-1141 to 2051)"),
    ):
        assert line in said
        assert quoted in text


@pytest.fixture
def windows(import_benchmark):
    return import_benchmark("steering_windows")


def test_the_page_has_the_tables_of_the_windows(windows):
    page = (STORED.parent / "constrained.md").read_text(encoding="utf-8")
    rows = pd.read_csv(STORED / "steering_windows.csv")
    assert rows.groupby("arm", sort=False)["seed"].apply(list).to_dict() == {
        arm.name: [0, 1, 2, 3, 4] for arm in windows.trained_arms()
    }
    tables = windows.page_tables(windows.beside_stored(rows)).split("\n\n")
    assert [len(table.splitlines()) for table in tables] == [2 + 6, 2 + 6]
    assert all(table in page for table in tables)


def test_the_first_head_begins_as_a_previous_token_head_and_the_bonus_leaves_m_a_alone(windows):
    config = PRESETS["quick"].config_of(windows.trained_arms()[-1])
    model = AttentionOnlyTransformer(config, seed=1)
    with torch.no_grad():
        windows.previous_first_head(model, 20)
    assert spectral_columns(model, folded=False)["dir_frac_raw"][0, 0] < 1e-6  # symmetric; measured 0
    tokens = torch.randint(0, config.d_vocab, (8, config.n_ctx), generator=torch.Generator().manual_seed(1))
    _, (first, _) = model.with_attention(tokens)
    prev = first.pattern.diagonal(-1, dim1=-2, dim2=-1).mean((0, -1))
    assert prev[0] > 3 * prev[1:].max()  # after 20 of 200 steps; a random head has some .04
    attention = model.layers[1].attn
    w_q, w_k = attention.W_Q[2], attention.W_K[2]
    windows.symmetric_bonus(model).backward()
    # d bonus / d M is the symmetric part of M, times -2 / ||M||^2 and the mean over 8 heads; by the chain to W_Q.
    m = w_q @ w_k.T
    expected = -2 / (m**2).sum() / 8 * ((m + m.T) / 2) @ w_k
    torch.testing.assert_close(attention.W_Q.grad[2], expected, rtol=1e-4, atol=1e-6)


def made_windows(windows, steps, shares):
    rows = []
    for arm, step in steps.items():
        for seed in range(5):
            row = {"arm": arm, "seed": seed, "formed_loss": step + 10 * seed, "formed_both": step + 10 * seed}
            rows.append(row | {"last_step": 4000, "head": "L0H0", "prev": 0.8, "share": shares[arm] + 0.001 * seed})
    return windows.verdicts(pd.DataFrame(rows)).set_index("arm")


def test_the_words_of_the_windows_follow_the_numbers(windows):
    names = [windows.window_arm(steps) for steps in windows.WINDOWS]
    steps = dict.fromkeys(names, 600) | {
        windows.FREE: 400,
        windows.BANNED: 1100,
        windows.BONUS: 500,
        windows.PREVIOUS: 300,
    }
    shares = dict.fromkeys(names, 0.6) | {
        windows.FREE: 0.7,
        windows.BANNED: 0.02,
        windows.BONUS: 0.2,
        windows.PREVIOUS: 0.1,
    }
    found = made_windows(windows, steps, shares)
    assert set(found.loc[names, "formed_loss"]) == {"cheaper"}
    assert set(found.loc[names, "stays"]) == {"it does not stay"}
    # Five against five at the least p: Holm over four windows, over five tests of the two arms without a ban.
    assert found.loc[names, "formed_both_p"].tolist() == pytest.approx([4 / 252] * 4)
    assert found.loc[windows.BONUS, "formed_loss_p"] == pytest.approx(5 / 252)
    assert found["FP"].to_dict() == dict.fromkeys([*names, windows.PREVIOUS], "") | {windows.BONUS: "holds"}
    assert found.loc[windows.PREVIOUS, "formed_loss"] == "accelerates"
    forgotten = made_windows(windows, steps, shares | {windows.BONUS: 0.69})
    assert forgotten.loc[windows.BONUS, "FP"] == "does not hold"
    dear = made_windows(windows, steps | {names[0]: 2000, windows.PREVIOUS: 400}, shares)
    assert (dear.loc[names[0], "formed_both"], dear.loc[windows.PREVIOUS, "formed_loss"]) == ("dearer", "open")


@pytest.mark.slow
def test_rows_of_trained_runs(steering, tmp_path, monkeypatch):
    monkeypatch.setattr(steering, "ASSISTED", 2)
    monkeypatch.setattr(steering, "BEHIND", 2)
    arms = [arm for positions in steering.SHARE for arm in steering.arms_of(positions).values()]
    assert {arm.name: arm.penalty_until for arm in arms if arm.penalty_until} == {"ape_assisted": 2, "rope_assisted": 2}
    tables = constrained_grid(tmp_path, replace(TINY, name="steering"), arms=arms, seeds=2)
    runs, tracks = steering.runs_of(tables)
    assert len(runs) == 16
    heads = tables["heads"].set_index(["arm", "seed", "step", "name"]).sort_index()
    for run in runs.itertuples():
        column = steering.SHARE[run.positions]
        at_end = heads.loc[(run.arm, run.seed, 6)]
        assert run.head == at_end["prev"].idxmax()
        assert run.share == at_end.loc[run.head, column]
        early = heads.loc[(run.arm, run.seed, 4)]
        assert (run.head_1300, run.share_1300) == (early["prev"].idxmax(), early.loc[early["prev"].idxmax(), column])
        assert run.mean_share_300 == pytest.approx(heads.loc[(run.arm, run.seed, 2), column].mean())
        assert (run.L0H0_share_0 < 1e-6) == (run.kind == "one head")
    assert set(tracks["step"]) == {0}


@pytest.mark.slow
def test_seeds_that_have_rows_are_not_trained_again(windows, tmp_path, monkeypatch):
    output, preset = tmp_path / "rows.csv", replace(TINY, name="windows")
    grid, trained = windows.constrained_grid, []

    def noted(folder, preset, *, arms, seeds):
        trained.extend(seeds)
        return grid(folder, preset, arms=arms, seeds=seeds)

    monkeypatch.setattr(windows, "constrained_grid", noted)
    windows.train_missing(tmp_path / "runs", output, 2, preset)
    whole = pd.read_csv(output)
    arms = [arm.name for arm in windows.trained_arms()]
    assert whole["arm"].tolist() == [arm for arm in arms for _ in range(2)]
    assert whole["seed"].tolist() == [0, 1] * len(arms)
    # Seed 1 loses a row: it is trained again, and the rows of seed 0 stay as they are, here with another share.
    marked = whole.drop(index=3).assign(share=whole["share"].where(whole["seed"] == 1, 0.125))
    marked.to_csv(output, index=False)
    windows.train_missing(tmp_path / "again", output, 2, preset)
    assert trained == [0, 1, 1]
    again = pd.read_csv(output)
    assert (again.loc[again["seed"] == 0, "share"] == 0.125).all()
    pd.testing.assert_frame_equal(again[again["seed"] == 1], whole[whole["seed"] == 1])


def test_what_the_page_says_of_the_windows(windows):
    runs = windows.beside_stored(pd.read_csv(STORED / "steering_windows.csv"))
    table = windows.verdicts(runs).set_index("arm")
    names = [windows.window_arm(steps) for steps in windows.WINDOWS]
    assert (table["formed"] == 5).all()
    for column in windows.CRITERIA:
        assert set(table.loc[[*names, windows.BONUS], column]) == {"cheaper"}
        assert table.loc[windows.PREVIOUS, column] == "accelerates"
        assert table.loc[names, f"{column}_p"].tolist() == pytest.approx([4 / 252] * 4)  # the least p
    assert set(table.loc[names, "stays"]) == {"it does not stay"}
    assert (table.loc[windows.BONUS, "stays"], table.loc[windows.BONUS, "FP"]) == ("it stays", "holds")
    assert [found["mean"] for found in table.loc[names, "formed_loss_less_free"]] == [190, 235, 280, 330]
    assert [found["mean"] for found in table.loc[names, "formed_loss_less_banned"]] == [-515, -470, -425, -375]
    assert all(found["low"] > 1.3 for found in table.loc[names, "formed_loss_ratio"])
    shares = {arm: windows.by_seed(runs, arm, "share").mean() for arm in (windows.FREE, windows.BANNED)}
    assert [round(share, 2) for share in shares.values()] == [0.68, 0.02]
    said = windows.other_readings(runs)
    assert len(said) == 12
    assert all("in 5 of 5 seeds; p = 0.0040 without Holm" in line for line in said)
    assert all(float(line.split(", ")[-1].split()[0]) < 0.001 for line in said)
