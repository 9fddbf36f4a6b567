// SPDX-License-Identifier: Apache-2.0
// How many scores the attention kernels have computed: what shows that masked blocks are skipped.
#include "flash_count.h"

#if defined(MLK_IS_BASELINE)

#include <atomic>

static std::atomic<int64_t> flash_scores{0};

void mlk_count_scores(int64_t count) { flash_scores.fetch_add(count, std::memory_order_relaxed); }

// Of this process so far, forward and backward together; a product of q and k is one score, masked or not.
extern "C" __attribute__((visibility("default"))) int64_t ms_longctx_flash_scores() { return flash_scores; }

#endif
