"""A program that is interrupted while blocks change a model, and says what they left on it.

It runs in a process of its own, since the checks of shapes that tests switch on are calls that no block can hold.

    python tests/support/interrupted_blocks.py KIND COUNT [KIND COUNT ...]

KIND is `edges` (SIGINT while blocks are entered and left), `moments` (at random moments of runs inside blocks), both
sent by a thread, or `steps` (at the given number of steps of Python code in the entry and exit of blocks, one after the
other). It writes the number of interrupts, and what was left after the last.
"""

import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress

import torch
import zoo

from tlspectral.hooks import ablate, ablation_hooks
from tlspectral.models.hooking import deferred_checks
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.hooking.methods import methods_replaced
from tlspectral.models.hooking.placing import hooks_on, without_hooks
from tlspectral.models.reading import attention_view
from tlspectral.models.running.partial_runs import unembedding_only
from tlspectral.models.running.passes import whole_logits


def state(model):
    """All that blocks change: hooks, methods, training flags."""
    modules = [*model.modules(), *model.original_model.modules()]
    return [
        (
            list(module._forward_hooks),
            list(module._forward_pre_hooks),
            [id(handle) for handle in getattr(module, "fwd_hooks", ())],
            [name for name in ("forward", "generate", "generate_stream") if name in vars(module)],
            module.training,
        )
        for module in modules
    ]


def logits(model):
    with torch.no_grad():
        return model(zoo.prompt(batch=1, length=8), return_type="logits")


class Blocks:
    """A model, and nested blocks on it. The model is in training mode, with hooks of a user's own."""

    def __init__(self):
        self.model = zoo.bridge("llama").train()
        self.view = attention_view(self.model)
        self.points = self.model.hook_dict
        self.model.add_hook("blocks.0.attn.hook_z", lambda activation, hook: activation * 1.5)
        with ablate(self.model, [(0, 1)], "symmetric"):  # what is proven once per model is proven now
            self.plain = None
        self.plain = logits(self.model)
        self.before = state(self.model)
        self.prepared = ablation_hooks(self.model, [(0, 1), (1, 0)], "output")

    def low(self, inside=lambda: None):
        """Enter and leave everything that puts something on a model."""
        with (
            hooks_on(self.model, self.points, self.prepared),
            methods_replaced(self.model, {"generate": print}),
            evaluating(self.model),
            deferred_checks.checked_at_end(),
            unembedding_only(self.view, slice(-1, None)),
            methods_replaced(self.model, {"generate": print, "generate_stream": print}),
        ):
            with without_hooks(self.model, self.points):
                pass
            inside()

    def high(self, inside=lambda: None):
        """Enter and leave what users enter."""
        with ablate(self.model, [(0, 1)], "symmetric"), ablate(self.model, [(1, 0)], "output"):
            inside()

    def left(self, handler):
        """What is not as before."""
        left = []
        if state(self.model) != self.before:
            left.append("state")
        if not torch.equal(logits(self.model), self.plain):
            left.append("outputs")
        if deferred_checks._waiting:
            left.append("checks")
        if signal.getsignal(signal.SIGINT) is not handler:
            left.append("handler")
        return left


def interrupted_by_a_thread(kind, count):
    blocks, inside = Blocks(), lambda: None
    armed = False

    def handler(number, frame):
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def enter_often(enter):  # a function: Python 3.13 handles signals between a loop and the `try` around it
        nonlocal armed
        armed = True
        while armed:
            enter(inside)

    def send():
        draws = random.Random(0)
        while not done.is_set():
            time.sleep(draws.uniform(0.0005, 0.004 if kind == "edges" else 0.04))
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, handler)
    done, leaks = threading.Event(), []
    sender = threading.Thread(target=send, daemon=True)
    if kind == "moments":
        inside = lambda: (logits(blocks.model), whole_logits(blocks.view, zoo.prompt(batch=1, length=8)))  # noqa: E731
    sender.start()
    for turn in range(count):
        enter = blocks.high if kind == "moments" or turn % 5 == 0 else blocks.low
        with suppress(KeyboardInterrupt):
            enter_often(enter)
        leaks += blocks.left(handler)
        if leaks:
            break
    done.set()
    sender.join()
    return turn + 1, leaks


TRACED = (
    "signal",
    "enum",
    "contextlib",
    "threading",
    "transformer_lens.hook_points",
    "tlspectral.models.",
    "tlspectral.hooks.",
)


def interrupted_at_steps(count):
    """Each interrupt is that of the handler which stands, at a step of Python code; all are spread over the steps."""
    blocks, handler = Blocks(), signal.default_int_handler
    signal.signal(signal.SIGINT, handler)
    steps, at = 0, -1

    def trace(frame, event, argument):
        nonlocal steps
        frame.f_trace_opcodes = True
        if event == "opcode" and f"{frame.f_globals.get('__name__')}.".startswith(TRACED):
            steps += 1
            if steps == at:
                sys.settrace(None)
                signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)
        return trace

    def run():
        nonlocal steps
        steps = 0
        try:
            sys.settrace(trace)
            blocks.low()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    run()
    total, leaks = steps, []
    for turn in range(count):
        at = 1 + turn * total // count
        if not run():
            leaks.append("an interrupt was lost")
        leaks += blocks.left(handler)
        if leaks:
            return turn + 1, [f"step {at} of {total}", *leaks]
    return count, leaks


if __name__ == "__main__":
    torch.set_num_threads(1)
    for kind, count in zip(sys.argv[1::2], map(int, sys.argv[2::2]), strict=True):
        done, leaks = interrupted_at_steps(count) if kind == "steps" else interrupted_by_a_thread(kind, count)
        sys.stdout.write(f"{kind}: {done} interrupts, {leaks or 'nothing'} left\n")
