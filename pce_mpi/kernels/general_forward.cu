// Forward with every option, in float32 or float64: the states. Each logit is read once. Launched by cuda.py.
#include <groups.cuh>
#include <weights.cuh>

namespace pce {

// Add a class to a state. `x` and `u` are canonical.
template <class Precision>
__device__ __forceinline__ void add(State& state, double x, double u, int64_t at, bool is_target, const Call& call) {
  double leading;
  if (call.has(HOLD_LARGEST)) {
    const State other{x, 0.0, {}, at, 0.0, u};
    const double before = state.held;
    if (b_is_held(state, other, call)) {
      // The class that was held before is added instead; the first time it is -inf with weight 0.
      if (!finite(x) || !counts(before, x, call)) forget_exponentials(state);
      u = state.held_weight;
      state.held = x;
      state.held_weight = other.held_weight;
      state.argmax = at;
      x = before;
    }
    leading = state.held;
  } else if (is_target) {
    state.held = x;
    state.held_weight = u;
    return;
  } else {
    const double before = state.top;
    state.top = leading = x == infinity() ? not_a_number() : larger(before, x);
    if (leading != before && is_huge(leading, call.transform)) forget_exponentials(state);
  }
  if (call.has(WEIGHT)) add_number(state.weight, u);
  if (call.has(WEIGHTED_LOGIT)) add_weighted_logit(state.weighted_logit, x, u, call.transform);
  if (!finite(leading) || !counts(x, leading, call)) return;
  add_class<Precision>(state, x, 1.0, {call.fields & (HOLD_LARGEST | ENTROPY), call.transform});
}

// `states` is (rows, splits, words). `target_column` may be null.
template <typename T, typename Precision>
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    fill_general_states(const T* logits, int64_t pitch, int64_t rows, int64_t classes, int chunk, int group_size,
                        const int64_t* target_column, const double* weight, double scale, int fields,
                        uint64_t* states, double softcap, const void* probabilities, int probability_dtype,
                        int64_t probability_pitch, double keep, double spread, int64_t class_start) {
  const RowTile tile(rows, classes, chunk, group_size);
  const bool has_row = tile.row < rows;
  const T* row = logits + (has_row ? tile.row * pitch + tile.first_class : 0);
  const int target = has_row && target_column != nullptr ? tile.local_index(target_column[tile.row]) : -1;
  const ClassWeights weights{weight == nullptr ? nullptr : weight + tile.first_class, probabilities, probability_dtype,
                             tile.row * probability_pitch + tile.first_class, keep, spread};
  const Call call = {fields, {scale, softcap}};
  State* own = thread_state();
  *own = State::identity();

#pragma unroll 1
  for (int at = tile.thread_rank; at < tile.count; at += group_size)
    add<Precision>(*own, canonical(number_of(row[at])), canonical(weights[at]), class_start + tile.first_class + at,
                    at == target, call);

  merge_group<Precision>(group_size, call);
  if (!has_row || tile.thread_rank != 0) return;
  if (target >= 0 && call.has(TARGET)) own->target = canonical(number_of(row[target]));
  own->template store<Precision>(states + (tile.row * gridDim.y + blockIdx.y) * words_of(fields), call);
}

}  // namespace pce
