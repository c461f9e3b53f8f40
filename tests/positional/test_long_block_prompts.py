"""`positional_symbolic` of long prompts, whose attention passes strip by strip, equals that of whole matrices."""

import pandas as pd
import pytest
import zoo
from block_marks import Marks
from positional_measurements import block_prompt, measured, modes
from squares import Squares

from tlspectral.models.reading import attention_view
from tlspectral.models.running.long_prompts import strips_of, why_whole
from tlspectral.positional import positional_symbolic

LENGTHS = (11, 13, 7, 11)


def assert_equal(long, whole):
    # Measured: 2e-6 relative, smaller float32 products in front of float64 logits; the keys of another query move
    # scores by tenths.
    assert long.attrs["strip"] in (7, 31)
    assert "strip" not in whole.attrs
    pd.testing.assert_frame_equal(long, whole, rtol=1e-4, atol=1e-5)
    for name in ("n_tokens", "n_swaps", "tokens_sha256"):
        assert long.attrs[name] == whole.attrs[name]


@modes
@pytest.mark.parametrize("name", ["llama", *zoo.also_slow("gemma2", "gptj", "bloom", "qwen3", "deepseek_v3")])
def test_scores(name, mode):
    model, prompt = zoo.shared("bridge", name), block_prompt(LENGTHS)
    how = {"mode": mode, "per_frequency": name in ("llama", "gptj")}
    whole = measured(model, prompt, **how)
    for size in (7, 31):
        with strips_of(size):
            assert_equal(measured(model, prompt, **how), whole)
    assert whole["s_pos"].std() > 1e-3


def test_scores_of_a_task_whose_contexts_share_a_cache():
    """Contexts are read once, strip by strip; every question continues them."""
    model, task = zoo.shared("bridge", "llama"), Marks(12, draws=2, queries=[1, 5])
    whole = positional_symbolic(model, task)
    with strips_of(7):
        assert_equal(positional_symbolic(model, task), whole)


@modes
def test_no_matrix_of_all_queries_and_keys_is_made(mode):
    model, prompt = zoo.bridge("llama", positions=512), block_prompt((60, 60, 60), prefix=20, suffix=3)
    why_whole(attention_view(model))  # checked once per model
    measured(model, block_prompt(), mode=mode)  # and what else is
    with strips_of(32), Squares(203) as squares:
        measured(model, prompt, mode=mode)
    assert squares.found == []
    with Squares(203) as squares:
        measured(model, prompt, mode=mode)
    assert squares.found
