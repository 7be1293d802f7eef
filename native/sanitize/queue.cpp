// The queue of kernel calls under ThreadSanitizer: several producers, flags between queues, failures,
// and queues that end themselves.
#include "../queue.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>

namespace {

using offloadtrain::Calls;
using offloadtrain::Flag;
using offloadtrain::Queue;

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}

void runs_in_order_from_several_producers() {
  Queue queue;
  int sum = 0;  // only the queue's thread touches it
  Calls add{{[&sum] { ++sum; }, [&sum] { ++sum; }}};
  queue.keep_stretches(true);
  std::vector<std::thread> producers;
  for (int i = 0; i < 3; ++i) {
    producers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) queue.call(add, "add", 0);
    });
  }
  for (auto& producer : producers) producer.join();
  Flag done;
  const auto number = queue.set(done);
  done.wait();
  while (queue.done() < number) std::this_thread::yield();
#ifdef PLANT_RACE
  queue.call(add, "add", 0);
  ++sum;
#endif
  require(sum == 1200, "every call is made once");
  require(queue.take_stretches().size() == 600, "every task is a stretch");
}

void waits_for_another_queue() {
  for (int round = 0; round < 100; ++round) {
    Queue first, second;
    int value = 0;
    Flag ready;
    Calls write{{[&value] { value = 1; }}}, read{{[&value] { require(value == 1, "in order"); }}};
    second.wait(ready);
    second.call(read, "read", 0);
    first.run([] { std::this_thread::sleep_for(std::chrono::microseconds(10)); }, false);
    first.call(write, "write", 0);
    first.set(ready);
    first.end();
    second.end();
  }
}

void stops_at_a_failure() {
  Queue queue;
  bool reached = false;
  Calls bad{{[] { throw std::runtime_error("planted"); }}}, after{{[&reached] { reached = true; }}};
  Flag flag;
  queue.call(bad, "bad", 0);
  queue.call(after, "after", 0);
  queue.set(flag);
  flag.wait();
  require(!reached && queue.error() == "planted", "only flags are set after a failure");
}

void may_be_destroyed_by_its_own_task() {
  auto* queue = new Queue;
  auto gone = std::make_shared<Flag>();
  Flag gate;
  queue->wait(gate);
  queue->run(
      [queue, gone] {
        delete queue;
        gone->set();
      },
      false);
  gate.set();
  gone->wait();
}

}  // namespace

int main() {
  runs_in_order_from_several_producers();
  waits_for_another_queue();
  stops_at_a_failure();
  for (int round = 0; round < 50; ++round) Queue idle;
  for (int round = 0; round < 50; ++round) may_be_destroyed_by_its_own_task();
  std::puts("queue: clean");
}
