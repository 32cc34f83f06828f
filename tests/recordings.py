"""Small data sets in the form of each family, for tests of readers and commands."""

from pathlib import Path

import h5py
import numpy as np

from offline.episodes import Episodes

SIZES = {
    "gym": (11, 3),
    "antmaze": (29, 8),
    "maze2d": (4, 2),
    "adroit": (39, 28),
    "kitchen": (60, 9),
}


def numbered(rows: int, columns: int, first: float = 0.0) -> np.ndarray:
    """(rows, columns) float32; row i holds first + i and small fractions."""
    return (first + np.arange(rows, dtype=np.float32)[:, None] + np.arange(columns) / 64).astype(
        np.float32
    )


def family_arrays(family: str, lengths=(4, 3, 5)) -> dict[str, np.ndarray]:
    """Key -> array as D4RL's file of this family has it; observation = number of the step."""
    d, a = SIZES[family]
    steps = sum(lengths)
    last = np.cumsum(lengths) - 1
    rng = np.random.default_rng(0)
    arrays = {
        "observations": numbered(steps, d),
        "actions": rng.uniform(-1, 1, (steps, a)).astype(np.float32),
        "rewards": rng.normal(size=steps).astype(np.float32),
    }
    ends = np.zeros(steps, bool)
    ends[last] = True
    none = np.zeros(steps, bool)
    if family == "gym":
        true_end = none.copy()
        true_end[last[0]] = True
        arrays |= {"terminals": true_end, "timeouts": ends & ~true_end}
        arrays["next_observations"] = arrays["observations"] + 1
        arrays["infos/qpos"] = rng.normal(size=(steps, 6))
        arrays["infos/action_log_probs"] = rng.normal(size=steps).astype(np.float32)
        arrays["metadata/algorithm"] = np.bytes_(b"SAC")
        arrays["metadata/iteration"] = np.int32(7)
        arrays["metadata/policy/fc0/weight"] = rng.normal(size=(4, d)).astype(np.float32)
    elif family == "antmaze":
        arrays["rewards"] = ends.astype(np.float32)[:, None]
        arrays |= {"terminals": ends.astype(np.float32)[:, None], "timeouts": none}
        arrays["infos/goal"] = rng.normal(size=(steps, 2))
    elif family == "maze2d":
        arrays["terminals"] = none
        arrays["infos/goal"] = rng.normal(size=(steps, 2))
    elif family == "adroit":
        arrays |= {"terminals": none, "timeouts": ends}
        arrays["infos/door_body_pos"] = rng.normal(size=(steps, 3))
    elif family == "kitchen":
        arrays["terminals"] = ends.astype(np.float32)
        arrays["infos"] = np.repeat(np.arange(len(lengths)), lengths)
    return arrays


def write_hdf5(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    """A plain D4RL file, as h5py writes it."""
    with h5py.File(path, "w") as file:
        for key, values in arrays.items():
            options = {"compression": "gzip"} if np.ndim(values) else {}
            file.create_dataset(key, data=values, **options)
    return path


def all_kinds_of_ends() -> Episodes:
    """One episode for each way to end, with infos and metadata."""
    lengths = np.array([3, 2, 1, 4, 2, 1])
    steps = int(lengths.sum())
    rng = np.random.default_rng(1)
    obs = rng.normal(size=(steps + len(lengths), 5)).astype(np.float32)
    known = np.array([True, True, False, False, True, False])
    last = np.cumsum(lengths + 1) - 1
    obs[last[~known]] = obs[last[~known] - 1]
    return Episodes(
        obs=obs,
        action=rng.uniform(-1, 1, (steps, 2)).astype(np.float32),
        reward=rng.normal(size=steps),
        lengths=lengths,
        terminated=np.array([True, False, False, True, False, False]),
        truncated=np.array([False, True, True, True, False, False]),
        final_known=known,
        infos={"qpos": rng.normal(size=(steps, 3)), "deep/step": np.arange(steps)},
        metadata={"task": "Toy-v0", "action_bounds": [[-1.0, None], [1.0, None]]},
    )


def assert_same(found: Episodes, want: Episodes) -> None:
    """Every array to the bit and of the same type; metadata but the file's name and checksums."""
    for name, value in vars(want).items():
        if isinstance(value, np.ndarray):
            other = getattr(found, name)
            assert other.dtype == value.dtype, name
            np.testing.assert_array_equal(other, value, err_msg=name)
    assert found.infos.keys() == want.infos.keys()
    for name, value in want.infos.items():
        assert found.infos[name].dtype == value.dtype
        np.testing.assert_array_equal(found.infos[name], value, err_msg=name)
    own = {"file", "sha256", "digest", "dataset"}
    clean = lambda data: {k: v for k, v in data.items() if k not in own}  # noqa: E731
    assert clean(found.metadata) == clean(want.metadata)
