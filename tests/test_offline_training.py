"""The loop of offline learners, the folders it writes, and networks side by side."""

import csv
import json
import signal

import numpy as np
import pytest
import torch
from recorded import episodes, random_data, spec
from torch import nn

from ctrl_rl.checkpoints import load_checkpoint
from ctrl_rl.compiled import Diverged, MinibatchStep
from ctrl_rl.networks import MLP, QEnsemble
from ctrl_rl.policy import load_policy
from ctrl_rl.report import write_report
from ctrl_rl.run_folder import find_checkpoint, read_config, read_metrics
from ctrl_rl.runs import Run
from offline import training
from offline.networks import StackedMLP, StackedQ, normal, stream, uniform
from offline.td3_bc import TD3BC, TD3BCConfig
from offline.transitions import Transitions

SPEC = spec(3, (-1.0, -1.0), (1.0, 1.0))
SMALL = TD3BCConfig(total_steps=40, batch_size=16, hidden=(8, 8), compile="off")


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(training, "LOG_EVERY", 10)
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)


@pytest.fixture(scope="module")
def data():
    data = random_data()
    data.report |= {"dataset": "noise-v0", "sha256": "ab", "file": "/here"}
    return data


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


# Networks -----------------------------------------------------------------------------------


def test_stacked_networks_are_the_single_ones_side_by_side():
    stacked = StackedMLP(2, (3, 8, 8, 1), "relu", generators(5, 6))
    x = normal(generators(1, 2), 4, 3)
    out = stacked(x)
    assert out.shape == (2, 2, 4, 1)
    for s, seed in enumerate((5, 6)):
        own = torch.Generator().manual_seed(seed)
        for e in range(2):
            single = MLP((3, 8, 8, 1), "relu", generator=own)
            torch.testing.assert_close(out[s, e], single(x[s]))
            named = stacked.weights_of(s, e)
            assert list(named) == list(single.state_dict())
            assert all(torch.equal(named[k], v) for k, v in single.state_dict().items())
    assert torch.equal(stacked(x, members=1)[:, 0], out[:, 0])
    apart = torch.stack([x, 2 * x], 1)
    torch.testing.assert_close(stacked(apart)[:, 0], out[:, 0])
    torch.testing.assert_close(stacked(apart)[:, 1], stacked(2 * x)[:, 1])


def test_layer_norm_stands_before_each_activation():
    plain, normed = (StackedMLP(1, (3, 8, 1), "relu", generators(0), 1.0, n) for n in (False, True))
    x = normal(generators(1), 5, 3)
    hidden = x[0] @ plain.layers[0].weight[0]
    z = (hidden - hidden.mean(1, keepdim=True)) / (hidden.var(1, correction=0, keepdim=True) + 1e-5
                                                   ).sqrt()  # fmt: skip
    torch.testing.assert_close(normed(x)[0, 0], z.relu() @ plain.layers[1].weight[0])
    assert not torch.allclose(normed(x), plain(x), atol=1e-2)


def test_action_values_read_actions_scaled_per_dimension():
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 10.0])
    stacked = StackedQ(2, 3, low, high, (8,), "relu", generators(4))
    single = QEnsemble(2, 3, low, high, (8,), "relu", torch.Generator().manual_seed(4))
    obs, action = torch.randn(1, 6, 3), torch.rand(1, 6, 2) * (high - low) + low
    torch.testing.assert_close(stacked(obs, action)[0], single(obs[0], action[0]))


def test_streams_differ_by_seed_and_by_name():
    first = {(s, n): stream(s, n).initial_seed() for s in range(50) for n in ("weights", "noise")}
    assert len(set(first.values())) == 100
    assert stream(3, "noise").initial_seed() == first[3, "noise"]
    draws = [stream(s, "noise") for s in (0, 1)]
    x = normal(draws, 1000)
    assert abs(float((x[0] * x[1]).mean())) < 0.15
    u = uniform([stream(0, "noise")], 1000)
    assert 0 <= float(u.min()) < 0.01 and 0.99 < float(u.max()) < 1


class Side(nn.Module):
    """S linear maps."""

    def __init__(self, count=2):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(count, 3, 1, generator=draw))
        self.bias = nn.Parameter(torch.zeros(count, 1, 1))


