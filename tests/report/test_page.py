"""The report page: one file, the table's own numbers, nothing that runs or asks for anything but its own script."""

import base64
import hashlib
import json
import re
from functools import partial

import command_line
import numpy as np
import pandas as pd
import pytest
from made_up_heads import INK, Structure, heads, kernels

from tlspectral.report import report
from tlspectral.tables import write_table
from tlspectral.tables.printed import short_number

pytestmark = pytest.mark.lowest


def data_of(page: str) -> dict:
    return json.loads(Structure(page).scripts()[0])


def test_the_page_is_well_formed_and_has_what_its_script_asks_for():
    page = report(
        heads(), kernels=kernels((0, 1)), sweep=pd.DataFrame([{"layer": 0, "head": 1, "part": "output", "delta": 1.0}])
    )
    found = Structure(page)
    identifiers = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    assert [attributes["lang"] for tag, attributes in found.tags if tag == "html"] == ["en"]
    assert {attributes["for"] for tag, attributes in found.tags if tag == "label"} <= set(identifiers)
    for said in ("tiny-model", "revision abc123", "Which heads do what", "Against the null", "Statuses",
                 "Provenance", "What this does not establish", "What the columns mean",
                 "Relative-position kernels"):  # fmt: skip
        assert said in found.text(), said
    assert [attributes["id"] for _, attributes in found.tags if "hidden" in attributes][:1] == ["explorer"]
    # The script runs in a browser in the slow tests; here, that it looks for nothing that is not there.
    data, cards, script = found.scripts()
    asked = set(re.findall(r'part\("(\w+)"\)', script))
    asked |= set(re.findall(r'"(\w+)"', re.search(r"= \[([^]]*)\]\.map\(part\)", script)[1]))
    assert len(asked) > 15
    assert asked <= set(identifiers)
    assert set(re.findall(r"\bdata\.(\w+)", script)) == set(json.loads(data))
    columns = set(re.findall(r"\bcolumn\.(name|unbounded|signed|mark|meaning|unit|computed|group)\b", script))
    assert columns <= set(json.loads(data)["columns"][0])
    assert set(json.loads(data)["identity"]) == {"layer", "head", "name", "kv_head", "status", "bilinear"}
    assert list(json.loads(cards)) == ["L0H1"]
    assert re.findall("<td[^>]*>([^<]*)", json.loads(cards)["L0H1"])[-2:] == ["output", "1.00"]


def test_the_numbers_are_the_tables():
    table = heads()
    table.loc[2, "self_match"] = np.nan
    table.loc[3, ["cond_eig", "self_match"]] = [np.inf, -np.inf]
    before = table.copy()
    found = data_of(report(table))
    pd.testing.assert_frame_equal(table, before)
    assert found["identity"]["name"] == list(table["name"])
    assert found["identity"]["layer"] == list(table["layer"])
    shown = [name for name in table if name not in ("layer", "head", "name", "kv_head", "status", "bilinear")]
    assert set(found["values"]) == set(shown)
    for name in shown:
        values = pd.Series(found["values"][name], dtype=object).map(
            lambda value: np.nan if value is None else float(value)
        )
        # Six digits are kept: a relative error of 5e-6 at most.
        np.testing.assert_allclose(values.to_numpy(float), table[name].to_numpy(float), rtol=5.1e-6, err_msg=name)
    assert found["values"]["self_match"][2] is None
    assert [found["values"]["cond_eig"][3], found["values"]["self_match"][3]] == ["Infinity", "-Infinity"]


def test_the_nulls_and_chance_stand_beside_their_columns():
    table = heads()
    marks = {column["name"]: column["mark"] for column in data_of(report(table))["columns"]}
    centre, spread = table["D_head_null_mean"].median(), table["D_head_null_std"].median()
    assert (marks["D_head"]["value"], marks["D_head"]["reach"]) == pytest.approx((centre, 2 * spread), rel=1e-5)
    assert marks["D_head_z"] == {"value": 0.0, "reach": 2.0, "label": "null"}
    assert marks["prev"] == {"value": 0.0625, "reach": 0.0, "label": "chance"}
    assert marks["copying"] is None


def test_a_chance_that_depends_on_the_layer_is_told_with_its_layers():
    table = heads()
    detectors = {**table.attrs["detectors"], "chance": {
        "prev": {"L0": 0.125, "L1": 0.0625, "L2": 0.125}, "dup": {"L0": 0.0, "L1": 0.0625, "L2": 0.0}, "ind": 0.0625
    }}  # fmt: skip
    table.attrs["detectors"] = detectors
    page = report(table)
    said = "Chance: prev 0.125 in L0 L2, 0.062 in L1; dup 0.000 in L0 L2, 0.062 in L1; ind 0.062."
    assert said in Structure(page).text()
    marks = {column["name"]: column["mark"] for column in data_of(page)["columns"]}
    assert (marks["prev"], marks["dup"]) == (None, None)  # no one place on the scale of all layers
    assert marks["ind"] == {"value": 0.0625, "reach": 0.0, "label": "chance"}
    table.attrs["detectors"] = {**detectors, "chance": dict.fromkeys(("prev", "dup", "ind"), 0.0625)}
    assert "Chance is 0.062." in Structure(report(table)).text()
    table.attrs["detectors"] = {key: value for key, value in detectors.items() if key != "chance"}
    assert "Chance" not in Structure(report(table)).text()


