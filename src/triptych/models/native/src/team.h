// A team of threads inside one OpenMP region: who does which part, and a barrier that spins briefly and then yields.
// One region serves a whole step, so that no layer pays for waking threads up.
#pragma once

#include <algorithm>
#include <atomic>
#include <sched.h>

namespace triptych {

struct Range {
  int lo, hi;
};

class Team {
 public:
  explicit Team(int size) : size(size) {}

  const int size;

  void barrier() {
    if (size == 1) return;
    const int phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (spins < kSpins) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else {
        sched_yield();
      }
    }
  }

  Range share(int count, int member) const {
    const int each = count / size, rest = count % size;
    const int lo = member * each + std::min(member, rest);
    return {lo, lo + each + (member < rest ? 1 : 0)};
  }

 private:
  static constexpr int kSpins = 4096;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

}  // namespace triptych
