"""What histories refuse, before anything is loaded where that can be known: the call and the words."""

import functools

import pandas as pd
import pytest
import zoo
from tlspectral_studies.common import RandomMapTask, TrainingSettings, TransformerConfig, train
from tlspectral_studies.common.checkpoints import training_checkpoints

import tlspectral as tls
from tlspectral.errors import BadHead, UnsupportedArchitecture
from tlspectral.history import suite_checkpoints
from tlspectral.history.checkpoint_tables import HeadHistory

WEIGHTS = {"null_draws": 2, "detectors": False}


def history(checkpoints, **options):
    return tls.head_history(checkpoints, **WEIGHTS | options)


def refuse():
    raise AssertionError("loaded although the input is wrong")


def steps(*labels):
    return history([(label, refuse) for label in labels])


@functools.cache
def folder(*names):
    """A folder with empty folders of these names, or with a model where a name has one."""
    made = zoo.temporary("history_")
    for name in names:
        step, _, model = name.partition(":")
        zoo.save_folder(model, made / step) if model else (made / step).mkdir()
    return made


@functools.cache
def run_without_checkpoints():
    settings = TrainingSettings(steps=1, batch_size=2, evaluation_sequences=2, warmup_steps=1)
    return train(TransformerConfig(d_vocab=8, n_ctx=16), RandomMapTask(vocabulary=8, length=16), settings)


def of_llama(**options):
    return history([(0, zoo.shared("bridge", "llama"))], **options)


def test_a_loader_that_takes_an_argument_is_refused_before_anything_is_loaded():
    with pytest.raises(
        TypeError, match=r"what loads the checkpoint 1 is a function of no arguments; found <lambda>\(s"
    ):
        history([(0, refuse), (1, lambda step: step)])


