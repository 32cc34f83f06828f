"""Training shared by several processes, on the cores or GPUs of one machine or of several.

`torchrun --nproc-per-node 2 -m ctrl_rl.cli train TASK` starts the processes ("ranks"), which join
into a group (gloo for CPU tensors, nccl for CUDA). Each steps N / W of the N environments, rank r
those numbered from r N / W on, and learns from what it saw there: the gradient, the advantage's
moments, the divergence and the observation statistics are those of all N, so that the weights
stay equal on all ranks and training is that of one process but for rounding.

In a process of its own every function here is the identity, to the bit. All of them that
communicate must be called by all ranks in the same order: what decides a branch around a call is
a number that all ranks share.

Reading order: the group -> its share of the work -> sums over the group.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported before any group: its default arguments keep the group that stands at that moment. The
# compiler imports it later, and the threads of a group that is kept abort a process at its exit.
import torch.distributed.nn.functional
from torch import Tensor

from ctrl_rl.spec import EnvSpec

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others; an evaluation, which rank 0 does alone, must be shorter."""


class Lost(RuntimeError):
    """Another process of the group has ended, or does not answer."""


# The group ----------------------------------------------------------------------------------


def launched() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


@contextmanager
def joined(timeout: timedelta = TIMEOUT) -> Iterator[None]:
    """Be one of the group's processes, if a launcher started this one; else change nothing.

    An error ends all ranks: the first one to fail raises it, the others, which fail of the same
    cause or of the first one's absence, leave without a word.

    Raises:
        Lost: see there.
        SystemExit: this rank failed, and not as the first.
    """
    if not launched():
        yield
        return
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield
    except Exception as error:
        if _failed_before(store):
            raise SystemExit(1) from error
        raise
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """Number of this process in the group; 0 writes, prints and evaluates."""
    return dist.get_rank() if _in_group() else 0


def world_size() -> int:
    """Processes W of the group; 1 outside one."""
    return dist.get_world_size() if _in_group() else 1


def refuse_group(learner: str) -> None:
    """Refuse torchrun for a learner that does not share its work.

    Raises:
        ValueError: there are several processes.
    """
    if world_size() > 1:
        raise ValueError(f"{learner} trains in one process; start it without torchrun")


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _failed_before(store) -> bool:
    """Whether another rank has failed and said so; from now on, one has."""
    try:
        return store.add("ctrl-rl/failures", 1) > 1
    except RuntimeError:  # the store went with the first rank
        return False


# Its share of the work ----------------------------------------------------------------------


def share(count: int, what: str = "environments") -> tuple[int, int]:
    """This rank's part of a count: how many, and the number of the first.

    Raises:
        ValueError: they cannot be shared equally.
    """
    each, rest = divmod(count, world_size())
    if rest or not each:
        raise ValueError(
            f"{count} {what} cannot be shared equally by {world_size()} processes; "
            f"use a multiple of {world_size()}"
        )
    return each, rank() * each


def local_device(device: str) -> str:
    """The device of this rank: each process of a machine has a GPU of its own.

    Raises:
        ValueError: the machine has fewer GPUs than processes.
    """
    if world_size() == 1 or not device.startswith("cuda"):
        return device
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= count:
        raise ValueError(
            f"process {local} of this machine has no GPU of its own: torch finds {count}; "
            "start as many processes as there are"
        )
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def local_threads(threads: int) -> int:
    """Simulator threads of this rank: 0, for all cores, is this rank's part of them."""
    if threads or world_size() == 1:
        return threads
    return max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)


def whole(spec: EnvSpec) -> EnvSpec:
    """The spec of all ranks' environments from that of this rank's."""
    return dataclasses.replace(spec, num_envs=spec.num_envs * world_size())


def own(x: Tensor, dim: int) -> Tensor:
    """This rank's part of a tensor that has those of all ranks, equally many, along `dim`."""
    if world_size() == 1:
        return x
    each, first = share(x.shape[dim])
    # A copy: `Generator.set_state` reads a view from the start of its storage.
    return x.narrow(dim, first, each).clone(memory_format=torch.contiguous_format)


