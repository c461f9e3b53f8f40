"""The ablation sweep on SmolLM2-135M against one plain full forward with a hook per head, and what hooks cost.

Run `python benchmarks/ablation.py`; some minutes on an idle core. Both sides use the same hook mathematics, the same
tokens and the induction task, alternately in one process. Only some heads of some layers are run: the cost of a head
depends on its layer alone, and layers between are interpolated. Times are CPU seconds (process_time), medians.
"""

import statistics
import time
from typing import Any

import torch
import typer
from measuring import peak as memory_peak
from measuring import seconds

import tlspectral as tls
from tlspectral.hooks import ablation_hooks
from tlspectral.hooks.parts import RopePhase
from tlspectral.hooks.sweeps.effects import LayerEffects, layer_effects
from tlspectral.hooks.sweeps.screen import gradient_screen
from tlspectral.hooks.sweeps.sweep import SEQUENCES
from tlspectral.models.hooking.hooks_on_model import hooks_on
from tlspectral.models.reading import AttentionView, attention_view
from tlspectral.models.running.partial_runs import IntactRun, intact_run, logits_at
from tlspectral.tasks import ScoredSequences, Task, induction, intact_values, next_token_loss, scored_sequences

PART = RopePhase()


def effects_of(intact: IntactRun, task: ScoredSequences, layer: int, heads: list[int]) -> LayerEffects:
    """Ablate heads of a layer in turn."""
    return layer_effects(intact, task, layer, heads, PART.on(intact.view, {layer: heads})[layer])


def plain_head(view: AttentionView, task: ScoredSequences, points: Any, hooks: list[Any]) -> None:
    """Run one head the plain way: a whole forward, all logits, the loss of the scored positions.

    Hooks are registered as in the sweep, as `model.hooks` of a bridge takes some ms for each.
    """
    with torch.no_grad(), hooks_on(view.model, points, hooks):
        logits = view.logits(task.tokens)[:, task.scored]
        task.measured(logits)


def blocks_and_unembedding(view: AttentionView, tokens: torch.Tensor, repeats: int) -> tuple[float, float]:
    """CPU seconds of all blocks, and of the unembedding at all positions, timed inside whole runs."""
    spent, started, handles = {"blocks": 0.0, "unembed": 0.0}, {}, []
    for name, modules in (("blocks", list(view.model.blocks)), ("unembed", [view.model.unembed])):
        for module in modules:

            def begin(*_: Any, name: str = name) -> None:
                started[name] = time.process_time()

            def end(*_: Any, name: str = name) -> None:
                spent[name] += time.process_time() - started[name]

            handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    with torch.no_grad():
        for _ in range(repeats):
            view.logits(tokens)
    for handle in handles:
        handle.remove()
    return spent["blocks"] / repeats, spent["unembed"] / repeats


def peak(view: AttentionView, task: ScoredSequences, points: Any, hooks: list[Any]) -> float:
    """MB of tensors alive at most during the blocks of a forward, less what was alive before."""
    with torch.no_grad(), hooks_on(view.model, points, hooks):
        # One position: the peak is not that of the logits.
        return memory_peak(lambda: logits_at(view, task.tokens, slice(0, 1)))


