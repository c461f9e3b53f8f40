"""Wrong arguments: swapped ones are recognised, long values are printed on one line, users' functions are named."""

import inspect

import numpy as np
import pandas as pd
import pytest
import torch
from zoo import shared

import tlspectral as tls
from tlspectral.errors import BadHead, kind_of, not_a, shown

pytestmark = pytest.mark.usefixtures("unchecked")

IDS = torch.arange(2, 26).reshape(3, 8)
TASK = tls.logit_difference(IDS, 3, 4)
TABLE = pd.DataFrame({"layer": range(10_000), "head": 0, "a": 1.5, "b": 2})


def model():
    return shared("bridge", "llama")


KINDS = [
    (model, "a model"),
    (lambda: TASK, "a task"),
    (lambda: "induction", "a task"),
    (lambda: "rope_phase", "a part"),
    (lambda: "M_S", "a part"),
    (lambda: tls.parts.Band("high"), "a part"),
    (lambda: "L5H1", "a head"),
    (lambda: (5, 1), "a head"),
    (lambda: ["L5H1", "L6H0"], "heads"),
    (lambda: [(5, 1), (6, 0)], "heads"),
    (lambda: "L5", "all heads of a layer"),
    (lambda: "L5KV1", "a key/value group"),
    (lambda: "L1H0.q", "a receiver"),
    (lambda: "The cat sat", "text, such as a prompt"),
    (lambda: ["The cat", "sat down"], "texts, such as prompts"),
    (lambda: IDS, "whole numbers, such as token ids"),
    (lambda: [[5, 6, 7]], "whole numbers, such as token ids"),
    (lambda: np.arange(4), "whole numbers, such as token ids"),
    (lambda: TABLE, "a table"),
    (lambda: len, "a function"),
    (lambda: "12", ""),
    (lambda: None, ""),
    (lambda: [1.5, None], ""),
    (lambda: [], ""),
]


@pytest.mark.parametrize(("value", "kind"), KINDS, ids=[str(place) for place in range(len(KINDS))])
def test_an_argument_is_recognised(value, kind):
    assert kind_of(value()) == kind


SWAPPED = [
    (
        lambda m: tls.ablate(m, "rope_phase", "output"),
        BadHead,
        r"'rope_phase' is a part, not a head; .*of ablate\(model",
    ),
    (lambda m: tls.ablate(m, "L0H1", "L0H2"), ValueError, "'L0H2' is a head, not a part; .*'rope_phase'"),
    (lambda m: tls.ablate("L0H1", m, "output"), TypeError, "'L0H1' is a head, not a model; .*tlspectral.load_model"),
    (
        lambda m: tls.ablation_sweep(m, ["L0H1"]),
        ValueError,
        r"\['L0H1'\] are heads, not a part; .*ablation_sweep\(model",
    ),
    (lambda m: tls.ablation_sweep(m, TASK), ValueError, "is a task, not a part"),
    (lambda m: tls.ablation_sweep(m, TABLE), ValueError, "is a table, not a part"),
    (lambda m: tls.ablation_sweep(m, "output", task="output"), ValueError, "'output' is a part, not a task"),
    (lambda m: tls.ablation_sweep(m, "output", heads=IDS.tolist()), BadHead, "are whole numbers, such as token ids"),
    (lambda m: tls.scores(m, m, "L0H1"), TypeError, "is a model, not prompts"),
    (lambda m: tls.scores(m, "L0H1", "L0H1"), ValueError, "'L0H1' is a head, not a prompt"),
    (lambda m: tls.scores(m, TABLE, "L0H1"), TypeError, "is a table, not prompts"),
    (lambda m: tls.evaluate(TASK, m), TypeError, "is a task, not a model"),
    (lambda m: tls.evaluate(m, IDS), ValueError, "such as token ids, not a task"),
    (lambda m: tls.analyze_heads(TABLE), TypeError, "is a table, not a model"),
    (lambda m: tls.analyze_heads("L0H1"), ValueError, "'L0H1' is a head, not a model"),
    (lambda m: tls.plots.heads(m, "D_head"), TypeError, "is a model, not a table"),
    (lambda m: tls.stats.top_head_percentile(m), TypeError, "is a model, not a table"),
    (lambda m: tls.hooks.summarize_sweep(m, TABLE), TypeError, "is a model, not a table"),
    (lambda m: tls.tasks.induction("L0H1"), TypeError, "'L0H1' is a head, not repeated sequences"),
    (lambda m: tls.tasks.paired_effect(TASK, TASK), TypeError, "is a task, not the value of a task"),
    (lambda m: tls.Task(IDS, "L0H1"), TypeError, "'L0H1' is a head, not a metric"),
    (lambda m: tls.read_table(m), TypeError, "path= must be the path of a file or folder; found a"),
]


