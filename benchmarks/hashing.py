"""How fast a file of weights is hashed, beside BLAKE3's own package given the same bytes in memory, both on all CPUs.

    python benchmarks/hashing.py [--gib 2] [--rounds 5]

The file is in the page cache. Both take turns, and are told by their medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from trtllm_pipeline.files.digest import digest_file


def seconds(hashed: Callable[[], object]) -> float:
    """What one call takes."""
    begin = time.perf_counter()
    hashed()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the file (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="of both in turns (default 5)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hashing-") as folder:
        path, content = Path(folder) / "weights", os.urandom(1 << 20) * int(args.gib * 1024)
        path.write_bytes(content)
        assert digest_file(path) == blake3(content).hexdigest()
        ours, bare = list[float](), list[float]()
        for _ in range(args.rounds):
            ours.append(seconds(lambda: digest_file(path)))
            bare.append(seconds(lambda: blake3(content, max_threads=blake3.AUTO).digest()))
    took, least = statistics.median(ours), statistics.median(bare)
    print(f"file {args.gib / took:.2f} GiB/s, memory {args.gib / least:.2f} GiB/s, ratio {least / took:.2f}")


if __name__ == "__main__":
    main()
