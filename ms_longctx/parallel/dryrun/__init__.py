# SPDX-License-Identifier: Apache-2.0
"""Compiles the training program of every kind of rank for Ascend, on any machine, and reports what it found."""
