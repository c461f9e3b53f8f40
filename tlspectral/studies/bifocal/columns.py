"""Columns of the tables on learnable rotary positions in a small Llama trained on formal languages.

BA is "Bifocal Attention". `tlspectral study learn EXPERIMENT -o FOLDER` writes all of them.
"""

from dataclasses import replace

from tlspectral.studies.bifocal.learned_frequency_columns import experiment_table
from tlspectral.studies.common.columns import SEED, STEP
from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import COLUMNS

# fmt: off
_HEAD = (COLUMNS["layer"], COLUMNS["head"])
_FREQUENCY = COLUMNS["frequency"]

_LANGUAGE = Column("language", "Formal language: nested brackets, a motif behind noise, or sums modulo 7.", "label",
    range="dyck3, bio_rotation, modulo7", source="BA 4.2")
_ARM = Column("arm",
    "What of the rotary positions is learned: nothing (standard), frequencies (omega), frequencies, gain and phase "
    "(full), the same in half of the heads (bifocal), gain and phase alone (placebo); full_noise and "
    "full_noise_shared start with BA's phase noise.", "label",
    range="standard, omega, full, bifocal, placebo, full_noise, full_noise_shared", source="BA 3",
    does_not_establish="That a learned parameter can change the model: gain and phase of trained queries are gauge.")
_RUN = (_LANGUAGE, _ARM, SEED)
_SIZE_LIMIT = "Anything about models of another size, or trained for longer."
_RATE = Column("learning_rate", "AdamW's rate of the weights; that of the frequencies is a tenth of it.", "per step",
    range="0 .. inf", source="this package; BA gives none",
    does_not_establish="That it is the best: it is the best of a few, by one tuning seed.")
_LOSS = Column("loss", "Mean cross-entropy over the scored tokens of fresh sequences.", "nat per scored token",
    range="0 .. inf", source="BA 4.2, Table 1", does_not_establish=_SIZE_LIMIT)
_ACCURACY = Column("accuracy", "Share of the scored tokens of fresh sequences that have the largest logit.", "share",
    range="0 .. 1", source="BA 4.2", does_not_establish=_SIZE_LIMIT)
_LOCK_IN = Column("lock_in",
    "First step at which the training loss, a mean over 10 steps, has lost more than half of its distance to the "
    "floor within 20 steps. NaN: none.", "step", range="30 .. steps", source="BA Fig. 4, which does not define it",
    does_not_establish="That something was locked in: it is a rule on the loss.")
_BATCH_LOSS = Column("loss", "Loss of the batch of the step, before the step was taken.", "nat per scored token",
    range="0 .. inf", source="BA Fig. 4", also_known_as="training loss",
    does_not_establish="A held-out loss, where the same sequences come in every step.")
_INTERVAL = "That there is no difference where intervals overlap: a few seeds show large ones only."


def _with_interval(name: str, column: Column) -> tuple[Column, ...]:
    return (
        replace(column, name=name, meaning=f"Mean over seeds. {column.meaning}"),
        *(
            replace(column, name=f"{name}_{end}", range="-inf .. inf", source="this package",
                meaning=f"{which} end of the 95 % t interval of {name} over seeds; NaN for one.",
                does_not_establish=_INTERVAL)
            for end, which in (("low", "Lower"), ("high", "Upper"))
        ),
    )


def _difference(column: Column) -> Column:
    return replace(
        column,
        meaning=f"{column.name} less that of the arm standard with the same seed. NaN for standard itself.",
        range="-inf .. inf",
        does_not_establish="That an arm is better where its interval holds 0.",
    )


def _of_language(name: str, meaning: str, unit: str, limit: str) -> Column:
    return Column(name, meaning, unit, range="0 .. inf" if unit != "share" else "0 .. 1", does_not_establish=limit)


_TABLE1 = (
    _LANGUAGE, _ARM, _RATE,
    Column("seeds", "Runs behind the row.", "count", range="1 .. inf"),
    Column("lock_ins", "Runs with a lock_in.", "count", range="0 .. seeds", source="BA Fig. 4",
        does_not_establish="That something was locked in: it is a rule on the loss."),
    *_with_interval("loss", _LOSS), *_with_interval("loss_difference", _difference(_LOSS)),
    *_with_interval("accuracy", _ACCURACY), *_with_interval("accuracy_difference", _difference(_ACCURACY)),
    _of_language("entropy_floor", "Loss per scored token that no model can go below.", "nat per scored token",
                 "That a model of this size reaches it."),
    _of_language("sequence_floor", "The same where every token counts, also those that no prefix decides.",
                 "nat per token", "A floor of loss, which is over scored tokens alone."),
    _of_language("chance_loss", "Loss of the best guess that sees no sequence.", "nat per scored token",
                 "What a model reaches with a part of the sequence."),
    _of_language("chance_accuracy", "Frequency of the most frequent answer.", "share",
                 "What a model reaches with a part of the sequence."),
    _of_language("backbone_parameters", "Numbers learned in the backbone; the same in every arm.", "count",
                 "What they are used for."),
    _of_language("spectral_parameters", "Numbers learned in the rotary positions.", "count",
                 "That they add anything: in placebo they are gauge."),
)

