#include "queue.h"

#include <pthread.h>

#include <chrono>
#include <exception>
#include <utility>

namespace offloadtrain {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

void sleep_s(double duration) {
  if (duration > 0) std::this_thread::sleep_for(std::chrono::duration<double>(duration));
}

}  // namespace

void Flag::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  set_ = true;
  changed_.notify_all();  // under the lock: a waiter may destroy the flag once it has it
}

bool Flag::is_set() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return set_;
}

void Flag::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return set_; });
}

Queue::Queue()
    : state_(std::make_shared<State>()), thread_([state = state_] { state->work(); }) {}

Queue::~Queue() {
  end();
  if (thread_.joinable()) thread_.detach();  // this is the thread
}

std::uint64_t Queue::call(const Calls& calls, std::string name, double least_s) {
  State* state = state_.get();
  return push({[state, &calls, name = std::move(name), least_s] { state->timed(calls, name, least_s); },
               false});
}

std::uint64_t Queue::run(std::function<void()> body, bool always) {
  return push({std::move(body), always});
}

std::uint64_t Queue::set(Flag& flag) {
  return push({[&flag] { flag.set(); }, true});
}

std::uint64_t Queue::wait(Flag& flag) {
  return push({[&flag] { flag.wait(); }, false});
}

std::string Queue::error() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->error;
}

std::vector<Stretch> Queue::take_stretches() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return std::exchange(state_->stretches, {});
}

void Queue::end() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->ending = true;
  }
  state_->more.notify_one();
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
}

std::uint64_t Queue::push(Task task) {
  std::uint64_t number;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->tasks.push_back(std::move(task));
    number = ++state_->pushed;
  }
  state_->more.notify_one();
  return number;
}

void Queue::State::work() {
  pthread_setname_np(pthread_self(), "ot-host-lane");
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex);
      more.wait(lock, [this] { return ending || !tasks.empty(); });
      if (tasks.empty()) return;
      task = std::move(tasks.front());
      tasks.pop_front();
    }
    if (task.always || !failed) attempt(task);
    done.fetch_add(1, std::memory_order_release);
  }
}

void Queue::State::attempt(const Task& task) {
  try {
    task.body();
  } catch (const std::exception& thrown) {
    std::lock_guard<std::mutex> lock(mutex);
    if (error.empty()) error = thrown.what();
    failed = true;
  }
}

void Queue::State::timed(const Calls& calls, const std::string& name, double least_s) {
  const auto start = Clock::now();
  ++begun;
  for (const auto& one : calls.all) one();
  ++ended;
  sleep_s(least_s - seconds(Clock::now() - start));
  const auto spent = Clock::now() - start;
  busy_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
  if (keeping) {
    std::lock_guard<std::mutex> lock(mutex);
    stretches.push_back({name, seconds(start.time_since_epoch()), seconds(spent)});
  }
}

}  // namespace offloadtrain
