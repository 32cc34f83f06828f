"""A healthy toy environment, and broken ones: each breaks one promise that `check_env` holds."""

import dataclasses

import numpy as np
import torch

from ctrl_rl.env import Step
from ctrl_rl.spec import PRIVILEGED, ActionDim, EnvSpec, ObsTerm
from robots.env import TaskEnv
from robots.sim.ode_backend import OdeSim


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig:
    max_episode_steps: int = 12

    def evaluation(self):
        return self

    def nominal(self):
        return self


class Toy(TaskEnv):
    """A mass on a line that must stay near the middle: noise, delay, history, two groups."""

    id = "Toy-v0"
    Config = ToyConfig
    backends = ("torch",)

    def make_sim(self, backend, device, threads):
        return OdeSim(lambda qpos, qvel, ctrl: ctrl, self.num_envs, (1, 1), 0.1, device=device)

    def make_spec(self):
        pos = ObsTerm(
            name="pos", kind="signal", size=1, unit="m", noise=0.01, delay=(0, 2), history=2
        )
        return EnvSpec(
            task=self.id,
            num_envs=self.num_envs,
            obs={
                "actor": (pos, ObsTerm(name="prev_action", kind="prev_action", size=1)),
                "critic": (
                    ObsTerm(name="pos", kind="signal", size=1, unit="m"),
                    ObsTerm(name="vel", kind=PRIVILEGED, size=1, unit="m/s"),
                ),
            },
            action=(ActionDim(name="force", low=-3.0, high=3.0, unit="N"),),
            physics_dt=0.1,
            step_dt=0.1,
            max_episode_steps=self.config.max_episode_steps,
        )

    def prepare(self):
        self.prev_action = self.remember("prev_action", torch.zeros_like(self.sim.qpos))
        self.wind = self.remember("wind", torch.zeros_like(self.sim.qpos))

    def observe_terms(self, rows):
        return {
            "pos": self.sim.qpos[rows],
            "vel": self.sim.qvel[rows],
            "prev_action": self.prev_action[rows],
        }

    def apply_action(self, action):
        self.sim.ctrl[:] = action + self.wind

    def reward_terms(self, action):
        return {"pos": -self.sim.qpos[:, 0].square(), "force": -0.1 * action[:, 0].square()}

    def terminations(self):
        return {"far": self.sim.qpos[:, 0].abs() > 0.8}

    def metrics(self):
        return {"distance": self.sim.qpos[:, 0].abs()}

    def advance(self, action):
        self.prev_action[:] = action

    def begin(self, rows):
        start = self.uniform("start", rows, 2, -0.5, 0.5)
        self.sim.qpos[rows], self.sim.qvel[rows] = start[:, :1], start[:, 1:]
        self.prev_action[rows] = 0.0
        self.wind[rows] = self.uniform("wind", rows, 1, -0.5, 0.5)


BROKEN: dict[str, list[type[Toy]]] = {}
"""Name of the check that must find it -> environments."""


def broken(check: str):
    """Register a toy that `check` must find."""

    def register(cls):
        BROKEN.setdefault(check, []).append(cls)
        return cls

    return register


def ended(step: Step) -> torch.Tensor:
    return step.terminated | step.truncated


# What `step` returns --------------------------------------------------------------------------


@broken("spec")
class CountsOneTooMany(Toy):
    def make_spec(self):
        return dataclasses.replace(super().make_spec(), num_envs=self.num_envs + 1)


@broken("spec")
class SpecWithLists(Toy):
    def make_spec(self):
        spec = super().make_spec()
        pos, other = spec.obs["actor"]
        obs = {**spec.obs, "actor": (dataclasses.replace(pos, delay=[0, 2]), other)}
        return dataclasses.replace(spec, obs=obs)


@broken("shapes")
class RewardIsAColumn(Toy):
    def step(self, action):
        step = super().step(action)
        return step._replace(reward=step.reward[:, None])


@broken("shapes")
class DoubleObs(Toy):
    def step(self, action):
        step = super().step(action)
        return step._replace(obs={g: v.double() for g, v in step.obs.items()})


@broken("shapes")
class IntegerFlags(Toy):
    def step(self, action):
        step = super().step(action)
        return step._replace(truncated=step.truncated.long())


@broken("shapes")
class NoCriticInNextObs(Toy):
    def step(self, action):
        step = super().step(action)
        return step._replace(next_obs={"actor": step.next_obs["actor"]})


@broken("shapes")
class UndeclaredGroup(Toy):
    def step(self, action):
        step = super().step(action)
        return step._replace(obs={**step.obs, "extra": step.reward[:, None]})


@broken("finite")
class NanAfterReset(Toy):
    def step(self, action):
        step = super().step(action)
        step.obs["critic"][ended(step)] = torch.nan
        return step


@broken("flags")
class BothFlags(Toy):
    def step(self, action):
        step = super().step(action)
        return step._replace(truncated=step.truncated | step.terminated)


