// The Python face: raw addresses in, checked by offloadtrain/kernels, the only caller.
// The interpreter's lock is released during every loop.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "kernels.h"
#include "layout.h"
#include "matrix_calls.h"
#include "queue.h"

namespace nb = nanobind;

namespace offloadtrain {
namespace {

constexpr std::int64_t kPageBytes = 4096;  // or less than a page

// The rule, and its numbers in the order of its class in rules.h.
using Scalars = std::tuple<int, std::vector<double>>;

Step step_of(const Scalars& scalars) {
  const auto& [rule, numbers] = scalars;
  if (numbers.size() > kNumbers) throw std::invalid_argument("too many numbers for a rule");
  Step step{static_cast<Rule>(rule), {}};
  std::transform(numbers.begin(), numbers.end(), step.numbers,
                 [](double number) { return static_cast<float>(number); });
  return step;
}

// A state's addresses in the order of its struct; 0 for what the rule does not have.
using Fields = std::array<Address, 6>;

Fp32State fp32_state(const Fields& a) { return {at<float>(a[0]), at<float>(a[1]), at<float>(a[2])}; }

void update_fp32(const Fields& in, const Fields& out, const Grad& grad, Address working,
                 int working_dtype, std::int64_t n, const Scalars& scalars) {
  const Step step = step_of(scalars);
  const Kernels* kernels = active;
  submit([=] {
    running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
      kernels->update_fp32(step, fp32_state(in), fp32_state(out), gradient(grad), at<void>(working),
                           static_cast<DType>(working_dtype), lo, hi);
    });
  });
}

Split16State split16_state(const Fields& a) {
  return {at<std::uint16_t>(a[0]), at<std::int16_t>(a[1]), at<std::uint16_t>(a[2]),
          at<std::uint16_t>(a[3])};
}

void update_split16(const Fields& in, const Fields& out, const Grad& grad, std::int64_t n,
                    const Layout& layout, const Seed& seed, const Scalars& scalars) {
  const Step step = step_of(scalars);
  const Kernels* kernels = active;
  submit([=] {
    running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
      each_run(layout, seed, lo, hi, [&](const Run& run) {
        kernels->update_split16(step, split16_state(in), split16_state(out), gradient(grad), run);
      });
    });
  });
}

Int8State int8_state(const Fields& a) {
  return {at<std::uint16_t>(a[0]), at<std::int8_t>(a[1]), at<std::uint8_t>(a[2]),
          at<std::uint8_t>(a[3]),  at<float>(a[4]),       at<float>(a[5])};
}

void update_int8(const Fields& in, const Fields& out, const Grad& grad, int weight_dtype,
                 std::int64_t n, const Layout& layout, const Seed& seed, const Scalars& scalars) {
  const Step step = step_of(scalars);
  const Kernels* kernels = active;
  submit([=] {
    running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
      each_run(layout, seed, lo, hi, [&](const Run& run) {
        kernels->update_int8(step, int8_state(in), int8_state(out), gradient(grad),
                             static_cast<DType>(weight_dtype), run);
      });
    });
  });
}

void accumulate(Address sum, const Grad& grad, std::int64_t n, bool first) {
  const Kernels* kernels = active;
  const Gradient g = gradient(grad);
  submit([=] {
    running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
      kernels->accumulate(at<float>(sum), g.values, g.dtype, first, lo, hi);
    });
  });
}

void cast(Address source, Address target, int dtype, std::int64_t n) {
  const Kernels* kernels = active;
  submit([=] {
    running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
      kernels->cast(at<const float>(source), at<void>(target), static_cast<DType>(dtype), lo, hi);
    });
  });
}

void copy(Address source, Address target, std::int64_t bytes) {
  submit([=] {
    running_pool()->run(bytes, kBytes, [&](std::int64_t lo, std::int64_t hi) {
      std::memcpy(at<char>(target) + lo, at<const char>(source) + lo, static_cast<std::size_t>(hi - lo));
    });
  });
}

void zero(Address memory, std::int64_t bytes) {
  submit([=] {
    running_pool()->run(bytes, kBytes, [&](std::int64_t lo, std::int64_t hi) {
      std::memset(at<char>(memory) + lo, 0, static_cast<std::size_t>(hi - lo));
    });
  });
}

