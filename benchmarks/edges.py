"""`edge_effects` on SmolLM2-135M: CPU time of an edge, and beside a forward pass per edge on TransformerLens 3.9.

Run `python benchmarks/edges.py`; some three minutes of one core, five with `--all-layers`. First come the edges that a
screen of one pair measures, in one pass and, in turns, in a pass for each kind of receivers of a layer. Then the
sequences are four of `[BOS, r, r]` with segments of 64 tokens. The other route is a HookedTransformer after
`set_ungroup_grouped_query_attention(True)` and `set_use_split_qkv_input(True)`, on which a hook takes the sender's
write out of the key input of the heads that share the receiver's keys, one forward pass per edge. Both cut the same
edges, and their effects on the induction loss are compared. Costs are CPU seconds (process_time) of one run.
"""

from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
import typer
from measuring import peak, seconds

import tlspectral as tls
from tlspectral.hooks import path_patching
from tlspectral.hooks.edges.measuring import by_kind, edge_columns
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import capture_until
from tlspectral.selection.heads_as_written import head_pair
from tlspectral.tasks.repeated import repeated_sequences

HEAD = "L18H6"
SENDERS = [f"L{layer}H{head}" for layer in (14, 15, 16) for head in range(9)]


def edges_of_a_screen(model: Any, rounds: int) -> None:
    """Print the time of the exact edges of a screen, of all receivers together and of a kind at a time."""
    clean, other = (f"Mary and John went to the store, {name} gave a drink to" for name in ("John", "Mary"))
    task, kept = tls.logit_difference([clean], " Mary", " John", counterfactual=[other]), list[Any]()

    def keep(*given: Any) -> pd.DataFrame:
        kept.append(given)
        return edge_columns(*given)

    with mock.patch.object(path_patching, "edge_columns", keep):
        tls.edge_effects(model, task=task, screen="gradient", method="EAP")
    edges, given = [edge for job in kept for edge in job[0]], kept[0][1:]
    kinds = [[edges[row] for row in rows] for rows in by_kind(edges, range(len(edges))).values()]
    arms = {
        "one pass": lambda: [edge_columns(edges, *given)],
        "kinds": lambda: [edge_columns(k, *given) for k in kinds],
    }
    spent, found = {name: [] for name in arms}, dict[str, Any]()
    for _ in range(rounds):
        for name, arm in arms.items():
            spent[name].append(seconds(lambda arm=arm, name=name: found.update({name: pd.concat(arm())})))
    least = {name: min(each) for name, each in spent.items()}
    effects = {name: np.sort(table["delta"]) for name, table in found.items()}
    off, n_tokens = float(np.abs(effects["one pass"] - effects["kinds"]).max()), given[0].tokens.shape[1]
    typer.echo(
        f"screen of one pair of {n_tokens} tokens: {len(edges)} exact edges in {least['one pass']:.2f} s; with a pass "
        f"for each of {len(kinds)} kinds {least['kinds']:.2f} s, {least['kinds'] / least['one pass']:.2f} times as "
        f"long; effects differ by at most {off:.1e} of {np.abs(effects['kinds']).max():.1f}"
    )


def edges_by_attention(model: Any, tokens: torch.Tensor, layers: list[int]) -> None:
    """Print the time of an edge into one head, and of all edges into the heads of some layers."""
    one, task = {}, tls.tasks.induction(tokens)

    def into_one() -> None:
        one["table"] = tls.edge_effects(model, f"{HEAD}.k", measure="ind", task=task)

    into_one()  # the first call reads the weights from disk
    spent = seconds(into_one)
    n_edges = len(one["table"])
    typer.echo(f"attention, keys of {HEAD}: {n_edges} edges in {spent:.1f} s, {1000 * spent / n_edges:.1f} ms each")
    spent = seconds(lambda: tls.edge_effects(model, f"{HEAD}.k", measure="ind", task=task, control="random"))
    typer.echo(f"the same with random writes of equal norm: {spent:.0f} s")
    keys = tls.hooks.receivers(
        [(layer, head) for layer in layers for head in range(attention_view(model).n_heads(layer))], "k"
    )

    def into_all() -> None:
        one["table"] = tls.edge_effects(model, keys, measure="ind", task=task)

    spent = seconds(into_all)
    n_edges = len(one["table"])
    each, span = 1000 * spent / n_edges, f"{layers[0]} to {layers[-1]}"
    typer.echo(f"attention, keys of layers {span}: {n_edges} edges in {spent:.0f} s, {each:.1f} ms each")
    view = attention_view(model)
    names = [name for layer in range(view.n_layers) for name in view.hook_names(layer).values()]
    cache = capture_until(view, tokens, [name for name in names if not name.endswith("resid_post")], last=names[-1])
    size = sum(value.numel() * value.element_size() for value in cache.values()) / 2**20
    del cache
    typer.echo(f"memory: {peak(into_one):.0f} MiB at most beside the model; a cache of one pass has {size:.0f} MiB")


