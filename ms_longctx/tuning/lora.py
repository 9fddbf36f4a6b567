# SPDX-License-Identifier: Apache-2.0
"""Linear layers with low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

import math
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_longctx.errors import MsLongctxError
from ms_longctx.nn.linear import Linear
from ms_longctx.tuning.config import LoraConfig
from ms_longctx.tuning.dropout import KeyedDropout


class LowRank(nn.Cell):
    """``scaling * B A dropout(x)``, the change an adapter makes to the result of a linear layer.

    A starts as peft starts it, uniform in +-1/sqrt(in_features) (Kaiming with a = sqrt(5)), and B at 0. Both
    are fp32 and are cast to the type of ``x`` where used.

    Args:
        in_features, out_features: of the linear layer.
        config: rank, scaling and dropout.
        rng: source of the first A.
        dropout: ``None`` where the config has none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        config: LoraConfig,
        rng: np.random.Generator,
        dropout: KeyedDropout | None,
    ) -> None:
        super().__init__()
        self.scaling = config.scaling
        self.dropout = dropout
        self.lora_A = Linear(in_features, config.r)
        self.lora_B = Linear(config.r, out_features)
        self.lora_A.weight.set_data(Tensor(first_values(rng, config.r, in_features)))
        self.lora_B.weight.set_data(Tensor(np.zeros((out_features, config.r), np.float32)))

    def construct(self, x: Tensor) -> Tensor:
        if self.dropout is not None:
            x = self.dropout(x)
        # The scaling is cheapest here, on r features.
        return self.lora_B(self.lora_A(x) * self.scaling)

    def delta(self) -> np.ndarray:
        """What the adapter adds to the weight of the layer: fp32 ``(out_features, in_features)``."""
        return self.lora_B.weight.asnumpy() @ self.lora_A.weight.asnumpy() * np.float32(self.scaling)


def first_values(rng: np.random.Generator, r: int, in_features: int) -> np.ndarray:
    """An A before training, fp32 ``(r, in_features)``; see :class:`LowRank`."""
    bound = 1 / math.sqrt(in_features)
    return rng.uniform(-bound, bound, (r, in_features)).astype(np.float32)


class Adapted(nn.Cell):
    """A frozen linear layer and its adapters; base of the two kinds.

    ``weight`` and ``bias`` are the base's own Parameters. They are listed here before ``base_layer``, so that
    they keep their paths in the model, and with them the names in checkpoints.
    """

    def __init__(self, base: Linear, config: LoraConfig) -> None:
        super().__init__(auto_prefix=False)
        self.config = config
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.weight = base.weight
        self.bias = base.bias
        self.base_layer = base
        self.before_merge: tuple[np.ndarray, list[np.ndarray]] | None = None  # the weight, every B

    def parts(self) -> list[tuple[LowRank, np.ndarray | slice]]:
        """The adapters and the rows of ``weight`` that each one changes."""
        raise NotImplementedError

    def merge(self) -> None:
        """Add the adapters to the weight in fp32, then round to its type; B is 0 from here on.

        Graphs compiled earlier stay correct: they add an adapter that is 0.

        Raises:
            MsLongctxError: the sum is not finite in the type of the weight; nothing was changed.
        """
        if self.before_merge is not None:
            return
        before = self.weight.asnumpy().copy()
        total = before.astype(np.float32)
        for adapter, rows in self.parts():
            total[rows] += adapter.delta()
        merged = Tensor(total).astype(self.weight.dtype)
        if not np.isfinite(merged.astype(ms.float32).asnumpy()).all():
            raise MsLongctxError(
                f"{self.weight.name}: the sum with its adapter is not finite in {self.weight.dtype}; "
                "the adapter has diverged, or load the base in fp32"
            )
        self.weight.copy_(merged)
        matrices = [adapter.lora_B.weight for adapter, _ in self.parts()]
        self.before_merge = (before, [matrix.asnumpy().copy() for matrix in matrices])
        for matrix in matrices:
            matrix.copy_(Tensor(np.zeros(matrix.shape, np.float32)))

    def unmerge(self) -> None:
        """Bring back the weight and the adapters as they were, bit for bit."""
        if self.before_merge is None:
            return
        weight, matrices = self.before_merge
        self.weight.copy_(Tensor(weight))
        for (adapter, _), matrix in zip(self.parts(), matrices, strict=True):
            adapter.lora_B.weight.copy_(Tensor(matrix))
        self.before_merge = None


