"""D4RL's HDF5 layout (Fu et al., "D4RL: Datasets for Deep Data-Driven RL", 2020), read and written.

Flat arrays with a row per step, all episodes one after another:

    observations (T, d)   actions (T, A)   rewards (T,)   terminals (T,)   timeouts (T,)
    next_observations (T, d)   infos/*   metadata/*           not in every file

`terminals` marks true ends, `timeouts` cuts. What differs between families is taken as it is
found: rewards and flags as columns (T, 1), terminals as numbers (kitchen), no `timeouts` (kitchen,
where every recording ends in a terminal; maze2d and old gym files, where the episode length has to
be given), no `next_observations`.

Where `next_observations` of a row is not the next row's observation although nothing marks an end,
an episode ends there all the same: two recordings were joined. It is counted in the metadata.

Not read: `metadata/policy/*`, the weights of the policy that collected the data, and other arrays
under `metadata`; observations that are pictures; actions that are integers.

What we write is the same layout, so that others can read it, and three things more:
`metadata/ctrl_rl`, our metadata as JSON; `metadata/stopped_episodes`, episodes whose recording just
stops, although `timeouts` marks their end for other readers; NaN for a `next_observations` row
that is not known.

Reading order: `read` -> `write`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ctrl_rl.checkpoints import replacing
from offline.arrays import check_bounds, check_lengths, check_width, flags, series, vectors
from offline.episodes import Episodes
from offline.hdf5 import get, made, opened, put

OURS = "metadata/ctrl_rl"
STOPPED = "metadata/stopped_episodes"


def read(
    path: Path,
    *,
    infos: Sequence[str] | bool = (),
    episode_length: int | None = None,
    usual_length: int | None = None,
    demonstrations: bool = False,
    widths: tuple[int | None, int | None] = (None, None),
    action_bounds: tuple[Any, Any] | None = None,
) -> Episodes:
    """Read a whole file.

    Args:
        path: the file.
        infos: names under `infos` to read too; True for all that are numbers.
        episode_length: steps after which an episode was cut, for a file without `timeouts`.
        usual_length: the same where `episode_length` is None; a file with `timeouts` goes before.
        demonstrations: the file is known to be kitchen's: without `timeouts`, each recording ends
            in a terminal. Otherwise it has to show that, by an `infos` that numbers recordings.
        widths: columns of observations and actions to insist on.
        action_bounds: lowest and highest action, scalars or (A,); None for those that the file
            itself states, if it does.

    Raises:
        ValueError: no such file, no HDF5, damaged; a key that is missing; arrays that do not belong
            together; a number that is not finite or out of bounds; no way to tell where episodes
            end, or two. One line with file, key and row.
    """
    path = Path(path)
    with opened(path) as file:
        obs = vectors(path, "observations", get(path, file, "observations"))
        action = _actions(path, get(path, file, "actions"))
        reward = series(path, "rewards", get(path, file, "rewards"))
        terminated = flags(path, "terminals", get(path, file, "terminals"))
        lengths = {"observations": obs, "actions": action, "rewards": reward}
        lengths |= {"terminals": terminated}
        timeout = None
        if "timeouts" in file:
            if episode_length is not None:
                raise ValueError(
                    f"{path} has 'timeouts', which say where its episodes end: it takes no episode "
                    "length"
                )
            lengths["timeouts"] = timeout = flags(path, "timeouts", get(path, file, "timeouts"))
        check_lengths(path, {key: len(values) for key, values in lengths.items()})
        check_width(path, "observations", obs, widths[0])
        check_width(path, "actions", action, widths[1])
        found_infos = _read_infos(path, file, infos, len(reward))
        metadata = _read_metadata(path, file)
        if timeout is None:
            if episode_length is None:
                episode_length = usual_length
            if episode_length is None and terminated[-1]:
                demonstrations = demonstrations or _numbers_recordings(file, terminated)
            timeout = _timeouts(path, terminated, episode_length, demonstrations)
            metadata["timeouts_missing"] = True
        ends = terminated | timeout
        ends[-1] = True
        following = None
        if "next_observations" in file:
            following = get(path, file, "next_observations")
            check_lengths(path, {"observations": len(obs), "next_observations": len(following)})
            following = vectors(path, "next_observations", following, allow_nan_rows=ends)
            check_width(path, "next_observations", following, obs.shape[1])
        stopped = get(path, file, STOPPED) if STOPPED in file else None

    check_bounds(path, "actions", action, action_bounds or metadata.get("action_bounds"))
    if following is not None:
        joined = ~ends[:-1] & (following[:-1] != obs[1:]).any(1)
        if joined.any():
            metadata["joined_recordings"] = int(joined.sum())
            ends[:-1] |= joined
    last = np.flatnonzero(ends)
    truncated = timeout[last]
    if stopped is not None:
        if stopped.dtype.kind not in "iu" or (stopped < 0).any() or (stopped >= len(last)).any():
            raise ValueError(f"{path}: {STOPPED} names episodes that are not there")
        truncated[stopped] = False
    metadata["file"] = path.name
    return _with_final_obs(
        obs,
        following,
        last,
        action=action,
        reward=reward,
        lengths=np.diff(last, prepend=-1).astype(np.int64),
        terminated=terminated[last],
        truncated=truncated,
        infos=found_infos,
        metadata=metadata,
    )


def _with_final_obs(obs: np.ndarray, following: np.ndarray | None, last: np.ndarray, **rest):
    """Episodes with the observation after each last step put in."""
    episodes = len(last)
    whole = np.empty((len(obs) + episodes, obs.shape[1]), np.float32)
    rows = np.arange(len(obs)) + np.repeat(np.arange(episodes), rest["lengths"])
    whole[rows] = obs
    final = obs[last] if following is None else following[last]
    known = np.zeros(episodes, bool)
    if following is not None:
        known |= ~np.isnan(final).all(1)
    final[~known] = obs[last[~known]]
    whole[last + np.arange(episodes) + 1] = final
    return Episodes(obs=whole, final_known=known, **rest)


def write(path: Path, episodes: Episodes) -> None:
    """Write D4RL's layout; `read` gives back equal episodes.

    The file takes its name only when it is whole.

    Raises:
        ValueError: it cannot be written, as where the folder does not exist or the disk is full;
            an older file of that name stands.
    """
    path = Path(path)
    steps = episodes.step_rows()
    last = np.cumsum(episodes.lengths) - 1
    terminals, timeouts = (np.zeros(episodes.num_steps, bool) for _ in range(2))
    terminals[last], timeouts[last] = episodes.terminated, episodes.truncated
    stopped = np.flatnonzero(~episodes.terminated & ~episodes.truncated)
    stopped = stopped[stopped < episodes.num_episodes - 1]  # the last one needs no mark
    timeouts[last[stopped]] = True
    try:
        with replacing(path, "wb") as raw, made(raw) as file:
            put(file, "observations", episodes.obs[steps])
            put(file, "actions", episodes.action)
            put(file, "rewards", episodes.reward)
            put(file, "terminals", terminals)
            put(file, "timeouts", timeouts)
            if episodes.final_known.any():
                following = episodes.obs[steps + 1]
                following[last[~episodes.final_known]] = np.nan
                put(file, "next_observations", following)
            for name, values in episodes.infos.items():
                put(file, "infos" if name == "infos" else f"infos/{name}", values)
            if len(stopped):
                file[STOPPED] = stopped
            file[OURS] = json.dumps(episodes.metadata, allow_nan=False)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None


# What differs between families ------------------------------------------------------------------


def _actions(path: Path, values: np.ndarray) -> np.ndarray:
    if values.ndim == 1 and values.dtype.kind in "iu":
        raise ValueError(f"{path}: actions are integers; only continuous actions are learned from")
    return vectors(path, "actions", values)


def _numbers_recordings(file: h5py.File, terminated: np.ndarray) -> bool:
    """Whether `infos` is kitchen's, the number of the recording, and changes after each terminal.

    A terminal in the last row alone would not do: recordings before it may have been cut.
    """
    found = file.get("infos")
    if not isinstance(found, h5py.Dataset) or found.shape != terminated.shape:
        return False
    return np.array_equal(found[1:] != found[:-1], terminated[:-1])


def _timeouts(
    path: Path, terminated: np.ndarray, episode_length: int | None, demonstrations: bool
) -> np.ndarray:
    """(T,) bool: where episodes were cut, in a file that does not say so."""
    if episode_length is None:
        if demonstrations and terminated[-1]:
            return np.zeros_like(terminated)
        raise ValueError(
            f"{path}: no dataset 'timeouts', so it is unknown where episodes end; give the episode "
            "length"
        )
    if episode_length < 1:
        raise ValueError(f"the episode length must be at least 1, not {episode_length}")
    starts = np.concatenate([[0], np.flatnonzero(terminated[:-1]) + 1])
    lengths = np.diff(starts, append=len(terminated))
    step = np.arange(len(terminated)) - np.repeat(starts, lengths)
    return (step % episode_length == episode_length - 1) & ~terminated


def _read_infos(
    path: Path, file: h5py.File, wanted: Sequence[str] | bool, steps: int
) -> dict[str, np.ndarray]:
    there = info_names(file)
    key_of = lambda name: "infos" if name == "infos" else f"infos/{name}"  # noqa: E731
    # Of all, those that are numbers with a row per step: a text is nothing to learn from.
    good = lambda x: x.dtype.kind in "biuf" and x.shape[:1] == (steps,)  # noqa: E731
    names = [n for n in there if good(file[key_of(n)])] if wanted is True else list(wanted or ())
    found = {}
    for name in names:
        if name not in there:
            raise ValueError(f"{path}: no infos/{name}; there are: {', '.join(there) or 'none'}")
        found[name] = get(path, file, key_of(name))
        check_lengths(
            path, {"observations": steps, key_of(name): np.atleast_1d(found[name]).shape[0]}
        )
    return found


def info_names(file: h5py.File) -> list[str]:
    """Names of the arrays under `infos`; kitchen's single one is called "infos"."""
    if "infos" not in file:
        return []
    if isinstance(file["infos"], h5py.Dataset):
        return ["infos"]
    found: list[str] = []
    visit = lambda k, x: found.append(k) if isinstance(x, h5py.Dataset) else None  # noqa: E731
    file["infos"].visititems(visit)
    return found


