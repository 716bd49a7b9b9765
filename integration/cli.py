"""The command ``turboquant-vlm``: mlx-vlm's commands with the hook in place, and switching it on and off.

``generate``, ``chat`` and ``server`` hand every flag to mlx-vlm's own command, except ``--kv-backend``, which is ours.
The report of the run goes to standard error, so that standard output is mlx-vlm's alone.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence

from . import backend, report, support
from .bits import UNSUPPORTED, resolve_kv_bits

USAGE = """\
usage: turboquant-vlm COMMAND [flags]

mlx-vlm's commands, with TurboQuant's KV cache:
  generate ...   as `mlx_vlm.generate`
  chat ...       as `mlx_vlm.chat`
  server ...     as `mlx_vlm.server`
  They take every flag of mlx-vlm, and --kv-backend {backends}.
  --kv-bits 3.5 selects TurboQuant with 4-bit keys and 3-bit values (the extra bit goes to the keys; mlx-vlm's
  help says the opposite of its own cache); --kv-bits 4 --kv-quant-scheme turboquant selects it at a whole width;
  --kv-key-bits and --kv-value-bits set them apart. --quantized-kv-start 0 quantizes from the first token.

this environment:
  enable         let plain `python -m mlx_vlm.generate`, and every other use of mlx_vlm here, use the cache
  disable        undo that
  doctor         versions, devices, backends and their checks, and whether the hook is in
                 (--recheck runs the checks again, --json prints JSON)
  demo           answer a question with a small model and a quantized cache

  --version, --help
"""


class UsageError(ValueError):
    """A command line that cannot be run; its text is all the user needs to see."""


def _take_backend(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take ``--kv-backend NAME`` or ``--kv-backend=NAME`` out of the arguments. UsageError if NAME is missing."""
    name: str | None = None
    rest: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--kv-backend":
            name = next(waiting, None)
            if name is None:
                raise UsageError("--kv-backend needs a name")
        elif argument.startswith("--kv-backend="):
            name = argument.partition("=")[2]
        else:
            rest.append(argument)
    return name, rest


def _run(command: str, arguments: Sequence[str]) -> int:
    """Run ``mlx_vlm.<command>``'s own main with the hook in; its exit status."""
    from .hook import install

    name, rest = _take_backend(arguments)
    try:
        if name is not None:
            # The environment, because a server may start further processes.
            os.environ[backend.VARIABLE] = backend.check(name)
        install()
        _check_bits(rest)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if command == "server" and "--reload" in rest:
        _say("--reload serves from another process; run `turboquant-vlm enable` once to have the hook there too.")
    module = importlib.import_module(f"mlx_vlm.{command}")
    before, sys.argv = sys.argv, [f"turboquant-vlm {command}", *rest]
    report.forget()
    try:
        module.main()
    except SystemExit as stop:
        return _status(stop)
    except ValueError as error:
        if not str(error).startswith(UNSUPPORTED):
            raise
        raise UsageError(str(error)) from error
    finally:
        sys.argv = before
    _print_report()
    return 0


def _check_bits(arguments: Sequence[str]) -> None:
    """ValueError for widths that no cache could serve, before a model is loaded. What is no number argparse refuses."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--kv-bits", "--kv-key-bits", "--kv-value-bits"):
        parser.add_argument(flag, type=float)
    parser.add_argument("--kv-quant-scheme")
    try:
        known, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError:
        return
    if known.kv_bits is None:
        return
    if not math.isfinite(known.kv_bits):
        raise ValueError(f"{UNSUPPORTED}; got kv_bits={known.kv_bits}")
    if known.kv_quant_scheme == "turboquant" or not known.kv_bits.is_integer():
        resolve_kv_bits(known.kv_bits, known.kv_key_bits, known.kv_value_bits)


def _status(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    _say(str(stop.code))
    return 1


def _print_report() -> None:
    last = report.last_report()
    if last is not None and backend.chosen() != "upstream":
        print(last, file=sys.stderr)


def _say(line: str) -> None:
    print(f"turboquant-vlm: {line}", file=sys.stderr)


def _generate(arguments: Sequence[str]) -> int:
    return _run("generate", arguments)


def _chat(arguments: Sequence[str]) -> int:
    return _run("chat", arguments)


def _server(arguments: Sequence[str]) -> int:
    return _run("server", arguments)


def _alone(command: str, arguments: Sequence[str]) -> None:
    if arguments:
        raise UsageError(f"{command} takes no flags; got {' '.join(arguments)}")


def _enable(arguments: Sequence[str]) -> int:
    from .enable import enable

    _alone("enable", arguments)
    return _switch(enable)


def _disable(arguments: Sequence[str]) -> int:
    from .enable import disable

    _alone("disable", arguments)
    return _switch(disable)


def _switch(action: Callable[[], str]) -> int:
    try:
        print(action())
    except OSError as error:
        _say(f"cannot change this environment: {error}")
        return 1
    return 0


def _doctor(arguments: Sequence[str]) -> int:
    from . import doctor

    try:
        return doctor.main(arguments)
    except SystemExit as stop:  # --help, or a flag it does not have
        return _status(stop)


def _demo(arguments: Sequence[str]) -> int:
    run: Callable[[Sequence[str]], int] = importlib.import_module(f"{__package__}.demo").main
    return run(list(arguments))


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "generate": _generate,
    "chat": _chat,
    "server": _server,
    "enable": _enable,
    "disable": _disable,
    "doctor": _doctor,
    "demo": _demo,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own); its exit status. 2 for wrong usage, 1 for a failure."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(backends="|".join(backend.NAMES)), end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from .doctor import version

        print(f"turboquant-vlm {version('turboquant-vlm')}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        _say(f"unknown command {arguments[0]!r}; expected one of {', '.join(COMMANDS)}")
        return 2
    try:
        return command(arguments[1:])
    except (UsageError, support.UnsupportedMlxVlm) as error:
        _say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
