"""One training run: its folder, its log, its checkpoints, and going on where it stopped.

Run folder:

    config.json               everything that was decided, written before training
    metrics.csv, tensorboard/ one row per logged iteration; x is env steps, or updates where a
                              recorded data set takes the place of environments
    checkpoints/last.pt       complete: policy, learner with its generator, environments
    checkpoints/replay-N.pt   the replay buffer that last.pt of env step N names
    checkpoints/best.pt       policy section only, best mean return of an evaluation
    checkpoints/step-N.pt     policy section only
    curves.png, video.mp4, evaluation.json, report.html

Reading order: `Recorded` -> `Run`. How a run folder is read: `ctrl_rl.run_folder`; how a checkpoint
is written: `ctrl_rl.checkpoints`.
"""

import csv
import dataclasses
import json
import math
import re
import shutil
import signal
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ctrl_rl import distributed
from ctrl_rl.checkpoints import (
    FORMAT,
    check_free,
    check_like,
    load_checkpoint,
    make_folder,
    plain,
    replacing,
    save_checkpoint,
    write_text,
)
from ctrl_rl.compiled import diverged
from ctrl_rl.env import Fault
from ctrl_rl.explosion import REWARD, explosion
from ctrl_rl.progress import Progress
from ctrl_rl.provenance import provenance
from ctrl_rl.run_folder import BEST_KEY, find_checkpoint, parse_config, read_config, read_metrics
from ctrl_rl.spec import EnvSpec, strict

PROCESSES = "processes"
"""Key under which a checkpoint of a group of processes lists their environments' states."""

LAST_KINDS = {
    "step": int,
    "policy": dict,
    "learner": dict,
    "env": dict,
    "best": float,
    "config": str,
}
"""What last.pt holds."""

LEFTOVERS = {".writable", ".writable.tmp", "config.json.tmp"}
"""Files of a run that was killed before it had its config.json; they are in nobody's way."""


# Run ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What an offline run learns from: it stands where `Run.start` else gets an environment."""

    spec: EnvSpec
    """What the policy reads and gives."""
    data: dict
    """Which data ("dataset") and what was done to it, plain JSON values: "data" in config.json. A
    resumed run must find the same, but for the place of the "file"."""
    seeds: tuple[int, ...]
    """Learned side by side."""
    device: torch.device | str = "cpu"
    """Where the data lies."""


