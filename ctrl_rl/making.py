"""`ctrl_rl.make`: a task by its id; `ctrl_rl.preset`: the settings that suit it."""

import dataclasses
import typing

from ctrl_rl import registry


def make(
    task: str,
    num_envs: int = 1,
    *,
    backend: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    first_index: int = 0,
    threads: int = 0,
    config=None,
):
    """Build N environments of a task.

    Args:
        task: id such as "Go1-Velocity-Flat-v0"; `ctrl-rl list tasks` shows them.
        num_envs: N.
        backend: simulator; None for the task's first.
        device: torch device.
        seed: decides every draw; environment i's stream depends on (seed, i) alone.
        first_index: number of row 0.
        threads: simulator threads, 0 for all cores.
        config: the task's configuration object; None for its default.

    Raises:
        NotFound: unknown task, with the nearest name.
        ValueError: a device that is not there, or a backend or device the task cannot use.
    """
    task_class = registry.load("tasks", task)
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = None
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {str(device)!r}; use cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}: torch finds no GPU here; see ctrl-rl doctor")
    return task_class(
        config,
        num_envs=num_envs,
        backend=backend,
        device=device,
        seed=seed,
        first_index=first_index,
        threads=threads,
    )


def preset(task: str, algo: str = "ppo", **changes):
    """The algorithm's configuration with the task's preset, as `ctrl-rl train TASK` uses it.

    Args:
        task: task id.
        algo: name of the algorithm.
        changes: fields to set otherwise.

    Raises:
        NotFound: unknown task or algorithm.
        TypeError: a change that is no field of the configuration.
    """
    config = typing.get_type_hints(registry.load("algos", algo).train)["config"]
    fields = {f.name for f in dataclasses.fields(config)}
    found = registry.load("tasks", task).presets.get(algo, {})
    return config(**{k: v for k, v in found.items() if k in fields} | changes)
