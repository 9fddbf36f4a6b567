# SPDX-License-Identifier: Apache-2.0
"""Finds out what is wrong with a machine, or with a run from its logs."""
