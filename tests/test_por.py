import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded import episodes, random_data, spec

from ctrl_rl.policy import Policy, load_policy
from ctrl_rl.runs import Run
from offline import por, training
from offline.commands.train import read_plan
from offline.por import POR, PORConfig
from offline.transitions import Transitions
from sim2real.export import export

LOW, HIGH = (-1.0, 0.0), (1.0, 10.0)


def test_value_target_and_loss_by_hand():
    # 1 + 0.9 * min(3, 2) = 2.8; 5 at a terminal step.
    next_value = torch.tensor([[[3.0, 7.0], [2.0, 8.0]]])
    y = por.value_target(torch.tensor([[1.0, 5.0]]), torch.tensor([[0.0, 1.0]]), next_value, 0.9)
    torch.testing.assert_close(y, torch.tensor([[2.8, 5.0]]))
    # u of V_1: 2, -1; of V_2: 0, 3. Expectile 0.7: (0.7*4 + 0.3*1)/2 + (0.7*9)/2 = 4.7, halved.
    value, y = torch.tensor([[[0.0, 1.0], [2.0, -3.0]]]), torch.tensor([[2.0, 0.0]])
    torch.testing.assert_close(por.value_loss(value, y, 0.7), torch.tensor([2.35]))


def test_residual_weights_and_loss_by_hand():
    found = por.residual_weight(torch.tensor([[0.0, 0.5, -1.0, 2.0, 1e6]]), 3.0)
    expected = [1.0, math.exp(1.5), math.exp(-3.0), 100.0, 100.0]
    torch.testing.assert_close(found, torch.tensor([expected]))
    weight, log_prob = torch.tensor([[1.0, 2.0]]), torch.tensor([[-3.0, 0.5]])
    loss = por.residual_loss(weight, log_prob, torch.ones(1, 2))
    torch.testing.assert_close(loss, torch.tensor([1.0]))
    loss = por.residual_loss(weight, log_prob, torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(loss, torch.tensor([3.0]))


@pytest.mark.parametrize("variant", por.VARIANTS)
def test_a_successor_that_was_not_recorded_is_learned_by_v_alone(variant):
    """As in AntMaze, whose files hold no observation after the step into the goal."""
    rng = np.random.default_rng(0)
    obs, action = rng.normal(size=(8, 3)), rng.uniform(-1, 1, (6, 2))
    obs[3] = obs[2]  # what readers put there
    recorded = episodes(obs, action, np.ones(6), [3, 3], [True, True])
    recorded = dataclasses.replace(recorded, final_known=np.array([False, True]))
    data = Transitions.from_episodes(recorded)
    config = PORConfig(total_steps=2, batch_size=6, hidden=(8,), execute_hidden=(8,),
                       variant=variant, alpha=0.0, compile="off")  # fmt: skip
    made = POR(config, data, spec(3, (-1.0, -1.0), (1.0, 1.0)))
    batch = data.batch(data.index[None])
    known = torch.tensor([[True, True, False, True, True, True]])
    found = por.known_successors(batch.obs, batch.next_obs, batch.terminated)
    assert torch.equal(found, known.float())
    with torch.no_grad():
        both = torch.cat([batch.obs, batch.next_obs], 2)
        execute = made.execute.log_prob(both, batch.action)[known].mean()
        states = made.guide if variant == "residual" else made.behavior
        guide = states.log_prob(batch.obs, batch.next_obs)[known].mean()  # alpha 0: all weigh 1
    found = dict(zip(por.STATS, made.update(batch)[:, 0].tolist(), strict=True))
    if variant == "residual":
        assert found["loss/guide"] == pytest.approx(-float(guide), rel=1e-5)
    else:  # the first update is the behaviour guide's
        assert found["loss/behavior"] == pytest.approx(-float(guide), rel=1e-5)
        found = dict(zip(por.STATS, made.update(batch)[:, 0].tolist(), strict=True))
    assert found["loss/execute"] == pytest.approx(-float(execute), rel=1e-5)


def test_value_gradient_loss_by_hand_and_lambda_is_a_constant():
    # mean |V| = 3, so lambda = 50 / 3; -50/3 * 1 - (-0.5).
    value = torch.tensor([[4.0, -2.0]], requires_grad=True)
    weight = por.value_gradient_weight(value, 50.0)
    loss = por.value_gradient_loss(weight, value, torch.tensor([[-2.0, 1.0]]))
    torch.testing.assert_close(loss, torch.tensor([-50 / 3 + 0.5]))
    (slope,) = torch.autograd.grad(loss.sum(), value)
    torch.testing.assert_close(slope, torch.full((1, 2), -50 / 3 / 2))


def test_log_density_by_hand():
    draws = [torch.Generator().manual_seed(i) for i in range(2)]
    made = por.StackedNormal((3, 8, 2), "relu", draws)
    with torch.no_grad():
        made.log_std[1, 0] = torch.tensor([math.log(0.5), -9.0])  # the latter is held at -5
    x = torch.randn(2, 5, 3, generator=draws[0])
    y = made(x) + torch.tensor([0.5, 1.0])
    normal = torch.distributions.Normal
    expected = normal(0, torch.tensor([[1.0, 1.0], [0.5, math.exp(-5)]])).log_prob(
        torch.tensor([0.5, 1.0])).sum(1)  # fmt: skip
    found = made.log_prob(x, y).mean(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", por.VARIANTS)
def test_an_update_is_the_sources_equations_in_its_order(variant):
    """y of the old target; then V; the guide by the new V and the old y; pi by the true s'."""
    data = random_data(low=LOW, high=HIGH)
    config = PORConfig(
        total_steps=8, batch_size=16, hidden=(8,), execute_hidden=(12,), compile="off", alpha=2.0,
        expectile=0.9, gamma=0.8, polyak=0.25, variant=variant, behavior_share=0.25,
        value_learning_rate=0.05,
    )  # fmt: skip
    made = POR(config, data, spec(3, LOW, HIGH), (4,))
    with torch.no_grad():  # so that target and V differ
        for p in made.target.parameters():
            p.mul_(1.1)
    batch = data.batch(data.draw(16, [torch.Generator().manual_seed(0)]))
    assert bool(batch.terminated.any())
    if variant == "value_gradient":
        for _ in range(2):
            before = made.state_dict()
            loss = -made.behavior.log_prob(batch.obs, batch.next_obs).mean().detach()
            found = dict(zip(por.STATS, made.update(batch)[:, 0].tolist(), strict=True))
            assert found["loss/behavior"] == pytest.approx(float(loss), rel=1e-4)
            assert found["loss/value"] == 0
            for name in ("value", "target", "guide", "execute"):
                for key, value in made.state_dict()[name].items():
                    assert torch.equal(value, before[name][key])
    with torch.no_grad():
        next_v = made.target(batch.next_obs)[0, ..., 0].amin(0)
        y = batch.reward[0] + 0.8 * (1 - batch.terminated[0]) * next_v
        u = y - made.value(batch.obs)[0, ..., 0]
        old_target = [p.clone() for p in made.target.parameters()]
        log_prob = made.guide.log_prob(batch.obs, batch.next_obs)[0]
        noise = torch.randn(1, 16, 3, generator=por.stream(4, "noise"))
        drawn = made.guide(batch.obs) + made.guide.std() * noise
        scaled = (batch.action - torch.tensor([0.0, 5.0])) / torch.tensor([1.0, 5.0])
        both = torch.cat([batch.obs, batch.next_obs], 2)
        execute = -made.execute.log_prob(both, scaled).mean()
    found = dict(zip(por.STATS, made.update(batch)[:, 0].tolist(), strict=True))
    side = torch.where(u < 0, 0.1, 0.9)
    assert found["loss/value"] == pytest.approx(float((side * u**2).mean(1).sum() / 2), rel=1e-4)
    for old, source, target in zip(
        old_target, made.value.parameters(), made.target.parameters(), strict=True
    ):
        torch.testing.assert_close(target, 0.75 * old + 0.25 * source)
    with torch.no_grad():  # V of after its step, which moved it by much
        if variant == "residual":
            new = made.value(batch.obs)[0, ..., 0].amin(0)
            assert float((u.amax(0) - (y - new)).abs().mean()) > 0.05
            weight = (2 * (y - new)).exp().clamp(max=100)
            expected, size = -(weight * log_prob).mean(), weight.mean()
        else:
            new = made.value(drawn)[0, ..., 0].amin(0)
            size = 2 / new.abs().mean()
            expected = -size * new.mean() - made.behavior.log_prob(batch.obs, drawn).mean()
    assert found["loss/guide"] == pytest.approx(float(expected), rel=1e-4)
    assert found["guide/weight"] == pytest.approx(float(size), rel=1e-4)
    assert found["loss/execute"] == pytest.approx(float(execute), rel=1e-4)


def test_only_the_step_sizes_of_the_policies_fall_and_only_after_the_behavior_guides():
    config = PORConfig(total_steps=200, batch_size=8, hidden=(8,), execute_hidden=(8,),
                       compile="off", variant="value_gradient")  # fmt: skip
    data = random_data()
    made = POR(config, data, spec(3, (-1.0, -1.0), (1.0, 1.0)))
    batch = data.batch(data.draw(8, [torch.Generator().manual_seed(0)]))
    rates = []
    for _ in range(200):
        made.update(batch)
        rates.append((float(made.guide_step.learning_rate), float(made.execute_step.learning_rate)))
    assert rates[100] == pytest.approx((1e-3, 1e-3)) and rates[150] == pytest.approx((5e-4, 5e-4))
    last = 1e-3 / 2 * (1 + math.cos(0.99 * math.pi))
    assert rates[199] == pytest.approx((last, last), rel=1e-4)
    assert float(made.value_step.learning_rate) == pytest.approx(1e-4)
    assert float(made.behavior_step.learning_rate) == pytest.approx(1e-4)


def test_the_policy_is_guide_then_execute_with_statistics_and_units(tmp_path):
    data = random_data(normalize_obs=True, offset=500.0, scale=100.0, low=LOW, high=HIGH)
    config = PORConfig(total_steps=30, batch_size=16, hidden=(8, 7), execute_hidden=(9, 6, 5),
                       compile="off", learning_rate=1e-2)  # fmt: skip
    made = POR(config, data, spec(3, LOW, HIGH), (0, 1))
    training.fit(made, data)
    raw = 500 + 100 * torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    assert data.normalizer is not None
    x = data.normalizer(raw)
    policy = Policy.from_section(made.policy_section(1))
    both = x.expand(2, -1, -1)
    mean = made.execute(torch.cat([both, made.guide(both)], 2))[1]
    expected = torch.tensor([0.0, 5.0]) + torch.tensor([1.0, 5.0]) * mean
    torch.testing.assert_close(
        policy(raw), expected.clamp(torch.tensor(LOW), torch.tensor(HIGH)), rtol=1e-4, atol=1e-4
    )
    # negative control: it does look through the guide
    section = made.policy_section(1)
    section["weights"]["guide.layers.2.bias"] += 1.0
    assert (Policy.from_section(section)(raw) - policy(raw)).abs().max() > 0.01
    noise = torch.Generator().manual_seed(0)
    far = policy.sample(raw[:1].expand(4000, -1), noise) - policy(raw[:1])
    std = made.execute.std()[1, 0] * torch.tensor([1.0, 5.0])
    inside = far[:, 1].abs() < 2  # away from the bounds
    assert 0.2 < float(far[inside, 1].std()) < float(std[1].detach())

    path = tmp_path / "policy.onnx"
    export(policy, path, obs=raw)
    torch.testing.assert_close(load_policy(path)(raw), policy(raw), rtol=1e-5, atol=1e-5)


def test_steep_policies_are_exported_too(tmp_path):
    """Where actions answer to small differences of observations, float32 is not enough."""
    made = POR(PORConfig(hidden=(64, 64), execute_hidden=(64, 64), compile="off"), random_data(),
               spec(3, (-1.0, -1.0), (1.0, 1.0)))  # fmt: skip
    section, raw = made.policy_section(0), 300 + 0.01 * torch.randn(200, 3)
    section["weights"]["execute.layers.2.bias"] -= Policy(section).module.net(raw)[0]
    steep = Policy.from_section(section)
    export(steep, tmp_path / "policy.onnx", obs=raw)
    torch.testing.assert_close(load_policy(tmp_path / "policy.onnx")(raw), steep(raw))
    exact = steep(raw)
    steep.module.net.float()  # the negative control
    assert float((steep(raw) - exact).abs().max()) > 1e-5


def test_damaged_guided_policies_are_refused():
    data = random_data()
    made = POR(PORConfig(hidden=(8,), execute_hidden=(9,), compile="off"), data,
               spec(3, (-1.0, -1.0), (1.0, 1.0)))  # fmt: skip
    good = made.policy_section(0)
    for change, message in (
        ({"guide_hidden": [7]}, "do not fit"),
        ({"bound": "tanh"}, "cannot have bound"),
        ({"weights": {k: v for k, v in good["weights"].items() if "guide" not in k}}, "guide"),
    ):
        with pytest.raises(ValueError, match=message):
            Policy.from_section(good | change)


# Settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("halfcheetah-medium-v2", ("locomotion", "residual", 0.5, 3.0, 1e-3, True)),
        ("walker2d-medium-expert-v2", ("locomotion", "residual", 0.5, 3.0, 1e-3, True)),
        ("hopper-medium-v2", ("locomotion", "value_gradient", 0.7, 50.0, 1e-3, False)),
        ("hopper-medium-replay-v2", ("locomotion", "value_gradient", 0.7, 50.0, 1e-3, False)),
        ("hopper-medium-expert-v2", ("locomotion", "value_gradient", 0.7, 5.0, 1e-3, True)),
        ("antmaze-umaze-diverse-v2", ("antmaze", "residual", 0.9, 10.0, 1e-3, False)),
        ("antmaze-large-play-v2", ("antmaze", "residual", 0.9, 10.0, 1e-4, False)),
        ("our-own-data", ("raw", "residual", 0.5, 3.0, 1e-3, True)),
    ],
)
def test_settings_of_each_data_set_are_the_sources(dataset, expected, our_names):
    if dataset == "hopper-medium-v2":  # as D4RL names the file
        dataset = "hopper_medium-v2.hdf5"
        Path(dataset).touch()
    plan = read_plan(["--algo", "por", "--dataset", dataset])
    c = plan.algo_config
    found = c.variant, c.expectile, c.alpha, c.learning_rate, c.layer_norm
    assert (plan.flags.reward, *found) == expected and not plan.flags.normalize_obs
    assert c.total_steps - c.behavior_steps == 1_000_000 and c.behavior_steps in (0, 1_000_000)
    assert c.execute_hidden == (1024, 1024) and c.hidden == (256, 256)


