"""Columns of the tables of the experiment on code: spectral parameters of a pretrained model, its weights frozen.

BA is "Bifocal Attention", section 5.2.
"""

from dataclasses import replace

from tlspectral.studies.bifocal.columns import TRAJECTORY, ZIGZAG, phase_columns
from tlspectral.studies.bifocal.learned_frequency_columns import experiment_table
from tlspectral.studies.common.columns import STEP
from tlspectral.tables.column import Column
from tlspectral.tables.head_columns import COLUMNS

# fmt: off
_HEAD = (COLUMNS["layer"], COLUMNS["head"])
_FREQUENCY = COLUMNS["frequency"]
_OMEGA, _GAIN, _PHASE = TRAJECTORY[-3:]
_ARM = Column("arm", "What is trained: log shifts of the frequencies (omega), gain and phase (placebo), all (full), or "
    "none (standard); the weights too in the tables of fine-tuning.",
    "label", range="full, omega, placebo, standard", source="BA 5.2",
    does_not_establish="That placebo can do nothing: with frozen weights gain and phase are no gauge.")
_ONE_RUN = "The spread between runs: there is one per arm. The files may have been in the model's training."

_LOSSES = (
    Column("loss", "Next-token cross-entropy, mean over held-out files; step 0 is the intact model.", "nat",
        range="0 .. inf", source="BA 5.2", does_not_establish=_ONE_RUN),
    Column("se", "Standard error of loss over held-out files.", "nat", range="0 .. inf",
        does_not_establish=_ONE_RUN),
)
_EFFECTS = (
    Column("reference", "What the arm is compared with on the same files: the intact model, or another arm.", "label",
        range="intact, placebo, omega, standard"),
    Column("value", "Held-out loss of the arm at the end less that of the reference, mean over files.", "nat",
        range="-inf .. inf", source="BA 5.2",
        does_not_establish="That the model needed other frequencies. " + _ONE_RUN),
    Column("se", "Standard error of value over files, paired.", "nat", range="0 .. inf",
        does_not_establish=_ONE_RUN),
    Column("pvalue", "Two-sided p of no difference, by flipping the signs of the files' differences.", "probability",
        range="1e-4 .. 1 above 13 files", also_known_as="sign-flip test", does_not_establish=_ONE_RUN),
)

_MOVED = "That a parameter that moved did anything: Adam moves parameters with no effect too."
_OMEGA_START = Column("omega_start", "Frequency of the pair before training: the model's own.", "rad/token",
    range="0 .. pi, as a rule", source="the model", also_known_as="theta")
_LOG_RATIO = Column("log_ratio", "log(omega / omega_start).", "log ratio", range="-inf .. inf", source="BA 5.2",
    does_not_establish=_MOVED)


def _mean(name: str, of: str, unit: str, span: str) -> Column:
    return Column(name, f"Mean over layers and heads of {of} of the pair at the end.", unit, range=span,
        does_not_establish=_MOVED)


_BY_FREQUENCY = (
    replace(_OMEGA_START, meaning="Frequency of the pair before training, mean over layers and heads."),
    Column("wavelength", "2 pi / omega_start, mean over layers and heads.", "token", range="2 .. inf, as a rule",
        source="the model",
        does_not_establish="That a pair is blind to positions where it is long: the angle within the context decides."),
    _mean("log_ratio", "log(omega / omega_start)", "log ratio", "-inf .. inf"),
    _mean("log_ratio_abs", "the absolute value of log(omega / omega_start)", "log ratio", "0 .. inf"),
    _mean("log_gain", "the logarithm of the absolute gain", "log ratio", "-inf .. inf"),
    _mean("log_gain_abs", "the absolute value of that logarithm", "log ratio", "0 .. inf"),
    _mean("phase", "the phase", "rad", "-inf .. inf"),
    _mean("phase_abs", "the absolute phase", "rad", "0 .. inf"),
)
_TRAINING = Column("loss", "Loss of the step's rows of code, before the step was taken.", "nat", range="0 .. inf",
    also_known_as="training loss", does_not_establish="A held-out loss.")


TABLES = (
    experiment_table("source-code", "code_losses", _ARM, STEP, *_LOSSES),
    experiment_table("source-code", "code_effects", _ARM, *_EFFECTS),
    experiment_table(
        "source-code", "code_movement", _ARM, *_HEAD, _FREQUENCY, _OMEGA_START, _OMEGA, _LOG_RATIO, _GAIN, _PHASE
    ),
    experiment_table("source-code", "code_by_frequency", _ARM, _FREQUENCY, *_BY_FREQUENCY),
    experiment_table("source-code", "code_phase_drift", _ARM, STEP, *_HEAD, *phase_columns("the head's pairs"), ZIGZAG),
    experiment_table("source-code", "code_training", _ARM, STEP, _TRAINING),
    experiment_table("fine-tuning", "backbone_losses", _ARM, STEP, *_LOSSES),
    experiment_table("fine-tuning", "backbone_effects", _ARM, *_EFFECTS),
    experiment_table(
        "fine-tuning", "backbone_phase_drift", _ARM, STEP, *_HEAD, *phase_columns("the head's pairs"), ZIGZAG
    ),
)
