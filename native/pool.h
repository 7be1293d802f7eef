// A pool of worker threads for loops over host memory. No OpenMP: a second runtime beside torch's
// would oversubscribe the cores, and each of torch's calling threads gets a team of its own.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace offloadtrain {

class Pool {
 public:
  using Body = std::function<void(std::int64_t lo, std::int64_t hi)>;

  // With `cpus`, every part runs on a worker bound to these CPUs, as a group, and the caller sleeps;
  // without, nothing is bound and the caller takes the first part. Where binding is refused, threads
  // run where they may. Throws std::system_error, and leaves no thread, if one cannot be made.
  explicit Pool(int threads, std::vector<int> cpus = {});
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Splits [0, n) into one contiguous part per thread, cut at multiples of `grain`. Returns when all
  // are done; then throws the first exception that a part threw. One loop at a time: a second caller
  // waits. n <= grain runs on the caller.
  void run(std::int64_t n, std::int64_t grain, const Body& body);

  // True in the process that made the pool: threads do not survive a fork.
  bool alive() const;

 private:
  void stop();
  void work(int part);
  void part(int part);

  const int threads_;
  const std::vector<int> cpus_;
  const bool caller_works_;
  const pid_t owner_;
  std::mutex turn_;   // one loop at a time
  std::mutex mutex_;  // guards what follows
  std::condition_variable begin_, end_;
  std::uint64_t round_ = 0;
  int busy_ = 0;
  bool stop_ = false;
  std::int64_t n_ = 0, grain_ = 1;
  const Body* body_ = nullptr;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;  // the last member: they use the others
};

}  // namespace offloadtrain
