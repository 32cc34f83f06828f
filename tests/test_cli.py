"""The command line: every flag has an effect, every mistake is one line and writes nothing."""

import dataclasses
import functools
import json
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
import torch

import ctrl_rl
from ctrl_rl import cli, ppo, registry
from ctrl_rl.commands import train
from ctrl_rl.commands.train import read_plan, rebuild

SHORT = (
    "Pendulum-v0 --num-envs 4 --total-steps 64 --algo.num-steps 16 --algo.hidden 8"
    " --eval-episodes 2 --task.max-episode-steps 20 --video-s 0"
).split()


@pytest.fixture
def quick(monkeypatch):
    """No pictures."""
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)


def fails(capsys, *words) -> str:
    """The one line on stderr of a command that exits with 2, prints and writes nothing."""
    before = sorted(Path().rglob("*"))
    assert cli.main(list(words)) == 2
    out, err = capsys.readouterr()
    assert sorted(Path().rglob("*")) == before
    assert err.count("\n") == 1 and "Traceback" not in err and not out
    return err


# Mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian Pendulum-v0", "unknown command 'trian'; did you mean 'train'?"),
        ("train Pendulm-v0", "unknown task 'Pendulm-v0'; did you mean 'Pendulum-v0'?"),
        ("train pendulum-v0", "did you mean 'Pendulum-v0'?"),
        ("train Pendulum-v0 --algo pp", "unknown algo 'pp'; did you mean 'ppo'?"),
        ("train Pendulum-v0 --sed 3", "unknown flag --sed; did you mean '--seed'?"),
        ("train Pendulum-v0 --algo.gama 0.9", "did you mean '--algo.gamma'?"),
        ("train Pendulum-v0 --task.max-episode-step 3", "did you mean '--task.max-episode-steps'?"),
        ("train Pendulum-v0 --algo.total-steps 3", "unknown flag --algo.total-steps"),
        ("train Pendulum-v0 --algo.seed 3", "unknown flag --algo.seed; did you mean '--seed'?"),
        ("train Pendulum-v0 --gama 3", "unknown flag --gama; did you mean '--algo.gamma'?"),
        ("train Pendulum-v0 --task.foo 3", "unknown flag --task.foo; known: --task.max-"),
        ("train Pendulum-v0 --task.reads 3", "did you mean '--task.max-episode-steps'?"),
        ("train Pendulum-v0 --seed=x", "--seed: invalid literal for int() with base 10: 'x'\n"),
        ("train Pendulum-v0 --seed", "Missing value for argument '--seed'"),
        ("train Pendulum-v0 more", "train: Unrecognized options: more\n"),
        ("train Pendulum-v0 --device tpu", "unknown device 'tpu'; use cpu or cuda"),
        ("bench Pendulum-v0 --device meta", "unknown device 'meta'; use cpu or cuda"),
        ("bench Pendulum-v0 --num-envs 0", "num_envs must be at least 1, not 0"),
        ("bench Pendulum-v0 --torch-threads 0", "torch_threads must be at least 1, not 0"),
        ("eval run --num-envs 0", "num_envs must be at least 1, not 0"),
        ("eval run --episodes 0", "episodes must be at least 1, not 0"),
        ("eval run --threads -1", "threads must be at least 0, not -1"),
        ("bench Pendulum-v0 --threads -1", "threads must be at least 0, not -1"),
        ("train Pendulum-v0 --threads -1", "threads must be at least 0, not -1"),
        ("train", "train needs a task"),
        ("train --num-envs 4 Pendulum-v0", "train needs a task"),
        ("train Pendulum-v0 --num-envs 0", "num_envs must be at least 1"),
        ("train Pendulum-v0 --video-s nan", "video_s must be at least 0, not nan"),
        ("train Pendulum-v0 --video-s inf", "video_s must be at least 0, not inf"),
        ("play nowhere --speed nan", "--speed must be positive, not nan"),
        ("train Pendulum-v0 --algo.gamma 2", "algo: gamma must be in 0..1, not 2.0"),
        ("train Pendulum-v0 --backend warp", "does not run on backend 'warp'"),
        ("train Pendulum-v0 --algo.num-minibatches 3000", "does not divide"),
        ("train --resume nowhere", "nowhere does not exist"),
        ("train Pendulum-v0 --init-from nowhere", "nowhere does not exist"),
        ("eval nowhere", "nowhere does not exist"),
        ("eval", "Missing from ctrl-rl eval: PATH A run folder"),
        ("play nowhere", "nowhere does not exist"),
        ("plot nowhere", "nowhere does not exist"),
        ("list tasts", "invalid choice 'tasts'"),
        ("doctor --foo", "unknown flag --foo"),
        ("--foo", "the command comes first"),
    ],
)
def test_a_mistake_is_one_line_exit_2_and_nothing_written(words, message, capsys):
    assert message in fails(capsys, *words.split())


