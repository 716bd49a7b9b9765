"""TurboQuant KV-cache quantization for mlx-vlm.

The rooms: ``reference`` is the contract as readable functions, ``fast`` the same functions on kernels,
``conformance`` the judge between the two, and ``integration`` what mlx-vlm and the command line see.
"""

from importlib.metadata import version

__version__ = version("turboquant-vlm")
