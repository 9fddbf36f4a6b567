# SPDX-License-Identifier: Apache-2.0
"""Several devices: the strategy file, collectives, attention over a split sequence, and the Ascend program."""
