"""Contrasts of scores: paired by head or by draw, with the interval of their formula, and what is not compared."""

from dataclasses import dataclass

import numpy as np
import pytest
import scipy.stats
import zoo
from block_marks import Marks

import tlspectral as tls
from tlspectral.positional import positional_contrast


@dataclass(frozen=True)
class Others(Marks):
    """Other lists under another name."""

    def draw(self, seed):
        return super().draw(seed + 1)


def scored(name="llama", kind=Marks):
    task = kind(queries=3, draws=3)
    return tls.positional_symbolic(zoo.shared("bridge", name), task, mode="key", by="draw", seed=4)


def test_two_tasks_on_one_model_are_paired_head_by_head():
    a, b = scored("smollm3"), scored("smollm3", Others)
    table = positional_contrast(a, b)
    for row in table.to_dict("records"):
        means = [one.groupby(["layer", "head"])[row["score"]].mean() for one in (a, b)]
        differences = means[0] - means[1]
        assert row["difference"] == pytest.approx(differences.mean(), abs=1e-12)
        assert row["difference"] == pytest.approx(row["a"] - row["b"], abs=1e-12)
        # With as many heads in each layer, leaving layers out gives the t interval of the layers' means.
        by_layer = differences.groupby("layer").mean()
        half = scipy.stats.t.ppf(0.975, len(by_layer) - 1) * by_layer.sem()
        assert (row["low"], row["high"]) == pytest.approx((by_layer.mean() - half, by_layer.mean() + half), abs=1e-12)
        assert (row["n"], row["paired_by"]) == (4, "head, over layers")
    itself = positional_contrast(a, a)
    assert (itself[["difference", "low", "high"]] == 0).all(axis=None)


def test_two_models_on_one_task_are_paired_draw_by_draw():
    a, b = scored("llama"), scored("qwen3")
    table = positional_contrast(a, b)
    for row in table.to_dict("records"):
        means = [one.groupby("draw")[row["score"]].mean() for one in (a, b)]
        differences = means[0] - means[1]
        half = scipy.stats.t.ppf(0.975, 2) * differences.sem()
        assert row["difference"] == pytest.approx(differences.mean(), abs=1e-12)
        assert row["high"] - row["low"] == pytest.approx(2 * half, abs=1e-12)
        assert (row["n"], row["paired_by"]) == (3, "draw")
    assert np.isfinite(table[["low", "high", "pvalue"]]).all(axis=None)