def cost_of_hooks(view: AttentionView, task: ScoredSequences, points: Any, repeats: int) -> None:
    """Print the cost of a hook on one head, of hooks on all heads, and their memory, against bare forwards."""
    heads = [(layer, head) for layer in range(view.n_layers) for head in range(view.n_heads(layer))]
    one_hook = ablation_hooks(view.model, [(view.n_layers // 2, 1)], PART)
    all_hooks = ablation_hooks(view.model, heads, PART)
    sides = ([], one_hook, all_hooks)
    for _ in range(2):
        plain_head(view, task, points, [])
    extra = peak(view, task, points, all_hooks) - peak(view, task, points, [])
    times = [
        [seconds(lambda side=side: plain_head(view, task, points, side)) for side in sides] for _ in range(repeats)
    ]
    one_ratio = statistics.median(with_one / bare for bare, with_one, _ in times)
    all_ratio = statistics.median(with_all / bare for bare, _, with_all in times)
    scores = len(task.tokens) * view.n_heads(0) * task.tokens.shape[1] ** 2 * 4 / 2**20
    print(f"forward without hooks         {statistics.median(bare for bare, _, _ in times):6.2f} s")
    print(f"hook on one head              {100 * (one_ratio - 1):+6.1f} %   (at most +8 %)")
    print(f"hooks on all heads            {all_ratio:6.2f} x   (at most 2 x)")
    print(f"peak memory, all heads        {extra:+6.1f} MB  (two layers' scores: {2 * scores:.1f} MB)")


def cost_of_a_metric(view: AttentionView, repeats: int) -> None:
    """Print the cost of a head with a metric of one's own, against the task's loss on the same tokens and positions.

    The metric of one's own gets all sequences at once, the loss of the task one batch after the other.
    """
    loss = scored_sequences(view, induction(n_sequences=SEQUENCES))

    def metric(logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return next_token_loss(logits, tokens, mask)

    own = scored_sequences(view, Task(loss.tokens, metric, predict=loss.scored))
    layer, ratios = view.n_layers // 2, []
    runs = [intact_values(view, task, [layer])[0] for task in (loss, own)]
    for _ in range(repeats + 1):
        times = [
            seconds(lambda run=run, task=task: effects_of(run, task, layer, [0, 1]))
            for run, task in zip(runs, (loss, own), strict=True)
        ]
        ratios.append(times[1] / times[0])
    ratio = statistics.median(ratios[1:])
    print(f"a metric of one's own         {ratio:6.2f} x the loss, heads of layer {layer}  (at most 1.05 x)")


def main(sequences: int = 4, heads: int = 3, repeats: int = 3, threads: int = 1) -> None:
    """Measure and print."""
    torch.set_num_threads(threads)
    view = attention_view(tls.load_model("smollm2-135m"))
    n_layers, n_heads = view.n_layers, view.n_heads(0)
    task = scored_sequences(view, induction(n_sequences=max(2, sequences)))
    rows, positions = task.tokens.shape
    print(f"SmolLM2-135M, {n_layers} x {n_heads} heads, {rows} sequences of {positions} tokens, {threads} thread(s)")
    points = view.model.hook_dict
    cost_of_hooks(view, task, points, max(5, repeats))
    cost_of_a_metric(view, max(5, repeats))

    blocks, unembedding = blocks_and_unembedding(view, task.tokens, repeats)
    scored = len(range(positions)[task.scored]) / positions
    limit = (blocks + unembedding) / (blocks * (n_layers + 1) / (2 * n_layers) + scored * unembedding)
    print(f"blocks {blocks:.2f} s, unembedding {unembedding:.2f} s, {100 * scored:.0f} % scored: limit {limit:.2f} x")

    intact = intact_run(
        view, task.tokens, task.scored, range(n_layers), batch=task.rows_at_once(view), reduce=lambda now, logits: None
    )
    sampled = sorted({*range(0, n_layers, 5), n_layers - 5, n_layers - 3, n_layers - 1})
    ratios, costs, plains = {}, {}, []
    for layer in sampled:
        hooks, times = ablation_hooks(view.model, [(layer, 0)], PART), []
        for _ in range(repeats):
            plain = seconds(lambda hooks=hooks: plain_head(view, task, points, hooks))
            replayed = seconds(lambda layer=layer: effects_of(intact, task, layer, list(range(heads))))
            times.append((plain, replayed / heads))
        plains += [plain for plain, _ in times]
        costs[layer] = statistics.median(head_seconds for _, head_seconds in times)
        ratios[layer] = statistics.median(plain / head_seconds for plain, head_seconds in times)
        print(f"layer {layer:2d}: {ratios[layer]:6.2f} x, {costs[layer]:.3f} s a head")
    slope, at_zero = statistics.linear_regression(list(costs), list(costs.values()))
    mean_cost, plain = at_zero + slope * (n_layers - 1) / 2, statistics.median(plains)
    achieved = plain / mean_cost
    late = [ratios[layer] for layer in sampled if layer >= n_layers - n_layers // 6]
    print(f"all layers: {achieved:.2f} x, {100 * achieved / limit:.0f} % of the limit (at least 85 %)")
    print(f"last sixth: {statistics.mean(late):.2f} x, its first layer {min(late):.2f} x (at least 4 x)")

    by_layer = {layer: list(range(n_heads)) for layer in range(n_layers)}
    screen = seconds(lambda: gradient_screen(view, task, by_layer, PART))
    whole_model = plain * n_layers * n_heads / (screen + plain + 40 * mean_cost)  # an intact run, 40 average heads
    print(f"gradient screen {screen:.2f} s, then 40 heads: {whole_model:.1f} x for the whole model (at least 8 x)")


if __name__ == "__main__":
    typer.run(main)