@pytest.mark.parametrize(("call", "error", "words"), SWAPPED, ids=[str(place) for place in range(len(SWAPPED))])
def test_swapped_arguments_are_recognised(call, error, words):
    with pytest.raises(error, match=words):
        call(model())


LONG = [torch.arange(10_000), torch.randn(100, 100), [*range(10_000)], ["thing"] * 10_000, TABLE, "a b " * 9_000, model]


@pytest.mark.parametrize("value", LONG, ids=[str(place) for place in range(len(LONG))])
def test_a_long_value_takes_one_line(value):
    value = value() if value is model else value
    assert len(shown(value)) <= 160
    for call in (
        lambda m: tls.ablate(m, "L0H1", value),
        lambda m: tls.ablation_sweep(m, "output", control=value),
        lambda m: tls.ablation_sweep(m, "output", draws=value),
        lambda m: tls.evaluate(m, value),
        lambda m: tls.head_directions(m, "L0H1", value),
        lambda m: tls.hooks.receivers("L0H1", value),
        lambda m: tls.logit_difference(IDS, 3, 4, positions=value),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            call(model())
        assert len(str(caught.value)) < 600
        assert str(caught.value).count("\n") == 0


def test_a_value_whose_own_text_fails_is_named_by_its_class():
    class Broken:
        def __repr__(self):
            raise RuntimeError("no text")

    assert shown(Broken()) == "a Broken"
    assert not_a(Broken(), "a part") == "a Broken is not a part"


def failing(*given):
    return torch.zeros(2) + torch.zeros(3)


def of_another_shape(*given):
    return torch.zeros(7)


class Half(tls.parts.QueryKeyPart):
    name = "half"

    def of(self, scores, pairs):
        return torch.zeros(2) + torch.zeros(3)


CALLS = [
    (lambda m: tls.evaluate(m, tls.Task(IDS, failing)), r"metric failing raised RuntimeError: .*shape \(3,\)"),
    (lambda m: tls.evaluate(m, tls.Task(IDS, of_another_shape)), r"metric of_another_shape .*shape \(3,\); found"),
    (lambda m: tls.detect_heads(m, prompts=IDS, pattern=failing), r"failing.* raised .*a matrix of shape \(8, 8\)"),
    (lambda m: tls.detect_heads(m, prompts=IDS, pattern=of_another_shape), r"of_another_shape.*shape \(8, 8\)"),
    (lambda m: tls.ablation_sweep(m, Half(), heads="L0H1", task=TASK), r"Half\.of\(\) .* raised .*of shape \("),
]


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[str(place) for place in range(len(CALLS))])
def test_a_function_of_the_user_that_fails_is_named_with_its_shape(call, words):
    with pytest.raises(ValueError, match=words):
        call(model())


def test_an_error_of_a_users_function_keeps_its_class():
    def divides(*given):
        return 1 / 0

    with pytest.raises(ZeroDivisionError, match=r"metric divides raised ZeroDivisionError: .*shape \(3,\)"):
        tls.evaluate(model(), tls.Task(IDS, divides))


SETTINGS = {
    "seed", "draws", "n_jobs", "folder", "control", "screen", "by", "max_se", "tau", "measure", "replace", "method",
    "rank", "choose", "null", "null_dtype", "null_blocks", "mode", "top", "remove", "checkpoint", "level",
}  # fmt: skip
"""Parameters that are settings also where the default is None."""
LISTS = {"task", "swaps", "queries", "base", "controls"}  # these take other values too, such as lists


RESULTS = {"HeadHistory", "HeadCard", "Wall", "PartialCorrelation", "Effect", "MetricValue"}  # users do not make them


