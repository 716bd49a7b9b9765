"""What one kernel launch is, and how arrays become its buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

STORAGE: dict[mx.Dtype, type[np.generic]] = {
    mx.bool_: np.bool_,
    mx.uint8: np.uint8,
    mx.uint16: np.uint16,
    mx.uint32: np.uint32,
    mx.uint64: np.uint64,
    mx.int8: np.int8,
    mx.int16: np.int16,
    mx.int32: np.int32,
    mx.int64: np.int64,
    mx.float16: np.float16,
    mx.float32: np.float32,
    mx.bfloat16: np.uint16,
    mx.complex64: np.complex64,
}
"""The NumPy dtype that holds the bits of each MLX dtype; NumPy has no bfloat16."""


@dataclass(frozen=True)
class Dispatch:
    """One launch of one kernel: the final Metal text, its sizes, and what its outputs are.

    ``grid`` counts threads, as in ``mx.fast.metal_kernel``; the last threadgroup of each dimension may be smaller.
    ``input_shapes`` and ``input_dtypes`` are those of the kernel's own inputs, in order.
    """

    source: str
    name: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]
    input_shapes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[mx.Dtype, ...] = ()
    row_contiguous: bool = True
    init_value: float | None = None
    template_arguments: str | None = None


@dataclass
class Buffer:
    """The bytes behind one kernel parameter."""

    name: str
    line: int
    data: Array | None
    size: int
    item_size: int
    offset: int = 0
    output: bool = False
    initialised: bool = False
    keep: Any = field(default=None, repr=False)


def as_mlx(value: Any) -> mx.array:
    """The array that MLX would hand to a kernel for ``value`` (an array or a Python scalar)."""
    return value if isinstance(value, mx.array) else mx.array(value)


def bits_of(array: mx.array) -> Array:
    """A NumPy view of an array's memory, with its strides; bfloat16 appears as uint16."""
    mx.eval(array)
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(plain)
    return np.array(plain, copy=False)


def from_bits(bits: Array, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """The MLX array of ``dtype`` with these bits."""
    array = mx.array(bits.reshape(shape))
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array


def _span(view: Array) -> tuple[Array, int]:
    """All bytes between the first and the last element of a strided view, and where its first element stands."""
    low = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True) if s < 0)
    high = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True) if s > 0)
    if view.size == 0:
        return np.zeros(0, np.uint8), 0
    size = high - low + view.itemsize
    first = np.ndarray((size,), np.uint8, buffer=_Memory(view, low, size))
    return first, -low


class _Memory:
    """Bytes around the first element of a view, through NumPy's array interface."""

    def __new__(cls, view: Array, low: int, size: int) -> Any:
        holder = super().__new__(cls)
        address = view.__array_interface__["data"][0] + low
        interface = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}
        holder.__dict__.update(__array_interface__=interface, view=view)
        return np.asarray(holder).data


def input_buffer(name: str, line: int, array: mx.array, row_contiguous: bool) -> tuple[Buffer, list[int], list[int]]:
    """The buffer of one input, its shape and its strides in elements."""
    view = bits_of(array)
    if row_contiguous:
        view = np.ascontiguousarray(view).reshape(view.shape)
    data, offset = _span(view)
    buffer = Buffer(name, line, data, data.size, view.itemsize, offset, keep=view)
    return buffer, list(view.shape), [s // view.itemsize for s in view.strides]


def output_buffer(name: str, line: int, shape: tuple[int, ...], dtype: mx.Dtype, init_value: float | None) -> Buffer:
    """The buffer of one output, filled when there is an initial value."""
    storage = np.dtype(STORAGE[dtype])
    count = int(np.prod(shape, dtype=np.int64))
    data = None
    if init_value is not None:
        data = bits_of(mx.full((count,), init_value, dtype=dtype)).view(np.uint8)
    size = count * storage.itemsize
    return Buffer(name, line, data, size, storage.itemsize, output=True, initialised=init_value is not None)
