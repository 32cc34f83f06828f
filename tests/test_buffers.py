"""Replay: never across an end, never across the seam, nothing lost by a save."""

import dataclasses
import math

import pytest
import torch
from probes import Probe
from test_runs import same
from torch import Tensor

from ctrl_rl.buffers import Batch, ReplayBuffer, updates_due
from ctrl_rl.checkpoints import load_checkpoint, save_checkpoint
from ctrl_rl.env import Fault, Info, Step
from ctrl_rl.spec import ObsTerm

GAMMA = 0.5


class Counter(Probe):
    """Counts its steps 0, 1, 2, 3, and twice as much for the critic; cut after 3."""

    id = "Probe-Counter-v0"

    def make_spec(self):
        spec = super().make_spec()
        twice = ObsTerm(name="twice", kind="signal", size=1)
        return dataclasses.replace(spec, obs={**spec.obs, "critic": (twice,)}, max_episode_steps=3)

    def observe_terms(self, rows):
        return {**super().observe_terms(rows), "twice": 2.0 * self.step_count[rows, None]}

    def reward_terms(self, action):
        return {"one": torch.ones(self.num_envs, dtype=self.sim.dtype)}


class Stream:
    """Steps of N environments in which every observation is a number of its own.

    `log` keeps them in plain lists, for `expected`.
    """

    def __init__(self, num_envs: int, seed: int = 0, end=0.15, fault=0.0) -> None:
        self.num_envs, self.end, self.fault = num_envs, end, fault
        self.generator = torch.Generator().manual_seed(seed)
        self.next_number = 0.0
        self.obs = self.fresh()
        self.log: list[dict[str, list]] = []

    def fresh(self) -> dict[str, Tensor]:
        x = torch.arange(self.num_envs)[:, None] + self.next_number
        self.next_number += self.num_envs
        return {"actor": x, "unused": x, "critic": torch.cat([x, -x], 1)}

    def step(self) -> tuple[dict, Tensor, Step]:
        rand = lambda: torch.rand(self.num_envs, generator=self.generator)  # noqa: E731
        terminated = rand() < self.end
        fault = (rand() < self.fault) & ~terminated
        truncated = (rand() < self.end) & ~terminated | fault
        obs, action, reward = self.obs, rand()[:, None], rand()
        action[fault] = torch.nan
        next_obs = self.fresh()
        after = next_obs
        if (ended := terminated | truncated).any():
            new = self.fresh()
            after = {g: torch.where(ended[:, None], new[g], x) for g, x in next_obs.items()}
        faults = tuple(Fault(int(row), "test") for row in fault.nonzero()[:, 0])
        step = Step(after, reward, terminated, truncated, next_obs, Info(faults=faults))
        names = ("obs", "action", "reward", "terminated", "ended", "next_obs", "faulty")
        actors = obs["actor"][:, 0], next_obs["actor"][:, 0]
        values = (actors[0], action[:, 0], reward, terminated, ended, actors[1], fault)
        self.log.append({n: v.tolist() for n, v in zip(names, values, strict=True)})
        self.obs = after
        return obs, action, step

    def fill(self, buffer: ReplayBuffer, steps: int) -> None:
        for _ in range(steps):
            buffer.add(*self.step())


def small_buffer(capacity=20, num_envs=2) -> ReplayBuffer:
    return ReplayBuffer(capacity, num_envs, {"actor": 1, "critic": 2}, 1)


def expected(log: list[dict[str, list]], t: int, row: int, n: int) -> tuple[float, ...]:
    """reward, next_obs, discount, by a walk through the plain lists."""
    total, weight = 0.0, 1.0
    while True:
        now = log[t]
        total += weight * now["reward"][row]
        weight *= GAMMA
        t += 1
        last = now["ended"][row] or n == 1 or t == len(log) or log[t]["faulty"][row]
        if last:
            return total, now["next_obs"][row], weight * (not now["terminated"][row])
        n -= 1


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("steps", [1, 4, 10, 11, 12, 40, 57])
@pytest.mark.parametrize("fault", [0.0, 0.2])
def test_every_window_is_that_of_a_plain_walk(num_envs, steps, fault):
    """Before the ring is full, at its seam and after many turns; n of 1 to 6."""
    buffer = small_buffer(10 * num_envs + 2 * (num_envs > 2), num_envs)
    assert buffer.num_slots == 10
    stream = Stream(num_envs, steps, fault=fault)
    stream.fill(buffer, steps)
    where = {x: (t, row) for t, now in enumerate(stream.log) for row, x in enumerate(now["obs"])}
    index = torch.arange(buffer.reward.numel())
    kept = [(t, r) for t in range(max(steps - 10, 0), steps) for r in range(num_envs)]
    kept = [(t, r) for t, r in kept if not stream.log[t]["faulty"][r]]
    assert len(buffer) == len(kept)
    if not kept:
        return
    drawn = buffer.draw(2000, torch.Generator().manual_seed(0)).unique()
    assert set(drawn.tolist()) <= set(index.tolist())
    for n in range(1, 7):
        batch = buffer.gather(drawn, n, GAMMA)
        found = []
        for i in range(len(drawn)):
            t, row = where[batch.obs["actor"][i].item()]
            found.append((t, row))
            reward, next_obs, discount = expected(stream.log, t, row, n)
            assert batch.reward[i].item() == pytest.approx(reward, abs=1e-6)
            assert batch.next_obs["actor"][i].item() == next_obs
            assert batch.next_obs["critic"][i].tolist() == [next_obs, -next_obs]
            assert batch.discount[i].item() == discount
            assert batch.action[i].item() == stream.log[t]["action"][row]
        assert sorted(found) == kept  # each once, and nothing else


