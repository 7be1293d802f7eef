// A pool of worker threads for loops over host memory. No OpenMP: a second runtime beside torch's
// would oversubscribe the cores, and each of torch's calling threads gets a team of its own.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace offloadtrain {

class Pool {
 public:
  using Body = std::function<void(std::int64_t lo, std::int64_t hi)>;

  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Splits [0, n) into one contiguous part per thread, cut at multiples of `grain`; the caller takes
  // the first part. Returns when all are done. One loop at a time: a second caller waits.
  void run(std::int64_t n, std::int64_t grain, const Body& body);

  // True in the process that made the pool: threads do not survive a fork.
  bool alive() const;

 private:
  void work(int index);
  void part(int index) const;

  std::vector<std::thread> workers_;
  std::mutex turn_;   // one loop at a time
  std::mutex mutex_;  // guards what follows
  std::condition_variable begin_, end_;
  std::uint64_t round_ = 0;
  int busy_ = 0;
  bool stop_ = false;
  std::int64_t n_ = 0, grain_ = 1;
  const Body* body_ = nullptr;
  pid_t owner_;
};

}  // namespace offloadtrain
