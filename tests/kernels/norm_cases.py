"""Norms in float64, and arguments of norms."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pykern.kernels.dropout import keeps
from tests.kernels.acceptance import padded

EPS = 1e-5
TYPES = [torch.float32, torch.bfloat16, torch.float16]
SEED = 2**40 + 5


class Exact:
    """A norm in float64: values, and of each the sum of |terms| that errors are relative to."""

    def __init__(self, total: Tensor, weight: Tensor, bias: Tensor | None, centred: bool) -> None:
        self.x = total.double()
        self.weight, self.bias, self.centred = weight.double(), bias, centred
        self.mean = self.x.mean(-1, keepdim=True) if centred else torch.zeros(())
        self.rstd = ((self.x - self.mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
        self.normal = (self.x - self.mean) * self.rstd
        size = self.x.abs()
        # The subtracted terms have an error too.
        size = size + size.mean(-1, keepdim=True) if centred else size
        self.size = size * self.rstd

    def normed(self) -> tuple[Tensor, Tensor]:
        value = self.normal * self.weight
        terms = self.size * (1 + self.size if self.centred else 1) * self.weight.abs()
        if self.bias is None:
            return value, terms
        return value + self.bias.double(), terms + self.bias.double().abs()

    def of_total(self, gradient: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        g = gradient.double() * self.weight
        value = g - self.normal * (g * self.normal).mean(-1, keepdim=True)
        terms = g.abs() + self.size * (g.abs() * self.size).mean(-1, keepdim=True)
        if self.centred:
            value = value - g.mean(-1, keepdim=True)
            terms = terms + g.abs().mean(-1, keepdim=True)
        value, terms = value * self.rstd, terms * self.rstd
        if residual is None:
            return value, terms
        return value + residual.double(), terms + residual.double().abs()

    def of_weights(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        g = gradient.double().reshape(-1, gradient.shape[-1])
        values = [(g * self.normal.reshape(g.shape)).sum(0)]
        terms = [(g.abs() * self.size.reshape(g.shape)).sum(0)]
        if self.bias is not None:
            values.append(g.sum(0))
            terms.append(g.abs().sum(0))
        return torch.stack(values), torch.stack(terms)


def exact_sum(x: Tensor, delta: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    term = torch.where(keeps(delta, rate, SEED, None), delta.double() / (1 - rate), 0.0)
    return x.double() + term, x.double().abs() + term.abs()


class Case:
    """Arguments of a norm, laid out anyhow."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.shape = draw(st.sampled_from([(), (1,), (0,), (7,), (2, 3), (33,)]))
        self.num_columns = draw(st.integers(1, 70))
        self.type = draw(st.sampled_from(TYPES))
        self.weight_type = draw(st.sampled_from([self.type, torch.float32]))
        self.normed_type = draw(st.sampled_from([self.type, torch.bfloat16]))
        self.centred = draw(st.booleans())
        self.has_bias = self.centred and draw(st.booleans())
        self.has_delta, self.has_residual = draw(st.booleans()), draw(st.booleans())
        self.rate = draw(st.sampled_from([0.0, 0.3])) if self.has_delta else 0.0
        self.padding, self.offset = draw(st.integers(0, 5)), draw(st.integers(0, 3))

    def __repr__(self) -> str:
        return str(self.__dict__)

    def tensors(self) -> list[Any]:
        torch.manual_seed(1)

        def row(wanted: bool = True) -> Tensor | None:
            return torch.randn(self.num_columns).to(self.weight_type) if wanted else None

        def rows(dtype: torch.dtype, wanted: bool = True) -> Tensor | None:
            if not wanted:
                return None
            values = (torch.randn(*self.shape, self.num_columns) * 2 + 0.5).to(dtype)
            return padded(values, self.padding, self.offset)

        return [
            rows(self.type),
            rows(self.type, self.has_delta),
            row(),
            row(self.has_bias),
            rows(self.normed_type),
            rows(self.type, self.has_residual),
        ]


CASES = st.composite(Case)()
