"""The sample of mutants: places, changes and the draw; and the comparison of two trees: what differs."""

import ast
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]

SOURCE = '''
def first(values: int = 3, *, wide: bool = True) -> int:
    """Text of 1 word."""
    if values < 2:
        raise ValueError(f"{values} is below 2: {values + 1}")
    values = values + 1
    store.kept = values
    store.add(values)
    if wide and -values:
        return values * 2
    return values, store


TABLE = [1.5, 0]
'''


@pytest.fixture(scope="module", autouse=True)
def _tools():
    sys.path.insert(0, str(ROOT / "tools"))
    yield
    sys.path.remove(str(ROOT / "tools"))


def all_mutants(source):
    from mutations import places

    for number, place in enumerate(places(ast.parse(source))):
        module = ast.parse(source)
        places(module)[number].apply()
        yield place, ast.unparse(ast.fix_missing_locations(module))


def test_every_kind_of_change_is_made_and_each_is_one_other_module_that_can_be_compiled():
    original, made = ast.unparse(ast.parse(SOURCE)), [source for _, source in all_mutants(SOURCE)]
    for source in made:
        compile(source, "mutant", "exec")
        assert source != original
    assert len(set(made)) == len(made)
    found = {(place.line, place.change) for place, _ in all_mutants(SOURCE)}
    assert found == {  # messages are left alone
        (2, "3 -> 4"), (2, "True -> False"), (4, "Lt -> LtE"), (4, "2 -> 3"), (5, "raise dropped"),
        (6, "statement deleted"), (6, "Add -> Sub"), (6, "1 -> 2"), (7, "statement deleted"), (8, "statement deleted"),
        (9, "And -> Or"), (9, "sign dropped"), (10, "returns swapped"), (10, "Mult -> Div"), (10, "2 -> 3"),
        (11, "returns swapped"), (14, "1.5 -> 3.0"), (14, "0 -> 1"),
    }  # fmt: skip


def test_lines_around_a_change_are_those_of_its_statement_and_returns_are_swapped():
    """Of a compound statement the lines are those of its head; what is returned changes place with another return."""
    around = {place.change: (place.first, place.last) for place, _ in all_mutants(SOURCE)}
    assert (around["Lt -> LtE"], around["Mult -> Div"], around["raise dropped"]) == ((4, 4), (10, 10), (5, 5))
    assert {place.in_function for place, _ in all_mutants(SOURCE) if place.line > 12} == {False}
    swapped = [source for place, source in all_mutants(SOURCE) if place.change == "returns swapped"]
    assert "        return (values, store)\n    return (values, store)" in swapped[0]
    assert "return (store, values)" in swapped[1]


@pytest.mark.slow
def test_every_place_of_the_core_gives_other_code():
    """Every seventh place of some files: all of them take minutes."""
    from mutations import core_files, mutated, parsed, places

    for file in list(core_files(ROOT))[::40]:
        original = mutated(ROOT, file, None)
        for number in range(0, len(places(parsed(ROOT, file))), 7):
            changed = mutated(ROOT, file, number)
            ast.parse(changed)
            assert changed != original


@pytest.mark.slow
def test_the_draw_is_the_same_again_and_begins_alike(tmp_path):
    from mutations import first_drawn

    small = tmp_path / "tree"
    for file in ("algebra/rotary.py", "algebra/spectra.py", "hooks/parts/query_key.py"):
        target = small / "tlspectral" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROOT / "tlspectral" / file).read_text())

    many, few, other = (
        [(mutant.file, mutant.number) for mutant in first_drawn(small, seed, count)]
        for seed, count in ((1, 60), (1, 30), (2, 30))
    )
    assert many[:30] == few != other
    assert len(set(many)) == 60


@pytest.mark.slow
def test_the_draw_is_in_proportion_to_lines():
    from mutations import core_files, first_drawn, room_of

    lines: Counter = Counter()
    for file, count in core_files(ROOT).items():
        lines[room_of(file)] += count
    drawn = Counter(room_of(mutant.file) for mutant in first_drawn(ROOT, 0, 2000))
    for room, count in lines.items():
        expected = 2000 * count / sum(lines.values())
        # Five standard errors of a count. Files without a place are passed over, small ones are used up.
        if expected > 40:
            assert abs(drawn[room] - expected) < 5 * expected**0.5, room


def test_tests_of_a_line_come_fastest_first_and_before_the_others_of_their_file(tmp_path):
    import mutant_tests

    database = mutant_tests.opened(tmp_path / "contexts.sqlite")
    times = {"t.py::slow": [9.0, True, True], "t.py::fast": [0.1, False, True], "t.py::other": [0.0, False, True]}
    times["t.py::broken"] = [0.0, False, False]
    masks = {("t.py::slow", "a.py"): 1 << 4, ("t.py::fast", "a.py"): 1 << 4, ("t.py::broken", "a.py"): 1 << 4}
    mutant_tests._keep(database, "t.py", False, times, masks | {("", "a.py"): 1 << 1})
    named = [test.node for test in mutant_tests.tests_of(database, "a.py", 3, 5, in_function=True)]
    assert named == ["t.py::fast", "t.py::slow", "t.py::other"]
    assert mutant_tests.tests_of(database, "a.py", 7, 7, in_function=True) == []
    assert len(mutant_tests.tests_of(database, "a.py", 1, 1, in_function=False)) == 3
    tests = mutant_tests.tests_of(database, "a.py", 3, 5, in_function=True)
    assert mutant_tests.within(tests, 1.0) == tests[:1]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="mutants are run in forks")
def test_a_changed_source_meets_the_tests_of_a_tree(tmp_path):
    import mutant_tests

    (tmp_path / "tests").mkdir()
    (tmp_path / "doubled.py").write_text("def twice(x):\n    return 2 * x\n")
    body = [
        "from doubled import twice",
        "def test_zero(): assert twice(0) == 0",
        "def test_one(): assert twice(1) == 2",
    ]
    (tmp_path / "tests" / "test_doubled.py").write_text("\n".join(body))
    nodes = ["tests/test_doubled.py::test_zero", "tests/test_doubled.py::test_one"]
    tests = [mutant_tests.Test(node, 0.0, False) for node in nodes]

    def ended(source):
        return mutant_tests.run(tmp_path, "doubled.py", source, tests, 60)[:2]

    assert ended("def twice(x):\n    return 2 * x\n") == ("passed", "")
    assert ended("def twice(x):\n    return 3 * x\n") == ("failed", nodes[1])
    assert ended("def other(x):\n    return 2 * x\n") == ("failed", "collection")


def test_differences_of_two_arrays_are_said():
    from compare_trees import difference

    one = np.array([1.0, np.nan, 4.0])
    assert difference(one, one.copy()) is None
    said, relative = difference(one, np.array([1.0, np.nan, 4.5]))
    assert (said, round(relative, 4)) == ("largest difference 0.5, relative 0.111", 0.1111)
    assert difference(one, np.array([1.0, 2.0, 4.0]))[1] == np.inf
    assert difference(one, one[:2])[1] == np.inf
    assert difference(np.array(["a", "b"]), np.array(["a", "c"]))[0] == "1 of 2 texts, first b -> c"
