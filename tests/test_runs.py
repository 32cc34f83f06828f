"""Run folder, checkpoints that survive anything, and exact resume."""

import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from probes import Probe

import ctrl_rl
from ctrl_rl import checkpoints, cli, ppo, run_folder, runs
from ctrl_rl.checkpoints import load_checkpoint, plain, save_checkpoint
from ctrl_rl.commands import train
from ctrl_rl.provenance import provenance
from ctrl_rl.run_folder import read_metrics
from ctrl_rl.runs import Run

TRAIN = (
    "Pendulum-v0 --num-envs 4 --algo.num-steps 16 --algo.hidden 8 --algo.num-minibatches 2"
    " --eval-episodes 2 --task.max-episode-steps 20 --video-s 0 --eval-every 128"
    " --checkpoint-every 64"
).split()


@dataclass(frozen=True, kw_only=True)
class Config:
    """Smallest configuration of a trainer."""

    total_steps: int = 1000
    rate: float = 0.1


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Curves have tests of their own and take longer than these runs."""
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)


@pytest.fixture
def env():
    return ctrl_rl.make("Pendulum-v0", 2)


SECTION = {"weights": {"layers.0.weight": torch.ones(2)}}
STATE = {"count": 1}


def started(env, folder=None, config=None, **options) -> Run:
    run = Run(folder, console=False, **options)
    run.start({"loss/policy": "a", "reward/<term>": "b", "eval/<metric>": "c"}, config or Config(),
              env, "test")  # fmt: skip
    return run


def same(a, b, path="") -> None:
    """Equal to the bit, with the place of the first difference."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}.{i}")
    else:
        assert a == b, path


# Checkpoint files ---------------------------------------------------------------------------


def test_only_plain_values_are_saved(tmp_path):
    for bad in (np.float64(1.0), np.ones(2), {1, 2}, torch.nn.Linear(1, 1), object()):
        with pytest.raises(TypeError, match=r"a\.b holds"):
            plain({"b": bad}, "a")
    with pytest.raises(TypeError, match="neither text nor an integer"):
        plain({1.5: 0})
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path / "x.pt", {"a": np.float64(1)})
    assert list(tmp_path.iterdir()) == []
    value = {"a": [1, 2.5, "x", None, True, (1, torch.ones(2))], 3: {}}
    save_checkpoint(tmp_path / "x.pt", value)
    same(load_checkpoint(tmp_path / "x.pt"), {"format": 1, **value})


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path):
    save_checkpoint(tmp_path / "x.pt", {"a": torch.zeros(1_000_000)[:3]})
    assert (tmp_path / "x.pt").stat().st_size < 10_000


