// Number formats, element by element. Included by kernels.cpp only: internal linkage throughout, and
// nothing of the standard library, because an inline function merged by the linker from the AVX-512
// object would crash an older CPU.
#pragma once

#include <cstdint>

// Before a loop whose elements are independent of each other, although memory that it reads may be
// memory that it writes. Vectorised and not unrolled: a loop of known length would be unrolled whole.
#if defined(__clang__)
#define OT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety) unroll(disable)")
#else
#define OT_INDEPENDENT _Pragma("GCC ivdep") _Pragma("GCC unroll 1")
#endif
// For what is called once with a length known to the compiler and once without.
#define OT_INLINE [[gnu::always_inline]] inline

namespace offloadtrain {
namespace {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

inline u32 bits_of(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(u32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Branch-free choice: a condition that the compiler hoists out of a loop as a second loop, or cannot
// if-convert, costs the vectorisation of both.
inline u32 mask_of(bool condition) { return 0u - static_cast<u32>(condition); }
inline u32 select(u32 mask, u32 chosen, u32 otherwise) {
  return (chosen & mask) | (otherwise & ~mask);
}
// Below 2^31 a signed comparison says the same, and AVX2 has no unsigned one.
inline bool less(u32 a, u32 b) { return static_cast<i32>(a) < static_cast<i32>(b); }
inline float select(u32 mask, float chosen, float otherwise) {
  return float_of(select(mask, bits_of(chosen), bits_of(otherwise)));
}

constexpr u32 kSign = 0x80000000u;
constexpr u32 kMagnitude = 0x7fffffffu;
constexpr u32 kInfinity = 0x7f800000u;
constexpr u32 kNan = 0x7fc00000u;

// [Note: Canonical NaN] The narrow states keep a NaN by keeping its upper bits, to which a rounding
// must not carry: CUDA's own NaN, 0x7fffffff, would become -0. So its payload is dropped where it
// can come in, with the gradient; arithmetic passes on what it gets. bf16 has no bits to carry.
inline float canonical(float value) {
  return less(kInfinity, bits_of(value) & kMagnitude) ? float_of(kNan) : value;
}

// [Note: Words of several elements] Narrow elements are taken 32 bits at a time: two of 16 bits, or four
// of 8, the first in the lowest bits. A lane then works on one element of each word, and nothing is
// shuffled between lanes: widening and narrowing took a third of the narrow formats' time on CPUs
// with a single port for shuffles.
template <typename T>
inline u32 word_at(const T* elements, i32 word) {
  u32 bits;
  __builtin_memcpy(&bits, reinterpret_cast<const char*>(elements) + 4 * static_cast<i64>(word), 4);
  return bits;
}

template <typename T>
inline void set_word(T* elements, i32 word, u32 bits) {
  __builtin_memcpy(reinterpret_cast<char*>(elements) + 4 * static_cast<i64>(word), &bits, 4);
}

constexpr u32 kUpper = 0xffff0000u;

// Element 0 or 1 of a word of two: in the upper half, or as a signed number.
template <int kElement>
inline u32 upper_half(u32 word) {
  return kElement ? word & kUpper : word << 16;
}
template <int kElement>
inline i32 signed_half(u32 word) {
  return static_cast<i32>(kElement ? word : word << 16) >> 16;
}
// The bits of `chosen` where the mask has ones, else those of `otherwise`. With exclusive ors g++ compiles this
// to one instruction of AVX-512, vpternlogd; where there is none, they depend on each other.
template <u32 kMask>
inline u32 merged(u32 chosen, u32 otherwise) {
#if defined(__AVX512F__)
  return otherwise ^ ((chosen ^ otherwise) & kMask);
#else
  return (chosen & kMask) | (otherwise & ~kMask);
#endif
}

// Four elements of 16 bits: 0 and 2 are the halves of `even`, 1 and 3 those of `odd`.
struct Halves {
  u32 even, odd;
};
// Element 0 to 3, in the upper half.
template <int kElement>
inline u32 upper_half(Halves elements) {
  return upper_half<kElement / 2>(kElement % 2 ? elements.odd : elements.even);
}

// The word of two elements that are in the upper halves, or in the lower ones, of these.
inline u32 word_of_upper(u32 first, u32 second) { return first >> 16 | (second & kUpper); }
inline u32 word_of_lower(u32 first, u32 second) { return (first & ~kUpper) | second << 16; }

// Element 0 to 3 of a word of four: from bit kTo on, by a single shift, or as a signed number.
template <int kElement, int kTo>
inline u32 byte_at(u32 word) {
  constexpr int left = kTo - 8 * kElement;
  const u32 shifted = left < 0 ? word >> (left < 0 ? -left : 0) : word << (left < 0 ? 0 : left);
  return shifted & (0xffu << kTo);
}
template <int kElement>
inline i32 signed_byte(u32 word) {
  return static_cast<i32>(word << (24 - 8 * kElement)) >> 24;
}
// The word of four elements that begin at bit kLow of these.
template <int kLow>
inline u32 word_of_bytes(u32 a, u32 b, u32 c, u32 d) {
  const u32 first = a >> kLow, second = kLow > 8 ? b >> (kLow - 8) : b << (8 - kLow);
  const u32 third = kLow > 16 ? c >> (kLow - 16) : c << (16 - kLow), fourth = d << (24 - kLow);
  return merged<kUpper>(merged<0xff000000u>(fourth, third), merged<0xff00u>(second, first));
}

struct Float32 {
  using Storage = float;
  static constexpr i32 kPerWord = 1;
  template <int>
  static float of_word(const float* stored, i32 word) { return stored[word]; }
  static float load(float stored) { return stored; }
  static float load_canonical(float stored) { return canonical(stored); }
  // Element 0 or 1 of a pair.
  template <int kElement>
  static float of_pair(const float* stored, i32 pair) { return canonical(stored[2 * pair + kElement]); }
  static float store(float value) { return value; }
};

struct BFloat16 {
  using Storage = u16;
  static constexpr i32 kPerWord = 2;
  template <int kElement>
  static float of_word(const u16* stored, i32 word) {
    return float_of(upper_half<kElement>(word_at(stored, word)));
  }
  static float load(u16 stored) { return float_of(static_cast<u32>(stored) << 16); }
  static float load_canonical(u16 stored) { return load(stored); }
  template <int kElement>
  static float of_pair(const u16* stored, i32 pair) { return of_word<kElement>(stored, pair); }

  // Round to nearest even. A NaN must not be rounded: its mantissa could carry into infinity.
  static u16 store(float value) {
    const u32 bits = bits_of(value);
    const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<u16>(less(kInfinity, bits & kMagnitude) ? kNan >> 16 : rounded);
  }

  // Round up with the probability of the part cut off. `random`: uniform over 16 bits. Infinity, and
  // a canonical NaN, stay what they are.
  static u16 store(float value, u32 random) { return static_cast<u16>(rounding(value, random) >> 16); }
  // The same in the upper half.
  static u32 rounding(float value, u32 random) { return bits_of(value) + random; }
};

struct Float16 {
  using Storage = u16;
  static constexpr i32 kPerWord = 2;
  template <int kElement>
  static float of_word(const u16* stored, i32 word) {
    return load(static_cast<u16>(upper_half<kElement>(word_at(stored, word)) >> 16));
  }

  // Shifted into place, the exponent is 112 too small; the multiplication is exact and also
  // normalises denormals.
  static float load(u16 stored) {
    const u32 magnitude = static_cast<u32>(stored & 0x7fffu) << 13;
    const u32 sign = static_cast<u32>(stored & 0x8000u) << 16;
    const u32 scaled = bits_of(float_of(magnitude) * 0x1p112f);
    const u32 special = magnitude | kInfinity;
    return float_of(sign | select(mask_of(!less(magnitude, 0x0f800000u)), special, scaled));
  }

  static float load_canonical(u16 stored) { return canonical(load(stored)); }
  template <int kElement>
  static float of_pair(const u16* stored, i32 pair) { return canonical(of_word<kElement>(stored, pair)); }

  // Round to nearest even, to infinity from 65520 on.
  static u16 store(float value) {
    const u32 bits = bits_of(value);
    const u32 sign = (bits >> 16) & 0x8000u;
    const u32 magnitude = bits & kMagnitude;
    const u32 normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 leaves a denormal half's mantissa, rounded, in the low bits.
    const u32 denormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const u32 finite = select(mask_of(less(magnitude, 0x38800000u)), denormal, normal);
    const u32 special = select(mask_of(less(kInfinity, magnitude)), 0x7e00u, 0x7c00u);
    return static_cast<u16>(sign | select(mask_of(!less(magnitude, 0x47800000u)), special, finite));
  }
};

// [Note: Random bits] A counter-based generator: the bits depend on (seed, step, parameter), which
// the key holds, and on the element's number, and on nothing else. A resumed run, another number of
// threads and another sharding draw the same bits. The mixer is lowbias32 (Wellons 2018), keyed
// between its two rounds too, so that two steps do not see one sequence shifted.
struct Random {
  u32 first, second;
  explicit Random(u64 key) : first(static_cast<u32>(key)), second(folded(static_cast<u32>(key >> 32))) {}

  u32 bits(u32 element) const { return mixed(shifted(element)); }

  // Of element + i, for i below a power of two up to 2^16 that divides element, mixed() takes
  // shifted(element) ^ i: these elements differ below bit 16 only, and share what is shifted down.
  u32 shifted(u32 element) const {
    const u32 x = element ^ first;
    return x ^ (x >> 16);
  }
  u32 mixed(u32 x) const { return finished(multiplied(x)); }

  // mixed() in two parts. Folding is linear, so that the key is folded once: folded(x ^ key) is
  // folded(x) ^ folded(key).
  static u32 multiplied(u32 x) { return x * 0x7feb352du; }
  u32 finished(u32 x) const {
    x = (folded(x) ^ second) * 0x846ca68bu;
    return x ^ (x >> 16);
  }

 private:
  static u32 folded(u32 x) { return x ^ (x >> 15); }
};

// The two halves of an fp32 number. The upper half rounds to nearest, ties away from zero: then the
// lower half, taken as a signed number, is what is missing. Under round-to-nearest-even 65,537
// numbers share an even upper half, one too many for 16 bits.
struct Split {
  static float join(u16 weight, i16 low) {
    return join(static_cast<u32>(weight) << 16, static_cast<i32>(low));
  }
  static float join(u32 upper, i32 low) { return float_of(upper + static_cast<u32>(low)); }
  static u16 weight(float master) { return static_cast<u16>(rounding(bits_of(master)) >> 16); }
  // The weight in the upper half.
  static u32 rounding(u32 master) { return master + 0x8000u; }
  static i16 low(float master) { return static_cast<i16>(static_cast<u16>(bits_of(master))); }
};

// A 16-bit weight and an 8-bit correction in units of 1/256 of the weight's last place: together X, a
// sign and 23 bits, weight = (X + 128) >> 8, correction = the low bits of X, signed. Here X has the
// upper 24 bits of a word, and what lies below them is to be ignored.
struct Plus8 {
  static u16 weight(u32 x) { return static_cast<u16>(rounding(x) >> 16); }
  // The weight in the upper half.
  static u32 rounding(u32 x) { return x + 0x8000u; }
  static i8 correction(u32 x) { return static_cast<i8>(static_cast<u8>(x >> 8)); }
};

struct BFloat16Plus8 {
  // `weight`: in the upper half.
  static float join(u32 weight, i32 correction) {
    return float_of(weight + (static_cast<u32>(correction) << 8));
  }
  // X of a master, rounded stochastically. `random`: uniform over 8 bits.
  static u32 encode(float master, u32 random) { return bits_of(master) + random; }
};

struct Float16Plus8 {
  static constexpr u32 kLeastNormal = 0x38800000u;  // 2^-14

  static float join(u32 weight, i32 correction) {
    const u32 sign = weight & kSign;
    const u32 x = ((weight & kMagnitude) >> 8) + static_cast<u32>(correction);
    const u32 normal = (x << 5) + 0x38000000u;
    const u32 denormal = bits_of(static_cast<float>(static_cast<i32>(x)) * 0x1p-32f);
    const u32 finite = select(mask_of(less(x, 0x40000u)), denormal, normal);
    const u32 special = select(mask_of(less(0x7c0000u, x)), kNan, kInfinity);
    return float_of(sign | select(mask_of(!less(x, 0x7c0000u)), special, finite));
  }
  // Below the least normal half the last place is fixed: count it instead of shifting.
  static u32 encode(float master, u32 random) {
    const u32 sign = bits_of(master) & kSign;
    const u32 magnitude = bits_of(master) & kMagnitude;
    const u32 fifth = random >> 3;
    const u32 normal = (magnitude - 0x38000000u + fifth) >> 5;
    const u32 small = select(mask_of(less(magnitude, kLeastNormal)), magnitude, kLeastNormal);
    const float places = float_of(small) * 0x1p32f + static_cast<float>(static_cast<i32>(fifth)) * 0x1p-5f;
    const u32 denormal = static_cast<u32>(static_cast<i32>(places));
    const u32 finite = select(mask_of(less(magnitude, kLeastNormal)), denormal, normal);
    const u32 special = select(mask_of(less(kInfinity, magnitude)), 0x7e0000u, 0x7c0000u);
    return sign | select(mask_of(!less(magnitude, 0x47800000u)), special, finite) << 8;
  }
};

// [Note: 8-bit moments] The magnitude x of a moment, relative to its block's largest, is kept as the
// top bits of the fp32 number 1 + t, t = x * kTop / largest: evenly spaced near zero, a small float
// of kMantissa bits above. Rounding is stochastic and unbiased in x, or small changes would be lost
// for ever: the second moment changes by 1 - beta2 of itself per step, a code by 1/8 and more.
template <int kMantissa, u32 kLargestCode>
struct Minifloat {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr u32 kOne = 0x3f800000u;

  // The bits of 1 + t of four codes, without their lower halves, which are zero. A code is the bits kBits of
  // a byte of the word, plus kMore.
  template <u32 kBits, u32 kMore>
  static Halves widened_codes(u32 word) {
    static_assert(kShift > 16 && kShift < 24);
    constexpr int shift = kShift - 16;
    constexpr u32 bits = (kBits << shift) * 0x10001u, more = ((kOne >> 16) + (kMore << shift)) * 0x10001u;
    return {((word << shift) & bits) + more, ((word >> (8 - shift)) & bits) + more};
  }
  // t * scale, rounded once, of the bits of 1 + t.
  static float decode(u32 widened, float scale) { return __builtin_fmaf(float_of(widened), scale, -scale); }
  // t of the largest code.
  static float top() { return decode(kOne + (kLargestCode << kShift), 1.0f); }

  // The bits of 1 + x * inverse, rounded once: what the code is cut from.
  static u32 widened(float x, float inverse) { return bits_of(__builtin_fmaf(x, inverse, 1.0f)); }
  // `random`: uniform over 12 bits, laid right below the cut, with half of its own last place added:
  // no drift. What is missing to the next code is more than rounding may have taken beyond top().
  // The code is above the kShift lower bits, which are to be cut off.
  static u32 rounding(u32 widened, u32 random) {
    const u32 below = (random << (kShift - 12)) + (1u << (kShift - 13));
    return widened - kOne + below;
  }
};

}  // namespace
}  // namespace offloadtrain