def test_a_run_begun_in_python_is_resumed_with_its_own_length_and_seed(tmp_path):
    small = {"num_steps": 8, "num_minibatches": 1, "compile": "off"}
    config = ctrl_rl.ppo.PPOConfig(total_steps=1_500_000, seed=3, **small)
    env = ctrl_rl.make("Pendulum-v0", 2, seed=7)
    ctrl_rl.ppo.train(config, env, ctrl_rl.Run(tmp_path / "r", stop_after=1, console=False))
    plan = read_plan(["--resume", str(tmp_path / "r")])
    assert (plan.algo_config.total_steps, plan.algo_config.seed) == (1_500_000, 3)
    assert plan.flags.total_steps == 1_500_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_said(capsys):
    assert "torch finds no GPU" in fails(capsys, "train", "Pendulum-v0", "--device", "cuda")


def test_a_traceback_comes_only_with_debug(monkeypatch, capsys):
    def broken(argv):
        raise KeyError("inside")

    monkeypatch.setattr(train, "main", broken)
    broken.__annotations__["argv"] = list[str]
    assert cli.main(["train", "Pendulum-v0"]) == 1
    assert capsys.readouterr().err == "ctrl-rl train: KeyError: 'inside' (--debug shows where)\n"
    with pytest.raises(KeyError):
        cli.main(["train", "Pendulum-v0", "--debug"])


# Help ---------------------------------------------------------------------------------------


