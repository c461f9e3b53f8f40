"""What tells work on one task from work on another: the same thing has one digest, another thing another."""

import os
import subprocess
import sys
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from beartype import beartype
from jaxtyping import Float, jaxtyped
from torch import Tensor

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.models.reading import attention_view
from tlspectral.tasks.identity import content_digest, sequences_identity, task_identity
from tlspectral.tasks.task_sequences import task_sequences

SCALE = 2.0

# Run in a process of its own: hashes of text, addresses and the place of every line are other ones there.
ELSEWHERE = """



import numpy as np, pandas as pd, torch
SCALE = 2.0
def helper(x):
    return x * SCALE
def made(answer):
    def metric(logits, tokens, mask, *, power={"a", "b", "c"}):
        return helper(logits[:, -1, answer])
    return metric
class Metric:
    def __init__(self, weights): self.weights = weights
    def __call__(self, logits, tokens, mask): return logits @ self.weights
def things():
    return [torch.arange(6).view(2, 3), {"b": {"x", "y", "z"}, "a": [1.5, None]}, made(3), Metric(torch.ones(4)),
            pd.DataFrame({"a": [1, 2], "b": ["x", None]}), np.array([1, "x"], dtype=object), torch.float16]
"""


def in_a_process(hash_seed, lines):
    code = "\n" * lines + ELSEWHERE + "\nfrom tlspectral.tasks.identity import content_digest\n"
    code += "print([content_digest(one) for one in things()])"
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.slow  # two processes that import torch
def test_two_processes_find_the_same_digests():
    assert in_a_process(1, lines=0) == in_a_process(2, lines=5)


def made(answer, scale=1.0):
    def metric(logits, tokens, mask):
        return scale * logits[:, -1, answer]

    return metric


def test_a_function_is_told_by_its_code_its_defaults_and_all_that_it_reads(monkeypatch):
    def plain(x, y=1):
        return x + y * SCALE

    spaces = {}
    for name, text in {
        "plain": "def f(x, y=1): return x + y * 2",
        "renamed": "\n\ndef f(x, y=1):\n    # a remark\n    return x + y * 2",
        "code": "def f(x, y=1): return x - y * 2",
        "constant": "def f(x, y=1): return x + y * 3",
        "default": "def f(x, y=2): return x + y * 2",
        "reads": "Z = 2\ndef f(x, y=1): return x + y * Z",
    }.items():
        spaces[name] = {"__name__": "mine"}
        exec(text, spaces[name])
    digests = {name: content_digest(space["f"]) for name, space in spaces.items()}
    assert digests["plain"] == digests["renamed"]
    assert len({*digests.values()}) == 5
    spaces["reads"]["Z"] = 3
    assert content_digest(spaces["reads"]["f"]) != digests["reads"]
    before = content_digest(plain)
    monkeypatch.setitem(globals(), "SCALE", 4.0)
    assert content_digest(plain) != before
    assert content_digest(made(3)) == content_digest(made(3)) != content_digest(made(4))
    assert content_digest(partial(made, 3)) != content_digest(partial(made, 4))
    assert content_digest(lru_cache(made(3))) != content_digest(lru_cache(made(4)))


def recursive(n):
    return n and recursive(n - 1)


class Weighted:
    """A metric with state."""

    __slots__ = ("weight",)
    power = 1

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, logits, tokens, mask):
        return logits[:, -1, 0] * self.weight


class Raised(Weighted):
    """The same state in another class."""

    power = 2


def test_a_function_whose_types_are_checked_is_that_function(monkeypatch):
    def metric(logits: Float[Tensor, "batch pos d_vocab"], scale: float = 1.0) -> Float[Tensor, " batch"]:
        return scale * logits[:, -1, 0]

    plain = content_digest(metric)
    for checked in (beartype(metric), jaxtyped(typechecker=beartype)(metric)):
        checked(torch.zeros(2, 3, 4))
        assert content_digest(checked) == plain
    assert content_digest(jaxtyped(typechecker=beartype)(made(3))) != content_digest(made(4))
    monkeypatch.setattr(metric, "__defaults__", (2.0,))
    assert content_digest(jaxtyped(typechecker=beartype)(metric)) != plain


