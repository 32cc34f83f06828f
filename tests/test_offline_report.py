"""The report of a benchmark: last and best apart, nothing left out in silence, one page alone."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from offline_results import write_seeds

from offline import report, statistics
from offline.commands import report as command
from offline.summary import summarise

X = Path("x")
OURS = {
    "env": "Hopper-v5 (gymnasium 1.4.0, mujoco 3.17.0)",
    "comparable": False,
    "steps": 50_000,
    "data": {"origin": "collected", "sha256": "ab" * 32, "transitions": 199_800},
}


@pytest.fixture(autouse=True)
def fast(monkeypatch, request):
    """Rougher profiles; only the test of the page itself paints its pictures."""
    monkeypatch.setattr("offline.summary.PROFILE_RESAMPLES", 50)
    monkeypatch.setattr("offline.summary.TAUS", 11)
    if "page" not in request.node.name:
        monkeypatch.setattr("offline.pictures._png", lambda figure: b"\x89PNG")


def write_bench() -> None:
    """Two data sets of two algorithms; bc has best scores far above its last ones."""
    for dataset, shift in (("hopper-medium", 0.0), ("hopper-medium-replay", 20.0)):
        for seed in range(3):
            score = 30.0 + shift + seed
            write_seeds(X, [score], first=seed, best=90.0 + shift, dataset=dataset, algo="bc",
                        **OURS)  # fmt: skip
        done = OURS | {"data": OURS["data"] | {"obs_normalized": True}}
        write_seeds(X, shift + np.array([60.0, 62.0, 70.0]), dataset=dataset, **done)


class Page(HTMLParser):
    """What a browser would fetch, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched, self.text, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        self.open.remove(tag)

    def handle_data(self, data):
        self.text.append(data)


def test_figures_are_those_of_the_seeds_and_last_is_apart_from_best():
    write_bench()
    found = summarise(X)
    cell = next(c for c in found["cells"] if (c["dataset"], c["algo"]) == ("hopper-medium", "bc"))
    assert cell["last"]["value"] == 31.0 and cell["last"]["scores"] == [30.0, 31.0, 32.0]
    assert cell["last"]["std"] == pytest.approx(np.sqrt(2 / 3))
    assert cell["best"]["value"] == 90.0 and cell["best"]["ci95"] == [90.0, 90.0]
    last, best = (found["aggregates"][report] for report in ("last", "best"))
    assert last["tasks"] == ["hopper-medium", "hopper-medium-replay"]
    matrix = np.array([[60.0, 80.0], [62.0, 82.0], [70.0, 90.0]])
    for name, statistic in (("iqm", statistics.iqm), ("mean", statistics.mean)):
        expected = statistics.estimate(statistic, matrix)
        assert last["algos"]["td3_bc"][name] == {
            "value": float(expected.value),
            "ci95": expected.ci95,
        }
    (pair,) = last["pairs"]
    assert (pair["x"], pair["y"], pair["better"]) == ("bc", "td3_bc", "td3_bc")
    assert pair["probability"]["value"] == 0.0 and pair["iqm_difference"]["ci95"][1] < 0
    assert best["pairs"][0]["better"] == "bc"  # by best scores it is the other way round
    profile = last["algos"]["bc"]["profile"]
    assert (profile["value"][0], profile["value"][-1]) == (1.0, 0.0)
    assert last["taus"][0] < 30 and last["taus"][-1] > 90


def test_equal_algorithms_are_undecided_and_one_seed_decides_nothing():
    for algo in ("bc", "iql"):
        write_seeds(X, [1.0, 2.0, 9.0], algo=algo)
    (pair,) = summarise(X)["aggregates"]["last"]["pairs"]
    assert pair["better"] is None and pair["probability"]["value"] == 0.5
    for algo, score in (("bc", 1.0), ("iql", 90.0)):
        write_seeds(Path("y"), [score], algo=algo)
    found, _ = report.write(Path("y"))
    (pair,) = found["aggregates"]["last"]["pairs"]
    assert pair["better"] is None and pair["iqm_difference"]["ci95"] is None
    assert "one seed decides nothing" in Path("y/report.md").read_text()


def test_published_figures_stand_beside_with_what_keeps_them_apart():
    write_bench()
    report.write(X)
    text = Path("x/report.md").read_text()
    last, best = text.split("## Last scores")[1].split("## Best scores")
    apart = "other simulator, data, steps, seeds"
    assert f"| td3_bc | 3 | 64.0 ± 4.3 | 60.0 … 70.0 | 60.4 ± 3.5 corl-gym ({apart});" in last
    assert f"70.4 ± 1.2 corl-gym ({apart})" in best and "60.4 ± 3.5" not in best
    assert (
        "59.3 diffuser-gym (other simulator, data; not known: report, steps, seeds, std, settings)"
        in last
    )
    assert "| corl-gym | CORL README at eeeeef2" in text
    # Nothing is apart where nothing differs.
    write_seeds(Path("y"), [60.0] * 4)
    report.write(Path("y"))
    assert "60.4 ± 3.5 corl-gym;" in Path("y/report.md").read_text()


