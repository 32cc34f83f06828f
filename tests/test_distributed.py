"""Two processes train as one does: the same minibatches, weights, statistics and figures."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from toys import Toy

import ctrl_rl
from ctrl_rl import cli, distributed, ppo, sac, td3
from ctrl_rl.buffers import Batch
from ctrl_rl.checkpoints import load_checkpoint
from ctrl_rl.env import Fault
from ctrl_rl.normalize import Normalizer
from ctrl_rl.rollout import Rollout
from ctrl_rl.runs import Run
from ctrl_rl.spec import Mirror

TRAIN = (
    "train Pendulum-v0 --num-envs 6 --total-steps 480 --algo.num-steps 16 --algo.hidden 8"
    " --algo.num-minibatches 4 --eval-episodes 2 --task.max-episode-steps 20 --video-s 0"
    " --eval-every 288 --checkpoint-every 192 --algo.compile off"
).split()
CLI = """
import sys
from ctrl_rl import cli, curves, report
curves.draw_run = report.write_report = lambda folder: None  # they take longer than these runs
sys.exit(cli.main(sys.argv[1:]))
"""
WORLD = 2


class Group:
    """Processes that find each other as torchrun's do; the store outlives each of them."""

    def __init__(self, code: str, *words: str, patience: float = 120.0) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.patience = patience
        shared = {
            "WORLD_SIZE": WORLD,
            "LOCAL_WORLD_SIZE": WORLD,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, *words],
                env=os.environ
                | {k: str(v) for k, v in {**shared, "RANK": r, "LOCAL_RANK": r}.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for r in range(WORLD)
        ]

    def wait(self) -> tuple[list[int], list[str], list[str]]:
        """Exit statuses, stdout and stderr by rank; none may hang."""
        try:
            outputs = [p.communicate(timeout=self.patience) for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        out, err = (list(texts) for texts in zip(*outputs, strict=True))
        return [p.returncode for p in self.processes], out, err

    def succeed(self) -> list[str]:
        """stdout by rank."""
        statuses, out, err = self.wait()
        assert statuses == [0] * WORLD, "\n".join(err)
        return out


@pytest.fixture
def here(monkeypatch):
    """`ctrl-rl` in this process."""
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)
    monkeypatch.setattr("ctrl_rl.report.write_report", lambda folder: None)
    return lambda *words: cli.main(list(words))


def rows(folder) -> list[dict[str, str]]:
    with open(Path(folder) / "metrics.csv") as file:
        return [
            {k: v for k, v in row.items() if not k.startswith("time/")}
            for row in csv.DictReader(file)
        ]


