"""Env steps per second of PPO's loop without physics: ours against rsl_rl and skrl.

`dummy_env.py` costs next to nothing, so that what is timed is acting, storing and updating. Steps,
epochs, minibatches, networks and observation normaliser are equal; each library runs its own
training loop with its fastest settings (see `*_loop.py`), on one and on two threads, and the best
of each side counts.
"""

import sys

from benchmarks import dummy_env, flops, peers
from benchmarks.cells import Cell, main
from benchmarks.learner_race import race

SETTINGS = {
    "num_steps": 24,
    "epochs": 5,
    "minibatches": 4,
    "learning_rate": 1e-3,
    "max_grad_norm": 1.0,
}
DESIGNS = {
    "ours, compiled": {"peer": peers.OURS, "script": "ours_loop.py", "compile": "on"},
    "ours, eager": {"peer": peers.OURS, "script": "ours_loop.py", "compile": "off"},
    "rsl_rl, compiled": {"peer": "rsl_rl", "script": "rsl_rl_loop.py", "compile": "on"},
    "rsl_rl, eager": {"peer": "rsl_rl", "script": "rsl_rl_loop.py", "compile": "off"},
    "skrl": {"peer": "skrl", "script": "skrl_loop.py"},
}
SIZES = ((64, (64, 64), 2.5), (1024, (64, 64), 1.6), (256, (512, 256, 128), 1.15))
"""Environments, hidden layers, and the least ratio of ours to the better of the two."""

CELLS = [
    Cell(
        name=f"{num_envs}-envs-{'x'.join(map(str, hidden))}",
        config={
            "num_envs": num_envs,
            "hidden": hidden,
            "floor": floor,
            "settings": SETTINGS,
            "designs": DESIGNS,
            "threads": (1, 2),
            "seconds": 2.0,
            "rounds": 7,
            "warm_up": 1,
        },
    )
    for num_envs, hidden, floor in SIZES
]


def measure(config: dict) -> dict:
    """One cell; the unit of work is an env step."""
    shared = {key: config[key] for key in ("num_envs", "hidden", "settings")}
    epochs = config["settings"]["epochs"]
    flop = flops.ppo_env_step(dummy_env.OBS, dummy_env.ACTIONS, config["hidden"], epochs)
    return race(config, shared, flop)


if __name__ == "__main__":
    sys.exit(main("ppo_loop", CELLS, measure))
