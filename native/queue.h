// A thread that runs kernel calls one after the other, and the flags that it sets and waits for. No
// Python in here: between two calls nobody needs the interpreter's lock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace offloadtrain {

// Calls of kernels with their arguments, to be made later.
struct Calls {
  std::vector<std::function<void()>> all;
};

// Set once, waited for by any number of threads.
class Flag {
 public:
  void set();
  bool is_set() const;
  void wait();

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

struct Stretch {
  std::string name;
  double start_s, seconds;  // of the monotonic clock
};

class Queue {
 public:
  Queue();
  ~Queue();  // as end()
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // All of these return at once. What is passed by address must live until done() passes the number
  // that they return. After a failure only what is `always` runs.
  // `call`: the task takes at least `least_s` (seconds): for rehearsals and tests.
  std::uint64_t call(const Calls& calls, std::string name, double least_s);
  std::uint64_t run(std::function<void()> body, bool always);
  std::uint64_t set(Flag& flag);
  std::uint64_t wait(Flag& flag);

  // How many tasks of `call` have begun and ended; at rest they differ if one has thrown.
  std::pair<std::uint64_t, std::uint64_t> counts() const {
    return {state_->begun.load(), state_->ended.load()};
  }
  std::uint64_t done() const { return state_->done.load(std::memory_order_acquire); }
  void fail() { state_->failed = true; }
  std::string error() const;  // the first that a call has thrown
  double busy_s() const { return static_cast<double>(state_->busy_ns.load()) * 1e-9; }
  void keep_stretches(bool keep) { state_->keeping = keep; }
  std::vector<Stretch> take_stretches();

  // Runs what is queued, then ends the thread. Idempotent; from the thread itself it only asks.
  void end();

 private:
  struct Task {
    std::function<void()> body;
    bool always;
  };

  // The thread shares it: the queue may be destroyed by a task of its own.
  struct State {
    std::mutex mutex;  // guards tasks, pushed, ending, error and stretches
    std::condition_variable more;
    std::deque<Task> tasks;
    std::uint64_t pushed = 0;
    bool ending = false;
    std::string error;
    std::vector<Stretch> stretches;
    std::atomic<bool> keeping{false};
    std::atomic<bool> failed{false};
    std::atomic<std::uint64_t> done{0};
    std::atomic<std::uint64_t> begun{0}, ended{0};  // tasks of `call`
    std::atomic<std::int64_t> busy_ns{0};

    void work();
    void attempt(const Task& task);
    void timed(const Calls& calls, const std::string& name, double least_s);
  };

  std::uint64_t push(Task task);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace offloadtrain
