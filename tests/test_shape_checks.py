"""Shapes are checked while tests run: in functions of the package, and in inner functions that name one."""

from collections.abc import Callable

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from shape_checks import checked
from torch import Tensor

from tlspectral.spectra import thin_core


def test_a_function_of_the_package_refuses_a_wrong_shape():
    w_q = torch.ones(2, 5, 3, dtype=torch.float64)
    thin_core(w_q, w_q)
    with pytest.raises(TypeCheckError):
        thin_core(w_q, w_q[:1])


def outer():
    def plain(x: int) -> int:
        return x

    def one(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> None:
        return None

    def deep(x: list[Float[Tensor, " n"] | None]) -> None:
        return None

    def handed(x: Callable[[Float[Tensor, " n"]], None]) -> None:
        return None

    return plain, one, deep, handed


def test_of_inner_functions_those_that_name_a_shape_are_checked():
    plain, one, deep, handed = outer()
    assert checked(plain) is plain
    assert all(checked(function) is not function for function in (one, deep, handed))
    same_length = jaxtyped(one, typechecker=checked)
    same_length(torch.ones(2), torch.ones(2))
    with pytest.raises(TypeCheckError):
        same_length(torch.ones(2), torch.ones(3))
