"""Runs commands of offloadtrain, each in a fork of a process that has imported what they need.

    PYTHON commands.py COMMANDS.json

where PYTHON is that of the checkout to run. Each command of the file is an object with `arguments`,
`output` (the file for what it prints) and `stop` ("STEP,SIGNAL" or ""). The answer, on standard
output, is a list of exit codes; that of a killed process is minus the number of the signal.
"""

from __future__ import annotations

import json
import os
import sys
import traceback


def run(arguments: list[str], output: str, stop: str) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(os.open(f"{output}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            if stop:
                import sitecustomize

                os.environ["GOLDEN_STOP"] = stop
                sitecustomize.install()
            from offloadtrain.cli.main import main

            sys.argv = ["offloadtrain", *arguments]
            code = main(arguments)
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    import torch

    import offloadtrain.engine
    import offloadtrain.train.run  # noqa: F401

    torch.set_num_threads(1)
    with open(sys.argv[1], encoding="utf-8") as file:
        commands = json.load(file)
    print(json.dumps([run(**command) for command in commands]))