def apart(module, x, y):
    out = torch.baddbmm(module.bias, x, module.weight)[..., 0]
    return (out - y).square().mean(1), out.detach().mean(1)[None]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_networks_side_by_side_have_norms_of_their_own(compiled):
    module = Side()
    step = MinibatchStep(module, apart, 1e-2, None, None, compiled, check_each=False)
    x, y = torch.randn(2, 5, 3), torch.randn(2, 5)
    loss, _ = apart(module, x, y)
    gradient = torch.autograd.grad(loss.sum(), (module.weight, module.bias))
    stats = step(x, y)
    assert stats.shape == (3, 2)
    for i in range(2):
        norm = torch.cat([gradient[0][i].flatten(), gradient[1][i].flatten()]).norm()
        torch.testing.assert_close(stats[1, i], norm)
    torch.testing.assert_close(stats[2], loss)
    y[1, 0] = float("nan")
    strict = MinibatchStep(Side(), apart, 1e-2, None)
    with pytest.raises(Diverged, match="network 1: loss nan"):
        strict(x, y)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_any_optimizer_gets_the_parameters_with_their_shapes(compiled):
    seen = []

    def sgd(parameters):
        seen.extend(parameters)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    module, x, y = Side(), torch.randn(2, 5, 3), torch.randn(2, 5)
    step = MinibatchStep(module, apart, 1.0, None, None, compiled, optimizer=sgd)
    assert [p.shape for p in seen] == [(2, 3, 1), (2, 1, 1)] and seen[0] is module.weight
    expected = Side()
    torch_sgd = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        step(x, y)
        torch_sgd.zero_grad()
        apart(expected, x, y)[0].sum().backward()
        torch_sgd.step()
    torch.testing.assert_close(module.weight, expected.weight)
    other = Side()
    other.load_state_dict(module.state_dict())
    resumed = MinibatchStep(other, apart, 1.0, None, None, compiled, optimizer=sgd)
    resumed.load_state_dict(step.state_dict())
    for each in (step, resumed):
        each(x, y)
    assert torch.equal(other.weight, module.weight)
    with pytest.raises(ValueError, match="adapt"):
        MinibatchStep(Side(), apart, 1.0, None, lambda lr, stats: lr, optimizer=sgd)


def test_the_critics_take_any_optimizer(data):
    made = TD3BC(SMALL, data, SPEC, (0, 1), lambda p: torch.optim.SGD(p, lr=0.0))
    before = made.state_dict()
    training.fit(made, data)
    after = made.state_dict()
    for key in before["critic"]:
        assert torch.equal(before["critic"][key], after["critic"][key])
    assert not torch.equal(*(s["actor"]["net.layers.0.weight"] for s in (before, after)))


# The loop -----------------------------------------------------------------------------------


def test_a_job_of_one_seed_is_one_run_folder(tmp_path, data):
    run = Run(tmp_path / "r", console=False)
    training.fit(TD3BC(SMALL, data, SPEC, (4,)), data, run)
    config = read_config(tmp_path / "r")
    assert config["task"] == "Recorded-v0" and config["algo"] == "td3_bc"
    assert config["run"]["seed"] == 4 and config["run"]["num_envs"] is None
    assert config["data"]["sha256"] == "ab" and config["data"]["transitions"] == len(data)
    assert [row["step"] for row in read_metrics(tmp_path / "r")] == [10, 20, 30, 40]
    assert load_policy(tmp_path / "r")(torch.zeros(1, 3)).shape == (1, 2)
    page = write_report(tmp_path / "r").read_text()
    assert "noise-v0" in page and "updates per second" in page
    for wrong in ("env steps", "None environments", "roll-out"):
        assert wrong not in page, page[page.index(wrong) - 100 :][:200]
    assert not list((tmp_path / "r").glob("s*"))


def test_each_seed_of_a_job_has_a_folder_that_reads_as_a_run(tmp_path, data):
    returns = {(20, 0): 1.0, (20, 9): 5.0, (40, 0): 3.0, (40, 9): 2.0}
    calls = []

    def evaluate(policy, seed):
        step = 20 if len(calls) < 2 else 40
        calls.append(seed)
        return {"eval/episode_return": returns[step, seed]}

    job = TD3BC(SMALL, data, SPEC, (0, 9))
    run = Run(tmp_path / "r", console=False, eval_every=20, checkpoint_every=0)
    training.fit(job, data, run, evaluate)
    assert [row.get("eval/episode_return") for row in run.rows] == [None, 3.0, None, 2.5]
    for place, seed in enumerate((0, 9)):
        folder = tmp_path / "r" / f"s{seed}"
        config = read_config(folder)
        assert config["run"]["seed"] == seed and config["job"] == ".."
        rows = read_metrics(folder)
        assert [row["step"] for row in rows] == [10, 20, 30, 40]
        assert rows[3]["eval/episode_return"] == returns[40, seed]
        x = torch.ones(1, 3)
        last = load_policy(folder, "last")
        torch.testing.assert_close(last(x), job.actor(x.expand(2, 1, 3))[place])
        best = load_checkpoint(find_checkpoint(folder, "best"))
        assert best["step"] == (40 if seed == 0 else 20)
    means = [np.mean([r[i]["value/q"] for r in (read_metrics(tmp_path / "r" / f"s{s}")
             for s in (0, 9))]) for i in range(4)]  # fmt: skip
    assert [row["value/q"] for row in run.rows] == pytest.approx(means)
    with pytest.raises(ValueError, match="holds several policies; name one of s0, s9"):
        load_policy(tmp_path / "r")