// Sums of squares of the parameters [first, last), to squares[id]: segments in parallel, then added in
// order. `segment(slot, done, count)` is that of `count` elements of a parameter from its element `done` on.
// Few elements are the caller's alone, however many parameters they are of: to wake a worker, and to wait
// for it, takes longer.
template <typename Segment>
void by_parameter(const Slot* first, const Slot* last, Address squares, const Segment& segment) {
  struct Piece {
    const Slot* slot;
    std::int64_t done, count;
  };
  std::vector<Piece> pieces;
  std::int64_t elements = 0;
  for (const Slot* slot = first; slot != last; ++slot) {
    elements += slot->numel;
    for (std::int64_t done = 0; done < slot->numel; done += kSegment) {
      pieces.push_back({slot, done, std::min(kSegment, slot->numel - done)});
    }
  }
  std::vector<double> partial(pieces.size());
  const auto body = [&](std::int64_t lo, std::int64_t hi) {
    for (std::int64_t i = lo; i < hi; ++i) {
      partial[i] = segment(*pieces[i].slot, pieces[i].done, pieces[i].count);
    }
  };
  const auto count = static_cast<std::int64_t>(pieces.size());
  running_pool()->run(count, elements <= kSquaredAlone ? count : kGrain / kSegment, body);
  std::size_t next = 0;
  for (const Slot* slot = first; slot != last; ++slot) {
    double sum = 0.0;
    for (std::int64_t done = 0; done < slot->numel; done += kSegment) sum += partial[next++];
    at<double>(squares)[slot->id] = sum;
  }
}

// Of a flat buffer: `segment(lo, count)` is that of its elements from `lo` on.
template <typename Segment>
void by_parameter(const Layout& layout, Address squares, const Segment& segment) {
  const Slot* first = at<const Slot>(std::get<0>(layout));
  by_parameter(first, first + std::get<1>(layout), squares,
               [&](const Slot& slot, std::int64_t done, std::int64_t count) {
                 return segment(slot.offset + done, count);
               });
}

void sum_squares(const Grad& values, const Layout& layout, Address squares) {
  const Kernels* kernels = active;
  const Gradient g = gradient(values);
  submit([=] {
    by_parameter(layout, squares, [&](std::int64_t lo, std::int64_t count) {
      return kernels->segment(g.values, g.dtype, lo, count);
    });
  });
}

// Of parameters that lie apart. `tensors`: the address, elements and id of each.
void sum_squares_each(const std::vector<std::array<std::int64_t, 3>>& tensors, int dtype,
                      Address squares) {
  const Kernels* kernels = active;
  submit([=] {
    std::vector<Slot> slots;
    for (const auto& [address, numel, id] : tensors) {
      slots.push_back({static_cast<std::int64_t>(slots.size()), numel, id, 0});
    }
    by_parameter(slots.data(), slots.data() + slots.size(), squares,
                 [&](const Slot& slot, std::int64_t done, std::int64_t count) {
                   const auto address = static_cast<Address>(tensors[slot.offset][0]);
                   return kernels->segment(at<const void>(address), static_cast<DType>(dtype), done, count);
                 });
  });
}

// One pass: a segment is squared while the cache still holds it.
void accumulate_squares(Address sum, const Grad& grad, const Layout& layout, bool first,
                        Address squares) {
  const Kernels* kernels = active;
  const Gradient g = gradient(grad);
  submit([=] {
    by_parameter(layout, squares, [&](std::int64_t lo, std::int64_t count) {
      kernels->accumulate(at<float>(sum), g.values, g.dtype, first, lo, lo + count);
      return kernels->segment(at<const void>(sum), DType::float32, lo, count);
    });
  });
}

void traffic(const Fields& state, Address grad, Address working, std::int64_t n) {
  const Kernels* kernels = active;
  running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
    kernels->traffic(fp32_state(state), at<const std::uint16_t>(grad), at<std::uint16_t>(working), lo,
                     hi);
  });
}

void encode_split16(Address master, Address weight, Address low, std::int64_t n) {
  const Kernels* kernels = active;
  submit([=] {
    running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
      kernels->encode_split16(at<const float>(master), at<std::uint16_t>(weight),
                              at<std::int16_t>(low), lo, hi);
    });
  });
}

void encode_int8(Address master, const Grad& weight, Address correction, std::int64_t n) {
  const Kernels* kernels = active;
  const auto [to, dtype] = weight;
  submit([=, to = to, dtype = dtype] {
    running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
      kernels->encode_int8(at<const float>(master), at<std::uint16_t>(to),
                           at<std::int8_t>(correction), static_cast<DType>(dtype), lo, hi);
    });
  });
}

void decode_split16(Address weight, Address low, Address master, std::int64_t n) {
  const Kernels* kernels = active;
  submit([=] {
    running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
      kernels->decode_split16(at<const std::uint16_t>(weight), at<const std::int16_t>(low),
                              at<float>(master), lo, hi);
    });
  });
}

void decode_int8(const Grad& weight, Address correction, Address master, std::int64_t n) {
  const Kernels* kernels = active;
  const auto [from, dtype] = weight;
  submit([=, from = from, dtype = dtype] {
    running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
      kernels->decode_int8(at<const std::uint16_t>(from), static_cast<DType>(dtype),
                           at<const std::int8_t>(correction), at<float>(master), lo, hi);
    });
  });
}

