// The softmax of a row, which kernels compute from its merged state wherever they need it.
#pragma once
#include <groups.cuh>

namespace pce {

__device__ __forceinline__ int64_t row_of_thread() {
  return static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
}

// `class_weights`, the words of one sum, may be null.
template <class Precision>
__device__ __forceinline__ RowSoftmax softmax_of_row(const uint64_t* states, int64_t row, const Call& call,
                                                     const uint64_t* class_weights) {
  Sum weights = {NO_GRID, {0, 0, 0}};
  if (class_weights != nullptr) weights = *reinterpret_cast<const Sum*>(class_weights);
  const State state = State::load<Precision>(states + row * words_of(call.fields), call);
  return RowSoftmax::of<Precision>(state, call, weights);
}

// An upstream gradient: one number, which may be given as such, or one of each row.
struct Upstream {
  const void* array;  // null for a number that is given
  int dtype, for_each_row;
  double number;

  __device__ __forceinline__ double operator[](int64_t row) const {
    return array == nullptr ? number : element(array, dtype, for_each_row ? row : 0);
  }
};

}  // namespace pce