_CHOSEN = Column("chosen", "Whether this rate has the lowest held-out loss of the arm, at a tie the lowest rate.",
    "flag", range="False, True", does_not_establish="That it is the best on other seeds.")
_TRAINING_LOSS = Column("training_loss", "Mean loss of the last 20 steps on the same few sequences.",
    "nat per scored token", range="0 .. inf", also_known_as="memorisation loss",
    does_not_establish="Anything on fresh sequences: it is the control.")

_SIZE = Column("size", "Depth of the bracket words, or letters of noise, of the test's sequences.", "count",
    range="1 .. inf; 4 .. 24 and 100 .. 400 in the full schedule", source="BA 1.2",
    does_not_establish="Why accuracy falls: longer inputs are new positions, new distances and new depths alike.")
_TOKENS = Column("tokens", "Scored tokens behind the row.", "count", range="1 .. inf",
    does_not_establish="Independent trials: tokens of a sequence are not.")
_TRAINED = Column("trained", "Whether training had sequences of this size.", "flag", range="False, True",
    does_not_establish="That training had these sequences: they are fresh.")


def intervals(what: str, unit: str) -> tuple[Column, ...]:
    """Columns `mean, low, high, n` of a mean over seeds."""
    return (
        Column("mean", f"Mean over seeds of {what}.", unit, range="-inf .. inf", does_not_establish=_INTERVAL),
        Column("low", "Lower end of the 95 % t interval of mean; NaN for one seed.", unit, range="-inf .. inf",
            does_not_establish=_INTERVAL),
        Column("high", "Upper end of that interval.", unit, range="-inf .. inf", does_not_establish=_INTERVAL),
        Column("n", "Seeds.", "count", range="1 .. inf"),
    )


_GAUGE = "That a parameter that moved did anything: Adam moves parameters with no effect too."
_PARAMETERS = (
    Column("omega", "Frequency of the pair as it is applied.", "rad/token", range="-inf .. inf", source="BA 3",
        also_known_as="Omega", does_not_establish=_GAUGE),
    Column("gain", "Factor on the pair's queries, as it is applied.", "ratio", range="-inf .. inf", source="BA 3",
        also_known_as="amplitude", does_not_establish=_GAUGE),
    Column("phase", "Angle added to the pair's queries; one that queries and keys share as it stands in the parameter.",
        "rad", range="-inf .. inf", source="BA 3",
        does_not_establish=_GAUGE + " A shared phase cancels in every score."),
)
TRAJECTORY = (STEP, *_HEAD, _FREQUENCY, *_PARAMETERS)
"""The columns of `Evolution.trajectory`."""

_PAIRS = Column("pairs",
    "Which rotary pairs count: all, or turning, those with at least half a rotation over the longest distance.",
    "label",
    range="all, turning",
    does_not_establish="That the others do nothing: slow pairs have a cosine near 1 without learning.")
_DRIFTS = "That resonance helps: a gain may come with any drift towards slower frequencies."
_RESONANCE = Column("resonance",
    "Mean over the task's distances N of the largest cos(omega N) over pairs; mean over runs and heads.", "cosine",
    range="-1 .. 1", source="BA 2.2, 5.3", does_not_establish=_DRIFTS)


def _gain(name: str, meaning: str, unit: str = "cosine", span: str = "-2 .. 2") -> Column:
    return Column(name, meaning, unit, range=span, does_not_establish=_DRIFTS)


_GAINS = (
    _PAIRS,
    _gain("start", "Resonance of the head before training: mean over distances of the largest cos(omega N) over pairs.",
          span="-1 .. 1"),
    _gain("end", "The same after training.", span="-1 .. 1"),
    _gain("gain", "end - start."),
    _gain("random_mean", "Mean gain of moves of the same size with random signs."),
    _gain("random_sd", "Standard deviation of the gain of those moves.", span="0 .. inf"),
    _gain("excess", "gain - random_mean."),
    _gain("percentile", "Share of those moves with at most this gain. NaN where nothing moved.", "share", "0 .. 1"),
)

_NOISE = "Learning: a phase that cancels in every score drifts too, on rounding noise that Adam scales up."


