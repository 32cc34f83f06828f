import dataclasses

import numpy as np
import pytest
import torch
from recorded import episodes, random_data, spec

from ctrl_rl.policy import load_policy
from ctrl_rl.runs import Run
from offline import decision_transformer as dt
from offline import training
from offline.commands.train import read_plan
from offline.decision_transformer import (
    DecisionTransformer,
    DecisionTransformerConfig,
    ReturnPolicy,
    Sequences,
)
from offline.transitions import Transitions
from sim2real.export import export

SMALL = {"context": 3, "width": 8, "layers": 2, "heads": 2, "warmup_steps": 0, "batch_size": 16}
LOW, HIGH = (-1.0, 0.0), (1.0, 10.0)


def recorded(reward="raw"):
    """Episodes of 4 steps (rewards 0 to 3) and 2 steps (4 and 5), the first one cut."""
    found = episodes(
        np.arange(8.0)[:, None], np.arange(6.0)[:, None] / 10, np.arange(6.0), [4, 2],
        [False, True], [True, False],
    )  # fmt: skip
    return Sequences(Transitions.from_episodes(found, reward=reward), 3)


@pytest.mark.parametrize("reward", ["raw", "antmaze"])
def test_sequences_by_hand(reward):
    """O-21, and no sequence spans two episodes. Returns to go are those of the file."""
    data = recorded(reward)
    assert data.index.tolist() == [0, 1, 2, 3, 5, 6]
    assert data.report["transitions"] == 6 and data.report["dropped_at_timeouts"] == 0
    batch = data.batch(torch.tensor([[0, 2, 3, 5, 6]]))
    assert batch.known[0].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]]
    known = batch.known[0].bool()
    for found, expected in (
        (batch.obs[0, ..., 0], [0, 1, 2, 2, 3, 3, 5, 6, 6]),
        (10 * batch.action[0, ..., 0], [0, 1, 2, 2, 3, 3, 4, 5, 5]),
        (batch.to_go[0], [6, 6, 5, 5, 3, 3, 9, 5, 5]),
        (batch.step[0], [0, 1, 2, 2, 3, 3, 0, 1, 1]),
    ):
        assert found[known].tolist() == pytest.approx(expected)
    assert data.largest_return == 9


def test_loss_by_hand_leaves_out_what_is_behind_the_end():
    # Errors 1 and 3 in one of two dimensions: (0.5 + 4.5) / 2; the third step is not known.
    action = torch.tensor([[[[1.0, 0.0], [0.0, 3.0], [9.0, 9.0]]]])
    known = torch.tensor([[[1.0, 1.0, 0.0]]])
    found = dt.sequence_loss(action, torch.zeros(1, 1, 3, 2), known)
    torch.testing.assert_close(found, torch.tensor([2.5]))


def transformer(seeds=(0,), **changes):
    config = DecisionTransformerConfig(**SMALL | changes)
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    net = dt.StackedTransformer(4, 2, 10, config, draws)
    with torch.no_grad():
        for p in net.parameters():  # so that every part counts
            p.add_(0.3 * torch.randn(p.shape, generator=draws[0]))
    return net


def inputs(seeds=1, steps=3):
    draw = torch.Generator().manual_seed(9)
    random = lambda *shape: torch.randn(seeds, 5, steps, *shape, generator=draw)  # noqa: E731
    step = torch.arange(steps).expand(seeds, 5, steps)
    return [random(4), random(2), random(), step]


def test_an_answer_depends_on_what_was_before_it_alone():
    net, given = transformer(), inputs()
    plain = net(*given)
    for place, name in enumerate(("obs", "action", "to_go", "step")):
        for step in range(3):
            other = [x.clone() for x in given]
            other[place][:, :, step] += 1
            moved = (net(*other) - plain).abs().amax((0, 1, 3)) > 1e-6
            first = step + (name == "action")  # its own action an answer must not see
            assert moved.tolist() == [t >= first for t in range(3)], (name, step)


