"""`run_circuit` on other tasks: the same edges, each task's own pairs, and both ends of each scale."""

import dataclasses
import inspect
import pickle

import numpy as np
import pytest
import zoo
from pair_prompts import prompt_pairs

import tlspectral as tls

EDGES = [("L0H1", "L1H2.q"), ("L1H2", "logits"), ("embedding", "L0KV0.v"), ("L0MLP", "logits")]


def pairs(name="pairs", n=3, length=9, seed=4, answer=7):
    clean, other = prompt_pairs(n, length, seed=seed, at=3)
    return dataclasses.replace(tls.logit_difference(clean, answer, 10, counterfactual=other), name=name)


OTHERS = [pairs("longer", 4, 11, 7), pairs("other answer", answer=8)]


def test_a_circuit_on_other_tasks_is_the_circuit_on_each_alone():
    model = zoo.shared("bridge", "llama")
    found = tls.run_circuit(model, iter(EDGES), pairs(), off_target=OTHERS)
    assert list(found.off_target) == ["longer", "other answer"]
    for task, score in zip([pairs(), *OTHERS], [found, *found.off_target.values()], strict=True):
        alone = tls.run_circuit(model, EDGES, task)
        assert (score.per_sequence == alone.per_sequence).all()
        assert score.sequences_sha256 == alone.sequences_sha256
        assert (alone.intact, alone.counterfactual, alone.off_target) == (None, None, {})
        assert (score.intact.per_sequence == tls.evaluate(model, task).per_sequence).all()
        none = tls.run_circuit(model, [], task)
        # Two routes in float32: 1e-6 measured; the ends are .05 and more apart.
        np.testing.assert_allclose(score.counterfactual.per_sequence, none.per_sequence, atol=1e-5)
        assert abs(float(score.intact) - float(score.counterfactual)) > 1e-2
        change, by_pair = score - score.intact, score.per_sequence - score.intact.per_sequence
        assert change.se == pytest.approx(by_pair.std(ddof=1) / len(by_pair) ** 0.5)
    with pytest.raises(ValueError, match="over the same"):
        found - found.off_target["longer"]


def test_a_task_that_is_the_target_has_its_score():
    found = tls.run_circuit(zoo.shared("bridge", "llama"), EDGES, pairs(), off_target=[pairs("again")])
    again = found.off_target["again"]
    assert (found, found.se, found.intact.se) == (again, again.se, again.intact.se)


def test_the_score_of_a_circuit_is_a_number_that_can_be_stored():
    found = tls.run_circuit(zoo.shared("bridge", "llama"), EDGES, pairs(), off_target=OTHERS[:1])
    stored = pickle.loads(pickle.dumps(found))
    assert float(stored) == float(found) == found.value
    assert float(stored.off_target["longer"].intact) == float(found.off_target["longer"].intact)
    assert "3 sequences" in repr(found)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (["language"], "language has no counterfactual prompts: give Task"),
        ([pairs()], "two tasks would be called 'pairs'"),
        ([OTHERS[0], pairs("longer")], "two tasks would be called 'longer'"),
        (OTHERS[0], "off_target is a list of tasks"),
    ],
)
def test_what_is_no_circuit_on_another_task_is_refused(others, words):
    with pytest.raises(ValueError, match=words):
        # Unwrapped, since the type check of the tests would refuse some of these first.
        inspect.unwrap(tls.run_circuit)(zoo.shared("bridge", "llama"), EDGES, pairs(), off_target=others)
