"""TransformerLens' native models (`boot_native`): every feature that enters an attention score is read right."""

import pytest
import torch
from conformance.reading import standard_frequencies
from native_models import FEATURES, native

import tlspectral as tls
from tlspectral.heads.operators.verification import check_prompt
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import capture_until


@pytest.mark.parametrize("feature", FEATURES)
def test_scores_are_reproduced(feature):
    model = native(feature)
    view = attention_view(model)
    name = view.hook_names(1)["pattern"]
    pattern = capture_until(view, check_prompt(view), [name], last=name)[name]
    # Neither flat, as with scores near 0 with which anything agrees, nor of one key.
    assert 0.2 < float(pattern[..., 8:, :].amax(-1).median()) < 0.999
    assert tls.verify_scores(model).max() < 1e-5
    if feature == "llama3 scaling":
        tls.verify_scores(model, torch.randint(0, 40, (2, 64), generator=torch.Generator().manual_seed(1)))


def test_rotary_geometry_is_that_of_the_tables():
    def theta(feature):
        return tls.qk_operators(native(feature)).rotary(1).theta

    plain = standard_frequencies(10000.0, 8)
    for feature, expected in [
        ("rotary", plain),
        ("linear scaling", plain / 4),
        ("rotary base", standard_frequencies(100.0, 8)),
        ("partial rotary", standard_frequencies(10000.0, 4)),
    ]:
        torch.testing.assert_close(theta(feature), expected, rtol=1e-6, atol=0)  # the tables are float32
    # Of wavelengths 6, 63, 628 and 6283 tokens all but the first are longer than the original context of 32.
    torch.testing.assert_close(theta("llama3 scaling")[1:], plain[1:] / 8, rtol=1e-6, atol=0)
    partial = tls.qk_operators(native("partial rotary")).rotary(0)
    assert (partial.real_index.tolist(), partial.imag_index.tolist()) == ([0, 2], [1, 3])
    assert partial.rotary_fraction == 0.5


@pytest.mark.tl4
@pytest.mark.slow
def test_the_table_of_heads():
    model = native("grouped keys")
    table = tls.analyze_heads(model, null_draws=2)
    assert len(table) == 8
    assert table[["dir_frac", "prev", "copying"]].notna().all(axis=None)
    assert table.attrs["score_check"]["compared"] == "pattern"
    assert len(tls.k_composition(model, (1, 3))) == 4
