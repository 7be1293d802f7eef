"""FLOPs by the sides of weights, FLOPs of attention, and bytes of single operations, by hand."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from offloadtrain.plan.costs.microbatch import AttentionKind, Work
from offloadtrain.plan.tracing.meter import Meter

of_groups = pytest.mark.skipif(
    not hasattr(F, "grouped_mm"), reason="torch 2.9 has no grouped products"
)


def work_of(run: Callable[[], Tensor], *weights: Tensor, backward: bool = False) -> Work:
    """What an operation does, or its backward alone."""
    meter = Meter()
    meter.weights = frozenset(weight.untyped_storage()._cdata for weight in weights)
    if not backward:
        with meter:
            run()
    else:
        out = run()
        with meter:
            out.sum().backward()
    work = Work()
    for segment in meter.segments:
        work.add(segment.work)
    return work


def test_a_product_has_the_sides_of_its_weight_in_forward_and_backward() -> None:
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(48, 12))
        x = torch.empty(100, 12, requires_grad=True)
        width = sqrt(48 * 12)
        assert work_of(lambda: F.linear(x, weight), weight).products == {width: 2 * 100 * 12 * 48}
        back = work_of(lambda: F.linear(x, weight), weight, backward=True)
    assert back.products == {width: 2 * 2 * 100 * 12 * 48} and not back.attention


def test_scores_are_products_of_the_smaller_sides_whose_bytes_count() -> None:
    with FakeTensorMode():
        q, k = torch.empty(6, 40, 8), torch.empty(6, 8, 40)
        work = work_of(lambda: q @ k)
    assert work.products == {sqrt(8 * 40): 2 * 6 * 40 * 8 * 40}
    assert work.nbytes == 4 * 6 * (2 * 40 * 8 + 40 * 40)


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_counts_all_scores_and_says_whether_it_is_causal(causal: bool) -> None:
    def attended() -> Tensor:
        return F.scaled_dot_product_attention(*three, is_causal=causal)

    with FakeTensorMode():
        three = [torch.empty(2, 4, 64, 8, requires_grad=True) for _ in range(3)]
        kind, scores = AttentionKind(32, 64, causal), 2 * 4 * 64 * 64
        assert work_of(attended).attention == {kind: 4 * scores * 8}
        assert work_of(attended, backward=True).attention == {kind: 10 * scores * 8}


def test_a_convolution_is_a_product_of_patches() -> None:
    """Of each 4 x 4 patch of 3 channels 16 outputs; backward of both, in groups by their share."""
    with FakeTensorMode():
        image = torch.empty(5, 3, 32, 32)
        weight = nn.Parameter(torch.empty(16, 3, 4, 4))
        flops, width = 2 * 5 * 8 * 8 * 16 * 3 * 16, sqrt(16 * 3 * 16)
        assert work_of(lambda: F.conv2d(image, weight, stride=4)).products == {width: flops}
        back = work_of(lambda: F.conv2d(image, weight, stride=4), backward=True)
        assert back.products == {width: flops}  # the image needs no gradient
        signal = torch.empty(5, 6, 30)
        depthwise = nn.Parameter(torch.empty(6, 1, 3))
        alone = work_of(lambda: F.conv1d(signal, depthwise, groups=6, padding=1))
    assert alone.products == {sqrt(6 * 3): 2 * 5 * 30 * 6 * 3}
    assert alone.nbytes == 4 * (2 * 5 * 6 * 30 + 6 * 3)  # bound by memory


@of_groups
def test_grouped_products_of_experts_count() -> None:
    with FakeTensorMode():
        tokens = torch.empty(64, 32, dtype=torch.bfloat16)
        experts = nn.Parameter(torch.empty(4, 32, 16, dtype=torch.bfloat16))
        ends = torch.empty(4, dtype=torch.int32)
        work = work_of(lambda: F.grouped_mm(tokens, experts, offs=ends), experts)
    assert work.products == {sqrt(32 * 16): 2 * 64 * 32 * 16}


def test_bytes_are_those_that_an_operation_reads_and_writes() -> None:
    with FakeTensorMode():
        table, some = torch.empty(1000, 8), torch.empty(10, dtype=torch.long)
        assert work_of(lambda: F.embedding(some, table)).nbytes == 2 * 4 * 10 * 8
        matrix, row = torch.empty(10, 8), torch.empty(1, 8).expand(10, 8)
        assert work_of(lambda: matrix + row).nbytes == 4 * (10 * 8 + 8 + 10 * 8)
        assert work_of(lambda: matrix.copy_(row)).nbytes == 4 * (8 + 10 * 8)
        assert work_of(lambda: torch.empty(100)).launches == 0
        few = torch.empty(3, dtype=torch.long)
        touched = work_of(lambda: table.index_add_(0, few, torch.empty(3, 8)))
        assert touched.nbytes < 1000


@of_groups
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("a", "b"),
    [((48, 16), (3, 16, 8)), ((16, 48), (48, 8)), ((3, 16, 8), (3, 8, 24)), ((3, 16, 8), (8, 48))],
)
def test_grouped_products_have_the_shape_and_dtype_that_torch_gives_them(
    a: tuple[int, ...], b: tuple[int, ...], dtype: torch.dtype
) -> None:
    offs = None if len(a) == len(b) == 3 else torch.tensor([16, 32, 48], dtype=torch.int32)
    operands = (torch.ones(a, dtype=dtype), torch.ones(b, dtype=dtype).mT.contiguous().mT)
    real = F.grouped_mm(*operands, offs=offs)
    with FakeTensorMode(allow_non_fake_inputs=True), Meter():
        fake = F.grouped_mm(*(torch.empty_like(tensor) for tensor in operands), offs=offs)
    described = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in (fake, real)]
    assert described[0] == described[1]


@of_groups
def test_grouped_products_whose_sides_differ_are_refused() -> None:
    with FakeTensorMode(), Meter(), pytest.raises(RuntimeError, match="sides differ"):
        F.grouped_mm(torch.empty(48, 16), torch.empty(3, 8, 16), offs=torch.empty(3).int())
