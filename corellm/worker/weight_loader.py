"""Fill the slab's weights: ranged reads of this rank's shards by several threads, or seeded random numbers."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from corellm.checkpoint import DTYPE_BYTES, Checkpoint, TensorRef
from corellm.comms.messages import Progress
from corellm.errors import CheckpointError
from corellm.layers.parallel import Collectives
from corellm.models.llama.spec import Shard, WeightEntry, WeightTable
from corellm.worker.slab import Slab
from corellm.worker.weight_sinks import Sink, make_sink

PIECE_BYTES = 16 * 2**20  # of file, the unit of work of a thread; large enough for the disk, small enough to stage
REPORT_SECONDS = 0.1
MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """At most about PIECE_BYTES of one tensor: `rows` runs of `row_bytes`, `stride` bytes apart in the file, which
    land back to back at byte `at` of the slab."""

    tensor: str
    file: Path
    dtype: str
    start: int
    rows: int
    row_bytes: int
    stride: int
    at: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


def load_weights(
    checkpoint: Checkpoint,
    table: WeightTable,
    slab: Slab,
    dtype: torch.dtype,
    group: Collectives,
    report: Callable[[Progress], None],
    *,
    threads: int | None = None,
) -> dict[str, torch.Tensor]:
    """Read every weight of `table` into `slab`, converting to `dtype`, and return them by name.

    The ranks of `group` read each byte of the files once in all: their own parts, and rank 0 what everyone has, which
    it sends to the others. `report` is called from the calling thread, at most ten times a second; its `done` counts
    the bytes that the files have delivered. A tied `head` is the same tensor as `embed`.

    Raises `CheckpointError`, naming file and tensor, when a file is shorter than it was when opened or cannot be read.
    """
    weights = _views(table, slab, dtype)
    for entry in table.entries:
        weights[entry.name][_filled_rows(entry) :].zero_()
    whole = [entry for entry in table.entries if entry.is_whole]
    sent = [] if group.rank else _all_pieces(whole, checkpoint, dtype.itemsize)
    own = _all_pieces([entry for entry in table.entries if not entry.is_whole], checkpoint, dtype.itemsize)
    reader = _Reader(slab, dtype, sum(piece.nbytes for piece in (*sent, *own)))
    reader.run(sent, report, 1)  # first, while no rank is far ahead of the others, who wait for it
    for entry in whole:
        group.broadcast(weights[entry.name])
    reader.run(own, report, threads or min(MAX_THREADS, max(2, os.cpu_count() or 2)))
    return weights


def dummy_weights(table: WeightTable, slab: Slab, dtype: torch.dtype, seed: int, rank: int) -> dict[str, torch.Tensor]:
    """Fill `slab` with random weights that keep activations near unit variance, and return them by name.

    The same arguments give the same weights. Norms, which every rank holds whole, do not depend on `rank`.
    """
    weights = _views(table, slab, dtype)
    generator = torch.Generator(slab.device)
    for entry in table.entries:
        weight = weights[entry.name]
        generator.manual_seed(_derive_seed(seed, entry.name, 0 if entry.is_whole else rank))
        if not entry.is_whole:
            fan_in = entry.shards[0].shape[1]
            filled = _filled_rows(entry)
            _fill_normal(weight[:filled], 0.0, fan_in**-0.5, generator)
            weight[filled:].zero_()
        else:
            _fill_normal(weight, 1.0, 0.02, generator)
    return weights


def _views(table: WeightTable, slab: Slab, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    weights = {entry.name: slab.view(entry.offset, entry.shape, dtype) for entry in table.entries}
    weights.setdefault("head", weights["embed"])
    return weights


def _filled_rows(entry: WeightEntry) -> int:
    """Rows that the checkpoint fills; those behind pad the vocabulary."""
    return max(shard.at + shard.stop - shard.start if shard.dim == 0 else entry.shape[0] for shard in entry.shards)


def _derive_seed(seed: int, name: str, rank: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{rank}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _fill_normal(weight: torch.Tensor, mean: float, std: float, generator: torch.Generator) -> None:
    # In float32 blocks: torch's CPU generator is several times slower in half precision.
    flat = weight.view(-1)
    block = torch.empty(min(flat.numel(), 2**22), dtype=torch.float32, device=weight.device)
    for start in range(0, flat.numel(), 2**22):
        part = flat[start : start + 2**22]
        part.copy_(block[: part.numel()].normal_(mean, std, generator=generator))


def _all_pieces(entries: Sequence[WeightEntry], checkpoint: Checkpoint, itemsize: int) -> list[Piece]:
    """What fills these entries, in file order, so that the disk reads ahead."""
    pieces = [
        piece
        for entry in entries
        for shard in entry.shards
        for piece in _pieces(entry, shard, checkpoint.tensors[shard.tensor], itemsize)
    ]
    return sorted(pieces, key=lambda piece: (piece.file, piece.start))


def _pieces(entry: WeightEntry, shard: Shard, ref: TensorRef, itemsize: int) -> Iterator[Piece]:
    source = DTYPE_BYTES[ref.dtype]
    width = math.prod(shard.shape[1:])
    if shard.dim == 0 or shard.stop - shard.start == width:  # whole rows: one run of bytes
        first, last = (shard.start, shard.stop) if shard.dim == 0 else (0, shard.shape[0])
        start = ref.start + first * width * source
        nbytes = (last - first) * width * source
        at = entry.offset + shard.at * width * itemsize
        for done in range(0, nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, nbytes - done)
            to = at + done // source * itemsize
            yield Piece(shard.tensor, ref.file, ref.dtype, start + done, 1, size, size, to)
        return
    # Part of each row. A column shard fills its entry's whole width, so its rows are back to back in the slab.
    rows, columns = shard.shape[0], shard.stop - shard.start
    batch = max(1, PIECE_BYTES // (columns * source))
    for row in range(0, rows, batch):
        start = ref.start + (row * width + shard.start) * source
        to = entry.offset + row * columns * itemsize
        taken = min(batch, rows - row)
        yield Piece(shard.tensor, ref.file, ref.dtype, start, taken, columns * source, width * source, to)


class _Reader:
    """Shares the pieces out to threads and counts the bytes that arrive.

    `_todo` is emptied from its left by all threads; `_done` is guarded by `_lock`; one thread at a time reads row by
    row, under `_rows_lock`.
    """

    def __init__(self, slab: Slab, dtype: torch.dtype, total: int) -> None:
        self._todo: deque[Piece] = deque()
        self._total = total  # bytes, of all that is going to be read
        self._slab = slab
        self._dtype = dtype
        self._done = 0
        self._lock = threading.Lock()
        self._rows_lock = threading.Lock()
        self._files: dict[Path, int] = {}

    def run(self, pieces: Sequence[Piece], report: Callable[[Progress], None], threads: int) -> None:
        """Read `pieces`, if there are any."""
        if not pieces:
            return
        self._todo.extend(pieces)
        with ExitStack() as stack:
            for file in {piece.file for piece in pieces}:
                self._files[file] = _open(file)
                stack.callback(os.close, self._files[file])
            pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="weights"))
            # Runs first on the way out, an interrupt included: threads then end with the piece they are at.
            stack.callback(self._todo.clear)
            running = {pool.submit(self._work) for _ in range(threads)}
            while running:
                finished, running = wait(running, timeout=REPORT_SECONDS)
                _raise_first(finished)
                report(Progress(stage="read weights", done=self._done, total=self._total, unit="B"))

    def _work(self) -> None:
        sink = make_sink(self._slab, self._dtype, PIECE_BYTES)
        while True:
            try:
                piece = self._todo.popleft()
            except IndexError:
                break
            self._read(piece, sink)
        sink.finish()

    def _read(self, piece: Piece, sink: Sink) -> None:
        buffer = sink.buffer(piece.at, piece.dtype, piece.nbytes)
        descriptor = self._files[piece.file]
        if piece.rows == 1:
            _read_exactly(descriptor, buffer, piece.start, piece)
        else:
            # Thousands of short reads are bound by the interpreter; threads that share it only slow each other down.
            with self._rows_lock:
                for row in range(piece.rows):
                    part = buffer[row * piece.row_bytes : (row + 1) * piece.row_bytes]
                    _read_exactly(descriptor, part, piece.start + row * piece.stride, piece)
        with self._lock:
            self._done += piece.nbytes
        sink.put(piece.at, piece.dtype, piece.nbytes)


def _raise_first(finished: set[Future[None]]) -> None:
    for future in finished:
        future.result()


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be opened: {error.strerror}") from error


def _read_exactly(descriptor: int, buffer: memoryview, offset: int, piece: Piece) -> None:
    filled = 0
    while filled < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
        except OSError as error:
            raise CheckpointError(f"{piece.file}: tensor {piece.tensor} cannot be read: {error.strerror}") from error
        if count == 0:
            raise CheckpointError(
                f"{piece.file}: ends inside tensor {piece.tensor}, at byte {offset + filled}; fetch the file again"
            )
        filled += count
