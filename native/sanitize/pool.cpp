// The thread pool under ThreadSanitizer: loops from several callers, exceptions, pools that come and
// go, with and without binding.
#include "../pool.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>

namespace {

using offloadtrain::Pool;

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}

// Each element is written by one thread, and read by the caller after run().
void covers_every_element_once(Pool& pool, std::int64_t n) {
  std::vector<int> touched(n, 0);
#ifdef PLANT_RACE
  int sum = 0;
#endif
  pool.run(n, 16, [&](std::int64_t lo, std::int64_t hi) {
    for (std::int64_t i = lo; i < hi; ++i) ++touched[i];
#ifdef PLANT_RACE
    ++sum;
#endif
  });
  for (const int count : touched) require(count == 1, "every element once");
}

void survives_an_exception(Pool& pool) {
  for (int round = 0; round < 20; ++round) {
    bool thrown = false;
    try {
      pool.run(1000, 1, [](std::int64_t lo, std::int64_t) {
        if (lo > 0) throw std::runtime_error("planted");
      });
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    require(thrown == (pool.threads() > 1), "an exception reaches the caller");
    covers_every_element_once(pool, 100);
  }
}

void serves_several_callers(Pool& pool) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&pool] {
      for (int round = 0; round < 100; ++round) covers_every_element_once(pool, 200 + round);
    });
  }
  for (auto& caller : callers) caller.join();
}

}  // namespace

int main() {
  for (const int threads : {1, 2, 4, 7}) {
    for (const std::vector<int>& cpus : {std::vector<int>{}, std::vector<int>{0, 1}, std::vector<int>{4000}}) {
      Pool pool(threads, cpus);
      for (const std::int64_t n : {0, 1, 16, 17, 100, 5000}) covers_every_element_once(pool, n);
      survives_an_exception(pool);
      serves_several_callers(pool);
    }
  }
  for (int round = 0; round < 50; ++round) Pool idle(3);
  std::puts("pool: clean");
}
