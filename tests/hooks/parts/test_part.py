"""Parts as values: what each knows of itself, its settings, what it is refused for, and parts by name."""

import inspect
import json
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from ablation_runs import block_parts, one_of_each
from positional_measurements import EQUAL_BLOCKS, PLACES
from zoo import shared

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.hooks.parts import (
    Antisymmetric,
    Band,
    Content,
    LongRange,
    Output,
    Part,
    RopePhase,
    Symmetric,
    part_of,
)
from tlspectral.models.reading import attention_view
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.tables import read_table, write_table
from tlspectral.tables.resume_folder import open_resume_folder

EVERY = one_of_each(EQUAL_BLOCKS)
REFERENCE = zoo.prompt(batch=5, seed=3)
OWN = EQUAL_BLOCKS.tokens().expand(2, -1)  # a part in blocks is settled for the prompts of its run


def view():
    return attention_view(shared("bridge", "llama"))


# --- what a part knows ---


def test_every_public_kind_is_among_them():
    kinds = {kind for name in tls.parts.__all__ if inspect.isclass(kind := getattr(tls.parts, name))}
    assert {type(part) for part in EVERY.values()} == {
        kind for kind in kinds if issubclass(kind, Part) and not inspect.isabstract(kind) and kind is not Part
    }


def test_where_a_part_acts_and_what_a_sweep_removes_in_its_place():
    assert {name: part.acts_on for name, part in EVERY.items() if part.acts_on != "scores"} == {
        "output": "z",
        "long_range": "mask",
    }
    assert {name for name, part in EVERY.items() if part.beside_heads} == {"output", "long_range"}
    geometry = view().rotary(0)
    assert {name for name, part in EVERY.items() if part.control_pairs(geometry, [0])} == {"rotary_band"}
    assert {name for name, part in EVERY.items() if type(part).control is not Part.control} == {*block_parts}
    assert {name for name, part in EVERY.items() if type(part).drawn is not Part.drawn} == {"mode"}


@pytest.mark.parametrize("name", EVERY)
def test_a_part_is_frozen_and_is_itself(name):
    part, other = EVERY[name], one_of_each(EQUAL_BLOCKS)[name]
    with pytest.raises(AttributeError):
        part.anything = 1
    # References and prompts are tensors, so parts are compared by identity and can be keys.
    assert part != other
    assert len({part, other}) == 2
    assert part_of(part) is part


@pytest.mark.parametrize("name", EVERY)
def test_a_settled_part_travels_to_worker_processes(name):
    part = EVERY[name].fixed(view(), packed_prompts(view(), OWN))
    assert pickle.loads(pickle.dumps(part)).settings == part.settings


SETTINGS = [
    (Symmetric(), {}),
    (Symmetric(include_bias=True), {"include_bias": True}),
    (Antisymmetric(), {}),
    (RopePhase(), {}),
    (RopePhase([]), {"frequencies": []}),
    (RopePhase(range(2), include_bias=True), {"frequencies": [0, 1], "include_bias": True}),
    (Band(torch.tensor([3, 0, 3])), {"frequencies": [0, 3]}),
    (Band("low"), {"frequencies": "low"}),
    (Output(), {}),
    (Output(seed=3), {}),
    (LongRange(3), {"window": 3, "sinks": 0}),
    (Content(PLACES), {"block_starts": [3, 6, 9, 12], "block_width": 3}),
]


@pytest.mark.parametrize(("part", "settings"), SETTINGS, ids=str)
def test_settings_are_what_is_not_the_default(part, settings):
    assert part.settings == settings
    assert part.fixed(view(), packed_prompts(view(), OWN)).settings == settings


PAIRS = [range(2), [0, 1], (0, 1), np.arange(2), [np.int64(0), np.int64(1)], torch.arange(2), iter(range(2))]
MASKS = [np.array([True, False]), torch.tensor([True, False]), [True, False]]


@pytest.mark.parametrize(("given", "kept"), [(one, (0, 1)) for one in PAIRS] + [(one, (True, False)) for one in MASKS])
def test_frequencies_of_any_library_are_numbers_that_a_file_can_hold(given, kept):
    band = Band(given)
    assert band.frequencies == kept
    assert json.loads(json.dumps(band.settings)) == {"frequencies": list(kept)}


