// The Python face: raw addresses in, checked by offloadtrain/kernels.py, the only caller.
// The interpreter's lock is released during every loop.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace nb = nanobind;

namespace offloadtrain {

extern const Kernels kBaseline;
#ifdef OT_X86
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

namespace {

using Address = std::uintptr_t;
constexpr std::int64_t kGrain = 16384;  // elements: below it a second thread costs more than it does

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#ifdef OT_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.push_back(&kAvx512);
  }
  if (avx2) found.push_back(&kAvx2);
#endif
  found.push_back(&kBaseline);
  return found;
}

const Kernels* active = usable().front();
std::mutex pool_mutex;
std::shared_ptr<Pool> pool;
std::atomic<int> wanted_threads{1};

// Shared: a caller keeps its pool alive when another one changes the number of threads meanwhile.
std::shared_ptr<Pool> running_pool() {
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool && !pool->alive()) {
    new std::shared_ptr<Pool>(pool);  // a fork: its threads are in the parent, joining would hang
    pool.reset();
  }
  if (!pool || pool->threads() != wanted_threads) pool = std::make_shared<Pool>(wanted_threads);
  return pool;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable()) names.emplace_back(kernels->name);
  return names;
}

void use_isa(const std::string& name) {
  for (const Kernels* kernels : usable()) {
    if (name == kernels->name) {
      active = kernels;
      return;
    }
  }
  throw std::invalid_argument("this CPU cannot run " + name);
}

void adam(Address master, Address exp_avg, Address exp_avg_sq, Address grad, int grad_dtype,
          Address working, int working_dtype, std::int64_t n, double lr, double beta1, double beta2,
          double eps, double weight_decay, std::int64_t step, bool decoupled, double grad_scale) {
  const double correction1 = 1.0 - std::pow(beta1, static_cast<double>(step));
  const double correction2 = 1.0 - std::pow(beta2, static_cast<double>(step));
  const float weight = static_cast<float>(1.0 - beta1);
  AdamArgs args{};
  args.master = reinterpret_cast<float*>(master);
  args.exp_avg = reinterpret_cast<float*>(exp_avg);
  args.exp_avg_sq = reinterpret_cast<float*>(exp_avg_sq);
  args.grad = reinterpret_cast<const void*>(grad);
  args.working = reinterpret_cast<void*>(working);
  args.grad_dtype = static_cast<DType>(grad_dtype);
  args.working_dtype = static_cast<DType>(working_dtype);
  args.grad_scale = static_cast<float>(grad_scale);
  args.decay = decoupled ? static_cast<float>(1.0 - lr * weight_decay) : 1.0f;
  args.l2 = decoupled ? 0.0f : static_cast<float>(weight_decay);
  args.towards_grad = !(weight < 0.5f);
  args.exp_avg_weight = args.towards_grad ? weight - 1.0f : weight;
  args.beta2 = static_cast<float>(beta2);
  args.exp_avg_sq_weight = static_cast<float>(1.0 - beta2);
  args.negative_step_size = -static_cast<float>(lr / correction1);
  args.bias_correction2_sqrt = static_cast<float>(std::sqrt(correction2));
  args.eps = static_cast<float>(eps);
  const Kernels* kernels = active;
  running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) { kernels->adam(args, lo, hi); });
}

void accumulate(Address sum, Address grad, int dtype, std::int64_t n, bool first) {
  const Kernels* kernels = active;
  running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
    kernels->accumulate(reinterpret_cast<float*>(sum), reinterpret_cast<const void*>(grad),
                        static_cast<DType>(dtype), first, lo, hi);
  });
}

void cast(Address source, Address target, int dtype, std::int64_t n) {
  const Kernels* kernels = active;
  running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
    kernels->cast(reinterpret_cast<const float*>(source), reinterpret_cast<void*>(target),
                  static_cast<DType>(dtype), lo, hi);
  });
}

struct Segment {
  std::int64_t lo, count;
};

// Per parameter: segments in parallel, then added in order.
std::vector<double> sum_squares(Address values, int dtype, const std::vector<std::int64_t>& offsets,
                                const std::vector<std::int64_t>& numels) {
  std::vector<Segment> segments;
  for (std::size_t p = 0; p < offsets.size(); ++p) {
    for (std::int64_t done = 0; done < numels[p]; done += kSegment) {
      segments.push_back({offsets[p] + done, std::min(kSegment, numels[p] - done)});
    }
  }
  std::vector<double> partial(segments.size());
  const Kernels* kernels = active;
  const auto body = [&](std::int64_t lo, std::int64_t hi) {
    for (std::int64_t i = lo; i < hi; ++i) {
      partial[i] = kernels->segment(reinterpret_cast<const void*>(values), static_cast<DType>(dtype),
                                    segments[i].lo, segments[i].count);
    }
  };
  running_pool()->run(static_cast<std::int64_t>(segments.size()), kGrain / kSegment, body);
  std::vector<double> sums(offsets.size(), 0.0);
  std::size_t next = 0;
  for (std::size_t p = 0; p < offsets.size(); ++p) {
    for (std::int64_t done = 0; done < numels[p]; done += kSegment) sums[p] += partial[next++];
  }
  return sums;
}

// Zero a fresh mapping, each part by the thread that will work on it: that places its pages.
void first_touch(Address memory, std::int64_t nbytes) {
  running_pool()->run(nbytes, std::int64_t{1} << 21, [&](std::int64_t lo, std::int64_t hi) {
    std::memset(reinterpret_cast<char*>(memory) + lo, 0, static_cast<std::size_t>(hi - lo));
  });
}

}  // namespace
}  // namespace offloadtrain

NB_MODULE(_native, m) {
  using namespace offloadtrain;
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  m.doc() = "CPU kernels of offloadtrain; call them through offloadtrain.kernels";
  m.def("isas", &isas, "Instruction sets this CPU can run, the fastest first.");
  m.def("use_isa", &use_isa, nb::arg("name"));
  m.def("isa", [] { return std::string(active->name); });
  m.def("set_threads", [](int threads) { wanted_threads = threads < 1 ? 1 : threads; });
  m.def("adam", &adam, unlocked);
  m.def("accumulate", &accumulate, unlocked);
  m.def("cast", &cast, unlocked);
  m.def("sum_squares", &sum_squares, unlocked);
  m.def("first_touch", &first_touch, unlocked);
}
