"""What is in a data set, and what in it is likely to mislead a learner.

Reading order: `schema` -> `figures` -> `suspicious_facts` -> `checksum_of` -> `verify`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from offline import minari
from offline.datasets import D4RLEntry, file_sha256
from offline.episodes import Episodes, digest
from offline.hdf5 import opened
from offline.transitions import is_sparse

BINS = 10
"""Bars of the histogram of returns."""

DUPLICATES = 0.001
"""Share of repeated (observation, action) rows from which on it is told."""


def schema(path: Path) -> list[dict[str, Any]]:
    """Key, shape and type of every array; of a Minari folder those of its first episode.

    An array with numbers that are not finite also says how many and in which row the first is.

    Raises:
        ValueError: it cannot be opened.
    """
    if path.is_dir():
        return [{"key": k, **v} for k, v in minari.schema(path).items()]
    found: list[dict[str, Any]] = []

    def visit(name: str, item) -> None:
        if not hasattr(item, "dtype"):
            return
        entry = {"key": name, "shape": list(item.shape), "dtype": str(item.dtype)}
        if item.dtype.kind == "f" and item.shape and not name.startswith("metadata"):
            try:
                finite = np.isfinite(item[()]).reshape(len(item), -1).all(1)
                if name == "next_observations":  # NaN: not known, see `offline.d4rl`
                    finite |= np.isnan(item[()]).all(1)
            except OSError as error:
                raise ValueError(f"{path}: {name} is damaged: {error}") from None
            if not finite.all():
                entry |= {"rows_not_finite": int((~finite).sum()), "first": int(np.argmin(finite))}
        found.append(entry)

    with opened(path) as file:
        file.visititems(visit)
    return found


def figures(episodes: Episodes) -> dict[str, Any]:
    """Counts, ends, and distributions of returns, lengths, rewards and actions; plain values.

    Returns are those of episodes that ended, if any did.
    """
    returns, lengths = episodes.finished_returns(), episodes.lengths
    terminated = episodes.terminated
    truncated = episodes.truncated & ~terminated
    counts, edges = np.histogram(returns, BINS)
    return {
        "episodes": episodes.num_episodes,
        "steps": episodes.num_steps,
        "obs_size": episodes.obs_size,
        "action_size": episodes.action_size,
        "terminated": int(terminated.sum()),
        "truncated": int(truncated.sum()),
        "stopped": int((~terminated & ~truncated).sum()),
        "final_obs_known": int(episodes.final_known.sum()),
        "episode_return": _spread(returns),
        "episode_length": _spread(lengths),
        "reward": _spread(episodes.reward),
        "action_min": float(episodes.action.min()),
        "action_max": float(episodes.action.max()),
        "histogram": {"edges": edges.tolist(), "episodes": counts.tolist()},
    }


def draw_histogram(histogram: dict[str, list], width: int = 40) -> list[str]:
    """Lines of text, one per bar."""
    most = max(histogram["episodes"])
    edges, lines = histogram["edges"], []
    for low, high, count in zip(edges, edges[1:], histogram["episodes"], strict=False):
        bar = "#" * -(-count * width // most)
        lines.append(f"{low:>10.4g} .. {high:<10.4g} {bar} {count}")
    return lines


def suspicious_facts(episodes: Episodes, entry: D4RLEntry | None = None) -> list[str]:
    """What a learner should know before it believes the data; empty is good.

    Args:
        episodes: the data.
        entry: D4RL's, for a step limit.
    """
    about, facts = episodes.metadata, []
    ended = episodes.terminated | episodes.truncated
    if not episodes.terminated.any():
        facts.append("no terminal is ever true: no value is ever cut to zero")
    if about.get("timeouts_missing"):
        facts.append(
            "the file has no timeouts: "
            + (
                "episodes end at terminals alone"
                if not episodes.truncated.any()
                else "episodes were cut by a step limit"
            )
        )
    if joined := about.get("joined_recordings"):
        facts.append(f"{joined} recordings were joined without a mark; they are kept apart")
    if missing := about.get("final_obs_missing"):
        facts.append(f"the final observation is missing in episodes {_few(missing)}")
    elif not episodes.final_known.all():
        open_ends = int((~episodes.final_known & ~episodes.terminated).sum())
        if open_ends:
            facts.append(
                f"the observation after the last step is unknown in {open_ends} episodes that did "
                "not terminate: their last steps are never learned from"
            )
    if (~ended).any():
        facts.append(f"{(~ended).sum()} recordings just stop, without a terminal or time-out")
    limit = entry.episode_length if entry else None
    if limit and (long := np.flatnonzero(episodes.lengths > limit)).size:
        facts.append(f"episodes {_few(long)} are longer than the task's limit of {limit} steps")
    if is_sparse(episodes.reward):
        share = float(np.mean(episodes.reward > 0))
        facts.append(
            f"rewards are sparse and never negative ({share:.2%} are positive): learn with a "
            "shift, such as reward preset antmaze"
        )
    elif (episodes.reward == episodes.reward[0]).all():
        facts.append(f"every reward is {episodes.reward[0]:g}")
    repeated = duplicates(episodes)
    if repeated > DUPLICATES * episodes.num_steps:
        facts.append(
            f"{repeated} of {episodes.num_steps} rows repeat an earlier observation and action"
        )
    steps = episodes.step_rows()
    dead = np.flatnonzero(np.ptp(episodes.obs[steps], axis=0) == 0)
    if dead.size and episodes.num_steps > 1:
        facts.append(f"observation columns {_few(dead)} never change")
    if np.abs(episodes.action).max() > 1 + 1e-5 and "action_bounds" not in about:
        facts.append(f"actions reach {np.abs(episodes.action).max():.4g}, outside [-1, 1]")
    return facts


def duplicates(episodes: Episodes) -> int:
    """Steps whose observation and action stood in an earlier one, to the bit.

    Rows are compared by a random linear hash of 64 bits: two different ones of a million agree with
    a probability of 3e-8.
    """
    rng = np.random.default_rng(0)
    total = np.zeros(episodes.num_steps, np.uint64)
    for values in (episodes.obs[episodes.step_rows()], episodes.action):
        bits = np.ascontiguousarray(values + np.float32(0)).view(np.uint32)  # -0.0 becomes 0.0
        for column in bits.T:
            total += column.astype(np.uint64) * rng.integers(1, 2**63, dtype=np.uint64)
            total ^= total >> np.uint64(29)
    return episodes.num_steps - len(np.unique(total))


# Checksums of files ---------------------------------------------------------------------------


def checksum_path(path: Path) -> Path:
    """Where the checksum of a file or folder stands, in the form that `sha256sum -c` reads."""
    return path.with_name(path.name + ".sha256")


def checksum_of(path: Path) -> str:
    """Contents of `checksum_path`: a line per file, names relative to the parent."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    lines = [f"{file_sha256(p)}  {p.relative_to(path.parent).as_posix()}\n" for p in files]
    return "".join(lines)