def phase_columns(over: str) -> tuple[Column, ...]:
    """`mean_abs, start_abs, drift` of phases, means over rotary pairs and over what `over` names."""
    meanings = (
        ("mean_abs", "Mean absolute phase", "mean shift"),
        ("start_abs", "Mean absolute phase before training", ""),
        ("drift", "Mean distance of phases from where they started", ""),
    )
    return tuple(
        Column(name, f"{meaning}, over {over}.", "rad", range="0 .. inf", source="BA 5.3", also_known_as=known,
            does_not_establish=_NOISE)
        for name, meaning, known in meanings
    )


ZIGZAG = Column("zigzag",
    "Share of neighbouring increments of the phase over frequency with opposite signs. NaN where phases are equal.",
    "share", range="0 .. 1",
    does_not_establish="Noise where it is 2/3: independent noise has that, and other curves can.")
_MEASURE = Column("measure", "Which number of the table per run the row is about.", "label",
    range="a column of the table per run")

_SPREAD = (
    Column("word", "Number of the bracket word, from 0.", "index", range="0 .. words - 1"),
    Column("depth", "Nesting depth: the k-th opener, which is the k-th token too.", "index",
        range="1 .. depth of the words", source="BA Fig. 3",
        does_not_establish="Depth apart from position: they are one here, as in BA's sequences."),
    Column("pc1", "First principal component of the head's output at the opener.", "units of the output",
        range="-inf .. inf", source="BA Fig. 3",
        does_not_establish="That the model uses the depth, or counts it other than by position."),
    Column("pc2", "Second principal component of the same.", "units of the output", range="-inf .. inf",
        source="BA Fig. 3", does_not_establish="That the model uses the depth, or counts it other than by position."),
    Column("explained", "Share of the head's variance in both components together.", "share", range="0 .. 1",
        does_not_establish="That the rest is noise."),
    Column("between",
        "Share of the head's variance, over all columns, that lies between depths: 1 where each is a point.", "share",
        range="0 .. 1", does_not_establish="That the model uses the depth, or counts it other than by position."),
)


EVOLVE_LOSSES = Table("evolve.losses", "`tlspectral.studies.bifocal.evolve`", (STEP, _BATCH_LOSS))
EVOLVE_TRAJECTORY = Table("evolve.trajectory", "`tlspectral.studies.bifocal.evolve`", TRAJECTORY)
TABLES = (
    EVOLVE_LOSSES, EVOLVE_TRAJECTORY,
    experiment_table("languages", "table1_runs", _LANGUAGE, _ARM, _RATE, SEED, _LOSS, _ACCURACY, _LOCK_IN),
    experiment_table("languages", "table1", *_TABLE1),
    experiment_table("languages", "learning_rates", _LANGUAGE, _ARM, _RATE, SEED, _LOSS, _CHOSEN),
    experiment_table("languages", "losses", *_RUN, STEP, _BATCH_LOSS),
    experiment_table("memorisation", "memorisation", _LANGUAGE, _ARM, _RATE, SEED, _TRAINING_LOSS, _LOSS, _ACCURACY),
    experiment_table("memorisation", "memorisation_losses", *_RUN, STEP, _BATCH_LOSS),
    experiment_table("structure-gap", "structure_gap_runs", *_RUN, _SIZE, _LOSS, _ACCURACY, _TOKENS, _TRAINED),
    experiment_table("structure-gap", "structure_gap", _LANGUAGE, _ARM, _SIZE,
        *intervals("accuracy", "share"), _TRAINED),
    experiment_table("structure-gap", "structure_gap_beyond", _LANGUAGE, _ARM,
        *intervals("the accuracy over all sizes beyond training, less that of the arm standard", "share")),
    experiment_table("resonance", "trajectories", *_RUN, *TRAJECTORY),
    experiment_table("resonance", "resonance_steps", _LANGUAGE, _ARM, _PAIRS, STEP, _RESONANCE),
    experiment_table("resonance", "phase_steps", _LANGUAGE, _ARM, STEP, *phase_columns("pairs, heads and runs")),
    experiment_table("resonance", "resonance_runs", *_RUN, *_HEAD, *_GAINS),
    experiment_table("resonance", "resonance", _LANGUAGE, _ARM, _PAIRS,
        *intervals("measure, a mean over heads", "cosine"), _MEASURE),
    experiment_table("resonance", "phase_drift_runs", *_RUN, STEP, *_HEAD, *phase_columns("the head's pairs"), ZIGZAG),
    experiment_table("resonance", "phase_drift", _LANGUAGE, _ARM,
        *intervals("measure, a mean over heads", "rad, or share for zigzag"), _MEASURE),
    experiment_table("manifold", "manifold", *_HEAD, *_SPREAD, _ARM),
)
