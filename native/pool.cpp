#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

namespace offloadtrain {
namespace {

void bind_to(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  const int last = *std::max_element(cpus.begin(), cpus.end());
  cpu_set_t* set = CPU_ALLOC(last + 1);
  const std::size_t size = CPU_ALLOC_SIZE(last + 1);
  CPU_ZERO_S(size, set);
  for (const int cpu : cpus) CPU_SET_S(cpu, size, set);
  pthread_setaffinity_np(pthread_self(), size, set);  // refused: a matter of speed, not of results
  CPU_FREE(set);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True once `ready` is, false after kSpinNs: see [Note: Spinning].
template <typename Ready>
bool spun(const Ready& ready) {
  constexpr int kLooks = 64;  // then another thread may need this core: perhaps the one waited for
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kSpinNs);
  do {
    for (int look = 0; look < kLooks; ++look) {
      if (ready()) return true;
      relax();
    }
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

Pool::Pool(int threads, std::vector<int> cpus)
    : threads_(std::max(threads, 1)),
      cpus_(std::move(cpus)),
      caller_works_(cpus_.empty()),
      owner_(getpid()) {
  try {
    for (int number = caller_works_ ? 1 : 0; number < threads_; ++number) {
      workers_.emplace_back([this, number] { work(number); });
    }
  } catch (...) {  // a limit on threads; destroying those that run would end the process
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  begin_.notify_all();
  for (auto& worker : workers_) worker.join();
}

bool Pool::alive() const { return owner_ == getpid(); }

void Pool::run(std::int64_t n, std::int64_t grain, const Body& body) {
  if (workers_.empty() || n <= grain) {
    if (n > 0) body(0, n);
    return;
  }
  std::lock_guard<std::mutex> turn(turn_);
  {
    std::lock_guard<std::mutex> lock(mutex_);  // a worker on its way to sleep sees the round, or is woken
    n_ = n;
    chunk_ = threads_ > 1 ? grain * std::max<std::int64_t>(n / (grain * threads_ * kChunksPerThread), 1) : n;
    next_.store(0, std::memory_order_relaxed);
    body_ = &body;
    error_ = nullptr;
    busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
  }
  begin_.notify_all();
  if (caller_works_) run_chunks();
  await_end();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Pool::await_end() {
  const auto ended = [this] { return busy_.load(std::memory_order_acquire) == 0; };
  if (spun(ended)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  end_.wait(lock, ended);
}

void Pool::await_round(std::uint64_t seen) {
  const auto begun = [this, seen] {
    return stop_.load(std::memory_order_relaxed) || round_.load(std::memory_order_acquire) != seen;
  };
  if (spun(begun)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  begin_.wait(lock, begun);
}

void Pool::work(int number) {
  pthread_setname_np(pthread_self(), ("ot-kernel-" + std::to_string(number)).substr(0, 15).c_str());
  bind_to(cpus_);
  for (std::uint64_t seen = 0;; ++seen) {
    await_round(seen);
    if (stop_.load(std::memory_order_relaxed)) return;
    run_chunks();
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
    // The caller may be gone by now: its loop is not touched any more. The pool outlives its workers.
    std::lock_guard<std::mutex> lock(mutex_);
    end_.notify_one();
  }
}

void Pool::run_chunks() {
  try {
    for (;;) {
      const std::int64_t lo = next_.fetch_add(chunk_, std::memory_order_relaxed);
      if (lo >= n_) return;
      (*body_)(lo, std::min(lo + chunk_, n_));
    }
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

}  // namespace offloadtrain
