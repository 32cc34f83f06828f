"""Hindsight: goals from the same episode, where the policy reads them, paid by the task."""

import pytest
import torch
from test_buffers import Stream
from test_off_policy import CASES, Case, without_time
from test_ppo import differing
from toys import GoalToy

import ctrl_rl
from ctrl_rl.buffers import ReplayBuffer
from ctrl_rl.hindsight import Hindsight, with_goal
from ctrl_rl.runs import Run
from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm

GAMMA, NUM_ENVS = 0.5, 3

POS = ObsTerm(name="pos", kind="signal", size=1)
GOAL = ObsTerm(name="goal", kind="command", size=1)
SCALED = ObsTerm(name="goal", kind="command", size=1, scale=(0.5,), clip=(-1000.0, 60.0))
SPEC = EnvSpec(
    task="Goals-v0",
    num_envs=NUM_ENVS,
    obs={
        "actor": (POS, SCALED),
        "critic": (ObsTerm(name="pos", kind="signal", size=1, history=2), GOAL),
        "goal": (GOAL,),
        "achieved": (POS,),
    },
    action=(ActionDim(name="a", low=-1.0, high=1.0),),
    physics_dt=1.0,
    step_dt=1.0,
    max_episode_steps=100,
)


class GoalStream(Stream):
    """Positions are numbers of their own; goals are negative, so that none is reached."""

    spec = SPEC

    def fresh(self):
        pos = torch.arange(self.num_envs)[:, None] + self.next_number
        self.next_number += self.num_envs
        goal = -1.0 - pos
        critic = torch.cat([pos, pos, goal], 1)
        actor = torch.cat([pos, 0.5 * goal], 1)
        return {"actor": actor, "critic": critic, "goal": goal, "achieved": pos}

    def reward_for(self, achieved, goal):
        """The distance to go; a step that leads to the goal ends the episode."""
        distance = (achieved - goal)[:, 0].abs()
        return -distance, distance == 0

    def future(self) -> dict[float, list[float]]:
        """Position before a step -> positions that the rest of its episode reached."""
        found = {}
        for env in range(self.num_envs):
            for t, row in enumerate(self.log):
                reached = []
                for later in self.log[t:]:
                    if later["faulty"][env]:
                        break
                    reached.append(later["next_obs"][env])
                    if later["ended"][env]:
                        break
                found[row["obs"][env]] = reached
        return found


def filled(steps: int, slots=12, **rates):
    stream = GoalStream(NUM_ENVS, **rates)
    sizes = {g: SPEC.obs_size(g) for g in SPEC.obs}
    replay = ReplayBuffer(slots * NUM_ENVS, NUM_ENVS, sizes, 1)
    stream.fill(replay, steps)
    return stream, replay


def draw(stream, replay, num_goals, batch_size=4000):
    generator = torch.Generator().manual_seed(0)
    return Hindsight(replay, stream, num_goals).sample(batch_size, generator, gamma=GAMMA)


@pytest.mark.parametrize("steps", [1, 7, 12, 13, 40])
@pytest.mark.parametrize("rates", [{}, {"end": 0.0}, {"fault": 0.15}], ids=str)
def test_goals_are_the_future_of_the_same_episode_and_all_of_it(steps, rates):
    """Never beyond an end, a fault, the newest step or the seam of the ring."""
    stream, replay = filled(steps, **rates)
    if len(replay) == 0:
        pytest.skip("the only step was a fault in every row")
    batch = draw(stream, replay, 4)
    future = stream.future()
    goals: dict[float, set] = {}
    for pos, goal in zip(batch.obs["actor"][:3200, 0], batch.obs["goal"][:3200, 0], strict=True):
        goals.setdefault(pos.item(), set()).add(goal.item())
    for env in range(NUM_ENVS):
        for row in stream.log[-12:]:
            if not row["faulty"][env]:
                pos = row["obs"][env]
                assert goals[pos] == set(future[pos]), pos


@pytest.mark.parametrize(("num_goals", "relabelled"), [(1, 50), (4, 80), (9, 90)])
def test_k_of_k_plus_1_transitions_are_relabelled_and_the_rest_is_as_it_was(num_goals, relabelled):
    stream, replay = filled(30)
    batch = draw(stream, replay, num_goals, 100)
    assert (batch.obs["goal"][:, 0] >= 0).sum() == relabelled
    index = replay.draw(100, torch.Generator().manual_seed(0))
    plain = replay.gather(index, gamma=GAMMA)
    for ours, theirs in zip(batch, plain, strict=True):
        pairs = zip(ours.values(), theirs.values()) if isinstance(ours, dict) else [(ours, theirs)]  # noqa: B905
        for a, b in pairs:
            assert torch.equal(a[relabelled:], b[relabelled:])
    assert torch.equal(batch.action, plain.action)
    for group in ("actor", "achieved"):  # the position stays
        assert torch.equal(batch.obs[group][:, 0], plain.obs[group][:, 0])
        assert torch.equal(batch.next_obs[group][:, 0], plain.next_obs[group][:, 0])


