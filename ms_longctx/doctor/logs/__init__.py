# SPDX-License-Identifier: Apache-2.0
"""Reading the logs of a failed run: which rank failed first, why, and what helps."""

from __future__ import annotations

from ms_longctx.doctor.logs.diagnosis import Diagnosis, Finding, diagnose
from ms_longctx.doctor.logs.report import as_data, as_text
from ms_longctx.doctor.logs.rules import Rule, load_rules

__all__ = ["Diagnosis", "Finding", "Rule", "as_data", "as_text", "diagnose", "load_rules"]
