"""Make the launcher `gyre_slurm` known to Hydra, which imports plugins only from below `hydra_plugins`.

The launcher's module is published under such a name, which works from a clone and from any kind of installation.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Final

from hydra.core.plugins import Plugins

PLUGINS: Final = "hydra_plugins.gyre_hpc"
CHOICE: Final = "hydra/launcher=gyre_slurm"
SWEEPERS: Final = ("hydra/sweeper=", "hydra.sweeper._target_=")


def with_plugins(arguments: list[str]) -> list[str]:
    """`arguments` for Hydra, which knows the launcher from here on; our sweeper is put beside our launcher."""
    plugins = Plugins.instance()  # loads the installed ones, before ours derives from them
    from gyre_hpc.sweep import launcher

    _publish(launcher)
    for plugin in (launcher.SlurmSweepLauncher, launcher.UncheckedSweeper):
        plugins.register(plugin)
    if CHOICE not in arguments or any(word.startswith(SWEEPERS) for word in arguments):
        return arguments
    return [*arguments, f"hydra.sweeper._target_={PLUGINS}.{launcher.UncheckedSweeper.__name__}"]


def _publish(module: ModuleType) -> None:
    parent_name, _, name = PLUGINS.rpartition(".")
    try:
        parent = importlib.import_module(parent_name)
    except ModuleNotFoundError:  # no other plugin is installed
        parent = ModuleType(parent_name)
        parent.__path__ = []
        sys.modules[parent_name] = parent
    sys.modules[PLUGINS] = module
    setattr(parent, name, module)
