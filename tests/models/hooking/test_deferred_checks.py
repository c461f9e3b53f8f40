"""Checks in the hooks of a pass: they wait until it ends, are copied at once, and none is lost."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import zoo

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablation_hooks
from tlspectral.models.hooking import deferred_checks
from tlspectral.models.hooking.deferred_checks import checked_at_end, judged
from tlspectral.models.reading import attention_view
from tlspectral.models.running.partial_runs import LAST, last_logits, logits_at
from tlspectral.models.running.passes import run_until, whole_logits


class Refused(Exception):
    pass


def small(name, number):
    if float(number) > 1.0:
        raise Refused(f"{name}: {float(number)}")


def test_a_check_outside_of_a_pass_is_made_at_once():
    judged((torch.tensor(0.5),), partial(small, "a"))
    with pytest.raises(Refused, match="a: 2"):
        judged((torch.tensor(2.0),), partial(small, "a"))


def passing(*numbers, error=None):
    """A pass with a check of each number, by its place, that ends in an error."""
    with checked_at_end():
        for index, number in enumerate(numbers):
            judged((torch.tensor(number), torch.ones(2, 3)), lambda one, shape, index=index: small(index, one))
        if error is not None:
            raise error


def test_checks_of_a_pass_are_made_when_it_ends_in_their_order(monkeypatch):
    copies, real = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copies.append(self.dtype) or real(self))
    passing(0.5, 1.0, 0.0)
    assert copies == [torch.float32]  # of six tensors
    with pytest.raises(Refused, match="1: 2"):
        passing(0.5, 2.0, 3.0)
    assert not deferred_checks._waiting


def test_numbers_keep_their_shape_type_and_values():
    given, found = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.empty(0), torch.tensor([1], dtype=int)], []
    with checked_at_end():
        judged(tuple(given), lambda *numbers: found.extend(numbers))
    for one, other in zip(given, found, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


def test_what_a_check_refuses_comes_before_an_error_of_the_pass():
    failed = ValueError("the pass failed")
    with pytest.raises(Refused, match="0: 2"):
        passing(2.0, error=failed)
    with pytest.raises(ValueError, match="the pass failed"):
        passing(1.0, error=failed)
    with pytest.raises(KeyboardInterrupt):
        passing(2.0, error=KeyboardInterrupt())
    assert not deferred_checks._waiting


def test_a_pass_within_a_pass_makes_its_own_checks():
    with checked_at_end():
        with pytest.raises(Refused, match="0: 2"):
            passing(2.0)
        judged((torch.tensor(1.0),), partial(small, "outer"))
        assert len(deferred_checks._waiting) == 1


def test_a_pass_of_one_thread_does_not_keep_checks_of_another():
    with checked_at_end(), ThreadPoolExecutor(1) as pool:
        refused = pool.submit(judged, (torch.tensor(2.0),), partial(small, "other")).exception()
    assert isinstance(refused, Refused)


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("run", ["logits", "logits_at", "last_logits", "run"])
def test_no_pass_of_the_library_hands_on_logits_before_its_checks(run):
    model, tokens = zoo.bridge("llama"), zoo.prompt()
    view = attention_view(model)
    hooks = ablation_hooks(model, ["L0H1", "L1H2"], "symmetric")
    late = [(view.hook_names(layer)["query"], lambda q, hook: q.flip(1)) for layer in (0, 1)]
    refused = pytest.raises(EditNotHonored, match="layer 0, head 1: the model's scores do not follow from this run's")
    if run == "run":
        with refused:
            run_until(view, tokens, [*hooks, *late], last=view.hook_names(1)["pattern"])
    elif run == "last_logits":
        with refused:
            last_logits(view, tokens, [*hooks, *late])
    else:
        call = partial(whole_logits, view, tokens) if run == "logits" else partial(logits_at, view, tokens, LAST)
        with refused, torch.no_grad(), view.hooks_on([*hooks, *late]):
            call()
    assert not deferred_checks._waiting
