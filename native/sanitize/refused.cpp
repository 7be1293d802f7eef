// A pool whose threads cannot all be made, as under a limit on processes: it throws, leaves no thread
// behind, and the process goes on.
#include "../pool.h"

#include <dlfcn.h>
#include <pthread.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <system_error>

namespace {

int allowed = 2;

bool is_refused(int threads, const std::vector<int>& cpus) {
  try {
    offloadtrain::Pool pool(threads, cpus);
  } catch (const std::system_error&) {
    return true;
  }
  return false;
}

}  // namespace

// In place of the C library's: the only thing that makes threads here is the pool.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) noexcept {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const Create create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (allowed == 0) return EAGAIN;
  --allowed;
  return create(thread, attributes, start, argument);
}

int main() {
  if (!is_refused(5, {}) || allowed != 0) return 1;
  if (!is_refused(1, {0})) return 2;  // the first one already
  allowed = 2;
  offloadtrain::Pool pool(3);
  std::int64_t ends[3] = {};
  pool.run(3, 1, [&](std::int64_t lo, std::int64_t hi) { ends[lo] = hi; });
  if (ends[0] != 1 || ends[1] != 2 || ends[2] != 3) return 3;
  std::puts("refused: clean");
}
