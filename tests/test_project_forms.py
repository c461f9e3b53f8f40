"""Forms of issues and pull requests, and the files that a newcomer looks for."""

import re
from pathlib import Path

import pytest
import transformers
import yaml
import zoo

import tlspectral as tls

ROOT = Path(__file__).parents[1]
FORMS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}


@pytest.mark.parametrize("name", ["wrong_number", "model_refused", "question"])
def test_a_form_has_what_the_host_asks_of_it(name):
    form = FORMS[name]
    assert {"name", "description", "body"} <= set(form)
    assert all(field["type"] in ("input", "textarea") for field in form["body"])
    labels = [field["attributes"]["label"] for field in form["body"]]
    assert len({field["id"] for field in form["body"]}) == len(set(labels)) == len(labels)
    assert any(field.get("validations", {}).get("required") for field in form["body"])


@pytest.mark.parametrize("name", ["wrong_number", "model_refused"])
def test_the_lines_of_a_form_print_what_a_number_is_made_again_from(name, capsys):
    (code,) = re.findall(
        r"```python\n(.*?)```",
        "".join(str(field["attributes"]["description"]) for field in FORMS[name]["body"]),
        re.DOTALL,
    )
    model = zoo.shared("bridge", "llama")
    exec(compile(code, name, "exec"), {"model": model, "frame": tls.frequency_table(model)})
    printed = capsys.readouterr().out
    assert printed.startswith(f"tlspectral {tls.__version__} transformer-lens ")
    assert f"transformers {transformers.__version__}" in printed
    if name == "wrong_number":
        assert "dtype torch.float32 device cpu" in printed
        assert "'weights_sha256'" in printed


def test_what_a_newcomer_needs_is_on_the_first_screen():
    first, _ = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## Commands\n")
    assert len(first.splitlines()) <= 40
    assert {"make test ", "make lint ", "make docs ", "make test-all "} <= set(re.findall(r"make [\w-]+ ", first))
    for target in re.findall(r"\]\(([^)#]+)\)", first):
        assert (ROOT / target).is_file(), target
    for file in ("CODE_OF_CONDUCT.md", "SECURITY.md", ".github/PULL_REQUEST_TEMPLATE.md"):
        assert (ROOT / file).is_file(), file
