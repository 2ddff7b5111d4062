"""Times a decision of the policy's network: ``python -m benchmarks.policy [--rounds N]``.

One thread, from the observation to the moves, for models of several sizes. ``encode`` is what makes the observation of
as many units, for comparison.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from autoprec.encoding import FEATURES, GlobalReading, UnitReading, encode
from autoprec.feature_rows import RUN_KNOBS
from autoprec.policies.network import PolicyNetwork
from benchmarks.timing import measure

ROWS = (3, 43, 200, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each measurement (default: %(default)s)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    network, generator = PolicyNetwork(), np.random.Generator(np.random.PCG64(0))
    for count in ROWS:
        rows = generator.uniform(-1.0, 1.0, (count, len(FEATURES))).astype(np.float32)
        units = [UnitReading(name=f"layer.{index}", legal=("fp32", "bf16")) for index in range(count - RUN_KNOBS)]
        variants: dict[str, Callable[[], object]] = {
            "moves": partial(network.moves, rows),
            "encode": partial(encode, units, GlobalReading()),
        }
        timing = measure(variants, rounds=rounds)
        moves_ms, encode_ms = (1e3 * timing.median(name) for name in ("moves", "encode"))
        print(f"policy: rows={count} moves_ms={moves_ms:.3f} encode_ms={encode_ms:.3f}")


if __name__ == "__main__":
    main()
