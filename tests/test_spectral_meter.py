"""The meter of learned frequencies: its number, its record and its warning; and the rates at two contexts."""

import warnings

import pytest
import torch
import transformers
import zoo
from test_spectral_hugging_face import Prompts

from tlspectral.spectral_rope import OmegaMeter, omega_shift, parameter_groups, to_spectral


def test_it_is_the_largest_change_times_the_context():
    spectral = to_spectral(zoo.hf_model("llama"), log_omega=False)
    assert omega_shift(spectral, 1000) == 0
    with torch.no_grad():
        spectral.spectral["1"].omega[1, 2] -= 0.25
        spectral.spectral["0"].omega[0, 0] += 0.125
    assert omega_shift(spectral, 1000) == pytest.approx(250, rel=1e-5)  # rounding of float32
    with pytest.raises(TypeError, match="not a spectral model"):
        omega_shift(zoo.hf_model("llama"), 10)


@pytest.mark.parametrize(("context", "warns"), [(8, False), (4096, True)])
def test_the_trainer_records_it_and_warns_once(context, warns, tmp_path):
    spectral = to_spectral(zoo.hf_model("llama"))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, save_strategy="no",
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=spectral, args=arguments, train_dataset=Prompts(), callbacks=[OmegaMeter(context)]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert sum("no longer that of the model" in str(warning.message) for warning in caught) == warns
    shifts = [record["omega_shift"] for record in trainer.state.log_history if "loss" in record]
    assert len(shifts) == 3
    assert 0 < shifts[0] < shifts[-1]
    assert shifts[-1] == omega_shift(spectral, context)


@pytest.mark.parametrize("context", [32, 1024])
def test_a_step_at_the_advised_rates_stays_small(context):
    """One AdamW step moves a log frequency by its rate: at most .1 radians at 1024 tokens for a pair of 1 rad/token."""
    spectral = to_spectral(zoo.hf_model("llama"))
    tokens = zoo.prompt(batch=1, length=context)
    optimizer = torch.optim.AdamW(parameter_groups(spectral, lr=1e-3))
    spectral(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert 0 < omega_shift(spectral, context) <= 1.01e-4 * context  # 1e-4 of the fastest pair's radian a token
