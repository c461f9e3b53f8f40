"""Addresses of public pages about single heads; `head_pages.txt` lists the models that have such pages, with
sources.
"""

from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any


def page_address(attrs: Mapping[Any, Any]) -> str | None:
    """Return the address of the public web pages about a model's heads, with `{layer}` and `{head}` to fill in, or None
    if the model has none.

    `attrs` are the `attrs` of a head table. The model is `attrs["model"]`, with or without the owner's name. Revisions
    such as training checkpoints have no pages. Nothing is requested from a network.
    """
    known, name = _pages(), str(attrs.get("model")).lower()
    return None if attrs.get("revision") not in (None, "main") else known.get(name)


def page_link(attrs: Mapping[Any, Any], pair: tuple[int, int]) -> str:
    """Return an HTML paragraph with a link to the public page of head `pair` (layer, head), or "" if none is known.

    `attrs` are the `attrs` of a head table, which name the model.
    """
    address = page_address(attrs)
    if address is None:
        return ""
    at = escape(address.format(layer=pair[0], head=pair[1]))
    return f'<p class="note"><a href="{at}" target="_blank" rel="noopener noreferrer">{LINKED}</a></p>'


LINKED = "Its public page: where it attends on another text, without errors or chance"
"""Text of a link. The page shows the model's public weights, even if the table has other weights."""


@cache
def _pages() -> dict[str, str]:
    """Return a dict from model name in lower case to address of its heads' public pages, each model with and without
    its owner's name.
    """
    text = files("tlspectral.report").joinpath("head_pages.txt").read_text(encoding="utf-8")
    lines = [line.split("|") for line in text.splitlines() if line and not line.startswith("#")]
    pages = {name.strip().lower(): address.strip() for name, address in lines}
    return {name.rpartition("/")[2]: address for name, address in pages.items()} | pages
