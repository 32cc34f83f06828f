"""`reproduce` passes on a table that is right, and fails on every one that is not."""

import dataclasses
import json
from pathlib import Path

import pytest
from offline_results import spread, write_seeds

from ctrl_rl import cli, registry
from offline.benchmark import FREE
from offline.commands import reproduce, train
from offline.published import NAMES, table
from offline.registry import ALGOS, COMMANDS

X = Path("x")
OURS = {printed: ours for ours, printed in NAMES.items()}
HOPPER = ("--dataset", "hopper-medium-v2", "--algo", "td3_bc")
"""Published: 60.37 ± 3.49 last, 70.44 ± 1.18 best; four seeds of a million updates."""


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """This checkout's commands and algorithms, whatever is installed."""
    names, ours = registry.names, {"offline_algos": ALGOS, "commands": COMMANDS}
    monkeypatch.setattr(registry, "names", lambda g: {**names(g), **ours.get(g, {})})


def run(*words: str) -> int:
    return cli.main(["offline", "reproduce", *words, "--results", "x"])


def verdicts(capsys, *words: str) -> tuple[int, list[str]]:
    found = reproduce.main([*words, "--results", "x"])
    capsys.readouterr()
    return (0 if found["passed"] else 1), [cell["verdict"] for cell in found["cells"]]


def write_table(cells) -> None:
    """Results with exactly the published means and deviations."""
    for cell in cells:
        if cell.algo in OURS:
            more = {"dataset": cell.dataset, "algo": OURS[cell.algo], "steps": cell.steps}
            write_seeds(X, spread(cell.mean, cell.std), **more)


def test_a_right_table_passes(capsys):
    cells = [c for c in table("corl-maze2d") if c.report == "last" and c.algo in OURS]
    write_table(cells)
    algos = ",".join(dict.fromkeys(OURS[c.algo] for c in cells))
    code, found = verdicts(capsys, "corl-maze2d", "--algo", algos)
    assert code == 0 and found == ["agrees"] * 30
    assert run("corl-maze2d", "--algo", algos) == 0
    out = capsys.readouterr().out
    assert "maze2d-umaze-v1 TD3+BC" in out and "30 agrees" in out and "arXiv:2210.07105" in out


def test_one_wrong_figure_fails_the_table(capsys):
    cells = [c for c in table("corl-maze2d") if c.report == "last" and c.algo in OURS]
    write_table(cells)
    write_seeds(X, spread(131.0, 3.0), dataset="maze2d-large-v1", algo="bc")  # published 2.26
    algos = ",".join(dict.fromkeys(OURS[c.algo] for c in cells))
    assert run("corl-maze2d", "--algo", algos) == 1
    out = capsys.readouterr().out
    assert "missed: ours 131.0 ± 3.0 (4 seeds), published 2.3 ± 4.4, difference +128.7" in out
    assert "29 agrees, 1 missed" in out


@pytest.mark.parametrize(
    ("dataset", "mean", "verdict"),
    [
        # 60.37 ± 3.49: two deviations, 6.98, are more than 5 points.
        ("hopper-medium-v2", 60.37 + 6.97, "agrees"),
        ("hopper-medium-v2", 60.37 + 6.99, "missed"),
        ("hopper-medium-v2", 60.37 - 6.97, "agrees"),
        ("hopper-medium-v2", 60.37 - 6.99, "missed"),
        # 48.10 ± 0.18: five points are more than two deviations.
        ("halfcheetah-medium-v2", 48.10 + 4.99, "agrees"),
        ("halfcheetah-medium-v2", 48.10 + 5.01, "missed"),
        ("halfcheetah-medium-v2", 48.10 - 5.01, "missed"),
    ],
)
def test_a_miss_is_more_than_five_points_and_two_deviations(dataset, mean, verdict, capsys):
    write_seeds(X, spread(mean, 0.5), dataset=dataset)
    words = ("corl-gym", "--algo", "td3_bc", "--dataset", dataset)
    assert verdicts(capsys, *words) == (int(verdict != "agrees"), [verdict])


