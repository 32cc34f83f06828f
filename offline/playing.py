"""What recorded data was recorded in: its family, its task here, its spec, and playing in it.

A policy section needs an `EnvSpec`. Where one of our tasks has the data's observation and action,
its spec is taken, and the policy can be played; else a spec is made from the data alone.

Reading order: `family_of` -> `recorded_task` -> `find_task` -> `task_config` -> `spec_of` ->
`Judge`.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py

from ctrl_rl import registry
from ctrl_rl.commands.train import rebuild
from ctrl_rl.evaluation import SELECTION_SEED, evaluate
from ctrl_rl.making import make
from ctrl_rl.policy import Policy
from ctrl_rl.spec import ActionDim, Discrete, EnvSpec, ObsTerm
from offline import d4rl
from offline.scores import Reference
from offline.transitions import Transitions

FAMILIES = {
    "gym": ("halfcheetah", "hopper", "walker2d", "ant"),
    "antmaze": ("antmaze",),
    "maze2d": ("maze2d",),
    "adroit": ("pen", "door", "hammer", "relocate"),
    "kitchen": ("kitchen",),
}
"""D4RL's families that algorithms have settings for -> words in the names of their data sets."""

TASKS = {
    "halfcheetah": "HalfCheetah-v5",
    "hopper": "Hopper-v5",
    "walker2d": "Walker2d-v5",
    "ant": "Ant-v5",
}
"""The same words -> our task on the same body."""


def family_of(dataset: str) -> str | None:
    """D4RL's family by the words of a data set's name; None for none with settings of its own."""
    words = re.split(r"[^a-z0-9]+", dataset.lower())
    for family, names in FAMILIES.items():
        if any(name in words for name in names):
            return family
    return None


def recorded_task(path: Path) -> str | None:
    """The task that data of our own names, read without the data; None where it names none."""
    try:
        if path.is_dir():
            text = json.loads((path / "data" / "metadata.json").read_text())["ctrl_rl"]
        else:
            with h5py.File(path) as file:
                text = json.loads(file[d4rl.OURS][()])  # pyright: ignore
        task = text["task"]
    except (OSError, KeyError, TypeError, ValueError):
        return None  # whoever reads the data says what is wrong with it
    return task if isinstance(task, str) else None


def find_task(metadata: Mapping[str, Any]) -> str | None:
    """Our task that data was recorded in, or the one on the same body; None for none.

    Args:
        metadata: of `Episodes`; read are task and dataset.
    """
    if metadata.get("task") in registry.names("tasks"):
        return str(metadata["task"])
    words = re.split(r"[^a-z0-9]+", str(metadata.get("dataset", "")).lower())
    return next((task for name, task in TASKS.items() if name in words), None)


def task_config(task: str, recorded: Mapping[str, Any] | None, where: str) -> Any:
    """The settings of a task that data was recorded in, to evaluate with; or the task's own.

    Args:
        task: task id.
        recorded: `task_config` of the data's metadata: settings that are not the task's own.
        where: what it stands in, for errors.

    Raises:
        ValueError: settings that this version's task does not have.
    """
    kind = registry.load("tasks", task).Config
    return kind() if recorded is None else rebuild(kind, dict(recorded), Path(where))


def recorded_config(metadata: Mapping[str, Any], task: str) -> dict | None:
    """Settings other than a task's own that the data was recorded in; None for none."""
    return metadata.get("task_config") if metadata.get("task") == task else None


def spec_of(
    data: Transitions, metadata: Mapping[str, Any], task: str | None = None
) -> tuple[EnvSpec, str | None, str]:
    """What a policy learned from the data reads and gives.

    Args:
        data: what will be learned from.
        metadata: of its `Episodes`; read are task, task_config, dataset and action_bounds.
        task: a task that the data is said to fit; None to find one.

    Returns:
        The spec, the task to play in or None, and a line that says why there is none.

    Raises:
        NotFound: an unknown task.
        ValueError: `task` has an observation or action of another size.
    """
    name, found = str(metadata.get("dataset", "recorded data")), task or find_task(metadata)
    if found is None:
        return _made_spec(data, metadata), None, f"no evaluation: no task here is that of {name}"
    config = task_config(found, recorded_config(metadata, found), name)
    env = make(found, 1, threads=1, config=config.evaluation())
    env.close()
    spec, sizes = env.spec, (data.obs_size, data.action_size)
    if not isinstance(spec.action, Discrete) and sizes == (spec.obs_size(), spec.action_size):
        return spec, found, ""
    wanted = "discrete actions" if isinstance(spec.action, Discrete) else f"{spec.action_size}"
    reason = (
        f"{name} has observations and actions of {sizes[0]} and {sizes[1]} numbers, {found} of "
        f"{spec.obs_size()} and {wanted}"
    )
    if task is not None:
        raise ValueError(reason)
    return _made_spec(data, metadata), None, f"no evaluation: {reason}"


def _made_spec(data: Transitions, metadata: Mapping[str, Any]) -> EnvSpec:
    """One observation term, and actions within the bounds that the file names, or -1..1."""
    ones = [1.0] * data.action_size
    low, high = metadata.get("action_bounds") or ([-x for x in ones], ones)
    bounds = [
        (-1.0, 1.0) if None in ends or not all(map(math.isfinite, ends)) else ends
        for ends in zip(low, high, strict=True)
    ]
    return EnvSpec(
        task=str(metadata.get("dataset", "recorded data")),
        num_envs=1,
        obs={"actor": (ObsTerm(name="obs", kind="signal", size=data.obs_size),)},
        action=tuple(
            ActionDim(name=f"action_{i}", low=float(ends[0]), high=float(ends[1]))
            for i, ends in enumerate(bounds)
        ),
        physics_dt=1.0,  # nothing is known of time: a step is one unit
        step_dt=1.0,
        max_episode_steps=max(int(data.lengths.max()), 1),
    )


class Judge:
    """Plays policies during training, in environments of its own; see `offline.training.Evaluate`.

    Each evaluation of a seed plays the same episodes from the same start, so that checkpoints are
    compared on equal terms and a resumed run finds the figures of an uninterrupted one.

    Args:
        task: task id.
        episodes: played side by side, without noise.
        reference: of the data set; adds `eval/normalized_score`.
        device: of the environments.
        threads: simulator threads, 0 for all cores.
        config: settings of the task; None for its own.
    """

    def __init__(
        self,
        task: str,
        episodes: int,
        reference: Reference | None = None,
        device: str = "cpu",
        threads: int = 0,
        config: Any = None,
    ) -> None:
        self.task, self.episodes, self.reference = task, episodes, reference
        self.device, self.threads = device, threads
        self.config = registry.load("tasks", task).Config() if config is None else config
        self._envs: dict[int, tuple[Any, dict]] = {}

    def __call__(self, policy: Policy, seed: int) -> dict[str, float]:
        """Figures of a policy, for the log."""
        if seed not in self._envs:
            env = make(
                self.task,
                self.episodes,
                device=self.device,
                seed=seed + SELECTION_SEED,
                threads=self.threads,
                config=self.config.evaluation(),
            )
            self._envs[seed] = env, env.state_dict()
        env, start = self._envs[seed]
        env.load_state_dict(start)
        figures = evaluate(policy, env, self.episodes).log()
        if self.reference is not None:
            score = self.reference.normalize(figures["eval/episode_return"])
            figures["eval/normalized_score"] = score
        return figures

    def close(self) -> None:
        """Close the environments."""
        for env, _ in self._envs.values():
            env.close()
        self._envs = {}