# --- a part settled for prompts, and bound to heads ---


def test_settings_of_a_part_that_is_not_settled_are_what_is_known():
    assert Output("mean").settings == Output("mean", REFERENCE).settings == {"replace": "mean"}
    assert Output("resample", seed=3).settings == {"replace": "resample", "replace_seed": 3}
    assert Content(EQUAL_BLOCKS).settings == {}


def test_a_settled_output_names_its_reference():
    prompts = packed_prompts(view(), REFERENCE)
    own = Output("mean").fixed(view(), prompts).settings
    assert own == {"replace": "mean", "reference_sha256": prompts.hashed()}
    assert Output("mean", REFERENCE).fixed(view(), prompts).settings == own
    other = Output("resample", zoo.prompt(batch=4, seed=4)).fixed(view(), prompts).settings
    assert (other["replace"], other["replace_seed"]) == ("resample", 0)
    assert other["reference_sha256"] != own["reference_sha256"]


def test_the_sequences_of_a_settled_output_are_drawn_by_its_own_seed():
    prompts = packed_prompts(view(), REFERENCE)

    def donors(seed):
        return Output("resample", seed=seed).fixed(view(), prompts).on(view(), {0: [1]})[0].bound.donors

    assert torch.equal(donors(1), donors(1))
    assert not all(torch.equal(donors(0), donors(seed)) for seed in range(1, 5))
    for seed in range(5):
        assert (donors(seed) != torch.arange(5)).all()


def test_settled_blocks_are_places():
    part = Content(EQUAL_BLOCKS).fixed(view(), packed_prompts(view(), OWN))
    assert part.prompt == PLACES
    assert part.settings == Content(PLACES).settings


@pytest.mark.parametrize("name", EVERY)
def test_a_part_is_bound_to_the_layers_that_it_is_given(name):
    assert set(EVERY[name].on(view(), {1: [0, 2], 0: [3]})) == {0, 1}
    assert EVERY[name].on(view(), {}) == {}


def test_a_part_that_removes_nothing_of_a_layer_is_not_bound_there():
    for part in (RopePhase([]), Band([]), Band([False] * 6)):
        assert part.on(view(), {0: [1], 1: [1]}) == {}


# --- refusals ---

REFUSED = [
    (lambda: Output("median"), "replace= must be None, 'zero', 'mean', 'resample' or 'counterfactual'; found 'median'"),
    (lambda: Output(reference=REFERENCE), "reference= has no use with replace=None"),
    (lambda: Band(None), "Band needs frequencies"),
    (lambda: Band("slow"), "'slow'.* is not a band: give 'high', 'middle', 'low'"),
    (lambda: LongRange(0), "window must be a whole number of keys, 1"),
    (lambda: LongRange(2.5), "window must be a whole number .* found 2.5"),
    (lambda: LongRange(True), "window must be a whole number .* found True"),
    (lambda: LongRange(1, sinks=-1), "sinks must be a whole number of first tokens, 0"),
    (lambda: Output("mean", "").on(view(), {0: [0]}), "reference: "),
]


@pytest.mark.parametrize(("make", "said"), REFUSED)
def test_settings_without_meaning_are_refused(make, said, monkeypatch):
    # Below the type check of the tests, which refuses some of these first.
    for kind in (Output, LongRange, Band):
        monkeypatch.setattr(kind, "__init__", inspect.unwrap(kind.__init__))
    with pytest.raises(ValueError, match=said):
        make()


# --- parts by name ---


def test_parts_without_settings_go_by_name_and_by_symbol():
    names = {"symmetric": Symmetric, "antisymmetric": Antisymmetric, "rope_phase": RopePhase, "output": Output}
    names |= {"M_S": Symmetric, "M_A": Antisymmetric, "Im(M_t)": RopePhase}
    for name, kind in names.items():
        part = part_of(name)
        assert type(part) is kind
        assert part.settings == {}
        assert part.name == kind.name