def public_functions():
    rooms = (getattr(tls, room) for room in (*sorted(tls._SUBMODULES - {"errors"}), "parts"))
    named = {name: getattr(room, name) for room in (tls, *rooms) for name in getattr(room, "__all__", ())}
    return [
        function
        for name, function in named.items()
        if callable(function) and not inspect.isabstract(function) and name not in RESULTS
    ]


def settings_of(function):
    """Return the names of a public function's settings: numbers, words, True and False, and those in `SETTINGS`."""
    parameters = inspect.signature(function).parameters.values()
    return [
        one.name
        for one in parameters
        if one.name in SETTINGS or (isinstance(one.default, bool | int | float | str) and one.name not in LISTS)
    ]


CHECKED = [(function, name) for function in public_functions() for name in settings_of(function)]


def test_settings_are_found():
    assert len(CHECKED) > 120


@pytest.mark.parametrize("value", [TABLE, IDS, lambda *given: None], ids=["a table", "ids", "a function"])
def test_every_setting_of_every_public_function_is_refused_by_its_name(value):
    passed = []
    for function, name in CHECKED:
        required = [
            one.name
            for one in inspect.signature(function).parameters.values()
            if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ]
        try:
            function(**{**dict.fromkeys(required, value), name: value})
        except (TypeError, ValueError) as error:
            if "= must be " in str(error) and "; found " in str(error):
                continue
            passed.append(f"{function.__name__}({name}=): {error}")
        else:
            passed.append(f"{function.__name__}({name}=)")
    assert passed == []


def test_numbers_of_any_library_are_numbers():
    expected = tls.analyze_heads(model(), null_draws=2, n_sequences=4)
    for number in (np.int64, torch.tensor):
        found = tls.analyze_heads(model(), null_draws=number(2), n_sequences=number(4), seed=number(0))
        pd.testing.assert_frame_equal(found, expected)
        assert found.attrs == expected.attrs
    assert tls.head_directions(model(), "L0H1", draws=np.int64(5), seed=np.int64(1)).attrs["seed"] == 1
    tls.plots.eigenvalues(model(), "L0H1", seed=np.int64(0))


LONG_TEXT = "a b " * 9_000
OTHERS = [
    (lambda m: tls.positional.exclusion_split(TABLE), r"logits must be a tensor .* found a DataFrame"),
    (lambda m: tls.positional.exclusion_split(IDS), r"of shape \[\.\.\., n, n\]; found a Tensor of shape \(3, 8\)"),
    (lambda m: tls.plots.kernel(IDS), "token ids, not a table"),
    (lambda m: tls.plots.kernel(TABLE), "has no column offset, score: give a table of relative_position_kernel"),
    (lambda m: tls.head_history(LONG_TEXT), r"checkpoints= must be the path .* \(36,000 characters\)"),
    (lambda m: tls.heads.analyze_models(LONG_TEXT, "folder"), "models= must be the path"),
    (lambda m: tls.history.suite_checkpoints(LONG_TEXT), "suite= must be the path"),
    (lambda m: tls.history.suite_checkpoints("pythia-70m", [0, "L0H1"]), r"steps= .* found \[0, 'L0H1'\]"),
    (lambda m: tls.head_history({0: m}, pairs=["L0H1"]), r"pairs= must be a list of pairs \(sender, receiver\)"),
    (lambda m: tls.hooks.check_hook(m, IDS, "L0H1"), r"hook= must be a list of pairs \(hook point, function\)"),
    (lambda m: tls.positional.BlockPrompt("", TABLE, "a"), "blocks= must be a list; found a DataFrame"),
    (lambda m: tls.positional.BlockPrompt(m, ["b", "c", "d"], "a"), "is a model, not a piece of a prompt"),
    (lambda m: tls.to_spectral(m, frequencies=m), "frequencies= must be indices of rotary pairs"),
    (lambda m: tls.spectral_rope.parameter_groups(TABLE, 0.1), "is a table, not a spectral model"),
    (lambda m: tls.report.report(tls.analyze_heads(m, null_draws=2, detectors=False), walls=m), "walls= has a"),
    (lambda m: tls.hooks.receivers("L0H1", TABLE), "input= must be 'q' or 'k' or 'v'"),
]


@pytest.mark.parametrize(("call", "words"), OTHERS, ids=[str(place) for place in range(len(OTHERS))])
def test_a_value_of_another_type_is_refused_in_words(call, words):
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        call(model())
    assert len(str(caught.value)) < 600