def test_top_help_is_fast_and_imports_neither_torch_nor_tyro(cli):
    code = (
        "import sys, ctrl_rl.cli; assert ctrl_rl.cli.main(['--help']) == 0; "
        "heavy = {'torch', 'tyro', 'mujoco', 'numpy', 'rich'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    took = []
    for _ in range(3):
        before = time.perf_counter()
        text = subprocess.run([cli, "--help"], check=True, capture_output=True, text=True).stdout
        took.append(time.perf_counter() - before)
    assert all(f"\n  {name}" in text for name in registry.names("commands"))
    assert min(took) < 0.5


def test_every_flag_is_explained_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        cli.main(["train", "Go1-Velocity-Flat-v0", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    plan = read_plan(["Go1-Velocity-Flat-v0"])
    for prefix, config in (
        ("", plan.flags),
        ("algo.", plan.algo_config),
        ("task.", plan.task_config),
    ):
        for flag, name, docs in flags_with_docs(prefix, config):
            if flag in ("--algo.total-steps", "--algo.seed"):
                continue  # the run's flags
            assert docs.get(name), f"{flag} has no line of help"
            assert f"{flag} " in text or f"{flag}," in text
            after = text[text.index(flag) :]
            assert "(default: " in after


@pytest.mark.parametrize("group", ["algos", "tasks"])
def test_every_field_of_every_configuration_is_explained(group):
    for name in registry.names(group):
        found = registry.load(group, name)
        cls = typing.get_type_hints(found.train)["config"] if group == "algos" else found.Config
        for flag, field, docs in flags_with_docs("", cls()):
            assert len(docs.get(field, "")) > 5, f"{name}: {flag}"


@pytest.mark.parametrize("flag", ["--run-dir", "--resume", "--init-from"])
def test_an_empty_name_of_a_folder_is_refused(flag, capsys):
    for words in ([flag, ""], [f"{flag}="]):
        assert cli.main(["train", "Pendulum-v0", *words]) == 2
        assert capsys.readouterr().err == f"ctrl-rl train: {flag} names no folder\n"


def flags_with_docs(prefix: str, config):
    """(flag, field, docs of its class) of a configuration, nested ones included."""
    docs = cli.field_docs(type(config))
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from flags_with_docs(f"{prefix}{name}.", value)
        else:
            yield f"--{prefix}{name}", field.name, docs


@pytest.mark.parametrize("name", ["eval", "play", "plot", "list", "doctor", "export", "verify"])
def test_every_command_explains_every_field(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as leave:
        cli.main([name, "--help"])
    assert leave.value.code in (0, None)
    text = capsys.readouterr().out
    (hint,) = [t for k, t in typing.get_type_hints(registry.load("commands", name)).items()
               if k != "return"]  # fmt: skip
    for flag in cli._flags(hint):
        assert flag in text
    docs = cli.field_docs(hint)
    nested = [t for t in typing.get_type_hints(hint).values() if dataclasses.is_dataclass(t)]
    for cls in (hint, *nested):
        docs |= cli.field_docs(cls)
        for field in dataclasses.fields(cls):
            if not dataclasses.is_dataclass(field.type) and field.type not in nested:
                assert docs.get(field.name) or "Annotated" in str(field.type), field.name


# A value given reaches everything -----------------------------------------------------------


def other(value, name: str):
    """A legal value that differs from the default."""
    special = {"activation": ("relu", "tanh"), "compile": ("off", "on"), "hidden": ((9, 7),)}
    if name in special:
        return next(choice for choice in special[name] if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value * 2 if value else 3
    if isinstance(value, float):
        return value / 2 if value else 0.25
    if isinstance(value, tuple):
        return tuple(other(v, "") for v in value)
    return {type(None): 7, str: "x"}[type(value)]


def as_words(flag: str, value) -> list[str]:
    if isinstance(value, bool):
        head, _, tail = flag[2:].rpartition(".")
        return [flag if value else f"--{head}.no-{tail}"]
    values = value if isinstance(value, tuple) else (value,)
    return [flag, *map(str, values)]


@pytest.mark.parametrize("task", ["Go1-Velocity-Flat-v0", "Pendulum-v0", "Ant-v5"])
def test_every_field_of_algorithm_and_task_can_be_set(task):
    plain = read_plan([task])
    for prefix, part in (("algo.", "algo_config"), ("task.", "task_config")):
        for flag, name, _ in flags_with_docs(prefix, getattr(plain, part)):
            if flag in ("--algo.total-steps", "--algo.seed"):
                continue
            path = [word.replace("-", "_") for word in flag[2:].split(".")[1:]]
            get = lambda plan: functools.reduce(getattr, path, getattr(plan, part))  # noqa: B023, E731
            wanted = other(get(plain), name)
            plan = read_plan([task, *as_words(flag, wanted)])
            assert get(plan) == wanted and get(plain) != wanted, flag
            for config in ("algo_config", "task_config"):  # and nothing else moved
                old, new = (dataclasses.asdict(getattr(p, config)) for p in (plain, plan))
                moved = {k for k in old if old[k] != new[k]}
                assert moved <= {path[0]} and (config == part or not moved)


def test_run_flags_reach_environment_learner_run_and_saved_config(tmp_path, monkeypatch):
    seen = {}
    threads = torch.get_num_threads()

    def look(config, env, run, evaluate):
        from ctrl_rl.policy import Policy

        seen.update(config=config, env=env, run=run, torch_threads=torch.get_num_threads())
        run.start(ppo.METRICS, config, env, "ppo")
        evaluate(Policy(ppo.PPO(config, env.spec, "cpu").policy_section()))
        seen["judge"] = evaluate

    look.__annotations__.update(ppo.train.__annotations__)
    monkeypatch.setattr(ppo, "train", look)
    made = []
    task = registry.load("tasks", "HalfCheetah-v5")
    init = task.__init__

    def record(self, config=None, **options):
        made.append(options | {"config": config})
        init(self, config, **options)

    monkeypatch.setattr(task, "__init__", record)
    words = (
        "HalfCheetah-v5 --total-steps 5000 --stop-after 4000 --num-envs 3 --seed 11"
        " --backend mujoco --device cpu --threads 2 --torch-threads 2 --run-dir here"
        " --eval-every 70 --eval-episodes 5 --checkpoint-every 90 --video-s 0"
        " --task.max-episode-steps 6"
    )
    try:
        train.main(words.split())
    finally:
        torch.set_num_threads(threads)
    config = json.loads(Path("here/config.json").read_text())
    assert seen["config"].total_steps == config["algo_config"]["total_steps"] == 5000
    assert seen["config"].seed == config["algo_config"]["seed"] == 11
    assert seen["torch_threads"] == config["run"]["torch_threads"] == 2
    run, env = seen["run"], seen["env"]
    assert not run.stopping(3999) and run.stopping(4000)
    assert [s for s in range(1, 200) if run.due("eval", s)] == [70, 140]
    assert [s for s in range(1, 200) if run.due("checkpoint", s)] == [90, 140, 180]
    assert env.num_envs == 3 and env.seed == 11 and env.backend == "mujoco"
    assert seen["judge"].result.metrics["episode_return"].n == 5
    training, judging = made
    assert training["threads"] == judging["threads"] == config["run"]["threads"] == 2
    assert judging["num_envs"] == 5 and judging["seed"] not in (11, 0)
    assert training["config"].max_episode_steps == judging["config"].max_episode_steps == 6
    assert config["run"] == {
        "total_steps": 5000,
        "num_envs": 3,
        "seed": 11,
        "backend": "mujoco",
        "device": "cpu",
        "threads": 2,
        "torch_threads": 2,
        "init_from": None,
        "eval_every": 70,
        "eval_episodes": 5,
        "checkpoint_every": 90,
        "video_s": 0.0,
    }


def test_no_value_given_keeps_the_task_s_preset(monkeypatch):
    task = registry.load("tasks", "Pendulum-v0")
    monkeypatch.setattr(task, "presets", {"ppo": {"gamma": 0.8, "num_envs": 5, "total_steps": 77}})
    plan = read_plan(["Pendulum-v0"])
    assert plan.algo_config.gamma == 0.8 and plan.algo_config.total_steps == 77
    assert plan.flags.num_envs == 5
    plan = read_plan(["Pendulum-v0", "--algo.gamma", "0.7", "--total-steps", "9"])
    assert plan.algo_config.gamma == 0.7 and plan.algo_config.total_steps == 9
    assert plan.flags.num_envs == 5


def test_underscores_are_read_as_hyphens():
    assert read_plan(["Pendulum-v0", "--num_envs", "3"]).flags.num_envs == 3


@pytest.mark.parametrize("task", sorted(registry.names("tasks")))
def test_configs_survive_json(task):
    config = registry.load("tasks", task).Config()
    for variant in (config, config.evaluation(), config.nominal()):
        text = json.dumps(dataclasses.asdict(variant))
        assert rebuild(type(config), json.loads(text)) == variant
    presets = registry.load("tasks", task).presets.get("ppo", {})
    fields = {f.name for f in dataclasses.fields(ppo.PPOConfig)}
    learner = ppo.PPOConfig(**{k: v for k, v in presets.items() if k in fields})
    assert rebuild(ppo.PPOConfig, json.loads(json.dumps(dataclasses.asdict(learner)))) == learner
    with pytest.raises(ValueError, match="has no nonsense"):
        rebuild(ppo.PPOConfig, {"nonsense": 1})


# --json -------------------------------------------------------------------------------------


def run_json(*words) -> dict:
    """The object a command prints with --json, checked to be all that stands on stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "ctrl_rl.cli", *words, "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout, parse_constant=lambda x: pytest.fail(f"{x} in JSON"))


def test_json_is_one_object_and_nothing_else(tmp_path):
    folder = str(tmp_path / "r")
    found = run_json("train", *SHORT, "--run-dir", folder)
    assert [found[k] for k in ("schema", "command", "task")] == [1, "train", "Pendulum-v0"]
    assert found["config"]["algo_config"]["hidden"] == [8] and found["version"]
    metric = found["metrics"]["episode_return"]
    assert set(metric) == {"mean", "ci95", "n", "unit"} and metric["n"] == 2
    found = run_json("eval", folder, "--episodes", "3", "--nominal", "--seed", "4")
    assert found["command"] == "eval" and found["variant"] == "nominal"
    assert found["config"]["seed"] == 4 and found["metrics"]["episode_length"]["mean"] == 20
    assert found["metrics"]["episode_return"]["n"] == 3
    assert run_json("list", "tasks")["tasks"].keys() == registry.names("tasks").keys()


def test_json_moves_file_descriptor_1():
    code = """
import os, sys
from ctrl_rl import cli
from ctrl_rl.commands import train
def noisy(argv: list[str]):
    os.write(1, b"from C")
    print("from Python")
    return {"metrics": {"x": {"mean": float("nan"), "ci95": None, "n": 1, "unit": "-"}}}
train.main = noisy
sys.exit(cli.main(["train", "--json"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["metrics"]["x"]["mean"] is None
    assert "from C" in done.stderr and "from Python" in done.stderr


def test_a_result_that_did_not_pass_exits_with_1(monkeypatch, capsys):
    def judged(argv):
        return {"passed": False}

    judged.__annotations__["argv"] = list[str]
    monkeypatch.setattr(train, "main", judged)
    assert cli.main(["train"]) == 1


# Commands -----------------------------------------------------------------------------------


def test_eval_plot_and_report_of_a_run(tmp_path, capsys):
    folder = tmp_path / "r"
    assert cli.main(["train", *SHORT, "--run-dir", str(folder)]) == 0
    assert (folder / "curves.png").stat().st_size > 10_000
    assert cli.main(["eval", str(folder), "--episodes", "4", "--checkpoint", "last"]) == 0
    assert cli.main(["eval", str(folder), "--episodes", "4", "--nominal"]) == 0
    found = json.loads((folder / "evaluation.json").read_text())
    assert set(found) == {"randomised", "nominal"}
    assert found["randomised"]["checkpoint"] == "last" and found["nominal"]["checkpoint"] == "best"
    assert cli.main(["plot", str(folder)]) == 0
    second = tmp_path / "s"
    assert cli.main(["train", *SHORT, "--run-dir", str(second), "--seed", "1"]) == 0
    capsys.readouterr()
    assert cli.main(["plot", str(folder), str(second), "--out", "both.png"]) == 0
    assert "mean of 2" in capsys.readouterr().out and Path("both.png").stat().st_size > 10_000
    (second / "metrics.csv").write_text("step,loss/value\n64,1.0\n")
    assert cli.main(["plot", str(folder), str(second), "--out", "both.png"]) == 0
    text = capsys.readouterr().out
    assert f"left out: {second} has not logged eval/episode_return\n" in text
    assert "mean of 1" in text
    assert cli.main(["plot", str(folder), str(second), "--key", "loss/nothing"]) == 2
    assert "there are" in capsys.readouterr().err


def test_eval_plays_the_run_s_own_task_configuration(tmp_path, quick, capsys):
    folder = tmp_path / "r"
    assert cli.main(["train", *SHORT, "--run-dir", str(folder)]) == 0
    assert cli.main(["eval", str(folder), "--episodes", "2"]) == 0
    found = json.loads((folder / "evaluation.json").read_text())["randomised"]
    assert found["metrics"]["episode_length"]["mean"] == 20  # as trained, not the default 200
    capsys.readouterr()
    assert cli.main(["eval", str(folder), "--task", "CartPole-SwingUp-v0"]) == 2
    assert "trained on Pendulum-v0" in capsys.readouterr().err


def test_doctor_says_what_the_machine_has(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "mujoco", "compiler", "rendering", "gpu", "cores", "commands"):
        assert word in text


def test_a_folder_that_hides_a_package_is_named(tmp_path):
    (tmp_path / "robots").mkdir()
    (tmp_path / "robots" / "__init__.py").touch()
    words = [sys.executable, "-m", "ctrl_rl.cli", "list"]  # with -m the folder comes first
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path / 'robots'} hides the installed package 'robots'" in done.stderr
