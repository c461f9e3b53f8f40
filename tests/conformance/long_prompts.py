"""Attention strip by strip: scores, patterns and logits are those of the model's own attention over whole prompts.

`PYTHONPATH=.:tests:tests/support:tests/plain python -m conformance.long_prompts` prints the worst deviation of each row
on 512 tokens.
"""

import sys
from functools import partial

import pytest
import torch
import zoo
from torch.nn import functional
from zoo_shapes import MORE_SHAPES, SHAPES

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.hooking.strips import OfStrips
from tlspectral.models.loading.building import build_bridge
from tlspectral.models.reading import attention_view
from tlspectral.models.running.long_prompts import strips_of, why_whole
from tlspectral.models.running.passes import require_single_runs, whole_logits

from .rows import asked

# A refused row needs all queries at once: an indexer picks keys, or a bias of all queries and keys is built.
REFUSED = {("bridge", "glm5"): "topk", ("bridge", "glm5_selecting"): "topk", ("hooked", "bloom"): "ALiBi"}
N, SIZE = 512, 100


def passed(view, tokens):
    """Logits of a run, scores and pattern of every layer, put together from strips, and how many strips there were."""
    kept = {}

    def keep(name, activation, strip, hook):
        kept.setdefault(name, []).append(functional.pad(activation.detach(), (0, strip.n_queries - strip.n_keys)))

    names = {
        (what, view.hook_names(layer)[what]) for layer in view.layers for what in ("scores", "pattern")
        if what in view.hook_names(layer)
    }  # fmt: skip
    hooks = [(name, OfStrips(lambda x, strip, hook, of=(what, name): keep(of, x, strip, hook))) for what, name in names]
    with view.hooks_on(hooks), torch.no_grad():
        logits = whole_logits(view, tokens)
    return logits, {name: torch.cat(rows, dim=-2) for name, rows in kept.items()}, {*map(len, kept.values())}


def compare(view, tokens, size):
    """The largest deviation of scores, pattern and logits over all layers, after a check that they are small."""
    logits, whole, _ = passed(view, tokens)
    with strips_of(size):
        found, by_strip, counts = passed(view, tokens)
    assert counts == {-(-tokens.shape[1] // size)}
    assert whole.keys() == by_strip.keys()
    worst = {"scores": float("nan"), "pattern": 0.0, "logits": float((found - logits).abs().max())}
    for (what, name), expected in whole.items():
        later = torch.ones(expected.shape[-2:], dtype=torch.bool).triu(1)
        expected = expected.masked_fill(later, 0.0)
        # Masked scores are of the size of the largest float.
        seen = expected.masked_fill(expected < -1e4, 0.0)
        off = (by_strip[what, name].masked_fill(later, 0.0) - expected).masked_fill(expected < -1e4, 0.0).abs().max()
        # Measured: 1.2e-5 on scores of Gemma 3, smaller float32 products; 2e-6 at most on patterns. One query at the
        # wrong place moves a pattern by .1.
        assert off <= 1e-5 + 1e-6 * float(seen.abs().max()), name
        worst[what] = float(torch.tensor(worst[what]).nan_to_num(0.0).maximum(off.cpu()))
    # Measured: 1.2e-6 of logits up to 3; a window that is left out moves them by .1.
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)
    return worst


@asked(size=(5, 8))
def strips_have_the_scores_patterns_and_logits_of_the_models_own_attention(row, size):
    refused = REFUSED.get((row.backend, row.name))
    assert (refused or "None") in str(why_whole(row.view))
    if refused is None:
        compare(row.view, zoo.prompt(2, 23), size)


def view_of(row):
    """The row's view; of a model of its own with more positions if it has a table of positions, which ends at 128."""
    endless = row.backend == "bridge" and row.rotary and row.name not in ("gptj", "codegen")
    return row.view if endless else attention_view(row.fresh(positions=N))


@asked(every=1)
@pytest.mark.slow
def the_same_holds_of_512_tokens(row):
    if (row.backend, row.name) not in REFUSED:
        compare(view_of(row), zoo.prompt(1, N), SIZE)


def lines():
    """The table: a line per row of the zoo, also of those of which nothing else is asked."""
    yield f"{'':<26} {'scores':>8} {'pattern':>8} {'logits':>8}   ({N} tokens, {SIZE} queries at a time)"
    for name in {**SHAPES, **MORE_SHAPES}:
        if name not in (*zoo.REFUSED, *zoo.ENCODERS):
            model = zoo.hf_model(name, positions=None if name in zoo.LENGTH_DEPENDENT else N)
            yield f"bridge {name:<19} {deviations(build_bridge, model, None, name)}"
    for name in zoo.HOOKED_ARCHITECTURES if zoo.HAS_HOOKED else ():
        yield f"hooked {name:<19} {deviations(partial(zoo.hooked, positions=N), name)}"


def deviations(build, *given):
    """The worst deviations of the model that `build` makes of what is given, as text, or why it is refused."""
    try:
        view = attention_view(build(*given))
        require_single_runs(view)
        if why_whole(view):
            return f"refused when long: {why_whole(view)}"
        return " ".join(f"{value:>8.0e}" for value in compare(view, zoo.prompt(1, N), SIZE).values())
    except UnsupportedArchitecture as error:
        return f"refused at any length: {error}"


if __name__ == "__main__":
    for printed in lines():
        sys.stdout.write(f"{printed}\n")
        sys.stdout.flush()
