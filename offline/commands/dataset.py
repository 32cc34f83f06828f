"""Data sets: list, info, download, collect, convert, verify.

`ctrl-rl dataset COMMAND ...`; each has its own --help. A data set is an id of D4RL or Minari, a
D4RL-style HDF5 file, or a Minari folder.
"""

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ctrl_rl import cli, registry


@dataclass(frozen=True, kw_only=True)
class List:
    """Show D4RL's ids with their reference scores, and what is on this machine."""

    pattern: Annotated[str, tyro.conf.Positional] = "*"
    """Names to show, with * and ?."""
    local: bool = False
    """Only those on this machine."""


@dataclass(frozen=True, kw_only=True)
class Info:
    """Show schema, episodes, returns and suspicious facts. Exit status 1 if it cannot be used."""

    dataset: Annotated[str, tyro.conf.Positional]
    """Id, file or folder."""
    episode_length: int | None = None
    """Steps after which episodes were cut, where a file does not say so."""
    obs_keys: tuple[str, ...] | None = None
    """Parts of a Minari data set's dict observation, in the order wanted."""

    def __post_init__(self) -> None:
        cli.check_least(self, 1, "episode_length")


@dataclass(frozen=True, kw_only=True)
class Download:
    """Fetch data sets into the cache; what was broken off goes on."""

    datasets: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Ids of D4RL or Minari."""
    mirror: str | None = None
    """Address to use instead of D4RL's, the part before the folder, as in
    http://host/offline_rl."""


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Record policies, or a learner's replay, into a file of D4RL's layout."""

    task: Annotated[str, tyro.conf.Positional]
    """Task id."""
    sources: tuple[str, ...]
    """Who acts: random, RUN, RUN:best, RUN:last, RUN:STEP or RUN:replay, each with =SHARE if the
    shares are not equal, as in random=0.2 runs/x:best=0.8."""
    out: Path
    """The file to write; it must not exist."""
    steps: int = 200_000
    """Steps in all."""
    num_envs: int | None = None
    """Environments side by side; each contributes the same number of steps, and the recording of
    its last episode just stops. None for so many, at most 32, that each gets five whole
    episodes."""
    seed: int = 0
    """Decides everything; added to a number that training and evaluation never use."""
    deterministic: bool = False
    """Policies play their mean action; otherwise they sample as in training."""
    backend: str | None = None
    """Simulator; None for the task's first."""
    device: str = "cpu"
    """Torch device of the environments."""
    threads: int = 0
    """Threads of the simulator; 0 for all cores."""
    torch_threads: int = 1
    """Threads of torch."""

    def __post_init__(self) -> None:
        cli.check_least(self, 1, "steps", "num_envs", "torch_threads")
        cli.check_least(self, 0, "threads")


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a data set in the other format; nothing is lost."""

    source: Annotated[str, tyro.conf.Positional]
    """Id, file or folder."""
    target: Annotated[Path, tyro.conf.Positional]
    """D4RL-style file with ending .hdf5, or a new folder for Minari's."""
    form: Literal["hdf5", "arrow", "parquet"] = "hdf5"
    """How a Minari folder stores its episodes."""
    episode_length: int | None = None
    """Steps after which episodes were cut, where a file does not say so."""
    obs_keys: tuple[str, ...] | None = None
    """Parts of a Minari data set's dict observation, in the order wanted."""

    def __post_init__(self) -> None:
        cli.check_least(self, 1, "episode_length")


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Recompute checksums, check all that must hold. Exit status 1 if something is wrong."""

    datasets: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Ids, files or folders."""
    episode_length: int | None = None
    """Steps after which episodes were cut, where a file does not say so."""

    def __post_init__(self) -> None:
        cli.check_least(self, 1, "episode_length")


def main(argv: list[str]) -> dict | None:
    """Carry out one of the commands."""
    known = ", ".join(COMMANDS)
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: ctrl-rl dataset COMMAND ...\n")
        for name, (cls, _) in COMMANDS.items():
            print(f"  {name:<{width}}  {(cls.__doc__ or '').splitlines()[0]}")
        print("\nctrl-rl dataset COMMAND --help shows every flag.")
        return None
    if argv[0] not in COMMANDS:
        hint = registry.nearest(argv[0], COMMANDS)
        raise cli.UsageError(f"unknown command {argv[0]!r} of dataset{hint}; there are: {known}")
    cls, function = COMMANDS[argv[0]]
    prog = f"ctrl-rl dataset {argv[0]}"
    return function(cli.parse(cls, argv[1:], prog, description=cls.__doc__))


