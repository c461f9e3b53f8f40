"""Ctrl-C while blocks are entered and left: nothing stays on the model, no signal is lost, handlers are as before."""

import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import zoo
from ablation_runs import ablated, intact, logits
from model_state import assert_unchanged, state_of

from tlspectral.errors import BadHead
from tlspectral.hooks import ablate, ablation
from tlspectral.models.hooking.exclusive import exclusive
from tlspectral.models.hooking.methods import methods_replaced
from tlspectral.models.hooking.placing import hooks_on, without_hooks
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import whole_logits

Z = "blocks.0.attn.hook_z"


@pytest.mark.slow
@pytest.mark.parametrize(
    "counts",
    [
        {"steps": 30, "edges": 60, "moments": 4},  # in one process, most of whose time is its imports
        pytest.param({"steps": 300, "edges": 1500, "moments": 100}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_interrupted_blocks_leave_nothing(counts):
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root / "tests" / "support"), str(root)])
    program = [sys.executable, str(root / "tests" / "support" / "interrupted_blocks.py")]
    program += [str(word) for count in counts.items() for word in count]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths})
    expected = "".join(f"{kind}: {n} interrupts, nothing left\n" for kind, n in counts.items())
    assert done.stdout == expected, done.stderr


class Interrupted(Exception):
    pass


@pytest.fixture
def handler():
    """A handler of SIGINT that raises an exception of its own, while the test runs."""

    def interrupt(number, frame):
        raise Interrupted

    before = signal.signal(signal.SIGINT, interrupt)
    yield interrupt
    assert signal.signal(signal.SIGINT, before) is interrupt


@pytest.fixture
def model():
    """A model of one's own, which has to be as it was when the test is over."""
    made = zoo.bridge("llama")
    plain, before = logits(made), state_of(made)
    yield made
    assert torch.equal(logits(made), plain)
    assert_unchanged(made, before)


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
@pytest.mark.usefixtures("handler")
def test_blocks_may_end_in_any_order(model, order):
    alone = [ablated(model, [(head % 2, head)], "output") for head in range(3)]
    blocks = [ablate(model, [(head % 2, head)], "output") for head in range(3)]
    for block in blocks:
        block.__enter__()
    for number in order[:2]:
        blocks[number].__exit__(None, None, None)
    assert torch.equal(logits(model), alone[order[2]])
    assert type(vars(model)["generate"]).__name__ == "WithoutCache"
    blocks[order[2]].__exit__(None, None, None)


@pytest.mark.parametrize("first", [0, 1])
def test_blocks_that_are_never_left_end_when_they_are_collected(model, first):
    blocks = [ablate(model, [(0, 1)], "output"), ablate(model, [(1, 0)], "symmetric")]
    for block in blocks:
        block.__enter__()
    del block
    blocks.pop(first)
    blocks.clear()
    gc.collect()
    with ThreadPoolExecutor(1) as pool:  # the model is free for other threads
        assert torch.equal(
            pool.submit(whole_logits, attention_view(model), zoo.prompt()).result(), intact("bridge", "llama")
        )


def test_hooks_that_were_taken_off_meanwhile_are_not_put_back(model):
    inner, outer = hooks_on(model, model.hook_dict, [(Z, lambda z, hook: 2 * z)]), without_hooks(model, model.hook_dict)
    inner.__enter__()
    outer.__enter__()
    assert torch.equal(logits(model), intact("bridge", "llama"))
    with pytest.raises(Exception, match="taken off"):
        inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)


def test_methods_that_others_have_set_since_stay(model):
    with methods_replaced(model, {"generate": print}):
        vars(model)["generate"] = len
    assert vars(model).pop("generate") is len


def test_what_a_broken_end_leaves_is_taken_off_by_the_next_entry(model, monkeypatch):
    """The end is broken off where no signal is: as by an exception that is raised into the thread."""
    handle_type = torch.utils.hooks.RemovableHandle
    remove, calls = handle_type.remove, []

    def fail_once(handle):
        calls.append(handle)
        if len(calls) == 1:
            raise Interrupted
        remove(handle)

    block = ablate(model, [(0, 1), (1, 0)], "output")
    block.__enter__()
    monkeypatch.setattr(handle_type, "remove", fail_once)
    with pytest.raises(Interrupted):
        block.__exit__(None, None, None)
    assert not torch.equal(logits(model), intact("bridge", "llama"))
    assert torch.equal(whole_logits(attention_view(model), zoo.prompt()), intact("bridge", "llama"))


@pytest.mark.usefixtures("handler")
def test_a_signal_is_held_back_until_a_block_is_entered_or_left(model):
    """It acts at once behind the entry, where the block is left again, and behind the exit."""

    def interrupting():
        yield Z, lambda z, hook: 2 * z
        signal.raise_signal(signal.SIGINT)
        yield Z, lambda z, hook: 2 * z

    inside = []
    with pytest.raises(Interrupted), hooks_on(model, model.hook_dict, interrupting()):
        inside.append(1)
    assert not inside


@pytest.mark.usefixtures("handler")
def test_what_takes_long_at_the_entry_is_interrupted(model, monkeypatch):
    calls = []

    def reference_run(*given, **named):
        signal.raise_signal(signal.SIGINT)
        calls.append(1)

    monkeypatch.setattr(ablation._Request, "hooks", reference_run)
    with pytest.raises(Interrupted), ablate(model, [(0, 1)], "output"):
        pass
    assert not calls


@pytest.mark.usefixtures("handler")
def test_who_waits_for_a_model_is_interrupted(model):
    opened, done = threading.Event(), threading.Event()

    def hold():
        with exclusive(model):
            opened.set()
            assert done.wait(30)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        assert opened.wait(30)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(Interrupted):
                whole_logits(attention_view(model), zoo.prompt())
        finally:
            done.set()
            timer.join()
        held.result()


@pytest.mark.slow
@pytest.mark.parametrize("own", [signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler])
def test_handlers_are_as_before(model, own):
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, own)
        with ExitStack() as stack:
            stack.enter_context(ablate(model, [(0, 1)], "output"))
            stack.enter_context(ablate(model, [(1, 0)], "output"))
        assert signal.getsignal(signal.SIGINT) is own
        with ablate(model, [(0, 1)], "output"), pytest.raises(BadHead), ablate(model, [(9, 9)], "output"):
            pass
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_set_inside_a_block_stays(model, handler):
    called = []

    def mine(number, frame):
        called.append(1)
        standing(number, frame)

    with ablate(model, [(0, 1)], "output"):
        standing = signal.signal(signal.SIGINT, mine)
        with ablate(model, [(1, 0)], "output"), pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is mine
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGINT)
    assert called == [1, 1]
    signal.signal(signal.SIGINT, handler)


def test_blocks_of_other_threads_leave_signals_alone(model, handler):
    def work():
        with ablate(model, [(0, 1)], "output"):
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() is handler


def test_a_block_decorates_a_function_that_is_called_twice(model):
    twice = ablate(model, [(0, 1)], "output")(lambda: logits(model))
    for _ in range(2):
        assert torch.equal(twice(), ablated(model, [(0, 1)], "output"))