def test_heads_at_chance_are_not_listed_as_strong():
    table = heads()
    table["prev"], table["dup"] = 0.06, [0.07, *[0.01] * 11]
    table["dup_se"] = 0.005  # dup: 1.5 errors above chance, which the largest of twelve scores reaches by chance
    text = Structure(report(table)).text()
    assert "Previous-token heads prev none above chance" in text
    assert "Duplicate-token heads dup none above chance" in text
    assert "Induction heads ind head score" in text
    assert "Chance is 0.062. Heads at chance are left out." in text
    table["dup_se"] = 0.001
    listed = Structure(report(table)).text().split("Duplicate-token heads dup")[1].split("Induction heads")[0]
    assert "L0H0 0.070" in listed
    assert "L0H1" not in listed


def test_the_tables_say_what_the_table_says():
    table = heads()
    table["D_head_null_pct"] = [0.0] * 5 + [1.0] * 3 + [0.5] * 4
    table.loc[[1, 6], "status"] = "zero"
    text = Structure(report(table)).text()
    best = table.nlargest(1, "ind").iloc[0]
    row = f"{best['name']} {best['ind']:.3f} {short_number(best['ind_se'], 4)} {best['D_head']:.3f} "
    row += f"{best['D_head_null_mean']:.3f} {best['D_head_null_pct']:.3f}"
    assert row in text
    assert re.search(r"rotational share \(D_head\) \S+ \S+ \S+ 5 4 3 ", text)
    assert "12 heads in 3 layers" in text
    assert "score_check worst_error 2.5e-06, tolerance 1.3e-05, layer 1" in text
    assert "zero 2 L0H1 , L1H2" in text
    assert "ok 10 all others" in text
    assert "0123456789abcdef" * 4 in text