@broken("flags")
class IgnoresItsLimit(Toy):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.spec = dataclasses.replace(self.spec, max_episode_steps=10)
        self._limit = 12

    def step(self, action):
        spec, self.spec = self.spec, dataclasses.replace(self.spec, max_episode_steps=self._limit)
        step = super().step(action)
        self.spec = spec
        return step


@broken("next_obs")
class LosesFinalObs(Toy):
    def step(self, action):
        step = super().step(action)
        return step._replace(next_obs={g: v.clone() for g, v in step.obs.items()})


@broken("next_obs")
class LosesFinalCriticObs(Toy):
    def step(self, action):
        step = super().step(action)
        return step._replace(next_obs={**step.next_obs, "critic": step.obs["critic"].clone()})


@broken("next_obs")
class StaleFinalObs(Toy):
    def step(self, action):
        before = self.observe()
        step = super().step(action)
        for group, value in step.next_obs.items():
            value[ended(step)] = before[group][ended(step)]
        return step


@broken("next_obs")
class ZeroFinalObs(Toy):
    def step(self, action):
        step = super().step(action)
        if ended(step).any():
            for value in step.next_obs.values():
                value[ended(step)] = 0.0
        return step


@broken("next_obs")
class UnscaledFinalObs(Toy):
    def step(self, action):
        step = super().step(action)
        if ended(step).any():
            step.next_obs["critic"][ended(step)] *= 10.0
        return step


@broken("next_obs")
class NextObsOfOtherRows(Toy):
    def step(self, action):
        step = super().step(action)
        return step._replace(next_obs={g: v.roll(1, 0) for g, v in step.next_obs.items()})


@broken("dead")
class DeadElement(Toy):
    def observe_terms(self, rows):
        terms = super().observe_terms(rows)
        return {**terms, "vel": torch.full_like(terms["vel"], 0.25)}


@broken("reward")
class ForgetsATerm(Toy):
    def step(self, action):
        step = super().step(action)
        del step.info.reward_terms["force"]
        return step


@broken("reward")
class NoTerms(Toy):
    def step(self, action):
        step = super().step(action)
        step.info.reward_terms.clear()
        return step


class GoalToy(Toy):
    """The toy with goals: it is paid for being near one, and an episode ends there."""

    id = "GoalToy-v0"

    def make_spec(self):
        spec = super().make_spec()
        goal = ObsTerm(name="goal", kind="command", size=1, unit="m", labels=("goal",))
        scaled = dataclasses.replace(goal, scale=(2.0,), clip=(-0.4, 0.4))
        obs = {
            "actor": (*spec.obs["actor"], scaled),
            "critic": (goal, *spec.obs["critic"]),
            "goal": (goal,),
            "achieved": (ObsTerm(name="pos", kind="signal", size=1, unit="m"),),
        }
        return dataclasses.replace(spec, obs=obs)

    def prepare(self):
        super().prepare()
        self.goal = self.remember("goal", torch.zeros_like(self.sim.qpos))

    def begin(self, rows):
        super().begin(rows)
        self.goal[rows] = self.uniform("goal", rows, 1, -0.5, 0.5)

    def observe_terms(self, rows):
        return {**super().observe_terms(rows), "goal": self.goal[rows]}

    def reward_for(self, achieved, goal):
        away = (achieved - goal)[:, 0].abs() > 0.05
        return -away.float(), ~away

    def reward_terms(self, action):
        reward, self.reached = self.reward_for(self.sim.qpos.float(), self.goal.float())
        return {"away": reward}

    def terminations(self):
        return {"reached": self.reached}


@broken("goals")
class PaysForMore(GoalToy):
    def reward_terms(self, action):
        return {**super().reward_terms(action), "force": -0.1 * action[:, 0].square()}


@broken("goals")
class EndsForMore(GoalToy):
    def terminations(self):
        return {**super().terminations(), "far": self.sim.qpos[:, 0].abs() > 0.6}


@broken("goals")
class PaysWithoutADimension(GoalToy):
    def reward_for(self, achieved, goal):
        reward, reached = super().reward_for(achieved, goal)
        return reward[:, None], reached

    def reward_terms(self, action):
        return {"away": super().reward_terms(action)["away"][:, 0]}


@broken("goals")
class ShowsTheActorAnotherGoal(GoalToy):
    def step(self, action):
        step = super().step(action)
        step.obs["actor"][:, -1] *= -1
        return step


@broken("goals")
class ShowsTheCriticAnotherGoal(GoalToy):
    def step(self, action):
        step = super().step(action)
        step.obs["critic"][:, 0] += 0.1
        return step


# Memory ---------------------------------------------------------------------------------------


@broken("aliasing")
class ReusesItsBuffer(Toy):
    def step(self, action):
        step = super().step(action)
        if not hasattr(self, "buffer"):
            self.buffer = step.reward
        self.buffer.copy_(step.reward)
        return step._replace(reward=self.buffer)


@broken("aliasing")
class FiguresAreLive(Toy):
    def step(self, action):
        step = super().step(action)
        step.info.metrics["age"] = self.step_count
        return step


@broken("aliasing")
class HandsOutItsOwnObs(Toy):
    def observe(self):
        return dict(self._obs)