def changed_files(path: Path) -> list[str] | None:
    """Files that differ from the recorded checksum, are new or gone; None if none is recorded."""
    recorded = checksum_path(path)
    if not recorded.is_file():
        return None
    split = lambda text: {line[66:]: line[:64] for line in text.splitlines()}  # noqa: E731
    old, new = split(recorded.read_text()), split(checksum_of(path))
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def verify(episodes: Episodes) -> list[str]:
    """What is wrong with data that could be read: the recorded digest, the flags, the metadata."""
    wrong = []
    metadata = episodes.metadata
    recorded = metadata.get("digest_recorded", metadata.get("digest"))
    if recorded is not None and recorded != (found := digest(episodes)):
        wrong.append(f"the data has digest {found[:12]}..., recorded is {str(recorded)[:12]}...")
    last = episodes.obs_starts + episodes.lengths
    for e in np.flatnonzero(~episodes.final_known):
        if (episodes.obs[last[e]] != episodes.obs[last[e] - 1]).any():
            wrong.append(f"episode {e} has a final observation that is said to be unknown")
            break
    counted = {"steps": episodes.num_steps, "episodes": episodes.num_episodes}
    for name, value in counted.items():
        if name in episodes.metadata and episodes.metadata[name] != value:
            wrong.append(f"{value} {name} are there, the metadata counts {episodes.metadata[name]}")
    try:
        json.dumps(episodes.metadata, allow_nan=False)
    except (TypeError, ValueError):
        wrong.append("the metadata is not plain JSON")
    return wrong


def _spread(values: np.ndarray) -> dict[str, float]:
    values = values.astype(np.float64)
    quartiles = np.quantile(values, (0.25, 0.5, 0.75))
    return {
        "min": float(values.min()),
        "q25": float(quartiles[0]),
        "median": float(quartiles[1]),
        "mean": float(values.mean()),
        "q75": float(quartiles[2]),
        "max": float(values.max()),
    }


def _few(numbers) -> str:
    """At most five of them."""
    shown = ", ".join(str(int(x)) for x in list(numbers)[:5])
    return shown if len(numbers) <= 5 else f"{shown} and {len(numbers) - 5} more"