def test_nothing_leaves_the_page_and_only_its_own_script_and_style_act():
    page = report(heads(), kernels=kernels((0, 1)))
    assert not re.findall(r"https?:|//\w+\.|url\((?!#)|@import|fetch\(|XMLHttp|import\(", page)
    found = Structure(page)
    assert not {tag for tag, _ in found.tags} & {"img", "iframe", "object", "base", "form"}
    for tag, attributes in found.tags:
        assert not any(name.startswith("on") or name in ("src", "style") for name in attributes)
        assert tag not in ("a", "link") or attributes.get("href", "#")[0] == "#" or attributes["href"] == "data:,"
    (policy,) = [one["content"] for tag, one in found.tags if tag == "meta" and "http-equiv" in one]
    assert policy.startswith("default-src 'none'; ")
    (style,) = [text for tag, text in found.texts if tag == "style"]
    for kind, source in (("script", found.scripts()[-1]), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_text_of_the_table_stays_text():
    table = heads()
    plain = len(Structure(report(table)).tags)
    table.attrs.update(model=INK, revision=INK, seed=INK, note={INK: [INK]}, null_draws=INK)
    table["name"], table["status"] = [INK] * 12, INK
    table["bilinear"] = "</script ><b onmouseover=alert(1)>"
    table[INK] = 1.0
    page = report(table, kernels=kernels((0, 1)))
    found = Structure(page)
    assert INK not in page
    block = page.split('id="data">')[1].split("</script")[0]
    assert json.loads(block)["identity"]["bilinear"][0].startswith("</script >")
    assert len([tag for tag, _ in found.tags if tag == "script"]) == 3  # two of them data
    assert not [tag for tag, _ in found.tags if tag == "b" and "onmouseover" in _]
    assert INK in found.text()
    assert data_of(page)["identity"]["name"] == [INK] * 12
    assert plain > 100


def test_what_was_not_computed_is_said():
    table = heads()
    table["rope_imag_frac"], table["prev"] = np.nan, np.nan
    page = report(table)
    computed = {column["name"]: column["computed"] for column in data_of(page)["columns"]}
    assert not computed["rope_imag_frac"]
    assert not computed["prev"]
    assert computed["D_head"]
    assert "Previous-token heads prev not computed" in Structure(page).text()
    assert "ind not computed" in Structure(report(heads().drop(columns=["ind", "ind_se"]))).text()
    without_null = Structure(report(heads()[["layer", "head", "dir_frac", "D_head", "prev"]])).text()
    assert "Against the null not computed" in without_null
    table[["D_head", "dir_frac", "prev", "dup", "ind"]] = np.nan
    text = Structure(report(table)).text()
    assert "Not a column" not in text
    assert "This table has no detector scores" in text
    assert "Previous-token heads" not in text
    assert "Mean attention on" not in text


def test_a_table_of_the_needed_columns_alone_is_enough_and_many_heads_stay_below_a_megabyte():
    table = heads()[["layer", "head", "dir_frac", "D_head"]].set_index(pd.Index([5] * 12))
    table["mine"], table["word"] = range(12), "x"
    found = data_of(report(table))
    assert found["identity"]["name"][4] == "L1H0"
    assert [column["name"] for column in found["columns"]] == ["dir_frac", "D_head", "mine"]
    assert all(column["mark"] is None for column in found["columns"])
    assert "word" not in found["values"]
    assert len(report(heads(32, 32)).encode()) < 1_000_000


def test_kernels_are_drawn_for_the_heads_that_lead():
    table = heads()
    first = table.nlargest(1, "prev").iloc[0]
    last = table.nsmallest(1, "prev")
    for detector in ("dup", "ind"):
        table.loc[last.index, detector] = 0.0
    places = [(int(row["layer"]), int(row["head"])) for row in (first, last.iloc[0])]
    page = report(table, kernels=kernels(*places))
    found = Structure(page)
    drawn = [attributes.get("aria-label") for tag, attributes in found.tags if tag == "svg"]
    said = [label for label in drawn if label and "highest mean score" in label]
    assert said == [f"{first['name']}: highest mean score 40.00 at offset -20, lowest 0.00"]
    assert "1 more in the table of kernels" in found.text()
    only = report(table, kernels=kernels(places[1]).assign(score=np.nan))
    assert "not computed" in Structure(only).text().split("Relative-position kernels")[1].split("Against the null")[0]


def kernels_of(model):
    table = kernels((0, 0))
    table.attrs["model"] = model
    return table


REFUSED = {
    "column": (lambda: report(heads().drop(columns="D_head")), "no column D_head: give a table of analyze_heads"),
    "columns": (lambda: report(heads().drop(columns=["layer", "dir_frac"])), "no column layer, dir_frac"),
    "rows": (lambda: report(heads().iloc[:0]), "no rows"),
    "twice": (lambda: report(pd.concat([heads(), heads().iloc[5:6]])), "several rows for layer 1, head 1"),
    "half": (lambda: report(heads().assign(layer=0.5)), "column layer holds 0.5"),
    "kernels": (lambda: report(heads(), kernels=kernels((0, 0), (9, 9))), "L9H9, which the table of heads lacks"),
    "offset": (lambda: report(heads(), kernels=kernels((0, 0)).drop(columns="offset")), "no column offset"),
    "model": (
        lambda: report(heads(), kernels=kernels_of("gpt2")),
        "with model tiny-model, the kernels with model gpt2",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_tables_are_refused(what):
    call, said = REFUSED[what]
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.slow
def test_the_command_writes_what_the_function_returns(tmp_path):
    sweeps = [pd.DataFrame({"layer": [0], "head": [1], "part": [part], "delta": [1.5]}) for part in ("output", "M_S")]
    for name, table in (("heads", heads()), ("kernels", kernels((0, 1))), ("1", sweeps[0]), ("2", sweeps[1])):
        write_table(table, tmp_path / f"{name}.parquet")
    out = tmp_path / "new" / "report.html"
    further = [word for name in "12" for word in ("--sweep", tmp_path / f"{name}.parquet")]
    done = run(tmp_path / "heads.parquet", "-o", out, "--kernels", tmp_path / "kernels.parquet", *further)
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(out)
    assert out.read_text(encoding="utf-8") == report(heads(), kernels=kernels((0, 1)), sweep=sweeps)
    assert report(heads(), tmp_path / "plain.html") == (tmp_path / "plain.html").read_text(encoding="utf-8")
    write_table(heads().drop(columns="D_head"), tmp_path / "heads.parquet")
    refused = run(tmp_path / "heads.parquet", "-o", tmp_path / "report.html")
    assert refused.exit_code == 2
    assert "no column D_head" in refused.output
    assert not (tmp_path / "report.html").exists()


run = partial(command_line.run, "report")


def test_a_full_disk_names_the_page_and_leaves_the_older_one(tmp_path, file_size_limit):
    path = tmp_path / "report.html"
    report(heads(), path)
    before = path.read_bytes()
    with file_size_limit(1000), pytest.raises(OSError, match=str(path)):
        report(heads(layers=5), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_notebook_shows_the_page_in_a_frame_that_holds_it():
    page = report(heads())
    ((tag, attributes),) = Structure(page._repr_html_()).tags
    assert (tag, attributes["srcdoc"]) == ("iframe", page)  # in the text of the notebook itself: no request
    assert "src" not in attributes
