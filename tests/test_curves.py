"""Curves: what is drawn over seeds, with known numbers."""

import json

import numpy as np
import pytest

from ctrl_rl import curves


def write_run(folder, rows, task="Toy-v0", seed=0, **settings):
    """A run folder with nothing but what curves read."""
    folder.mkdir()
    config = {"format": 1, "task": task, "algo": "ppo", "run": {"seed": seed, "num_envs": 1}}
    config |= dict.fromkeys(("algo_config", "task_config", "metrics", "spec"), {})
    config["algo_config"] = {"seed": seed, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    keys = list(dict.fromkeys(k for row in rows for k in row))
    lines = [",".join(keys), *(",".join(str(row.get(k, "")) for k in keys) for row in rows)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_iqm_is_the_mean_of_the_middle_half():
    # of 0, 1, 2, 3, 4, 5, 6, 100 the middle four are 2, 3, 4, 5
    values = np.array([100.0, 0, 6, 1, 5, 2, 4, 3])[:, None]
    assert curves.iqm(values)[0] == 3.5


def test_runs_are_compared_where_all_of_them_have_values():
    a = np.array([0.0, 10, 20, 30]), np.array([0.0, 10, 20, 30])
    b = np.array([5.0, 25]), np.array([100.0, 200.0])
    x, values = curves.align([a, b])
    assert x.tolist() == [5, 10, 20, 25]
    assert values.tolist() == [[5, 10, 20, 25], [100, 125, 175, 200]]
    with pytest.raises(ValueError, match="no env step in common"):
        curves.align([a, (np.array([50.0]), np.array([1.0]))])


def test_the_interval_covers_the_mean_and_shrinks_with_runs():
    draw = np.random.default_rng(1).normal(size=(40, 1))
    few, many = curves.interval(draw[:4]), curves.interval(draw)
    assert few[0] < draw[:4].mean() < few[1]
    assert (many[1] - many[0]) < 0.6 * (few[1] - few[0])
    same = curves.interval(np.ones((3, 2)))
    assert same[0].tolist() == same[1].tolist() == [1, 1]


def test_a_picture_that_breaks_off_leaves_the_one_before(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a", [{"step": 10, "loss/value": 1.0}])
    (folder / "curves.png").write_bytes(b"before")

    def full(figure, file, **options):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(OSError, match="no space"):
        curves.draw_run(folder)
    assert (folder / "curves.png").read_bytes() == b"before"
    assert not list(folder.glob("*.tmp"))


def test_seeds_of_a_task_are_one_line_with_the_statistic_named(tmp_path):
    def rows(x):
        key = "eval/episode_return"
        return [{"step": 10, key: x}, {"step": 20, key: 2 * x}]

    runs = [write_run(tmp_path / f"a{i}", rows(i), seed=i) for i in range(1, 5)]
    other = write_run(tmp_path / "b", rows(7), task="Other-v0")
    silent = write_run(tmp_path / "c", [{"step": 10, "loss/value": 1.0}])
    found, left_out = curves.draw_comparison([*runs, silent, other], tmp_path / "x.png")
    assert left_out == [silent]
    line = found["Toy-v0 · ppo"]
    assert line["runs"] == 4 and line["statistic"] == "mean" and line["last"]["mean"] == 5.0
    assert line["last"]["ci95"][0] < 5.0 < line["last"]["ci95"][1]
    assert found["Other-v0 · ppo"]["last"] == {"mean": 14.0, "ci95": None, "n": 1, "unit": "-"}
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    # a fifth run that failed badly moves the mean to -16, not the interquartile mean
    runs.append(write_run(tmp_path / "a5", rows(-50), seed=5))
    line = curves.draw_comparison(runs, tmp_path / "x.png")[0]["Toy-v0 · ppo"]
    assert line["statistic"] == "interquartile mean" and line["last"]["mean"] == 4.0
    with pytest.raises(ValueError, match="no run has logged 'x'; there are eval/episode_return"):
        curves.draw_comparison(runs, tmp_path / "x.png", "x")


def test_runs_with_other_settings_are_lines_of_their_own(tmp_path):
    rows = [{"step": 10, "eval/episode_return": 1.0}]
    runs = [
        write_run(tmp_path / f"{gamma}-{seed}", rows, seed=seed, gamma=gamma, total_steps=seed)
        for gamma in (0.9, 0.99)
        for seed in (1, 2)
    ]
    found, _ = curves.draw_comparison(runs, tmp_path / "x.png")
    assert {name: line["runs"] for name, line in found.items()} == {
        "Toy-v0 · ppo · algo.gamma 0.9": 2,
        "Toy-v0 · ppo · algo.gamma 0.99": 2,
    }


def test_one_run_gets_all_its_figures(tmp_path):
    rows = [
        {"step": k, "rollout/episode_return": k, "reward/a": 1, "reward/b": 2, "policy/kl": 0.1,
         "loss/value": 10.0 / k, "task/error": "nan"}
        for k in (1, 2, 3)
    ]  # fmt: skip
    rows[1]["eval/episode_return"] = 5
    folder = write_run(tmp_path / "r", rows)
    panels = dict(curves._panels(curves.read_metrics(folder)))
    assert panels["Episode return"] == ["rollout/episode_return", "eval/episode_return"]
    assert panels["Reward terms, mean per step"] == ["reward/a", "reward/b"]
    assert curves.draw_run(folder).read_bytes().startswith(b"\x89PNG")
    assert curves.draw_run(write_run(tmp_path / "empty", [])) is None


def test_many_lines_can_be_told_apart_and_are_not_covered(tmp_path, monkeypatch):
    figures = []
    make = curves._figure
    monkeypatch.setattr(curves, "_figure", lambda *size: figures.append(make(*size)) or figures[0])
    rows = [{"step": k} | {f"reward/term_{i}": i * k for i in range(13)} for k in (1, 2, 3)]
    curves.draw_run(write_run(tmp_path / "r", rows))
    (axes,) = figures[0].axes
    looks = {(line.get_color(), str(line.get_linestyle())) for line in axes.get_lines()}
    assert len(axes.get_lines()) == len(looks) == 13
    box = axes.get_legend().get_window_extent()
    assert box.y1 < axes.get_window_extent().y0 and box.y0 >= 0


def test_no_figure_of_a_learner_is_left_out():
    learner = [{"step": 1, "value/q": 1.0, "loss/critic": 2.0, "some/thing": 3.0, "time/x_s": 1.0}]
    panels = dict(curves._panels(learner))
    assert panels["Action value [reward]"] == ["value/q"] and panels["some/thing"] == ["some/thing"]
    assert {key for keys in panels.values() for key in keys} == learner[0].keys() - {
        *("step", "time/x_s")
    }