// Fault in the pages of a fresh mapping, by the threads that will work on it: that places them near these
// threads' CPUs. The kernel has zeroed them by then, so one write per page is enough, and a second pass is
// saved.
void first_touch(Address memory, std::int64_t n, std::int64_t itemsize) {
  running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
    volatile char* const bytes = at<char>(memory);
    for (std::int64_t i = lo * itemsize; i < hi * itemsize; i += kPageBytes) bytes[i] = 0;
  });
}

// `body` is borrowed: the caller keeps it until done(). It must not raise.
std::uint64_t run_python(Queue& queue, nb::handle body, bool always) {
  return queue.run(
      [body] {
        nb::gil_scoped_acquire locked;
        body();
      },
      always);
}

// Of a stream, recorded by the time `issued` is set; `handle` holds its address then. The driver's
// function comes as an address, since this module is built without CUDA.
std::uint64_t wait_event(Queue& queue, Flag& issued, Address handle, Address synchronize) {
  return queue.run(
      [&issued, handle, synchronize] {
        issued.wait();
        const Address event = *at<const Address>(handle);
        if (event == 0) return;  // never recorded: its lane has failed
        const int result = at<int(void*)>(synchronize)(at<void>(event));
        if (result != 0) {
          throw std::runtime_error("cuEventSynchronize gave " + std::to_string(result));
        }
      },
      false);
}

std::vector<std::tuple<std::string, double, double>> take_stretches(Queue& queue) {
  std::vector<std::tuple<std::string, double, double>> rows;
  for (auto& [name, start_s, seconds] : queue.take_stretches()) rows.emplace_back(name, start_s, seconds);
  return rows;
}

}  // namespace
}  // namespace offloadtrain

NB_MODULE(_native, m) {
  using namespace offloadtrain;
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::set_leak_warnings(false);  // a run that ends while its lanes live leaves their flags behind
  m.doc() = "CPU kernels of offloadtrain; call them through offloadtrain.runtime.kernels";
  m.def("isas", &isas, "Instruction sets this CPU can run, the fastest first.");
  m.def("use_isa", &use_isa, nb::arg("name"));
  m.def("isa", [] { return std::string(active.load()->name); });
  m.def("set_threads", &set_threads, nb::arg("threads"), nb::arg("cpus"), unlocked);
  m.def("update_fp32", &update_fp32, unlocked);
  m.def("update_split16", &update_split16, unlocked);
  m.def("update_int8", &update_int8, unlocked);
  m.def("accumulate", &accumulate, unlocked);
  m.def("accumulate_squares", &accumulate_squares, unlocked);
  m.def("cast", &cast, unlocked);
  m.def("sum_squares", &sum_squares, unlocked);
  m.def("sum_squares_each", &sum_squares_each, unlocked);
  m.def("copy", &copy, unlocked);
  m.def("zero", &zero, unlocked);
  m.def("traffic", &traffic, unlocked);
  m.def("encode_split16", &encode_split16, unlocked);
  m.def("encode_int8", &encode_int8, unlocked);
  m.def("decode_split16", &decode_split16, unlocked);
  m.def("decode_int8", &decode_int8, unlocked);
  m.def("blend_fp32", &blend_fp32, unlocked);
  m.def("blend_split16", &blend_split16, unlocked);
  m.def("subtract_fp32", &subtract_fp32, unlocked);
  m.def("subtract_split16", &subtract_split16, unlocked);
  m.def("first_touch", &first_touch, unlocked);

  nb::class_<Calls>(m, "Calls", "Kernel calls to be made later.")
      .def(nb::init<>())
      .def("begin", [](Calls& calls) { capturing = &calls; }, "From here on this thread's calls go in.")
      .def("end", [](Calls&) { capturing = nullptr; })
      .def("__len__", [](const Calls& calls) { return calls.all.size(); });
  nb::class_<Flag>(m, "Flag", "Set once, waited for by any thread.")
      .def(nb::init<>())
      .def("set", &Flag::set, unlocked)
      .def("is_set", &Flag::is_set)
      .def("wait", &Flag::wait, unlocked);
  nb::class_<Queue>(m, "Queue", "A thread that makes kernel calls without the interpreter's lock.")
      .def(nb::init<>())
      .def("call", &Queue::call)
      .def("run", &run_python)
      .def("set", &Queue::set)
      .def("wait", &Queue::wait)
      .def("wait_event", &wait_event)
      .def("counts", &Queue::counts)
      .def("done", &Queue::done)
      .def("fail", &Queue::fail)
      .def("error", &Queue::error)
      .def("busy_s", &Queue::busy_s)
      .def("keep_stretches", &Queue::keep_stretches)
      .def("take_stretches", &take_stretches)
      .def("end", &Queue::end, unlocked);
}
