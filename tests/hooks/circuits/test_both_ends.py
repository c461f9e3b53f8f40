"""The proof that all edges are the clean run and none the counterfactual one: made once for what it depends on."""

import copy

import pytest
import torch
import zoo
from pair_prompts import prompt_pairs

import tlspectral as tls
from tlspectral.errors import EditNotHonored
from tlspectral.hooks.circuits import pairs
from tlspectral.models.hooking.methods import methods_replaced
from tlspectral.models.reading import attention_view
from tlspectral.models.running.partial_runs import module_hooks

EDGES = [("embedding", "L0MLP"), ("L0H1", "L1H0.q"), ("L1MLP", "logits")]
CLEAN, OTHER = prompt_pairs(2, 9, seed=0)


def task_of(clean=CLEAN, other=OTHER):
    return tls.logit_difference(clean, 7, 10, counterfactual=other)


@pytest.fixture
def passes(spied):
    """How many passes of the whole model a call takes."""
    seen = spied(pairs, "logits_at")

    def count(model, task=None):
        seen.clear()
        tls.run_circuit(model, EDGES, task or task_of())
        return len(seen)

    return count


OWN, PROOF = 2, 3  # passes of a circuit: the pairs and the clean prompts; a plain one and two of the proof


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_a_second_call_proves_nothing_and_has_the_same_value(passes, backend):
    model = getattr(zoo, backend)("llama")
    assert passes(model) == PROOF + OWN
    first = tls.run_circuit(model, EDGES, task_of())
    assert passes(model) == OWN
    assert tls.run_circuit(model, EDGES, task_of()).per_sequence.tolist() == first.per_sequence.tolist()
    # Calls of other kinds keep it too, and several pairs are known.
    tls.edge_effects(model, "L1H0.q", task=task_of(CLEAN + 1, OTHER + 1))
    assert [passes(model, task_of(CLEAN + n, OTHER + n)) for n in (0, 1, 0)] == [OWN] * 3
    assert passes(copy.deepcopy(model)) == PROOF + OWN  # a model of its own


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "task",
    [task_of(OTHER, CLEAN), task_of(CLEAN, CLEAN.flip(0)), task_of(CLEAN[:, :8], OTHER[:, :8])],
    ids=["sides exchanged", "another pair", "shorter"],
)
@pytest.mark.filterwarnings("ignore:.*differ before every named position")
def test_another_first_pair_is_proved_anew(passes, task):
    model = zoo.bridge("llama")
    passes(model)
    assert [passes(model, one) for one in (task, task, None)] == [PROOF + OWN, OWN, OWN]


def weights_of(model):
    return model.blocks[1].mlp.gate.original_component.weight


def in_place(model):
    with torch.no_grad():
        weights_of(model).add_(1e-3)


def through_data(model):
    weights_of(model).data[0, 0] += 1e-3  # is not counted as an edit in place


def replaced(model):
    owner = model.blocks[1].mlp.gate.original_component
    owner.weight = torch.nn.Parameter(owner.weight.detach() * 1.001)


def loaded(model):
    model.original_model.load_state_dict({k: v * 1.001 for k, v in model.original_model.state_dict().items()})


def buffer(model):
    model.original_model.model.rotary_emb.inv_freq.mul_(0.9)


def attribute(model):
    model.original_model.model.norm.variance_epsilon = 1e-3


def configuration(model):
    model.cfg.eps = 1e-3


def kind(model):
    model.original_model.model.layers[0].mlp.act_fn = torch.nn.GELU()


@pytest.mark.parametrize("change", [in_place, through_data, replaced, loaded, buffer, attribute, configuration, kind])
def test_a_change_of_the_model_is_proved_anew(passes, change):
    model = zoo.bridge("llama")
    passes(model)
    change(model)
    assert [passes(model), passes(model)] == [PROOF + OWN, OWN]


def on_a_hook_point(model):
    return model.hooks(fwd_hooks=[("blocks.0.hook_out", lambda x, hook: None)])


def on_a_module(model):
    return module_hooks([(model.blocks[0].register_forward_hook, lambda module, given, output: None)])


def in_place_of_a_forward(model):
    block = model.blocks[0].mlp.original_component
    forward = block.forward
    return methods_replaced(block, {"forward": lambda *given: forward(*given)})


def of_an_ablation(model):
    return tls.ablate(model, "L0H0", "output")


@pytest.mark.fast(1)
@pytest.mark.parametrize("put_on", [on_a_hook_point, on_a_module, in_place_of_a_forward, of_an_ablation])
@pytest.mark.filterwarnings("ignore:.*hooks of yours are on the model")
def test_under_a_hook_it_is_proved_in_each_call(passes, put_on):
    model = zoo.bridge("llama")
    passes(model)
    with put_on(model):
        assert [passes(model), passes(model)] == [PROOF + OWN] * 2
    assert passes(model) == OWN


@pytest.mark.filterwarnings("ignore:.*hooks of yours are on the model")
def test_a_proof_that_fails_fails_again_and_is_not_remembered():
    model, task = zoo.bridge("llama"), task_of(*prompt_pairs(2, 9, seed=0, at=8))
    value = float(tls.run_circuit(model, EDGES, task))
    # The stream is no sum of writes any more.
    with model.hooks(fwd_hooks=[(attention_view(model).hook_names(1)["residual"], lambda x, hook: 1.5 * x)]):
        for _ in range(2):
            with pytest.raises(EditNotHonored, match="no edge kept is not the run of the counterfactual prompt"):
                tls.run_circuit(model, EDGES, task)
    assert float(tls.run_circuit(model, EDGES, task)) == value
    kept = weights_of(model).detach().clone()
    with torch.no_grad():
        weights_of(model).fill_(torch.nan)
    for _ in range(2):
        with pytest.raises(EditNotHonored, match="a circuit with"):
            tls.run_circuit(model, EDGES, task)
    with torch.no_grad():
        weights_of(model).copy_(kept)
    assert float(tls.run_circuit(model, EDGES, task)) == value


def test_training_mode_is_the_same_state(passes):
    model = zoo.bridge("llama")
    passes(model)
    model.train()
    assert passes(model) == OWN
