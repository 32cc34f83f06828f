"""One action of a shipped policy: onnxruntime against the same policy in eager torch, batch 1.

The policy has the sizes of the Go1 task (128-128) and random weights, which cost as much as
trained ones. Both sides take and give what a control loop has, a float32 array (1, d), run on one
thread and take turns; torch runs in inference mode, the fastest eager way.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import ctrl_rl
from benchmarks.cells import Cell, main
from ctrl_rl import ppo
from ctrl_rl.policy import Policy
from sim2real import export, runtime

CELLS = [
    Cell(
        name="go1",
        config={
            "task": "Go1-Velocity-Flat-v0",
            "hidden": [128, 128],
            "calls": 2000,
            "rounds": 15,
            "threads": 1,
        },
    )
]


def measure(config: dict) -> dict:
    """Median time of a call [µs] of each, over rounds of `calls`, and their ratio."""
    torch.set_num_threads(config["threads"])
    env = ctrl_rl.make(config["task"], 4)
    learner = ppo.PPO(
        ppo.PPOConfig(hidden=tuple(config["hidden"]), num_minibatches=1, num_steps=1),
        env.spec,
        "cpu",
    )
    policy = Policy.from_section(learner.policy_section())
    obs = env.observe()["actor"][:1].numpy()
    env.close()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.onnx"
        export.export(policy, path)
        network, _ = runtime.load(path)

    @torch.inference_mode()
    def eager(x: np.ndarray) -> np.ndarray:
        return policy.module(torch.from_numpy(x)).numpy()

    assert np.abs(eager(obs) - network(obs)).max() <= 1e-5
    times: dict[str, list[float]] = {"onnxruntime": [], "torch": []}
    for _ in range(config["rounds"] + 1):
        for name, call in (("onnxruntime", network), ("torch", eager)):
            times[name].append(_per_call(call, obs, config["calls"]))
    medians = {name: statistics.median(t[1:]) for name, t in times.items()}
    return {
        "us": {name: round(1e6 * t, 2) for name, t in medians.items()},
        "all_us": {name: [round(1e6 * x, 2) for x in t[1:]] for name, t in times.items()},
        "ratio": round(medians["onnxruntime"] / medians["torch"], 3),
    }


def _per_call(call: Callable, obs: np.ndarray, calls: int) -> float:
    """Mean time of a call [s]."""
    start = time.perf_counter()
    for _ in range(calls):
        call(obs)
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    sys.exit(main("latency", CELLS, measure))
