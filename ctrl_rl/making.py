"""`ctrl_rl.make`: a task by its id; `ctrl_rl.preset`: the settings that suit it."""

import dataclasses
import os
import typing
from functools import partial

from ctrl_rl import registry

MANY = 100_000
"""Environments from which on their memory is looked at before they are built."""


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
        ValueError: a device that is not there, a backend or device the task cannot use, or more
            environments than its memory holds.
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
    build = partial(
        task_class,
        config,
        backend=backend,
        device=device,
        seed=seed,
        first_index=first_index,
        threads=threads,
    )
    if num_envs > MANY:
        _check_memory(build, num_envs)
    return build(num_envs=num_envs)


def _check_memory(build, num_envs: int) -> None:
    """Refuse what cannot be held: the state of one environment is measured, the rest is more.

    Raises:
        ValueError: with both sizes.
    """
    import torch

    env = build(num_envs=1)
    device, task = torch.device(env.device), env.spec.task
    needed = num_envs * _num_bytes(env.state_dict())
    env.close()
    if device.type == "cuda":
        have = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf"):
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:  # Windows
        return
    if needed > have:
        raise ValueError(
            f"{num_envs:,} environments of {task} need more than {needed / 2**30:,.1f} GiB of "
            f"memory; {device} has {have / 2**30:,.1f} GiB"
        )


def _num_bytes(state) -> int:
    """Size of the tensors of a nested state."""
    if isinstance(state, dict):
        return sum(_num_bytes(value) for value in state.values())
    return getattr(state, "nbytes", 0)


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