def gap(a, b) -> float:
    """Largest difference of two nested states, relative where numbers exceed 1."""
    if isinstance(a, torch.Tensor):
        a, b = a.double(), b.double()
        return float(((a - b).abs() / b.abs().clamp(min=1)).max()) if a.numel() else 0.0
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return max((gap(a[k], b[k]) for k in a), default=0.0)
    if isinstance(a, (list, tuple)):
        return max((gap(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) / max(abs(b), 1)
    assert a == b
    return 0.0


# One update, given the same batch -----------------------------------------------------------

STEPS, ENVS = 8, 6
SPEC = Toy(num_envs=ENVS).spec


def batch(seed: int, first: int, each: int, learner: ppo.PPO) -> Rollout:
    """Rows first .. first + each of a roll-out of 6 environments, with ends of both kinds."""
    g = torch.Generator().manual_seed(seed)
    obs = {k: 3 + 2 * torch.randn(STEPS, ENVS, SPEC.obs_size(k), generator=g) for k in SPEC.obs}
    after = {k: 3 + 2 * torch.randn(STEPS, ENVS, SPEC.obs_size(k), generator=g) for k in SPEC.obs}
    after = {k: v.index_fill(1, torch.tensor([5]), 40.0) for k, v in after.items()}
    noise = torch.randn(STEPS, ENVS, SPEC.action_size, generator=g)
    reward = torch.randn(STEPS, ENVS, generator=g)
    ends = torch.rand(STEPS, ENVS, generator=g)
    cut = slice(first, first + each)
    terminated, truncated = (ends < 0.15)[:, cut], (ends > 0.85)[:, cut]
    ended = terminated | truncated
    head, action = learner.act({k: v[:, cut] for k, v in obs.items()}, noise[:, cut])
    return Rollout(
        {k: v[:, cut] for k, v in obs.items()},
        head,
        action,
        reward[:, cut],
        terminated,
        truncated,
        {k: v[0, cut] for k, v in after.items()},
        {k: v[:, cut][ended] for k, v in after.items()},
        truncated[ended],
        faults=(),
        reward_terms={},
    )


def learn(compiled: str, num_minibatches: int, mirror: bool = False) -> dict:
    """State after three iterations on given batches, and the figures of each."""
    config = ppo.PPOConfig(
        num_steps=STEPS, num_minibatches=num_minibatches, hidden=(8,), num_epochs=3,
        target_kl=0.003, compile=compiled, mirror=mirror,
    )  # fmt: skip
    each, first = distributed.share(ENVS)
    turned = dict.fromkeys(("pos", "vel", "prev_action"), ("-0",))
    image = Mirror(terms=turned, action=("-force",))
    learner = ppo.PPO(config, replace(Toy(num_envs=each).spec, mirror=image), "cpu")
    noise = learner.draw_noise()
    figures = [learner.update(batch(seed, first, each, learner)) for seed in range(3)]
    return {
        "learner": learner.state_dict(),
        "figures": figures,
        "noise": distributed.concatenated(noise, dim=1),
        "compiled": learner.step._graphs is not None,
    }


def learn_off_policy(name: str) -> dict:
    """Likewise of SAC or TD3, after four updates on given minibatches of 12 samples."""
    module, size = {"sac": sac, "td3": td3}[name], 12
    make, config = (module.SAC, sac.SACConfig) if name == "sac" else (module.TD3, td3.TD3Config)
    each, _ = distributed.share(ENVS)
    learner = make(
        config(batch_size=size, hidden=(8,), learning_rate=1e-2, polyak=0.1, compile="off"),
        Toy(num_envs=each).spec,
        "cpu",
    )
    stats = []
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape, g=g: distributed.own(torch.randn(size, *shape, generator=g), 0)  # noqa: E731
        obs, next_obs = ({k: draw(SPEC.obs_size(k)) for k in SPEC.obs} for _ in range(2))
        stats.append(
            learner.update(
                Batch(obs, draw(1).clamp(-3, 3), draw(), next_obs, (draw() > 0.3).float())
            )
        )
    state = learner.state_dict()
    generators = state.pop("generator").view(-1, len(learner.generator.get_state()))
    assert all(torch.equal(generators[0], other) for other in generators)  # no faults, no re-draws
    return {"learner": state, "figures": learner.figures(stats)}


def in_group(folder: str, options: tuple) -> None:
    """What each process of a `Group` does."""
    torch.set_num_threads(1)
    with distributed.joined(timedelta(minutes=5)):
        found = learn_off_policy(*options) if len(options) == 1 else learn(*options)
        torch.save(found, f"{folder}/{distributed.rank()}.pt")


def learn_in_group(tmp_path, *options, before: str = "pass") -> list[dict]:
    code = f"import test_distributed as t; {before}; t.in_group({str(tmp_path)!r}, {options!r})"
    Group(code, patience=300).succeed()
    return [torch.load(tmp_path / f"{r}.pt") for r in range(WORLD)]


def test_two_processes_learn_what_one_learns(tmp_path):
    # 24 minibatches of 2 samples: some lie on one of the ranks altogether.
    for options in (("off", 4), ("off", 24), ("off", 24, True)):
        whole = learn(*options)
        parts = learn_in_group(tmp_path, *options)
        assert gap(parts[0], parts[1]) == 0  # to the bit
        assert gap(parts[0], whole) < 1e-5
        rates = [f["loss/learning_rate"] for f in whole["figures"]]
        assert len(set(rates)) > 1, rates  # the adapted step size had something to follow


def test_without_the_exchange_they_would_not(tmp_path):
    alone = "t.distributed.dist.all_reduce = lambda x, op=None: x.mul_(2)"
    parts = learn_in_group(tmp_path, "off", 4, before=alone)
    whole = learn("off", 4)
    for part in parts:
        assert gap(part["learner"]["networks"], whole["learner"]["networks"]) > 1e-3
        assert gap(part["learner"]["normalizers"], whole["learner"]["normalizers"]) > 1e-3


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_two_processes_learn_off_policy_what_one_learns(tmp_path, name):
    whole = learn_off_policy(name)
    parts = learn_in_group(tmp_path, name)
    assert gap(parts[0], parts[1]) == 0
    assert gap(parts[0], whole) < 1e-5
    alone = learn_in_group(
        tmp_path, name, before="t.distributed.dist.all_reduce = lambda x, op=None: x.mul_(2)"
    )
    assert gap(alone[0]["learner"], whole["learner"]) > 1e-3


@pytest.mark.slow
def test_two_processes_learn_what_one_learns_compiled(tmp_path):
    whole = learn("on", 4)
    parts = learn_in_group(tmp_path, "on", 4)
    assert all(part["compiled"] for part in (whole, *parts))
    assert gap(parts[0], parts[1]) == 0
    assert gap(parts[0], whole) < 1e-5


# The share of each --------------------------------------------------------------------------


@pytest.fixture
def as_rank(monkeypatch):
    """Pretend to be one of several processes that never talk."""

    def pretend(rank: int, world_size: int):
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: world_size)

    return pretend


@pytest.mark.parametrize(
    "name", ["recurrent_ppo", "multi_critic_ppo", "fast_sac", "ddpg", "aro_ddpg"]
)
def test_a_learner_that_cannot_share_refuses_torchrun(as_rank, name):
    from ctrl_rl import registry

    learner = registry.load("algos", name)
    as_rank(0, 2)
    with pytest.raises(ValueError, match=f"{name} trains in one process"):
        learner.train(None, None)


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_hindsight_refuses_torchrun(as_rank, name):
    from ctrl_rl import registry

    learner, env = registry.load("algos", name), ctrl_rl.make("Reach-v0", 1)
    config = {"sac": sac.SACConfig, "td3": td3.TD3Config}[name](hindsight=4)
    as_rank(0, 2)
    with pytest.raises(ValueError, match=f"{name} with hindsight trains in one process"):
        learner.train(config, env)


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_a_minibatch_is_the_union_of_the_ranks(as_rank, world_size):
    order = torch.randperm(STEPS * ENVS)
    each = ENVS // world_size
    union = [set() for _ in range(4)]
    for rank in range(world_size):
        as_rank(rank, world_size)
        mine, sizes = distributed.own_samples(order, 12, ENVS)
        assert sum(sizes) == len(mine) == STEPS * each
        for k, part in enumerate(mine.split(sizes)):
            found = {int(s) // each * ENVS + int(s) % each + rank * each for s in part}
            assert len(found) == len(part) and not found & union[k]
            union[k] |= found
    assert union == [set(map(int, part)) for part in order.split(12)]


def test_environments_are_shared_equally_or_refused(as_rank):
    as_rank(2, 3)
    assert distributed.share(6) == (2, 4)
    assert distributed.own(torch.arange(6), 0).tolist() == [4, 5]
    for bad in (7, 1):
        with pytest.raises(ValueError, match=f"{bad} environments.*use a multiple of 3"):
            distributed.share(bad)


def test_each_process_has_its_gpu_and_its_cores(as_rank, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert distributed.local_device("cuda") == "cuda" and distributed.local_threads(0) == 0
    as_rank(1, 2)
    assert distributed.local_device("cuda:0") == "cuda:1" and chosen == [1]
    assert distributed.local_device("cpu") == "cpu"
    assert distributed.local_threads(0) == 4 and distributed.local_threads(3) == 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="process 1 of this machine has no GPU of its own"):
        distributed.local_device("cuda")


def test_alone_nothing_changes():
    x = torch.randn(3, 2)
    for same in (distributed.total(x), distributed.own(x, 1), distributed.concatenated(x, 0)):
        assert same is x
    assert distributed.weighted_mean(x, 5) is x
    assert distributed.gathered(3) == [3] and distributed.any_rank(True)
    with distributed.joined():
        assert distributed.world_size() == 1


def exchange() -> None:
    """In a group: faults, statistics of unequal parts, a stop that only one rank was asked for."""
    from ctrl_rl.rollout import faults_of_all_ranks

    with distributed.joined(timedelta(seconds=60)):
        rank = distributed.rank()
        assert faults_of_all_ranks([], 3) == ()
        faults = [(4, Fault(1, "here")), (2, Fault(0, "there"))] if rank else [(3, Fault(2, "x"))]
        assert [(t, f.row) for t, f in faults_of_all_ranks(faults, 3)] == [(2, 3), (3, 2), (4, 4)]

        normalizer = Normalizer(1)
        x = torch.arange(10.0)[:, None] + 1e6
        normalizer.update(x[:0] if rank == 0 else x[:7])  # rank 0 has nothing
        normalizer.update(x[7:9] if rank == 0 else x[9:])
        normalizer.update(x[:0])
        assert normalizer.count == 10 and normalizer.mean == 1e6 + 4.5
        assert abs(normalizer.var.item() - 8.25) < 1e-6

        assert distributed.gathered_on_first(rank) == ([] if rank else [0, 1])
        assert distributed.largest(torch.tensor([3.0 * rank, 2.0 - rank])).tolist() == [3.0, 2.0]
        assert distributed.any_rank(rank == 1) and not distributed.any_rank(False)
        run = Run()
        run.total_steps = 100
        run._interrupted = rank == 1
        assert not run.stopping(5)
        assert run.due("checkpoint", 5) and run.stopping(5)


def threads() -> set[str]:
    """Names of this process's threads."""
    return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}


def leave_the_group():
    with distributed.joined(timedelta(seconds=60)):
        import torch._dynamo  # noqa: F401  as a learner does

        assert distributed.any_rank(True)
        assert any("gloo" in name for name in threads())
    assert not any("gloo" in name for name in threads())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_the_group_outlives_it():
    """One that is left at the process's exit aborts it now and then."""
    Group("import test_distributed as t; t.leave_the_group()").succeed()


def test_what_ranks_exchange():
    Group("import test_distributed as t; t.exchange()").succeed()


# The command --------------------------------------------------------------------------------


def test_the_command_gives_the_run_of_one_process_and_goes_on_exactly(here, capsys):
    assert here(*TRAIN, "--run-dir", "one") == 0
    out = Group(CLI, *TRAIN, "--run-dir", "two").succeed()
    assert "6 environments in 2 processes" in out[0] and "finished" in out[0]
    assert out[1] == ""
    for a, b in zip(rows("two"), rows("one"), strict=True):
        assert gap({k: float(v or 0) for k, v in a.items()},
                   {k: float(v or 0) for k, v in b.items()}) < 1e-4  # fmt: skip
    two = load_checkpoint(Path("two/checkpoints/last.pt"))
    one = load_checkpoint(Path("one/checkpoints/last.pt"))
    assert two["policy"]["spec"] == one["policy"]["spec"]
    names = [sorted(p.name for p in Path(f, "checkpoints").iterdir()) for f in ("one", "two")]
    assert names[0] == names[1]  # intervals count the steps of all processes
    assert json.loads(two["config"])["processes"] == 2
    assert gap(two["learner"], one["learner"]) < 1e-4
    assert [e["first_index"] for e in two["env"]["processes"]] == [0, 3]

    Group(CLI, *TRAIN, "--run-dir", "halves", "--stop-after", "192").succeed()
    assert rows("halves")[-1]["step"] == "192"
    assert here("train", "--resume", "halves") == 2
    told = capsys.readouterr().err
    assert "halves was trained by 2 processes, not 1; go on with torchrun --nproc" in told
    Group(CLI, "train", "--resume", "halves").succeed()
    assert rows("halves") == rows("two")
    resumed = load_checkpoint(Path("halves/checkpoints/last.pt"))
    for part in ("policy", "learner", "env"):
        assert gap(resumed[part], two[part]) == 0


def test_each_process_keeps_a_replay_of_its_own(here):
    words = (
        "train Pendulum-v0 --algo sac --num-envs 4 --total-steps 3000 --algo.warmup-steps 500"
        " --algo.updates-per-step 0.1 --algo.batch-size 32 --algo.hidden 8 --eval-episodes 2"
        " --video-s 0 --eval-every 0 --checkpoint-every 1000 --algo.compile off"
    ).split()
    Group(CLI, *words, "--run-dir", "two").succeed()
    assert rows("two")[-1]["replay/size"] == "3000.0"
    Group(CLI, *words, "--run-dir", "halves", "--stop-after", "2000").succeed()
    found = sorted(p.name for p in Path("halves/checkpoints").glob("replay*"))
    assert found == ["replay-2000-rank1.pt", "replay-2000.pt"]
    replays = [load_checkpoint(Path("halves/checkpoints", name))["replay"] for name in found]
    assert not torch.equal(*(replay["grids"]["obs"] for replay in replays))
    Group(CLI, "train", "--resume", "halves").succeed()
    assert rows("halves") == rows("two")
    a, b = (load_checkpoint(Path(f, "checkpoints/last.pt")) for f in ("halves", "two"))
    for part in ("policy", "learner", "env"):
        assert gap(a[part], b[part]) == 0


def lines(err: list[str]) -> list[str]:
    """What was said on stderr, without torch's own warnings."""
    return [x for text in err for x in text.splitlines() if x.startswith("ctrl-rl")]


FAILURES = {
    "a wrong number": ("", ["--num-envs", "7"], "7 environments cannot be shared equally by 2"),
    "divergence on all ranks": ("", ["--algo.learning-rate", "1e30", "--algo.target-kl", "None"],
                                "training diverged before step"),
    "an error on rank 1": ("""
from ctrl_rl import distributed
import robots.env as env
step, count = env.TaskEnv.step, [0]
def failing(self, action):
    count[0] += 1
    if distributed.rank() == 1 and count[0] > 40: raise ValueError("the simulator broke")
    return step(self, action)
env.TaskEnv.step = failing
""", [], "the simulator broke"),
    "a kill of rank 1": ("""
from ctrl_rl import distributed, ppo
import os, signal
update, count = ppo.PPO.update, [0]
def dying(self, rollout):
    count[0] += 1
    if distributed.rank() == 1 and count[0] > 3: os.kill(os.getpid(), signal.SIGKILL)
    return update(self, rollout)
ppo.PPO.update = dying
""", [], "another process of the group has ended"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_ends_all_processes_with_one_line(what):
    before, words, said = FAILURES[what]
    began = time.monotonic()
    statuses, _, err = Group(before + CLI, *TRAIN, *words, "--run-dir", "run").wait()
    assert time.monotonic() - began < 60
    assert 0 not in statuses
    found = lines(err)
    assert len(found) == 1 and said in found[0], "\n".join(err)


def test_torchrun_stops_on_ctrl_c_with_a_checkpoint(tmp_path):
    words = ["--total-steps", "10000000", "--run-dir", "run", "--eval-every", "0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "ctrl_rl.cli", *TRAIN, *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Ctrl-C is ignored where the tests run in the background of a shell.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 90
        while not (Path("run/metrics.csv").is_file() and len(rows("run")) > 3):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        out, _ = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert "stopped at" in out and "--resume run" in out
    step = load_checkpoint(Path("run/checkpoints/last.pt"))["step"]
    assert step == int(rows("run")[-1]["step"])
