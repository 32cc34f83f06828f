"""What AdamO and its budget do to critics that diverge under Adam.

`toy-*`: temporal differences on 128 fixed transitions whose next actions lie outside the data. A
critic 6-64-64-1 in PyTorch's default initialisation, full batches, five seeds side by side. Rewards
lie in -1..1, so that no value beyond 1 / (1 - gamma) = 100 exists.

`hopper-*`, `door-*`: TD3+BC whose policy follows the critics almost alone (alpha 1e6: no BC term
to speak of), on real recorded data of CTRL_RL_TEST_DATA, with networks narrower than usual. The
policy leaves the data, and the critics with it. `*-cloning` is TD3+BC as it is meant, with alpha
2.5, under Adam: what the monitor says of a sound critic.

Nothing is timed: cells may run beside other work.

Reading order: `OPTIMIZERS` -> `CELLS` -> the toy -> `learner`.
"""

import itertools
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cells import Absent, Cell, main
from offline.adamo import AdamO, AdamOConfig, make

GAMMA, POLYAK, LEARNING_RATE = 0.99, 0.005, 3e-4
TOY_STEPS, TRANSITIONS = 6_000, 128
TOY_BOUND = 1 / (1 - GAMMA)  # rewards of the toy lie in -1..1
SIZES = (6, 64, 64, 1)  # four of the observation, two of the action
SEEDS = [0, 1, 2, 3, 4]

OPTIMIZERS: dict[str, dict | None] = {
    "adam": None,
    "default": {},
    "none": {"mode": "none", "strength": 10.0},
    "strict": {"mode": "strict", "scope": "matrix", "head": False, "strength": 10.0},
}
"""Name -> what differs from `AdamOConfig`'s defaults; None for Adam itself."""

DATA = {
    "hopper": "hopper-medium-expert-v2_segments.hdf5",
    "door": "door-human_dapg.hdf5",
}
"""Benchmark -> file of recorded data."""

LEARNER = {
    "alpha": 1e6,
    "total_steps": 10_000,
    "batch_size": 128,
    "hidden": [128, 128],
    "learning_rate": LEARNING_RATE,
    "gamma": GAMMA,
    "polyak": POLYAK,
}

CELLS = (
    [
        Cell(name=f"toy-{name}", config={"optimizer": name, "seeds": SEEDS, "steps": TOY_STEPS})
        for name in OPTIMIZERS
    ]
    + [
        Cell(
            name=f"{data}-{name}",
            config={"data": data, "optimizer": name, "seeds": SEEDS, "learner": LEARNER},
        )
        for data in DATA
        for name in OPTIMIZERS
    ]
    + [
        Cell(
            name=f"{data}-cloning",
            config={
                "data": data,
                "optimizer": "adam",
                "seeds": SEEDS,
                "learner": LEARNER | {"alpha": 2.5},
            },
        )
        for data in DATA
    ]
)


class Critics(nn.Module):
    """S critics, each as `torch.nn.Linear` starts under its seed: (S, B, 6) to (S, B)."""

    def __init__(self, seeds: list[int]) -> None:
        super().__init__()
        members = []
        for seed in seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                members.append([nn.Linear(a, b) for a, b in itertools.pairwise(SIZES)])
        self.layers: Any = nn.ModuleList()
        for same in zip(*members, strict=True):
            layer: Any = nn.Module()
            layer.weight = nn.Parameter(torch.stack([x.weight.detach().T for x in same]))
            layer.bias = nn.Parameter(torch.stack([x.bias.detach()[None] for x in same]))
            self.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, 6) to (S, B)."""
        for i, layer in enumerate(self.layers):
            x = torch.baddbmm(layer.bias, x.relu() if i else x, layer.weight)
        return x[..., 0]


def transitions(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (B, 6), rewards (B,), next inputs (B, 6) with a corner of the square as action."""
    draw = torch.Generator().manual_seed(1000 + seed)
    obs, next_obs = torch.randn(2, TRANSITIONS, 4, generator=draw)
    action = torch.rand(TRANSITIONS, 2, generator=draw) - 0.5
    corner = torch.randint(2, (TRANSITIONS, 2), generator=draw) * 2.0 - 1
    reward = torch.rand(TRANSITIONS, generator=draw) * 2 - 1
    return torch.cat([obs, action], 1), reward, torch.cat([next_obs, corner], 1)


def make_optimizer(module: nn.Module, name: str, replicas: int) -> torch.optim.Optimizer:
    """Adam or a variant of AdamO over S networks."""
    settings = OPTIMIZERS[name]
    if settings is None:
        return torch.optim.Adam(module.parameters(), LEARNING_RATE)
    return make(module, LEARNING_RATE, AdamOConfig(**settings), replicas)


