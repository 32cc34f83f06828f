"""The report: whole without a network, honest about what is missing, safe against its own text."""

import json
import re
from html.parser import HTMLParser

import pytest

import ctrl_rl
from ctrl_rl import ppo
from ctrl_rl.evaluation import Metric, Result
from ctrl_rl.report import add_evaluation, read_evaluations, refresh, write_report
from ctrl_rl.runs import Run


class Page(HTMLParser):
    """Links, tags and text; open tags must be closed."""

    VOID = {"meta", "img", "br", "tr", "th"}

    def __init__(self, text):
        super().__init__()
        self.links, self.tags, self.text, self.open = [], [], "", []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data + " "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "r <b>&"
    env = ctrl_rl.make("Pendulum-v0", 4)
    run = Run(folder, console=False, eval_every=0)
    return ppo.train(ppo.PPOConfig(total_steps=128, num_steps=16, hidden=(8,)), env, run).folder


def test_a_fresh_run_says_what_is_missing_and_how_to_get_it(folder):
    page = Page(write_report(folder).read_text())
    text = " ".join(page.text.split())
    assert "Pendulum-v0 · ppo" in text and "complete" in text and "128 env steps" in text
    for word in ("ctrl-rl export", "ctrl-rl eval", "ctrl-rl play", "made when a run ends"):
        assert word in text
    assert "r <b>&" in text and "b" not in set(page.tags) - {"b"}  # the folder's name is text
    assert page.links and all(link.startswith("data:image/png;base64,") for link in page.links)


def test_nothing_is_loaded_from_a_network(folder):
    text = write_report(folder).read_text()
    text = re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
    assert "http" not in text and "//" not in text and "@import" not in text


def test_evaluation_video_and_card_are_shown(folder):
    metric = Metric(mean=-123.4, ci95=(-150.0, -100.0), n=50, unit="-")
    rate = Metric(mean=0.25, ci95=None, n=50, unit="-")
    result = Result(metrics={"episode_return": metric, "terminated_rate": rate}, episodes={})
    found = {"checkpoint": "best", "env_steps": 64, "deterministic": True}
    add_evaluation(folder, "nominal", found | {"metrics": result.to_dict()})
    add_evaluation(folder, "randomised", found | {"metrics": result.to_dict()})
    add_evaluation(folder, "nominal", found | {"metrics": result.to_dict(), "env_steps": 96})
    assert {k: v["env_steps"] for k, v in read_evaluations(folder).items()} == {
        "nominal": 96,
        "randomised": 64,
    }
    (folder / "video.mp4").write_bytes(b"x")
    card = {"train_steps": 64, "input": "obs", "output": "actions", "spec": {"step_dt": 0.05}}
    (folder / "policy.json").write_text(json.dumps(card))
    (folder / "policy.onnx").write_bytes(b"x" * 2000)
    checks = {"falls": {"value": 0.01, "limit": 0.02, "unit": "-", "passed": True},
              "drift": {"value": 0.2, "limit": 0.05, "unit": "m", "passed": False}}  # fmt: skip
    assert refresh(folder, {"checks": checks, "notes": ["a note"]}) == folder / "report.html"
    page = Page((folder / "report.html").read_text())
    text = " ".join(page.text.split())
    assert "falls 0.01 0.02 - passed" in text and "drift 0.2 0.05 m not passed a note" in text
    for word in ("-123.4", "-150 … -100", "25.0%", "50 episodes", "best", "20 Hz", "2 kB"):
        assert word in text, word
    assert "video.mp4" in page.links and "policy.onnx" in page.links
    (folder / "evaluation.json").write_text("{")
    with pytest.raises(ValueError, match="evaluation.json is damaged"):
        write_report(folder)


def test_only_a_run_gets_a_report(tmp_path):
    assert refresh(tmp_path) is None
    with pytest.raises(ValueError, match="not a run folder"):
        write_report(tmp_path)
