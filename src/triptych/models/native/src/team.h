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
    if (size == 1) return next_.store(0, std::memory_order_relaxed);
    const int phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
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

  // Calls work(index) for what this member gets of [0, count): who is done with one takes the next, so that a thread which
  // has to wait for its processor keeps nobody waiting. Once between two barriers.
  template <class Work>
  void take_turns(int count, Work work) {
    for (int index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < count;) work(index);
  }

 private:
  static constexpr int kSpins = 4096;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace triptych
