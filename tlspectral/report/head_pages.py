"""Public pages of single heads: `head_pages.txt` says of which models there are some, and by what source."""

from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any


def page_address(attrs: Mapping[Any, Any]) -> str | None:
    """Return the address of the public pages of a model's heads, with `{layer}` and `{head}`; None if none is known.

    The model is the one in a table's `attrs`, by its whole name or, as TransformerLens calls it, by what stands behind
    the owner. There is no page of a revision, such as a checkpoint of training. Nothing is asked of a network.
    """
    known, name = _pages(), str(attrs.get("model")).lower()
    return None if attrs.get("revision") not in (None, "main") else known.get(name)


def page_link(attrs: Mapping[Any, Any], pair: tuple[int, int]) -> str:
    """Return a line of HTML with the link to the public page of a head; empty if none is known."""
    address = page_address(attrs)
    if address is None:
        return ""
    at = escape(address.format(layer=pair[0], head=pair[1]))
    return f'<p class="note"><a href="{at}" target="_blank" rel="noopener noreferrer">{LINKED}</a></p>'


LINKED = "Its public page: where it attends on another text, without errors or chance"
"""What a link says. The page is of the model's public weights, whatever weights the table is of."""


@cache
def _pages() -> dict[str, str]:
    text = files("tlspectral.report").joinpath("head_pages.txt").read_text(encoding="utf-8")
    lines = [line.split("|") for line in text.splitlines() if line and not line.startswith("#")]
    pages = {name.strip().lower(): address.strip() for name, address in lines}
    return {name.rpartition("/")[2]: address for name, address in pages.items()} | pages
