// The dtypes of logits, vectors of them, and the classes of a row that a group of threads works on.
#pragma once
#include <constants.cuh>
#include <device.cuh>
#include <gradients.h>

namespace pce {

struct float16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};

// Properties of a dtype that is computed in float32: its code, the elements of a vector, and a word of -inf.
template <typename T>
struct Storage;
template <>
struct Storage<float16> {
  static constexpr int dtype = FLOAT16, width = sizeof(Vector) / sizeof(float16);
  static constexpr unsigned minus_inf = 0xfc00fc00u;
};
template <>
struct Storage<bfloat16> {
  static constexpr int dtype = BFLOAT16, width = sizeof(Vector) / sizeof(bfloat16);
  static constexpr unsigned minus_inf = 0xff80ff80u;
};
template <>
struct Storage<float> {
  static constexpr int dtype = FLOAT32, width = sizeof(Vector) / sizeof(float);
  static constexpr unsigned minus_inf = 0xff800000u;
};

__device__ __forceinline__ float widen(float16 x) { return float_of_half(x.bits); }
__device__ __forceinline__ float widen(bfloat16 x) { return bit_cast<float>(static_cast<unsigned>(x.bits) << 16); }
__device__ __forceinline__ float widen(float x) { return x; }

// The elements of a vector in float32.
template <typename T>
__device__ __forceinline__ void unpack(const Vector& v, float (&x)[Storage<T>::width]) {
  if constexpr (Storage<T>::dtype == FLOAT32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = bit_cast<float>(v.word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = widen(T{static_cast<unsigned short>(v.word[i] & 0xffffu)});
      x[2 * i + 1] = widen(T{static_cast<unsigned short>(v.word[i] >> 16)});
    }
  }
}

template <typename T>
__device__ __forceinline__ Vector pack(const float (&x)[Storage<T>::width]) {
  Vector v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Storage<T>::dtype == FLOAT32)
      v.word[i] = bit_cast<unsigned>(x[i]);
    else if constexpr (Storage<T>::dtype == FLOAT16)
      v.word[i] = halves_of_floats(x[2 * i], x[2 * i + 1]);
    else
      v.word[i] = bfloat16s_of_floats(x[2 * i], x[2 * i + 1]);
  }
  return v;
}

// Give the element at `index`, if the vector has that element, the bits of `word`, in which all elements are the same.
template <typename T>
__device__ __forceinline__ void mask(Vector& v, unsigned index, unsigned word) {
  if (index >= Storage<T>::width) return;
  constexpr unsigned in_word = Storage<T>::width / 4;
  const unsigned bits = in_word == 1 ? 0xffffffffu : 0xffffu << (index % in_word * 16);
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) {
    // The word is not in the condition: some compilers would use it as an index, and put the vector in memory.
    const unsigned here = index / in_word == i ? bits : 0;
    v.word[i] = (v.word[i] & ~here) | (word & here);
  }
}

// Elementwise maximum of two words, nan where there is a nan.
template <typename T>
__device__ __forceinline__ unsigned maximum(unsigned a, unsigned b) {
  if constexpr (Storage<T>::dtype == FLOAT32)
    return bit_cast<unsigned>(maximum_or_nan(bit_cast<float>(a), bit_cast<float>(b)));
  else if constexpr (Storage<T>::dtype == FLOAT16)
    return maximum_of_halves(a, b);
  else
    return maximum_of_bfloat16s(a, b);
}

template <typename T>
__device__ __forceinline__ float max_of_word(unsigned word) {
  if constexpr (Storage<T>::dtype == FLOAT32) {
    return bit_cast<float>(word);
  } else {
    const T first{static_cast<unsigned short>(word & 0xffffu)}, second{static_cast<unsigned short>(word >> 16)};
    return maximum_or_nan(widen(first), widen(second));
  }
}

// Elementwise the smaller of a and the size of b.
template <typename T>
__device__ __forceinline__ unsigned minimum_size(unsigned a, unsigned b) {
  if constexpr (Storage<T>::dtype == FLOAT32)
    return bit_cast<unsigned>(smaller_size(bit_cast<float>(a), bit_cast<float>(b)));
  else
    return smaller_sizes_of_bfloat16s(a, b);
}

template <typename T>
__device__ __forceinline__ float min_of_word(unsigned word) {
  if constexpr (Storage<T>::dtype == FLOAT32)
    return bit_cast<float>(word);
  else
    return smaller_size(bit_cast<float>(word << 16), bit_cast<float>(word & 0xffff0000u));
}

