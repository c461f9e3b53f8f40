"""Head tables of made-up numbers, and pages taken apart."""

from html.parser import HTMLParser

import numpy as np
import pandas as pd

from tlspectral.tables.head_columns import HEAD_COLUMNS

VOID = {"meta", "link", "br", "input"}


INK = "<script>alert(1)</script>"


def heads(layers: int = 3, per_layer: int = 4) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    count = layers * per_layer
    frame = pd.DataFrame({column.name: generator.uniform(0.2, 0.8, count) for column in HEAD_COLUMNS})
    frame[["prev_se", "dup_se", "ind_se"]] *= 0.01  # errors of scores that are above chance
    frame["layer"], frame["head"] = np.repeat(np.arange(layers), per_layer), np.tile(np.arange(per_layer), layers)
    frame["kv_head"], frame["rank"], frame["status"], frame["bilinear"] = frame["head"] // 2, 8, "ok", "exact"
    frame["name"] = [f"L{layer}H{head}" for layer, head in zip(frame["layer"], frame["head"], strict=True)]
    frame.attrs = {
        "model": "tiny-model",
        "revision": "abc123",
        "weights_sha256": "0123456789abcdef" * 4,
        "versions": {"tlspectral": "0.1.0"},
        "seed": 7,
        "null_draws": 300,
        "score_check": {"worst_error": 2.5e-6, "tolerance": 1.3e-5, "layer": 1, "compared": "scores"},
        "detectors": {"n_sequences": 200, "segment_length": 64, "chance": 0.0625},
    }
    return frame


def kernels(*places: tuple[int, int]) -> pd.DataFrame:
    rows = [(*place, offset, 0.1 * offset**2) for place in places for offset in range(-20, 1)]
    return pd.DataFrame(rows, columns=["layer", "head", "offset", "score"])


class Structure(HTMLParser):
    """Checks that elements close in order; keeps tags, text by element and every attribute."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self) -> str:
        return " ".join(" ".join(text for tag, text in self.texts if tag not in ("script", "style")).split())

    def scripts(self) -> list[str]:
        return [text for tag, text in self.texts if tag == "script"]