def test_last_and_best_are_held_against_last_and_best(capsys):
    for seed, (last, best) in enumerate(zip(spread(60.0, 3.0), spread(70.0, 1.0), strict=True)):
        write_seeds(X, [last], first=seed, best=best)
    assert verdicts(capsys, "corl-gym", *HOPPER) == (0, ["agrees"])
    assert verdicts(capsys, "corl-gym", *HOPPER, "--report", "best") == (0, ["agrees"])
    for seed in range(4):  # the right last score, a best one of far above the published
        write_seeds(X, [60.0], first=seed, best=99.0)
    assert verdicts(capsys, "corl-gym", *HOPPER) == (0, ["agrees"])
    assert verdicts(capsys, "corl-gym", *HOPPER, "--report", "best") == (1, ["missed"])


OTHER = {
    "other simulator: Hopper-v5 (mujoco 3.17), not D4RL's": {
        "env": "Hopper-v5 (mujoco 3.17)",
        "comparable": False,
    },
    "other data: hopper-medium, not D4RL's hopper-medium-v2": {"dataset": "hopper-medium"},
    "other data: collected by sac, not D4RL's file": {"data": {"origin": "collected by sac"}},
    "other data: unknown origin, not D4RL's file": {"data": {}},
    "other steps: 50,000, published 1,000,000": {"steps": 50_000},
    "other seeds: 5, published 4": {"count": 5},
    "other seeds: 3, published 4": {"count": 3},
}


@pytest.mark.parametrize("reason", OTHER)
def test_what_is_not_comparable_fails_unless_allowed(reason, capsys):
    more = dict(OTHER[reason])
    write_seeds(X, spread(60.0, 2.0, more.pop("count", 4)), **more)
    assert run("corl-gym", *HOPPER) == 1
    out = capsys.readouterr().out
    kind = reason.partition(":")[0]
    assert f"allowed 7.0; {kind}\n" in out and f"1 not comparable\n  {reason}\n" in out
    # Allowed, it is judged by its number, and the difference still told.
    code, found = verdicts(capsys, "corl-gym", *HOPPER, "--allow-env-mismatch")
    assert (code, found) == (0, ["agrees, not comparable"])
    assert run("corl-gym", *HOPPER, "--allow-env-mismatch") == 0
    assert f"agrees: ours 60.0 ± 2.0 ({'5' if '5,' in reason else '3' if ' 3,' in reason else '4'}"
    assert f"1 agrees, not comparable\n  {reason}\n" in capsys.readouterr().out


def test_other_settings_than_the_source_s_are_not_comparable(capsys):
    """Those of `offline train` without any given are the source's; each other one is named."""
    plan = train.read_plan(["--algo", "td3_bc", "--dataset", "hopper-medium-v2"])
    config = dataclasses.asdict(plan.flags) | dataclasses.asdict(plan.algo_config)
    config = json.loads(json.dumps({k: v for k, v in config.items() if k not in FREE}, default=str))
    assert config["normalize_obs"] is True  # a preset
    write_seeds(X, spread(60.0, 2.0), config=config | {"episodes": 100, "compile": "off"})
    assert verdicts(capsys, "corl-gym", *HOPPER) == (0, ["agrees"])
    changed = {"learning_rate": 0.1, "hidden": [8], "reward": "locomotion", "normalize_obs": False}
    write_seeds(X, spread(60.0, 2.0), config=config | changed)
    assert run("corl-gym", *HOPPER) == 1
    told = capsys.readouterr().out
    assert "; other settings\n" in told
    assert (
        "other settings: hidden [8]/[256, 256], learning_rate 0.1/0.0003, "
        "normalize_obs False/True, reward locomotion/raw\n" in told
    )


