"""The one loop of all offline learners: draw, update, log, evaluate, save.

Offline learners differ in their update alone; there is no environment in it. A job trains several
seeds side by side, each with initial weights, minibatches and noise of its own, so that a seed
learns the same alone as in a job, but for rounding.

A job of one seed is one run folder, see `ctrl_rl.runs`. A job of several has below its own a folder
`s<seed>` for each, which `ctrl-rl eval`, `export` and `plot` read like any run:

    config.json, metrics.csv, checkpoints/    the means over seeds; last.pt holds the whole job
    s0/config.json, metrics.csv               of seed 0 alone
    s0/checkpoints/last.pt, best.pt           its policy section

The folders of seeds are written anew from the job at each of its checkpoints.

Reading order: `Learner` -> `fit` -> `check_data` -> the folders of seeds.
"""

import csv
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ctrl_rl import distributed
from ctrl_rl.checkpoints import replacing, save_checkpoint, write_text
from ctrl_rl.compiled import Diverged
from ctrl_rl.policy import Policy
from ctrl_rl.run_folder import BEST_KEY
from ctrl_rl.runs import Recorded, Run
from ctrl_rl.spec import Discrete, EnvSpec
from offline.collapse import Watch
from offline.networks import stream
from offline.transitions import Batch, Transitions

LOG_EVERY = 250
"""Updates behind a row of the log; the run is asked for evaluation and checkpoint as often."""

METRICS = {
    "eval/<metric>": "figure of an evaluation",
    "eval/normalized_score": "its return as a D4RL score: 0 random, 100 expert",
    "time/updates_per_s": "updates per second, evaluation left out; those of all seeds count once",
    "time/update_s": "drawing and updating [s]",
}
"""What the loop itself logs; part of every learner's own METRICS."""

BOUND_TOLERANCE = 1e-4
"""How far a recorded action may lie outside its bounds [half ranges]: files keep float32."""

CHECKED_AT_ONCE = 1 << 18
"""Rows of data that are looked at together, so that no copy of all is made."""

Evaluate = Callable[[Policy, int], dict[str, float]]
"""`evaluate(policy, seed) -> {key: figure}`, in environments of its own."""


class Learner(Protocol):
    """What `fit` asks of an algorithm's class."""

    name: str
    """As the registry has it."""
    metrics: dict[str, str]
    """Every key that is logged, with its meaning."""
    spec: EnvSpec
    seeds: tuple[int, ...]

    @property
    def stats(self) -> tuple[str, ...]:
        """Keys of what `update` returns, in its order."""
        ...

    @property
    def config(self) -> Any:
        """A frozen dataclass with `total_steps` and `batch_size`."""
        ...

    def update(self, batch: Batch) -> Tensor:
        """One step on (S, B, ...) transitions; figures (K, S) named by `stats`, on the device."""
        ...

    def policy_section(self, seed: int) -> dict:
        """Policy of the seed at this place of the job, 0..S-1; see `ctrl_rl.policy`."""
        ...

    def state_dict(self) -> dict:
        """Everything that decides the future of training but what is drawn, as a copy."""
        ...

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        ...


