"""Models that run a layer several times in one pass, HRM first, are refused wherever they are met."""

import pytest
import torch
import zoo
from torch import nn

import tlspectral as tls
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading import attention_view
from tlspectral.positional import BlockPrompt

TASK = tls.Task(zoo.prompt(2, 12), lambda logits, *_: logits[:, -1, 5], counterfactual=zoo.prompt(2, 12, seed=1))
BLOCKS = BlockPrompt(torch.tensor([3]), torch.tensor([[5, 6], [7, 8], [9, 10]]).unbind(), torch.tensor([5]))
REFUSED = "several times in one pass .*no single one: use a model that runs each layer once"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return zoo.save_folder("hrm", tmp_path_factory.mktemp("hrm"))


# --- HRM, whose config says it ---

BY_NAME = {
    "load_model": tls.load_model,
    "files": lambda path: tls.load_model(path, weights="files"),
    "analyze_heads": tls.analyze_heads,
    "object": lambda path: tls.load_model(zoo.hf_model("hrm")),
    "rotations": lambda path: tls.to_spectral(zoo.hf_model("hrm")),
}


@pytest.mark.parametrize("road", BY_NAME)
def test_hrm_is_refused_by_its_config_before_it_is_loaded(folder, road):
    with pytest.raises(UnsupportedArchitecture, match=rf"layers {REFUSED}") as raised:
        BY_NAME[road](folder)
    assert "(model type hrm_text, H_cycles=2, L_cycles=2)" in str(raised.value)


MEASURED = {
    "view": attention_view,
    "table": lambda model: tls.analyze_heads(model, null_draws=2),
    "check": tls.verify_scores,
    "detectors": lambda model: tls.detect_heads(model, n_sequences=2, segment_length=4),
    "pairs": lambda model: tls.top_pairs(model, None, TASK.prompts),
    "kernel": lambda model: tls.relative_position_kernel(model, None, TASK.prompts),
    "ablate": lambda model: tls.ablate(model, "L0H0", "output").__enter__(),
    "hooks": lambda model: tls.ablation_hooks(model, "L0H0", "symmetric"),
    "sweep": lambda model: tls.ablation_sweep(model, "output", task=TASK),
    "edges": lambda model: tls.edge_effects(model, "L1H1.k", task=TASK),
    "circuit": lambda model: tls.run_circuit(model, [("L0H0", "L1H0.k")], TASK),
    "scores": lambda model: tls.scores(model, TASK.prompts[:1], "L1H0"),
    "one score": lambda model: tls.qk_attribution(model, TASK.prompts[:1], "L1H0", 10, 3),
    "writes": lambda model: tls.ov_attribution(model, TASK.prompts[:1], "L1H0", 10),
    "swaps": lambda model: tls.positional_symbolic(model, BLOCKS),
    "shares": lambda model: tls.positional.logit_shares(model, BLOCKS),
    "rotations": tls.to_spectral,
}


@pytest.mark.parametrize("call", [*MEASURED, "composition"])
def test_a_bridge_of_hrm_is_refused_by_every_function(call):
    calls = MEASURED | {"composition": lambda model: tls.k_composition(model)}
    with pytest.raises(UnsupportedArchitecture, match=rf"^HrmTextForCausalLM runs its layers {REFUSED}"):
        calls[call](zoo.shared("bridge", "hrm"))


def test_two_stacks_that_run_once_are_refused_as_what_they_are():
    model = zoo.bridge("hrm")
    model.original_model.config.H_cycles = model.original_model.config.L_cycles = 1
    with pytest.raises(UnsupportedArchitecture, match=r"no list of layers .*\(its lists: L_blocks, H_blocks\)"):
        attention_view(model)


@pytest.mark.parametrize("field", ["total_ut_steps", "mean_recurrence"])  # of Ouro and Huginn
def test_other_configs_that_say_so(field):
    model = zoo.bridge("llama")
    for count in (1, None):
        setattr(model.original_model.config, field, count)
        attention_view(model)
    setattr(model.original_model.config, field, 4)
    with pytest.raises(UnsupportedArchitecture, match=rf"LlamaForCausalLM .*\(model type llama, {field}=4\)"):
        attention_view(model)


# --- models that do it without a word ---


class Twice(nn.ModuleList):
    """Layers through which a pass goes twice."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return [*found, *found] if isinstance(index, slice) else found


def with_one_layer_twice():
    model = zoo.hf_model("gpt2")
    model.config.use_cache = False
    model.transformer.h[1] = model.transformer.h[0]
    return model


def with_one_attention_twice():
    model = zoo.hf_model("llama")
    model.config.use_cache = False
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    return model


MADE = {"layer": with_one_layer_twice, "attention": with_one_attention_twice}


@pytest.mark.parametrize("made", MADE)
def test_a_model_that_repeats_is_refused_when_it_is_loaded(made):
    with pytest.raises(UnsupportedArchitecture, match=rf"fires several times\), .*{REFUSED[-30:]}"):
        tls.load_model(MADE[made]())


@pytest.mark.fast(2)
@pytest.mark.tl4
@pytest.mark.filterwarnings("ignore:.*hooks of yours are on the model")  # a list of the user's own class
@pytest.mark.parametrize("call", [call for call in MEASURED if call != "view"])
def test_a_bridge_that_repeats_is_refused_by_what_runs_it(call):
    model = zoo.bridge("llama")
    model.original_model.config.use_cache = False
    model.original_model.model.layers.__class__ = Twice
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(UnsupportedArchitecture, match=rf"runs its layers {REFUSED}"):
            MEASURED[call](model)


@zoo.needs_hooked
def test_two_layers_with_one_attention_are_refused_in_a_hooked_transformer():
    model = zoo.hooked("llama")
    model.blocks[1].attn = model.blocks[0].attn
    with pytest.raises(UnsupportedArchitecture, match=r"\(blocks\.0\.attn\.hook_z fires several times\)"):
        tls.verify_scores(model)


@pytest.mark.filterwarnings("ignore:.*hooks of yours are on the model")
def test_the_proof_is_made_once_and_out_of_sight():
    model, lengths = zoo.bridge("llama"), []
    passes = []
    model.original_model.register_forward_hook(lambda *_: passes.append(1))
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: lengths.append(x.shape[1]))]):
        for _ in range(2):
            tls.verify_scores(model, zoo.prompt())
    assert lengths == 2 * [zoo.PROMPT_LENGTH]  # the passes that are asked for, which end behind the last pattern
    assert len(passes) == 1
