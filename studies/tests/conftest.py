"""What the tests of studies share beside the fixtures of all tests."""

import pytest


@pytest.fixture(scope="session")
def tiny_grid(tmp_path_factory):
    """The folder of a finished grid of constrained training, and what the call returned. Not to be changed."""
    from constrained_preset import TINY
    from tlspectral_studies.fingerprint.constrained import constrained_grid

    folder = tmp_path_factory.mktemp("grid")
    returned = constrained_grid(folder, TINY, seeds=2)
    return folder, returned