REFUSED = {
    ValueError: {
        # Labels.
        "none": (lambda: history([]), "checkpoints= is empty"),
        "a step twice": (lambda: steps(0, 2, 2), "step 2 comes twice"),
        "a step that falls": (lambda: steps(0, 4, 2), "step 2 comes after step 4"),
        "a generator of falling steps": (
            lambda: history((step, zoo.shared("bridge", "llama")) for step in (2, 1)),
            "step 1 comes after step 2",
        ),
        "a negative step": (lambda: steps(0, -1), "-1 is not a training step"),
        "half a step": (lambda: steps(0.5), "0.5 is not a training step"),
        "a flag": (lambda: steps(True), "True is not a training step"),
        "a number as text": (lambda: steps("8"), "'8' is not a training step: give whole numbers .* or a name"),
        "a name twice": (lambda: history(["a", "a"]), "'a' comes twice: give .label, checkpoint. pairs"),
        "a step in two folders": (lambda: history(["run/step8", "other/step8"]), "step 8 comes twice"),
        "a name and a step": (
            lambda: history(["run/step8", "run/final"]),
            "'run/final' is a name, but 8 is a training",
        ),
        # Models.
        "no model": (lambda: history([(5, 3)]), "step 5: found int; give a model, its name"),
        "a function of no model": (lambda: history([(5, lambda: 3)]), "step 5: .*neither a TransformerBridge"),
        "another width": (
            lambda: history([(0, zoo.shared("bridge", "llama")), (1, tls.load_model("tiny-rope"))]),
            "step 1 has another architecture than step 0: d_model 64, there 48",
        ),
        "other kind of positions": (
            lambda: history([(0, tls.load_model("tiny-rope")), (1, tls.load_model("tiny-ape"))]),
            r"rotary \[False, False\], there \[True, True\]",
        ),
        "another architecture in files": (
            lambda: history(folder("step0:llama", "step1:gpt2")),
            "step 1 has another architecture than step 0: ",
        ),
        "a source above its target": (
            lambda: history([(0, refuse)], pairs=[((1, 0), (1, 1))]),
            r"\(\(1, 0\), \(1, 1\)\) cannot compose",
        ),
        "a track without detectors": (lambda: of_llama().track(), "detectors were not run"),
        # Names and folders.
        "steps nobody knows": (lambda: history("maker/model"), "the training steps of maker/model are not known"),
        "names of steps nobody knows": (
            lambda: suite_checkpoints("maker/model", [0]),
            "how maker/model names its training st",
        ),
        "steps of a packaged model": (lambda: suite_checkpoints("tiny-rope", [0]), "no revision or checkpoint to ch"),
        "an empty folder": (lambda: suite_checkpoints(folder()), r"has no sub-folder step\{N\} or checkpoint-\{N\}"),
        "a step in a folder twice": (lambda: history(folder("step5:llama", "checkpoint-5:llama")), "5 comes twice"),
        "a step that is not on the hub": (
            lambda: suite_checkpoints("EleutherAI/pythia-70m", [512])[0][1](),
            "EleutherAI/pythia-70m.*step512",
        ),
        "a training that kept no steps": (lambda: training_checkpoints(run_without_checkpoints()), "keep_steps"),
    },
    TypeError: {
        "steps alone": (lambda: history([0]), "an object of type int: give names, folders, models"),
        "the name of a task": (
            lambda: of_llama(blocks="copying"),
            "one tls.positional.BlockPrompt.*'copying'. For tasks",
        ),
        "several prompts": (lambda: of_llama(blocks=[]), "one tls.positional.BlockPrompt.*; found list. For tasks"),
        "a function alone": (lambda: history([lambda: None]), "an object of type function"),
    },
    FileNotFoundError: {
        "a path to nowhere": (lambda: history(["/nowhere/step5"]), "no folder or file /nowhere/step5"),
        "a suite that is nowhere": (lambda: suite_checkpoints("/nowhere"), "no folder"),
        "a step that a folder lacks": (
            lambda: suite_checkpoints(folder("step0:llama", "checkpoint-9:llama"), [0, 7]),
            "neither a folder step7 nor checkpoint-7",
        ),
    },
    UnsupportedArchitecture: {
        "an encoder": (lambda: history(folder("step3:bert")), "^step 3: .*not read layer by layer"),
    },
    BadHead: {
        "a track of no head": (lambda: of_llama().track((1, 7)), "L1H7 does not exist"),
        "no sender": (lambda: of_llama(pairs=[((0, 5), (1, 0))]), "L0H5 does not exist"),
        "senders beside receivers": (
            lambda: of_llama(pairs=([(0, 0), (1, 1)], [(1, 2), (2, 3)])),
            "two readings: .senders, receivers",
        ),
        "no receiver": (lambda: of_llama(pairs=[((0, 0), (1, 5))]), "does not exist"),
        "no layer": (lambda: of_llama(pairs=[((0, 0), (2, 0))]), "does not exist"),
    },
}


@pytest.mark.parametrize(
    ("error", "call", "said"),
    [pytest.param(error, *row, id=name) for error, rows in REFUSED.items() for name, row in rows.items()],
)
@pytest.mark.usefixtures("no_network")
def test_a_history_that_cannot_be_is_refused(error, call, said):
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("prev", r"give history\.heads\['prev'\]$"),
        ("step", r"give history\.heads\['step'\] or history\.summary\['step'\]$"),
        ("other", r"its tables are history\.heads, history\.summary, history\.composition: give one of them$"),
        (["step"], "its tables are "),
        (0, "its tables are "),
    ],
)
def test_an_index_of_a_history_is_refused_with_the_table_that_has_it(key, said):
    tables = [pd.DataFrame(columns=names) for names in (["step", "prev"], ["step"], [])]
    with pytest.raises(TypeError, match=f"has several tables and is not a table itself: {said}"):
        HeadHistory(*tables)[key]


def test_pairs_and_tracks_count_from_the_end():
    """The model has two layers with four heads."""
    made = of_llama(pairs=[((-2, -1), "L-1H0"), ("L0H3", (1, 0))])
    ends = made.composition[["sender_layer", "sender_head", "receiver_layer", "receiver_head"]]
    assert ends.to_numpy().tolist() == [[0, 3, 1, 0]] * 2
    assert made.track((-1, -1)).equals(made.track("L1H3"))
    with pytest.raises(
        ValueError, match=r"cannot compose: give .sender, receiver. with the sender in an earlier layer"
    ):
        of_llama(pairs=[((-1, 0), (1, 0))])
