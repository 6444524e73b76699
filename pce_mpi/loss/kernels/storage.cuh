// Logits as they are stored: four types, vectors of 16 bytes, and the rows that are cut into them.
#pragma once
#include <device.cuh>

using int64 = long long;

struct float16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};

// The types by number, where only the launch knows which one it is; kernels/cuda.py has the same order.
enum Kind { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };

template <typename T>
struct Storage;
template <>
struct Storage<float16> {
  static constexpr int kind = FLOAT16, width = 8;
  static constexpr unsigned lowest = 0xfc00fc00u;  // a word of -inf
};
template <>
struct Storage<bfloat16> {
  static constexpr int kind = BFLOAT16, width = 8;
  static constexpr unsigned lowest = 0xff80ff80u;
};
template <>
struct Storage<float> {
  static constexpr int kind = FLOAT32, width = 4;
  static constexpr unsigned lowest = 0xff800000u;
};
template <>
struct Storage<double> {
  static constexpr int kind = FLOAT64, width = 2;
  static constexpr unsigned lowest = 0xfff00000u;  // the upper word
};

template <typename A>
__device__ __forceinline__ A infinity();
template <>
__device__ __forceinline__ float infinity<float>() {
  return bits_as<float>(0x7f800000u);
}
template <>
__device__ __forceinline__ double infinity<double>() {
  return bits_as<double>(0x7ff0000000000000ull);
}

// Neither infinite nor nan.
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < infinity<float>(); }
__device__ __forceinline__ bool is_finite(double x) { return fabs(x) < infinity<double>(); }

__device__ __forceinline__ float number(float16 x) { return float_of_half(x.bits); }
__device__ __forceinline__ float number(bfloat16 x) { return bits_as<float>(static_cast<unsigned>(x.bits) << 16); }
__device__ __forceinline__ float number(float x) { return x; }
__device__ __forceinline__ double number(double x) { return x; }

// The numbers of a vector of a type that float32 arithmetic is for.
template <typename T>
__device__ __forceinline__ void unpack(const Vector& v, float (&x)[Storage<T>::width]) {
  if constexpr (Storage<T>::kind == FLOAT32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = bits_as<float>(v.word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = number(T{static_cast<unsigned short>(v.word[i] & 0xffffu)});
      x[2 * i + 1] = number(T{static_cast<unsigned short>(v.word[i] >> 16)});
    }
  }
}

template <typename T>
__device__ __forceinline__ Vector pack(const float (&x)[Storage<T>::width]) {
  Vector v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Storage<T>::kind == FLOAT32)
      v.word[i] = bits_as<unsigned>(x[i]);
    else if constexpr (Storage<T>::kind == FLOAT16)
      v.word[i] = halves_of_floats(x[2 * i], x[2 * i + 1]);
    else
      v.word[i] = bfloat16s_of_floats(x[2 * i], x[2 * i + 1]);
  }
  return v;
}

template <typename T>
__device__ __forceinline__ Vector vector_of_lowest() {
  constexpr unsigned lowest = Storage<T>::lowest;
  if constexpr (sizeof(T) == 8) return Vector{0, lowest, 0, lowest};
  return Vector{lowest, lowest, lowest, lowest};
}

// Put -inf in the place of one number, counted from the vector's first; nowhere, if that is none of them.
template <typename T>
__device__ __forceinline__ void mask(Vector& v, unsigned place) {
  if (place >= Storage<T>::width) return;
  constexpr unsigned in_word = Storage<T>::width / 4;
  const unsigned bits = in_word == 1 ? 0xffffffffu : 0xffffu << (place % in_word * 16);
#pragma unroll
  for (unsigned i = 0; i < 4; ++i)
    v.word[i] = place / in_word == i ? (v.word[i] & ~bits) | (Storage<T>::lowest & bits) : v.word[i];
}

// The largest numbers so far, a word of them, and those of a vector; nan only if there is nothing else.
template <typename T>
__device__ __forceinline__ unsigned larger(unsigned word, const Vector& v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Storage<T>::kind == FLOAT32)
      word = bits_as<unsigned>(fmaxf(bits_as<float>(word), bits_as<float>(v.word[i])));
    else if constexpr (Storage<T>::kind == FLOAT16)
      word = maximum_of_halves(word, v.word[i]);
    else
      word = maximum_of_bfloat16s(word, v.word[i]);
  }
  return word;
}