def test_successors_survive_the_growth_of_their_ring():
    """Few ends until both rings have turned, then many, so that the second one grows amid."""
    buffer, stream = small_buffer(40, 1), Stream(1, seed=3, end=0.05)
    stream.fill(buffer, 160)
    assert 0 < buffer._kept_count < len(buffer._kept) and buffer._kept_start > 0
    size = len(buffer._kept)
    stream.end = 0.6
    stream.fill(buffer, 25)
    assert len(buffer._kept) > size
    batch = buffer.gather(buffer.draw(500, torch.Generator().manual_seed(0)), 1, GAMMA)
    true = {now["obs"][0]: now["next_obs"][0] for now in stream.log}
    found = dict(
        zip(*(x["actor"][:, 0].tolist() for x in (batch.obs, batch.next_obs)), strict=True)
    )
    assert len(found) == 40
    assert found == {obs: true[obs] for obs in found}


def test_windows_by_hand():
    buffer = small_buffer(10, 1)
    number = lambda x: {"actor": torch.full((1, 1), x), "critic": torch.full((1, 2), x)}  # noqa: E731
    flag = lambda x: torch.tensor([x])  # noqa: E731

    def add(x, reward, then=None, terminated=False):
        ended = then is not None
        obs, after = number(x), number(0.0 if ended else x + 1)
        reached = number(then) if ended else after
        step = Step(after, torch.tensor([reward]), flag(terminated), flag(ended and not terminated),
                    reached, Info())  # fmt: skip
        buffer.add(obs, torch.zeros(1, 1), step)

    for x, reward in ((0.0, 1.0), (1.0, 2.0)):
        add(x, reward)
    add(2.0, 4.0, then=3.0)  # a time limit: the state goes on from 3
    add(0.0, 8.0)
    add(1.0, 16.0, then=9.0, terminated=True)
    add(0.0, 32.0)  # the newest step, which led to 1
    batch = buffer.gather(torch.arange(6), 3, 0.5)
    # 1 + 2/2 + 4/4 = 3; 2 + 4/2 = 4; 4 | 8 + 16/2 = 16; 16 | 32
    assert batch.reward.tolist() == [3, 4, 4, 16, 16, 32]
    assert batch.next_obs["actor"].flatten().tolist() == [3, 3, 3, 9, 9, 1]
    assert batch.discount.tolist() == [1 / 8, 1 / 4, 1 / 2, 0, 0, 1 / 2]
    one = buffer.gather(torch.arange(6), 1, 0.5)
    assert one.reward.tolist() == [1, 2, 4, 8, 16, 32]
    assert one.next_obs["actor"].flatten().tolist() == [1, 2, 3, 1, 9, 1]
    assert one.discount.tolist() == [0.5, 0.5, 0.5, 0.5, 0, 0.5]