@pytest.mark.parametrize("kind", [Symmetric, Antisymmetric])
def test_a_static_part_has_a_name_of_its_own(kind):
    name = f"{kind.name}_static"
    for part in (kind(static=True), part_of(name), pickle.loads(pickle.dumps(replace(kind(static=True), at=3)))):
        assert type(part) is kind
        assert part.static
        assert part.name == name
        assert part.settings == {}
    assert kind().name == kind(include_bias=True).name == kind.name
    assert kind(True, True).settings == {"include_bias": True}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rotary_band", r"Band has settings: give tls.parts.Band\(frequencies\), not 'rotary_band'"),
        ("LongRange", r"give tls.parts.LongRange\(window, sinks=0\)"),
        (LongRange, r"give tls.parts.LongRange\(window, sinks=0\)"),
        ("long_range", r"give tls.parts.LongRange\(window, sinks=0\)"),
        ("content", r"give tls.parts.Content\(prompt\)"),
        ("interaction", r"give tls.parts.Interaction\(prompt\)"),
        ("symetric", "part must be one of 'symmetric', .*; not 'symetric'; did you mean 'symmetric'"),
        ("rope-phase", "did you mean 'rope_phase'"),
        ("M_a", "did you mean 'M_A'"),
        ("m_s", "did you mean 'M_S'"),
        ("im(m_t)", r"did you mean 'Im\(M_t\)'"),
        ("OUTPUT", "did you mean 'output'"),
        ("Symmetric_Static", "did you mean 'symmetric_static'"),
        (None, "part must be one of .*; not None"),
        (3, "not 3"),
        (Symmetric, "part must be one of"),
    ],
)
def test_other_names_are_refused(name, said, monkeypatch):
    # Below the type check of the tests, which refuses what is no text first.
    monkeypatch.setattr(tls.parts, "chosen_part", inspect.unwrap(tls.parts.chosen_part))
    with pytest.raises(ValueError, match=said):
        inspect.unwrap(part_of)(name)


# A model from a GGUF file has its name under `file`; a part that is read and written again has none of the folder's.
ATTRS = {"seed": 3, "file": "tiny.gguf", "given": {"made_with": 1}, "nested": {"tokens": [1, 2]}}


def table_of(number, attrs):
    table = pd.DataFrame({"number": [number]})
    table.attrs = dict(attrs)
    return table


@pytest.fixture
def folder(tmp_path):
    """A folder with two finished parts."""
    folder = open_resume_folder(tmp_path / "parts", {"a": 1})
    for number in range(2):
        folder.write(f"part{number}", table_of(number, ATTRS))
    return folder


@pytest.mark.parametrize("attrs", [{}, ATTRS])
def test_a_part_is_read_under_its_own_name_with_the_attrs_it_was_given(folder, attrs):
    table = table_of(2, attrs)
    folder.write("part2", table)
    pd.testing.assert_frame_equal(folder.read("part2"), table)
    assert folder.read("part2").attrs == table.attrs == attrs
    assert folder.read("part3") is None


def test_a_part_copied_over_another_is_refused_by_name(folder):
    shutil.copy(folder.path / "part0.parquet", folder.path / "part1.parquet")
    with pytest.raises(IncompatibleCheckpoint, match=r"part1\.parquet holds part0, another job or a file"):
        folder.read("part1")
    assert folder.read("part0")["number"].item() == 0


def test_a_part_without_a_name_is_refused(folder):
    """An earlier version wrote such parts."""
    file = folder.path / "part0.parquet"
    table = read_table(file)
    assert table.attrs.pop("file") == "part0"
    write_table(table, file)
    with pytest.raises(IncompatibleCheckpoint, match=r"part0\.parquet holds a job without a name.*: remove the file"):
        folder.read("part0")


def test_a_part_of_other_settings_is_refused(folder, tmp_path):
    other = open_resume_folder(tmp_path / "other", {"a": 2})
    shutil.copy(folder.path / "part0.parquet", other.path)
    with pytest.raises(IncompatibleCheckpoint, match=r"part0\.parquet was made with other settings than .*settings"):
        other.read("part0")
