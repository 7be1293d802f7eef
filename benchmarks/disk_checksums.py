"""What checksums of the scratch file cost: an update with state on the disk, with and without.

    python -m benchmarks.disk_checksums FOLDER [--size GIB] [--rounds N]

Both cases run in turn in one process, once per round. FOLDER is on the drive to measure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from math import isqrt
from types import SimpleNamespace
from typing import Any, cast

from offloadtrain.cli.bench.disk import BUCKETS, BYTES_PER_PARAM, _engine
from offloadtrain.cli.bench.rounds import ratio
from offloadtrain.runtime import disk_arena

WITH, WITHOUT = "with checksums", "without"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--size", type=float, default=1.0, help="GiB of fp32 state")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    width = isqrt(int(options.size * 2**30) // BYTES_PER_PARAM // BUCKETS) // 64 * 64
    num_bytes = 2 * BUCKETS * width * width * BYTES_PER_PARAM
    module = cast(Any, disk_arena)
    hashes = {WITH: module.xxhash, WITHOUT: SimpleNamespace(xxh3_64_intdigest=lambda _: 0)}
    seconds: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    with _engine(options.folder, width) as update:
        for number in range(options.rounds + 1):
            for case in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
                module.xxhash = hashes[case]
                update.prepare()  # the gradients, which are not timed
                begin = time.perf_counter()
                update()
                if number:  # the first round touches pages
                    seconds[case].append(time.perf_counter() - begin)
    module.xxhash = hashes[WITH]
    for case, times in seconds.items():
        median = statistics.median(times)
        print(f"{case:16} {median:6.3f} s  {num_bytes / median / 1e9:5.2f} GB/s")
    found = ratio(seconds[WITH], seconds[WITHOUT])
    assert found is not None
    print(f"median of ratios: {found:.3f}")


if __name__ == "__main__":
    main()
