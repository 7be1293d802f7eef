// What every kernel writes, as one number per case: the same from each instruction set. For values as
// a run has them, with zeros, denormals and infinities among them. Not-a-number counts as one value:
// CPUs differ in its sign.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../kernels.h"

namespace offloadtrain {
extern const Kernels kTested;
}

namespace {

using namespace offloadtrain;
using u16 = std::uint16_t;

std::uint32_t next_random() {
  static std::uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

float next_value() {
  const std::uint32_t kind = next_random() % 97;
  if (kind == 0) return 0.0f;
  if (kind == 1) return 1e-41f;
  const float size = static_cast<float>(next_random() % 20001) * 1e-4f - 1.0f;
  return kind < 9 ? size * 1e-12f : size;
}

class Sum {
 public:
  template <typename T>
  void add(const T* values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, values + i, sizeof(T));
      mix(bits);
    }
  }
  void add(const float* values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, values + i, 4);
      mix((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits);
    }
  }
  // Numbers of 16 bits, whose infinity this is.
  void add(const u16* values, std::int64_t count, u16 infinity) {
    for (std::int64_t i = 0; i < count; ++i) {
      mix((values[i] & 0x7fffu) > infinity ? 0x7fffu : values[i]);
    }
  }
  void print(const char* name, std::int64_t count, int one, int other) const {
    std::printf("%s %lld %d %d %016llx\n", name, static_cast<long long>(count), one, other,
                static_cast<unsigned long long>(value_));
  }

 private:
  void mix(std::uint32_t bits) { value_ = (value_ ^ bits) * 0x100000001b3ull; }
  std::uint64_t value_ = 0xcbf29ce484222325ull;
};

constexpr u16 infinity_of(DType dtype) { return dtype == DType::float16 ? 0x7c00 : 0x7f80; }

// Numbers of a dtype, rounded by the kernel under test, whose own case is `cast`.
struct Numbers {
  Numbers(std::int64_t count, DType of) : dtype(of), wide(count), narrow(count) {
    for (float& value : wide) value = next_value();
    if (count > 70) wide[70] = __builtin_huge_valf();
    if (dtype != DType::float32) kTested.cast(wide.data(), narrow.data(), dtype, 0, count);
  }
  void* get() { return dtype == DType::float32 ? static_cast<void*>(wide.data()) : narrow.data(); }
  void add_to(Sum& sum) const {
    const auto count = static_cast<std::int64_t>(wide.size());
    if (dtype == DType::float32) return sum.add(wide.data(), count);
    sum.add(narrow.data(), count, infinity_of(dtype));
  }

  DType dtype;
  std::vector<float> wide;
  std::vector<u16> narrow;
};

constexpr DType kFloats[] = {DType::float32, DType::bfloat16, DType::float16};

struct Tested {
  Rule rule;
  int moments;
  Step step;
};

// Adam as most runs have it, and with decay in the gradient and beta1 below 0.5; each rule's own order.
const Tested kRules[] = {
    {Rule::adam, 2, {Rule::adam, {0.5f, 0.999f, 0.0f, 0.1f, 0.0f, 0.95f, 0.05f, -1e-3f, 0.3f, 1e-8f}}},
    {Rule::adam, 2, {Rule::adam, {0.5f, 0.999f, 0.1f, -0.4f, 1.0f, 0.95f, 0.05f, -1e-3f, 0.3f, 1e-8f}}},
    {Rule::lion, 1, {Rule::lion, {0.5f, 0.999f, 0.9f, 0.1f, 0.99f, 0.01f, -1e-4f}}},
    {Rule::sgd, 0, {Rule::sgd, {0.5f, 0.1f, -1e-2f}}},
    {Rule::momentum, 1, {Rule::momentum, {0.5f, 0.1f, -1e-2f, 0.9f, 1.0f, 0.0f, 1.0f}}},
    {Rule::adagrad, 1, {Rule::adagrad, {0.5f, 0.1f, 1e-2f, 1e-10f}}},
};

template <typename T>
T* moment(const Tested& tested, int number, std::vector<T>& memory) {
  return number < tested.moments ? memory.data() : nullptr;
}

void fp32(const Tested& tested, std::int64_t count, DType dtype, bool doubled) {
  Numbers master(count, DType::float32), first(count, DType::float32), grad(count, dtype);
  std::vector<float> second(count, 1e-4f), a(count), b(count), c(count);
  std::vector<u16> working(count);
  const Fp32State in = {master.wide.data(), moment(tested, 0, first.wide), moment(tested, 1, second)};
  const Fp32State other = {a.data(), moment(tested, 0, b), moment(tested, 1, c)};
  const Fp32State& out = doubled ? other : in;
  kTested.update_fp32(tested.step, in, out, {grad.get(), dtype}, working.data(), DType::bfloat16, 0, count);
  Sum sum;
  for (const float* field : {out.master, out.first, out.second}) {
    if (field) sum.add(field, count);
  }
  sum.add(working.data(), count, infinity_of(DType::bfloat16));
  sum.print("fp32", count, static_cast<int>(tested.rule), static_cast<int>(dtype) + 10 * doubled);
}

