"""``turboquant-vlm doctor``: what is installed, which devices and backends there are, and what "auto" picks and why.

The reference is checked like the kernels are: it runs on MLX, and an MLX that miscomputes on this device would break it
too.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from . import backend, support

REFERENCE = "reference"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="turboquant-vlm doctor",
        description="Show versions, devices, backends and the verdicts of their device checks. "
        "Exit code 0 if mlx-vlm is supported and the backend that would serve is sound.",
    )
    p.add_argument("--recheck", action="store_true", help="run the device checks again, whatever is remembered")
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def version(package: str) -> str:
    """The installed version of a distribution, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def examine(recheck: bool = False) -> dict[str, Any]:
    """Everything the command shows, as plain data. Runs each device check that is not remembered, or all of them.

    Keys: versions, mlx_vlm (supported, range), devices, backends (per name: available, reason, verdict), asked,
    serving, why, available, hook (enabled, folder), cache_folder, sound.
    """
    from turboquant_vlm.conformance.folder import cache_folder

    from .enable import enabled, site_packages

    backends = {target.name: _examine(target, recheck) for target in (*backend.targets(), _reference())}
    serving, why = _serving()
    supported = _supported()
    found = backends.get(serving, {}).get("verdict")
    return {
        "versions": {
            **{name: version(name) for name in ("turboquant-vlm", "mlx", "mlx-vlm")},
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "mlx_vlm": {"supported": supported, "range": support.RANGE},
        "devices": _devices(),
        "backends": backends,
        "asked": backend.chosen(),
        "serving": serving,
        "why": why,
        "available": list(backend.available()),
        "hook": {"enabled": enabled(), "folder": str(site_packages())},
        "cache_folder": str(cache_folder()),
        # mlx-vlm's own caches are not ours to judge.
        "sound": supported and (serving == "upstream" or bool(found and found["ok"])),
    }


def _reference() -> Any:
    from turboquant_vlm.fast.targets import Target

    return Target(REFERENCE, "turboquant_vlm.reference")


def _examine(target: Any, recheck: bool) -> dict[str, Any]:
    reason = target.unavailable_reason()
    if reason is not None:
        return {"available": False, "reason": reason, "verdict": None}
    found = backend.verdict(target, force=recheck)
    shown = ("ok", "reason", "cases", "seconds", "when", "remembered", "identity")
    return {"available": True, "reason": None, "verdict": {name: getattr(found, name) for name in shown}}


def _serving() -> tuple[str, str]:
    try:
        found = backend.resolve()
    except (ValueError, ImportError) as error:
        return "none", str(error)
    return found.name, found.why


def _supported() -> bool:
    try:
        support.check(version("mlx-vlm"))
    except support.UnsupportedMlxVlm:
        return False
    return True


def _devices() -> list[dict[str, Any]]:
    """MLX's devices of this process, the default one marked."""
    import mlx.core as mx

    found = []
    for kind in (mx.gpu, mx.cpu):
        device = mx.Device(kind)
        if mx.is_available(device):
            info = mx.device_info(device)
            name = str(info.get("device_name", "unknown"))
            found.append({"kind": device.type.name, "name": name, "default": mx.default_device() == device})
    return found


def _verdict_text(verdict: dict[str, Any]) -> str:
    state = "passed" if verdict["ok"] else "FAILED"
    source = f"remembered from {verdict['when']}" if verdict["remembered"] else "checked now"
    text = f"device check {state}, {verdict['cases']} cases, {verdict['seconds']:.1f} s, {source}"
    return text if verdict["ok"] else f"{text}: {verdict['reason']}"


def lines(found: dict[str, Any]) -> list[str]:
    """The text of `examine`'s data."""
    versions, hook = found["versions"], found["hook"]
    supported = "supported" if found["mlx_vlm"]["supported"] else "outside the supported range"
    out = [
        f"turboquant-vlm {versions['turboquant-vlm']}, Python {versions['python']}, {versions['platform']}",
        f"mlx {versions['mlx']}, mlx-vlm {versions['mlx-vlm']}: {supported} ({found['mlx_vlm']['range']})",
    ]
    for device in found["devices"]:
        default = ", MLX's default" if device["default"] else ""
        out.append(f"device: {device['kind']}, {device['name']}{default}")
    for name, entry in found["backends"].items():
        state = f"unavailable, {entry['reason']}" if entry["verdict"] is None else _verdict_text(entry["verdict"])
        out.append(f"  {name}: {state}")
    available = ", ".join(found["available"])
    out.append(f"backend: {found['asked']}, served by {found['serving']}; available: {available}")
    if found["why"]:
        out.append(f"  why: {found['why']}")
    place = f"enabled in {hook['folder']}" if hook["enabled"] else "not enabled; generate, chat and server install it"
    out.append(f"hook: {place}")
    out.append(f"cache folder: {found['cache_folder']}")
    return out


def main(arguments: Sequence[str]) -> int:
    """Print what was found; 0 if the backend that would serve is sound, else 1."""
    args = parser().parse_args(list(arguments))
    found = examine(args.recheck)
    print(json.dumps(found, indent=1) if args.json else "\n".join(lines(found)))
    return 0 if found["sound"] else 1