def test_every_section_with_figures_names_simulator_and_data():
    write_bench()
    found, _ = report.write(X)
    for section in report.sections(found):
        told = " ".join((*section.notes, *section.caption, *sum(map(list, section.rows), [])))
        if section.title not in ("Published figures", "Settings"):
            assert "Hopper-v5 (gymnasium 1.4.0, mujoco 3.17.0)" in told, section.title
            assert "abababababab" in told, section.title
        if section.title not in ("Published figures", "Settings", "What was measured"):
            assert "Not D4RL's: such figures compare with each other alone" in told
    measured = next(s for s in report.sections(found) if s.title == "What was measured")
    assert measured.rows[0][2:] == [
        "collected, checksum abababababab, 199,800 transitions", "50,000", "D4RL score", "no",
    ]  # fmt: skip


def test_the_page_stands_alone(monkeypatch):
    write_bench()
    write_seeds(X, [1.0], first=7, dataset="hopper-medium", algo="bc",
                variant={"note": "<script>alert(1)</script>"}, **OURS)  # fmt: skip
    _, files = report.write(X)
    page = Page()
    page.feed(Path("x/report.html").read_text())
    assert not page.open  # every tag is closed
    assert page.fetched and all(v.startswith("data:image/png;base64,") for v in page.fetched)
    assert not re.search(r"https?://|url\(|@import", Path("x/report.html").read_text())
    assert "script" not in "".join(re.findall(r"<[^>]*>", Path("x/report.html").read_text()))
    assert "<script>alert(1)</script>" in "".join(page.text)
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", Path("x/report.md").read_text())
    assert {X / name for name in pictures} == {f for f in files if f.suffix == ".png"}
    for name in pictures:
        assert (X / name).read_bytes().startswith(b"\x89PNG")
    kept = json.loads(Path("x/report.json").read_text())
    assert kept["aggregates"] == summarise(X)["aggregates"]
    assert not list(X.rglob("*.tmp"))


def test_settings_are_told_and_where_data_sets_differ():
    for dataset, expectile in (("hopper-medium", 0.7), ("hopper-expert", 0.9)):
        write_seeds(X, [1.0], dataset=dataset, algo="iql", data={"obs_normalized": True},
                    config={"batch_size": 256, "expectile": expectile})  # fmt: skip
    found, _ = report.write(X)
    assert found["settings"] == {
        "iql": {"batch_size": 256, "expectile": [0.9, 0.7], "obs_normalized": True}
    }
    text = Path("x/report.md").read_text()
    assert "| iql | batch_size 256, expectile [0.9, 0.7], obs_normalized true |" in text


def test_what_is_missing_is_listed_and_left_out_of_aggregates():
    write_bench()
    write_seeds(X, [5.0, 6.0], dataset="hopper-expert", **OURS)  # no bc there
    Path("x/results/hopper-medium/td3_bc/s1.json").unlink()
    cells = [{"dataset": "hopper-medium", "algo": "td3_bc", "seed": 1, "error": "it diverged"}]
    cells += [{"dataset": "hopper-medium", "algo": "cql", "seed": 0, "error": None}]
    Path("x/bench.json").write_text(json.dumps({"cells": cells}))
    found, _ = report.write(X)
    told = {(c["dataset"], c["algo"], c["seed"]): c["error"] for c in found["missing"]}
    assert told == {
        ("hopper-medium", "td3_bc", 1): "it diverged",
        ("hopper-medium", "cql", 0): None,
        **{("hopper-expert", "bc", seed): None for seed in range(3)},
        ("hopper-expert", "td3_bc", 2): None,
    }
    last = found["aggregates"]["last"]
    assert last["left_out"] == {"hopper-expert": "no results of bc"}
    # Seed 1 counts on neither data set: the others stand for the algorithm on both.
    assert last["algos"]["td3_bc"]["seeds"] == [0, 2] and last["algos"]["bc"]["seeds"] == [0, 1, 2]
    assert last["algos"]["td3_bc"]["mean"]["value"] == (60 + 70 + 80 + 90) / 4
    text = Path("x/report.md").read_text()
    assert "| hopper-medium | td3_bc | 1 | it diverged |" in text
    assert "Without hopper-expert: no results of bc." in text


def test_returns_are_shown_and_not_aggregated():
    write_seeds(X, [12345.6, 12347.6], dataset="mine", normalized=False, comparable=False)
    found, _ = report.write(X)
    assert found["aggregates"]["last"]["left_out"] == {"mine": "returns, not D4RL scores"}
    text = Path("x/report.md").read_text()
    assert "12,347 ± 1 | 12,346 … 12,348" in text
    assert "No data set can be aggregated." in text and "mine: returns, not D4RL scores." in text
    assert not Path("x/pictures/profiles.png").exists()


def test_the_command_prints_scores_and_files(capsys):
    write_bench()
    found = command.main(["x"])
    out = capsys.readouterr().out
    assert "hopper-medium bc             3 seeds  last 31 [30" in out and "x/report.html" in out
    assert found["metrics"]["hopper-medium td3_bc last"] == {
        "mean": 64.0, "ci95": [60.0, 70.0], "n": 3, "unit": "D4RL score",
    }  # fmt: skip
    with pytest.raises(ValueError, match="nowhere holds no results"):
        command.main(["nowhere"])
    assert not Path("nowhere").exists()
