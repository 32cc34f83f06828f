"""PPO with several critics: arithmetic of groups, equality with PPO, what groups are for."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from probes import AgeReward, ConstantReward, FollowSignal, LastStepReward, Probe
from test_ppo import differing, pendulum, slope

from ctrl_rl import multi_critic_ppo, ppo
from ctrl_rl.commands.train import read_plan, rebuild
from ctrl_rl.multi_critic_ppo import (
    METRICS,
    MultiCriticPPO,
    MultiCriticPPOConfig,
    check_groups,
    combined,
    group_rewards,
    multi_critic_ppo_loss,
    term_names,
    train,
)
from ctrl_rl.policy import Policy
from ctrl_rl.returns import gae
from ctrl_rl.rollout import collect
from ctrl_rl.runs import Run

SMALL = MultiCriticPPOConfig(
    reward_groups={"angle": ("angle",), "effort": ("speed", "torque")},
    num_steps=8,
    num_epochs=2,
    num_minibatches=4,
    hidden=(16,),
    compile="off",
)


def small(**changes) -> MultiCriticPPOConfig:
    return dataclasses.replace(SMALL, **changes)


def learner(env, config=SMALL) -> MultiCriticPPO:
    return MultiCriticPPO(config, env.spec, env.device)


def roll(learner, env):
    return collect(learner.act, env, learner.draw_noise())[0]


class TwoSizes(Probe):
    """One step, two targets: "left" is worth 1000 and wants action 0 a little, "right" 1 and 1.

    The rewards are -1000 (a_0 - 0.5 s)^2 and -(a_1 + 0.5 s)^2 of a signal s in -1..1, and 1000
    times a number that the action does not decide stands in the large group.
    """

    id = "Probe-TwoSizes-v0"
    terms = FollowSignal.terms
    action = tuple(dataclasses.replace(FollowSignal.action[0], name=n) for n in ("x", "y"))
    observe_terms = FollowSignal.observe_terms
    terminations = FollowSignal.terminations

    def begin(self, rows):
        self.sim.qpos[rows] = self.uniform("signal", rows, 1, -1.0, 1.0)

    def reward_terms(self, action):
        signal = self.sim.qpos[:, 0]
        luck = self.uniform("luck", slice(None), 1, -1.0, 1.0)[:, 0]
        return {
            "left": -1000 * (action[:, 0] - signal / 2).square(),
            "luck": 1000 * luck,
            "right": -(action[:, 1] + signal / 2).square(),
        }


# Groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "leaves out: a, b, c"),
        ({"x": ("a", "b")}, "leaves out: c"),
        ({"x": ("a", "b"), "y": ("c", "d")}, "names what is no reward term: d"),
        ({"x": ("a", "b"), "y": ("c", "b")}, "names more than once: b"),
        ({"x": ("a", "b", "b"), "y": ("c",)}, "names more than once: b"),
        ({"x": ("a", "b", "c"), "y": ()}, "has no term for: y"),
    ],
)
def test_each_term_stands_in_exactly_one_group(groups, message):
    check_groups({"x": ("c", "a"), "y": ("b",)}, ["a", "b", "c"], "Toy-v0")
    with pytest.raises(ValueError, match=f"{message}; the terms of Toy-v0 are a, b, c$"):
        check_groups(groups, ["a", "b", "c"], "Toy-v0")


def test_training_refuses_before_it_writes_and_leaves_the_environment_alone(tmp_path):
    env = pendulum()
    before = env.state_dict()
    assert term_names(env) == ["angle", "speed", "torque"]
    assert differing(before, env.state_dict()) == []
    config = small(reward_groups={"angle": ("angle",)}, total_steps=64)
    with pytest.raises(ValueError, match="leaves out: speed, torque"):
        train(config, env, Run(tmp_path / "run", console=False))
    assert not list((tmp_path / "run").glob("*"))


def test_groups_come_from_the_preset_and_flags_change_them():
    words = ["Pendulum-v0", "--algo", "multi_critic_ppo", "--algo.group-weights.effort", "0.2"]
    config = read_plan(words).algo_config
    assert config.reward_groups == {"upright": ("angle", "speed"), "effort": ("torque",)}
    assert config.group_weights == {"effort": 0.2}
    check_groups(config.reward_groups, term_names(pendulum()), "Pendulum-v0")
    saved = json.loads(json.dumps(dataclasses.asdict(config)))
    assert rebuild(MultiCriticPPOConfig, saved) == config
    with pytest.raises(ValueError, match="group_weights names work, no group"):
        read_plan([*words, "--algo.group-weights.work", "1"])


@pytest.mark.parametrize(
    ("flags", "groups", "weights"),
    [
        (  # none of the preset's names: its groups go, and their weights with them
            "--algo.reward-groups.a angle speed --algo.reward-groups.b torque",
            {"a": ("angle", "speed"), "b": ("torque",)},
            {},
        ),
        (  # one of its names: its weight stays, its terms do not
            "--algo.reward-groups.all-else angle --algo.reward-groups.effort torque speed"
            " --algo.group-weights.all_else 0.5",
            {"all_else": ("angle",), "effort": ("torque", "speed")},
            {"all_else": 0.5, "effort": 0.1},
        ),
    ],
)
def test_groups_given_by_flags_take_the_place_of_the_presets(flags, groups, weights):
    words = ["Pendulum-v0", "--algo", "multi_critic_ppo", *flags.split(), "--video-s", "0"]
    config = read_plan(words).algo_config
    assert config.reward_groups == groups and config.group_weights == weights
    check_groups(config.reward_groups, term_names(pendulum()), "Pendulum-v0")


def test_groups_given_by_flags_must_be_all_of_them():
    words = ["Pendulum-v0", "--algo", "multi_critic_ppo", "--algo.reward-groups.upright", "angle"]
    config = read_plan(words).algo_config
    with pytest.raises(ValueError, match="leaves out: speed, torque"):
        check_groups(config.reward_groups, term_names(pendulum()), "Pendulum-v0")
    with pytest.raises(ValueError, match="group_weights names effort, no group"):
        read_plan([*words, "--algo.group-weights.effort", "1"])


def test_config_refuses_nonsense():
    with pytest.raises(ValueError, match="group_weights names speed, no group"):
        small(group_weights={"speed": 1.0})
    with pytest.raises(ValueError, match="group_weights of angle must be 0 or more, not -1"):
        small(group_weights={"angle": -1.0})
    with pytest.raises(ValueError, match="^gamma must be"):
        small(gamma=2.0)


def test_rewards_of_groups_by_hand():
    terms = {"a": torch.tensor([[1.0]]), "b": torch.tensor([[20.0]]), "c": torch.tensor([[300.0]])}
    found = group_rewards(terms, {"x": ("c", "a"), "y": ("b",)})
    assert [x.item() for x in found] == [301.0, 20.0]


def test_terms_of_a_roll_out_add_up_to_its_reward_faults_included():
    env = pendulum()
    ppo_learner = learner(env)
    calls = []

    def act(obs, noise):
        head, action = ppo_learner.act(obs, noise)
        calls.append(1)
        if len(calls) == 3:
            action[5] = torch.nan
        return head, action

    rollout, metrics = collect(act, env, ppo_learner.draw_noise())
    assert rollout.truncated[2, 5] and rollout.reward[2, 5] == 0
    assert list(rollout.reward_terms) == ["angle", "speed", "torque"]
    (whole,) = group_rewards(rollout.reward_terms, {"all": ("torque", "speed", "angle")})
    assert torch.equal(whole, rollout.reward)
    for name, values in rollout.reward_terms.items():
        assert values.shape == (8, 8) and values[2, 5] == 0
        assert metrics[f"reward/{name}"] == values.mean().item()


def test_advantages_are_normalised_apart_and_summed_by_weight():
    # Mean 3, deviation sqrt((4 + 0 + 4) / 3) = 1.633: -1.2247, 0, 1.2247; the second the same
    # though a thousand times as large, and reversed; the third has no spread and adds nothing.
    small_ones, large = torch.tensor([[1.0, 3.0, 5.0]]), torch.tensor([[5000.0, 3000.0, 1000.0]])
    equal = torch.full((1, 3), 0.1)
    found = combined([small_ones, large, equal], [1.0, 0.5, 2.0])
    assert found[0].tolist() == pytest.approx([-0.61237, 0.0, 0.61237], abs=1e-4)
    assert combined([small_ones, large], [1.0, 1.0]).abs().max() < 1e-6


def test_the_value_loss_is_the_sum_over_groups():
    env = pendulum()
    ppo_learner = learner(env)
    for i, value in enumerate((1.0, 2.0)):
        critic = getattr(ppo_learner.networks, f"critic_{i}")
        for p in critic.parameters():
            p.data.zero_()
        critic.layers[-1].bias.data.fill_(value)
    x = torch.zeros(4, 3)
    target = torch.tensor([[3.0, 5.0]]).expand(4, 2)
    batch = x, x, torch.zeros(4, 1), torch.zeros(4), torch.zeros(4), target
    _, stats = multi_critic_ppo_loss(ppo_learner.networks, batch, small())
    assert stats[1].item() == pytest.approx((3 - 1) ** 2 + (5 - 2) ** 2)


# Equality with PPO --------------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [1, 2])
def test_one_group_learns_what_ppo_learns(num_groups):
    """To the bit with one group of all terms; the negative control has two."""
    groups = {"all": ("torque", "angle", "speed")} if num_groups == 1 else SMALL.reward_groups
    config = small(reward_groups=groups, total_steps=4 * 64)
    shared = {f.name for f in dataclasses.fields(ppo.PPOConfig)} & {
        f.name for f in dataclasses.fields(config)
    }
    plain = ppo.PPOConfig(**{name: getattr(config, name) for name in shared})
    ours, theirs = [], []
    record = lambda found: lambda policy: (found.append(policy), {"eval/x": 0.0})[1]  # noqa: E731
    run = lambda: Run(eval_every=64)  # noqa: E731
    rows = train(config, pendulum(), run(), record(ours)).rows
    expected = ppo.train(plain, pendulum(), run(), record(theirs)).rows
    same = all(
        torch.equal(x, y)
        for a, b in zip(ours, theirs, strict=True)
        for x, y in zip(a.module.parameters(), b.module.parameters(), strict=True)
    )
    assert same == (num_groups == 1)
    if num_groups == 1:
        assert len(ours) == 4
        for row, other in zip(rows, expected, strict=True):
            shared_keys = [k for k in other if "time/" not in k]
            assert [row[k] for k in shared_keys] == [other[k] for k in shared_keys]


# Update -------------------------------------------------------------------------------------


def test_each_critic_sees_its_own_group(monkeypatch):
    env = pendulum()
    ppo_learner = learner(env)
    seen = []

    def spy(reward, value, *rest):
        seen.append((reward, value))
        return gae(reward, value, *rest)

    monkeypatch.setattr(multi_critic_ppo, "gae", spy)
    rollout = roll(ppo_learner, env)
    value, _ = ppo_learner._values(rollout)
    ppo_learner.update(rollout)
    terms = rollout.reward_terms
    assert torch.equal(seen[0][0], terms["angle"].float())
    assert torch.equal(seen[1][0], (terms["speed"] + terms["torque"]).float())
    for i in range(2):
        assert torch.equal(seen[i][1], value[..., i])


def test_an_update_moves_every_weight_and_the_ratio_starts_at_one():
    env = pendulum()
    ppo_learner = learner(env, small(entropy_coef=0.01))
    before = ppo_learner.state_dict()["networks"]
    ppo_learner.update(roll(ppo_learner, env))
    after = ppo_learner.state_dict()["networks"]
    assert {k.split(".")[0] for k in before} == {"actor", "critic_0", "critic_1", "policy"}
    assert [k for k in before if torch.equal(before[k], after[k])] == []
    ppo_learner = learner(env, small(num_epochs=1, num_minibatches=1, target_kl=None))
    for _ in range(2):
        assert abs(ppo_learner.update(roll(ppo_learner, env))["policy/kl"]) < 1e-6


def test_a_group_of_weight_zero_does_not_move_the_actor():
    """Its critic still learns."""
    actors = []
    for reward in (1.0, -5.0):
        env = pendulum()
        terms = env.reward_terms
        env.reward_terms = lambda action, terms=terms, size=reward: {
            k: v * size if k == "angle" else v for k, v in terms(action).items()
        }
        ppo_learner = learner(env, small(group_weights={"angle": 0.0}, target_kl=None))
        before = ppo_learner.state_dict()["networks"]
        ppo_learner.update(roll(ppo_learner, env))
        after = ppo_learner.state_dict()["networks"]
        assert not torch.equal(
            before["critic_0.layers.0.weight"], after["critic_0.layers.0.weight"]
        )
        actors.append({k: v for k, v in after.items() if k.startswith("actor")})
    assert differing(*actors) == []


def test_resumed_equals_uninterrupted(tmp_path):
    config = small(total_steps=512)
    train(config, pendulum(), Run(tmp_path / "whole", console=False))
    train(config, pendulum(), Run(tmp_path / "parts", stop_after=192, console=False))
    train(config, pendulum(), Run(tmp_path / "parts", resume=True, console=False))
    last = [torch.load(tmp_path / name / "checkpoints/last.pt") for name in ("whole", "parts")]
    a, b = ({k: x[k] for k in ("step", "policy", "learner", "env")} for x in last)
    assert differing(a, b) == []


def test_the_policy_section_is_the_policy():
    env = pendulum()
    ppo_learner = learner(env)
    ppo_learner.update(roll(ppo_learner, env))
    policy = Policy.from_section(ppo_learner.policy_section())
    _, action = ppo_learner.act(env.observe(), torch.zeros(8, 1))
    assert torch.equal(policy(env.observe()), action)


def test_every_logged_key_is_documented(repository: Path):
    page = (repository / "docs/algorithms/multi_critic_ppo.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    table = {row[1].strip().strip("`"): row[2].strip() for row in rows if "/" in row[1]}
    assert table == METRICS


def test_every_declared_key_is_logged():
    rows = train(small(total_steps=2000), pendulum(), Run(), lambda policy: {"eval/x": 0.0}).rows
    logged = set().union(*rows) - {"step"}
    plain = {k for k in METRICS if "<" not in k}
    assert plain - logged == set()
    for group in ("angle", "effort"):
        assert {f"value/explained_variance/{group}", f"value/advantage_std/{group}"} <= logged


# Learning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", [ConstantReward, AgeReward, LastStepReward])
def test_the_exact_values_leave_no_advantage(probe):
    """Two groups: the probe's reward, and three times it."""
    env, gamma = probe(num_envs=4), 0.9
    terms = env.reward_terms
    env.reward_terms = lambda action: {
        "one": next(iter(terms(action).values())),
        "three": 3 * next(iter(terms(action).values())),
    }
    groups = {"one": ("one",), "three": ("three",)}
    config = small(num_steps=24, gamma=gamma, normalize_obs=False, reward_groups=groups)
    ppo_learner = learner(env, config)
    exact = lambda x: probe.value(x, gamma)  # noqa: E731
    ppo_learner.networks.values = lambda x: torch.cat([exact(x), 3 * exact(x)], 1)
    rollout = roll(ppo_learner, env)
    value, next_value = ppo_learner._values(rollout)
    flags = rollout.terminated, rollout.truncated
    assert rollout.ended.any()
    for i, reward in enumerate(group_rewards(rollout.reward_terms, groups)):
        arguments = value[..., i], next_value[..., i], *flags, gamma, 0.95
        assert gae(reward, *arguments).abs().max() < 1e-3
        # negative control: the other group's critic
        other = value[..., 1 - i], next_value[..., 1 - i], *flags, gamma, 0.95
        assert gae(reward, *other).abs().max() > 0.1


