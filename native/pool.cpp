#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
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

}  // namespace

Pool::Pool(int threads, std::vector<int> cpus)
    : threads_(std::max(threads, 1)),
      cpus_(std::move(cpus)),
      caller_works_(cpus_.empty()),
      owner_(getpid()) {
  try {
    for (int part = caller_works_ ? 1 : 0; part < threads_; ++part) {
      workers_.emplace_back([this, part] { work(part); });
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
    std::lock_guard<std::mutex> lock(mutex_);
    n_ = n;
    grain_ = grain;
    body_ = &body;
    error_ = nullptr;
    busy_ = static_cast<int>(workers_.size());
    ++round_;
  }
  begin_.notify_all();
  if (caller_works_) part(0);
  std::unique_lock<std::mutex> lock(mutex_);
  end_.wait(lock, [this] { return busy_ == 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Pool::work(int own) {
  pthread_setname_np(pthread_self(), ("ot-kernel-" + std::to_string(own)).substr(0, 15).c_str());
  bind_to(cpus_);
  std::uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      begin_.wait(lock, [this, seen] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
    }
    part(own);
    std::lock_guard<std::mutex> lock(mutex_);
    if (--busy_ == 0) end_.notify_one();
  }
}

void Pool::part(int own) {
  const std::int64_t grains = (n_ + grain_ - 1) / grain_;
  const std::int64_t lo = grains * own / threads_ * grain_;
  const std::int64_t hi = std::min(n_, grains * (own + 1) / threads_ * grain_);
  if (lo >= hi) return;
  try {
    (*body_)(lo, hi);
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

}  // namespace offloadtrain