template <typename T>
__device__ __forceinline__ float largest_of(unsigned word) {
  if constexpr (Storage<T>::kind == FLOAT32) {
    return bits_as<float>(word);
  } else {
    const T first{static_cast<unsigned short>(word & 0xffffu)}, second{static_cast<unsigned short>(word >> 16)};
    return fmaxf(number(first), number(second));
  }
}

// One number, and -inf.
template <typename T>
__device__ __forceinline__ Vector vector_of(T x) {
  Vector v = vector_of_lowest<T>();
  if constexpr (sizeof(T) == 8) {
    const auto bits = bits_as<unsigned long long>(x);
    v.word[0] = static_cast<unsigned>(bits);
    v.word[1] = static_cast<unsigned>(bits >> 32);
  } else if constexpr (sizeof(T) == 4) {
    v.word[0] = bits_as<unsigned>(x);
  } else {
    v.word[0] = (v.word[0] & 0xffff0000u) | x.bits;
  }
  return v;
}

// The numbers of a vector one after the other, in a loop: registers have no addresses to index.
template <typename T>
__device__ __forceinline__ T next(Vector& v) {
  const unsigned first = v.word[0], second = v.word[1];
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = v.word[i] >> 16 | (i < 3 ? v.word[i + 1] : 0u) << 16;
    return T{static_cast<unsigned short>(first & 0xffffu)};
  } else {
    constexpr int words = sizeof(T) / 4;
#pragma unroll
    for (int i = 0; i + words < 4; ++i) v.word[i] = v.word[i + words];
    if constexpr (words == 1)
      return bits_as<T>(first);
    else
      return bits_as<T>(static_cast<unsigned long long>(second) << 32 | first);
  }
}

// An element of an array whose type only the launch knows.
__device__ __forceinline__ double element(const void* array, int kind, int64 index) {
  if (kind == FLOAT16) return number(static_cast<const float16*>(array)[index]);
  if (kind == BFLOAT16) return number(static_cast<const bfloat16*>(array)[index]);
  if (kind == FLOAT32) return static_cast<const float*>(array)[index];
  return static_cast<const double*>(array)[index];
}

__device__ __forceinline__ void set_element(void* array, int kind, int64 index, double value) {
  const float narrow = nearest_float(value);
  if (kind == FLOAT16)
    static_cast<float16*>(array)[index].bits = static_cast<unsigned short>(halves_of_floats(narrow, 0.0f));
  else if (kind == BFLOAT16)
    static_cast<bfloat16*>(array)[index].bits = static_cast<unsigned short>(bfloat16s_of_floats(narrow, 0.0f));
  else if (kind == FLOAT32)
    static_cast<float*>(array)[index] = narrow;
  else
    static_cast<double*>(array)[index] = value;
}

// Consecutive classes of one row: single ones up to the first address that 16 divides, whole vectors from there, and
// single ones again. `edges` counts the single ones at both ends.
template <typename T>
struct Stretch {
  static constexpr int width = Storage<T>::width;
  int head, body, edges;

  __device__ __forceinline__ Stretch(const T* begin, int count) {
    const unsigned beyond = static_cast<unsigned>(bits_as<unsigned long long>(begin) % 16 / sizeof(T));
    head = (width - static_cast<int>(beyond)) % width;
    head = head < count ? head : count;
    body = (count - head) / width;
    edges = count - body * width;
  }

  // Where a vector begins, and where a single class is, from `begin`.
  __device__ __forceinline__ int vector_at(int index) const { return head + index * width; }
  __device__ __forceinline__ int edge_at(int index) const { return index < head ? index : index + body * width; }
};

// The part of a row that one block looks at, and of which rows. Threads work on a row in groups of `lanes`, and several
// groups are in a block where rows are short. The grid is (blocks for all rows, parts of a row).
struct Place {
  int lane;
  int64 row, first;  // the first class
  int count;         // of classes; 0 in a group that has no row

  __device__ __forceinline__ Place(int64 rows, int64 classes, int chunk, int lanes) {
    const int thread = static_cast<int>(threadIdx.x);
    lane = thread % lanes;
    row = static_cast<int64>(blockIdx.x) * (static_cast<int>(blockDim.x) / lanes) + thread / lanes;
    first = static_cast<int64>(blockIdx.y) * chunk;
    const int64 left = classes - first;
    count = row < rows ? static_cast<int>(left < chunk ? left : chunk) : 0;
  }

  // A local column relative to the first class, -1 for one that lies elsewhere.
  __device__ __forceinline__ int relative(int64 column) const {
    return column >= first && column < first + count ? static_cast<int>(column - first) : -1;
  }
};
