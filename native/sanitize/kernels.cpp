// Every kernel over heap buffers of the exact size, for AddressSanitizer and UBSan: lengths around
// every block and slab, unaligned starts, all dtypes, and values that are not numbers.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../kernels.h"

namespace offloadtrain {
extern const Kernels kTested;
}

namespace {

using namespace offloadtrain;

// Memory of exactly so many elements that starts `shift` elements into an allocation.
template <typename T>
class Exact {
 public:
  Exact(std::int64_t count, int shift)
      : memory_(static_cast<T*>(std::malloc((count + shift) * sizeof(T) + (count + shift == 0)))),
        shift_(shift) {
    std::memset(static_cast<void*>(memory_), 0, (count + shift) * sizeof(T));
  }
  ~Exact() { std::free(memory_); }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  T* get() { return memory_ + shift_; }

 private:
  T* memory_;
  int shift_;
};

std::uint32_t next_random() {
  static std::uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return state;
}

// Any bits at all: NaN, infinities and denormals among them.
void fill(void* memory, std::size_t bytes) {
  auto* out = static_cast<unsigned char*>(memory);
  for (std::size_t i = 0; i < bytes; ++i) out[i] = static_cast<unsigned char>(next_random() >> 24);
}

std::size_t size_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

constexpr DType kFloats[] = {DType::float32, DType::bfloat16, DType::float16};

// A rule, with how many moments it has. The numbers are read in each rule's own order.
struct Tested {
  Rule rule;
  int moments;

  Step step() const {
    return {rule, {0.5f, 0.999f, 0.1f, 0.1f, 0.0f, 0.95f, 0.05f, -1e-3f, 0.3f, 1e-8f}};
  }
};

constexpr Tested kRules[] = {
    {Rule::adam, 2}, {Rule::lion, 1}, {Rule::sgd, 0}, {Rule::momentum, 1}, {Rule::adagrad, 1}};

struct Case {
  std::int64_t count;
  int shift;
  DType grad;
  bool doubled;
  Tested tested;

  // Memory of a moment; null if the rule does not have so many.
  template <typename T>
  T* moment(int number, Exact<T>& memory) const {
    return number < tested.moments ? memory.get() : nullptr;
  }
};

void fp32(const Case& c, DType working_dtype) {
  Exact<float> a(c.count, c.shift), b(c.count, c.shift), v(c.count, c.shift);
  Exact<float> a2(c.count, c.shift), b2(c.count, c.shift), v2(c.count, c.shift);
  Exact<unsigned char> grad(c.count * size_of(c.grad), c.shift * size_of(c.grad));
  const std::size_t width = working_dtype == DType::none ? 0 : size_of(working_dtype);
  Exact<unsigned char> working(c.count * width, c.shift * width);
  for (float* p : {a.get(), b.get(), v.get()}) fill(p, c.count * 4);
  fill(grad.get(), c.count * size_of(c.grad));
  const Fp32State in = {a.get(), c.moment(0, b), c.moment(1, v)};
  const Fp32State other = {a2.get(), c.moment(0, b2), c.moment(1, v2)};
  kTested.update_fp32(c.tested.step(), in, c.doubled ? other : in, {grad.get(), c.grad},
                      width ? working.get() : nullptr, working_dtype, 0, c.count);
}

void split16(const Case& c) {
  Exact<std::uint16_t> w(c.count, c.shift), m(c.count, c.shift), v(c.count, c.shift);
  Exact<std::uint16_t> w2(c.count, c.shift), m2(c.count, c.shift), v2(c.count, c.shift);
  Exact<std::int16_t> low(c.count, c.shift), low2(c.count, c.shift);
  Exact<unsigned char> grad(c.count * size_of(c.grad), c.shift * size_of(c.grad));
  for (std::uint16_t* p : {w.get(), m.get(), v.get()}) fill(p, c.count * 2);
  fill(low.get(), c.count * 2);
  fill(grad.get(), c.count * size_of(c.grad));
  const Split16State in = {w.get(), low.get(), c.moment(0, m), c.moment(1, v)};
  const Split16State other = {w2.get(), low2.get(), c.moment(0, m2), c.moment(1, v2)};
  kTested.update_split16(c.tested.step(), in, c.doubled ? other : in, {grad.get(), c.grad},
                         {0, c.count, 0x123456789abcdefu, 0xfffffff0u});
}

void int8(const Case& c, DType weight_dtype) {
  const std::int64_t blocks = (c.count + kBlock - 1) / kBlock;
  Exact<std::uint16_t> w(c.count, c.shift), w2(c.count, c.shift);
  Exact<std::int8_t> r(c.count, c.shift), r2(c.count, c.shift);
  Exact<std::uint8_t> m(c.count, c.shift), v(c.count, c.shift), m2(c.count, c.shift), v2(c.count, c.shift);
  Exact<float> ms(blocks, c.shift), vs(blocks, c.shift), ms2(blocks, c.shift), vs2(blocks, c.shift);
  Exact<unsigned char> grad(c.count * size_of(c.grad), c.shift * size_of(c.grad));
  fill(w.get(), c.count * 2);
  fill(r.get(), c.count);
  fill(m.get(), c.count);
  fill(v.get(), c.count);
  fill(ms.get(), blocks * 4);
  fill(vs.get(), blocks * 4);
  fill(grad.get(), c.count * size_of(c.grad));
  const Int8State in = {w.get(),        r.get(),         c.moment(0, m),
                        c.moment(1, v), c.moment(0, ms), c.moment(1, vs)};
  const Int8State other = {w2.get(),        r2.get(),         c.moment(0, m2),
                           c.moment(1, v2), c.moment(0, ms2), c.moment(1, vs2)};
  kTested.update_int8(c.tested.step(), in, c.doubled ? other : in, {grad.get(), c.grad}, weight_dtype,
                      {0, c.count, 7, 0});
}

void gradients(std::int64_t count, int shift, DType dtype) {
  Exact<float> sum(count, shift), source(count, shift);
  const std::size_t width = size_of(dtype);
  Exact<unsigned char> grad(count * width, shift * width), target(count * width, shift * width);
  fill(grad.get(), count * size_of(dtype));
  fill(source.get(), count * 4);
  kTested.accumulate(sum.get(), grad.get(), dtype, true, 0, count);
  kTested.accumulate(sum.get(), grad.get(), dtype, false, 0, count);
  kTested.cast(source.get(), target.get(), dtype, 0, count);
  double total = 0.0;
  for (std::int64_t lo = 0; lo < count; lo += kSegment) {
    const std::int64_t rest = count - lo;
    total += kTested.segment(grad.get(), dtype, lo, rest < kSegment ? rest : kSegment);
  }
  if (total == 0.5) std::puts("");  // used
}

void limit(std::int64_t count, int shift) {
  Exact<float> a(count, shift), b(count, shift), c(count, shift);
  Exact<std::uint16_t> grad(count, shift), working(count, shift);
  kTested.traffic({a.get(), b.get(), c.get()}, grad.get(), working.get(), 0, count);
}

void masters(std::int64_t count, int shift) {
  Exact<float> master(count, shift);
  Exact<std::uint16_t> weight(count, shift);
  Exact<std::int16_t> low(count, shift);
  Exact<std::int8_t> correction(count, shift);
  fill(master.get(), count * 4);
  kTested.encode_split16(master.get(), weight.get(), low.get(), 0, count);
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    kTested.encode_int8(master.get(), weight.get(), correction.get(), dtype, 0, count);
  }
  fill(weight.get(), count * 2);
  fill(low.get(), count * 2);
  fill(correction.get(), count);
  kTested.decode_split16(weight.get(), low.get(), master.get(), 0, count);
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    kTested.decode_int8(weight.get(), dtype, correction.get(), master.get(), 0, count);
  }
}

