// Forward with every option, in float32 or float64: the states. Each logit is read once. Launched by cuda.py.
#include <exponential.cuh>
#include <softmax_state.cuh>
#include <weights.cuh>

constexpr int NONE = 0x7fffffff;  // no class is held

// The state of a thread: the class held apart, and sums over the others.
template <typename A>
struct Sums {
  Exponential<float, A> exponential;
  A held = -infinity<A>(), max = -infinity<A>();
  int held_at = NONE;  // the class, counted from the first of the tile
  double sum = 0.0;
  // Gaps are to the `max` so far and not scaled. `exp_gap` is relative to the same reference as `sum`.
  double weight = 0.0, weighted_gap = 0.0, exp_gap = 0.0;

  __device__ __forceinline__ explicit Sums(double scale) : exponential(scale) {}

  __device__ __forceinline__ void add(A x, int at, int target, const ClassWeights& weights, double scale,
                                      unsigned fields) {
    double u;
    if (fields & ARGMAX ? comes_first(x, at, held, held_at) : at == target) {
      // The new class is held, and the one that was held is added; the first time that is -inf with weight 0.
      const A released = held;
      u = held_at == NONE ? 0.0 : weights[held_at];
      held = x;
      held_at = at;
      x = released;
    } else {
      u = fields & WEIGHT ? weights[at] : 0.0;
    }
    if (x > max) {
      const double rise = static_cast<double>(x) - max;
      weighted_gap += times(weight, rise);
      exp_gap += times(sum, rise);
      max = x;
    }
    if (x > exponential.limit) {
      const Exponential<float, A> before = exponential;
      exponential.set_reference(x);
      if (sum != 0.0) {
        const double decay = exp(before.log_rescale(exponential, scale));
        sum *= decay;
        exp_gap *= decay;
      }
    }
    const double e = exponential(x);
    sum += e;
    if (fields & (WEIGHT | EXP_GAP)) {
      const double gap = x == -infinity<A>() ? infinity<double>() : max - static_cast<double>(x);
      weight += u;
      weighted_gap += times(u, gap);
      exp_gap += times(e, gap);
    }
  }

  // `first` is the global number of the first class of the tile.
  __device__ __forceinline__ void store_to(State& state, const ClassWeights& weights, double scale,
                                           int64 first) const {
    state = identity();
    state.held = held;
    state.max = max;
    state.weight = weight;
    state.weighted_gap = scale * weighted_gap;
    if (held_at != NONE) {
      state.held_weight = weights[held_at];
      state.argmax = first + held_at;
    }
    if (sum != 0.0) {
      const double factor = exp(exponential.log_rescale(state.max, scale));
      state.sum_exp = sum * factor;
      state.exp_gap = scale * exp_gap * factor;
    }
  }
};

// `states` is (rows, splits, fields). `fields` says whether the largest logit or the target is held apart, and which
// sums are needed. `target_column` may be null. The softmax is of scale x, or of softcap tanh(slope x) if softcap != 0.
template <typename T, typename A>
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    fill_general_states(const T* logits, int64 pitch, int64 rows, int64 classes, int chunk, int group_size,
                         const int64* target_column, const double* weight, double scale, unsigned fields,
                         double* states, const void* probabilities, int probability_dtype, int64 probability_pitch,
                         double keep, double spread, double softcap, double slope, int64 class_start) {
  const RowTile tile(rows, classes, chunk, group_size);
  const bool has_row = tile.row < rows;
  const T* row = logits + (has_row ? tile.row * pitch + tile.first_class : 0);
  const VectorizedSpan<T> span(row, tile.count);
  const int target = has_row && target_column != nullptr ? tile.local_index(target_column[tile.row]) : -1;
  const ClassWeights weights{weight == nullptr ? nullptr : weight + tile.first_class, probabilities, probability_dtype,
                             tile.row * probability_pitch + tile.first_class, keep, spread};
  Sums<A> sums(scale);

  for (int i = tile.thread_rank; i < span.vectors + span.scalars; i += group_size) {
    const bool single = i >= span.vectors;
    int at = single ? span.scalar_index(i - span.vectors) : span.vector_start(i);
    Vector v = single ? vector_of(row[at]) : load_constant(row + at);
#pragma unroll 1
    for (const int end = at + (single ? 1 : Storage<T>::width); at < end; ++at) {
      const T x = pop_front<T>(v);
      sums.add(capped(static_cast<A>(widen(x)), softcap, slope), at, target, weights, scale, fields);
    }
  }

  State* own = thread_state();
  sums.store_to(*own, weights, scale, class_start + tile.first_class);
  merge_group(group_size, fields, scale);
  if (!has_row || tile.thread_rank != 0) return;
  if (target >= 0) own->target = capped(static_cast<A>(widen(row[target])), softcap, slope);
  store(*own, states + (tile.row * gridDim.y + blockIdx.y) * num_fields(fields), fields, scale);
}
