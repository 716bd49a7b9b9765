"""The room of the kernels: the public functions of `turboquant_vlm.reference` on packed data, with the same bits.

It holds no kernels yet: `TARGETS` is empty, and the integration serves every call with the reference.  A target is a
module with the reference's functions and signatures that has passed `turboquant_vlm.conformance` on its device.
"""

from __future__ import annotations

TARGETS: tuple[str, ...] = ()
"""Targets that can serve: "metal", "cuda", "cpu" as they come."""
