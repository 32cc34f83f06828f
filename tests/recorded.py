"""Small recorded data, and what tests of offline learners share."""

import numpy as np
import torch

from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm
from offline.episodes import Episodes
from offline.transitions import Transitions


def spec(obs_size: int, low=(-1.0,), high=(1.0,), task="Recorded-v0") -> EnvSpec:
    return EnvSpec(
        task=task,
        num_envs=1,
        obs={"actor": (ObsTerm(name="obs", kind="signal", size=obs_size),)},
        action=tuple(
            ActionDim(name=f"a{i}", low=x, high=y)
            for i, (x, y) in enumerate(zip(low, high, strict=True))
        ),
        physics_dt=1.0,
        step_dt=1.0,
        max_episode_steps=1000,
    )


def episodes(obs, action, reward, lengths, terminated, truncated=None) -> Episodes:
    """From lists; every successor is known."""
    count = len(lengths)
    return Episodes(
        obs=np.asarray(obs, np.float32),
        action=np.asarray(action, np.float32),
        reward=np.asarray(reward, np.float32),
        lengths=np.asarray(lengths, np.int64),
        terminated=np.asarray(terminated, bool),
        truncated=np.zeros(count, bool) if truncated is None else np.asarray(truncated, bool),
        final_known=np.ones(count, bool),
    )


def random_data(
    seed=0,
    rows=200,
    obs_size=3,
    low=(-1.0, -1.0),
    high=(1.0, 1.0),
    offset=0.0,
    scale=1.0,
    **kinds,
) -> Transitions:
    """Noise: for what does not depend on what is learned."""
    draw = np.random.default_rng(seed)
    lengths = np.full(rows // 20, 20)
    found = episodes(
        offset + scale * draw.standard_normal((rows + len(lengths), obs_size)),
        draw.uniform(low, high, (rows, len(low))),
        draw.standard_normal(rows),
        lengths,
        draw.random(len(lengths)) < 0.5,
    )
    return Transitions.from_episodes(found, timeouts="keep", **kinds)


def same(a, b, path="") -> None:
    """Equal to the bit, with the place of the first difference."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}.{i}")
    else:
        assert a == b or (a != a and b != b), path
