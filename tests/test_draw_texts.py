"""tools/draw_texts.py draws texts of each kind from a commit, and the same texts for the same seed."""

import ast
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import draw_texts

SOURCE = '''
class Public:
    """Say one thing."""

    size: int
    """Number of heads."""

    def method(self, heads: str) -> int:
        """Return the layer."""
        if not heads:
            raise ValueError(f"heads={heads} names no head: give L5H1 or a list")
        raise ValueError("too short")
'''


def test_docstrings_and_messages_are_read_from_a_source():
    tree = ast.parse(SOURCE)
    public, private = draw_texts._docstrings("heads/file.py", tree, {"Public"}, "")
    assert (public.kind, public.place) == ("public docstring", "heads/file.py:2 Public")
    assert public.text == 'class Public()\n    size: int\n    """Number of heads."""\n\nSay one thing.'
    assert (private.kind, private.place) == ("private docstring", "heads/file.py:8 Public.method")
    assert private.text == "def Public.method(self, heads: str) -> int\n\nReturn the layer."
    (message,) = draw_texts._messages("heads/file.py", tree)  # the message of two words is left out
    assert message.text == "ValueError: heads={heads} names no head: give L5H1 or a list"


def test_a_draw_has_texts_of_each_kind_and_depends_on_the_seed_alone():
    kinds = [kind for kind, size in draw_texts.SIZES.items() for _ in range(2 * size)]
    texts = [draw_texts.Text(kind, f"file.py:{number}", "") for number, kind in enumerate(kinds)]
    drawn = draw_texts.draw(texts, 7)
    assert Counter(text.kind for text in drawn) == draw_texts.SIZES
    assert len({text.place for text in drawn}) == len(drawn)
    assert draw_texts.draw(texts[::-1], 7) == drawn != draw_texts.draw(texts, 8)


def test_names_of_the_package_and_its_rooms_are_public():
    kinds = {text.place.rpartition(" ")[2]: text.kind for text in draw_texts.every_text("HEAD")}
    assert [kinds[name] for name in ("ablate", "qk_penalty", "Output")] == ["public docstring"] * 3
    assert kinds["AttentionView.layers"] == "private docstring"
