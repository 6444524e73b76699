// The state of a row and its `merge`, as in pce_mpi/loss/softmax_state.py, and reductions over a group of threads.
#pragma once
#include <storage.cuh>

__device__ __forceinline__ double max_or_nan(double a, double b) { return a != a || a > b ? a : b; }
__device__ __forceinline__ double min_or_nan(double a, double b) { return a != a || a < b ? a : b; }

// weight * gap, and 0 for weight 0 even if the gap is infinite.
__device__ __forceinline__ double times(double weight, double gap) { return weight == 0.0 ? 0.0 : weight * gap; }

struct State {
  double held, max, sum_exp, target, held_weight, weight, weighted_gap, exp_gap;
  int64 argmax;
};

// The state of no classes.
__device__ __forceinline__ State identity() {
  const double lowest = -infinity<double>();
  return State{lowest, lowest, 0.0, lowest, 0.0, 0.0, 0.0, 0.0, NO_CLASS};
}

// Whether a is the argmax of a and b: nan before numbers, then the larger logit, then the lower class.
template <typename A>
__device__ __forceinline__ bool comes_first(A a, int64 class_a, A b, int64 class_b) {
  const bool nan_a = a != a, nan_b = b != b;
  if (nan_a || nan_b) return nan_a && (!nan_b || class_a < class_b);
  return a > b || (a == b && class_a < class_b);
}

// Make `a` the state of the union of two disjoint sets of classes of one row.
__device__ inline void merge(State& a, const State& b, unsigned fields, double scale) {
  a.target = max_or_nan(a.target, b.target);
  // If the largest is held apart: of the two that are held, the smaller becomes one of the others, in a second pass.
  const bool swap = fields & ARGMAX && comes_first(b.held, b.argmax, a.held, a.argmax);
  const double lower = min_or_nan(a.held, b.held), weight_of_lower = swap ? a.held_weight : b.held_weight;
  a.held = max_or_nan(a.held, b.held);
  if (!(fields & ARGMAX))
    a.held_weight += b.held_weight;  // 0 without the target
  else if (swap) {
    a.held_weight = b.held_weight;
    a.argmax = b.argmax;
  }
#pragma unroll 1
  for (int pass = 0; pass < (fields & ARGMAX ? 2 : 1); ++pass) {
    const bool masked = pass && lower == -infinity<double>();
    const double max = pass ? lower : b.max, sum_exp = pass ? (masked ? 0.0 : 1.0) : b.sum_exp;
    const double top = max_or_nan(a.max, max);
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

__device__ __forceinline__ int field_index(Field field, unsigned fields) { return __popc(fields & (field - 1)); }
__device__ __forceinline__ int num_fields(unsigned fields) { return __popc(fields); }

__device__ inline void store(const State& state, double* to, unsigned fields, double scale) {
  to[0] = state.held;
  to[1] = state.max;
  to[2] = state.sum_exp;
  if (fields & SCALE) to[field_index(SCALE, fields)] = scale;
  if (fields & TARGET) to[field_index(TARGET, fields)] = state.target;
  if (fields & HELD_WEIGHT) to[field_index(HELD_WEIGHT, fields)] = state.held_weight;
  if (fields & WEIGHT) to[field_index(WEIGHT, fields)] = state.weight;
  if (fields & WEIGHTED_GAP) to[field_index(WEIGHTED_GAP, fields)] = state.weighted_gap;
  if (fields & EXP_GAP) to[field_index(EXP_GAP, fields)] = state.exp_gap;
  if (fields & ARGMAX) to[field_index(ARGMAX, fields)] = bit_cast<double>(state.argmax);
}

__device__ inline State load(const double* from, unsigned fields) {
  State state = identity();
  state.held = from[0];
  state.max = from[1];
  state.sum_exp = from[2];
  if (fields & TARGET) state.target = from[field_index(TARGET, fields)];
  if (fields & HELD_WEIGHT) state.held_weight = from[field_index(HELD_WEIGHT, fields)];
  if (fields & WEIGHT) state.weight = from[field_index(WEIGHT, fields)];
  if (fields & WEIGHTED_GAP) state.weighted_gap = from[field_index(WEIGHTED_GAP, fields)];
  if (fields & EXP_GAP) state.exp_gap = from[field_index(EXP_GAP, fields)];
  if (fields & ARGMAX) state.argmax = bit_cast<int64>(from[field_index(ARGMAX, fields)]);
  return state;
}

// One state for each thread, in shared memory: a merge of two states in registers would spill.
struct BlockStates {
  State state[BLOCK_THREADS];
};

__device__ __forceinline__ State* thread_state() { return shared_memory<BlockStates>().state + threadIdx.x; }

// Merge the states of a group of `group_size` threads, a power of two, into that of its first thread. Every thread of
// the block must call.
__device__ inline void merge_group(int group_size, unsigned fields, double scale) {
  State* own = thread_state();
  const int thread_rank = static_cast<int>(threadIdx.x) % group_size;
  __syncthreads();
  for (int step = group_size / 2; step > 0; step /= 2) {
    if (thread_rank < step) merge(*own, own[step], fields, scale);
    __syncthreads();
  }
}

template <typename V>
struct WarpValues {
  V value[WARP_SIZE];  // a block has at most as many warps as a warp has threads
};

__device__ __forceinline__ float shuffle_xor(float value, int lane_mask) {
  return bit_cast<float>(shuffle_xor(bit_cast<unsigned>(value), lane_mask));
}

__device__ __forceinline__ double shuffle_xor(double value, int lane_mask) {
  const auto bits = bit_cast<unsigned long long>(value);
  const auto low = shuffle_xor(static_cast<unsigned>(bits), lane_mask);
  const auto high = shuffle_xor(static_cast<unsigned>(bits >> 32), lane_mask);
  return bit_cast<double>(static_cast<unsigned long long>(high) << 32 | low);
}

// Reduce the values of a group of threads with `op`, in an order that depends on its size alone: a power of two up to a
// warp, or any number of whole warps. Every thread of the group gets the result. Every thread of the block must call.
template <typename V, typename Op>
__device__ __forceinline__ V reduce(V value, int group_size, Op op) {
  for (int mask = 1; mask < (group_size < WARP_SIZE ? group_size : WARP_SIZE); mask *= 2)
    value = op(value, shuffle_xor(value, mask));
  if (group_size <= WARP_SIZE) return value;
  V* warp_values = shared_memory<WarpValues<V>>().value;
  const int thread = static_cast<int>(threadIdx.x), warps = group_size / WARP_SIZE;
  const int first = thread / group_size * warps;
  if (thread % WARP_SIZE == 0) warp_values[thread / WARP_SIZE] = value;
  __syncthreads();
  value = warp_values[first];
  for (int i = 1; i < warps; ++i) value = op(value, warp_values[first + i]);
  __syncthreads();
  return value;
}

// Reduce each thread's max, and its sum of exponentials relative to its own reference, to the max of the group and the
// sum relative to that.
template <typename E>
__device__ __forceinline__ void reduce_sums(float& max, double& sum, const E& exponential, double scale,
                                            int group_size) {
  max = reduce(max, group_size, [](float a, float b) { return a > b ? a : b; });
  // A thread that added nothing has no reference.
  if (sum != 0.0) sum *= exp(exponential.log_rescale(static_cast<double>(max), scale));
  sum = reduce(sum, group_size, [](double a, double b) { return a + b; });
}