class LoraLinear(Adapted):
    """A linear layer with one adapter: ``base(x) + scaling * B A dropout(x)``, shapes as of ``base``."""

    def __init__(self, base: Linear, config: LoraConfig, adapter: LowRank) -> None:
        super().__init__(base, config)
        self.lora_A = adapter.lora_A  # before ``adapter``: the paths are peft's
        self.lora_B = adapter.lora_B
        self.adapter = adapter

    def construct(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.adapter(x)

    def parts(self) -> list[tuple[LowRank, np.ndarray | slice]]:
        return [(self.adapter, slice(None))]


@dataclass(frozen=True)
class QKVLayout:
    """How the rows of a fused ``qkv_proj`` lie: per key/value head its queries, its key, its value.

    Args:
        kv_heads: key/value heads.
        group: query heads of one key/value head.
        head_dim: rows of one head.
    """

    kv_heads: int
    group: int
    head_dim: int

    @classmethod
    def of(cls, attention: nn.Cell) -> "QKVLayout":
        """The layout in an attention module, from its ``num_heads``, ``kv_heads`` and ``head_dim``."""
        return cls(attention.kv_heads, attention.num_heads // attention.kv_heads, attention.head_dim)

    def heads(self, part: str) -> int:
        """Heads of ``q_proj``, ``k_proj`` or ``v_proj`` that belong to one key/value head."""
        return self.group if part == "q_proj" else 1

    def rows(self, part: str) -> np.ndarray:
        """Rows of the fused weight that are the rows of ``part``, in its own order."""
        order = np.arange(self.kv_heads * (self.group + 2) * self.head_dim)
        order = order.reshape(self.kv_heads, self.group + 2, self.head_dim)
        first = {"q_proj": 0, "k_proj": self.group, "v_proj": self.group + 1}[part]
        return order[:, first : first + self.heads(part)].reshape(-1)


class LoraQKVLinear(Adapted):
    """A fused ``qkv_proj`` whose q, k and v have adapters of their own, the same as of three separate layers.

    Args:
        base: the fused layer.
        config: of the adapters.
        layout: of the rows.
        adapters: by ``q_proj``, ``k_proj``, ``v_proj``; those left out have none.

    Inputs, result: those of ``base``.
    """

    def __init__(self, base: Linear, config: LoraConfig, layout: QKVLayout, adapters: dict[str, LowRank]) -> None:
        super().__init__(base, config)
        self.layout = layout
        self.kv_heads = layout.kv_heads
        self.group = layout.group
        self.head_dim = layout.head_dim
        self.q_proj = adapters.get("q_proj")
        self.k_proj = adapters.get("k_proj")
        self.v_proj = adapters.get("v_proj")

    def construct(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        q = self.change(self.q_proj, self.group, x)
        k = self.change(self.k_proj, 1, x)
        v = self.change(self.v_proj, 1, x)
        return y + ops.reshape(ops.concat((q, k, v), -2), y.shape)

    def change(self, adapter: LowRank | None, heads: int, x: Tensor) -> Tensor:
        """What one adapter adds, ``(..., kv_heads, heads, head_dim)``."""
        shape = x.shape[:-1] + (self.kv_heads, heads, self.head_dim)
        if adapter is None:
            return ops.zeros(shape, x.dtype)
        return ops.reshape(adapter(x), shape)

    def adapters(self) -> dict[str, LowRank]:
        """The adapters by the name of the layer they belong to."""
        named = {"q_proj": self.q_proj, "k_proj": self.k_proj, "v_proj": self.v_proj}
        return {name: adapter for name, adapter in named.items() if adapter is not None}

    def parts(self) -> list[tuple[LowRank, np.ndarray | slice]]:
        return [(adapter, self.layout.rows(name)) for name, adapter in self.adapters().items()]
