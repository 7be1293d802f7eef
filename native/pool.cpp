#include "pool.h"

#include <unistd.h>

#include <algorithm>

namespace offloadtrain {

Pool::Pool(int threads) : owner_(getpid()) {
  for (int index = 1; index < threads; ++index) {
    workers_.emplace_back([this, index] { work(index); });
  }
}

Pool::~Pool() {
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
    busy_ = static_cast<int>(workers_.size());
    ++round_;
  }
  begin_.notify_all();
  part(0);
  std::unique_lock<std::mutex> lock(mutex_);
  end_.wait(lock, [this] { return busy_ == 0; });
}

void Pool::work(int index) {
  std::uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      begin_.wait(lock, [this, seen] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
    }
    part(index);
    std::lock_guard<std::mutex> lock(mutex_);
    if (--busy_ == 0) end_.notify_one();
  }
}

void Pool::part(int index) const {
  const std::int64_t grains = (n_ + grain_ - 1) / grain_;
  const std::int64_t lo = grains * index / threads() * grain_;
  const std::int64_t hi = std::min(n_, grains * (index + 1) / threads() * grain_);
  if (lo < hi) (*body_)(lo, hi);
}

}  // namespace offloadtrain
