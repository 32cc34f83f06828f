"""What AdamO and its budget do to critics that diverge under Adam.

`toy-*`: temporal differences on 128 fixed transitions whose next actions lie outside the data. A
critic 6-64-64-1 in PyTorch's default initialisation, full batches, five seeds side by side. Rewards
lie in -1..1, so that no value beyond 1 / (1 - gamma) = 100 exists.

Nothing is timed: cells may run beside other work.
"""

import torch
from torch import Tensor, nn

from benchmarks.cells import Cell, main
from offline.adamo import AdamO, AdamOConfig

GAMMA, POLYAK, LEARNING_RATE = 0.99, 0.005, 3e-4
TOY_STEPS, TRANSITIONS = 6_000, 128
SIZES = (6, 64, 64, 1)  # four of the observation, two of the action
SEEDS = [0, 1, 2, 3, 4]

OPTIMIZERS: dict[str, dict | None] = {
    "adam": None,
    "default": {},
    "none": {"mode": "none", "strength": 10.0},
    "strict": {"mode": "strict", "scope": "matrix", "head": False, "strength": 10.0},
}
"""Name -> what differs from `AdamOConfig`'s defaults; None for Adam itself."""

CELLS = [
    Cell(name=f"toy-{name}", config={"optimizer": name, "seeds": SEEDS, "steps": TOY_STEPS})
    for name in OPTIMIZERS
]


class Critics(nn.Module):
    """S critics, each as `torch.nn.Linear` starts under its seed: (S, B, 6) to (S, B)."""

    def __init__(self, seeds: list[int]) -> None:
        super().__init__()
        members = []
        for seed in seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                members.append([nn.Linear(*SIZES[i : i + 2]) for i in range(len(SIZES) - 1)])
        self.layers = nn.ModuleList()
        for same in zip(*members, strict=True):
            layer = nn.Module()
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
    from offline.adamo import make

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
        with torch.no_grad():
            y = reward + GAMMA * target(next_x)
        q = critic(x)
        if step % 500 == 0:
            with torch.no_grad():
                largest = torch.maximum(q.abs().amax(1), critic(next_x).abs().amax(1))
            curve.append([step, *(round(v, 3) for v in largest.tolist())])
        if step == config["steps"]:
            break
        optimizer.zero_grad()
        (q - y).square().mean(1).sum().backward()
        optimizer.step()
        if isinstance(optimizer, AdamO) and optimizer.applied is not None:
            applied.append(optimizer.applied.mean().item())
        with torch.no_grad():
            torch._foreach_lerp_([*target.parameters()], [*critic.parameters()], POLYAK)
    rmse = (q - y).detach().square().mean(1).sqrt()
    return {
        "q_max": curve[-1][1:],
        "td_rmse": [round(v, 4) for v in rmse.tolist()],
        "curve": curve,
        "applied": round(sum(applied) / len(applied), 4) if applied else None,
    }


if __name__ == "__main__":
    raise SystemExit(main("adamo", CELLS, toy))