void split16(const Tested& tested, std::int64_t count, DType dtype) {
  Numbers master(count, DType::float32), first(count, DType::bfloat16), grad(count, dtype);
  std::vector<u16> weight(count), second(count, 0x38d2);
  std::vector<std::int16_t> low(count);
  kTested.encode_split16(master.wide.data(), weight.data(), low.data(), 0, count);
  const Split16State state = {weight.data(), low.data(), moment(tested, 0, first.narrow),
                              moment(tested, 1, second)};
  kTested.update_split16(tested.step, state, state, {grad.get(), dtype},
                         {0, count, 0x123456789abcdefu, 0xfffffff0u});
  Sum sum;
  sum.add(weight.data(), count, infinity_of(DType::bfloat16));
  sum.add(low.data(), count);
  for (const u16* field : {state.first, state.second}) {
    if (field) sum.add(field, count, infinity_of(DType::bfloat16));
  }
  kTested.decode_split16(weight.data(), low.data(), master.wide.data(), 0, count);
  sum.add(master.wide.data(), count);
  sum.print("split16", count, static_cast<int>(tested.rule), static_cast<int>(dtype));
}

// Three steps, so that codes other than zero are read.
void int8(const Tested& tested, std::int64_t count, DType dtype, DType weight_dtype) {
  const std::int64_t blocks = (count + kBlock - 1) / kBlock;
  Numbers master(count, DType::float32);
  std::vector<u16> weight(count);
  std::vector<std::int8_t> correction(count);
  std::vector<std::uint8_t> first(count), second(count);
  std::vector<float> first_scale(blocks), second_scale(blocks);
  kTested.encode_int8(master.wide.data(), weight.data(), correction.data(), weight_dtype, 0, count);
  const Int8State state = {weight.data(), correction.data(), moment(tested, 0, first),
                           moment(tested, 1, second), moment(tested, 0, first_scale),
                           moment(tested, 1, second_scale)};
  for (std::uint64_t step = 0; step < 3; ++step) {
    Numbers grad(count, dtype);
    kTested.update_int8(tested.step, state, state, {grad.get(), dtype}, weight_dtype, {0, count, step, 0});
  }
  Sum sum;
  sum.add(weight.data(), count, infinity_of(weight_dtype));
  sum.add(correction.data(), count);
  sum.add(first.data(), count);
  sum.add(second.data(), count);
  sum.add(first_scale.data(), blocks);
  sum.add(second_scale.data(), blocks);
  kTested.decode_int8(weight.data(), weight_dtype, correction.data(), master.wide.data(), 0, count);
  sum.add(master.wide.data(), count);
  sum.print("int8", count, static_cast<int>(tested.rule),
            static_cast<int>(dtype) + 10 * static_cast<int>(weight_dtype));
}

void gradients(std::int64_t count, DType dtype) {
  Numbers grad(count, dtype), more(count, dtype);
  std::vector<float> total(count);
  kTested.accumulate(total.data(), grad.get(), dtype, true, 0, count);
  kTested.accumulate(total.data(), more.get(), dtype, false, 0, count);
  std::vector<double> squares;
  for (std::int64_t lo = 0; lo < count; lo += kSegment) {
    const std::int64_t rest = count - lo < kSegment ? count - lo : kSegment;
    squares.push_back(kTested.segment(more.get(), dtype, lo, rest));
  }
  Sum sum;
  grad.add_to(sum);
  sum.add(total.data(), count);
  sum.add(reinterpret_cast<const std::uint32_t*>(squares.data()), 2 * static_cast<std::int64_t>(squares.size()));
  sum.print("gradients", count, 0, static_cast<int>(dtype));
}

void matrices(std::int64_t count, DType dtype) {
  const Blend blend = {0.5f, 0.05f, -0.05f, false, true, true};
  const Decay decay = {0.999f, -0.02f};
  Numbers grad(count, dtype), master(count, DType::float32), average(count, DType::float32);
  Numbers narrow(count, DType::bfloat16);
  std::vector<u16> target(count), weight(count), working(count);
  std::vector<std::int16_t> low(count);
  Sum sum;
  kTested.encode_split16(master.wide.data(), weight.data(), low.data(), 0, count);
  kTested.blend_fp32(blend, average.wide.data(), {grad.get(), dtype}, target.data(), 0, count);
  average.add_to(sum);
  sum.add(target.data(), count, infinity_of(DType::bfloat16));
  kTested.subtract_fp32(decay, master.wide.data(), target.data(), working.data(), DType::bfloat16, 0, count);
  master.add_to(sum);
  sum.add(working.data(), count, infinity_of(DType::bfloat16));
  kTested.blend_split16(blend, narrow.narrow.data(), {grad.get(), dtype}, target.data(),
                        {0, count, 0x123456789abcdefu, 0xfffffff0u});
  narrow.add_to(sum);
  kTested.subtract_split16(decay, weight.data(), low.data(), target.data(), 0, count);
  sum.add(weight.data(), count, infinity_of(DType::bfloat16));
  sum.add(low.data(), count);
  sum.print("matrices", count, 0, static_cast<int>(dtype));
}

}  // namespace

int main() {
  for (const std::int64_t count : {1, 64, 129, 2049, 10007}) {
    for (const DType dtype : kFloats) {
      for (const Tested& tested : kRules) {
        fp32(tested, count, dtype, false);
        fp32(tested, count, dtype, true);
        split16(tested, count, dtype);
        if (tested.rule == Rule::adagrad) continue;
        int8(tested, count, dtype, DType::bfloat16);
        int8(tested, count, dtype, DType::float16);
      }
      gradients(count, dtype);
      matrices(count, dtype);
    }
  }
}
