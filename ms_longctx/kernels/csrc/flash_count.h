// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

void mlk_count_scores(int64_t count);  // flash_count.cc