def fit(
    learner: Learner, data: Transitions, run: Run | None = None, evaluate: Evaluate | None = None
) -> Run:
    """Train to `total_steps` updates, or go on where `run` stopped.

    Args:
        learner: networks and optimisers of S seeds.
        data: what to learn from, on the learner's device; its `report` goes into the run's record.
        run: where to log and save, a `ctrl_rl.Run`; None keeps the log in memory.
        evaluate: called for each seed when the run says that it is due.

    Returns:
        The run; its `rows` hold what was logged, means over the seeds.

    Raises:
        Diverged: a figure of a seed is not finite; the message names seed and figure. Or the
            critics collapse and `monitor` is to stop then. The last checkpoint stands.
        ValueError: data and learner do not fit, see `check_data`; this process is one of a group.
    """
    distributed.refuse_group(learner.name)
    check_data(data, learner.spec)
    run = Run() if run is None else run
    config, seeds = learner.config, learner.seeds
    draws = [stream(seed, "minibatches", data.device) for seed in seeds]
    record = {"dataset": "recorded data", **data.report}
    source = Recorded(spec=learner.spec, data=record, seeds=seeds, device=data.device)
    fixed_length = getattr(learner, "fixed_length", False)
    run.start(learner.metrics, config, source, learner.name, fixed_length=fixed_length)
    watch, rows = Watch(learner, data), [[] for _ in seeds]
    progress, drawn = _Progress(learner, rows, watch), Draws(*draws)
    step = run.resume(learner=progress, env=drawn)
    while step < config.total_steps and not run.stopping(step):
        began, first = time.perf_counter(), step
        step = min(step + LOG_EVERY, config.total_steps)
        stats = [
            learner.update(data.batch(data.draw(config.batch_size, draws)))
            for _ in range(step - first)
        ]
        figures = _figures(learner, torch.stack(stats).mean(0), step)
        for mine, found in zip(figures, watch.check(step, step == config.total_steps), strict=True):
            mine |= found
        wall_s = time.perf_counter() - began
        of_loop = {"time/updates_per_s": (step - first) * len(seeds) / wall_s}
        of_loop["time/update_s"] = wall_s
        if run.due("eval", step) and evaluate is not None:
            for i, seed in enumerate(seeds):
                kind = getattr(learner, "policy_class", Policy)
                policy = kind.from_section(learner.policy_section(i), data.device)
                figures[i] |= evaluate(policy, seed)
        for mine, found in zip(rows, figures, strict=True):
            mine.append({"step": step, **found, **of_loop})
        run.log(step, _mean(figures) | of_loop)
        if run.due("checkpoint", step):
            sections = [learner.policy_section(i) for i in range(len(seeds))]
            if len(seeds) > 1:
                _write_seed_folders(run, seeds, sections, rows)
            whole = _whole(seeds, sections)
            run.save(step, whole, progress.state_dict(), drawn.state_dict())
    run.finish()
    return run


def check_data(data: Transitions, spec: EnvSpec) -> None:
    """Refuse data that a policy of this spec cannot have been recorded from.

    Raises:
        ValueError: other sizes, a value that is not finite, or an action out of bounds, with its
            place.
    """
    if isinstance(spec.action, Discrete):
        raise ValueError(f"{spec.task} has discrete actions; offline learners need continuous ones")
    found, wanted = (data.obs_size, data.action_size), (spec.obs_size(), spec.action_size)
    if found != wanted:
        raise ValueError(
            f"the data has observations and actions of {found[0]} and {found[1]} numbers, "
            f"{spec.task} of {wanted[0]} and {wanted[1]}"
        )
    low, high = (
        torch.tensor([getattr(dim, end) for dim in spec.action], device=data.device)
        for end in ("low", "high")
    )
    middle, reach = (high + low) / 2, (high - low) / 2 * (1 + BOUND_TOLERANCE)
    for part, rows in enumerate(data.rows.split(CHECKED_AT_ONCE)):
        finite = rows.isfinite()
        action = rows[:, data.obs_size : data.obs_size + data.action_size]
        inside = (action - middle).abs() <= reach
        inside |= (action == 0).all(1, keepdim=True)  # so the rows that hold no step
        if bool(finite.all()) and bool(inside.all()):
            continue
        wrong = ~finite if not bool(finite.all()) else ~inside
        row, column = wrong.nonzero()[0].tolist()
        at = part * CHECKED_AT_ONCE + row
        episode = int((data.starts <= at).sum()) - 1
        where = f"step {at - int(data.starts[episode])} of episode {episode} of the data"
        if wrong.shape == rows.shape:
            raise ValueError(f"{where} holds a value that is not finite")
        dim = spec.action[column]
        raise ValueError(
            f"{where} has {float(action[row, column]):.6g} as action {dim.name!r}, whose bounds "
            f"are {dim.low:g} and {dim.high:g}"
        )


