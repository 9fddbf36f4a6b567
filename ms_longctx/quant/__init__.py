# SPDX-License-Identifier: Apache-2.0
"""Post-training quantization: int8 (SmoothQuant) and int4 (AWQ, GPTQ), in layouts that other programs read."""
