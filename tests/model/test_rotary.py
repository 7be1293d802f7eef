"""Rotary positions: relative, exact, and in fp32 whatever happens to the model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.model.layers import RotaryTables, rotary_tables, rotate
from tests import levels

COS_TP, SIN_TP = rotary_tables(16, 256, 10000.0)


@levels.examples(50)
@given(q_at=st.integers(0, 100), k_at=st.integers(0, 100), shift=st.integers(0, 155))
def test_products_depend_on_the_distance_only(q_at: int, k_at: int, shift: int) -> None:
    q_H, k_H = torch.randn(2, 16, generator=torch.Generator().manual_seed(q_at))

    def product(q_at: int, k_at: int) -> float:
        q = rotate(q_H.view(1, 1, 1, 16), COS_TP[[q_at]], SIN_TP[[q_at]])
        k = rotate(k_H.view(1, 1, 1, 16), COS_TP[[k_at]], SIN_TP[[k_at]])
        return float((q * k).sum())

    assert product(q_at, k_at) == pytest.approx(product(q_at + shift, k_at + shift), abs=2e-5)


def test_rotation_is_multiplication_by_a_unit_complex_number() -> None:
    x_BNTH = torch.randn(2, 3, 256, 16)
    pairs = torch.complex(*x_BNTH.double().chunk(2, dim=-1))
    frequencies_P = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angles_TP = torch.arange(256.0, dtype=torch.float64)[:, None] * frequencies_P
    turned = pairs * torch.polar(torch.ones_like(angles_TP), angles_TP)
    expected = torch.cat((turned.real, turned.imag), dim=-1).float()
    torch.testing.assert_close(rotate(x_BNTH, COS_TP, SIN_TP), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tables_survive_conversions_of_the_model(dtype: torch.dtype) -> None:
    tables = RotaryTables(16, 256, 10000.0).to(dtype)
    assert torch.equal(tables.cos_TP, COS_TP)
    assert torch.equal(tables.sin_TP, SIN_TP)
    assert set(dict(tables.named_buffers())) == {"cos_TP", "sin_TP"}


def test_tables_are_filled_after_the_meta_device() -> None:
    with torch.device("meta"):
        tables = RotaryTables(16, 256, 10000.0)
    assert tables.cos_TP.is_meta
    tables = tables.to_empty(device="cpu")
    assert torch.equal(tables.cos_TP, COS_TP)
    assert torch.equal(tables.sin_TP, SIN_TP)
