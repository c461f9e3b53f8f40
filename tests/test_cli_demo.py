"""The command of the first minutes, on a packaged model."""

from functools import partial

from typer.testing import CliRunner

import tlspectral as tls
from tlspectral.cli import app, demo


def test_one_load_gives_table_figure_and_ablation(tmp_path, monkeypatch):
    loads = []
    real = tls.load_model
    monkeypatch.setattr(demo, "_MODEL", "tiny-rope")
    monkeypatch.setattr(tls, "load_model", lambda *given, **options: (loads.append(given), real(*given, **options))[1])
    # Few draws of the null: how many there are without that is the library's to say.
    monkeypatch.setattr(tls, "analyze_heads", partial(tls.analyze_heads, null_draws=5))
    run = CliRunner().invoke(app, ["demo", "-o", str(tmp_path / "out"), "--jobs", "1"])
    assert run.exit_code == 0, run.output
    assert loads == [("tiny-rope",)]
    heads, sweep = (tls.read_table(tmp_path / "out" / f"{name}.parquet") for name in ("smollm2", "rope_phase"))
    assert len(heads) == 8
    strongest = heads.loc[heads["prev"].idxmax(), "name"]
    # Without the phase of the one previous-token head the model does not copy: 1.7 against .1 nats.
    assert sweep.loc[sweep["delta"].idxmax(), ["layer", "head"]].tolist() == [0, 3]
    assert run.output.split("rope_phase removed")[1].splitlines()[2].startswith(f"{strongest} ")
    assert (tmp_path / "out" / "smollm2.png").stat().st_size > 10_000