def test_values_are_told_by_what_they_hold():
    ids = torch.tensor([[1, 2], [3, 4]])
    looped = [1]
    looped.append(looped)
    different = [
        ids, ids.flatten(), ids.float(), ids.numpy(), [[1, 2], [3, 4]], [["1", 2], [3, 4]], {1: 2}, {2: 1}, 1, 1.0,
        True, "1", b"1", None, Weighted(1.0), Weighted(2.0), Raised(1.0), pd.Series([1, 2]), pd.Series([1, 2], [1, 0]),
        slice(1, 2), slice(1, 3), len, recursive, looped, torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.mean,
        torch.sum, np.random.default_rng(0), np.random.default_rng(1), Path("a"), Path("b"), torch.int64, torch.int32,
    ]  # fmt: skip
    digests = [content_digest(one) for one in different]
    assert len({*digests}) == len(digests)
    assert digests == [content_digest(one) for one in different]
    alike = [1, 2]
    for one, same in [
        ((1, 2), [1, 2]),
        ([alike, alike], [alike, [1, 2]]),
        (np.int64(7), 7),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (ids, ids.clone().requires_grad_(False)),
        (ids[:, :1], ids[:, :1].contiguous()),
    ]:
        assert content_digest(one) == content_digest(same)
    assert isinstance(content_digest(one for one in alike), str)  # it cannot be pickled


PROMPTS = zoo.prompt(3, 8) % 32  # the tokens of tiny-rope


def normalised(direction):
    """A metric that is 1 on every prompt of the intact model, whatever logit it looks at."""
    model = tls.load_model("tiny-rope")
    with torch.no_grad():
        intact = model(PROMPTS)[:, -1, direction]
    return tls.Task(PROMPTS, lambda logits, tokens, mask: logits[:, -1, direction] / intact.to(logits.device))


def mean_of(order):
    """A metric whose mean over prompts does not depend on the order of its weights."""
    weights = torch.tensor(order)
    return tls.Task(PROMPTS, lambda logits, tokens, mask: weights.to(logits.device) + 0 * logits[:, -1, 0], name="m")


def work(task, folder):
    model = tls.load_model("tiny-rope")
    tls.ablation_sweep(model, "output", heads="L0H1", task=task, folder=folder / "sweep")
    tls.edge_effects(model, "L1H0.k", senders="L0H1", task=task, measure="task", folder=folder / "edges")
    tls.head_history(["tiny-rope"], task=task, folder=folder / "history", null_draws=2, detectors=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (partial(normalised, 3), partial(normalised, 5), "metric"),
        (partial(mean_of, [1.0, 2.0, 3.0]), partial(mean_of, [3.0, 2.0, 1.0]), "metric"),
        (
            lambda: tls.logit_difference(PROMPTS, 3, 5, counterfactual=PROMPTS.flip(0)),
            lambda: tls.logit_difference(PROMPTS, 3, 5, counterfactual=PROMPTS),
            "counterfactual",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*pairs are equal")
def test_a_folder_of_another_metric_of_equal_mean_is_refused_by_name(one, other, name, tmp_path):
    work(one(), tmp_path)
    work(one(), tmp_path)  # made anew, it is the same work
    for folder in ("sweep", "edges", "history"):
        (tmp_path / f"only_{folder}").mkdir()
        (tmp_path / folder).rename(tmp_path / f"only_{folder}" / folder)
        with pytest.raises(IncompatibleCheckpoint, match=rf"made with other {name}.* \({name}: .* there, .* now"):
            work(other(), tmp_path / f"only_{folder}")


def test_answers_by_word_and_by_id_are_one_task_for_a_model():
    view = attention_view(tls.load_model("tiny-rope"))
    tasks = [tls.logit_difference(PROMPTS, answer, 5) for answer in (3, [3, 3, 3], [[3]] * 3)]
    found = [sequences_identity(task_sequences(view, task), task) for task in tasks]
    assert found[0] == found[1] == found[2]
    assert len({task_identity(task)["prompts"] for task in tasks}) == 1
