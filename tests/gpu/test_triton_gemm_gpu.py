"""Products of few rows on a GPU: against float64 in the shapes of Llama 3.1, and chained in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corellm.kernels.gemm_tuning import WIDTHS, GemmTile, HeldTile, PipedTile, Tile
from corellm.kernels.inputs import Heads, Rope

pytest.importorskip("triton")
from corellm.kernels.skinny_products import SkinnyProducts
from tests.support.skinny_checks import EPS, SkinnyCase, poison_outputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

BF16 = torch.bfloat16
HEADS_8B = Heads(32, 8, 128)
QKV = {  # weights of one rank: Llama 3.1 8B and 70B, whole and halved
    (6144, 4096): HEADS_8B,
    (3072, 4096): Heads(16, 4, 128),
    (10240, 8192): Heads(64, 8, 128),
    (5120, 8192): Heads(32, 4, 128),
}
GATE_UP = [(28672, 4096), (14336, 4096), (57344, 8192), (28672, 8192)]
O_AND_DOWN = [(4096, 4096), (4096, 2048), (8192, 8192), (8192, 4096)]
O_AND_DOWN += [(4096, 14336), (4096, 7168), (8192, 28672), (8192, 14336)]
HEAD = [(128256, 4096), (64128, 4096), (128256, 8192), (64128, 8192)]
ROWS = [1, 2, 3, 16, 32]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_outputs(monkeypatch)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [*QKV, *GATE_UP, *O_AND_DOWN, *HEAD], ids=str)
def test_shapes_of_llama(shape: tuple[int, int]) -> None:
    products = SkinnyProducts(device(), BF16)
    assert products.covers(1, *shape)
    for m in (m for m in ROWS if products.covers(m, *shape)):
        case = SkinnyCase(products, m, *shape, BF16, "cuda")
        if shape in O_AND_DOWN:
            case.check_linear_add()
        elif not products.fuses(m, *shape):
            case.check_linear()
        elif shape in QKV:
            case.check_norm_qkv(QKV[shape], page_size=16)
        elif shape in GATE_UP:
            case.check_norm_gated()
        else:
            case.check_norm_linear()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("tile", "rows"),
    [
        (HeldTile(4, 8, 1), (1, 2)),
        (HeldTile(2, 4, 3, 128), (1, 2)),
        (PipedTile(8, 512, 2, 4), (1, 2)),
        (GemmTile(16, 256, 2, 4), (1, 8, 16)),
        (GemmTile(64, 128, 4, 4), (5, 32)),
    ],
    ids=str,
)
def test_shapes_that_no_tile_divides(tile: Tile, rows: tuple[int, ...]) -> None:
    n, k = 1034, 2560
    products = SkinnyProducts(device(), BF16, {(n, k): (tile,) * len(WIDTHS)})
    for m in rows:
        case = SkinnyCase(products, m, n, k, BF16, "cuda")
        case.check_linear()
        case.check_linear_add()
        if isinstance(tile, HeldTile):
            case.check_norm_linear()
            case.check_norm_gated()


class Layers:
    """Weights of four layers of 8B without their attention: q stands for what it would return."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator, device="cuda") * scale).to(BF16)

        self.random = random
        self.norm = random(4096)
        shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
        self.weights = [[random(n, k, scale=k**-0.5) for n, k in shapes] for _ in range(4)]
        self.rope = Rope(random(2, 1, 128), random(2, 1, 128))
        self.slots = torch.tensor([5, 17], device="cuda")
        self.cache = random(2, 2, 16, 8, 128)

    def forward(self, products: SkinnyProducts, x: Tensor) -> Tensor:
        """The residual stream [m, 4096] behind the last layer; each kernel reads what the one before it wrote."""
        m, residual = len(x), x.clone()
        rope = Rope(self.rope.cos[:m], self.rope.sin[:m])
        for qkv, o, gate_up, down in self.weights:
            q = products.norm_qkv(residual, self.norm, EPS, qkv, rope, HEADS_8B, self.slots[:m], *self.cache)
            products.linear_add(q.view(m, -1), o, residual)
            products.linear_add(products.norm_gated(residual, self.norm, EPS, gate_up), down, residual)
        return residual

    def written(self, m: int) -> Tensor:
        """K and V of the m tokens."""
        return self.cache.view(2, -1, 8, 128)[:, self.slots[:m]]


@pytest.mark.parametrize("m", [1, 2])
def test_a_graph_with_dependent_launch_gives_the_bits_of_one_launch_after_another(m: int) -> None:
    layers = Layers()
    overlapping, serial = SkinnyProducts(device(), BF16), SkinnyProducts(device(), BF16, pdl=False)
    x = layers.random(m, 4096)
    layers.forward(overlapping, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers.forward(overlapping, x)
    for _ in range(5):
        x.copy_(layers.random(m, 4096))
        expected = layers.forward(serial, x)
        written = layers.written(m)
        for _ in range(20):  # a race shows in some replay
            layers.cache.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, expected)
            assert torch.equal(layers.written(m), written)
