"""`offloadtrain version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> None:
    """Print the versions to include in a bug report."""
    print(f"offloadtrain {package_version()}")
    print(f"python       {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("torch", "numba"):
        print(f"{package:12} {_version_of(package)}")
    from offloadtrain.runtime import kernels

    chosen = kernels.backend()
    print(f"{'kernels':12} {chosen.name} {chosen.isa}: {chosen.why}")


def package_version() -> str:
    return _version_of("offloadtrain")


def _version_of(package: str) -> str:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return "not installed"
