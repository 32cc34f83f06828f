"""What the machine's matrix multiplication reaches: large float32 products; counts FLOP."""

import torch
import worker

SIZE = 1536  # three matrices of 9 MB, beyond which the rate no longer grows


def run(config, tick):
    """Products for ever, one tick each."""
    torch.set_num_threads(config["torch_threads"])
    a, b = torch.randn(2, SIZE, SIZE)
    out = torch.empty(SIZE, SIZE)
    while True:
        torch.mm(a, b, out=out)
        tick(2 * SIZE**3)


if __name__ == "__main__":
    worker.serve(run, ("torch",))
