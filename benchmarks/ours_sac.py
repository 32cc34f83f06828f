"""This project's SAC and TD3 with the settings of `sac_settings.py`.

`ours_sac.py train` answers with the returns after training, `ours_sac.py updates` ticks once per
block of updates on a replay of random steps, `ours_sac.py loop` once per env step of `train`.
"""

import sys
import time

import judge
import torch
import worker
from ours_runs import KeepPolicy, Newest

import ctrl_rl
from ctrl_rl import sac, td3

PACKAGES = ("ctrl-rl", "torch", "gymnasium", "mujoco", "numpy")
LEARNERS = {"sac": (sac, sac.SACConfig), "td3": (td3, td3.TD3Config)}
BLOCK = 50  # updates between two looks at the clock


def build(config, total_steps):
    """Module, configuration and environments."""
    torch.set_num_threads(config["torch_threads"])
    module, make = LEARNERS[config["algo"]]
    s = dict(config["settings"])
    env = ctrl_rl.make(
        config["task"], s.pop("num_envs"), seed=config["seed"], threads=config["sim_threads"]
    )
    s |= {
        "hidden": tuple(s["hidden"]),
        "total_steps": total_steps,
        "seed": config["seed"],
        "compile": config["compile"],
    }
    return module, make(**s), env


def train(config):
    """Train, then play in gymnasium with the policy as it would be shipped."""
    module, settings, env = build(config, config["settings"]["total_steps"])
    run = KeepPolicy()
    wall, cpu = time.perf_counter(), time.process_time()
    module.train(settings, env, run)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    policy = ctrl_rl.policy.Policy.from_section(run.policy)

    def act(obs):
        return policy(torch.from_numpy(obs)).numpy()

    return {
        "returns": judge.episode_returns(act, config["task"], config["episodes"], seed=10_000),
        "env_steps": run.rows[-1]["step"],
        "train_wall_s": round(wall, 1),
        "train_cpu_s": round(cpu, 1),
        "curve": run.curve.columns(),
    }


def updates(config, tick):
    """Updates of SAC for ever, drawn from `filled` steps; one tick per block."""
    _, settings, env = build(config, total_steps=10**12)
    learner = sac.SAC(settings, env.spec, env.device)
    replay, obs = learner.make_replay(), env.observe()
    for _ in range(config["filled"] // env.spec.num_envs):
        action = learner.act_randomly()
        step = env.step(action)
        replay.add(obs, action, step)
        obs = step.obs
    draw = settings.batch_size, learner.generator
    while True:
        stats = [learner.update(replay.sample(*draw, gamma=settings.gamma)) for _ in range(BLOCK)]
        learner.figures(stats)
        tick(BLOCK)


def loop(config, tick):
    """`train` for ever; one tick per env step once updates go on and graphs are compiled."""
    module, settings, env = build(config, total_steps=10**12)
    env_step, num_envs, steps = env.step, env.spec.num_envs, 0

    def step(action):
        nonlocal steps
        if steps > settings.warmup_steps + BLOCK:
            tick(num_envs)
        steps += num_envs
        return env_step(action)

    env.step = step
    module.train(settings, env, Newest())


if __name__ == "__main__":
    if sys.argv[1] == "train":
        worker.answer(train, PACKAGES)
    else:
        worker.serve({"updates": updates, "loop": loop}[sys.argv[1]], PACKAGES)
