"""Where this package keeps what it can make again; see `turboquant_vlm.fast.folder`."""

from turboquant_vlm.fast.folder import CACHE_VARIABLE, cache_folder

__all__ = ["CACHE_VARIABLE", "cache_folder"]
