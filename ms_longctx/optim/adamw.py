# SPDX-License-Identifier: Apache-2.0
"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2), in place, that skips overflows."""

import math
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_longctx.errors import MsLongctxError
from ms_longctx.nn.backend import implementation as choose
from ms_longctx.optim.clip import GlobalNorm
from ms_longctx.optim.groups import ParamGroup

# Each turn of an unrolled loop nests what follows it one level deeper, and MindSpore ends at 1000 levels: a loop over
# all parameters of a model is cut into calls of this many turns.
LOOP_PIECE = 32


class AdamW(nn.Cell):
    """``torch.optim.AdamW`` behind ``torch.nn.utils.clip_grad_norm_``, for graph mode and PyNative.

    fp16 and bf16 parameters have an fp32 master copy here that the updates go to. Moments are fp32.

    Args:
        groups: what to train; see :func:`ms_longctx.optim.groups.decay_groups`.
        betas: decay rates of the first and the second moment.
        eps: added to the denominator.
        max_grad_norm: global norm to clip to; ``None``: no clipping.
        implementation: see :func:`ms_longctx.nn.backend.implementation`.

    Inputs:
        grads: gradients in the order of :attr:`parameters`, fp32, fp16 or bf16.
        learning_rate: fp32 scalar tensor; groups multiply it with their ``lr_scale``.
        grad_scale: fp32 scalar tensor the gradients are multiplied with first. With gradients summed over
            micro batches it is ``1 / (loss scale * number of tokens)``.

    Returns:
        ``(norm, finite)``: global norm after ``grad_scale`` and before clipping, fp32 scalar; whether it is
        finite, bool scalar. If it is not, nothing was changed: parameters, moments and step count.

    Raises:
        MsLongctxError: no parameters, a parameter in two groups, or an impossible value.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_grad_norm: float | None = None,
        implementation: str = "auto",
    ) -> None:
        super().__init__(auto_prefix=False)  # the names of the parameters are the model's
        _check(groups, betas, eps, max_grad_norm)
        self.groups = tuple(groups)
        self.betas = tuple(betas)
        self.eps = eps
        self.max_grad_norm = max_grad_norm
        self.clips = max_grad_norm is not None
        self.is_mapped = choose(implementation) != "cpu_kernel"
        self.parameters = ParameterTuple([param for group in groups for param in group.params])
        self.step = Parameter(Tensor(0, ms.int32), name="step", requires_grad=False)
        if self.is_mapped:
            self.updates = nn.CellList([_Update(group) for group in groups], auto_prefix=False)
            self.mapped = _OperatorUpdate(self.updates, groups, betas, eps)
        else:
            self.updates = nn.CellList([_KernelUpdate(group, betas, eps) for group in groups], auto_prefix=False)
        self.lr_scales = tuple(float(group.lr_scale) for group in groups)
        stops = np.cumsum([len(group.params) for group in groups]).tolist()
        self.ranges = tuple(zip([0, *stops[:-1]], stops, strict=True))
        self.norm = GlobalNorm(implementation)

    def construct(self, grads: tuple, learning_rate: Tensor, grad_scale: Tensor) -> tuple:
        norm = self.norm(grads) * grad_scale
        finite = ops.isfinite(norm)
        if self.clips:
            grad_scale = grad_scale * ops.minimum(self.max_grad_norm / (norm + 1e-6), 1.0)
        step = self.step + ops.cast(finite, ms.int32)
        if self.is_mapped:
            norm = ops.depend(norm, self.mapped(grads, learning_rate, step, grad_scale, finite))
            return ops.depend(norm, ops.assign(self.step, step)), finite
        for i, update in enumerate(self.updates):
            start, stop = self.ranges[i]
            done = update(grads[start:stop], learning_rate * self.lr_scales[i], step, grad_scale, finite)
            norm = ops.depend(norm, done)
        return ops.depend(norm, ops.assign(self.step, step)), finite

    def state(self) -> dict[str, Parameter]:
        """What a checkpoint has to keep, by name.

        ``step`` and, per parameter, ``exp_avg.<name>``, ``exp_avg_sq.<name>`` and, where the parameter is not
        fp32, ``master.<name>``.
        """
        state = {"step": self.step}
        for update in self.updates:
            state.update(update.state())
        return state

    def hyperparameters(self) -> dict[str, Any]:
        """What shapes the updates beside the learning rate, as plain data for a checkpoint."""
        return {
            "betas": list(self.betas),
            "eps": self.eps,
            "groups": {
                group.name: {
                    "weight_decay": group.weight_decay,
                    "lr_scale": group.lr_scale,
                    "params": [param.name for param in group.params],
                }
                for group in self.groups
            },
        }

    def load_state(self, arrays: dict[str, np.ndarray], hyperparameters: dict[str, Any]) -> None:
        """Continue from :meth:`state` (as arrays) and :meth:`hyperparameters` of a checkpoint.

        Raises:
            MsLongctxError: names, shapes or hyperparameters differ from this optimizer's.
        """
        differences = _differences("optimizer", hyperparameters, self.hyperparameters())
        state = self.state()
        differences += [f"{name} is missing" for name in sorted(state.keys() - arrays.keys())]
        differences += [f"{name} is not known" for name in sorted(arrays.keys() - state.keys())]
        differences += [
            f"{name} has shape {tuple(arrays[name].shape)}, expected {tuple(state[name].shape)}"
            for name in sorted(state.keys() & arrays.keys())
            if tuple(arrays[name].shape) != tuple(state[name].shape)
        ]
        if differences:
            more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
            raise MsLongctxError(
                "the optimizer state does not fit this run: "
                + "; ".join(differences[:3])
                + more
                + "; resume with the settings of the checkpoint or start a new run"
            )
        for name, param in state.items():
            param.copy_(Tensor(arrays[name], param.dtype))


class _Update(nn.Cell):
    """State of one group."""

    def __init__(self, group: ParamGroup) -> None:
        super().__init__(auto_prefix=False)
        self.params = ParameterTuple(group.params)
        self.low_precision = tuple(param.dtype != ms.float32 for param in group.params)
        pairs = list(zip(group.params, self.low_precision, strict=True))
        # The parameter itself where it is fp32 already.
        self.masters = ParameterTuple([_fp32_state(p, "master", p) if low else p for p, low in pairs])
        self.exp_avg = ParameterTuple([_fp32_state(p, "exp_avg") for p in group.params])
        self.exp_avg_sq = ParameterTuple([_fp32_state(p, "exp_avg_sq") for p in group.params])

    def state(self) -> dict[str, Parameter]:
        masters = [master for master, low in zip(self.masters, self.low_precision, strict=True) if low]
        return {param.name: param for param in [*self.exp_avg, *self.exp_avg_sq, *masters]}


class _KernelUpdate(_Update):
    """All parameters of the group in one call of the fused CPU kernel, unless ``finite`` is false.

    ``step`` is int32, 1 for the first update; the result only says that the update is done.
    """

    def __init__(self, group: ParamGroup, betas: tuple[float, float], eps: float) -> None:
        super().__init__(group)
        from ms_longctx.kernels.fused import make_adamw

        self.kernel = make_adamw(*betas, eps, group.weight_decay)

    def construct(
        self, grads: tuple, learning_rate: Tensor, step: Tensor, grad_scale: Tensor, finite: Tensor
    ) -> Tensor:
        skip = ops.logical_not(finite)
        state = (self.masters, self.exp_avg, self.exp_avg_sq)
        done = self.kernel(learning_rate, step, grad_scale, skip, *state, grads)
        for start in range(0, len(self.params), LOOP_PIECE):
            done = self.round_masters(done, start, min(start + LOOP_PIECE, len(self.params)))
        return done

    def round_masters(self, done: Tensor, start: int, stop: int) -> Tensor:
        """Copy the fp32 values to the low-precision parameters after ``done``."""
        for i in range(start, stop):
            if self.low_precision[i]:
                rounded = ops.cast(ops.depend(self.masters[i], done), self.params[i].dtype)
                done = ops.depend(done, ops.assign(self.params[i], rounded))
        return done


class _OperatorUpdate(nn.Cell):
    """All groups in one map of MindSpore's AdamWeightDecay over the parameters.

    A map and no loop, and no branch on ``finite``: a pipeline over several devices is compiled only of such a step, and
    takes out of it what belongs to other stages.

    The operator has no bias correction: it is moved into its scalars. With ``c1 = 1 - beta1^t``,
    ``c2 = sqrt(1 - beta2^t)``: ``(m / c1) / (sqrt(v) / c2 + eps)`` is ``c2 / c1`` times ``m / (sqrt(v) + eps * c2)``,
    so learning rate, eps and decay become ``lr * c2 / c1``, ``eps * c2`` and ``decay * c1 / c2``. Where the gradient is
    not finite, betas of 1 with rate and gradient 0 change nothing.
    """

    def __init__(
        self, updates: Sequence[_Update], groups: Sequence[ParamGroup], betas: tuple[float, float], eps: float
    ):
        super().__init__(auto_prefix=False)
        self.params = ParameterTuple([param for update in updates for param in update.params])
        self.masters = ParameterTuple([master for update in updates for master in update.masters])
        self.exp_avg = ParameterTuple([moment for update in updates for moment in update.exp_avg])
        self.exp_avg_sq = ParameterTuple([moment for update in updates for moment in update.exp_avg_sq])
        # The operator rounds the betas to fp32; the corrections have to belong to the same values.
        self.beta1, self.beta2 = (Tensor(beta, ms.float32) for beta in betas)
        self.log_beta1, self.log_beta2 = (math.log(max(float(np.float32(beta)), 1e-30)) for beta in betas)
        self.one, self.zero = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)
        self.eps = eps
        self.decays = tuple(float(group.weight_decay) for group in groups for _ in group.params)
        self.lr_scales = tuple(float(group.lr_scale) for group in groups for _ in group.params)
        self.has_masters = any(param.dtype != ms.float32 for param in self.params)
        self.adam = ops.AdamWeightDecay()
        self.select = ops.Select()  # ops.select is Python with branches in it
        self.map = ops.HyperMap()

    def construct(self, grads: tuple, learning_rate: Tensor, step: Tensor, grad_scale: Tensor, finite: Tensor) -> tuple:
        t = ops.cast(ops.maximum(step, 1), ms.float32)
        c1 = -ops.expm1(t * self.log_beta1)
        c2 = ops.sqrt(-ops.expm1(t * self.log_beta2))
        rate = self.select(finite, learning_rate * c2 / c1, self.zero)
        beta1, beta2 = self.select(finite, self.beta1, self.one), self.select(finite, self.beta2, self.one)
        update = ops.partial(_adam, self.adam, finite, grad_scale, rate, beta1, beta2, self.eps * c2, c1 / c2)
        state = (self.masters, self.exp_avg, self.exp_avg_sq)
        done = self.map(update, self.decays, self.lr_scales, *state, grads)
        if self.has_masters:
            done = self.map(ops.partial(_round, done), self.params, self.masters)
        return done


_adam = ops.MultitypeFuncGraph("adam")


@_adam.register(
    "Function", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Number", "Number", "Tensor",
    "Tensor", "Tensor", "Tensor",
)  # fmt: skip
def _adam_one(
    adam: Any,
    finite: Tensor,
    grad_scale: Tensor,
    rate: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    decay_factor: Tensor,
    decay: float,
    lr_scale: float,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
) -> Tensor:
    grad = ops.cast(grad, ms.float32) * grad_scale
    grad = ops.Select()(finite, grad, ops.zeros_like(grad))
    return adam(master, exp_avg, exp_avg_sq, rate * lr_scale, beta1, beta2, eps, decay * decay_factor, grad)


_round = ops.MultitypeFuncGraph("round")


@_round.register("Tuple", "Tensor", "Tensor")
def _round_one(done: tuple, param: Tensor, master: Tensor) -> Tensor:
    return ops.assign(param, ops.cast(ops.depend(master, done), param.dtype))


def _fp32_state(param: Parameter, kind: str, value: Parameter | None = None) -> Parameter:
    """fp32 companion ``<kind>.<name>`` of a parameter, zero or a copy of ``value``."""
    state = param.clone(init="zeros" if value is None else "same")
    state.set_dtype(ms.float32)
    state.name = f"{kind}.{param.name}"
    state.requires_grad = False
    return state


def _check(groups: Sequence[ParamGroup], betas: tuple[float, float], eps: float, max_grad_norm: float | None) -> None:
    names = [param.name for group in groups for param in group.params]
    if not names:
        raise MsLongctxError("the optimizer has no parameters: nothing in the model is trainable")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MsLongctxError(f"parameter {twice[0]} stands in the optimizer's groups more than once")
    if not all(0 <= beta < 1 for beta in betas):
        raise MsLongctxError(f"optimizer.betas = {list(betas)} must be at least 0 and below 1")
    if eps <= 0 or any(group.weight_decay < 0 for group in groups):
        raise MsLongctxError("optimizer.eps must be above 0, optimizer.weight_decay must not be negative")
    if max_grad_norm is not None and max_grad_norm <= 0:
        raise MsLongctxError(f"optimizer.max_grad_norm = {max_grad_norm} must be above 0; null switches clipping off")


def _differences(path: str, saved: Any, current: Any) -> list[str]:
    """Where two trees of plain data differ, one line each."""
    if isinstance(saved, dict) and isinstance(current, dict):
        lines = []
        for key in sorted(saved.keys() | current.keys()):
            lines += _differences(f"{path}.{key}", saved.get(key), current.get(key))
        return lines
    return [] if saved == current else [f"{path} was {saved}, now it is {current}"]
