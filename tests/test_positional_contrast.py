"""Contrasts of profiles: paired by head or by draw, with the interval of their formula, and what is not compared."""

from dataclasses import dataclass

import numpy as np
import pytest
import scipy.stats
import zoo
from block_marks import Marks
from described import assert_described

import tlspectral as tls
from tlspectral.positional import profile_contrast

MARKS = {"n_blocks": 5, "queries": 3, "seed": 4}


@dataclass(frozen=True)
class Others(Marks):
    """Other lists under another name."""

    def draw(self, seed):
        return super().draw(seed + 1)


def profile(name="llama", task=None, **options):
    model = zoo.shared("bridge", name)
    return tls.positional_symbolic_profile(model, task or Marks(), **{**MARKS, "draws": 3, "mode": "key", **options})


def test_two_tasks_on_one_model_are_paired_head_by_head():
    a, b = profile("smollm3"), profile("smollm3", Others())
    table = profile_contrast(a, b)
    assert_described(table)
    for row in table.to_dict("records"):
        differences = a.heads[row["score"]] - b.heads[row["score"]]
        assert row["difference"] == pytest.approx(differences.mean(), abs=1e-12)
        assert row["difference"] == pytest.approx(row["a"] - row["b"], abs=1e-12)
        # With as many heads in each layer, leaving layers out gives the t interval of the layers' means.
        by_layer = differences.groupby(a.heads["layer"]).mean()
        half = scipy.stats.t.ppf(0.975, len(by_layer) - 1) * by_layer.sem()
        assert (row["low"], row["high"]) == pytest.approx((by_layer.mean() - half, by_layer.mean() + half), abs=1e-12)
        assert (row["n"], row["paired_by"]) == (4, "head, over layers")
    itself = profile_contrast(a, a)
    assert (itself[["difference", "low", "high"]] == 0).all(axis=None)


def test_two_models_on_one_task_are_paired_draw_by_draw():
    a, b = profile("llama"), profile("qwen3")
    table = profile_contrast(a, b)
    for row in table.to_dict("records"):
        means = [one.draws.groupby("draw")[row["score"]].mean() for one in (a, b)]
        differences = means[0] - means[1]
        half = scipy.stats.t.ppf(0.975, 2) * differences.sem()
        assert row["difference"] == pytest.approx(differences.mean(), abs=1e-12)
        assert row["high"] - row["low"] == pytest.approx(2 * half, abs=1e-12)
        assert (row["n"], row["paired_by"]) == (3, "draw")
    assert np.isfinite(table[["low", "high", "pvalue"]]).all(axis=None)
