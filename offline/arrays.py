"""Arrays as they come out of a file: typed, of one length, finite; an error names file, key, row.

Reading order: `numbers`, `vectors`, `series`, `flags` -> `check_bounds`, `check_lengths`.
"""

from pathlib import Path

import numpy as np

BOUND_TOLERANCE = 1e-5
"""How far beyond its bounds an action may be, relative to max(1, |bound|): float32 rounding."""


def numbers(path: Path, key: str, values: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
    """`values` as `dtype`, without a copy where it is that already.

    Raises:
        ValueError: they are no real numbers.
    """
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{path}: {key} holds {values.dtype}, not numbers")
    with np.errstate(over="ignore"):  # becomes infinite, which is refused with its row
        return np.ascontiguousarray(values, dtype=dtype)


def vectors(path: Path, key: str, values: np.ndarray, allow_nan_rows=None) -> np.ndarray:
    """(n, d) float32, finite.

    Args:
        path: the file, for errors.
        key: where in it.
        values: what was read.
        allow_nan_rows: (n,) bool, rows that may be NaN as a whole.

    Raises:
        ValueError: another shape, no numbers, or a NaN or infinity.
    """
    if values.ndim != 2:
        what = "pictures or other grids are not read" if values.ndim > 2 else "one row per step"
        raise ValueError(f"{path}: {key} has shape {values.shape}, not (rows, width): {what}")
    values = numbers(path, key, values, np.float32)
    finite = np.isfinite(values).all(1)
    if not finite.all():
        bad = ~finite
        if allow_nan_rows is not None:
            bad &= ~(allow_nan_rows & np.isnan(values).all(1))
        if bad.any():
            row = int(np.argmax(bad))
            column = int(np.argmin(np.isfinite(values[row])))
            raise ValueError(
                f"{path}: {key}, row {row}, column {column} is {values[row, column]}: "
                "every number must be finite"
            )
    return values


def series(path: Path, key: str, values: np.ndarray) -> np.ndarray:
    """(n,) float32, or float64 as it was; finite. A column (n, 1) is taken for (n,).

    Raises:
        ValueError: another shape, no numbers, or a NaN or infinity.
    """
    values = _column(path, key, values)
    values = numbers(path, key, values, np.float64 if values.dtype == np.float64 else np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        row = int(np.argmin(finite))
        raise ValueError(f"{path}: {key}, row {row} is {values[row]}: every number must be finite")
    return values


def flags(path: Path, key: str, values: np.ndarray) -> np.ndarray:
    """(n,) bool from bools, or from numbers that are 0 or 1.

    Raises:
        ValueError: another shape, or another value.
    """
    values = _column(path, key, values)
    if values.dtype == bool:
        return values
    values = numbers(path, key, values, values.dtype)
    wrong = (values != 0) & (values != 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{path}: {key}, row {row} is {values[row]}, neither 0 nor 1")
    return values.astype(bool)


def check_lengths(path: Path, lengths: dict[str, int]) -> None:
    """Refuse arrays of different lengths, or none at all.

    Args:
        path: the file.
        lengths: key -> rows; the first is what the others are held against.

    Raises:
        ValueError: the first key that differs.
    """
    first, rows = next(iter(lengths.items()))
    for key, found in lengths.items():
        if found != rows:
            raise ValueError(f"{path}: {key} has {found} rows, {first} {rows}")
    if rows == 0:
        raise ValueError(f"{path}: {first} has no row")


def check_width(path: Path, key: str, values: np.ndarray, width: int | None) -> None:
    """Refuse rows of another width than the task has; None allows any.

    Raises:
        ValueError: the widths differ.
    """
    if width is not None and values.shape[1] != width:
        raise ValueError(f"{path}: {key} has {values.shape[1]} columns, the task has {width}")


def check_bounds(
    path: Path, key: str, action: np.ndarray, bounds: tuple[np.ndarray, np.ndarray] | None
) -> None:
    """Refuse actions (n, A) outside their bounds (A,), or scalars; None allows any.

    Raises:
        ValueError: the first such row, or bounds of another width.
    """
    if bounds is None:
        return
    low, high = (np.asarray(b, dtype=np.float64) for b in bounds)
    for bound in (low, high):
        if bound.ndim and len(bound) != action.shape[1]:
            raise ValueError(f"{path}: {key} has {action.shape[1]} columns, bounds {len(bound)}")
    slack = lambda bound: BOUND_TOLERANCE * np.maximum(1.0, np.abs(bound))  # noqa: E731
    low_f32 = np.asarray(low - slack(low), dtype=np.float32)
    high_f32 = np.asarray(high + slack(high), dtype=np.float32)
    outside = (action < low_f32) | (action > high_f32)
    if outside.any():
        row, column = (int(i) for i in np.unravel_index(np.argmax(outside), outside.shape))
        at = lambda bound: float(bound[column] if bound.ndim else bound)  # noqa: E731
        raise ValueError(
            f"{path}: {key}, row {row}, column {column} is {action[row, column]:.6g}, "
            f"outside [{at(low):g}, {at(high):g}]"
        )


def _column(path: Path, key: str, values: np.ndarray) -> np.ndarray:
    """(n, 1) -> (n,)."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise ValueError(f"{path}: {key} has shape {values.shape}, not (rows,)")
    return values