// One element, followed by those of a word.
template <typename T>
__device__ __forceinline__ Vector vector_of(T x, unsigned word) {
  if constexpr (sizeof(T) == 4)
    return {bit_cast<unsigned>(x), word, word, word};
  else
    return {(word & 0xffff0000u) | x.bits, word, word, word};
}

template <typename T>
__device__ __forceinline__ T narrowed(float x) {
  if constexpr (Storage<T>::dtype == FLOAT16)
    return T{static_cast<unsigned short>(halves_of_floats(x, 0.0f))};
  else if constexpr (Storage<T>::dtype == BFLOAT16)
    return T{static_cast<unsigned short>(bfloat16s_of_floats(x, 0.0f))};
  else
    return x;
}

// A word of equal elements.
template <typename T>
__device__ __forceinline__ unsigned word_of(float x) {
  if constexpr (sizeof(T) == 4)
    return bit_cast<unsigned>(x);
  else
    return narrowed<T>(x).bits * 0x10001u;
}

__device__ __forceinline__ double number_of(float16 x) { return wide(widen(x)); }
__device__ __forceinline__ double number_of(bfloat16 x) { return wide(widen(x)); }

// Elements of an array whose dtype is known at run time only.
__device__ __forceinline__ double element(const void* array, int dtype, int64_t index) {
  if (dtype == FLOAT16) return number_of(static_cast<const float16*>(array)[index]);
  if (dtype == BFLOAT16) return number_of(static_cast<const bfloat16*>(array)[index]);
  if (dtype == FLOAT32) return number_of(static_cast<const float*>(array)[index]);
  return static_cast<const double*>(array)[index];
}

// Rounded once.
__device__ __forceinline__ void set_element(void* array, int dtype, int64_t index, double value) {
  if (dtype == FLOAT16)
    static_cast<float16*>(array)[index] = narrowed<float16>(narrow(cut_for_half(value)));
  else if (dtype == BFLOAT16)
    static_cast<bfloat16*>(array)[index] = narrowed<bfloat16>(narrow(cut_for_half(value)));
  else if (dtype == FLOAT32)
    static_cast<float*>(array)[index] = narrow(value);
  else
    static_cast<double*>(array)[index] = value;
}

// Consecutive classes of one row, for loads of vectors: `head` scalars up to the first aligned address, `vectors` whole
// vectors, and the remaining scalars. `scalars` counts those at both ends.
template <typename T>
struct VectorizedSpan {
  static constexpr int width = Storage<T>::width;
  int head, vectors, scalars;

  __device__ __forceinline__ VectorizedSpan(const T* begin, int count) {
    const auto address = bit_cast<unsigned long long>(begin);
    const unsigned misaligned = static_cast<unsigned>(address % sizeof(Vector) / sizeof(T));
    head = (width - static_cast<int>(misaligned)) % width;
    head = head < count ? head : count;
    vectors = (count - head) / width;
    scalars = count - vectors * width;
  }

  // The offset from `begin` of the first element of a vector, and of a scalar.
  __device__ __forceinline__ int vector_start(int index) const { return head + index * width; }
  __device__ __forceinline__ int scalar_index(int index) const {
    return index < head ? index : index + vectors * width;
  }

  // The index of the vector or scalar that an element is in.
  __device__ __forceinline__ int index_of(int at) const {
    const int after = at - head, past = after - vectors * width;
    return after < 0 ? at : past < 0 ? after / width : head + past;
  }
};

// The classes that one group of threads works on: one split of one row. A block has several groups if rows are short.
// The grid is (blocks, splits).
struct RowTile {
  int thread_rank;  // in the group
  int64_t row, first_class;
  int count;  // of classes; 0 in a group that has no row

  __device__ __forceinline__ RowTile(int64_t rows, int64_t classes, int chunk, int group_size) {
    const int thread = static_cast<int>(threadIdx.x);
    thread_rank = thread % group_size;
    row = static_cast<int64_t>(blockIdx.x) * (static_cast<int>(blockDim.x) / group_size) + thread / group_size;
    first_class = static_cast<int64_t>(blockIdx.y) * chunk;
    const int64_t left = classes - first_class;
    count = row < rows ? static_cast<int>(left < chunk ? left : chunk) : 0;
  }

  // A local column, counted from the first class of the tile; -1 if the tile does not have it.
  __device__ __forceinline__ int local_index(int64_t column) const {
    return column >= first_class && column < first_class + count ? static_cast<int>(column - first_class) : -1;
  }
};

}  // namespace pce
