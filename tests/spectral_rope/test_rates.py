"""Rates of spectral parameters and the meter of what they change: the page's recipe leaves a model what it was."""

import warnings

import pytest
import torch
import torch.nn.functional as F
import zoo
from installed import needs_smollm2
from page_code import blocks
from spectral_training import trainer_of
from spectral_zoo import base, config

import tlspectral as tls
from tlspectral.models.reading import attention_view
from tlspectral.models.running.text import packaged_text
from tlspectral.spectral_rope import OmegaMeter, SpectralHookedTransformer, omega_shift, parameter_groups, to_spectral

pytestmark = pytest.mark.long


def recipe(model):
    """The spectral model and the optimizer that the page makes of a model, line by line."""
    (lines,) = [block for block in blocks("docs/training.md") if "tls.to_spectral(model)" in block]
    names = {"tls": tls, "torch": torch, "model": model}
    exec(lines.split("trainer =")[0], names)
    return names["spectral"], names["optimizer"]


def row_loss(model, row):
    return F.cross_entropy(model(row, return_type="logits")[0, :-1], row[0, 1:])


def held_out_losses(model, rows):
    with torch.no_grad():
        return [float(row_loss(model, row[None])) for row in rows]


def one_step(spectral, optimizer, row):
    row_loss(spectral, row).backward(inputs=list(spectral.spectral_parameters()))
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"log_omega": False}, {"scope": "model"}, {"shared_phase": True}])
def test_frequencies_have_a_tenth_of_the_rate(options):
    spectral = to_spectral(base("bridge", "llama"), **options)
    groups = {group["name"]: group for group in parameter_groups(spectral, 0.02)}
    assert {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()} == {
        "gain_phase": (0.02, 0.0),
        "omega": (pytest.approx(0.002), 0.0),
    }
    held = {name: {id(value) for value in group["params"]} for name, group in groups.items()}
    for name, parameter in spectral.spectral.named_parameters():
        assert id(parameter) in held["omega" if "omega" in name else "gain_phase"]
    # Each once, and none of the base.
    assert sum(len(group["params"]) for group in groups.values()) == len(list(spectral.spectral_parameters()))


def own_weights(kind):
    if kind == "from scratch":
        return SpectralHookedTransformer(config())
    if kind == "transformers":
        return to_spectral(zoo.hf_model("llama"), share_weights=False)
    return to_spectral(base("bridge", "neox"), share_weights=False)


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", [pytest.param("from scratch", marks=zoo.needs_hooked), "transformers", "bridge"])
def test_weights_that_train_are_a_group_with_a_rate_of_their_own(kind):
    spectral = own_weights(kind)
    asked = {id(value) for value in spectral.parameters() if value.requires_grad}
    groups = {group["name"]: group for group in parameter_groups(spectral, 0.02, weights_lr=0.001)}
    assert list(groups) == ["gain_phase", "omega", "weights"]
    assert sorted(id(value) for group in groups.values() for value in group["params"]) == sorted(asked)
    assert {id(value) for name in ("gain_phase", "omega") for value in groups[name]["params"]} == {
        id(value) for value in spectral.spectral_parameters()
    }
    assert groups["weights"]["lr"] == 0.001
    assert parameter_groups(spectral, 0.02)[-1]["lr"] == 0.02
    decay = [group["weight_decay"] for group in torch.optim.AdamW([*groups.values()], weight_decay=0.3).param_groups]
    assert decay == [0.0, 0.0, 0.3]


def test_of_a_model_whose_weights_train_every_weight_moves_in_a_step():
    spectral = to_spectral(zoo.hf_model("llama"), share_weights=False)
    before = {name: value.detach().clone() for name, value in spectral.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(spectral, 1e-3))
    spectral(input_ids=zoo.prompt(), labels=zoo.prompt()).loss.backward()
    optimizer.step()
    assert not [name for name, value in spectral.named_parameters() if torch.equal(value, before[name])]


def test_what_asks_for_no_gradient_is_left_out():
    spectral = to_spectral(base("bridge", "llama"))
    for name, parameter in spectral.spectral.named_parameters():
        parameter.requires_grad_(name.endswith("phase"))
    (group,) = parameter_groups(spectral, 1e-3)
    assert group["name"] == "gain_phase"
    assert len(group["params"]) == 2


@pytest.mark.slow
def test_a_step_of_the_recipe_turns_no_pair_far_at_a_thousand_tokens():
    """Radians at distance 1,024: a tenth at most by the recipe; 1 and more by a linear step at AdamW's default rate."""
    model = tls.load_model("tiny-rope")
    row = torch.randint(3, attention_view(model).d_vocab, (1, 24), generator=torch.Generator().manual_seed(0))
    spectral, optimizer = recipe(model)
    one_step(spectral, optimizer, row)
    assert 0.05 < omega_shift(spectral, 1024) < 0.11
    linear = to_spectral(model, log_omega=False)
    one_step(linear, torch.optim.AdamW(linear.spectral_parameters(), weight_decay=0.0), row)
    assert omega_shift(linear, 1024) > 1.0


def test_the_meter_is_the_largest_change_times_the_context():
    spectral = to_spectral(zoo.hf_model("llama"), log_omega=False)
    assert omega_shift(spectral, 1000) == 0
    with torch.no_grad():
        spectral.spectral["1"].omega[1, 2] -= 0.25
        spectral.spectral["0"].omega[0, 0] += 0.125
    assert omega_shift(spectral, 1000) == pytest.approx(250, rel=1e-5)  # rounding of float32


def test_the_trainer_records_the_meter_and_warns_once(tmp_path):
    spectral = to_spectral(zoo.hf_model("llama"))
    meters = [OmegaMeter(8), OmegaMeter(4096)]  # the first has no reason to warn, the second in each step
    trainer = trainer_of(spectral, tmp_path, meters, max_steps=3, save_strategy="no", logging_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    (said,) = [str(warning.message) for warning in caught if "differs from the starting model" in str(warning.message)]
    assert "over 4096 tokens" in said
    shifts = [record["omega_shift"] for record in trainer.state.log_history if "loss" in record]
    assert len(shifts) == 3
    assert 0 < shifts[0] < shifts[-1]
    assert shifts[-1] == omega_shift(spectral, 4096)


@pytest.mark.slow
def test_a_step_of_the_recipe_leaves_a_held_out_row_of_five_hundred_tokens():
    needs_smollm2()
    model = tls.load_model("smollm2-135m")
    view, length = attention_view(model), 512
    ids = model.tokenizer(packaged_text(), add_special_tokens=False, verbose=False).input_ids
    rows = torch.tensor([[view.start_token, *ids[at : at + length - 1]] for at in range(0, 2 * length, length)])
    before = held_out_losses(model, rows[1:])
    spectral, optimizer = recipe(model)
    one_step(spectral, optimizer, rows[:1])
    after = held_out_losses(spectral, rows[1:])
    # Measured: 3.526 before, 3.523 after; 3.862 by AdamW's default rate on omega itself.
    assert all(found < wanted + 0.02 for found, wanted in zip(after, before, strict=True))