def test_transformers_side_by_side_are_the_single_ones():
    both, given = transformer((5, 6)), inputs(2)
    found = both(*given)
    for seed in range(2):
        alone = transformer()
        own = {k: v[seed : seed + 1] for k, v in both.state_dict().items()}
        alone.load_state_dict(own)
        mine = alone(*(x[seed : seed + 1] for x in given))
        torch.testing.assert_close(mine[0], found[seed])


def test_attention_by_hand():
    """One block, one head, against the sums written out."""
    net, (obs, action, to_go, step) = transformer(layers=1, heads=1), inputs()
    w = {k: v[0] for k, v in net.state_dict().items()}
    norm = lambda n, x: (  # noqa: E731
        (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        * w[f"gain.{n}"] + w[f"shift.{n}"]
    )  # fmt: skip
    linear = lambda n, x: x @ w[f"weight.{n}"] + w[f"bias.{n}"]  # noqa: E731
    tokens = []
    for t in range(3):
        age = w["age"][t]
        tokens += [linear("to_go", to_go[0, 0, t].view(1, 1)) + age,
                   linear("obs", obs[0, 0, t][None]) + age,
                   linear("action", action[0, 0, t][None]) + age]  # fmt: skip
    x = norm("tokens", torch.cat(tokens))
    query, key, value = (norm("a0", x) @ w["weight.attend0"]).chunk(3, 1)
    rows = []
    for i in range(9):
        share = (key[: i + 1] @ query[i] / 8**0.5).softmax(0)
        rows.append(share @ value[: i + 1])
    x = x + linear("merge0", torch.stack(rows))
    x = x + linear("narrow0", torch.nn.functional.gelu(linear("widen0", norm("b0", x))))
    expected = torch.tanh(linear("head", norm("out", x)[1::3]))
    torch.testing.assert_close(net(obs, action, to_go, step)[0, 0], expected)


def test_the_step_size_rises_to_its_own():
    data = Sequences(random_data(), 3)
    config = DecisionTransformerConfig(**SMALL | {"warmup_steps": 10})
    made = DecisionTransformer(config, data, spec(3, (-1.0, -1.0), (1.0, 1.0)))
    batch = data.batch(data.draw(4, [torch.Generator().manual_seed(0)]))
    rates = []
    for _ in range(12):
        made.update(batch)
        rates.append(float(made.net_step.learning_rate))
    assert rates == pytest.approx([1e-5 * i for i in range(1, 11)] + [1e-4, 1e-4])


# Playing ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    data = Sequences(random_data(normalize_obs=True, low=LOW, high=HIGH, offset=5.0), 3)
    config = DecisionTransformerConfig(**SMALL | {"total_steps": 30, "learning_rate": 1e-2})
    learner = DecisionTransformer(config, data, spec(3, LOW, HIGH), (0, 1))
    training.fit(learner, data)
    return learner


def by_hand(made, obs, rewards, actions):
    """The action at the end of one episode, from its whole history."""
    normalizer = made.normalizer
    k = min(3, len(obs))
    to_go = made.target - np.cumsum([0.0, *rewards])
    scaled = [(a - made.middle) / made.half_range for a in actions]
    given = (
        normalizer(torch.stack(obs))[-k:],
        torch.stack([*scaled, torch.zeros(2)])[-k:],
        torch.tensor(to_go, dtype=torch.float32)[-k:] / 1000,
        torch.arange(len(obs))[-k:],
    )
    answer = made.net(*(x.expand(2, 1, *x.shape) for x in given))[1, 0, -1]
    return (made.middle + made.half_range * answer).detach()


def test_played_it_reads_the_last_steps_of_each_row_and_the_return_that_is_left(made):
    """Row 1 begins anew after step 2, row 0 goes on, beyond the context of 3."""
    policy = ReturnPolicy.from_section(made.policy_section(1))
    draw = torch.Generator().manual_seed(0)
    history = [([], [], []), ([], [], [])]
    for step in range(7):
        obs = 5 + torch.randn(2, 3, generator=draw)
        action = policy(obs)
        for row, (seen, rewards, actions) in enumerate(history):
            seen.append(obs[row])
            expected = by_hand(made, seen, rewards, actions)
            torch.testing.assert_close(action[row], expected, rtol=1e-4, atol=1e-4)
            actions.append(action[row])
        reward = 100 * torch.randn(2, generator=draw)
        policy.receive(reward)
        for row in range(2):
            history[row][1].append(float(reward[row]))
        if step == 2:
            policy.reset(torch.tensor([1]))
            history[1] = ([], [], [])
    policy.reset()
    torch.testing.assert_close(
        policy(obs)[0], by_hand(made, [obs[0]], [], []), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ValueError, match="remembers 2 rows, the observation has 3"):
        policy(torch.zeros(3, 3))


def test_a_run_is_loaded_and_damage_is_named(made, tmp_path, monkeypatch):
    from ctrl_rl import registry
    from offline.registry import POLICIES

    names = registry.names
    monkeypatch.setattr(
        registry, "names", lambda g: {**names(g), **(POLICIES if g == "policies" else {})}
    )
    data = random_data(low=LOW, high=HIGH)
    config = DecisionTransformerConfig(**SMALL | {"total_steps": 2, "target_return": 7.0})
    dt.train(config, data, spec(3, LOW, HIGH), (3,), Run(tmp_path / "r", console=False))
    policy = load_policy(tmp_path / "r")
    assert isinstance(policy, ReturnPolicy) and policy.target_return == 7.0
    assert policy(torch.zeros(2, 3)).shape == (2, 2)
    with pytest.raises(ValueError, match="a decision_transformer policy is played .* not exported"):
        export(policy, tmp_path / "policy.onnx", obs=torch.zeros(4, 3))
    section = made.policy_section(0)
    weights = section["weights"]
    for change, message in (
        ({"kind": "gaussian_mlp"}, "no decision_transformer"),
        ({"weights": weights | {"age": weights["age"][:, :2]}}, "do not fit"),
        ({"weights": weights | {"age": weights["age"] * float("nan")}}, "age is not finite"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ReturnPolicy(section | change)
    del section["normalizer"]
    with pytest.raises(ValueError, match="lacks normalizer"):
        ReturnPolicy(section)


@pytest.mark.parametrize(("target", "expected"), [(1.0, 0.5), (0.0, -0.5)])
def test_it_does_what_was_done_where_the_return_was_the_one_asked_for(target, expected):
    """Action 0.5 paid 1, action -0.5 paid 0."""
    draw = np.random.default_rng(0)
    paid = draw.integers(0, 2, 200).astype(float)
    action = (paid - 0.5)[:, None]
    found = episodes(np.zeros((400, 1)), action, paid, np.ones(200), np.ones(200))
    data = Sequences(Transitions.from_episodes(found), 2)
    config = DecisionTransformerConfig(
        total_steps=150, batch_size=64, context=2, width=16, layers=1, warmup_steps=10,
        learning_rate=1e-2, return_scale=1.0, target_return=target,
    )  # fmt: skip
    made = DecisionTransformer(config, data, spec(1))
    training.fit(made, data)
    policy = ReturnPolicy(made.policy_section(0))
    assert float(policy(torch.zeros(1, 1))) == pytest.approx(expected, abs=0.1)


def test_settings_of_each_data_set(our_names):
    for name, expected in {
        "hopper-medium-v2": (3600.0, 4096, 8e-4, 1000.0, True),
        "antmaze-umaze-v2": (1.0, 64, 1e-4, 1.0, True),
        "our-own": (None, 64, 1e-4, 1000.0, False),
    }.items():
        plan = read_plan(["--algo", "decision_transformer", "--dataset", name])
        c = plan.algo_config
        found = c.target_return, c.batch_size, c.learning_rate, c.return_scale
        assert (*found, plan.flags.normalize_obs) == expected


def test_a_wrong_setting_is_named():
    good = DecisionTransformerConfig()
    for name, bad in {
        "context": 0, "heads": 3, "warmup_steps": -1, "return_scale": 0.0,
        "target_return": float("nan"),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name} must be"):
            dataclasses.replace(good, **{name: bad})
