"""The work list of one step's attention, made on the host once for all layers.

Query tokens of a row are cut into tiles. Where there are too few tiles to fill the device, the positions a tile
attends to are cut too, in whole KV tiles of `block_n`, so that the pieces of all rows are about equally long.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corellm.kernels.inputs import Rows
from corellm.kernels.tuning import AttentionTile

ITEM_FIELDS = 12  # 48 bytes: a list's end is aligned as its start is
MERGE_FIELDS = 4
ROUNDS = (1, 2, 4)  # ways to split that are looked at: so many rounds of equal items
ITEM_COST = 2  # KV tiles: about what starting an item and merging its result take


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """What the programs of one launch do.

    items, int32 [i, ITEM_FIELDS]: first query token, number of query tokens, row of the block table, positions the
    first token sees, first and last position (exclusive) of this item, slot of its partial result or -1 where it
    writes the output itself, positions of the row that hold KV, first slot of its tile, items of its tile, nothing.
    """

    items: NDArray[np.int32]
    slots: int

    def merges(self) -> NDArray[np.int32]:
        """int32 [m, MERGE_FIELDS], for each query token whose tile was split: token, its index in the tile, first slot,
        number of slots."""
        token, count, slot, first, splits = self.items[:, (0, 1, 6, 8, 9)].T
        split = np.flatnonzero((slot == first) & (splits > 1))
        of = np.repeat(split, count[split])
        local = _ranks(count[split])
        return np.stack((token[of] + local, local, first[of], splits[of]), axis=1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Query tiles, each int64 [t]; `visible` counts the positions that the first token of a tile sees."""

    token: NDArray[np.int64]
    count: NDArray[np.int64]
    slot: NDArray[np.int64]
    visible: NDArray[np.int64]
    context: NDArray[np.int64]


def plan_work(
    rows: Rows,
    chosen: NDArray[np.int64],
    *,
    tokens_per_tile: int,
    tile: AttentionTile,
    programs: int,
) -> AttentionWork:
    """Work for the `chosen` of `rows`; `programs` of a KV head run at a time."""
    tiles = _query_tiles(rows, chosen, tokens_per_tile)
    ends = tiles.visible + tiles.count - 1
    lengths = -(-ends // tile.block_n)  # in KV tiles
    step = -(-lengths // -(-lengths // _longest_item(lengths, tile, programs)))
    splits = -(-lengths // step)

    of = np.repeat(np.arange(len(splits)), splits)
    index = _ranks(splits)
    first_slot = np.cumsum(np.where(splits > 1, splits, 0)) - splits
    start = index * step[of] * tile.block_n
    stop = np.minimum(start + step[of] * tile.block_n, ends[of])
    slot = np.where(splits[of] > 1, first_slot[of] + index, -1)
    items = np.zeros((len(of), ITEM_FIELDS), np.int32)
    items[:, :10] = np.stack(
        (
            tiles.token[of], tiles.count[of], tiles.slot[of], tiles.visible[of], start, stop, slot, tiles.context[of],
            first_slot[of], splits[of],
        ),
        axis=1,
    )  # fmt: skip
    longest_first = np.argsort(start - stop, kind="stable")  # short ones fill the gaps at the end
    return AttentionWork(items[longest_first], int(splits[splits > 1].sum()))


def most_items(tiles: int, programs: int, tile: AttentionTile) -> int:
    """No work for so many tiles has more items than this: a split ends an item short of its length once a tile."""
    return min(tiles + programs * max(ROUNDS), tiles * tile.max_splits)


def _longest_item(lengths: NDArray[np.int64], tile: AttentionTile, programs: int) -> int:
    """The most KV tiles one item should take of tiles with these `lengths`, for the earliest end of the last one.

    Shorter items balance better but each costs more. Items run in rounds of `programs`, so time is estimated as rounds
    times the mean length of an item and what it costs besides.
    """
    total = int(lengths.sum())
    least = max(tile.min_split, -(-int(lengths.max()) // tile.max_splits))
    options = [max(least, -(-total // (programs * rounds))) for rounds in ROUNDS]
    items = [int((-(-lengths // option)).sum()) for option in options]
    cost = [-(-count // programs) * (total / count + ITEM_COST) for count in items]
    return options[cost.index(min(cost))]


def _query_tiles(rows: Rows, chosen: NDArray[np.int64], tokens_per_tile: int) -> _Tiles:
    lengths = rows.starts[chosen + 1] - rows.starts[chosen]
    tiles = -(-lengths // tokens_per_tile)
    row = np.repeat(chosen, tiles)
    token = rows.starts[row] + _ranks(tiles) * tokens_per_tile
    left = rows.starts[row + 1] - token
    context = rows.contexts[row]
    return _Tiles(token, np.minimum(left, tokens_per_tile), rows.slots[row], context - left + 1, context)


def _ranks(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0..counts[0], 0..counts[1], ... end to end (each exclusive)."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