class Draws:
    """Random generators as one part of a checkpoint."""

    def __init__(self, *generators: torch.Generator) -> None:
        self._generators = generators

    def state_dict(self) -> dict:
        """Where each of them stands."""
        return {"draws": [generator.get_state() for generator in self._generators]}

    def load_state_dict(self, state: dict) -> None:
        """Draw next what would have been drawn then."""
        for generator, drawn in zip(self._generators, state["draws"], strict=True):
            generator.set_state(drawn)


# Inside -------------------------------------------------------------------------------------


class _Progress:
    """A learner, the rows of each seed so far and the watch as one part of a checkpoint."""

    def __init__(self, learner: Learner, rows: list[list[dict]], watch: Watch) -> None:
        self._learner, self._rows, self._watch = learner, rows, watch

    def state_dict(self) -> dict:
        """As `load_state_dict` takes it."""
        watch = self._watch.state_dict()
        return {"state": self._learner.state_dict(), "rows": self._rows, "watch": watch}

    def load_state_dict(self, state: dict) -> None:
        """Go on where `state_dict` was taken."""
        self._learner.load_state_dict(state["state"])
        self._rows[:] = state["rows"]
        self._watch.load_state_dict(state["watch"])


def _figures(learner: Learner, means: Tensor, step: int) -> list[dict[str, float]]:
    """One row for each seed of the means (K, S) of what the updates returned."""
    values = means.T.tolist()
    for seed, column in zip(learner.seeds, values, strict=True):
        for key, value in zip(learner.stats, column, strict=True):
            if not math.isfinite(value):
                raise Diverged(
                    f"seed {seed} diverged before update {step}: {key} is {value}; the last "
                    "checkpoint is kept. A smaller learning rate or rewards of smaller size may "
                    "help"
                )
    return [dict(zip(learner.stats, column, strict=True)) for column in values]


def _mean(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each figure over the seeds that have it."""
    if len(figures) == 1:
        return figures[0]
    found = {key: [row[key] for row in figures if key in row] for row in figures for key in row}
    return {key: math.fsum(values) / len(values) for key, values in found.items()}


def _whole(seeds: Sequence[int], sections: list[dict]) -> dict:
    """What the job's own checkpoints hold as policy; that of several is no one's."""
    if len(seeds) == 1:
        return sections[0]
    return {"seeds": [f"s{seed}" for seed in seeds], "weights": {}}


def _write_seed_folders(
    run: Run, seeds: Sequence[int], sections: list[dict], rows: list[list[dict]]
) -> None:
    """Bring the folder of each seed to the last row.

    Raises:
        ValueError: a policy is not finite; no folder was touched.
    """
    for seed, section in zip(seeds, sections, strict=True):
        for name, value in section["weights"].items():
            if not bool(value.isfinite().all()):
                raise ValueError(
                    f"policy weight {name} of seed {seed} is not finite; the last checkpoint is "
                    "kept"
                )
    if run.folder is None:
        return
    config = json.loads((run.folder / "config.json").read_text())
    for seed, section, mine in zip(seeds, sections, rows, strict=True):
        folder = run.folder / f"s{seed}"
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        own = config | {"run": {**config["run"], "seed": seed, "seeds": [seed]}, "job": ".."}
        write_text(folder / "config.json", json.dumps(own, indent=1) + "\n")
        columns = list(dict.fromkeys(key for row in mine for key in row))
        with replacing(folder / "metrics.csv") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(mine)
        content = {"step": mine[-1]["step"], "policy": section}
        scores = [row[BEST_KEY] for row in mine if BEST_KEY in row]
        if BEST_KEY in mine[-1] and mine[-1][BEST_KEY] > max(scores[:-1], default=-math.inf):
            save_checkpoint(checkpoints / "best.pt", content)
        save_checkpoint(checkpoints / "last.pt", content)