class Run:
    """The log and memory of one training run.

    A trainer calls, in this order: `initial`, `start`, `resume`, then per iteration `log`, `due`,
    `save` until `stopping` or its last step, then `finish`. In a group of processes all of them
    do so, and rank 0 alone writes and prints.

    Args:
        folder: the run folder; None keeps the log in memory and writes nothing.
        eval_every: env steps between evaluations; None for a fifth of the run, 0 for the end only.
        checkpoint_every: env steps between checkpoints; None for a tenth of the run, 0 for the
            end only. An evaluation is always followed by a checkpoint.
        stop_after: leave with a checkpoint at the first iteration that reaches this env step.
        resume: go on in a folder that holds a run.
        init_from: another run whose weights and statistics a trainer starts from; see `initial`.
        console: show progress.
        settings: what else decided the run (flags of the command line), kept in config.json.

    Raises:
        ValueError: the folder holds something, is no run (with `resume`), cannot be written, or
            its disk is too full.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        eval_every: int | None = None,
        checkpoint_every: int | None = None,
        stop_after: int | None = None,
        resume: bool = False,
        init_from: str | Path | None = None,
        console: bool = True,
        settings: dict | None = None,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self._place = self.folder  # also on ranks that write no run
        leads = distributed.rank() == 0
        self._follows = folder is not None and not leads
        self.rows: list[dict[str, float]] = []
        self.faults: dict[str, tuple[int, int]] = {}
        self.metrics: dict[str, str] = {}
        self.total_steps = 0
        self._gamma: float | None = None
        self.settings = settings or {}
        self._every = {"eval": eval_every, "checkpoint": checkpoint_every}
        self._last_due: dict[str, int] = {"eval": 0, "checkpoint": 0}
        self._evaluated_at = -1
        self._stop_after = stop_after
        self._interrupted = self._leaving = False
        self._handlers: dict = {}
        self._columns: list[str] = []
        self._csv = self._tensorboard = self._checkpoint = self._replay = None
        self._best: float = -math.inf
        self._resume = resume
        self._init_from = None if init_from is None else Path(init_from)
        self._console = Progress() if console and folder is not None and leads else None
        self._new_folders: list[Path] = []
        self._unit, self._command = "env steps", "ctrl-rl train"
        if self.folder is not None and leads:
            folders = (self.folder, *self.folder.parents)
            self._new_folders = [f for f in folders if not f.exists()]
            try:
                _claim(self.folder, resume)
            except ValueError:
                self._forget_folder()
                raise
        if self.folder is not None and resume:
            last = self.folder / "checkpoints" / "last.pt"
            if last.is_file():
                self._checkpoint = load_checkpoint(last, LAST_KINDS)
                _check_processes(self.folder, self._checkpoint["env"])
                if name := self._checkpoint.get("replay"):
                    path = _own_replay(last.with_name(name))
                    self._replay = _load_replay(path, self._checkpoint["step"])
            elif len([*last.parent.glob("step-*.pt")]) > 1:  # one: killed in the first checkpoint
                raise ValueError(f"{last} is missing: there is nothing to go on from")
        if self._follows:
            self.folder = None

    def initial(self, spec: EnvSpec, algo: str | None = None) -> dict | None:
        """The learner's state in the run named by `init_from`; None where there is none.

        Args:
            spec: the environment's contract.
            algo: name of the algorithm; None for one that takes states of others.

        Raises:
            ValueError: `init_from` is no run, or one of another algorithm, observation or action.
        """
        if self._init_from is None or self._checkpoint is not None:
            return None
        from ctrl_rl.policy import check_same_shape

        config = read_config(self._init_from)
        if algo not in (None, config["algo"]):
            raise ValueError(
                f"{algo} cannot start from {self._init_from}, a run of {config['algo']}: name a "
                f"run of {algo}"
            )
        check_same_shape(EnvSpec.from_dict(config["spec"]), spec, spec.obs)
        last = find_checkpoint(self._init_from, "last")
        return load_checkpoint(last, {"learner": dict})["learner"]

    def start(
        self,
        metrics: dict[str, str],
        config,
        env,
        algo: str,
        replay_bytes: int = 0,
        fixed_length: bool = False,
    ) -> None:
        """Declare what will be logged and write config.json.

        Args:
            metrics: key -> explanation; a part in angle brackets stands for any name, as in
                "reward/<term>".
            config: the algorithm's frozen dataclass; `total_steps` gives the length.
            env: the training environment, or `Recorded`; then steps are updates.
            algo: name of the algorithm.
            replay_bytes: largest size of what `save` gets as `replay`, in this process.
            fixed_length: step sizes depend on `total_steps`, so that a resumed run must keep it.

        Raises:
            ValueError: the disk is too full for the replay; or a resumed run, or the checkpoint in
                its folder, was made by another algorithm, task, size or configuration; nothing
                was changed.
        """
        self.metrics = dict(metrics)
        self._patterns = [
            re.compile(re.sub(r"<\w+>", "[^/]+", re.sub(r"([.+*?^$()])", r"\\\1", k)))
            for k in metrics
        ]
        self.total_steps, self._gamma = config.total_steps, getattr(config, "gamma", None)
        if isinstance(env, Recorded):
            self._unit, self._command = "updates", "ctrl-rl offline train"
        kept = read_config(self._place)["run"] if self._resume and self._place else {}
        for kind, parts in (("eval", 5), ("checkpoint", 10)):
            if self._every[kind] is None:  # of a run that is made longer what it began with
                self._every[kind] = kept.get(f"{kind}_every", max(self.total_steps // parts, 1))
        if self._follows:
            self._catch_signals()
        if self.folder is None:
            return
        # Through JSON once, so that what is compared is what a later resume will read.
        record = json.loads(json.dumps(strict(self._record(config, env, algo))))
        if self._resume:
            self._check_same(record, read_config(self.folder), "was started with", fixed_length)
            if self._checkpoint:
                last = self.folder / "checkpoints" / "last.pt"
                made = parse_config(self._checkpoint["config"], last)
                verb = "holds a checkpoint of a run with"
                self._check_same(record, made, verb, fixed_length)
        if replay_bytes:  # for a moment the old file and the new one lie side by side
            found = sum(path.stat().st_size for path in self.folder.glob("checkpoints/replay-*"))
            needed = 2 * replay_bytes * distributed.world_size()
            check_free(self.folder, max(needed - found, 0))
        if isinstance(env, Recorded):
            source = f"{env.data['dataset']}, {algo}"
        else:
            num_envs, processes = record["run"]["num_envs"], distributed.world_size()
            shared = f" in {processes} processes" if processes > 1 else ""
            source = f"{env.spec.task}, {algo}, {num_envs} environments{shared}"
        self._begin = partial(self._open, record, source)
        if not self._checkpoint:  # else once it is known that the run can go on
            self._begin()

    @property
    def goes_on(self) -> bool:
        """Whether a checkpoint of the run is there to go on from."""
        return self._checkpoint is not None

    def resume(self, **parts) -> int:
        """Let the parts of a run go on where `save` left them.

        Args:
            parts: "learner", "env" and, where there is one, "replay": what has a `state_dict` and
                a `load_state_dict`.

        Returns:
            Env steps so far, 0 for a new run.

        Raises:
            ValueError: the checkpoint does not fit a part, as one that was damaged or edited; the
                folder stays as it was.
        """
        if self._checkpoint is None:
            return 0
        saved = self._saved(self._checkpoint)
        for name, part in parts.items():
            state, replay = saved.get(name), name == "replay"
            try:
                check_like(state, part.state_dict(), name, rows_may_differ=replay)
                part.load_state_dict(state)
            except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
                file = f"replay-{saved['step']}.pt" if replay and state else "last.pt"
                reason = " ".join(str(error).split())
                raise ValueError(
                    f"{self._place}/checkpoints/{file} does not fit this run: {reason}"
                ) from None
        self.restore()
        return saved["step"]

    def restore(self) -> dict | None:
        """What `save` was given last, as {"step", "policy", "learner", "env"}; None at step 0.

        And "replay", where there was one. From here on the folder is written to.
        """
        if self._checkpoint is None:
            return None
        saved = self._saved(self._checkpoint)
        self._best = self._checkpoint["best"]
        self._last_due = dict.fromkeys(self._last_due, saved["step"])
        if self.folder is not None:
            self._begin()
        self._checkpoint = self._replay = None
        return saved

    def _saved(self, checkpoint: dict) -> dict:
        """What `restore` returns."""
        saved = {key: checkpoint[key] for key in ("step", "policy", "learner", "env")}
        if distributed.world_size() > 1:
            saved["env"] = saved["env"][PROCESSES][distributed.rank()]
        return saved if self._replay is None else {**saved, "replay": self._replay}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Add figures at an env step; a second call at the same step adds to the row.

        Raises:
            Diverged: the figures show a reward that is not finite, or a critic or temperature that
                exploded, see `ctrl_rl.explosion`; the row is kept.
            KeyError: a key that was not declared.
        """
        for key in metrics:
            if not any(p.fullmatch(key) for p in self._patterns):
                raise KeyError(f"metric {key!r} was not declared; see `Run.start`")
        figures = {key: float(value) for key, value in metrics.items()}
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1].update(figures)
        else:
            self._flush_row()
            self.rows.append({"step": step, **figures})
        if self._tensorboard is not None:
            for key, value in figures.items():
                self._tensorboard.add_scalar(key, value, step)
        if self._console:
            self._console.show(step, self.rows[-1])
        if REWARD in figures:
            if what := explosion(self.rows, self._gamma):
                raise diverged(step, what)

    def report_fault(self, step: int, fault: Fault) -> None:
        """Name a fault; one of the same cause as an earlier one is counted, not said again.

        `faults` keeps cause -> (step, environment) of the first.
        """
        if fault.cause in self.faults:
            return
        self.faults[fault.cause] = step, fault.row
        where = f"environment {fault.row} at env step {step:,}"
        self._say(f"fault in {where}: {fault.cause}; it was reset, and training goes on")

    def due(self, kind: str, step: int) -> bool:
        """Whether it is time for "eval" or "checkpoint"; ask once per iteration, eval first.

        True when `step` reached the next multiple of the interval, and at the end of the run,
        whatever the number of environments. A stop on demand makes a checkpoint due, not an
        evaluation, so that a resumed run evaluates where an uninterrupted one does.
        """
        every, last = self._every[kind] or 0, self._last_due[kind]
        due = step >= self.total_steps or bool(every and step // every > last // every)
        self._last_due[kind] = step
        if kind == "eval" and due:
            self._evaluated_at = step
        if kind == "checkpoint":
            # The last word for this iteration: a Ctrl-C that comes later waits for the next one.
            self._leaving = distributed.any_rank(self._interrupted)
            due = due or self._evaluated_at == step or self.stopping(step)
        return due

    def stopping(self, step: int) -> bool:
        """Whether to leave after this iteration: `stop_after` reached, or Ctrl-C."""
        return self._leaving or (self._stop_after is not None and step >= self._stop_after)

    def row_end(self, step: int, length: int) -> int:
        """Env step at which a row of `length` steps ends that begins at `step`.

        Earlier where an evaluation, a checkpoint or `stop_after` is asked for before that many.
        """
        short = [every for every in self._every.values() if every and every < length]
        ends = [step + length, *(step - step % every + every for every in short)]
        if self._stop_after is not None and step < self._stop_after < length:
            ends.append(self._stop_after)
        return min(ends)

    def save(
        self, step: int, policy: dict, learner: dict, env: dict, replay: dict | None = None
    ) -> None:
        """Write last.pt and step-N.pt, and best.pt if the evaluation at this step was the best.

        The replay goes to a file of its own before last.pt, which names it; older ones are removed
        when last.pt stands. In a group of processes each writes its own replay.

        Args:
            step: env steps so far.
            policy: a policy section, see `ctrl_rl.policy`.
            learner: the learner's `state_dict()`.
            env: the environment's `state_dict()`.
            replay: a replay buffer's `state_dict()`.

        Raises:
            ValueError: a weight is not finite, or the disk failed; the last checkpoint stands.
        """
        if distributed.world_size() > 1:
            env = {PROCESSES: distributed.gathered_on_first(plain(env))}
        if self._follows and replay is not None:
            self._save_replay(step, replay)
        if self.folder is None:
            return
        for name, value in policy["weights"].items():
            if not torch.isfinite(value).all():
                raise ValueError(
                    f"policy weight {name} is not finite at step {step:,}; "
                    f"{self.folder}/checkpoints/last.pt holds the last good step"
                )
        self._flush_row()
        here = self.rows[-1] if self.rows and self.rows[-1]["step"] == step else {}
        score = here.get(BEST_KEY, -math.inf)
        better = score > self._best
        if better:
            self._best = score
        checkpoints = self.folder / "checkpoints"
        section = {"step": step, "policy": policy}
        whole = {
            **section,
            "learner": learner,
            "env": env,
            "best": self._best,
            "config": (self.folder / "config.json").read_text(),
        }
        if replay is not None:
            whole["replay"] = f"replay-{step}.pt"
        try:
            save_checkpoint(checkpoints / f"step-{step}.pt", section)
            if better:
                save_checkpoint(checkpoints / "best.pt", section)
            if replay is not None:
                self._save_replay(step, replay)
            save_checkpoint(checkpoints / "last.pt", whole)
            for path in checkpoints.glob("replay-*"):  # also what a kill left half written
                if replay is None or not re.fullmatch(rf"replay-{step}(-rank\d+)?\.pt", path.name):
                    path.unlink()
        except OSError as error:
            raise _cannot_write(error, self.folder, self._command) from error

    def finish(self) -> None:
        """Close the log, draw curves.png and say where everything lies."""
        step = self.rows[-1]["step"] if self.rows else 0
        self.close()
        if self.folder is None:
            return
        from ctrl_rl import curves

        curves.draw_run(self.folder)
        if step >= self.total_steps:
            self._say(f"finished: {step:,} {self._unit}, {self.folder}")
        else:
            self._say(
                f"stopped at {step:,} of {self.total_steps:,} {self._unit}; "
                f"go on with: {self._command} --resume {self.folder}"
            )

    def close(self) -> None:
        """Flush and give the signal handlers back; safe to call twice."""
        self._flush_row()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        if self._csv is not None:
            self._csv.close()
            self._csv = None
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._console:
            self._console.stop()
        self._forget_folder()

    def _save_replay(self, step: int, replay: dict) -> None:
        """Write this process's replay; returns when those of all processes stand."""
        assert self._place is not None
        path = _own_replay(self._place / "checkpoints" / f"replay-{step}.pt")
        try:
            save_checkpoint(path, {"step": step, "replay": replay})
        except OSError as error:
            raise _cannot_write(error, self._place, self._command) from error
        distributed.any_rank(False)

    # Inside -----------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        if self._console:
            self._console.say(line)

    def _forget_folder(self) -> None:
        """A run that never started leaves no empty folder."""
        for folder in self._new_folders:
            if not folder.is_dir() or any(folder.iterdir()):
                return
            folder.rmdir()

    def _record(self, config, env, algo: str) -> dict:
        """What config.json holds."""
        recorded = isinstance(env, Recorded)
        spec = env.spec if recorded else distributed.whole(env.spec)
        return {
            "format": FORMAT,
            "task": spec.task,
            "algo": algo,
            "run": {
                **self.settings,
                "num_envs": None if recorded else spec.num_envs,
                **({"seeds": env.seeds} if recorded else {}),
                "seed": env.seeds[0] if recorded else getattr(env, "seed", None),
                "backend": getattr(env, "backend", None),
                "device": str(env.device),
                "torch_threads": torch.get_num_threads(),
                "eval_every": self._every["eval"],
                "checkpoint_every": self._every["checkpoint"],
            },
            "processes": distributed.world_size(),
            "algo_config": dataclasses.asdict(config),
            "task_config": dataclasses.asdict(env.config) if hasattr(env, "config") else {},
            "metrics": self.metrics,
            "spec": json.loads(spec.to_json()),
            **({"data": env.data} if recorded else {}),
            **provenance(),
        }

    def _check_same(self, new: dict, old: dict, verb: str, fixed_length: bool) -> None:
        """A resumed run may be longer, if nothing depends on its length; the rest is the same."""
        total, before = (record["algo_config"].get("total_steps", 0) for record in (new, old))
        if total < before:
            raise ValueError(f"total_steps may be raised, not lowered: {before:,}, now {total:,}")
        if total != before and fixed_length:
            raise ValueError(
                f"total_steps must stay {before:,}: step sizes of {new['algo']} fall over the "
                "whole run; start a new one"
            )
        free = {"total_steps", "threads", "checkpoint_every", "file"}
        parts = ("task", "algo", "spec", "algo_config", "task_config", "run", "data")
        old, new = {"data": {}, **old}, {"data": {}, **new}
        for part in parts:
            if not isinstance(old[part], dict):
                pairs = [(part, old[part], new[part])]
            else:
                keys = dict.fromkeys((*old[part], *new[part]))
                if part == "run":  # a run made from Python records no flags
                    keys = [k for k in keys if k in old[part] and k in new[part]]
                pairs = [(k, old[part].get(k), new[part].get(k)) for k in keys if k not in free]
            for key, before, now in pairs:
                if before != now:
                    values = "" if isinstance(now, (dict, list)) else f" ({before!r}, now {now!r})"
                    hint = "" if new["data"] else " with --init-from to go on from its weights"
                    raise ValueError(
                        f"{self.folder} {verb} another {key}{values}; start a new run{hint}"
                    )

    def _open(self, record: dict, source: str) -> None:
        """Write config.json, cut the logs back to the checkpoint and open them."""
        assert self.folder is not None
        step = self._checkpoint["step"] if self._checkpoint else 0
        self.rows = read_metrics(self.folder, up_to=step if self._resume else -1)
        write_text(self.folder / "config.json", json.dumps(record, indent=1) + "\n")
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        self._open_logs()
        self._catch_signals()
        self._say(f"{source}; {self.folder}")
        if self._resume and not self._checkpoint:
            self._say("the run was stopped before its first checkpoint: it begins anew at step 0")
        if self._console:
            self._console.start(self.total_steps, step)

    def _open_logs(self) -> None:
        """Open metrics.csv and TensorBoard, both cut back to `rows`."""
        from torch.utils.tensorboard import SummaryWriter

        assert self.folder is not None
        self._columns = list(dict.fromkeys(("step", *(k for row in self.rows for k in row))))
        self._rewrite_csv()
        # Event files cannot be cut, so they are written anew from the rows.
        shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
        self._tensorboard = SummaryWriter(str(self.folder / "tensorboard"))
        for row in self.rows:
            for key, value in row.items():
                if key != "step":
                    self._tensorboard.add_scalar(key, value, row["step"])
        self._written = len(self.rows)

    def _rewrite_csv(self) -> None:
        """All rows under the present columns, then open for appending."""
        assert self.folder is not None
        if self._csv is not None:
            self._csv.close()
        path = self.folder / "metrics.csv"
        with replacing(path) as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        self._csv = open(path, "a")

    def _flush_row(self) -> None:
        """Write the newest row; a new key makes a new column, which rewrites the small file."""
        if self._csv is None or len(self.rows) == self._written:
            return
        row = self.rows[-1]
        new = [key for key in row if key not in self._columns]
        if new:
            self._columns += new
            self._rewrite_csv()
        else:
            csv.DictWriter(self._csv, self._columns, lineterminator="\n").writerow(row)
            self._csv.flush()
        self._written = len(self.rows)

    def _catch_signals(self) -> None:
        """First Ctrl-C or SIGTERM finishes the iteration; the second one aborts."""
        if threading.current_thread() is not threading.main_thread():
            return

        def handle(number, frame):
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            self._say("stopping after this iteration; press Ctrl-C again to abort")

        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, handle)


