"""Every function that keeps its parts in a folder: stopped, continued, shared out, and refused where it is other work.

A row of `ROWS` is one function. Kills, damaged files and jobs that meet in one folder are tests of the engine
(test_measurement, test_resume_folder).
"""

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import joblib
import pandas as pd
import pytest
import torch
import zoo
from block_marks import Marks
from positional_measurements import block_prompt
from zoo import shared

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.heads import analyze_models
from tlspectral.hooks.parts import Band, Content, LongRange, Output, RopePhase
from tlspectral.hooks.sweeps import sweep_jobs
from tlspectral.models.reading import attention_view
from tlspectral.tables import read_table, shard
from tlspectral.tables.resume_folder import ResumeFolder
from tlspectral.tasks import induction
from tlspectral.tasks.block_prompt import BlockPrompt
from tlspectral.tasks.repeated import repeated_sequences

HEADS = ["L0H1", "L1H2"]
MARKS = Marks()
IN_BLOCKS = zoo.prompt(1, 15, 1).repeat(2, 1)  # those of `block_prompt` of 15 tokens, with two last tokens
IN_BLOCKS[1, -1] = 5
BLOCKS = BlockPrompt(torch.arange(1, 3), torch.arange(3, 12).split(3), torch.arange(12, 14))
TWO = [[1, 2, 3, 1], [4, 5, 4, 9]]
FEW_DRAWS = {"null_draws": 3, "detectors": False}


@pytest.fixture(autouse=True)
def a_layer_is_a_job(monkeypatch):
    """Not several layers of these small sweeps, so that there is something to go on with."""
    monkeypatch.setattr(sweep_jobs, "TOKENS_OF_JOB", 1)


@functools.cache
def drawn(count=3):
    return repeated_sequences(attention_view(shared("bridge", "llama")), n_sequences=count, segment_length=8, seed=1)


@functools.cache
def saved(name, seed=0):
    """A model of the zoo in a folder. Not to be changed."""
    return zoo.save_folder(name, zoo.temporary("saved_") / f"{name}_{seed}", seed=seed)


@functools.cache
def with_one_other_weight(name, layer):
    """The folder of `saved` with one number changed in the middle of one matrix."""
    model = zoo.hf_model(name, 0)
    with torch.no_grad():
        model.model.layers[layer].self_attn.k_proj.weight[7, 20] += 1e-3
    path = zoo.temporary("saved_") / f"{name}_changed"
    model.save_pretrained(path)
    return path


def means_of(count=3):
    """The mean of sequences of its own."""
    return Output("mean", drawn(count))


class OtherMarks(Marks):
    """The same task by another name."""


class ShiftedMarks(Marks):
    """Other tokens by the same name."""

    name = MARKS.name

    def draw(self, seed):
        return super().draw(seed + 1)


def repeated(count=3):
    return induction(drawn(count))


def renamed():
    """The task of a sweep by another name."""
    return replace(repeated(), name="another")


def margin(prompts, answers=(2, 5)):
    return tls.logit_difference(prompts, list(answers), 7)


# --- what is called ---


def swept(folder, part="symmetric", model=None, **options):
    model = shared("bridge", "llama") if model is None else model
    options = {"heads": HEADS, "task": repeated(), **options}
    return {"sweep": tls.ablation_sweep(model, part, folder=folder, **options)}


def bands(folder, model=None, **options):
    model = shared("bridge", "llama") if model is None else model
    options = {"heads": HEADS, "task": repeated(), "draws": 3, **options}
    return {"bands": tls.hooks.band_effects(model, folder=folder, **options)}


def edges(folder, model=None, receivers=("L1H0.k", "L1H1.k"), n_jobs=1, **options):
    model = shared("bridge", "gemma2") if model is None else model
    options = {"task": repeated(), "control": 3, "senders": ["L0H3", "L0H0"], "measure": "ind", **options}
    with joblib.parallel_config(n_jobs=n_jobs):
        return {"edges": tls.edge_effects(model, [*receivers, "L2H1.k"], folder=folder, **options)}


def scored(folder, model=None, kind=Marks, swapped=4, queries=2, draws=2, **options):
    task = kind(swapped=swapped, queries=queries, draws=draws)
    model = shared("bridge", "llama") if model is None else model
    return {"scores": tls.positional_symbolic(model, task, folder=folder, **{"seed": 5, **options})}


def scored_prompts(folder, seeds=(1, 2), suffix=2, **options):
    prompts = [block_prompt(seed=seed, suffix=suffix) for seed in seeds]
    return {"scores": tls.positional_symbolic(shared("bridge", "llama"), prompts, folder=folder, **options)}


def streamed(folder, path=None, name="llama", **options):
    path = saved(name) if path is None else path
    return {"heads": tls.analyze_heads(path, folder=folder, **FEW_DRAWS | options)}


