"""This project's environments, and the physics under them without an environment.

`ours_env.py env` steps a task with random actions and ticks once per step of all environments;
`ours_env.py rollout` hands `mujoco.batch` whole chunks of actions for the same model, from states
the task reaches under such actions; `ours_env.py memory` answers with what environments add.
"""

import os
import sys

import torch
import worker

import ctrl_rl

CHUNKS, SPACING = 6, 4
"""Bare physics replays every fourth chunk of the first 24, so not only what follows a reset."""
PACKAGES = ("ctrl-rl", "torch", "mujoco", "numpy", "gymnasium")


def make_env(config):
    """The task and 64 random actions for all of its environments."""
    torch.set_num_threads(1)
    env = ctrl_rl.make(config["task"], config["num_envs"], seed=0, threads=config["threads"])
    generator = torch.Generator().manual_seed(0)
    shape = (64, config["num_envs"], len(env.spec.action))
    if config["actions"] == "normal":
        return env, config["std"] * torch.randn(shape, generator=generator)
    low, high = (torch.tensor([getattr(d, k) for d in env.spec.action]) for k in ("low", "high"))
    return env, low + (high - low) * torch.rand(shape, generator=generator)


def env(config, tick):
    """One tick per step: observation, reward, flags as tensors, ended environments reset."""
    env, actions = make_env(config)
    while True:
        for action in actions:
            env.step(action)
            tick(config["num_envs"])


def rollout(config, tick):
    """Chunks of `chunk` control steps of bare physics: what an environment cannot exceed."""
    import numpy as np
    from mujoco.batch import Batch

    env, actions = make_env(config)
    batch = Batch(env.sim.model, config["num_envs"], nthread=config["threads"])
    starts, controls = [], []
    for k in range(CHUNKS * SPACING * config["chunk"]):
        chunk, at = divmod(k, config["chunk"])
        kept = chunk % SPACING == SPACING - 1
        if kept and at == 0:
            starts.append(env.sim.state_dict()["state"].numpy())
            controls.append([])
        env.step(actions[k % len(actions)])
        if kept:
            controls[-1] += env.spec.decimation * [env.sim.ctrl.numpy().copy()]
    controls = [np.stack(c, 1) for c in controls]
    while True:
        for start, control in zip(starts, controls, strict=True):
            batch.state[:] = start
            batch.rollout(control.shape[1], control, record=("qpos", "qvel"))
            tick(config["num_envs"] * config["chunk"])


def memory(config):
    """Resident memory that `num_envs` environments add to those of one [MB]."""
    small, _ = make_env({**config, "num_envs": 1})
    small.step(torch.zeros(1, len(small.spec.action)))
    before = resident()
    env, actions = make_env(config)
    for action in actions[:20]:
        env.step(action)
    del actions
    return {"added_mb": round(resident() - before, 1)}


def resident():
    """Resident memory of this process [MB]."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    mode = sys.argv[1]
    if mode == "memory":
        worker.answer(memory, PACKAGES)
    else:
        worker.serve({"env": env, "rollout": rollout}[mode], PACKAGES)