def test_the_goal_stands_in_its_columns_and_is_paid_by_the_task():
    stream, replay = filled(30)
    batch = draw(stream, replay, 4, 1000)
    for obs in (batch.obs, batch.next_obs):
        goal = batch.obs["goal"][:800]
        assert torch.equal(obs["goal"][:800], goal)
        assert torch.equal(obs["actor"][:800, 1:], 0.5 * goal.clamp(max=60.0))
        assert (goal > 60).any()  # so that the clip was tried
        assert torch.equal(obs["critic"][:800, 2:], goal)
        for column in (0, 1):
            assert torch.equal(obs["critic"][:, column], obs["actor"][:, 0])
    distance = (batch.next_obs["achieved"] - batch.obs["goal"])[:800, 0].abs()
    assert torch.equal(batch.reward[:800], -distance)
    assert torch.equal(batch.discount[:800], torch.where(distance == 0, 0.0, GAMMA))
    assert 0.1 < (distance == 0).float().mean() < 0.9


def test_a_step_that_terminated_goes_on_under_a_goal_that_it_did_not_reach():
    """Only `reward_for` says what ends an episode."""
    stream, replay = filled(30, end=0.5)
    stream.reward_for = lambda achieved, goal: (goal[:, 0] * 0, goal[:, 0] < 0)
    batch = draw(stream, replay, 4, 1000)
    assert (batch.discount[:800] == GAMMA).all() and (batch.discount[800:] == 0).any()


def test_the_largest_reward_is_that_of_relabelled_transitions():
    stream, replay = filled(12)
    hindsight = Hindsight(replay, stream, 4)
    assert hindsight.largest_reward() == 0
    batch = hindsight.sample(100)
    assert hindsight.largest_reward() == float(batch.reward[:80].abs().max()) > 0
    assert hindsight.largest_reward() == 0


def test_sampling_does_not_change_the_replay():
    stream, replay = filled(30)
    before = {name: x.clone() for name, x in replay.state_dict()["grids"].items()}
    draw(stream, replay, 4)
    for name, x in replay.state_dict()["grids"].items():
        assert torch.equal(x, before[name])


def test_with_goal_gives_a_copy():
    obs = torch.tensor([[7.0, 1.0], [8.0, 2.0]])
    out = with_goal(SPEC, "actor", obs, torch.tensor([[10.0], [100.0]]))
    assert out.tolist() == [[7.0, 5.0], [8.0, 30.0]]
    assert obs.tolist() == [[7.0, 1.0], [8.0, 2.0]]


def test_a_task_without_goals_is_refused():
    env = ctrl_rl.make("Pendulum-v0", 2)
    replay = ReplayBuffer(10, 2, {"actor": 3}, 1)
    with pytest.raises(ValueError, match="hindsight needs a task with goals; Pendulum-v0 has no"):
        Hindsight(replay, env, 4)


# Learners -----------------------------------------------------------------------------------


@pytest.fixture(params=CASES)
def case(request, monkeypatch) -> Case:
    monkeypatch.setattr(CASES[request.param].module, "LOG_EVERY", 64)
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)
    return CASES[request.param]


def toy():
    return GoalToy(num_envs=4)


def test_learners_learn_from_the_relabelled_batch(case, monkeypatch):
    """`update` gets goals of hindsight in k of k + 1 rows, and none without the option."""
    update, seen = case.learner.update, []
    monkeypatch.setattr(
        case.learner, "update", lambda self, batch: (seen.append(batch), update(self, batch))[1]
    )
    case.train(toy(), total_steps=128, hindsight=3)
    assert len(seen) == 96
    for batch in seen:
        for group, place in (("actor", slice(-1, None)), ("critic", slice(0, 1))):
            scale, bound = (2.0, 0.4) if group == "actor" else (1.0, 9.0)
            for obs in (batch.obs, batch.next_obs):
                wanted = scale * batch.obs["goal"][:24].clamp(-bound, bound)
                assert torch.equal(obs[group][:24, place], wanted)
        reached = (batch.next_obs["achieved"] - batch.obs["goal"])[:, 0].abs() <= 0.05
        assert torch.equal(batch.reward, -(~reached).float())
        assert torch.equal(batch.discount == 0, reached)
    share = torch.cat([batch.reward[:24] for batch in seen]).eq(0).float().mean()
    plain = torch.cat([batch.reward[24:] for batch in seen]).eq(0).float().mean()
    assert share > 2 * plain
    seen.clear()
    case.train(toy(), total_steps=128)
    assert all(set(batch.obs) == {"actor", "critic"} for batch in seen)


def test_learners_refuse_hindsight_without_goals(case):
    with pytest.raises(ValueError, match="hindsight needs a task with goals; Pendulum-v0 has no"):
        case.train(ctrl_rl.make("Pendulum-v0", 4), total_steps=128, hindsight=4)
    with pytest.raises(ValueError, match="hindsight must be 0 or more, not -1"):
        case.train(toy(), hindsight=-1)


def test_a_run_with_hindsight_resumes_exactly(case, tmp_path):
    train = lambda env, run: case.train(  # noqa: E731
        env, run, total_steps=480, buffer_size=200, hindsight=4
    )
    whole = train(toy(), Run(tmp_path / "whole", console=False))
    train(toy(), Run(tmp_path / "parts", stop_after=128, console=False))
    resumed = train(toy(), Run(tmp_path / "parts", resume=True, console=False))
    for name in ("checkpoints/last.pt", "checkpoints/replay-480.pt"):
        a, b = (torch.load(tmp_path / part / name) for part in ("whole", "parts"))
        a, b = ({k: v for k, v in x.items() if k != "config"} for x in (a, b))
        assert differing(a, b) == []
    assert without_time(whole.rows)[-1] == without_time(resumed.rows)[-1]
