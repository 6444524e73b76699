// The softmax monoid on the device: the record of a row, `merge` and what derives from it, as pce_mpi/records.py says.
#pragma once
#include <storage.cuh>

// The fields of a record, in their order; which ones there are is the sum of their bits.
enum Field : unsigned {
  HELD = 1,
  MAX = 2,
  SUM_EXP = 4,
  SCALE = 8,
  TARGET = 16,
  HELD_WEIGHT = 32,
  WEIGHT = 64,
  WEIGHTED_GAP = 128,
  EXP_GAP = 256,
  ARGMAX = 512,  // and so it is the largest logit that is held apart
};

constexpr int64 NO_CLASS = 0x7fffffffffffffff;  // loses every tie against a class

__device__ __forceinline__ double larger_or_nan(double a, double b) { return a != a || a > b ? a : b; }
__device__ __forceinline__ double smaller_or_nan(double a, double b) { return a != a || a < b ? a : b; }

// weight * gap, where weight 0 gives 0 even if the gap is infinite.
__device__ __forceinline__ double times(double weight, double gap) { return weight == 0.0 ? 0.0 : weight * gap; }

struct Record {
  double held, max, sum_exp, target, held_weight, weight, weighted_gap, exp_gap;
  int64 argmax;
};

// The record of no classes.
__device__ __forceinline__ Record identity() {
  const double lowest = -infinity<double>();
  return Record{lowest, lowest, 0.0, lowest, 0.0, 0.0, 0.0, 0.0, NO_CLASS};
}

// Whether the class of logit a comes before that of b: a nan before numbers, then the larger, then the lower class.
template <typename A>
__device__ __forceinline__ bool comes_first(A a, int64 class_a, A b, int64 class_b) {
  const bool nan_a = a != a, nan_b = b != b;
  if (nan_a || nan_b) return nan_a && (!nan_b || class_a < class_b);
  return a > b || (a == b && class_a < class_b);
}

// Make `a` the record of the union of two disjoint sets of classes of one row.
__device__ inline void merge(Record& a, const Record& b, unsigned fields, double scale) {
  a.target = larger_or_nan(a.target, b.target);
  // Where the largest is held, that of the two which comes second joins the others.
  const bool swap = fields & ARGMAX && comes_first(b.held, b.argmax, a.held, a.argmax);
  const double lower = smaller_or_nan(a.held, b.held), weight_of_lower = swap ? a.held_weight : b.held_weight;
  a.held = larger_or_nan(a.held, b.held);
  if (!(fields & ARGMAX))
    a.held_weight += b.held_weight;  // nought but where the target is
  else if (swap) {
    a.held_weight = b.held_weight;
    a.argmax = b.argmax;
  }
#pragma unroll 1
  for (int pass = 0; pass < (fields & ARGMAX ? 2 : 1); ++pass) {
    const bool masked = pass && lower == -infinity<double>();
    const double max = pass ? lower : b.max, sum_exp = pass ? (masked ? 0.0 : 1.0) : b.sum_exp;
    const double top = larger_or_nan(a.max, max);
    const double gap_a = a.max == top ? 0.0 : scale * (top - a.max), gap_b = max == top ? 0.0 : scale * (top - max);
    if (fields & WEIGHT) {
      const double weight = pass ? weight_of_lower : b.weight;
      const double weighted_gap = pass ? (masked && weight != 0.0 ? infinity<double>() : 0.0) : b.weighted_gap;
      a.weighted_gap = (a.weighted_gap + times(a.weight, gap_a)) + (weighted_gap + times(weight, gap_b));
      a.weight += weight;
    }
    const double decay_a = exp(-gap_a), decay_b = exp(-gap_b);
    if (fields & EXP_GAP)
      a.exp_gap = decay_a * (a.exp_gap + times(a.sum_exp, gap_a)) +
                  decay_b * ((pass ? 0.0 : b.exp_gap) + times(sum_exp, gap_b));
    a.sum_exp = a.sum_exp * decay_a + sum_exp * decay_b;
    a.max = top;
  }
}

__device__ __forceinline__ int column_of(Field field, unsigned fields) { return __popc(fields & (field - 1)); }
__device__ __forceinline__ int columns(unsigned fields) { return __popc(fields); }

