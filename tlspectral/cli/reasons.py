"""Commands that ask why a head looks where it does: `edges`, `pairs` and `attribution`."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlspectral.cli.app import (
    Device,
    DType,
    Folder,
    Format,
    Model,
    Quiet,
    Revision,
    Shard,
    TableOutput,
    app,
    choice,
    deliver,
    keeps,
    listed_heads,
    require_shared,
    require_table_file,
    require_writable,
    write_figure,
)
from tlspectral.cli.prompt_options import (
    PromptsFile,
    ReadyTask,
    prompts_of_file,
    read_prompt,
    require_one_task,
    task_of_file,
)

if TYPE_CHECKING:
    import pandas as pd

_LISTED = 20
_DRAWN = 24  # edges: up to 24 are drawn as a graph

Picture = Annotated[
    Path | None, typer.Option("--picture", metavar="FILE", help="Draw the result too: .png, .pdf or .svg.")
]


def _require_outputs(table: Path | None, picture: Path | None) -> None:
    """Raise an error, before long work begins, if the table or the picture cannot be written; None passes."""
    require_table_file(table)
    if picture is not None:
        require_writable(picture)


def _deliver(table: "pd.DataFrame", output: Path | None, form: str | None, figure: Any, picture: Path | None) -> None:
    """Write and print the table (see `deliver`), and write the matplotlib figure to the file `picture` unless it is
    None. Paths are printed unless the table itself is.
    """
    deliver(table, output, form)
    if picture is not None:
        write_figure(figure, picture)
    if form is None:
        for path in (output, picture):
            if path is not None:
                typer.echo(str(path))


@app.command(short_help="which earlier heads and MLPs feed a head")
def edges(
    model: Model,
    receivers: Annotated[
        str | None,
        typer.Argument(
            metavar="RECEIVERS",
            help="What reads: queries, keys or values such as L18H6.q,L18KV2.k, an MLP such as L3MLP, or logits. "
            "Default: all of them, which needs prompts with a column counterfactual.",
        ),
    ] = None,
    senders: Annotated[
        str | None,
        typer.Option(
            metavar="L5H1,L3MLP", help="What writes: names, or heads, mlps. Default: all earlier heads; see below."
        ),
    ] = None,
    task: ReadyTask = None,
    prompts: PromptsFile = None,
    screen: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Estimate all edges by gradients, and measure the N largest and some others. Needs a column "
            "counterfactual.",
        ),
    ] = None,
    control: Annotated[
        str | None,
        choice("--control", ("random",), "Also subtract random writes of equal size."),
    ] = None,
    draws: Annotated[int | None, typer.Option(min=1, help="Random writes per edge (default 20).")] = None,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
    output: TableOutput = None,
    picture: Picture = None,
    form: Format = None,
    folder: Folder = None,
    shard: Shard = None,
    quiet: Quiet = False,
) -> None:
    """Cut each edge from a sender (an earlier head or MLP) to a receiver, one at a time, and measure what changes.

    Example: tlspectral edges smollm2-135m L18H6.k -o edges.parquet --picture edges.png

    Example: tlspectral edges smollm2-135m --prompts pairs.csv --screen 50 -o edges.parquet --picture circuit.png

    A cut takes what the sender wrote out of the receiver's input, and out of nothing else. The result is a table with a
    row per sender and receiver. `delta` is the change: for one receiver of queries or keys without --prompts, of its
    head's attention to the token after the same token in repeated random tokens (probability); otherwise of the task's
    metric (nats, or for --prompts the logit of the correct minus the wrong answer). The command prints the 20 edges
    with the largest change; -o writes all rows, and --picture draws the largest 24.

    With a column counterfactual in --prompts, the write is replaced by the write on that prompt, and senders include
    MLPs and the embedding. Otherwise it is replaced by its mean.

    Not shown: that an edge without effect carries nothing. Other edges may carry the same.
    """
    _require_outputs(output, picture)
    require_shared(folder, "--folder")
    keeps(folder)
    require_one_task(prompts, task)
    if control is None and draws is not None:
        raise typer.BadParameter("needs --control random", param_hint="--draws")
    if receivers is None and prompts is None:
        raise typer.BadParameter(
            "no receiver is given: give for example L18H6.k, or --prompts with a column counterfactual",
            param_hint="RECEIVERS",
        )
    if prompts is not None:
        task_of_file(prompts)  # a file that cannot be read is refused before the model is loaded
    import tlspectral

    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    from_names = None if senders is None else senders if senders in ("heads", "mlps", "mixers") else senders.split(",")
    table = tlspectral.edge_effects(
        loaded,
        None if receivers is None else receivers.split(","),
        senders=from_names,
        task=task if prompts is None else task_of_file(prompts, model=loaded),  # type: ignore[arg-type]
        control=None if control is None else draws or "random",
        screen=screen,
        folder=folder,
    )
    if form is None and not quiet:
        _print_edges(table)
    _deliver(table, output, form, None if picture is None else tlspectral.plots.circuit(table, most=_DRAWN), picture)


def _print_edges(table: "pd.DataFrame") -> None:
    """Print the 20 rows of a table of `edge_effects` with the largest measured change, largest first."""
    from tlspectral.tables.printed import printed

    names = ("sender", "receiver", "position", "attention", "delta", "delta_se", "control_p", "qvalue", "estimate")
    measured = table.dropna(subset=["delta"])
    largest = measured.reindex(measured["delta"].abs().sort_values(ascending=False, kind="stable").index)
    typer.echo(
        f"the {min(_LISTED, len(largest))} largest changes of {len(largest)} measured edges ({len(table)} in all):"
    )
    typer.echo(
        printed(largest.loc[:, [name for name in names if name in table]].head(_LISTED).dropna(axis=1, how="all"), 4)
    )


@app.command(short_help="the pairs of tokens a head attends between most, as text")
def pairs(
    model: Model,
    heads: Annotated[
        str | None, typer.Argument(metavar="HEADS", help="Heads, layers or groups: L5H1,L3,L5KV1. Default: all.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE.csv",
            help="Column prompt; other columns are not read. Default: packaged text (Alice, 8,192 tokens).",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Largest pairs of each head.")] = 10,
    sink: Annotated[bool, typer.Option("--sink", help="Include pairs with the first token as key.")] = False,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
    output: TableOutput = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE",
            help="Draw the attention of HEADS (at most 12) on the prompt of the largest pair: .png, .pdf or .svg. "
            "Needs --prompts.",
        ),
    ] = None,
    form: Format = None,
    quiet: Quiet = False,
) -> None:
    """Find the pairs of tokens with the most attention of each head, and print them in their text.

    Example: tlspectral pairs smollm2-135m L18H6,L16H0 -o pairs.parquet

    Example: tlspectral pairs smollm2-135m L18H6 --prompts names.csv --picture patterns.png

    The result is a table with a row per pair: attention (probability), positions, tokens, and the text around them,
    with the key in [ ] and the query in < >. `kind` compares the tokens: previous, self, induction (the key follows an
    earlier token equal to the query's), duplicate (an equal token), or other. The command prints at most 20 pairs. With
    -o, the table also has ordinary pairs, drawn from below the largest, in three intervals of attention.

    Not shown: whether the model needs these tokens. The largest pairs are extremes.
    """
    _require_outputs(output, picture)
    if picture is not None and (prompts is None or heads is None):
        raise typer.BadParameter("needs HEADS and --prompts, whose attention is drawn", param_hint="--picture")
    chosen = listed_heads(heads)
    import tlspectral

    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    texts = None if prompts is None else prompts_of_file(prompts, loaded)
    table = tlspectral.top_pairs(loaded, chosen, texts, n=top, sink=sink)
    if form is None and not quiet:
        _print_pairs(table)
    figure = None
    if picture is not None and texts is not None:
        if table.empty:
            raise ValueError("there is no pair to draw: give prompts of two tokens or more")
        at = int(table.loc[table["attention"].idxmax(), "prompt"])
        figure = tlspectral.plots.patterns(loaded, texts[at : at + 1], chosen)
    _deliver(table, output, form, figure, picture)


def _print_pairs(table: "pd.DataFrame") -> None:
    """Print the largest pairs of a table of `top_pairs`, at most 20 in all: the first of every head, then the second,
    and so on, each with its text on the lines below it.
    """
    ranked = table.loc[table["rank"].notna()].sort_values(["rank", "attention"], ascending=[True, False], kind="stable")
    shown = ranked.head(_LISTED).sort_values(["layer", "head", "rank"])
    typer.echo(f"{len(shown)} of the {len(ranked)} largest pairs; the key in [ ], the query in < >")
    for row in shown.to_dict("records"):
        typer.echo(f"{row['name']}  {row['attention']:.3f}  {row['kind']}, {row['offset']} tokens")
        typer.echo(textwrap.fill(row["context"].strip(), 80, initial_indent="    ", subsequent_indent="    "))


@app.command(short_help="one attention score as a sum of earlier writes")
def attribution(
    model: Model,
    head: Annotated[str, typer.Argument(metavar="HEAD", help="One head, such as L18H6.")],
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="TEXT", help="One prompt; token ids such as 5,6,7 without a tokenizer.")
    ],
    query: Annotated[
        str | None,
        typer.Option(
            metavar="POSITION", help="Token that looks: its position (-1 is the last) or its text. Default: see below."
        ),
    ] = None,
    key: Annotated[str | None, typer.Option(metavar="POSITION", help="Token that is looked at, in this form.")] = None,
    by: Annotated[
        str,
        choice("--by", ("source", "mode", "frequency"), "Terms: earlier heads and MLPs, modes, or rotary frequencies."),
    ] = "source",
    top: Annotated[int, typer.Option(min=1, help="Number of largest terms; all others are one row, rest.")] = 12,
    remove: Annotated[
        int | None, typer.Option(min=1, help="Number of largest terms to take out, to measure the score without each.")
    ] = None,
    writes: Annotated[
        bool, typer.Option("--writes", help="Split what the head writes at --query instead, by the token it reads.")
    ] = False,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
    output: TableOutput = None,
    picture: Picture = None,
    form: Format = None,
    quiet: Quiet = False,
) -> None:
    """Split one attention score of a head, from a query to a key, into a sum over what earlier heads and MLPs wrote.

    Example: tlspectral attribution smollm2-135m L18H6 --prompt "one two three one two" --picture why.png

    Example: tlspectral attribution smollm2-135m L18H6 --prompt "one two three one two" --query -1 --key 2 --by mode

    Example: tlspectral attribution smollm2-135m L16H0 --prompt "one two three one two" --writes

    Without --query and --key, the score is the one of the head's largest attention on this prompt, except to the first
    token. The result is a table with a row per term of the query and term of the key, in logits before the softmax:
    M_S, M_A, the phase Im(M_t) and biases (`outside_m`) add up to `total`. A mode is a pair of singular vectors of the
    query-key matrix. With --remove, `measured` is the loss of score without the term, with norms computed again.

    With --writes, each row is a token: the length (`norm`) of what the head writes from it, and its cosine with the
    whole write.

    Not shown: that a term caused the attention. Terms can cancel, and norms change when a term is removed.
    """
    _require_outputs(output, picture)
    if writes and (key is not None or by != "source" or remove is not None or picture is not None):
        raise typer.BadParameter("leave out --key, --by, --remove and --picture", param_hint="--writes")
    if not writes and (query is None) != (key is None):
        raise typer.BadParameter("give both --query and --key, or neither", param_hint="--query")
    names = listed_heads(head)
    import tlspectral
    from tlspectral.tables.printed import printed

    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    tokens = read_prompt(loaded, prompt)
    if writes:
        at = _position(query or "-1")
        table = tlspectral.ov_attribution(loaded, tokens, names, at)
        said = f"what {head} writes at position {at}, by the token it reads"
        shown = table.loc[:, ["position", "token", "norm", "cosine"]].head(top)
    else:
        pair = (_position(query), _position(key)) if query and key else _largest_pair(loaded, tokens, head)
        table = tlspectral.qk_attribution(loaded, tokens, head, *pair, by=by, top=top, remove=remove)  # type: ignore[arg-type]
        about = table.attrs
        places = f"{about['query_token']!r} (position {about['query']}) to {about['key_token']!r} ({about['key']})"
        said = f"{head}, {places}: score {about['score']:.3f}, attention {about['attention']:.3f}"
        numbers = ("symmetric", "antisymmetric", "phase", "outside_m", "total", "measured", "attention_measured")
        shown = table.loc[:, ["query_term", "key_term", *(name for name in numbers if name in table)]]
    if form is None and not quiet:
        typer.echo(said)
        typer.echo(printed(shown, 3))
    _deliver(table, output, form, None if picture is None else tlspectral.plots.qk_attribution(table), picture)


def _position(given: str) -> int | str:
    """Return `--query` or `--key` as a position if it is a whole number, otherwise as the text of a token."""
    try:
        return int(given)
    except ValueError:
        return given


def _largest_pair(model: Any, prompt: Any, head: str) -> tuple[int, int]:
    """Return (query, key) with the head's largest attention on a prompt (text, or token ids [pos]), except to the first
    token. Raises ValueError if no prompt has such a pair.
    """
    import tlspectral

    largest = tlspectral.top_pairs(model, head, [prompt] if isinstance(prompt, str) else prompt[None], n=1)
    if largest.empty:
        raise ValueError("the prompt has no pair of tokens besides the first one: give --query and --key")
    return int(largest.loc[0, "query"]), int(largest.loc[0, "key"])