def loaded(folder, model=None, **options):
    model = shared("bridge", "llama") if model is None else model
    return {"heads": tls.analyze_heads(model, folder=folder, **{"null_draws": 3, "n_sequences": 4} | options)}


def history(folder, checkpoints=(("one", "tiny-rope-imag"), ("two", "tiny-rope")), **options):
    found = tls.head_history(list(checkpoints), folder=folder, **FEW_DRAWS | options)
    return {name: table for name, table in vars(found).items() if table is not None}


def many(folder, models=("llama", "gpt2"), **options):
    folder = zoo.temporary("many_") if folder is None else folder
    failures = analyze_models([saved(name) for name in models], folder, **FEW_DRAWS | options)
    assert failures.empty
    assert not list((folder / "layers").iterdir())
    return {file.name: read_table(file) for file in sorted((folder / "heads").iterdir())}


# --- the rows ---


def other(settings):
    """What a refusal says where these settings differ and no others."""
    return rf"made with other {settings} \("


def each(**options):
    """The refusals of work with one other option, named by it."""
    return [(other(name), {name: value}) for name, value in options.items()]


@dataclass(frozen=True)
class Row:
    """A function, and how it keeps its work.

    Attributes:
        measure: called with a folder or None and options; returns tables by name.
        parts: number of files that the whole work writes.
        stop: how many of them are written when it is stopped.
        options: of every call.
        foreign: a word of the refusal, by the options of work that must not continue in the folder.
        served: number of parts that are made anew, by the options of work that may share the folder.

    An option that is a `partial` is made when the function is called.
    """

    measure: Callable[..., dict[str, pd.DataFrame]]
    parts: int
    stop: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    foreign: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    served: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, folder, **options):
        given = self.options | options
        made = {name: value() if isinstance(value, partial) else value for name, value in given.items()}
        return self.measure(folder, **made)


