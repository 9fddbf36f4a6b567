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


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
def test_each_graph_asks_for_itself(make_pair: Any, mode: int) -> None:
    """An adapted and a whole model in one process: the head of the second still gets its gradient."""
    rng = np.random.RandomState(1)
    before = ms.get_context("mode")
    ms.set_context(mode=mode)
    try:
        for adapted in (True, False, True):
            model = make_pair(tie_word_embeddings=True)[1]
            if adapted:
                get_pe_model(model, LoraConfig(r=4))
            model.set_train()
            params = model.trainable_params()
            ids = Tensor(rng.randint(0, model.config.vocab_size, (2, 9)).astype(np.int32))
            grads = ms.grad(model, None, params)(ids, ids)
            found = {param.name: bool((grad.asnumpy() != 0).any()) for param, grad in zip(params, grads, strict=True)}
            # lora_A has no gradient while lora_B is zero.
            assert all(seen for name, seen in found.items() if "lora_A" not in name), found
    finally:
        ms.set_context(mode=before)
