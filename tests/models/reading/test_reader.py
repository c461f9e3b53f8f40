"""Both backends define every function of the `Reader` protocol, with the arguments that it names."""

import inspect

import pytest

from tlspectral.models.reading import bridge, hooked_transformer
from tlspectral.models.reading.reader import Reader
from tlspectral.models.reading.view import READERS

FUNCTIONS = {name: method for name, method in vars(Reader).items() if inspect.isfunction(method) and name[0] != "_"}


@pytest.mark.parametrize("module", [bridge, hooked_transformer], ids=lambda module: module.__name__.split(".")[-1])
def test_a_reader_defines_all_functions_with_the_named_arguments(module):
    assert isinstance(module, Reader)
    for name, method in FUNCTIONS.items():
        asked = [*inspect.signature(method).parameters][1:]  # without self
        assert [*inspect.signature(getattr(module, name)).parameters] == asked, name


def test_views_know_no_other_reader_and_the_protocol_names_what_views_call():
    assert [*READERS.values()] == [bridge, hooked_transformer]
    assert len(FUNCTIONS) == 13
