"""How results show themselves in a notebook."""

import html
import re
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
from tlspectral_studies.fingerprint.history_questions import formation_crossing

from tlspectral import stats
from tlspectral.tables.html_summary import html_summary
from tlspectral.tasks import Effect

pytestmark = pytest.mark.lowest


def cells(result):
    """The cells of the table that a notebook shows, by their names."""
    shown = result._repr_html_()
    text = [html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", shown, flags=re.DOTALL)]
    return dict(zip(text[::2], text[1::2], strict=True))


def test_a_result_shows_its_fields_with_few_digits():
    heads = pd.DataFrame(np.random.default_rng(0).normal(size=(40, 3)), columns=["D_head", "prev", "dir_frac"])
    heads["layer"] = np.arange(40) // 5
    found = stats.layer_bootstrap(heads, draws=50)
    shown = cells(found)
    assert shown["statistic"] == f"{found.statistic:.3g}"
    assert shown["interval"] == ", ".join(f"{end:.3g}" for end in found.interval)
    assert "reason" not in shown  # None says nothing
    # A correlation within a result is its number, not its whole text.
    heads["rope_imag_frac"] = heads["freq_centroid"] = heads["prev"]
    inner = stats.attenuation(heads)
    assert cells(inner)["before"] == f"{inner.before.statistic:.3g}"


def test_what_is_long_is_cut_and_what_is_odd_is_escaped():
    @dataclass(frozen=True)
    class Odd:
        text: str
        many: tuple[int, ...]
        array: np.ndarray

        _repr_html_ = html_summary

    shown = cells(Odd("<script>" + "x" * 200, tuple(range(100)), np.zeros((3, 4))))
    assert shown["text"].startswith("<script>xxx")
    assert "<script>" not in Odd("<script>", (), np.zeros(1))._repr_html_()
    assert len(shown["text"]) == 80
    assert shown["many"].startswith("100 values: 0, 1, 2")
    assert shown["array"] == "array of shape (3, 4)"


@pytest.mark.parametrize(
    "result",
    [
        Effect(0.5, 0.1, 0.02),
        stats.model_permutation_test([1.0, 2.0], [3.0, 4.0]),
        formation_crossing(pd.DataFrame({"step": [0, 1], "prev": [0.0, 1.0], "rope_imag_frac_pct": [0.0, 1.0]})),
    ],
    ids=lambda result: type(result).__name__,
)
def test_results_of_several_rooms_have_a_summary(result):
    assert f"<b>{type(result).__name__}</b>" in result._repr_html_()
    assert cells(result)