@broken("aliasing")
class ObsIsNextObsAtAnEnd(Toy):
    def step(self, action):
        step = super().step(action)
        for group, value in step.obs.items():
            step.next_obs[group].copy_(value)
        return step._replace(obs=step.next_obs)


# Randomness -----------------------------------------------------------------------------------


@broken("starts")
class AllRowsAlike(Toy):
    def begin(self, rows):
        super().begin(rows)
        self.sim.qpos[rows] = self.seed / 10
        self.sim.qvel[rows] = 0.1
        self.wind[rows] = 0.1

    def uniform(self, term, rows, size, low=0.0, high=1.0):  # no noise and no delay either
        return super().uniform(term, rows, size) * 0


@broken("starts")
class EveryEpisodeAlike(Toy):
    def _draw_key(self, rows):
        self.episode[rows] = 0
        return super()._draw_key(rows)


@broken("starts")
class IgnoresItsSeed(Toy):
    def __init__(self, *args, seed=0, **kwargs):
        super().__init__(*args, seed=0, **kwargs)


@broken("determinism")
class GlobalGenerator(Toy):
    def begin(self, rows):
        super().begin(rows)
        self.sim.qvel[rows] += 0.1 * torch.rand_like(self.sim.qvel[rows])


@broken("determinism")
class SeedsTheGlobalGenerator(GlobalGenerator):
    def __init__(self, *args, seed=0, **kwargs):
        torch.manual_seed(seed)
        super().__init__(*args, seed=seed, **kwargs)


@broken("determinism")
class NumpyGenerator(Toy):
    def advance(self, action):
        super().advance(action)
        self.sim.qvel[:] += 0.01 * np.random.rand()


@broken("determinism")
class KeepsTheAction(Toy):
    def apply_action(self, action):
        self.sim.ctrl[:] = getattr(self, "kept", action)  # one step late, by reference
        self.kept = action


@broken("determinism")
class WritesToTheAction(Toy):
    def apply_action(self, action):
        super().apply_action(action.clamp_(-1.0, 1.0))


@broken("num_envs")
class DependsOnNumEnvs(Toy):
    def begin(self, rows):
        super().begin(rows)
        self.sim.qvel[rows] += self.index[rows, None] / self.num_envs


# State ----------------------------------------------------------------------------------------


@broken("observe")
class ObservePushesAFrame(Toy):
    def observe(self):
        self._obs = self._make_obs(slice(None))
        return super().observe()


@broken("state")
class ForgetsToRemember(Toy):
    def prepare(self):
        super().prepare()
        del self.memory["wind"]


@broken("state")
class SavesItsLiveState(Toy):
    def state_dict(self):
        return {**super().state_dict(), "memory": self.memory}


@broken("state")
class SavesAnArray(Toy):
    def state_dict(self):
        return {**super().state_dict(), "age": self.step_count.numpy()}


@broken("state")
class ForgetsTheSeed(Toy):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "seed": self.seed})


@broken("rows")
class SetsTooManyRows(Toy):
    def set_rows(self, rows, state):
        super().set_rows(rows, state)
        self.sim.qvel[:] = 0.0


@broken("rows")
class RowsLoseTheirAge(Toy):
    def get_rows(self, rows):
        state = super().get_rows(rows)
        state["memory"]["step_count"] *= 0
        return state


@broken("rows")
class RowsKeepTheirObs(Toy):
    def set_rows(self, rows, state):
        super().set_rows(rows, {**state, "obs": {}})


# Bad input ------------------------------------------------------------------------------------


@broken("refusal")
class TakesAnything(Toy):
    def step(self, action):
        return super().step(action.float().flatten()[: self.num_envs, None])


@broken("refusal")
class StepsBeforeItRefuses(Toy):
    def step(self, action):
        if action.shape != (self.num_envs, 1):
            super().step(torch.zeros(self.num_envs, 1))
        return super().step(action)


@broken("faults")
class TakesNan(Toy):
    def _check_action(self, action):
        return torch.nan_to_num(action), None


@broken("faults")
class FaultsTerminate(Toy):
    def step(self, action):
        step = super().step(action)
        for fault in step.info.faults:
            step.terminated[fault.row], step.truncated[fault.row] = True, False
        return step


@broken("faults")
class FaultsCost(Toy):
    def step(self, action):
        step = super().step(action)
        for fault in step.info.faults:
            step.reward[fault.row] = -1.0
            step.info.reward_terms["fault"] = step.reward
        return step


@broken("faults")
class FaultsWithoutACause(Toy):
    def _cause(self, *args):
        return ""


@broken("faults")
class FaultsHurtOthers(Toy):
    def advance(self, action):
        super().advance(action)
        if (action == 0).any():  # the zero that replaced a NaN
            self.sim.qvel[:] *= 0.5


@broken("faults")
class FaultsShowTheBadObs(Toy):
    def step(self, action):
        step = super().step(action)
        for fault in step.info.faults:
            step.next_obs["critic"][fault.row] = 7.0
        return step
