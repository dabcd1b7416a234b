"""Task family `patchkit`: a folder of small Python modules, some still unwritten, judged by hidden cases."""

from gyre_hpc.executions.patchkit.family import PatchkitFamily, PatchkitTask

__all__ = ["PatchkitFamily", "PatchkitTask"]
