// A pool of worker threads for loops over host memory. No OpenMP: a second runtime beside torch's
// would oversubscribe the cores, and each of torch's calling threads gets a team of its own.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace offloadtrain {

// [Note: Spinning] Waking a thread that sleeps takes tens of microseconds, as long as a small loop. A
// worker therefore looks for the next loop, and a caller for the end of its own, kSpinNs long before it
// sleeps. A pool without loops uses no processor time.
constexpr std::int64_t kSpinNs = 50'000;

// [Note: Chunks] The threads share their cores with those that launch compute and copies, and in a
// virtual machine with others. With equal parts all would wait for the thread that was interrupted
// longest. So each thread takes chunks, kChunksPerThread on average, until none is left. Results do not
// depend on the chunks: elements are independent, and sums are added in an order of their own.
constexpr std::int64_t kChunksPerThread = 16;

class Pool {
 public:
  using Body = std::function<void(std::int64_t lo, std::int64_t hi)>;

  // With `cpus`, every chunk runs on a worker bound to these CPUs, as a group, and the caller sleeps;
  // without, nothing is bound and the caller takes chunks too. Where binding is refused, threads
  // run where they may. Throws std::system_error, and leaves no thread, if one cannot be made.
  explicit Pool(int threads, std::vector<int> cpus = {});
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Splits [0, n) into chunks, cut at multiples of `grain`, of which each thread takes the next: see
  // [Note: Chunks]. Returns when all are done; then throws the first exception that a chunk threw. One
  // loop at a time: a second caller waits. n <= grain runs on the caller.
  void run(std::int64_t n, std::int64_t grain, const Body& body);

  // True in the process that made the pool: threads do not survive a fork.
  bool alive() const;

 private:
  void stop();
  void work(int number);
  void run_chunks();
  // Returns once `round_` is not `seen`; or the pool ends.
  void await_round(std::uint64_t seen);
  void await_end();

  const int threads_;
  const std::vector<int> cpus_;
  const bool caller_works_;
  const pid_t owner_;
  std::mutex turn_;   // one loop at a time
  std::mutex mutex_;  // of those who sleep, and of error_
  std::condition_variable begin_, end_;
  // The hand-over: a loop is written before its round, and a worker is done with it before it is not busy.
  std::atomic<std::uint64_t> round_{0};
  std::atomic<int> busy_{0};
  std::atomic<bool> stop_{false};
  std::atomic<std::int64_t> next_{0};  // the first element that no thread has taken
  std::int64_t n_ = 0, chunk_ = 1;
  const Body* body_ = nullptr;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;  // the last member: they use the others
};

}  // namespace offloadtrain