def show_list(args: List) -> dict:
    """Print a table of ids."""
    import fnmatch

    from offline.datasets import d4rl_folder, d4rl_table, minari_folder

    found: dict[str, dict] = {}
    for name, entry in d4rl_table().items():
        here = (d4rl_folder() / entry.file_name).is_file()
        found[name] = {
            "family": entry.family,
            "ref_min": entry.ref_min,
            "ref_max": entry.ref_max,
            "here": here,
        }
    root = minari_folder()
    for metadata in sorted(root.glob("**/data/metadata.json")):
        name = metadata.parent.parent.relative_to(root).as_posix()
        found[name] = {"family": "minari", "ref_min": None, "ref_max": None, "here": True}
    shown = {
        name: about
        for name, about in found.items()
        if fnmatch.fnmatchcase(name, args.pattern) and (about["here"] or not args.local)
    }
    if not shown:
        where = f"{d4rl_folder()} and {root}"
        print(f"no data set {args.pattern!r}" + (f" in {where}" if args.local else ""))
    width = max(map(len, shown), default=0)
    number = lambda value: "-" if value is None else f"{value:.6g}"  # noqa: E731
    if shown:
        print(f"{'':{width}}  {'family':9} {'score 0':>9} {'score 100':>9}")
    for name, about in shown.items():
        low, high = number(about["ref_min"]), number(about["ref_max"])
        here = "  here" if about["here"] else ""
        print(f"{name:<{width}}  {about['family']:9} {low:>9} {high:>9}{here}")
    return {"datasets": shown, "config": dataclasses.asdict(args)}


def show_info(args: Info) -> dict:
    """Print what is in a data set, and what is odd about it."""
    from offline import inspection
    from offline.datasets import load, locate
    from offline.scores import dataset_score

    path, entry = locate(args.dataset)
    arrays = inspection.schema(path)
    print(f"{path}{f', {entry.dataset} of D4RL' if entry else ''}")
    for array in arrays:
        bad = ""
        if "rows_not_finite" in array:
            bad = f"  {array['rows_not_finite']} rows not finite, the first {array['first']}"
        print(f"  {array['key']:<36} {_shape(array['shape']):>14} {array['dtype']}{bad}")
    found: dict = {"path": str(path), "schema": arrays, "config": dataclasses.asdict(args)}
    try:
        episodes = load(path, episode_length=args.episode_length, obs_keys=args.obs_keys)
    except ValueError as error:
        print(f"\ncannot be used: {error}")
        return found | {"facts": [str(error)], "passed": False}
    numbers = inspection.figures(episodes)
    print(
        f"\n{numbers['episodes']} episodes, {numbers['steps']} steps: "
        f"{numbers['terminated']} terminated, {numbers['truncated']} were cut, "
        f"{numbers['stopped']} just stop"
    )
    for name in ("episode_return", "episode_length", "reward"):
        spread = "  ".join(f"{k} {v:.5g}" for k, v in numbers[name].items())
        print(f"  {name:<15} {spread}")
    print(f"  {'action':<15} min {numbers['action_min']:.4g}  max {numbers['action_max']:.4g}")
    if order := episodes.metadata.get("obs_order"):
        print("  observation     " + ", ".join(f"{name} ({width})" for name, width in order))
    print("\nepisode return:")
    print("\n".join(inspection.draw_histogram(numbers["histogram"])))
    score = dataset_score(episodes.metadata, episodes.finished_returns())
    print(f"\nmean {score}")
    facts = inspection.suspicious_facts(episodes, entry)
    print("\nsuspicious:" if facts else "\nnothing suspicious")
    print("\n".join(f"  - {fact}" for fact in facts))
    found |= {"figures": numbers, "facts": facts, "metadata": episodes.metadata}
    found["score"] = {
        "normalized": score.normalized,
        "comparable": score.comparable,
        "played_in": score.played_in,
    }
    return found


def fetch(args: Download) -> dict:
    """Download each data set that is not there."""
    from offline.datasets import d4rl_folder, d4rl_table, is_minari_id, minari_folder, unknown
    from offline.download import download, download_minari

    table = d4rl_table()
    if not args.datasets:
        raise cli.UsageError("name at least one data set; ctrl-rl dataset list shows D4RL's")
    for name in args.datasets:
        if name not in table and not is_minari_id(name):
            raise unknown(name)
    done = {}
    for name in args.datasets:
        if name in table:
            path, url = d4rl_folder() / table[name].file_name, table[name].url
            if args.mirror is not None:
                url = args.mirror.rstrip("/") + url.partition("/offline_rl")[2]
            state = download(url, path, _Meter(name))
        else:
            path = minari_folder() / name
            state = download_minari(name, path)
        print(f"{name}: {state}, {path}")
        done[name] = {"state": state, "path": str(path)}
    return {"datasets": done, "config": dataclasses.asdict(args)}