CORL_S_OWN = {
    ("iql", "hopper-medium-v2"): "deterministic False/True, normalize_obs False/True, "
    "polyak 0.005/0.001",
    ("iql", "hopper-medium-replay-v2"): "deterministic False/True, normalize_obs False/True, "
    "polyak 0.005/0.001",
    ("iql", "hopper-medium-expert-v2"): "expectile 0.7/0.5, inverse_temperature 3.0/6.0, "
    "normalize_obs False/True, reward locomotion/raw",
    ("cql", "antmaze-umaze-v2"): "actor_learning_rate 3e-05/0.0001, cql_clip_diff_min none "
    "here/-200, cql_max_target_backup none here/True, layers of the critics none here/5 and 3, "
    "reward antmaze/10 r - 5, target_gap None/0.8",
    ("rebrac", "antmaze-umaze-v2"): "actor_penalty 0.01/0.003, batch_size 1024/256, "
    "critic_learning_rate none here/5e-05, critic_penalty 0.01/0.002, gamma 0.99/0.999, "
    "learning_rate 0.001/0.0003, reward raw/100 r",
    ("decision_transformer", "hopper-medium-v2"): "clip_grad none here/0.25, "
    "dropout none here/0.1, weight_decay none here/0.0001",
    # Our presets are CORL's here.
    ("td3_bc", "antmaze-umaze-v2"): "",
    ("awac", "pen-human-v1"): "",
    ("bc", "maze2d-large-v1"): "",
    ("rebrac", "pen-human-v1"): "",
    ("edac", "pen-human-v1"): "",
    ("cql", "hopper-medium-v2"): "",
}  # fmt: skip
"""Our algorithm by its presets and a cell of CORL -> what CORL ran otherwise."""


@pytest.mark.parametrize(("algo", "dataset"), CORL_S_OWN)
def test_a_cell_is_held_against_what_its_source_ran_not_against_our_presets(algo, dataset, capsys):
    (cell,) = [
        c for name in ("gym", "maze2d", "antmaze", "adroit") for c in table(f"corl-{name}")
        if (c.dataset, c.algo, c.report) == (dataset, NAMES[algo], "last")
    ]  # fmt: skip
    plan = train.read_plan(["--algo", algo, "--dataset", dataset])
    config = dataclasses.asdict(plan.flags) | dataclasses.asdict(plan.algo_config)
    config = json.loads(json.dumps({k: v for k, v in config.items() if k not in FREE}, default=str))
    write_seeds(X, spread(cell.mean, cell.std), dataset=dataset, algo=algo, steps=cell.steps,
                config=config)  # fmt: skip
    found = reproduce.main([cell.table, "--algo", algo, "--dataset", dataset, "--results", "x"])
    (line,) = found["cells"]
    differs = CORL_S_OWN[algo, dataset]
    assert line["obstacles"] == ([f"other settings: {differs}"] if differs else [])
    assert line["verdict"] == ("not comparable" if differs else "agrees")


@pytest.mark.parametrize(("critics", "verdict"), [(10, "not comparable"), (500, "agrees")])
def test_a_printed_variant_is_held_against_what_its_source_used(critics, verdict, capsys):
    write_seeds(
        X, spread(40.8, 2.0), algo="edac", variant={"diversity": "0"}, steps=3_000_000,
        config={"diversity": 0.0, "critics": critics},
    )  # fmt: skip
    words = ("corl-gym", "--dataset", "hopper-medium-v2", "--algo", "SAC-N")
    assert verdicts(capsys, *words)[1] == [verdict]


def test_a_wrong_figure_fails_also_where_a_mismatch_is_allowed(capsys):
    write_seeds(X, spread(20.0, 2.0), comparable=False)
    code, found = verdicts(capsys, "corl-gym", *HOPPER, "--allow-env-mismatch")
    assert (code, found) == (1, ["missed, not comparable"])


def test_a_last_score_is_not_held_against_a_best_one(capsys):
    # This table has last scores only.
    write_seeds(X, spread(59.5, 9.0), dataset="antmaze-umaze-diverse-v2", algo="iql")
    words = ("corl-pretrain-antmaze", "--algo", "iql", "--dataset", "antmaze-umaze-diverse-v2")
    assert verdicts(capsys, *words) == (0, ["agrees"])
    assert run(*words, "--report", "best") == 1
    assert "other report: best score, published last" in capsys.readouterr().out


