"""Every causal family that TransformerLens can hold is reproduced or refused in words, loaded and streamed."""

import pytest
import zoo
from families import TABLE, outcome, stored
from family_configs import NOT_BUILT, families, forms, tiny_config
from zoo_shapes import SHAPES

from tlspectral.models.checkpoints.layers import STREAMED_MODEL_TYPES

# The tables are of passes without a key/value cache.
pytestmark = pytest.mark.filterwarnings("ignore:.*loses the key/value cache")

OK = {"reproduced", "refused", "not built"}
TABLES = sorted(TABLE.parent.glob("families-tl*.csv"))
STREAMED_ALONE = {("opt", form) for form in ("projected embedding", "350M")}
"""Forms of which only a streamed table is made: the loaded one needs an embedding as wide as the residual stream."""

PECULIAR = (
    ("exaone4", ""),
    ("gemma3n", ""),
    ("gpt_bigcode", "multi_query=False"),
    ("gpt_neox", "attention_bias=False"),
    ("granitemoehybrid", "attention without positions"),
    ("hrm_text", ""),
    ("modernbert-decoder", ""),
    ("openai-gpt", ""),
    ("opt", "350M"),
    ("stablelm", "qk_layernorm=True"),
)
ELSEWHERE = {(SHAPES[name]().model_type, "") for name in zoo.RIGHT}
"""Forms of the zoo's models, of which test_loading.py and test_layers.py ask the same."""


def compare(family: str, form: str) -> None:
    found = outcome(family, form, forms(family)[form])
    assert found.loaded in OK, found
    assert (found.loaded == "not built") == ((family, form) in NOT_BUILT), found
    expected = stored()[family, form]
    assert (found.loaded, found.streamed) == (expected.loaded, expected.streamed), found
    assert found.loaded == "reproduced" or found.reason


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), PECULIAR)
def test_a_peculiar_form_is_reproduced_or_refused(family, form):
    compare(family, form)


@pytest.mark.slow  # 95 families in 279 forms: about 3 minutes of one core
@pytest.mark.parametrize("family", families())
def test_every_form_of_a_family_is_reproduced_or_refused(family, full):
    """The usual form and every second one of the others, if asked nowhere else; all with --full."""
    for number, form in enumerate(forms(family)):
        if full or (number % 2 == 0 and (family, form) not in {*PECULIAR, *ELSEWHERE}):
            compare(family, form)


@pytest.mark.slow
def test_the_table_of_the_docs_has_every_family_and_form():
    """A new family of transformers or TransformerLens fails here: `make families` adds its row."""
    assert list(stored()) == [(family, form) for family in families() for form in forms(family)]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_no_family_ends_in_a_raw_error_or_a_silent_difference(path):
    for row in stored(path).values():
        assert row.loaded in OK, row
        assert row.streamed in ("reproduced", "refused", "") or row.streamed == "unconfirmed", row
        assert row.reason or (row.loaded, row.streamed) == ("reproduced", "reproduced"), row


@pytest.mark.slow
def test_streamed_are_the_families_of_which_the_streamed_table_is_the_loaded_one():
    good, bad = set(), set()
    for path in TABLES:
        for row in stored(path).values():
            kind = tiny_config(row.family).get_text_config().model_type if row.streamed else None
            if row.streamed == "reproduced":
                good.add(kind)
            elif row.streamed not in ("refused", "") and (row.family, row.form) not in STREAMED_ALONE:
                bad.add(kind)
    assert sorted(good - bad) == list(STREAMED_MODEL_TYPES)
