"""Runs Gluon kernels for Hopper on a CPU: every program in turn, its partitions as threads, tensors as numpy arrays.

Asynchronous work happens as late as the program allows, copies as early: a product reads its operands when it is waited
for, a TMA copy is there at once. So memory that is released too soon shows in the result. A wait that nothing ends
raises. All numbers are float32, and layouts mean nothing.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

DEADLOCK_S = 20.0


class Tensor(np.ndarray):
    """An array with the methods that kernels call."""

    def to(self, dtype: object) -> Tensor:
        return self

    def __iadd__(self, other: Any) -> Tensor:  # a name gets another value: the one it had may have other names
        return self + other

    def __isub__(self, other: Any) -> Tensor:
        return self - other


def tensor(value: Any) -> Tensor:
    return np.asarray(value).view(Tensor)


class Pointer:
    """Elements of a flat array at one offset or an array of offsets."""

    def __init__(self, flat: np.ndarray, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset
        self.dtype = SimpleNamespace(element_ty=None)

    def __add__(self, distance: Any) -> Pointer:
        return Pointer(self.flat, np.asarray(self.offset) + np.asarray(distance))


@dataclass
class Descriptor:
    """A TMA descriptor: boxes of `box` elements of `array`; what lies outside of it reads as 0."""

    array: np.ndarray
    box: tuple[int, ...]
    dtype: None = None
    layout: None = None

    def read(self, corner: Sequence[Any]) -> np.ndarray:
        found = np.zeros(self.box, np.float32)
        ranges = [
            (int(at), min(int(at) + n, size)) for at, n, size in zip(corner, self.box, self.array.shape, strict=True)
        ]
        inside = self.array[tuple(slice(*ends) for ends in ranges)]
        found[tuple(slice(0, n) for n in inside.shape)] = inside
        return found


class Memory:
    """Shared memory, or a view of it."""

    dtype = None

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def index(self, i: Any) -> Any:
        found = self.values[int(i)]
        return found if isinstance(found, Barrier) else Memory(found)

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return Memory(np.moveaxis(np.moveaxis(self.values, dim, 0)[start : start + length], 0, dim))

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.values.transpose(order))

    def reshape(self, shape: Sequence[int]) -> Memory:
        return Memory(self.values.reshape(shape))

    def load(self, layout: object) -> Tensor:
        return tensor(self.values.copy())

    def store(self, values: np.ndarray) -> None:
        self.values[...] = values


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        with self.changed:
            self.pending -= count
            self.bytes += expected
            self._advance()

    def complete(self, count: int) -> None:
        with self.changed:
            self.bytes -= count
            self._advance()

    def wait(self, parity: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase & 1 != int(parity), DEADLOCK_S):
                raise TimeoutError(f"phase {self.phase} of a barrier did not end within {DEADLOCK_S:.0f} s")

    def _advance(self) -> None:
        if self.pending < 0:
            raise RuntimeError("more arrived at a barrier than it counts")
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.changed.notify_all()


@dataclass
class Product:
    """A product under way."""

    compute: Callable[[], np.ndarray]
    value: np.ndarray | None = None

    def finish(self) -> None:
        if self.value is None:
            self.value = self.compute()


class Context(threading.local):
    """What a thread knows: its program, and products in the order in which it started them."""

    program = programs = 0
    products: list[Product]


CONTEXT = Context()


def _operand(value: Any) -> np.ndarray:
    return value.values if isinstance(value, Memory) else value


def _mma(a: Any, b: Memory, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    base = acc if use_acc else 0
    product = Product(lambda: tensor((base + _operand(a) @ _operand(b)).astype(np.float32)))
    CONTEXT.products.append(product)
    return product if is_async else _mma_wait(0, [product])


def _mma_wait(left: int, deps: Sequence[Any]) -> Any:
    done = CONTEXT.products[: len(CONTEXT.products) - left]
    for product in done:
        product.finish()
    found = [dep.value if isinstance(dep, Product) else dep for dep in deps]
    return found[0] if len(found) == 1 else tuple(found)


def _tma_load(source: Descriptor, corner: Sequence[Any], barrier: Barrier, target: Memory) -> None:
    found = source.read(corner)
    target.store(found)
    barrier.complete(2 * found.size)


def _load(pointer: Pointer) -> Tensor:
    return tensor(pointer.flat[pointer.offset])


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    offset, value, mask = np.broadcast_arrays(pointer.offset, value, mask)
    pointer.flat[offset[mask]] = value[mask]


def _allocate(dtype: object, shape: Sequence[int], layout: object) -> Any:
    if dtype != "int64":
        return Memory(np.full(shape, np.nan, np.float32))
    barriers = np.array([Barrier() for _ in range(shape[0])], dtype=object)
    return Memory(barriers) if len(shape) > 1 else barriers[0]


def _inline_asm(asm: str, constraints: str, args: Sequence[Any], **options: object) -> Any:
    return tensor(np.exp2(args[0])) if asm.startswith("ex2") else args[0]


def _warp_specialize(partitions: Sequence[tuple[Any, tuple[Any, ...]]], *sizes: object) -> None:
    program, programs, failures = CONTEXT.program, CONTEXT.programs, []

    def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        CONTEXT.program, CONTEXT.programs, CONTEXT.products = program, programs, []
        try:
            with np.errstate(all="ignore"):
                function(*args)
        except Exception as error:  # noqa: BLE001 (raised where the partitions are joined)
            failures.append(error)

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _jit(function: Callable[..., None] | None = None, **options: object) -> Any:
    return _jit if function is None else function


LANGUAGE = SimpleNamespace(
    constexpr=lambda value: value,
    int32="int32", int64="int64", float32="float32",
    static_range=range,
    NVMMADistributedLayout=lambda *a: None, SliceLayout=lambda *a: None, DotOperandLayout=lambda *a: None,
    DistributedLinearLayout=lambda *a: None, BlockedLayout=lambda *a: None, NVMMASharedLayout=lambda **k: None,
    program_id=lambda axis: tensor(CONTEXT.program), num_programs=lambda axis: tensor(CONTEXT.programs),
    arange=lambda start, end, layout: tensor(np.arange(start, end)),
    full=lambda shape, value, dtype, layout: tensor(np.full(shape, value, np.float32)),
    full_like=lambda x, value: tensor(np.full_like(x, value)), zeros_like=lambda x: tensor(np.zeros_like(x)),
    where=lambda *a: tensor(np.where(*a)), minimum=lambda *a: tensor(np.minimum(*a)),
    maximum=lambda *a: tensor(np.maximum(*a)), log2=lambda x: tensor(np.log2(x)),
    max=lambda x, axis: tensor(np.max(x, axis)), sum=lambda x, axis: tensor(np.sum(x, axis)),
    expand_dims=lambda x, axis: tensor(np.expand_dims(x, axis)), convert_layout=lambda x, layout: x,
    load=_load, store=_store, allocate_shared_memory=_allocate, inline_asm_elementwise=_inline_asm,
    warp_specialize=_warp_specialize,
)  # fmt: skip
HOPPER = SimpleNamespace(
    fence_async_shared=lambda: None,
    warpgroup_mma=_mma,
    warpgroup_mma_wait=_mma_wait,
    tma=SimpleNamespace(async_load=_tma_load),
    mbarrier=SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, size: barrier.arrive(1, size),
        arrive=lambda barrier, count: barrier.arrive(count),
        wait=lambda barrier, parity: barrier.wait(parity),
    ),
)


def emulated(path: Path) -> ModuleType:
    """The module at `path`, with its kernels as plain functions."""
    gluon = SimpleNamespace(jit=_jit, language=LANGUAGE)
    name = "triton.experimental"
    fakes = {"triton": SimpleNamespace(), name: SimpleNamespace(gluon=gluon), f"{name}.gluon": gluon}
    fakes |= {f"{name}.gluon.language": LANGUAGE, f"{name}.gluon.language.nvidia": SimpleNamespace()}
    fakes |= {f"{name}.gluon.language.nvidia.hopper": HOPPER}
    spec = importlib.util.spec_from_file_location("emulated_" + path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, fakes):
        spec.loader.exec_module(module)
    return module


def launch(kernel: Callable[..., None], programs: int, *args: Any, **sizes: int) -> None:
    """Run `programs` programs of a kernel, one after another."""
    CONTEXT.programs, CONTEXT.products = programs, []
    for program in range(programs):
        CONTEXT.program = program
        kernel(*args, **sizes)
