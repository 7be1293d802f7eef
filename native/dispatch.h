// Which kernels run, on which threads, and whether now or later. For module.cpp only.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels.h"
#include "layout.h"
#include "pool.h"
#include "queue.h"

namespace offloadtrain {

extern const Kernels kBaseline;
#ifdef OT_X86
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

namespace {

constexpr std::int64_t kGrain = 16384;  // elements: below it a second thread costs more than it does
constexpr std::int64_t kBytes = 16 * kGrain;  // bytes: the same for memory that is only copied or filled
constexpr std::int64_t kSquaredAlone = 4 * kGrain;  // elements: the same for sums of squares, which read only

// Where this thread's kernel calls go instead of running, between begin() and end().
thread_local Calls* capturing = nullptr;

template <typename Loop>
void submit(Loop&& loop) {
  if (capturing) {
    capturing->all.emplace_back(std::forward<Loop>(loop));
  } else {
    loop();
  }
}

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#ifdef OT_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.push_back(&kAvx512);
  }
  if (avx2) found.push_back(&kAvx2);
#endif
  found.push_back(&kBaseline);
  return found;
}

std::atomic<const Kernels*> active{usable().front()};
struct Wanted {
  int threads = 1;
  std::vector<int> cpus;
  bool operator==(const Wanted& other) const {
    return threads == other.threads && cpus == other.cpus;
  }
};

std::mutex pool_mutex;  // guards the next three
std::shared_ptr<Pool> pool;
Wanted wanted, running;

// Made when a loop needs it. Shared: a caller keeps its pool alive when another one changes what is
// wanted meanwhile.
std::shared_ptr<Pool> running_pool() {
  std::shared_ptr<Pool> old;  // joined after the lock is given back
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool && !pool->alive()) {
    new std::shared_ptr<Pool>(pool);  // a fork: its threads are in the parent, joining would hang
    pool.reset();
  }
  if (!pool || !(running == wanted)) {
    old = std::move(pool);
    pool = std::make_shared<Pool>(wanted.threads, wanted.cpus);
    running = wanted;
  }
  return pool;
}

void set_threads(int threads, const std::vector<int>& cpus) {
  std::lock_guard<std::mutex> lock(pool_mutex);
  wanted = {std::max(threads, 1), cpus};
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable()) names.emplace_back(kernels->name);
  return names;
}

void use_isa(const std::string& name) {
  for (const Kernels* kernels : usable()) {
    if (name == kernels->name) {
      active = kernels;
      return;
    }
  }
  throw std::invalid_argument("this CPU cannot run " + name);
}

using Grad = std::tuple<Address, int>;  // address and dtype

Gradient gradient(const Grad& grad) {
  return {at<const void>(std::get<0>(grad)), static_cast<DType>(std::get<1>(grad))};
}

}  // namespace
}  // namespace offloadtrain