// The directions of 16-bit gradients, and 16-bit weights, lie where their operand was.
void matrices(std::int64_t count, int shift, DType dtype) {
  const Blend blend = {0.5f, 0.05f, -0.05f, false, true, true};
  const Decay decay = {0.999f, -0.02f};
  const bool narrow = dtype != DType::float32;
  Exact<float> master(count, shift), average(count, shift);
  Exact<std::uint16_t> weight(count, shift), short_average(count, shift), target(count, shift);
  Exact<std::int16_t> low(count, shift);
  Exact<unsigned char> memory(count * size_of(dtype), shift * size_of(dtype));
  for (float* p : {master.get(), average.get()}) fill(p, count * 4);
  for (std::uint16_t* p : {weight.get(), short_average.get(), target.get()}) fill(p, count * 2);
  fill(low.get(), count * 2);
  fill(memory.get(), count * size_of(dtype));
  auto* front = narrow ? reinterpret_cast<std::uint16_t*>(memory.get()) : target.get();
  kTested.blend_fp32(blend, average.get(), {memory.get(), dtype}, front, 0, count);
  kTested.blend_split16(blend, short_average.get(), {memory.get(), dtype}, front,
                        {0, count, 0x123456789abcdefu, 0xfffffff0u});
  kTested.subtract_fp32(decay, master.get(), front, nullptr, DType::none, 0, count);
  kTested.subtract_fp32(decay, master.get(), front, memory.get(), dtype, 0, count);
  kTested.subtract_split16(decay, weight.get(), low.get(), target.get(), 0, count);
}

void all(std::int64_t count, int shift) {
  for (const DType grad : kFloats) {
    for (const bool doubled : {false, true}) {
      for (const Tested& tested : kRules) {
        const Case c = {count, shift, grad, doubled, tested};
        for (const DType working : kFloats) fp32(c, working);
        fp32(c, DType::none);
        split16(c);
        int8(c, DType::bfloat16);
        int8(c, DType::float16);
      }
    }
    gradients(count, shift, grad);
    matrices(count, shift, grad);
  }
  limit(count, shift);
  masters(count, shift);
}

}  // namespace

int main() {
  for (const std::int64_t count : {0, 1, 15, 127, 128, 129, 511, 512, 513, 2047, 2048, 2049, 10007}) {
    for (const int shift : {0, 1}) all(count, shift);
  }
#ifdef PLANT_FAULT
  Exact<float> sum(100, 0), grad(99, 0);
  kTested.accumulate(sum.get(), grad.get(), DType::float32, false, 0, 100);
#endif
  std::printf("%s: clean\n", kTested.name);
}