@pytest.mark.parametrize("moment", ["half written", "written", "renamed"])
def test_kill_while_saving_leaves_a_whole_checkpoint(tmp_path, moment):
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"step": 1, "w": torch.ones(10_000)})
    child = os.fork()
    if child == 0:
        kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        if moment == "half written":
            save = torch.save

            def half(content, file):
                whole = io.BytesIO()
                save(content, whole)
                file.write(whole.getvalue()[: whole.tell() // 2])
                file.flush()
                kill()

            checkpoints.torch.save = half
        elif moment == "written":
            checkpoints.os.replace = kill
        else:
            checkpoints._sync_folder = kill
        try:
            save_checkpoint(path, {"step": 2, "w": torch.zeros(10_000)})
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    expected = 2 if moment == "renamed" else 1
    assert load_checkpoint(path)["step"] == expected
    save_checkpoint(path, {"step": 3})  # what was left over is not in the way
    assert load_checkpoint(path)["step"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_a_full_disk_loses_nothing(tmp_path, env):
    run = started(env, tmp_path / "r")
    run.log(10, {"loss/policy": 1.0})
    run.save(10, SECTION, {"a": torch.ones(5000)}, STATE)
    before = load_checkpoint(tmp_path / "r/checkpoints/last.pt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # a real write that breaks off
    try:
        run.log(20, {"loss/policy": 2.0})
        with pytest.raises(ValueError, match="cannot write a checkpoint.*--resume"):
            run.save(20, SECTION, {"a": torch.zeros(5000)}, STATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
        run.close()
    same(load_checkpoint(tmp_path / "r/checkpoints/last.pt"), before)
    assert not list((tmp_path / "r/checkpoints").glob("*.tmp"))
    again = started(env, tmp_path / "r", resume=True)
    assert again.restore()["step"] == 10
    again.close()


def flipped(content: bytes) -> bytes:
    """One bit wrong in the middle, amid the numbers of a tensor."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def foreign(value) -> bytes:
    """What torch.save writes for any object."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_damaged_and_foreign_checkpoints_are_one_line(tmp_path):
    path = tmp_path / "x.pt"

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    save_checkpoint(path, {"a": torch.ones(1000)})
    whole = path.read_bytes()
    cases = {
        "does not exist": None,
        "damaged or not a checkpoint": whole[: len(whole) // 2],
        "wrong checksum of .*data/0": flipped(whole),
        "damaged or not a checkpoint: ": pickle.dumps(Evil()),
        "it holds something other than data$": foreign(Evil()),
    }
    for message, content in cases.items():
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            load_checkpoint(path)
        assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert not (tmp_path / "ran").exists()
    torch.save({"w": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="not a checkpoint of ctrl-rl"):
        load_checkpoint(path)
    torch.save({"format": 99}, path)
    with pytest.raises(ValueError, match="format 99, this version reads 1"):
        load_checkpoint(path)


# Folder and log -----------------------------------------------------------------------------


def test_unusable_folders_are_refused_before_anything_runs(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty.*--resume"):
        Run(tmp_path / "full")
    with pytest.raises(ValueError, match="not a run folder: it has no config.json"):
        Run(tmp_path / "full", resume=True)
    with pytest.raises(ValueError, match="does not exist"):
        Run(tmp_path / "none", resume=True)
    with pytest.raises(ValueError, match="cannot write to"):
        Run(tmp_path / "full" / "notes.txt" / "run")
    monkeypatch.setattr(runs.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 2**20))
    with pytest.raises(ValueError, match="only 1 MiB free.*needs 256 MiB"):
        Run(tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"


def test_what_a_kill_at_the_start_leaves_is_not_in_the_way(tmp_path):
    for name in (".writable", ".writable.tmp", "config.json.tmp"):
        (tmp_path / name).write_text("x")
    trained(tmp_path, *TRAIN, "--total-steps", "64")
    assert {p.name for p in tmp_path.iterdir() if p.suffix == ".tmp" or p.name[0] == "."} == set()


def test_a_run_that_never_started_leaves_no_folder(tmp_path):
    Run(tmp_path / "a" / "b", console=False).close()
    assert list(tmp_path.iterdir()) == []


def test_config_is_written_before_training(tmp_path, env):
    run = started(env, tmp_path / "r", settings={"threads": 3})
    config = json.loads((tmp_path / "r/config.json").read_text())
    run.close()
    assert config["task"] == "Pendulum-v0" and config["algo"] == "test"
    assert config["algo_config"] == {"total_steps": 1000, "rate": 0.1}
    assert config["run"]["num_envs"] == 2 and config["run"]["threads"] == 3
    assert (config["run"]["eval_every"], config["run"]["checkpoint_every"]) == (200, 100)
    assert config["versions"]["torch"] and config["hardware"]["cores"] >= 1
    assert ctrl_rl.spec.EnvSpec.from_dict(config["spec"]) == env.spec


def test_config_is_strict_json_and_infinite_settings_come_back(tmp_path):
    """Hopper's healthy height has no upper end."""
    env = ctrl_rl.make("Hopper-v5", num_envs=1, threads=1)
    started(env, tmp_path / "r").close()
    text = (tmp_path / "r/config.json").read_text()
    json.loads(text, parse_constant=pytest.fail)
    saved = run_folder.read_config(tmp_path / "r")["task_config"]
    assert train.rebuild(type(env.config), saved) == env.config
    (tmp_path / "r/config.json").write_text(text.replace('"inf"', "Infinity"))  # of old versions
    assert run_folder.read_config(tmp_path / "r")["task_config"] == saved


def test_unknown_keys_are_refused(env):
    run = started(env)
    run.log(1, {"loss/policy": 1.0, "reward/anything": 2.0})
    for key in ("loss/value", "reward/a/b", "xloss/policy", "loss/policyx"):
        with pytest.raises(KeyError, match="was not declared"):
            run.log(1, {key: 1.0})
    run.log(1, {"eval/episode_return": 3.0})
    assert run.rows == [
        {"step": 1, "loss/policy": 1.0, "reward/anything": 2.0, "eval/episode_return": 3.0}
    ]


def test_a_fault_is_named_once_for_each_cause(tmp_path, capsys):
    class Broken(Probe):
        """Row 1 leaves the numbers at the first of every two steps, row 2 at the last."""

        steps = 0

        def reward_terms(self, action):
            self.steps += 1
            bad = (self.index == 1) & (self.steps % 2 == 1)
            return {"good": torch.zeros(3), "bad": torch.where(bad, torch.nan, 0.0)}

        def metrics(self):
            return {"speed": torch.where((self.index == 2) & (self.steps == 8), torch.inf, 1.0)}

    config = ppo.PPOConfig(
        total_steps=24, num_steps=4, num_minibatches=1, hidden=(8,), compile="off"
    )
    run = ppo.train(config, Broken(num_envs=3), Run(tmp_path / "r"))
    reward, speed = "reward: not finite in bad", "metrics: not finite in speed"
    assert run.faults == {reward: (3, 1), speed: (24, 2)}
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault")]
    assert len(said) == 2
    assert said[0].startswith(f"fault in environment 1 at env step 3: {reward};")
    assert said[1].startswith(f"fault in environment 2 at env step 24: {speed};")
    assert [row["rollout/faults"] for row in run.rows] == [2, 3]


@pytest.mark.parametrize("num_envs", [1, 4, 32, 300])
def test_intervals_count_env_steps_whatever_the_number_of_environments(env, num_envs):
    # 1000 asked, 10,000 steps: 10 times, each at the first step on or after a multiple of 1000.
    run = started(env, eval_every=1000, checkpoint_every=1000, config=Config(total_steps=10_000))
    seen = {"eval": [], "checkpoint": []}
    step = 0
    while step < 10_000:
        step += num_envs
        for kind, steps in seen.items():
            if run.due(kind, step):
                steps.append(step)
    wanted = [-(-k * 1000 // num_envs) * num_envs for k in range(1, 11)]
    assert seen == {"eval": wanted, "checkpoint": wanted}


def test_at_least_one_evaluation_and_checkpoint_at_the_end(env):
    run = started(env, eval_every=0, checkpoint_every=0)
    due = {s: (run.due("eval", s), run.due("checkpoint", s)) for s in (400, 800, 1200)}
    assert due == {400: (False, False), 800: (False, False), 1200: (True, True)}


def test_stopping_makes_a_checkpoint_due_but_no_evaluation(env):
    run = started(env, stop_after=500, eval_every=0, checkpoint_every=0)
    assert not run.stopping(400) and run.stopping(500)
    assert not run.due("eval", 500) and run.due("checkpoint", 500)


def events(folder) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's view: key -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    log.Reload()
    return {k: [(e.step, e.value) for e in log.Scalars(k)] for k in log.Tags()["scalars"]}


def test_logs_are_cut_back_to_the_checkpoint_on_resume(tmp_path, env):
    folder = tmp_path / "r"
    run = started(env, folder)
    for step in (10, 20, 30):
        run.log(step, {"loss/policy": step / 10})
        if step == 20:
            run.save(step, SECTION, STATE, STATE)
    run.log(40, {"eval/x": 4.0})
    run.close()
    with open(folder / "metrics.csv", "a") as file:
        file.write("50,1.2")  # a kill cut the line in two
    assert [row["step"] for row in read_metrics(folder)] == [10, 20, 30, 40]
    assert read_metrics(folder)[-1] == {"step": 40, "eval/x": 4.0}

    run = started(env, folder, resume=True)
    assert run.restore()["step"] == 20
    run.log(30, {"loss/policy": 7.0})
    run.close()
    assert read_metrics(folder) == [
        {"step": 10, "loss/policy": 1.0},
        {"step": 20, "loss/policy": 2.0},
        {"step": 30, "loss/policy": 7.0},
    ]
    assert events(folder) == {"loss/policy": [(10, 1.0), (20, 2.0), (30, 7.0)]}


def test_floats_survive_metrics_csv_to_the_bit(tmp_path, env):
    values = [0.1 + 0.2, 1e-300, -1.2345678901234567e22, float("inf")]
    run = started(env, tmp_path / "r")
    for step, value in enumerate(values, 1):
        run.log(step, {"loss/policy": value})
    run.close()
    assert [row["loss/policy"] for row in read_metrics(tmp_path / "r")] == values


def test_best_is_the_best_evaluation_and_is_remembered_over_a_resume(tmp_path, env):
    folder = tmp_path / "r"
    run = started(env, folder)
    section = lambda x: {"weights": {"w": torch.tensor([x])}}  # noqa: E731
    for step, score in ((10, 1.0), (20, 3.0), (30, 2.0)):
        run.log(step, {"eval/episode_return": score})
        run.save(step, section(score), STATE, STATE)
    run.close()
    best = folder / "checkpoints/best.pt"
    assert load_checkpoint(best)["step"] == 20 and "learner" not in load_checkpoint(best)
    run = started(env, folder, resume=True)
    run.restore()
    run.log(40, {"eval/episode_return": 2.5})
    run.save(40, section(2.5), STATE, STATE)
    run.close()
    assert load_checkpoint(best)["step"] == 20
    assert load_checkpoint(run_folder.find_checkpoint(folder, "30"))["step"] == 30
    with pytest.raises(ValueError, match="no checkpoint '31'; there are best, last, 10, 20, 30"):
        run_folder.find_checkpoint(folder, "31")


REPLAY = {"obs": torch.arange(1000.0)}


def replayed(folder, env, *steps: int) -> None:
    """A run that saved its replay at some steps."""
    run = started(env, folder)
    for step in steps:
        run.log(step, {"loss/policy": 1.0})
        run.save(step, SECTION, STATE, STATE, {"obs": REPLAY["obs"] + step})
    run.close()


def test_replay_is_saved_beside_the_checkpoint_that_names_it(tmp_path, env):
    checkpoints = tmp_path / "r/checkpoints"
    replayed(tmp_path / "r", env, 10, 20)
    assert [p.name for p in checkpoints.glob("replay-*")] == ["replay-20.pt"]
    assert "replay" not in load_checkpoint(checkpoints / "step-20.pt")
    run = started(env, tmp_path / "r", resume=True)
    saved = run.restore()
    same(saved["replay"], {"obs": REPLAY["obs"] + 20})
    run.close()
    with pytest.raises(ValueError, match="there are last, 10, 20$"):
        run_folder.find_checkpoint(tmp_path / "r", "30")


def test_a_kill_while_the_replay_is_saved_leaves_the_one_before(tmp_path, env, monkeypatch):
    checkpoints = tmp_path / "r/checkpoints"
    replayed(tmp_path / "r", env, 10)
    (checkpoints / "replay-15.pt.tmp").write_bytes(b"half")
    save = runs.save_checkpoint

    def killed(path, content):
        if path.name == "last.pt":
            raise KeyboardInterrupt
        save(path, content)

    run = started(env, tmp_path / "r", resume=True)
    run.restore()
    with monkeypatch.context() as patch:
        patch.setattr(runs, "save_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            run.save(20, SECTION, STATE, STATE, REPLAY)
    run.close()
    run = started(env, tmp_path / "r", resume=True)
    assert run.restore()["replay"]["obs"][0] == 10
    run.save(30, SECTION, STATE, STATE, REPLAY)
    run.close()
    assert [p.name for p in checkpoints.glob("replay-*")] == ["replay-30.pt"]


def test_a_run_killed_before_its_first_checkpoint_begins_anew(tmp_path, env):
    started(env, tmp_path / "r").close()
    for name in ("replay-10", "step-10", "best"):  # in the order in which they are written
        save_checkpoint(tmp_path / f"r/checkpoints/{name}.pt", REPLAY)
        run = started(env, tmp_path / "r", resume=True)
        assert run.restore() is None
        run.close()
    save_checkpoint(tmp_path / "r/checkpoints/step-20.pt", REPLAY)  # the first one was whole, then
    with pytest.raises(ValueError, match="last.pt is missing"):
        Run(tmp_path / "r", resume=True, console=False)


def test_a_missing_or_damaged_replay_is_one_line(tmp_path, env):
    path = tmp_path / "r/checkpoints/replay-10.pt"
    replayed(tmp_path / "r", env, 10)
    whole = path.read_bytes()
    for message, content in (
        ("replay-10.pt does not exist", None),
        ("replay-10.pt is damaged", whole[: len(whole) // 2]),
        ("replay-10.pt is damaged.*wrong checksum", flipped(whole)),
    ):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=message + ".*last.pt needs it.*--init-from") as error:
            Run(tmp_path / "r", resume=True, console=False)
        assert "\n" not in str(error.value)


def test_the_disk_must_have_room_for_two_replays(tmp_path, env, monkeypatch):
    free = 256 * 2**20 + 2 * 10**6
    disk = shutil._ntuple_diskusage(1, 1, free)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: disk)
    metrics = {"loss/policy": "a"}
    run = Run(tmp_path / "r", console=False)
    with pytest.raises(ValueError, match="only 258 MiB free.*needs 275 MiB"):
        run.start(metrics, Config(), env, "test", replay_bytes=10 * 10**6)
    run.close()
    assert not (tmp_path / "r").exists()
    run = Run(tmp_path / "r", console=False)
    run.start(metrics, Config(), env, "test", replay_bytes=10**6)
    run.close()


def test_weights_that_are_not_finite_are_not_saved(tmp_path, env):
    run = started(env, tmp_path / "r")
    run.save(10, SECTION, STATE, STATE)
    with pytest.raises(ValueError, match=r"layers\.0\.weight is not finite.*last good step"):
        run.save(20, {"weights": {"layers.0.weight": torch.tensor([float("nan")])}}, STATE, STATE)
    run.close()
    assert load_checkpoint(tmp_path / "r/checkpoints/last.pt")["step"] == 10


def test_a_run_without_a_folder_writes_nothing(tmp_path, env):
    run = ppo.train(ppo.PPOConfig(total_steps=64, num_steps=16, hidden=(8,)), env)
    assert [row["step"] for row in run.rows] == [32, 64]
    assert list(tmp_path.iterdir()) == []


# Exact resume -------------------------------------------------------------------------------


def trained(folder, *words) -> tuple[dict, list]:
    """last.pt and the metrics without time/* after `ctrl-rl train`."""
    train.main([*words, "--run-dir", str(folder)] if words[0] != "--resume" else list(words))
    rows = [
        {k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(folder)
    ]
    return load_checkpoint(folder / "checkpoints/last.pt"), rows


def without_config(checkpoint: dict) -> dict:
    return {k: v for k, v in checkpoint.items() if k != "config"}


def test_training_leaves_torch_s_global_generator_alone(tmp_path):
    before = torch.get_rng_state()
    trained(tmp_path / "r", *TRAIN, "--total-steps", "128")
    assert torch.equal(torch.get_rng_state(), before)


def test_stopped_and_resumed_equals_uninterrupted_to_the_bit(tmp_path):
    whole, rows = trained(tmp_path / "whole", *TRAIN, "--total-steps", "512")
    _, half = trained(tmp_path / "parts", *TRAIN, "--total-steps", "512", "--stop-after", "200")
    assert [row["step"] for row in half] == [64, 128, 192, 256]
    resumed, again = trained(tmp_path / "parts", "--resume", str(tmp_path / "parts"))
    same(without_config(resumed), without_config(whole))
    assert again == rows and rows[-1]["step"] == 512
    assert sum("eval/episode_return" in row for row in rows) == 4
    for name in ("best.pt", "step-512.pt", "step-256.pt"):
        same(*(load_checkpoint(tmp_path / d / "checkpoints" / name) for d in ("whole", "parts")))


def test_first_ctrl_c_finishes_the_iteration_and_the_second_aborts(tmp_path, monkeypatch):
    whole, rows = trained(tmp_path / "whole", *TRAIN, "--total-steps", "384")
    log, presses = Run.log, []

    def press(self, step, metrics):
        log(self, step, metrics)
        if step == 128 and len(presses) < 1:
            presses.append(step)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "log", press)
    handler = signal.getsignal(signal.SIGINT)
    _, half = trained(tmp_path / "parts", *TRAIN, "--total-steps", "384")
    assert half[-1]["step"] == 128 and signal.getsignal(signal.SIGINT) is handler
    resumed, again = trained(tmp_path / "parts", "--resume", str(tmp_path / "parts"))
    same(without_config(resumed), without_config(whole))
    assert again == rows

    def twice(self, step, metrics):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "log", twice)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "abort", *TRAIN, "--total-steps", "384")
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_kill_before_the_first_checkpoint_begins_anew_and_says_so(tmp_path, monkeypatch, capsys):
    whole, rows = trained(tmp_path / "whole", *TRAIN, "--total-steps", "128")
    save = Run.save
    monkeypatch.setattr(Run, "save", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        trained(tmp_path / "parts", *TRAIN, "--total-steps", "128")
    monkeypatch.setattr(Run, "save", save)
    resumed, again = trained(tmp_path / "parts", "--resume", str(tmp_path / "parts"))
    same(without_config(resumed), without_config(whole))
    assert again == rows
    begins = "the run was stopped before its first checkpoint: it begins anew at step 0\n"
    assert capsys.readouterr().out.count(begins) == 1
    longer = ("--resume", str(tmp_path / "parts"), "--total-steps", "192")
    trained(tmp_path / "parts", *longer)
    text = capsys.readouterr().out
    assert "finished: 192" in text and "anew" not in text


def test_a_kill_after_the_last_checkpoint_loses_no_evaluation(tmp_path, monkeypatch):
    words = (*TRAIN, "--total-steps", "128")
    trained(tmp_path / "whole", *words)
    with monkeypatch.context() as patch:
        patch.setattr(
            "ctrl_rl.report.add_evaluation", lambda *_: (_ for _ in ()).throw(MemoryError)
        )
        with pytest.raises(MemoryError):
            trained(tmp_path / "parts", *words)
    assert not (tmp_path / "parts/evaluation.json").exists()
    result = train.main(["--resume", str(tmp_path / "parts")])
    found = [(tmp_path / d / "evaluation.json").read_text() for d in ("whole", "parts")]
    assert found[0] == found[1]
    assert result["metrics"] == json.loads(found[0])["randomised"]["metrics"]
    evaluated = []
    monkeypatch.setattr(train.Judge, "__call__", lambda self, policy: evaluated.append(policy))
    train.main(["--resume", str(tmp_path / "parts")])
    assert not evaluated  # it stands


def test_resume_keeps_its_settings_but_may_be_longer(tmp_path):
    folder = tmp_path / "r"
    trained(folder, *TRAIN, "--total-steps", "128", "--algo.gamma", "0.9")
    for words, message in (
        (("--seed", "4"), r"another seed \(0, now 4\)"),
        (("--algo.gamma", "0.5"), r"another gamma \(0.9, now 0.5\)"),
        (("--task.max-episode-steps", "7"), "another"),
        (("--num-envs", "8"), "another"),
        (("--total-steps", "64"), "may be raised, not lowered"),
    ):
        with pytest.raises(ValueError, match=message):
            train.main(["--resume", str(folder), *words])
    last, rows = trained(folder, "--resume", str(folder), "--total-steps", "256")
    assert last["step"] == 256 and rows[-1]["step"] == 256
    config = run_folder.read_config(folder)
    assert config["algo_config"]["total_steps"] == config["run"]["total_steps"] == 256
    with pytest.raises(ValueError, match="is a run of Pendulum-v0, not of CartPole-SwingUp-v0"):
        train.main(["CartPole-SwingUp-v0", "--resume", str(folder)])


def test_init_from_takes_weights_and_statistics_and_nothing_else(tmp_path):
    source, _ = trained(tmp_path / "a", *TRAIN, "--total-steps", "128")
    started_from = []

    class Stop(Exception):
        pass

    def look(self, rollout):
        started_from.append(plain(self.state_dict()))
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo.PPO, "update", look)
        with pytest.raises(Stop):
            words = ["--init-from", str(tmp_path / "a"), "--run-dir", str(tmp_path / "b")]
            train.main([*TRAIN, *words, "--seed", "5"])
    (state,) = started_from
    same(state["networks"], source["learner"]["networks"])
    same(state["normalizers"], source["learner"]["normalizers"])
    assert state["normalizers"]["actor"]["count"] > 0
    assert not torch.equal(state["generator"], source["learner"]["generator"])

    source = ["--init-from", str(tmp_path / "a"), "--run-dir"]
    with pytest.raises(ValueError, match=r"trained on Pendulum-v0, which observes angle \(2\)"):
        train.main(["CartPole-SwingUp-v0", *source, str(tmp_path / "c")])
    assert not (tmp_path / "c").exists()
    with pytest.raises(ValueError, match="other networks"):
        train.main(["Pendulum-v0", "--algo.hidden", "9", *source, str(tmp_path / "d")])
    assert not (tmp_path / "d").exists()


def test_a_warm_start_killed_before_its_first_checkpoint_is_warm_again(tmp_path, monkeypatch):
    trained(tmp_path / "a", *TRAIN, "--total-steps", "128")
    words = [*TRAIN, "--total-steps", "128", "--init-from", str(tmp_path / "a")]
    whole, _ = trained(tmp_path / "whole", *words)
    save = Run.save
    monkeypatch.setattr(Run, "save", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        trained(tmp_path / "parts", *words)
    monkeypatch.setattr(Run, "save", save)
    resumed, _ = trained(tmp_path / "parts", "--resume", str(tmp_path / "parts"))
    same(without_config(resumed), without_config(whole))


def test_a_checkpoint_of_another_run_is_refused_and_the_log_stays(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    trained(mine, *TRAIN, "--total-steps", "192")
    log = (mine / "metrics.csv").read_bytes()
    for words, message in (
        ((*TRAIN, "--seed", "3"), r"holds a checkpoint of a run with another seed \(3, now 0\)"),
        (("CartPole-SwingUp-v0", *TRAIN[1:]), "holds a checkpoint of a run with another task"),
    ):
        trained(other, *words, "--total-steps", "64")
        shutil.copy(other / "checkpoints" / "last.pt", mine / "checkpoints" / "last.pt")
        shutil.rmtree(other)
        with pytest.raises(ValueError, match=message):
            train.main(["--resume", str(mine)])
        assert (mine / "metrics.csv").read_bytes() == log
    (mine / "checkpoints" / "last.pt").unlink()  # not what a kill leaves: that is one step-N.pt
    with pytest.raises(ValueError, match="last.pt is missing"):
        train.main(["--resume", str(mine)])
    assert (mine / "metrics.csv").read_bytes() == log


# Damaged folders ----------------------------------------------------------------------------


def contents(folder) -> dict:
    """Every file of a run folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "r"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)
        train.main([*TRAIN, "--total-steps", "64", "--run-dir", str(folder)])
    return folder


def edited(change):
    """Damage of config.json by a function that changes what it holds."""

    def damage(folder):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return damage


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def changed(key, *value):
    """Damage of last.pt: another value of a key, or none."""

    def damage(folder):
        path = folder / "checkpoints/last.pt"
        content = load_checkpoint(path)
        del content[key]
        save_checkpoint(path, content | dict(zip((key,), value, strict=False)))

    return damage


CONFIG, LAST, LOG = "config.json", "last.pt", "metrics.csv"


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (written(CONFIG, b'{"format": 1}'), CONFIG, "it holds no task"),
        (written(CONFIG, b"[1]"), CONFIG, "not the configuration of a run"),
        (written(CONFIG, b'{"format": 1, "task": "\xff"}'), CONFIG, "not the configuration"),
        (edited(lambda c: c.pop("task_config")), CONFIG, "it holds no task_config"),
        (edited(lambda c: c["run"].pop("seed")), CONFIG, "its run holds no seed"),
        (edited(lambda c: c.update(run=[])), CONFIG, r"it holds no run \(dict\)"),
        (edited(lambda c: c["algo_config"].update(gamma="x")), CONFIG, "gamma.* float.*'x'"),
        (edited(lambda c: c["algo_config"].update(hidden=["a"])), CONFIG, "hidden.* int.*'a'"),
        (edited(lambda c: c["algo_config"].update(hidden=7)), CONFIG, "hidden.* tuple.*7"),
        (edited(lambda c: c["algo_config"].update(gamma=[1])), CONFIG, r"gamma.* float.*\[1\]"),
        (edited(lambda c: c["run"].update(num_envs=True)), CONFIG, "num_envs.* int.*True"),
        (edited(lambda c: c["algo_config"].update(zeta=1)), CONFIG, "has no zeta"),
        *(
            (changed(key), LAST, f"it holds no {key}")
            for key in ("step", "policy", "learner", "env", "best", "config")
        ),
        (changed("learner", {}), LAST, "its learner is empty"),
        (changed("env", {}), LAST, "its env is empty"),
        (changed("policy", [1]), LAST, r"it holds no policy \(dict\)"),
        (changed("config", "{}"), LAST, "not the configuration of a run"),
        (changed("config", '{"format": 1}'), LAST, "it holds no task"),
        (written(LOG, b"step,eval/x\n64,oops\n"), LOG, "line 2.*'oops'"),
        (written(LOG, b"a,b\n64,1\n"), LOG, "line 2.*step"),
        (written(LOG, b"step,eval/x\nnan,1\n"), LOG, "line 2"),
        (written(LOG, b"step,eval/\xff\n1,1\n"), LOG, "is damaged"),
    ],
)
def test_a_damaged_folder_is_one_line_and_stays_as_it_is(
    whole_run, tmp_path, capsys, damage, file, message
):
    folder = tmp_path / "r"
    shutil.copytree(whole_run, folder)
    damage(folder)
    before = contents(folder)
    assert cli.main(["train", "--resume", str(folder), "--total-steps", "128"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(message, line) and file in line and str(folder) in line
    assert contents(folder) == before


@pytest.mark.parametrize("command", ["plot", "eval", "export"])
def test_other_commands_name_a_damaged_config_too(whole_run, tmp_path, capsys, command):
    folder = tmp_path / "r"
    shutil.copytree(whole_run, folder)
    (folder / CONFIG).write_text('{"format": 1}')
    assert cli.main([command, *[str(folder)] * (2 if command == "plot" else 1)]) == 2
    assert f"{folder / CONFIG} is damaged: it holds no task" in capsys.readouterr().err


def test_eval_names_the_config_that_holds_a_wrong_value(whole_run, tmp_path, capsys):
    folder = tmp_path / "r"
    shutil.copytree(whole_run, folder)
    edited(lambda c: c["task_config"].update(max_episode_steps="x"))(folder)
    assert cli.main(["eval", str(folder), "--episodes", "1"]) == 2
    line = capsys.readouterr().err
    assert str(folder / CONFIG) in line and "max_episode_steps" in line and "'x'" in line


def test_a_replay_file_without_a_replay_is_one_line(tmp_path, env):
    replayed(tmp_path / "r", env, 10)
    save_checkpoint(tmp_path / "r/checkpoints/replay-10.pt", {"step": 10})
    with pytest.raises(ValueError, match="replay-10.pt is damaged: it holds no replay.*--init"):
        Run(tmp_path / "r", resume=True, console=False)
    save_checkpoint(tmp_path / "r/checkpoints/replay-10.pt", {"step": 7, "replay": REPLAY})
    with pytest.raises(ValueError, match="replay-10.pt is of step 7, last.pt of 10; .*--init"):
        Run(tmp_path / "r", resume=True, console=False)


def test_init_from_a_checkpoint_without_a_learner_is_one_line(tmp_path, env):
    run = started(env, tmp_path / "r")
    run.save(10, SECTION, STATE, STATE)
    run.close()
    changed("learner")(tmp_path / "r")
    with pytest.raises(ValueError, match="last.pt is damaged: it holds no learner"):
        Run(init_from=tmp_path / "r", console=False).initial(env.spec)


def test_provenance_names_commit_and_versions():
    found = provenance()
    assert found["versions"]["ctrl-rl"] == ctrl_rl.__version__
    assert found["commit"] is None or len(found["commit"].rstrip("+")) == 40
