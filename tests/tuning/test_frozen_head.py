# SPDX-License-Identifier: Apache-2.0
"""A head that does not train costs no weight gradient. Reference: the same loss with a head that trains; exact."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_longctx import kernels
from ms_longctx.nn.loss import LinearCrossEntropy
from ms_longctx.tuning import LoraConfig, get_pe_model


@pytest.mark.parametrize("implementation", ["cpu_kernel", "operators"])
def test_gradient_of_the_hidden_states_stays(implementation: str) -> None:
    if implementation == "cpu_kernel" and not kernels.available():
        pytest.skip(kernels.reason())
    rng = np.random.RandomState(0)
    hidden, weight = Tensor(rng.randn(31, 24).astype(np.float32)), Tensor(rng.randn(97, 24).astype(np.float32))
    labels = Tensor(np.where(rng.rand(31) < 0.3, -100, rng.randint(0, 97, 31)).astype(np.int32))
    loss = LinearCrossEntropy(8, implementation).set_train()

    def gradients(frozen: bool) -> list[np.ndarray]:
        total = ms.value_and_grad(lambda h, w: loss(h, w, labels, frozen)[0] * 0.5, (0, 1))
        value, grads = total(hidden, weight)
        return [value.asnumpy(), *(grad.asnumpy() for grad in grads)]

    plain, frozen = gradients(False), gradients(True)
    np.testing.assert_array_equal(frozen[0], plain[0])
    np.testing.assert_array_equal(frozen[1], plain[1])
    assert (plain[2] != 0).any() and (frozen[2] == 0).all()


def test_the_model_knows_whether_its_head_trains(make_pair: Any) -> None:
    assert not make_pair()[1].head_is_frozen
    assert get_pe_model(make_pair()[1], LoraConfig(r=4)).head_is_frozen
    assert not get_pe_model(make_pair()[1], LoraConfig(r=4, modules_to_save=["lm_head"])).head_is_frozen
    tied = make_pair(tie_word_embeddings=True)[1]
    assert not get_pe_model(tied, LoraConfig(r=4, modules_to_save=["embed_tokens", "lm_head"])).head_is_frozen
