"""POR's two further claims (Xu et al., NeurIPS 2022, abstract) on a small plane, as measurements.

A point moves by 0.1 times its action, turned by an angle that depends on where it is: to know where
to go does not say how to get there. Each step costs the distance to a goal.

    more data   Few good episodes, and many random ones. "guide_good" learns value and guide from
                the good ones and the execute policy from all (`execute_from`). Beside it POR from
                the good ones alone and from all, and cloning of both.
    new task    300 episodes towards anywhere with rewards for goal A, then 30 others with rewards
                for goal B. "new_guide" learns value and guide from the 30 and keeps the execute
                policy of A. Beside it POR from the 30 alone, and A's policy as it was. (From the
                same 300 episodes with other rewards both would be the same to the digit: no reward
                enters the execute policy.)

Figures are the mean over 400 starts of what is lost by an episode of 30 steps, the sum of
distances, for each of 3 seeds; the controller that knows the plane loses `known`.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.cells import Cell, main
from ctrl_rl.policy import load_policy
from ctrl_rl.runs import Run
from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm
from offline.bc import BCConfig
from offline.bc import train as train_bc
from offline.episodes import Episodes, concatenate
from offline.por import PORConfig
from offline.por import train as train_por
from offline.transitions import Transitions

LENGTH, STRIDE = 30, 0.1
GOALS = {"A": (0.5, 0.5), "B": (-0.5, 0.3)}
SEEDS = (0, 1, 2)
SETTINGS = {
    "total_steps": 2000,
    "batch_size": 128,
    "gamma": 0.95,
    "hidden": (64, 64),
    "execute_hidden": (128, 128),
    "value_learning_rate": 1e-3,
    "expectile": 0.7,
    "alpha": 10.0,
    "layer_norm": False,
    "compile": "off",
}

SPEC = EnvSpec(
    task="Swirl",
    num_envs=1,
    obs={"actor": (ObsTerm(name="position", kind="signal", size=2),)},
    action=tuple(ActionDim(name=name, low=-1.0, high=1.0) for name in "xy"),
    physics_dt=1.0,
    step_dt=1.0,
    max_episode_steps=LENGTH,
)

CELLS = [
    *(
        Cell(name=f"more-data-{kind}", config={"claim": "more data", "kind": kind})
        for kind in ("por_good", "por_all", "guide_good", "bc_good", "bc_all")
    ),
    *(
        Cell(name=f"new-task-{kind}", config={"claim": "new task", "kind": kind, "episodes": 30})
        for kind in ("new_guide", "from_nothing", "old_policy")
    ),
]


def turn(s: np.ndarray) -> np.ndarray:
    """Matrices (N, 2, 2) by which actions in places s (N, 2) are turned."""
    angle = 2.5 * np.sin(3 * s[:, 0]) * np.cos(3 * s[:, 1])
    c, n = np.cos(angle), np.sin(angle)
    return np.stack([np.stack([c, -n], 1), np.stack([n, c], 1)], 1)


def move(s: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Where actions (N, 2) lead; the plane ends at -1 and 1."""
    return np.clip(s + STRIDE * np.einsum("nij,nj->ni", turn(s), np.clip(a, -1, 1)), -1, 1)


def towards(s: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """The action that knows how actions are turned."""
    way = np.clip((goal - s) / STRIDE, -0.7, 0.7)
    return np.einsum("nji,nj->ni", turn(s), way)


def record(count: int, act, rng: np.random.Generator, goal: tuple[float, float]) -> Episodes:
    """Episodes of `act(s)`, with the rewards of a goal."""
    s, obs, action = rng.uniform(-1, 1, (count, 2)), [], []
    for _ in range(LENGTH):
        obs.append(s)
        action.append(np.clip(act(s), -1, 1))
        s = move(s, action[-1])
    obs, action = np.stack([*obs, s], 1), np.stack(action, 1)
    reward = -np.linalg.norm(obs[:, 1:] - np.array(goal), axis=2)
    return Episodes(
        obs=obs.reshape(-1, 2).astype(np.float32),
        action=action.reshape(-1, 2).astype(np.float32),
        reward=reward.reshape(-1).astype(np.float32),
        lengths=np.full(count, LENGTH, np.int64),
        terminated=np.zeros(count, bool),
        truncated=np.ones(count, bool),
        final_known=np.ones(count, bool),
    )


def lost(act, goal: tuple[float, float]) -> float:
    """Mean sum of distances over episodes from 400 starts."""
    s, total = np.random.default_rng(99).uniform(-1, 1, (400, 2)), 0.0
    for _ in range(LENGTH):
        s = move(s, act(s))
        total += np.linalg.norm(s - np.array(goal), axis=1).mean()
    return float(total)


def learn(folder: Path, episodes: Episodes, cloned: bool = False, **changes) -> Path:
    """Train all seeds on recorded episodes into a folder, which is returned."""
    data = Transitions.from_episodes(episodes, timeouts="keep")
    run = Run(folder, console=False, checkpoint_every=0)
    if cloned:
        shared = {k: SETTINGS[k] for k in ("total_steps", "batch_size", "hidden", "compile")}
        train_bc(BCConfig(**shared), data, SPEC, SEEDS, run)
    else:
        train_por(PORConfig(**SETTINGS | changes), data, SPEC, SEEDS, run)
    return folder


def score(folder: Path, goal: tuple[float, float]) -> list[float]:
    """What each seed's last policy loses."""
    found = []
    for seed in SEEDS:
        policy = load_policy(folder / f"s{seed}", "last")
        act = lambda s, policy=policy: policy(torch.from_numpy(s).float()).double().numpy()  # noqa: E731
        found.append(round(lost(act, goal), 3))
    return found


def measure(config: dict) -> dict:
    """Train what the cell names.

    Returns:
        `lost`, of each seed; `mean`; `known`, what the controller loses that knows the plane.
    """
    rng, kind = np.random.default_rng(0), config["kind"]
    goal = GOALS["A" if config["claim"] == "more data" else "B"]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if config["claim"] == "more data":
            noisy = lambda s: towards(s, np.array(goal)) + rng.normal(0, 0.1, s.shape)  # noqa: E731
            good = record(10, noisy, rng, goal)
            random = record(300, lambda s: rng.uniform(-1, 1, s.shape), rng, goal)
            everything = concatenate([good, random])
            if kind == "guide_good":
                first = learn(place / "first", everything)
                folder = learn(place / "run", good, execute_from=str(first))
            else:
                data = good if kind.endswith("good") else everything
                folder = learn(place / "run", data, cloned=kind.startswith("bc"))
        else:
            folder = learn_new_task(place, kind)
        found = score(folder, goal)
    known = lost(lambda s: towards(s, np.array(goal)), goal)
    return {"lost": found, "mean": round(float(np.mean(found)), 3), "known": round(known, 3)}


def learn_new_task(place: Path, kind: str) -> Path:
    """Movements towards anywhere: many with rewards for goal A, few others with those for B."""

    def data(count: int, seed: int, goal: tuple[float, float]) -> Episodes:
        rng = np.random.default_rng(seed)
        targets = rng.uniform(-1, 1, (count, 2))
        act = lambda s: towards(s, targets) + rng.normal(0, 0.3, s.shape)  # noqa: E731
        return record(count, act, rng, goal)

    few = data(30, 2, GOALS["B"])
    if kind == "from_nothing":
        return learn(place / "run", few)
    first = learn(place / "first", data(300, 1, GOALS["A"]))
    if kind == "old_policy":
        return first
    return learn(place / "run", few, execute_from=str(first))


if __name__ == "__main__":
    raise SystemExit(main("por_claims", CELLS, measure))
