"""What is no model is refused by every public function that takes one, in words that say what is accepted."""

from contextlib import ExitStack
from functools import partial

import pandas as pd
import pytest
import torch
import zoo
from public_functions import FUNCTIONS, TAKE_A_MODEL

import tlspectral as tls

PROMPT = tls.positional.BlockPrompt(prefix="a", blocks=("b", "c", "d"), suffix="e")
MORE = {
    "ablate": ("L0H1", "symmetric"),
    "ablation_hooks": ("L0H1", "symmetric"),
    "ablation_sweep": ("symmetric",),
    "bake": ("L0H1",),
    "band_effects": ("L0H1",),
    "cache_prices": ([[1, 2, 3]],),
    "evaluate": ("induction",),
    "edge_effects": ("L1H1.k",),
    "head_directions": ("L0H1",),
    "k_composition": ((1, 0),),
    "ov_attribution": ([1, 2, 3], "L0H1", -1),
    "positional_symbolic": (PROMPT,),
    "qk_attribution": ([1, 2, 3], "L0H1", -1, 0),
    "qk_penalty": ("symmetric",),
    "relative_position_kernel": ("L0H1",),
    "scores": ([1, 2, 3], "L0H1"),
}
KEYWORDS = {"cache_prices": {"windows": 2}}
NAMES_TOO = {"analyze_heads", "head_history", "k_composition", "load_model"}
PAIRS = tls.logit_difference([[1, 2]], 1, 2, counterfactual=[[3, 2]])
MORE |= {"faithfulness": (pd.DataFrame(), PAIRS), "run_circuit": ([], PAIRS), "check_hook": (None, "L0H1")}
MORE["sufficient_heads"] = (PAIRS,)
NO_MODELS = {
    "text": lambda: "gpt2",
    "a tensor": lambda: torch.zeros(3),
    "a list": lambda: [0.5],
    "nothing": lambda: None,
    "a model of transformers": lambda: zoo.hf_model("llama"),
}

OBJECTS_TOO = ("analyze_heads", "bake", "k_composition", "load_model", "to_spectral")
"""Functions that take a model of transformers as it is."""


@pytest.mark.parametrize("name", TAKE_A_MODEL)
def test_what_is_no_model_is_a_type_error_that_says_what_is_accepted(name):
    function = FUNCTIONS[name]
    accepted = "TransformerBridge.*HookedTransformer" if name not in NAMES_TOO else "TransformerBridge|name"
    for what, given in NO_MODELS.items():
        if (what == "text" and name in NAMES_TOO) or (what == "a model of transformers" and name in OBJECTS_TOO):
            continue
        call = partial(function, given(), *MORE.get(name, ()), **KEYWORDS.get(name, {}))
        with pytest.raises(TypeError, match=accepted):
            _ = ExitStack().enter_context(call()) if name == "ablate" else call()


def test_every_function_of_a_model_is_among_them():
    assert len(TAKE_A_MODEL) > 15
    assert set(MORE) | NAMES_TOO <= set(TAKE_A_MODEL)


@pytest.mark.slow
def test_the_table_of_a_model_of_transformers_is_that_of_the_loaded_one():
    given = zoo.hf_model("llama")
    found, expected = (tls.analyze_heads(one, null_draws=2, detectors=False) for one in (given, tls.load_model(given)))
    pd.testing.assert_frame_equal(found, expected)
    assert found.attrs["weights_sha256"] == expected.attrs["weights_sha256"]