OTHER_NULL = {"null_draws": 4, "seed": 1, "null_blocks": "fresh", "null_dtype": "float64"}
ROWS = {
    "sweep": Row(
        swept,
        2,
        options={"control": "random"},
        foreign=[
            *each(seed=1, control=None, screen="gradient", heads=HEADS[:1], task=partial(renamed)),
            *each(heads=None),
            (other("tokens"), {"task": partial(repeated, 4)}),
            (other("draws") + "draws: null there, 19 now", {"draws": 19}),
            (other("weights"), {"model": partial(zoo.bridge, "llama", seed=1)}),
        ],
        served=[(2, {"part": "output"}), (0, {"part": "M_S"})],
    ),
    "screened sweep": Row(
        swept, 3, 2, {"screen": "gradient", "heads": None}
    ),
    "sweep of a window": Row(
        swept,
        2,
        options={"part": LongRange(2, sinks=1)},
        foreign=[(other("window"), {"part": LongRange(3, sinks=1)}), (other("sinks"), {"part": LongRange(2)})],
    ),
    "sweep of a band": Row(
        swept,
        2,
        options={"part": Band(torch.tensor([0, 2]))},
        foreign=[
            (other("frequencies"), {"part": Band([0])}),
            (other("frequencies"), {"part": "symmetric"}),
            (other("include_bias"), {"part": RopePhase([0, 2], include_bias=True)}),
        ],
        served=[(0, {"part": Band([2, 0, 2])}), (2, {"part": RopePhase([0, 2])})],
    ),
    "sweep of means": Row(
        swept,
        2,
        options={"part": Output("mean")},
        foreign=[
            (other("replace, replace_seed"), {"part": Output("resample")}),
            (other("reference_sha256"), {"part": partial(means_of, 4)}),
            (other("reference_sha256, replace"), {"part": Output()}),
        ],
        served=[(0, {"part": partial(means_of)})],
    ),
    "sweep of blocks": Row(
        swept,
        2,
        options={"part": Content(block_prompt((3, 3, 3))), "task": tls.tasks.language(IN_BLOCKS)},
        foreign=[
            (other("block_starts"), {"part": Content(block_prompt((3, 3, 3), prefix=2, suffix=4))}),
            (other("block_starts, block_width"), {"part": Content(block_prompt((4, 4, 4), prefix=1, suffix=2))}),
        ],
    ),
    "bands": Row(
        bands,
        6,
        4,
        foreign=[
            *each(seed=1, draws=2, heads=["L0H1"]),
            (other("tokens"), {"task": partial(repeated, 4)}),
            (other("positions"), {"at": -2}),
            (other("weights"), {"model": partial(zoo.bridge, "llama", seed=1)}),
        ],
    ),
    "edges": Row(
        edges,
        2,
        foreign=[
            *each(seed=1, task=partial(renamed), senders=["L0H3"], receivers=["L1H0.k"], measure="dup", replace="zero"),
            *each(receivers=["L1H0.q", "L1H1.k"], measure="task"),
            (other("tokens"), {"task": partial(repeated, 4)}),
            (other("control, draws"), {"control": None}),
            (other("draws"), {"control": 4}),
            (other("weights"), {"model": partial(zoo.bridge, "gemma2", seed=1)}),
        ],
    ),
    "scores by key": Row(
        scored,
        2,
        options={"mode": "key", "per_frequency": True},
        foreign=[
            (other("seed, tokens"), {"seed": 6}),
            ("queries", {"queries": 1}),
            (other("blocks"), {"swapped": 3}),
            *each(swaps="all", logit_scale=2.0, heads="L0H1"),
            (other("tokens"), {"kind": ShiftedMarks}),
            (other("task"), {"kind": OtherMarks}),
            (other("weights"), {"model": partial(zoo.bridge, "llama", seed=1)}),
        ],
        served=[
            (1, {"draws": 3}),
            (0, {"tau": 0.02, "by": "query"}),
            (0, {"per_frequency": False}),
            (4, {"mode": "prompt"}),
        ],
    ),
    "scores by prompt": Row(scored, 4, 2, {"mode": "prompt", "draws": 1, "swapped": 5, "swaps": "all"}),
    "scores of prompts": Row(
        scored_prompts,
        4,
        2,
        foreign=[
            (other("blocks, queries, tokens"), {"seeds": (1,)}),
            (other("tokens"), {"seeds": (2, 1)}),
            (other("swaps"), {"swaps": "all"}),
        ],
        served=[(0, {"by": "draw", "tau": 0.02}), (2, {"mode": "key"})],
    ),
    "head table from files": Row(
        streamed,
        2,
        foreign=[
            *each(**OTHER_NULL, extras=["position_share"], heads=["L0H1"]),
            (other("config_sha256"), {"path": partial(saved, "qwen3")}),
            ("made from other weights of layer 1", {"path": partial(with_one_other_weight, "llama", 1)}),
        ],
        served=[(0, {"heads": "L0", "path": partial(with_one_other_weight, "llama", 1)})],
    ),
    "head table from files, shares of positions": Row(
        streamed, 2, options={"name": "gpt2", "extras": ["position_share"]}
    ),
    "chosen heads from files": Row(
        streamed,
        2,
        options={"heads": HEADS},
        foreign=[*each(heads=HEADS[:1]), *each(heads=None)],
        served=[(0, {"heads": HEADS[::-1]})],
    ),
    "head table": Row(
        loaded,
        3,
        2,
        foreign=[
            *each(**{name: value for name, value in OTHER_NULL.items() if name != "seed"}),
            *each(extras=["score_asym"], heads=["L0H1"], max_se=None, prompts=torch.arange(3, 20)),
            (other("detectors, seed"), {"seed": 1}),
            (other("detectors, n_sequences"), {"n_sequences": 5}),
            (other("detectors, max_se, n_sequences"), {"detectors": False}),
            (other("weights"), {"model": partial(zoo.bridge, "llama", seed=1)}),
            (other("config_sha256, .*weights"), {"model": partial(saved, "llama"), "detectors": False}),
        ],
        served=[(0, {"heads": "L0"}), (0, {"n_jobs": 3})],
    ),
    "head table on prompts": Row(
        loaded,
        2,
        options={"detectors": False, "prompts": TWO, "extras": ["score_asym"], "heads": HEADS},
        foreign=[*each(prompts=TWO[::-1], extras=[], heads=None)],
        served=[(0, {"heads": HEADS[::-1], "prompts": partial(iter, TWO)})],
    ),
    "history": Row(
        history,
        2,
        options={"pairs": [((0, 1), (1, 2))], "task": margin(TWO), "blocks": BLOCKS},
        foreign=[
            *each(null_draws=4, null_dtype="float64", seed=1, detectors=True, max_se=None, pairs=[], blocks=None),
            (other("metric, predict, prompts, task"), {"task": None}),
            *each(blocks=BLOCKS.swapped(0, 1)),
            (other("prompts"), {"task": margin([[1, 2, 3, 1], [4, 5, 6, 9]])}),
            (other("metric"), {"task": margin(TWO, (5, 2))}),
            (other("attention"), {"task": replace(margin(TWO), attention=[3, 1])}),
            (other("predict"), {"task": replace(margin(TWO), predict=[3])}),
            (other("positions"), {"task": replace(margin(TWO), positions={"S": 1})}),
            (other("counterfactual"), {"task": replace(margin(TWO), counterfactual=TWO[::-1])}),
            ("has 'one' of another model", {"checkpoints": [("one", "tiny-rope")]}),
        ],
        served=[(1, {"checkpoints": [("three", "tiny-rope"), ("one", "tiny-rope-imag")]})],
    ),
    "many models": Row(
        many,
        6,
        4,
        foreign=each(null_draws=4, seed=1, null_dtype="float64", detectors=True, max_se=None),
    ),
}  # fmt: skip


