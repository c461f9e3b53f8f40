"""What a run of `analyze_heads` leaves behind: an unchanged model, also when interrupted, and no layers in memory."""

import gc

import pytest
import torch
import zoo
from head_tables import analyze, assert_same, built, table_of
from model_state import assert_unchanged, state_of, warm


@pytest.mark.parametrize(
    ("backend", "name", "training"),
    [("bridge", "gpt2", True), ("bridge", "opt", False)] + [("hooked", "gpt2", True)] * zoo.HAS_HOOKED,
)
def test_the_model_is_left_as_it_was(backend, name, training):
    model = warm(getattr(zoo, backend)(name))
    model.train(training)
    seen = []
    model.add_hook("blocks.0.attn.hook_pattern", lambda pattern, hook: seen.append(1), is_permanent=True)
    before = state_of(model)
    analyze(model, extras=["score_asym", "position_share"], detectors=name == "gpt2")
    assert_unchanged(model, before)
    assert seen


@pytest.mark.parametrize("step", ["svdvals", "eigvals"])
def test_an_interrupt_leaves_the_model_usable(monkeypatch, step):
    """In the spectra (svdvals) and in the null (eigvals): Ctrl-C between two layers."""
    model = warm(zoo.bridge("llama"))
    before, threads = state_of(model), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    real, calls = getattr(torch.linalg, step), []

    def interrupted(*arguments, **options):
        calls.append(step)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, step, interrupted)
            with pytest.raises(KeyboardInterrupt):
                analyze(model)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert len(calls) == 3
    assert_unchanged(model, before)
    assert_same(analyze(model), table_of("llama"))


def test_layers_are_let_go_one_by_one(monkeypatch):
    """While the last layer's spectra are taken, not more float64 is alive than at the first."""
    model = built("bridge", "gemma3")
    real, alive = torch.linalg.eig, []

    def weighed(*arguments):
        # type() and not isinstance(), which would wake the lazy objects of other packages.
        wide = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype == torch.float64]
        alive.append(sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in wide}.values()))
        return real(*arguments)

    monkeypatch.setattr(torch.linalg, "eig", weighed)
    gc.collect()  # what other tests left
    analyze(model, extras=["position_share"])
    assert len(alive) == 4
    layer = 2 * 4 * 48 * 16 * 8  # bytes of W_Q and W_K, keys repeated, in float64
    # A kept layer adds at least its own factors with every step; measured: the same to the byte from the second on.
    assert max(alive) < alive[0] + layer / 2
