# SPDX-License-Identifier: Apache-2.0
"""Dynamic loss scale for fp16 (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2)."""

from __future__ import annotations

from ms_longctx.errors import MsLongctxError

FACTOR = 2.0
MAXIMUM = 2.0**127  # the largest power of two in fp32


class DynamicLossScale:
    """Halves on an overflow, doubles after ``window`` good steps in a row.

    The trainer multiplies the loss by :attr:`scale`, divides the gradients by it, and reports each step with
    :meth:`update`. A step with an overflow is one the optimizer has skipped.

    Args:
        initial: first scale.
        window: good steps in a row before the scale doubles.
        minimum: floor of the scale.
        max_skipped_steps: skipped steps in a row that end the run.

    Raises:
        MsLongctxError: a value is impossible.
    """

    def __init__(
        self,
        initial: float = 65536.0,
        window: int = 1000,
        minimum: float = 1.0,
        max_skipped_steps: int = 50,
    ) -> None:
        if not 0 < minimum <= initial:
            raise MsLongctxError(f"loss_scale_min = {minimum} must be above 0 and at most loss_scale_init = {initial}")
        if window < 1 or max_skipped_steps < 1:
            raise MsLongctxError("loss_scale_window and max_skipped_steps must be at least 1")
        self.scale = float(initial)
        self.window = window
        self.minimum = float(minimum)
        self.max_skipped_steps = max_skipped_steps
        self.good_steps = 0
        self.skipped_steps = 0

    def update(self, finite: bool) -> None:
        """Report one optimizer step: ``finite`` is false when its gradients held an inf or a NaN.

        Raises:
            MsLongctxError: ``max_skipped_steps`` steps in a row were skipped.
        """
        if finite:
            self.skipped_steps = 0
            self.good_steps += 1
            if self.good_steps == self.window:
                self.scale = min(self.scale * FACTOR, MAXIMUM)
                self.good_steps = 0
            return
        self.good_steps = 0
        self.skipped_steps += 1
        self.scale = max(self.scale / FACTOR, self.minimum)
        if self.skipped_steps >= self.max_skipped_steps:
            raise MsLongctxError(
                f"{self.skipped_steps} optimizer steps in a row had inf or NaN gradients (loss scale now "
                f"{self.scale:g}); the model has diverged or a batch is broken: lower "
                "optimizer.learning_rate, look at the data, or train in fp32 or bf16"
            )

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint has to keep."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from :meth:`state_dict`."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.skipped_steps = int(state["skipped_steps"])
