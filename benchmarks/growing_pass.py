"""Sweeps whose layers share a growing pass, beside the same replays layer by layer: CPU seconds, block calls, effects.

    python benchmarks/growing_pass.py smollm2-135m

Both ways take turns in one process with one thread, behind one run without ablation; the smallest of `--runs` seconds
of each are compared. The first cases are random Llamas; those of a named model are all heads on one prompt of 18
tokens, and a head of each of four late layers on 16 x 129 tokens, where a pass on a CPU holds less than one replay and
nothing can be gained. SmolLM2-135M takes three CPU minutes.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import torch
import typer
from measuring import seconds

import tlspectral as tls
from tlspectral.hooks.parts import part_of
from tlspectral.hooks.parts.checked_calls import bound_parts
from tlspectral.hooks.sweeps.layer_effects import LayerReplays, layer_effects
from tlspectral.hooks.sweeps.sweep import chosen_heads
from tlspectral.models.reading import measured
from tlspectral.tasks.task_sequences import intact_values, task_sequences

SHAPES = ((8, 4, 64, 16, 1), (32, 8, 128, 16, 4))
"""Random Llamas: layers, heads, width, tokens of a prompt, prompts."""


def random_llama(layers: int, heads: int, width: int) -> Any:
    """A Llama whose attention is not near uniform."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 500,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "attn_implementation": "eager",
    }
    config = transformers.LlamaConfig(**sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data.mul_(4)
    return tls.load_model(model)


def cases(name: str | None) -> Iterator[tuple[str, Any, torch.Tensor, str, Any]]:
    """Yield what is swept: a name, the model, prompts, the part and the heads."""
    for layers, heads, width, length, rows in SHAPES:
        model, prompts = random_llama(layers, heads, width), torch.randint(0, 500, (rows, length))
        for part in ("output", "rope_phase"):
            yield f"{layers} layers x {heads} heads, {rows} x {length} tokens, {part}", model, prompts, part, None
    if name is not None:
        model = tls.load_model(name)
        tokens = torch.randint(5, model.cfg.d_vocab - 5, (16, 129))
        late = [f"L{model.cfg.n_layers - back}H0" for back in (8, 6, 4, 2)]
        yield f"{name}, 1 x 18 tokens, output", model, tokens[:1, :18], "output", None
        yield f"{name}, 16 x 129 tokens, output of four heads", model, tokens, "output", late


def compared(model: Any, prompts: torch.Tensor, part: str, heads: Any, runs: int) -> str:
    """Measure one case in both ways and return what was found."""
    task = tls.logit_difference(prompts, 6, 8)
    with measured(model) as view:
        chosen = chosen_heads(view, heads, part_of(part))
        sequences = task_sequences(view, task)
        fixed = part_of(part).fixed(view, sequences)
        bound = bound_parts(fixed, view, chosen, every=True)
        intact, _ = intact_values(view, sequences, sorted(chosen))
        found: dict[str, Any] = {}

        def sweep(name: str, groups: Iterable[list[int]]) -> None:
            found[name] = [
                torch.from_numpy(effects.values)
                for group in groups
                for effects in layer_effects(
                    intact,
                    sequences,
                    [LayerReplays(view, sequences, layer, chosen[layer], bound[layer]) for layer in group],
                )
            ]

        def calls(job: Callable[[], None]) -> int:
            counted: list[str] = []
            points = [view.hook_names(layer)["residual"] for layer in range(view.n_layers)]
            with view.hooks_on([(point, lambda x, hook: counted.append(hook.name)) for point in points]):
                job()
            return len(counted)

        ways = {
            "layer by layer": lambda: sweep("layer by layer", [[layer] for layer in chosen]),
            "growing": lambda: sweep("growing", [[*chosen]]),
        }
        of_way: dict[str, list[float]] = {way: [] for way in ways}
        for way in ways.values():
            way()  # proofs of edits
        for run in range(runs):
            for way in [*ways][:: 1 if run % 2 else -1]:
                of_way[way].append(seconds(ways[way]))
        old, new = (min(one) for one in of_way.values())
        of_blocks = [calls(job) for job in ways.values()]
    off = (torch.cat(found["growing"]) - torch.cat(found["layer by layer"])).abs().max()
    return (
        f"{old:.2f} -> {new:.2f} CPU s, {old / new:.2f} times as fast; {of_blocks[0]} -> {of_blocks[1]} block calls; "
        f"values differ by {float(off):.0e}"
    )


def main(
    name: Annotated[str | None, typer.Argument(help="Also a model, by its name for load_model.")] = None,
    runs: Annotated[int, typer.Option(help="Sweeps in each way.")] = 4,
) -> None:
    """Measure each case in both ways and print a line of it."""
    torch.set_num_threads(1)
    for said, model, prompts, part, heads in cases(name):
        typer.echo(f"{said}: {compared(model, prompts, part, heads, runs)}")


if __name__ == "__main__":
    typer.run(main)
