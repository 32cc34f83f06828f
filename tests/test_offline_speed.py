"""The speed benchmark of offline learners: operations counted, scripts that run, its table."""

import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import cells, flops, offline_speed, peers, table
from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm
from offline import iql, td3_bc
from offline.networks import stream

sys.path.insert(0, str(cells.ROOT / "benchmarks"))  # as its scripts find each other
from ours_offline import data

COUNTED = {
    "td3_bc": (td3_bc.TD3BC, td3_bc.TD3BCConfig, flops.td3_bc_update),
    "iql": (iql.IQL, iql.IQLConfig, flops.iql_update),
}


@pytest.mark.parametrize("algo", COUNTED)
def test_an_update_needs_what_is_counted(algo):
    make, settings, count = COUNTED[algo]
    transitions = data(2000)
    spec = EnvSpec(
        task="Recorded-v0",
        num_envs=1,
        obs={"actor": (ObsTerm(name="obs", kind="signal", size=offline_speed.OBS),)},
        action=tuple(
            ActionDim(name=f"a{i}", low=-1.0, high=1.0) for i in range(offline_speed.ACTIONS)
        ),
        physics_dt=0.01,
        step_dt=0.01,
        max_episode_steps=1000,
    )
    learner = make(settings(compile="off"), transitions, spec)
    with FlopCounterMode(display=False) as counter:
        for _ in range(2):  # TD3+BC steps its policy on one of two
            learner.update(transitions.batch(transitions.draw(256, [stream(0, "minibatches")])))
    needed = 2 * count(offline_speed.OBS, offline_speed.ACTIONS, (256, 256), 256)
    # It also computes some gradients by inputs, which are not needed; and a layer of one column
    # may be a sum that is not counted as a product.
    assert counter.get_total_flops() == pytest.approx(needed, rel=0.03)


@pytest.mark.parametrize("algo", COUNTED)
@pytest.mark.parametrize(("script", "seeds"), [("ours_offline.py", 2), ("eager_offline.py", 1)])
def test_scripts_tick(script, seeds, algo):
    settings = {"batch_size": 8, "hidden": [8, 8], "learning_rate": 3e-4}
    config = {"algo": algo, "rows": 2000, "settings": settings, "seeds": seeds}
    config |= {"compile": "off", "torch_threads": 1}
    with peers.Worker(peers.OURS, script, config) as worker:
        done = worker.run(0.1)
    assert done.work >= 50 * seeds and done.work % (50 * seeds) == 0


def test_the_plain_loop_learns():
    import eager_offline

    torch.manual_seed(0)
    batch = torch.randn(16, 11), torch.rand(16, 3), torch.ones(16), torch.randn(16, 11)
    for make in (eager_offline.TD3BC, eager_offline.IQL):
        learner = make([32], 1e-3)
        shown = [learner.update(*batch, torch.ones(16)) for _ in range(300)]
        critic = 0 if make is eager_offline.TD3BC else 1
        assert shown[-1][critic] < 0.1 * shown[0][critic]  # every step ends: Q goes to the reward


def test_ratios_are_told_for_each_reference(monkeypatch):
    rates = {"ours, compiled": 180, "ours, eager": 120, "eager": 100, "d3rlpy, eager": 60}
    rates = {f"{name}, 1 thread": {"per_s": float(rate)} for name, rate in rates.items()}
    rates["d3rlpy, compiled, 1 thread"] = {"per_s": 90.0}
    best = "ours, compiled, 1 thread"
    found = {"per_s": rates, "best": best, "share_of_peak": {best: 0.66}}
    monkeypatch.setattr(offline_speed, "race", lambda *_: found)
    cell = offline_speed.CELLS[0]
    result = offline_speed.measure(cell.config)
    assert result["ratios"] == {"eager": 1.8, "d3rlpy": 2.0}
    monkeypatch.setattr(table, "measured_on", lambda cells: "")
    monkeypatch.setattr(table, "load", lambda *_: {"td3_bc": {"result": result}})
    line = table.offline_updates(cells.RESULTS).splitlines()[2]
    assert line == (
        "| TD3+BC | 180 (compiled, 1 thread) | 100 (1 thread) | 90 (compiled, 1 thread) "
        "| 1.80, 2.00 | 1.3, 1.8 | 66 % |"
    )