def _own_replay(path: Path) -> Path:
    """The file of this process, from that of the first."""
    rank = distributed.rank()
    return path.with_name(f"{path.stem}-rank{rank}{path.suffix}") if rank else path


def _cannot_write(error: OSError, folder: Path, command: str) -> ValueError:
    return ValueError(
        f"cannot write a checkpoint: {error.strerror or error}; the one before stands. "
        f"Make room, then: {command} --resume {folder}"
    )


def _check_processes(folder: Path, env: dict) -> None:
    """Refuse to go on in a group of another size: each process saved its own environments."""
    saved, here = len(env.get(PROCESSES, (env,))), distributed.world_size()
    if saved != here:
        how = f"torchrun --nproc-per-node {saved} -m ctrl_rl.cli" if saved > 1 else "ctrl-rl"
        raise ValueError(
            f"{folder} was trained by {saved} processes, not {here}; go on with "
            f"{how} train --resume {folder}, or start a new run with --init-from"
        )


def _load_replay(path: Path, step: int) -> dict:
    """The replay that last.pt of this env step names; without it the run cannot go on as it was."""
    try:
        content = load_checkpoint(path, {"step": int, "replay": dict})
        if content["step"] != step:
            raise ValueError(f"{path} is of step {content['step']:,}, last.pt of {step:,}")
        return content["replay"]
    except ValueError as error:
        raise ValueError(
            f"{error}; last.pt needs it to go on. Start a new run with --init-from "
            f"{path.parent.parent} to keep the weights"
        ) from None


def _claim(folder: Path, resume: bool) -> None:
    """Refuse a folder that cannot take the run, before anything is computed."""
    if resume:
        read_config(folder)
    elif folder.exists() and not (
        folder.is_dir() and {path.name for path in folder.iterdir()} <= LEFTOVERS
    ):
        raise ValueError(
            f"{folder} exists and is not empty; choose another --run-dir, or go on in it with "
            f"--resume {folder}"
        )
    make_folder(folder)