def learned_slopes(groups, steps=60_000) -> tuple[float, float]:
    """What the two actions answer to a signal of 1 more; the best are 0.5 and -0.5."""
    env = TwoSizes(num_envs=64)
    config = small(total_steps=steps, num_steps=16, initial_std=0.5, reward_groups=groups)
    ppo_learner = learner(env, config)
    for _ in range(steps // (16 * 64)):
        ppo_learner.update(roll(ppo_learner, env))
    policy = Policy.from_section(ppo_learner.policy_section())
    low, high = policy(torch.tensor([[-0.5], [0.5]])).unbind()
    return tuple((high - low).tolist())


def test_a_small_group_is_heard_beside_a_large_one():
    left, right = learned_slopes({"large": ("left", "luck"), "small": ("right",)})
    assert left == pytest.approx(0.5, abs=0.15) and right == pytest.approx(-0.5, abs=0.15)


def test_one_critic_for_both_does_not_hear_it():
    """Negative control: beside terms a thousand times as large the small one is noise."""
    _, right = learned_slopes({"all": ("left", "luck", "right")})
    assert abs(right + 0.5) > 0.25


def test_follows_a_signal_with_one_group():
    env = FollowSignal(num_envs=64)
    groups = {"all": ("miss",)}
    config = small(total_steps=40_000, num_steps=16, initial_std=0.5, reward_groups=groups)
    run = train(config, env, Run(), lambda policy: {"eval/slope": slope(policy)})
    assert run.rows[-1]["eval/slope"] == pytest.approx(0.5, abs=0.1)
