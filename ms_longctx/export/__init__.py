# SPDX-License-Identifier: Apache-2.0
"""Models for other programs: MindIR, ONNX, MindSpore Lite and MindSpore Serving.

:mod:`graphs` is the model in plain operators, :mod:`manifest` describes an exported directory, :mod:`session` runs such
graphs step by step (also under Python 3.7, without this package), :mod:`mindir` writes and loads MindIR, :mod:`onnx`,
:mod:`lite` and :mod:`serving` the other formats.
"""