def record(args: Collect) -> dict:
    """Roll out, and write the file when all is there."""
    import torch

    torch.set_num_threads(args.torch_threads)
    from ctrl_rl.checkpoints import check_free
    from offline import d4rl
    from offline.collect import Source, collect

    if args.out.exists():
        raise ValueError(f"{args.out} exists already")
    if args.out.suffix != ".hdf5":
        raise ValueError(f"{args.out} must end in .hdf5")
    if not args.out.absolute().parent.is_dir():
        raise ValueError(f"{args.out.absolute().parent} is no folder")
    check_free(args.out.absolute().parent)
    episodes = collect(
        args.task,
        Source.parse_all(args.sources),
        args.steps,
        num_envs=args.num_envs,
        seed=args.seed,
        deterministic=args.deterministic,
        backend=args.backend,
        device=args.device,
        threads=args.threads,
        progress=lambda line: print(line, flush=True),
    )
    episodes.metadata["dataset"] = args.out.stem
    d4rl.write(args.out, episodes)
    print(f"{args.out}: {episodes.num_steps} steps, digest {episodes.metadata['digest']}")
    config = dataclasses.asdict(args) | {"out": str(args.out)}
    return {"task": args.task, "metadata": episodes.metadata, "config": config}


def translate(args: Convert) -> dict:
    """Read one format, write the other."""
    from ctrl_rl.checkpoints import check_free
    from offline import d4rl, minari
    from offline.datasets import load

    if args.target.exists():
        raise ValueError(f"{args.target} exists already")
    if not args.target.absolute().parent.is_dir():
        raise ValueError(f"{args.target.absolute().parent} is no folder")
    check_free(args.target.absolute().parent)
    episodes = load(
        args.source, infos=True, episode_length=args.episode_length, obs_keys=args.obs_keys
    )
    if args.target.suffix == ".hdf5":
        if args.form != "hdf5":
            raise ValueError(f"{args.target} is a file; --form {args.form} is for Minari's folders")
        d4rl.write(args.target, episodes)
    else:
        minari.write(args.target, episodes, args.form)
    print(f"{args.target}: {episodes.num_episodes} episodes, {episodes.num_steps} steps")
    config = dataclasses.asdict(args) | {"target": str(args.target)}
    return {"steps": episodes.num_steps, "episodes": episodes.num_episodes, "config": config}


def check(args: Verify) -> dict:
    """Read everything, and hold it against what was recorded."""
    from offline import inspection
    from offline.datasets import load, locate
    from offline.episodes import digest

    if not args.datasets:
        raise cli.UsageError("name at least one data set")
    report = {}
    for name in args.datasets:
        path, _ = locate(name)
        changed = inspection.changed_files(path)
        wrong = [f"{file} differs from its recorded checksum" for file in changed or []]
        found = None
        try:
            episodes = load(path, episode_length=args.episode_length, infos=True)
            wrong += inspection.verify(episodes)
            found = digest(episodes)
        except ValueError as error:
            wrong.append(str(error))
        print(f"{name}: {'good' if not wrong else 'WRONG'}")
        print("\n".join(f"  - {line}" for line in wrong), end="\n" if wrong else "")
        if changed is None:
            print("  no checksum of the file was recorded")
        if found:
            print(f"  digest {found}")
        report[name] = {"wrong": wrong, "digest": found, "checksum_recorded": changed is not None}
    passed = not any(about["wrong"] for about in report.values())
    return {"datasets": report, "passed": passed, "config": dataclasses.asdict(args)}


COMMANDS = {
    "list": (List, show_list),
    "info": (Info, show_info),
    "download": (Download, fetch),
    "collect": (Collect, record),
    "convert": (Convert, translate),
    "verify": (Verify, check),
}


class _Meter:
    """A line every few seconds while bytes come."""

    def __init__(self, name: str, every_s: float = 5.0) -> None:
        self.name, self.every_s, self.told = name, every_s, time.monotonic()

    def __call__(self, have: int, total: int | None) -> None:
        if time.monotonic() - self.told < self.every_s:
            return
        self.told = time.monotonic()
        of = f" of {total / 1e6:.1f}" if total else ""
        print(f"{self.name}: {have / 1e6:.1f}{of} MB", file=sys.stderr, flush=True)


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) or "one value"
