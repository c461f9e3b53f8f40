"""Values of `tls.parts` before a model is given: what they keep, and what they refuse by themselves."""

import json

import numpy as np
import pytest
import torch

from tlspectral.parts import Band, RopePhase, part_of

PAIRS = [
    range(2),
    [0, 1],
    (0, 1),
    np.arange(2),
    [np.int64(0), np.int64(1)],
    torch.arange(2),
    (pair for pair in range(2)),
]
MASKS = [np.array([True, False]), torch.tensor([True, False]), [True, False]]


@pytest.mark.parametrize(("given", "kept"), [(one, (0, 1)) for one in PAIRS] + [(one, (True, False)) for one in MASKS])
def test_frequencies_of_any_library_are_numbers_that_a_file_can_hold(given, kept):
    band = Band(given)
    assert band.frequencies == kept
    assert json.loads(json.dumps(band.settings)) == {"frequencies": list(kept)}


def test_a_part_says_its_settings_where_they_are_not_the_default():
    assert RopePhase().settings == {}
    assert RopePhase([0], include_bias=True).settings == {"frequencies": [0], "include_bias": True}


def test_a_band_has_frequencies():
    band = object.__new__(Band)  # `Band(None)`, which the check of annotations would refuse first
    object.__setattr__(band, "frequencies", None)
    with pytest.raises(ValueError, match="Band needs frequencies"):
        band.__post_init__()


@pytest.mark.parametrize("name", ["rotary_band", "long_range", "content", "position", "interaction"])
def test_a_part_with_settings_is_no_name(name):
    with pytest.raises(ValueError, match=f"{name!r} has settings: give tls.parts.* in place of its name"):
        part_of(name)
