"""Check the built site: `python tools/check_site.py build/site`, which `make docs` runs.

Examples of the reference are code and fit the page. Queries of the search field lead to the page that answers them.
Prints what is wrong and exits with 1.
"""

import html
import json
import re
import sys
from pathlib import Path

import lunr.builder
import lunr.query
import lunr.stop_word_filter
import lunr.trimmer

WIDEST = 100
"""Characters of a line of code on a page of the reference; longer lines need a scroll bar."""
QUERIES = {
    "D_head": "concepts.html",
    "dir_frac": "concepts.html",
    "compare models": "two_models.html",
    "attention sink": "detectors.html",
    "head importance": "your_question.html",
    "GQA": "grouped_keys.html",
    "head_mask": "head_mask.html",
    "attention head ablation GQA": "grouped_keys.html",
    "null model": "concepts.html",
    "mean ablation": "parts.html",
    "zero ablation": "parts.html",
    "activation patching": "circuits.html",
    "path patching": "wiring.html",
    "pruning": "head_mask.html",
    "logit lens": "questions.html",
    "previous token head": "detectors.html",
    "fold_ln": "from_transformerlens.html",
    "gpu": "gpu.html",
    "Colab": "platforms.html",
    "cite": "index.html",
    "activation steering": "write_your_own.html",
    "vLLM": "other_tools.html",
    "device_map": "gpu.html",
    "tensor parallel": "gpu.html",
    "URL": "table.html",
    "CPR": "circuits.html",
    "AtP*": "circuits.html",
    "function vector": "parts.html",
    "adapter": "two_models.html",
    "QK circuit": "attribution.html",
    "rotary pair": "preferences.html",
    "nnsight": "models.html",
}
"""What people type, and the page that has to come first."""


def quoted_examples(site: Path) -> list[str]:
    """Return the pages of the reference on which Markdown took an example for a quotation."""
    return [page.name for page in sorted(site.glob("api/*.html")) if "<blockquote>" in page.read_text(encoding="utf-8")]


def wide_code(site: Path) -> list[str]:
    """Return the lines of code of the reference that are wider than `WIDEST`, with their page."""
    wide: list[str] = []
    for page in sorted(site.glob("api/*.html")):
        for code in re.findall(r"<pre[^>]*>(.*?)</pre>", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            lines = html.unescape(re.sub("<[^>]+>", "", code)).splitlines()
            wide += [f"{page.name}: {line}" for line in lines if len(line) > WIDEST]
    return wide


def search(site: Path) -> "lunr.index.Index":
    """Return the search index of the site, with the weights of fields that its configuration gives."""
    stored = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    builder = lunr.builder.Builder()
    builder.pipeline.add(lunr.trimmer.trimmer, lunr.stop_word_filter.stop_word_filter)
    builder.ref("location")
    for name, field in stored["config"]["fields"].items():
        builder.field(name, boost=field["boost"])
    for entry in stored["docs"]:
        text = re.sub("<[^>]+>", " ", entry["text"])
        builder.add({**entry, "text": text, "tags": " ".join(entry.get("tags", ()))})
    return builder.build()


def first_pages(site: Path) -> dict[str, str]:
    """Return the page that comes first for each of `QUERIES`; "" if nothing is found."""
    index = search(site)
    found: dict[str, str] = {}
    for text in QUERIES:
        query = lunr.query.Query(index.fields)
        for word in re.split(r"[\s\-]+", text.lower()):
            query.term(word)
            query.term(word, wildcard=lunr.query.Query.WILDCARD_TRAILING)
        results = index.query(query)
        found[text] = results[0]["ref"].partition("#")[0] if results else ""
    return found


def main(site: Path) -> int:
    """Print every fault; return the exit status."""
    faults = [f"an example is a quotation: {page}" for page in quoted_examples(site)]
    faults += [f"wider than {WIDEST}: {line}" for line in wide_code(site)]
    for query, page in first_pages(site).items():
        if page != QUERIES[query]:
            faults.append(f"the search for {query!r} leads to {page or 'nothing'}, not to {QUERIES[query]}")
    print("\n".join(faults) or f"{len(QUERIES)} queries lead to their pages; examples are code")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