# --- what is asked of every row ---


@pytest.fixture
def written(monkeypatch):
    """The parts that are written; the work is stopped before part `written.stop`."""

    class Written(list):
        stop = None

    real, seen = ResumeFolder.write, Written()

    def write(self, name, table):
        if len(seen) == seen.stop:
            raise KeyboardInterrupt
        seen.append(self.path / name)
        return real(self, name, table)

    monkeypatch.setattr(ResumeFolder, "write", write)
    return seen


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        pd.testing.assert_frame_equal(found[name], table, check_exact=True)
        assert found[name].attrs == table.attrs


@functools.cache
def finished(name):
    """A folder with the whole work of a row, and its tables."""
    folder = zoo.temporary("finished_")
    return folder, ROWS[name](folder)


# Rows of the fast tests: one of each room that keeps parts.
FAST = ("screened sweep", "edges", "scores by key", "chosen heads from files", "head table")


def marks(name):
    return () if name in FAST else pytest.mark.slow


every_row = pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in ROWS])


@pytest.mark.slow
@every_row
def test_stopped_work_continues_to_the_same_table(name, tmp_path, written):
    """A finished part is not made again, and a finished work makes none."""
    row, folder = ROWS[name], tmp_path / "new"
    _, expected = finished(name)
    written.clear()
    written.stop = row.stop
    with pytest.raises(KeyboardInterrupt):
        row(folder)
    assert len(written) == row.stop
    written.stop = None
    assert_same(row(folder), expected)
    assert len(written) == len(set(written)) == row.parts
    written.clear()
    assert_same(row(folder), expected)
    assert written == []
    assert not list(folder.glob(".*"))


@pytest.mark.fast(3)
@every_row
def test_three_shards_make_each_part_once_and_the_last_has_the_table(name, tmp_path, written):
    row, folder = ROWS[name], tmp_path / "new"
    whole, expected = finished(name)
    written.clear()
    found = []
    for index in (3, 1, 2):
        with shard(index, 3):
            found.append(row(folder))
    (table,) = found
    assert_same(table, expected)
    assert len(written) == len(set(written)) == row.parts
    for file in (file for file in whole.rglob("*") if file.is_file()):
        assert (folder / file.relative_to(whole)).read_bytes() == file.read_bytes()


@pytest.mark.fast(1)
@every_row
def test_two_workers_give_the_same_table_without_a_folder(name):
    with joblib.parallel_config(backend="threading"):  # the code path of processes
        assert_same(ROWS[name](None, n_jobs=2), finished(name)[1])


@pytest.mark.parametrize(
    ("name", "said", "options"),
    [
        pytest.param(name, said, options, id=f"{name}-{number}-{next(iter(options))}", marks=marks(name))
        for name, row in ROWS.items()
        for number, (said, options) in enumerate(row.foreign)
    ],
)
def test_other_work_is_refused(name, said, options):
    with pytest.raises(IncompatibleCheckpoint, match=f"{said}.*[Cc]hoose another folder"):
        ROWS[name](finished(name)[0], **options)


@pytest.mark.parametrize(
    ("name", "model"), [("sweep", "llama"), ("edges", "gemma2"), ("scores by key", "llama"), ("head table", "llama")]
)
def test_other_hooks_on_the_model_are_refused(name, model):
    folder, _ = finished(name)
    first_layer = tls.ablate(shared("bridge", model), [(0, head) for head in range(4)], "output")
    with first_layer, pytest.raises(IncompatibleCheckpoint, match="hooks on the model"):
        ROWS[name](folder)


@pytest.mark.slow
def test_other_hooks_on_a_model_of_a_history_are_refused(tmp_path):
    model = zoo.bridge("llama")
    history(tmp_path, [("one", model)])
    history(tmp_path, [("one", model)])
    model.add_hook("blocks.0.attn.hook_z", lambda z, hook: 0.5 * z)
    with pytest.raises(IncompatibleCheckpoint, match=r"has 'one' with other hooks on the model \(none there, .*hook_z"):
        history(tmp_path, [("one", model)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "new", "options"),
    [
        pytest.param(name, new, options, id=f"{name}-{next(iter(options))}", marks=marks(name))
        for name, row in ROWS.items()
        for new, options in row.served
    ],
)
def test_what_may_share_a_folder_does(name, new, options, tmp_path, written):
    """The table is that of a measurement without a folder, and of the parts that it needs the missing ones are made."""
    expected = ROWS[name](None, **options)
    folder = shutil.copytree(finished(name)[0], tmp_path / "copy")
    written.clear()
    assert_same(ROWS[name](folder, **options), expected)
    assert len(written) == new