def test_a_real_environment_keeps_its_true_last_observation():
    env = Counter(num_envs=2)
    buffer = ReplayBuffer(20, 2, {"actor": 1, "critic": 1}, 1)
    obs = env.reset()
    for _ in range(7):
        action = torch.zeros(2, 1)
        step = env.step(action)
        buffer.add(obs, action, step)
        obs = step.obs
    batch = buffer.gather(torch.arange(14), 1, 0.9)
    assert batch.obs["actor"][::2, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert batch.next_obs["actor"][::2, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert batch.next_obs["critic"][1::2, 0].tolist() == [2, 4, 6, 2, 4, 6, 2]
    assert batch.discount.tolist() == pytest.approx([0.9] * 14)


def test_a_fault_is_not_learned_from():
    env = Counter(num_envs=2)
    buffer = ReplayBuffer(20, 2, {"actor": 1}, 1)
    obs = env.reset()
    for broken in (False, True, False):
        action = torch.tensor([[0.0], [math.nan if broken else 0.0]])
        step = env.step(action)
        buffer.add(obs, action, step)
        obs = step.obs
    assert len(buffer) == 5
    batch = buffer.sample(500, torch.Generator().manual_seed(0), 3, 0.5)
    assert all(x.isfinite().all() for x in (batch.action, batch.reward, batch.discount))
    # Row 1: the step before the fault leads to what the fault began from, with one discount.
    one = buffer.gather(torch.tensor([1]), 3, 0.5)
    assert (one.reward.item(), one.next_obs["actor"].item(), one.discount.item()) == (1, 1, 0.5)
    lone = ReplayBuffer(2, 2, {"actor": 1}, 1)
    with pytest.raises(ValueError, match="holds no transition yet"):
        lone.draw(1)


def test_draws_are_uniform_over_what_is_kept():
    buffer = small_buffer(6, 2)
    Stream(2).fill(buffer, 4)  # four frames; the oldest of four steps was overwritten
    counts = buffer.draw(60_000, torch.Generator().manual_seed(0)).bincount(minlength=8)
    assert counts.view(4, 2).sum(1).nonzero()[:, 0].tolist() == [1, 2, 3]
    assert counts[2:].double().sub(10_000).abs().max() < 5 * math.sqrt(10_000)


def test_memory_is_one_observation_per_transition_and_one_per_end():
    sizes = {"actor": 30, "critic": 20}
    buffer = ReplayBuffer(1000, 4, sizes, 6)
    per_transition = 4 * (50 + 6 + 1) + 3 + 8  # obs, action, reward; flags; place of a successor
    assert buffer.nbytes == 251 * 4 * per_transition + 4 * 4 * 50
    short = small_buffer(40, 4)
    Stream(4, end=1.0).fill(short, 200)  # every step ends: as many successors as transitions
    assert 40 <= len(short._kept) <= 80
    assert short._kept_count == 40


def test_restored_to_the_bit(tmp_path):
    for steps in (3, 9, 10, 25):
        buffer, stream = small_buffer(), Stream(2, steps, fault=0.05)
        stream.fill(buffer, steps)
        save_checkpoint(tmp_path / "x.pt", buffer.state_dict())
        other = small_buffer()
        other.load_state_dict(load_checkpoint(tmp_path / "x.pt"))
        for _ in range(7):
            step = stream.step()
            buffer.add(*step)
            other.add(*step)
        same(other.state_dict(), buffer.state_dict())
        assert len(other) == len(buffer)
        a, b = (x.sample(64, torch.Generator().manual_seed(1), 3) for x in (buffer, other))
        same(a._asdict(), b._asdict())
    with pytest.raises(ValueError, match="buffer of another size"):
        small_buffer(22).load_state_dict(buffer.state_dict())
    with pytest.raises(ValueError, match="buffer of another size"):
        ReplayBuffer(20, 2, {"actor": 1}, 1).load_state_dict(buffer.state_dict())


def test_only_what_is_filled_is_saved(tmp_path):
    buffer = ReplayBuffer(1_000_000, 2, {"actor": 1, "critic": 2}, 1)
    Stream(2).fill(buffer, 100)
    save_checkpoint(tmp_path / "x.pt", buffer.state_dict())
    assert (tmp_path / "x.pt").stat().st_size < 20_000


def test_rewards_can_be_written_anew_after_the_ring_has_turned():
    buffer = small_buffer(10, 1)  # 13 steps into 10 places
    Stream(1).fill(buffer, 13)
    buffer.reward.fill_(7.0)
    assert buffer.sample(500, torch.Generator().manual_seed(0)).reward.unique().tolist() == [7.0]


def test_what_cannot_be_stored_is_refused():
    with pytest.raises(ValueError, match="3 transitions cannot hold one step of 4 environments"):
        small_buffer(3, 4)
    buffer, stream = small_buffer(), Stream(2)
    stream.fill(buffer, 3)
    obs, action, step = stream.step()
    copy = {g: x.clone() for g, x in obs.items()}
    other = {g: x + 1 for g, x in obs.items()}
    with pytest.raises(ValueError, match="one unbroken stream"):
        buffer.add(other, action, step)
    buffer.add(copy, action, step)  # equal, though another object


def test_a_batch_is_not_the_buffer():
    buffer = small_buffer()
    Stream(2).fill(buffer, 5)
    before = {k: x.clone() for k, x in buffer.state_dict()["grids"].items()}
    batch = buffer.sample(8)
    assert isinstance(batch, Batch)
    for x in (*batch.obs.values(), *batch.next_obs.values(), batch.action, batch.reward):
        x.fill_(99.0)
    same(buffer.state_dict()["grids"], before)


@pytest.mark.parametrize("num_envs", [1, 4, 32, 300])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.03, 4.0])
def test_updates_count_env_steps_whatever_the_number_of_environments(num_envs, ratio):
    step, total = 0, 0
    while step < 9600:
        total += updates_due(step, step + num_envs, 1000, ratio)
        step += num_envs
        assert total == math.floor(ratio * max(step - 1000, 0))
    assert updates_due(0, 1000, 1000, ratio) == 0
