# SPDX-License-Identifier: Apache-2.0
"""Attention over described masks: one meaning, an implementation for each kind of hardware."""