@pytest.mark.parametrize(
    "wrong",
    [
        {"variant": "q"}, {"expectile": 1.0}, {"alpha": -1.0}, {"behavior_share": 1.0},
        {"execute_hidden": ()}, {"value_learning_rate": 0.0},
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
        PORConfig(**wrong)


def test_a_narrower_execute_policy_is_said_in_the_log_and_the_record(tmp_path, capsys):
    data = random_data()
    for widths, words in (((256, 256), "256-256 wide, the source's 1024-1024"), ((1024,), None)):
        config = PORConfig(total_steps=1, batch_size=2, hidden=(4,), execute_hidden=widths,
                           compile="off")  # fmt: skip
        folder = tmp_path / str(len(widths))
        por.train(config, data, spec(3, (-1.0, -1.0), (1.0, 1.0)), (0,), Run(folder, console=False))
        said = "\n".join(por_record(folder)["warnings"])
        assert (words in said) if words else said == ""
        assert (
            (words in capsys.readouterr().out) if words else "wide" not in capsys.readouterr().out
        )
    assert data.report["warnings"] == []


def por_record(folder):
    from ctrl_rl.run_folder import read_config

    return read_config(folder)["data"]


# Another task with the same execute policy --------------------------------------------------


def kept(folder, data, seeds=(0, 1), box=None, **changes):
    small = PORConfig(total_steps=20, batch_size=16, hidden=(8,), execute_hidden=(9,),
                      compile="off", execute_from=str(folder))  # fmt: skip
    config = dataclasses.replace(small, **changes)
    return POR(config, data, spec(3, LOW, HIGH) if box is None else box, seeds), config


@pytest.fixture
def first(tmp_path):
    data = random_data(low=LOW, high=HIGH)
    learner, config = kept("", data)
    run = Run(tmp_path / "first", console=False)
    training.fit(learner, data, run)
    return tmp_path / "first", data, learner


def test_a_run_goes_on_without_the_run_that_its_execute_policy_is_from(first, tmp_path):
    folder, data, learner = first
    _, config = kept(folder, data)
    box = spec(3, LOW, HIGH)
    por.train(config, data, box, (0, 1), Run(tmp_path / "x", console=False, stop_after=10))
    folder.rename(tmp_path / "moved")
    run = Run(tmp_path / "x", console=False, resume=True)
    por.train(config, data, box, (0, 1), run)
    assert run.rows[-1]["step"] == 20
    policy = load_policy(tmp_path / "x" / "s1", "last").section()["weights"]
    torch.testing.assert_close(
        policy["execute.layers.0.weight"], learner.execute.net.weights_of(1)["layers.0.weight"]
    )
    with pytest.raises(ValueError, match="first"):  # a new run needs it
        por.train(config, data, box, (0, 1), Run(tmp_path / "y", console=False))


@pytest.mark.parametrize("variant", por.VARIANTS)
def test_the_execute_policy_of_a_run_is_kept_for_each_seed(first, variant):
    folder, data, learner = first
    again, _ = kept(folder, data, variant=variant)
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(again.execute(x), learner.execute(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again.execute.log_std, learner.execute.log_std)
    assert not torch.allclose(again.guide.net.layers[0].weight, learner.guide.net.layers[0].weight)
    before = again.state_dict()
    run = training.fit(again, data)
    after = again.state_dict()
    assert all(torch.equal(before["execute"][k], after["execute"][k]) for k in before["execute"])
    assert not any(torch.equal(before["guide"][k], after["guide"][k]) for k in before["guide"])
    assert run.rows[-1]["gradient/execute"] == 0 and run.rows[-1]["loss/execute"] != 0
    alone, _ = kept(folder / "s1", data, seeds=(5,))
    torch.testing.assert_close(alone.execute(x[1:]), learner.execute(x)[1:], rtol=1e-5, atol=1e-5)


def test_an_execute_policy_that_does_not_fit_is_refused(first, tmp_path):
    folder, data, _ = first
    with pytest.raises(ValueError, match=r"execute_from .*layer 0 .* \(6, 9\), not \(6, 12\)"):
        kept(folder, data, execute_hidden=(12,))
    renamed = spec(3, LOW, HIGH)
    (term,) = renamed.obs["actor"]
    renamed.obs["actor"] = (dataclasses.replace(term, name="position"),)
    normalized = random_data(low=LOW, high=HIGH, normalize_obs=True)
    with pytest.raises(ValueError, match="other statistics"):
        kept(folder, normalized)
    for changes, message in (
        ({"activation": "tanh"}, "activation is relu, not tanh; use --algo.activation relu"),
        ({"box": spec(3, LOW, (1.0, 9.0))}, "trained on .* whose action is not that"),
        ({"box": renamed}, "observes obs .* has position"),
    ):
        with pytest.raises(ValueError, match=f"^execute_from .*{message}"):
            kept(folder, data, **changes)
    with pytest.raises(ValueError, match="nowhere"):
        kept(tmp_path / "nowhere", data)
    from offline.td3_bc import TD3BC, TD3BCConfig

    other = TD3BC(TD3BCConfig(total_steps=1, hidden=(8,), compile="off"), data, spec(3, LOW, HIGH))
    training.fit(other, data, Run(tmp_path / "td3", console=False))
    with pytest.raises(ValueError, match="no execute policy"):
        kept(tmp_path / "td3", data, seeds=(0,))


# Known answers ------------------------------------------------------------------------------

GAMMA, CELLS = 0.9, 7


def line() -> Transitions:
    """Seven cells; action a moves sign(a) cells, or none; +1 for stepping onto the last cell.

    Episodes start everywhere and last until the goal, or are cut after six steps.
    """
    draw = np.random.default_rng(0)
    obs, action, reward, lengths, ended = [], [], [], [], []
    for _ in range(400):
        cell, rows = int(draw.integers(CELLS - 1)), 0
        obs.append(cell)
        while rows < 6 and cell < CELLS - 1:
            a = float(draw.uniform(-1, 1))
            cell = min(max(cell + (1 if a > 0 else -1), 0), CELLS - 1)
            action.append(a)
            reward.append(float(cell == CELLS - 1))
            obs.append(cell)
            rows += 1
        lengths.append(rows)
        ended.append(cell == CELLS - 1)
    ended = np.asarray(ended)
    found = episodes(one_hot(obs), np.array(action)[:, None], reward, lengths, ended, ~ended)
    return Transitions.from_episodes(found, timeouts="keep")


def one_hot(cells):
    return np.eye(CELLS)[np.asarray(cells, int)]


def learned(**changes) -> tuple[POR, np.ndarray, Policy]:
    config = PORConfig(**{
        "total_steps": 1200, "batch_size": 128, "hidden": (32,), "execute_hidden": (32,),
        "gamma": GAMMA, "polyak": 0.05, "learning_rate": 3e-3, "value_learning_rate": 3e-3,
        "expectile": 0.99, "alpha": 10.0, "layer_norm": False, "compile": "off"} | changes
    )  # fmt: skip
    data = line()
    made = POR(config, data, spec(CELLS))
    training.fit(made, data)
    eye = torch.eye(CELLS)[: CELLS - 1]
    value = made.value(eye[None])[0, ..., 0].amin(0).detach().numpy()
    return made, value, Policy.from_section(made.policy_section(0))


OPTIMUM = np.array([GAMMA**k for k in range(CELLS - 2, -1, -1)])


def test_on_a_deterministic_line_value_and_policy_are_the_optimal_ones():
    """The best successor has V = gamma^(steps left - 1); the guide names the cell to the right."""
    made, value, policy = learned()
    np.testing.assert_allclose(value, OPTIMUM, rtol=0.05)
    eye = torch.eye(CELLS)[: CELLS - 1]
    named = made.guide(eye[None])[0].argmax(1)
    assert named.tolist() == [1, 2, 3, 4, 5, 6]
    assert bool((policy(eye) > 0).all())


def test_without_weights_and_at_the_mean_it_is_the_behaviour():
    """The negative control of the same test: nothing is known to be better."""
    _, value, policy = learned(expectile=0.5, alpha=0.0)
    assert (value[:-1] < 0.9 * OPTIMUM[:-1]).all()
    middle = policy(torch.eye(CELLS)[2:5])
    assert float(middle.abs().max()) < 0.35


def drift() -> Transitions:
    """s' = s + a / 2 with a spread around 0; arriving at s' pays s' + 1, once."""
    draw = np.random.default_rng(1)
    start, action = draw.uniform(-0.5, 0.5, (2, 1000, 1))
    after = start + action / 2
    # Two steps: the second ends the episode and pays where it stands.
    obs = np.stack([start, after, after], 1).reshape(-1, 1)
    moves = np.stack([action, np.zeros_like(action)], 1).reshape(-1, 1)
    reward = np.stack([np.zeros_like(after), after + 1], 1).reshape(-1)
    count = np.full(1000, 2)
    return Transitions.from_episodes(episodes(obs, moves, reward, count, np.ones(1000)))


@pytest.mark.parametrize(("alpha", "climbs"), [(5.0, True), (0.0, False)])
def test_the_value_gradient_draws_the_guide_towards_higher_values(alpha, climbs):
    config = PORConfig(
        total_steps=1200, batch_size=128, hidden=(32,), execute_hidden=(32,), gamma=1.0,
        polyak=0.05, learning_rate=3e-3, value_learning_rate=3e-3, variant="value_gradient",
        alpha=alpha, layer_norm=False, compile="off",
    )  # fmt: skip
    data = drift()
    made = POR(config, data, spec(1))
    training.fit(made, data)
    x = torch.linspace(-0.3, 0.3, 7)[None, :, None]
    moved = float((made.guide(x) - made.behavior(x)).detach().mean())
    assert (moved > 0.1) if climbs else abs(moved) < 0.06
