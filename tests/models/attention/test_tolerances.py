"""The one check of two routes to a quantity: what it allows, and which difference it reports."""

import pytest
import torch

from tlspectral.models.attention.tolerances import NOISE, nearest_bound, noise_of, require_close
from tlspectral.tables.printed import short_number


class Refused(Exception):
    pass


@pytest.mark.parametrize("what", NOISE)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_allowed_passes_and_a_hair_more_is_refused(what, stored):
    absolute, relative = noise_of(what, stored)
    size = torch.tensor([0.5, 3.0], dtype=torch.float64)
    allowed = absolute + relative * size
    found, most = nearest_bound(allowed, size, stored, what, "it differs", "so", Refused)
    assert found in allowed
    assert found == most
    for index in (0, 1):
        beyond = allowed.clone()
        beyond[index] *= 1 + 1e-12
        with pytest.raises(Refused) as refused:
            require_close(beyond, size, stored, what, "it differs", "so", Refused)
        found, most = float(beyond[index]), float(allowed[index])
        largest = short_number(float(size[index]))
        assert str(refused.value) == f"it differs by {found:.2e} (allowed {most:.2e}, largest {largest}); so"


def test_16_bits_allow_more_and_nan_is_refused():
    for what in NOISE:
        wide, half = (sum(noise_of(what, stored)) for stored in (torch.float32, torch.bfloat16))
        assert half >= wide
        with pytest.raises(Refused):
            require_close(
                torch.tensor([0.0, torch.nan]), torch.ones(2), torch.float32, what, "it differs", "so", Refused
            )


def test_the_bounds_of_verify_scores_are_those_of_its_docstring():
    assert noise_of("scores", torch.float32) == (1e-5, 1e-5)
    assert noise_of("scores", torch.bfloat16) == (0.0, 4 * torch.finfo(torch.bfloat16).eps)
    assert noise_of("pattern", torch.float32) == (1e-5, 0.0)
    assert noise_of("pattern", torch.float16) == (0.0, torch.finfo(torch.float16).eps)
