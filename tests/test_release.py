"""What a package index shows of the project."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from command_line import refusal, succeed

ROOT = Path(__file__).parents[1]


@pytest.fixture
def hatch_build(monkeypatch):
    """The build hook; hatchling itself is only in the environment of a build."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_and_pictures_of_the_readme_become_absolute(hatch_build):
    text = hatch_build.with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), "https://host/owner/name")
    pictures, links = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text), re.findall(r"(?<!!)\[[^\]]*\]\(([^)]*)\)", text)
    assert pictures
    assert links
    assert all(link.startswith("https://host/owner/name/raw/main/docs/images/") for link in pictures)
    assert all(link.startswith(("https://", "#")) for link in links)
    assert "https://host/owner/name/blob/main/docs/wiring.md" in links
    assert "https://github.com/TransformerLensOrg/TransformerLens" in links


def test_without_an_address_nothing_is_linked(hatch_build):
    hook = hatch_build.ProjectLinks()
    hook.root, hook.config, metadata = str(ROOT), {"repository": ""}, {}
    hook.update(metadata)
    assert "urls" not in metadata
    assert metadata["readme"]["text"] == (ROOT / "README.md").read_text(encoding="utf-8")
    hook.config = {"repository": "https://host/owner/name/"}
    hook.update(metadata)
    assert metadata["urls"]["Issues"] == "https://host/owner/name/issues"


def test_without_its_extra_the_figures_say_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "tlspectral.plots", raising=False)
    with pytest.raises(ImportError, match=r'needs the package matplotlib: pip install "tlspectral\[plots\]"'):
        importlib.import_module("tlspectral.plots")
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert "matplotlib" in "".join(extras["plots"])


def test_without_the_package_of_studies_the_command_says_where_it_is(monkeypatch):
    monkeypatch.setattr("tlspectral.cli.study.entry_points", lambda group: [])
    assert "pip install ./studies" in refusal("study", "replicate")
    assert "pip install ./studies" in refusal("study")


def test_the_studies_show_their_help_without_statsmodels(monkeypatch):
    monkeypatch.setitem(sys.modules, "statsmodels", None)  # as if it were not installed
    assert "replicate" in succeed("study", "--help").output


def test_version_and_citation_agree():
    from tlspectral.version import __version__

    studies = (ROOT / "studies" / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{__version__}"\n' in studies
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