__device__ inline void store(const Record& record, double* to, unsigned fields, double scale) {
  to[0] = record.held;
  to[1] = record.max;
  to[2] = record.sum_exp;
  if (fields & SCALE) to[column_of(SCALE, fields)] = scale;
  if (fields & TARGET) to[column_of(TARGET, fields)] = record.target;
  if (fields & HELD_WEIGHT) to[column_of(HELD_WEIGHT, fields)] = record.held_weight;
  if (fields & WEIGHT) to[column_of(WEIGHT, fields)] = record.weight;
  if (fields & WEIGHTED_GAP) to[column_of(WEIGHTED_GAP, fields)] = record.weighted_gap;
  if (fields & EXP_GAP) to[column_of(EXP_GAP, fields)] = record.exp_gap;
  if (fields & ARGMAX) to[column_of(ARGMAX, fields)] = bits_as<double>(record.argmax);
}

__device__ inline Record load(const double* from, unsigned fields) {
  Record record = identity();
  record.held = from[0];
  record.max = from[1];
  record.sum_exp = from[2];
  if (fields & TARGET) record.target = from[column_of(TARGET, fields)];
  if (fields & HELD_WEIGHT) record.held_weight = from[column_of(HELD_WEIGHT, fields)];
  if (fields & WEIGHT) record.weight = from[column_of(WEIGHT, fields)];
  if (fields & WEIGHTED_GAP) record.weighted_gap = from[column_of(WEIGHTED_GAP, fields)];
  if (fields & EXP_GAP) record.exp_gap = from[column_of(EXP_GAP, fields)];
  if (fields & ARGMAX) record.argmax = bits_as<int64>(from[column_of(ARGMAX, fields)]);
  return record;
}

// A record for each thread, in shared memory: two of them and what a merge needs are more than the registers.
struct RecordsOfBlock {
  Record of_thread[256];
};

__device__ __forceinline__ Record* own_record() { return shared_memory<RecordsOfBlock>().of_thread + threadIdx.x; }

// Merge the records of a group of `lanes` threads, a power of two, into its first. Every thread of the block calls.
__device__ inline void merge_group(int lanes, unsigned fields, double scale) {
  Record* own = own_record();
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  __syncthreads();
  for (int step = lanes / 2; step > 0; step /= 2) {
    if (lane < step) merge(*own, own[step], fields, scale);
    __syncthreads();
  }
}

template <typename V>
struct OfWarps {
  V value[32];
};

__device__ __forceinline__ float exchanged(float value, int other_lanes) {
  return bits_as<float>(exchanged_in_warp(bits_as<unsigned>(value), other_lanes));
}

__device__ __forceinline__ double exchanged(double value, int other_lanes) {
  const auto bits = bits_as<unsigned long long>(value);
  const auto low = exchanged_in_warp(static_cast<unsigned>(bits), other_lanes);
  const auto high = exchanged_in_warp(static_cast<unsigned>(bits >> 32), other_lanes);
  return bits_as<double>(static_cast<unsigned long long>(high) << 32 | low);
}

// `join` the values of a group of `lanes` threads, in an order that only depends on their number: a power of two up to
// a warp, or any number of whole warps. Every thread of the group gets the result, and every thread of the block calls.
template <typename V, typename Join>
__device__ __forceinline__ V reduce(V value, int lanes, Join join) {
  for (int step = 1; step < (lanes < 32 ? lanes : 32); step *= 2) value = join(value, exchanged(value, step));
  if (lanes <= 32) return value;
  V* of_warps = shared_memory<OfWarps<V>>().value;
  const int thread = static_cast<int>(threadIdx.x), warps = lanes / 32, first = thread / lanes * warps;
  if (thread % 32 == 0) of_warps[thread / 32] = value;
  __syncthreads();
  value = of_warps[first];
  for (int i = 1; i < warps; ++i) value = join(value, of_warps[first + i]);
  __syncthreads();
  return value;
}

// The sums of exponentials of a group of threads, each relative to its own reference, as one relative to their max.
template <typename E>
__device__ __forceinline__ void reduce_sums(float& max, double& sum, const E& exponential, double scale, int lanes) {
  max = reduce(max, lanes, [](float a, float b) { return a > b ? a : b; });
  // Where nothing was added there is no reference.
  if (sum != 0.0) sum *= exp(exponential.over(static_cast<double>(max), scale));
  sum = reduce(sum, lanes, [](double a, double b) { return a + b; });
}
