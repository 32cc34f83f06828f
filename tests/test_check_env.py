"""`check_env`: every check can fail, every registered task passes."""

import dataclasses

import pytest
import torch
from toys import BROKEN, GoalToy, Toy

import ctrl_rl
from ctrl_rl.env_check import CHECKS, NEED_MAKE, ContractError, check_env
from ctrl_rl.spec import Discrete
from robots.registry import TASKS

ENDS_EARLY = ("Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "Go1-Velocity-Flat-v0")
"""Tasks of 1000 steps whose episodes end long before under random actions."""
EVERY_BROKEN = [(check, toy) for check, toys in BROKEN.items() for toy in toys]


@pytest.mark.parametrize("toy", [Toy, GoalToy])
def test_a_healthy_toy_passes_every_check(toy):
    report = check_env(lambda num_envs, seed: toy(num_envs=num_envs, seed=seed))
    assert report.passed == tuple(CHECKS)
    assert not report.faults and not report.skipped
    assert str(report) == f"{toy.id}: 17 checks passed, 0 faults, 0 not made"


def test_every_check_has_a_toy_that_breaks_it():
    assert set(BROKEN) == set(CHECKS)


@pytest.mark.parametrize(("check", "toy"), EVERY_BROKEN, ids=lambda x: getattr(x, "__name__", x))
def test_a_broken_toy_is_found_by_its_check(check, toy):
    with pytest.raises(ContractError) as error:
        check_env(lambda num_envs, seed: toy(num_envs=num_envs, seed=seed))
    found = [line.split(":")[0] for line in error.value.report.faults]
    assert check in found, str(error.value)
    assert f"fault    {check}: " in str(error.value)
    assert "was raised" not in str(error.value)


@pytest.mark.parametrize("task", TASKS)
def test_every_registered_task_passes(task):
    def make(num_envs, seed):
        return ctrl_rl.make(task, num_envs, seed=seed, threads=1)

    steps = 200 if task in ENDS_EARLY else None
    report = check_env(make, num_envs=4, num_steps=steps)
    assert report.passed == tuple(CHECKS), str(report)


def test_an_instance_is_checked_as_far_as_it_can_be():
    env = Toy(num_envs=4)
    report = check_env(env)
    assert report.passed == tuple(name for name in CHECKS if name not in NEED_MAKE)
    assert report.skipped == tuple(
        f"{name}: needs make(num_envs, seed), not an instance" for name in NEED_MAKE
    )
    env.step(torch.zeros(4, 1))  # still open
    with pytest.raises(ContractError, match="reward: "):
        check_env(BROKEN["reward"][0](num_envs=4))


def test_all_faults_stand_in_one_error():
    class Two(*(BROKEN["dead"] + BROKEN["reward"][:1])):
        pass

    with pytest.raises(ContractError) as error:
        check_env(lambda num_envs, seed: Two(num_envs=num_envs, seed=seed))
    dead, reward = error.value.report.faults
    assert dead == "dead: critic/vel[0] is always 0.25"
    assert reward.startswith("reward: row ")
    assert str(error.value).splitlines()[0] == "Toy-v0: 15 checks passed, 2 faults, 0 not made"


def test_a_term_may_declare_itself_constant():
    class Constant(*BROKEN["dead"]):
        def make_spec(self):
            spec = super().make_spec()
            pos, vel = spec.obs["critic"]
            obs = {**spec.obs, "critic": (pos, dataclasses.replace(vel, constant=True))}
            return dataclasses.replace(spec, obs=obs)

    assert not check_env(lambda n, seed: Constant(num_envs=n, seed=seed)).faults


def test_an_exception_is_a_fault_and_not_a_crash():
    class Raises(Toy):
        def step(self, action):
            raise RuntimeError("motor on fire")

    with pytest.raises(ContractError, match="RuntimeError was raised: motor on fire"):
        check_env(lambda n, seed: Raises(num_envs=n, seed=seed))


def test_what_could_not_be_checked_is_said():
    report = check_env(lambda n, seed: Toy(num_envs=n, seed=seed), num_steps=2)
    assert "next_obs: no episode ended in 2 steps" in report.skipped
    assert "faults: no episode lasts for three steps" in report.skipped
    with pytest.raises(ValueError, match="num_envs of at least 4, not 2"):
        check_env(lambda n, seed: Toy(num_envs=n, seed=seed), num_envs=2)


class Choice(Toy):
    """The toy with three choices instead of a force."""

    def make_spec(self):
        return dataclasses.replace(super().make_spec(), action=Discrete(n=3))

    def apply_action(self, action):
        super().apply_action(3.0 * (action[:, None] - 1))

    def reward_terms(self, action):
        return super().reward_terms(action[:, None])

    def advance(self, action):
        super().advance(action[:, None])


def test_discrete_actions_are_checked_too():
    report = check_env(lambda n, seed: Choice(num_envs=n, seed=seed))
    assert report.passed == tuple(CHECKS)