def own_samples(order: Tensor, batch_size: int, num_envs: int) -> tuple[Tensor, list[int]]:
    """This rank's part of a permutation of an iteration's samples.

    Minibatch k of one process is thus the union of the ranks' minibatches k. Their sizes differ a
    little between ranks, since the permutation knows nothing of them.

    Args:
        order: permutation of T N samples, sample t N + i being step t of environment i; the same
            on all ranks.
        batch_size: samples of a minibatch, a divisor of T N.
        num_envs: N, of all ranks.

    Returns:
        The samples of this rank in the same order, numbered t n + i within its own n
        environments; and how many of them each minibatch has.
    """
    if world_size() == 1:
        return order, [batch_size] * (len(order) // batch_size)
    each, first = share(num_envs)
    row = order % num_envs - first
    mine = (row >= 0) & (row < each)
    sizes = mine.view(-1, batch_size).sum(1).tolist()
    return (order // num_envs * each + row)[mine], sizes


# Sums over the group ------------------------------------------------------------------------


def total(x: Tensor) -> Tensor:
    """Sum over the ranks."""
    if world_size() == 1:
        return x
    x = x.detach().clone()
    _collective(dist.all_reduce, x)
    return x


def largest(x: Tensor) -> Tensor:
    """Elementwise the largest of the ranks' tensors."""
    if world_size() == 1:
        return x
    x = x.detach().clone()
    _collective(dist.all_reduce, x, dist.ReduceOp.MAX)
    return x


def mean(x: Tensor) -> Tensor:
    """Mean over the ranks, of a figure to which each contributes equally many samples."""
    return total(x) / world_size()


def weighted_mean(x: Tensor, samples: int) -> Tensor:
    """Mean over all ranks' samples, from the mean x (K,) over this rank's; there may be none."""
    if world_size() == 1:
        return x
    weighted = x * samples if samples else torch.zeros_like(x)
    summed = total(torch.cat([weighted, weighted.new_tensor([samples])]))
    return summed[:-1] / summed[-1]


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance over all ranks' elements, float64 scalars.

    Each rank holds equally many elements.
    """
    x = x.double()
    average = mean(x.mean())
    return average, mean((x - average).square().mean())


def merged(rows: int, average: Tensor, squares: Tensor) -> tuple[int, Tensor, Tensor]:
    """Rows, mean (d,) and sum of squared deviations (d,) of all ranks' rows, from this rank's."""
    if world_size() == 1:
        return rows, average, squares
    average = average if rows else torch.zeros_like(average)
    squares = squares if rows else torch.zeros_like(squares)
    summed = total(torch.cat([average * rows, average.new_tensor([rows])]))
    count = int(summed[-1].item())
    overall = summed[:-1] / max(count, 1)
    return count, overall, total(squares + (average - overall).square() * rows)


def any_rank(flag: bool) -> bool:
    """Whether the flag is up on one of the ranks."""
    return flag if world_size() == 1 else bool(total(torch.tensor(int(flag))))


def mean_figures(figures: dict[str, float]) -> dict[str, float]:
    """Mean over the ranks of each figure; all ranks have the same keys."""
    if world_size() == 1:
        return figures
    values = mean(torch.tensor(list(figures.values()), dtype=torch.float64))
    return dict(zip(figures, values.tolist(), strict=True))


def concatenated(x: Tensor, dim: int) -> Tensor:
    """The ranks' tensors of one shape beside each other along `dim`; `own` is the way back."""
    if world_size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(world_size())]
    _collective(dist.all_gather, parts, x.contiguous())
    return torch.cat(parts, dim)


def gathered(value) -> list:
    """What each rank holds, in their order, on all ranks; for small things that can be pickled."""
    values = [value]
    if world_size() > 1:
        values = [None] * world_size()
        _collective(dist.all_gather_object, values, value)
    return values


def gathered_on_first(value) -> list:
    """As `gathered`, but only rank 0 gets them; the others get an empty list."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size() if rank() == 0 else []
    _collective(dist.gather_object, value, values or None)
    return values


def _collective(function: Callable, *args) -> None:
    try:
        function(*args)
    except RuntimeError as error:  # also of a time-out; torch has no narrower kind for gloo
        reason = str(error).strip().splitlines()[0]
        raise Lost(f"another process of the group has ended or does not answer: {reason}") from None
