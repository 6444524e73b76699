// Loads, conversions and shuffles of the GPU. In PTX where CUDA C++ would need one of CUDA's headers: NVRTC
// alone can compile the kernels.
#pragma once
#include <arithmetic.h>

// The logits that one instruction loads or stores. The PTX below moves four words.
struct alignas(PCE_VECTOR_BYTES) Vector {
  unsigned word[4];
};
static_assert(sizeof(Vector) == PCE_VECTOR_BYTES, "a vector is four words");

template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "the types differ in size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// From memory that no thread writes to while the kernel runs.
__device__ __forceinline__ Vector load_constant(const void* address) {
  Vector v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address));
  return v;
}

// From memory that this thread may write to later.
__device__ __forceinline__ Vector load_streaming(const void* address) {
  Vector v;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_streaming(void* address, Vector v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// A word holds two float16 or bfloat16; the first one is in the lower half.
__device__ __forceinline__ float float_of_half(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned halves_of_floats(float first, float second) {
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

__device__ __forceinline__ unsigned bfloat16s_of_floats(float first, float second) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

// The maxima of two pairs; nan where one of the two is.
__device__ __forceinline__ unsigned maximum_of_halves(unsigned a, unsigned b) {
  unsigned larger;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

__device__ __forceinline__ unsigned maximum_of_bfloat16s(unsigned a, unsigned b) {
  unsigned larger;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// The maximum; nan if one of them is.
__device__ __forceinline__ float maximum_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

__device__ __forceinline__ float size_of(float v) {
  float size;
  asm("abs.f32 %0, %1;" : "=f"(size) : "f"(v));
  return size;
}

// The smaller of a and the size of b; nan where one of the two is.
__device__ __forceinline__ float smaller_size(float a, float b) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(size_of(b)));
  return smaller;
}

__device__ __forceinline__ unsigned smaller_sizes_of_bfloat16s(unsigned a, unsigned b) {
  unsigned smaller;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b & 0x7fff7fffu));
  return smaller;
}

// Equal numbers, also subnormal ones, or nan both.
__device__ __forceinline__ bool same(float a, float b) {
  return (a != a && b != b) || pce::bits(pce::sum32(a, 0.0f)) == pce::bits(pce::sum32(b, 0.0f));
}

// The integer part.
__device__ __forceinline__ double truncated(double v) {
  double whole;
  asm("cvt.rzi.f64.f64 %0, %1;" : "=d"(whole) : "d"(v));
  return whole;
}

// v shifted to the right by any number of bits.
__device__ __forceinline__ uint64_t shifted_right(uint64_t v, unsigned by) {
  uint64_t result;
  asm("shr.u64 %0, %1, %2;" : "=l"(result) : "l"(v), "r"(by));
  return result;
}

// One T in the shared memory of each block.
template <typename T>
__device__ __forceinline__ T& shared_memory() {
  __shared__ alignas(16) char memory[sizeof(T)];
  return *reinterpret_cast<T*>(memory);
}

__device__ __forceinline__ unsigned shuffle_xor(unsigned word, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, word, lane_mask);
}
