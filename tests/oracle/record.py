"""Records every case anew:

    python -m tests.oracle.record

Prints what has changed, case by case. Do that only where a change of the programs is wanted, and
say why.
"""

from __future__ import annotations

import logging
import sys

import torch

from tests.distributed.pool import Pool
from tests.oracle.cases import CASES
from tests.oracle.programs import FILE, difference, known, save
from tests.oracle.runs import recorded

SHOWN = 12
"""Lines of a difference."""


def record_all() -> dict[str, str]:
    """In the order of `CASES`, so that what is alike lies together in the file."""
    logging.disable(logging.WARNING)  # of steps that skip, and of another order of use
    torch.set_num_threads(1)
    pools: dict[int, Pool] = {}
    result = {}
    try:
        for name, case in CASES.items():
            if case.ranks == 1:
                result[name] = recorded(case)
                continue
            if case.ranks in pools and pools[case.ranks].is_worn:
                pools.pop(case.ranks).close()
            if case.ranks not in pools:
                pools[case.ranks] = Pool(case.ranks)
                pools[case.ranks].run(logging.disable, logging.WARNING)
            result[name] = together(pools[case.ranks].run(recorded, case))
    finally:
        for pool in pools.values():
            pool.close()
    return result


def together(texts: list[str]) -> str:
    """The programs of several ranks as one text; a limit of memory stays in front."""
    return "\n".join(f"{text}\nrank {rank} has ended" for rank, text in enumerate(texts))


def tell(before: dict[str, str], now: dict[str, str]) -> None:
    for name in sorted({*before, *now}):
        if name not in before or name not in now:
            print(f"{'new' if name in now else 'gone'}: {name}")
        elif before[name] != now[name]:
            lines = difference(before[name], now[name])
            print(f"changed: {name} ({len(lines)} lines of difference)")
            print("\n".join(f"    {line}" for line in lines[:SHOWN]))


def main() -> int:
    now = record_all()
    tell(known(), now)
    save(now)
    lines = sum(text.count("\n") for text in now.values())
    print(f"{len(now)} cases, {lines} lines, {FILE.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