def toy(config: dict) -> dict:
    """Train; per seed: the largest |Q| over the transitions at the end and in between, the error.

    Returns:
        `q_max` and `td_rmse`, lists over the seeds; `curve`, rows of the step and `q_max`;
        `applied`, the mean share of the wanted correction that was made.
    """
    seeds = config["seeds"]
    x, reward, next_x = (torch.stack(part) for part in zip(*map(transitions, seeds), strict=True))
    critic, target = Critics(seeds), Critics(seeds).requires_grad_(False)
    optimizer = make_optimizer(critic, config["optimizer"], len(seeds))
    curve, applied = [], []
    for step in range(config["steps"] + 1):
        if step % 500 == 0:
            with torch.no_grad():
                largest = torch.maximum(critic(x).abs().amax(1), critic(next_x).abs().amax(1))
            curve.append([step, *(round(v, 3) for v in largest.tolist())])
        if step == config["steps"]:
            break
        with torch.no_grad():
            y = reward + GAMMA * target(next_x)
        optimizer.zero_grad()
        (critic(x) - y).square().mean(1).sum().backward()
        optimizer.step()
        if isinstance(optimizer, AdamO) and optimizer.applied is not None:
            applied.append(optimizer.applied.mean().item())
        with torch.no_grad():
            for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                old.lerp_(new, POLYAK)
    with torch.no_grad():
        rmse = (critic(x) - reward - GAMMA * target(next_x)).square().mean(1).sqrt()
    return {
        "q_max": curve[-1][1:],
        "td_rmse": [round(v, 4) for v in rmse.tolist()],
        "curve": curve,
        "applied": round(sum(applied) / len(applied), 4) if applied else None,
    }


def learner(config: dict) -> dict:
    """Train on recorded data, watched every 1,000 updates.

    Returns:
        `bound`, the largest |Q| that the rewards allow; `curve`, rows of the update and each seed's
        largest |Q| on the probe batch, None if it is no number; `eigenvalue`, likewise of S's
        largest real part over its norm; `flagged`, the update at which the monitor first warned of
        each seed, or None.
    """
    from offline import datasets
    from offline.collapse import Watch, legal_bound
    from offline.networks import stream
    from offline.playing import spec_of
    from offline.td3_bc import TD3BC, TD3BCConfig
    from offline.transitions import Transitions

    folder = os.environ.get("CTRL_RL_TEST_DATA", "")
    path = Path(folder) / DATA[config["data"]]
    if not folder or not path.exists():
        raise Absent(f"no {path.name} in the folder that CTRL_RL_TEST_DATA names")
    episodes = datasets.load(path, episode_length=1000)
    data = Transitions.from_episodes(episodes, normalize_obs=True)
    settings = OPTIMIZERS[config["optimizer"]]
    seeds, values = config["seeds"], config["learner"] | {"monitor": "warn"}
    if settings is not None:
        values |= {"optimizer": "adamo", "adamo": AdamOConfig(**settings)}
    made = TD3BCConfig(**values | {"hidden": tuple(values["hidden"])})
    td3 = TD3BC(made, data, spec_of(data, episodes.metadata, None)[0], seeds)
    watch, draws = Watch(td3, data), [stream(seed, "minibatches") for seed in seeds]
    curve, eigenvalues = [], []
    flagged: list[int | None] = [None] * len(seeds)
    for step in range(made.total_steps + 1):
        if step % 1000 == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = watch.check(step)
            for i, seed in enumerate(seeds):
                if flagged[i] is None and any(f"seed {seed} is" in str(w.message) for w in caught):
                    flagged[i] = step
            row = lambda key: [_number(f.get(f"collapse/{key}")) for f in found]  # noqa: B023, E731
            curve.append([step, *row("q_max")])
            eigenvalues.append([step, *row("eigenvalue_normalized")])
            print(config["optimizer"], *curve[-1], flush=True)
        if step < made.total_steps:
            td3.update(data.batch(data.draw(made.batch_size, draws)))
    reward, terminated = data.rows[:, -2:][data.index].unbind(1)
    return {
        "transitions": len(data),
        "sha256": episodes.metadata.get("sha256"),
        "bound": legal_bound(reward, terminated, made.gamma),
        "q_max": curve[-1][1:],
        "curve": curve,
        "eigenvalue": eigenvalues,
        "flagged": flagged,
    }


def _number(x: float | None) -> float | None:
    """Five digits of it; None where there is none."""
    return float(f"{x:.5g}") if x is not None and math.isfinite(x) else None


def measure(config: dict) -> dict:
    """One cell of either kind."""
    return learner(config) if "data" in config else toy(config)


if __name__ == "__main__":
    raise SystemExit(main("adamo", CELLS, measure))
