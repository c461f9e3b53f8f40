"""What is computed from a part of a run or summed over it, beside the whole run."""

import numpy as np
import pytest
import torch
import zoo
from ablation_runs import recorded
from described import assert_described

import tlspectral as tls
from tlspectral.heads import relative_position_kernel
from tlspectral.hooks import parts
from tlspectral.hooks.sweeps import sweep_jobs
from tlspectral.models.running.key_value_cache import prefill
from tlspectral.models.running.partial_runs import begins_whole, intact_run
from tlspectral.models.running.passes import whole_logits

from .edits import editable
from .rows import asked


@asked(encoders=True)
def a_replay_is_the_whole_forward(row):
    """At every layer, under a user's hooks in front of it, at it and behind it."""
    view, tokens, scored, seen = row.view, zoo.prompt(5, 21), slice(11, 20), {}
    hooks = [(view.hook_names(layer)["residual"], lambda x, hook: x * 1.1) for layer in (0, row.layers[-1])]
    with torch.no_grad(), row.model.hooks(fwd_hooks=hooks):
        whole = whole_logits(view, tokens)[:, scored]
        keep = lambda now, logits: seen.update({now.start: logits})  # noqa: E731
        intact = intact_run(view, tokens, scored, row.layers, batch=3, reduce=keep)
        assert sorted(seen) == [0, 3]
        for layer in row.layers:
            again = intact.replay([layer] * 2, slice(1, 3))
            # Measured: 2e-7, another batch size.
            torch.testing.assert_close(again, whole[1:3].repeat(2, 1, 1), rtol=0, atol=1e-5)
        # Copies that join at every layer, and of layers that do not follow each other: blocks run those that are there.
        for layers in ([*row.layers], [row.layers[0], *[row.layers[-1]] * 2]):
            again = intact.replay(layers, slice(1, 3))
            torch.testing.assert_close(again, whole[1:3].repeat(len(layers), 1, 1), rtol=0, atol=1e-5)
        assert [block.module.__dict__.get("forward") for block in view.blocks] == [None for _ in row.layers]
    torch.testing.assert_close(torch.cat([seen[0], seen[3]]), whole, rtol=0, atol=1e-5)


def plain_kernel(model, layer, head, tokens, farthest=20):
    """Mean kept score by offset, one loop over sequences, queries and offsets."""
    seen = recorded(model, ("scores",), tokens, [layer])
    scores, n, means = seen[layer, "scores"][:, head].double().numpy(), tokens.shape[1], []
    for back in range(min(farthest, n - 1), -1, -1):
        values = [each[i, i - back] for each in scores for i in range(back, n)]
        kept = [value for value in values if value > -1e30]
        means.append(np.mean(kept) if kept else np.nan)
    return means


@asked(lambda row: not row.delegated, every=3)
def the_kernel_is_the_mean_of_the_kept_scores(row):
    tokens = zoo.prompt(3, 24)
    found = relative_position_kernel(row.model, [(1, 2), (0, 1)], tokens)
    assert_described(found)
    assert list(found) == ["layer", "head", "name", "offset", "score", "predicted"]
    assert found["offset"].tolist() == 2 * list(range(-20, 1))
    for (layer, head), one in found.groupby(["layer", "head"]):
        # Measured: 1e-15; the mean of another offset differs by 0.1.
        np.testing.assert_allclose(one["score"], plain_kernel(row.model, layer, head, tokens), rtol=0, atol=1e-9)
    if row.name == "mistral":  # a window of 8: nothing farther is ever seen
        assert (found["score"].isna() == (found["offset"] <= -zoo.WINDOW)).all()


@asked(editable, every=9, part=("output", "antisymmetric", "long_range"))
def a_sweep_at_a_position_is_one_of_whole_runs(row, part):
    """Of prompts of unequal length, at a position of each and at their ends, scored before and behind it."""
    rows = zoo.prompt(4, 24)
    prompts = [ids[:length] for ids, length in zip(rows, (24, 22, 24, 19), strict=True)]
    probability = lambda logits, tokens, mask: logits.double().log_softmax(-1)[..., 5].mean(1)  # noqa: E731
    task = tls.Task(prompts, probability, predict=[9, -2, -1])
    removed = parts.LongRange(3) if part == "long_range" else part
    asked_for, tables, own = [], [], sweep_jobs.continued_run

    def noted(intact, first):
        asked_for.append(own(intact, first))
        return asked_for[-1]

    for continued in (noted, lambda intact, first: None):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sweep_jobs, "continued_run", continued)
            tables.append(tls.ablation_sweep(row.model, removed, task=task, at=[[5, 9, 7, 12], -1]))
    for column in ("value", "delta", "score_rms"):
        # Measured in float32: 1e-7 at most over the zoo.
        np.testing.assert_allclose(*(table[column] for table in tables), rtol=0, atol=1e-6)
    assert tables[0]["delta"].abs().max() > 5e-4
    goes_on = not begins_whole(row.view) and prefill(row.view, rows) is not None
    assert [run is not None for run in asked_for] == [goes_on] * len(asked_for)
    assert asked_for