def is_ours(path: Path) -> bool:
    """Whether `write` made a file, whatever its name says; False for one that cannot be opened."""
    try:
        with h5py.File(path, "r") as file:
            return OURS in file
    except OSError:
        return False


def _read_metadata(path: Path, file: h5py.File) -> dict[str, Any]:
    """Our own metadata where the file has some; else attributes and single values of `metadata`."""
    if OURS in file:
        try:
            found = json.loads(str(file[OURS].asstr()[()]))
        except (AttributeError, ValueError, TypeError, OSError):
            raise ValueError(f"{path}: {OURS} is no JSON text") from None
        if not isinstance(found, dict):
            raise ValueError(f"{path}: {OURS} is no JSON object")
        return found
    found: dict[str, Any] = {}
    attributes = {k: _plain(v) for k, v in file.attrs.items() if _plain(v) is not None}
    if attributes:
        found["attributes"] = attributes
    single: dict[str, Any] = {}

    def visit(name: str, item) -> None:
        if isinstance(item, h5py.Dataset) and item.shape == ():
            value = _plain(item[()])
            if value is not None:
                single[name] = value

    if "metadata" in file and isinstance(file["metadata"], h5py.Group):
        file["metadata"].visititems(visit)
    if single:
        found["metadata"] = single
    return found


def _plain(value) -> Any:
    """A JSON value, or None where it is none."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool)) else None