def by_forward_passes(hooked: Any, tokens: torch.Tensor, writes: dict[str, torch.Tensor]) -> list[float]:
    """Return the induction loss with each edge cut, by one forward pass per edge of the ungrouped model."""
    layer, head = head_pair(HEAD)
    group = [head // 3 * 3 + i for i in range(3)]
    length = (tokens.shape[1] - 1) // 2
    losses = []
    for write in writes.values():

        def cut(value: torch.Tensor, hook: Any, write: torch.Tensor = write) -> torch.Tensor:
            edited = value.clone()
            edited[:, :, group] -= write[:, :, None]
            return edited

        with torch.no_grad():
            logits = hooked.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{layer}.hook_k_input", cut)])
        scored = logits[:, length + 1 : 2 * length].float().flatten(0, 1)
        losses.append(float(torch.nn.functional.cross_entropy(scored, tokens[:, length + 2 :].flatten())))
    return losses


def edges_by_task(model: Any, tokens: torch.Tensor) -> None:
    """Print both routes' times and how far their effects differ."""
    hooked, task = tls.load_model("smollm2-135m", backend="hooked"), tls.tasks.induction(tokens)
    hooked.set_ungroup_grouped_query_attention(True)
    hooked.set_use_split_qkv_input(True)
    results: dict[str, Any] = {}

    def ours() -> None:
        results["ours"] = tls.edge_effects(
            model, f"{HEAD}.k", senders=SENDERS, task=task, measure="task", replace="zero"
        )

    def theirs() -> None:
        names = {sender: f"blocks.{head_pair(sender)[0]}.attn.hook_z" for sender in SENDERS}
        with torch.no_grad():
            _, cache = hooked.run_with_cache(tokens, names_filter=lambda name: name in set(names.values()))
        writes = {
            sender: cache[names[sender]][:, :, head_pair(sender)[1]] @ hooked.W_O[head_pair(sender)]
            for sender in SENDERS
        }
        results["theirs"] = by_forward_passes(hooked, tokens, writes)

    intact = float(tls.evaluate(model, task))
    times = {"ours": seconds(ours), "theirs": seconds(theirs)}
    delta = results["ours"]["delta"].to_numpy()
    off = float(np.abs(delta - (np.array(results["theirs"]) - intact)).max())
    each = {name: 1000 * spent / len(SENDERS) for name, spent in times.items()}
    typer.echo(
        f"task, {len(SENDERS)} key edges into {HEAD}: {each['ours']:.0f} ms each; a forward pass per edge "
        f"takes {each['theirs']:.0f} ms, {times['theirs'] / times['ours']:.1f} times as long; effects differ by at "
        f"most {off:.1e} nats of {np.abs(delta).max():.2f}"
    )


def main(layers: str = "16-18", all_layers: bool = False, rounds: int = 3) -> None:
    """Print what edges cost, of a screen the least of `rounds`. `--all-layers` measures every key edge of the model."""
    torch.set_num_threads(1)
    model = tls.load_model("smollm2-135m")
    edges_of_a_screen(model, rounds)
    tokens = repeated_sequences(attention_view(model), n_sequences=4, segment_length=64)
    first, last = (1, attention_view(model).n_layers - 1) if all_layers else map(int, layers.split("-"))
    edges_by_attention(model, tokens, list(range(first, last + 1)))
    edges_by_task(model, tokens)


if __name__ == "__main__":
    typer.run(main)
