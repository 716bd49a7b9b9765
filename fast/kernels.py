"""From a template and parameters to a Metal kernel with a readable name.

The logic is in `templates/*.metal`; here are only the parameters, as macros in front of the text. One text serves
every length, batch and seed; head sizes, widths, dtypes and what is absent (mask, sinks, packed tiles) make another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, TypeVar, cast

import mlx.core as mx

from . import launch
from .tables import OFFSETS, order

Parameter = int | str
F = TypeVar("F", bound=Callable[..., Any])

TYPES = {mx.float16: "half", mx.bfloat16: "bfloat16_t", mx.float32: "float"}
"""Metal's names of the dtypes of a model."""

THREADGROUP_BYTES = 32768
"""Threadgroup memory of every Apple GPU that MLX supports."""


@dataclass(frozen=True)
class Kernel:
    """One kernel: the object of `mx.fast.metal_kernel`, its name and its parameters."""

    name: str
    metal: Callable[..., Any]
    header: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __call__(
        self,
        inputs: Mapping[str, mx.array],
        groups: tuple[int, int, int],
        threads: int,
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
    ) -> list[mx.array]:
        """Starts groups of `threads` threads. inputs by name; outputs as (shape, dtype) in the kernel's order."""
        given = [inputs[name] for name in self.inputs]
        # The first start of a text: it is compiled now, where the caller can still do without it.
        first = id(self.metal) not in _started and evaluated(given)
        results = launch.current()(
            self.metal,
            inputs=given,
            grid=(groups[0] * threads, groups[1], groups[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=[tuple(shape) for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )
        if first and evaluated(results):
            _started.add(id(self.metal))
        return results


def kernels_started() -> int:
    """How many texts this process has started and seen through."""
    return len(_started)


def evaluated(arrays: Sequence[mx.array]) -> bool:
    """Computes arrays; False inside a function transformation of MLX, where that is not possible."""
    try:
        mx.eval(arrays)
    except ValueError as error:
        if "during function transformations" in str(error):
            return False
        raise
    return True


_remembered: list[Any] = []
# By identity: the objects of MLX can neither be hashed by content nor carry a name. Each is kept alive here.
_sources: dict[int, Kernel] = {}
_started: set[int] = set()


def remembered(function: F) -> F:
    """`functools.cache`, emptied by `forget`."""
    cached = cache(function)
    _remembered.append(cached)
    return cast(F, cached)


def forget() -> None:
    """Drops every kernel and template, so that the next call reads the text again."""
    for cached in _remembered:
        cached.cache_clear()


@remembered
def template(name: str) -> str:
    """The text of `templates/<name>.metal`."""
    return (resources.files(__package__) / "templates" / f"{name}.metal").read_text(encoding="utf-8")


@remembered
def build(
    name: str,
    body: str,
    parts: tuple[str, ...],
    parameters: tuple[tuple[str, Parameter], ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Kernel:
    """The kernel whose body is the template `body` and whose functions are those of `parts`, in this order."""
    constants = [*((k, v) for k, v in OFFSETS.items()), *parameters]
    defines = "".join(f"#define {key} {value}\n" for key, value in constants)
    header = defines + "".join(template(part) for part in parts)
    text = template(body)
    metal: Any = mx.fast.metal_kernel(
        name=name, input_names=list(inputs), output_names=list(outputs), source=text, header=header
    )
    made = Kernel(name, metal, header, text, inputs, outputs)
    _sources[id(metal)] = made
    return made


def source_of(metal: Callable[..., Any]) -> Kernel:
    """The kernel whose Metal object a launcher was given."""
    return _sources[id(metal)]


def rotation_parameters(prefix: str, dim: int) -> list[tuple[str, Parameter]]:
    """Head size, the factors of its Hadamard matrix and where the way back finds its table, as macros."""
    m, k = order(dim)
    back = OFFSETS["TQ_PALEY"] + m * ((m + 31) // 32)
    return [(prefix, dim), (f"{prefix}_M", m), (f"{prefix}_K", k), (f"{prefix}_PALEY_BACK", back)]


def dtype_name(dtype: mx.Dtype) -> str:
    """A short name of a dtype for kernel names."""
    return {mx.float16: "f16", mx.bfloat16: "bf16", mx.float32: "f32"}[dtype]
