"""Rotations of every reproduced family learn, in the model of transformers and its bridge, or are refused in words."""

import pytest
import torch
from families import save, stored
from family_configs import families, forms
from spectral_families import TABLE, Outcome, outcome, reproduced
from zoo import prompt

import tlspectral as tls

# The tables are of passes without a key/value cache.
pytestmark = pytest.mark.filterwarnings("ignore:.*loses the key/value cache")

TABLES = sorted(TABLE.parent.glob("spectral-families-tl*.csv"))
OK = {"trains", "refused"}
# A forward pass that TransformerLens sets on linear layers; a query that the bridge does not use; positions that the
# layer does not pass on; several rotations in one model.
PECULIAR = ("falcon", "afmoe", "codegen", "gemma3_text")


def compare(family, form):
    found = outcome(family, form, forms(family)[form])
    assert found == stored(TABLE, Outcome)[family, form]._replace(reason=found.reason)
    assert "refused" not in (found.transformers, found.bridge) or found.reason


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize("family", PECULIAR)
def test_rotations_of_a_peculiar_family_learn_or_are_refused(family):
    compare(family, "")


@pytest.mark.slow  # 169 forms: about a minute of one core
@pytest.mark.parametrize("family", families())
def test_rotations_of_every_form_learn_or_are_refused(family, full):
    """The usual form alone; all with --full."""
    for form in forms(family) if full else [""]:
        if (family, form) in reproduced():
            compare(family, form)


def test_the_table_has_every_reproduced_form():
    """A new family fails here: `make families` adds its row."""
    assert list(stored(TABLE, Outcome)) == reproduced()


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_no_form_ends_in_a_raw_error_or_another_function(path):
    for row in stored(path, Outcome).values():
        assert {row.transformers, row.bridge} <= OK, row
        assert row.reason or (row.transformers, row.bridge) == ("trains", "trains"), row


def test_weights_of_its_own_are_those_that_run(tmp_path):
    """copy.deepcopy leaves a function that holds a module as it is, and with it the weights that it runs."""
    save("falcon", {}, tmp_path)
    base = tls.load_model(tmp_path)
    spectral = tls.to_spectral(base, share_weights=False)
    spectral(prompt(), return_type="loss").backward()
    assert all(parameter.grad is None for parameter in base.parameters())
    own = [parameter for name, parameter in spectral.named_parameters() if ".mlp." in name]
    assert own
    assert all(parameter.grad is not None for parameter in own)
    with torch.no_grad():
        before = base(prompt(), return_type="logits")
        for parameter in own:
            parameter.zero_()
        assert torch.equal(base(prompt(), return_type="logits"), before)
