"""Shapes are checked while tests run: in functions of the package, and in inner functions that name one."""

from collections.abc import Callable

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from shape_checks import CALLS, check_again, checked, not_checked
from torch import Tensor
from zoo import needs_hooked

from tlspectral.algebra.spectra import thin_core
from tlspectral.models.reading.hooked_transformer import seen_keys
from tlspectral.positional import exclusion_split


def all_are_checked(pytestconfig):
    return "tlspectral" in pytestconfig.getoption("--jaxtyping-packages").split(",")


def test_a_wrong_shape_is_refused_in_functions_of_the_package_and_in_inner_ones_that_name_a_shape(pytestconfig):
    if not all_are_checked(pytestconfig):
        pytest.skip("`make test-tl4` checks the shapes of all modules, this run only those of a few")

    def plain(x: int) -> int:
        return x

    def one(x: Float[Tensor, " n"], y: list[Float[Tensor, " n"]]) -> None:
        return None

    def handed(x: Callable[[Float[Tensor, " n"]], None]) -> None:
        return None

    assert checked(plain) is plain
    assert checked(handed) is not handed
    w_q = torch.ones(2, 5, 3, dtype=torch.float64)
    thin_core(w_q, w_q)
    same_length = jaxtyped(one, typechecker=checked)
    same_length(torch.ones(2), [torch.ones(2)])
    for call in (lambda: thin_core(w_q, w_q[:1]), lambda: same_length(torch.ones(2), [torch.ones(3)])):
        with pytest.raises(TypeCheckError):
            call()


def test_annotations_that_are_kept_as_text_are_checked_too(pytestconfig):
    if not all_are_checked(pytestconfig):
        pytest.skip("`make test-tl4` checks the shapes of all modules, this run only those of a few")
    assert isinstance(exclusion_split.__annotations__["logits"], str)
    with pytest.raises(TypeCheckError):
        exclusion_split(torch.ones(2, 3, dtype=torch.float64))


def test_the_first_calls_in_each_test_are_checked_and_a_refused_one_does_not_count():
    def one(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> None:
        return None

    same_length = jaxtyped(one, typechecker=checked)
    with not_checked():
        same_length(torch.ones(2), torch.ones(3))
    for _ in range(2):
        for _ in range(CALLS):
            with pytest.raises(TypeCheckError):
                same_length(torch.ones(2), torch.ones(3))
            same_length(torch.ones(2), torch.ones(2))
        same_length(torch.ones(2), torch.ones(3))
        check_again()


@needs_hooked
def test_modules_that_transformerlens_4_cannot_run_are_checked_in_every_run(pytestconfig):
    *packages, _ = pytestconfig.getoption("--jaxtyping-packages").split(",")
    assert all_are_checked(pytestconfig) or all("hooked" in name for name in packages)
    with pytest.raises(TypeCheckError):
        seen_keys(None, 0, "three")
