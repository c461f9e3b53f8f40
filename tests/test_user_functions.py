"""Functions that users pass in: their arguments, and the check of their results."""

import numpy as np
import pytest
import torch
from stand_in_device import DEVICE, StandInDevice

from tlspectral.user_functions import not_finite, require_call, returned_tensor

GOOD = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        (lambda a: a, ("rows", "keys"), r"metric is a function of rows and keys, .* order; found <lambda>\(a\)"),
        (lambda: 0, ("rows",), r"metric is a function of rows; found <lambda>\(\)"),
        (lambda a: a, (), r"metric is a function of no arguments; found <lambda>\(a\)"),
        (lambda a, *, b: a, ("rows",), r"found <lambda>\(a, \*, b\)"),
    ],
)
def test_a_function_that_takes_other_arguments_is_refused(function, arguments, said):
    with pytest.raises(TypeError, match=said):
        require_call(function, arguments, "metric")


def test_a_function_that_can_be_called_is_not():
    for function in (lambda a, b: a, lambda *given: given, lambda a, b, c=1: a, torch.add, max, torch.nn.Linear(2, 2)):
        require_call(function, ("rows", "keys"), "metric")


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (GOOD[0], r"found shape \(3,\) of torch.float32"),
        (GOOD[None], r"found shape \(1, 2, 3\)"),
        (GOOD[:, :1], r"found shape \(2, 1\)"),  # would be broadcast
        (GOOD.T, r"found shape \(3, 2\)"),
        (GOOD.numpy(), r"found shape \(2, 3\) of ndarray"),
        (GOOD.tolist(), "found list"),
        (None, "found NoneType"),
        (1.0, "found float"),
        (GOOD + 0j, "found .* of torch.complex64"),
        (GOOD.to_sparse(), "found a tensor with the layout torch.sparse_coo"),
        (GOOD.to("meta"), r"found .*\(on meta\)"),
    ],
)
@pytest.mark.parametrize("kind", ["real numbers", "floating-point numbers"])
def test_another_result_is_refused_with_both_shapes(values, found, kind):
    with pytest.raises(ValueError, match=rf"mine returns rows, a tensor of {kind} of shape \(2, 3\); {found}"):
        returned_tensor(values, (2, 3), "mine returns rows", kind=kind)


@pytest.mark.parametrize("values", [GOOD.int(), GOOD > 1])
def test_whole_numbers_are_real_but_not_floating_point(values):
    assert returned_tensor(values, (2, 3), "mine") is values
    with pytest.raises(ValueError, match=f"floating-point numbers .*; found .*{values.dtype}"):
        returned_tensor(values, (2, 3), "mine", kind="floating-point numbers")


def test_a_mask_is_of_true_and_false():
    assert returned_tensor(GOOD > 1, (2, 3), "mine", kind="True and False").dtype is torch.bool
    with pytest.raises(ValueError, match="a tensor of True and False of shape"):
        returned_tensor(GOOD, (2, 3), "mine", kind="True and False")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_point_results_get_the_type_of_the_scores(dtype):
    found = returned_tensor(GOOD.to(dtype), (2, 3), "mine", kind="floating-point numbers", like=GOOD)
    assert found.dtype is torch.float32
    assert torch.equal(found, GOOD)  # small whole numbers, exact in all of these types


def test_a_result_on_another_device_is_refused_where_the_device_counts():
    with StandInDevice():
        away = GOOD.to(DEVICE)
        assert returned_tensor(away, (2, 3), "mine") is away
        with pytest.raises(ValueError, match=rf"a tensor on cpu; found one on {DEVICE}: add \.to\('cpu'\)"):
            returned_tensor(away, (2, 3), "mine", like=GOOD)


def test_numbers_that_are_not_finite_are_found_and_large_ones_are_not():
    assert not_finite(GOOD) is None
    assert not_finite(torch.tensor([3e38, 3e38])) is None  # whose sum is infinite
    assert not_finite(torch.arange(3)) is None
    for value in (np.nan, np.inf, -np.inf):
        wrong = not_finite(torch.tensor([1.0, value, 2.0]))
        assert wrong is not None
        assert wrong.tolist() == [False, True, False]
    assert not_finite(torch.tensor([np.inf, -np.inf])) is not None
