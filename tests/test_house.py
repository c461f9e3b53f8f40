"""The rules of the house: floors, what is tracked, what an import loads, the public names, the versions.

CONTRIBUTING.md explains them.
"""

import ast
import functools
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import make_dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import tlspectral

PACKAGE = Path(tlspectral.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ENTRANCES = {"__init__", "__main__"}

MAY_IMPORT = {  # the other rooms do without; what an extra installs is needed by these alone
    "transformer_lens": {"models", "spectral_rope"},
    "matplotlib": {"cli", "plots"},
    "statsmodels": set(),
}
LARGEST_TRACKED = 1_000_000  # bytes
LARGER: set[str] = set()  # models and results that may be larger, by their path; none is
SAYS_NOTHING = {"common", "helpers", "misc", "utils"}


def drawn_floors() -> dict[str, int]:
    """The floor of every room, as the table in CONTRIBUTING.md has it."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, flags=re.MULTILINE)
    return {room: int(floor) for floor, rooms in rows for room in re.findall(r"`(\w+)`", rooms)}


FLOORS = drawn_floors()
WHOLE_PACKAGE = {"cli"}  # may say `import tlspectral`; what they take from it is an import of its room


def room_of(path: Path) -> str:
    """The room a file stands in: the module or package right below tlspectral, or `__init__`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """All nodes of a source, which several rules look at."""
    return list(ast.walk(ast.parse(source)))


def imported(path: Path, source: str) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports, wherever in it, with the line; relative imports made absolute."""
    package = ["tlspectral", *path.relative_to(PACKAGE).parts[:-1]]
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tlspectral":
            yield f"tlspectral.{node.attr}", node.lineno


def rooms_imported(path: Path, source: str) -> Iterator[tuple[str, int]]:
    """Rooms of the package that a file imports; a public name taken from `tlspectral` itself counts as its room."""
    for name, line in imported(path, source):
        parts = name.split(".")
        if parts[0] != "tlspectral":
            continue
        if len(parts) == 1 or parts[1].startswith("__"):
            yield "__init__", line
        elif parts[1] in tlspectral.__all__:
            yield getattr(tlspectral, parts[1]).__module__.split(".")[1], line
        else:
            yield parts[1], line


def faults(path: Path, source: str) -> Iterator[str]:
    """What one file does against the rules."""
    room, place = room_of(path), path.relative_to(PACKAGE)
    if path.stem in SAYS_NOTHING:
        yield f"{place}: a name that says nothing of what is in it"
    if room in ENTRANCES:
        return
    if room not in FLOORS:
        yield f"{place}: {room} stands on no floor: give it one in CONTRIBUTING.md"
        return
    for other, line in rooms_imported(path, source):
        if other == "__init__":
            if room not in WHOLE_PACKAGE:
                yield f"{place}:{line}: imports the whole package: import the room it needs"
        elif other != room and FLOORS.get(other, FLOORS[room]) >= FLOORS[room]:
            yield f"{place}:{line}: {room} (floor {FLOORS[room]}) imports {other} (floor {FLOORS.get(other)}): not down"
    if "tlspectral_studies." in source:
        yield f"{place}: names a module of a study: say what is meant"
    for name, line in imported(path, source):
        package = name.split(".")[0]
        if package == "tlspectral_studies":
            yield f"{place}:{line}: the core imports a study"
        if room not in MAY_IMPORT.get(package, {room}):
            yield f"{place}:{line}: only {', '.join(sorted(MAY_IMPORT[package])) or 'studies'} may import {package}"
    for node in nodes(source):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print" and room != "cli":
            yield f"{place}:{node.lineno}: print in the library"


def test_every_file_keeps_the_rules():
    assert len(FILES) > 10
    found = [fault for path in FILES for fault in faults(path, path.read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source", "said"),
    [
        ("algebra/spectra.py", "from tlspectral.heads import analyze_heads\n", "not down"),
        ("algebra/spectra.py", "from ..heads.null import null_columns\n", "not down"),
        ("algebra/spectra.py", "from .. import heads\n", "not down"),
        ("algebra/spectra.py", "from .. import tables\n", "not down"),
        ("algebra/spectra.py", "def lazy():\n    from tlspectral import analyze_heads\n", "not down"),
        ("heads/operators/factored.py", "from ...hooks import ablate\n", "not down"),
        ("heads/operators/factored.py", "import tlspectral\n", "whole package"),
        ("history/checkpoint_tables.py", "from tlspectral_studies.common import train\n", "the core imports a study"),
        ("algebra/rotary.py", '"""As in `tlspectral_studies.common`."""\n', "names a module of a study"),
        ("stats.py", "from transformer_lens import HookedTransformer\n", "transformer_lens"),
        ("stats.py", "import transformer_lens.utilities as t\n", "transformer_lens"),
        ("stats.py", "def lazy():\n    from statsmodels.api import OLS\n", "only studies may import statsmodels"),
        ("report/page.py", "from matplotlib.figure import Figure\n", "only cli, plots may"),
        ("stats.py", "print(1)\n", "print"),
        ("heads/utils.py", "", "says nothing"),
        ("attic.py", "", "no floor"),
        ("heads/analysis.py", "from tlspectral.heads.detectors import detect_heads\nfrom . import null\n", None),
        ("heads/operators/factored.py", "from ...models.reading import attention_view\n", None),
        ("cli/analyze.py", "import tlspectral\nprint(tlspectral.__version__)\n", None),
        ("models/loading/building_hooked.py", "import transformer_lens\n", None),
    ],
)
def test_a_broken_rule_is_seen_and_a_kept_one_is_not_faulted(file, source, said):
    found = list(faults(PACKAGE / file, source))
    assert found == [] if said is None else any(said in fault for fault in found)


def arguments(call: Callable[..., object]) -> int:
    """Arguments of a function, or of the making of a class (fields of a dataclass); `**settings` count as five."""
    kinds = [parameter.kind for parameter in inspect.signature(call).parameters.values()]
    return sum(5 if kind is inspect.Parameter.VAR_KEYWORD else 1 for kind in kinds)


def test_no_public_function_takes_more_than_thirteen_arguments():
    public = {name: getattr(tlspectral, name) for name in tlspectral.__all__}
    functions = {name: arguments(call) for name, call in public.items() if inspect.isfunction(call)}
    assert {name: count for name, count in functions.items() if count > 13} == {}


def test_arguments_are_counted_however_they_are_written():
    def plain(a, *, b, **settings): ...

    assert arguments(plain) == 7
    assert arguments(make_dataclass("Made", ["a", "b"])) == 2


def test_the_drawing_is_that_of_the_imports():
    """A room stands one floor above the highest room that it imports, so that the drawing says what needs what."""
    below: dict[str, set[str]] = {}
    for path in FILES:
        if (room := room_of(path)) not in ENTRANCES:
            others = {other for other, _ in rooms_imported(path, path.read_text(encoding="utf-8"))}
            below.setdefault(room, set()).update(others - {room, "__init__"})
    found: dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():  # raises CycleError, with the circle
        found[room] = 1 + max((found[other] for other in below.get(room, ())), default=-1)
    assert found == FLOORS


MODULES = {".".join(["tlspectral", *path.relative_to(PACKAGE).with_suffix("").parts]): path for path in FILES}
MODULES = {name.removesuffix(".__init__"): path for name, path in MODULES.items()}


def home(name: str) -> str:
    """The module in which a dotted name is defined, also where a package hands it on."""
    if name in MODULES:
        return name
    module, _, last = name.rpartition(".")
    if module in MODULES and MODULES[module].stem == "__init__":
        for other, _ in imported(MODULES[module], MODULES[module].read_text(encoding="utf-8")):
            if other != name and other.endswith(f".{last}"):
                return home(other)
    return module


def arrows() -> Iterator[tuple[str, str]]:
    """Each module with each module of the package that it imports, also for type checkers alone; no faces."""
    for module, path in MODULES.items():
        if path.stem != "__init__":
            for name, _ in imported(path, path.read_text(encoding="utf-8")):
                if name.startswith("tlspectral.") and (other := home(name)) != module:
                    yield module, other


def circles(arrows: Iterable[tuple[str, str]]) -> list[str]:
    """A circle of each package in which files or folders import each other in a circle."""
    below: dict[str, dict[str, set[str]]] = {}
    for module, other in arrows:
        first, second = module.split("."), other.split(".")
        same = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
        if same is not None:
            below.setdefault(".".join(first[:same]), {}).setdefault(first[same], set()).add(second[same])
    found = []
    for package, graph in below.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            found.append(f"{package}: {' <- '.join(error.args[1])}")
    return found


def test_files_and_folders_of_a_package_import_each_other_in_no_circle():
    every = list(arrows())
    assert ("tlspectral.hooks.ablation", "tlspectral.hooks.edges.reached") in every  # also inside a function
    assert circles(every) == []
    back = ("tlspectral.hooks.edges.reached", "tlspectral.hooks.ablation")
    assert [circle.split(":")[0] for circle in circles([*every, back])] == ["tlspectral.hooks"]


def tracked(*options: str) -> list[str]:
    """Paths that git tracks in this clone."""
    root = PACKAGE.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        pytest.skip(f"{root} is no clone, or git is not installed: nothing says what is tracked")
    # The owner of a clone may be another user, as in a container; git then asks for leave by name.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", *options]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.split("\0") if path]


def test_no_cache_and_no_product_of_a_build_is_tracked():
    """What .gitignore names, the folders that tools write among it, is in no commit."""
    assert tracked()
    ignored = (PACKAGE.parent / ".gitignore").read_text(encoding="utf-8").split()
    assert {".cache/", "__pycache__/", "build/", "dist/", "out/"} <= set(ignored)
    assert tracked("--cached", "--ignored", "--exclude-per-directory=.gitignore") == []


def test_no_large_file_is_tracked_but_those_that_are_listed():
    root = PACKAGE.parent
    sizes = {path: (root / path).lstat().st_size for path in tracked() if (root / path).exists()}
    assert {path: size for path, size in sizes.items() if size > LARGEST_TRACKED and path not in LARGER} == {}


HEAVY = ["torch", "transformers", "transformer_lens", "pandas", "matplotlib", "pyarrow", "statsmodels"]


def loaded_by(*steps: str) -> list[set[str]]:
    """The heavy packages that a fresh interpreter has loaded after each of some statements."""
    loaded = f"print(*[name for name in {HEAVY} if name in sys.modules])"
    code = "\n".join(["import sys", *(f"{step}\n{loaded}" for step in steps)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_package_and_its_lower_rooms_load_nothing_heavy():
    """Rooms that the docs name are attributes of the package once it is imported."""
    package, tables, stats, numbers, loading, last = loaded_by(
        "import tlspectral",
        "assert tlspectral.tables.__name__ == 'tlspectral.tables'",
        "assert tlspectral.stats.__name__ == 'tlspectral.stats'",
        "import tlspectral.errors, tlspectral.algebra.nulls, tlspectral.algebra.rotary, tlspectral.algebra.spectra",
        "import tlspectral.models.loading",
        "import statsmodels; tlspectral.plots, tlspectral.positional, tlspectral.spectral_rope",
    )
    assert package == set()
    assert not tables & {"torch", "transformer_lens"}
    assert not stats & {"statsmodels", "transformer_lens"}
    assert "transformer_lens" not in numbers
    assert not loading & {"transformers", "transformer_lens"}
    assert {"statsmodels", "torch"} <= last  # the check itself can fail


def test_public_names_are_sorted_importable_and_documented():
    assert tlspectral.__all__ == sorted(set(tlspectral.__all__))
    assert {*tlspectral.__all__, "plots", "report", "tables"} <= set(dir(tlspectral))
    rooms = [one for name in dir(tlspectral) if inspect.ismodule(one := getattr(tlspectral, name))]
    assert not any(callable(room) for room in rooms)
    assert all(set(getattr(room, "__all__", ())) <= set(dir(room)) for room in rooms)
    for name in tlspectral.__all__:
        public = getattr(tlspectral, name)
        assert public.__module__.startswith("tlspectral."), name
        assert (inspect.getdoc(public) or "").strip(), name
    with pytest.raises(AttributeError, match="no attribute 'analyse_heads'"):
        _ = tlspectral.analyse_heads


WITHOUT_AN_EXAMPLE = {"SpectralHookedTransformer"}
"""Public names whose docstring has no example at its head: TransformerLens 4 has no HookedTransformer to run one on."""


def test_public_docstrings_have_an_example_within_fifteen_lines():
    """Which runs, as those of all docstrings do (`tests/test_docs_code.py`)."""
    public = {name: getattr(tlspectral, name) for name in tlspectral.__all__}
    heads = {
        name: "\n".join((inspect.getdoc(one) or "").splitlines()[:15])
        for name, one in public.items()
        if inspect.isfunction(one) or inspect.isclass(one)
    }
    assert len(heads) > 20
    assert {name for name, head in heads.items() if ">>> " not in head} == WITHOUT_AN_EXAMPLE


FACES = (tlspectral, *(getattr(tlspectral, room) for room in (
    "heads", "history", "hooks", "parts", "plots", "positional", "report", "spectral_rope", "stats", "tables", "tasks",
)))  # fmt: skip
LONGEST_ANNOTATION = 80
"""Characters of one annotation, as `help()` and shift-tab show it."""
DOTTED = re.compile(r"\b(typing|collections|contextlib|jaxtyping|tlspectral)\.|\b(Union|Optional)\[|\bNoneType\b")
"""What an annotation shows where it is an evaluated type: `from __future__ import annotations` keeps it as written."""


def shown(call: Callable[..., object]) -> dict[str, str]:
    """The annotations of a function, or of the making of a class, as `help()` shows them."""
    signature = inspect.signature(call)
    given = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    given["return"] = signature.return_annotation
    return {name: inspect.formatannotation(one) for name, one in given.items() if one is not inspect.Signature.empty}


def public_calls() -> Iterator[tuple[str, Callable[..., object]]]:
    """Public functions and classes of the package and its rooms, and the public methods of these classes."""
    for face in FACES:
        for name in face.__all__:
            public = getattr(face, name)
            if inspect.isfunction(public) or inspect.isclass(public):
                yield name, public
            if inspect.isclass(public):
                own = {one: getattr(public, one) for one in vars(public) if not one.startswith("_")}
                yield from (
                    (f"{name}.{one}", call)
                    for one, call in own.items()
                    if inspect.isfunction(call) or inspect.ismethod(call)
                )


def long_annotations(calls: Iterable[tuple[str, Callable[..., object]]]) -> list[str]:
    """Annotations that no reader wants to see in a signature."""
    return [
        f"{name}({argument}: {text})"
        for name, call in calls
        for argument, text in shown(call).items()
        if len(text) > LONGEST_ANNOTATION or DOTTED.search(text)
    ]


def test_public_docstrings_have_at_most_forty_lines():
    """Longer text stands on the page that the docstring names."""
    lengths = {name: len((inspect.getdoc(call) or "").splitlines()) for name, call in public_calls()}
    assert len(lengths) > 150
    assert {name: length for name, length in lengths.items() if length > 40} == {}


def test_signatures_are_as_short_as_they_are_written():
    calls = list(public_calls())
    assert len(calls) > 100
    assert long_annotations(calls) == []


def test_errors_are_named_where_they_are_raised():
    """A reader of a docstring need not look up another one to learn what can go wrong."""
    raised = {
        name: re.search(r"^Raises:\n(( {4}.*)?\n)*", f"{inspect.getdoc(call)}\n", re.MULTILINE)
        for name, call in public_calls()
    }
    assert sum(found is not None for found in raised.values()) > 40
    elsewhere = [
        name
        for name, found in raised.items()
        if found is not None and re.search(r"(?<!such )\bas (by |for |of )?`", found[0])
    ]
    assert elsewhere == []


def test_a_long_signature_is_seen():
    def evaluated(heads: Iterable[str] | None, part: int) -> Callable[..., object]: ...

    assert len(long_annotations([("evaluated", evaluated)])) == 2


IN_ROOMS = {
    "hooks": ("bake", "band_effects", "check_hook", "receivers", "summarize_sweep"),
    "heads": ("copying_scores", "qk_penalty"),
    "parts": ("Band", "Content", "Interaction", "LongRange", "Output", "Position", "RopePhase", "Symmetric"),
    "positional": ("BlockPrompt", "BlockTask"),
    "report": ("head_card",),
    "spectral_rope": ("SpectralRoPE",),
    "stats": ("attenuation", "layer_bootstrap", "model_permutation_test", "partial_spearman", "top_head_percentile"),
    "tasks": ("induction_loss", "language_loss"),
}


def test_names_of_a_room_are_reached_by_it_alone():
    for room, names in IN_ROOMS.items():
        module = getattr(tlspectral, room)
        assert set(names) <= set(module.__all__)
        for name in names:
            assert not hasattr(tlspectral, name)
            assert (inspect.getdoc(getattr(module, name)) or "").strip(), name


def test_no_two_files_of_the_core_have_one_name():
    """Another name says what is in the file; `CONTRIBUTING.md`, Words."""
    stems = [path.stem for path in FILES if path.stem not in ENTRANCES]
    assert [stem for stem in sorted(set(stems)) if stems.count(stem) > 1] == []


def misplaced(files: Iterable[Path]) -> list[str]:
    """Files of tests that stand in the folder of no room, or are named after a module of another one."""
    rooms = {path.stem: path.parent.relative_to(PACKAGE) for path in FILES if path.stem not in ENTRANCES}
    found = []
    for file in files:
        folder, name = file.parent, file.stem.removeprefix("test_")
        if not (PACKAGE / folder).is_dir() or rooms.get(name, folder) != folder != Path(*folder.parts[:-1], name):
            found.append(str(file))
    return found


def test_files_of_tests_stand_in_the_folder_of_their_room():
    tests = PACKAGE.parent / "tests"
    files = [file.relative_to(tests) for file in tests.rglob("test_*.py")]
    assert len(files) > 100
    assert misplaced(files) == []
    wrong = [Path("attic/test_chance.py"), Path("plots/test_chance.py")]
    right = [Path("plots/test_refusals.py"), Path("models/loading/test_loading.py")]  # of several modules, of a package
    assert misplaced([*wrong, *right]) == list(map(str, wrong))


def test_the_tests_of_a_public_function_are_found_by_its_name():
    named = {name for name, call in public_calls() if inspect.isfunction(call) and "." not in name}
    assert len(named) > 40
    files = (PACKAGE.parent / "tests").rglob("test_*.py")
    assert named - {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))} == set()


def versions(requirements: Iterable[str], operator: str) -> dict[str, Version]:
    """The version that stands behind `==` or `>=` in each requirement, by name."""
    found = {}
    for requirement in map(Requirement, requirements):
        if requirement.name == "tlspectral":  # an extra that holds others
            continue
        (version,) = (part.version for part in requirement.specifier if part.operator == operator)
        found[requirement.name] = Version(version)
    return found


def pinned(name: str) -> dict[str, Version]:
    """Versions in a file of constraints."""
    lines = (PACKAGE.parent / name).read_text(encoding="utf-8").splitlines()
    return versions((line for line in lines if line and not line.startswith("#")), "==")


def test_the_lowest_constraints_are_the_lower_bounds():
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project, studies = (
        tomllib.loads((PACKAGE.parent / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in ("", "studies")
    )
    extras, needed = project["optional-dependencies"], [*project["dependencies"], *studies["dependencies"]]
    tested = ("adapters", "cluster", "plots", "test")
    bounds = versions([*needed, *(line for name in tested for line in extras[name])], ">=")
    lowest = pinned("constraints-lowest.txt")
    # Gigabytes in most builds: its lower bound is the one that is not tested.
    assert lowest.pop("torch") == pinned("constraints.txt")["torch"] > bounds.pop("torch")
    assert lowest == bounds


def test_both_files_of_constraints_differ_by_transformerlens_alone():
    lines = [
        {line for line in (PACKAGE.parent / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")}
        for name in ("constraints.txt", "constraints-tl4.txt")
    ]
    first, second = lines[0] - lines[1], lines[1] - lines[0]
    assert [line.split(".")[0] for line in (*first, *second)] == ["transformer-lens==3", "transformer-lens==4"]


@pytest.mark.slow
def test_files_that_test_tl4_leaves_out_load_no_model():
    """No model of the zoo and none that is loaded; nor would a test that is marked tl4 run."""
    told = subprocess.run(["make", "-n", "test-tl4"], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    left_out = [PACKAGE.parent / path for path in re.findall(r"--ignore=(\S+)", told.stdout)]
    assert len(left_out) > 20
    loads = re.compile(r"^(import|from) (zoo|\w*_zoo|conformance)\b|= (tls\.)?load_model\(|mark\.tl4\b", re.MULTILINE)
    for path in left_out:
        for file in path.rglob("test_*.py") if path.is_dir() else [path]:
            assert not loads.search(file.read_text(encoding="utf-8")), file


def test_pages_install_what_is_tested():
    """Every line that installs the package from a clone has a file of constraints."""
    root = PACKAGE.parent
    for path in (root / "README.md", *(root / "docs").glob("*.md"), *(root / "notebooks").glob("*.ipynb")):
        for line in re.findall(r"pip install .*", path.read_text(encoding="utf-8")):
            if re.search(r"""['"](\.\.?\[|\.\.?['"])""", line):
                assert re.search(r"-c (\.\./)?constraints(-tl4)?\.txt", line), f"{path.name}: {line}"