def test_a_seed_that_diverges_is_named_and_the_last_checkpoint_stands(tmp_path, data):
    job = TD3BC(SMALL, data, SPEC, (0, 9))
    update, count = job.update, []

    def spoil(batch):
        count.append(0)
        if len(count) == 25:
            batch = batch._replace(reward=batch.reward.clone())
            batch.reward[1, 3] = float("inf")
        return update(batch)

    job.update = spoil
    run = Run(tmp_path / "r", console=False, checkpoint_every=10)
    with pytest.raises(Diverged, match=r"^seed 9 diverged before update 30: \S+ is (inf|nan)"):
        training.fit(job, data, run)
    run.close()
    assert load_checkpoint(tmp_path / "r/checkpoints/last.pt")["step"] == 20
    assert load_checkpoint(tmp_path / "r/s9/checkpoints/last.pt")["step"] == 20
    assert bool(load_policy(tmp_path / "r/s9")(torch.zeros(1, 3)).isfinite().all())


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path, data, capsys):
    job = TD3BC(SMALL, data, SPEC)
    update, count = job.update, []

    def press(batch):
        count.append(0)
        if len(count) == 13:
            signal.raise_signal(signal.SIGINT)
        return update(batch)

    job.update = press
    run = training.fit(job, data, Run(tmp_path / "r", checkpoint_every=0))
    assert run.rows[-1]["step"] == 20
    assert load_checkpoint(tmp_path / "r/checkpoints/last.pt")["step"] == 20
    text = capsys.readouterr().out
    assert "noise-v0, td3_bc" in text
    assert (
        f"stopped at 20 of 40 updates; go on with: ctrl-rl offline train --resume {tmp_path}"
        in (text.replace("\n", ""))
    )


def test_going_on_with_other_data_or_seeds_is_refused(tmp_path, data):
    run = Run(tmp_path / "r", console=False, stop_after=20)
    training.fit(TD3BC(SMALL, data, SPEC), data, run)
    log = (tmp_path / "r/metrics.csv").read_bytes()
    other = random_data(seed=1)
    other.report |= data.report | {"sha256": "cd"}
    for found, seeds, message in (
        (other, (0,), r"another sha256 \('ab', now 'cd'\); start a new run$"),
        (data, (1,), "another seeds"),
    ):
        run = Run(tmp_path / "r", console=False, resume=True)
        with pytest.raises(ValueError, match=message):
            training.fit(TD3BC(SMALL, found, SPEC, seeds), found, run)
        run.close()
    assert (tmp_path / "r/metrics.csv").read_bytes() == log
    data.report["file"] = "/moved"  # the same data elsewhere
    run = Run(tmp_path / "r", console=False, resume=True)
    assert training.fit(TD3BC(SMALL, data, SPEC), data, run).rows[-1]["step"] == 40


def test_a_seed_folder_is_brought_back_to_where_the_job_goes_on(tmp_path, data, monkeypatch):
    """A kill between a seed's checkpoint and the job's leaves the former ahead."""
    run = Run(tmp_path / "r", console=False, checkpoint_every=10)
    save = Run.save

    def die(self, step, *rest):
        if step == 30:
            raise MemoryError
        save(self, step, *rest)

    monkeypatch.setattr(Run, "save", die)
    with pytest.raises(MemoryError):
        training.fit(TD3BC(SMALL, data, SPEC, (0, 1)), data, run)
    run.close()
    assert read_metrics(tmp_path / "r/s0")[-1]["step"] == 30
    monkeypatch.setattr(Run, "save", save)
    run = Run(tmp_path / "r", console=False, resume=True)
    training.fit(TD3BC(SMALL, data, SPEC, (0, 1)), data, run)
    with open(tmp_path / "r/s0/metrics.csv") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [10, 20, 30, 40]
    config = json.loads((tmp_path / "r/s0/config.json").read_text())
    assert config["run"]["seeds"] == [0]


# Data that cannot be learned from -----------------------------------------------------------


def changed(field, place, value):
    obs, action, reward = np.zeros((7, 3)), np.full((5, 2), 0.5), np.zeros(5)
    {"obs": obs, "action": action, "reward": reward}[field][place] = value
    return Transitions.from_episodes(episodes(obs, action, reward, [2, 3], [True, True]))


@pytest.mark.parametrize(
    ("field", "place", "value", "message"),
    [
        ("reward", 3, np.nan, "^step 1 of episode 1 of the data holds a value that is not finite"),
        ("obs", (6, 1), np.inf, "^step 3 of episode 1 .*not finite"),
        ("action", (0, 1), 1.5, "^step 0 of episode 0 .* 1.5 as action 'a1', .* -1 and 1$"),
        ("action", (4, 0), -1.001, "^step 2 of episode 1 .* -1.001 as action 'a0'"),
    ],
)
def test_bad_data_is_one_line_with_its_place(field, place, value, message, monkeypatch):
    for at_once in (100, 2):
        monkeypatch.setattr(training, "CHECKED_AT_ONCE", at_once)
        with pytest.raises(ValueError, match=message):
            training.check_data(changed(field, place, value), SPEC)
        training.check_data(changed("action", (4, 0), -1.00001), SPEC)


def test_data_of_other_sizes_is_refused(data):
    with pytest.raises(ValueError, match="of 3 and 2 numbers, Recorded-v0 of 4 and 2"):
        training.check_data(data, spec(4, (-1.0, -1.0), (1.0, 1.0)))