def test_returns_are_never_held_against_scores(capsys):
    write_seeds(X, spread(60.0, 2.0), normalized=False)
    for words in ((), ("--allow-env-mismatch",)):
        assert run("corl-gym", *HOPPER, *words) == 1
        assert "other scale: returns, not D4RL scores" in capsys.readouterr().out


def test_a_missing_cell_is_listed_and_fails(capsys):
    write_seeds(X, spread(60.37, 3.49))
    assert run("corl-gym", "--dataset", "hopper-medium-v2", "--algo", "td3_bc,IQL") == 1
    out = capsys.readouterr().out
    assert "hopper-medium-v2 IQL     missing: published 67.5 ± 3.8, nothing of ours" in out
    assert "1 agrees, 1 missing" in out
    # The whole table was asked for, and we have one cell.
    code, found = verdicts(capsys, "corl-gym")
    assert code == 1 and len(found) == 90 and found.count("missing") == 89


def test_a_variant_does_not_stand_for_the_algorithm(capsys):
    write_seeds(X, spread(60.37, 3.49), variant={"optimizer": "adamo"})
    assert verdicts(capsys, "corl-gym", *HOPPER) == (1, ["missing"])


def test_what_the_source_does_not_state_is_told(capsys):
    write_seeds(X, spread(98.0, 1.0), dataset="hopper-medium-replay-v2", algo="por")
    words = ("por", "--dataset", "hopper-medium-replay-v2")
    assert run(*words) == 0
    told = capsys.readouterr().out
    assert "not known of the source: report, steps, seeds, std, settings\n" in told
    write_seeds(X, spread(93.8, 1.0), dataset="hopper-medium-replay-v2", algo="por")
    assert verdicts(capsys, *words) == (1, ["missed"])  # 98.9 - 93.8 > 5


def test_a_set_named_after_its_data_stands_for_it_once(capsys):
    write_seeds(X, spread(60.0, 2.0), dataset="hopper-medium")
    write_seeds(X, spread(10.0, 2.0), dataset="hopper-medium-v5")
    assert run("corl-gym", *HOPPER, "--allow-env-mismatch") == 2
    err = capsys.readouterr().err
    assert "hopper-medium and hopper-medium-v5 could both stand for hopper-medium-v2" in err
    write_seeds(X, spread(60.0, 2.0))  # the real one goes before both
    assert verdicts(capsys, "corl-gym", *HOPPER) == (0, ["agrees"])


REFUSED = {
    ("corl-gim",): "unknown table 'corl-gim'; did you mean 'corl-gym'",
    ("corl-gym", "--algo", "td3-bc"): "corl-gym has no 'td3-bc'; did you mean 'TD3+BC'",
    ("corl-gym", "--dataset", "hopper-medium"): "did you mean 'hopper-medium-v2'",
    ("corl-gym", "--report", "first"): "report",
    ("corl-gym", "--alow-env-mismatch"): "did you mean '--allow-env-mismatch'",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_published_is_refused_by_name(words, capsys):
    write_seeds(X, [1.0])
    assert run(*words) == 2
    assert REFUSED[words] in capsys.readouterr().err


def test_the_object_holds_every_cell(capsys):
    write_seeds(X, spread(60.37, 3.49))
    found = reproduce.main(["corl-gym", *HOPPER, "--results", "x"])
    assert json.dumps(found, allow_nan=False)
    (cell,) = found["cells"]
    assert cell["verdict"] == "agrees" and cell["seeds"] == 4 and cell["obstacles"] == []
    assert cell["mean"] == pytest.approx(60.37) and cell["std"] == pytest.approx(3.49)
    assert found["metrics"]["hopper-medium-v2 TD3+BC"]["n"] == 4
