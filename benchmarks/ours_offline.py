"""This project's TD3+BC and IQL on `dummy_data.py`: draw and update for ever, as `fit` does."""

import dummy_data
import numpy as np
import torch
import worker

from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm
from offline import iql, td3_bc
from offline.episodes import Episodes
from offline.networks import stream
from offline.transitions import Transitions

LEARNERS = {
    "td3_bc": (td3_bc.TD3BC, td3_bc.TD3BCConfig),
    "iql": (iql.IQL, iql.IQLConfig),
}
BLOCK = 50  # updates between two looks at the clock


def data(rows):
    """Episodes whose last observation is known and that go on after it."""
    obs, action, reward = dummy_data.arrays(rows)
    count = rows // dummy_data.EPISODE
    obs = obs.reshape(count, dummy_data.EPISODE, -1)
    flags = np.zeros(count, bool)
    return Transitions.from_episodes(
        Episodes(
            obs=np.concatenate([obs, obs[:, -1:]], 1).reshape(-1, dummy_data.OBS),
            action=action,
            reward=reward,
            lengths=np.full(count, dummy_data.EPISODE),
            terminated=flags,
            truncated=flags,
            final_known=~flags,
        )
    )


def run(config, tick):
    """Updates for ever; one tick per block, which counts every seed's."""
    torch.set_num_threads(config["torch_threads"])
    transitions, s = data(config["rows"]), config["settings"]
    make, settings = LEARNERS[config["algo"]]
    seeds = tuple(range(config.get("seeds", 1)))
    spec = EnvSpec(
        task="Recorded-v0",
        num_envs=1,
        obs={"actor": (ObsTerm(name="obs", kind="signal", size=dummy_data.OBS),)},
        action=tuple(
            ActionDim(name=f"action_{i}", low=-1.0, high=1.0) for i in range(dummy_data.ACTIONS)
        ),
        physics_dt=0.01,
        step_dt=0.01,
        max_episode_steps=dummy_data.EPISODE,
    )
    chosen = {**s, "hidden": tuple(s["hidden"]), "compile": config["compile"]}
    learner = make(settings(total_steps=10**9, **chosen), transitions, spec, seeds)
    draws = [stream(seed, "minibatches") for seed in seeds]
    while True:
        stats = [
            learner.update(transitions.batch(transitions.draw(s["batch_size"], draws)))
            for _ in range(BLOCK)
        ]
        assert bool(torch.stack(stats).isfinite().all())
        tick(BLOCK * len(seeds))


if __name__ == "__main__":
    worker.serve(run, ("ctrl-rl", "torch"))
